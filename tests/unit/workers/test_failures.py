from __future__ import annotations

import pytest

from workers.errors import (
    ContextOverflowError,
    DeadlineExceededError,
    QueueFullError,
    StepFailedError,
    WorkerStoppingError,
)
from workers.failures import failure_code_of
from workers.messages import FailureCode


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextOverflowError("too long"), FailureCode.CONTEXT_LENGTH_EXCEEDED),
        (QueueFullError("too many"), FailureCode.QUEUE_FULL),
        (DeadlineExceededError("too late"), FailureCode.DEADLINE_EXCEEDED),
        (WorkerStoppingError("too late to begin"), FailureCode.WORKER_STOPPING),
        (StepFailedError("not finite"), FailureCode.INTERNAL),
        (RuntimeError("a bug"), FailureCode.INTERNAL),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refusal_has_the_code_that_a_client_can_act_on(error, code):
    assert failure_code_of(error) is code
