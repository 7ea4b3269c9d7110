"""A folder with something saved in it: a subfolder with the data, and the manifest that names it.

The data goes to a subfolder of a new name and is synced to the disk; only then is the manifest renamed into place. Who
opens the folder finds the old thing or the new one, never half of one. What was there before is swept up last.

Files that lie beside the data under names of their own change with it. Until they are put in place, and while they are
taken away, they lie in the subfolder DATA.beside. A file of another save never lies beside the manifest.

What a killed process leaves is a subfolder that no manifest names, or a draft that no process has locked. The next save
into the folder takes it away.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.store import _checksums

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module has no optional type

T = TypeVar("T")

LOCK = "save.lock"
"""Held while something is saved into the folder; it stays there."""

BESIDE = ".beside"
"""The end of the name of a subfolder with files that are not in place yet, or not any more."""

_FILE_NAME = re.compile(r"(?!\.\.?$)[^/\\\0]+")
_DRAFT = re.compile(r"\.cdr-[0-9a-f]{16}")
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

    def save(
        self, folder: Path, write: Callable[[Path], dict[str, Any]], beside: Mapping[str, bytes] | None = None
    ) -> None:
        """Replace what is in the folder by what `write` puts into the empty subfolder it is given.

        write: returns the fields of the manifest. beside: files of the folder, by their names, that change with the
        data as one; those of the save before go. None: those of the save before stay.

        Saves into one folder take turns, those of other threads and processes too, wherever `fcntl.flock` works;
        elsewhere (Windows, some network mounts) callers see to that. After an error the folder is as it was, and gone
        if it was made here and nobody else put something into it.
        """
        made = not folder.exists()
        with turn(folder) as alone:
            if alone:
                self._settle(folder)
            before = self._found(folder)
            data = folder / f"{self.data}{secrets.token_hex(8)}"
            aside = _aside(data)
            draft = folder / f"{self.file}.{data.name}"
            listed = dict(_beside_of(before)) if beside is None else _sums_of(beside)
            replaced = set() if beside is None else {*_beside_of(before), *listed}
            try:
                data.mkdir()
                fields = write(data)
                manifest = {**fields, "format": self.format, "format_version": self.version, "data": data.name}
                manifest["files"] = _checksums.of_folder(data)
                if listed:
                    manifest["beside"] = listed
                if beside:
                    _write_beside(folder, aside, beside)
                manifest["identity"] = identity_of(manifest)
                sync_folder(data)
                with synced(draft) as file:
                    file.write(json.dumps(manifest, indent=1, sort_keys=True).encode())
                if before:
                    _take_away(folder, _aside(folder / before["data"]), replaced)
                os.replace(draft, folder / self.file)
            except BaseException:
                if not self._names(folder, data):  # an interrupt may come when the manifest is in place already
                    if before:
                        _put_in_place(folder, _aside(folder / before["data"]), replaced)
                    for path in (data, aside):
                        shutil.rmtree(path, ignore_errors=True)
                    with contextlib.suppress(OSError):
                        draft.unlink(missing_ok=True)
                    leave(folder, made)
                raise
            sync_folder(folder)
            if beside:
                for name in sorted(beside):
                    os.replace(aside / name, folder / name)
                sync_folder(folder)
            self._sweep(folder, data, replaced=True)

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
        beside = found.get("beside", {})
        if not isinstance(beside, dict) or not all(map(_FILE_NAME.fullmatch, beside)):
            raise DamagedFileError(f"{path}: expected beside to name files, found {beside!r}", path)
        data = found.get("data")
        if not isinstance(data, str) or not re.fullmatch(rf"{re.escape(self.data)}[0-9a-f]{{16}}", data):
            raise DamagedFileError(f"{path}: expected data to name a subfolder, found {data!r}", path)
        return found

    def check_same(self, folder: Path, data: str) -> None:
        """Raises ValueError where the folder holds another save by now than the one with this data.

        For whoever reads several files of one save: what was read since the manifest was is of this save then.
        """
        if self.manifest(folder)["data"] != data:
            raise ValueError(f"{folder}: the {self.what} was replaced while it was read: read it again")

    def _names(self, folder: Path, data: Path) -> bool:
        try:
            return bool(json.loads((folder / self.file).read_bytes())["data"] == data.name)
        except (OSError, ValueError, TypeError, KeyError):
            return False

    def _found(self, folder: Path) -> dict[str, Any] | None:
        """The manifest that is there, None where there is none that can be read."""
        with contextlib.suppress(OSError, ValueError):
            return self.manifest(folder)
        return None

    def _settle(self, folder: Path) -> None:
        """End what a save that was killed had begun: put files beside the data in place, sweep up what nothing names.

        For whoever has the turn alone. Where the manifest cannot be read nothing is done: all may still be needed.
        """
        found = self._found(folder)
        if found is not None:
            data = folder / found["data"]
            _put_in_place(folder, _aside(data), _beside_of(found))
            self._sweep(folder, data)
        elif not (folder / self.file).exists():
            self._sweep(folder, None)

    def _sweep(self, folder: Path, data: Path | None, *, replaced: bool = False) -> None:
        """Remove what earlier saves left, and those that were killed; what was made of data that is replaced, too."""
        left = rf"({re.escape(self.file)}\.)?{re.escape(self.data)}[0-9a-f]{{16}}|"
        left += rf"{re.escape(self.data)}[0-9a-f]{{16}}{re.escape(BESIDE)}"
        names = re.compile(f"{left}|{self.derived}" if self.derived and replaced else left)
        for path in folder.iterdir():
            if path != data and names.fullmatch(path.name):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def beside(self, path: Path) -> Path:
        """Where a file is that a save puts beside its data: at this path, or not put there yet.

        Raises:
            FileNotFoundError: The save that the folder has was made with such a file, and it is gone.
            DamagedFileError: The save was made with such a file, and this is another one.
        """
        for _ in range(_ATTEMPTS):
            found = self._found(path.parent)
            if found is None or path.name not in _beside_of(found):
                return path
            waiting = _aside(path.parent / found["data"]) / path.name
            for place in (path, waiting, path):
                with contextlib.suppress(FileNotFoundError):  # it may be put in place meanwhile
                    if _checksums.of_file(place) == _beside_of(found)[path.name]:
                        return place
            if found == self._found(path.parent):
                break
        if path.exists():
            raise DamagedFileError(
                f"{path}: not as it was written with the {self.what} beside it: damaged, or changed since. Make the "
                f"{self.what} again, or keep a changed copy in another folder",
                path,
            )
        what = f"not there, although the {self.what} was made with it: make the {self.what} again"
        raise FileNotFoundError(errno.ENOENT, what, str(path))


def _aside(data: Path) -> Path:
    """Where the files beside this data are while they are not in place."""
    return data.with_name(f"{data.name}{BESIDE}")


def _beside_of(manifest: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The files beside the data by their names, with their checksums."""
    return {} if manifest is None else manifest.get("beside", {})


