"""The oracle for tokens: greedy output of whole workers equals that of transformers' `generate`.

Every model in every mode, in fp32. Equal means token for token; where tokens differ, the
reference's two likeliest logits must be closer than `TIE` at the first difference. Such prompts are
listed in the table at the end of the session, which fails if they are more than very few. By
default a seeded sample runs; with `BATON_TEST_ALL=1` everything.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.fakes.tiny_models import SERVED
from tests.parity.ledger import Ledger
from tests.parity.modes import MODES, Mode, generate
from tests.parity.subjects import Extent, Subject, default_model_subject, tiny_subject
from workers.models.errors import ModelNotFoundError
from workers.models.store import ModelStore, default_cache_dir

pytestmark = pytest.mark.timeout(7200)

RUN_ALL = os.environ.get("BATON_TEST_ALL") == "1"

TELLING = ("deepseek_v3", "gemma2", "gpt_neox", "gpt_oss", "llama", "mixtral")
"""Families that differ most from each other; a sample has them and a few of the others."""
OTHERS = sorted(set(SERVED) - set(TELLING))
FAMILIES = [
    family
    for family in SERVED
    if RUN_ALL or family in TELLING or family in random.Random(2).sample(OTHERS, 3)
]


async def check(mode: Mode, subject: Subject, ledger: Ledger) -> None:
    """Serve, compare, and enter the outcome."""
    served = await generate(mode, subject)
    references = [reference for reference, _ in served]
    tokens = [generated for _, generated in served]
    wrong = ledger.compare(subject.name, mode.name, references, tokens)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, extent: Extent, reference_folder: Path) -> Subject:
    """A random model of each family that is served, or of a sample of them."""
    return tiny_subject(request.param, extent, reference_folder)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
async def test_tiny_model_gives_the_tokens_of_generate(mode, tiny, ledger):
    await check(mode, tiny, ledger)


@pytest.fixture(scope="module", params=["questions", "documents"])
def default_model(
    request: pytest.FixtureRequest, extent: Extent, reference_folder: Path
) -> Subject:
    """The default model with either half of its prompts."""
    try:
        path = ModelStore(default_cache_dir(os.environ)).resolve("smollm2-135m").path
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    is_asked = request.param == "questions"
    data = request.getfixturevalue("baton_data") if is_asked else None
    return default_model_subject(path, request.param, extent, reference_folder, data)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
async def test_default_model_gives_the_tokens_of_generate(mode, default_model, ledger):
    await check(mode, default_model, ledger)
