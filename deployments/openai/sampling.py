"""From a checked body to the sampling of each sequence: limits, the model's defaults, seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TypeVar

from deployments.openai.errors import InvalidRequestError
from deployments.openai.models import ModelCard
from deployments.openai.schema import Body, GenerationBody
from workers.engine.sampling_params import SamplingParams
from workers.messages import FailureCode

__all__ = ["SEED_BITS", "check_prompt_ids", "choice_seed", "sampling_params"]

Value = TypeVar("Value")

SEED_BITS = 63
"""Seeds go down as non-negative 64-bit integers, whatever sign the client's has."""
_NUM_SEEDS = 1 << SEED_BITS


def sampling_params(
    body: Body, card: ModelCard, *, prompt_tokens: int, prompt_param: str, seed: int
) -> SamplingParams:
    """The sampling of one sequence; `InvalidRequestError` if the window has no room for it.

    A value that the body does not give is the model's own default, or else neutral.
    """
    if not prompt_tokens:
        raise InvalidRequestError("the prompt has no tokens", param=prompt_param)
    max_tokens = _max_tokens(body, card, prompt_tokens, prompt_param)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {min_tokens}, above the {max_tokens} output tokens allowed",
            param="min_tokens",
        )
    defaults = card.defaults
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        top_k=max(0, _first(body.top_k, defaults.top_k, 0)),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=_logit_bias(body, card),
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        seed=seed,
        stop_token_ids=_stop_token_ids(body, card),
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a prompt's n-th choice, from the request's; the first choice has it unchanged."""
    if choice == 0:
        return seed % _NUM_SEEDS
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _NUM_SEEDS


def check_prompt_ids(token_ids: tuple[int, ...], card: ModelCard) -> None:
    """Refuse ids that the model has no embedding for."""
    _check_ids(token_ids, card, "prompt")


def _check_ids(token_ids: Iterable[int], card: ModelCard, param: str) -> None:
    highest = max(token_ids, default=0)
    if highest >= card.vocab_size:
        raise InvalidRequestError(
            f"token id {highest} is outside the vocabulary, [0, {card.vocab_size})", param=param
        )


def _max_tokens(
    body: GenerationBody, card: ModelCard, prompt_tokens: int, prompt_param: str
) -> int:
    room = card.window - prompt_tokens
    name, asked = _asked_tokens(body)
    if room < 1:
        needed = "an answer needs 1 more" if asked is None else f"{name} is {asked}"
        what = f"the prompt has {prompt_tokens} tokens and {needed}"
        raise _context_error(card, what, prompt_param)
    if asked is None:
        return min(room, card.default_max_tokens)
    if asked == 0:  # an echoed prompt: what is sampled after it is not shown
        return 1
    if asked > room:
        what = f"the prompt has {prompt_tokens} tokens and {name} is {asked}, at most {room}"
        raise _context_error(card, what, name)
    return asked


def _asked_tokens(body: GenerationBody) -> tuple[str, int | None]:
    """The client's limit of output tokens and the name it has in the body."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _context_error(card: ModelCard, what: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the model's context window is {card.window} tokens; {what}",
        param=param,
        code=FailureCode.CONTEXT_LENGTH_EXCEEDED.value,
    )


def _stop_token_ids(body: GenerationBody, card: ModelCard) -> frozenset[int]:
    asked = frozenset(body.stop_token_ids or ())
    _check_ids(asked, card, "stop_token_ids")
    return asked if body.ignore_eos else asked | card.eos_token_ids


def _logit_bias(body: GenerationBody, card: ModelCard) -> tuple[tuple[int, float], ...]:
    _check_ids((token_id for token_id, _ in body.logit_bias), card, "logit_bias")
    return body.logit_bias


def _first(given: Value | None, default: Value | None, neutral: Value) -> Value:
    if given is not None:
        return given
    return neutral if default is None else default
