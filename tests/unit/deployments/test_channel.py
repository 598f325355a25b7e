"""Front and decode workers over channels on real sockets, both ends in this process."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest

from deployments.channel.address import ChannelAddress
from deployments.channel.frames import (
    WINDOW_EVENTS,
    Cancel,
    Credit,
    Events,
    Frame,
    Open,
    encode_frame,
)
from deployments.channel.pool import ChannelPool
from deployments.channel.stream import ChannelLostError, FrameStream, accept
from kv_transfer import doorkeeper
from kv_transfer.authentication import CHALLENGE_BYTES, Purpose, Responder, Secret
from kv_transfer.logprobs import TokenLogprobs
from tests.fakes.backend import Step, finished, frame
from tests.fakes.channel import (
    HOST,
    PATIENCE_S,
    QUICK,
    SECRET,
    FakeWorker,
    raw_front,
    request,
    rig,
    until_ready,
)
from tests.fakes.clock import FakeClock
from tests.fakes.until import until
from workers.messages import (
    Failed,
    FailureCode,
    Finished,
    GenerateRequest,
    Heartbeat,
    PromptFrame,
    TokenFrame,
    WorkerEvent,
)

pytestmark = pytest.mark.timeout(PATIENCE_S * 2)


async def all_of(events: AsyncGenerator[WorkerEvent, None]) -> list[WorkerEvent]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in events]


def tokens_of(events: list[WorkerEvent]) -> list[int]:
    return [
        token_id
        for event in events
        if isinstance(event, TokenFrame)
        for token_id in event.token_ids
    ]


class Held:
    """A worker whose requests send one token and then wait for `go`."""

    def __init__(self, token_id: int = 7) -> None:
        self.go = asyncio.Event()
        self.worker = FakeWorker(
            lambda asked: [frame(token_id), self.go, frame(token_id + 1), finished(asked, 2)]
        )


async def hear(front: FrameStream) -> AsyncGenerator[Frame, None]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for heard in await front.receive():
                yield heard


async def is_dropped(front: FrameStream) -> bool:
    with suppress(ChannelLostError):
        async for _ in hear(front):
            pass
    front.abort()
    return True


# Requests ---------------------------------------------------------------------------------------


async def test_a_request_gets_its_events_in_order_and_ends_by_itself():
    worker = FakeWorker()
    async with rig(a=worker) as made:
        asked = request()
        events = await all_of(made.pool.generate(asked))
        assert events == [frame(7), frame(8), frame(9), finished(asked, 3)]
        assert worker.requests == [asked]
        await worker.idle.wait()
        assert worker.num_cut == 0


async def test_many_requests_share_the_connection_and_are_not_mixed_up():
    worker = FakeWorker(
        lambda asked: [
            frame(int(asked.request_id)),
            frame(int(asked.request_id) + 1),
            finished(asked, 2),
        ]
    )
    async with rig(a=worker) as made:
        numbers = range(0, 400, 2)
        answers = await asyncio.gather(
            *(all_of(made.pool.generate(request(str(number)))) for number in numbers)
        )
    assert [tokens_of(answer) for answer in answers] == [[n, n + 1] for n in numbers]


async def test_closing_a_request_cancels_it_on_the_worker_and_no_other():
    held = Held()
    async with rig(a=held.worker) as made:
        staying = made.pool.generate(request("staying"))
        async with aclosing(made.pool.generate(request("leaving"))) as leaving:
            assert [await anext(staying), await anext(leaving)] == [frame(7), frame(7)]
        await until(lambda: held.worker.num_open == 1)
        assert held.worker.num_cut == 1
        held.go.set()
        assert tokens_of(await all_of(staying)) == [8]


async def test_the_events_of_one_step_leave_in_one_write():
    step = asyncio.Event()
    worker = FakeWorker(lambda asked: [step, frame(int(asked.request_id)), finished(asked, 1)])
    async with rig(a=worker) as made:
        front = await raw_front(made.addresses["a"])
        for call in range(3):
            front.send(Open(call=call, request=request(str(call))))
        await until(lambda: worker.num_open == 3)
        step.set()
        heard = (each async for each in hear(front) if isinstance(each, Events) and each.events)
        first = await anext(heard)
        assert isinstance(first, Events)
        tokens = [(call, event) for call, event in first.events if isinstance(event, TokenFrame)]
        assert tokens == [(call, frame(call)) for call in range(3)]
        front.abort()


async def test_a_slow_reader_holds_up_itself_and_nobody_else():
    sent: list[int] = []

    def script(asked: GenerateRequest) -> Iterator[Step]:
        for token_id in range(asked.sampling.max_tokens):
            sent.append(token_id)
            yield frame(token_id)
        yield finished(asked, asked.sampling.max_tokens)

    async with rig(a=FakeWorker(script)) as made:
        slow = made.pool.generate(request("slow", max_tokens=1000))
        await anext(slow)
        await until(lambda: len(sent) > WINDOW_EVENTS)
        assert len(sent) == WINDOW_EVENTS + 1  # the one more is what waits for credit
        assert tokens_of(await all_of(made.pool.generate(request("quick", max_tokens=300)))) == [
            *range(300)
        ]
        assert len(sent) == WINDOW_EVENTS + 1 + 300
        assert tokens_of(await all_of(slow)) == [*range(1, 1000)]


async def test_a_long_prompt_s_scores_come_in_pieces_that_are_all_of_them():
    scores = tuple(TokenLogprobs(logprob=-1.0, rank=rank) for rank in range(1, 1001))
    worker = FakeWorker(lambda asked: [PromptFrame(attempt=0, logprobs=scores), finished(asked, 0)])
    async with rig(a=worker) as made:
        events = await all_of(made.pool.generate(request()))
    said = [each for event in events if isinstance(event, PromptFrame) for each in event.logprobs]
    assert tuple(said) == scores
    assert isinstance(events[-1], Finished)


async def test_heartbeats_name_the_worker_as_requests_avoid_it():
    worker = FakeWorker(lambda asked: [Heartbeat(attempt=0, worker="decode-0"), finished(asked, 0)])
    async with rig(replica_x=worker) as made:
        first, _ = await all_of(made.pool.generate(request()))
    assert first == Heartbeat(attempt=0, worker="replica_x")


async def test_a_worker_s_bug_ends_its_request_with_a_reply():
    worker = FakeWorker(lambda _: [frame(7), RuntimeError("a bug")])
    async with rig(a=worker) as made:
        first, last = await all_of(made.pool.generate(request()))
        assert first == frame(7)
        assert isinstance(last, Failed)
        assert last.code is FailureCode.INTERNAL
        assert "a bug" not in last.message  # it may quote a prompt
        assert await made.pool.is_ready()


# Workers that come and go -----------------------------------------------------------------------


async def test_a_lost_connection_fails_its_requests_after_what_had_come():
    held = Held()
    async with rig(a=held.worker) as made:
        events = made.pool.generate(replace(request(), attempt=3))
        assert await anext(events) == frame(7)
        await made.lose("a")
        (last,) = await all_of(events)
        assert isinstance(last, Failed)
        assert (last.code, last.attempt) == (FailureCode.WORKER_LOST, 3)
        await until_ready(made.pool, ready=False)
        assert held.worker.num_open == 0


async def test_requests_go_on_with_whoever_is_left_and_wait_for_who_comes():
    async with rig(a=FakeWorker(), b=FakeWorker()) as made:
        await made.lose("a")
        assert tokens_of(await all_of(made.pool.generate(request()))) == [7, 8, 9]
        await made.lose("b")
        await until_ready(made.pool, ready=False)
        waiting = asyncio.create_task(all_of(made.pool.generate(request(avoid=("c",)))))
        await made.add("c", FakeWorker())
        assert tokens_of(await waiting) == [7, 8, 9]


async def test_a_worker_that_leaves_finishes_what_it_has_and_gets_nothing_new():
    held, other = Held(), FakeWorker()
    async with rig(a=held.worker) as made:
        running = made.pool.generate(request())
        await anext(running)
        made.servers["a"].leave()
        await until_ready(made.pool, ready=False)
        waiting = [asyncio.create_task(all_of(made.pool.generate(request()))) for _ in range(5)]
        await made.add("b", other)
        assert [tokens_of(await task) for task in waiting] == [[7, 8, 9]] * 5
        held.go.set()
        assert tokens_of(await all_of(running)) == [8]
        assert len(held.worker.requests) == 1


async def test_closing_lets_last_words_leave():
    held = Held()
    async with rig(a=held.worker) as made:
        events = made.pool.generate(request())
        await anext(events)
        held.go.set()
        await made.servers["a"].close()
        assert [type(event) for event in await all_of(events)] == [TokenFrame, Finished]


async def test_a_front_that_goes_takes_its_requests_with_it_and_no_others():
    held = Held()
    async with rig(a=held.worker) as made:
        staying = made.pool.generate(request("staying"))
        await anext(staying)
        front = await raw_front(made.addresses["a"])
        for call in range(3):
            front.send(Open(call=call, request=request()))
        await until(lambda: held.worker.num_open == 4)
        front.abort()
        await until(lambda: held.worker.num_open == 1)
        held.go.set()
        assert tokens_of(await all_of(staying)) == [8]


async def test_a_worker_that_says_nothing_gets_no_new_requests_until_it_does():
    clock = FakeClock()
    timings = replace(QUICK, silence_s=2.0)
    async with rig(a=FakeWorker(), clock=clock, timings=timings) as made:
        clock.advance(2.1)
        assert not await made.pool.is_ready()
        await until_ready(made.pool)  # by its next beat
        assert tokens_of(await all_of(made.pool.generate(request()))) == [7, 8, 9]


async def test_an_engine_that_does_not_run_is_not_ready():
    worker = FakeWorker()
    async with rig(a=worker) as made:
        worker.ready = False
        await until_ready(made.pool, ready=False)


async def test_load_that_is_reported_leaves_out_the_front_s_own_requests():
    held = Held()
    held.worker.others = 5
    async with rig(a=held.worker) as made:
        front = await raw_front(made.addresses["a"])
        for call in range(3):
            front.send(Open(call=call, request=request()))
        tokens, loads = 0, []
        async for each in hear(front):
            assert isinstance(each, Events)
            tokens += len(each.events)
            if each.load is not None:
                loads.append(each.load.requests)
            if tokens == 3 and not each.events:
                break
        assert loads[0] == loads[-1] == 5
        front.abort()


async def test_a_pool_that_has_stopped_looking_is_not_ready_and_keeps_nobody_waiting(caplog):
    """By a bug: Front says so to Serve, and is replaced."""
    asked, broken = asyncio.Event(), asyncio.Event()

    async def find() -> list[ChannelAddress]:
        asked.set()
        await broken.wait()
        raise ValueError("a bug")

    pool = ChannelPool(
        me="front",
        find=find,
        secret=SECRET,
        timings=QUICK,
        rng=random.Random(1),
        clock=time.monotonic,
    )
    pool.start()
    await asked.wait()
    assert pool.is_watching
    waiting = asyncio.create_task(all_of(pool.generate(request())))
    await asyncio.sleep(0)
    broken.set()
    with pytest.raises(RuntimeError, match="not looking"):
        await waiting
    assert not pool.is_watching
    assert not await pool.is_ready()
    assert "not looked for any more" in caplog.text
    await pool.close()


# Peers that are not what they should be ---------------------------------------------------------


async def test_who_does_not_know_the_secret_is_not_read():
    worker = FakeWorker()
    async with rig(a=worker) as made:
        with pytest.raises(ChannelLostError):
            await raw_front(made.addresses["a"], Secret("another secret, of another deployment"))
        assert worker.requests == []
        assert tokens_of(await all_of(made.pool.generate(request()))) == [7, 8, 9]


async def test_another_worker_at_the_address_is_not_taken_for_the_one_wanted():
    async with rig(a=FakeWorker()) as made:
        with pytest.raises(ChannelLostError):
            await raw_front(replace(made.addresses["a"], worker="b"))


@pytest.mark.parametrize(
    "greeting",
    [b"", b"GET / HTTP/1.1\r\n\r\n", encode_frame(Open(call=0, request=request())), b"\0" * 200],
)
async def test_a_stranger_is_dropped_in_time_and_harms_nobody(greeting):
    worker = FakeWorker()
    async with rig(a=worker) as made:
        address = made.addresses["a"]
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(greeting)
        if greeting and len(greeting) < 100:
            writer.write_eof()
        if greeting:  # one that says nothing is dropped at close, or after connect_s
            async with asyncio.timeout(PATIENCE_S):
                with suppress(ConnectionError):
                    while await reader.read(4096):
                        pass
        writer.transport.abort()
        assert worker.requests == []
        assert tokens_of(await all_of(made.pool.generate(request()))) == [7, 8, 9]
        await until(lambda: made.servers["a"].num_strangers == 1)


async def test_strangers_that_fill_every_place_make_room_for_who_proves_itself(monkeypatch):
    monkeypatch.setattr(doorkeeper, "MAX_CONNECTIONS", 3)  # the pool has one of them
    async with rig(a=FakeWorker()) as made:
        server, address = made.servers["a"], made.addresses["a"]
        first = await asyncio.open_connection(address.host, address.port)
        await first[0].readexactly(CHALLENGE_BYTES)
        second = await asyncio.open_connection(address.host, address.port)
        await second[0].readexactly(CHALLENGE_BYTES)
        front = await raw_front(address)
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                assert await first[0].read() == b""  # it is the oldest that goes
        assert server.num_strangers == 1
        another = await raw_front(address)
        with pytest.raises(ChannelLostError):
            await raw_front(address)  # all are admitted
        assert server.num_strangers == 2
        assert tokens_of(await all_of(made.pool.generate(request()))) == [7, 8, 9]
        for stream in (front, another):
            stream.abort()
        for _, writer in (first, second):
            writer.transport.abort()


@pytest.mark.parametrize(
    "said",
    [
        [Events()],
        [Open(call=0, request=request()), Open(call=0, request=request())],
        [Open(call=0, request=request()), Credit(call=0, events=WINDOW_EVENTS + 1)],
        [Open(call=0, request=request()), Credit(call=0, events=0)],
    ],
    ids=["events", "same call twice", "credit for what was not sent", "credit for nothing"],
)
async def test_a_front_that_breaks_the_protocol_is_dropped_with_its_requests(said):
    held = Held()
    async with rig(a=held.worker) as made:
        front = await raw_front(made.addresses["a"])
        for each in said:
            front.send(each)
        assert await is_dropped(front)
        await until(lambda: held.worker.num_open == 0)
        assert await made.pool.is_ready()


async def test_what_is_said_of_a_call_that_has_ended_is_of_no_effect():
    async with rig(a=FakeWorker()) as made:
        front = await raw_front(made.addresses["a"])
        front.send(Cancel(call=5))
        front.send(Credit(call=5, events=9))
        front.send(Open(call=6, request=request()))
        events: list[WorkerEvent] = []
        async for each in hear(front):
            assert isinstance(each, Events)
            events += [event for _, event in each.events]
            if events and isinstance(events[-1], Finished):
                break
        assert tokens_of(events) == [7, 8, 9]
        front.abort()


FLOOD = Events(events=tuple((0, frame(1)) for _ in range(WINDOW_EVENTS + 2)))


@pytest.mark.parametrize(
    "said",
    [b"\xff" * 64, encode_frame(Cancel(call=0)), encode_frame(FLOOD)],
    ids=["garbage", "a Front's frame", "more than was read"],
)
async def test_a_worker_that_breaks_the_protocol_is_lost(said):
    """Its requests go elsewhere; the pool itself goes on."""

    async def misbehave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        responder = Responder(secret=SECRET, purpose=Purpose.TOKEN_CHANNEL, me="bad")
        stream = await accept(reader, writer, responder, QUICK)
        stream.send(Events(load=FakeWorker().load()))
        with suppress(ChannelLostError):
            await stream.receive()
            writer.write(said)
            await stream.receive()
        stream.abort()

    async with rig() as made:
        server = await asyncio.start_server(misbehave, HOST, 0)
        _, port = server.sockets[0].getsockname()
        made.addresses["bad"] = ChannelAddress(worker="bad", host=HOST, port=port)
        events = made.pool.generate(request())
        seen = await all_of(events)
        assert isinstance(seen[-1], Failed)
        assert seen[-1].code is FailureCode.WORKER_LOST
        server.close()
