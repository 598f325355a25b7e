"""Log-probabilities of the model's own distribution: exact, and of as many rows as asked for.

"Own" means before bias, penalties, temperature and filters, as OpenAI's service and vLLM's default
have it. The sum over the vocabulary is a log-sum-exp over all of it; alternatives are found by
top-k; nothing is sorted but the few that were found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kv_transfer.logprobs import TokenLogprobs
from workers.engine.sampler import SamplingRow, sample

__all__ = ["Sampled", "logprobs_of", "sample_with_logprobs"]

_ROWS_AT_ONCE = 32
"""Rows compared at a time: what is computed on the way is as large as their logits, twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A row's token, and what it asked to know of it."""

    token_id: int
    logprobs: TokenLogprobs | None


@torch.inference_mode()
def sample_with_logprobs(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled | None]:
    """`sample`, with log-probabilities for the rows that ask for them; None for a broken row."""
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    own = logits[asked]  # a copy: sampling changes the logits that it is given
    token_ids = sample(logits, rows)
    found: dict[int, TokenLogprobs | None] = {}
    if asked:
        # A broken row is left out below, whatever is asked of it here.
        chosen = [token_ids[index] or 0 for index in asked]
        num_top = max(rows[index].params.logprobs or 0 for index in asked)
        found = dict(zip(asked, logprobs_of(own, chosen, num_top), strict=True))
    return [
        None
        if token_id is None
        else Sampled(token_id=token_id, logprobs=_cut(found.get(index), rows[index]))
        for index, token_id in enumerate(token_ids)
    ]


@torch.inference_mode()
def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs | None]:
    """Of one token for each row of `logits` `[rows, vocabulary]`, with num_top alternatives.

    None for a row that is not finite. Equally likely alternatives come by rising id.
    """
    found: list[TokenLogprobs | None] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        found += _logprobs_of(logits[start:end].float(), token_ids[start:end], num_top)
    return found


def _logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs | None]:
    totals = logits.logsumexp(dim=1, keepdim=True)
    chosen = torch.tensor(token_ids, dtype=torch.int64).unsqueeze(1).to(logits.device)
    own = logits.gather(1, chosen)
    ranks: list[int] = (logits > own).sum(dim=1).add_(1).tolist()
    top = logits.topk(min(num_top, logits.shape[1]), dim=1)
    columns = zip(
        totals.squeeze(1).tolist(),
        (own - totals).squeeze(1).tolist(),
        ranks,
        top.indices.tolist(),
        (top.values - totals).tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(logprob=logprob, rank=rank, top=_by_chance(ids, logprobs))
        if math.isfinite(total)
        else None
        for total, logprob, rank, ids, logprobs in columns
    ]


def _by_chance(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    pairs = zip(ids, logprobs, strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _cut(logprobs: TokenLogprobs | None, row: SamplingRow) -> TokenLogprobs | None:
    """No more alternatives than the row itself asks for; another may have asked for more."""
    if logprobs is None:
        return None
    return replace(logprobs, top=logprobs.top[: row.params.logprobs])
