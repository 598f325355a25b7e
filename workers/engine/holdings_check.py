"""What must hold for the blocks of sequences, as assertions that name the invariant.

`Holdings` calls these with what it keeps; nothing is changed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from typing import Final

from kv_transfer.geometry import BlockId, KVGroup, ceil_div
from workers.engine.block_pool import BlockPool, BlockState
from workers.engine.block_table import BlockTable, TableRules
from workers.engine.sequence import Sequence, SequenceStatus

WITH_TRANSFER: Final = frozenset({SequenceStatus.AWAITING_KV, SequenceStatus.QUARANTINED})
"""States in which a transfer may be writing to the sequence's blocks."""


def check_owners(
    pool: BlockPool, live: Ordered[Sequence], lingering: Iterable[Ordered[BlockId]]
) -> None:
    """Every taken block has as many holders as it is named times.

    By live sequences, and by ended ones whose blocks are `lingering`.
    """
    named = Counter(block_id for sequence in live for block_id in sequence.block_ids)
    for block_ids in lingering:
        named.update(block_ids)
    taken = pool.num_blocks - pool.num_available
    assert len(named) == taken, (
        f"INV-CONSERVE: {taken} blocks are taken, {len(named)} have an owner"
    )
    for block_id, times in named.items():
        assert pool.num_holders(block_id) == times, (
            f"INV-CONSERVE: block {block_id} is named {times} times, "
            f"counted are {pool.num_holders(block_id)}"
        )


def check_fenced(pool: BlockPool, until_fence: Iterable[Ordered[BlockId]]) -> None:
    """What a transfer may still write to is in quarantine."""
    fenced = [block_id for block_ids in until_fence for block_id in block_ids]
    assert pool.states(fenced) == _repeat(BlockState.QUARANTINED, len(fenced)), (
        "INV-FENCE: a block of an ended sequence left quarantine before the fence"
    )


def check_blocks(pool: BlockPool, rules: TableRules, sequence: Sequence) -> None:
    """A sequence holds what was reserved, each block in the state that its tokens imply."""
    if sequence.status is SequenceStatus.WAITING:
        assert not sequence.block_tables, "INV-ADMIT: a waiting sequence holds blocks"
        return
    reserved = rules.max_blocks(sequence.spec.num_reserved_tokens)
    tables = zip(rules.groups, sequence.block_tables, reserved, strict=True)
    for group, table, max_blocks in tables:
        _check_extent(rules, sequence, group, table, max_blocks)
        _check_states(pool, sequence, table)
    _check_aside(pool, rules, sequence)


def _check_extent(
    rules: TableRules, sequence: Sequence, group: KVGroup, table: BlockTable, max_blocks: int
) -> None:
    """A table holds no more than was reserved, and all that the tokens to come need."""
    is_awaiting = sequence.status in WITH_TRANSFER
    first, end = rules.needed(
        group,
        sequence.spec.num_reserved_tokens,
        position=sequence.num_prompt_tokens if is_awaiting else sequence.num_computed,
        is_decoding=is_awaiting or sequence.status is SequenceStatus.DECODING,
    )
    assert end - first <= len(table.block_ids) <= max_blocks, (
        f"INV-ADMIT: sequence {sequence.sequence_id} holds {len(table.block_ids)} blocks of a "
        f"group, it needs {end - first}, reserved were {max_blocks}"
    )
    num_used = ceil_div(sequence.num_computed, rules.block_size)
    assert table.start <= first, (
        f"INV-ADMIT: sequence {sequence.sequence_id} gave up block {first} of a group, which "
        "its next token sees"
    )
    assert num_used <= table.end, (
        f"INV-ADMIT: sequence {sequence.sequence_id} has KV in {num_used} blocks of a group, "
        f"its table ends with {table.end}"
    )


def _check_aside(pool: BlockPool, rules: TableRules, sequence: Sequence) -> None:
    """While KV is awaited there is enough to compute the prompt here; afterwards nothing aside."""
    if sequence.status not in WITH_TRANSFER:
        assert not sequence.hits_aside, "INV-CONSERVE: a hit is held aside of what is computed"
        return
    for group, aside, table in zip(
        rules.groups, sequence.hits_aside, sequence.block_tables, strict=True
    ):
        assert pool.states(aside) == _repeat(BlockState.USED, len(aside)), (
            "INV-CONSERVE: a hit that is held aside has no KV"
        )
        first, end = rules.needed(
            group,
            sequence.spec.num_reserved_tokens,
            position=sequence.num_computed,
            is_decoding=False,
        )
        num_held = len(aside) + len(table.block_ids)
        assert num_held >= end - first, (
            f"INV-ADMIT: sequence {sequence.sequence_id} holds {num_held} blocks of a group, to "
            f"compute its prompt it needs {end - first}"
        )


def _check_states(pool: BlockPool, sequence: Sequence, table: BlockTable) -> None:
    is_quarantined = sequence.status is SequenceStatus.QUARANTINED
    rest = BlockState.QUARANTINED if is_quarantined else BlockState.RESERVED
    num_used = len(table.cut(0, pool.blocks_for(sequence.num_computed)))
    num_unused = len(table.block_ids) - num_used
    expected = _repeat(BlockState.USED, num_used) + _repeat(rest, num_unused)
    assert pool.states(table.block_ids) == expected, (
        f"INV-CONSERVE: blocks of a {sequence.status.value} sequence with "
        f"{sequence.num_computed} computed tokens are {pool.states(table.block_ids)!r}"
    )


def _repeat(state: BlockState, num_blocks: int) -> bytes:
    return bytes((state,)) * num_blocks
