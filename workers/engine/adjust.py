"""What a request wants changed in a row of logits before anything is drawn from it.

In the order that vLLM's users know: logit bias, repetition penalty, frequency and presence
penalties, then the stop tokens that must still wait. Only the logits of tokens that are named, or
that the sequence has, are touched; a row that asks for nothing costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from workers.engine.sampling_params import SamplingParams
from workers.engine.token_counts import SeenTokens

__all__ = ["adjust"]

_LARGEST_LOGIT = 1e30
"""A repetition penalty near 0 must not make a logit infinite: the row would count as broken."""


def adjust(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    num_output_tokens: int,
    seen: SeenTokens | None,
) -> None:
    """Change one row of fp32 logits `[vocabulary]` in place.

    `seen` are the tokens before the one that is to be drawn; needed only for penalties. Ids that
    the model does not have are passed over.
    """
    if params.logit_bias:
        _add_bias(logits, params)
    if params.has_penalties and seen is not None:
        _penalize(logits, params, seen)
    if num_output_tokens < params.min_tokens:
        logits[_known(params.stop_token_ids, len(logits))] = -math.inf


def _add_bias(logits: torch.Tensor, params: SamplingParams) -> None:
    biases = dict(params.logit_bias)
    ids = _known(biases, len(logits))
    added = torch.tensor([biases[token_id] for token_id in ids], dtype=torch.float32)
    logits[ids] += added.to(logits.device)


def _penalize(logits: torch.Tensor, params: SamplingParams, seen: SeenTokens) -> None:
    """Repetition as in CTRL (arXiv 1909.05858), by sign of the logit; the others as OpenAI has."""
    ids = _int64(seen.ids, logits.device)
    scores = logits[ids]
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        scores = torch.where(scores > 0, scores / penalty, scores * penalty)
    if params.frequency_penalty or params.presence_penalty:
        counts = _int64(seen.output_counts, logits.device)
        scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    logits[ids] = scores.clamp(max=_LARGEST_LOGIT)


def _int64(raw: bytes, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(raw, dtype=np.int64).copy()).to(device)


def _known(token_ids: Iterable[int], vocabulary: int) -> list[int]:
    return [token_id for token_id in token_ids if 0 <= token_id < vocabulary]
