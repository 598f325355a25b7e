import numpy as np
import psutil
import pytest
import torch

from kv_transfer.geometry import BlockId, KVLayout
from kv_transfer.shared_memory import SharedMapping, SharedRegion
from workers.engine.kv_cache import KVCache, torch_dtype


def make_layout(**changes) -> KVLayout:
    fields = {
        "model_digest": "m",
        "dtype": "float32",
        "element_bytes": 4,
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 4,
        "block_size": 8,
    }
    return KVLayout(**(fields | changes))


@pytest.fixture
def layout() -> KVLayout:
    return make_layout()


@pytest.fixture
def kv_cache(layout) -> KVCache:
    return KVCache(layout, 5, poison=True)


def test_a_block_is_its_bytes_in_place(kv_cache, layout):
    keys, values = kv_cache.layer(1)
    keys[3] = 1.5
    values[3] = -2.0

    block = kv_cache.block(BlockId(3))

    assert block.nbytes == layout.bytes_per_block == kv_cache.bytes_per_block
    assert block.format == "B"
    assert block.contiguous
    elements = np.frombuffer(block, np.float32).reshape(3, 2, 8, 2, 4)
    assert (elements[1, 0] == 1.5).all()
    assert (elements[1, 1] == -2.0).all()
    assert np.isnan(elements[[0, 2]]).all()


