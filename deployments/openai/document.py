"""The API in OpenAPI's words, for people who read /docs and for tools that read /openapi.json."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from deployments.openai.schema import ChatBody, CompletionBody

__all__ = ["api_document"]


def api_document(version: str) -> dict[str, Any]:
    """The OpenAPI document of the HTTP surface."""
    _, definitions = models_json_schema(
        [(CompletionBody, "validation"), (ChatBody, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": {
            "/v1/completions": _post("Complete a prompt.", "CompletionBody"),
            "/v1/chat/completions": _post("Answer a conversation.", "ChatBody"),
            "/v1/models": _get("Every served model."),
            "/v1/models/{model_id}": _get("One served model.", "model_id"),
            "/health": _get("The process is alive."),
            "/ready": _get("A request would be served now."),
            "/version": _get("What runs here."),
            "/metrics": _get("Everything counted, in Prometheus' text format."),
        },
        "components": {"schemas": definitions["$defs"]},
    }


def _post(summary: str, schema: str) -> dict[str, Any]:
    reference = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    body = {"required": True, "content": {"application/json": reference}}
    return {"post": {"summary": summary, "requestBody": body, "responses": _responses()}}


def _get(summary: str, *path_parameters: str) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in path_parameters
    ]
    return {"get": {"summary": summary, "parameters": parameters, "responses": _responses()}}


def _responses() -> dict[str, Any]:
    return {
        "200": {"description": "The answer; events if the body asks for a stream."},
        "default": {"description": "An error: {error: {message, type, param, code}}."},
    }
