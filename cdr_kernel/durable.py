"""Facts that stay: a Lance dataset as the record of truth, and the store that ranks kept equal to it.

    with DurableStore.create(path, 384, embedding_model="all-MiniLM-L6-v2") as store:
        store.add(ids, texts, embeddings, source=sources, attributes={"tenant": tenants})
        cdr_rank(query, Retriever(store.facts), session, where={"tenant": "x"})

A change is acknowledged when its commit is on the disk. Beside the record lies a snapshot of the facts that is mapped
at open; it can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from cdr_kernel import exchange, lance_record, snapshot
from cdr_kernel.arrays import Int64
from cdr_kernel.attributes import Attributes, Value
from cdr_kernel.folder import LOCK, sync_folder, turn
from cdr_kernel.lance_record import COLUMNS, LIVE, QUARANTINED, Record
from cdr_kernel.ngram import HashKey, Tokenizer, take_tokens
from cdr_kernel.snapshot import Found
from cdr_kernel.store import Added, Checked, EmbeddingModelMismatch, FactStore, StoreView
from cdr_kernel.terminal import Progress, say

T = TypeVar("T")
Advance: TypeAlias = Callable[[int], object]

RECORD = "facts.lance"
SNAPSHOT = "snapshot"
WORTH_SNAPSHOT = 16384
"""Facts read from the record at open, beyond an eighth of all, from which a snapshot is written."""

_EXPIRES = "_expires_at"  # the column in memory: microseconds since 1970
_ATTEMPTS = 50
_BATCH = 65536
_LONG_WORK = 100_000  # facts from which reading them is said on standard error
_LATEST = 253402300799  # seconds: the end of the year 9999


class DurableStore:
    """Facts in a folder that survive whatever ends the process, shared by any number of processes.

    Made by ``create`` and ``open``. ``facts`` is the live `FactStore` that retrievers, sessions and rankings take; it
    is equal to ``version`` of the record and changed by this class alone. What other processes commit shows after
    ``refresh``, and before every change. Threads may call everything at once; changes take turns.

    A quarantined fact is in no ranking until it is released, whoever upserts it meanwhile; an expired one is deleted.
    """

    def __init__(self, path: Path, record: Record, tokenizer: Tokenizer | None, hash_key: HashKey | None) -> None:
        """For ``create`` and ``open``."""
        self.path = path
        self._lock = threading.RLock()
        self._tokenizer, self._hash_key = tokenizer, hash_key
        self._closed = threading.Event()
        self._checking: threading.Thread | None = None
        self._damage: str | None = None
        self._held: dict[str, tuple[int, str | None]] = {}  # the quarantined: sequence and reason
        self._record = record
        self._facts = self._empty()
        self._version = record.version  # of the facts in memory; that of _record but while catching up
        self._next = 0
        self._snapshot_version: int | None = None
        self._alone = False  # whether the turn that is taken keeps other processes out

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
        """A new store without facts in a folder that is empty or not there yet.

        dim, embedding_model, dtype, tokenizer, hash_key: as for `FactStore`. Raises FileExistsError where there is
        something else in the folder, ImportError without the extra `store`.
        """
        lance_record.lance_module()
        folder = Path(path)
        facts = FactStore(dim, embedding_model=embedding_model, dtype=dtype, tokenizer=tokenizer, hash_key=hash_key)
        about = {
            "dim": facts.dim,
            "dtype": facts.dtype.name,
            "embedding_model": embedding_model,
            "tokenizer": facts.tokenizer_name,
            "hash_key": facts.key_fingerprint,
            "unicode": unicodedata.unidata_version,
        }
        check_new_folder(folder)
        with turn(folder):
            check_new_folder(folder)
            record = Record.create(folder / RECORD, about)
        return cls(folder, record, tokenizer, hash_key)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        embedding_model: str | None = None,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        verify: bool = False,
    ) -> DurableStore:
        """The newest version of a store.

        embedding_model: EmbeddingModelMismatch unless it is the store's; not compared for None. tokenizer, hash_key:
        those the store was made with, ValueError for others. verify: whether to check every block of the snapshot
        before returning rather than in the background.

        Facts are mapped from the snapshot where it fits the record, and what was committed since is read; else all
        are read from the record, with a line on standard error where that takes long, and a snapshot is written. Facts
        that are past their time are taken out. Raises FileNotFoundError where there is no durable store, ValueError
        for a damaged one or one of a later format, ImportError without the extra `store`.
        """
        folder = Path(path)
        if not is_durable(folder):
            what = f"expected {RECORD}"
            if (folder / "manifest.json").is_file():
                what += f"; this is a folder of FactStore.save: `cdr store create {folder} -o NEW` makes it durable"
            raise FileNotFoundError(f"{folder}: no durable store here ({what})")
        record = _opened(folder)
        about = record.about
        if embedding_model is not None and embedding_model != about["embedding_model"]:
            raise EmbeddingModelMismatch(f"{folder}", about["embedding_model"], embedding_model)
        store = cls(folder, record, tokenizer, hash_key)
        for name, own in (("tokenizer", store._facts.tokenizer_name), ("hash_key", store._facts.key_fingerprint)):
            if about[name] != own:
                what = "tokenizer" if name == "tokenizer" else "a key of fingerprint"
                raise ValueError(
                    f"{folder}: the texts were hashed with {what} {about[name]!r}, got {own!r}: pass {name}="
                )
        with store._lock:  # the check of the snapshot that this starts waits with putting anything right
            store._fill()
        if verify:
            store.verify()
        return store

    @classmethod
    def from_facts(
        cls, facts: FactStore, path: str | os.PathLike[str], *, advance: Advance | None = None
    ) -> DurableStore:
        """A new durable store with the facts of a store in memory, in their order and with their sequence numbers.

        Whole or not at all. advance: told of facts as they are done. Raises what ``create`` raises, ValueError for
        strings with lone surrogates.
        """
        view = facts.view()
        _check_names(view.attribute_names)
        hasher: dict[str, Any] = {"tokenizer": facts.tokenizer, "hash_key": facts.hash_key}
        about: dict[str, Any] = {"embedding_model": facts.embedding_model, "dtype": facts.dtype.name, **hasher}
        with _building(path) as draft, cls.create(draft, facts.dim, **about) as store:
            rows = np.flatnonzero(view.alive)
            for start in range(0, len(rows), _BATCH):
                part = rows[start : start + _BATCH]
                store._import(_of_view(view, part, store._facts), view.sequence[part])
                if advance is not None:
                    advance(len(part))
            store._persist_next(facts.next_sequence)
        return cls.open(path, **hasher)

    def export(self, file: str | os.PathLike[str]) -> int:
        """Write all facts, quarantined ones included, to one safetensors file; returns how many.

        The file is replaced whole or not at all; `docs/store.md` has its format. Takes memory for all facts.
        """
        with self._lock:
            self._check_open()
            record, table = self._with_newest(self._record, lambda record: (record, record.read().sort_by("sequence")))
            following = max(self._next, int(table["sequence"][-1].as_py()) + 1 if table.num_rows else 0)
            exchange.write(Path(file), table, record.about, record.attributes, following)
        return int(table.num_rows)

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
        """A new durable store of a file that ``export`` wrote: the same facts, numbers, times and quarantine.

        Whole or not at all. tokenizer, hash_key: of the new store, which need not be those of the old one. Raises what
        ``create`` raises, FileNotFoundError and ValueError for a file that is missing, damaged or of another kind.
        """
        found = exchange.Exchanged(Path(file))
        model, dtype = found.about["embedding_model"], found.about["dtype"]
        with (
            _building(path) as draft,
            cls.create(
                draft, found.dim, embedding_model=model, dtype=dtype, tokenizer=tokenizer, hash_key=hash_key
            ) as store,
        ):
            last = -1
            for batch in found.batches():
                sequence = np.array(batch["sequence"], np.int64)
                if sequence[0] <= last or (np.diff(sequence) <= 0).any():
                    raise ValueError(f"{file}: sequence: expected ascending numbers")
                last = int(sequence[-1])
                checked = store._facts.check(
                    batch["id"],
                    batch["text"],
                    batch["embedding"],
                    batch["importance"],
                    batch["source"],
                    batch["position"],
                    batch["attributes"],
                )
                expiries = {_EXPIRES: (int, batch["expires_at"])}
                checked = checked._replace(attributes={**checked.attributes, **expiries})
                held = [
                    None if status == LIVE else (reason or "")
                    for status, reason in zip(batch["status"], batch["reason"], strict=True)
                ]
                store._import(checked, sequence, held, batch["added_at"])
                if advance is not None:
                    advance(len(sequence))
            store._persist_next(found.next_sequence)
        return cls.open(path, tokenizer=tokenizer, hash_key=hash_key)

    def _import(
        self,
        found: Checked,
        sequence: Int64,
        held: Sequence[str | None] | None = None,
        added_at: Sequence[int] | None = None,
    ) -> None:
        """Put facts of another store at the end of a draft, into the record alone."""
        _check_text(found)
        kinds = {name: kind for name, (kind, _) in found.attributes.items() if name != _EXPIRES}
        record = self._record.add_attributes(kinds)
        nothing = [None] * len(found.ids) if held is None else held
        self._record = record.commit(_table(record, found, sequence, nothing, added_at))

    def _persist_next(self, following: int) -> None:
        self._record.check_unique()
        self._record.persist_next(following)

    # What there is

    @property
    def facts(self) -> FactStore:
        """The live store: take it to a Retriever, do not change it."""
        return self._facts

    @property
    def version(self) -> int:
        """The version of the record that ``facts`` is equal to."""
        return self._version

    @property
    def embedding_model(self) -> str:
        """The model that made the embeddings."""
        return self._facts.embedding_model

    @property
    def dim(self) -> int:
        """D."""
        return self._facts.dim

    def __len__(self) -> int:
        return len(self._facts)

    def __contains__(self, fact_id: object) -> bool:
        return fact_id in self._facts

    def __repr__(self) -> str:
        return f"DurableStore({str(self.path)!r}, version {self.version}, {self._facts!r})"

    def __enter__(self) -> DurableStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs in the background. ``facts`` can still be ranked; changes raise ValueError."""
        self._closed.set()
        if self._checking is not None and self._checking is not threading.current_thread():
            self._checking.join()

    def quarantined(self) -> dict[str, str | None]:
        """Ids of the quarantined facts in the order of their sequence, with the reasons."""
        with self._lock:
            return {i: reason for i, (_, reason) in sorted(self._held.items(), key=lambda item: item[1][0])}

    def versions(self) -> list[tuple[int, float]]:
        """(version, seconds since 1970) of every version that is kept, oldest first."""
        return self._with_newest(self._record.newest(), Record.versions)

    def stats(self) -> dict[str, Any]:
        """Counts, sizes in bytes, versions and settings, ready for JSON.

        snapshot_version: that of the snapshot in the folder, None without one. snapshot: "none", "checking", "checked"
        or what was wrong with the one that was opened.
        """
        with self._lock:
            checking = self._checking is not None and self._checking.is_alive()
            checked = "none" if self._checking is None else (self._damage or "checked")
            return {
                "path": str(self.path),
                "facts": len(self._facts),
                "quarantined": len(self._held),
                "version": self.version,
                "next_sequence": self._next,
                "dim": self.dim,
                "dtype": self._facts.dtype.name,
                "embedding_model": self.embedding_model,
                "attributes": {name: kind.__name__ for name, kind in sorted(self._record.attributes.items())},
                **self._record.stats(),
                "snapshot_version": self._snapshot_version,
                "snapshot": "checking" if checking else checked,
                "snapshot_bytes": lance_record.bytes_in(self.path / SNAPSHOT),
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
        """Add facts that are not in the store yet, quarantined ones included; as `FactStore.add`.

        expires_at: [M] when a fact is taken out: a datetime with a time zone, seconds since 1970, or None for never.
        Strings must be valid Unicode (no lone surrogates), ValueError else. Returns when the facts are on the disk;
        after an error the record is as it was.
        """
        args = (ids, texts, embeddings, importance, source, position, expires_at, attributes, on_invalid)
        return self._put(*args, replace=False)

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
        """Like add, but a fact that is there is replaced whole, in the same commit, and takes a new sequence number.

        A quarantined fact is replaced too and stays quarantined.
        """
        args = (ids, texts, embeddings, importance, source, position, expires_at, attributes, on_invalid)
        return self._put(*args, replace=True)

    def _put(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Any,
        importance: Any,
        source: Sequence[str | None] | None,
        position: Sequence[int | None] | None,
        expires_at: Sequence[datetime | float | None] | None,
        attributes: Mapping[str, Sequence[Value | None]] | None,
        on_invalid: str,
        *,
        replace: bool,
    ) -> Added:
        _check_names(attributes or ())
        ids = ids if isinstance(ids, str | bytes) else list(ids)
        found = self._facts.check(ids, texts, embeddings, importance, source, position, attributes, None, on_invalid)
        expiries = _microseconds(expires_at, len(ids))
        if any(moment is not None for moment in expiries):
            by_id = dict(zip(ids, expiries, strict=True))
            columns: Attributes = {**found.attributes, _EXPIRES: (int, [by_id[i] for i in found.ids])}
            found = found._replace(attributes=columns)
        _check_text(found)

        def make(record: Record) -> tuple[Record, Added]:
            held = self._held
            there = [i for i in found.ids if i in self._facts or i in held]
            if there and not replace:
                few = ", ".join(repr(i) for i in there[:5]) + (f" and {len(there) - 5} more" if there[5:] else "")
                raise ValueError(f"ids: {few} in the store already (upsert replaces)")
            kinds = {name: kind for name, (kind, _) in found.attributes.items() if name != _EXPIRES}
            for name, kind in kinds.items():
                known = record.attributes.get(name, kind)
                if kind is not known and (kind, known) != (int, float):
                    raise TypeError(
                        f"attributes[{name!r}]: expected {known.__name__} as in the store, got {kind.__name__}"
                    )
            if not found.ids:
                return record, Added(0, found.skipped)
            record = record.add_attributes(kinds)
            sequence = np.arange(self._next, self._next + len(found.ids))
            statuses = [held.get(i) for i in found.ids]
            old_rows = self._facts.rows_of([i for i in found.ids if i in self._facts])
            old = [*self._facts.view().sequence[old_rows].tolist(), *(s[0] for s in statuses if s is not None)]
            table = _table(record, found, sequence, [None if s is None else (s[1] or "") for s in statuses])
            made = record.commit(table, np.array(old, np.int64))
            live = np.array([i for i, s in enumerate(statuses) if s is None], np.int64)
            self._held = held | {
                i: (number, its[1])
                for i, number, its in zip(found.ids, sequence.tolist(), statuses, strict=True)
                if its is not None
            }
            self._facts.apply(_subset(found, live), sequence[live], old_rows)
            self._next += len(found.ids)
            return made, Added(len(found.ids), found.skipped)

        with self._lock:
            added = self._change(make)
            if any(moment is not None and moment <= _now() for moment in expiries):
                self._expire_due()
            return added

    def remove(self, ids: Iterable[str], *, missing: str = "raise") -> int:
        """Delete facts, quarantined ones included; returns how many. Their bytes are gone after ``compact``.

        missing: "raise" is a KeyError naming ids that are not there (nothing is removed then), "ignore" passes them
        over. A quarantined id that was removed may be added again as a new fact.
        """
        if missing not in ("raise", "ignore"):
            raise ValueError(f"missing: expected 'raise' or 'ignore', got {missing!r}")
        wanted = _ids(ids)

        def make(record: Record) -> tuple[Record, int]:
            held = self._held
            self._known(wanted, lambda i: i in self._facts or i in held, missing)
            rows = self._facts.rows_of([i for i in wanted if i in self._facts])
            out_ids = set(wanted)
            out = [*self._facts.view().sequence[rows].tolist(), *(held[i][0] for i in wanted if i in held)]
            if not out:
                return record, 0
            made = record.commit(None, np.array(out, np.int64))
            self._held = {i: its for i, its in held.items() if i not in out_ids}
            self._facts.apply(None, removed=rows)
            return made, len(out)

        return self._change(make)

    def quarantine(self, ids: Iterable[str], reason: str | None = None) -> int:
        """Take facts out of every ranking until they are released; returns how many. They stay in the record.

        reason: kept beside them; a fact that is quarantined already gets the new one. Raises KeyError naming ids that
        are not there; then nothing is changed.
        """
        wanted = _ids(ids)
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"reason: expected a str or None, got {type(reason).__name__}")

        def make(record: Record) -> tuple[Record, int]:
            held = self._held
            self._known(wanted, lambda i: i in self._facts or i in held, "raise")
            if not wanted:
                return record, 0
            live = [i for i in wanted if i in self._facts]
            rows = self._facts.rows_of(live)
            given = dict(zip(live, self._facts.view().sequence[rows].tolist(), strict=True))
            given |= {i: held[i][0] for i in wanted if i in held}
            numbers = np.array(list(given.values()), np.int64)
            made = record.commit(_restated(record, numbers, QUARANTINED, reason), numbers)
            self._held = held | {i: (number, reason) for i, number in given.items()}
            self._facts.apply(None, removed=rows)
            return made, len(wanted)

        return self._change(make)

    def release(self, ids: Iterable[str]) -> int:
        """Let quarantined facts into rankings again, as the newest facts in the order given; returns how many.

        Raises KeyError naming ids that are not quarantined; then nothing is changed.
        """
        wanted = _ids(ids)

        def make(record: Record) -> tuple[Record, int]:
            held = self._held
            self._known(wanted, lambda i: i in held, "raise", "not quarantined")
            if not wanted:
                return record, 0
            out = np.array([held[i][0] for i in wanted], np.int64)
            table = _restated(record, out, LIVE, None, np.arange(self._next, self._next + len(out)))
            found, sequence = _checked(table, self._facts, record)
            made = record.commit(table, out)
            self._held = {i: its for i, its in held.items() if i not in set(wanted)}
            self._facts.apply(found, sequence)
            self._next += len(out)
            return made, len(out)

        return self._change(make)

    def expire(self, now: datetime | float | None = None) -> int:
        """Delete the facts whose time is past, quarantined ones included; returns how many.

        now: a datetime with a time zone or seconds since 1970; the present for None. They never come back, whatever a
        clock says later.
        """
        moment = _now() if now is None else _microsecond(now, "now")

        def make(record: Record) -> tuple[Record, int]:
            table = record.read(["sequence", "expires_at"], "expires_at IS NOT NULL")
            out = table["sequence"].to_numpy()[table["expires_at"].cast("int64").to_numpy() <= moment]
            if not len(out):
                return record, 0
            made = record.commit(None, out)
            gone = set(out.tolist())
            self._held = {i: its for i, its in self._held.items() if its[0] not in gone}
            view = self._facts.view()
            self._facts.apply(None, removed=np.flatnonzero(view.alive & np.isin(view.sequence, out)))
            return made, len(out)

        return self._change(make)

    def refresh(self) -> bool:
        """See what other processes have committed, and take out what is past its time; whether anything changed."""
        with self._lock:
            self._check_open()
            before = self._facts.version
            record = self._record.newest()
            changed = record is not self._record
            self._with_newest(record, self._catch_up)
            self._expire_due()
            return changed or self._facts.version != before

    # The folder

    def snapshot(self, *, codes: bool = True) -> None:
        """Write the facts of this version to the folder, where the next open maps them.

        codes: also the scan's codes, of 16,384 facts or more, which a retriever would else make again.
        """
        from cdr_kernel.retrieve import WORTH_CODES, Retriever

        folder = self.path / SNAPSHOT
        with self._lock:
            self._check_open()
            record, view, following = self._record, self._facts.view(), self._next
        snapshot.write(folder, self._facts, view, record, following)
        with self._lock:
            self._snapshot_version = record.version
        if codes and len(view) >= WORTH_CODES:
            saved = FactStore.load(folder, tokenizer=self._tokenizer, hash_key=self._hash_key)
            Retriever(saved).save()
            snapshot.seal_codes(folder)

    def compact(self, *, keep: float = 0.0) -> None:
        """Write the record in few files without what was deleted, drop old versions, and write a new snapshot.

        keep: seconds for which versions are kept. Others wait with their changes meanwhile; readers do not.
        """
        if not isinstance(keep, int | float) or isinstance(keep, bool) or not 0.0 <= keep < 1e9:
            raise ValueError(f"keep: expected seconds of at least 0, got {keep!r}")
        self.expire()

        self._change(lambda record: (record.compact(keep, self._alone), None))
        self.snapshot()
        with self._lock:
            if len(self._facts.view().alive) > len(self._facts):
                found = self._from_snapshot()
                if isinstance(found, Found):
                    found.close()
                    if found.version == self.version:
                        self._facts.adopt(found.facts)

    def verify(self) -> str | None:
        """Wait until all of the snapshot that was opened is checked; what was wrong, None for nothing.

        What was wrong has been put right from the record by then.
        """
        if self._checking is not None and self._checking is not threading.current_thread():
            self._checking.join()
        return self._damage

    # Within

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ValueError(f"{self.path}: the store was closed")

    def _change(self, make: Callable[[Record], tuple[Record, T]]) -> T:
        """What `make` makes of the newest version, in a turn of its own; again where somebody else was quicker."""
        from lance.commit import CommitConflictError

        with self._lock:
            self._check_open()
            for attempt in range(_ATTEMPTS):
                with contextlib.suppress(CommitConflictError), turn(self.path) as self._alone:
                    self._with_newest(self._record.newest(), self._catch_up)
                    record, result = make(self._record)
                    self._record, self._version = record, record.version
                    return result
                time.sleep(random.uniform(0.0, 0.01 * 2 ** min(attempt, 6)))
            raise OSError(f"{self.path}: expected a turn to write, others were quicker {_ATTEMPTS} times")

    def _with_newest(self, record: Record, use: Callable[[Record], T]) -> T:
        """Use a version; where another process has compacted it away meanwhile, the newer one."""
        for _ in range(_ATTEMPTS):
            try:
                return use(record)
            except (OSError, ValueError):
                newer = Record.open(self.path / RECORD)
                if newer.version == record.version:
                    raise
                record = newer
        return use(record)

    def _catch_up(self, record: Record) -> None:
        """Take over what was committed after the version that the facts are equal to.

        No number that was taken out ever comes back, and what is put in has a higher one than all before.
        """
        if record.version != self._version:
            view = self._facts.view()
            following = record.next_sequence()
            first = max(self._next, int(view.sequence[-1]) + 1 if view.rows else 0)
            live = record.read(["sequence"], f"status = '{LIVE}'")["sequence"].to_numpy()
            gone = np.flatnonzero(view.alive & ~np.isin(view.sequence, live))
            found = sequence = None
            if len(live) and live.max() >= first:
                table = record.read(None, f"status = '{LIVE}' AND sequence >= {first}")
                found, sequence = _checked(table, self._facts, record)
            held = _held(record)
            self._facts.apply(found, sequence, gone)
            self._held, self._next, self._version = held, following, record.version
        self._record = record

    def _fill(self) -> None:
        """The facts of the newest version, from the snapshot if it can be used."""
        found = self._from_snapshot()
        if isinstance(found, str) and self._record.newest() is not self._record:  # it may be of a newer version
            self._record = self._record.newest()
            found = self._from_snapshot()
        if isinstance(found, str):
            self._take(self._with_newest(self._record, self._rebuilt), in_place=False)
            late = len(self._facts)
        else:
            self._facts, self._next, self._version = found.facts, found.next_sequence, found.version
            self._snapshot_version = found.version
            if found.version == self._record.version:
                self._held = self._with_newest(self._record, _held)
            mapped = self._facts.view().rows
            self._checking = threading.Thread(target=self._check, args=(found,), name="cdr-snapshot", daemon=True)
            self._checking.start()
            self._with_newest(self._record, self._catch_up)
            view = self._facts.view()
            late = (view.rows - mapped) + (view.rows - len(view))
        self._expire_due()
        if late >= max(WORTH_SNAPSHOT, len(self._facts) // 8):
            with contextlib.suppress(OSError):  # a full disk or a folder that cannot be written: the next open reads on
                self.snapshot(codes=False)
                found = self._from_snapshot()
                if isinstance(found, Found):
                    found.close()
                    if found.version == self._version:
                        self._facts = found.facts

    def _from_snapshot(self) -> Found | str:
        return snapshot.load(self.path / SNAPSHOT, self._record, tokenizer=self._tokenizer, hash_key=self._hash_key)

    def _empty(self) -> FactStore:
        about = self._record.about
        return FactStore(
            self._record.dim,
            embedding_model=about["embedding_model"],
            dtype=about["dtype"],
            tokenizer=self._tokenizer,
            hash_key=self._hash_key,
        )

    def _take(self, rebuilt: _Rebuilt, *, in_place: bool) -> None:
        """Be equal to what was rebuilt."""
        if in_place:
            self._facts.adopt(rebuilt.facts)
        else:
            self._facts = rebuilt.facts
        self._record, self._version = rebuilt.record, rebuilt.record.version
        self._next, self._held = rebuilt.next_sequence, rebuilt.held

    def _rebuilt(self, record: Record) -> _Rebuilt:
        """All facts of a version of the record."""
        facts, total = self._empty(), record.count(LIVE)
        record.check_unique()
        if total >= _LONG_WORK:
            say(f"{self.path}: reading {total:,} facts from the record, its snapshot is missing or does not fit")
        with Progress("facts", total) as advance:
            for batch in record.batches(f"status = '{LIVE}'"):
                facts.apply(*_checked(batch, facts, record))
                advance(batch.num_rows)
        return _Rebuilt(facts, record.next_sequence(), _held(record), record)

    @staticmethod
    def _known(
        wanted: Sequence[str], there: Callable[[str], bool], missing: str, what: str = "not in the store"
    ) -> None:
        absent = [i for i in wanted if not there(i)]
        if absent and missing == "raise":
            few = ", ".join(repr(i) for i in absent[:5]) + (f" and {len(absent) - 5} more" if absent[5:] else "")
            raise KeyError(f"ids: {few} {what}")

    def _expire_due(self) -> None:
        """Take out what is past its time: of the record too where it can be written."""
        rows = self._due_rows()
        if not len(rows):
            return
        with contextlib.suppress(OSError):  # a folder that is read only
            self.expire()
        self._facts.apply(None, removed=self._due_rows())

    def _due_rows(self) -> Int64:
        return self._facts.view().rows_at_most(_EXPIRES, _now())

    def _check(self, found: Found) -> None:
        """Check every block of the snapshot that was mapped."""
        try:
            with contextlib.suppress(_Closed):
                self._damage = snapshot.damage(found.files, found.checksums, self._stop_when_closed)
                if self._damage is not None:
                    try:
                        self._put_right(self._damage)
                    except (OSError, ValueError) as error:
                        say(f"warning: {self.path}: the facts could not be read from the record again ({error})")
                codes = snapshot.codes_damage(self.path / SNAPSHOT, self._stop_when_closed)
                if codes is not None:
                    self._damage = self._damage or codes
                    self._drop_codes(codes)
        finally:
            found.close()

    def _stop_when_closed(self, _: int) -> None:
        if self._closed.is_set():
            raise _Closed

    def _put_right(self, damage: str) -> None:
        """Read all facts from the record in place of a damaged snapshot."""
        say(f"warning: {damage}; the facts are read from the record again")
        with self._lock:
            self._take(self._with_newest(Record.open(self.path / RECORD), self._rebuilt), in_place=True)
            self._snapshot_version = None
            with contextlib.suppress(OSError):
                self.snapshot(codes=False)

    def _drop_codes(self, damage: str) -> None:
        say(f"warning: {damage}; the codes are made again")
        with contextlib.suppress(OSError):
            snapshot.drop_codes(self.path / SNAPSHOT)
        self._facts.renumber()


class _Rebuilt(NamedTuple):
    """What was read from a version of the record."""

    facts: FactStore
    next_sequence: int
    held: dict[str, tuple[int, str | None]]
    record: Record


class _Closed(Exception):
    """The store was closed while its snapshot was checked."""


def _opened(folder: Path) -> Record:
    """The newest version of the record, past one that a power cut has torn before it was acknowledged."""
    try:
        return Record.open(folder / RECORD)
    except (ValueError, OSError):
        with turn(folder):
            aside = lance_record.set_torn_aside(folder / RECORD)
        if aside is None:
            raise
        say(
            f"warning: {folder / RECORD}: set aside {aside}, whose end is missing, for the version before it: torn "
            "before anybody was told of the commit, unless it was damaged since"
        )
        return Record.open(folder / RECORD)


def check_new_folder(folder: Path) -> None:
    """Raises FileExistsError unless a durable store may be made there: nothing yet, or an empty folder.

    What a ``create`` that was killed has left counts as nothing.
    """
    if folder.is_dir() and is_durable(folder):
        found = "a durable store"
    elif any((folder / RECORD / "_versions").glob("*.torn")):
        found = "a durable store that is damaged"
    elif folder.is_dir() and {entry.name for entry in folder.iterdir()} - {LOCK, RECORD}:
        found = "other files"
    elif folder.exists() and not folder.is_dir():
        found = "a file"
    else:
        return
    raise FileExistsError(f"{folder}: expected a new or empty folder, found {found}")


def _check_names(attributes: Iterable[str]) -> None:
    for name in attributes:
        if name in COLUMNS or "`" in str(name):
            raise ValueError(
                f"attributes: expected a name that is none of {', '.join(COLUMNS)} and has no backtick, got {name!r}"
            )


def is_durable(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a durable store."""
    return lance_record.exists(Path(path) / RECORD)


def _held(record: Record) -> dict[str, tuple[int, str | None]]:
    """The quarantined facts of a version: sequence and reason."""
    table = record.read(["id", "sequence", "reason"], f"status != '{LIVE}'")
    columns = (table[name].to_pylist() for name in ("id", "sequence", "reason"))
    return {i: (sequence, reason) for i, sequence, reason in zip(*columns, strict=True)}


def _checked(table: Any, facts: FactStore, record: Record) -> tuple[Checked, Int64]:
    """Rows of the record, a table or a batch, as the store takes them, in the order of their sequence numbers."""
    import pyarrow as pa

    table = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
    table = table.sort_by("sequence").combine_chunks()
    vectors = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["embedding"].chunks]
    names = [name for name in record.attributes if name in table.schema.names]
    found = facts.check(
        table["id"].to_pylist(),
        table["text"].to_pylist(),
        np.concatenate([np.empty(0, facts.dtype), *vectors]).reshape(-1, facts.dim),
        table["importance"].to_numpy(),
        table["source"].to_pylist(),
        table["position"].to_pylist(),
        {name: table[name].to_pylist() for name in names},
    )
    expiries = table["expires_at"].cast("int64").to_pylist()
    if any(moment is not None for moment in expiries):
        found = found._replace(attributes={**found.attributes, _EXPIRES: (int, expiries)})
    return found, table["sequence"].to_numpy()


def _table(
    record: Record,
    found: Checked,
    sequence: Int64,
    held: Sequence[str | None],
    added_at: Sequence[int] | None = None,
) -> Any:
    """Rows for the record. held: of each fact the reason it is quarantined for, None where it is not."""
    import pyarrow as pa

    schema, m = record.schema, len(found.ids)
    stamp = schema.field("added_at").type
    embedding = schema.field("embedding").type
    values = pa.array(np.ascontiguousarray(found.embeddings).reshape(-1), embedding.value_type)
    nothing: list[Any] = [None] * m
    columns: dict[str, Any] = {
        "id": found.ids,
        "sequence": sequence,
        "text": found.texts,
        "source": found.sources,
        "position": [None if position < 0 else position for position in found.positions.tolist()],
        "importance": found.importance,
        "added_at": pa.array([_now()] * m if added_at is None else added_at, pa.int64()).cast(stamp),
        "expires_at": pa.array(found.attributes.get(_EXPIRES, (int, nothing))[1], pa.int64()).cast(stamp),
        "status": [LIVE if reason is None else QUARANTINED for reason in held],
        "reason": [reason or None for reason in held],
        "embedding": pa.FixedSizeListArray.from_arrays(values, embedding.list_size),
    }
    arrays = []
    for field in schema:
        given = columns.get(field.name)
        if given is None:
            given = found.attributes.get(field.name, (None, nothing))[1]
        arrays.append(given if isinstance(given, pa.Array) else pa.array(given, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _restated(record: Record, sequence: Int64, status: str, reason: str | None, renumbered: Int64 | None = None) -> Any:
    """The rows of these sequence numbers under a status, with other numbers where they are given."""
    import pyarrow as pa

    wanted = ",".join(map(str, sequence.tolist()))
    table = record.read(None, f"sequence IN ({wanted})").sort_by("sequence")
    m = table.num_rows
    columns: dict[str, Any] = {"status": [status] * m, "reason": [reason] * m}
    if renumbered is not None:
        columns["sequence"] = renumbered[np.argsort(sequence)]
    for name, values in columns.items():
        field = record.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
    return table.sort_by("sequence")


def _of_view(view: StoreView, rows: Int64, store: FactStore) -> Checked:
    """Facts of another store, as this one takes them."""
    facts = view.facts(rows)
    names = view.attribute_names
    return store.check(
        [fact.id for fact in facts],
        [fact.text for fact in facts],
        view.take(rows),
        [fact.importance for fact in facts],
        [fact.source for fact in facts],
        [fact.position for fact in facts],
        {name: [fact.attributes.get(name) for fact in facts] for name in names},
    )


@contextlib.contextmanager
def _building(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder beside the one that is wanted, which takes its name when the block ends well and else goes."""
    folder = Path(path)
    check_new_folder(folder)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        yield draft
        check_new_folder(folder)
        shutil.rmtree(folder, ignore_errors=True)  # what a `create` that was killed has left
        draft.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _subset(found: Checked, keep: Int64) -> Checked:
    """The facts of these positions."""
    if len(keep) == len(found.ids):
        return found
    columns: Attributes = {name: (kind, [v[i] for i in keep]) for name, (kind, v) in found.attributes.items()}
    return Checked(
        [found.ids[i] for i in keep],
        [found.texts[i] for i in keep],
        found.embeddings[keep],
        found.squared_norms[keep],
        found.importance[keep],
        [found.sources[i] for i in keep],
        found.positions[keep],
        take_tokens((found.tokens,), keep),
        columns,
        None,
        found.skipped,
    )


def _check_text(found: Checked) -> None:
    """Raises ValueError for strings that no UTF-8 can hold."""
    columns = {"ids": found.ids, "texts": found.texts, "source": [s for s in found.sources if s is not None]}
    for name, (kind, values) in found.attributes.items():
        if kind is str:
            columns[f"attributes[{name!r}]"] = [str(value) for value in values if value is not None]
    for name, strings in columns.items():
        for value in strings:
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{name}: expected text without lone surrogates, got {value[:80]!r}") from None


def _ids(ids: Iterable[str]) -> list[str]:
    if isinstance(ids, str | bytes):
        raise TypeError(f"ids: expected a sequence of str, got one {type(ids).__name__}")
    wanted = list(dict.fromkeys(ids))
    for i in wanted:
        if not isinstance(i, str):
            raise TypeError(f"ids: expected str, got {type(i).__name__}")
    return wanted


def _now() -> int:
    return time.time_ns() // 1000


def _microsecond(moment: object, where: str) -> int:
    """A moment as microseconds since 1970."""
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ValueError(f"{where}: expected a time with its zone, got {moment.isoformat()} without")
        return round((moment - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))
    if isinstance(moment, bool) or not isinstance(moment, int | float | np.integer | np.floating):
        raise TypeError(f"{where}: expected a datetime, seconds since 1970 or None, got {type(moment).__name__}")
    if not 0.0 <= moment <= _LATEST:
        raise ValueError(f"{where}: expected 0 to {_LATEST} seconds since 1970, got {moment}")
    return round(moment * 10**6)


def _microseconds(moments: Sequence[datetime | float | None] | None, m: int) -> list[int | None]:
    if moments is None:
        return [None] * m
    listed = list(moments)
    if len(listed) != m:
        raise ValueError(f"expires_at: expected {m} entries (one per id), got {len(listed)}")
    return [None if each is None else _microsecond(each, f"expires_at[{i}]") for i, each in enumerate(listed)]
