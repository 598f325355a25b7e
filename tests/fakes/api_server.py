"""A scripted server of the OpenAI API on a real socket, for clients under test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_KEEP_ALIVE_S = 0.05


@dataclass
class ApiScript:
    """What the server answers with, and what it was asked."""

    models: list[str] = field(default_factory=lambda: ["tiny"])
    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo"])
    finish_reason: str = "stop"
    error: tuple[int, str] | None = None
    error_event: str | None = None
    """Sent after the pieces, in place of the end."""
    hold: threading.Event | None = None
    """Where there is one, the end of a stream waits for it; `held` says that it does."""
    held: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    script: ApiScript

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._send_json(200, {"data": [{"id": name} for name in self.script.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.script.requests.append((self.path, body))
        if self.script.error is not None:
            status, message = self.script.error
            self._send_json(status, {"error": {"message": message}})
        elif body.get("stream"):
            self._stream(is_chat="messages" in body)
        else:
            text = "".join(self.script.pieces)
            choice = {"text": text, "finish_reason": self.script.finish_reason}
            self._send_json(200, {"choices": [choice]})

    def _send_json(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, *, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": keep-alive\n\n")
        for piece in self.script.pieces:
            content: dict[str, Any] = {"delta": {"content": piece}} if is_chat else {"text": piece}
            self._send_event({"choices": [{**content, "finish_reason": None}]})
        if self.script.error_event is not None:
            self._send_event({"error": {"message": self.script.error_event}})
            return
        if self.script.hold is not None:
            self.script.held.set()
            # As a real server does. It also wakes a client whose signal came just before it began
            # to wait: Python looks for signals between two reads only.
            while not self.script.hold.wait(_KEEP_ALIVE_S):
                self._send(b": keep-alive\n\n")
        end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        self._send_event({"choices": [{**end, "finish_reason": self.script.finish_reason}]})
        self._send_event({"choices": [], "usage": {"completion_tokens": 2}})
        self._send(b"data: [DONE]\n\n")

    def _send_event(self, body: dict[str, Any]) -> None:
        self._send(f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode())

    def _send(self, content: bytes) -> None:
        with suppress(OSError):  # a client that has left is for the test to judge
            self.wfile.write(content)


@contextmanager
def api_server(script: ApiScript) -> Iterator[str]:
    """Serve the script on a free port of loopback; gives the address."""
    handler = type("Handler", (_Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
