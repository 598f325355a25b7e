"""What is known about the model pools when an agent step is routed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PoolSignals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSignals:
    """Load and health of one pool at one moment, filled in by deployments."""

    pool: str
    is_healthy: bool
    running: int
    """Sequences that run."""
    waiting: int
    """Sequences that wait for blocks."""
    free_tokens: int
    """Tokens for which the pool has blocks now."""
