"""However the bytes of frames are cut, the same frames come out; and no bytes break the reader."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.frames import (
    BrokenFrameError,
    Cancel,
    Credit,
    Events,
    Frame,
    FrameBuffer,
    Open,
)
from tests.fakes.channel import request, wire
from workers.messages import Heartbeat, TokenFrame

CALLS = st.integers(0, 2**40)
TOKENS = st.lists(st.integers(0, 2**32), max_size=4).map(tuple)
EVENTS = st.builds(TokenFrame, attempt=st.integers(0, 9), token_ids=TOKENS) | st.builds(
    Heartbeat, attempt=st.integers(0, 9), worker=st.text(max_size=5)
)
FRAMES: st.SearchStrategy[list[Frame]] = st.lists(
    st.builds(Open, call=CALLS, request=st.just(request()))
    | st.builds(Cancel, call=CALLS)
    | st.builds(Credit, call=CALLS, events=st.integers(1, 64))
    | st.builds(Events, events=st.lists(st.tuples(CALLS, EVENTS), max_size=3).map(tuple)),
    max_size=6,
)


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 1000), max_size=20))
def test_frames_do_not_depend_on_how_their_bytes_are_cut(frames, cuts):
    encoded = wire(*frames)
    places = [0, *sorted(min(cut, len(encoded)) for cut in cuts), len(encoded)]
    buffer = FrameBuffer()
    read = [frame for start, end in pairwise(places) for frame in buffer.feed(encoded[start:end])]
    assert read == frames


@given(frames=FRAMES, place=st.integers(0, 200), flipped=st.integers(1, 255), tail=st.binary())
def test_damaged_bytes_are_read_or_refused_and_nothing_else(frames, place, flipped, tail):
    damaged = bytearray(wire(*frames) + tail)
    if place < len(damaged):
        damaged[place] ^= flipped
    try:
        FrameBuffer().feed(bytes(damaged))
    except BrokenFrameError:
        return
