"""One call of `baton bench`: connects to what it names, measures it, and leaves nothing open."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deployments.bench.client import (
    RequestStyle,
    StreamingClient,
    make_http_client,
    server_address,
)
from deployments.bench.cpu import CpuWatch
from deployments.bench.drive import SystemClock
from deployments.bench.plan import BenchOptions, Plan
from deployments.bench.session import Observer, Report, ServerInfo, Session
from deployments.bench.versus import Side
from deployments.terminal.client import ApiClient
from deployments.version import installed_version

__all__ = ["ServerTarget", "open_report", "run_bench"]

_MODELS_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTarget:
    """A server to measure, as it was named."""

    url: str
    model: str | None
    """None is the server's first."""


def open_report(
    options: BenchOptions, style: RequestStyle, targets: Mapping[Side, ServerTarget]
) -> Report:
    """A report without figures; asks for models that were not named. ApiError, BenchInputError."""
    return Report(
        options={**asdict(options), **asdict(style)},
        seed=options.seed,
        servers=tuple(_server_info(name, target) for name, target in targets.items()),
        host=_host(),
    )


async def run_bench(
    report: Report,
    options: BenchOptions,
    plan: Plan,
    style: RequestStyle,
    *,
    api_key: str | None,
    observer: Observer,
) -> None:
    """Measure the report's servers into it; raises BenchError."""
    addresses: dict[str, str] = {server.name: server.address for server in report.servers}
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[Side, StreamingClient] = {}
        for server in report.servers:
            http = await stack.enter_async_context(make_http_client(server.address, api_key))
            clients[server.name] = StreamingClient(http, server.model, style, time.perf_counter)
        session = Session(
            options,
            plan,
            clients,
            clock=SystemClock(time.perf_counter),
            cpu=CpuWatch(addresses, time.perf_counter),
            observer=observer,
        )
        stack.callback(observer.end)
        await session.run(report)


def _server_info(name: Side, target: ServerTarget) -> ServerInfo:
    address = server_address(target.url)
    if target.model is not None:
        return ServerInfo(name=name, address=address, model=target.model)
    with ApiClient(address, timeout_s=_MODELS_TIMEOUT_S) as client:
        return ServerInfo(name=name, address=address, model=client.models()[0])


def _host() -> dict[str, Any]:
    """What a reader of the figures needs to know of the machine that measured."""
    return {
        "baton": installed_version(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "started_at": time.time(),
    }
