"""What is known about one agent step when it is routed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AgentStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStep:
    """One call of a client's, as far as it matters to which pool serves it. Holds no text."""

    request_id: str
    model: str
    """The name that the client asked for."""
    prompt_tokens: int
    max_tokens: int
    """Output tokens at most, the default filled in."""