def _sums_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    return {name: _checksums.of_bytes(files[name]) for name in sorted(files)}


def _write_beside(folder: Path, aside: Path, files: Mapping[str, bytes]) -> None:
    """Write the files to be put in place, in the order of their names. OSErrors name the place where each belongs."""
    aside.mkdir()
    for name, content in sorted(files.items()):
        place = folder / name
        if place.is_dir():
            raise FileExistsError(f"{place}: expected a file to write to, found a folder")
        try:
            with synced(aside / name) as file:
                file.write(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(place)) from None
    sync_folder(aside)


def _take_away(folder: Path, aside: Path, names: Iterable[str]) -> None:
    """Move the files of a save that is being replaced out of their places."""
    there = [name for name in sorted(names, reverse=True) if (folder / name).is_file()]
    if there:
        aside.mkdir(exist_ok=True)
        for name in there:
            os.replace(folder / name, aside / name)
        sync_folder(aside)
        sync_folder(folder)


def _put_in_place(folder: Path, aside: Path, names: Iterable[str]) -> None:
    """Move files that wait there to their places, but over nothing that somebody else has put there."""
    for name in names:
        with contextlib.suppress(OSError):
            if not (folder / name).exists():
                os.replace(aside / name, folder / name)
    with contextlib.suppress(OSError):
        aside.rmdir()


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


@contextlib.contextmanager
def draft(target: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file beside the target, to be written and renamed over it; it goes with the block where it is not.

    Drafts of processes that were killed are taken out of that folder first.
    """
    sweep(target.parent, _DRAFT)

    def make() -> tuple[Path, int | None]:
        path = target.with_name(f".cdr-{secrets.token_hex(8)}")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        if fcntl is None:  # Windows renames no file that is open
            os.close(handle)
            return path, None
        return path, handle

    path, handle = _owned(make)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        _let_go(handle)


@contextlib.contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside the target, to be filled and renamed to it; it goes with the block where it is not.

    Drafts for the same target of processes that were killed are taken away first.
    """
    sweep(target.parent, re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}"))

    def make() -> tuple[Path, int | None]:
        path = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        path.mkdir(parents=True)
        return path, None if fcntl is None else os.open(path, os.O_RDONLY)

    path, handle = _owned(make)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _let_go(handle)


def _owned(make: Callable[[], tuple[Path, int | None]]) -> tuple[Path, int | None]:
    """A draft that is locked, so that nobody sweeps it up."""
    for _ in range(_ATTEMPTS):  # more than one only where others swept it up before it was locked
        path, handle = make()
        if handle is None or fcntl is None:
            return path, handle
        with contextlib.suppress(OSError):  # a mount that knows no locks, where nobody sweeps
            fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return path, handle
        os.close(handle)
    raise OSError(f"{path}: expected a draft that stays, found it gone {_ATTEMPTS} times")


def _let_go(handle: int | None) -> None:
    if handle is not None:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child may have the handle too
        os.close(handle)


def sweep(folder: Path, names: re.Pattern[str]) -> None:
    """Take away files and folders of these names that no process has locked: those who made them were killed."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        for path in [Path(entry.path) for entry in os.scandir(folder) if names.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):  # locked, gone meanwhile, or not to be opened by this user
                folder_there = path.is_dir()
                way = os.O_RDONLY if folder_there else os.O_RDWR  # some network mounts lock only what can be written
                handle = os.open(path, way | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if folder_there:
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink()
                finally:
                    os.close(handle)


def leave(folder: Path, made: bool) -> None:
    """Take the lock away where it is all there is, and the folder where it was made here; to be called in a `turn`."""
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            if made:
                folder.rmdir()
