"""A draw is a function of seed and position alone: sampled texts are the same in every mode."""

from __future__ import annotations

import os

import pytest

from tests.parity.modes import MODES, generate
from tests.parity.references import Reference
from tests.parity.subjects import Subject, default_model_subject, tiny_subject
from workers.engine.sampling_params import SamplingParams
from workers.models.errors import ModelNotFoundError
from workers.models.store import ModelStore, default_cache_dir

pytestmark = pytest.mark.timeout(3600)


SUBJECTS = ["llama", "qwen3_moe", *(["smollm2"] if os.environ.get("BATON_TEST_ALL") == "1" else [])]


def seeded(number: int, reference: Reference) -> SamplingParams:
    """Hot enough that greedy would be noticed."""
    return SamplingParams(
        max_tokens=len(reference.tokens), temperature=0.9, top_p=0.95, seed=1000 + number
    )


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request, extent, reference_folder) -> Subject:
    """Two tiny models, and among all the default one."""
    if request.param != "smollm2":
        return tiny_subject(request.param, extent, reference_folder)
    try:
        path = ModelStore(default_cache_dir(os.environ)).resolve("smollm2-135m").path
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    return default_model_subject(path, "documents", extent, reference_folder, None)


@pytest.mark.slow
async def test_sampled_tokens_are_the_same_in_every_mode(subject):
    texts = {mode.name: [t for _, t in await generate(mode, subject, seeded)] for mode in MODES}

    alone = texts.pop("colocated")
    assert list(alone) != [reference.tokens for reference in subject.references], "not sampled"
    for name, together in texts.items():
        # A mode may repeat the prompts, under other seeds.
        assert together[: len(alone)] == alone, name
        assert len(set(together)) > len(together) / 2, "seeds make no difference"
