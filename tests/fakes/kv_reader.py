"""A decode worker's transfer side as a process of its own, told what to do by lines of JSON.

    python tests/fakes/kv_reader.py '{"num_blocks": 64, "bytes_per_block": 4096, ...}'

Each line on standard input is a command with an `id`; its answer carries the id. Pulls are reported
as they end, and then no byte of them lands any more.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.receiver import IncomingTransfer, KVReceiver
from kv_transfer.transport import TransferError
from kv_transfer.transports.stream_server import StreamTimings
from tests.fakes.block_memory import ByteMemory
from tests.fakes.stream_kinds import ALL_KINDS


def tell(**message: Any) -> None:
    """Write one line for the test."""
    print(json.dumps(message), flush=True)


class Reader:
    """Carries out commands; a command's name is a method's."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.memory = ByteMemory(arguments["num_blocks"], arguments["bytes_per_block"])
        (kind,) = (kind for kind in ALL_KINDS if kind.label == arguments["transport"])
        timings = StreamTimings(connect_s=20.0, silence_s=20.0)  # no owner of its falls silent
        self.receiver = KVReceiver(
            memory=self.memory,
            me=PeerInfo(**arguments["me"]),
            transports=[kind.transport(timings=timings)],
            lease_s=arguments["lease_s"],
        )
        self.pulls: set[asyncio.Task[None]] = set()

    def pull(self, peer: dict[str, Any], key: dict[str, Any], places: list[int]) -> dict[str, Any]:
        """Begin to pull blocks of one token."""
        peer["endpoints"] = tuple(tuple(endpoint) for endpoint in peer["endpoints"])
        transfer = self.receiver.transfer(
            PeerInfo(**peer),
            TransferKey(**key),
            [BlockId(place) for place in places],
            len(places),
            60.0,
        )
        task = asyncio.create_task(self.follow(transfer, key["transfer_id"]))
        self.pulls.add(task)
        task.add_done_callback(self.pulls.discard)
        return {}

    async def follow(self, transfer: IncomingTransfer, transfer_id: str) -> None:
        """Pull to the end, whatever it is."""
        try:
            await transfer.pull()
        except TransferError as error:
            await transfer.wait_quiesced()
            tell(pulled=transfer_id, outcome=type(error).__name__)
        else:
            tell(pulled=transfer_id, outcome="landed")

    def begun(self, place: int) -> dict[str, Any]:
        """Whether anything has landed in a block."""
        return {"begun": any(self.memory.block(BlockId(place))[:64])}

    def stats(self) -> dict[str, Any]:
        """What became of the pulls."""
        stats = self.receiver.stats()
        return {"active": stats.active, "published": stats.blocks_published}


async def main(arguments: dict[str, Any]) -> None:
    """Pull until standard input ends."""
    reader = Reader(arguments)
    await reader.receiver.start()
    tell(started=True)
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        command = json.loads(line)
        answer = getattr(reader, command["do"])(**command["with"])
        tell(id=command["id"], **answer)
    await reader.receiver.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
