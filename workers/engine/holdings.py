"""Which blocks each sequence holds, from its admission until nobody can write to them any more.

The holdings turn what happens to a sequence into what happens to its blocks; the roster alone
calls them. A block of an ended sequence stays taken while the step in flight, or a transfer, may
still write to it (INV-FENCE).

A sequence has a block table for each group of layers. In a group with a sliding window it holds
only as many blocks as can be needed at once: when its next step is planned, it gives up what no
token to come can see, and takes as many blocks for the tokens ahead.

Here alone a sequence meets the prefix cache: what is found at admission is held in place of own
blocks, what fills up is stored. A block that is found is full, so that nobody writes to it: steps
write behind the computed tokens, transfers behind the prefix hit. There is a prefix cache only
where all layers are in one group, so that a hit is a run of blocks from the first on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kv_transfer.geometry import BlockId, KVGroup
from workers.engine.block_pool import BlockPool
from workers.engine.block_table import BlockTable, TableRules
from workers.engine.holdings_check import WITH_TRANSFER, check_blocks, check_fenced, check_owners
from workers.engine.prefix_cache import KeyChain, PrefixScope
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

        A step computes at most chunk_tokens tokens of a sequence.
        """
        rules = TableRules(groups=groups, block_size=pool.block_size, chunk_tokens=chunk_tokens)
        if scope is not None and (rules.has_sliding_window or len(groups) > 1):
            raise ValueError("there is no prefix cache for layers with a sliding window")
        self.pool = pool
        self._rules = rules
        self._has_sliding_window = rules.has_sliding_window
        self.num_queried_tokens = 0
        """Prompt tokens of the sequences that were admitted with a look at the cache."""
        self.num_hit_tokens = 0
        """Those of them whose KV was there."""
        self._scope = scope
        self._in_step: frozenset[SequenceId] = frozenset()
        # Blocks of ended sequences that the step in flight, or a transfer, may still write to.
        self._until_commit: dict[SequenceId, tuple[BlockId, ...]] = {}
        self._until_fence: dict[SequenceId, tuple[BlockId, ...]] = {}

    def remembers(self, sequence_id: SequenceId) -> bool:
        """Whether blocks, or rows of the step in flight, go by the id of a sequence."""
        return sequence_id in self._until_fence or sequence_id in self._in_step

    # -- in -------------------------------------------------------------------------------------

    def open_chain(self, sequence: Sequence) -> None:
        """Name the full blocks of a new sequence's prompt."""
        if self._scope is not None:
            sequence.chain = self._scope.chain(sequence.spec.cache_salt)
            num_full = sequence.num_prompt_tokens // self.pool.block_size
            sequence.chain.extend(sequence.token_ids, num_full)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether `take` would succeed."""
        hits = self._find(sequence, 0)
        return self.pool.fits(self.num_blocks(sequence) - len(hits), hits=hits)

    def num_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence holds at once at most, all groups (INV-ADMIT)."""
        return sum(self._rules.max_blocks(sequence.spec.num_reserved_tokens))

    def take(self, sequence: Sequence) -> bool:
        """Take every block that the sequence can ever need (INV-ADMIT), or none.

        The first of them are its prefix hit: blocks that hold its KV already.
        """
        hits = self._find(sequence, 0)
        block_ids = self.pool.reserve(self.num_blocks(sequence) - len(hits), hits=hits)
        if block_ids is None:
            return False
        is_awaited = sequence.spec.mode is SequenceMode.AWAIT_KV
        sequence.block_tables = self._rules.deal(
            block_ids,
            sequence.spec.num_reserved_tokens,
            position=sequence.num_prompt_tokens if is_awaited else 0,
        )
        if _looks_up(sequence):
            self.num_queried_tokens += sequence.num_prompt_tokens
        self._add_hit(sequence, len(hits))
        return True

    # -- what is computed -----------------------------------------------------------------------

    def catch_up(self, sequence: Sequence) -> None:
        """Take over what others have computed of the prompt since the sequence was admitted.

        To be called before a chunk of it is planned. Requests that come together and begin alike
        compute their beginning once.
        """
        index, rest = divmod(sequence.num_computed, self.pool.block_size)
        if rest or not self._follows(sequence, index):
            return
        found = self._find(sequence, index)
        own = sequence.block_tables[0].block_ids[index:]
        for block_id, present in zip(own, found, strict=False):
            self.pool.swap(block_id, present)
        _replace(sequence, index, found)
        self._add_hit(sequence, len(found))

    def move_on(self, sequence: Sequence) -> None:
        """Behind a sliding window, give up what no step to come sees; take blocks for the next.

        To be called when a step of the sequence is planned: nobody reads or writes its blocks
        then. It takes no more than it gives up, so that it never fails (INV-ADMIT).
        """
        if self._has_sliding_window:
            sequence.block_tables = tuple(
                self._move_on(sequence, group, table)
                for group, table in zip(self._rules.groups, sequence.block_tables, strict=True)
            )

    def computed(self, sequence: Sequence, num_computed: int) -> None:
        """The sequence's first num_computed tokens have KV now."""
        sequence.num_computed = num_computed
        num_used = self.pool.blocks_for(num_computed)
        if num_used > sequence.num_used_blocks:
            self.pool.mark_used(sequence.cut(sequence.num_used_blocks, num_used))
            sequence.num_used_blocks = num_used
        if sequence.chain is not None:
            self._store(sequence, sequence.chain)

    def distrust(self, sequence: Sequence) -> None:
        """The model gave nonsense after the sequence's KV: nobody else may find it."""
        self.pool.forget(sequence.cut(0, sequence.num_used_blocks))

    # -- transfers ------------------------------------------------------------------------------

    def quarantine(self, sequence: Sequence) -> None:
        """A transfer that failed may still write to the blocks behind the prefix hit."""
        self.pool.quarantine(sequence.unused_blocks)

    def unquarantine(self, sequence: Sequence) -> None:
        """No transfer writes to a live sequence's blocks any more."""
        self.pool.unquarantine(sequence.unused_blocks)

    def start_over(self, sequence: Sequence) -> None:
        """What a transfer was to bring is computed here instead, from the hit's end on."""
        sequence.block_tables = tuple(replace(table, start=0) for table in sequence.block_tables)

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
            self.pool.release(sequence.cut(0, sequence.num_used_blocks))
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

    def _needed(self, sequence: Sequence, group: KVGroup, position: int) -> tuple[int, int]:
        return self._rules.needed(
            group,
            sequence.spec.num_reserved_tokens,
            position=position,
            is_decoding=sequence.status is SequenceStatus.DECODING,
        )

    def _move_on(self, sequence: Sequence, group: KVGroup, table: BlockTable) -> BlockTable:
        first, end = self._needed(sequence, group, sequence.num_computed)
        if (first, end) == (table.start, table.end):
            return table
        given_up = table.cut(table.start, first) + table.cut(end, table.end)
        taken = self.pool.exchange(given_up, max(0, end - table.end))
        return BlockTable(start=first, block_ids=table.cut(first, end) + taken)

    def _find(self, sequence: Sequence, start: int) -> tuple[BlockId, ...]:
        """Blocks that hold the prompt's KV from block `start` on.

        Never the whole prompt: its last token is computed here, for what the model says after it.
        """
        if sequence.chain is None or not sequence.spec.takes_hits:
            return ()
        end = (sequence.num_prompt_tokens - 1) // self.pool.block_size
        return self.pool.cache.match(sequence.chain.keys[start:end])

    def _follows(self, sequence: Sequence, index: int) -> bool:
        """Whether the block before `index` is found as the one that the sequence holds.

        Only then may its next block be: whoever holds a block must hold those before it.
        """
        if sequence.chain is None:
            return False
        parent = sequence.chain.parent(index)
        if parent is None:
            return True
        return self.pool.cache.block_of(parent) == sequence.block_tables[0].block(index - 1)

    def _add_hit(self, sequence: Sequence, num_blocks: int) -> None:
        """So many more of the sequence's leading blocks were found rather than computed."""
        num_tokens = num_blocks * self.pool.block_size
        sequence.num_used_blocks += num_blocks
        sequence.num_stored_blocks += num_blocks
        sequence.num_computed += num_tokens
        sequence.num_hit_tokens += num_tokens
        self.num_hit_tokens += num_tokens

    def _store(self, sequence: Sequence, chain: KeyChain) -> None:
        """Let the blocks that have become full be found; of two equal ones the first stays.

        The table changes where there was one: before anybody is told what the new blocks hold.
        """
        start = sequence.num_stored_blocks
        num_full = sequence.num_computed // self.pool.block_size
        chain.extend(sequence.token_ids, num_full)
        for index in range(start, num_full):
            if not self._follows(sequence, index):
                return
            block_id = sequence.block_tables[0].block(index)
            stored = self.pool.store(block_id, chain.keys[index], chain.parent(index))
            if stored != block_id:
                _replace(sequence, index, (stored,))
            sequence.num_stored_blocks += 1


def _looks_up(sequence: Sequence) -> bool:
    return sequence.chain is not None and sequence.spec.takes_hits


def _replace(sequence: Sequence, start: int, block_ids: tuple[BlockId, ...]) -> None:
    """Hold other blocks from index `start` on, in the one group that prefixes are found for."""
    held = sequence.block_tables[0].block_ids
    replaced = (*held[:start], *block_ids, *held[start + len(block_ids) :])
    sequence.block_tables = (BlockTable(block_ids=replaced),)
