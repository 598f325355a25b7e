"""Which blocks of one hand-off have arrived (INV-COVER).

A block carries all layers of its group, so one mark per block is enough; a transport that moves
layer ranges would add the range to `mark` and keep everything else.
"""

from __future__ import annotations

from kv_transfer.geometry import LogicalBlock, ceil_div, group_and_index, logical_block
from kv_transfer.handoff import GrantedBlock
from kv_transfer.transport import CorruptTransferError


class Coverage:
    """Counts landed blocks against exactly the range that the prompt needs."""

    def __init__(
        self, *, num_tokens: int, block_size: int, first_blocks: tuple[int, ...] = (0,)
    ) -> None:
        """Expect the blocks of `num_tokens` tokens, all of them full but maybe the last.

        In each group from the index in `first_blocks` on: those before it are there already (a
        prefix hit) or nobody sees them any more (a sliding window), and must not land.
        """
        if num_tokens < 1 or block_size < 1:
            raise ValueError(
                f"num_tokens {num_tokens} and block_size {block_size} must be positive"
            )
        if not first_blocks or not all(0 <= i * block_size < num_tokens for i in first_blocks):
            raise ValueError(
                f"first_blocks {first_blocks} of {block_size} tokens leave nothing of "
                f"{num_tokens} tokens to land"
            )
        self._num_tokens = num_tokens
        self._block_size = block_size
        end = ceil_div(num_tokens, block_size)
        self._has_landed: dict[LogicalBlock, bool] = {
            logical_block(group, index): False
            for group, first in enumerate(first_blocks)
            for index in range(first, end)
        }
        self._tokens_missing = sum(map(self.valid_tokens, self._has_landed))
        self._blocks_landed = 0

    @property
    def expected(self) -> tuple[LogicalBlock, ...]:
        """The blocks that must land, group by group in the order of the tokens."""
        return tuple(self._has_landed)

    @property
    def expected_blocks(self) -> int:
        """Blocks that must land."""
        return len(self._has_landed)

    @property
    def blocks_landed(self) -> int:
        """Distinct blocks that have landed."""
        return self._blocks_landed

    @property
    def is_full(self) -> bool:
        """Whether exactly the expected blocks, with exactly the expected tokens, have landed."""
        return self._blocks_landed == self.expected_blocks and self._tokens_missing == 0

    def valid_tokens(self, logical: LogicalBlock) -> int:
        """Tokens that an expected block must carry."""
        _, index = group_and_index(logical)
        return min(self._block_size, self._num_tokens - index * self._block_size)

    def check(self, block: GrantedBlock) -> None:
        """Refuse a block outside the expected range or with another number of tokens.

        Raises `CorruptTransferError`.
        """
        if block.logical not in self._has_landed:
            group, index = group_and_index(block.logical)
            raise CorruptTransferError(
                f"logical block {index} of group {group} is outside the {self.expected_blocks} "
                "expected"
            )
        expected = self.valid_tokens(block.logical)
        if block.valid_tokens != expected:
            raise CorruptTransferError(
                f"logical block {block.logical} has {block.valid_tokens} tokens, needed {expected}"
            )

    def mark(self, block: GrantedBlock) -> None:
        """Record that a block's bytes are in place.

        Raises `CorruptTransferError` and changes nothing if it was not to be expected.
        """
        self.check(block)
        if self._has_landed[block.logical]:
            raise CorruptTransferError(f"logical block {block.logical} landed twice")
        self._has_landed[block.logical] = True
        self._blocks_landed += 1
        self._tokens_missing -= block.valid_tokens

    def check_invariants(self) -> None:
        """Assert that the counts are those of the marks."""
        assert self._blocks_landed == sum(self._has_landed.values()), "INV-COVER: block count"
        missing = [logical for logical, landed in self._has_landed.items() if not landed]
        assert self._tokens_missing == sum(map(self.valid_tokens, missing)), (
            "INV-COVER: token count"
        )
