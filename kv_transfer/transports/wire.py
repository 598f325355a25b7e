"""The frames of the stream transports: bytes to values and back, nothing else.

Every frame is a fixed header and a payload. The header names the transfer (a tag of its whole key,
so that a frame of another attempt or another process cannot pass for one of this), the payload's
length and its digest; on DATA it also says which block the payload is. All checks that need no
payload can be made before one byte of it is read.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from types import MappingProxyType

import xxhash

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import (
    FirstToken,
    Grant,
    GrantedBlock,
    PeerInfo,
    TransferKey,
    Verdict,
)
from kv_transfer.logprobs import pack_logprobs, unpack_logprobs
from kv_transfer.transport import (
    CorruptTransferError,
    InvalidTransferError,
    LeaseLostError,
    LinkRefusedError,
    NotAuthenticatedError,
    PeerLostError,
    TransferDeadlineError,
    TransferError,
)

MAGIC = b"BtKV"
WIRE_VERSION = 4
MAX_HELLO_BYTES = 8 * 1024
"""Bound for a peer that has not said who it is."""
MAX_CONTROL_BYTES = 4 * 1024 * 1024
"""Bound for a frame without KV: a grant of 200,000 blocks."""
MAX_BLOCKS_PER_FETCH = 4096
_MAX_ERROR_BYTES = 1024

_HEADER = struct.Struct("!4sBBHIQ16sIIQQ")
HEADER_BYTES = _HEADER.size
_SEED = struct.Struct("!16sQBI")
_GRANT = struct.Struct("!I?qII?")
_COUNT = struct.Struct("!I")
_BLOCK = struct.Struct("!IIQI")
_PEER_FIELDS = tuple(field.name for field in fields(PeerInfo))


class FrameType(IntEnum):
    """What a frame says."""

    HELLO = 1
    WELCOME = 2
    GRANT = 3
    FETCH = 4
    DATA = 5
    RENEW = 6
    CONFIRM = 7
    VERDICT = 8
    RELEASE = 9
    ALIVE = 10
    ERROR = 11
    LOCATED = 12
    DIRECTIONS = 13
    TURN = 21
    READY = 22
    RENDEZVOUS = 23


BLOCK_FRAMES = frozenset({FrameType.DATA, FrameType.LOCATED})
"""Frames that name a block: DATA has its bytes behind it; LOCATED has none, for the receiver reads
them where they are, or they come another way."""


_ERROR_CODES: Mapping[type[TransferError], int] = MappingProxyType(
    {
        TransferError: 0,
        LinkRefusedError: 1,
        PeerLostError: 2,
        TransferDeadlineError: 3,
        LeaseLostError: 4,
        CorruptTransferError: 5,
        InvalidTransferError: 6,
        NotAuthenticatedError: 7,
    }
)
_ERROR_TYPES = MappingProxyType({code: error for error, code in _ERROR_CODES.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What marks a frame as part of one transfer."""

    tag: bytes
    """16 bytes of digest over transfer id and both incarnations."""
    epoch: int

    @staticmethod
    def of(key: TransferKey) -> Identity:
        """The identity of a transfer."""
        names = (key.transfer_id, key.prefill_incarnation, key.decode_incarnation)
        tag = hashlib.blake2b(repr(names).encode(), digest_size=16).digest()
        return Identity(tag=tag, epoch=key.epoch)

    def digest(self, kind: FrameType, payload: memoryview | bytes, logical: int = 0) -> int:
        """64-bit digest of a payload in its place: the same bytes elsewhere have another one."""
        seed = xxhash.xxh3_64_intdigest(_SEED.pack(self.tag, self.epoch, kind, logical))
        return xxhash.xxh3_64_intdigest(payload, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A frame's header; the fields that name a block are 0 where the frame is not of one."""

    kind: FrameType
    length: int
    """Bytes of payload."""
    epoch: int
    tag: bytes
    logical: LogicalBlock
    valid_tokens: int
    generation: int
    digest: int


def control_frame(identity: Identity, kind: FrameType, payload: bytes = b"") -> bytes:
    """A whole frame without KV; ValueError if the payload is over the bound."""
    if len(payload) > MAX_CONTROL_BYTES:
        raise ValueError(f"{kind.name} of {len(payload)} bytes, at most {MAX_CONTROL_BYTES}")
    digest = identity.digest(kind, payload)
    header = _HEADER.pack(
        MAGIC,
        WIRE_VERSION,
        kind,
        0,
        len(payload),
        identity.epoch,
        identity.tag,
        0,
        0,
        0,
        digest,
    )
    return header + payload


def block_header(
    identity: Identity, kind: FrameType, block: GrantedBlock, content: memoryview
) -> bytes:
    """A block's header, with its content's digest: DATA goes before the bytes, LOCATED alone."""
    return _HEADER.pack(
        MAGIC,
        WIRE_VERSION,
        kind,
        0,
        content.nbytes if kind is FrameType.DATA else 0,
        identity.epoch,
        identity.tag,
        block.logical,
        block.valid_tokens,
        block.generation,
        identity.digest(kind, content, block.logical),
    )


def parse_header(raw: bytes | bytearray | memoryview) -> Header:
    """Read a header; `CorruptTransferError` if it is not one of ours."""
    magic, version, kind, reserved, length, epoch, tag, logical, valid, generation, digest = (
        _HEADER.unpack(raw)
    )
    if magic != MAGIC or version != WIRE_VERSION or reserved:
        raise CorruptTransferError("not a frame of this protocol")
    try:
        frame_type = FrameType(kind)
    except ValueError as error:
        raise CorruptTransferError(f"unknown frame type {kind}") from error
    if frame_type not in BLOCK_FRAMES:
        if logical or valid or generation:
            raise CorruptTransferError(f"{frame_type.name} names a block")
        if length > MAX_CONTROL_BYTES:
            raise CorruptTransferError(f"{frame_type.name} of {length} bytes is oversized")
    return Header(
        kind=frame_type,
        length=length,
        epoch=epoch,
        tag=tag,
        logical=LogicalBlock(logical),
        valid_tokens=valid,
        generation=generation,
        digest=digest,
    )


def check_identity(header: Header, identity: Identity) -> None:
    """Refuse a frame of another transfer, attempt or process."""
    if header.tag != identity.tag or header.epoch != identity.epoch:
        raise CorruptTransferError(f"{header.kind.name} belongs to another transfer")


def check_payload(header: Header, identity: Identity, payload: memoryview | bytes) -> None:
    """Refuse a payload whose digest, in its place, is not what the header says."""
    found = identity.digest(header.kind, payload, header.logical)
    if found != header.digest:
        raise CorruptTransferError(
            f"{header.kind.name} digest is {found:016x}, header says {header.digest:016x}"
        )


def pack_blocks(blocks: Sequence[GrantedBlock]) -> bytes:
    """Blocks by logical index, block id, generation and tokens."""
    rows = (
        _BLOCK.pack(block.logical, block.block_id, block.generation, block.valid_tokens)
        for block in blocks
    )
    return _COUNT.pack(len(blocks)) + b"".join(rows)


def unpack_blocks(payload: bytes) -> tuple[GrantedBlock, ...]:
    """Inverse of `pack_blocks`; `CorruptTransferError` if the length is not that of the count."""
    if len(payload) < _COUNT.size:
        raise CorruptTransferError(f"block list of {len(payload)} bytes")
    (count,) = _COUNT.unpack_from(payload)
    if len(payload) != _COUNT.size + count * _BLOCK.size:
        raise CorruptTransferError(f"block list of {len(payload)} bytes says {count} blocks")
    return tuple(
        GrantedBlock(
            logical=LogicalBlock(logical),
            block_id=BlockId(block_id),
            generation=generation,
            valid_tokens=valid_tokens,
        )
        for logical, block_id, generation, valid_tokens in _BLOCK.iter_unpack(
            payload[_COUNT.size :]
        )
    )


def pack_grant(grant: Grant) -> bytes:
    """A grant as payload: head, blocks, log-probabilities (the first token's are the last)."""
    first = grant.first or FirstToken(token_id=0)
    blocks = pack_blocks(grant.blocks)
    head = _GRANT.pack(
        grant.sequence_number,
        grant.is_last,
        first.token_id,
        first.num_hit_tokens,
        len(blocks),
        first.logprobs is not None,
    )
    of_first = () if first.logprobs is None else (first.logprobs,)
    return head + blocks + pack_logprobs((*grant.prompt_logprobs, *of_first))


def unpack_grant(payload: bytes) -> Grant:
    """Inverse of `pack_grant`; raises `CorruptTransferError`."""
    if len(payload) < _GRANT.size:
        raise CorruptTransferError(f"grant of {len(payload)} bytes")
    sequence_number, is_last, token_id, num_hit_tokens, blocks_bytes, has_logprobs = (
        _GRANT.unpack_from(payload)
    )
    end = _GRANT.size + blocks_bytes
    try:
        logprobs = unpack_logprobs(payload[end:])
    except ValueError as error:
        raise CorruptTransferError(str(error)) from error
    if has_logprobs and not (is_last and logprobs):
        raise CorruptTransferError("grant without the first token whose log-probability it has")
    first = FirstToken(
        token_id=token_id,
        num_hit_tokens=num_hit_tokens,
        logprobs=logprobs[-1] if has_logprobs else None,
    )
    return Grant(
        sequence_number=sequence_number,
        blocks=unpack_blocks(payload[_GRANT.size : end]),
        first=first if is_last else None,
        prompt_logprobs=logprobs[:-1] if has_logprobs else logprobs,
    )


def pack_hello(key: TransferKey, me: PeerInfo) -> bytes:
    """Who asks, and for which transfer."""
    return json.dumps({"key": asdict(key), "peer": asdict(me)}).encode()


def unpack_hello(payload: bytes) -> tuple[TransferKey, PeerInfo]:
    """Inverse of `pack_hello`; raises `CorruptTransferError`."""
    parts = _object(_json(payload), ("key", "peer"))
    return _key(parts["key"]), _peer(parts["peer"])


def pack_welcome(me: PeerInfo) -> bytes:
    """Who answers."""
    return json.dumps(asdict(me)).encode()


def unpack_welcome(payload: bytes) -> PeerInfo:
    """Inverse of `pack_welcome`; raises `CorruptTransferError`."""
    return _peer(_json(payload))


def pack_verdict(verdict: Verdict) -> bytes:
    """The answer to confirm."""
    return verdict.value.encode()


def unpack_verdict(payload: bytes) -> Verdict:
    """Inverse of `pack_verdict`; raises `CorruptTransferError`."""
    try:
        return Verdict(payload.decode())
    except ValueError as error:
        raise CorruptTransferError(f"verdict {payload[:16]!r}") from error


def pack_error(error: TransferError) -> bytes:
    """A refusal, with its reason for people."""
    code = _ERROR_CODES.get(type(error), _ERROR_CODES[TransferError])
    return bytes((code,)) + str(error).encode()[:_MAX_ERROR_BYTES]


def unpack_error(payload: bytes) -> TransferError:
    """Inverse of `pack_error`; an unknown code is the root of the tree."""
    code, text = payload[:1], payload[1 : 1 + _MAX_ERROR_BYTES]
    error = _ERROR_TYPES.get(code[0] if code else 0, TransferError)
    return error(text.decode(errors="replace"))


def _json(payload: bytes) -> object:
    try:
        parsed: object = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise CorruptTransferError("payload is not JSON") from error
    return parsed


def _object(value: object, names: Sequence[str]) -> dict[str, object]:
    if not isinstance(value, dict) or set(value) != set(names):
        raise CorruptTransferError(f"expected an object with exactly {', '.join(names)}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise CorruptTransferError(f"expected text, not {type(value).__name__}")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise CorruptTransferError("expected a count")
    return value


def _key(value: object) -> TransferKey:
    names = ("transfer_id", "epoch", "prefill_incarnation", "decode_incarnation")
    found = _object(value, names)
    return TransferKey(
        transfer_id=_text(found["transfer_id"]),
        epoch=_count(found["epoch"]),
        prefill_incarnation=_text(found["prefill_incarnation"]),
        decode_incarnation=_text(found["decode_incarnation"]),
    )


def _peer(value: object) -> PeerInfo:
    found = _object(value, _PEER_FIELDS)
    return PeerInfo(
        worker_id=_text(found["worker_id"]),
        incarnation=_text(found["incarnation"]),
        fingerprint=_text(found["fingerprint"]),
        content_fingerprint=_text(found["content_fingerprint"]),
        model_digest=_text(found["model_digest"]),
        dtype=_text(found["dtype"]),
        num_layers=_count(found["num_layers"]),
        num_kv_heads=_count(found["num_kv_heads"]),
        head_dim=_count(found["head_dim"]),
        block_size=_count(found["block_size"]),
        bytes_per_block=_count(found["bytes_per_block"]),
        layers_per_block=_count(found["layers_per_block"]),
        tp_size=_count(found["tp_size"]),
        tp_rank=_count(found["tp_rank"]),
        max_model_len=_count(found["max_model_len"]),
        pool_tokens=_count(found["pool_tokens"]),
        host=_text(found["host"]),
        gpu=_text(found["gpu"]),
        endpoints=(),
    )
