"""The transports beside a plain socket copy and a memory copy, between two processes, in one run.

    python tests/bench/bench_transport.py

For each block size and transport: GB/s of a transfer of many blocks, of the same bytes by
sendall/recv_into over one blocking connection, and of the same copied within this process; and the
time from asking for one block to having it against one plain request and answer, and against one
copy. Rounds alternate, so that a busy machine is busy for all. With the extra rdma, nixl is
measured too: within this host it copies by CMA; nixl-tcp has UCX go over TCP (here on loopback), as
it does between hosts without RDMA, and its owner in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import FirstToken, GrantedBlock, PeerInfo, TransferKey
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transports.nixl_agent import has_nixl
from tests.fakes.block_memory import ByteMemory, peer_info, transfer_key
from tests.fakes.stream_kinds import NIXL, NIXL_TCP, STREAM_KINDS, StreamKind

POOL_BYTES = 96 * 1024 * 1024
SIZES_KIB = (16, 64, 360, 720)
_ASK = struct.Struct("!II")


def geometry(size_kib: int) -> tuple[int, int]:
    """Bytes per block, and blocks that make up the pool."""
    return size_kib * 1024, POOL_BYTES // (size_kib * 1024)


def info(name: str, size_kib: int) -> PeerInfo:
    """A worker with one token per block."""
    size, count = geometry(size_kib)
    return peer_info(
        name,
        f"{name}-1",
        bytes_per_block=size,
        block_size=1,
        max_model_len=count,
        pool_tokens=count,
    )


def owners() -> list[tuple[StreamKind, ...]]:
    """The transports that there are here, by the owner's process.

    One process offers no two of one name, and one that aborts takes none of the others with it.
    """
    return [(*STREAM_KINDS, NIXL), (NIXL_TCP,)] if has_nixl() else [STREAM_KINDS]


def serve_plain(listener: socket.socket, memory: ByteMemory) -> None:
    """Answer (count, -) with the first `count` blocks, until the peer closes."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while ask := connection.recv(_ASK.size, socket.MSG_WAITALL):
        count, _ = _ASK.unpack(ask)
        for i in range(count):
            connection.sendall(memory.block(BlockId(i)))


