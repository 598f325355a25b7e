"""A model's facts for planning: from `ModelInfo` where it is loaded, else from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import ModelSettings
from workers.models.errors import ModelAccessError, ModelFormatError, ModelNotFoundError
from workers.planning import ModelFacts, resolve_dtype
from workers.runner_choice import architecture_of

if TYPE_CHECKING:
    from workers.models.loading import ModelInfo

__all__ = ["facts_from_info", "find_snapshot", "read_facts"]

_SLIDING_BY_DEFAULT = frozenset(
    {
        "afmoe",
        "cohere2",
        "exaone4",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gpt_oss",
        "ministral",
        "mistral",
        "olmo3",
    }
)
"""Values of `model_type` of families that have a sliding window where nothing is stated. With one
that is missing here a pool is sized as if its layers saw everything; workers know better."""
_STORED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def facts_from_info(
    info: ModelInfo, model: ModelSettings, *, is_faster_in_bf16: bool
) -> ModelFacts:
    """The facts of a model whose weights' headers were read."""
    dtype, element_bytes = resolve_dtype(model, is_faster_in_bf16=is_faster_in_bf16)
    return ModelFacts(
        digest=info.weights_digest,
        context_length=info.context_length,
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        dtype=dtype,
        element_bytes=element_bytes,
        vocab_size=info.vocab_size,
        architecture=info.architecture_facts,
        sliding_windows=info.sliding_windows,
        weight_bytes=info.num_parameters * element_bytes,
    )


def read_facts(path: Path, model: ModelSettings, *, is_faster_in_bf16: bool) -> ModelFacts:
    """The facts of the model in a directory, for sizing only, in milliseconds where possible.

    A configuration that leaves something to the defaults of its family is read by transformers.
    """
    config = _read_config(path)
    sizes = _explicit_sizes(config.get("text_config", config))
    if sizes is None:
        # Imported here: torch and transformers take seconds, and most models do without them.
        from workers.models.loading import load_model_info

        return facts_from_info(load_model_info(path), model, is_faster_in_bf16=is_faster_in_bf16)
    dtype, element_bytes = resolve_dtype(model, is_faster_in_bf16=is_faster_in_bf16)
    stored = _STORED_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")))
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return ModelFacts(
        digest="",  # nothing is exchanged by these facts, and the digest needs the weights
        context_length=sizes["max_position_embeddings"],
        num_layers=sizes["num_hidden_layers"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        dtype=dtype,
        element_bytes=element_bytes,
        vocab_size=sizes["vocab_size"],
        architecture=architecture_of(config),
        weight_bytes=weights * element_bytes // stored if weights and stored else None,
    )


def find_snapshot(repo_id: str, cache_dir: Path) -> Path:
    """A hub model that was pulled before; never downloads. For `ModelStore(fetch_snapshot=...)`."""
    # Imported here: an optional source, whose client takes half a second to import.
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo_id, cache_dir=cache_dir, local_files_only=True))
    except errors.LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"Model {repo_id!r} is not in the cache; run `baton models pull {repo_id}` first."
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{repo_id!r} is not a valid hub id: {error}") from error


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelAccessError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelFormatError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ModelFormatError(f"{file} does not hold a JSON object.")
    return config


def _may_have_sliding_window(config: Mapping[str, Any]) -> bool:
    """Whether it takes the family's code to say which layers have one, if any."""
    if config.get("use_sliding_window") is False:
        return False
    if "sliding_window" in config:
        return bool(config["sliding_window"])
    return config.get("model_type") in _SLIDING_BY_DEFAULT


def _explicit_sizes(config: object) -> dict[str, int] | None:
    """Every size that planning needs, or None if the configuration does not state them all.

    Latent attention has heads of other sizes than its configuration calls by those names.
    """
    names = (
        "max_position_embeddings",
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    values = config if isinstance(config, dict) else {}
    if "kv_lora_rank" in values or _may_have_sliding_window(values):
        return None
    sizes = {name: values.get(name) for name in names}
    stated = {name: size for name, size in sizes.items() if type(size) is int and size > 0}
    return stated if len(stated) == len(names) else None
