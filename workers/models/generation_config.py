"""What a model's own files say about ending a text and sampling it; read as JSON, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.models.errors import ModelFormatError

__all__ = ["GenerationDefaults", "read_eos_token_ids", "read_generation_defaults", "read_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the model's authors advise for sampling; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_eos_token_ids(path: Path) -> tuple[int, ...]:
    """Every id that the files say ends a text, the generation config's first, each once."""
    written = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json")
    sources: tuple[Mapping[str, Any], ...] = (
        generation,
        written,
        written.get("text_config") or {},
    )
    ids = [token_id for source in sources for token_id in _as_list(source.get("eos_token_id"))]
    return tuple(dict.fromkeys(ids))


def read_generation_defaults(path: Path) -> GenerationDefaults:
    """The authors' sampling; empty where they do not sample."""
    generation = read_json(path / "generation_config.json")
    if not generation.get("do_sample"):
        return GenerationDefaults()
    return GenerationDefaults(
        temperature=generation.get("temperature"),
        top_p=generation.get("top_p"),
        top_k=generation.get("top_k"),
        min_p=generation.get("min_p"),
        repetition_penalty=generation.get("repetition_penalty"),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in an optional file; empty if the file is not there."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelFormatError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} does not hold a JSON object.")
    return value


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
