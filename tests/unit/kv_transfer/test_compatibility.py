import dataclasses

import pytest

from kv_transfer.compatibility import check_compatible, check_heads
from kv_transfer.geometry import KVLayout
from kv_transfer.handoff import PeerInfo
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
        ("layers_per_block", 1),
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


WHOLE = KVLayout(
    model_digest="m",
    dtype="fp16",
    element_bytes=2,
    num_layers=2,
    num_kv_heads=4,
    head_dim=8,
    block_size=4,
)


def rank_of(layout: KVLayout, worker_id: str) -> PeerInfo:
    return PeerInfo.of(
        layout, worker_id=worker_id, incarnation="i", max_model_len=64, pool_tokens=64
    )


def prefill_rank(tp_rank, tp_size, **changes):
    layout = dataclasses.replace(WHOLE, **changes).for_rank(tp_rank, tp_size)
    return rank_of(layout, f"prefill-{tp_rank}")


def decode_rank(tp_rank, tp_size, **changes):
    layout = dataclasses.replace(WHOLE, **changes).for_rank(tp_rank, tp_size)
    return rank_of(layout, f"decode-{tp_rank}")


@pytest.mark.parametrize("block_size", [4, 6])
@pytest.mark.parametrize("num_prefill", [1, 2, 4])
@pytest.mark.parametrize("num_decode", [1, 2, 4])
def test_ranks_may_link_where_they_have_a_head_in_common(num_prefill, num_decode, block_size):
    for p in range(num_prefill):
        for d in range(num_decode):
            prefill = prefill_rank(p, num_prefill, block_size=block_size)
            decode = decode_rank(d, num_decode)
            # Rank p has the share [p / P, (p + 1) / P) of the heads.
            if p * num_decode < (d + 1) * num_prefill and d * num_prefill < (p + 1) * num_decode:
                check_compatible(prefill, decode)
                continue
            with pytest.raises(LinkRefusedError, match="no KV head in common"):
                check_compatible(prefill, decode)


def test_ranks_without_a_common_head_are_told_both_shares():
    with pytest.raises(LinkRefusedError) as refused:
        check_compatible(prefill_rank(0, 2), decode_rank(3, 4))
    assert str(refused.value) == "no KV head in common: 0 to 1 on prefill-0, 3 to 3 on decode-3"


def test_a_split_that_is_not_1_2_or_4_is_refused_with_both_values():
    wide = {"num_kv_heads": 8}
    with pytest.raises(LinkRefusedError) as refused:
        check_compatible(prefill_rank(0, 8, **wide), decode_rank(0, 2, **wide))
    assert str(refused.value) == (
        "tensor-parallel split differs: 8 on prefill-0, 2 on decode-0; "
        "splits of 1, 2 and 4 can be repacked"
    )


def test_any_split_may_link_with_its_like():
    """Nothing but the block size is repacked then, if anything is."""
    wide = {"num_kv_heads": 8}
    for block_size in (4, 8):
        prefill = prefill_rank(5, 8, block_size=block_size, **wide)
        check_compatible(prefill, decode_rank(5, 8, **wide))


def test_heads_that_a_split_does_not_divide_are_another_number_of_heads():
    """A rank has a whole number of them, so that its worker has another number in all."""
    with pytest.raises(LinkRefusedError) as refused:
        check_compatible(prefill_rank(0, 2, num_kv_heads=6), decode_rank(0, 4, num_kv_heads=4))
    assert str(refused.value) == "number of KV heads differs: 6 on prefill-0, 4 on decode-0"


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_there_is_not_is_refused(rank):
    decode = dataclasses.replace(decode_rank(1, 2), tp_rank=rank)
    with pytest.raises(LinkRefusedError, match=rf"rank differs: 0 of 1 on .*, {rank} of 2 on"):
        check_compatible(prefill_rank(0, 1), decode)


@pytest.mark.parametrize("windows", [(8, 8), (None, 8)])
def test_sliding_windows_keep_neither_ranks_nor_block_sizes_apart(windows):
    changes = {"sliding_windows": windows}
    for size in (4, 8, 6):
        prefill = prefill_rank(1, 2, block_size=size, **changes)
        check_compatible(prefill, decode_rank(0, 1, **changes))


def test_ranks_whose_layers_have_other_windows_are_refused():
    prefill = prefill_rank(0, 2, sliding_windows=(None, 8))
    with pytest.raises(LinkRefusedError, match=r"rank differs: 0 of 2 on .*, 0 of 1 on decode-0"):
        check_compatible(prefill, decode_rank(0, 1, sliding_windows=(None, 9)))


def test_ranks_with_other_windows_are_refused():
    decode = dataclasses.replace(decode_rank(0, 1), max_model_len=32)
    with pytest.raises(LinkRefusedError, match="window differs: 64 on prefill-0, 32 on decode-0"):
        check_compatible(prefill_rank(0, 2), decode)


@pytest.mark.parametrize(
    ("sources", "decode"),
    [
        ([(0, 1)], (1, 4)),
        ([(1, 2)], (2, 4)),
        ([(1, 2), (0, 2)], (0, 1)),
        ([(2, 4), (3, 4)], (1, 2)),
        ([(0, 2), (2, 4), (3, 4)], (0, 1)),
    ],
)
def test_sources_that_have_each_head_once_are_enough(sources, decode):
    check_heads([prefill_rank(*source) for source in sources], decode_rank(*decode))


@pytest.mark.parametrize(
    ("sources", "named"),
    [
        ([], "KV heads do not add up: nowhere, 0 to 3 on decode-0"),
        ([(1, 2)], "KV heads do not add up: 2 to 3 on prefill-1, 0 to 3 on decode-0"),
        (
            [(0, 2), (0, 1)],
            "KV heads do not add up: 0 to 1 on prefill-0, 0 to 3 on prefill-0, 0 to 3 on decode-0",
        ),
        (
            [(0, 2), (3, 4)],
            "KV heads do not add up: 0 to 1 on prefill-0, 3 to 3 on prefill-3, 0 to 3 on decode-0",
        ),
    ],
)
def test_sources_that_lack_a_head_or_have_one_twice_are_refused(sources, named):
    with pytest.raises(LinkRefusedError) as refused:
        check_heads([prefill_rank(*source) for source in sources], decode_rank(0, 1))
    assert str(refused.value) == named
