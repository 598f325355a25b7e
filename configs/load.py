"""Preset, file, environment and overrides to one `Settings`; each later source wins.

Owns the reading and the sentences about what is wrong. Nothing else in Baton reads settings from
the environment.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.schema import Settings

__all__ = ["ENVIRONMENT_PREFIX", "Preset", "SettingsError", "load", "presets"]

ENVIRONMENT_PREFIX = "BATON_"

_SEPARATOR = "__"
"""Between levels in a variable's name; single underscores belong to the settings' names."""

_PROBLEMS = {
    "int_type": "must be a whole number, but is {value}",
    "float_type": "must be a number, but is {value}",
    "string_type": "must be text, but is {value} (quote it to keep it text)",
    "literal_error": "must be {expected}, but is {value}",
    "greater_than": "must be above {gt}, but is {value}",
    "greater_than_equal": "must be at least {ge}, but is {value}",
    "less_than_equal": "must be at most {le}, but is {value}",
    "finite_number": "must be finite, but is {value}",
    "string_too_short": "must not be empty",
    "model_type": "must be a group of settings, but is {value}",
}


class SettingsError(Exception):
    """Settings cannot be read or break a rule; `problems` has one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A shipped set of settings."""

    name: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """What one source says, and what to call it in a message."""

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """One settings file: its values and the two words about the file itself."""

    origin: str
    preset: str | None
    description: str
    values: Mapping[str, Any]


def presets() -> tuple[Preset, ...]:
    """The shipped presets, by name."""
    documents = {name: _read_document(path, name) for name, path in _preset_files().items()}
    return tuple(
        Preset(name=name, description=documents[name].description) for name in sorted(documents)
    )


def load(
    preset: str | None = None,
    *,
    file: Path | None = None,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
) -> Settings:
    """Settings of a preset, then a file, then the environment, then `a.b=value` overrides.

    Without a preset here or in the file, the schema's defaults are the base. Raises SettingsError
    that names every problem with its path and its source.
    """
    document = None if file is None else _read_document(file, str(file))
    base = _base_preset(preset, document)
    layers = [] if base is None else [_preset_layer(base)]
    if document is not None:
        layers.append(_Layer(origin=document.origin, values=document.values))
    layers += _environment_layers(environ)
    layers += [_override_layer(text) for text in overrides]
    values: dict[str, Any] = {}
    for layer in layers:
        values = _merge(values, layer.values)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = [_sentence(detail, layers) for detail in error.errors(include_url=False)]
        raise SettingsError(problems) from error


def _base_preset(preset: str | None, document: _Document | None) -> str | None:
    named = document.preset if document else None
    if preset is not None and named is not None and preset != named:
        raise SettingsError(
            [f"The preset {preset!r} was asked for, but the file builds on {named!r}; drop one."]
        )
    return preset or named


def _preset_files() -> dict[str, Traversable]:
    folder = resources.files("configs") / "presets"
    return {
        path.name.removesuffix(".yaml"): path
        for path in folder.iterdir()
        if path.name.endswith(".yaml")
    }


def _preset_layer(name: str) -> _Layer:
    files = _preset_files()
    if name not in files:
        raise SettingsError([f"There is no preset {name!r}; there are {', '.join(sorted(files))}."])
    document = _read_document(files[name], f"preset {name}")
    return _Layer(origin=document.origin, values=document.values)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML takes the last of two equal keys without a word; settings refuse them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} appears twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


def _read_document(path: Path | Traversable, origin: str) -> _Document:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SettingsError([f"The settings file {origin} cannot be read: {reason}."]) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2001-99-99
        raise SettingsError([f"{origin} is not valid YAML: {_yaml_problem(error)}."]) from error
    values = {} if content is None else content
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise SettingsError([f"{origin} must hold named settings, e.g. `http: {{port: 8000}}`."])
    head = {key: values.pop(key, None) for key in ("preset", "description")}
    for key, value in head.items():
        if value is not None and not isinstance(value, str):
            raise SettingsError([f"{key} in {origin} must be text, but is {value!r}."])
    return _Document(
        origin=origin,
        preset=head["preset"],
        description=head["description"] or "",
        values=values,
    )


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return f"{getattr(error, 'problem', None) or error}{place}"


def _environment_layers(environ: Mapping[str, str]) -> list[_Layer]:
    """Variables with a level separator, and those named like a whole group (BATON_PREFILL=null).

    Other BATON_ variables are not settings, except a mistake: a group's name and one underscore.
    """
    layers = []
    for variable in sorted(environ):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable:
            continue
        path = name.lower().split(_SEPARATOR)
        if len(path) == 1 and path[0] not in Settings.model_fields:
            _refuse_single_underscore(variable, path[0])
            continue
        value = _parse_value(environ[variable], variable)
        layers.append(_Layer(origin=variable, values=_nest(path, value)))
    return layers


def _refuse_single_underscore(variable: str, name: str) -> None:
    group, _, rest = name.partition("_")
    if group in Settings.model_fields and rest:
        meant = f"{ENVIRONMENT_PREFIX}{group}{_SEPARATOR}{rest}".upper()
        raise SettingsError([f"{variable} is not a setting; did you mean {meant}?"])


def _override_layer(text: str) -> _Layer:
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SettingsError([f"--set takes name=value, e.g. http.port=8001, but got {text!r}."])
    origin = f"--set {text}"
    return _Layer(origin=origin, values=_nest(keys, _parse_value(value, origin)))


def _parse_value(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2001-99-99
        raise SettingsError(
            [f"The value of {origin} is not valid YAML: {_yaml_problem(error)}."]
        ) from error


def _nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Groups merge key by key; any other value replaces what was there."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, dict):
            merged[key] = _merge(below if isinstance(below, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def _sentence(detail: ErrorDetails, layers: Sequence[_Layer]) -> str:
    """One problem of pydantic's as a sentence with the setting's path and its source."""
    path = [str(key) for key in detail["loc"]]
    where = ".".join(path)
    origin = _origin(path, layers)
    source = f" (from {origin})" if origin else ""
    if detail["type"] == "extra_forbidden":
        known = [".".join([*path[:-1], name]) for name in _known_names(path[:-1])]
        return f"{where}: there is no such setting{source}{_nearest(where, known)}"
    context = detail.get("ctx", {})
    if detail["type"] == "value_error":
        return f"{where}: {context['error']}{source}."
    context = {name: f"{v:g}" if isinstance(v, float) else v for name, v in context.items()}
    template = _PROBLEMS.get(detail["type"])
    if template is None:
        return f"{where}: {detail['msg']}{source}."
    return f"{where}: {template.format(value=repr(detail['input']), **context)}{source}."


def _origin(path: Sequence[str], layers: Sequence[_Layer]) -> str:
    """The last source that says something at the path."""
    for layer in reversed(layers):
        value: Any = layer.values
        for key in path:
            value = value.get(key, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            return layer.origin
    return ""


_ABSENT = object()
"""Tells a missing key from a null."""


def _known_names(path: Sequence[str]) -> list[str]:
    """Names of the settings in the group at the path."""
    group: type[BaseModel] = Settings
    for key in path:
        annotation = group.model_fields[key].annotation
        group = next(
            option
            for option in (annotation, *get_args(annotation))
            if hasattr(option, "model_fields")
        )
    return list(group.model_fields)


def _nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else "."
