"""Which blocks each sequence holds, from its admission until nobody can write to them any more.

The holdings turn what happens to a sequence into what happens to its blocks; roster and scheduler
alone call them. A block of an ended sequence stays taken while the step in flight, or a transfer,
may still write to it (INV-FENCE).

A sequence has a block table for each group of layers. In a group with a sliding window it holds
only as many blocks as can be needed at once: when its next step is planned, it gives up what no
token to come can see, and takes as many blocks for the tokens ahead.

What is found of a sequence in the prefix cache (`PrefixSharing`) is held in place of own blocks.

A sequence that awaits KV may need two things of a hit: what its output will see, beside what
arrives, and, should nothing arrive, what its prompt sees from the hit's end on. It holds both
until one of them is settled.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import islice

from kv_transfer.geometry import BlockId, KVGroup
from workers.engine.block_pool import BlockPool
from workers.engine.block_table import BlockTable, Claim, TableRules
from workers.engine.holdings_check import WITH_TRANSFER, check_blocks, check_fenced, check_owners
from workers.engine.prefix_cache import PrefixScope
from workers.engine.prefix_sharing import PrefixSharing
from workers.engine.sequence import Sequence, SequenceMode, SequenceStatus
from workers.engine.step import SequenceId


class Holdings:
    """Takes blocks for sequences, follows what is computed into them, and gives them back."""

    def __init__(
        self,
        pool: BlockPool,
        scope: PrefixScope | None,
        *,
        groups: tuple[KVGroup, ...],
        chunk_tokens: int,
    ) -> None:
        """Without a scope nothing is stored, and nothing found.

        A step computes at most chunk_tokens tokens of a sequence. ValueError if the pool was made
        for other groups.
        """
        windows = tuple(group.sliding_window for group in groups)
        if windows != pool.sliding_windows:
            raise ValueError(
                f"the groups' sliding windows are {windows}, the pool's {pool.sliding_windows}"
            )
        self.pool = pool
        self._rules = TableRules(
            groups=groups, block_size=pool.block_size, chunk_tokens=chunk_tokens
        )
        self._has_sliding_window = self._rules.has_sliding_window
        self.sharing = PrefixSharing(pool, self._rules, scope)
        """What is found of sequences in the prefix cache, and stored there."""
        self._in_step: frozenset[SequenceId] = frozenset()
        # Blocks of ended sequences that the step in flight, or a transfer, may still write to.
        self._until_commit: dict[SequenceId, tuple[BlockId, ...]] = {}
        self._until_fence: dict[SequenceId, tuple[BlockId, ...]] = {}

    def remembers(self, sequence_id: SequenceId) -> bool:
        """Whether blocks, or rows of the step in flight, go by the id of a sequence."""
        return sequence_id in self._until_fence or sequence_id in self._in_step

    # -- in -------------------------------------------------------------------------------------

    def has_room(self, sequence: Sequence) -> bool:
        """Whether `take` would succeed."""
        wish = self._wish(sequence)
        return self.pool.fits(wish.num_own, hits=wish.hit_ids)

    def num_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence holds at once at most, all groups (INV-ADMIT)."""
        return sum(self._rules.max_blocks(sequence.spec.num_reserved_tokens))

    def take(self, sequence: Sequence) -> bool:
        """Take every block that the sequence can ever need at once (INV-ADMIT), or none.

        The first of them are its prefix hit: blocks that hold its KV already.
        """
        wish = self._wish(sequence)
        block_ids = self.pool.reserve(wish.num_own, hits=wish.hit_ids)
        if block_ids is None:
            return False
        own = iter(block_ids[len(wish.hit_ids) :])
        tables, aside = [], []
        for claim, hits in zip(wish.claims, wish.hits, strict=True):
            num_aside = min(len(hits), claim.start - claim.hit_start)
            aside.append(hits[:num_aside])
            taken = (*hits[num_aside:], *islice(own, claim.num_own))
            tables.append(BlockTable(start=claim.start, block_ids=taken))
        sequence.block_tables = tuple(tables)
        sequence.hits_aside = tuple(aside) if _is_awaited(sequence) else ()
        self.sharing.looked_up(sequence, wish.hit_end)
        return True

    # -- what is computed -----------------------------------------------------------------------

    def catch_up(self, sequence: Sequence) -> None:
        """Take over what others have computed of the prompt since the sequence was admitted.

        To be called before a chunk of it is planned. Requests that come together and begin alike
        compute their beginning once.
        """
        found = self.sharing.more_hits(sequence)
        if found is not None:
            self._take_over(sequence, found)
            self.sharing.add_hit(sequence, len(found))

    def move_on(self, sequence: Sequence) -> None:
        """Behind a sliding window, give up what no step to come sees; take blocks for the next.

        To be called when a step of the sequence is planned: nobody reads or writes its blocks
        then. It takes no more than it gives up, so that it never fails (INV-ADMIT).
        """
        if not self._has_sliding_window:
            return
        extents = self._needed(sequence, sequence.num_computed)
        if all(
            (table.start, table.end) == extent
            for table, extent in zip(sequence.block_tables, extents, strict=True)
        ):
            return
        given_up: list[BlockId] = []
        for table, (first, end) in zip(sequence.block_tables, extents, strict=True):
            given_up += table.cut(table.start, first) + table.cut(end, table.end)
        kept = [
            BlockTable(start=first, block_ids=table.cut(first, end))
            for table, (first, end) in zip(sequence.block_tables, extents, strict=True)
        ]
        self._exchange(sequence, given_up, kept, extents)

    def computed(self, sequence: Sequence, num_computed: int) -> None:
        """The sequence's first num_computed tokens have KV now."""
        sequence.num_computed = num_computed
        num_used = self.pool.blocks_for(num_computed)
        if num_used > sequence.num_used_blocks:
            self.pool.mark_used(sequence.cut(sequence.num_used_blocks, num_used))
            sequence.num_used_blocks = num_used
        self.sharing.store(sequence)

    # -- transfers ------------------------------------------------------------------------------

    def quarantine(self, sequence: Sequence) -> None:
        """A transfer that failed may still write to the blocks behind the prefix hit."""
        self.pool.quarantine(sequence.unused_blocks)

    def unquarantine(self, sequence: Sequence) -> None:
        """No transfer writes to a live sequence's blocks any more."""
        self.pool.unquarantine(sequence.unused_blocks)

    def landed(self, sequence: Sequence, first_tokens: tuple[int, ...]) -> None:
        """The prompt's KV has arrived, proved intact, in each group from its first token on.

        Empty is all that the tables have place for.
        """
        sequence.first_tokens = first_tokens
        self.pool.release([block_id for block_ids in sequence.hits_aside for block_id in block_ids])
        sequence.hits_aside = ()
        self.computed(sequence, sequence.num_prompt_tokens)

    def start_over(self, sequence: Sequence) -> None:
        """What a transfer was to bring is computed here instead, from the hit's end on."""
        tables = []
        for aside, table, (first, end) in zip(
            sequence.hits_aside,
            sequence.block_tables,
            self._needed(sequence, sequence.num_computed),
            strict=True,
        ):
            held = (*aside, *table.block_ids)
            self.pool.release(held[end - first :])
            tables.append(BlockTable(start=first, block_ids=held[: end - first]))
        sequence.block_tables, sequence.hits_aside = tuple(tables), ()

    def fence(self, sequence_id: SequenceId) -> None:
        """No transfer writes to an ended sequence's blocks any more; free them, if it left any."""
        block_ids = self._until_fence.pop(sequence_id, ())
        self.pool.unquarantine(block_ids)
        self.pool.release(block_ids)

    # -- steps ----------------------------------------------------------------------------------

    def take_off(self, sequence_ids: Iterable[SequenceId]) -> None:
        """A step writes to these sequences' blocks from now on."""
        self._in_step = frozenset(sequence_ids)

    def land(self) -> None:
        """The step is over: nothing writes to the blocks of what ended during it any more."""
        self._in_step = frozenset()
        for block_ids in self._until_commit.values():
            self.pool.release(block_ids)
        self._until_commit.clear()

    # -- out ------------------------------------------------------------------------------------

    def give_back(self, sequence: Sequence, before: SequenceStatus) -> None:
        """Free the blocks of a sequence that ended as soon as nobody can write to them."""
        sequence_id, block_ids = sequence.sequence_id, sequence.block_ids
        if before in WITH_TRANSFER:
            if before is SequenceStatus.AWAITING_KV:
                self.quarantine(sequence)
            self.pool.release(sequence.hit_ids)
            self._until_fence[sequence_id] = sequence.unused_blocks
        elif sequence_id in self._in_step:
            self._until_commit[sequence_id] = block_ids
        else:
            self.pool.release(block_ids)

    # -- self-check -----------------------------------------------------------------------------

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError, with its id, if an invariant does not hold for live sequences."""
        self.pool.check_invariants()
        live = list(sequences)
        lingering = (*self._until_commit.values(), *self._until_fence.values())
        check_owners(self.pool, live, lingering)
        check_fenced(self.pool, self._until_fence.values())
        for sequence in live:
            check_blocks(self.pool, self._rules, sequence)

    # -- the parts ------------------------------------------------------------------------------

    def _needed(self, sequence: Sequence, position: int) -> list[tuple[int, int]]:
        """By group, (first block, end) of what a step needs that begins at a position."""
        return [
            self._rules.needed(
                group,
                sequence.spec.num_reserved_tokens,
                position=position,
                is_decoding=sequence.status is SequenceStatus.DECODING,
            )
            for group in self._rules.groups
        ]

    def _exchange(
        self,
        sequence: Sequence,
        given_up: Ordered[BlockId],
        kept: Ordered[BlockTable],
        extents: Ordered[tuple[int, int]],
    ) -> None:
        """Give up blocks and complete the tables to their extents, in all groups at once.

        A block that is evicted for the room takes others of its key with it: before that, all
        that is given up must have been let go.
        """
        missing = [end - table.end for table, (_, end) in zip(kept, extents, strict=True)]
        taken = iter(self.pool.exchange(given_up, sum(missing)))
        sequence.block_tables = tuple(
            replace(table, block_ids=(*table.block_ids, *islice(taken, num_missing)))
            for table, num_missing in zip(kept, missing, strict=True)
        )

    # -- hits -----------------------------------------------------------------------------------

    def _wish(self, sequence: Sequence) -> _Wish:
        """What to take for a sequence: with its hit, if the pool could ever hold all of that."""
        wish = self._wish_with(sequence, self.sharing.hit_end(sequence, 0))
        # A hit is held beside what a transfer brings, which may be more than was reserved for.
        if wish.num_own + len(wish.hit_ids) > self.pool.num_blocks:
            return self._wish_with(sequence, 0)
        return wish

    def _wish_with(self, sequence: Sequence, hit_end: int) -> _Wish:
        claims = self._rules.claims(
            sequence.spec.num_reserved_tokens,
            hit_end=hit_end,
            landing=sequence.num_prompt_tokens if _is_awaited(sequence) else None,
        )
        first_blocks = [claim.hit_start for claim in claims]
        return _Wish(
            claims=claims,
            hit_end=hit_end,
            hits=self.sharing.hit_blocks(sequence, first_blocks, hit_end),
        )

    def _take_over(self, sequence: Sequence, hit: range) -> None:
        """Hold blocks as they were found, in place of own ones without KV."""
        index, end = hit.start, hit.stop
        extents = self._needed(sequence, end * self.pool.block_size)
        found = self.sharing.hit_blocks(sequence, [max(index, first) for first, _ in extents], end)
        self.pool.share([block_id for block_ids in found for block_id in block_ids])
        given_up: list[BlockId] = []
        kept = []
        for table, hits, extent in zip(sequence.block_tables, found, extents, strict=True):
            first, table_end = extent
            spare = table.cut(index, table.end)
            given_up += (*table.cut(table.start, min(first, index)), *spare[table_end - end :])
            block_ids = (*table.cut(first, index), *hits, *spare[: table_end - end])
            kept.append(BlockTable(start=first, block_ids=block_ids))
        self._exchange(sequence, given_up, kept, extents)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What is to be taken for a sequence."""

    claims: tuple[Claim, ...]
    """By group."""
    hit_end: int
    """Leading blocks that are found."""
    hits: tuple[tuple[BlockId, ...], ...]
    """By group, those of them that are needed."""

    @property
    def hit_ids(self) -> tuple[BlockId, ...]:
        """The hits of all groups."""
        return tuple(block_id for hits in self.hits for block_id in hits)

    @property
    def num_own(self) -> int:
        """Blocks to reserve beside the hits, all groups."""
        return sum(claim.num_own for claim in self.claims)


def _is_awaited(sequence: Sequence) -> bool:
    return sequence.spec.mode is SequenceMode.AWAIT_KV
