"""Checksums of the files of a Lance dataset, which have none of their own.

Beside the files lies one small file for each, `_checksums/NAME.json`, written before the commit that names the file
(right after it for the manifest). Files of a dataset never change, so a block is checked once. What is about to be read
is checked first: of a data file the blocks that hold the columns that are asked for, and what says where they lie.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from cdr_kernel import _C
from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.store import _checksums
from cdr_kernel.store._atomic_folder import identity_of, sync_folder, synced

FOLDER = "_checksums"
_FOOTER = struct.Struct("<QQQIIHH4s")  # of a data file: where its metadata begins comes first
_MAGIC = b"LANC"


class Sums:
    """What is known of the files of one dataset. Threads may ask at once.

    path: the dataset's folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[Path, _C.CheckedFile] = {}
        self._spans: dict[Path, dict[str, list[tuple[int, int]]] | None] = {}

    def seal(self, files: Iterable[Path]) -> None:
        """Write the checksums of new files as they are now, and have them on the disk when this returns.

        Those of a file that has some already stay, but for a manifest: a version that was torn is written again.
        """
        folder = self.path / FOLDER
        new = [file for file in files if file.suffix == ".manifest" or not self.sealed(file)]
        if not new:
            return
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            sync_folder(self.path)
        for file in new:
            try:
                said = {"file": file.name, **_checksums.of_file(file)}
            except FileNotFoundError:  # of another writer, who has taken it away again
                continue
            draft = folder / f"{file.name}.{secrets.token_hex(4)}"
            with synced(draft) as made:
                made.write(json.dumps({**said, "identity": identity_of(said)}).encode())
            os.replace(draft, self._of(file))
            self._files.pop(file, None)
            self._spans.pop(file, None)
        sync_folder(folder)

    def sealed(self, file: Path) -> bool:
        """Whether there are checksums of a file."""
        return self._of(file).is_file()

    def check(self, file: Path) -> None:
        """Raises DamagedFileError unless all of a file is as it was written, OSError where the disk cannot give it."""
        opened = self._opened(file)
        if not opened.verified:
            opened.check()

    def check_columns(self, file: Path, columns: Collection[str]) -> None:
        """The same of what is read of a data file for some of its columns."""
        opened = self._opened(file)
        if opened.verified:
            return
        spans = self._spans_of(file, opened)
        if spans is None:
            opened.check()
            return
        for name in columns:
            for start, stop in spans.get(name, ()):
                opened.check(start, stop)

    def sweep(self) -> None:
        """Take away the checksums of files that are gone."""
        folder = self.path / FOLDER
        there = {name for _, _, names in os.walk(self.path) for name in names}
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.suffix != ".json" or path.stem not in there:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def _of(self, file: Path) -> Path:
        return self.path / FOLDER / f"{file.name}.json"

    def _opened(self, file: Path) -> _C.CheckedFile:
        found = self._files.get(file)
        if found is not None:
            return found
        beside = self._of(file)
        try:
            said = json.loads(beside.read_bytes())
            whole = said["file"] == file.name and said["identity"] == identity_of(said)
        except FileNotFoundError:
            if not file.exists():
                raise
            raise DamagedFileError(f"{file}: expected its checksums in {beside}, found none", beside) from None
        except (ValueError, TypeError, KeyError, RecursionError):
            whole = False
        if not whole:
            raise DamagedFileError(f"{beside}: not as it was written", beside)
        if not file.exists():  # which whoever reads looks for in a newer version
            raise FileNotFoundError(f"{file}: no such file")
        found = self._files[file] = _checksums.opened(file, said, str(beside), mapped=False)
        return found

    def _spans_of(self, file: Path, opened: _C.CheckedFile) -> dict[str, list[tuple[int, int]]] | None:
        """Where each column lies in a data file, from what is checked here; None where that is not to be told."""
        if file not in self._spans:
            self._spans[file] = _spans(file, opened)
        return self._spans[file]


def _spans(file: Path, opened: _C.CheckedFile) -> dict[str, list[tuple[int, int]]] | None:
    from lance.file import LanceFileReader

    size = len(opened)
    if size < _FOOTER.size:
        return None
    opened.check(size - _FOOTER.size)
    with open(file, "rb") as read:
        read.seek(size - _FOOTER.size)
        metadata, *_, magic = _FOOTER.unpack(read.read())
    if magic != _MAGIC or metadata > size:
        return None
    opened.check(metadata)
    try:
        found: Any = LanceFileReader(str(file)).metadata()
        for buffer in found.global_buffers:
            opened.check(buffer.position, buffer.position + buffer.size)
        names = [field.name for field in found.schema]
        if len(names) != len(found.columns) or len(set(names)) != len(names):
            return None
        return {
            name: [(b.position, b.position + b.size) for page in column.pages for b in page.buffers]
            + [(b.position, b.position + b.size) for b in column.column_buffers]
            for name, column in zip(names, found.columns, strict=True)
        }
    except (OSError, RuntimeError, ValueError, AttributeError):  # another build of Lance: all of it is checked
        return None
