"""Whether two workers may exchange KV blocks: one check, used by both ends of a link."""

from __future__ import annotations

from kv_transfer.handoff import PeerInfo
from kv_transfer.transport import LinkRefusedError


def check_compatible(prefill: PeerInfo, decode: PeerInfo) -> None:
    """Refuse a pair whose blocks or windows differ, or either of which cannot hold the window.

    Raises `LinkRefusedError` that names both values. The fingerprint comes first: where it
    differs, nothing else that the peer says about its blocks can be trusted to mean the same.
    """
    pairs = (
        ("layout fingerprint", prefill.fingerprint, decode.fingerprint),
        ("block size", prefill.block_size, decode.block_size),
        ("bytes per block", prefill.bytes_per_block, decode.bytes_per_block),
        ("window", prefill.max_model_len, decode.max_model_len),
    )
    for what, of_prefill, of_decode in pairs:
        if of_prefill != of_decode:
            raise LinkRefusedError(
                f"{what} differs: {of_prefill} on {prefill.worker_id}, "
                f"{of_decode} on {decode.worker_id}"
            )
    for worker in (prefill, decode):
        if worker.pool_tokens < worker.max_model_len:
            raise LinkRefusedError(
                f"INV-POOL-WINDOW: pool of {worker.worker_id} holds {worker.pool_tokens} tokens, "
                f"below the window of {worker.max_model_len}"
            )
