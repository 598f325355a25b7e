"""The runner and its self check on tiny real models."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from kv_transfer.geometry import BlockId
from tests.fakes.tiny_models import MAX_MODEL_LEN, SERVED, WINDOW, layout_of, make_model
from workers.engine.attention.backend import build_metadata
from workers.engine.attention.interface import use_packed_attention
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.block_table import BlockTable
from workers.engine.build import build_runner
from workers.engine.kv_cache import KVCache
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.runners.self_check import check_model
from workers.engine.runners.stock import StockForward
from workers.engine.sampling_params import SamplingParams
from workers.engine.step import PromptScoring, ScheduledSequence, SequenceId, StepPlan
from workers.errors import UnsupportedModelError
from workers.models.loading import GenerationDefaults, ModelInfo
from workers.runner_choice import Architecture

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model():
    return make_model("llama", SERVED["llama"])


@pytest.fixture
def kv_cache(model):
    return KVCache(layout_of(model, block_size=BLOCK_SIZE), 24, poison=True)


@pytest.fixture
def runner(model, kv_cache):
    return RaggedModelRunner(StockForward(model, TorchBackend(kv_cache)), block_size=BLOCK_SIZE)


def share(sequence_id, tokens, start=0, *, sampling=GREEDY, num_output_tokens=0, num_groups=1):
    """Tokens of a sequence whose blocks, eight for all groups, follow from its id."""
    blocks = tuple(BlockId(3 * j + sequence_id) for j in range(8))
    return ScheduledSequence(
        sequence_id=SequenceId(sequence_id),
        token_ids=tuple(tokens),
        start=start,
        block_tables=tuple(BlockTable(block_ids=blocks[i::num_groups]) for i in range(num_groups)),
        sampling=sampling,
        num_output_tokens=num_output_tokens,
    )


def alone(model, token_ids) -> np.ndarray:
    """fp64 log-probabilities `[tokens, vocabulary]` by the model's own attention."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    finally:
        use_packed_attention(model)
    return logits.double().log_softmax(dim=-1).numpy()


def step(*sequences, step_id=0) -> StepPlan:
    return StepPlan(step_id=step_id, sequences=sequences)


def test_only_sequences_that_sample_get_a_token(runner):
    result = runner.execute(
        step(
            share(0, [5, 6, 7], sampling=None), share(1, [9]), share(2, [1, 2], sampling=None),
            step_id=41,
        )
    )  # fmt: skip

    assert result.step_id == 41
    assert result.token_ids.keys() == {1}
    assert result.failed == {}


def test_a_step_that_samples_nothing_writes_its_keys_and_values(runner, kv_cache):
    result = runner.execute(step(share(0, [5, 6, 7, 8, 9], sampling=None)))

    assert result.token_ids == {}
    for layer_index in range(3):
        for kind in kv_cache.layer(layer_index):
            assert torch.isfinite(kind[0]).all()
            assert torch.isfinite(kind[3, 0]).all()
            assert torch.isnan(kind[3, 1:]).all()


def test_the_head_runs_for_sampled_rows_only(runner, model):
    shapes = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: shapes.append(out.shape[-2]))
    try:
        runner.execute(step(share(0, [5, 6, 7]), share(1, [1] * 9), share(2, [2], sampling=None)))
        runner.execute(step(share(0, [5, 6, 7], sampling=None)))
    finally:
        hook.remove()

    assert shapes == [2, 0]


def test_a_sequence_with_a_hole_fails_alone(runner, kv_cache):
    runner.execute(step(share(0, [5, 6, 7, 8, 9]), share(1, [1, 2, 3, 4, 5, 6])))
    kv_cache.poison([BlockId(1)])

    result = runner.execute(step(share(0, [3], start=5), share(1, [7], start=6)))

    assert result.token_ids.keys() == {0}
    assert result.failed == {1: "the logits up to position 7 are not finite"}


def test_chunks_that_are_scored_get_their_own_rows(runner, model):
    """Two in one step, beside a sequence that only samples; the first is not its prompt's last."""
    first = replace(
        share(0, [5, 6, 7], sampling=None),
        scoring=PromptScoring(token_ids=(6, 7, 8), num_top=2),
    )
    last = replace(share(1, [9, 4, 3, 2]), scoring=PromptScoring(token_ids=(4, 3, 2), num_top=0))

    result = runner.execute(step(first, last, share(2, [1, 2])))

    assert result.token_ids.keys() == {1, 2}
    assert result.prompt_logprobs.keys() == {0, 1}
    for sequence, tokens in ((first, (5, 6, 7, 8)), (last, (9, 4, 3, 2))):
        expected = alone(model, tokens)
        found = result.prompt_logprobs[sequence.sequence_id]
        assert [each.logprob for each in found] == pytest.approx(
            [expected[place - 1, tokens[place]] for place in (1, 2, 3)], abs=1e-4
        )
        assert {len(each.top) for each in found} == {sequence.scoring.num_top}


