"""Plays a scene with some guards replaced, and says who refused and what tenant B was told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from kv_transfer.geometry import KVLayout
from kv_transfer.transport import Transport
from tests.fakes.worker_rig import (
    Client,
    ModelFactory,
    Rig,
    RigConfig,
    generate_request,
    worker_rig,
)
from tests.leak import guards
from tests.leak.guards import Guard
from tests.leak.scenes import (
    A_TOKENS,
    B_TOKENS,
    SALT_OF_B,
    SAMPLING,
    Prompt,
    Scene,
    first_intact,
)
from workers.errors import PoolTooSmallError
from workers.messages import Failed

_SHORT_DEADLINE_S = 1.0
"""Of a transfer in which nothing more can come: the deadline is how it is refused."""
_ENDED_BY_THE_DEADLINE = (guards.ADMISSION, guards.COVERAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What all scenes are played on."""

    layout: KVLayout
    model: ModelFactory
    transport: Callable[[], Transport]

    def sized(self, config: RigConfig) -> RigConfig:
        """Workers for the model."""
        return replace(config, layout=self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a scene ended."""

    evidence: str
    """What was logged and raised."""
    token_ids: tuple[int, ...] | None
    """B's answer; None if it got an error, or nothing was started."""

    def refused_by(self, scene: Scene) -> set[str]:
        """Patterns of the guards that refused."""
        return {guard.seen_as for guard in scene.chain if guard.has_refused(self.evidence)}


def tenant_a(number: int) -> Prompt:
    """One of A's prompts: different ones leave different pages."""
    rng = random.Random(1000 + number)
    return tuple(rng.randrange(1, 256) for _ in range(A_TOKENS))


def tenant_b() -> Prompt:
    """B's prompt; nothing in it is of A."""
    rng = random.Random(2000)
    return tuple(rng.randrange(1, 256) for _ in range(B_TOKENS))


async def play(
    scene: Scene,
    stage: Stage,
    replaced: Sequence[Guard],
    log: pytest.LogCaptureFixture,
    *,
    prompt_of_a: Prompt,
) -> Outcome:
    """A, then B, with stand-ins for the guards in `replaced`."""
    log.clear()
    config = stage.sized(scene.config)
    if first_intact(scene, replaced) in _ENDED_BY_THE_DEADLINE:
        decode = replace(config.decode, transfer_deadline_s=_SHORT_DEADLINE_S)
        config = replace(config, decode=decode)
    with pytest.MonkeyPatch.context() as patch:
        scene.plant(patch, prompt_of_a, replaced)
        for guard in replaced:
            guard.replace(patch)
        try:
            async with worker_rig(config, model=stage.model, transport=stage.transport()) as rig:
                await scene.before(rig, prompt_of_a, patch)
                log.clear()
                return await _ask_for_b(rig, log)
        except PoolTooSmallError as error:
            return Outcome(evidence=str(error), token_ids=None)


async def _ask_for_b(rig: Rig, log: pytest.LogCaptureFixture) -> Outcome:
    rig.transport.fetching.clear()
    found_before = rig.decode.stats()[0].prefix_hit_tokens
    client = Client(
        rig,
        generate_request(tenant_b(), SAMPLING, number=2, cache_salt=SALT_OF_B),
        patience_s=60.0,
    )
    end = await client.end()
    found = rig.decode.stats()[0].prefix_hit_tokens - found_before
    return Outcome(
        evidence=f"{log.text}\ngranted={rig.transport.fetching.is_set()} found={found}",
        token_ids=None if isinstance(end, Failed) else tuple(client.token_ids),
    )
