"""What a refusal of a worker is called in a reply: one table, for decode and prefill alike."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from workers.errors import (
    ContextOverflowError,
    DeadlineExceededError,
    QueueFullError,
    WorkerStoppingError,
)
from workers.messages import FailureCode

_CODES: Final[Mapping[type[Exception], FailureCode]] = MappingProxyType(
    {
        ContextOverflowError: FailureCode.CONTEXT_LENGTH_EXCEEDED,
        QueueFullError: FailureCode.QUEUE_FULL,
        DeadlineExceededError: FailureCode.DEADLINE_EXCEEDED,
        WorkerStoppingError: FailureCode.WORKER_STOPPING,
    }
)


def failure_code_of(error: Exception) -> FailureCode:
    """The code of an error; INTERNAL for one that is nobody's to act on."""
    return _CODES.get(type(error), FailureCode.INTERNAL)
