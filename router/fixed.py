"""The policy of a deployment with one pool."""

from __future__ import annotations

from collections.abc import Mapping

from router.agent_step import AgentStep
from router.policy import Decision, Routing
from router.signals import PoolSignals

__all__ = ["FixedPolicy"]


class FixedPolicy:
    """Sends every agent step to one pool."""

    def __init__(self, pool: str) -> None:
        self._decision = Decision(pool=pool, reason="fixed")

    def route(self, agent_step: AgentStep, signals: Mapping[str, PoolSignals]) -> Routing:
        """See `Policy.route`; asks nothing."""
        yield from ()  # a policy is a generator even if it has nothing to ask
        return self._decision
