"""Calls in a thread that ends with them."""

import threading

import pytest

from workers.engine.passing_thread import in_passing_thread


def test_a_call_is_made_in_another_thread_which_has_ended_afterwards():
    made_in = in_passing_thread(threading.current_thread)
    assert made_in is not threading.current_thread()
    assert not made_in.is_alive()


def test_what_a_call_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        in_passing_thread(lambda: 1 // 0)
