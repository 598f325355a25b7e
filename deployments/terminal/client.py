"""A client of a running server's OpenAI API, as far as `complete` and `chat` need one."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from deployments.terminal.errors import ApiError, BrokenAnswerError, RefusedError, UnreachableError
from deployments.terminal.sse import decode_events

__all__ = ["ApiClient", "Json"]

Json = Mapping[str, Any]
"""A JSON object."""

_CONNECT_TIMEOUT_S = 5.0


class ApiClient:
    """Speaks to the server at `url`; close it, or use it in `with`.

    The scheme may be left out, and a final /v1 may be there, as in other clients' base URLs.

    `timeout_s` is how long the server may send nothing at all.
    """

    def __init__(
        self, url: str, *, timeout_s: float, transport: httpx.BaseTransport | None = None
    ) -> None:
        address = url if "://" in url else f"http://{url}"
        self.url = address.rstrip("/").removesuffix("/v1")
        try:
            host = httpx.URL(self.url).host
        except httpx.InvalidURL as error:
            raise UnreachableError(f"{url!r} is not an address: {error}.") from error
        self._client = httpx.Client(
            base_url=f"{self.url}/v1/",
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
            # A proxy from the environment would be asked for its own 127.0.0.1.
            trust_env=host not in ("127.0.0.1", "localhost", "::1"),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections."""
        self._client.close()

    def models(self) -> list[str]:
        """Names of the models that the server serves."""
        with self._explained():
            response = self._client.get("models")
            body = _object(_checked(response).text)
        entries = body.get("data")
        ids = [
            entry.get("id")
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict)
        ]
        names = [name for name in ids if isinstance(name, str)]
        if not names:
            raise BrokenAnswerError(f"{self.url} serves no model.")
        return names

    def post(self, path: str, body: Json) -> Json:
        """The whole answer to a request that does not stream."""
        with self._explained():
            response = self._client.post(path, json=body)
            return _object(_checked(response).text)

    def stream(self, path: str, body: Json) -> Generator[Json, None, None]:
        """The chunks of a streamed answer; raises if it ends without [DONE].

        Closing the iterator closes the connection, which cancels the request on the server.
        """
        request = {**body, "stream": True}
        with self._explained(), self._client.stream("POST", path, json=request) as response:
            if not response.is_success:
                response.read()
            _checked(response)
            for data in decode_events(response.iter_bytes()):
                if data == "[DONE]":
                    return
                chunk = _object(data)
                if "error" in chunk:
                    raise BrokenAnswerError(f"The server ended the answer: {_error_message(chunk)}")
                yield chunk
        raise BrokenAnswerError("The answer broke off: the server closed the connection.")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn httpx's exceptions into sentences with the address."""
        try:
            yield
        except httpx.ConnectError as error:
            raise UnreachableError(
                f"Nothing listens at {self.url} ({error}). Start a server with `baton serve`, or "
                "name another one with --url."
            ) from error
        except httpx.TimeoutException as error:
            raise UnreachableError(f"{self.url} did not answer in time.") from error
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise UnreachableError(f"{self.url!r} is not an address: {error}") from error
        except UnicodeEncodeError as error:
            raise ApiError("The text holds bytes that are not UTF-8.") from error
        except httpx.TransportError as error:
            raise BrokenAnswerError(f"The connection to {self.url} broke: {error}.") from error


def _checked(response: httpx.Response) -> httpx.Response:
    """The response, or the error that it holds in the server's own words."""
    if response.is_success:
        return response
    try:
        message = _error_message(_object(response.text))
    except BrokenAnswerError:
        message = "it gave no reason in JSON; is this an OpenAI API?"
    raise RefusedError(
        f"The server refused the request ({response.status_code}): {message}",
        status=response.status_code,
    )


def _object(text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BrokenAnswerError(f"The server sent something that is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise BrokenAnswerError("The server sent JSON that is not an object.")
    return value


def _error_message(body: Json) -> str:
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "no reason given")
