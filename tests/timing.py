"""How long something takes, for tests that compare a hostile input with a usual one of its size."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def seconds(call: Callable[..., Any], *arguments: Any, tries: int = 5) -> float:
    """The least of some times that a call takes, in processor seconds of this thread: others share the cores.

    A short call is made more often, until all took 50 ms: one interruption of it would be most of its time.
    """
    times: list[float] = []
    while len(times) < tries or sum(times) < 0.05:
        start = time.thread_time()
        call(*arguments)
        times.append(time.thread_time() - start)
    return min(times)


def longest_wait(call: Callable[[], Any]) -> float:
    """The longest that this thread, which asks every millisecond, was kept from running while another made the call.

    Of two tries the better one, since the machine may do other things.
    """
    return min(_longest_wait(call) for _ in range(2))


def _longest_wait(call: Callable[[], Any]) -> float:
    worker = threading.Thread(target=call)
    longest, last = 0.0, time.perf_counter()
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest
