"""Long work in steps: a generator that yields wherever it may pause, and returns what the work makes.

A function whose name ends in `_steps` is such a generator. `finish` runs one to its end; a server that has others to
serve goes on with those of many requests by turns.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")


def finish(steps: Generator[Any, None, T]) -> T:
    """What the steps return, after all of them; what they yield is not read."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
