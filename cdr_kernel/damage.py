"""The one error for a file that is not as it was written."""

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
