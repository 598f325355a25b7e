"""A backend that plays a script: events, waits, failures, in the order written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace

from kv_transfer.logprobs import TokenLogprobs
from workers.messages import (
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    PromptFrame,
    TokenFrame,
    WorkerEvent,
)

__all__ = [
    "FakeBackend",
    "Step",
    "finished",
    "frame",
    "frames",
    "made_up",
    "scored_frames",
    "tokens_then_end",
]

Step = WorkerEvent | asyncio.Event | Exception
"""An event is yielded, an `asyncio.Event` is waited for, an exception is raised."""


class FakeBackend:
    """Implements `deployments.pipeline.Backend`; `script` says what each request gets."""

    def __init__(self, script: Callable[[GenerateRequest], Iterable[Step]]) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.num_open = 0
        self.num_cut = 0
        """Calls that were closed before their script had ended."""
        self.opened = asyncio.Event()
        self.idle = asyncio.Event()
        """Set while no call is open."""
        self.ready = True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """See `Backend.generate`."""
        self.requests.append(request)
        self.num_open += 1
        self.opened.set()
        self.idle.clear()
        whole = False
        try:
            for step in self.script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    whole = True
                    raise step
                else:
                    yield step
            whole = True
        finally:
            self.num_open -= 1
            self.num_cut += not whole
            if self.num_open == 0:
                self.idle.set()

    async def is_ready(self) -> bool:
        """See `Backend.is_ready`."""
        return self.ready


def frame(*token_ids: int, attempt: int = 0) -> TokenFrame:
    """A frame of tokens."""
    return TokenFrame(attempt=attempt, token_ids=token_ids)


def frames(token_ids: Sequence[int], sizes: Sequence[int] = ()) -> list[TokenFrame]:
    """Tokens in frames of these sizes, and one by one after them."""
    cut, rest = [], list(token_ids)
    for size in sizes:
        cut.append(frame(*rest[:size]))
        rest = rest[size:]
    return [*cut, *(frame(token_id) for token_id in rest)]


def made_up(token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of a token that follow from it; it is the second likeliest itself."""
    logprob = -1.0 - token_id % 64 / 64
    likelier, *others = (each for each in range(2, 40) if each != token_id)
    top = [(likelier, -0.5), (token_id, logprob)]
    top += [(each, -4.0 - place) for place, each in enumerate(others)]
    return TokenLogprobs(logprob=logprob, rank=2, top=tuple(top[:num_top]))


def scored_frames(
    token_ids: Sequence[int], num_top: int, sizes: Sequence[int] = ()
) -> list[TokenFrame]:
    """`frames` of tokens whose log-probabilities were asked for."""
    return [
        replace(each, logprobs=tuple(made_up(token_id, num_top) for token_id in each.token_ids))
        for each in frames(token_ids, sizes)
    ]


def finished(
    request: GenerateRequest,
    completion_tokens: int,
    *,
    reason: FinishReason = FinishReason.LENGTH,
    cached_tokens: int = 0,
) -> Finished:
    """The last event of a sequence that ended by itself."""
    return Finished(
        attempt=request.attempt,
        reason=reason,
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
        prefilled_by="prefill-0",
    )


def tokens_then_end(
    token_ids: Sequence[int], reason: FinishReason = FinishReason.LENGTH
) -> Callable[[GenerateRequest], list[Step]]:
    """A script: these tokens, as far as max_tokens allows, with what is asked of them; the end."""

    def script(request: GenerateRequest) -> list[Step]:
        sampling, prompt = request.sampling, request.prompt_token_ids
        allowed = token_ids[: sampling.max_tokens]
        steps: list[Step] = [finished(request, len(allowed), reason=reason)]
        if sampling.logprobs is None:
            steps = [*frames(allowed), *steps]
        else:
            steps = [*scored_frames(allowed, sampling.logprobs), *steps]
        if sampling.prompt_logprobs is None:
            return steps
        scored = tuple(made_up(each, sampling.prompt_logprobs) for each in prompt[1:])
        return [PromptFrame(attempt=request.attempt, logprobs=scored), *steps]

    return script
