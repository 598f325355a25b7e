import asyncio
import socket

import pytest

from kv_transfer.transport import LeaseLostError, PeerLostError
from kv_transfer.transports.frame_socket import FrameSocket
from tests.fakes.until import until


@pytest.fixture
async def pair():
    """A connected pair whose buffers are far smaller than what the tests send."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    listener.close()
    for end in (client, server):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    sender, receiver = FrameSocket(client), FrameSocket(server)
    yield sender, receiver
    sender.close()
    receiver.close()


async def test_pieces_arrive_whole_and_in_order(pair):
    sender, receiver = pair
    pieces = [bytes([i]) * (i * 100_000 + 1) for i in range(8)]
    received = bytearray(sum(map(len, pieces)))
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(sender.send(pieces))
        group.create_task(receiver.receive_into(memoryview(received)))
    assert received == b"".join(pieces)
    assert receiver.bytes_received == len(received)


async def test_a_connection_that_ends_inside_a_piece_is_a_lost_peer(pair):
    sender, receiver = pair
    await sender.send([b"short"])
    sender.close()
    with pytest.raises(PeerLostError, match="closed"):
        await receiver.receive_into(memoryview(bytearray(6)))


async def test_a_reset_connection_is_a_lost_peer(pair):
    sender, receiver = pair
    receiver.close()
    with pytest.raises(PeerLostError):
        async with asyncio.timeout(10):
            await sender.send([bytes(10 * 1024 * 1024)])


async def test_no_byte_leaves_after_the_permission_has_ended(pair):
    sender, receiver = pair
    asked = 0

    def still_allowed():
        nonlocal asked
        asked += 1
        if asked == 3:
            raise LeaseLostError("expired")

    total = 10 * 1024 * 1024
    got = bytearray(total)
    reading = asyncio.create_task(receiver.receive_into(memoryview(got)))
    with pytest.raises(LeaseLostError):
        await sender.send([bytes(total)], still_allowed)
    sender.close()
    with pytest.raises(PeerLostError):
        await reading
    assert asked == 3
    assert receiver.bytes_received < total


async def test_a_cancelled_receive_takes_no_more_bytes(pair):
    sender, receiver = pair
    target = bytearray(1000)
    reading = asyncio.create_task(receiver.receive_into(memoryview(target)))
    await sender.send([b"x" * 10])
    await until(lambda: receiver.bytes_received == 10)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await sender.send([b"y" * 500])
    receiver.close()
    assert bytes(target) == b"x" * 10 + bytes(990)


async def test_a_last_word_neither_waits_nor_fails(pair):
    sender, _ = pair
    for _ in range(20_000):
        sender.try_send(b"z" * 60)  # long past what the buffers hold
    sender.close()
    sender.try_send(b"closed")


async def test_a_fast_peer_does_not_keep_other_tasks_waiting():
    size = 3 * 1024 * 1024
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * size)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    with listener, socket.create_connection(listener.getsockname()) as fast:
        accepted, _ = listener.accept()
        await asyncio.to_thread(fast.sendall, bytes(size))  # all of it is there to be read
        receiver = FrameSocket(accepted)
        block = memoryview(bytearray(64 * 1024))
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        watching = asyncio.create_task(other())
        for _ in range(size // block.nbytes):
            await receiver.receive_into(block)
        watching.cancel()
        receiver.close()
        assert turns >= 2
