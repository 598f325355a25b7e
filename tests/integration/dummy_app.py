"""The least application that has Baton's shape: an HTTP entry that streams from an inner pool.

Run as a program (`python -m tests.integration.dummy_app DIRECTORY PORT`), it serves until it is
told to stop, as `baton serve` does.
"""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from deployments.cluster.environment import prepare_environment

prepare_environment()

from fastapi import FastAPI  # noqa: E402
from fastapi.responses import StreamingResponse  # noqa: E402
from ray import serve  # noqa: E402

from deployments.cluster.errors import DeployError  # noqa: E402
from deployments.cluster.local import LocalCluster  # noqa: E402
from kv_transfer.authentication import Secret  # noqa: E402

http = FastAPI()


@serve.deployment(graceful_shutdown_wait_loop_s=0.1, max_constructor_retry_count=1)
class Counter:
    def __init__(self, fails: bool) -> None:
        if fails:
            raise ValueError("the dummy was told to fail")

    async def highest(self, numbers: bytes) -> bytes:
        return bytes([max(numbers)])

    async def count(self, end: int) -> AsyncIterator[str]:
        for number in range(end):
            yield f"{number}\n"


@serve.deployment(graceful_shutdown_wait_loop_s=0.1)
@serve.ingress(http)
class Entry:
    def __init__(self, counter: Any) -> None:
        self._counter = counter.options(stream=True)

    @http.get("/count")
    async def count(self, end: int) -> StreamingResponse:
        return StreamingResponse(self._counter.count.remote(end), media_type="text/plain")


def build(args: dict[str, Any]) -> Any:
    counter = Counter.bind(args.get("fails", False))  # type: ignore[attr-defined]  # serve adds it
    return Entry.bind(counter)  # type: ignore[attr-defined]


def config(*, fails: bool) -> dict[str, Any]:
    application = {
        "name": "dummy",
        "route_prefix": "/",
        "import_path": "tests.integration.dummy_app:build",
        "args": {"fails": fails},
    }
    return {"applications": [application]}


def main(directory: str, port: str, first: str = "") -> None:
    with LocalCluster(Path(directory), port=int(port), secret=Secret.fresh()) as cluster:
        if first == "fail-first":
            try:
                cluster.deploy(config(fails=True), timeout_s=120)
            except DeployError as error:
                print(f"failed: {error}", flush=True)
            cluster.deploy(config(fails=False), timeout_s=120)
        else:
            cluster.run("dummy", build({}), timeout_s=120)
        answers = [
            cluster.ask_all("dummy", "Counter", "highest", bytes([1, end]), timeout_s=10)
            for end in (2, 3)
        ]
        print(f"answers: {answers}", flush=True)
        print(f"ready: {cluster.status().is_ready} {cluster.url}", flush=True)
        cluster.wait()
    print("stopped", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
