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

from cdr_kernel.arrays import Int64
from cdr_kernel.attributes import RESERVED
from cdr_kernel.folder import sync_folder
from cdr_kernel.numbering import Numbering

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
    text. numbering: whose the sequence numbers are. version: int; grows with every commit.
    """

    def __init__(self, path: Path, dataset: Any) -> None:
        self.path = path
        self._dataset = dataset
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
        return cls(path, dataset)

    @classmethod
    def open(cls, path: Path, version: int | None = None) -> Record:
        """The newest version, or the one asked for. Raises ValueError where it cannot be read or is not there."""
        lance = lance_module()
        try:
            return cls(path, lance.dataset(str(path), version=version))
        except ValueError as error:
            if version is not None and exists(path):
                raise ValueError(f"{path}: no version {version} here ({_plain(str(error))})") from None
            raise ValueError(f"{path}: {_plain(str(error))}") from None
        except OSError as error:
            raise _plain_error(error, path) from None
        except BaseException as error:
            _raise_panic(error, path)
            raise

    def newest(self) -> Record:
        """The newest version: this one, or what others have committed."""
        with said_plainly(self.path):
            latest = int(self._dataset.latest_version)
        return self if latest == self.version else Record.open(self.path)

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
        return self.path / "_versions" / f"{2**64 - 1 - version:020}.manifest"

    def count(self, status: str | None = None) -> int:
        """Rows, or those of a status."""
        with said_plainly(self.path):
            return int(self._dataset.count_rows(None if status is None else f"status = '{status}'"))

    def read(self, columns: Iterable[str] | None = None, where: str | None = None) -> Any:
        """A table of these columns (all for None) of the rows of which an SQL condition holds."""
        with said_plainly(self.path):
            return self._dataset.to_table(columns=None if columns is None else list(columns), filter=where)

    def batches(self, where: str | None = None) -> Iterator[Any]:
        """All columns of the rows of which a condition holds, in batches of up to 65,536, in the order of sequence."""
        sequence = self.read(["sequence"], where)["sequence"].to_numpy()
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
        with said_plainly(self.path):
            self._dataset.add_columns(pa.schema(_columns(missing)))
            self._sync_commit(self._dataset)
        return Record.open(self.path)

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
        return Record(self.path, made)

    def _without(self, out: Int64, added: int | None) -> tuple[list[Any], list[int]]:
        """(fragments that keep some rows, with their new deletion files; ids of those that keep none)."""
        if not len(out):
            return [], []
        dataset = self._dataset
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
            plan = Compaction.plan(dataset, {"materialize_deletions": True, "materialize_deletions_threshold": 0.0})
            made = [task.execute(dataset) for task in plan.tasks]
            if made:
                for folder in ("data", "_deletions"):
                    self._sync_new(self.path / folder)
                Compaction.commit(dataset, made)
                self._sync_commit(dataset)
        record = Record.open(self.path)
        with said_plainly(self.path):
            older_than = timedelta(seconds=keep if alone else max(keep, _OTHERS_AT_WORK))
            record._dataset.cleanup_old_versions(older_than, delete_unverified=alone)
        return record

    def versions(self) -> list[tuple[int, float]]:
        """(version, seconds since 1970 when it was made) of all that are kept, oldest first."""
        with said_plainly(self.path):
            return [(int(v["version"]), v["timestamp"].timestamp()) for v in self._dataset.versions()]

    def stats(self) -> dict[str, int]:
        """Fragments and bytes on the disk."""
        return {"fragments": len(self._dataset.get_fragments()), "record_bytes": bytes_in(self.path)}

    def _sync_files(self, data: list[Any], deletions: list[Any]) -> None:
        for fragment in data:
            for file in fragment.files:
                _sync(self.path / "data" / file.path)
        for fragment in deletions:
            if fragment.deletion_file is not None:
                _sync(self.path / fragment.deletion_file.path(fragment.id))
        for folder, some in (("data", data), ("_deletions", deletions)):
            if some and (self.path / folder).is_dir():
                sync_folder(self.path / folder)

    def _sync_new(self, folder: Path) -> None:
        if folder.is_dir():
            for path in folder.iterdir():
                _sync(path)
            sync_folder(folder)

    def _sync_commit(self, dataset: Any) -> None:
        """Make a commit durable: its manifest, and the names of it and of its transaction."""
        _sync(self._manifest(dataset.version))
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
        raise ValueError(
            f"{newest}: damaged, its end was there when its commit was acknowledged: put it back from a copy, or "
            "rename it to .torn to go on without that commit"
        )
    newest.rename(newest.with_suffix(".torn"))
    return newest.name


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
    except CommitConflictError:
        raise
    except (OSError, RuntimeError) as error:
        if "commit conflict" in str(error).lower():
            raise _conflict(_plain(str(error))) from error
        raise _plain_error(error, path) from error
    except ValueError as error:  # Arrow's: of damaged files
        raise ValueError(f"{path}: {_plain(str(error))}") from error
    except BaseException as error:
        _raise_panic(error, path)
        raise


def _raise_panic(error: BaseException, path: Path | str) -> None:
    """A ValueError in place of a panic of Lance, which is no Exception and would go past every handler."""
    if type(error).__name__ == "PanicException":
        raise ValueError(f"{path}: damaged ({_plain(str(error))})") from error


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
