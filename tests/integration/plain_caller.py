"""Somebody who has Ray's token and not the deployment's secret, and calls a prefill worker.

    python -m tests.integration.plain_caller ADDRESS_OF_RAY

prints one line of JSON: what each kind of call was answered.
"""

from __future__ import annotations

import asyncio
import json
import sys

from deployments.cluster.environment import prepare_environment
from deployments.prefill_call import PrefillCall
from kv_transfer.authentication import Secret
from workers.messages import PrefillRequest

prepare_environment()

# Ray reads the environment when it is imported.
import ray  # noqa: E402
from ray import serve  # noqa: E402

from tests.fakes.prefill_call import prefill_request  # noqa: E402


async def answers_to(message: PrefillRequest | bytes) -> list[str]:
    """All that comes back of one call, as Serve brings it."""
    handle = serve.get_deployment_handle("Prefill", "baton")
    calling = handle.options(stream=True)
    return [repr(answer) async for answer in calling.prefill.remote(message)]


async def main() -> None:
    """Make the calls, one after another."""
    request = prefill_request()
    sealed = PrefillCall(Secret("not the secret of this deployment"), request).message
    print(json.dumps([await answers_to(message) for message in (request, sealed, sealed[:-1])]))


if __name__ == "__main__":
    ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, configure_logging=False)
    asyncio.run(main())
    ray.shutdown()
