"""How a policy talks to whoever performs what it wants: a generator without I/O.

A policy yields what it needs to know (`Ask` a pool, `Verify` an answer), is sent the reply, and
ends in a `Decision`. Front performs what it yields, so that a policy is tested by a plain loop.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Protocol

from router.agent_step import AgentStep
from router.signals import PoolSignals

__all__ = ["Ask", "Decision", "Inquiry", "Policy", "Reply", "Routing", "UnansweredError", "drive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Have a pool answer the agent step; the reply is its text."""

    pool: str
    choices: tuple[str, ...] = ()
    """The only answers allowed; empty allows any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Have a pool judge an answer to the agent step; the reply says whether it is good."""

    pool: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The end of routing: which pool serves the agent step, and why."""

    pool: str
    reason: str
    cost_estimate: float | None = None
    """In the currency of the pools' prices; None where they have none."""


Inquiry = Ask | Verify
Reply = str | bool
Routing = Generator[Inquiry, Reply, Decision]


class Policy(Protocol):
    """Chooses a pool for an agent step."""

    def route(self, agent_step: AgentStep, signals: Mapping[str, PoolSignals]) -> Routing:
        """Start routing; `signals` holds every pool by name."""
        ...


class UnansweredError(Exception):
    """A policy asked for something where nobody can answer."""


def drive(routing: Routing) -> Decision:
    """Run a policy that needs no answers to its decision; raises UnansweredError if it does."""
    try:
        inquiry = next(routing)
    except StopIteration as end:
        decision: Decision = end.value
        return decision
    routing.close()
    raise UnansweredError(
        f"the policy yields {type(inquiry).__name__}, but nothing here answers it"
    )
