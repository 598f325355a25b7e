"""A prefill worker's transfer side, as what a process of its own does.

Ended transfers are reported as they end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import FirstToken, GrantedBlock, PeerInfo, TransferKey
from kv_transfer.sender import KVSender
from kv_transfer.transport import Transport
from kv_transfer.transports.stream_server import StreamTimings
from tests.fakes.block_memory import ByteMemory
from tests.fakes.line_process import Tell
from tests.fakes.rank_pools import guarded, write_sequence
from tests.fakes.stream_kinds import ALL_KINDS

_TRANSPORTS: dict[str, Callable[..., Transport]] = {
    kind.label: kind.transport for kind in ALL_KINDS
}


class Owner:
    """Carries out commands; a command's name is a method's."""

    def __init__(self, arguments: dict[str, Any], tell: Tell) -> None:
        self.transport = _TRANSPORTS[arguments["transport"]]
        self.timings = StreamTimings(**arguments["timings"])
        self.lease_s = arguments["lease_s"]
        self.tell = tell
        memory = ByteMemory(arguments["num_blocks"], arguments["bytes_per_block"], shared=True)
        memory.fill(arguments["seed"])
        self._be(memory, PeerInfo(**arguments["me"]))

    def _be(self, memory: ByteMemory, me: PeerInfo) -> None:
        self.memory = memory
        self.me = me
        self.sender = KVSender(
            memory=self.memory,
            me=self.me,
            generation_of=self.memory.generation_of,
            transports=[self.transport(timings=self.timings)],
            on_end=lambda key, reason: self.tell(ended=key.transfer_id, reason=reason.value),
            lease_s=self.lease_s,
            sweep_s=0.02,
        )

    async def start(self) -> dict[str, Any]:
        """Serve; says how it is reached."""
        return {"peer": asdict(await self.sender.start())}

    async def close(self) -> None:
        """Serve nobody any more."""
        await self.sender.close()

    def offer(self, key: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
        """Open a transfer."""
        self.sender.open(TransferKey(**key), PeerInfo(**decode))
        return {}

    async def become(
        self, me: dict[str, Any], tables: list[list[int]], first_tokens: list[int], num_tokens: int
    ) -> dict[str, Any]:
        """Be another worker from now on, whose pool holds one sequence (`rank_pools`)."""
        await self.sender.close()
        assert self.memory.region is not None
        self.memory.region.close()
        info = PeerInfo(**me)
        memory = guarded(info, shared=True)
        write_sequence(memory, info, tables, first_tokens, num_tokens)
        self._be(memory, info)
        return {"peer": asdict(await self.sender.start())}

    def offer_together(
        self, readers: Sequence[tuple[dict[str, Any], dict[str, Any]]], first_blocks: list[int]
    ) -> dict[str, Any]:
        """Open transfers of the same blocks to several workers."""
        self.sender.open_together(
            {TransferKey(**key): PeerInfo(**decode) for key, decode in readers},
            first_blocks=tuple(first_blocks),
        )
        return {}

    def grant_part(
        self, key: dict[str, Any], blocks: list[dict[str, Any]], token_id: int | None
    ) -> dict[str, Any]:
        """Grant blocks of any number of tokens; a token id makes it the last."""
        granted = [GrantedBlock(**block) for block in blocks]
        first = FirstToken(token_id=token_id) if token_id is not None else None
        return {"live": self.sender.grant(TransferKey(**key), granted, first)}

    def grant(
        self, key: dict[str, Any], start: int, block_ids: list[int], token_id: int | None
    ) -> dict[str, Any]:
        """Grant one-token blocks, logical block `start` first; a token id makes it the last."""
        blocks = [
            GrantedBlock(
                logical=LogicalBlock(start + i),
                block_id=BlockId(block_id),
                generation=self.memory.generations[block_id],
                valid_tokens=1,
            )
            for i, block_id in enumerate(block_ids)
        ]
        first = FirstToken(token_id=token_id) if token_id is not None else None
        return {"live": self.sender.grant(TransferKey(**key), blocks, first)}

    def free(self, block_ids: list[int]) -> dict[str, Any]:
        """Free blocks and give them to somebody else, as a pool that lost count would."""
        for block_id in block_ids:
            self.memory.generations[block_id] += 1
            self.memory.block(BlockId(block_id))[:] = b"\x99" * self.memory.bytes_per_block
        return {}

    def revoke(self, key: dict[str, Any]) -> dict[str, Any]:
        """Take a transfer's blocks back."""
        self.sender.revoke(TransferKey(**key), "revoked by the test")
        return {}

    def stats(self) -> dict[str, Any]:
        """Live leases, and what the process holds of the system."""
        gc.collect()
        process = psutil.Process()
        return {
            "active": self.sender.stats().active_leases,
            "opened": self.sender.stats().opened,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "listening": [
                c.laddr.ip
                for c in process.net_connections("inet")
                if c.status == psutil.CONN_LISTEN
            ],
        }
