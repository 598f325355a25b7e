"""What Ray Serve would silently ignore in a config.

Serve validates values but drops keys that it does not know: `max_ongoing_request: 64` leaves the
default of 5 in force without a word. Here such a key is an error that names it.
"""

import difflib
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from deployments.cluster.errors import ServeConfigError

# Fields that Serve declares as a plain dict and reads as a model later, without a word either.
_DECLARED_AS_DICT: Mapping[tuple[type[BaseModel], str], type[BaseModel]] = {
    (ServeApplicationSchema, "autoscaling_policy"): AutoscalingPolicy,
}


def parse_serve_config(config: Mapping[str, Any]) -> ServeDeploySchema:
    """The config as Serve's own model; ServeConfigError if any key or value is not Serve's."""
    unknown = list(unknown_keys(config, ServeDeploySchema))
    if unknown:
        raise ServeConfigError("; ".join(unknown))
    try:
        return ServeDeploySchema.model_validate(dict(config))
    except ValidationError as error:
        problems = (
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
        raise ServeConfigError("; ".join(problems)) from error


def unknown_keys(value: Mapping[str, Any], model: type[BaseModel], path: str = "") -> Iterator[str]:
    """A sentence for each key that the model does not have, in nested models too."""
    fields = model.model_fields
    names = {field.alias or name for name, field in fields.items()} | set(fields)
    for key, item in value.items():
        place = f"{path}.{key}" if path else str(key)
        if key not in names:
            close = difflib.get_close_matches(str(key), sorted(names), n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            yield f"unknown key {place}{hint}"
            continue
        field = fields.get(key) or next(f for f in fields.values() if f.alias == key)
        annotation = _DECLARED_AS_DICT.get((model, str(key)), field.annotation)
        yield from _unknown_in(item, annotation, place)


def _unknown_in(item: Any, annotation: Any, place: str) -> Iterator[str]:
    models = list(_models_in(annotation))
    if isinstance(item, Mapping) and models:
        # a field that may be one of several models accepts the keys of any of them
        findings = [list(unknown_keys(item, model, place)) for model in models]
        yield from min(findings, key=len)
    elif isinstance(item, list | tuple):
        for index, element in enumerate(item):
            yield from _unknown_in(element, annotation, f"{place}[{index}]")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models among a field's types, at whatever depth of Optional, Union and list."""
    origin = typing.get_origin(annotation)
    if origin is None and inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    if origin in (dict, Mapping):
        return  # free-form: args, user_config, runtime_env
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
