"""Kills, pauses, cuts, leaving clients and full pools under load: is a token wrong, a block left?

    python -m tests.bench.bench_chaos --minutes 10 --seed 4
    python -m tests.bench.bench_chaos --minutes 2 --model default   # the real model: fewer requests

Two prefill and two decode workers in processes of their own, behind HTTP. Exits with 1 unless every
request ended once, no token was wrong, and nothing was held at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from typing import get_args

from configs.schema import TransferSettings
from tests.tools.baton_server import BatonServer
from tests.tools.bench_process import bench_directory, model_for, say
from tests.tools.chaos import ChaosConfig, chaos_settings, make_asks, run_chaos
from tests.tools.faults import can_cut

WINDOW = 512
TRANSPORT = TransferSettings.model_fields["transport"].annotation


def main() -> None:
    """Run it and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn, and printed, if not given")
    parser.add_argument("--model", choices=("tiny", "default"), default="tiny")
    parser.add_argument("--transport", default="auto", choices=get_args(TRANSPORT))
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--fault-every", type=float, default=2.0, metavar="SECONDS")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    is_tiny = arguments.model == "tiny"
    config = ChaosConfig(
        seed=seed,
        seconds=60 * arguments.minutes,
        window=WINDOW,
        num_clients=arguments.clients,
        max_output_tokens=48 if is_tiny else 16,
        num_asks=48 if is_tiny else 16,
        fault_every_s=arguments.fault_every,
        stays_s=1.5 if is_tiny else 6.0,
        progress=say,
    )
    with bench_directory() as directory:
        say(f"seed {seed}, {arguments.minutes:g} minutes, {arguments.model} model")
        if not can_cut():
            say("connections are not cut: this user may not take over sockets")
        model = model_for(arguments.model, directory)
        asks = asyncio.run(make_asks(model, config))
        settings = chaos_settings(model, window=WINDOW, transport=arguments.transport)
        with BatonServer.started(directory, preset="split-2p2d", settings=settings) as server:
            report = asyncio.run(run_chaos(server, asks, config))
        say("\n".join(report.lines()))
    sys.exit(0 if report.is_clean else 1)


if __name__ == "__main__":
    main()
