"""Every exception class that callers may want to catch. Imports nothing of the package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class DamagedFileError(ValueError):
    """A file is not as it was written: bits have changed, or some of it is missing. No answer was made of it.

    Args:
        message: What is wrong. It names the file, and the block where one is known.
        file: The file, None where the message alone names it.
        block: The block of the file, from 0, None for all of it.
    """

    def __init__(self, message: str, file: str | os.PathLike[str] | None = None, block: int | None = None) -> None:
        self.file = None if file is None else Path(file)
        self.block = block
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:  # errors of shards travel between processes
        return type(self), (self.args[0], self.file, self.block)


class EmbeddingModelMismatch(ValueError):
    """Vectors of another embedding model than the store's or the session's (§2.5, reading R18).

    expected, got: the models, got None where none was named. advice: who has which, and what to do; by default that
    `expected` is a session's and `got` that of the store it was to rank.
    """

    def __init__(self, what: str, expected: str, got: str | None, advice: str | None = None) -> None:
        self.expected, self.got = expected, got
        self._given = what, expected, got, advice  # what makes it again in another process
        named = "no embedding model was named" if got is None else f"got {got!r}"
        if advice is None:
            advice = (
                f"the session is of {expected!r}, the store of {got!r}: make a session with vectors of {got!r}, "
                f"or rank a store of {expected!r}"
            )
        super().__init__(f"{what}: expected embedding model {expected!r}, {named}; {advice}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given


class FileError(ValueError):
    """Something in a file is not as it must be; the message says which file, where, what was expected and found."""


class WriterError(RuntimeError):
    """A command gave no text for a window; the message says which window and why."""
