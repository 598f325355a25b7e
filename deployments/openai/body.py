"""From the bytes of a body to a JSON object, and from what is wrong in it to an error naming it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from deployments.openai.errors import InvalidRequestError

__all__ = ["OtherFields", "decode_object", "parse"]

Model = TypeVar("Model", bound=BaseModel)

_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherFields:
    """Fields of the API beyond a model's own."""

    neutral: Mapping[str, Sequence[Any]]
    """Not implemented: taken only as null or as one of the values that ask for nothing."""
    ignored: Collection[str]
    """Taken with any value, without effect on the answer."""
    nested: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    """Models of the fields that hold objects, for the hint at a misspelt name in one."""


def decode_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body; `InvalidRequestError` if there is none."""
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse_constant)
        if b"\\u" in raw:
            # An escape may stand for half a character, which no later step can write as UTF-8.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise InvalidRequestError("the body is not valid Unicode text") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {_reason(error)}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def parse(model: type[Model], body: Mapping[str, Any], other: OtherFields) -> Model:
    """Check a body against a model; the error names the first parameter that is wrong."""
    own = {name: value for name, value in body.items() if name in model.model_fields}
    known = {*model.model_fields, *other.neutral, *other.ignored}
    for name, value in body.items():
        if name not in known:
            raise _unknown_parameter(name, name, known)
        if name in other.neutral and not _is_neutral(value, other.neutral[name]):
            raise _unsupported_parameter(name, other.neutral[name])
    try:
        return model.model_validate(own)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise _invalid_parameter(details[0], other) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    # In Python True == 1: a penalty of `true` is not the number 1.
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )


def _unknown_parameter(param: str, name: str, known: Collection[str]) -> InvalidRequestError:
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return InvalidRequestError(
        f"unknown parameter {_shortened(param)!r}{hint}",
        param=_shortened(param),
        code="unknown_parameter",
    )


def _unsupported_parameter(name: str, neutral: Sequence[Any]) -> InvalidRequestError:
    allowed = " or ".join(json.dumps(value) for value in (None, *neutral))
    return InvalidRequestError(
        f"{name!r} is not supported by this server: leave it out or send {allowed}",
        param=name,
        code="unsupported_parameter",
    )


def _invalid_parameter(details: ErrorDetails, other: OtherFields) -> InvalidRequestError:
    location = details["loc"]
    param = _path(location)
    match details["type"]:
        case "missing":
            return InvalidRequestError(f"missing required parameter {param!r}", param=param)
        case "extra_forbidden":
            siblings = other.nested[str(location[0])].model_fields
            return _unknown_parameter(param, str(location[-1]), siblings)
        case _:
            return InvalidRequestError(f"{param}: {details['msg']}", param=param)


def _path(location: Sequence[str | int]) -> str:
    """`messages[0].content` from ("messages", 0, "content")."""
    first, *rest = location
    return str(first) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest
    )


def _shortened(name: str) -> str:
    """A client's own name, at a length that an error message bears."""
    return name if len(name) <= _NAME_CHARACTERS else f"{name[:_NAME_CHARACTERS]}..."
