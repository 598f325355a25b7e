import dataclasses

import pytest

from kv_transfer.compatibility import check_compatible
from kv_transfer.transport import LinkRefusedError
from tests.fakes.block_memory import peer_info

PREFILL = peer_info("prefill-0", "p-1", bytes_per_block=4096)
DECODE = peer_info("decode-0", "d-1", bytes_per_block=4096)


def test_equal_workers_may_exchange_blocks():
    check_compatible(PREFILL, DECODE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "0" * 32),
        ("model_digest", "n" * 32),
        ("dtype", "bf16"),
        ("num_layers", 3),
        ("num_kv_heads", 4),
        ("head_dim", 16),
        ("block_size", 8),
        ("bytes_per_block", 8192),
        ("tp_size", 2),
        ("tp_rank", 1),
        ("max_model_len", 32),
    ],
)
@pytest.mark.parametrize("changed", ["prefill", "decode"])
def test_each_difference_alone_is_refused_and_both_values_are_named(field, value, changed):
    prefill, decode = PREFILL, DECODE
    if changed == "prefill":
        prefill = dataclasses.replace(PREFILL, **{field: value})
    else:
        decode = dataclasses.replace(DECODE, **{field: value})
    with pytest.raises(LinkRefusedError) as refused:
        check_compatible(prefill, decode)
    assert str(value) in str(refused.value)
    assert str(getattr(PREFILL, field)) in str(refused.value)


SMALLER_BLOCKS = dataclasses.replace(
    DECODE, block_size=2, bytes_per_block=2048, fingerprint="s" * 32
)


def test_blocks_of_another_size_are_repacked():
    check_compatible(PREFILL, SMALLER_BLOCKS)
    check_compatible(SMALLER_BLOCKS, PREFILL)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"content_fingerprint": "0" * 32}, "block size differs: 4 on prefill-0, 2 on decode-0"),
        ({"has_sliding_window": True}, "block size differs: 4 on prefill-0, 2 on decode-0"),
        ({"bytes_per_block": 2049}, "block size differs: 4 on prefill-0, 2 on decode-0"),
        ({"bytes_per_block": 1024}, "block size differs: 4 on prefill-0, 2 on decode-0"),
        (
            {"tp_rank": 1, "tp_size": 1},
            "tensor-parallel rank differs: 0 of 1 on prefill-0, 1 of 1 on decode-0",
        ),
        ({"max_model_len": 32}, "window differs: 64 on prefill-0, 32 on decode-0"),
    ],
)
def test_blocks_of_another_size_are_refused_where_anything_else_differs(changes, named):
    with pytest.raises(LinkRefusedError) as refused:
        check_compatible(PREFILL, dataclasses.replace(SMALLER_BLOCKS, **changes))
    assert str(refused.value) == named


def test_blocks_of_no_tokens_are_refused():
    """As a peer may say that its blocks are."""
    with pytest.raises(LinkRefusedError, match="block size differs"):
        check_compatible(
            dataclasses.replace(PREFILL, block_size=0, bytes_per_block=0), SMALLER_BLOCKS
        )


def test_a_difference_is_named_by_what_people_know_it_by():
    """Fingerprints differ whenever anything does; alone they say what nothing else says."""
    decode = dataclasses.replace(DECODE, fingerprint="0" * 32, dtype="bf16", pool_tokens=1)
    with pytest.raises(LinkRefusedError, match=r"^dtype differs: fp32 on prefill-0, bf16"):
        check_compatible(PREFILL, decode)


def test_the_layout_is_judged_before_window_and_pool():
    decode = dataclasses.replace(DECODE, fingerprint="0" * 32, max_model_len=32, pool_tokens=1)
    with pytest.raises(LinkRefusedError, match=r"^layout fingerprint differs"):
        check_compatible(PREFILL, decode)


@pytest.mark.parametrize("short", ["prefill", "decode"])
def test_a_pool_below_the_window_is_refused_on_either_side(short):
    prefill, decode = PREFILL, DECODE
    if short == "prefill":
        prefill = dataclasses.replace(PREFILL, pool_tokens=63)
    else:
        decode = dataclasses.replace(DECODE, pool_tokens=63)
    with pytest.raises(LinkRefusedError, match=rf"INV-POOL-WINDOW.*{short}-0 holds 63.*64"):
        check_compatible(prefill, decode)


def test_a_pool_that_holds_exactly_the_window_is_accepted():
    check_compatible(
        dataclasses.replace(PREFILL, pool_tokens=64), dataclasses.replace(DECODE, pool_tokens=64)
    )
