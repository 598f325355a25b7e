"""A decode worker and its prefill workers in one process, over a real sender and receiver.

The model is whatever `ModelFactory` makes: by default the fake one, whose KV is bytes that a
transport moves, so that a block that went astray shows as a wrong token.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kv_transfer.geometry import BlockId, KVLayout
from kv_transfer.handoff import PeerInfo
from kv_transfer.logprobs import TokenLogprobs
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transport import BlockMemory, Clock, Transport
from tests.fakes.block_memory import ByteMemory
from tests.fakes.clock import FakeClock
from tests.fakes.model_runner import FakeModelRunner
from tests.fakes.stream_kinds import tcp_transport
from tests.fakes.transport import Fault
from tests.fakes.until import until
from tests.fakes.watched_transport import WatchedPool, WatchedTransport
from workers.decode import DecodeWorker
from workers.decode_config import DecodeConfig
from workers.engine.loop import Engine
from workers.engine.prefix_cache import PrefixScope
from workers.engine.sampling_params import SamplingParams
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_config import SchedulerConfig
from workers.engine.step import SequenceId, StepPlan, StepResult
from workers.engine.step_thread import ModelRunner
from workers.handoff import PrefillService
from workers.messages import (
    Failed,
    Finished,
    GenerateEvent,
    GenerateRequest,
    Heartbeat,
    PrefillEvent,
    PrefillRequest,
    PromptFrame,
    TokenFrame,
)
from workers.prefill import PrefillWorker

BLOCK_SIZE = 4
FAKE_LAYOUT = KVLayout(
    model_digest="fake",
    dtype="float16",
    element_bytes=2,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    block_size=BLOCK_SIZE,
)
"""Four bytes of KV a token: the token id itself."""

ModelFactory = Callable[[int], tuple[ModelRunner, BlockMemory]]
"""A runner and its memory of so many blocks."""

PATIENCE_S = 20.0

_SEED_OF_GARBAGE = 0xBAD


class ByteModelRunner(FakeModelRunner):
    """The fake model on a pool of bytes, which a transport can read and write."""

    def __init__(self, memory: ByteMemory) -> None:
        super().__init__(block_size=BLOCK_SIZE)
        self._memory = memory
        self._opened = threading.Event()
        self.begun = threading.Event()
        """Set when a step has begun since `hold`."""
        self._opened.set()
        self.gate = self._opened

    def hold(self) -> None:
        """Let no step end until `let_go`."""
        self.begun.clear()
        self._opened.clear()

    def let_go(self) -> None:
        """Let the held step, and all others, go on."""
        self._opened.set()

    def execute(self, plan: StepPlan) -> StepResult:
        self.begun.set()
        return super().execute(plan)

    def write(self, block_ids: Sequence[int], token_ids: Sequence[int], start: int = 0) -> None:
        for position, token_id in enumerate(token_ids, start):
            self._token(block_ids, position)[:] = token_id.to_bytes(4, "little")

    def read(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        return [
            int.from_bytes(self._token(block_ids, position), "little")
            for position in range(num_tokens)
        ]

    def _token(self, block_ids: Sequence[int], position: int) -> memoryview:
        block = self._memory.block(BlockId(block_ids[position // BLOCK_SIZE]))
        offset = position % BLOCK_SIZE * 4
        return block[offset : offset + 4]


def fake_model(num_blocks: int) -> tuple[ByteModelRunner, ByteMemory]:
    """The default `ModelFactory`; every byte is garbage until it is written."""
    memory = ByteMemory(num_blocks, FAKE_LAYOUT.bytes_per_block, shared=True)
    memory.fill(_SEED_OF_GARBAGE)
    return ByteModelRunner(memory), memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RigConfig:
    """Sizes of the workers of a rig."""

    layout: KVLayout = FAKE_LAYOUT
    prefill_layout: KVLayout | None = None
    """Of prefill workers, where it is another one."""
    num_blocks: int = 32
    """Of a decode worker, and of a prefill worker unless that has a size of its own."""
    prefill_blocks: int | None = None
    max_model_len: int = 64
    max_sequences: int = 8
    step_tokens: int = 16
    prefill_chunk_tokens: int = 8
    queue_limit: int = 16
    num_prefill: int = 2
    """None of them: the decode worker is colocated."""
    num_decode: int = 1
    lease_s: float = 5.0
    sweep_s: float = 0.02
    lease_clock: Clock = time.monotonic
    """Of prefill workers' leases; the renewals that decode sends are by the real one."""
    prefix_cache: bool = False
    decode: DecodeConfig = field(
        default_factory=lambda: DecodeConfig(local_prefill_tokens=3, transfer_deadline_s=20.0)
    )

    def window_blocks(self, layout: KVLayout) -> int:
        """Blocks that a request of the whole window needs at once."""
        return layout.sequence_blocks(self.max_model_len, chunk_tokens=self.prefill_chunk_tokens)


