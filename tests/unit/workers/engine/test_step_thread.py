import asyncio
import threading

import pytest

from tests.fakes.model_runner import FakeModelRunner
from workers.engine.step import StepPlan, StepResult
from workers.engine.step_thread import StepThread

EMPTY = StepPlan(step_id=3, sequences=())


async def test_step_runs_outside_the_loops_thread():
    ran_in = []
    runner = FakeModelRunner(block_size=4)
    runner.on_execute = lambda _plan: ran_in.append(threading.current_thread())
    thread = StepThread(runner)
    thread.start()
    assert await thread.submit(EMPTY) == StepResult(step_id=3, token_ids={})
    assert ran_in != [threading.current_thread()]
    thread.close()
    assert thread.join(5)


async def test_what_the_runner_raises_reaches_who_awaits():
    runner = FakeModelRunner(block_size=4)
    runner.errors.append(MemoryError("no room"))
    thread = StepThread(runner)
    thread.start()
    with pytest.raises(MemoryError, match="no room"):
        await thread.submit(EMPTY)
    thread.close()
    assert thread.join(5)


async def test_outcome_of_a_step_that_was_given_up_is_dropped():
    runner = FakeModelRunner(block_size=4)
    runner.gate = threading.Event()
    thread = StepThread(runner)
    thread.start()
    thread.submit(EMPTY).cancel()
    runner.gate.set()
    assert await thread.submit(EMPTY) == StepResult(step_id=3, token_ids={})
    thread.close()
    assert thread.join(5)


def test_thread_outlives_the_loop_that_asked():
    runner = FakeModelRunner(block_size=4)
    runner.gate = threading.Event()
    thread = StepThread(runner)
    thread.start()

    async def ask_and_leave() -> None:
        thread.submit(EMPTY)

    asyncio.run(ask_and_leave())
    runner.gate.set()
    thread.close()
    assert thread.join(5)
    assert runner.plans == [EMPTY]


async def test_join_tells_that_a_step_hangs():
    runner = FakeModelRunner(block_size=4)
    runner.gate = threading.Event()
    thread = StepThread(runner)
    thread.start()
    step = thread.submit(EMPTY)
    thread.close()
    assert not thread.join(0)
    runner.gate.set()
    await step
    assert thread.join(5)
