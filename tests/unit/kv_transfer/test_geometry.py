import dataclasses

import pytest

from kv_transfer.geometry import KVLayout, ceil_div
from tests.fakes.block_memory import peer_info

LAYOUT = KVLayout(
    model_digest="abc",
    dtype="float32",
    element_bytes=4,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
)


def test_a_block_holds_keys_and_values_of_all_layers():
    assert LAYOUT.bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert LAYOUT.bytes_per_block == 720 * 1024


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_a_started_block_counts_whole(num_tokens, blocks):
    assert LAYOUT.blocks_for(num_tokens) == blocks
    assert ceil_div(num_tokens, 16) == blocks


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_digest", "abd"),
        ("dtype", "bfloat16"),
        ("element_bytes", 2),
        ("num_layers", 31),
        ("num_kv_heads", 4),
        ("head_dim", 32),
        ("block_size", 32),
    ],
)
def test_each_field_alone_changes_the_fingerprint(field, value):
    other = dataclasses.replace(LAYOUT, **{field: value})
    assert other.fingerprint != LAYOUT.fingerprint
    assert len(other.fingerprint) == 32


def test_equal_layouts_have_equal_fingerprints():
    assert dataclasses.replace(LAYOUT).fingerprint == LAYOUT.fingerprint


def test_an_endpoint_is_found_by_its_transport():
    peer = dataclasses.replace(
        peer_info("p", "p-1", bytes_per_block=8), endpoints=(("tcp", "10.0.0.1:5"),)
    )
    assert peer.endpoint("tcp") == "10.0.0.1:5"
    assert peer.endpoint("nixl") is None