async def serve(size_kib: int, kinds: Sequence[StreamKind]) -> None:
    """The owner's process: one transfer per line on standard input, `id reader count`."""
    memory = ByteMemory(geometry(size_kib)[1], geometry(size_kib)[0], shared=True)
    memory.fill(1)
    sender = KVSender(
        memory=memory,
        me=info("p", size_kib),
        generation_of=memory.generation_of,
        transports=[kind.transport() for kind in kinds],
        on_end=lambda _key, _reason: None,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    plain = asyncio.create_task(asyncio.to_thread(serve_plain, listener, memory))
    peer = await sender.start()
    told = {"endpoints": peer.endpoints, "port": listener.getsockname()[1]}
    print(json.dumps(told), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        transfer_id, reader, count = line.split()
        me = info(reader, size_kib)
        key = transfer_key(transfer_id, decode=me.incarnation)
        sender.open(key, me)
        blocks = [
            GrantedBlock(logical=LogicalBlock(i), block_id=BlockId(i), generation=0, valid_tokens=1)
            for i in range(int(count))
        ]
        sender.grant(key, blocks, FirstToken(token_id=1))
        print("open", flush=True)
    await sender.close()
    await plain


class Peer:
    """The owner's process as the measuring one sees it."""

    def __init__(self, size_kib: int, owner: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(size_kib), "--owner", str(owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        told = json.loads(self._line())
        endpoints = tuple((name, address) for name, address in told["endpoints"])
        self.info = replace(info("p", size_kib), endpoints=endpoints)
        self.plain = socket.create_connection(("127.0.0.1", told["port"]))
        self.plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.opened = 0

    def open(self, reader: PeerInfo, count: int) -> TransferKey:
        """Have the first `count` blocks granted."""
        self.opened += 1
        assert self.process.stdin is not None
        self.process.stdin.write(f"t{self.opened} {reader.worker_id} {count}\n")
        self.process.stdin.flush()
        self._line()
        return transfer_key(f"t{self.opened}", decode=reader.incarnation)

    def close(self) -> None:
        """End the process."""
        self.plain.close()
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = "["
        while line.startswith("["):  # UCX warns on standard output
            line = self.process.stdout.readline()
        return line


def plain_copy(peer: Peer, memory: ByteMemory, count: int) -> float:
    """Seconds for `count` blocks over the plain connection."""
    started = time.perf_counter()
    peer.plain.sendall(_ASK.pack(count, 0))
    for i in range(count):
        view = memory.block(BlockId(i))
        while view.nbytes:
            view = view[peer.plain.recv_into(view) :]
    return time.perf_counter() - started


def summary(seconds: list[float], unit: Callable[[float], float]) -> str:
    """Median with its spread."""
    values = sorted(unit(s) for s in seconds)
    return f"{statistics.median(values):8.2f} [{values[0]:.2f} .. {values[-1]:.2f}]"


def memory_copy(source: ByteMemory, memory: ByteMemory, count: int, start: int = 0) -> float:
    """Seconds for `count` blocks from one part of this process's memory to another."""
    started = time.perf_counter()
    for i in range(start, start + count):
        memory.block(BlockId(i))[:] = source.block(BlockId(i))
    return time.perf_counter() - started


class Measurement:
    """One transport's times at one block size."""

    def __init__(self, kind: StreamKind, peer: Peer, memory: ByteMemory, size_kib: int) -> None:
        self.label = kind.label
        self.peer = peer
        self.transport = kind.transport()
        self.memory = memory
        self.me, receiver = info("d", size_kib), info("r", size_kib)
        # What a transport keeps of its peers belongs to one thread and one worker: so the receiver
        # has its own, and is another.
        self.receiver = KVReceiver(memory=memory, me=receiver, transports=[kind.transport()])
        self.receiver_info = receiver
        self.fetch: list[float] = []
        self.whole: list[float] = []
        self.one: list[float] = []

    async def round(self, count: int) -> None:
        """One transfer on a session of its own, one whole hand-off, and some single blocks."""
        peer = self.peer
        self.fetch += await self._fetches(peer, count, count)
        places = [BlockId(i) for i in range(count)]
        key = peer.open(self.receiver_info, count)
        transfer = self.receiver.transfer(peer.info, key, places, count, 60.0)
        self.whole.append((await transfer.pull()).fetch_s)
        self.one += await self._fetches(peer, 20, 1)

    async def _fetches(self, peer: Peer, count: int, each: int) -> list[float]:
        """Seconds per fetch of `each` blocks, on one session whose grant covers `count`."""
        key = peer.open(self.me, count)
        session = await self.transport.connect(self.memory, peer.info, key, self.me)
        (blocks,) = [grant.blocks async for grant in session.grants()]
        places = {block.logical: block.block_id for block in blocks}
        seconds = []
        for start in range(0, count, each):
            started = time.perf_counter()
            async for _ in session.fetch(blocks[start : start + each], places):
                pass
            seconds.append(time.perf_counter() - started)
        await session.release()
        await session.close()
        return seconds


async def measure(size_kib: int, rounds: int) -> None:
    """Print one block size's comparison."""
    size, count = geometry(size_kib)
    # Both begin at a page, as the arenas of workers do: copies between odd addresses are slower.
    memory, source = (ByteMemory(count, size, shared=True) for _ in range(2))
    source.fill(2)
    peers = [Peer(size_kib, owner) for owner in range(len(owners()))]
    measured = [
        Measurement(kind, peer, memory, size_kib)
        for peer, kinds in zip(peers, owners(), strict=True)
        for kind in kinds
    ]
    for measurement in measured:
        await measurement.receiver.start()
    plain, copied, one_plain, one_copied = [], [], [], []
    for _ in range(rounds):
        plain.append(plain_copy(peers[0], memory, count))
        copied.append(memory_copy(source, memory, count))
        for measurement in measured:
            await measurement.round(count)
        one_plain += [plain_copy(peers[0], memory, 1) for _ in range(20)]
        # Each another block, as with a transport: one that was just copied is in the cache.
        one_copied += [memory_copy(source, memory, 1, start=i) for i in range(20)]
    for measurement in measured:
        await measurement.receiver.close()
        await measurement.transport.close()
    for peer in peers:
        peer.close()

    def speed(seconds: float) -> float:
        return count * size / seconds / 1e9

    def micros(seconds: float) -> float:
        return seconds * 1e6

    def ratio(some: list[float], others: list[float]) -> str:
        return f"{statistics.median(some) / statistics.median(others):.2f}"

    print(f"{size_kib} KiB x {count}, n={rounds}; GB/s, then microseconds for one block")
    print(f"  plain socket {summary(plain, speed)}   one {summary(one_plain, micros)}")
    print(f"  memory copy  {summary(copied, speed)}   one {summary(one_copied, micros)}")
    for measurement in measured:
        print(
            f"  {measurement.label}: fetch {summary(measurement.fetch, speed)}"
            f" = {ratio(plain, measurement.fetch)} of plain,"
            f" {ratio(copied, measurement.fetch)} of a copy;"
            f" whole hand-off {summary(measurement.whole, speed)};"
            f" one {summary(measurement.one, micros)}"
            f" = {ratio(measurement.one, one_plain)} of plain,"
            f" {ratio(measurement.one, one_copied)} of a copy",
            flush=True,
        )


def main() -> None:
    """Measure every size, or serve one as the other process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", type=int)
    parser.add_argument("--owner", type=int, default=0)
    parser.add_argument("--size", type=int, action="append", help="KiB", choices=SIZES_KIB)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, owners()[arguments.owner]))
        return
    for size_kib in arguments.size or SIZES_KIB:
        asyncio.run(measure(size_kib, arguments.rounds))


if __name__ == "__main__":
    main()
