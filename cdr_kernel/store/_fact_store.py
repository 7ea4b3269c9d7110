"""The facts: ids, texts, importance, sources, attributes and embeddings, in memory or mapped from a folder.

A store only ever appends rows and marks rows as removed, so a ``StoreView`` taken at any moment stays as it
was while others add and remove: whoever ranks works on one consistent version without a lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.exceptions import DamagedFileError, EmbeddingModelMismatch
from cdr_kernel.store import _format
from cdr_kernel.store._attributes import Attribute, Attributes, Value, checked_attributes
from cdr_kernel.store._checksums import Files, check_rest
from cdr_kernel.store._columns import (
    CHUNK,
    EXPIRES,
    MAX_POSITION,
    NO_POSITION,
    Pieces,
    Storage,
    Strings,
    Tokens,
    marked,
    new_in,
)
from cdr_kernel.store._format import FORMAT, FORMAT_VERSION, KIND, check_store_folder
from cdr_kernel.store._numbering import Numbering
from cdr_kernel.store._view import Bool, Fact, StoreView, indexed
from cdr_kernel.text import Tokenizer, tokenize
from cdr_kernel.text._repr import html_table
from cdr_kernel.text._token_hashes import HashKey, TokenBlock, TokenHasher, TokenRows, take_tokens
from cdr_kernel.validation._arrays import (
    Float64,
    Growing,
    Int64,
    New,
    as_array,
    check_rows,
    factor,
    odd_row,
    scale_rows,
)
from cdr_kernel.validation._scalars import check_order, check_strings, counted, few
from cdr_kernel.validation._warn import warn

__all__ = [
    "DTYPES",
    "FORMAT",
    "FORMAT_VERSION",
    "Added",
    "Bool",
    "Checked",
    "EmbeddingModelMismatch",
    "Fact",
    "FactStore",
    "StoreView",
    "check_store_folder",
    "view_of",
]

DTYPES = ("float16", "float32", "float64")
_STEP = 60 * 10**6  # microseconds by which a clock may go back without a fact coming back that it had withheld

_AT_ONCE = 64 << 20  # bytes up to which a load checks what it maps; more is checked as it is read, and behind it


class Added(NamedTuple):
    """What an add did: how many facts went in, and the ids that on_invalid="skip" left out."""

    added: int
    skipped: tuple[str, ...]


class Checked(NamedTuple):
    """Facts that passed the door of a store, as it keeps them: M of them, and the ids that were skipped.

    sequence: their numbers, None for the store's next ones. first_sequence: the numbers that they were added with, None
    where those are `sequence`.
    """

    ids: list[str]
    texts: list[str]
    embeddings: npt.NDArray[Any]
    squared_norms: Float64
    importance: Float64
    sources: list[str | None]
    positions: Int64
    tokens: TokenBlock
    attributes: Attributes
    sequence: Int64 | None
    skipped: tuple[str, ...]
    first_sequence: Int64 | None = None

    def take(self, keep: Int64) -> Checked:
        """The facts of these positions."""
        if len(keep) == len(self.ids):
            return self
        return Checked(
            [self.ids[i] for i in keep],
            [self.texts[i] for i in keep],
            self.embeddings[keep],
            self.squared_norms[keep],
            self.importance[keep],
            [self.sources[i] for i in keep],
            self.positions[keep],
            take_tokens((self.tokens,), keep),
            {name: (kind, [values[i] for i in keep]) for name, (kind, values) in self.attributes.items()},
            None if self.sequence is None else self.sequence[keep],
            self.skipped,
            None if self.first_sequence is None else self.first_sequence[keep],
        )


class FactStore:
    """Facts (chunks of text) with their embeddings, in memory or mapped from a folder.

    Vectors are cast to `dtype` once, when they are added. They are not normalised. A row whose largest magnitude lies
    outside 2^±200, which only float64 can hold, is stored times an exact power of two, so its direction does not
    change.

    Each text is tokenised once, when it is added, and its token hashes are kept for the n-gram guard (§5): 7 bytes a
    token.

    All methods are thread-safe. Changes take turns; `view` never waits.

    Args:
        dim: The dimension D of the embeddings, at least 1.
        embedding_model: The name of the model that made the embeddings. Sessions must name the same one (§2.5).
        dtype: "float16", "float32" or "float64".
        tokenizer: A callable str -> list[str] with a name. None is `tokenize`. Sessions over the store need a guard
            with the same tokenizer and hash key.
        hash_key: Bytes or an int, for stores whose authors may be hostile (see `TokenHasher`).
        scratch: A folder, for more rows than memory holds. Added rows then lie in mapped files there, which have no
            name and go with the store. A forked child must not add to such a store. None keeps rows in memory.
    """

    def __init__(
        self,
        dim: int,
        *,
        embedding_model: str,
        dtype: str = "float32",
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer):
            raise TypeError(f"dim: expected an integer, got {type(dim).__name__}")
        if dim < 1:
            raise ValueError(f"dim: expected at least 1, got {dim}")
        if not isinstance(embedding_model, str):
            raise TypeError(f"embedding_model: expected a str, got {type(embedding_model).__name__}")
        if not embedding_model:
            raise ValueError("embedding_model: expected a name, got an empty string")
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = str(dtype)
        if name not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        self.dim = int(dim)
        self.embedding_model = embedding_model
        self.dtype = np.dtype(name)
        self.path: Path | None = None
        """The folder that the store was loaded from."""
        if scratch is not None and not Path(scratch).is_dir():
            raise FileNotFoundError(f"scratch: expected a folder, found none at {scratch}")
        self._new: New = np.empty if scratch is None else new_in(Path(scratch))
        self.about: Mapping[str, Any] = {}
        """What its manifest says beside the facts, and `data`, the subfolder they are in."""
        self.held: Mapping[str, tuple[int, str | None, int]] = {}
        """Facts that a durable store has in quarantine, which are not here: their sequence numbers, the reasons, and
        the numbers that they were added with."""
        self._withheld: dict[str, int] = {}  # rows of facts that are past their time
        self.numbering = Numbering.new()
        """Whose the sequence numbers are."""
        self._is_copy = False  # whether numbers that are given from now on are not those of `numbering`
        self._hasher = TokenHasher(tokenizer, hash_key)
        self._lock = Lock()
        self._row_of: dict[str, int] | None = {}  # None: to be made from the view when needed
        self._next_sequence = 0
        storage = Storage(
            mapped=None,
            tail=Pieces(self.dim, self.dtype, self._new),
            squared_norms=Growing(np.zeros(0)),
            importance=Growing(np.zeros(0)),
            sequence=Growing(np.zeros(0, np.int64)),
            first_sequence=Growing(np.zeros(0, np.int64)),
            positions=Growing(np.zeros(0, np.int64)),
            ids=Strings(),
            texts=Strings(),
            tokens=Tokens(),
            sources=Strings(),
            attributes={},
        )
        self._view = self._view_of(storage, np.zeros(0, np.bool_), version=0, layout=0)

    def _view_of(self, storage: Storage, alive: Bool, version: int, layout: int) -> StoreView:
        alive.flags.writeable = False
        n = len(alive)
        return StoreView(
            blocks=storage.blocks(n),
            squared_norms=storage.squared_norms.front(n),
            importance=storage.importance.front(n),
            alive=alive,
            sequence=storage.sequence.front(n),
            first_sequence=storage.first_sequence.front(n),
            tokens=TokenRows(storage.tokens.blocks(n), storage.texts, self.tokenizer_name, self.key_fingerprint),
            version=version,
            layout=layout,
            embedding_model=self.embedding_model,
            newest=self._next_sequence - 1,
            _storage=storage,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the texts, None for the default."""
        return None if self._hasher.tokenizer is tokenize else self._hasher.tokenizer

    @property
    def hash_key(self) -> HashKey | None:
        """The key that the store was made with."""
        return self._hasher.hash_key

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer of the texts, "nfkc-casefold-1" for the default."""
        return self._hasher.tokenizer_name

    @property
    def key_fingerprint(self) -> str:
        """16 hexadecimal digits that tell one `hash_key` from another."""
        return self._hasher.key_fingerprint

    def check_hasher(self, saved: Mapping[str, Any], where: str) -> None:
        """Raises ValueError unless `saved`, what was written beside texts, names this tokenizer and this key."""
        for name, own, what in (
            ("tokenizer", self.tokenizer_name, "tokenizer"),
            ("hash_key", self.key_fingerprint, "a key of fingerprint"),
        ):
            if saved[name] != own:
                raise ValueError(
                    f"{where}: the texts were hashed with {what} {saved[name]!r}, got {own!r}: pass {name}="
                )

    def view(self) -> StoreView:
        """The store as it is now, as an immutable snapshot. Later changes do not affect it.

        Raises:
            DamagedFileError: If a file that the store is mapped from was cut short.
        """
        view = self._view
        view._storage.mapped_files.check()
        return view

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._view.version

    @property
    def newest(self) -> int:
        """The largest sequence number given so far, -1 for none; adding and replacing facts raises it."""
        return self._view.newest

    def __len__(self) -> int:
        return len(self._view)

    def __contains__(self, fact_id: object) -> bool:
        with self._lock:
            return fact_id in self._rows()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a FactStore cannot be copied or pickled: save it and load it again, or use view(), which never changes"
        )

    def __repr__(self) -> str:
        shape = f"dim={self.dim}, dtype={self.dtype.name}"
        return f"FactStore({counted(len(self), 'fact')}, {shape}, model={self.embedding_model!r})"

    def _repr_html_(self) -> str:
        rows = {"facts": len(self), "dimension": self.dim, "dtype": self.dtype.name, "model": self.embedding_model}
        return html_table("FactStore", {**rows, "folder": self.path or "in memory"})

    def empty(self) -> FactStore:
        """A store without facts, of the same dimension, model, dtype, tokenizer and hash key."""
        return FactStore(
            self.dim,
            embedding_model=self.embedding_model,
            dtype=self.dtype.name,
            tokenizer=self.tokenizer,
            hash_key=self.hash_key,
        )

    @property
    def next_sequence(self) -> int:
        """The number that the next fact gets."""
        return self._next_sequence

    def count_from(self, following: int) -> None:
        """Give no sequence number below this one from now on."""
        with self._lock:
            self._next_sequence = max(self._next_sequence, following)

    @property
    def verified(self) -> bool:
        """Whether all that is mapped from the disk was checked and is as it was written; True for a store in memory."""
        files = self._view._storage.files
        return files is None or files.verified

    def verify(self, progress: Callable[[int], object] = lambda count: None, *, parallel: bool = True) -> None:
        """Check now what is mapped from the disk and was not checked yet, rather than when it is read.

        Args:
            progress: Told of the bytes that were checked since the last call; what it raises ends the work.
            parallel: Whether by all threads; else by this one, which leaves the others to whoever ranks.

        Raises:
            DamagedFileError: A file is not as it was written. It names the file and the block.
            OSError: The disk cannot give a block.
        """
        files = self._view._storage.files
        if files is not None:
            files.check(progress, parallel=parallel)

    @property
    def ids(self) -> list[str]:
        """Ids in order of their sequence."""
        return self.view().ids

    def get(self, ids: Iterable[str]) -> list[Fact]:
        """The facts of these ids, in their order.

        Args:
            ids: The ids.

        Raises:
            KeyError: If an id is not in the store.
            TypeError: For a single str.
        """
        wanted = check_strings(ids, "ids")
        with self._lock:
            rows = self._rows()
            missing = [i for i in wanted if i not in rows]
            if missing:
                raise KeyError(f"ids: {few(missing)} not in the store")
            return self.view().facts([rows[i] for i in wanted])

    def rows_of(self, ids: Iterable[str]) -> Int64:
        """The rows of these ids in the newest view. KeyError for one that is not there."""
        with self._lock:
            known = self._rows()
            return np.array([known[i] for i in ids], np.int64)

    def numbers_of(self, ids: Iterable[str]) -> Int64:
        """The numbers by which session tokens name these facts.

        A fact's number is the sequence number that it was added with. An upsert and a quarantine keep it, and a fact
        that is past its time has it still. A fact that was removed and added again has another one.

        Args:
            ids: M ids of facts.

        Returns:
            int64 [M]; -1 for an id that is not in the store.
        """
        with self._lock:
            known, first, held = self._rows(), self._view.first_sequence, self.held
            past, numbers = self._withheld, []
            for i in ids:
                row = known[i] if i in known else past.get(i)
                numbers.append(first[row] if row is not None else held[i][2] if i in held else -1)
            return np.array(numbers, np.int64)

    def ids_of(self, numbers: Int64) -> list[str | None]:
        """The facts of these numbers (see ``numbers_of``).

        Args:
            numbers: int64 [M].

        Returns:
            M ids; None for a fact that was removed, and for a number that no fact has.
        """
        with self._lock:
            view, held = self.whole(), {first: id for id, (_, _, first) in self.held.items()}
        rows = view.rows_numbered(numbers)
        ids = iter(view.ids_at(rows[rows >= 0]))
        return [next(ids) if row >= 0 else held.get(number) for row, number in zip(rows, numbers.tolist(), strict=True)]

    def index_ids(self) -> None:
        """Index the ids now, which else the first call that looks one up does."""
        with self._lock:
            self._rows()

    def _rows(self) -> dict[str, int]:
        if self._row_of is None:
            self._row_of = indexed(self.view())
        return self._row_of

    def add(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Any,
        *,
        importance: Any = None,
        source: Sequence[str | None] | None = None,
        position: Sequence[int | None] | None = None,
        attributes: Mapping[str, Sequence[Value | None]] | None = None,
        sequence: Sequence[int] | None = None,
        on_invalid: str = "raise",
    ) -> Added:
        """Add facts that are not in the store yet. After an error the store is as it was.

        Args:
            ids: [M] strings, not empty.
            texts: [M] strings, which may be blank. A text of fewer than six tokens has no n-gram, so the guard (§5)
                never acts on it.
            embeddings: [M, D] of any float dtype.
            importance: [M], finite and >= 0. Default 1.
            source: [M] names of documents, or None.
            position: [M] places in the source, 0 to 2^63 - 1, or None.
            attributes: Further columns by name, each [M] of str, int, float or bool (one type for each column), or
                None. `where=` of a ranking filters by them.
            sequence: [M] ascending numbers above all that the store gave, for facts that were numbered elsewhere.
            on_invalid: "raise" refuses vectors that are not finite or all zeros. "skip" leaves out their facts.

        Returns:
            How many facts were added, and the ids that were skipped.

        Raises:
            ValueError: For an id that is in the store or comes twice, and for wrong lengths, dimensions and values.
            TypeError: For values of a wrong type.
        """
        found = self.check(ids, texts, embeddings, importance, source, position, attributes, sequence, on_invalid)
        return self._put(found, replace=False)

    def upsert(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Any,
        *,
        importance: Any = None,
        source: Sequence[str | None] | None = None,
        position: Sequence[int | None] | None = None,
        attributes: Mapping[str, Sequence[Value | None]] | None = None,
        sequence: Sequence[int] | None = None,
        on_invalid: str = "raise",
    ) -> Added:
        """Add facts, and replace those that are in the store. A replaced fact gets a new sequence number (reading R26).

        Args:
            ids: As in `add`, and so are the others.
            texts: See `add`.
            embeddings: See `add`.
            importance: See `add`.
            source: See `add`.
            position: See `add`.
            attributes: See `add`.
            sequence: See `add`.
            on_invalid: See `add`.
        """
        found = self.check(ids, texts, embeddings, importance, source, position, attributes, sequence, on_invalid)
        return self._put(found, replace=True)

    def check(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Any,
        importance: Any = None,
        source: Sequence[str | None] | None = None,
        position: Sequence[int | None] | None = None,
        attributes: Mapping[str, Sequence[Value | None]] | None = None,
        sequence: Sequence[int] | None = None,
        on_invalid: str = "raise",
    ) -> Checked:
        """What ``add`` would put in, checked and as the store keeps it; the store is not changed.

        Raises what ``add`` raises, but for ids that are in the store.
        """
        if on_invalid not in ("raise", "skip"):
            raise ValueError(f"on_invalid: expected 'raise' or 'skip', got {on_invalid!r}")
        names = check_strings(ids, "ids")
        words = check_strings(texts, "texts")
        m = len(names)
        if "" in names:
            raise ValueError(f"ids: expected names, got an empty string at {names.index('')}")
        _same_length(words, m, "texts")
        sources = [None] * m if source is None else check_strings(source, "source", optional=True)
        _same_length(sources, m, "source")
        positions = _positions(position, m)
        columns = checked_attributes(attributes, m)
        numbers = None if sequence is None else _numbers(sequence, m)
        weights = factor(importance, m, "importance")
        if weights is None:
            weights = np.ones(m)
        if len(set(names)) != m:
            seen: set[str] = set()
            twice = [i for i in names if i in seen or seen.add(i)]  # type: ignore[func-returns-value]  # add() is None
            raise ValueError(f"ids: {few(twice)} more than once in one call")
        rows, norms, flags = self._cast(embeddings, names)
        bad = np.flatnonzero(flags)
        if len(bad) and on_invalid == "raise":
            what = "not finite" if flags[bad[0]] == 1 else "all zeros"
            raise ValueError(
                f"embeddings: {what} as {self.dtype.name}: {few([names[i] for i in bad])} "
                "(on_invalid='skip' leaves such facts out)"
            )
        keep = np.flatnonzero(flags == 0)
        skipped = tuple(names[i] for i in bad)
        if len(bad):
            names, words = [names[i] for i in keep], [words[i] for i in keep]
            sources, positions, weights = [sources[i] for i in keep], positions[keep], weights[keep]
            rows, norms = rows[keep], norms[keep]
            columns = {name: (kind, [values[i] for i in keep]) for name, (kind, values) in columns.items()}
            numbers = None if numbers is None else numbers[keep]
        tokens = self._hasher.hashed(words)
        return Checked(names, words, rows, norms, weights, sources, positions, tokens, columns, numbers, skipped)

    def _put(self, found: Checked, *, replace: bool) -> Added:
        with self._lock:
            known = self._rows()
            old = [i for i in found.ids if i in known]
            if old and not replace:
                raise ValueError(f"ids: {few(old)} in the store already (upsert replaces)")
            if not found.ids:
                return Added(0, found.skipped)
            if found.sequence is not None and found.sequence[0] < self._next_sequence:
                raise ValueError(f"sequence: expected at least {self._next_sequence}, got {found.sequence[0]}")
            sequence, rows = found.sequence, [known[i] for i in old]
            if sequence is None:
                sequence = np.arange(self._next_sequence, self._next_sequence + len(found.ids))
            if (old or self._withheld) and found.first_sequence is None:
                found = found._replace(first_sequence=self._first_numbers(found.ids, sequence))
            if self._is_copy:
                self.numbering, self._is_copy = self.numbering.branched(int(sequence[0])), False
            self.apply(found, sequence, rows)
        return Added(len(found.ids), found.skipped)

    def _first_numbers(self, ids: Sequence[str], sequence: Int64) -> Int64:
        """The numbers that facts were added with; those in `sequence` for facts that are not in the store."""
        numbers = self.numbers_of(ids)
        return np.where(numbers < 0, sequence, numbers)

    def check_kinds(self, columns: Attributes) -> None:
        """Raises TypeError where a column of these has another type than the store's of that name."""
        for name, (kind, _) in columns.items():
            column = self._view._storage.attributes.get(name)
            if column is not None:
                column.check_kind(kind, f"attributes[{name!r}]")

    @property
    def withheld(self) -> Mapping[str, int]:
        """Rows of the facts that are past their time, by id: in no view, and still there."""
        return self._withheld

    def whole(self) -> StoreView:
        """The store as it is now with the facts that are past their time: what is to be saved, and not ranked."""
        with self._lock:
            view = self.view()
            if not self._withheld:
                return view
            alive = view.alive.copy()
            alive[list(self._withheld.values())] = True
            return self._view_of(view._storage, alive, view.version, view.layout)

    def look(self, moment: int) -> tuple[int, int]:
        """Withhold what expires at this moment or before, and let back in what was withheld by a clock that was ahead.

        Args:
            moment: Microseconds since 1970, as a clock has it. A clock that went back by less than a minute lets
                nothing back in.

        Returns:
            How many facts were withheld, and how many came back.
        """
        with self._lock:
            due, back = self.due(moment)
            if len(due):
                ids = self._view.ids_at(due)
                self.apply(None, removed=due)
                self._withheld.update(zip(ids, due.tolist(), strict=True))
            if len(back):
                self._let_back(back)
            return len(due), len(back)

    def due(self, moment: int) -> tuple[Int64, Int64]:
        """The rows that ``look`` would withhold, and those it would let back in."""
        with self._lock:
            view = self.view()
            column = view._storage.attributes.get(EXPIRES)
            if column is None:
                return np.zeros(0, np.int64), np.zeros(0, np.int64)
            rows = np.fromiter(self._withheld.values(), np.int64, len(self._withheld))
            return view.rows_at_most(EXPIRES, moment), rows[column.numbers(view.rows)[rows] > moment + _STEP]

    def _let_back(self, rows: Int64) -> None:
        view, known = self._view, self._row_of
        ids = view.ids_at(rows)
        alive = view.alive.copy()
        alive[rows] = True
        self._row_of = None
        # Whoever keeps something by row has left these out for good, so it is made anew.
        self._view = self._view_of(view._storage, alive, view.version + 1, view.layout + 1)
        for id in ids:
            del self._withheld[id]
        if known is not None:
            known.update(zip(ids, rows.tolist(), strict=True))
            self._row_of = known

    def apply(self, found: Checked | None, sequence: Int64 | None = None, removed: Iterable[int] = ()) -> None:
        """Take out the facts in the rows `removed` and put in what ``check`` gave, in one version.

        sequence: [M] ascending, none below those given so far; the next ones for None. Ids of `found` that are in the
        store must be those of removed rows. For callers that keep a store equal to another record.
        """
        with self._lock:
            view, storage = self._view, self._view._storage
            n, old = view.rows, [int(row) for row in removed]
            alive = view.alive
            if found is not None and found.ids:
                if sequence is None:
                    sequence = np.arange(self._next_sequence, self._next_sequence + len(found.ids))
                self.check_kinds(found.attributes)
                self._write_rows(storage, n, found, sequence)
                alive = np.concatenate([alive, np.ones(len(found.ids), np.bool_)])
            elif old:
                alive = alive.copy()
            else:
                return
            known, self._row_of = self._row_of, None
            alive[old] = False
            if self._withheld:
                for row in old:
                    if self._withheld.get(gone := storage.ids[row]) == row:
                        del self._withheld[gone]
                for id in () if found is None else found.ids:
                    self._withheld.pop(id, None)
            if sequence is not None and len(sequence):
                self._next_sequence = max(self._next_sequence, int(sequence[-1]) + 1)
            self._view = self._view_of(storage, alive, view.version + 1, view.layout)
            if known is not None:
                for row in old:
                    known.pop(storage.ids[row], None)
                if found is not None:
                    known.update(zip(found.ids, range(n, n + len(found.ids)), strict=True))
                self._row_of = known

    @staticmethod
    def _write_rows(storage: Storage, n: int, found: Checked, sequence: Int64) -> None:
        """Put facts at row n and on, where no view looks yet."""
        storage.tail.write(n - storage.mapped_rows, found.embeddings)
        storage.squared_norms.write(n, found.squared_norms)
        storage.importance.write(n, found.importance)
        storage.positions.write(n, found.positions)
        storage.sequence.write(n, sequence)
        storage.first_sequence.write(n, sequence if found.first_sequence is None else found.first_sequence)
        storage.ids.write(n, found.ids)
        storage.texts.write(n, found.texts)
        storage.tokens.write(n, found.tokens)
        storage.sources.write(n, map(marked, found.sources))
        for name, (kind, _) in found.attributes.items():
            if name not in storage.attributes:
                storage.attributes[name] = Attribute.missing(kind, n)
        nothing: list[Value | None] = [None] * len(found.ids)
        for name, column in storage.attributes.items():
            column.write(n, found.attributes[name][1] if name in found.attributes else nothing)

    def _cast(self, embeddings: Any, names: Sequence[str]) -> tuple[npt.NDArray[Any], Float64, npt.NDArray[np.uint8]]:
        m = len(names)
        try:
            a = as_array(embeddings, 2, "embeddings")
        except (TypeError, ValueError):
            wrong = odd_row(embeddings, self.dim)
            if wrong is None or wrong.row >= m:
                raise
            raise wrong.error(
                f"embeddings: expected a vector of {self.dim} numbers for fact {names[wrong.row]!r} (position "
                f"{wrong.row}), got {wrong.got}"
            ) from None
        if len(a) != m:
            raise ValueError(f"embeddings: expected {m} rows (one per id), got {len(a)}")
        if m and a.shape[1] != self.dim:
            raise ValueError(f"embeddings: expected dimension {self.dim}, got {a.shape[1]}")
        with np.errstate(over="ignore", under="ignore"):
            rows = np.ascontiguousarray(a.reshape(m, self.dim) if m else np.empty((0, self.dim)), dtype=self.dtype)
        norms, flags = check_rows((rows,))
        far = np.flatnonzero(flags == 3)
        if len(far):
            rows = rows.copy()  # it may still be the caller's
            rows[far] = scale_rows(rows[far])
            norms, flags = check_rows((rows,))
        return rows, norms, flags

    def remove(self, ids: Iterable[str], *, missing: str = "raise") -> int:
        """Remove facts. The next ranking does not see them; `compact` frees their memory.

        Args:
            ids: The ids.
            missing: "raise" refuses ids that are not in the store, and removes nothing. "ignore" ignores them.

        Returns:
            How many facts were removed.

        Raises:
            KeyError: If an id is not in the store and `missing` is "raise".
        """
        if missing not in ("raise", "ignore"):
            raise ValueError(f"missing: expected 'raise' or 'ignore', got {missing!r}")
        wanted = list(dict.fromkeys(check_strings(ids, "ids", ordered=False)))
        with self._lock:
            known, withheld = self._rows(), self._withheld
            absent = [i for i in wanted if i not in known and i not in withheld]
            if absent and missing == "raise":
                raise KeyError(f"ids: {few(absent)} not in the store")
            rows = [known[i] if i in known else withheld[i] for i in wanted if i in known or i in withheld]
            self.apply(None, removed=rows)
        return len(rows)

    def compact(self) -> int:
        """Give back the memory of removed facts; returns their number. Order and sequence numbers stay."""
        with self._lock:
            view = self.whole()
            keep = np.flatnonzero(view.alive)
            removed = view.rows - len(keep)
            if not removed:
                return 0
            old = view._storage
            rows = Pieces(self.dim, self.dtype, self._new)
            for start in range(0, len(keep), CHUNK):
                rows.write(start, view.take(keep[start : start + CHUNK]))
            new = Storage(
                mapped=None,
                tail=rows,
                squared_norms=Growing(view.squared_norms[keep]),
                importance=Growing(view.importance[keep]),
                sequence=Growing(view.sequence[keep]),
                first_sequence=Growing(view.first_sequence[keep]),
                positions=Growing(old.positions.buffer[keep]),
                ids=Strings(),
                texts=Strings(),
                tokens=Tokens(tail=take_tokens(view.tokens.blocks, keep)),
                sources=Strings(),
                attributes={name: column.take(keep) for name, column in old.attributes.items()},
            )
            alive = view.alive.tolist()
            new.ids.write(0, compress(old.ids, alive))
            new.texts.write(0, compress(old.texts, alive))
            new.sources.write(0, compress(old.sources, alive))
            self._row_of = None
            rows_now = np.ones(len(keep), np.bool_)
            self._withheld = {id: int(np.searchsorted(keep, row)) for id, row in self._withheld.items()}
            rows_now[list(self._withheld.values())] = False
            self._view = self._view_of(new, rows_now, view.version + 1, view.layout + 1)
            return removed

    def adopt(self, other: FactStore) -> None:
        """Become what the other store is, with its rows and their numbers; the other must not be used any more.

        Raises ValueError for another dimension, dtype, embedding model, tokenizer or hash key.
        """
        for name in ("dim", "dtype", "embedding_model", "tokenizer_name", "key_fingerprint"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                raise ValueError(f"{name}: expected {mine!r}, got {its!r}")
        with other._lock, self._lock:
            view = other._view
            self._row_of = None
            self._next_sequence = max(self._next_sequence, other._next_sequence)
            self.numbering, self._is_copy = other.numbering, other._is_copy
            self._withheld = dict(other._withheld)
            alive = view.alive.copy()
            self._view = self._view_of(view._storage, alive, self._view.version + 1, self._view.layout + 1)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        view: StoreView | None = None,
        about: Callable[[Path], Mapping[str, Any]] | None = None,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write the facts to a folder that `load` opens, and replace the store that is there.

        The data goes to a new subfolder and is synced to disk. Then the manifest that names it is renamed into place. A
        reader finds the old store or the new one, never half of one. Removed facts are left out; sequence numbers are
        kept. Saves into one folder take turns, across processes too, and the last one stays. (On Windows, and on
        network mounts without flock, callers must take turns themselves.)

        Args:
            path: The folder.
            view: A version of this store. None saves the present one.
            about: Called with the subfolder when the data is in it. What it returns goes into the manifest; `about` of
                the loaded store has it.
            beside: Files of the folder by name, such as tasks about the facts. They change together with the store.
                None keeps those of the store that was loaded from this folder.

        Raises:
            FileExistsError: If path is something other than a store or an empty folder.
        """
        folder = Path(path)
        with self._lock:
            saved, next_sequence, numbering = view or self.whole(), self._next_sequence, self.numbering
        check_store_folder(folder)
        own = self.path is not None and folder.exists() and folder.samefile(self.path)
        files = beside if beside is not None or own else {}
        KIND.save(folder, lambda data: _format.write(data, saved, next_sequence, numbering, about), files)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        mmap: bool = True,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        scratch: str | os.PathLike[str] | None = None,
        snapshot: bool = False,
        verify: bool = False,
    ) -> FactStore:
        """Open a folder that `save` wrote.

        While others save into the folder, this is the store of the last save. Its mapped data does not change. Nothing
        is ever unpickled.

        Every block of every file has a checksum. The manifest, the numbers and all of a small store are checked here. A
        large store is checked block by block before a block is first read, and the rest on a background thread. A
        ranking or lookup that finds damage raises DamagedFileError.

        Args:
            path: The folder.
            mmap: Whether to map the embeddings, texts and tokens instead of reading them now. Ids are indexed when the
                first is looked up, about 0.4 s for a million.
            tokenizer: The tokenizer that the store was made with, if it was made with one.
            hash_key: The hash key that the store was made with, if it was made with one.
            scratch: As for a new store.
            snapshot: Whether the snapshot of a durable store is meant. If not, a warning says whose snapshot it is.
            verify: Whether to check all bytes before returning.

        Raises:
            FileNotFoundError: If there is no store.
            DamagedFileError: If a file is not as it was written.
            ValueError: For another tokenizer or hash key, and for a store of another format.
        """
        folder = Path(path)

        def read(manifest: dict[str, Any]) -> FactStore:
            store = cls(
                manifest["dim"],
                embedding_model=manifest["embedding_model"],
                dtype=manifest["dtype"],
                tokenizer=tokenizer,
                hash_key=hash_key,
                scratch=scratch,
            )
            store.check_hasher(manifest, f"{folder}")
            storage = _format.read(folder, manifest, store.dtype, mmap=mmap, new=store._new)
            about = manifest.get("about", {})
            store.path = folder
            store.about = {**(about if isinstance(about, dict) else {}), "data": manifest["data"]}
            store._row_of = None
            store._next_sequence = manifest["next_sequence"]
            store.numbering, store._is_copy = Numbering.read(manifest["numbering"], f"{folder / KIND.file}"), True
            store._view = store._view_of(storage, np.ones(manifest["facts"], np.bool_), version=0, layout=0)
            return store

        found: FactStore = KIND.load(folder, read)
        files = found._view._storage.files
        assert files is not None
        if verify or files.unverified_bytes <= _AT_ONCE:
            files.check()
        elif not snapshot:  # a durable store looks after its own
            _check_behind(files)
        if "record" in found.about and not snapshot:
            whose = folder.resolve().parent
            warn(
                f"{folder}: expected a store, found the snapshot of the durable store {whose} as it once was: open "
                f"DurableStore.open({str(whose)!r}), or {whose} with `cdr`, to have what was changed since"
            )
        return found


def _check_behind(files: Files) -> None:
    """Check the files of a store on a thread of its own, which ends with the store and with the program.

    It rests as long as it works, so that whoever reads the disk meanwhile has at least half of it.
    """
    store = weakref.ref(files)
    since = time.monotonic()

    def rest(_: int) -> None:
        nonlocal since
        time.sleep(min(1.0, time.monotonic() - since))
        if not threading.main_thread().is_alive() or store() is None:
            raise _Ended
        since = time.monotonic()

    def work(parts: list[_C.CheckedFile]) -> None:
        try:
            while parts:
                check_rest(parts.pop(), rest, parallel=False)
        except _Ended:
            pass
        except (DamagedFileError, OSError) as error:
            with contextlib.suppress(Warning):  # where warnings are errors: whoever reads the file is told too
                warnings.warn(f"{error}: whatever reads it raises this", RuntimeWarning, stacklevel=2)

    with contextlib.suppress(RuntimeError):  # no thread can be had: blocks are checked as they are read
        threading.Thread(target=work, args=(files.opened,), name="cdr-verify").start()


class _Ended(Exception):
    """Nobody has the store any more, or the program ends."""


def _same_length(values: Sequence[Any], m: int, name: str) -> None:
    if len(values) != m:
        raise ValueError(f"{name}: expected {m} entries (one per id), got {len(values)}")


def _numbers(values: Sequence[int], m: int) -> Int64:
    check_order(values, "sequence")
    out = np.asarray(values)
    if out.shape != (m,) or (m and out.dtype.kind not in "iu"):
        raise ValueError(f"sequence: expected {m} integers (one per id), got {out.dtype} {list(out.shape)}")
    if m and (out[0] < 0 or out[-1] >= MAX_POSITION or (out[1:] <= out[:-1]).any()):
        raise ValueError("sequence: expected ascending integers from 0 to 2^63 - 2")
    return out.astype(np.int64)


def _positions(values: Sequence[int | None] | None, m: int) -> Int64:
    if values is None:
        return np.full(m, NO_POSITION, np.int64)
    check_order(values, "position")
    out = list(values)
    _same_length(out, m, "position")
    for i, v in enumerate(out):
        if v is not None and (isinstance(v, bool) or not isinstance(v, int | np.integer) or v < 0):
            raise ValueError(f"position: expected an integer >= 0 or None, got {v!r} at {i}")
        if v is not None and v > MAX_POSITION:
            raise ValueError(f"position: expected at most 2^63 - 1, got {v} at {i}")
    return np.array([NO_POSITION if v is None else int(v) for v in out], np.int64)


def view_of(store: object) -> StoreView:
    """The present view of a store; a view as it is. TypeError for anything else, which says where such a thing has its
    store."""
    if isinstance(store, FactStore):
        return store.view()
    if isinstance(store, StoreView):
        return store
    inner = (name for name in ("store", "facts") if isinstance(getattr(store, name, None), FactStore))
    hint = next((f": pass its .{name}" for name in inner), "")
    raise TypeError(f"store: expected a FactStore or a StoreView, got {type(store).__name__}{hint}")
