"""One request inside a decode worker, and what its reader is told of what happens to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kv_transfer.logprobs import TokenLogprobs
from workers.engine.events import (
    Admitted,
    Event,
    PromptScored,
    SequenceFailed,
    SequenceFinished,
    TokensSampled,
)
from workers.engine.step import SequenceId
from workers.errors import WorkerError
from workers.failures import failure_code_of
from workers.messages import (
    Failed,
    FailureCode,
    Finished,
    GenerateRequest,
    PromptFrame,
    TokenFrame,
)
from workers.outbox import Outbox
from workers.placement import Reason

__all__ = ["Call", "failed"]


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A request from its arrival to its last event; for one event loop."""

    request: GenerateRequest
    deadline: float | None
    """On this process's clock."""
    outbox: Outbox = field(default_factory=Outbox)
    sequence_id: SequenceId | None = None
    reason: Reason = Reason.SETTING
    """Why the prompt is computed where it is."""
    prefilled_by: str = ""
    driver: asyncio.Task[None] | None = None
    """What brings the prompt home; None where it was never to be computed elsewhere."""
    remote_hit_tokens: int | None = None
    """Prompt tokens that the prefill worker found, once it has computed the rest."""
    is_written_to: bool = False
    """Whether a transfer may be writing to the sequence's blocks."""
    admitted: asyncio.Future[Admitted] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def number(self) -> SequenceId:
        """The sequence's id, of a call that the engine has taken."""
        assert self.sequence_id is not None
        return self.sequence_id

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What needs KV before the next token: the prompt, and what an earlier attempt made."""
        return self.request.prompt_token_ids + self.request.resumed_token_ids

    def relay(self, event: Event) -> None:
        """Tell the reader what the engine's event means for it."""
        attempt = self.request.attempt
        if isinstance(event, TokensSampled):
            frame = TokenFrame(
                attempt=attempt,
                token_ids=event.token_ids,
                logprobs=event.logprobs,
                cached_tokens=self._cached_tokens(event),
            )
            self.outbox.put(frame)
        elif isinstance(event, PromptScored):
            self.score_prompt(event.logprobs)
        elif isinstance(event, SequenceFinished):
            finished = Finished(
                attempt=attempt,
                reason=event.reason,
                prompt_tokens=event.prompt_tokens,
                completion_tokens=event.completion_tokens,
                cached_tokens=self._cached_tokens(event),
                prefilled_by=self.prefilled_by,
                stop_token_id=event.stop_token_id,
            )
            self.outbox.put(finished)
        elif isinstance(event, SequenceFailed):
            self.fail(event.error)

    def score_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Tell the reader the log-probabilities of the next prompt tokens."""
        self.outbox.put(PromptFrame(attempt=self.request.attempt, logprobs=logprobs))

    def fail(self, error: WorkerError) -> None:
        """Tell the reader that it will get no more."""
        self.outbox.put(failed(self.request, error))

    def _cached_tokens(self, event: TokensSampled | SequenceFinished) -> int:
        """Prompt tokens that nobody computed: the hit of the worker that computed the others."""
        remote = self.remote_hit_tokens
        hit = event.num_hit_tokens if remote is None else remote
        # An earlier attempt's output may be hit too.
        return min(hit, len(self.request.prompt_token_ids))


def failed(request: GenerateRequest, error: WorkerError) -> Failed:
    """The last event of a request that this error ended."""
    code = failure_code_of(error)
    retry_after_s = 1.0 if code is FailureCode.QUEUE_FULL else None
    return Failed(
        attempt=request.attempt, code=code, message=str(error), retry_after_s=retry_after_s
    )
