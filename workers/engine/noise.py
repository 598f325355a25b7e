"""Random numbers of a draw: functions of its seed, its position and the token, and of nothing else.

A token is drawn by a race: each one arrives after an exponential time at a rate of its weight, and
the first is taken, which is the token with the largest logit / temperature - log(time at rate 1).
(Gumbel, 1954; the trick of Gumbel-max.) Each token's time is its own, so the least change of
the logits, as another batch makes it, changes a draw only where two tokens arrive together. One
number held against sums over many tokens lies near the border of two of them far more often: with
top-p, in 1 draw of 60 where logits differ by a millionth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["draw_keys", "log_arrivals"]

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
"""Of a 32-bit hash with low bias (Wellons, hash-prospector, 2018), as signed numbers."""
_ALMOST_ONE = 1 - 2.0**-24
"""The largest fp32 number below it: the slowest token arrives in finite time."""


def draw_keys(seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """64 bits for each (seed, position): a SplitMix64 hash of both (Steele et al., 2014)."""
    keys = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    mixed: list[int] = _mix(_mix(keys) + np.array(positions, dtype=np.uint64)).tolist()
    return mixed


def log_arrivals(key: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Logarithms of times at rate 1, one for each of `token_ids` (int32, any shape); fp32.

    31 random bits each: no time is below 2**-32, and of the short ones hardly two are the same.
    """
    # Every key has the tokens' ids in another order before they are hashed: one round is enough.
    keyed = token_ids.mul(_signed(key & 0xFFFF_FFFF | 1)).add_(_signed(key >> 32))
    shares = (_mix32_(keyed) >> 1).bitwise_and_(0x7FFF_FFFF).float()  # in [0, 2**31)
    shares = shares.add_(0.5).mul_(2.0**-31).clamp_(max=_ALMOST_ONE)
    return shares.neg_().log1p_().neg_().log_()


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One SplitMix64 output per state; arithmetic is modulo 2**64."""
    mixed = values + np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return mixed ^ (mixed >> np.uint64(31))


def _mix32_(values: torch.Tensor) -> torch.Tensor:
    """Hash int32 in place; arithmetic is modulo 2**32, and the masks undo the shifted-in signs."""
    first, second = _MULTIPLIERS
    values.bitwise_xor_((values >> 16).bitwise_and_(0xFFFF)).mul_(first)
    values.bitwise_xor_((values >> 15).bitwise_and_(0x1_FFFF)).mul_(second)
    return values.bitwise_xor_((values >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    """The int32 of the same 32 bits."""
    return word - (1 << 32) if word >> 31 else word
