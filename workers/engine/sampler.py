"""Logits to token ids: batched, seeded, and blind to what else is in the batch.

Every row's draw is a function of its logits, its parameters and (seed, position), see `noise.py`.
There is no generator, so neither batching, nor a resume elsewhere, nor a draft can shift a row's
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.adjust import adjust
from workers.engine.kept_tokens import kept_tokens
from workers.engine.noise import draw_keys, log_arrivals
from workers.engine.sampling_params import SamplingParams
from workers.engine.token_counts import SeenTokens

__all__ = ["SamplingRow", "sample"]

_GREEDY_BELOW = 1e-5
"""Temperatures under it are 0; vLLM draws the line at the same place."""
_WIDTH = 256
"""How many of the likeliest tokens are looked at, of all rows at once, before a row's whole
vocabulary is: few filters keep more."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What decides over a row of logits, besides the logits."""

    params: SamplingParams
    position: int
    """Of the token that is sampled, in its sequence."""
    num_output_tokens: int = 0
    """Output tokens before it."""
    seen: SeenTokens | None = None
    """The tokens before it; needed only for penalties."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Draw:
    """A row that is not greedy."""

    index: int
    logits: torch.Tensor
    """fp32 `[vocabulary]`"""
    max_logit: float
    params: SamplingParams
    key: int
    """What its random numbers come from."""

    @property
    def keeps_all(self) -> bool:
        """Whether no filter is set."""
        params = self.params
        keeps_all_by_count = params.top_k == 0 or params.top_k >= len(self.logits)
        return keeps_all_by_count and params.top_p >= 1 and params.min_p <= 0

    def weights(self) -> torch.Tensor:
        """exp(logit / temperature), the likeliest token's being 1; fp32 `[vocabulary]`."""
        return self.logits.sub(self.max_logit).div_(self.params.temperature).exp_()


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """One token id per row of `logits` `[rows, vocabulary]`; None where a row is not finite.

    First `adjust` changes the rows that ask for it (in `logits` itself, if it is fp32). Then
    filters apply in the order of transformers' `generate`: temperature, top-k, top-p of what top-k
    left, min-p. Of tokens that are equally likely the lower ids are kept. A temperature below 1e-5
    takes the likeliest token: in fp32 a smaller one divides by zero.
    """
    if not rows:
        return []
    logits = logits.float()
    for index, row in enumerate(rows):
        adjust(logits[index], row.params, num_output_tokens=row.num_output_tokens, seen=row.seen)
    likeliest = logits.max(dim=1)  # a NaN counts as the largest
    max_logits: list[float] = likeliest.values.tolist()
    token_ids: list[int | None] = likeliest.indices.tolist()
    for index, max_logit in enumerate(max_logits):
        if not math.isfinite(max_logit):
            token_ids[index] = None
    draws = _draws(logits, rows, max_logits)
    for draw in draws:
        if draw.keeps_all:
            token_ids[draw.index] = _draw_from_all(draw)
    for draw, token_id in _draw_filtered([draw for draw in draws if not draw.keeps_all]):
        token_ids[draw.index] = token_id
    return token_ids


def _draws(
    logits: torch.Tensor, rows: Sequence[SamplingRow], max_logits: Sequence[float]
) -> list[_Draw]:
    chosen = [
        index
        for index, row in enumerate(rows)
        if row.params.temperature >= _GREEDY_BELOW and math.isfinite(max_logits[index])
    ]
    if not chosen:
        return []
    keys = draw_keys(
        [rows[index].params.seed for index in chosen], [rows[index].position for index in chosen]
    )
    return [
        _Draw(
            index=index,
            logits=logits[index],
            max_logit=max_logits[index],
            params=rows[index].params,
            key=key,
        )
        for index, key in zip(chosen, keys, strict=True)
    ]


def _draw_from_all(draw: _Draw) -> int:
    """The first of the whole vocabulary to arrive."""
    token_ids = torch.arange(len(draw.logits), dtype=torch.int32, device=draw.logits.device)
    scores = draw.logits.sub(draw.max_logit).div_(draw.params.temperature)
    scores.sub_(log_arrivals(draw.key, token_ids))
    return int(scores.cpu().numpy().argmax())  # torch's takes as long as a third of all this


