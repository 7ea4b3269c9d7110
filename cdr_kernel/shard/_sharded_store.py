"""Facts in shards as one store: added, removed, saved and spread over more shards, with one version for all.

`ShardedRetriever` ranks them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import numpy as np

from cdr_kernel.concurrency._forks import Lock, Threads, cached_property
from cdr_kernel.shard._messages import Call, Counts, Group, Limits, Replica, ReplicaLost, Slot, Superseded, ask_all
from cdr_kernel.shard._partition import (
    CHUNK,
    Home,
    Write,
    check_by,
    check_shards,
    empty_store,
    facts_in,
    home_of,
    joined,
    keys_of,
    kinds_in,
    manifest_fields,
    manifest_of,
    numbering_in,
    open_shard,
    owners,
    parts_of,
    shard_names,
)
from cdr_kernel.shard._worker import Change, Reply, Request, Shard
from cdr_kernel.store import FactStore, _expiry
from cdr_kernel.store._attributes import Attribute, Where, chosen
from cdr_kernel.store._fact_store import Added, Fact
from cdr_kernel.store._numbering import Numbering
from cdr_kernel.text._ngram_guard import HashKey, Tokenizer
from cdr_kernel.validation._arrays import Int64
from cdr_kernel.validation._scalars import check_strings, counted, few

_ATTEMPTS = 100


class ShardsMissing(TimeoutError):
    """Shards that did not answer in time, by name."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(sorted(names))
        super().__init__(f"no answer in time from {', '.join(self.names)}")


class ThreadReplica:
    """A shard in this process, asked by the threads of a pool.

    open: gives the shard; called again by ``restart``.
    """

    def __init__(self, open: Callable[[], Shard], pool: Threads) -> None:
        self._open = open
        self._pool = pool
        self._shard = open()

    def submit(self, request: Request) -> Future[Reply]:
        """Ask the shard."""
        return self._pool.submit(self._answer, request)

    def _answer(self, request: Request) -> Reply:
        return self._shard.answer(request)

    def lost(self, error: BaseException) -> bool:
        """Whether the request may be asked again."""
        return isinstance(error, ReplicaLost)

    def restart(self) -> None:
        """Open the shard again."""
        self._shard = self._open()

    def close(self) -> None:
        """Nothing."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One version of the facts of all shards: `version` counts changes as a store does, `versions` those of shards.

    newest: the sequence number of the newest fact, -1 where there was none."""

    version: int
    facts: int
    groups: tuple[Group, ...]
    versions: tuple[int, ...]
    newest: int

    @cached_property
    def cache(self) -> dict[str, Any]:
        """What was found out about this version."""
        return {}


