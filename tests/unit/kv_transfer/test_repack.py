"""Which bytes go where between pools of other block sizes and other shares of the heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.compatibility import block_shape
from kv_transfer.geometry import KVLayout
from kv_transfer.handoff import PeerInfo
from kv_transfer.repack import BlockShape, RepackPlan

SHAPE = BlockShape(num_layers=2, block_size=4, num_heads=2, head_bytes=8)


def spans(source_size, own_size, index, *, first_token=0, num_tokens):
    """(own block, source token, own token, tokens) of each box."""
    plan = RepackPlan(
        source=replace(SHAPE, block_size=source_size),
        own=replace(SHAPE, block_size=own_size),
        first_token=first_token,
        num_tokens=num_tokens,
    )
    return [
        (box.own_block, box.tokens.source, box.tokens.own, box.tokens.length)
        for box in plan.boxes(index)
    ]


def test_a_large_block_goes_into_several_small_ones():
    assert spans(8, 4, 1, num_tokens=16) == [(2, 0, 0, 4), (3, 4, 0, 4)]


def test_small_blocks_go_side_by_side_into_a_large_one():
    assert spans(4, 8, 2, num_tokens=16) == [(1, 0, 0, 4)]
    assert spans(4, 8, 3, num_tokens=16) == [(1, 0, 4, 4)]


def test_sizes_that_do_not_divide_each_other_meet_in_the_middle_of_blocks():
    assert spans(6, 4, 1, num_tokens=12) == [(1, 0, 2, 2), (2, 2, 0, 4)]


def test_tokens_behind_the_prompt_stay_out():
    assert spans(8, 4, 1, num_tokens=10) == [(2, 0, 0, 2)]


def test_tokens_before_the_first_one_stay_out():
    """They are in blocks of a prefix hit, which others may hold too."""
    assert spans(8, 4, 0, first_token=4, num_tokens=16) == [(1, 4, 0, 4)]


def test_blocks_that_are_needed_are_those_that_hold_a_token_of_the_range():
    plan = RepackPlan(source=replace(SHAPE, block_size=8), own=SHAPE, first_token=12, num_tokens=19)
    assert (plan.source_blocks, plan.own_blocks) == (range(1, 3), range(3, 5))
    with pytest.raises(IndexError, match="source block 0"):
        plan.boxes(0)


@pytest.mark.parametrize(("rank", "own_head"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_a_rank_brings_its_own_heads(rank, own_head):
    source = replace(SHAPE, num_heads=1, first_head=rank)
    plan = RepackPlan(source=source, own=replace(SHAPE, num_heads=4), first_token=0, num_tokens=4)
    assert (plan.heads.source, plan.heads.own, plan.heads.length) == (0, own_head, 1)


def test_a_rank_takes_its_own_heads_of_a_whole_pool():
    own = replace(SHAPE, first_head=2)
    plan = RepackPlan(source=replace(SHAPE, num_heads=4), own=own, first_token=0, num_tokens=4)
    assert (plan.heads.source, plan.heads.own, plan.heads.length) == (2, 0, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 3}, "3 and 8, 2 and 8"),
        ({"head_bytes": 16}, "2 and 16, 2 and 8"),
        ({"first_head": 2}, "2 from 2 on, 2 from 0 on"),
    ],
)
def test_what_cannot_be_repacked_is_refused_with_both_values(change, named):
    with pytest.raises(ValueError, match=named):
        RepackPlan(source=replace(SHAPE, **change), own=SHAPE, first_token=0, num_tokens=4)


@pytest.mark.parametrize(("first", "end"), [(-1, 4), (4, 4), (5, 4)])
def test_an_empty_range_is_refused(first, end):
    with pytest.raises(ValueError, match="are no range"):
        RepackPlan(source=SHAPE, own=SHAPE, first_token=first, num_tokens=end)


def test_shape_of_a_layout_is_that_of_its_blocks():
    layout = KVLayout(
        model_digest="m",
        dtype="float16",
        element_bytes=2,
        num_layers=3,
        num_kv_heads=2,
        head_dim=5,
        block_size=4,
        tp_size=4,
        tp_rank=3,
    )
    peer = PeerInfo.of(layout, worker_id="w", incarnation="i", max_model_len=64, pool_tokens=64)
    shape = block_shape(peer)
    assert shape == BlockShape(num_layers=3, block_size=4, num_heads=2, head_bytes=10, first_head=6)
    assert shape.bytes_per_block == layout.bytes_per_block


def test_shape_of_a_layout_with_groups_is_that_of_one_group():
    layout = KVLayout(
        model_digest="m",
        dtype="float16",
        element_bytes=2,
        num_layers=6,
        num_kv_heads=2,
        head_dim=5,
        block_size=4,
        sliding_windows=(None, 8, 8) * 2,
    )
    peer = PeerInfo.of(layout, worker_id="w", incarnation="i", max_model_len=64, pool_tokens=64)
    shape = block_shape(peer)
    assert shape == BlockShape(num_layers=2, block_size=4, num_heads=2, head_bytes=10)
    assert shape.bytes_per_block == layout.bytes_per_block
