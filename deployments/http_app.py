"""The HTTP application: which path does what. Works without Ray; Front mounts it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route

from deployments.front_service import FrontService
from deployments.http_boundary import Boundary, Reply
from deployments.http_generation import GenerationEndpoint
from deployments.openai.document import api_document
from deployments.openai.errors import (
    ApiError,
    MethodNotAllowedError,
    NotReadyError,
    UnknownPathError,
)
from deployments.openai.models import model_list, model_object

__all__ = ["build_app"]


def build_app(front: FrontService) -> FastAPI:
    """The application in front of a service.

    The routes are plain ASGI: bodies are parsed by `openai.schema`, so that every error has the
    shape that OpenAI clients read. FastAPI serves the API's document and is what Serve mounts.
    """
    pages = _Pages(front)
    app = FastAPI(
        title="Baton",
        version=front.settings.version,
        routes=[
            _post("/v1/completions", GenerationEndpoint(front, "completions")),
            _post("/v1/chat/completions", GenerationEndpoint(front, "chat_completions")),
            _get("/v1/models", pages.models),
            _get("/v1/models/{model_id:path}", pages.model),
            _get("/health", pages.health),
            _get("/ready", pages.ready),
            _get("/version", pages.version),
            _get("/metrics", pages.metrics),
        ],
        middleware=[Middleware(Boundary, front=front)],
        exception_handlers={HTTPException: _on_http_exception},
    )
    document = api_document(front.settings.version)
    app.openapi = lambda: document  # type: ignore[method-assign]  # the routes are not FastAPI's
    return app


class _Pages:
    """The endpoints that are read."""

    def __init__(self, front: FrontService) -> None:
        self._front = front

    async def models(self, _: Request) -> Reply:
        """Every served model."""
        return Reply(model_list(self._front.cards, await self._front.runners()))

    async def model(self, request: Request) -> Reply:
        """One served model."""
        card = self._front.model(request.path_params["model_id"]).card
        return Reply(model_object(card, await self._front.runners()))

    async def health(self, _: Request) -> Reply:
        """The process is alive."""
        return Reply({"status": "ok"})

    async def ready(self, _: Request) -> Reply:
        """A request would be served now."""
        if not await self._front.is_ready():
            raise NotReadyError("no worker is ready")
        return Reply({"status": "ready"})

    async def version(self, _: Request) -> Reply:
        """What runs here."""
        return Reply({"version": self._front.settings.version})

    async def metrics(self, _: Request) -> Reply:
        """Everything counted, for a scrape."""
        text = await self._front.metrics_text()
        return Reply(text.encode(), content_type=CONTENT_TYPE_LATEST)


def _get(path: str, page: Callable[[Request], Awaitable[Reply]]) -> Route:
    return Route(path, page, methods=["GET"])


def _post(path: str, endpoint: GenerationEndpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


async def _on_http_exception(request: Request, error: Any) -> Reply:
    """What the router itself refuses, in the API's shape."""
    where = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        refusal: ApiError = MethodNotAllowedError(f"{where}: not a method of this path")
    else:
        refusal = UnknownPathError(f"{where}: nothing is served here")
    return Reply.of_error(refusal, headers=error.headers)
