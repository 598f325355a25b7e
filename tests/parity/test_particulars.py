"""The tiny models can tell: what a family does its own way shows in its tokens.

A runner that forgot a window, a cap or a bias must fail `test_parity`. So each of them is taken out
of the stock model here, and the reference has to change by more than a tie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.fakes.tiny_models import MAX_MODEL_LEN
from tests.parity.ledger import Ledger
from tests.parity.prompts import random_prompts
from tests.parity.references import make_reference
from tests.parity.subjects import telling_model

_FULL = ["full_attention"] * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Particular:
    """Something of a family's own, and how a model is made that lacks it."""

    family: str
    what: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """To the configuration."""
    tensors: str | None = None
    """A pattern of names of parameters and buffers that are set to `value`."""
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.family}: {self.what}"


PARTICULARS = (
    Particular(family="mistral", what="window", changes={"sliding_window": None}),
    Particular(family="phi3", what="window", changes={"sliding_window": None}),
    Particular(family="starcoder2", what="window", changes={"sliding_window": None}),
    Particular(family="starcoder2", what="value bias", tensors=r"v_proj\.bias$"),
    Particular(family="gemma2", what="window", changes={"sliding_window": MAX_MODEL_LEN}),
    Particular(family="gemma2", what="softcap", changes={"attn_logit_softcapping": None}),
    Particular(family="gemma2", what="scale", changes={"query_pre_attn_scalar": 256}),
    Particular(family="gemma3_text", what="layer kinds", changes={"layer_types": _FULL}),
    Particular(family="gemma3_text", what="query norm", tensors=r"q_norm\.weight$"),
    Particular(family="gpt_oss", what="window", changes={"layer_types": _FULL}),
    Particular(family="gpt_oss", what="sinks", tensors=r"sinks$", value=-1e9),
    Particular(family="gpt_oss", what="router bias", tensors=r"router\.bias$"),
    Particular(family="qwen2", what="query bias", tensors=r"q_proj\.bias$"),
    Particular(family="qwen3", what="key norm", tensors=r"k_norm\.weight$", value=1.0),
    Particular(family="olmo2", what="query norm", tensors=r"q_norm\.weight$", value=1.0),
    Particular(family="gpt2", what="attention bias", tensors=r"c_attn\.bias$"),
    Particular(family="mixtral", what="second expert", changes={"num_experts_per_tok": 1}),
    Particular(family="qwen3_moe", what="second expert", changes={"num_experts_per_tok": 1}),
    Particular(
        family="gpt_neox",
        what="part that is not rotated",
        changes={
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 1.0,
            }
        },
    ),
    Particular(family="cohere2", what="layers without positions", changes={"layer_types": _FULL}),
)


@pytest.mark.parametrize("particular", PARTICULARS, ids=str)
def test_tokens_change_without_it(particular):
    whole = telling_model(particular.family)
    lacking = telling_model(particular.family, particular.changes)
    if particular.tensors is not None:
        _fill(lacking, particular.tensors, particular.value)
    prompts = random_prompts(1, (21, 40), 256)
    references = [make_reference(whole, prompt, 8) for prompt in prompts]
    tokens = [make_reference(lacking, prompt, 8).tokens for prompt in prompts]

    assert Ledger().compare(particular.family, particular.what, references, tokens)


def _fill(model: torch.nn.Module, pattern: str, value: float) -> None:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    found = [tensor for name, tensor in tensors.items() if re.search(pattern, name)]
    assert found, f"no tensor is called {pattern}"
    with torch.no_grad():
        for tensor in found:
            tensor.fill_(value)
