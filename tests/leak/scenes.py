"""The published incident, and its relatives, on real workers with a real tiny model.

The incident: a prefill pool was smaller than the window, a prompt that it could not hold was
replaced by a placeholder, the placeholder's KV was sent, and decode answered from the pages that
another tenant had left in its pool. Each scene here goes wrong in one such way. Tenant A comes
first and leaves its pages behind; tenant B's prompt is the one that goes wrong.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pytest

import tests.fakes.worker_rig
from kv_transfer.geometry import BlockId, ceil_div
from kv_transfer.handoff import (
    FirstToken,
    GrantedBlock,
    ReleaseReason,
    TransferKey,
)
from kv_transfer.transports import shm, tcp, wire
from kv_transfer.transports.wire import FrameType, Identity
from tests.fakes.worker_rig import Client, Rig, RigConfig, generate_request
from tests.leak import guards
from tests.leak.guards import Guard
from workers.decode_config import DecodeConfig
from workers.engine.events import Admitted, ChunkComputed, Event, PromptComputed
from workers.engine.sampling_params import SamplingParams
from workers.engine.sequence import SequenceMode
from workers.engine.step import SequenceId
from workers.messages import Failed, PrefillRequest, TokenFrame
from workers.prefill import PrefillWorker

BLOCK_SIZE = 4
WINDOW = 64
OUTPUT_TOKENS = 8
A_TOKENS, B_TOKENS = 56, 42
HELD_TOKENS = 18
"""What the placeholder has of a prompt; its last block is not full."""
SMALL_POOL_BLOCKS = 5
SALT_OF_A, SALT_OF_B = "tenant-a", "tenant-b"
SAMPLING = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)

CONFIG = RigConfig(
    num_blocks=2 * WINDOW // BLOCK_SIZE,
    max_model_len=WINDOW,
    num_prefill=1,
    prefill_chunk_tokens=16,
    decode=DecodeConfig(
        local_prefill_tokens=BLOCK_SIZE,
        transfer_deadline_s=60.0,
        accept_timeout_s=60.0,
        attempts=1,
    ),
)
"""Without its layout, which is the model's."""

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One way of going wrong, and the guards that it must get past, in the order it meets them."""

    name: str
    story: str
    chain: tuple[Guard, ...]
    plant: Callable[[pytest.MonkeyPatch, Prompt, Sequence[Guard]], None]
    """Make the workers go wrong, given A's prompt and which guards are replaced."""
    before: Callable[[Rig, Prompt, pytest.MonkeyPatch], Awaitable[None]]
    """How A leaves its pages, and what goes wrong from then on."""
    config: RigConfig = CONFIG


# -- A leaves its pages ---------------------------------------------------------------------------


async def _computed_on_decode(rig: Rig, tenant_a: Prompt, _: pytest.MonkeyPatch) -> None:
    """A's whole prompt is computed into decode's blocks, which are free when this returns."""
    colocated = rig.decode_worker(None)
    request = generate_request(tenant_a, SAMPLING, number=1, cache_salt=SALT_OF_A)
    tokens = 0
    async for event in colocated.generate(request):
        assert not isinstance(event, Failed), event
        tokens += len(event.token_ids) if isinstance(event, TokenFrame) else 0
    assert tokens == OUTPUT_TOKENS
    await rig.settled()


async def _handed_over(rig: Rig, tenant_a: Prompt, _: pytest.MonkeyPatch) -> None:
    """A's prompt goes the usual way; both pools have its pages, in free or in cached blocks."""
    request = generate_request(tenant_a, SAMPLING, number=1, cache_salt=SALT_OF_A)
    finished = await Client(rig, request).finished()
    assert finished.prefilled_by == "prefill-0"
    await rig.settled()


async def _comes_in_between(rig: Rig, tenant_a: Prompt, _: pytest.MonkeyPatch) -> None:
    """A comes while B is under way."""


# -- going wrong ----------------------------------------------------------------------------------


class PlaceholderPrefill(PrefillWorker):
    """The worker of the incident: what it cannot hold, it replaces by what it can."""

    def _open(self, key: TransferKey, request: PrefillRequest) -> object:
        held = request.prompt_token_ids[:HELD_TOKENS]
        return super()._open(key, replace(request, prompt_token_ids=held))


class EarlyFreePrefill(PrefillWorker):
    """Frees a prompt's blocks when it is computed, lets A have them, then grants what it had."""

    tenant_a: Prompt = ()
    _others: dict[TransferKey, SequenceId]

    async def start(self) -> None:
        self._others = {}
        await super().start()

    def on_transfer_end(self, key: TransferKey, reason: ReleaseReason) -> None:
        super().on_transfer_end(key, reason)
        if (other := self._others.pop(key, None)) is not None:
            self._engine.cancel(other)

    def _on_engine_event(self, key: TransferKey, event: Event) -> None:
        job = self._jobs.get(key)
        if job is None:
            return
        if isinstance(event, (Admitted, ChunkComputed)):
            job.block_tables = event.block_tables
        elif isinstance(event, PromptComputed):
            first = FirstToken(token_id=event.first_token)
            end = self._layout.blocks_for(job.num_prompt_tokens)
            stale = [self._granted(job, 0, index) for index in range(end)]
            self._engine.cancel(job.sequence_id)
            self._others[key] = self._engine.submit(
                prompt_token_ids=self.tenant_a,
                sampling=SAMPLING,
                mode=SequenceMode.PREFILL_ONLY,
                sink=lambda other: self._on_overwritten(key, stale, first, other),
            )

    def _on_overwritten(
        self, key: TransferKey, stale: list[GrantedBlock], first: FirstToken, event: Event
    ) -> None:
        if isinstance(event, PromptComputed):
            self._sender.grant(key, stale, first)


