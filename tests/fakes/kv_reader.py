"""A decode worker's transfer side, as what a process of its own does.

Pulls are reported as they end, and then no byte of them lands any more.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.receiver import KVReceiver
from kv_transfer.transport import TransferError
from kv_transfer.transports.stream_server import StreamTimings
from tests.fakes.block_memory import ByteMemory
from tests.fakes.line_process import Tell
from tests.fakes.stream_kinds import ALL_KINDS


class Reader:
    """Carries out commands; a command's name is a method's."""

    def __init__(self, arguments: dict[str, Any], tell: Tell) -> None:
        self.tell = tell
        self.memory = ByteMemory(arguments["num_blocks"], arguments["bytes_per_block"])
        (kind,) = (kind for kind in ALL_KINDS if kind.label == arguments["transport"])
        timings = StreamTimings(**arguments["timings"])
        self.receiver = KVReceiver(
            memory=self.memory,
            me=PeerInfo(**arguments["me"]),
            transports=[kind.transport(timings=timings)],
            lease_s=arguments["lease_s"],
        )
        self.pulls: set[asyncio.Task[None]] = set()

    async def start(self) -> dict[str, Any]:
        """Be ready to pull."""
        await self.receiver.start()
        return {}

    async def close(self) -> None:
        """Cancel what is being pulled."""
        await self.receiver.close()

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
            self.tell(pulled=transfer_id, outcome=type(error).__name__)
        else:
            self.tell(pulled=transfer_id, outcome="landed")

    def begun(self, place: int) -> dict[str, Any]:
        """Whether anything has landed in a block."""
        return {"begun": any(self.memory.block(BlockId(place))[:64])}

    def stats(self) -> dict[str, Any]:
        """What became of the pulls."""
        stats = self.receiver.stats()
        return {"active": stats.active, "published": stats.blocks_published}
