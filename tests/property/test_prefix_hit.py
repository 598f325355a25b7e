"""The hit over groups is the longest one with which computing could go on, whatever is cached."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.geometry import BlockId, KVGroup
from workers.engine.block_table import TableRules
from workers.engine.prefix_cache import BlockKey, PrefixCache
from workers.engine.prefix_hit import hit_blocks, hit_end

BLOCK_SIZE = 4
NUM_KEYS = 9
KEYS = [BlockKey(bytes((number,)) * 16) for number in range(NUM_KEYS)]


@st.composite
def caches(draw: st.DrawFn) -> tuple[PrefixCache, TableRules, list[set[int]]]:
    """A cache as eviction may leave it: no holes in full groups, no block without farther ones."""
    windows = draw(
        st.lists(st.sampled_from([None, 2, 4, 5, 6, 9, 13]), min_size=1, max_size=4).map(
            lambda kinds: sorted(kinds, key=lambda window: window is not None)
        )
    )
    present: dict[int | None, set[int]] = {}
    longest = (
        set(range(draw(st.integers(0, NUM_KEYS)))) if None in windows else set(range(NUM_KEYS))
    )
    left = longest
    for window in sorted({w for w in windows if w is not None}, reverse=True):
        left = present[window] = left & draw(st.sets(st.integers(0, NUM_KEYS - 1), min_size=3))
    present[None] = longest
    cache = PrefixCache(sliding_windows=windows)
    for group, window in enumerate(windows):
        for index in sorted(present[window]):
            parent = KEYS[index - 1] if index else None
            cache.store(BlockId(100 * group + index), KEYS[index], parent, group=group)
    groups = tuple(KVGroup(layers=(i,), sliding_window=w) for i, w in enumerate(windows))
    rules = TableRules(groups=groups, block_size=BLOCK_SIZE, chunk_tokens=4)
    return cache, rules, [present[window] for window in windows]


@given(caches(), st.integers(0, NUM_KEYS), st.integers(0, NUM_KEYS))
def test_hit_is_the_longest_that_every_group_can_go_on_from(given_cache, one, other):
    cache, rules, present = given_cache
    start, end = sorted((one, other))

    def can_go_on(boundary: int) -> bool:
        """Whether every token that one at the boundary sees, and start has not, is there."""
        position = boundary * BLOCK_SIZE
        for group, indexes in zip(rules.groups, present, strict=True):
            window = group.sliding_window or position + 1
            seen = range(max(0, position - window + 1), position)
            if any(p // BLOCK_SIZE not in indexes for p in seen if p >= start * BLOCK_SIZE):
                return False
        return True

    expected = max(b for b in range(start, end + 1) if b == start or can_go_on(b))
    assert hit_end(cache, rules, KEYS, start=start, end=end) == expected
    firsts = [max(start, g.first_block(expected * BLOCK_SIZE, BLOCK_SIZE)) for g in rules.groups]
    assert hit_blocks(cache, KEYS, first_blocks=firsts, end=expected) == tuple(
        tuple(100 * group + index for index in range(first, expected))
        for group, first in enumerate(firsts)
    )
