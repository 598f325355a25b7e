"""Baton, changed while it runs: each line of stdin is what to deploy next.

    python -m tests.integration.scaled_app DIRECTORY PORT PRESET SETTING...

A line is the JSON of the `deployments` of a Serve config; "deployed" is printed once it holds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from configs.load import load
from deployments.cluster.local import LocalCluster
from kv_transfer.authentication import Secret

DEPLOY_TIMEOUT_S = 240.0


def main(directory: str, port: int, preset: str, *overrides: str) -> None:
    """Deploy what comes, until stdin ends."""
    settings = load(preset, environ=os.environ, overrides=(*overrides, f"http.port={port}"))
    application: dict[str, Any] = {
        "name": "baton",
        "route_prefix": "/",
        "import_path": "deployments.app:build",
        "args": {"settings": settings.model_dump(mode="json")},
    }
    with LocalCluster(
        Path(directory), host="127.0.0.1", port=port, secret=Secret.fresh()
    ) as cluster:
        for line in sys.stdin:
            application["deployments"] = json.loads(line)
            cluster.deploy({"applications": [application]}, timeout_s=DEPLOY_TIMEOUT_S)
            print("deployed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
