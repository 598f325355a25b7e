"""Any order of holders that begin alike, on a pool too small for them, against what each holds.

A dictionary remembers what every block holds and since which free it holds it, so that a hit on
other KV, a block given up under its holder, and a generation that moves for nothing all show.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.geometry import BlockId
from workers.engine.block_pool import BlockPool, BlockState
from workers.engine.prefix_cache import BlockEvicted, BlockKey, BlockStored, KeyChain, PrefixScope

NUM_BLOCKS = 8
BLOCK_SIZE = 2
SCOPE = PrefixScope(fingerprint="a model in a layout", block_size=BLOCK_SIZE)
TEXTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map("".join)
"""A letter is a block's tokens."""


@dataclass(slots=True, kw_only=True, eq=False)
class Holder:
    """A table of blocks, of which the first num_stored can be found."""

    salt: str
    text: str
    block_ids: list[BlockId]
    num_stored: int

    @property
    def chain(self) -> KeyChain:
        chain = SCOPE.chain(self.salt)
        chain.extend([ord(letter) for letter in self.text for _ in range(2)], len(self.text))
        return chain


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=2)
        self.pool.cache.follow()
        self.holders: list[Holder] = []
        self.contents: dict[BlockId, tuple[str, str, int]] = {}
        """Salt, text up to the block's end, and the block's generation when it was written."""
        self.told: dict[BlockKey, BlockKey | None] = {}
        """Keys that whoever follows the events believes in, with their parents."""

    @rule(salt=st.sampled_from(["", "x"]), text=TEXTS, extra=st.integers(1, 3))
    def hold(self, salt: str, text: str, extra: int) -> None:
        """Find what is there and reserve the rest."""
        holder = Holder(salt=salt, text=text, block_ids=[], num_stored=0)
        hits = self.pool.cache.match(holder.chain.keys[:-1])
        for index, block_id in enumerate(hits):
            written = salt, text[: index + 1], self.pool.generations[block_id]
            assert self.contents[block_id] == written, "a hit on other KV"
        before, generations = self.pool.counts(), list(self.pool.generations)
        num_blocks = len(text) - len(hits) + extra
        fits = self.pool.fits(num_blocks, hits=hits)
        table = self.pool.reserve(num_blocks, hits=hits)
        assert (table is not None) == fits
        if table is None:
            assert (self.pool.counts(), self.pool.generations) == (before, generations)
            return
        assert table[: len(hits)] == hits
        holder.block_ids, holder.num_stored = list(table), len(hits)
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Compute a holder's next block, and let it be found."""
        holder = data.draw(st.sampled_from(self.holders))
        index = holder.num_stored
        if index == len(holder.text):
            return
        own, chain = holder.block_ids[index], holder.chain
        self.pool.mark_used((own,))
        written = holder.salt, holder.text[: index + 1], self.pool.generations[own]
        present = self.pool.cache.block_of(chain.keys[index])
        stored = self.pool.store(own, chain.keys[index], chain.parent(index))
        assert stored == (own if present is None else present)
        if stored == own:
            self.contents[own] = written
        holder.block_ids[index] = stored
        holder.num_stored += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder.block_ids)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """A holder's KV is not to be trusted: all that hold some of it go."""
        holder = data.draw(st.sampled_from(self.holders))
        doomed = holder.block_ids[: holder.num_stored]
        self.pool.forget(doomed)
        for other in [h for h in self.holders if set(h.block_ids) & set(doomed)]:
            self.holders.remove(other)
            self.pool.release(other.block_ids)
        assert not any(self.pool.cache.is_keyed(block_id) for block_id in doomed)

    @invariant()
    def pool_is_consistent(self) -> None:
        self.pool.check_invariants()

    @invariant()
    def holders_are_counted(self) -> None:
        times = Counter(block_id for holder in self.holders for block_id in holder.block_ids)
        for block_id in map(BlockId, range(NUM_BLOCKS)):
            assert self.pool.num_holders(block_id) == times[block_id]
        assert self.pool.num_available == NUM_BLOCKS - len(times)

    @invariant()
    def generations_stay_while_kv_is_there(self) -> None:
        """INV-GEN: a block that is held or can be found is as it was written."""
        for holder in self.holders:
            for index in range(holder.num_stored):
                block_id = holder.block_ids[index]
                written = holder.salt, holder.text[: index + 1], self.pool.generations[block_id]
                assert self.contents[block_id] == written

    @invariant()
    def events_tell_what_can_be_found(self) -> None:
        taken = self.pool.cache.take_events()
        assert taken.num_lost == 0
        for event in taken.events:
            match event:
                case BlockStored():
                    assert event.parent is None or event.parent in self.told
                    self.told[event.key] = event.parent
                case BlockEvicted():
                    assert event.key not in self.told.values(), "a parent went before its child"
                    assert self.told.pop(event.key) == event.parent
        keyed = [block for block in range(NUM_BLOCKS) if self.pool.cache.is_keyed(BlockId(block))]
        assert len(keyed) == len(self.told)

    def teardown(self) -> None:
        """Whatever is left to be found goes when all of the room is needed."""
        for holder in self.holders:
            self.pool.release(holder.block_ids)
        assert self.pool.num_available == NUM_BLOCKS
        assert self.pool.reserve(NUM_BLOCKS) is not None
        assert self.pool.counts().reserved == NUM_BLOCKS
        assert set(self.pool.states(range(NUM_BLOCKS))) == {BlockState.RESERVED}


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_prefix_cache_in_any_order = CacheMachine.TestCase
