"""Whether two workers may exchange KV blocks: one check, used by both ends of a link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    ("layers per block", lambda worker: worker.layers_per_block),
    # Covers all of these and more (sliding windows, the protocol's version), but is no word for
    # people: it is named only where nothing else says what the matter is.
    ("layout fingerprint", lambda worker: worker.fingerprint),
)
"""Where they lie in a block: not to differ but in what `can_repack` allows."""

_SPLITS: Final = frozenset({1, 2, 4})
"""Numbers of tensor-parallel ranks between which KV heads are repacked."""

_WINDOW: Final[_Compared] = (("window", lambda worker: worker.max_model_len),)


def check_compatible(prefill: PeerInfo, decode: PeerInfo) -> None:
    """Refuse a pair whose KV or windows differ, or either of which cannot hold the window.

    Raises `LinkRefusedError` that names the first thing that differs, with both values.
    """
    _refuse_difference(_CONTENT, prefill, decode)
    if can_repack(prefill, decode):
        _refuse_foreign_heads(prefill, decode)
    else:
        _refuse_split(prefill, decode)
        _refuse_difference(_PLACES, prefill, decode)
    _refuse_difference(_WINDOW, prefill, decode)
    for worker in (prefill, decode):
        if worker.pool_tokens < worker.max_model_len:
            raise LinkRefusedError(
                f"INV-POOL-WINDOW: pool of {worker.worker_id} holds {worker.pool_tokens} tokens, "
                f"below the window of {worker.max_model_len}"
            )


def check_heads(sources: Sequence[PeerInfo], decode: PeerInfo) -> None:
    """Refuse sources that do not have, together, each KV head of `decode` once.

    Each of them is compatible with it alone. Raises `LinkRefusedError` that names all heads.
    """
    wanted = _heads(decode)
    brought = sorted(head for source in sources for head in _heads(source) if head in wanted)
    if brought != list(wanted):
        named = ", ".join(map(_named_heads, sources)) or "nowhere"
        raise LinkRefusedError(f"KV heads do not add up: {named}, {_named_heads(decode)}")


def can_repack(prefill: PeerInfo, decode: PeerInfo) -> bool:
    """Whether their blocks differ in size or in the share of the heads, and in nothing else."""
    ours, theirs = block_shape(decode), block_shape(prefill)
    return (
        ours != theirs
        and prefill.content_fingerprint == decode.content_fingerprint
        and (_split(prefill) == _split(decode) or (_has_split(prefill) and _has_split(decode)))
        and (theirs.num_layers, theirs.head_bytes) == (ours.num_layers, ours.head_bytes)
        and theirs.bytes_per_block == prefill.bytes_per_block
        and ours.bytes_per_block == decode.bytes_per_block
    )


def block_shape(worker: PeerInfo) -> BlockShape:
    """What a worker's blocks are, if their size is what it says."""
    heads = 2 * worker.layers_per_block * worker.block_size * worker.num_kv_heads
    return BlockShape(
        num_layers=worker.layers_per_block,
        block_size=worker.block_size,
        num_heads=worker.num_kv_heads,
        head_bytes=worker.bytes_per_block // max(1, heads),
        first_head=_heads(worker).start,
    )


def _refuse_difference(compared: _Compared, prefill: PeerInfo, decode: PeerInfo) -> None:
    for difference in _differences(compared, prefill, decode):
        raise LinkRefusedError(difference)


def _differences(compared: _Compared, prefill: PeerInfo, decode: PeerInfo) -> Iterator[str]:
    for what, of in compared:
        if of(prefill) != of(decode):
            yield (
                f"{what} differs: {of(prefill)} on {prefill.worker_id}, "
                f"{of(decode)} on {decode.worker_id}"
            )


def _refuse_split(prefill: PeerInfo, decode: PeerInfo) -> None:
    if prefill.tp_size != decode.tp_size and not {prefill.tp_size, decode.tp_size} <= _SPLITS:
        raise LinkRefusedError(
            f"tensor-parallel split differs: {prefill.tp_size} on {prefill.worker_id}, "
            f"{decode.tp_size} on {decode.worker_id}; splits of 1, 2 and 4 can be repacked"
        )


def _refuse_foreign_heads(prefill: PeerInfo, decode: PeerInfo) -> None:
    theirs, ours = _heads(prefill), _heads(decode)
    if theirs.stop <= ours.start or ours.stop <= theirs.start:
        raise LinkRefusedError(
            f"no KV head in common: {_named_heads(prefill)}, {_named_heads(decode)}"
        )


def _split(worker: PeerInfo) -> tuple[int, int]:
    return worker.tp_rank, worker.tp_size


def _has_split(worker: PeerInfo) -> bool:
    return worker.tp_size in _SPLITS and 0 <= worker.tp_rank < worker.tp_size


def _heads(worker: PeerInfo) -> range:
    """Which of the model's KV heads it has."""
    first = worker.tp_rank * worker.num_kv_heads
    return range(first, first + worker.num_kv_heads)


def _named_heads(worker: PeerInfo) -> str:
    heads = _heads(worker)
    return f"{heads.start} to {heads.stop - 1} on {worker.worker_id}"
