"""A worker behind a channel, and both ends of channels in one process, over real sockets."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from deployments.channel.address import ChannelAddress
from deployments.channel.frames import Frame, encode_frame
from deployments.channel.pool import ChannelPool
from deployments.channel.server import ChannelServer, ChannelService
from deployments.channel.stream import ChannelTimings, FrameStream, connect
from kv_transfer.authentication import Initiator, Purpose, Secret
from tests.fakes.backend import FakeBackend, Step, tokens_then_end
from workers.engine.sampling_params import SamplingParams
from workers.messages import GenerateRequest, WorkerLoad

HOST = "127.0.0.1"
SECRET = Secret("a secret of a deployment in a test")
QUICK = ChannelTimings(
    connect_s=5.0,
    beat_s=0.02,
    silence_s=30.0,
    close_s=0.02,
    find_s=0.02,
    find_first_s=0.005,
    load_s=0.0,
)
PATIENCE_S = 20.0

Script = Callable[[GenerateRequest], Iterable[Step]]


class FakeWorker(FakeBackend):
    """Implements `ChannelService`."""

    def __init__(self, script: Script | None = None) -> None:
        """Plays the script; without one, three tokens and the end."""
        super().__init__(script or tokens_then_end((7, 8, 9)))
        self.others = 0
        """Requests of Fronts that are not in the test."""

    def load(self) -> WorkerLoad:
        """See `ChannelService.load`."""
        return WorkerLoad(
            takes_requests=self.ready,
            requests=self.num_open + self.others,
            waiting=0,
            available_blocks=10,
        )


@dataclass(slots=True, kw_only=True)
class Rig:
    """Workers that listen, and one Front's pool of channels to them."""

    pool: ChannelPool
    servers: dict[str, ChannelServer] = field(default_factory=dict)
    addresses: dict[str, ChannelAddress] = field(default_factory=dict)

    async def add(self, name: str, worker: ChannelService) -> ChannelServer:
        """One more worker, which the pool will find."""
        server = ChannelServer(service=worker, worker=name, secret=SECRET, timings=QUICK)
        self.servers[name] = server
        self.addresses[name] = await server.start(HOST, 0)
        return server

    async def lose(self, name: str) -> None:
        """A worker's connections end while its requests run."""
        del self.addresses[name]
        await self.servers.pop(name).close()


@asynccontextmanager
async def rig(
    *,
    clock: Callable[[], float] = time.monotonic,
    timings: ChannelTimings = QUICK,
    **workers: ChannelService,
) -> AsyncIterator[Rig]:
    """The pool is ready if there is a worker; at the end nothing of it is left."""
    addresses: dict[str, ChannelAddress] = {}

    async def find() -> list[ChannelAddress]:
        return list(addresses.values())

    pool = ChannelPool(
        me="front", find=find, secret=SECRET, timings=timings, rng=random.Random(1), clock=clock
    )
    made = Rig(pool=pool, addresses=addresses)
    for name, worker in workers.items():
        await made.add(name, worker)
    pool.start()
    try:
        if workers:
            await until_ready(pool)
        yield made
    finally:
        await pool.close()
        for server in made.servers.values():
            await server.close()


async def until_ready(pool: ChannelPool, *, ready: bool = True) -> None:
    """Return once the pool is ready, or is not."""
    async with asyncio.timeout(PATIENCE_S):
        while await pool.is_ready() is not ready:  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(0.001)


async def raw_front(address: ChannelAddress, secret: Secret = SECRET) -> FrameStream:
    """A Front's end that a test speaks for itself."""
    initiator = Initiator(
        secret=secret, purpose=Purpose.TOKEN_CHANNEL, me="raw", peer=address.worker
    )
    return await connect(address, initiator, QUICK)


def request(
    name: str = "r", *, max_tokens: int = 1000, avoid: tuple[str, ...] = ()
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens),
        avoid=avoid,
    )


def wire(*frames: Frame) -> bytes:
    """Their bytes, one after the other."""
    return b"".join(map(encode_frame, frames))
