"""The record of truth of a durable store: one Lance dataset, changed by whole commits that are on the disk when they
return.

A commit takes rows out by sequence number and puts rows in, both or neither. It is made against the version that was
read: where another writer was quicker, Lance refuses it and the caller looks again. (An append alone would be let
through, and two writers would give the same sequence number twice; so every commit also names a fragment that was
there, as changed, and a dataset without fragments is overwritten.)
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from cdr_kernel.durable._checksums import Sums
from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.store._atomic_folder import sync_folder
from cdr_kernel.store._attributes import RESERVED
from cdr_kernel.store._numbering import Numbering
from cdr_kernel.validation._arrays import Int64

FORMAT = "cdr-durable-store"
FORMAT_VERSION = 1
LIVE, QUARANTINED = "live", "quarantined"
COLUMNS = (*sorted(RESERVED), "first_sequence", "status", "reason", "added_at", "expires_at")
"""Names that no attribute may have."""

_ABOUT = ("dim", "dtype", "embedding_model", "tokenizer", "hash_key", "unicode", "numbering")
_NEXT = "cdr:next_sequence"
_SOURCE_PLACE = re.compile(r"(, )?(\S*/)?\S+\.rs:\d+:\d+")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_BATCH = 65536
_MANIFEST_END = b"LANC"
_MANIFEST = re.compile(r"[0-9]{20}\.manifest")
_CONDITIONS = re.compile(r"\b(?:status|sequence|expires_at)\b")  # columns that conditions name
_ATTEMPTS = 100
_ACKNOWLEDGED = "_acknowledged"  # in the dataset: the newest version whose commit was on the disk
_OTHERS_AT_WORK = 3600.0  # seconds for which a version may be read by a writer that no lock keeps out


def lance_module() -> Any:
    """pylance, imported when it is first needed. ImportError naming the extra where it is missing."""
    try:
        import lance
    except ImportError as error:
        raise ImportError(
            f'a durable store needs the extra "store": pip install ".[store]" in a checkout ({error})'
        ) from None
    return lance


class Record:
    """One version of the dataset in a folder.

    about: dim, dtype, embedding model, tokenizer, hash key's fingerprint, Unicode version and numbering (JSON), all as
    text. numbering: whose the sequence numbers are. version: int; grows with every commit. sums: what is known of the
    files, which are checked before they are read; None for a dataset without checksums, of which whoever reads it sees
    to that.
    """

    def __init__(self, path: Path, dataset: Any, sums: Sums | None = None) -> None:
        self.path = path
        self._dataset = dataset
        self._sums = sums
        self._checked: set[tuple[int, str]] = set()  # fragments with columns
        metadata = {key.decode(): value.decode() for key, value in (dataset.schema.metadata or {}).items()}
        if metadata.get("cdr:format") != FORMAT:
            raise ValueError(f"{path}: expected a dataset of format {FORMAT!r}, found another Lance dataset")
        if metadata.get("cdr:format_version") != str(FORMAT_VERSION):
            found = metadata.get("cdr:format_version")
            raise ValueError(f"{path}: format version {found}, this version reads {FORMAT_VERSION}")
        try:
            self.about = {name: metadata[f"cdr:{name}"] for name in _ABOUT}
            self._next = int(metadata.get(_NEXT, "0"))
            self.numbering = Numbering.read(json.loads(self.about["numbering"]), str(path))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: expected the store's settings in the dataset, found none of {error}") from None

    @property
    def version(self) -> int:
        """The dataset's version."""
        return int(self._dataset.version)

    @property
    def dim(self) -> int:
        """D."""
        return int(self.about["dim"])

    @classmethod
    def create(cls, path: Path, about: Mapping[str, Any]) -> Record:
        """A new dataset without facts. Raises FileExistsError where there is one."""
        lance, schema = lance_module(), schema_of(about, {})
        if exists(path):
            raise FileExistsError(f"{path}: expected a new folder, found a durable store")
        with said_plainly(path):
            dataset = lance.write_dataset(schema.empty_table(), str(path), mode="create")
            for folder, _, names in os.walk(path, topdown=False):
                for name in names:
                    _sync(Path(folder) / name)
                sync_folder(Path(folder))
            sync_folder(path.parent)
        sums = Sums(path)
        sums.seal((path / "_versions").glob("*.manifest"))
        return cls(path, dataset, sums)

    @classmethod
    def open(cls, path: Path, version: int | None = None, sums: Sums | None = None) -> Record:
        """The newest version, or the one asked for.

        sums: what is known of the files already. Raises DamagedFileError where the version's manifest is not as it was
        written, ValueError where it cannot be read or is not there.
        """
        lance, sums = lance_module(), sums or Sums(path)
        for _ in range(_ATTEMPTS):
            wanted = newest_version(path) if version is None else version
            if wanted is None:  # Lance says what is wrong
                break
            try:
                _check_manifest(path, wanted, sums)
                break
            except FileNotFoundError:  # others have taken it away since
                if version is not None:
                    break
        try:
            return cls(path, lance.dataset(str(path), version=wanted), sums)
        except ValueError as error:
            if version is not None and exists(path):
                raise ValueError(f"{path}: no version {version} here ({_plain(str(error))})") from None
            raise DamagedFileError(f"{path}: {_plain(str(error))}", path) from None
        except OSError as error:
            raise _plain_error(error, path) from None
        except BaseException as error:
            _raise_panic(error, path)
            raise

    def newest(self) -> Record:
        """The newest version: this one, or what others have committed."""
        return self if newest_version(self.path) == self.version else Record.open(self.path, sums=self._sums)

    @property
    def attributes(self) -> dict[str, type]:
        """Types of the further columns."""
        kinds = {"string": str, "int64": int, "double": float, "bool": bool}
        return {field.name: kinds[str(field.type)] for field in self._dataset.schema if field.name not in COLUMNS}

    @property
    def schema(self) -> Any:
        """The Arrow schema of the rows."""
        return self._dataset.schema

    def fingerprint(self) -> str | None:
        """What tells this version from any other, of this record or one that was restored; None if it is not kept."""
        return _fingerprint(self._manifest(self.version))

    def fingerprint_of(self, version: int) -> str | None:
        """The fingerprint of an earlier version, None where it is gone."""
        return _fingerprint(self._manifest(version))

    def _manifest(self, version: int) -> Path:
        return _manifest_of(self.path, version)

    def _check(self, columns: Iterable[str] | None, fragments: Iterable[int] | None = None) -> None:
        """Raises DamagedFileError unless what is read of these columns of these fragments (None: all) is as it was
        written. Every read comes after it."""
        if self._sums is None:
            return
        wanted = [""] if columns is None else sorted(columns)
        numbers = None if fragments is None else set(fragments)
        for fragment in self._dataset.get_fragments():
            number = int(fragment.fragment_id)
            if numbers is not None and number not in numbers:
                continue
            missing = [name for name in wanted if not self._checked & {(number, name), (number, "")}]
            if not missing:
                continue
            metadata = fragment.metadata
            if metadata.deletion_file is not None:
                self._sums.check(self.path / metadata.deletion_file.path(number))
            for file in metadata.files:
                path = self.path / "data" / file.path
                if columns is None:
                    self._sums.check(path)
                else:
                    self._sums.check_columns(path, missing)
            self._checked.update((number, name) for name in missing)

    def _check_rows(self, where: str | None) -> None:
        """The same of all columns of the rows of which a condition holds."""
        if self._sums is None:
            return
        if where is None:
            self._check(None)
            return
        self._check(_named(["sequence"], where))
        found = self._dataset.to_table(columns=["sequence"], filter=where, with_row_address=True)
        self._check(None, np.unique(found["_rowaddr"].to_numpy() >> np.uint64(32)).tolist())

    def count(self, status: str | None = None) -> int:
        """Rows, or those of a status."""
        with said_plainly(self.path):
            self._check(["status"])
            return int(self._dataset.count_rows(None if status is None else f"status = '{status}'"))

    def read(self, columns: Iterable[str] | None = None, where: str | None = None) -> Any:
        """A table of these columns (all for None) of the rows of which an SQL condition holds."""
        names = None if columns is None else list(columns)
        with said_plainly(self.path):
            if names is None:
                self._check_rows(where)
            else:
                self._check(_named(names, where))
            return self._dataset.to_table(columns=names, filter=where)

    def batches(self, where: str | None = None) -> Iterator[Any]:
        """All columns of the rows of which a condition holds, in batches of up to 65,536, in the order of sequence."""
        sequence = self.read(["sequence"], where)["sequence"].to_numpy()
        with said_plainly(self.path):
            self._check_rows(where)
        if (np.diff(sequence) > 0).all():
            with said_plainly(self.path):
                yield from self._dataset.to_batches(filter=where, batch_size=_BATCH, scan_in_order=True)
            return
        ordered = np.sort(sequence)
        for start in range(0, len(ordered), _BATCH):
            part = ordered[start : start + _BATCH]
            limits = f"sequence BETWEEN {part[0]} AND {part[-1]}"
            yield from (
                self.read(None, limits if where is None else f"{limits} AND {where}")
                .sort_by("sequence")
                .combine_chunks()
                .to_batches()
            )

    def check_unique(self) -> None:
        """Raises ValueError where an id or a sequence number is there twice, which no commit makes."""
        import pyarrow.compute as pc

        for name in ("id", "sequence", "first_sequence"):
            column = self.read([name])[name]
            if pc.count_distinct(column).as_py() != len(column):
                raise ValueError(f"{self.path}: expected every {name} once, found one more than once")

    def next_sequence(self) -> int:
        """The number that the next fact gets: above all that were ever given."""
        given = self.read(["sequence"])["sequence"].to_numpy()
        return max(self._next, int(given.max()) + 1 if len(given) else 0)

    def persist_next(self, following: int) -> None:
        """Have no fact get a sequence number below this one."""
        with said_plainly(self.path):
            self._dataset.update_schema_metadata({_NEXT: str(following)})
            self._sync_commit(self._dataset)

    def add_attributes(self, kinds: Mapping[str, type]) -> Record:
        """The record with these further columns as well; rows that are there have no value in them."""
        import pyarrow as pa

        missing = {name: kind for name, kind in kinds.items() if name not in self.attributes}
        if not missing:
            return self
        before = self.version
        with said_plainly(self.path):
            self._dataset.add_columns(pa.schema(_columns(missing)))
            self._sync_commit(self._dataset)
        if self.version != before + 1:  # Lance puts new columns on top of what others have committed meanwhile
            raise _conflict(f"{self.path}: another writer was quicker")
        return Record.open(self.path, self.version, self._sums)

    def commit(self, rows: Any = None, removed: Int64 | None = None) -> Record:
        """The record without the rows of the sequence numbers `removed` and with the table `rows`, in one commit.

        Returns when the commit is on the disk. Raises CommitConflictError of `lance.commit` where this version is no
        longer the newest; then, and after any other error, the record is as it was.
        """
        lance = lance_module()
        operations = lance.LanceOperation
        dataset, out = self._dataset, np.zeros(0, np.int64) if removed is None else np.unique(removed)
        with said_plainly(self.path):
            changed, gone = self._without(out, None if rows is None else rows.num_rows)
            new = [] if rows is None or not rows.num_rows else lance.fragment.write_fragments(rows, dataset)
            self._sync_files(data=new, deletions=changed)
            fragments = dataset.get_fragments()
            if fragments:
                touched = {fragment.id for fragment in changed} | set(gone)
                if fragments[0].fragment_id not in touched:
                    changed.append(fragments[0].metadata)
                operation = operations.Update(removed_fragment_ids=gone, updated_fragments=changed, new_fragments=new)
            elif new:
                operation = operations.Overwrite(dataset.schema, new)
            else:
                return self
            made = lance.LanceDataset.commit(dataset, operation, read_version=dataset.version, max_retries=0)
            self._sync_commit(made)
        return Record(self.path, made, self._sums)

    def _without(self, out: Int64, added: int | None) -> tuple[list[Any], list[int]]:
        """(fragments that keep some rows, with their new deletion files; ids of those that keep none)."""
        if not len(out):
            return [], []
        dataset = self._dataset
        self._check(["sequence"])
        table = dataset.to_table(columns=["sequence"], with_row_address=True)
        sequence, address = table["sequence"].to_numpy(), table["_rowaddr"].to_numpy()
        hit = np.isin(sequence, out)
        kept = sequence[~hit]
        least = int(out[-1]) + 1
        if not added and least > self._next and (not len(kept) or kept.max() < out[-1]):
            before = dataset.version
            dataset.update_schema_metadata({_NEXT: str(least)})  # no number is given twice
            if dataset.version != before + 1:
                raise _conflict(f"{self.path}: another writer was quicker")
            self._seal([self._manifest(dataset.version)])
        home = (address >> np.uint64(32)).astype(np.int64)
        changed, gone = [], []
        for number in np.unique(home[hit]).tolist():
            here = home == number
            fragment = dataset.get_fragment(number)
            if hit[here].all():
                gone.append(number)
                continue
            wanted = ",".join(map(str, sequence[here & hit].tolist()))
            changed.append(fragment.delete(f"sequence IN ({wanted})"))
        return changed, gone

    def compact(self, keep: float, alone: bool) -> Record:
        """The record in few files, without rows that were removed; versions older than `keep` seconds are gone.

        alone: whether nobody else writes meanwhile; then files that no version names, which writers that were killed
        have left, are taken away too. Else those of a week and versions of an hour stay: others may be at them.
        """
        from lance.optimize import Compaction

        lance_module()
        with said_plainly(self.path):
            dataset = self._dataset
            self._check(None)  # what is damaged must not be written again as if it were whole
            plan = Compaction.plan(dataset, {"materialize_deletions": True, "materialize_deletions_threshold": 0.0})
            made = [task.execute(dataset) for task in plan.tasks]
            if made:
                for folder in ("data", "_deletions"):
                    self._sync_new(self.path / folder)
                Compaction.commit(dataset, made)
                self._sync_commit(dataset)
        record = Record.open(self.path, sums=self._sums)
        with said_plainly(self.path):
            older_than = timedelta(seconds=keep if alone else max(keep, _OTHERS_AT_WORK))
            record._dataset.cleanup_old_versions(older_than, delete_unverified=alone)
        if alone and self._sums is not None:
            self._sums.sweep()
        return record

    def versions(self) -> list[tuple[int, float]]:
        """(version, seconds since 1970 when it was made) of all that are kept, oldest first."""
        with said_plainly(self.path):
            return [(int(v["version"]), v["timestamp"].timestamp()) for v in self._dataset.versions()]

    def stats(self) -> dict[str, int]:
        """Fragments and bytes on the disk."""
        return {"fragments": len(self._dataset.get_fragments()), "record_bytes": bytes_in(self.path)}

    def _sync_files(self, data: list[Any], deletions: list[Any]) -> None:
        files = [self.path / "data" / file.path for fragment in data for file in fragment.files]
        files += [self.path / f.deletion_file.path(f.id) for f in deletions if f.deletion_file is not None]
        for path in files:
            _sync(path)
        self._seal(files)
        for folder, some in (("data", data), ("_deletions", deletions)):
            if some and (self.path / folder).is_dir():
                sync_folder(self.path / folder)

    def _sync_new(self, folder: Path) -> None:
        if folder.is_dir():
            for path in folder.iterdir():
                _sync(path)
            sync_folder(folder)
            self._seal(path for path in folder.iterdir() if path.name[0] != ".")  # which others are still writing

    def _seal(self, files: Iterable[Path]) -> None:
        if self._sums is not None:
            self._sums.seal(files)

    def _sync_commit(self, dataset: Any) -> None:
        """Make a commit durable: its manifest, and the names of it and of its transaction."""
        _sync(self._manifest(dataset.version))
        self._seal([self._manifest(dataset.version)])
        for folder in ("_transactions", "_versions"):
            if (self.path / folder).is_dir():
                sync_folder(self.path / folder)
        # Not synced: where a power cut takes it, a damaged commit looks torn, and no commit waits for it.
        with contextlib.suppress(OSError):
            (self.path / _ACKNOWLEDGED).write_text(f"{dataset.version:020}")  # of one length, whoever else writes it


