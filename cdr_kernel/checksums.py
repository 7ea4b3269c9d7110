"""Checksums of files by block, and of the scan's codes: whether what was saved is still what it was."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cdr_kernel.folder import synced

BLOCK = 4 << 20
"""Bytes under one checksum."""
_SCAN = "scan.json"
CODES = "codes.json"
"""The checksums of the scan's codes, which are saved after the facts."""


def of_folder(data: Path) -> dict[str, list[int]]:
    """CRC-32 of every block of the files in a folder, by name."""
    found = {}
    for path in sorted(data.iterdir()):
        with open(path, "rb", buffering=0) as file:
            found[path.name] = [crc for crc, _ in _blocks(file)]
    return found


def opened(data: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The files of a folder that have checksums, open, so that they can be checked when others have replaced it."""
    files: dict[str, Any] = {}
    try:
        for name in expected:
            files[name] = open(data / name, "rb", buffering=0)  # noqa: SIM115  # closed by whoever checks them
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return files


def damage(
    files: Mapping[str, Any], expected: Mapping[str, Any], advance: Callable[[int], object] = lambda count: None
) -> str | None:
    """What is wrong with open files, None for nothing. advance: told of the bytes read since last."""
    for name, file in files.items():
        blocks, place = expected[name], 0
        try:
            for crc, size in _blocks(file):
                advance(size)
                if place >= len(blocks) or crc != blocks[place]:
                    return f"{file.name}: block {place} is not as it was written"
                place += 1
        except OSError as error:
            return f"{file.name}: {error.strerror}"
        if place != len(blocks):
            return f"{file.name}: expected {len(blocks)} blocks, found {place}"
    return None


def seal_codes(folder: Path) -> None:
    """Write the checksums of the scan's codes that are in the folder."""
    data = codes_folder(folder)
    if data is None:
        return
    path = folder / CODES
    draft = folder / f"{CODES}.draft"
    draft.unlink(missing_ok=True)
    with synced(draft) as file:
        manifest = zlib.crc32((folder / _SCAN).read_bytes())
        file.write(json.dumps({"data": data.name, "checksums": of_folder(data), "manifest": manifest}).encode())
    draft.replace(path)


def codes_damage(folder: Path, advance: Callable[[int], object] = lambda count: None) -> str | None:
    """What is wrong with the scan's codes in the folder, None for nothing or where there are none."""
    data = codes_folder(folder)
    if data is None:
        return None
    try:
        sealed = json.loads((folder / CODES).read_bytes())
        if sealed["data"] != data.name:
            return f"{folder / CODES}: of other codes"
        if sealed.get("manifest", manifest := zlib.crc32((folder / _SCAN).read_bytes())) != manifest:
            return f"{folder / _SCAN}: not as it was written"
        files = opened(data, sealed["checksums"])
        try:
            return damage(files, sealed["checksums"], advance)
        finally:
            for file in files.values():
                file.close()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{folder / CODES}: expected the checksums of the codes ({error})"


def codes_folder(folder: Path) -> Path | None:
    """Where the scan's codes are, None where there are none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return folder / Path(json.loads((folder / _SCAN).read_bytes())["data"]).name
    return None


def drop_codes(folder: Path) -> None:
    """Have no retriever use the codes that are there."""
    for name in (_SCAN, CODES):
        (folder / name).unlink(missing_ok=True)


def _blocks(file: Any) -> Iterator[tuple[int, int]]:
    """(CRC-32, length) of every block of a file."""
    buffer = memoryview(bytearray(BLOCK))
    while count := _fill(file, buffer):
        yield zlib.crc32(buffer[:count]), count


def _fill(file: Any, buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends."""
    count = 0
    while count < len(buffer) and (read := file.readinto(buffer[count:])):
        count += read
    return count
