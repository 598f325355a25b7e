"""The slow reference of the sampler: all of the vocabulary in fp64, one row at a time, sorted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.noise import draw_keys, log_arrivals
from workers.engine.sampling_params import SamplingParams

FloatArray = npt.NDArray[np.float64]


def adjusted(
    logits: FloatArray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> FloatArray:
    """Logits after bias, penalties and the stop tokens that must wait, token by token."""
    scores = np.array(logits, dtype=np.float64)
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    for token_id in {*prompt, *output}:
        is_likely = scores[token_id] > 0
        penalty = params.repetition_penalty
        scores[token_id] *= 1 / penalty if is_likely else penalty
    for token_id, count in Counter(output).items():
        scores[token_id] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        scores[list(params.stop_token_ids)] = -math.inf
    return scores


def distribution(
    logits: FloatArray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> FloatArray:
    """Probability of every token to come after prompt and output."""
    scores = adjusted(logits, params, prompt, output) / params.temperature
    order = np.lexsort((np.arange(len(scores)), -scores))
    probabilities = np.exp(scores - scores.max())
    kept = order[: params.top_k or None]
    of_kept = probabilities[kept] / probabilities[kept].sum()
    if params.top_p < 1:
        before = np.concatenate([[0.0], of_kept.cumsum()[:-1]])
        kept = kept[before < params.top_p]
    kept = kept[probabilities[kept] >= params.min_p * probabilities.max()]
    result = np.zeros(len(scores))
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def reference_draw(
    logits: FloatArray,
    params: SamplingParams,
    position: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> int:
    """The kept token with the largest log-probability - log of its arrival; of equals the first."""
    probabilities = distribution(logits, params, prompt, output)
    (key,) = draw_keys([params.seed], [position])
    arrivals = log_arrivals(key, torch.arange(len(logits), dtype=torch.int32)).double().numpy()
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(probabilities) - arrivals))


def chi_square_excess(drawn: Sequence[int], probabilities: FloatArray) -> float:
    """Standard deviations by which the chi-square of the draws exceeds what chance gives.

    The cube root of chi-square over its degrees of freedom is close to normal (Wilson, Hilferty).
    Infinite if an impossible token was drawn.
    """
    counts = np.bincount(drawn, minlength=len(probabilities))
    if counts[probabilities == 0].sum() > 0:
        return math.inf
    expected = probabilities * len(drawn)
    rare = (expected > 0) & (expected < 5)
    cells = expected >= 5
    observed, wanted = counts[cells], expected[cells]
    if expected[rare].sum() >= 5:
        observed = np.append(observed, counts[rare].sum())
        wanted = np.append(wanted, expected[rare].sum())
    freedom = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
