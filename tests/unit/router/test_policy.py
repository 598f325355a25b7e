from __future__ import annotations

from collections.abc import Mapping

import pytest

from router.agent_step import AgentStep
from router.fixed import FixedPolicy
from router.policy import Ask, Decision, Policy, Routing, UnansweredError, Verify, drive
from router.signals import PoolSignals

AGENT_STEP = AgentStep(request_id="r1", model="small", prompt_tokens=10, max_tokens=20)
SIGNALS = {
    name: PoolSignals(pool=name, is_healthy=True, running=0, waiting=0, free_tokens=1000)
    for name in ("small", "large")
}


class EscalatingPolicy:
    """Asks the small pool, has the large one verify, and takes the large one if it says no."""

    def __init__(self) -> None:
        self.was_closed = False

    def route(self, agent_step: AgentStep, signals: Mapping[str, PoolSignals]) -> Routing:
        try:
            answer = yield Ask(pool="small", choices=("yes", "no"))
            is_good = yield Verify(pool="large", answer=str(answer))
        finally:
            self.was_closed = True
        return Decision(pool="small" if is_good else "large", reason="verified")


def test_fixed_policy_sends_every_agent_step_to_its_pool() -> None:
    policy: Policy = FixedPolicy("small")

    decision = drive(policy.route(AGENT_STEP, SIGNALS))

    assert decision == Decision(pool="small", reason="fixed", cost_estimate=None)


def test_fixed_policy_can_route_again() -> None:
    policy = FixedPolicy("large")

    decisions = [drive(policy.route(AGENT_STEP, SIGNALS)) for _ in range(3)]

    assert [decision.pool for decision in decisions] == ["large"] * 3


@pytest.mark.parametrize(("is_good", "pool"), [(True, "small"), (False, "large")])
def test_policy_decides_by_the_replies_it_is_sent(is_good: bool, pool: str) -> None:
    routing = EscalatingPolicy().route(AGENT_STEP, SIGNALS)

    assert next(routing) == Ask(pool="small", choices=("yes", "no"))
    assert routing.send("yes") == Verify(pool="large", answer="yes")
    with pytest.raises(StopIteration) as end:
        routing.send(is_good)

    assert end.value.value == Decision(pool=pool, reason="verified")


def test_drive_refuses_a_policy_that_asks_and_closes_it() -> None:
    policy = EscalatingPolicy()

    routing = policy.route(AGENT_STEP, SIGNALS)  # kept: it must not take its collection

    with pytest.raises(UnansweredError, match="Ask"):
        drive(routing)

    assert policy.was_closed
