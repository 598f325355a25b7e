"""Blocks of a pool on a device: what their digest is made of, and what cuda_ipc alone must do."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.geometry import BlockId
from kv_transfer.receiver import KVReceiver
from kv_transfer.scratch import ScratchArenas
from kv_transfer.transport import CorruptTransferError, LinkRefusedError
from kv_transfer.transports import staged
from kv_transfer.transports.cuda_device import CudaDevice
from kv_transfer.transports.device import (
    block_content,
    block_tensor,
    block_work,
    device_memory,
    fingerprint,
)
from kv_transfer.transports.device_workspace import DeviceWorkspace
from kv_transfer.transports.staged import StagedTransport
from tests.fakes.block_memory import ByteMemory, peer_info
from tests.fakes.device import DeviceBytes, SharedHostDevice
from tests.fakes.kv_link import PLACES, kv_link
from tests.fakes.rank_link import rank_link
from tests.fakes.stream_kinds import cuda_ipc_transport, tcp_transport

_MASK = (1 << 64) - 1


def split_mix(word: int) -> int:
    """SplitMix64's finalizer, as it was published."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def reference(content: bytes) -> bytes:
    """The fingerprint in integers without a size."""
    padded = content + bytes(-len(content) % 8)
    step = 0x9E3779B97F4A7C15
    first = second = 0
    for i in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * i : 8 * i + 8], "little")
        mixed = split_mix((word + (i + 1) * step) & _MASK)
        first, second = first + mixed & _MASK, second + split_mix(mixed + step & _MASK) & _MASK
    return first.to_bytes(8, "little") + second.to_bytes(8, "little")


def tensor_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@given(st.binary(min_size=1, max_size=100))
def test_a_fingerprint_is_what_it_is_said_to_be(content: bytes) -> None:
    assert fingerprint(tensor_of(content)) == reference(content)


@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_fingerprint_changes_with_every_bit(content: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8

    assert fingerprint(tensor_of(content)) != fingerprint(tensor_of(bytes(changed)))


def test_a_fingerprint_changes_with_the_order_of_words() -> None:
    first, second = os.urandom(8), os.urandom(8)

    assert fingerprint(tensor_of(first + second)) != fingerprint(tensor_of(second + first))


def test_a_block_is_its_bytes_on_the_host_and_a_fingerprint_on_a_device() -> None:
    memory = ByteMemory(2, 24)
    memory.fill(1)
    there = DeviceBytes(memory)
    content = memory.block(BlockId(1))

    assert block_content(memory, BlockId(1)) == content
    assert block_content(there, BlockId(1)) == reference(bytes(content))
    for pool in (memory, there):
        assert block_tensor(pool, BlockId(1)).numpy().tobytes() == content
    with pytest.raises(ValueError, match="in host memory"):
        device_memory(memory)


@pytest.mark.parametrize("size", [512, 1 << 20])
def test_a_small_block_on_a_device_takes_longer_than_its_bytes(size: int) -> None:
    """Or the transfer thread would make thousands of fingerprints without a look at its peers."""
    memory = ByteMemory(1, size)

    assert block_work(memory) == size
    assert block_work(DeviceBytes(memory)) == max(size, 128 * 1024)


async def test_a_peers_arena_is_mapped_once_for_all_transfers() -> None:
    device = SharedHostDevice()
    async with kv_link(cuda_ipc_transport(device=device)) as link:
        for name in ("first", "second"):
            await link.incoming(link.offer(name)).pull()
    assert (device.shared, device.opened) == (1, 1)


async def test_an_arena_of_another_gpu_is_refused() -> None:
    owner = cuda_ipc_transport(device=SharedHostDevice("GPU-1"))
    async with kv_link(owner, receiving=cuda_ipc_transport()) as link:
        with pytest.raises(LinkRefusedError, match="is on GPU GPU-1, this worker on GPU-0"):
            await link.incoming(link.offer()).pull()


async def test_a_block_that_changes_after_it_was_announced_is_not_used() -> None:
    """As over shm: what is copied later is not what the owner's fingerprint was made of."""

    class WithoutHost(SharedHostDevice):
        """Has no host memory to give."""

        def host_memory(self, num_bytes: int) -> torch.Tensor:
            raise AssertionError("nothing goes by way of the host")

    transport = cuda_ipc_transport(device=WithoutHost())
    async with kv_link(transport) as link:
        key = link.open()
        session: Any = await transport.connect(link.into, link.peer, key, link.me)
        copy = session._source._copy

        def late(block_id: BlockId, place: BlockId) -> None:
            link.source.block(block_id)[7] ^= 1
            copy(block_id, place)

        session._source._copy = late
        blocks = link.blocks()[:1]
        assert link.sender.grant(key, blocks, None)
        async for _ in session.grants():
            break
        with pytest.raises(CorruptTransferError, match="digest"):
            async for _ in session.fetch(blocks, {blocks[0].logical: PLACES[0]}):
                pass
        await session.close()


@pytest.mark.parametrize("outside", [16, 1 << 31])
async def test_a_block_outside_the_arena_is_corrupt(outside: int) -> None:
    transport = cuda_ipc_transport()
    async with kv_link(transport) as link:
        session: Any = await transport.connect(link.into, link.peer, link.open(), link.me)
        block = dataclasses.replace(link.blocks()[0], block_id=BlockId(outside))
        arrival = SimpleNamespace(block=block, place=BlockId(0))
        with pytest.raises(CorruptTransferError, match="outside the arena"):
            await session._source.fill(session._frames, arrival)
        await session.close()


async def test_staged_blocks_take_turns_in_little_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staged, "STAGING_BYTES", 2 * 512)
    async with kv_link(StagedTransport(tcp_transport(), SharedHostDevice())) as link:
        await link.incoming(link.offer()).pull()
        assert link.has_arrived()