@dataclass(slots=True, kw_only=True)
class Side:
    """What a worker is made of."""

    runner: ModelRunner
    memory: BlockMemory
    pool: WatchedPool
    scheduler: Scheduler
    engine: Engine
    info: PeerInfo

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held, waited for or feared."""
        counts = self.pool.counts()
        return counts.free + counts.cached == counts.total and self.scheduler.num_live == 0


class PrefillPoolFake:
    """`PrefillService`: the n-th call goes to the n-th worker, or where a test's script says."""

    def __init__(self, workers: Sequence[PrefillWorker]) -> None:
        self.workers = workers
        self.script: list[Callable[[PrefillRequest], AsyncIterator[PrefillEvent]]] = []
        """Answers of the next calls, in place of the workers."""
        self.requests: list[PrefillRequest] = []

    def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        number = len(self.requests)
        self.requests.append(request)
        if self.script:
            return self.script.pop(0)(request)
        return self.workers[number % len(self.workers)].prefill(request)


@dataclass(slots=True, kw_only=True)
class DecodeEnd:
    """A decode worker and what it is made of."""

    side: Side
    transport: WatchedTransport
    receiver: KVReceiver
    worker: DecodeWorker


class Rig:
    """The workers, started, and what tests look at; `decode` is the first of its kind."""

    def __init__(
        self,
        config: RigConfig,
        model: ModelFactory,
        transport: WatchedTransport,
        another: Callable[[], Transport],
        prefill_model: ModelFactory,
    ) -> None:
        self.config = config
        self.clock = FakeClock()
        self.transport = transport
        self._model = model
        self._prefill_model = prefill_model
        self._starts: Counter[str] = Counter()
        self.generation_shift = 0
        """Added to what the senders see: a pool that lost count."""
        self.prefill_sides = [self._prefill_side(i) for i in range(config.num_prefill)]
        self.prefill_workers = [self._prefill_worker(side) for side in self.prefill_sides]
        self.prefill = PrefillPoolFake(self.prefill_workers)
        self.decode_ends = [
            # One pool's blocks are not another's: each is watched by itself.
            self._decode_end(i, WatchedTransport(another()) if i else transport)
            for i in range(config.num_decode)
        ]
        first = self.decode_ends[0]
        self.side, self.receiver, self.decode = first.side, first.receiver, first.worker

    def decode_worker(self, prefill: PrefillService | None) -> DecodeWorker:
        """Another decode worker around the first one's engine."""
        return self._decode_worker(self.side, self.receiver, prefill)

    @property
    def sides(self) -> list[Side]:
        """Of all workers, decode first."""
        return [end.side for end in self.decode_ends] + self.prefill_sides

    async def start(self) -> None:
        """Start all workers."""
        for worker in self.prefill_workers:
            await worker.start()
        for end in self.decode_ends:
            await end.worker.start()

    async def stop(self) -> None:
        """Stop all workers, decode first."""
        for side in self.sides:
            if isinstance(side.runner, ByteModelRunner):
                side.runner.let_go()
        for end in self.decode_ends:
            await end.worker.stop()
        for worker in self.prefill_workers:
            await worker.stop()

    async def restart_prefill(self, number: int) -> None:
        """Stop a prefill worker and start it as a new process would: empty, another incarnation."""
        await self.prefill_workers[number].stop()
        side = self._prefill_side(number)
        worker = self._prefill_worker(side)
        await worker.start()
        self.prefill_sides[number], self.prefill_workers[number] = side, worker

    async def restart_decode(self, number: int) -> None:
        """The same for a decode worker; what it was answering has failed when this returns."""
        old = self.decode_ends[number]
        await old.worker.stop()
        end = self._decode_end(number, old.transport)
        await end.worker.start()
        self.decode_ends[number] = end

    async def settled(self) -> None:
        """Return once nobody holds anything; then check what must hold."""
        try:
            await until(lambda: not self.held(), timeout_s=10.0)
        except TimeoutError:
            raise AssertionError(f"still held: {self.held()}") from None
        self.check()

    def held(self) -> list[str]:
        """What is not free, in words."""
        held = [
            f"{side.info.worker_id}: {side.pool.counts()} {side.scheduler.count_by_status()}"
            for side in self.sides
            if not side.is_empty
        ]
        held += [
            f"{worker.me.worker_id}: {leases} leases"
            for worker in self.prefill_workers
            if (leases := worker.stats()[1].active_leases)
        ]
        for end in self.decode_ends:
            if active := end.receiver.stats().active:
                held.append(f"{active} transfers")
            if handoffs := end.worker.stats()[2].active:
                held.append(f"{handoffs} hand-offs")
        return held

    def check(self) -> None:
        """Every scheduler's invariants, and no block freed before its fence."""
        for side in self.sides:
            if side.engine.failure is None:
                side.scheduler.check_invariants()
        assert [
            end.transport.violations for end in self.decode_ends if end.transport.violations
        ] == []

    def expire(self) -> None:
        """Move the clock past every deadline, and have the decode engine look at it."""
        self.clock.advance(1000.0)
        self.wake()

    def wake(self) -> None:
        """Have the decode engine plan again: any call does, even for an unknown sequence."""
        self.side.engine.cancel(SequenceId(-1))

    def _decode_end(self, number: int, transport: WatchedTransport) -> DecodeEnd:
        side = self._side(
            f"decode-{number}",
            self._model,
            self.config.layout,
            self.config.num_blocks,
            watch=transport,
        )
        transport.pool_memory = side.memory
        receiver = KVReceiver(
            memory=side.memory,
            me=side.info,
            transports=[transport],
            lease_s=self.config.lease_s,
        )
        prefill = self.prefill if self.config.num_prefill > 0 else None
        worker = self._decode_worker(side, receiver, prefill)
        return DecodeEnd(side=side, transport=transport, receiver=receiver, worker=worker)

    def _decode_worker(
        self, side: Side, receiver: KVReceiver, prefill: PrefillService | None
    ) -> DecodeWorker:
        return DecodeWorker(
            engine=side.engine,
            me=side.info,
            layout=self.config.layout,
            config=self.config.decode,
            receiver=receiver if prefill is not None else None,
            prefill=prefill,
            clock=self.clock,
        )

    def _prefill_side(self, number: int) -> Side:
        config = self.config
        return self._side(
            f"prefill-{number}",
            self._prefill_model,
            config.prefill_layout or config.layout,
            config.prefill_blocks or config.num_blocks,
            watch=None,
        )

    def _side(
        self,
        worker_id: str,
        model: ModelFactory,
        layout: KVLayout,
        num_blocks: int,
        *,
        watch: WatchedTransport | None,
    ) -> Side:
        config = self.config
        self._starts[worker_id] += 1
        runner, memory = model(num_blocks)
        window_blocks = config.window_blocks(layout)
        pool = WatchedPool(
            num_blocks=num_blocks,
            block_size=layout.block_size,
            max_model_len=config.max_model_len,
            window_blocks=window_blocks,
            sliding_windows=[group.sliding_window for group in layout.groups],
            transport=watch,
        )
        scheduler = Scheduler(
            pool,
            SchedulerConfig(
                max_model_len=config.max_model_len,
                max_sequences=config.max_sequences,
                step_tokens=config.step_tokens,
                prefill_chunk_tokens=config.prefill_chunk_tokens,
                queue_limit=config.queue_limit,
            ),
            PrefixScope(fingerprint=layout.fingerprint, block_size=layout.block_size)
            if config.prefix_cache
            else None,
            groups=layout.groups,
        )
        return Side(
            runner=runner,
            memory=memory,
            pool=pool,
            scheduler=scheduler,
            engine=Engine(scheduler, runner, self.clock),
            info=PeerInfo.of(
                layout,
                worker_id=worker_id,
                incarnation=f"{worker_id}-{self._starts[worker_id]}",
                max_model_len=config.max_model_len,
                pool_tokens=num_blocks * config.max_model_len // window_blocks,
                host="here",
            ),
        )

    def _prefill_worker(self, side: Side) -> PrefillWorker:
        worker: PrefillWorker
        sender = KVSender(
            memory=side.memory,
            me=side.info,
            generation_of=lambda block: side.engine.generation_of(block) + self.generation_shift,
            transports=[self.transport],
            lease_s=self.config.lease_s,
            clock=self.config.lease_clock,
            sweep_s=self.config.sweep_s,
            on_end=lambda key, reason: worker.on_transfer_end(key, reason),
        )
        worker = PrefillWorker(
            engine=side.engine,
            sender=sender,
            layout=self.config.prefill_layout or self.config.layout,
            clock=self.clock,
        )
        return worker