def test_a_scored_chunk_with_a_hole_fails_alone(runner, kv_cache):
    runner.execute(step(share(0, [5, 6, 7, 8, 9]), share(1, [1, 2, 3, 4, 5, 6])))
    kv_cache.poison([BlockId(1)])
    scoring = PromptScoring(token_ids=(1,), num_top=1)

    result = runner.execute(
        step(
            replace(share(0, [3], start=5, sampling=None), scoring=scoring),
            replace(share(1, [7], start=6, sampling=None), scoring=scoring),
        )
    )

    assert result.prompt_logprobs.keys() == {0}
    assert result.failed.keys() == {1}


def test_min_tokens_counts_the_tokens_before_the_step(runner):
    likeliest = runner.execute(step(share(0, [5, 6, 7]))).token_ids[SequenceId(0)]
    sampling = SamplingParams(
        max_tokens=4, temperature=0.0, min_tokens=2, stop_token_ids=frozenset({likeliest})
    )

    early = runner.execute(step(share(0, [5, 6, 7], sampling=sampling, num_output_tokens=1)))
    late = runner.execute(step(share(0, [5, 6, 7], sampling=sampling, num_output_tokens=2)))

    assert early.token_ids[SequenceId(0)] != likeliest
    assert late.token_ids[SequenceId(0)] == likeliest


def test_a_seeded_draw_does_not_depend_on_batch_or_chunks(model):
    sampling = SamplingParams(max_tokens=4, temperature=2.0, top_p=0.95, seed=77)
    tokens = list(range(10, 27))

    def draw(*parts, beside=()):
        kv_cache = KVCache(layout_of(model, block_size=BLOCK_SIZE), 24, poison=True)
        runner = RaggedModelRunner(
            StockForward(model, TorchBackend(kv_cache)), block_size=BLOCK_SIZE
        )
        for start, end in parts:
            mine = share(0, tokens[start:end], start, sampling=sampling if end == 17 else None)
            result = runner.execute(step(mine, *beside))
        return result.token_ids[SequenceId(0)]

    alone = draw((0, 17))

    assert draw((0, 6), (6, 13), (13, 17)) == alone
    assert draw((0, 16), (16, 17), beside=(share(1, [1, 2, 3]), share(2, [7]))) == alone