def test_writing_a_blocks_bytes_changes_that_block_only(kv_cache):
    received = np.arange(kv_cache.bytes_per_block // 4, dtype=np.float32)

    kv_cache.block(BlockId(2))[:] = received.tobytes()

    for layer_index in range(3):
        for kind, view in enumerate(kv_cache.layer(layer_index)):
            expected = received.reshape(3, 2, 8, 2, 4)[layer_index, kind]
            assert np.array_equal(view[2].numpy(), expected)
            assert torch.isnan(view[[0, 1, 3, 4]]).all()


def test_two_bytes_of_bfloat16_are_two_bytes_of_the_block():
    kv_cache = KVCache(make_layout(dtype="bfloat16", element_bytes=2), 2)
    kv_cache.layer(0)[0][1] = 1.0

    block = kv_cache.block(BlockId(1))

    assert bytes(block[:2]) == b"\x80\x3f"
    assert block.nbytes == kv_cache.layout.bytes_per_block


def test_token_index_names_the_row_of_each_slot_in_every_layer(kv_cache):
    slots = np.array([0, 7, 8, 3 * 8 + 5, 4 * 8 + 7])

    index = kv_cache.token_index(slots)

    assert index.shape == (5,)
    for layer_index, kinds in enumerate(kv_cache.token_rows):
        for kind, rows in enumerate(kinds):
            marks = torch.arange(5.0).view(5, 1, 1).expand(5, 2, 4) + 10 * layer_index + 100 * kind
            rows.index_copy_(0, index, marks)
    for layer_index in range(3):
        for kind, view in enumerate(kv_cache.layer(layer_index)):
            written = view.flatten(0, 1)[torch.from_numpy(slots), 0, 0]
            assert (written == torch.arange(5.0) + 10 * layer_index + 100 * kind).all()
            assert torch.isfinite(view).sum() == 5 * 2 * 4


def test_block_index_names_the_rows_of_each_block_in_every_layer(kv_cache):
    for layer_index in range(3):
        for kind, view in enumerate(kv_cache.layer(layer_index)):
            for block_id in range(5):
                view[block_id] = block_id + 10 * layer_index + 100 * kind
    block_ids = np.array([[4, 0], [2, 2]])

    index = kv_cache.block_index(block_ids)

    assert index.shape == (2, 2, 2)
    for layer_index, block_rows in enumerate(kv_cache.block_rows):
        for kind in range(2):
            rows = block_rows[index[kind]]
            expected = torch.from_numpy(block_ids) + 10.0 * layer_index + 100 * kind
            assert torch.equal(rows[..., 0], expected)
            assert torch.equal(rows[..., -1], expected)


def test_layers_with_one_place_in_different_groups_meet_in_no_block():
    """Layers 0 and 2 have a window each, layer 1 sees everything: blocks of one layer."""
    layout = make_layout(sliding_windows=(4, None, 4))
    kv_cache = KVCache(layout, 3, poison=True)
    assert kv_cache.bytes_per_block == make_layout().bytes_per_block // 3

    for block_id, layer_index in enumerate((1, 0, 2)):  # as the groups are ordered
        index = kv_cache.token_index(np.arange(8) + 8 * block_id)
        for kind, rows in enumerate(kv_cache.token_rows[layer_index]):
            rows.index_copy_(0, index, torch.full((8, 2, 4), 10.0 * layer_index + kind))

    for block_id, layer_index in enumerate((1, 0, 2)):
        elements = np.frombuffer(kv_cache.block(BlockId(block_id)), np.float32).reshape(2, -1)
        assert (elements == [[10.0 * layer_index], [10.0 * layer_index + 1]]).all()
        rows = kv_cache.block_rows[layer_index][kv_cache.block_index(np.array([block_id]))]
        assert np.array_equal(rows[:, 0].numpy(), elements)


def test_layers_of_one_group_lie_in_one_block():
    layout = make_layout(num_layers=4, sliding_windows=(4, None, 4, None))
    kv_cache = KVCache(layout, 2, poison=True)

    for layer_index in range(4):
        block_id = 0 if layer_index % 2 else 1
        for view in kv_cache.layer(layer_index):
            view[block_id] = layer_index

    for block_id, layers in ((0, (1, 3)), (1, (0, 2))):
        elements = np.frombuffer(kv_cache.block(BlockId(block_id)), np.float32).reshape(2, -1)
        assert (elements == [[layer] for layer in layers]).all()


def test_poison_makes_used_blocks_unreadable_again(kv_cache):
    keys, values = kv_cache.layer(0)
    keys.zero_()
    values.zero_()

    kv_cache.poison([BlockId(1)])

    assert torch.isnan(keys[1]).all()
    assert torch.isnan(values[1]).all()
    assert not torch.isnan(keys[[0, 2, 3, 4]]).any()


def test_untouched_blocks_cost_no_memory():
    layout = make_layout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
    num_blocks = 2**31 // layout.bytes_per_block
    before = psutil.Process().memory_info().rss

    kv_cache = KVCache(layout, num_blocks)
    kv_cache.block(BlockId(num_blocks - 1))[:4] = b"last"

    assert kv_cache.num_blocks * kv_cache.bytes_per_block == 2**31
    assert psutil.Process().memory_info().rss - before < 2**26


@pytest.mark.parametrize("block_id", [-1, 5])
def test_a_block_that_does_not_exist_is_refused(kv_cache, block_id):
    with pytest.raises(IndexError, match=f"block {block_id} is not one of the 5"):
        kv_cache.block(BlockId(block_id))
    with pytest.raises(IndexError):
        kv_cache.poison([BlockId(block_id)])


def test_a_block_is_the_same_bytes_as_a_tensor(kv_cache):
    kv_cache.tensor(BlockId(3))[:] = 7

    assert bytes(kv_cache.block(BlockId(3))) == bytes([7]) * kv_cache.bytes_per_block
    assert bytes(kv_cache.block(BlockId(2))) != bytes([7]) * kv_cache.bytes_per_block
    with pytest.raises(IndexError, match="block 5 is not one of the 5"):
        kv_cache.tensor(BlockId(5))


def test_memory_off_the_host_has_no_bytes_to_show(layout):
    kv_cache = KVCache(layout, 1, device="meta")

    assert kv_cache.kind == "cuda"
    assert KVCache(layout, 1).kind == "host"
    with pytest.raises(TypeError, match="meta"):
        kv_cache.block(BlockId(0))


def test_a_layout_that_contradicts_its_dtype_is_refused():
    with pytest.raises(ValueError, match=r"float32 has 4 bytes, the layout says 2"):
        KVCache(make_layout(element_bytes=2), 1)


def test_an_unknown_dtype_is_refused_by_name():
    with pytest.raises(ValueError, match="fp32"):
        torch_dtype("fp32")


def test_a_cache_without_blocks_is_refused(layout):
    with pytest.raises(ValueError, match="at least one block"):
        KVCache(layout, 0)


def test_blocks_in_a_region_are_what_another_process_reads(layout):
    region = SharedRegion(5 * layout.bytes_per_block)
    kv_cache = KVCache(layout, 5, region=region)
    mapping = SharedMapping(region.descriptor)

    kv_cache.layer(1)[0][3] = 1.5

    start = 3 * layout.bytes_per_block
    assert mapping.view(start, layout.bytes_per_block) == kv_cache.block(BlockId(3))
    assert np.frombuffer(mapping.view(start, layout.bytes_per_block), np.float32).max() == 1.5
    assert kv_cache.region is region
    mapping.close()
    region.close()


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_region_of_another_size_is_refused(layout, extra):
    region = SharedRegion((5 + extra) * layout.bytes_per_block)
    with pytest.raises(ValueError, match=f"{5 * layout.bytes_per_block} bytes of KV on cpu"):
        KVCache(layout, 5, region=region)
    region.close()
