"""Facts that stay: a Lance dataset as the record of truth, and the store that ranks kept equal to it.

    with DurableStore.create(path, 384, embedding_model="all-MiniLM-L6-v2") as store:
        store.add(ids, texts, embeddings, source=sources, attributes={"tenant": tenants})
        cdr_rank(query, Retriever(store.facts), session, where={"tenant": "x"})

A change is acknowledged when its commit is on the disk. Beside the record lies a snapshot of the facts that is mapped
at open; it can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.durable import _copies, _dataset, _snapshot, _transfer, _writes
from cdr_kernel.durable._copies import Advance
from cdr_kernel.durable._dataset import Record
from cdr_kernel.durable._layout import RECORD, SNAPSHOT, building, check_new_folder, is_durable, newest_record
from cdr_kernel.durable._mirror import Progress, Replica, no_progress
from cdr_kernel.durable._rows import check_names, check_text
from cdr_kernel.durable._snapshot import Found
from cdr_kernel.exceptions import DamagedFileError, EmbeddingModelMismatch
from cdr_kernel.store import FactStore, _expiry
from cdr_kernel.store._atomic_folder import turn
from cdr_kernel.store._attributes import Value
from cdr_kernel.store._fact_store import Added, Checked
from cdr_kernel.store._numbering import Numbering
from cdr_kernel.text import Tokenizer
from cdr_kernel.text._token_hashes import HashKey
from cdr_kernel.validation._scalars import check_order, check_strings

__all__ = ["RECORD", "SNAPSHOT", "WORTH_SNAPSHOT", "Advance", "DurableStore", "check_new_folder", "is_durable"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

LOOKS = "expiry.json"
"""In the folder: when ``expire`` looked at the clock."""
WORTH_SNAPSHOT = 16384
"""Facts read from the record at open, beyond an eighth of all, from which a snapshot is written."""


class DurableStore:
    """Facts in a folder that survive a crash. Any number of processes can share it.

    `create`, `open` and `from_facts` make one. ``facts`` is the live `FactStore` that retrievers and sessions use. It
    equals ``version`` of the dataset, and only this class changes it. Commits of other processes appear after
    `refresh`, and before every change. All methods are thread-safe; changes take turns.

    A quarantined fact is in no ranking until it is released, even if it is upserted meanwhile. An expired fact is
    withheld at once by every process whose clock says so. It stays in the dataset until `expire` deletes it.
    """

    def __init__(
        self,
        path: Path,
        record: Record,
        tokenizer: Tokenizer | None,
        hash_key: HashKey | None,
        progress: Progress = no_progress,
    ) -> None:
        """For ``create`` and ``open``."""
        self.path = path
        self._lock = Lock()
        self._tokenizer, self._hash_key = tokenizer, hash_key
        self._replica = Replica(record, tokenizer, hash_key, progress)
        self._closed = False
        self._checking: threading.Thread | None = None
        self._damage: str | None = None
        self._snapshot_version: int | None = None

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        dim: int,
        *,
        embedding_model: str,
        dtype: str = "float32",
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
    ) -> DurableStore:
        """Create a store without facts, in a folder that is empty or does not exist.

        Args:
            path: The folder.
            dim: As for `FactStore`.
            embedding_model: As for `FactStore`.
            dtype: As for `FactStore`.
            tokenizer: As for `FactStore`.
            hash_key: As for `FactStore`.

        Raises:
            FileExistsError: If the folder contains something else.
            ImportError: Without the extra `store`.
        """
        facts = FactStore(dim, embedding_model=embedding_model, dtype=dtype, tokenizer=tokenizer, hash_key=hash_key)
        return cls._create(Path(path), facts, facts.numbering)

    @classmethod
    def _create(cls, folder: Path, like: FactStore, numbering: Numbering) -> DurableStore:
        """A new store of the kind of another one. numbering: whose its sequence numbers are."""
        _dataset.lance_module()
        about = {
            "dim": like.dim,
            "dtype": like.dtype.name,
            "embedding_model": like.embedding_model,
            "tokenizer": like.tokenizer_name,
            "hash_key": like.key_fingerprint,
            "unicode": unicodedata.unidata_version,
            "numbering": json.dumps(numbering.listed()),
        }
        check_new_folder(folder)
        with turn(folder):
            check_new_folder(folder)
            record = Record.create(folder / RECORD, about)
        return cls(folder, record, like.tokenizer, like.hash_key)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        embedding_model: str | None = None,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        verify: bool = False,
        progress: Progress | None = None,
    ) -> DurableStore:
        """Open the newest version of a store.

        Facts are mapped from the snapshot if it belongs to the dataset, and later commits are read. Otherwise all facts
        are read from the dataset, and a snapshot is written. Expired facts are withheld.

        Args:
            path: The folder.
            embedding_model: The model that the store must have. None does not check.
            tokenizer: The tokenizer that the store was made with.
            hash_key: The hash key that the store was made with.
            verify: Whether to check every block of the snapshot before returning, rather than in the background.
            progress: Shows how far long reads are. It is called with what is counted and how many there are, and
                returns a context manager with a function to advance.

        Raises:
            FileNotFoundError: If there is no durable store.
            EmbeddingModelMismatch: If the store has another model.
            ValueError: For a damaged store, one of a later format, and another tokenizer or hash key.
            ImportError: Without the extra `store`.
        """
        store = cls._open(Path(path), embedding_model, tokenizer, hash_key, progress=progress)
        if verify:
            store.verify()
        return store

    @classmethod
    def _open(
        cls,
        folder: Path,
        embedding_model: str | None,
        tokenizer: Tokenizer | None,
        hash_key: HashKey | None,
        *,
        new: bool = False,
        progress: Progress | None = None,
    ) -> DurableStore:
        if not is_durable(folder):
            what = f"expected {RECORD}"
            if (folder / "manifest.json").is_file():
                what += f"; this is a folder of FactStore.save: `cdr store create {folder} -o NEW` makes it durable"
            raise FileNotFoundError(f"{folder}: no durable store here ({what})")
        record = newest_record(folder)
        about = record.about
        if embedding_model is not None and embedding_model != about["embedding_model"]:
            own = about["embedding_model"]
            advice = f"the store in {folder} is of {own!r}: ask for that or for none, or open another store"
            raise EmbeddingModelMismatch("embedding_model", own, embedding_model, advice)
        store = cls(folder, record, tokenizer, hash_key, progress or no_progress)
        store.facts.check_hasher(about, f"{folder}")
        with store._lock:  # the check of the snapshot that this starts waits with putting anything right
            store._fill(new)
        return store

    @classmethod
    def from_facts(
        cls, facts: FactStore, path: str | os.PathLike[str], *, advance: Advance | None = None
    ) -> DurableStore:
        """Create a durable store with the facts of a store, in their order and with their sequence numbers. Whole or
        not at all.

        Args:
            facts: The store.
            path: The folder, empty or not there yet.
            advance: Called with the number of facts that are done since the last call.

        Raises:
            FileExistsError: If the folder contains something else.
            ValueError: For strings with lone surrogates.
            ImportError: Without the extra `store`.
        """
        check_names(facts.view().attribute_names)
        hasher: dict[str, Any] = {"tokenizer": facts.tokenizer, "hash_key": facts.hash_key}
        numbering = facts.numbering.branched(facts.next_sequence)
        with building(path) as draft, cls._create(draft, facts, numbering) as store:
            _copies.facts_into(store._replica.record, store.facts, facts, advance)
        return cls._open(Path(path), None, **hasher, new=True)

    def export(self, file: str | os.PathLike[str]) -> int:
        """Write all facts, quarantined ones included, to one safetensors file. docs/store.md describes the format.

        The file is replaced whole or not at all. This takes memory for all facts.

        Args:
            file: The file.

        Returns:
            How many facts were written.

        Raises:
            OSError: If no file can be written there. Nothing was read then.
        """
        _transfer.check_target(Path(file))
        with self._lock:
            self._check_open()
            replica = self._replica
            return replica.with_newest(
                replica.record, lambda record: _copies.exported(record, Path(file), replica.next_sequence)
            )

    @classmethod
    def from_export(
        cls,
        file: str | os.PathLike[str],
        path: str | os.PathLike[str],
        *,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        advance: Advance | None = None,
    ) -> DurableStore:
        """Create a durable store from a file that `export` wrote: the same facts, numbers, times and quarantine. Whole
        or not at all.

        Args:
            file: The file.
            path: The folder, empty or not there yet.
            tokenizer: The tokenizer of the new store. It may be another one than before.
            hash_key: The hash key of the new store. It may be another one than before.
            advance: Called with the number of facts that are done since the last call.

        Raises:
            FileNotFoundError: If the file is missing.
            FileExistsError: If the folder contains something else.
            ValueError: If the file is damaged or of another kind.
        """
        found = _transfer.Exchanged(Path(file))
        model, dtype = found.about["embedding_model"], found.about["dtype"]
        hasher: dict[str, Any] = {"tokenizer": tokenizer, "hash_key": hash_key}
        like = FactStore(found.dim, embedding_model=model, dtype=dtype, **hasher)
        numbering = found.numbering.branched(found.next_sequence)
        with building(path) as draft, cls._create(draft, like, numbering) as store:
            _copies.exchanged_into(store._replica.record, store.facts, found, advance)
        return cls._open(Path(path), None, **hasher, new=True)

    # What there is

    @property
    def facts(self) -> FactStore:
        """The live store. Give it to a `Retriever`; do not change it."""
        return self._replica.facts

    @property
    def version(self) -> int:
        """The version of the dataset that `facts` equals."""
        return self._replica.version

    @property
    def embedding_model(self) -> str:
        """The model that made the embeddings."""
        return self.facts.embedding_model

    @property
    def dim(self) -> int:
        """D."""
        return self.facts.dim

    def __len__(self) -> int:
        return len(self.facts)

    def __contains__(self, fact_id: object) -> bool:
        return fact_id in self.facts

    def __repr__(self) -> str:
        return f"DurableStore({str(self.path)!r}, version {self.version}, {self.facts!r})"

    def __enter__(self) -> DurableStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the background work. `facts` can still be ranked; changes raise ValueError."""
        self._closed = True
        self.verify()  # which ends soon now

    def quarantined(self) -> dict[str, str | None]:
        """The ids of the quarantined facts in the order of their sequence, with the reasons."""
        with self._lock:
            return {i: held[1] for i, held in sorted(self._replica.held.items(), key=lambda item: item[1][0])}

    def versions(self) -> list[tuple[int, float]]:
        """(version, seconds since 1970) of every version that is kept, oldest first."""
        return self._replica.with_newest(self._replica.record.newest(), Record.versions)

    def stats(self) -> dict[str, Any]:
        """Counts, sizes in bytes, versions and settings, ready for JSON.

        `withheld` counts facts that are expired by this process's clock and still in the dataset. `snapshot_version` is
        that of the snapshot in the folder, None without one. `snapshot` is "none", "checking", "checked", or what was
        wrong with the snapshot.
        """
        with self._lock:
            checking = self._checking is not None and self._checking.is_alive()
            checked = self._damage or ("none" if self._checking is None else "checked")
            replica = self._replica
            return {
                "path": str(self.path),
                "facts": len(self.facts),
                "quarantined": len(replica.held),
                "withheld": len(self.facts.withheld),
                "version": self.version,
                "next_sequence": replica.next_sequence,
                "dim": self.dim,
                "dtype": self.facts.dtype.name,
                "embedding_model": self.embedding_model,
                "attributes": {name: kind.__name__ for name, kind in sorted(replica.record.attributes.items())},
                **replica.record.stats(),
                "snapshot_version": self._snapshot_version,
                "snapshot": "checking" if checking else checked,
                "snapshot_bytes": _dataset.bytes_in(self.path / SNAPSHOT),
            }

    # Changes

    def add(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Any,
        *,
        importance: Any = None,
        source: Sequence[str | None] | None = None,
        position: Sequence[int | None] | None = None,
        expires_at: Sequence[datetime | float | None] | None = None,
        attributes: Mapping[str, Sequence[Value | None]] | None = None,
        on_invalid: str = "raise",
    ) -> Added:
        """Add facts that are not in the store yet, as `FactStore.add` does. It returns when the facts are on disk.

        After an error the dataset is as it was. An expired fact does not count as present: a new fact with its id takes
        its place. A quarantined one does.

        Args:
            ids: As in `FactStore.add`, and so are the others. Strings must be valid Unicode.
            texts: See there.
            embeddings: See there.
            importance: See there.
            source: See there.
            position: See there.
            expires_at: [M]: from when a fact is withheld: a datetime with a time zone, seconds since 1970, or None for
                never.
            attributes: See there.
            on_invalid: See there.

        Raises:
            ValueError: As `FactStore.add`, and for strings with lone surrogates.
        """
        ids = _listed(ids)
        check_names(attributes or ())
        found = self.facts.check(ids, texts, embeddings, importance, source, position, attributes, None, on_invalid)
        return self._put(ids, found, expires_at, replace=False)

    def upsert(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Any,
        *,
        importance: Any = None,
        source: Sequence[str | None] | None = None,
        position: Sequence[int | None] | None = None,
        expires_at: Sequence[datetime | float | None] | None = None,
        attributes: Mapping[str, Sequence[Value | None]] | None = None,
        on_invalid: str = "raise",
    ) -> Added:
        """Add facts, and replace those that are in the store, in one commit. A replaced fact gets a new sequence
        number.

        A quarantined fact is replaced too and stays quarantined. The arguments are those of `add`.
        """
        ids = _listed(ids)
        check_names(attributes or ())
        found = self.facts.check(ids, texts, embeddings, importance, source, position, attributes, None, on_invalid)
        return self._put(ids, found, expires_at, replace=True)

    def _put(
        self, ids: Sequence[str], found: Checked, expires_at: Sequence[datetime | float | None] | None, *, replace: bool
    ) -> Added:
        expiries = _expiry.microseconds(expires_at, len(ids))
        if any(moment is not None for moment in expiries):
            by_id = dict(zip(ids, expiries, strict=True))
            found = _expiry.expiring(found, [by_id[i] for i in found.ids])
        check_text(found)
        with self._lock:
            added = self._change(lambda: _writes.put(self._replica, found, replace=replace))
            if any(moment is not None and moment <= _expiry.now() for moment in expiries):
                self._look()
            return added

    def remove(self, ids: Iterable[str], *, missing: str = "raise") -> int:
        """Delete facts, quarantined and expired ones included. `compact` frees their bytes.

        A quarantined id that was removed may be added again as a new fact.

        Args:
            ids: The ids.
            missing: "raise" refuses ids that are not there, and removes nothing. "ignore" ignores them.

        Returns:
            How many facts were deleted.

        Raises:
            KeyError: If an id is not there and `missing` is "raise".
        """
        if missing not in ("raise", "ignore"):
            raise ValueError(f"missing: expected 'raise' or 'ignore', got {missing!r}")
        wanted = _distinct(ids)
        return self._change(lambda: _writes.remove(self._replica, wanted, missing=missing))

    def quarantine(self, ids: Iterable[str], reason: str | None = None) -> int:
        """Take facts out of every ranking until they are released. They stay in the dataset.

        Args:
            ids: The ids.
            reason: Stored with the facts. It replaces the reason of a fact that is quarantined already.

        Returns:
            How many facts were quarantined.

        Raises:
            KeyError: If an id is not there. Nothing was changed then.
        """
        wanted = _distinct(ids)
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"reason: expected a str or None, got {type(reason).__name__}")
        return self._change(lambda: _writes.quarantine(self._replica, wanted, reason))

    def release(self, ids: Iterable[str]) -> int:
        """Let quarantined facts into rankings again, as the newest facts, in the given order.

        Args:
            ids: The ids.

        Returns:
            How many facts were released.

        Raises:
            KeyError: If an id is not quarantined. Nothing was changed then.
        """
        wanted = _distinct(ids)
        with self._lock:
            count = self._change(lambda: _writes.release(self._replica, wanted))
            self._look()
            return count

    def expire(self, now: datetime | float | None = None, *, grace: float = _expiry.GRACE) -> int:
        """Delete the facts whose time has been past for sure, quarantined ones included; withhold what is past it now.

        A clock may be wrong. So a fact is deleted only where two calls, at least `grace` seconds apart by their clocks,
        both found it past its time. Until then it is withheld, and comes back once the clock of a process says that its
        time has not come. Call it every day, or ``compact``, which does.

        Args:
            now: A datetime with a time zone, or seconds since 1970; the present for None.
            grace: Seconds; 0 deletes at once all that is past its time now.

        Returns:
            How many facts were deleted. They never come back.

        Raises:
            ValueError: A moment without a time zone or out of range, or a grace below 0.
            TypeError: A moment of another type.
        """
        moment = _expiry.now() if now is None else _expiry.microsecond(now, "now")
        if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0.0 <= grace < 1e9:
            raise ValueError(f"grace: expected seconds of at least 0, got {grace!r}")

        def delete() -> int:
            past = _expiry.confirmed(self.path / LOOKS, moment, grace)
            return 0 if past is None else _writes.expire(self._replica, past)

        with self._lock:
            deleted = self._change(delete)
            self._look(moment)
            return deleted

    def refresh(self) -> bool:
        """Read what other processes have committed, and withhold expired facts.

        Facts that a wrong clock withheld come back.

        Returns:
            Whether anything changed.
        """
        with self._lock:
            self._check_open()
            before = self.facts.version
            self._mend()
            record = self._replica.record.newest()
            changed = record is not self._replica.record
            self._replica.with_newest(record, self._replica.catch_up)
            self._look()
            return changed or self.facts.version != before

    # The folder

    def snapshot(self, *, codes: bool = True) -> None:
        """Write the facts of this version to the folder. The next open maps them.

        Args:
            codes: Whether to write the scan's codes too, for 16,384 facts or more. A retriever would make them again
                otherwise.
        """
        from cdr_kernel.retrieve import Retriever
        from cdr_kernel.retrieve._retriever import WORTH_CODES

        folder = self.path / SNAPSHOT
        with self._lock:
            self._check_open()
            record, view, following = self._replica.record, self.facts.whole(), self._replica.next_sequence
            held = self._replica.held
        try:
            _snapshot.write(folder, self.facts, view, record, following, held)
        except DamagedFileError as error:  # of the snapshot that is mapped: never written again as if it were whole
            self._put_right(str(error))
            return
        with self._lock:
            self._snapshot_version = record.version
        if codes and len(view) >= WORTH_CODES:
            saved = FactStore.load(folder, tokenizer=self._tokenizer, hash_key=self._hash_key, snapshot=True)
            Retriever(saved).save()

    def compact(self, *, keep: float = 0.0) -> None:
        """Rewrite the dataset in few files without deleted facts, drop old versions, and write a new snapshot.

        Writers wait meanwhile; readers do not.

        Args:
            keep: Seconds for which old versions are kept.
        """
        if not isinstance(keep, int | float) or isinstance(keep, bool) or not 0.0 <= keep < 1e9:
            raise ValueError(f"keep: expected seconds of at least 0, got {keep!r}")
        self.expire()

        replica = self._replica
        self._change(lambda: replica.follow(replica.record.compact(keep, replica.alone)))
        self.snapshot()
        with self._lock:
            if self.facts.view().rows > len(self.facts.whole()):
                mapped = self._mapped()
                if mapped is not None:
                    mapped.look(_expiry.now())  # first, so that no ranking has what is past its time
                    self.facts.adopt(mapped)

    @property
    def verified(self) -> bool:
        """Whether every block of the snapshot was checked."""
        return self.facts.verified

    def verify(self, progress: Callable[[int], object] | None = None) -> str | None:
        """Wait until all of the snapshot that was opened is checked; what was wrong, None for nothing.

        What was wrong has been put right from the record by then.

        Args:
            progress: Called with 0 ten times a second meanwhile; what it raises ends the waiting.
        """
        if self._checking is not None and self._checking is not threading.current_thread():
            while progress is not None and self._checking.is_alive():
                progress(0)
                self._checking.join(0.1)
            self._checking.join()
        return self._damage

    # Within

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path}: the store was closed")

    def _change(self, make: Callable[[], T]) -> T:
        with self._lock:
            self._check_open()
            self._mend()
            return self._replica.change(make)

    def _mend(self) -> None:
        """Read the facts from the record again where a file of the snapshot that they are mapped from was cut short."""
        try:
            self.facts.view()
        except DamagedFileError as error:
            self._damage = str(error)
            self._put_right(self._damage, cut_short=True)

    def _fill(self, new: bool) -> None:
        """The facts of the newest version, from the snapshot if it can be used, which a new store does not have."""
        replica = self._replica
        found = self._from_snapshot()
        if isinstance(found, str) and replica.record.newest() is not replica.record:  # it may be of a newer version
            replica.record = replica.record.newest()
            found = self._from_snapshot()
        damaged = isinstance(found, str) and self._damage is not None
        if isinstance(found, str):
            why = None if new else "its snapshot is missing or does not fit"
            replica.reread(replica.record, in_place=False, why=why)
            late = len(self.facts)
        else:
            replica.facts, replica.next_sequence, replica.version = found.facts, found.next_sequence, found.version
            self._snapshot_version = found.version
            replica.held = found.held
            mapped = self.facts.view().rows
            self._check_behind(found.facts)
            replica.with_newest(replica.record, replica.catch_up)
            view = self.facts.view()
            late = (view.rows - mapped) + (view.rows - len(view))
        worth = late >= max(WORTH_SNAPSHOT, len(self.facts) // 8)
        if worth or damaged:
            with contextlib.suppress(OSError):  # a full disk or a folder that cannot be written: the next open reads on
                self.snapshot(codes=False)
                mapped_again = self._mapped() if worth else None
                if mapped_again is not None:
                    replica.facts = mapped_again
        self._look()

    def _from_snapshot(self) -> Found | str:
        try:
            return _snapshot.load(
                self.path / SNAPSHOT, self._replica.record, tokenizer=self._tokenizer, hash_key=self._hash_key
            )
        except DamagedFileError as error:
            if self._damage is None:
                _log.warning("%s; the facts are read from the record again", error)
            self._damage = str(error)
            return self._damage

    def _mapped(self) -> FactStore | None:
        """The facts of the snapshot that was just written, None where it is of another version already."""
        found = self._from_snapshot()
        if isinstance(found, str):
            return None
        if found.version != self.version:
            return None
        self._check_behind(found.facts)
        return found.facts

    def _look(self, moment: int | None = None) -> None:
        """Withhold what is past its time at this moment, the present for None."""
        moment = _expiry.now() if moment is None else moment
        try:
            self.facts.look(moment)
        except DamagedFileError as error:  # of the snapshot that is mapped
            self._damage = str(error)
            self._put_right(self._damage)
            self.facts.look(moment)

    def _check_behind(self, facts: FactStore) -> None:
        self._checking = threading.Thread(target=self._check, args=(facts,), name="cdr-snapshot")
        self._checking.start()

    def _check(self, facts: FactStore) -> None:
        """Check every block of the snapshot that was mapped, on one thread: the others are for whoever ranks."""
        with contextlib.suppress(_Closed):
            try:
                facts.verify(self._stop_when_closed, parallel=False)
            except (DamagedFileError, OSError) as error:
                self._damage = str(error)
                try:
                    self._put_right(self._damage)
                except (OSError, ValueError) as other:
                    _log.warning("%s: the facts could not be read from the record again (%s)", self.path, other)

    def _stop_when_closed(self, _: int) -> None:
        if self._closed or not threading.main_thread().is_alive():
            raise _Closed

    def _put_right(self, damage: str, *, cut_short: bool = False) -> None:
        """Read all facts from the record in place of a damaged snapshot, unless another thread has done so."""
        with self._lock:
            if self.facts.verified and not cut_short:
                return
            _log.warning("%s; the facts are read from the record again", damage)
            self._replica.reread(Record.open(self.path / RECORD), in_place=True)
            self._snapshot_version = None
            with contextlib.suppress(OSError):
                self.snapshot(codes=False)


class _Closed(Exception):
    """The store was closed while its snapshot was checked."""


def _listed(ids: Sequence[str]) -> Sequence[str]:
    """Ids that are gone through more than once; one string is left for the check that refuses it."""
    check_order(ids, "ids")
    return ids if isinstance(ids, str | bytes) else list(ids)


def _distinct(ids: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(check_strings(ids, "ids", ordered=False)))
