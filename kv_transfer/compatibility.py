"""Whether two workers may exchange KV blocks: one check, used by both ends of a link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kv_transfer.handoff import PeerInfo
from kv_transfer.transport import LinkRefusedError

_COMPARED: Final[tuple[tuple[str, Callable[[PeerInfo], object]], ...]] = (
    ("model", lambda worker: worker.model_digest),
    ("dtype", lambda worker: worker.dtype),
    ("number of layers", lambda worker: worker.num_layers),
    ("number of KV heads", lambda worker: worker.num_kv_heads),
    ("head size", lambda worker: worker.head_dim),
    ("block size", lambda worker: worker.block_size),
    ("bytes per block", lambda worker: worker.bytes_per_block),
    # Covers all of these and more (sliding windows, the protocol's version), but is no word for
    # people: it is named only where nothing else says what the matter is.
    ("layout fingerprint", lambda worker: worker.fingerprint),
    ("window", lambda worker: worker.max_model_len),
)


def check_compatible(prefill: PeerInfo, decode: PeerInfo) -> None:
    """Refuse a pair whose layouts or windows differ, or either of which cannot hold the window.

    Raises `LinkRefusedError` that names the first thing that differs, with both values.
    """
    for what, of in _COMPARED:
        if of(prefill) != of(decode):
            raise LinkRefusedError(
                f"{what} differs: {of(prefill)} on {prefill.worker_id}, "
                f"{of(decode)} on {decode.worker_id}"
            )
    for worker in (prefill, decode):
        if worker.pool_tokens < worker.max_model_len:
            raise LinkRefusedError(
                f"INV-POOL-WINDOW: pool of {worker.worker_id} holds {worker.pool_tokens} tokens, "
                f"below the window of {worker.max_model_len}"
            )
