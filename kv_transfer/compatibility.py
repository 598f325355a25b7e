"""Whether two workers may exchange KV blocks: one check, used by both ends of a link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kv_transfer.handoff import PeerInfo
from kv_transfer.repack import BlockShape
from kv_transfer.transport import LinkRefusedError

_Compared = tuple[tuple[str, Callable[[PeerInfo], object]], ...]

_CONTENT: Final[_Compared] = (
    ("model", lambda worker: worker.model_digest),
    ("dtype", lambda worker: worker.dtype),
    ("number of layers", lambda worker: worker.num_layers),
    ("number of KV heads", lambda worker: worker.num_kv_heads * worker.tp_size),
    ("head size", lambda worker: worker.head_dim),
)
"""What the numbers in blocks are: never to differ."""

_PLACES: Final[_Compared] = (
    ("tensor-parallel rank", lambda worker: f"{worker.tp_rank} of {worker.tp_size}"),
    ("block size", lambda worker: worker.block_size),
    ("bytes per block", lambda worker: worker.bytes_per_block),
    # Covers all of these and more (sliding windows, the protocol's version), but is no word for
    # people: it is named only where nothing else says what the matter is.
    ("layout fingerprint", lambda worker: worker.fingerprint),
)
"""Where they lie in a block: not to differ but in what `can_repack` allows."""

_WINDOW: Final[_Compared] = (("window", lambda worker: worker.max_model_len),)


def check_compatible(prefill: PeerInfo, decode: PeerInfo) -> None:
    """Refuse a pair whose KV or windows differ, or either of which cannot hold the window.

    Raises `LinkRefusedError` that names the first thing that differs, with both values.
    """
    _refuse_difference(_CONTENT, prefill, decode)
    if not can_repack(prefill, decode):
        _refuse_difference(_PLACES, prefill, decode)
    _refuse_difference(_WINDOW, prefill, decode)
    for worker in (prefill, decode):
        if worker.pool_tokens < worker.max_model_len:
            raise LinkRefusedError(
                f"INV-POOL-WINDOW: pool of {worker.worker_id} holds {worker.pool_tokens} tokens, "
                f"below the window of {worker.max_model_len}"
            )


def can_repack(prefill: PeerInfo, decode: PeerInfo) -> bool:
    """Whether their blocks are of different sizes and hold the same otherwise, token by token.

    Layers with a sliding window are left out: of a block that is partly behind the window not
    all tokens are sent, and a block of another size would have others of them. So are ranks: a
    hand-off has one source, and a rank has a part of the heads.
    """
    ours, theirs = block_shape(decode), block_shape(prefill)
    return (
        prefill.block_size != decode.block_size
        and prefill.content_fingerprint == decode.content_fingerprint
        and not (prefill.has_sliding_window or decode.has_sliding_window)
        and (prefill.tp_rank, prefill.tp_size) == (decode.tp_rank, decode.tp_size)
        and replace(theirs, block_size=ours.block_size) == ours
        and theirs.bytes_per_block == prefill.bytes_per_block
        and ours.bytes_per_block == decode.bytes_per_block
    )


def block_shape(worker: PeerInfo) -> BlockShape:
    """What a worker's blocks are, if all layers are in one group and the size is what it says."""
    heads = 2 * worker.num_layers * worker.block_size * worker.num_kv_heads
    return BlockShape(
        num_layers=worker.num_layers,
        block_size=worker.block_size,
        num_heads=worker.num_kv_heads,
        head_bytes=worker.bytes_per_block // max(1, heads),
        first_head=worker.tp_rank * worker.num_kv_heads,
    )


def _refuse_difference(compared: _Compared, prefill: PeerInfo, decode: PeerInfo) -> None:
    for what, of in compared:
        if of(prefill) != of(decode):
            raise LinkRefusedError(
                f"{what} differs: {of(prefill)} on {prefill.worker_id}, "
                f"{of(decode)} on {decode.worker_id}"
            )