def test_two_runners_of_one_model_run_side_by_side_in_threads(model):
    prompts = [[5, 6, 7, 8, 9], list(range(100, 120))]
    layout = layout_of(model, block_size=BLOCK_SIZE)

    def run(prompt, into, barrier):
        backend = TorchBackend(KVCache(layout, 24, poison=True))
        runner = RaggedModelRunner(StockForward(model, backend), block_size=BLOCK_SIZE)
        barrier.wait()
        for _ in range(20):
            into.append(runner.execute(step(share(0, prompt))).token_ids[SequenceId(0)])

    alone = [[], []]
    for prompt, into in zip(prompts, alone, strict=True):
        run(prompt, into, threading.Barrier(1))
    together, barrier = [[], []], threading.Barrier(2)
    threads = [
        threading.Thread(target=run, args=(prompt, into, barrier))
        for prompt, into in zip(prompts, together, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert together == alone


def test_a_step_without_sequences_is_refused(runner):
    with pytest.raises(ValueError, match="step 3 has no sequences"):
        runner.execute(step(step_id=3))


def test_logits_are_those_of_the_rows_asked_for(runner, model):
    plan = step(share(0, [5, 6, 7, 8, 9]), share(1, [1, 2]))

    logits = runner.logits(build_metadata(plan, BLOCK_SIZE), np.array([1, 6]))

    everything = runner.logits(build_metadata(plan, BLOCK_SIZE), np.arange(7))
    torch.testing.assert_close(logits, everything[[1, 6]])


class BrokenBackend(TorchBackend):
    """The CPU backend with one planted fault."""

    def __init__(self, kv_cache, fault):
        super().__init__(kv_cache)
        self._fault = fault

    def forward(self, layer_index, q, k, v, scoring):
        return super().forward(layer_index, q, k, v, self._fault(scoring))


FAULTS = {
    "gemma2": [
        lambda scoring: replace(scoring, sliding_window=scoring.sliding_window and 7),
        lambda scoring: replace(scoring, sliding_window=None),
        lambda scoring: replace(scoring, softcap=None),
        lambda scoring: replace(scoring, scale=scoring.scale * 1.02),
    ],
    "gpt_oss": [lambda scoring: replace(scoring, sinks=None)],
    "llama": [lambda scoring: replace(scoring, sliding_window=12)],
}


@pytest.mark.parametrize(
    ("family", "fault", "dtype"),
    [(family, fault, torch.float32) for family in FAULTS for fault in FAULTS[family]]
    # The others change logits by less than 16 bits may, from one right way to another.
    + [("gpt_oss", FAULTS["gpt_oss"][0], torch.bfloat16)],
)
def test_the_self_check_sees_a_wrong_attention(family, fault, dtype, monkeypatch):
    model = make_model(family, SERVED[family]).to(dtype)
    monkeypatch.setattr(
        "workers.engine.runners.comparison.TorchBackend",
        lambda kv_cache: BrokenBackend(kv_cache, fault),
    )

    with pytest.raises(UnsupportedModelError, match="logits differ by"):
        check_model(model, layout_of(model, block_size=16), max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_self_check_passes_in_both_dtypes_and_leaves_the_model_usable(dtype):
    model = make_model("gemma2", SERVED["gemma2"]).to(dtype)
    layout = layout_of(model, block_size=16)

    check_model(model, layout, max_model_len=MAX_MODEL_LEN)

    runner = RaggedModelRunner(
        StockForward(model, TorchBackend(KVCache(layout, 24))), block_size=16
    )
    plan = step(share(0, [5, 6], num_groups=len(layout.groups)))
    assert runner.execute(plan).token_ids.keys() == {0}


def test_the_self_check_wants_a_layout_that_keeps_what_is_seen():
    model = make_model("gemma2", SERVED["gemma2"])
    kept = replace(layout_of(model, block_size=16), sliding_windows=(WINDOW, WINDOW - 1, WINDOW))

    with pytest.raises(UnsupportedModelError, match=r"layer 1 .*=None, the KV layout keeps 7 tok"):
        check_model(model, kept, max_model_len=MAX_MODEL_LEN)


def test_the_self_check_wants_the_layouts_number_of_layers():
    model = make_model("llama", SERVED["llama"])
    layout = layout_of(
        make_model("llama", SERVED["llama"] | {"num_hidden_layers": 2}), block_size=4
    )

    with pytest.raises(
        UnsupportedModelError, match=r"each of its 2 layers .* \{0: 1, 1: 1, 2: 1\}"
    ):
        check_model(model, layout, max_model_len=MAX_MODEL_LEN)


def test_the_self_check_names_the_architecture_of_a_model_that_raises():
    model = make_model("llama", SERVED["llama"])
    model.model.norm.forward = lambda _: math.sqrt(-1)

    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .* raised ValueError"):
        check_model(model, layout_of(model, block_size=4), max_model_len=MAX_MODEL_LEN)


def make_info(model) -> ModelInfo:
    config = model.config
    return ModelInfo(
        architecture="LlamaForCausalLM",
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        weights_dtype="float32",
        weights_size_bytes=0,
        num_parameters=0,
        eos_token_ids=(),
        generation_defaults=GenerationDefaults(),
        licence=None,
        weights_digest="d",
        architecture_facts=Architecture(model_type="llama"),
    )


@pytest.fixture
def own_model():
    """One that a test may give away: build lays its weights out anew."""
    return make_model("llama", SERVED["llama"])


@pytest.fixture
def same_threads():
    threads = torch.get_num_threads()
    yield threads
    torch.set_num_threads(threads)


def test_build_makes_a_checked_runner_over_a_pool_of_the_size_asked_for(own_model, same_threads):
    runner, kv_cache = build_runner(
        own_model,
        info=make_info(own_model),
        layout=layout_of(own_model, block_size=BLOCK_SIZE),
        num_blocks=24,
        threads=1,
    )

    assert torch.get_num_threads() == 1
    assert (runner.choice.tier, runner.choice.cause) == ("llama_shaped", "verified_family")
    assert kv_cache.num_blocks == 24
    assert runner.execute(step(share(0, [5, 6, 7]))).token_ids.keys() == {0}
    assert torch.isfinite(kv_cache.layer(0)[0][0, :3]).all()


def test_build_loads_a_model_directory(own_model, tmp_path, same_threads):
    own_model.save_pretrained(tmp_path)

    runner, _ = build_runner(
        tmp_path,
        info=make_info(own_model),
        layout=layout_of(own_model, block_size=BLOCK_SIZE),
        num_blocks=24,
        threads=same_threads,
    )

    own = RaggedModelRunner(
        StockForward(
            own_model, TorchBackend(KVCache(layout_of(own_model, block_size=BLOCK_SIZE), 24))
        ),
        block_size=BLOCK_SIZE,
    )
    plan = step(share(0, [5, 6, 7]))
    assert runner.execute(plan) == own.execute(plan)


def test_build_refuses_a_window_in_which_rotary_frequencies_change(same_threads):
    changes = {
        **SERVED["llama"],
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    }
    model = make_model("llama", changes)
    layout = layout_of(model, block_size=BLOCK_SIZE)
    info = make_info(model)
    common = {"info": info, "layout": layout, "num_blocks": 4}

    build_runner(model, **common, threads=same_threads, max_model_len=64)
    with pytest.raises(UnsupportedModelError, match="when a sequence of 65 tokens is in the batch"):
        build_runner(model, **common, threads=same_threads, max_model_len=65)