def schema_of(about: Mapping[str, Any], attributes: Mapping[str, type]) -> Any:
    """The Arrow schema of a record with these settings and further columns."""
    import pyarrow as pa

    metadata = {"cdr:format": FORMAT, "cdr:format_version": str(FORMAT_VERSION)}
    metadata |= {f"cdr:{name}": str(about[name]) for name in _ABOUT}
    kind = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}[str(about["dtype"])]
    stamp = pa.timestamp("us", "UTC")
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("sequence", pa.int64(), nullable=False),
            pa.field("first_sequence", pa.int64(), nullable=False),
            pa.field("text", pa.string(), nullable=False),
            pa.field("source", pa.string()),
            pa.field("position", pa.int64()),
            pa.field("importance", pa.float64(), nullable=False),
            pa.field("added_at", stamp, nullable=False),
            pa.field("expires_at", stamp),
            pa.field("status", pa.string(), nullable=False),
            pa.field("reason", pa.string()),
            pa.field("embedding", pa.list_(kind, int(about["dim"])), nullable=False),
            *_columns(attributes),
        ],
        metadata=metadata,
    )


def _columns(kinds: Mapping[str, type]) -> list[Any]:
    import pyarrow as pa

    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    return [pa.field(name, types[kind]) for name, kind in kinds.items()]