class ShardedStore:
    """Facts in shards. It does what a `FactStore` does, with one sequence of numbers and one version for all shards.

    `split`, `open`, `open_store` and `open_on_ray` make one. Changes take turns, and the next ranking sees them. A
    ranking reads one version. If replicas can be lost, the store remembers the changes since the last `save`, and sends
    them to replicas that missed some.
    """

    def __init__(
        self,
        start: Callable[[str], Sequence[Replica]],
        like: FactStore,
        versions: Mapping[str, int],
        *,
        by: str,
        home: Home | None = None,
        next_sequence: int = 0,
        numbering: Numbering | None = None,
        is_copy: bool = False,
        version: int = 0,
        facts: int | None = None,
        kinds: Mapping[str, type] | None = None,
        expires: bool = False,
        limits: Limits | None = None,
        pool: Threads | None = None,
    ) -> None:
        self.by = check_by(by)
        self.limits = limits or Limits()
        self.counts = Counts()
        self.home = home
        self._start = start
        self._like = like
        self._pool = pool
        self._lock = Lock()
        self._next_sequence = next_sequence
        self.numbering = numbering or Numbering.new()
        """Whose the sequence numbers are."""
        self._is_copy = is_copy  # whether numbers that are given from now on are not those of `numbering`
        self._expires = expires  # whether any fact may
        self._clock: int | None = None  # the last look at it
        self._kinds = kinds  # of further columns; None: to be asked of the shards when first needed
        groups = tuple(Group(name, start(name), v, keep=home is not None) for name, v in versions.items())
        newest = next_sequence - 1
        self._snapshot = Snapshot(version, 0, groups, tuple(group.version for group in groups), newest)
        if facts is None:
            facts = sum(self._ask("applied"))
        self._snapshot = Snapshot(version, facts, groups, self._snapshot.versions, newest)

    @classmethod
    def split(
        cls,
        store: FactStore,
        *,
        shards: int,
        by: str = "source",
        timeout: float = 600.0,
        hedge_after: float | None = None,
        max_in_flight: int = 64,
    ) -> ShardedStore:
        """Split the facts of a store into shards of this process. Do not use the store afterwards.

        Args:
            store: The store.
            shards: How many shards.
            by: "source" keeps all facts of one source in one shard. "id" spreads facts evenly.
            timeout: Seconds that a request may take.
            hedge_after: Seconds after which another replica is asked too. None never does.
            max_in_flight: The most requests that a replica works on at a time.
        """
        if not isinstance(store, FactStore):
            raise TypeError(f"store: expected a FactStore, got {type(store).__name__}")
        limits = Limits(timeout, hedge_after, max_in_flight)
        names = shard_names(check_shards(shards))
        view = store.whole()
        ready = {name: Shard(part) for name, part in parts_of([view], store, names, check_by(by))}
        pool = _threads(len(names))

        def start(name: str) -> list[Replica]:
            shard = ready.pop(name) if name in ready else Shard(store.empty())
            return [ThreadReplica(lambda: shard, pool)]

        made = cls(
            start,
            store.empty(),
            dict.fromkeys(names, 0),
            by=by,
            next_sequence=store.next_sequence,
            numbering=store.numbering,
            is_copy=store._is_copy,
            version=view.version,
            facts=len(view),
            kinds=view.attribute_types,
            expires=_expiry.EXPIRES in view._storage.attributes,
            limits=limits,
            pool=pool,
        )
        made.expire()
        return made

    @classmethod
    def open(
        cls,
        home: str | os.PathLike[str] | Home,
        *,
        replicas: int = 1,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        verify: bool = True,
        device: str | Mapping[str, str] | None = None,
        device_dtype: str | None = None,
        timeout: float = 600.0,
        hedge_after: float | None = None,
        max_in_flight: int = 64,
    ) -> ShardedStore:
        """Map the shards that `partition` or `save` wrote into this process.

        Args:
            home: The folder, or a `LanceHome`.
            replicas: Replicas of each shard.
            tokenizer: The tokenizer that the facts were added with.
            hash_key: The hash key that the facts were added with.
            verify: Whether to read all shards first and compare them with their checksums.
            device: A torch device such as "cuda" on which the shards rank, or one for each shard by name. Shards
                without one scan on the processor.
            device_dtype: The dtype of the rows on the device (see `retriever_on`).
            timeout: Seconds that a request may take.
            hedge_after: Seconds after which another replica is asked too. None never does.
            max_in_flight: The most requests that a replica works on at a time.

        Raises:
            ShardDamaged: If a shard is not as it was written.
            FileNotFoundError: If there is no partition.
            ValueError: For another tokenizer or hash key.
            KeyError: If `device` names a shard that does not exist.
        """
        home = home_of(home)
        manifest = manifest_of(home)
        device_of = devices_of(device, manifest["shards"])
        pool = _threads(len(manifest["shards"]))

        def opened(name: str) -> Shard:
            found = open_shard(home, name, tokenizer=tokenizer, hash_key=hash_key, verify=verify)
            return Shard(*found, device=device_of(name), device_dtype=device_dtype)

        def start(name: str) -> list[Replica]:
            return [ThreadReplica(lambda: opened(name), pool) for _ in range(replicas)]

        store = cls.of_manifest(
            home,
            manifest,
            start,
            tokenizer=tokenizer,
            hash_key=hash_key,
            limits=Limits(timeout, hedge_after, max_in_flight),
            pool=pool,
        )
        with contextlib.suppress(ShardsMissing):  # whoever ranks is told
            store.expire()
        return store

    @classmethod
    def of_manifest(
        cls,
        home: str | os.PathLike[str] | Home,
        manifest: Mapping[str, Any],
        start: Callable[[str], Sequence[Replica]],
        *,
        tokenizer: Tokenizer | None,
        hash_key: HashKey | None,
        limits: Limits,
        pool: Threads | None = None,
    ) -> ShardedStore:
        """A partition whose replicas `start` starts, by shard."""
        return cls(
            start,
            empty_store(manifest, tokenizer=tokenizer, hash_key=hash_key),
            manifest["shards"],
            by=manifest["by"],
            home=home_of(home),
            next_sequence=manifest["next_sequence"],
            numbering=numbering_in(manifest),
            is_copy=True,
            version=manifest["store_version"],
            facts=manifest["facts"],
            kinds=kinds_in(manifest),
            expires=bool(manifest.get("expires")),
            limits=limits,
            pool=pool,
        )

    def empty(self) -> FactStore:
        """A store in memory without facts, of the same dimension, model, dtype, tokenizer and hash key."""
        return self._like.empty()

    @property
    def dim(self) -> int:
        """D."""
        return self._like.dim

    @property
    def embedding_model(self) -> str:
        """The model of the embeddings (§2.5)."""
        return self._like.embedding_model

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the embeddings, as they are stored."""
        return self._like.dtype

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer of the texts."""
        return self._like.tokenizer_name

    @property
    def key_fingerprint(self) -> str:
        """16 hexadecimal digits that tell one `hash_key` from another."""
        return self._like.key_fingerprint

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._snapshot.version

    @property
    def newest(self) -> int:
        """As ``FactStore.newest``."""
        return self._snapshot.newest

    @property
    def shards(self) -> list[str]:
        """Names of the shards."""
        return [group.name for group in self._snapshot.groups]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The shards with their replicas."""
        return self._snapshot.groups

    def snapshot(self) -> Snapshot:
        """The version that a ranking would read now."""
        return self._snapshot

    def __len__(self) -> int:
        return self._snapshot.facts

    def __contains__(self, fact_id: object) -> bool:
        return isinstance(fact_id, str) and bool(self._find([fact_id]))

    def __repr__(self) -> str:
        held = f"{counted(len(self), 'fact')} in {counted(len(self.shards), 'shard')}"
        return f"ShardedStore({held}, dim={self.dim}, version={self.version})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the replicas."""
        for group in self._snapshot.groups:
            for slot in group.slots:
                slot.replica.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    @property
    def ids(self) -> list[str]:
        """Ids in order of their sequence."""
        parts = self._ask("ids")
        sequence = np.concatenate([numbers for numbers, _ in parts])
        ids = [id for _, some in parts for id in some]
        return [ids[i] for i in np.argsort(sequence).tolist()]

    def get(self, ids: Iterable[str]) -> list[Fact]:
        """The facts of these ids, in their order.

        Args:
            ids: The ids.

        Raises:
            KeyError: If an id is not in the store.
            TypeError: For a single str.
        """
        wanted = check_strings(ids, "ids")
        found = {fact.id: fact for part in self._ask("get", (tuple(wanted),)) for fact in part}
        missing = [i for i in wanted if i not in found]
        if missing:
            raise KeyError(f"ids: {few(missing)} not in the store")
        return [found[i] for i in wanted]

    @property
    def next_sequence(self) -> int:
        """The number that the next fact gets."""
        return self._next_sequence

    def numbers_of(self, ids: Iterable[str]) -> Int64:
        """As ``FactStore.numbers_of``. Raises ShardsMissing where a shard that may have one of the ids cannot be
        asked."""
        wanted = list(ids)
        found = self._located(wanted, "numbers_of")
        return np.array([found[id][1] if id in found else -1 for id in wanted], np.int64)

    def ids_of(self, numbers: Int64) -> list[str | None]:
        """As ``FactStore.ids_of``. Raises ShardsMissing where a shard cannot be asked."""
        found = {number: id for part in self._ask("ids_of", (numbers,)) for number, id in part.items()}
        return [found.get(number) for number in numbers.tolist()]

    def add(self, ids: Sequence[str], texts: Sequence[str], embeddings: Any, **keywords: Any) -> Added:
        """Add facts, as `FactStore.add` does. Nothing is added after an error.

        Args:
            ids: As in `FactStore.add`, and so are the others.
            texts: See there.
            embeddings: See there.
            keywords: See there.

        Raises:
            ShardsMissing: If a shard that may have one of the ids cannot be reached.
        """
        return self._put(ids, texts, embeddings, keywords, replace=False)

    def upsert(self, ids: Sequence[str], texts: Sequence[str], embeddings: Any, **keywords: Any) -> Added:
        """As ``FactStore.upsert``; a fact whose source changes may change its shard."""
        return self._put(ids, texts, embeddings, keywords, replace=True)

    def _put(
        self, ids: Sequence[str], texts: Sequence[str], embeddings: Any, keywords: dict[str, Any], *, replace: bool
    ) -> Added:
        checked = self._like.empty()
        added = checked.add(ids, texts, embeddings, **keywords)
        view = checked.view()
        names = view.ids
        with self._lock:
            present, past = self._located(names), self._located_withheld(names)
            if present and not replace:
                raise ValueError(
                    f"ids: {few([i for i in names if i in present])} in the store already (upsert replaces)"
                )
            if not names:
                return added
            sequence = view.sequence + self._next_sequence if "sequence" not in keywords else view.sequence
            if sequence[0] < self._next_sequence:
                raise ValueError(f"sequence: expected at least {self._next_sequence}, got {sequence[0]}")
            kinds = self._checked_kinds(view.attribute_types)
            rows = np.arange(len(names))
            owner = owners(keys_of(names, view.sources(rows.tolist()), self.by), self.shards)
            there = past | present
            first = sequence.copy()
            for row, id in enumerate(names):
                if id in there:
                    first[row] = there[id][1]
            changes = {}
            for i, group in enumerate(self._snapshot.groups):
                here = rows[owner == i]
                old = tuple(id for id in names if id in there and there[id][0] == group.name)
                facts = None
                if len(here):
                    numbers = {"sequence": sequence[here], "first_sequence": first[here]}
                    facts = {**_typed(facts_in(view, here), kinds), **numbers}
                if len(here) or old:
                    changes[group.name] = Change(old, facts)
            if self._is_copy:
                self.numbering, self._is_copy = self.numbering.branched(int(sequence[0])), False
            self._next_sequence = int(sequence[-1]) + 1
            self._kinds = kinds
            self._commit(changes, len(names) - len(present))
        return added

    @property
    def attribute_types(self) -> dict[str, type]:
        """Types of the further columns by name: str, int, float or bool."""
        if self._kinds is None:  # a partition that does not say
            self._kinds = {name: kind for part in self._ask("kinds") for name, kind in part.items()}
        return dict(self._kinds)

    def _checked_kinds(self, added: Mapping[str, type]) -> dict[str, type]:
        """Types of all further columns with these; TypeError where one has another type in the shards."""
        known = self.attribute_types
        for name, kind in added.items():
            if name in known:
                Attribute(known[name]).check_kind(kind, f"attributes[{name!r}]")
        return {**added, **known}

    def checked_where(self, where: Where) -> Where:
        """A filter of all facts, with a list of values for every name. Raises what ``StoreView.select`` raises of a
        mapping: KeyError for an attribute that no fact was ever added with, TypeError for a value of another type."""
        if not isinstance(where, Mapping):
            return where
        kinds, checked = {"source": str, **self.attribute_types}, {}
        for name, values in where.items():
            if not isinstance(name, str):
                raise TypeError(f"where: expected names that are str, got {type(name).__name__}")
            if name not in kinds:
                raise KeyError(f"where: expected source or one of {sorted(self.attribute_types)}, got {name!r}")
            checked[name] = chosen(values)
            Attribute(kinds[name]).equal(checked[name], 0, f"where[{name!r}]")
        return checked

    def remove(self, ids: Iterable[str], *, missing: str = "raise") -> int:
        """As ``FactStore.remove``."""
        if missing not in ("raise", "ignore"):
            raise ValueError(f"missing: expected 'raise' or 'ignore', got {missing!r}")
        wanted = list(dict.fromkeys(check_strings(ids, "ids", ordered=False)))
        with self._lock:
            present, past = self._located(wanted), self._located_withheld(wanted)
            absent = [i for i in wanted if i not in present and i not in past]
            if absent and missing == "raise":
                raise KeyError(f"ids: {few(absent)} not in the store")
            there = past | present
            changes: dict[str, Change] = {}
            for group in self._snapshot.groups:
                gone = tuple(id for id in wanted if id in there and there[id][0] == group.name)
                if gone:
                    changes[group.name] = Change(gone)
            if changes:
                self._commit(changes, -len(present))
        return len(present) + len(past)

    def expire(self, now: datetime | float | None = None) -> int:
        """Withhold the facts whose time is past; returns how many that were there until now.

        No clock deletes anything here: what is withheld is saved with the rest, and comes back where a later call finds
        that its time has not come. ``remove`` deletes it. An open does this once; call it again every so often where
        facts of a durable store expire.

        Args:
            now: A datetime with a time zone or seconds since 1970; the present for None.

        Raises:
            ShardsMissing: A shard cannot be asked.
        """
        moment = _expiry.now() if now is None else _expiry.microsecond(now, "now")
        if not self._expires:
            return 0
        with self._lock:
            due = dict(zip(self.shards, self._ask("due", (moment,)), strict=True))
            changes = {name: Change(clock=moment) for name, counts in due.items() if any(counts)}
            out, back = (int(sum(counts[i] for counts in due.values())) for i in (0, 1))
            if changes:
                self._commit(changes, back - out)
            self._clock = moment
        return out

    def compact(self) -> int:
        """As ``FactStore.compact``."""
        with self._lock:
            removed = dict(zip(self.shards, self._ask("removed"), strict=True))
            changes = {name: Change(compact=True) for name, count in removed.items() if count}
            if changes:
                self._commit(changes, 0)
        return sum(removed.values())

    def prepare(self) -> None:
        """Have all replicas make the codes of their scans now, as ``Retriever.prepare``."""
        self._told(self._snapshot.groups, "prepare")

    def save(self, home: str | os.PathLike[str] | Home | None = None) -> None:
        """Write all shards as a partition, to the folder that they were opened from or to another one.

        A reader finds the old shards or the new ones. Replicas elsewhere write their own shards, so all of them must
        see the folder. Earlier changes are then no longer remembered here.

        Args:
            home: The folder, or a `LanceHome`. None is where the shards were opened from.
        """
        with self._lock:
            place = self.home if home is None else home_of(home)
            if place is None:
                raise ValueError("home: expected a folder, the store was not opened from one")
            now = self._snapshot

            def write(to: Mapping[str, Write]) -> dict[str, Any]:
                calls = [
                    Call(g, "save", v, lambda slot, full, g=g: (to[g.name],))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                    for g, v in zip(now.groups, now.versions, strict=True)
                ]
                return dict(zip(self.shards, self._complete(calls), strict=True))

            past = sum(map(len, self._ask("withheld"))) if self._expires else 0
            fields = manifest_fields(
                self._like,
                dict(zip(self.shards, now.versions, strict=True)),
                self.by,
                facts=now.facts + past,
                version=now.version,
                next_sequence=self._next_sequence,
                numbering=self.numbering,
                kinds=self.attribute_types,
                expires=self._expires,
            )
            place.save(fields, write)
            if place == self.home:
                for group in now.groups:
                    group.trim(group.version)

    def add_shards(self, count: int = 1) -> int:
        """Add empty shards and move to them the facts that belong there.

        Rankings go on meanwhile, on the old shards until all facts have moved. A store that was opened from a folder is
        saved afterwards.

        Args:
            count: How many shards to add.

        Returns:
            How many facts moved.
        """
        with self._lock:
            count = check_shards(count)
            before = self._snapshot
            added = shard_names(count, start=1 + max(int(name.rsplit("-", 1)[1]) for name in self.shards))
            names = (*self.shards, *added)
            leaving = self._ask_each("leaving", lambda group: (group.name, names, self.by))
            groups = [Group(name, self._start(name), 0, keep=self.home is not None) for name in added]
            changes: dict[str, Change] = {}
            moved = 0
            for group in groups:
                there = [part.get(group.name, np.zeros(0, np.int64)) for part in leaving]
                numbers = np.sort(np.concatenate(there))
                moved += len(numbers)
                for start in range(0, len(numbers), CHUNK):
                    group.append(Change(facts=self._collected(numbers[start : start + CHUNK], there)))
                    self._told([group])
                if self._clock is not None:
                    group.append(Change(clock=self._clock))
                    self._told([group])
            for group, version, parts in zip(before.groups, before.versions, leaving, strict=True):
                if parts:
                    ids = self._ask_one(group, version, "names", (np.concatenate(list(parts.values())),))
                    changes[group.name] = Change(tuple(ids))
            self._commit(changes, 0, added=groups, step=0)  # the facts are the same
            if self.home is not None:
                self.save()
        return moved

    def _collected(self, numbers: Int64, there: list[Int64]) -> dict[str, Any]:
        """The facts of these sequence numbers from all shards, in order."""
        now = self._snapshot
        parts = []
        for group, version, here in zip(now.groups, now.versions, there, strict=True):
            some = np.intersect1d(here, numbers)
            if len(some):
                parts.append(self._ask_one(group, version, "take", (some,)))
        return joined(parts)

    def _commit(self, changes: Mapping[str, Change], more: int, *, added: Sequence[Group] = (), step: int = 1) -> None:
        """Decide on these changes and tell all replicas; those that do not hear of it in time are told later."""
        now = self._snapshot
        changed = [group for group in now.groups if group.name in changes]
        for group in changed:
            group.append(changes[group.name])
        groups = (*now.groups, *added)
        versions = tuple(group.version for group in groups)
        try:
            self._told(changed)
        finally:
            newest = self._next_sequence - 1
            self._snapshot = Snapshot(now.version + step, now.facts + more, groups, versions, newest)

    def _told(self, groups: Sequence[Group], method: str = "applied") -> None:
        calls = [
            Call(group, method, group.version, _no_arguments, only=slot) for group in groups for slot in group.slots
        ]
        ask_all(calls, time.monotonic() + self.limits.timeout, self.limits, self.counts)
        for group in groups:
            if not group.keep:
                group.trim(min(slot.version for slot in group.slots))

    def _find(self, ids: Sequence[str]) -> dict[str, str]:
        """The shard of each of these ids that is there."""
        return {id: name for id, (name, _) in self._located(ids).items()}

    def _located(self, ids: Sequence[str], method: str = "find") -> dict[str, tuple[str, int]]:
        """The shard of each of these ids that is there, and the sequence number that its fact was added with.

        method: of `Shard`; "find", or "numbers_of" for facts that are past their time too.
        """
        if not ids:
            return {}
        if self.by == "id":
            owner = owners(keys_of(ids, [None] * len(ids), self.by), self.shards)
            own = {
                name: tuple(ids[j] for j in np.flatnonzero(owner == i).tolist()) for i, name in enumerate(self.shards)
            }
            asked = [group for group in self._snapshot.groups if own[group.name]]
            found = self._ask_each(method, lambda group: (own[group.name],), asked)
        else:
            asked = list(self._snapshot.groups)
            found = self._ask_each(method, lambda group: (tuple(ids),))
        return {
            id: (group.name, number) for group, part in zip(asked, found, strict=True) for id, number in part.items()
        }

    def _located_withheld(self, ids: Sequence[str]) -> dict[str, tuple[str, int]]:
        """As ``_located``, of the facts that are past their time."""
        if not self._expires or not ids:
            return {}
        found = self._ask("withheld", (tuple(ids),))
        return {
            id: (name, number) for name, part in zip(self.shards, found, strict=True) for id, number in part.items()
        }

    def _ask(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return self._ask_each(method, lambda group: args)

    def _ask_each(
        self, method: str, args: Callable[[Group], tuple[Any, ...]], groups: Sequence[Group] | None = None
    ) -> list[Any]:
        """What each shard says, all of them or ShardsMissing."""
        for _ in range(_ATTEMPTS):
            now = self._snapshot
            calls = []
            for group, version in zip(now.groups, now.versions, strict=True):
                if groups is None or group in groups:
                    given = args(group)
                    calls.append(Call(group, method, version, lambda slot, full, given=given: given))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            try:
                return self._complete(calls)
            except Superseded:
                continue
        raise Superseded(f"{_ATTEMPTS} versions went by before the shards answered")

    def _ask_one(self, group: Group, version: int, method: str, args: tuple[Any, ...]) -> Any:
        return self._complete([Call(group, method, version, lambda slot, full: args)])[0]

    def _complete(self, calls: Sequence[Call]) -> list[Any]:
        missing = ask_all(calls, time.monotonic() + self.limits.timeout, self.limits, self.counts)
        if missing:
            raise ShardsMissing(call.group.name for call in missing)
        return [call.value for call in calls]


def _typed(facts: dict[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """The facts with integers as floats where the column is one of floats elsewhere."""
    for name, values in facts["attributes"].items():
        if kinds[name] is float:
            facts["attributes"][name] = [None if value is None else float(value) for value in values]
    return facts


def _no_arguments(slot: Slot, full: bool) -> tuple[Any, ...]:
    return ()


def _threads(shards: int) -> Threads:
    return Threads(max(2, min(shards, os.cpu_count() or 1)), "cdr-shard")


def devices_of(device: str | Mapping[str, str] | None, names: Iterable[str]) -> Callable[[str], str | None]:
    """What tells the device of a shard, None where it scans. Raises KeyError for a name that no shard has."""
    if not isinstance(device, Mapping):
        return lambda name: device
    if unknown := sorted(device.keys() - set(names)):
        raise KeyError(f"device: expected names of shards ({', '.join(names)}), got {', '.join(unknown)}")
    return device.get
