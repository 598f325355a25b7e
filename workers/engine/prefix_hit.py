"""How much of a prompt the prefix cache holds, over all groups of layers.

A hit ends at the end of a block. To compute from there on takes, in a group that sees everything,
every block before; behind a sliding window only those that the next token sees anything of, by
the same rule by which sequences give up the others (`KVGroup.first_block`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.geometry import BlockId, KVGroup
from workers.engine.block_table import TableRules
from workers.engine.prefix_cache import BlockKey, PrefixCache


def hit_end(
    cache: PrefixCache, rules: TableRules, keys: Sequence[BlockKey], *, start: int, end: int
) -> int:
    """The largest number of leading blocks, `end` at most, with which one could go on.

    Those before `start` are the caller's already; `start` if no more is found. From a block that
    is missing it goes on to the boundary before it, so that it looks at each key about once.
    """
    if cache.has_full_group:  # which is the first
        end = start + len(cache.match(keys[start:end]))
    # Groups that see equally far have the same keys: one of each kind tells.
    windowed = [(layers, group) for group, layers in _one_of_each_window(rules).items()]
    while end > start:
        missing = _last_missing(cache, windowed, rules.block_size, keys, start=start, end=end)
        if missing is None:
            break
        end = missing
    return end


def hit_blocks(
    cache: PrefixCache, keys: Sequence[BlockKey], *, first_blocks: Sequence[int], end: int
) -> tuple[tuple[BlockId, ...], ...]:
    """By group, the blocks from the index in `first_blocks` to the hit's end."""
    return tuple(
        cache.match(keys[first:end], group=group) for group, first in enumerate(first_blocks)
    )


def _one_of_each_window(rules: TableRules) -> dict[int, KVGroup]:
    by_window = {layers.sliding_window: group for group, layers in enumerate(rules.groups)}
    return {group: rules.groups[group] for window, group in by_window.items() if window is not None}


def _last_missing(
    cache: PrefixCache,
    windowed: Sequence[tuple[KVGroup, int]],
    block_size: int,
    keys: Sequence[BlockKey],
    *,
    start: int,
    end: int,
) -> int | None:
    """The last block that going on from `end` would see in some group and that is not there."""
    firsts = [
        (max(start, layers.first_block(end * block_size, block_size)), group)
        for layers, group in windowed
    ]
    for index in range(end - 1, min(firsts, default=(end, 0))[0] - 1, -1):
        for first, group in firsts:
            if index >= first and cache.block_of(keys[index], group=group) is None:
                return index
    return None
