"""Which blocks each sequence holds, from its admission until nobody can write to them any more.

The holdings turn what happens to a sequence into what happens to its blocks; the roster alone
calls them. A block of an ended sequence stays taken while the step in flight, or a transfer, may
still write to it (INV-FENCE).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kv_transfer.geometry import BlockId
from workers.engine.block_pool import BlockPool, BlockState
from workers.engine.sequence import Sequence, SequenceStatus
from workers.engine.step import SequenceId

_WITH_TRANSFER: Final = frozenset({SequenceStatus.AWAITING_KV, SequenceStatus.QUARANTINED})
"""States in which a transfer may be writing to the sequence's blocks."""


class Holdings:
    """Takes blocks for sequences, follows what is computed into them, and gives them back."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._in_step: frozenset[SequenceId] = frozenset()
        # Blocks of ended sequences that the step in flight, or a transfer, may still write to.
        self._until_commit: dict[SequenceId, tuple[BlockId, ...]] = {}
        self._until_fence: dict[SequenceId, tuple[BlockId, ...]] = {}

    def remembers(self, sequence_id: SequenceId) -> bool:
        """Whether blocks, or rows of the step in flight, go by the id of a sequence."""
        return sequence_id in self._until_fence or sequence_id in self._in_step

    def has_room(self, sequence: Sequence) -> bool:
        """Whether `take` would succeed."""
        return self.pool.blocks_for(sequence.spec.num_reserved_tokens) <= self.pool.num_free

    def take(self, sequence: Sequence) -> bool:
        """Take every block that the sequence can ever need (INV-ADMIT), or none."""
        num_blocks = self.pool.blocks_for(sequence.spec.num_reserved_tokens)
        block_ids = self.pool.reserve(num_blocks)
        if block_ids is None:
            return False
        sequence.block_ids = block_ids
        return True

    def computed(self, sequence: Sequence, num_computed: int) -> None:
        """The sequence's first num_computed tokens have KV now."""
        sequence.num_computed = num_computed
        num_used = self.pool.blocks_for(num_computed)
        if num_used > sequence.num_used_blocks:
            self.pool.mark_used(sequence.block_ids[sequence.num_used_blocks : num_used])
            sequence.num_used_blocks = num_used

    # -- transfers ------------------------------------------------------------------------------

    def quarantine(self, sequence: Sequence) -> None:
        """A transfer that failed may still write to the sequence's blocks."""
        self.pool.quarantine(sequence.block_ids)

    def unquarantine(self, sequence: Sequence) -> None:
        """No transfer writes to a live sequence's blocks any more."""
        self.pool.unquarantine(sequence.block_ids)

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
        if before in _WITH_TRANSFER:
            if before is SequenceStatus.AWAITING_KV:
                self.pool.quarantine(block_ids)
            self._until_fence[sequence_id] = block_ids
        elif sequence_id in self._in_step:
            self._until_commit[sequence_id] = block_ids
        else:
            self.pool.release(block_ids)

    # -- self-check -----------------------------------------------------------------------------

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError, with its id, if an invariant does not hold for live sequences."""
        self.pool.check_invariants()
        live = list(sequences)
        self._check_owners(live)
        for sequence in live:
            self._check_blocks(sequence)

    def _check_owners(self, live: list[Sequence]) -> None:
        """Every taken block has exactly one owner."""
        owned = [block_id for sequence in live for block_id in sequence.block_ids]
        for block_ids in (*self._until_commit.values(), *self._until_fence.values()):
            owned.extend(block_ids)
        taken = self.pool.num_blocks - self.pool.num_free
        assert len(owned) == len(set(owned)) == taken, (
            f"INV-CONSERVE: {taken} blocks are taken, {len(set(owned))} have an owner, "
            f"{len(owned) - len(set(owned))} have a second one"
        )
        fenced = [block_id for ids in self._until_fence.values() for block_id in ids]
        assert self.pool.states(fenced) == _repeat(BlockState.QUARANTINED, len(fenced)), (
            "INV-FENCE: a block of an ended sequence left quarantine before the fence"
        )

    def _check_blocks(self, sequence: Sequence) -> None:
        """A sequence holds what was reserved, each block in the state that its tokens imply."""
        if sequence.status is SequenceStatus.WAITING:
            assert not sequence.block_ids, "INV-ADMIT: a waiting sequence holds blocks"
            return
        reserved = self.pool.blocks_for(sequence.spec.num_reserved_tokens)
        assert len(sequence.block_ids) == reserved, (
            f"INV-ADMIT: sequence {sequence.sequence_id} holds {len(sequence.block_ids)} blocks, "
            f"reserved were {reserved}"
        )
        is_quarantined = sequence.status is SequenceStatus.QUARANTINED
        rest = BlockState.QUARANTINED if is_quarantined else BlockState.RESERVED
        num_used = self.pool.blocks_for(sequence.num_computed)
        expected = _repeat(BlockState.USED, num_used) + _repeat(rest, reserved - num_used)
        assert self.pool.states(sequence.block_ids) == expected, (
            f"INV-CONSERVE: blocks of a {sequence.status.value} sequence with "
            f"{sequence.num_computed} computed tokens are {self.pool.states(sequence.block_ids)!r}"
        )


def _repeat(state: BlockState, num_blocks: int) -> bytes:
    return bytes((state,)) * num_blocks
