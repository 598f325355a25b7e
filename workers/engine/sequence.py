"""One token stream in an engine: its tokens, its blocks, and the states that it may go through.

A `Sequence` is owned and changed by the scheduler alone; everybody else sees events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from kv_transfer.geometry import BlockId
from workers.engine.block_table import BlockTable
from workers.engine.prefix_cache import KeyChain
from workers.engine.sampling_params import SamplingParams
from workers.engine.step import SequenceId
from workers.engine.token_counts import TokenCounts


class SequenceMode(Enum):
    """What an engine is asked to do with a sequence."""

    GENERATE = "generate"
    """Compute the prompt's KV here, then decode."""
    PREFILL_ONLY = "prefill_only"
    """Compute the prompt's KV, sample one token, and keep the blocks until they are released."""
    AWAIT_KV = "await_kv"
    """The prompt's KV arrives from another worker; decode once it is published."""


class SequenceStatus(Enum):
    """Where a sequence is between submission and its end."""

    WAITING = "waiting"
    """Has a ticket; holds no blocks."""
    AWAITING_KV = "awaiting_kv"
    """Holds its blocks, which a transfer may be writing to."""
    QUARANTINED = "quarantined"
    """A transfer failed; its blocks may still be written to until the fence."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    HELD = "held"
    """Prefill-only and computed: the blocks are pinned for a reader."""
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


TERMINAL: Final = frozenset(
    {SequenceStatus.FINISHED, SequenceStatus.ABORTED, SequenceStatus.FAILED}
)
"""States that nothing leaves."""

_BROKEN_OFF: Final = frozenset({SequenceStatus.ABORTED, SequenceStatus.FAILED})

TRANSITIONS: Final[Mapping[SequenceStatus, frozenset[SequenceStatus]]] = MappingProxyType(
    {
        SequenceStatus.WAITING: frozenset({SequenceStatus.AWAITING_KV, SequenceStatus.PREFILLING})
        | _BROKEN_OFF,
        SequenceStatus.AWAITING_KV: frozenset(
            {SequenceStatus.DECODING, SequenceStatus.PREFILLING, SequenceStatus.QUARANTINED}
        )
        | _BROKEN_OFF,
        # Only the fence leads back, so that nothing computes into blocks a transfer may write to.
        SequenceStatus.QUARANTINED: frozenset({SequenceStatus.AWAITING_KV}) | _BROKEN_OFF,
        SequenceStatus.PREFILLING: frozenset({SequenceStatus.DECODING, SequenceStatus.HELD})
        | _BROKEN_OFF,
        SequenceStatus.DECODING: frozenset({SequenceStatus.FINISHED}) | _BROKEN_OFF,
        SequenceStatus.HELD: frozenset({SequenceStatus.FINISHED}) | _BROKEN_OFF,
        SequenceStatus.FINISHED: frozenset(),
        SequenceStatus.ABORTED: frozenset(),
        SequenceStatus.FAILED: frozenset(),
    }
)
"""Every legal move; a state without moves is terminal."""


class IllegalTransitionError(RuntimeError):
    """A sequence was asked for something that its state does not allow: a bug of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """What to generate; never changes after submission."""

    sequence_id: SequenceId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    mode: SequenceMode = SequenceMode.GENERATE
    priority: int = 0
    """Lower is admitted earlier; waiting improves it."""
    deadline: float | None = None
    """Monotonic seconds after which the sequence fails; None never does."""
    cache_salt: str = field(default="", repr=False)
    """Prefix hits are only on KV of sequences with the same one; a tenant's secret."""
    num_resumed: int = 0
    """How many of the prompt's last tokens are output of an earlier attempt: computed like a
    prompt, counted as output."""

    @property
    def takes_hits(self) -> bool:
        """Whether prompt tokens may be found rather than computed.

        A prompt whose log-probabilities are asked for needs all of its rows.
        """
        return self.sampling.prompt_logprobs is None

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that blocks are reserved for at admission (INV-ADMIT)."""
        if self.mode is SequenceMode.PREFILL_ONLY:
            return len(self.prompt_token_ids)
        return len(self.prompt_token_ids) + self.sampling.max_tokens - self.num_resumed


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A sequence's mutable state; compared by identity."""

    spec: SequenceSpec
    token_ids: list[int]
    """Prompt, then output."""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    """Leading tokens whose KV is in blocks."""
    block_tables: tuple[BlockTable, ...] = ()
    """By group: reserved at admission; behind a sliding window, moved on since then."""
    hits_aside: tuple[tuple[BlockId, ...], ...] = ()
    """By group, while KV is awaited: blocks of the prefix hit before the table, which nobody looks
    at once the KV has arrived, and which computing the prompt here begins with."""
    first_tokens: tuple[int, ...] = ()
    """By group, if KV has arrived: the first token that has any. That is maybe not the first one of
    the table's first block, which is then of no use to others; empty where the tables say all."""
    num_used_blocks: int = 0
    """Leading blocks that hold KV, or held it before they were given up."""
    chain: KeyChain | None = None
    """Keys of its full blocks; None where nothing is cached."""
    num_stored_blocks: int = 0
    """Leading blocks that were found in the prefix cache or entered there."""
    num_hit_tokens: int = 0
    """Prefix hit: leading prompt tokens whose KV was found rather than computed."""
    admission: int = 0
    """Number of its admission: older ones prefill first."""
    token_counts: TokenCounts | None = None
    """Of token_ids, where the sampling has penalties."""

    @classmethod
    def from_spec(cls, spec: SequenceSpec) -> Sequence:
        """A waiting sequence that holds nothing."""
        num_prompt = len(spec.prompt_token_ids) - spec.num_resumed
        sequence = cls(spec=spec, token_ids=list(spec.prompt_token_ids))
        if spec.sampling.has_penalties:
            sequence.token_counts = TokenCounts(spec.prompt_token_ids[:num_prompt])
            for token_id in spec.prompt_token_ids[num_prompt:]:
                sequence.token_counts.add(token_id)
        return sequence

    @property
    def sequence_id(self) -> SequenceId:
        """The id that events and the runner use."""
        return self.spec.sequence_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens to compute before the first one is sampled here."""
        return len(self.spec.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output so far, a stop token and an earlier attempt's output included."""
        return len(self.token_ids) - len(self.spec.prompt_token_ids) + self.spec.num_resumed

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.token_ids.append(token_id)
        if self.token_counts is not None:
            self.token_counts.add(token_id)

    @property
    def block_ids(self) -> tuple[BlockId, ...]:
        """Every block that it holds; the groups that see everything, which are the first, last.

        A release goes backwards: of a text that nobody holds any more those blocks go first, and
        take with them what is of no use without them.
        """
        held = (*self.hits_aside, *(table.block_ids for table in reversed(self.block_tables)))
        return tuple(block_id for block_ids in held for block_id in block_ids)

    @property
    def hit_ids(self) -> tuple[BlockId, ...]:
        """While KV is awaited: the blocks of its prefix hit, which no transfer writes to."""
        aside = tuple(block_id for block_ids in self.hits_aside for block_id in block_ids)
        return aside + self.cut(0, self.num_used_blocks)

    @property
    def unused_blocks(self) -> tuple[BlockId, ...]:
        """Blocks that hold no KV yet."""
        num_used = self.num_used_blocks
        cuts = (table.cut(num_used, table.end) for table in self.block_tables)
        return tuple(block_id for cut in cuts for block_id in cut)

    def cut(self, first: int, end: int) -> tuple[BlockId, ...]:
        """Blocks first, first + 1, ... end - 1 of every group, where it holds them."""
        cuts = (table.cut(first, end) for table in self.block_tables)
        return tuple(block_id for cut in cuts for block_id in cut)

    def move_to(self, status: SequenceStatus) -> None:
        """Take one step of `TRANSITIONS`; any other raises and changes nothing."""
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransitionError(
                f"sequence {self.sequence_id} is {self.status.value}: "
                f"it cannot become {status.value}"
            )
        self.status = status
