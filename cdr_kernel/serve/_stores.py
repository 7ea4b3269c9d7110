"""The facts of one tenant, whichever kind of store they are in: a durable one, or a folder that is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from cdr_kernel.durable import DurableStore
from cdr_kernel.durable._durable_store import is_durable
from cdr_kernel.serve._errors import invalid
from cdr_kernel.store import FactStore
from cdr_kernel.store._fact_store import Added
from cdr_kernel.text._ngram_guard import HashKey

T = TypeVar("T")


class Facts(Protocol):
    """What the operations ask of a store.

    durable: whether facts outlast the process. quarantined: ids of the facts that are, with the reasons. facts: what is
    ranked; changed by the methods alone, which may wait for the disk and for other processes.
    """

    durable: bool
    quarantined: Mapping[str, str | None]

    @property
    def facts(self) -> FactStore:
        """The facts that are ranked."""

    def add(self, ids: list[str], texts: list[str], embeddings: Any, **columns: Any) -> Added:
        """See `DurableStore.add`."""

    def upsert(self, ids: list[str], texts: list[str], embeddings: Any, **columns: Any) -> Added:
        """See `DurableStore.upsert`."""

    def remove(self, ids: list[str], *, missing: str = "raise") -> int:
        """See `DurableStore.remove`."""

    def quarantine(self, ids: list[str], reason: str | None = None) -> int:
        """See `DurableStore.quarantine`."""

    def release(self, ids: list[str]) -> int:
        """See `DurableStore.release`."""

    def refresh(self) -> bool:
        """See what other processes have changed, and take out what is past its time; whether anything changed."""

    def verify(self, progress: Callable[[int], object]) -> None:
        """Return when all that answers come from is checked. progress: called every now and then; what it raises ends
        the work. Raises DamagedFileError for damage that cannot be put right."""

    def close(self) -> None:
        """Let go of it."""


class DurableFacts:
    """A durable store, which other processes may change too. See `Facts`."""

    durable = True

    def __init__(self, path: Path, hash_key: HashKey | None = None) -> None:
        self._store = DurableStore.open(path, hash_key=hash_key)
        self.quarantined: Mapping[str, str | None] = self._store.quarantined()

    @property
    def facts(self) -> FactStore:
        """See `Facts`."""
        return self._store.facts

    def add(self, ids: list[str], texts: list[str], embeddings: Any, **columns: Any) -> Added:
        """See `Facts`."""
        return self._noted(self._store.add(ids, texts, embeddings, **columns))

    def upsert(self, ids: list[str], texts: list[str], embeddings: Any, **columns: Any) -> Added:
        """See `Facts`."""
        return self._noted(self._store.upsert(ids, texts, embeddings, **columns))

    def remove(self, ids: list[str], *, missing: str = "raise") -> int:
        """See `Facts`."""
        return self._noted(self._store.remove(ids, missing=missing))

    def quarantine(self, ids: list[str], reason: str | None = None) -> int:
        """See `Facts`."""
        return self._noted(self._store.quarantine(ids, reason))

    def release(self, ids: list[str]) -> int:
        """See `Facts`."""
        return self._noted(self._store.release(ids))

    def refresh(self) -> bool:
        """See `Facts`."""
        return self._noted(self._store.refresh())

    def verify(self, progress: Callable[[int], object]) -> None:
        """See `Facts`. A damaged snapshot is put right from the record."""
        self._store.verify(progress)
        self._store.facts.verify(progress)  # where it could not be put right

    def close(self) -> None:
        """See `Facts`."""
        self._store.close()

    def _noted(self, result: T) -> T:
        """Note here, where changes take their time, what others may then read at once."""
        self.quarantined = self._store.quarantined()
        return result


class FolderFacts:
    """A store that `FactStore.save` wrote. What is changed here lasts as long as the process. See `Facts`."""

    durable = False
    quarantined: Mapping[str, str | None] = MappingProxyType({})

    def __init__(self, path: Path, hash_key: HashKey | None = None) -> None:
        self._store = FactStore.load(path, hash_key=hash_key)

    @property
    def facts(self) -> FactStore:
        """See `Facts`."""
        return self._store

    def add(
        self, ids: list[str], texts: list[str], embeddings: Any, *, expires_at: Any = None, **columns: Any
    ) -> Added:
        """See `Facts`."""
        _for_ever(expires_at)
        return self._store.add(ids, texts, embeddings, **columns)

    def upsert(
        self, ids: list[str], texts: list[str], embeddings: Any, *, expires_at: Any = None, **columns: Any
    ) -> Added:
        """See `Facts`."""
        _for_ever(expires_at)
        return self._store.upsert(ids, texts, embeddings, **columns)

    def remove(self, ids: list[str], *, missing: str = "raise") -> int:
        """See `Facts`."""
        return self._store.remove(ids, missing=missing)

    def quarantine(self, ids: list[str], reason: str | None = None) -> int:
        """Raises `Refusal`: it would not last."""
        raise _needs_durable("ids")

    def release(self, ids: list[str]) -> int:
        """Raises `Refusal`."""
        raise _needs_durable("ids")

    def refresh(self) -> bool:
        """Nobody else changes it."""
        return False

    def verify(self, progress: Callable[[int], object]) -> None:
        """See `Facts`."""
        self._store.verify(progress)

    def close(self) -> None:
        """Nothing to do."""


def _for_ever(expires_at: Any) -> None:
    if any(moment is not None for moment in expires_at or ()):
        raise _needs_durable("facts.expires_at")


def _needs_durable(field: str) -> Exception:
    return invalid(field, "a durable store (`cdr store create`)", "one that is read from a folder", code="not_durable")


def open_facts(path: Path, hash_key: HashKey | None = None) -> Facts:
    """The store in a folder. Raises what `DurableStore.open` or `FactStore.load` raises."""
    return DurableFacts(path, hash_key) if is_durable(path) else FolderFacts(path, hash_key)
