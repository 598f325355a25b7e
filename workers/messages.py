"""What Front, decode and prefill workers say to each other about requests.

Frozen values of plain types: MessagePack on the token channel, and in the call for a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.logprobs import TokenLogprobs
from workers.engine.events import FinishReason
from workers.engine.sampling_params import SamplingParams

__all__ = [
    "Failed",
    "FailureCode",
    "FinishReason",
    "Finished",
    "GenerateEvent",
    "GenerateRequest",
    "Heartbeat",
    "PrefillAccepted",
    "PrefillEnded",
    "PrefillEvent",
    "PrefillLoad",
    "PrefillRefused",
    "PrefillRequest",
    "PromptFrame",
    "TokenFrame",
    "WorkerEvent",
    "WorkerLoad",
    "deadline_of",
]


class FailureCode(Enum):
    """Why a request ended without finishing; Front turns each into a status or an error event."""

    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    QUEUE_FULL = "queue_full"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    WORKER_LOST = "worker_lost"
    WORKER_STOPPING = "worker_stopping"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate; a client's request with n choices makes n of them."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Lower is served earlier; waiting improves it."""
    attempt: int = 0
    """Grows when Front sends the same sequence again; frames carry it back."""
    timeout_s: float | None = None
    """Time left until the client's deadline, as a duration: clocks of hosts differ."""
    cache_salt: str = field(default="", repr=False)
    """Prefix hits are only on KV of requests with the same one; a tenant's secret."""
    resumed_token_ids: tuple[int, ...] = ()
    """Output of earlier attempts, which this one goes on from; part of the sampling's max_tokens
    and of what `Finished` counts."""
    avoid: tuple[str, ...] = ()
    """Workers that lost an earlier attempt, as their heartbeats named them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFrame:
    """Output tokens that became known since the frame before."""

    attempt: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of token_ids where the request asks for them, else of none."""
    cached_tokens: int = 0
    """Prompt tokens that nobody computed for this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFrame:
    """Log-probabilities of the next prompt tokens; only where the request asks for them.

    All frames together have every prompt token but the first, and come before the first output
    token.
    """

    attempt: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last frame of a sequence that ended by itself."""

    attempt: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that nobody computed for this request."""
    prefilled_by: str = ""
    """worker_id of the worker that computed the prompt."""
    stop_token_id: int | None = None
    """The stop token that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The last frame of a sequence that did not finish; nothing comes after it."""

    attempt: int
    code: FailureCode
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The worker has the sequence and lives; sent where nothing else was for a while."""

    attempt: int
    worker: str
    """Its name for `GenerateRequest.avoid`."""


GenerateEvent = PromptFrame | TokenFrame | Finished | Failed
"""What a sequence's reader is told."""

WorkerEvent = GenerateEvent | Heartbeat
"""What a decode worker sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """How busy a decode worker is, for who chooses among several."""

    takes_requests: bool
    """Whether its engine runs."""
    requests: int
    waiting: int
    """Of them, those that wait for blocks."""
    available_blocks: int
    """Free or cached."""
    is_leaving: bool = False
    """Its process finishes what it has and then goes: nothing new is for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """Decode asks prefill to compute a prompt's KV and sample its first token.

    The prefill worker that takes it completes (transfer_id, epoch) to a `TransferKey`.
    """

    request_id: str
    transfer_id: str
    epoch: int
    decode: PeerInfo
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float | None = None
    skip_tokens: int = 0
    """Of the prompt, what decode has already: blocks with nothing else in them are not granted."""
    cache_salt: str = field(default="", repr=False)
    num_resumed: int = 0
    """How many of the prompt's last tokens are output of an earlier attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLoad:
    """How busy and how fast a prefill worker is."""

    queued_tokens: int
    """Prompt tokens that it has yet to compute."""
    prompt_token_s: float | None
    """Seconds that each takes, lately; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAccepted:
    """The first answer: the lease runs from here on; grants come over the link to `peer`."""

    key: TransferKey
    peer: PeerInfo
    load: PrefillLoad
    """This prompt included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillEnded:
    """The last answer: prefill holds nothing for the request any more."""

    key: TransferKey
    outcome: str
    """A `ReleaseReason` value, or the failure in words."""
    load: PrefillLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRefused:
    """The only answer of a worker that does not take the request; it holds nothing."""

    code: FailureCode
    message: str


PrefillEvent = PrefillAccepted | PrefillEnded | PrefillRefused


def deadline_of(timeout_s: float | None, now: float) -> float | None:
    """A duration that a message carried, as a deadline on this process's clock."""
    return None if timeout_s is None else now + timeout_s
