import dataclasses

import pytest

from kv_transfer.geometry import (
    KVGroup,
    KVLayout,
    ceil_div,
    group_and_index,
    group_layers,
    logical_block,
)
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
        ("tp_size", 2),
    ],
)
def test_each_field_alone_changes_the_fingerprint(field, value):
    other = dataclasses.replace(LAYOUT, **{field: value})
    assert other.fingerprint != LAYOUT.fingerprint
    assert len(other.fingerprint) == 32


def test_where_the_numbers_lie_changes_the_fingerprint_and_not_that_of_the_content():
    half = dataclasses.replace(LAYOUT, num_kv_heads=LAYOUT.num_kv_heads // 2 or 1, tp_size=2)
    whole = dataclasses.replace(half, num_kv_heads=half.num_kv_heads * 2, tp_size=1)
    layouts = [whole, dataclasses.replace(whole, block_size=32), half]
    layouts.append(dataclasses.replace(half, tp_rank=1))

    assert len({layout.fingerprint for layout in layouts}) == 4
    assert len({layout.content_fingerprint for layout in layouts}) == 1


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        dataclasses.replace(LAYOUT, tp_size=2, tp_rank=2)


def test_windows_change_the_fingerprint_and_so_does_which_layers_have_them():
    windows = ((None, 8) * 15, (8, None) * 15, (None, 9) * 15, ())
    layouts = [dataclasses.replace(LAYOUT, sliding_windows=some) for some in windows]
    assert len({layout.fingerprint for layout in layouts}) == 4


def test_a_layout_whose_layers_all_see_everything_has_one_group():
    assert LAYOUT.groups == (KVGroup(layers=tuple(range(30)), sliding_window=None),)
    assert not LAYOUT.has_sliding_window


@pytest.mark.parametrize("windows", [(8,), (1,) * 30, (0,) * 30])
def test_windows_that_make_no_sense_are_refused(windows):
    with pytest.raises(ValueError, match="sliding window"):
        dataclasses.replace(LAYOUT, sliding_windows=windows)


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((8, 8), [((0, 1), 8)]),
        ((8, None), [((1,), None), ((0,), 8)]),
        ((8, None, 8, None), [((1, 3), None), ((0, 2), 8)]),
        ((8, 8, None, 8, 8, None), [((2, 5), None), ((0, 1), 8), ((3, 4), 8)]),
        ((8, None, 9), [((1,), None), ((0,), 8), ((2,), 9)]),
    ],
)
def test_layers_are_parted_by_their_windows_into_groups_of_equal_number(windows, groups):
    found = group_layers(windows)
    assert [(group.layers, group.sliding_window) for group in found] == groups


def test_all_blocks_are_of_one_size_and_together_hold_all_layers():
    layout = dataclasses.replace(LAYOUT, sliding_windows=(8, 8, 8, None, None) * 6)
    assert len(layout.groups) == 5
    assert layout.bytes_per_block * len(layout.groups) == LAYOUT.bytes_per_block


@pytest.mark.parametrize("window", [2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_group_needs_as_many_blocks_as_the_worst_chunk_touches(window, chunk, block_size):
    group = KVGroup(layers=(0,), sliding_window=window)

    def touched(start: int) -> int:
        seen = range(max(0, start - window + 1), start + chunk)
        assert group.first_block(start, block_size) == seen[0] // block_size
        return len({position // block_size for position in seen})

    worst = max(touched(start) for start in range(60))
    assert group.max_blocks(1000, chunk_tokens=chunk, block_size=block_size) == worst


def test_a_short_sequence_needs_no_more_than_its_blocks():
    layout = dataclasses.replace(LAYOUT, sliding_windows=(40, None) * 15)
    assert layout.sequence_blocks(33, chunk_tokens=1) == 3 + 3
    assert layout.sequence_blocks(1600, chunk_tokens=1) == 100 + 4
    assert LAYOUT.sequence_blocks(1600, chunk_tokens=1) == 100


def test_what_follows_a_prompt_sees_its_last_tokens_behind_a_window():
    layout = dataclasses.replace(LAYOUT, sliding_windows=(17, None) * 15)
    assert layout.first_tokens(10) == (0, 0)
    assert layout.first_tokens(31) == (0, 15)
    assert layout.first_tokens(31, num_found=14) == (14, 15)
    assert layout.first_tokens(31, num_found=16) == (16, 16)


def test_a_logical_block_names_its_group():
    names = {logical_block(group, index) for group in range(3) for index in range(100)}
    assert len(names) == 300
    assert group_and_index(logical_block(2, 99)) == (2, 99)
    assert logical_block(0, 7) == 7


def test_equal_layouts_have_equal_fingerprints():
    assert dataclasses.replace(LAYOUT).fingerprint == LAYOUT.fingerprint


def test_an_endpoint_is_found_by_its_transport():
    peer = dataclasses.replace(
        peer_info("p", "p-1", bytes_per_block=8), endpoints=(("tcp", "10.0.0.1:5"),)
    )
    assert peer.endpoint("tcp") == "10.0.0.1:5"
    assert peer.endpoint("nixl") is None


def test_ranks_share_the_heads_in_equal_runs():
    whole = dataclasses.replace(LAYOUT, num_kv_heads=4)
    ranks = [whole.for_rank(rank, 2) for rank in range(2)]
    assert [(rank.num_kv_heads, rank.tp_rank, rank.tp_size) for rank in ranks] == [
        (2, 0, 2),
        (2, 1, 2),
    ]
    assert sum(rank.bytes_per_block for rank in ranks) == whole.bytes_per_block
    assert {rank.content_fingerprint for rank in ranks} == {whole.content_fingerprint}
    assert whole.for_rank(0, 1) == whole


@pytest.mark.parametrize(
    ("rank", "size", "named"),
    [(0, 2, "3 KV heads"), (0, 0, "3 KV heads"), (3, 3, "no rank 3 of 3"), (-1, 3, "no rank -1")],
)
def test_heads_that_cannot_be_shared_and_ranks_that_are_not_are_refused(rank, size, named):
    with pytest.raises(ValueError, match=named):
        LAYOUT.for_rank(rank, size)


def test_the_layout_of_a_rank_has_no_ranks():
    with pytest.raises(ValueError, match="rank 1 of 3"):
        LAYOUT.for_rank(1, 3).for_rank(0, 1)
