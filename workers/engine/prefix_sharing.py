"""Where sequences meet the prefix cache: what is found of each, and what it lets others find.

What is found at admission is held in place of own blocks, what fills up is stored in every group,
and what is given up behind a window stays to be found. A block that is found is full, so that
nobody writes to it: steps write behind the computed tokens, transfers behind the prefix hit.

`Holdings` takes the blocks that are found. Here one is exchanged only where it is stored and equals
an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from kv_transfer.geometry import BlockId
from workers.engine.block_pool import BlockPool
from workers.engine.block_table import BlockTable, TableRules
from workers.engine.prefix_cache import KeyChain, PrefixScope
from workers.engine.prefix_hit import hit_blocks, hit_end
from workers.engine.sequence import Sequence


class PrefixSharing:
    """Looks sequences up in the pool's prefix cache, and stores what they compute there."""

    def __init__(self, pool: BlockPool, rules: TableRules, scope: PrefixScope | None) -> None:
        """Without a scope nothing is stored, and nothing found."""
        self._pool = pool
        self._rules = rules
        self._scope = scope
        self.num_queried_tokens = 0
        """Prompt tokens of the sequences that were admitted with a look at the cache."""
        self.num_hit_tokens = 0
        """Those of them whose KV was there."""

    def open_chain(self, sequence: Sequence) -> None:
        """Name the full blocks of a new sequence's prompt."""
        if self._scope is not None:
            sequence.chain = self._scope.chain(sequence.spec.cache_salt)
            num_full = sequence.num_prompt_tokens // self._pool.block_size
            sequence.chain.extend(sequence.token_ids, num_full)

    def hit_end(self, sequence: Sequence, start: int) -> int:
        """Up to which block the prompt's KV is found, as far as it is needed from there on.

        Never the whole prompt: its last token is computed here, for what the model says after it.
        """
        if sequence.chain is None or not sequence.spec.takes_hits:
            return start
        end = (sequence.num_prompt_tokens - 1) // self._pool.block_size
        return hit_end(self._pool.cache, self._rules, sequence.chain.keys, start=start, end=end)

    def hit_blocks(
        self, sequence: Sequence, first_blocks: Ordered[int], end: int
    ) -> tuple[tuple[BlockId, ...], ...]:
        """By group, the blocks that were found, from the index in `first_blocks` to `end`."""
        if sequence.chain is None or end == 0:
            return ((),) * len(first_blocks)
        keys = sequence.chain.keys
        return hit_blocks(self._pool.cache, keys, first_blocks=first_blocks, end=end)

    def looked_up(self, sequence: Sequence, num_blocks: int) -> None:
        """The sequence was admitted, with so many leading blocks that were found."""
        if sequence.chain is not None and sequence.spec.takes_hits:
            self.num_queried_tokens += sequence.num_prompt_tokens
        self.add_hit(sequence, num_blocks)

    def add_hit(self, sequence: Sequence, num_blocks: int) -> None:
        """So many more of the sequence's leading blocks were found rather than computed."""
        num_tokens = num_blocks * self._pool.block_size
        sequence.num_used_blocks += num_blocks
        sequence.num_stored_blocks += num_blocks
        sequence.num_computed += num_tokens
        sequence.num_hit_tokens += num_tokens
        self.num_hit_tokens += num_tokens

    def more_hits(self, sequence: Sequence) -> range | None:
        """Blocks behind the computed tokens that have been stored since it was admitted."""
        index, rest = divmod(sequence.num_computed, self._pool.block_size)
        if rest or not self._follows(sequence, index):
            return None
        end = self.hit_end(sequence, index)
        return range(index, end) if end > index else None

    def store(self, sequence: Sequence) -> None:
        """Let the blocks that have become full be found; of two equal ones the first stays.

        The tables change where there was one: before anybody is told what the new blocks hold.
        """
        chain = sequence.chain
        if chain is None:
            return
        num_full = sequence.num_computed // self._pool.block_size
        chain.extend(sequence.token_ids, num_full)
        for index in range(sequence.num_stored_blocks, num_full):
            if not self._follows(sequence, index):
                return
            sequence.block_tables = tuple(
                self._store_block(table, chain, index, group)
                if self._is_whole(sequence, index, group)
                else table
                for group, table in enumerate(sequence.block_tables)
            )
            sequence.num_stored_blocks += 1

    def distrust(self, sequence: Sequence, live: Iterable[Sequence]) -> None:
        """The model gave nonsense after the sequence's KV: nobody else may find it.

        Nor what `live` sequences compute from it. Where all layers forget, nobody knows who has
        seen it: those that have computed anything then store nothing more.
        """
        self._pool.forget(sequence.cut(0, sequence.num_used_blocks))
        if not self._pool.cache.has_full_group:
            for other in live:
                if other.num_computed > 0:
                    other.chain = None

    def _follows(self, sequence: Sequence, index: int) -> bool:
        """Whether the block before `index` is found as the one that the sequence holds.

        Only then may its next block be: whoever holds a block must hold those before it. Where
        all layers forget, nobody holds them: the next block may be found as long as the sequence
        has keys.
        """
        if sequence.chain is None:
            return False
        parent = sequence.chain.parent(index)
        if parent is None or not self._pool.cache.has_full_group:
            return True
        return self._pool.cache.block_of(parent) == sequence.block_tables[0].block(index - 1)

    def _is_whole(self, sequence: Sequence, index: int, group: int) -> bool:
        """Whether a full block is there, all of it: what arrives begins behind the window."""
        if index < sequence.block_tables[group].start:
            return False
        first_token = sequence.first_tokens[group] if sequence.first_tokens else 0
        return index * self._pool.block_size >= first_token

    def _store_block(
        self, table: BlockTable, chain: KeyChain, index: int, group: int
    ) -> BlockTable:
        """Let one block be found."""
        block_id = table.block(index)
        stored = self._pool.store(block_id, chain.keys[index], chain.parent(index), group=group)
        return table if stored == block_id else table.with_block(index, stored)
