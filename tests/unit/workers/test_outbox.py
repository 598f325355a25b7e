"""Heartbeats go where nothing else does."""

from __future__ import annotations

from workers.messages import Heartbeat, TokenFrame, WorkerEvent
from workers.outbox import Outbox

BEAT = Heartbeat(attempt=0, worker="decode-0")
FRAME = TokenFrame(attempt=0, token_ids=(1,))


async def beats(outbox: Outbox, num_beats: int) -> list[WorkerEvent]:
    """What comes of some beats, with all read in between."""
    seen = []
    for _ in range(num_beats):
        outbox.beat(BEAT)
        outbox.put(FRAME)  # so that there is always something to get
        while (event := await outbox.get()) is not FRAME:
            seen.append(event)
    return seen


async def test_a_new_outbox_names_its_worker_at_the_first_beat():
    outbox = Outbox()
    outbox.beat(BEAT)
    assert await outbox.get() == BEAT


async def test_a_beat_is_left_out_where_something_was_sent_since_the_last_one():
    assert await beats(Outbox(), 3) == [BEAT]


async def test_quiet_outboxes_beat_every_time():
    outbox = Outbox()
    for _ in range(3):
        outbox.beat(BEAT)
        assert await outbox.get() == BEAT


async def test_a_reader_that_does_not_read_collects_no_heartbeats():
    outbox = Outbox()
    for _ in range(3):
        outbox.beat(BEAT)
    outbox.put(FRAME)
    assert [await outbox.get(), await outbox.get()] == [BEAT, FRAME]
