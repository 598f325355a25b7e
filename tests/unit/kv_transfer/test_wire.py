import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import FirstToken, Grant, GrantedBlock, Verdict
from kv_transfer.logprobs import TokenLogprobs
from kv_transfer.transport import (
    CorruptTransferError,
    InvalidTransferError,
    LeaseLostError,
    LinkRefusedError,
    PeerLostError,
    TransferDeadlineError,
    TransferError,
)
from kv_transfer.transports import wire
from kv_transfer.transports.wire import HEADER_BYTES, FrameType, Identity
from tests.fakes.block_memory import granted_blocks, peer_info, transfer_key

KEY = transfer_key("abc", epoch=3)
IDENTITY = Identity.of(KEY)
BLOCK = granted_blocks(6, 4, [5, 6])[1]
PAYLOAD = memoryview(bytearray(random.Random(1).randbytes(96)))

blocks = st.builds(
    GrantedBlock,
    logical=st.integers(0, 2**32 - 1).map(LogicalBlock),
    block_id=st.integers(0, 2**32 - 1).map(BlockId),
    generation=st.integers(0, 2**64 - 1),
    valid_tokens=st.integers(0, 2**32 - 1),
)
logprobs = st.builds(
    TokenLogprobs,
    logprob=st.floats(-1000, 0, width=32),
    rank=st.integers(1, 2**20),
    top=st.lists(st.tuples(st.integers(0, 2**20), st.floats(-1000, 0, width=32)), max_size=3).map(
        tuple
    ),
)
grants = st.builds(
    Grant,
    sequence_number=st.integers(0, 2**32 - 1),
    blocks=st.lists(blocks, max_size=5).map(tuple),
    first=st.none()
    | st.builds(
        FirstToken,
        token_id=st.integers(-(2**63), 2**63 - 1),
        num_hit_tokens=st.integers(0, 2**32 - 1),
        logprobs=st.none() | logprobs,
    ),
    prompt_logprobs=st.lists(logprobs, max_size=3).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(grant=grants)
def test_a_grant_comes_back_as_it_was(grant):
    assert wire.unpack_grant(wire.pack_grant(grant)) == grant


@settings(max_examples=100, deadline=None)
@given(grant=grants, cut=st.integers(1, 40))
def test_a_grant_that_is_cut_or_padded_is_corrupt(grant, cut):
    packed = wire.pack_grant(grant)
    for damaged in (packed[: max(0, len(packed) - cut)], packed + bytes(cut)):
        with pytest.raises(CorruptTransferError):
            wire.unpack_grant(damaged)


@pytest.mark.parametrize("first", [None, FirstToken(token_id=3)])
def test_a_grant_that_announces_log_probabilities_and_has_none_is_corrupt(first):
    packed = bytearray(wire.pack_grant(Grant(sequence_number=0, blocks=(), first=first)))
    packed[21] = True  # after number, last, token id, hit and length
    with pytest.raises(CorruptTransferError, match="first token"):
        wire.unpack_grant(bytes(packed))


@settings(max_examples=200, deadline=None)
@given(payload=st.binary(max_size=200))
def test_garbage_payloads_raise_corrupt_and_nothing_else(payload):
    for unpack in (
        wire.unpack_grant,
        wire.unpack_blocks,
        wire.unpack_hello,
        wire.unpack_welcome,
        wire.unpack_verdict,
    ):
        try:
            unpack(payload)
        except CorruptTransferError:
            continue
    assert isinstance(wire.unpack_error(payload), TransferError)


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_garbage_headers_are_corrupt(raw):
    with pytest.raises(CorruptTransferError):
        wire.parse_header(raw)


def test_a_greeting_comes_back_as_it_was_without_endpoints():
    me = dataclasses.replace(
        peer_info("decode-0", "d-1", bytes_per_block=96), endpoints=(("tcp", "10.0.0.1:1"),)
    )
    key, peer = wire.unpack_hello(wire.pack_hello(KEY, me))
    assert key == KEY
    assert peer == dataclasses.replace(me, endpoints=())
    assert wire.unpack_welcome(wire.pack_welcome(me)) == peer


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * 5000,
        b"[]",
        b'{"key": 1, "peer": 2}',
        b'{"key": {}, "peer": {}}',
        b'{"key": {"transfer_id": 1, "epoch": 0, "prefill_incarnation": "", '
        b'"decode_incarnation": ""}, "peer": {}}',
        b'{"key": {"transfer_id": "", "epoch": -1, "prefill_incarnation": "", '
        b'"decode_incarnation": ""}, "peer": {}}',
        b'{"key": {"transfer_id": "", "epoch": true, "prefill_incarnation": "", '
        b'"decode_incarnation": ""}, "peer": {}}',
    ],
)
def test_a_greeting_with_other_fields_or_types_is_corrupt(payload):
    with pytest.raises(CorruptTransferError):
        wire.unpack_hello(payload)


