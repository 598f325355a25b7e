"""Which tokens of a whole vocabulary a row's filters keep, without sorting it.

What is kept are the likeliest tokens down to some logit. Tokens are put into buckets by their
logits; sums over buckets say which one has that border, and only its few tokens are sorted. That is
a handful of passes over the vocabulary, where sorting takes as long as a small model's whole step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["kept_tokens"]

_NUM_BUCKETS = 4096
_FEW = 512
"""Tokens that are sorted rather than put into buckets once more."""

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
TokenIds = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def kept_tokens(
    logits: Logits, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> TokenIds:
    """Ids of the tokens that pass top-k, then top-p of what is left, then min-p, rising.

    `logits` `[vocabulary]`; one that is -inf has no weight. top_k 0, top_p 1 and min_p 0 keep all.
    The likeliest token always passes; of those that are equally likely the lower ids are kept.
    """
    ids = np.arange(len(logits))
    if 0 < top_k < len(ids):
        ids = ids[_are_likeliest(logits, np.ones(len(ids)), top_k)]
    if top_p < 1 or min_p > 0:
        with np.errstate(over="ignore"):  # a temperature near 0 leaves the likeliest token alone
            weights = np.exp((logits[ids].astype(np.float64) - logits.max()) / temperature)
        is_kept = weights >= min_p
        if top_p < 1:
            is_kept &= _are_likeliest(logits[ids], weights, top_p * float(weights.sum()))
        ids = ids[is_kept]
    return ids


def _are_likeliest(logits: Logits, weights: Weights, target: float) -> Mask:
    """Which tokens are the likeliest until they weigh `target`, the one that reaches it included.

    Tokens are given by rising id. At least one is among them.
    """
    are = np.zeros(len(logits), dtype=bool)
    before = 0.0
    """Weight of the tokens that are among them for sure."""
    places = np.arange(len(logits))
    """Of the tokens that are in question."""
    while len(places) > _FEW and logits[places].min() < logits[places].max():
        buckets = _buckets(logits[places])
        cumulative = before + np.bincount(buckets, weights[places], _NUM_BUCKETS).cumsum()
        border = min(int(np.searchsorted(cumulative, target)), _NUM_BUCKETS - 1)
        before = float(cumulative[border - 1]) if border else before
        are[places[buckets < border]] = True
        places = places[buckets == border]
    places = places[np.argsort(-logits[places], kind="stable")]
    come_before = before + weights[places].cumsum() - weights[places]
    are[places[come_before < target]] = True
    are[places[:1]] |= not before
    return are


def _buckets(logits: Logits) -> npt.NDArray[np.int64]:
    """The number of each token's bucket; a likelier one's is never higher."""
    finite = logits[np.isfinite(logits)]
    most, least = finite.max(), finite.min()
    scale = (_NUM_BUCKETS - 2) / max(float(most - least), float(np.finfo(np.float32).tiny))
    buckets: npt.NDArray[np.float64] = (most - logits.astype(np.float64)) * scale
    return buckets.clip(max=_NUM_BUCKETS - 1).astype(np.int64)
