"""What a Kubernetes API server would say to a custom resource: its CRD as a JSON schema.

Three things differ from plain JSON Schema: defaults are filled in before validation, a field may
take an integer or a string, and unknown keys are dropped without a word, which here is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft7Validator

Schema = Mapping[str, Any]


def schema_of(crd: Mapping[str, Any], version: str) -> Schema:
    """The openAPIV3 schema of one version of a CustomResourceDefinition."""
    for entry in crd["spec"]["versions"]:
        if entry["name"] == version:
            schema: Schema = entry["schema"]["openAPIV3Schema"]
            return schema
    raise ValueError(f"the CRD has no version {version}")


def problems(document: Any, schema: Schema) -> Iterator[str]:
    """A sentence for each rule of the schema that the document breaks, its path first."""
    validator = Draft7Validator(_json_schema(schema))
    for error in validator.iter_errors(with_defaults(document, schema)):
        path = ".".join(str(key) for key in error.absolute_path)
        yield f"{path}: {error.message}"


def with_defaults(value: Any, schema: Schema) -> Any:
    """The value with what the schema fills in; the value given is left alone."""
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(item, schema["items"]) for item in value]
    if not isinstance(value, dict):
        return value
    fields: Mapping[str, Schema] = schema.get("properties", {})
    missing = {
        name: copy.deepcopy(field["default"])
        for name, field in fields.items()
        if "default" in field and name not in value
    }
    others = schema.get("additionalProperties")
    rest: Schema = others if isinstance(others, dict) else {}
    return {
        name: with_defaults(item, fields.get(name, rest))
        for name, item in {**value, **missing}.items()
    }


def _json_schema(schema: Schema) -> dict[str, Any]:
    """The same schema for a JSON Schema validator, closed to unknown keys."""
    result = {
        key: value for key, value in schema.items() if not key.startswith("x-") and key != "format"
    }
    if "properties" in schema:
        result["properties"] = {
            name: _json_schema(field) for name, field in schema["properties"].items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            result[key] = _json_schema(schema[key])
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
        result.pop("anyOf", None)
    if schema.get("nullable"):
        result["type"] = [schema["type"], "null"]
    return result
