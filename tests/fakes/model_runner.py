"""A model runner without a model: the next token is a function of the tokens before it."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence

from kv_transfer.logprobs import TokenLogprobs
from workers.engine.block_table import BlockTable
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan, StepResult
from workers.runner_choice import RunnerChoice


def next_token(token_ids: Sequence[int]) -> int:
    """The token that the fake model gives after token_ids; depends on every one of them."""
    return zlib.crc32(repr(tuple(token_ids)).encode()) % 1000


Windows = Sequence[int | None]
"""By group of layers, how many tokens one sees; None is all."""


def seen(token_ids: Sequence[int], windows: Windows) -> list[int]:
    """What the fake model's groups of layers see after token_ids, one after the other."""
    return [
        token_id
        for window in windows
        for token_id in (token_ids if window is None else token_ids[-window:])
    ]


def generate(prompt: Sequence[int], num_tokens: int, windows: Windows = (None,)) -> list[int]:
    """What a sequence should sample, computed without an engine."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(seen(token_ids, windows)))
    return token_ids[len(prompt) :]


def fake_logprobs(before: Sequence[int], token_id: int, num_top: int) -> TokenLogprobs:
    """What the fake model says of a token; depends on it and on every token before it."""
    number = zlib.crc32(repr((tuple(before), token_id)).encode()) % 1000
    top = tuple((next_token([*before, place]), -0.5 - place) for place in range(num_top))
    return TokenLogprobs(logprob=-number / 8, rank=number + 1, top=top)


class FakeModelRunner:
    """Executes plans on a KV that is the token ids themselves, kept by slot.

    Sampling reads what is seen of the history back through each group's block table, so that a
    wrong start, block or order shows as a wrong token, as it would with a model.
    """

    def __init__(self, *, block_size: int, windows: Windows = (None,)) -> None:
        self._block_size = block_size
        self._windows = tuple(windows)
        self._slots: dict[int, int] = {}
        self.choice = RunnerChoice(tier="stock", cause="by_hand", reason="it is a fake")
        self.plans: list[StepPlan] = []
        """Every plan executed, in order."""
        self.errors: list[BaseException] = []
        """Raised, first first, in place of the next steps."""
        self.failed: dict[SequenceId, str] = {}
        """Sequences that get no token, with the reason."""
        self.gate: threading.Event | None = None
        """If set to an event, each step waits for it."""
        self.on_execute: Callable[[StepPlan], object] | None = None
        """Called at the start of each step, in the runner's thread."""

    def write(self, block_ids: Sequence[int], token_ids: Sequence[int], start: int = 0) -> None:
        """Put KV into slots, as a step or a transfer does."""
        for position, token_id in enumerate(token_ids, start):
            self._slots[self._slot(block_ids, position)] = token_id

    def read(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens whose KV is in the first num_tokens slots of a block table."""
        return [self._slots[self._slot(block_ids, position)] for position in range(num_tokens)]

    def read_window(self, table: BlockTable, end: int, window: int | None) -> list[int]:
        """The tokens that one at position end - 1 sees in a group."""
        first = 0 if window is None else max(0, end - window)
        gone = table.start * self._block_size
        assert gone <= first, f"tokens from {first} on are seen, the table begins with {gone}"
        return self.read(table.block_ids, end - gone)[first - gone :]

    def read_seen(self, entry: ScheduledSequence, end: int) -> list[int]:
        """What the groups of layers see from position end - 1, one after the other."""
        return [
            token_id
            for table, window in zip(entry.block_tables, self._windows, strict=True)
            for token_id in self.read_window(table, end, window)
        ]

    def execute(self, plan: StepPlan) -> StepResult:
        """Write every row's KV, then sample where the plan asks for it."""
        self.plans.append(plan)
        if self.on_execute is not None:
            self.on_execute(plan)
        if self.gate is not None:
            assert self.gate.wait(10), "nobody opened the fake runner's gate"
        if self.errors:
            raise self.errors.pop(0)
        sampled: dict[SequenceId, int] = {}
        for entry in plan.sequences:
            for table in entry.block_tables:
                start = entry.start - table.start * self._block_size
                self.write(table.block_ids, entry.token_ids, start)
            if entry.sampling is not None and entry.sequence_id not in self.failed:
                sampled[entry.sequence_id] = next_token(self.read_seen(entry, entry.end))
        failed = {
            entry.sequence_id: self.failed[entry.sequence_id]
            for entry in plan.sequences
            if entry.sampling is not None and entry.sequence_id in self.failed
        }
        return StepResult(
            step_id=plan.step_id,
            token_ids=sampled,
            failed=failed,
            logprobs={
                entry.sequence_id: fake_logprobs(
                    self.read_seen(entry, entry.end),
                    sampled[entry.sequence_id],
                    entry.sampling.logprobs,
                )
                for entry in plan.sequences
                if entry.sequence_id in sampled
                and entry.sampling is not None
                and entry.sampling.logprobs is not None
            },
            prompt_logprobs={
                entry.sequence_id: tuple(
                    fake_logprobs(
                        self.read_seen(entry, entry.start + row + 1),
                        token_id,
                        entry.scoring.num_top,
                    )
                    for row, token_id in enumerate(entry.scoring.token_ids)
                )
                for entry in plan.sequences
                if entry.scoring is not None
            },
        )

    def _slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // self._block_size] * self._block_size + (
            position % self._block_size
        )
