import asyncio
import threading

import pytest

from kv_transfer.transfer_thread import MAX_TURN_S, TransferThread, run_beside
from tests.fakes.clock import FakeClock
from tests.fakes.until import turned


async def test_work_runs_on_one_other_thread_in_the_order_of_the_posts():
    thread = TransferThread("kv-test")
    await thread.start()
    seen = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    for i in range(5):
        thread.post(note, i)

    async def last():
        return threading.current_thread().name

    assert await thread.run(last()) == "kv-test"
    assert seen == [(i, "kv-test") for i in range(5)]
    await thread.stop()


async def test_an_error_comes_back_to_who_asked():
    thread = TransferThread("kv-test")
    await thread.start()

    async def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await thread.run(fail())
    await thread.stop()


async def test_stopping_ends_the_thread_cancels_its_tasks_and_can_be_repeated():
    thread = TransferThread("kv-test")
    await thread.start()
    cancelled = threading.Event()
    started = threading.Event()

    async def forever():
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    task = asyncio.create_task(thread.run(forever()))
    await asyncio.to_thread(started.wait)
    await thread.stop()
    assert cancelled.is_set()
    assert not any(t.name == "kv-test" for t in threading.enumerate())
    await thread.stop()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_thread_that_does_not_run_takes_no_work():
    thread = TransferThread("kv-test")

    async def nothing():
        return None

    await thread.stop()
    with pytest.raises(RuntimeError):
        thread.post(print)
    with pytest.raises(RuntimeError):
        await thread.run(nothing())
    await thread.start()
    with pytest.raises(RuntimeError):
        await thread.start()
    await thread.stop()


class Probe:
    """A coroutine that waits, and remembers how it ended."""

    def __init__(self):
        self.go = asyncio.Event()
        self.ended = False

    async def run(self):
        try:
            await self.go.wait()
        finally:
            self.ended = True


async def value(result):
    return result


async def fail(error):
    raise error


async def test_the_main_result_ends_the_others():
    probe = Probe()
    assert await run_beside(value(5), probe.run()) == 5
    assert await run_beside(value(6)) == 6


async def test_an_other_that_fails_ends_main():
    main, other = Probe(), Probe()
    with pytest.raises(KeyError):
        await run_beside(main.run(), other.run(), fail(KeyError("x")))
    assert main.ended
    assert other.ended


async def test_an_other_may_end_before_main():
    main = Probe()

    async def release():
        main.go.set()

    await run_beside(main.run(), release())


async def test_a_failure_of_main_is_raised():
    with pytest.raises(KeyError):
        await run_beside(fail(KeyError("x")), Probe().run())


async def test_cancelling_ends_all_even_when_cancelled_twice():
    main = Probe()
    slow_end = asyncio.Event()
    slow_ended = asyncio.Event()

    async def slow():
        try:
            await asyncio.Event().wait()
        finally:
            await slow_end.wait()
            slow_ended.set()

    task = asyncio.create_task(run_beside(main.run(), slow()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    slow_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert main.ended
    assert slow_ended.is_set()


async def test_a_loop_that_does_not_get_to_its_next_turn_hangs_until_it_does():
    clock = FakeClock()
    thread = TransferThread("kv-test", clock)
    assert not thread.is_hung, "it does not run"
    await thread.start()
    going_on = threading.Event()
    thread.post(going_on.wait)
    assert not thread.is_hung, "that has asked, and the answer has time"
    clock.advance(MAX_TURN_S)
    assert not thread.is_hung
    clock.advance(0.1)
    assert thread.is_hung

    going_on.set()

    await turned(thread)
    assert not thread.is_hung, "the old question was answered, and a new one asked"
    clock.advance(MAX_TURN_S + 0.1)
    await turned(thread)
    assert not thread.is_hung
    await thread.stop()
    clock.advance(MAX_TURN_S + 0.1)
    assert not thread.is_hung, "it was told to end"
