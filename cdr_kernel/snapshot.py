"""A snapshot: the facts of one version of a record in the folder format of ``FactStore``, mapped and disposable.

It says which version of which record it is of, and has a checksum of every block of its files. Whatever does not fit
is no snapshot: the facts are read from the record again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cdr_kernel.folder import LOCK, synced, turn
from cdr_kernel.lance_record import Record
from cdr_kernel.store import FactStore, StoreView, check_store_folder
from cdr_kernel.token_hashes import HashKey
from cdr_kernel.tokens import Tokenizer

BLOCK = 4 << 20
"""Bytes under one checksum."""
CODES = "codes.json"
"""The checksums of the scan's codes, which are saved after the facts."""


class Found(NamedTuple):
    """A snapshot that was opened: its facts, the version they are of, the next sequence number then, its files, open
    to be checked, and what their checksums must be."""

    facts: FactStore
    version: int
    next_sequence: int
    files: dict[str, Any]
    checksums: dict[str, list[int]]

    def close(self) -> None:
        """Close the files; the facts stay mapped."""
        for file in self.files.values():
            file.close()


def write(folder: Path, facts: FactStore, view: StoreView, record: Record, next_sequence: int) -> None:
    """Save a view as the snapshot of this version of the record, replacing the one that is there."""
    _clear_what_is_damaged(folder)
    key = {"version": record.version, "fingerprint": record.fingerprint(), "next_sequence": next_sequence}
    facts.save(folder, view=view, about=lambda data: {"record": key, "checksums": checksums(data)})


def load(
    folder: Path, record: Record, *, tokenizer: Tokenizer | None = None, hash_key: HashKey | None = None
) -> Found | str:
    """The snapshot of this version of the record or an earlier one; why not, where there is none that can be used."""
    try:
        facts = FactStore.load(folder, tokenizer=tokenizer, hash_key=hash_key, snapshot=True)
    except (OSError, ValueError) as error:
        return f"{error}"
    except Exception as error:  # a damaged header makes numpy's parser raise almost anything
        return f"{type(error).__name__}: {error}"
    key = facts.about.get("record")
    sums = facts.about.get("checksums")
    if not isinstance(key, dict) or not isinstance(sums, dict) or not all(isinstance(s, list) for s in sums.values()):
        return f"{folder}: expected the version of a record and checksums, found none"
    version, following = key.get("version"), key.get("next_sequence")
    if type(version) is not int or type(following) is not int or version > record.version:
        return f"{folder}: expected a version up to {record.version}, found {version!r}"
    if key.get("fingerprint") is None or key["fingerprint"] != record.fingerprint_of(version):
        return f"{folder}: version {version} of the record is not the one it was made of"
    about = record.about
    if (str(facts.dim), facts.dtype.name, facts.embedding_model) != tuple(
        about[name] for name in ("dim", "dtype", "embedding_model")
    ):
        return f"{folder}: expected the record's dimension, dtype and model"
    data = folder / facts.about["data"]
    try:
        if set(os.listdir(data)) != sums.keys():
            return f"{data}: expected a checksum for every file"
        return Found(facts, version, following, opened(data, sums), sums)
    except OSError as error:
        return f"{data}: {error.strerror}"


def checksums(data: Path) -> dict[str, list[int]]:
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
        file.write(json.dumps({"data": data.name, "checksums": checksums(data)}).encode())
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
        return folder / Path(json.loads((folder / "scan.json").read_bytes())["data"]).name
    return None


def drop_codes(folder: Path) -> None:
    """Have no retriever use the codes that are there."""
    for name in ("scan.json", CODES):
        (folder / name).unlink(missing_ok=True)


def _clear_what_is_damaged(folder: Path) -> None:
    """Empty a folder whose manifest says nothing, which would not be saved over."""
    try:
        check_store_folder(folder)
    except FileExistsError:
        with turn(folder):
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != LOCK:
                    path.unlink(missing_ok=True)


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