def set_torn_aside(path: Path) -> str | None:
    """Rename the newest version if its manifest does not end as manifests do; returns its name.

    What was acknowledged was synced before, so this may be a commit that a power cut has torn and nobody was told of;
    there is one at most, and never the only version. Nobody else may write meanwhile. Raises ValueError where the
    version, or one after it that is gone, was acknowledged: then it is damaged.
    """
    manifests = sorted((path / "_versions").glob("*.manifest"))  # the newest first, as their names count down
    if len(manifests) < 2:
        return None
    with open(manifests[0], "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_MANIFEST_END)))
        if file.read() == _MANIFEST_END:
            return None
    newest = manifests[0]
    acknowledged = _acknowledged(path)
    if acknowledged is not None and acknowledged >= 2**64 - 1 - int(newest.stem):
        raise DamagedFileError(
            f"{newest}: damaged, its end was there when its commit was acknowledged: put it back from a copy, or "
            "rename it to .torn to go on without that commit",
            newest,
        )
    newest.rename(newest.with_suffix(".torn"))
    return newest.name


def newest_version(path: Path) -> int | None:
    """The newest version that is there; Lance's own hint of it is not asked. None where there is none."""
    try:
        names = [entry.name for entry in os.scandir(path / "_versions")]
    except OSError:
        return None
    numbers = [int(name[:20]) for name in names if _MANIFEST.fullmatch(name)]
    return 2**64 - 1 - min(numbers) if numbers else None


def _manifest_of(path: Path, version: int) -> Path:
    return path / "_versions" / f"{2**64 - 1 - version:020}.manifest"


def _check_manifest(path: Path, version: int, sums: Sums) -> None:
    """Raises DamagedFileError where a version's manifest is not as it was written, FileNotFoundError where it is gone.

    A writer that was killed between its commit and the checksums has left none: nobody was told of that commit.
    """
    manifest = _manifest_of(path, version)
    acknowledged = _acknowledged(path)
    if sums.sealed(manifest) or (acknowledged is not None and version <= acknowledged):
        sums.check(manifest)


def _named(columns: Iterable[str], where: str | None) -> list[str]:
    """The columns that are read for these and a condition."""
    return list({*columns, *(_CONDITIONS.findall(where) if where else ())})


def _acknowledged(path: Path) -> int | None:
    try:
        return int((path / _ACKNOWLEDGED).read_text())
    except (OSError, ValueError):  # a power cut may have left anything
        return None


def bytes_in(folder: Path) -> int:
    """Bytes of the files in a folder and below; others may take some away meanwhile."""
    total = 0
    for home, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(home, name)).st_size
    return total


