"""Build a store from a file of facts.

The module works in batches, so that memory never holds a million facts twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cdr_kernel.exceptions import FileError
from cdr_kernel.files._files import FactBatch, count_facts, first_place, read_array, read_facts
from cdr_kernel.store import FactStore

Embed: TypeAlias = Callable[[list[str]], Any]

_TEXTS_AT_ONCE = 256


class FactFile:
    """A file of facts with their embeddings.

    Args:
        path: The file of facts.
        embeddings: FILE.npy or FILE.npz:KEY, [N, D], row i for fact i. Or a function from n texts to vectors, [n, D].
        start: The first row, 0-based.
        stop: The row after the last. None is the end of the file.
        name: The name of the function in messages.
        called: The name of the file in messages. The default is its path.

    Raises:
        FileError: If the file has no facts or not these rows, or if facts and embeddings do not fit together.
    """

    def __init__(
        self,
        path: Path,
        embeddings: str | Embed,
        *,
        start: int = 0,
        stop: int | None = None,
        name: str = "",
        called: str = "",
    ) -> None:
        called = called or str(path)
        next(read_facts(path, stop=1, name=called), None)  # report a file of another kind before counting its facts
        count = count_facts(path)
        if count == 0:
            raise FileError(f"{called}: expected at least one fact, found none")
        if not start < (count if stop is None else stop) <= count:
            raise FileError(f"{called}: expected the rows {start}:{'' if stop is None else stop}, found {count} facts")
        self.path, self._called = path, called
        self.start, self.stop = start, count if stop is None else stop
        self._source = embeddings if isinstance(embeddings, str) else name
        self._embed = None if isinstance(embeddings, str) else embeddings
        self._vectors = None
        if isinstance(embeddings, str):
            self._vectors = read_array(embeddings, 2)
            if len(self._vectors) != count:
                raise FileError(
                    f"{embeddings}: expected {count} rows (one per fact of {called}), got {len(self._vectors)}"
                )
            if self._vectors.shape[1] == 0:
                raise FileError(f"{embeddings}: expected a dimension of at least 1, got 0")

    def __len__(self) -> int:
        return self.stop - self.start

    def build(
        self,
        *,
        embedding_model: str,
        dtype: str = "float32",
        on_invalid: str = "raise",
        advance: Callable[[int], None] = lambda count: None,
    ) -> tuple[FactStore, list[str]]:
        """Build a store of the facts.

        Args:
            embedding_model: The name of the embedding model.
            dtype: The dtype of the store's embeddings.
            on_invalid: "raise", or "skip" to leave out facts with an invalid vector.
            advance: A progress callback. It takes the number of further facts that are done.

        Returns:
            The store, and the ids of the facts that "skip" left out.

        Raises:
            FileError: For a repeated id, for a vector that is not finite or all zeros, or if no valid vector remains.
                The message names the place in the file.
        """
        store: FactStore | None = None
        skipped: list[str] = []
        for batch in read_facts(self.path, start=self.start, stop=self.stop, name=self._called):
            rows = self._rows(batch, advance)
            if store is None:
                store = FactStore(rows.shape[1], embedding_model=embedding_model, dtype=dtype)
            skipped += self._add(store, batch, rows, on_invalid)
        if store is None or not len(store):
            raise FileError(f"{self._source}: expected a vector that is finite and not zero, found none")
        return store, skipped

    def _rows(self, batch: FactBatch, advance: Callable[[int], None]) -> Any:
        if self._vectors is not None:
            advance(len(batch))
            return self._vectors[batch.first : batch.first + len(batch)]
        assert self._embed is not None
        parts = []
        for first in range(0, len(batch), _TEXTS_AT_ONCE):
            texts = batch.texts[first : first + _TEXTS_AT_ONCE]
            parts.append(self._embed(texts))
            advance(len(texts))
        return np.concatenate(parts)

    def _add(self, store: FactStore, batch: FactBatch, rows: Any, on_invalid: str) -> tuple[str, ...]:
        seen: set[str] = set()
        for id, place in zip(batch.ids, batch.places, strict=True):
            if id in seen or id in store:
                first = first_place(self.path, id)
                raise FileError(f"{self._called}, {place}: id: expected one that is new, got {id!r} as in {first}")
            seen.add(id)
        try:
            return store.add(
                batch.ids,
                batch.texts,
                rows,
                importance=batch.importance,
                source=batch.source,
                position=batch.position,
                attributes=batch.columns(),
                on_invalid=on_invalid,
            ).skipped
        except TypeError as error:  # attribute types span the batch, so no single fact is to blame
            raise FileError(f"{self._called}, {batch.places[0]} to {batch.places[-1]}: {error}") from None
        except ValueError:
            with np.errstate(over="ignore", under="ignore"):
                cast = np.asarray(rows).astype(store.dtype)
            finite = np.isfinite(cast).all(axis=1)
            wrong = np.flatnonzero(~(finite & cast.any(axis=1)))
            if not len(wrong):
                raise
            i = int(wrong[0])
            raise FileError(
                f"{self._source}, row {batch.first + i} (fact {batch.ids[i]!r}, {batch.places[i]} of {self._called}): "
                f"expected a vector that is finite and not zero as {store.dtype.name}, got one that is "
                f"{'all zeros' if finite[i] else 'not finite'}; --on-invalid skip leaves such facts out"
            ) from None
