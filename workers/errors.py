"""Refusals of the workers.

WorkerError
+-- ContextOverflowError   the request can never fit the window
+-- PoolTooSmallError      the request, or the window, can never fit the pool (INV-POOL-WINDOW)
+-- QueueFullError         no room now, and too many wait already
+-- DeadlineExceededError  the request's time ran out
+-- UnsupportedModelError  the engine cannot run the model's architecture and would answer wrongly
+-- StepFailedError        a step, or the request's part of it, broke; the worker goes on
+-- WorkerStoppingError    the worker is draining or its engine has failed
"""


class WorkerError(Exception):
    """A worker cannot serve what it was asked for."""


class ContextOverflowError(WorkerError):
    """prompt + max tokens does not fit the window."""


class PoolTooSmallError(WorkerError):
    """A pool that cannot hold one full window must not start."""


class QueueFullError(WorkerError):
    """The ticket queue is at its limit."""


class DeadlineExceededError(WorkerError):
    """The request's deadline passed before it finished."""


class StepFailedError(WorkerError):
    """The step that the request took part in gave no token for it."""


class WorkerStoppingError(WorkerError):
    """No new requests are taken."""


class UnsupportedModelError(WorkerError):
    """The engine's way of batching does not hold for this architecture: it must not be served."""