def exists(path: Path) -> bool:
    """Whether there is a Lance dataset with at least one version."""
    versions = path / "_versions"
    return versions.is_dir() and any(p.suffix == ".manifest" for p in versions.iterdir())


@contextlib.contextmanager
def said_plainly(path: Path | str) -> Iterator[None]:
    """Lance's errors as Python's own, without the places in its source; conflicts of commits as what they are."""
    from lance.commit import CommitConflictError

    try:
        yield
    except (CommitConflictError, DamagedFileError):
        raise
    except (OSError, RuntimeError) as error:
        if "commit conflict" in str(error).lower():
            raise _conflict(_plain(str(error))) from error
        raise _plain_error(error, path) from error
    except ValueError as error:  # Arrow's: of damaged files
        raise DamagedFileError(f"{path}: {_plain(str(error))}", path) from error
    except BaseException as error:
        _raise_panic(error, path)
        raise


def _raise_panic(error: BaseException, path: Path | str) -> None:
    """A DamagedFileError in place of a panic of Lance, which is no Exception and would go past every handler."""
    if type(error).__name__ == "PanicException":
        raise DamagedFileError(f"{path}: damaged ({_plain(str(error))})", path) from error


def _plain_error(error: Exception, path: Path | str) -> OSError:
    found = _OS_ERROR.search(str(error))
    number = getattr(error, "errno", None) or (int(found[1]) if found else None)
    if number is None and "No space left" in str(error):
        number = errno.ENOSPC
    if number is None:
        return OSError(f"{path}: {_plain(str(error))}")
    return OSError(number, os.strerror(number), str(path))


def _plain(message: str) -> str:
    return _SOURCE_PLACE.sub("", message).strip()


def _conflict(message: str) -> OSError:
    from lance.commit import CommitConflictError

    made: OSError = CommitConflictError(message)
    return made


def _sync(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _fingerprint(manifest: Path) -> str | None:
    try:
        return hashlib.blake2b(manifest.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None