@pytest.mark.parametrize(("field", "value"), [("tp_size", True), ("content_fingerprint", 0)])
def test_a_greeting_with_a_value_of_another_type_is_corrupt(field, value):
    me = peer_info("decode-0", "d-1", bytes_per_block=96)
    with pytest.raises(CorruptTransferError):
        wire.unpack_welcome(wire.pack_welcome(dataclasses.replace(me, **{field: value})))


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_verdict_comes_back_as_it_was(verdict):
    assert wire.unpack_verdict(wire.pack_verdict(verdict)) is verdict


@pytest.mark.parametrize(
    "error",
    [
        TransferError,
        LinkRefusedError,
        PeerLostError,
        TransferDeadlineError,
        LeaseLostError,
        CorruptTransferError,
        InvalidTransferError,
    ],
)
def test_an_error_keeps_its_type_and_text(error):
    received = wire.unpack_error(wire.pack_error(error("pool of 3 blocks")))
    assert type(received) is error
    assert str(received) == "pool of 3 blocks"


def test_an_error_of_a_kind_that_the_wire_does_not_know_is_the_root():
    class LaterError(LeaseLostError):
        pass

    assert type(wire.unpack_error(wire.pack_error(LaterError("x")))) is TransferError


def test_a_long_error_text_is_cut():
    assert len(wire.pack_error(TransferError("x" * 10**6))) < 2000


def test_a_data_header_says_which_block_its_bytes_are():
    header = wire.parse_header(wire.block_header(IDENTITY, FrameType.DATA, BLOCK, PAYLOAD))
    assert header.kind is FrameType.DATA
    assert (header.logical, header.valid_tokens, header.generation) == (1, 2, 0)
    assert header.length == PAYLOAD.nbytes
    wire.check_identity(header, IDENTITY)
    wire.check_payload(header, IDENTITY, PAYLOAD)


def test_any_changed_bit_of_a_payload_is_noticed():
    header = wire.parse_header(wire.block_header(IDENTITY, FrameType.DATA, BLOCK, PAYLOAD))
    for position in range(PAYLOAD.nbytes):
        changed = bytearray(PAYLOAD)
        changed[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptTransferError, match="digest"):
            wire.check_payload(header, IDENTITY, memoryview(changed))


@pytest.mark.parametrize(
    "identity",
    [
        Identity.of(transfer_key("abd", epoch=3)),
        Identity.of(transfer_key("abc", epoch=4)),
        Identity.of(transfer_key("abc", epoch=3, prefill="p-2")),
        Identity.of(transfer_key("abc", epoch=3, decode="d-2")),
    ],
)
def test_frames_of_another_transfer_attempt_or_process_are_refused(identity):
    header = wire.parse_header(wire.block_header(identity, FrameType.DATA, BLOCK, PAYLOAD))
    with pytest.raises(CorruptTransferError, match="another transfer"):
        wire.check_identity(header, IDENTITY)
    assert identity.digest(FrameType.DATA, PAYLOAD, 1) != IDENTITY.digest(
        FrameType.DATA, PAYLOAD, 1
    )


def test_equal_bytes_in_another_place_have_another_digest():
    digests = {IDENTITY.digest(FrameType.DATA, PAYLOAD, logical) for logical in range(64)}
    digests |= {IDENTITY.digest(kind, PAYLOAD) for kind in FrameType}
    assert len(digests) == 64 + len(FrameType) - 1  # DATA of block 0 is in both


@pytest.mark.parametrize("position", [*range(4), 4, 5, 6, 7, *range(36, 52)])
def test_a_control_header_with_any_unexpected_field_is_corrupt(position):
    frame = bytearray(wire.control_frame(IDENTITY, FrameType.ALIVE)[:HEADER_BYTES])
    frame[position] = 0xF0
    with pytest.raises(CorruptTransferError):
        wire.parse_header(frame)


def test_an_oversized_control_frame_is_refused_by_its_header_and_never_made():
    frame = bytearray(wire.control_frame(IDENTITY, FrameType.GRANT)[:HEADER_BYTES])
    frame[8:12] = (wire.MAX_CONTROL_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(CorruptTransferError, match="oversized"):
        wire.parse_header(frame)
    with pytest.raises(ValueError, match="at most"):
        wire.control_frame(IDENTITY, FrameType.GRANT, bytes(wire.MAX_CONTROL_BYTES + 1))
