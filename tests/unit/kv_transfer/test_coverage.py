import dataclasses

import pytest

from kv_transfer.coverage import Coverage
from kv_transfer.geometry import BlockId, LogicalBlock, group_and_index, logical_block
from kv_transfer.handoff import GrantedBlock
from kv_transfer.transport import CorruptTransferError
from tests.fakes.block_memory import granted_blocks


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3)]
)
def test_expects_the_blocks_of_the_tokens_and_no_more(num_tokens, expected):
    assert Coverage(num_tokens=num_tokens, block_size=16).expected_blocks == expected


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33])
def test_is_full_only_when_the_last_block_has_landed(num_tokens):
    coverage = Coverage(num_tokens=num_tokens, block_size=16)
    blocks = granted_blocks(num_tokens, 16, list(range(9)))
    for landed, block in enumerate(reversed(blocks)):
        assert not coverage.is_full
        assert coverage.blocks_landed == landed
        coverage.mark(block)
        coverage.check_invariants()
    assert coverage.is_full


def test_a_repeated_block_is_refused_and_counts_once():
    coverage = Coverage(num_tokens=32, block_size=16)
    block = granted_blocks(32, 16, [0, 1])[0]
    coverage.mark(block)
    with pytest.raises(CorruptTransferError, match="twice"):
        coverage.mark(block)
    assert coverage.blocks_landed == 1
    assert not coverage.is_full
    coverage.check_invariants()


@pytest.mark.parametrize("logical", [-1, 2, 10**6])
def test_a_block_outside_the_range_is_refused(logical):
    coverage = Coverage(num_tokens=32, block_size=16)
    block = dataclasses.replace(granted_blocks(32, 16, [0, 1])[0], logical=LogicalBlock(logical))
    with pytest.raises(CorruptTransferError, match="outside"):
        coverage.mark(block)
    assert coverage.blocks_landed == 0


@pytest.mark.parametrize(("logical", "tokens"), [(0, 15), (0, 17), (0, 0), (1, 16), (1, 3), (1, 5)])
def test_a_block_with_another_number_of_tokens_is_refused(logical, tokens):
    coverage = Coverage(num_tokens=20, block_size=16)
    block = dataclasses.replace(granted_blocks(20, 16, [0, 1])[logical], valid_tokens=tokens)
    with pytest.raises(CorruptTransferError, match="tokens"):
        coverage.mark(block)
    assert coverage.blocks_landed == 0


@pytest.mark.parametrize(("num_tokens", "block_size"), [(0, 16), (-1, 16), (5, 0)])
def test_nothing_to_cover_is_a_mistake(num_tokens, block_size):
    with pytest.raises(ValueError, match="positive"):
        Coverage(num_tokens=num_tokens, block_size=block_size)


def test_blocks_that_are_there_already_are_not_expected():
    coverage = Coverage(num_tokens=10, block_size=4, first_blocks=(1,))
    assert coverage.expected_blocks == 2
    blocks = granted_blocks(10, 4, [5, 6, 7])
    with pytest.raises(CorruptTransferError, match="block 0 of group 0 is outside the 2 expected"):
        coverage.mark(blocks[0])
    for block in blocks[1:]:
        assert not coverage.is_full
        coverage.mark(block)
        coverage.check_invariants()
    assert coverage.is_full


@pytest.mark.parametrize("first_blocks", [(-1,), (2,), (0, 3), ()])
def test_something_must_be_left_to_land(first_blocks):
    with pytest.raises(ValueError, match="leave nothing of 8 tokens"):
        Coverage(num_tokens=8, block_size=4, first_blocks=first_blocks)


def test_every_group_is_expected_from_its_own_first_block_on():
    coverage = Coverage(num_tokens=10, block_size=4, first_blocks=(0, 2))
    assert coverage.expected == tuple(
        logical_block(*place) for place in ((0, 0), (0, 1), (0, 2), (1, 2))
    )
    behind_the_window = granted(logical_block(1, 1), 4)
    with pytest.raises(CorruptTransferError, match="block 1 of group 1 is outside the 4 expected"):
        coverage.mark(behind_the_window)
    for logical in coverage.expected:
        assert not coverage.is_full
        coverage.mark(granted(logical, 2 if group_and_index(logical)[1] == 2 else 4))
        coverage.check_invariants()
    assert coverage.is_full


def granted(logical: LogicalBlock, valid_tokens: int) -> GrantedBlock:
    return GrantedBlock(
        logical=logical, block_id=BlockId(3), generation=0, valid_tokens=valid_tokens
    )
