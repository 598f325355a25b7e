"""The published incident, rebuilt: whichever guard is missing, another one refuses.

Each guard is replaced by a stand-in that says yes: alone, with all before it, and all but it. In
every one of these cases the first that is left refuses, and B's answer is what B gets alone, or an
error. With all of them replaced B's answer is made of A's pages, so that these tests can fail.
"""

from __future__ import annotations

import pytest

from tests.fakes.paged_model import paged
from tests.fakes.stream_kinds import SHM, TCP
from tests.fakes.tiny_models import SERVED, layout_of, make_model
from tests.leak.replay import Stage, play, tenant_a, tenant_b
from tests.leak.scenes import (
    BLOCK_SIZE,
    EARLY_FREE,
    OUTPUT_TOKENS,
    PLACEHOLDER,
    SCENES,
    first_intact,
    replacements,
)
from tests.leak.table import DOCUMENT, with_table
from tests.parity.references import make_reference

CASES = [
    pytest.param(scene, replaced, id=f"{scene.name}-{number}")
    for scene in SCENES
    for number, replaced in enumerate(replacements(scene))
]


@pytest.fixture(scope="module")
def model():
    return make_model("llama", SERVED["llama"])


@pytest.fixture(scope="module")
def right_answer(model):
    """What B gets where nobody else was, by transformers."""
    return make_reference(model, tenant_b(), OUTPUT_TOKENS).tokens


@pytest.fixture(params=[TCP, SHM], ids=lambda kind: kind.name)
def stage(request, model):
    layout = layout_of(model, block_size=BLOCK_SIZE)
    return Stage(
        layout=layout, model=paged(model, layout, shared=True), transport=request.param.transport
    )


@pytest.mark.parametrize(("scene", "replaced"), CASES)
async def test_the_first_guard_that_is_left_refuses(scene, replaced, stage, right_answer, caplog):
    outcome = await play(scene, stage, replaced, caplog, prompt_of_a=tenant_a(0))

    assert outcome.refused_by(scene) == {first_intact(scene, replaced).seen_as}, outcome.evidence
    assert outcome.token_ids in (None, right_answer)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
async def test_without_any_guard_the_answer_is_made_of_another_tenants_pages(
    scene, stage, right_answer, caplog
):
    answers = [
        (await play(scene, stage, scene.chain, caplog, prompt_of_a=tenant_a(number))).token_ids
        for number in (0, 1, 0)
    ]

    assert answers[0] is not None
    assert answers[0] == answers[2]
    assert len({answers[0], answers[1], right_answer}) == 3


@pytest.mark.parametrize("scene", [PLACEHOLDER, EARLY_FREE], ids=lambda scene: scene.name)
async def test_what_is_refused_costs_the_reader_nothing_but_time(
    scene, stage, right_answer, caplog
):
    """Of guards that refuse one transfer, none ends the request."""
    outcome = await play(scene, stage, scene.chain[:-1], caplog, prompt_of_a=tenant_a(0))

    assert outcome.token_ids == right_answer


def test_documented_guards_are_those_that_were_replaced():
    text = DOCUMENT.read_text("utf-8")

    assert with_table(text) == text, "run: python -m tests.leak.table"
