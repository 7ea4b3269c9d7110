"""The facts of one tenant, whichever kind of store they are in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdr_kernel.ngram import HashKey
from cdr_kernel.store import Added, Fact, FactStore


class FolderFacts:
    """A store that `FactStore.save` wrote. What is added or removed here lasts as long as the process."""

    durable = False

    def __init__(self, path: Path, hash_key: HashKey | None = None) -> None:
        self.facts = FactStore.load(path, hash_key=hash_key)

    def add(self, ids: list[str], texts: list[str], embeddings: Any, **columns: Any) -> Added:
        """See `FactStore.add`."""
        return self.facts.add(ids, texts, embeddings, **columns)

    def upsert(self, ids: list[str], texts: list[str], embeddings: Any, **columns: Any) -> Added:
        """See `FactStore.upsert`."""
        return self.facts.upsert(ids, texts, embeddings, **columns)

    def remove(self, ids: list[str], *, missing: str = "raise") -> int:
        """See `FactStore.remove`."""
        return self.facts.remove(ids, missing=missing)

    def get(self, id: str) -> Fact:
        """See `FactStore.get`."""
        return self.facts.get([id])[0]

    def close(self) -> None:
        """Nothing to do."""


def open_facts(path: Path, hash_key: HashKey | None = None) -> FolderFacts:
    """The store in a folder. Raises what `FactStore.load` raises."""
    return FolderFacts(path, hash_key)