def _draw_filtered(draws: list[_Draw]) -> Iterator[tuple[_Draw, int]]:
    """Each draw with its token, from those that its filters keep."""
    many = [draw for draw in draws if draw.params.top_k >= _WIDTH]
    few = [draw for draw in draws if draw.params.top_k < _WIDTH]
    for draw, token_id in zip(few, _draw_from_likeliest(few), strict=True):
        yield draw, _draw_from_kept(draw) if token_id is None else token_id
    for draw in many:
        yield draw, _draw_from_kept(draw)


def _draw_from_kept(draw: _Draw) -> int:
    """The first to arrive of the tokens that the filters keep, however many they are."""
    logits, params = draw.logits.cpu().numpy(), draw.params
    ids = kept_tokens(
        logits,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    return int(ids[_race(draw, logits[ids].astype(np.float64), ids).argmax()])


def _draw_from_likeliest(draws: list[_Draw]) -> list[int | None]:
    """Draw from each row's likeliest tokens; None where those that are kept may be more."""
    if not draws:
        return []
    vocabulary = len(draws[0].logits)
    width = min(_WIDTH, vocabulary)
    logits, ids = _likeliest(draws, width)
    temperatures = np.array([draw.params.temperature for draw in draws])[:, None]
    with np.errstate(over="ignore"):  # a temperature near 0 leaves the likeliest token alone
        weights = np.exp((logits - logits[:, :1]) / temperatures)
    kept = _num_kept(draws, weights, weights.cumsum(axis=1))
    drawn: list[int | None] = []
    for row, draw in enumerate(draws):
        # A token as likely as the last one looked at may have an equal with a lower id further on.
        is_complete = width == vocabulary or logits[row, kept[row] - 1] > logits[row, -1]
        among = slice(kept[row])
        place = _race(draw, logits[row, among], ids[row, among]).argmax()
        drawn.append(int(ids[row, place]) if is_complete else None)
    return drawn


def _race(draw: _Draw, logits: FloatArray, ids: IntArray) -> FloatArray:
    """What the first token to arrive has most of, for some tokens of the row."""
    with np.errstate(over="ignore"):
        scores: FloatArray = (logits - draw.max_logit) / draw.params.temperature
    scores -= log_arrivals(draw.key, torch.from_numpy(ids).int()).numpy()
    return scores


def _likeliest(draws: list[_Draw], width: int) -> tuple[FloatArray, IntArray]:
    """Logits and ids of each row's likeliest tokens, by falling logit, then by rising id."""
    top = torch.stack([draw.logits for draw in draws]).topk(width, dim=1)
    logits, ids = top.values.double().cpu().numpy(), top.indices.cpu().numpy()
    for row in np.flatnonzero((logits[:, 1:] == logits[:, :-1]).any(axis=1)):
        order = np.lexsort((ids[row], -logits[row]))
        logits[row], ids[row] = logits[row, order], ids[row, order]
    return logits, ids


def _num_kept(draws: list[_Draw], weights: FloatArray, cumulative: FloatArray) -> IntArray:
    """How many of each row's likeliest tokens pass its filters; at least one."""
    width = weights.shape[1]
    kept = np.array([draw.params.top_k or width for draw in draws]).clip(max=width)
    for row, draw in enumerate(draws):
        params = draw.params
        if params.top_p < 1:
            total = cumulative[row, kept[row] - 1] if params.top_k else _total_weight(draw)
            before = cumulative[row] - weights[row]
            kept[row] = min(kept[row], np.count_nonzero(before < params.top_p * total))
        if params.min_p > 0:
            kept[row] = min(kept[row], np.count_nonzero(weights[row] >= params.min_p))
    return kept.clip(min=1)


def _total_weight(draw: _Draw) -> float:
    """Of the whole vocabulary; one row at a time, so that no other row changes its rounding."""
    return float(draw.weights().sum(dtype=torch.float64))
