"""What a decode worker is told about prompts that others compute for it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecodeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """When a prompt is computed elsewhere, and how long decode waits for it."""

    local_prefill_tokens: int
    """Prompts of which no more is missing are prefilled here: moving costs more than computing."""
    transfer_deadline_s: float
    is_placed_by_cost: bool = False
    """Whether measured costs decide above that, rather than all being handed over."""
    accept_timeout_s: float = 2.0
    """Until a prefill worker answers at all; after that decode goes on without."""
    attempts: int = 2
    """Prefill workers tried before the prompt is computed here."""
    heartbeat_s: float = 0.5
    """Between two signs of life to the reader of a quiet request."""
    rest_s: float = 2.0
    """After a prefill pool did not answer, prompts are computed here for this long."""