def _placeholder(patch: pytest.MonkeyPatch, _: Prompt, replaced: Sequence[Guard]) -> None:
    if guards.ADMISSION in replaced:
        patch.setattr(tests.fakes.worker_rig, "PrefillWorker", PlaceholderPrefill)


def _early_free(patch: pytest.MonkeyPatch, tenant_a: Prompt, _: Sequence[Guard]) -> None:
    worker = type("EarlyFree", (EarlyFreePrefill,), {"tenant_a": tenant_a})
    patch.setattr(tests.fakes.worker_rig, "PrefillWorker", worker)


def _nothing(patch: pytest.MonkeyPatch, tenant_a: Prompt, replaced: Sequence[Guard]) -> None:
    """The guards' stand-ins are what goes wrong."""


async def _exchanged_on_the_way(rig: Rig, tenant_a: Prompt, patch: pytest.MonkeyPatch) -> None:
    """After A, for each block of B the bytes of one that only A's longer prompt was in."""
    await _handed_over(rig, tenant_a, patch)
    others = range(ceil_div(B_TOKENS, BLOCK_SIZE), len(tenant_a) // BLOCK_SIZE)
    copy = shm._ArenaSource._copy

    def stray(block_id: BlockId) -> BlockId:
        return BlockId(others[block_id % len(others)])

    def sent(
        self: tcp._SocketOutlet, identity: Identity, block: GrantedBlock
    ) -> Sequence[bytes | memoryview]:
        right = self._memory.block(block.block_id)
        header = wire.block_header(identity, FrameType.DATA, block, right)
        return header, self._memory.block(stray(block.block_id))

    def copied(self: shm._ArenaSource, block_id: BlockId, destination: memoryview) -> None:
        copy(self, stray(block_id), destination)

    patch.setattr(tcp._SocketOutlet, "frame", sent)
    patch.setattr(shm._ArenaSource, "_copy", copied)


# -- the scenes -----------------------------------------------------------------------------------

PLACEHOLDER: Final = Scene(
    name="placeholder",
    story="The incident: prefill holds less than the window, computes a placeholder in place of a "
    "prompt that it cannot hold, and grants that.",
    chain=(
        guards.POOL,
        guards.PREFILL_LINK,
        guards.DECODE_LINK,
        guards.ADMISSION,
        guards.VALID_TOKENS,
        guards.LAST_GRANT,
        guards.COVERAGE,
    ),
    plant=_placeholder,
    before=_computed_on_decode,
    config=replace(CONFIG, prefill_blocks=SMALL_POOL_BLOCKS),
)
EARLY_FREE: Final = Scene(
    name="early-free",
    story="Prefill frees a prompt's blocks before decode has read them, another tenant's prompt "
    "is computed into them, and prefill says VALID.",
    chain=(guards.FETCHED_GENERATION, guards.CONFIRM),
    plant=_early_free,
    before=_comes_in_between,
)
DEAF_DECODE: Final = Scene(
    name="deaf-decode",
    story="The same, prefill says INVALID, and decode does not listen.",
    chain=(guards.FETCHED_GENERATION, guards.VERDICT, guards.PUBLISH),
    plant=_early_free,
    before=_comes_in_between,
)
EXCHANGED: Final = Scene(
    name="exchanged",
    story="The transport brings the bytes of other blocks than were granted.",
    chain=(guards.DIGEST,),
    plant=_nothing,
    before=_exchanged_on_the_way,
)
SAME_KEYS: Final = Scene(
    name="same-keys",
    story="The prefix cache gives a prompt the blocks of another tenant's.",
    chain=(guards.SALT, guards.TOKENS),
    plant=_nothing,
    before=_handed_over,
    config=replace(CONFIG, prefix_cache=True),
)
SCENES: Final = (PLACEHOLDER, EARLY_FREE, DEAF_DECODE, EXCHANGED, SAME_KEYS)


def first_intact(scene: Scene, replaced: Sequence[Guard]) -> Guard | None:
    """The guard that must refuse; None if all are replaced."""
    return next((guard for guard in scene.chain if guard not in replaced), None)


def replacements(scene: Scene) -> list[tuple[Guard, ...]]:
    """Which guards to replace together: each alone, all before each, all but each; never all."""
    chain = scene.chain
    ways = [(guard,) for guard in chain]
    ways += [chain[:index] for index in range(len(chain))]
    ways += [tuple(guard for guard in chain if guard is not kept) for kept in chain]
    return [way for way in dict.fromkeys(ways) if len(way) < len(chain)]
