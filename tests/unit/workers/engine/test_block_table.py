import pytest

from kv_transfer.geometry import BlockId, KVGroup
from workers.engine.block_table import BlockTable, Claim, TableRules

TABLE = BlockTable(start=2, block_ids=(BlockId(9), BlockId(4), BlockId(7)))
RULES = TableRules(
    groups=(KVGroup(layers=(0,), sliding_window=None), KVGroup(layers=(1,), sliding_window=6)),
    block_size=4,
    chunk_tokens=3,
)
SLIDING = RULES.groups[1]


def test_blocks_go_by_their_index_in_the_sequence():
    assert [TABLE.block(index) for index in (2, 3, 4)] == [9, 4, 7]
    assert TABLE.end == 5


@pytest.mark.parametrize("index", [0, 1, 5])
def test_a_block_that_is_not_in_the_table_is_refused(index):
    with pytest.raises(IndexError, match="not among 2 to 4"):
        TABLE.block(index)


@pytest.mark.parametrize(
    ("first", "end", "found"),
    [(0, 2, ()), (0, 3, (9,)), (3, 5, (4, 7)), (4, 9, (7,)), (5, 9, ()), (3, 3, ())],
)
def test_a_cut_names_the_blocks_that_are_there(first, end, found):
    assert TABLE.cut(first, end) == found


def test_a_block_is_replaced_at_its_index_in_the_sequence():
    assert TABLE.with_block(3, BlockId(8)) == BlockTable(
        start=2, block_ids=(BlockId(9), BlockId(8), BlockId(7))
    )


def test_a_sequence_claims_what_it_may_hold_less_the_hit_that_it_looks_at():
    assert RULES.max_blocks(40) == (10, 3)
    assert RULES.claims(40, hit_end=0) == (
        Claim(hit_start=0, start=0, num_own=10),
        Claim(hit_start=0, start=0, num_own=3),
    )
    assert RULES.claims(40, hit_end=5) == (
        Claim(hit_start=0, start=0, num_own=5),
        Claim(hit_start=3, start=3, num_own=1),
    )


def test_a_prompt_that_arrives_claims_the_room_to_compute_it_as_well():
    """Of the hit's blocks 3 and 4, its output will see one; the other is for computing from 5."""
    assert RULES.claims(40, hit_end=5, landing=21)[1] == Claim(hit_start=3, start=4, num_own=2)


def test_a_prompt_that_arrives_far_behind_its_hit_claims_all_that_its_output_sees():
    assert RULES.claims(40, hit_end=5, landing=33)[1] == Claim(hit_start=3, start=7, num_own=3)


def test_a_chunk_needs_what_its_first_token_sees_and_room_for_itself():
    assert RULES.needed(SLIDING, 40, position=21, is_decoding=False) == (4, 7)
    assert RULES.needed(SLIDING, 40, position=21, is_decoding=True) == (4, 7)
    assert RULES.needed(SLIDING, 40, position=38, is_decoding=False) == (8, 10)


def test_only_rules_with_a_window_let_sequences_forget():
    assert RULES.has_sliding_window
    assert not TableRules(groups=RULES.groups[:1], block_size=4, chunk_tokens=3).has_sliding_window
