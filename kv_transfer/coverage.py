"""Which blocks of one hand-off have arrived (INV-COVER).

A block carries all layers, so one mark per block is enough; a transport that moves layer ranges
would add the range to `mark` and keep everything else.
"""

from __future__ import annotations

from kv_transfer.geometry import LogicalBlock, ceil_div
from kv_transfer.handoff import GrantedBlock
from kv_transfer.transport import CorruptTransferError


class Coverage:
    """Counts landed blocks against exactly the range that the prompt needs."""

    def __init__(self, *, num_tokens: int, block_size: int, skip_blocks: int = 0) -> None:
        """Expect the blocks of `num_tokens` tokens, all of them full but maybe the last.

        The first `skip_blocks` of them are there already (a prefix hit) and must not land.
        """
        if num_tokens < 1 or block_size < 1:
            raise ValueError(
                f"num_tokens {num_tokens} and block_size {block_size} must be positive"
            )
        if not 0 <= skip_blocks * block_size < num_tokens:
            raise ValueError(
                f"skip_blocks {skip_blocks} of {block_size} tokens leave nothing of "
                f"{num_tokens} tokens to land"
            )
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._skip_blocks = skip_blocks
        self._landed = bytearray(ceil_div(num_tokens, block_size) - skip_blocks)
        self._blocks_landed = 0
        self._tokens_landed = 0

    @property
    def expected_blocks(self) -> int:
        """Blocks that must land."""
        return len(self._landed)

    @property
    def blocks_landed(self) -> int:
        """Distinct blocks that have landed."""
        return self._blocks_landed

    @property
    def is_full(self) -> bool:
        """Whether exactly the expected blocks, with exactly the expected tokens, have landed."""
        missing_tokens = self._num_tokens - self._skip_blocks * self._block_size
        return self._blocks_landed == len(self._landed) and self._tokens_landed == missing_tokens

    def valid_tokens(self, logical: LogicalBlock) -> int:
        """Tokens that an expected block must carry."""
        return min(self._block_size, self._num_tokens - logical * self._block_size)

    def check(self, block: GrantedBlock) -> None:
        """Refuse a block outside the expected range or with another number of tokens.

        Raises `CorruptTransferError`.
        """
        if not 0 <= block.logical - self._skip_blocks < len(self._landed):
            raise CorruptTransferError(
                f"logical block {block.logical} is outside the {len(self._landed)} expected "
                f"from {self._skip_blocks} on"
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
        index = block.logical - self._skip_blocks
        if self._landed[index]:
            raise CorruptTransferError(f"logical block {block.logical} landed twice")
        self._landed[index] = 1
        self._blocks_landed += 1
        self._tokens_landed += block.valid_tokens

    def check_invariants(self) -> None:
        """Assert that the counts are those of the bitmap."""
        assert self._blocks_landed == sum(self._landed), "INV-COVER: block count"
        tokens = sum(
            self.valid_tokens(LogicalBlock(logical))
            for logical, landed in enumerate(self._landed, self._skip_blocks)
            if landed
        )
        assert self._tokens_landed == tokens, "INV-COVER: token count"
