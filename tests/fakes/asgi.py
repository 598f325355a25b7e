"""One HTTP connection to an ASGI application, message by message: a client that can leave early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from deployments.http_boundary import AsgiApp, Message, Scope

__all__ = ["Connection"]

_PATIENCE_S = 20.0


class Connection:
    """Sends one request; `async with` ends it by leaving, as a closed socket would."""

    def __init__(
        self,
        app: AsgiApp,
        path: str,
        body: Mapping[str, Any] | bytes,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._app = app
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {"content-type": "application/json", **(headers or {})}
        self._scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in names.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self._incoming: list[Message] = [
            {"type": "http.request", "body": self._body, "more_body": False},
            {"type": "http.request", "body": b"", "more_body": False},  # servers may repeat the end
        ]
        self._left = asyncio.Event()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Connection:
        """Send the request."""
        self.task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave, and wait until the application is through."""
        self.leave()
        await self.ended()

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def ended(self) -> None:
        """Wait until the application is through with the request."""
        assert self.task is not None
        async with asyncio.timeout(_PATIENCE_S):
            await self.task

    async def message(self) -> Message:
        """The application's next message."""
        async with asyncio.timeout(_PATIENCE_S):
            return await self._messages.get()

    async def text_until(self, wanted: str) -> str:
        """The body from here until it holds a text."""
        text = ""
        while wanted not in text:
            message = await self.message()
            assert message["type"] == "http.response.body", message
            text += message["body"].decode()
            assert message.get("more_body") or wanted in text, text
        return text

    async def rest(self) -> str:
        """The body from here to its end."""
        text = ""
        while True:
            message = await self.message()
            if message["type"] == "http.response.body":
                text += message["body"].decode()
                if not message.get("more_body"):
                    return text

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._incoming and not self._left.is_set():
            return self._incoming.pop(0)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._messages.put_nowait(message)