@asynccontextmanager
async def worker_rig(
    config: RigConfig | None = None,
    *,
    model: ModelFactory = fake_model,
    transport: Transport | None = None,
    another: Callable[[], Transport] | None = None,
    faults_of: Callable[[int], Sequence[Fault]] | None = None,
    prefill_model: ModelFactory | None = None,
) -> AsyncIterator[Rig]:
    """Started workers over a transport, tcp by default; stopped and checked at the end.

    `another` makes the transports of the second decode worker and those after it, where one may
    not serve several. `prefill_model` is for a `prefill_layout`.
    """
    base = transport or tcp_transport()
    watched = WatchedTransport(base, faults_of)
    rig = Rig(
        config or RigConfig(), model, watched, another or (lambda: base), prefill_model or model
    )
    await rig.start()
    try:
        yield rig
    finally:
        await rig.stop()
    rig.check()


class Client:
    """Reads one request's events, as Front does, and can leave."""

    def __init__(
        self,
        rig: Rig,
        request: GenerateRequest,
        *,
        decode: int = 0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Ask the decode worker of this number."""
        self.events: list[GenerateEvent] = []
        self._patience_s = patience_s
        self._grew = asyncio.Event()
        self.task = asyncio.create_task(self._read(rig.decode_ends[decode].worker, request))

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far."""
        frames = (event for event in self.events if isinstance(event, TokenFrame))
        return [token_id for frame in frames for token_id in frame.token_ids]

    @property
    def ends(self) -> list[GenerateEvent]:
        """The terminal events; more than one is a breach of INV-ONE-END."""
        return [event for event in self.events if isinstance(event, (Finished, Failed))]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Those of all tokens so far."""
        frames = (event for event in self.events if isinstance(event, TokenFrame))
        return [logprobs for frame in frames for logprobs in frame.logprobs]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Those of the prompt so far."""
        frames = (event for event in self.events if isinstance(event, PromptFrame))
        return [logprobs for frame in frames for logprobs in frame.logprobs]

    async def first_token(self) -> None:
        """Return once there is a token."""
        async with asyncio.timeout(self._patience_s):
            while not self.events:
                self._grew.clear()
                await self._grew.wait()

    async def end(self) -> GenerateEvent:
        """The one terminal event, which must be the last."""
        async with asyncio.timeout(self._patience_s):
            await asyncio.wait({self.task})
        self.task.result()
        assert len(self.ends) == 1, self.events
        assert self.events[-1] is self.ends[0]
        return self.ends[0]

    async def finished(self) -> Finished:
        """The end of a request that must not fail."""
        end = await self.end()
        assert isinstance(end, Finished), end
        return end

    async def failed(self) -> Failed:
        """The end of a request that must fail."""
        end = await self.end()
        assert isinstance(end, Failed), end
        return end

    def leave(self) -> None:
        """Stop reading, wherever the request is; safe to repeat."""
        self.task.cancel()

    async def left(self) -> None:
        """Return once the reading has stopped; the request must not have ended by itself."""
        await asyncio.wait({self.task}, timeout=self._patience_s)
        assert self.task.cancelled(), self.events

    async def _read(self, worker: DecodeWorker, request: GenerateRequest) -> None:
        events = worker.generate(request)
        try:
            async for event in events:
                if not isinstance(event, Heartbeat):
                    self.events.append(event)
                    self._grew.set()
        finally:
            await events.aclose()  # type: ignore[attr-defined]  # a generator, as all of them are


def generate_request(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    number: int = 0,
    timeout_s: float | None = None,
    cache_salt: str = "",
) -> GenerateRequest:
    """A request as Front sends it."""
    return GenerateRequest(
        request_id=f"request-{number}",
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        timeout_s=timeout_s,
        cache_salt=cache_salt,
    )
