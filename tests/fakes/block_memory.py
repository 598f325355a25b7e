"""A pool's bytes in a plain buffer, and the parts of a worker that hand-offs need."""

from __future__ import annotations

import random

from kv_transfer.geometry import BlockId, LogicalBlock, ceil_div
from kv_transfer.handoff import GrantedBlock, PeerInfo, TransferKey
from kv_transfer.shared_memory import SharedRegion
from kv_transfer.transport import MemoryKind


class ByteMemory:
    """`BlockMemory` in a region or a bytearray, with the generation counters of a pool."""

    kind: MemoryKind = "host"

    def __init__(self, num_blocks: int, bytes_per_block: int, *, shared: bool = False) -> None:
        size = num_blocks * bytes_per_block
        self.region = SharedRegion(size) if shared else None
        self._bytes = memoryview(bytearray(size)) if self.region is None else self.region.buffer
        self._bytes_per_block = bytes_per_block
        self.generations = [0] * num_blocks

    @property
    def bytes_per_block(self) -> int:
        return self._bytes_per_block

    @property
    def num_blocks(self) -> int:
        return len(self.generations)

    def block(self, block_id: BlockId) -> memoryview:
        start = block_id * self._bytes_per_block
        return self._bytes[start : start + self._bytes_per_block]

    def generation_of(self, block_id: BlockId) -> int:
        return self.generations[block_id]

    def fill(self, seed: int) -> None:
        """Give every block bytes of its own."""
        source = random.Random(seed)
        size = self._bytes_per_block
        for block_id in range(self.num_blocks):
            part = source.randbytes(min(size, 65521))  # a prime: a shift shows in large blocks too
            self.block(BlockId(block_id))[:] = (part * ceil_div(size, len(part)))[:size]


def peer_info(
    worker_id: str,
    incarnation: str,
    *,
    bytes_per_block: int,
    block_size: int = 4,
    fingerprint: str = "f" * 32,
    max_model_len: int = 64,
    pool_tokens: int = 128,
    host: str = "here",
    gpu: str = "",
) -> PeerInfo:
    """A worker whose peers are those made with the same values."""
    return PeerInfo(
        worker_id=worker_id,
        incarnation=incarnation,
        fingerprint=fingerprint,
        content_fingerprint="c" * 32,
        model_digest="m" * 32,
        dtype="fp32",
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        layers_per_block=2,
        tp_size=1,
        tp_rank=0,
        max_model_len=max_model_len,
        pool_tokens=pool_tokens,
        host=host,
        gpu=gpu,
    )


def transfer_key(
    transfer_id: str = "t", epoch: int = 0, prefill: str = "p-1", decode: str = "d-1"
) -> TransferKey:
    """A key between the two processes that most tests have."""
    return TransferKey(
        transfer_id=transfer_id,
        epoch=epoch,
        prefill_incarnation=prefill,
        decode_incarnation=decode,
    )


def granted_blocks(
    num_tokens: int, block_size: int, block_ids: list[int], generations: list[int] | None = None
) -> tuple[GrantedBlock, ...]:
    """The blocks of a prompt, logical block i in `block_ids[i]`."""
    return tuple(
        GrantedBlock(
            logical=LogicalBlock(i),
            block_id=BlockId(block_ids[i]),
            generation=generations[block_ids[i]] if generations is not None else 0,
            valid_tokens=min(block_size, num_tokens - i * block_size),
        )
        for i in range(ceil_div(num_tokens, block_size))
    )
