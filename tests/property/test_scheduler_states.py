"""Any order of calls on a scheduler, with a runner and transfers that really write to the blocks.

The fake model reads a sequence's history back through its block table. A block that is handed out
while a step or a transfer may still write to it therefore shows as a wrong token, whatever the
scheduler's own books say. So does a prefix hit on a block that holds another text. Prompts are
few, and begin alike in every salt, so that hits are many; a machine beside it remembers under
which salt each block was written.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.geometry import BlockId
from tests.fakes.model_runner import FakeModelRunner, Windows, generate
from tests.fakes.scheduling import BLOCK_SIZE, SCOPE, make_scheduler
from workers.engine.block_table import BlockTable
from workers.engine.events import (
    TERMINAL_EVENTS,
    Admitted,
    ChunkComputed,
    Event,
    PromptComputed,
    PromptScored,
    SequenceFailed,
    SequenceFinished,
    TokensSampled,
)
from workers.engine.prefix_cache import PrefixScope
from workers.engine.sampling_params import SamplingParams
from workers.engine.sequence import SequenceMode, SequenceSpec, SequenceStatus
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan, StepResult
from workers.errors import (
    DeadlineExceededError,
    QueueFullError,
    StepFailedError,
    WorkerStoppingError,
)
from workers.messages import FinishReason

STEP_TOKENS = 5
"""Little more than max_sequences: decodes and chunks compete for rows."""
AGING_S = 10.0
GARBAGE = -1
SALTS = ("", "tenant")
TEXTS = 2


class Record:
    """What one sequence was promised and what it has got."""

    def __init__(self, spec: SequenceSpec, now: float, windows: Windows) -> None:
        self.spec = spec
        self.windows = windows
        self.rank = (now + spec.priority * AGING_S, spec.sequence_id)
        """Whose turn it is: lower goes first."""
        self.tables: tuple[BlockTable, ...] = ()
        self.admission = 0
        """Its number among all that were admitted, once it is."""
        self.token_ids: list[int] = []
        self.num_hit_tokens = 0
        """Prefix hit at its admission: nothing but what comes after it may be written."""
        self.num_computed = 0
        self.first_token: int | None = None
        self.end: Event | None = None
        self.is_fenced = spec.mode is not SequenceMode.AWAIT_KV
        """Whether no transfer can write to its blocks any more."""

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that may ever have KV here."""
        num_output = self.spec.sampling.max_tokens
        if self.spec.mode is SequenceMode.PREFILL_ONLY:
            num_output = 0
        return len(self.spec.prompt_token_ids) + num_output

    @property
    def placement(self) -> tuple[BlockId, ...]:
        """Where a transfer writes."""
        hit = self.num_hit_tokens // BLOCK_SIZE
        return tuple(block for table in self.tables for block in table.cut(hit, table.end))

    @property
    def is_held(self) -> bool:
        """Whether its prompt has been computed for somebody else to read."""
        return self.first_token is not None

    def take(self, event: Event, admission: int) -> None:
        assert self.end is None, f"{event} after {self.end}: INV-ONE-END"
        match event:
            case Admitted():
                assert not self.tables
                self.tables = event.block_tables
                for table, window in zip(self.tables, self.windows, strict=True):
                    if window is None:
                        assert len(table.block_ids) * BLOCK_SIZE >= self.num_reserved_tokens
                self.num_hit_tokens = self.num_computed = event.num_hit_tokens
                assert event.num_hit_tokens < len(self.spec.prompt_token_ids)
                assert self.spec.takes_hits or event.num_hit_tokens == 0
                self.admission = admission
            case ChunkComputed():
                assert event.num_computed > self.num_computed
                self.num_computed = event.num_computed
                self.tables = event.block_tables
            case PromptComputed():
                assert self.num_computed == len(self.spec.prompt_token_ids)
                self.first_token = event.first_token
            case PromptScored():
                assert not self.spec.takes_hits
            case TokensSampled():
                self.token_ids.extend(event.token_ids)
            case _:
                assert isinstance(event, TERMINAL_EVENTS)
                self.end = event
                is_late = isinstance(event, SequenceFailed) and isinstance(
                    event.error, DeadlineExceededError
                )
                assert not (is_late and self.is_held), "a reader's blocks were taken from it"

    def check_tokens(self) -> None:
        """What was sampled is what the model gives for this sequence alone."""
        expected = generate(self.spec.prompt_token_ids, self.spec.sampling.max_tokens, self.windows)
        assert self.token_ids == expected[: len(self.token_ids)]
        assert self.spec.sampling.stop_token_ids.isdisjoint(self.token_ids)
        if self.first_token is not None:
            assert self.first_token == expected[0]
        if isinstance(self.end, SequenceFinished):
            assert self.end.prompt_tokens == len(self.spec.prompt_token_ids)
            is_stop = self.end.reason is FinishReason.STOP
            assert self.end.completion_tokens == len(self.token_ids) + is_stop
            if is_stop:
                assert expected[len(self.token_ids)] in self.spec.sampling.stop_token_ids
            else:
                assert len(self.token_ids) == self.spec.sampling.max_tokens


