"""How long something takes, for tests that compare a hostile input with a usual one of its size."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def seconds(call: Callable[..., Any], *arguments: Any, tries: int = 3) -> float:
    """The least of some times that a call takes."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)