@pytest.mark.parametrize("kind", ["staged", "cuda_ipc"])
async def test_a_pool_in_host_memory_is_not_for_these(kind: str) -> None:
    transport = (
        cuda_ipc_transport()
        if kind == "cuda_ipc"
        else StagedTransport(tcp_transport(), SharedHostDevice())
    )
    me = peer_info("p", "p-1", bytes_per_block=512)

    with pytest.raises(ValueError, match="in host memory"):
        transport.server(ByteMemory(4, 512), object(), me)  # type: ignore[arg-type]


class FakeStorage:
    """What torch says of a storage that is shared."""

    def _share_cuda_(self) -> tuple[object, ...]:
        return (3, b"\x02handle", 640, 128, b"/torch_1_2", 7, b"\x00event", True)


class FakeCuda(CudaDevice):
    """Without a driver: what passes between two of them is what is tested."""

    def __init__(self, uuid: str) -> None:
        self._device = torch.device("cuda", 0)
        self._uuid = uuid

    @property
    def uuid(self) -> str:
        return self._uuid


def test_a_handle_brings_torch_what_it_needs_to_map_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []
    memory: Any = SimpleNamespace(
        num_blocks=4,
        bytes_per_block=100,
        tensor=lambda _: SimpleNamespace(untyped_storage=FakeStorage),
    )

    def map_shared(*arguments: object) -> torch.UntypedStorage:
        asked.append(arguments)
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(map_shared))
    handle = FakeCuda("GPU-a").share(memory)

    with pytest.raises(RuntimeError, match="no driver"):
        FakeCuda("GPU-a").open(handle)
    with pytest.raises(ValueError, match="GPU-a, this worker on GPU-b"):
        FakeCuda("GPU-b").open(handle)

    assert asked == [(0, b"\x02handle", 640, 128, b"/torch_1_2", 7, b"\x00event", True)]
    assert json.loads(handle)["num_bytes"] == 400


@pytest.mark.parametrize("handle", [b"", b"[]", b'{"gpu": "GPU-a"}', b'{"handle": 3}', b"\xff"])
def test_what_is_no_handle_is_refused(handle: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of whatever kind, a link is refused by it
        FakeCuda("GPU-a").open(handle)


async def test_a_device_without_memory_to_repack_in_refuses_by_name() -> None:
    """And is not asked again with every prompt: each time would keep it waiting."""

    class Full(SharedHostDevice):
        asked = 0

        def memory(self, num_bytes: int) -> torch.Tensor:
            self.asked += 1
            raise torch.OutOfMemoryError(f"tried to allocate {num_bytes} bytes")

    device = Full()
    scratch = ScratchArenas(DeviceWorkspace(device))
    async with kv_link(cuda_ipc_transport(), own_size=8, scratch=scratch) as link:
        for name in ("first", "second"):
            with pytest.raises(LinkRefusedError, match="no memory on the device for"):
                link.incoming(link.offer(name))
    assert device.asked == 1


def test_scratch_is_where_the_pool_is() -> None:
    pool = DeviceBytes(ByteMemory(2, 64))
    me = peer_info("decode-0", "d-1", bytes_per_block=64)
    with pytest.raises(ValueError, match="pool in cuda memory cannot be repacked in host memory"):
        KVReceiver(memory=pool, me=me, transports=[cuda_ipc_transport()])


def test_scratch_of_a_gpu_is_of_the_stream_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it may be what a step that still runs has given back."""
    current: list[object] = []

    @contextmanager
    def stream(of: object) -> Iterator[None]:
        current.append(of)
        yield
        current.pop()

    def empty(num_bytes: int, **_: object) -> tuple[int, object]:
        return num_bytes, current[-1]

    device = FakeCuda("GPU-a")
    device._stream = "the copies'"
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch, "empty", empty)
    assert device.memory(64) == (64, "the copies'")


class LateView:
    """A block to which copies come when the device gets to it."""

    def __init__(self, block: Any, asked: list[Callable[[], None]]) -> None:
        self._block = block
        self._asked = asked

    def __getitem__(self, slices: Any) -> LateView:
        return LateView(self._block[slices], self._asked)

    def __setitem__(self, slices: Any, value: Any) -> None:
        assert LateWorkspace.is_apart, "a copy that nobody waits for"
        content = value._block if isinstance(value, LateView) else value
        self._asked.append(lambda: self._block.__setitem__(slices, content))


class LateWorkspace(DeviceWorkspace):
    """Its device has done nothing before it is waited for."""

    asked: ClassVar[list[Callable[[], None]]] = []
    is_apart: ClassVar[bool] = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        with super().apart():
            LateWorkspace.is_apart = True
            yield
            LateWorkspace.is_apart = False
            for copy in self.asked:
                copy()
            self.asked.clear()

    def view(self, *arguments: Any) -> Any:
        return LateView(super().view(*arguments), self.asked)


@pytest.mark.parametrize("windows", [(), (None, 8)])
async def test_what_is_repacked_on_a_device_is_there_before_it_counts(windows: Any) -> None:
    transport = cuda_ipc_transport()
    scratch = ScratchArenas(LateWorkspace(SharedHostDevice()))
    async with rank_link(
        transport, source_size=3, sliding_windows=windows, scratch=scratch
    ) as link:
        await link.incoming().pull()
        assert link.has_arrived()
        with pytest.raises(TypeError, match="no host address"):
            scratch.of(link.owners[0].info.bytes_per_block).memory.block(BlockId(0))
