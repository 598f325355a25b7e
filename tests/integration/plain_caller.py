"""Somebody who has Ray's token and not the deployment's secret, and calls whatever there is.

    python -m tests.integration.plain_caller ADDRESS_OF_RAY

prints one line of JSON: what each kind of call was answered, by whom and what it asked for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from deployments.cluster.environment import prepare_environment
from deployments.control_call import (
    CHANNEL_ADDRESS,
    CONTROL,
    DRAIN,
    END_ALL,
    INTRODUCE,
    SNAPSHOT,
    STOP_RESUMING,
    ControlCall,
    Method,
)
from deployments.prefill_call import PrefillCall
from kv_transfer.authentication import Secret

prepare_environment()

# Ray reads the environment when it is imported.
import ray  # noqa: E402
from ray import serve  # noqa: E402

from tests.fakes.prefill_call import prefill_request  # noqa: E402

NOT_OURS = Secret("not the secret of this deployment")
CONTROL_CALLS: Mapping[str, Sequence[Method[Any]]] = MappingProxyType(
    {
        "Front": (INTRODUCE, SNAPSHOT, STOP_RESUMING, END_ALL),
        "Decode": (INTRODUCE, CHANNEL_ADDRESS, SNAPSHOT, DRAIN),
        "Prefill": (INTRODUCE, SNAPSHOT),
    }
)
DRAIN_S = 0.0
NUM_FORMS = 3
"""Of each call: in plain words, sealed with another secret, and that cut short."""


async def prompt_answers() -> list[list[str]]:
    """All that comes back of each call for a prompt, as Serve brings it."""
    request = prefill_request()
    sealed = PrefillCall(NOT_OURS, request).message
    calling = serve.get_deployment_handle("Prefill", "baton").options(stream=True)
    return [
        [repr(answer) async for answer in calling.prefill.remote(message)]
        for message in (request, sealed, sealed[:-1])
    ]


async def control_answers(deployment: str, method: Method[Any]) -> list[str]:
    """What comes back of each form of a control call."""
    arguments = (DRAIN_S,) if method is DRAIN else ()
    sealed = ControlCall(NOT_OURS, method, *arguments, meant_for=["anybody"]).message
    calling = serve.get_deployment_handle(deployment, "baton").options(method_name=CONTROL)
    return [repr(await calling.remote(message)) for message in (method.name, sealed, sealed[:-1])]


async def answer_by_name(deployment: str, method: Method[Any]) -> str:
    """What Serve says where the method is called by its name, without `control`."""
    handle = serve.get_deployment_handle(deployment, "baton")
    try:
        return repr(await handle.options(method_name=method.name).remote())
    except Exception as error:  # noqa: BLE001  # whatever it is, it goes to who asked
        return str(error)


async def main() -> None:
    """Make the calls, one after another."""
    said: dict[str, Any] = {"prompt": await prompt_answers(), "control": {}, "by_name": {}}
    for deployment, methods in CONTROL_CALLS.items():
        for method in methods:
            call = f"{deployment}.{method.name}"
            said["control"][call] = await control_answers(deployment, method)
            said["by_name"][call] = await answer_by_name(deployment, method)
    print(json.dumps(said))


if __name__ == "__main__":
    ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, configure_logging=False)
    asyncio.run(main())
    ray.shutdown()
