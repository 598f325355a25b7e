"""The CPU backend against attention written out token by token, in fp64."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.geometry import BlockId, KVLayout
from workers.engine.attention.backend import LayerScoring, build_metadata
from workers.engine.attention.masked import causal_bias
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.block_table import BlockTable
from workers.engine.kv_cache import KVCache
from workers.engine.sampling_params import SamplingParams
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 6, 2, 8, 4
SCALE = 0.3


def make_layout(dtype: torch.dtype) -> KVLayout:
    return KVLayout(
        model_digest="m",
        dtype=str(dtype).removeprefix("torch."),
        element_bytes=dtype.itemsize,
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
    )


def scheduled(sequence_id, start, length, block_ids, sampling=GREEDY) -> ScheduledSequence:
    return ScheduledSequence(
        sequence_id=SequenceId(sequence_id),
        token_ids=tuple(range(start, start + length)),
        start=start,
        block_tables=(BlockTable(block_ids=tuple(map(BlockId, block_ids))),),
        sampling=sampling,
    )


def reference(q, k, v, *, window=None, softcap=None, sinks=None):
    """One query `[heads, head_dim]`, the last of the tokens in k, v; fp64, one head at a time."""
    q, k, v = (part.double().numpy() for part in (q, k, v))
    first = 0 if window is None else max(0, len(k) - window)
    heads = []
    for head in range(len(q)):
        kv_head = head // (len(q) // k.shape[1])
        scores = k[first:, kv_head] @ q[head] * SCALE
        if softcap is not None:
            scores = np.tanh(scores / softcap) * softcap
        weights = np.exp(scores)
        total = weights.sum() + (0.0 if sinks is None else math.exp(sinks[head]))
        heads.append(weights / total @ v[first:, kv_head])
    return torch.from_numpy(np.stack(heads))


class World:
    """A poisoned cache, a backend, and by sequence and layer all K and V that there were so far."""

    def __init__(self, num_sequences, dtype=torch.float32, blocks_each=40, seed=0, **options):
        self.dtype = dtype
        self.random = torch.Generator().manual_seed(seed)
        self.cache = self.make_cache(dtype, num_sequences * blocks_each)
        self.backend = TorchBackend(self.cache, **options)
        order = torch.randperm(self.cache.num_blocks, generator=self.random).tolist()
        self.tables = [order[i::num_sequences] for i in range(num_sequences)]
        empty = torch.empty(0, KV_HEADS, HEAD_DIM, dtype=dtype)
        self.history = [[(empty, empty) for _ in range(LAYERS)] for _ in range(num_sequences)]

    def make(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def make_cache(self, dtype, num_blocks):
        return KVCache(make_layout(dtype), num_blocks, poison=True)

    def tables_of(self, sequence, start):
        return (BlockTable(block_ids=tuple(self.tables[sequence])),)

    def share(self, sequence, start, length):
        entry = scheduled(sequence, start, length, ())
        return replace(entry, block_tables=self.tables_of(sequence, start))

    def run(self, lengths, **options):
        """One step: sequence i brings lengths[i] tokens; returns (result, expected) per layer."""
        members = [i for i, length in enumerate(lengths) if length]
        plan = StepPlan(
            step_id=0,
            sequences=tuple(self.share(i, len(self.history[i][0][0]), lengths[i]) for i in members),
        )
        self.backend.prepare(build_metadata(plan, BLOCK_SIZE))
        return [self.run_layer(layer, members, lengths, **options) for layer in range(LAYERS)]

    def run_layer(self, layer, members, lengths, *, window=None, softcap=None, sinks=None):
        num_tokens = sum(lengths)
        q = self.make(num_tokens, HEADS, HEAD_DIM)
        k, v = (self.make(num_tokens, KV_HEADS, HEAD_DIM) for _ in range(2))
        scoring = LayerScoring(scale=SCALE, sliding_window=window, softcap=softcap, sinks=sinks)
        out = self.backend.forward(layer, q, k, v, scoring)
        expected, row = [], 0
        for i in members:
            keys, values = self.history[i][layer]
            rows = slice(row, row + lengths[i])
            keys, values = torch.cat([keys, k[rows]]), torch.cat([values, v[rows]])
            self.history[i][layer] = (keys, values)
            for j in range(lengths[i]):
                end = len(keys) - lengths[i] + j + 1
                expected.append(
                    reference(
                        q[row + j],
                        keys[:end],
                        values[:end],
                        window=window,
                        softcap=softcap,
                        sinks=sinks,
                    )
                )
            row += lengths[i]
        return out, torch.stack(expected)


def assert_same(results, tolerance=2e-6):
    for out, expected in results:
        assert out.shape == expected.shape
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])
VARIANTS = [
    {},
    {"window": 1},
    {"window": 5},
    {"window": 64},
    {"softcap": 1.5},
    {"sinks": SINKS},
    {"window": 3, "softcap": 2.0},
    {"window": 6, "sinks": SINKS},
]


@pytest.mark.parametrize("options", VARIANTS, ids="+".join)
def test_every_kind_of_step_matches_attention_written_out(options):
    world = World(3)
    for lengths in [
        (9, 0, 0),  # a whole prompt
        (1, 6, 0),  # decode beside a whole prompt
        (1, 3, 11),  # decode, a chunk over a prefix, a whole prompt
        (1, 1, 1),  # decodes of unequal length in one call
        (4, 1, 2),  # several query tokens per decode
        (0, 1, 0),  # one decode alone
    ]:
        assert_same(world.run(lengths, **options))


@pytest.mark.parametrize("prompts", list(itertools.permutations((20, 10, 2, 150))))
def test_decodes_of_very_unequal_length_match_attention_written_out(prompts):
    """They attend in groups by length, whatever their order in the step."""
    world = World(4)
    for lengths in [prompts, (1, 1, 1, 1), (1, 1, 1, 1)]:
        assert_same(world.run(lengths))


@pytest.mark.parametrize("max_gather_bytes", [0, 3000, 6000])
def test_decodes_in_several_small_gathers_match_attention_written_out(max_gather_bytes):
    world = World(5, max_gather_bytes=max_gather_bytes)
    for lengths in [(9, 2, 17, 10, 11), (1, 1, 1, 1, 1), (1, 1, 1, 1, 1)]:
        assert_same(world.run(lengths))


def test_decodes_of_equal_length_match_attention_written_out():
    world = World(3)
    for lengths in [(7, 7, 7), (1, 1, 1), (1, 1, 1)]:
        assert_same(world.run(lengths))


def test_decodes_behind_a_chunk_in_the_plan_match_attention_written_out():
    world = World(3)
    for lengths in [(3, 5, 2), (2, 1, 1)]:
        assert_same(world.run(lengths))


def test_bfloat16_is_right_to_its_precision():
    world = World(3, dtype=torch.bfloat16)
    for lengths in [(9, 4, 0), (1, 3, 11), (1, 1, 1)]:
        assert_same(world.run(lengths), tolerance=0.03)


def test_queries_split_from_one_projection_need_not_be_contiguous():
    world = World(1)
    world.make = lambda *shape: torch.randn(shape[0], 3, *shape[1:], generator=world.random)[:, 1]

    for length in (5, 3, 1):
        assert_same(world.run((length,)))


def test_a_hole_in_the_prefix_is_not_attended_to_in_silence():
    world = World(1)
    world.run((9,))
    world.cache.poison([BlockId(world.tables[0][1])])

    ((out, _), *_) = world.run((1,))

    assert torch.isnan(out).all()


def test_a_hole_in_one_sequence_leaves_the_others_alone():
    world = World(2)
    world.run((9, 8))
    world.cache.poison([BlockId(world.tables[0][1])])

    for out, expected in world.run((1, 1)):
        assert torch.isnan(out[0]).all()
        torch.testing.assert_close(out[1].double(), expected[1], atol=2e-6, rtol=2e-6)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(*(st.integers(0, 6) for _ in range(3))).filter(any), min_size=1, max_size=6),
    st.sampled_from(VARIANTS),
)
def test_any_split_into_steps_matches_attention_written_out(steps, options):
    world = World(3, blocks_each=10)
    for lengths in steps:
        assert_same(world.run(lengths, **options))


class SlidingWorld(World):
    """Layer 0 sees everything, layer 1 the last WINDOW tokens, in tables that move on."""

    WINDOW = 6
    LAYOUT = replace(make_layout(torch.float32), sliding_windows=(None, WINDOW))

    def make_cache(self, dtype, num_blocks):
        return KVCache(self.LAYOUT, num_blocks, poison=True)

    def tables_of(self, sequence, start):
        order = self.tables[sequence]
        full, sliding = order[::2], order[1::2]
        first = self.LAYOUT.groups[1].first_block(start, BLOCK_SIZE)
        given_up = [BlockId(block) for block in sliding[:first]]
        self.cache.poison(given_up)  # whoever has them now, their content is not this sequence's
        return (
            BlockTable(block_ids=tuple(full)),
            BlockTable(start=first, block_ids=tuple(sliding[first:])),
        )

    def run_layer(self, layer, members, lengths, **options):
        window = self.WINDOW if layer == 1 else None
        return super().run_layer(layer, members, lengths, window=window, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sinks": SINKS}], ids="+".join)
def test_tables_that_moved_on_show_all_that_a_window_shows(options):
    world = SlidingWorld(3)
    for lengths in [
        (20, 3, 9),
        (1, 4, 1),  # decode, a chunk, decode
        (1, 1, 1),
        (7, 1, 2),
        (1, 1, 1),
        (1, 30, 0),
        (1, 1, 1),
    ]:
        assert_same(world.run(lengths, **options))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(*(st.integers(0, 9) for _ in range(3))).filter(any), min_size=1, max_size=8)
)
def test_any_split_into_steps_is_right_behind_a_window(steps):
    world = SlidingWorld(3)
    for lengths in steps:
        assert_same(world.run(lengths))


def test_a_step_without_a_table_for_each_group_is_refused():
    backend = TorchBackend(KVCache(SlidingWorld.LAYOUT, 4))
    plan = StepPlan(step_id=1, sequences=(scheduled(7, start=0, length=1, block_ids=(1,)),))

    with pytest.raises(ValueError, match="tables for 1 groups of layers, the KV layout has 2"):
        backend.prepare(build_metadata(plan, BLOCK_SIZE))


def test_a_table_that_gave_up_the_steps_own_tokens_is_refused():
    entry = scheduled(7, start=3, length=2, block_ids=(9,))
    table = BlockTable(start=1, block_ids=(BlockId(9),))
    plan = StepPlan(step_id=1, sequences=(replace(entry, block_tables=(table,)),))

    with pytest.raises(IndexError, match=r"tokens 3 to 4 need blocks up to 1, .* has 1 to 1"):
        build_metadata(plan, BLOCK_SIZE)


def test_metadata_counts_tokens_from_a_tables_first_block_on():
    entry = scheduled(7, start=9, length=2, block_ids=())
    table = BlockTable(start=1, block_ids=(BlockId(5), BlockId(3), BlockId(8)))
    plan = StepPlan(step_id=1, sequences=(replace(entry, block_tables=(table,)),))

    (group,) = build_metadata(plan, BLOCK_SIZE).groups

    assert group.seq_lens.tolist() == [7]
    assert group.slot_mapping.tolist() == [13, 14]
    assert [table.tolist() for table in group.block_tables] == [[5, 3]]


def test_metadata_lays_the_sequences_out_one_after_the_other():
    plan = StepPlan(
        step_id=1,
        sequences=(
            scheduled(7, start=5, length=1, block_ids=(9, 2, 4)),
            scheduled(8, start=2, length=4, block_ids=(3, 6), sampling=None),
            scheduled(9, start=0, length=2, block_ids=(1,)),
        ),
    )

    meta = build_metadata(plan, BLOCK_SIZE)

    assert meta.input_ids.tolist() == [5, 2, 3, 4, 5, 0, 1]
    assert meta.positions.tolist() == [5, 2, 3, 4, 5, 0, 1]
    assert meta.cu_seqlens_q.tolist() == [0, 1, 5, 7]
    (group,) = meta.groups
    assert group.slot_mapping.tolist() == [9, 14, 15, 24, 25, 4, 5]
    assert group.seq_lens.tolist() == [6, 6, 2]
    assert [table.tolist() for table in group.block_tables] == [[9, 2], [3, 6], [1]]
    assert meta.sampled_rows.tolist() == [0, 6]


def test_a_block_table_too_short_for_its_tokens_is_refused():
    plan = StepPlan(step_id=1, sequences=(scheduled(7, start=4, length=1, block_ids=(9,)),))

    with pytest.raises(IndexError, match="tokens 4 to 4 need blocks up to 1, the table has 0 to 0"):
        build_metadata(plan, BLOCK_SIZE)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_bias_shows_exactly_the_tokens_that_a_query_may_see(window):
    bias = causal_bias(3, 7, window, dtype=torch.float32, device=torch.device("cpu"))

    for query, token in itertools.product(range(3), range(7)):
        own = 4 + query
        is_seen = token <= own and (window is None or token > own - window)
        assert bias[query, token] == (0.0 if is_seen else -np.inf)
