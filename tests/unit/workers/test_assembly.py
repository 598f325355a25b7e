"""What a worker is refused for, and what it is told, before its weights are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import workers.assembly
from configs.schema import ModelSettings, PrefillSettings, Settings, TlsSettings, TransferSettings
from kv_transfer.authentication import Secret
from workers.assembly import build_prefill_worker
from workers.errors import WorkerError

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


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a model that is never loaded: the refusal comes before."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file({"model.embed_tokens.weight": torch.zeros(100, 16)}, folder / "model.safetensors")
    return Settings(model=ModelSettings(source=str(folder)), prefill=PrefillSettings())


def test_certificates_that_cannot_be_used_are_named(settings: Settings, tmp_path: Path) -> None:
    none = str(tmp_path / "none.pem")
    tls = TlsSettings(certificate=none, key=none, ca=none)
    settings = settings.model_copy(update={"transfer": TransferSettings(tls=tls)})

    with pytest.raises(WorkerError, match=rf"transfer.tls: certificate {none}, .* No such file"):
        build_prefill_worker(settings, worker_id="prefill-0", environ={}, secret=SECRET)


class AskedForError(Exception):
    """A runner was asked for."""


@pytest.mark.parametrize("name", [None, "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"])
def test_threads_are_placed_unless_openmp_s_own_variables_place_them(settings, monkeypatch, name):
    def build_runner(*_, threads, **__):
        raise AskedForError(threads.are_placed)

    monkeypatch.setattr(workers.assembly, "build_runner", build_runner)
    environ = {name: "false"} if name else {}

    with pytest.raises(AskedForError) as built:
        build_prefill_worker(settings, worker_id="prefill-0", environ=environ, secret=SECRET)
    assert built.value.args == (name is None,)