class SchedulerMachine(RuleBasedStateMachine):
    WINDOWS: Windows = (None,)
    NUM_BLOCKS = 10
    SCOPE: PrefixScope | None = SCOPE

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(
            num_blocks=self.NUM_BLOCKS,
            windows=self.WINDOWS,
            max_sequences=4,
            step_tokens=STEP_TOKENS,
            queue_limit=3,
            aging_s=AGING_S,
            scope=self.SCOPE,
        )
        self.runner = FakeModelRunner(block_size=BLOCK_SIZE, windows=self.WINDOWS)
        self.records: dict[SequenceId, Record] = {}
        self.in_flight: StepPlan | None = None
        self.now = 0.0
        self.admissions = 0
        self.salts: dict[BlockId, str] = {}
        """Under which salt each block was last written."""

    # -- what the rules share -------------------------------------------------------------------

    def drain(self) -> None:
        events = self.scheduler.take_events()
        for event in events:
            self.records[event.sequence_id].take(event, self.admissions)
            self.admissions += isinstance(event, Admitted)
        admitted = [self.records[e.sequence_id] for e in events if isinstance(e, Admitted)]
        for number in self.in_status(SequenceStatus.WAITING):
            for record in admitted:
                assert record.rank < self.records[number].rank, "the head was overtaken"

    def land(self) -> StepPlan:
        plan, self.in_flight = self.in_flight, None
        assert plan is not None
        return plan

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the model; what it reads and writes must be of the sequence's own salt."""
        for entry in plan.sequences:
            salt = self.records[entry.sequence_id].spec.cache_salt
            first_written, end = entry.start // BLOCK_SIZE, -(-entry.end // BLOCK_SIZE)
            for table in entry.block_tables:
                self.salt_is_its_own(table.cut(0, first_written), salt)
                self.note_salt(table.cut(first_written, end), salt)
        result = self.runner.execute(plan)
        for entry in plan.sequences:
            self.every_row_sees_its_tokens(entry)
        return result

    def every_row_sees_its_tokens(self, entry: ScheduledSequence) -> None:
        record = self.records[entry.sequence_id]
        token_ids = [*record.spec.prompt_token_ids, *record.token_ids]
        for table, window in zip(entry.block_tables, self.WINDOWS, strict=True):
            first = 0 if window is None else max(0, entry.start - window + 1)
            reach = None if window is None else entry.end - first
            assert self.runner.read_window(table, entry.end, reach) == token_ids[first : entry.end]

    def salt_is_its_own(self, block_ids: tuple[BlockId, ...], salt: str) -> None:
        assert all(self.salts.get(block_id) == salt for block_id in block_ids), "INV-SALT"

    def note_salt(self, block_ids: tuple[BlockId, ...], salt: str) -> None:
        self.salts.update(dict.fromkeys(block_ids, salt))

    def table_of(self, number: SequenceId) -> tuple[BlockId, ...]:
        return self.scheduler._roster.live[number].block_ids

    def in_status(self, *wanted: SequenceStatus) -> list[SequenceId]:
        return [number for number in self.records if self.scheduler.status_of(number) in wanted]

    def live(self) -> list[SequenceId]:
        return [number for number, record in self.records.items() if record.end is None]

    def unfenced(self) -> list[SequenceId]:
        return [number for number, record in self.records.items() if not record.is_fenced]

    def pick(self, data: st.DataObject, numbers: list[SequenceId]) -> SequenceId:
        return data.draw(st.sampled_from(numbers))

    # -- sequences come -------------------------------------------------------------------------

    @rule(
        prompt=st.integers(1, 14),
        max_tokens=st.integers(1, 8),
        mode=st.sampled_from(SequenceMode),
        priority=st.integers(-1, 1),
        patience=st.none() | st.integers(1, 30),
        stops_at=st.none() | st.integers(1, 8),
        text=st.integers(1, TEXTS),
        salt=st.sampled_from(SALTS),
        looks_up=st.sampled_from([True, True, True, False]),
        follows=st.booleans(),
    )
    def submit(
        self, prompt, max_tokens, mode, priority, patience, stops_at, text, salt, looks_up, follows
    ) -> None:
        number = SequenceId(len(self.records))
        token_ids = tuple(range(1000 * text, 1000 * text + prompt))
        if follows and self.records:  # the next turn of a conversation
            before = self.records[SequenceId(number - 1)]
            token_ids = (*before.spec.prompt_token_ids, *before.token_ids, 7)[:24]
        stop = () if stops_at is None else generate(token_ids, stops_at, self.WINDOWS)[-1:]
        spec = SequenceSpec(
            sequence_id=number,
            prompt_token_ids=token_ids,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                stop_token_ids=frozenset(stop),
                prompt_logprobs=None if looks_up else 0,
            ),
            mode=mode,
            priority=priority,
            deadline=None if patience is None else self.now + patience,
            cache_salt=salt,
        )
        self.records[number] = Record(spec, self.now, self.WINDOWS)
        try:
            self.scheduler.submit(spec, self.now)
        except QueueFullError:
            assert self.scheduler.num_waiting == 3
            del self.records[number]
        self.drain()

    # -- steps ----------------------------------------------------------------------------------

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def begin_step(self) -> None:
        decoding = set(self.in_status(SequenceStatus.DECODING))
        self.in_flight = self.scheduler.plan(self.now)
        self.drain()
        if self.in_flight is None:
            assert not self.in_status(SequenceStatus.DECODING, SequenceStatus.PREFILLING)
            return
        assert 0 < self.in_flight.num_tokens <= STEP_TOKENS
        planned = {entry.sequence_id for entry in self.in_flight.sequences}
        late = {number for number in decoding if self.records[number].end is not None}
        assert decoding - late <= planned, "a decoding sequence got no row"
        prefilling = self.in_status(SequenceStatus.PREFILLING)
        prefilling.sort(key=lambda number: self.records[number].admission)
        scheduled = [entry.sequence_id for entry in self.in_flight.sequences]
        chunks = [number for number in scheduled if number in prefilling]
        assert chunks == prefilling[: len(chunks)], "a younger prompt went first"
        self.no_slot_is_written_twice(self.in_flight)

    def no_slot_is_written_twice(self, plan: StepPlan) -> None:
        slots = [
            (table.block(position // BLOCK_SIZE), position % BLOCK_SIZE)
            for entry in plan.sequences
            for table in entry.block_tables
            for position in range(entry.start, entry.end)
        ]
        assert len(slots) == len(set(slots))

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def end_step(self) -> None:
        """The writes happen at the very end: whatever changed in between is hit by them."""
        plan = self.land()
        self.scheduler.commit(self.execute(plan))
        self.drain()

    @precondition(lambda self: self.in_flight is None)
    @rule(num_steps=st.integers(1, 12))
    def run_steps(self, num_steps: int) -> None:
        """Without this, hardly any sequence would get to its end between two interventions."""
        for _ in range(num_steps):
            self.begin_step()
            if self.in_flight is None:
                return
            self.end_step()
            self.scheduler.check_invariants()

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def break_step(self) -> None:
        plan = self.land()
        self.execute(plan)
        self.scheduler.fail_step(StepFailedError("broken"))
        self.drain()
        for entry in plan.sequences:
            assert self.records[entry.sequence_id].end is not None

    @precondition(lambda self: self.in_flight is not None)
    @rule(data=st.data())
    def end_step_with_a_bad_sequence(self, data: st.DataObject) -> None:
        plan = self.land()
        bad = data.draw(st.sampled_from(plan.sequences)).sequence_id
        result = self.execute(plan)
        tokens = {number: token for number, token in result.token_ids.items() if number != bad}
        self.scheduler.commit(
            StepResult(step_id=plan.step_id, token_ids=tokens, failed={bad: "not finite"})
        )
        self.drain()
        assert self.records[bad].end is not None

    # -- KV from another worker -----------------------------------------------------------------

    @precondition(lambda self: self.in_status(SequenceStatus.AWAITING_KV))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        number = self.pick(data, self.in_status(SequenceStatus.AWAITING_KV))
        record = self.records[number]
        prompt, salt = record.spec.prompt_token_ids, record.spec.cache_salt
        hit = record.num_hit_tokens // BLOCK_SIZE
        for table in record.tables:
            first = max(hit, table.start)
            brought = table.cut(first, -(-len(prompt) // BLOCK_SIZE))
            self.salt_is_its_own(table.cut(0, hit), salt)
            self.note_salt(brought, salt)
            self.runner.write(brought, prompt[first * BLOCK_SIZE :])
        record.is_fenced = True
        assert self.scheduler.publish(number, generate(prompt, 1, self.WINDOWS)[0])
        self.drain()

    @precondition(lambda self: self.in_status(SequenceStatus.AWAITING_KV))
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        assert self.scheduler.quarantine(
            self.pick(data, self.in_status(SequenceStatus.AWAITING_KV))
        )

    @precondition(lambda self: self.unfenced())
    @rule(data=st.data(), then_prefill=st.booleans())
    def fence(self, data: st.DataObject, then_prefill: bool) -> None:
        number = self.pick(data, self.unfenced())
        is_live = self.scheduler.fence(number)
        assert is_live == (self.records[number].end is None)
        if not is_live:
            self.records[number].is_fenced = True
        elif then_prefill and self.scheduler.status_of(number) is SequenceStatus.AWAITING_KV:
            self.records[number].is_fenced = True
            assert self.scheduler.prefill_here(number)
        self.drain()

    @precondition(lambda self: self.unfenced())
    @rule(data=st.data())
    def late_transfer_writes(self, data: st.DataObject) -> None:
        """A transfer that failed, or whose sequence ended, writes on until its fence."""
        record = self.records[self.pick(data, self.unfenced())]
        for block_id in record.placement:
            self.runner.write((block_id,), (GARBAGE,) * BLOCK_SIZE)

    # -- ends -----------------------------------------------------------------------------------

    @precondition(lambda self: self.in_status(SequenceStatus.HELD))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = self.pick(data, self.in_status(SequenceStatus.HELD))
        self.held_blocks_are_intact()
        assert self.scheduler.release(number)
        self.drain()

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = self.pick(data, list(self.records))
        was_live = self.records[number].end is None
        assert self.scheduler.cancel(number) == was_live
        self.drain()
        assert self.records[number].end is not None

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.scheduler.expire(self.now)
        self.drain()
        for number, record in self.records.items():
            deadline = record.spec.deadline
            if deadline is not None and deadline <= self.now and record.end is None:
                assert self.scheduler.status_of(number) is SequenceStatus.HELD

    # -- always ---------------------------------------------------------------------------------

    @invariant()
    def books_are_right(self) -> None:
        self.scheduler.check_invariants()

    @invariant()
    def nobody_else_holds_blocks_that_are_written_to(self) -> None:
        """A step writes until it ends, a transfer until its fence; whoever ended meanwhile."""
        written = [block for number in self.unfenced() for block in self.records[number].placement]
        held = [block_id for number in self.live() for block_id in self.table_of(number)]
        for number in self.unfenced():
            if self.records[number].end is not None:
                held.extend(self.records[number].placement)
        if self.in_flight is not None:
            for entry in self.in_flight.sequences:
                first = entry.start // BLOCK_SIZE
                for table in entry.block_tables:
                    blocks = table.cut(first, table.end)
                    written.extend(blocks)
                    if self.records[entry.sequence_id].end is not None:
                        held.extend(blocks)
        times = Counter(held)
        assert all(times[block_id] == 1 for block_id in written)
        assert all(self.scheduler.pool.num_holders(block_id) for block_id in held)

    @invariant()
    def live_is_what_has_not_ended(self) -> None:
        live = self.live()
        assert len(live) == self.scheduler.num_live
        assert all(self.scheduler.status_of(number) is not None for number in live)

    @invariant()
    def tokens_are_the_models(self) -> None:
        for record in self.records.values():
            record.check_tokens()

    @invariant()
    def held_blocks_are_intact(self) -> None:
        for number in self.in_status(SequenceStatus.HELD):
            record = self.records[number]
            prompt = list(record.spec.prompt_token_ids)
            for table, window in zip(record.tables, self.WINDOWS, strict=True):
                reach = None if window is None else window - 1  # the next token sees itself too
                visible = prompt if reach is None else prompt[-reach:]
                assert self.runner.read_window(table, len(prompt), reach) == visible

    @invariant()
    def what_can_be_found_is_what_it_is_named_by(self) -> None:
        """Keys are of the text, in the salt, that their blocks in each group hold."""
        cache = self.scheduler.pool.cache
        for record in self.records.values():
            chain = SCOPE.chain(record.spec.cache_salt)
            token_ids = [*record.spec.prompt_token_ids, *record.token_ids]
            chain.extend(token_ids, len(token_ids) // BLOCK_SIZE)
            for index, key in enumerate(chain.keys):
                for group in range(len(self.WINDOWS)):
                    found = cache.match([key], group=group)
                    if found:
                        text = token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
                        assert self.runner.read(found, BLOCK_SIZE) == text
                        self.salt_is_its_own(found, record.spec.cache_salt)

    def teardown(self) -> None:
        """Nothing leaks: once all is ended, landed and fenced, nobody holds a block."""
        self.scheduler.fail_all(WorkerStoppingError("stopping"))
        if self.in_flight is not None:
            self.scheduler.commit(self.execute(self.in_flight))
        for number in self.unfenced():
            self.scheduler.fence(number)
        self.drain()
        assert all(record.end is not None for record in self.records.values())
        assert self.scheduler.pool.num_available == self.scheduler.pool.num_blocks
        self.scheduler.check_invariants()


class SlidingWindowMachine(SchedulerMachine):
    """Groups of layers that forget, beside one that does not."""

    WINDOWS = (None, 3, 6)
    NUM_BLOCKS = 26

    @initialize()
    def compute_every_text_once(self) -> None:
        """So that there is something to find from the first request on."""
        for text in range(1, TEXTS + 1):
            self.submit(
                prompt=14,
                max_tokens=3,
                mode=SequenceMode.GENERATE,
                priority=0,
                patience=None,
                stops_at=None,
                text=text,
                salt=SALTS[0],
                looks_up=True,
                follows=False,
            )
            self.run_steps(num_steps=12)

    @invariant()
    def nobody_holds_more_than_it_can_see_and_compute(self) -> None:
        for number in self.live():
            tables = self.scheduler._roster.live[number].block_tables
            for table, window in zip(tables, self.WINDOWS, strict=False):
                if window is not None:
                    most = window - 1 + self.scheduler.config.prefill_chunk_tokens
                    assert (len(table.block_ids) - 2) * BLOCK_SIZE < most

    @invariant()
    def who_decodes_keeps_no_room_for_chunks(self) -> None:
        if self.in_flight is None:
            return
        for entry in self.in_flight.sequences:
            if entry.num_output_tokens > 0:
                for table, window in zip(entry.block_tables, self.WINDOWS, strict=True):
                    assert window is None or (len(table.block_ids) - 2) * BLOCK_SIZE < window


class ForgetfulMachine(SlidingWindowMachine):
    """No layer sees everything: nothing is there as long as what was computed from it."""

    WINDOWS = (6, 6)
    NUM_BLOCKS = 12


for _machine in (SchedulerMachine, SlidingWindowMachine, ForgetfulMachine):
    _machine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
test_scheduler_in_any_order = SchedulerMachine.TestCase
test_scheduler_with_sliding_windows_in_any_order = SlidingWindowMachine.TestCase
test_scheduler_that_forgets_everything_in_any_order = ForgetfulMachine.TestCase
