"""The checksum of every block of the files in a folder, and the files opened with them.

No byte of such a file is used before its block was checked: small files are checked when they are opened, mapped ones
block by block when something is read (`_C.CheckedFile`), the rest by ``Files.check``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.exceptions import DamagedFileError

BLOCK = 1 << 20
"""Bytes under one checksum."""

_SLICE = 64 << 20  # bytes checked at a time by all threads, after which whoever waits is told
_SMALL_SLICE = 8 << 20  # and by one
_HEADER = 4096  # no header of an array is longer


def of_file(path: Path) -> dict[str, Any]:
    """The length of a file and the CRC-32C of its blocks: {"bytes": int, "crc32c": 8 hexadecimal digits a block}."""
    count, sums = _C.block_sums(str(path), BLOCK)
    return {"bytes": count, "crc32c": sums.hex()}


def of_folder(data: Path) -> dict[str, dict[str, Any]]:
    """`of_file` of the files in a folder, by name."""
    return {path.name: of_file(path) for path in sorted(data.iterdir()) if path.is_file()}


def of_bytes(content: bytes) -> dict[str, Any]:
    """`of_file` of what a file will hold."""
    sums = [_C.crc32c(content[at : at + BLOCK]) for at in range(0, len(content), BLOCK)]
    return {"bytes": len(content), "crc32c": "".join(f"{each:08x}" for each in sums)}


def opened(path: Path, listed: object, where: str, *, mapped: bool = True) -> _C.CheckedFile:
    """A file of which `listed` is what `of_file` said.

    where: what says so, for errors. mapped: see `_C.CheckedFile`. Raises DamagedFileError where the file is gone or has
    another length, and where `listed` cannot be.
    """
    try:
        count, sums = int(listed["bytes"]), bytes.fromhex(listed["crc32c"])  # type: ignore[index]  # what is no mapping is an error below
        if count < 0 or len(sums) % 4:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        what = f"expected the size and the checksums of {path.name} in files, found {listed!r:.80}"
        raise DamagedFileError(f"{where}: {what}", where) from None
    try:
        return _C.CheckedFile(str(path), count, sums, BLOCK, mapped)
    except FileNotFoundError:
        raise DamagedFileError(f"{path}: expected {count} bytes, found no file", path) from None


def check_rest(file: _C.CheckedFile, advance: Callable[[int], object], *, parallel: bool) -> None:
    """Check what was not checked so far of a file. See ``Files.check``."""
    while count := file.check_next(_SLICE if parallel else _SMALL_SLICE, parallel):
        advance(count)
    file.check()  # what others were given and have not looked at yet, and what they found damaged


class Files:
    """The files of a folder, opened with their checksums as they are asked for.

    Args:
        data: The folder.
        listed: What `of_folder` said of it.
        where: The file that says so, for errors.
    """

    def __init__(self, data: Path, listed: Mapping[str, Any], where: Path) -> None:
        self.data = data
        self._listed = listed
        self._where = str(where)
        self._files: dict[str, _C.CheckedFile] = {}

    def file(self, name: str) -> _C.CheckedFile:
        """The file, opened once. Raises DamagedFileError where it is gone, has another length or is not listed."""
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = opened(self.data / name, self._listed.get(name), self._where)
        return found

    def mapped(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a file, uint8, mapped and not checked yet: whoever reads them checks them first."""
        file = self.file(name)
        return np.frombuffer(memoryview(file), np.uint8) if len(file) else np.zeros(0, np.uint8)

    def content(self, name: str) -> bytes:
        """The bytes of a file, checked."""
        raw = self.mapped(name)
        self.file(name).check()
        return raw.tobytes()

    def array(self, name: str, dtype: Any, shape: tuple[int, ...], *, mapped: bool) -> npt.NDArray[Any]:
        """The array in an .npy file, mapped (its header checked), or read and checked.

        Never unpickles; DamagedFileError for any other file, dtype or shape.
        """
        raw, path = self.mapped(name), self.data / name
        self.file(name).check(0, _HEADER)
        try:
            kind, found, at = _header(raw[:_HEADER].tobytes())
            a = raw[at:].view(kind)
            if (kind, found) == (dtype, shape):
                a = a.reshape(shape)
        except Exception as error:  # a header that is none makes numpy's parser raise almost anything
            raise DamagedFileError(f"{path}: not a readable array ({error})", path) from error
        if (kind, found) != (dtype, shape):
            what = f"expected {np.dtype(dtype)} {list(shape)}, found {kind} {list(found)}"
            raise DamagedFileError(f"{path}: {what}", path)
        if mapped:
            return a
        self.file(name).check()
        return a.copy()

    @property
    def opened(self) -> list[_C.CheckedFile]:
        """The files that were opened."""
        return list(self._files.values())

    @property
    def verified(self) -> bool:
        """Whether every block of the files that were opened was checked and found whole."""
        return all(file.verified for file in self.opened)

    @property
    def unverified_bytes(self) -> int:
        """Bytes of the blocks that were not found whole so far."""
        return sum(file.unverified_bytes for file in self.opened)

    def check(self, advance: Callable[[int], object] = lambda count: None, *, parallel: bool = True) -> None:
        """Check what was not checked so far of the files that were opened.

        Args:
            advance: Told of the bytes that were checked since the last call; what it raises ends the work.
            parallel: Whether by all threads; else by this one, which leaves the others to whoever ranks.

        Raises:
            DamagedFileError: Something is not as it was written.
            OSError: The disk cannot give it.
        """
        for file in self.opened:
            check_rest(file, advance, parallel=parallel)


def _header(raw: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """(dtype, shape, where the numbers begin) of an .npy file."""
    file = io.BytesIO(raw)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"expected version 1.0 of the format, found {version}")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject:
        raise ValueError("expected numbers, found Python objects")
    if fortran and len(shape) > 1:
        raise ValueError("expected rows one after the other, found columns")
    return dtype, shape, file.tell()
