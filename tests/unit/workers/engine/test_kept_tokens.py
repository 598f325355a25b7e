"""The border that filters draw through a vocabulary, against one that sorts it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.engine import kept_tokens as module
from workers.engine.kept_tokens import kept_tokens
from workers.engine.sampler import SamplingRow, sample
from workers.engine.sampling_params import SamplingParams


def kept_by_sorting(logits, *, temperature, top_k, top_p, min_p):
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order].astype(np.float64) - float(logits.max())) / temperature)
    count = min(top_k, len(logits)) if top_k else len(logits)
    if top_p < 1:
        before = weights[:count].cumsum() - weights[:count]
        count = max(1, np.count_nonzero(before < top_p * weights[:count].sum()))
    return sorted(order[:count][weights[:count] >= min_p].tolist())


@st.composite
def vocabularies(draw):
    """Logits, with equal ones, a few far off, and some that are impossible."""
    size = draw(st.sampled_from([1, 40, 600, 5_000]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = random.normal(size=size) * draw(st.sampled_from([0.0, 1e-6, 0.1, 3.0]))
    logits = logits.round(draw(st.sampled_from([1, 9])))
    logits[random.integers(size, size=draw(st.integers(0, 3)))] = 1e4
    impossible = random.random(size) < draw(st.sampled_from([0.0, 0.5]))
    impossible[0] = False
    logits[impossible] = -np.inf
    return logits.astype(np.float32)


@given(
    logits=vocabularies(),
    temperature=st.sampled_from([0.3, 1.0, 40.0]),
    top_k=st.sampled_from([0, 1, 30, 4_000]),
    top_p=st.sampled_from([0.01, 0.5, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_the_same_tokens_are_kept_as_by_sorting(logits, **filters):
    kept = set(kept_tokens(logits, **filters).tolist())
    different = sorted(kept ^ set(kept_by_sorting(logits, **filters)))
    # Sums in another order may put the border one token off, as both have it in doubt.
    assert len(different) <= 1, different
    if different:
        assert filters["top_p"] < 1
    assert int(logits.argmax()) in kept


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_k": 20_000}, {"top_k": 30_000, "top_p": 0.8}, {"min_p": 1e-4}]
)
def test_no_vocabulary_is_sorted_for_a_draw(monkeypatch, filters):
    """However flat the distribution is, only some hundred tokens are."""
    sorted_sizes = []

    def watch(name):
        original = getattr(np, name)

        def watched(values, *args, **kwargs):
            sorted_sizes.append(len(values[-1]) if name == "lexsort" else np.size(values))
            return original(values, *args, **kwargs)

        monkeypatch.setattr(np, name, watched)

    for name in ("argsort", "sort", "lexsort"):
        watch(name)
    widths = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(
        torch.Tensor, "topk", lambda self, k, **rest: widths.append(k) or topk(self, k, **rest)
    )
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 49_152)).astype(np.float32))
    rows = [
        SamplingRow(
            params=SamplingParams(max_tokens=1, temperature=1.0, seed=i, **filters), position=i
        )
        for i in range(4)
    ]
    drawn = sample(logits, rows)
    assert None not in drawn
    assert max([*sorted_sizes, 0]) <= 2 * module._FEW
    assert max([*widths, 0]) <= 256
