"""A folder with something saved in it: a subfolder with the data, and the manifest that names it.

The data goes to a subfolder of a new name and is synced to the disk; only then is the manifest renamed into place. Who
opens the folder finds the old thing or the new one, never half of one. What was there before is swept up last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cdr_kernel import checksums
from cdr_kernel.damage import DamagedFileError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module has no optional type

T = TypeVar("T")

LOCK = "save.lock"
"""Held while something is saved into the folder; it stays there."""

_ATTEMPTS = 100
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


@dataclass(frozen=True)
class Kind:
    """One kind of thing that is saved.

    what: its name in errors. file: the manifest's name. data: what the names of subfolders begin with. format,
    version: what the manifest must say. fields: what else is in it, and of which type; integers are 0 to 2^63 - 1.
    derived: a pattern of the names of files and folders beside the manifest that are made of what is saved: they go
    when it is replaced.

    Every manifest has `files`, the checksums of the files in the subfolder, and `identity`, a digest of all it says:
    what is made of the saved thing names it, and is of no other.
    """

    what: str
    file: str
    data: str
    format: str
    version: int
    fields: Mapping[str, type]
    derived: str = ""

    def save(self, folder: Path, write: Callable[[Path], dict[str, Any]]) -> None:
        """Replace what is in the folder by what `write` puts into the empty subfolder it is given.

        write: returns the fields of the manifest.

        Saves into one folder take turns, those of other threads and processes too, wherever `fcntl.flock` works;
        elsewhere (Windows, some network mounts) callers see to that. After an error the folder is as it was, and gone
        if it was made here and nobody else put something into it.
        """
        made = not folder.exists()
        with turn(folder):
            data = folder / f"{self.data}{secrets.token_hex(8)}"
            draft = folder / f"{self.file}.{data.name}"
            try:
                data.mkdir()
                fields = write(data)
                manifest = {**fields, "format": self.format, "format_version": self.version, "data": data.name}
                manifest["files"] = checksums.of_folder(data)
                manifest["identity"] = identity_of(manifest)
                sync_folder(data)
                with synced(draft) as file:
                    file.write(json.dumps(manifest, indent=1, sort_keys=True).encode())
                os.replace(draft, folder / self.file)
            except BaseException:
                if not self._names(folder, data):  # an interrupt may come when the manifest is in place already
                    shutil.rmtree(data, ignore_errors=True)
                    with contextlib.suppress(OSError):
                        draft.unlink(missing_ok=True)
                    leave(folder, made)
                raise
            sync_folder(folder)
            self._sweep(folder, data)

    def load(self, folder: Path, read: Callable[[dict[str, Any]], T]) -> T:
        """What `read` makes of the folder's manifest.

        Where it fails and another save has replaced the manifest (and swept up the data) meanwhile, the newer one is
        read, at most 100 times.
        """
        found = self.manifest(folder)
        for _ in range(_ATTEMPTS - 1):
            try:
                return read(found)
            except (OSError, ValueError):
                newer = self.manifest(folder)
                if newer["data"] == found["data"]:
                    raise
                found = newer
        return read(found)

    def manifest(self, folder: Path) -> dict[str, Any]:
        """The folder's manifest. Raises FileNotFoundError where there is none, DamagedFileError where it is damaged,
        ValueError where it is of another version."""
        path = folder / self.file
        if not path.is_file():
            raise FileNotFoundError(f"{folder}: no {self.what} here (expected {self.file})")
        try:
            found = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(f"{path}: not readable JSON ({error})", path) from None
        if not isinstance(found, dict) or found.get("format") != self.format:
            raise DamagedFileError(f"{path}: expected a manifest of format {self.format!r}", path)
        version = found.get("format_version")
        if type(version) is not int or version != self.version:
            raise ValueError(f"{path}: format version {version!r}, this version reads {self.version}")
        written, own = found.get("identity"), identity_of(found)
        if written != own:
            raise DamagedFileError(f"{path}: not as it was written (its identity is {written!r}, not {own!r})", path)
        for name, kind in {**self.fields, "files": dict}.items():
            value = found.get(name)
            counts = isinstance(value, int) and 0 <= value < 2**63
            if type(value) is not kind or (kind is int and not counts):
                raise DamagedFileError(f"{path}: expected {name} to be {kind.__name__}, found {value!r}", path)
        data = found.get("data")
        if not isinstance(data, str) or not re.fullmatch(rf"{re.escape(self.data)}[0-9a-f]{{16}}", data):
            raise DamagedFileError(f"{path}: expected data to name a subfolder, found {data!r}", path)
        return found

    def _names(self, folder: Path, data: Path) -> bool:
        try:
            return bool(json.loads((folder / self.file).read_bytes())["data"] == data.name)
        except (OSError, ValueError, TypeError, KeyError):
            return False

    def _sweep(self, folder: Path, data: Path) -> None:
        """Remove what earlier saves left, those that were killed, and what was made of the data that is replaced."""
        own = rf"({re.escape(self.file)}\.)?{re.escape(self.data)}[0-9a-f]{{16}}"
        left = re.compile(f"{own}|{self.derived}" if self.derived else own)
        for path in folder.iterdir():
            if path != data and left.fullmatch(path.name):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def identity_of(manifest: Mapping[str, Any]) -> str:
    """What tells what was saved from anything else: a digest of what its manifest says, however its JSON is laid out.

    A manifest names the checksums of all blocks of its files, and the subfolder that this save alone has.
    """
    said = {name: value for name, value in manifest.items() if name != "identity"}
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()


class synced:
    """A new file whose bytes are on the disk when the block ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Any:
        self._file = open(self._path, "xb")
        return self._file

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    if os.name == "nt":
        return  # Windows has no handle of a folder to sync
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[bool]:
    """The folder, made if need be, for nobody but this block: not for other threads, nor for other processes.

    Gives whether that is so: False on Windows and on mounts that know no locks.
    """
    handle, alone = _locked(folder)
    try:
        yield alone
    finally:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked child may have the handle too
        os.close(handle)


def _locked(folder: Path) -> tuple[int, bool]:
    path = folder / LOCK
    for _ in range(_ATTEMPTS):  # more than one only where others take a new folder away again
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                alone = _wait(handle)
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    return handle, alone
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
    raise OSError(f"{path}: expected a lock that stays, found it gone {_ATTEMPTS} times")


def _wait(handle: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def leave(folder: Path, made: bool) -> None:
    """Take the lock away where it is all there is, and the folder where it was made here; to be called in a `turn`."""
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            if made:
                folder.rmdir()
