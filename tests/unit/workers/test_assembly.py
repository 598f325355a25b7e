"""A worker that hands KV over is not built without what it proves itself by."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from configs.schema import ModelSettings, PrefillSettings, Settings, TlsSettings, TransferSettings
from kv_transfer.authentication import Secret
from workers.assembly import build_decode_worker, build_prefill_worker
from workers.errors import WorkerError
from workers.messages import PrefillEvent, PrefillRequest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "vocab_size": 100,
}
SECRET = Secret("a secret of this deployment, which is long")


class NoPrefill:
    """A prefill pool that nobody asks anything."""

    def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        raise NotImplementedError


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a model that is never loaded: the refusal comes before."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file({"model.embed_tokens.weight": torch.zeros(100, 16)}, folder / "model.safetensors")
    return Settings(model=ModelSettings(source=str(folder)), prefill=PrefillSettings())


def test_a_prefill_worker_without_a_secret_is_refused(settings: Settings) -> None:
    with pytest.raises(WorkerError, match=r"prefill-0 hands KV over but has no .* BATON_SECRET"):
        build_prefill_worker(settings, worker_id="prefill-0", environ={}, secret=None)


def test_a_decode_worker_with_a_link_and_without_a_secret_is_refused(settings: Settings) -> None:
    with pytest.raises(WorkerError, match=r"decode-0 hands KV over but has no .* BATON_SECRET"):
        build_decode_worker(
            settings, worker_id="decode-0", environ={}, prefill=NoPrefill(), secret=None
        )


def test_certificates_that_cannot_be_used_are_named(settings: Settings, tmp_path: Path) -> None:
    none = str(tmp_path / "none.pem")
    tls = TlsSettings(certificate=none, key=none, ca=none)
    settings = settings.model_copy(update={"transfer": TransferSettings(tls=tls)})

    with pytest.raises(WorkerError, match=rf"transfer.tls: certificate {none}, .* No such file"):
        build_prefill_worker(settings, worker_id="prefill-0", environ={}, secret=SECRET)
