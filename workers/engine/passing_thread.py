"""A thread that ends with the one call that it is for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_passing_thread(call: Callable[[], Result]) -> Result:
    """Make a call in a thread of its own and wait for it; returns or raises what it does.

    OpenMP keeps a team of threads for every thread that has computed, for as long as that one
    lives, and where all teams together are more than the cores, it lets none of them spin: a
    model's load would make every later step slow.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="passing") as thread:
        return thread.submit(call).result()
