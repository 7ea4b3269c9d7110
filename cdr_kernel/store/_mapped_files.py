"""Whether files that are mapped into memory are still as long as they were.

A file that is cut short while it is mapped ends the process with SIGBUS as soon as the missing part is read. A look at
the lengths before a pass over the data says so as an error. What is cut during the pass is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cdr_kernel.exceptions import DamagedFileError


class MappedFiles:
    """Files that are mapped, as long as they are when this is made.

    Args:
        paths: The files.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]] = ()) -> None:
        self._files = tuple((str(path), os.stat(path)) for path in paths)

    def check(self) -> None:
        """Raises DamagedFileError naming a file that was cut short.

        A file that has lost its name, as when a later save swept it up, stays whole for those who have it mapped.
        """
        for path, before in self._files:
            try:
                now = os.stat(path)
            except FileNotFoundError:
                continue
            if now.st_size < before.st_size and os.path.samestat(now, before):
                what = f"expected {before.st_size} bytes, found {now.st_size}: it was cut short"
                raise DamagedFileError(f"{path}: {what}", Path(path))
