"""The facts: ids, texts, importance, sources, attributes and embeddings, in memory or mapped from a folder.

A store only ever appends rows and marks rows as removed, so a ``StoreView`` taken at any moment stays as it
was while others add and remove: whoever ranks works on one consistent version without a lock.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from cdr_kernel.arrays import Blocks, Float64, Growing, Int64, New, as_array, check_rows, factor, scale_rows, take_rows
from cdr_kernel.attributes import KINDS, Attribute, Attributes, Value, Where, checked_attributes, chosen, where_key
from cdr_kernel.checks import check_strings, few
from cdr_kernel.folder import LOCK, Kind, read_array, synced
from cdr_kernel.ngram import TOKEN_BYTES, HashKey, TokenBlock, TokenHasher, Tokenizer, TokenRows, take_tokens, tokenize

Bool: TypeAlias = npt.NDArray[np.bool_]

FORMAT = "cdr-fact-store"
FORMAT_VERSION = 2
DTYPES = ("float16", "float32", "float64")
_ARRAYS = ("embeddings", "squared_norms", "importance", "sequence", "positions", "tokens", "token_offsets")
_TEXTS = ("ids", "texts", "sources")
_FILES = {*(f"{name}.npy" for name in _ARRAYS), *(f"{n}{end}" for n in _TEXTS for end in (".utf8", "_offsets.npy"))}
_KIND = Kind(
    "store",
    file="manifest.json",
    data="data-",
    format=FORMAT,
    version=FORMAT_VERSION,
    oldest=1,  # which knew no attributes
    fields={
        "dim": int,
        "dtype": str,
        "embedding_model": str,
        "tokenizer": str,
        "hash_key": str,
        "unicode": str,
        "facts": int,
        "next_sequence": int,
        "files": dict,
    },
)
_UNFINISHED = re.compile(  # names that saves give, of stores and of the scan indexes beside them
    rf"{re.escape(LOCK)}|scan\.json|(manifest\.json\.)?data-[0-9a-f]{{16}}|(scan\.json\.)?scan-[0-9a-f]{{16}}"
)
_NO_POSITION = -1
_MAX_POSITION = 2**63 - 1
_FLOAT64 = np.finfo(np.float64)
_CHUNK = 65536  # rows read or written at a time
_SELECTIONS = 8  # filtered views that a view keeps
_PIECE_BYTES = 2 << 30  # of rows in memory that lie in one array


class EmbeddingModelMismatch(ValueError):
    """Vectors of another embedding model than the store's or the session's (§2.5, reading R18)."""

    def __init__(self, what: str, expected: str, got: str | None) -> None:
        named = "no embedding model was named" if got is None else f"got {got!r}"
        super().__init__(f"{what}: expected embedding model {expected!r}, {named}")


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact as it is stored. importance is finite and >= 0; sequence grows with every add (reading R26).

    attributes: the further columns that have a value for it.
    """

    id: str
    text: str
    source: str | None
    position: int | None
    importance: float
    sequence: int
    attributes: Mapping[str, Value] = field(default_factory=dict, hash=False)


class Added(NamedTuple):
    """What an add did: how many facts went in, and the ids that on_invalid="skip" left out."""

    added: int
    skipped: tuple[str, ...]


class Checked(NamedTuple):
    """Facts that passed the door of a store, as it keeps them: M of them, and the ids that were skipped."""

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
        )


class _Strings(Sequence[str]):
    """Append-only strings: a mapped part (UTF-8 bytes and offsets) and a list of what came later."""

    def __init__(self, offsets: Int64 | None = None, utf8: npt.NDArray[np.uint8] | None = None) -> None:
        self._offsets = np.zeros(1, np.int64) if offsets is None else offsets
        self._utf8 = np.zeros(0, np.uint8) if utf8 is None else utf8
        self._mapped = len(self._offsets) - 1
        self._tail: list[str] = []

    def __len__(self) -> int:
        return self._mapped + len(self._tail)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if row >= self._mapped:
            return self._tail[row - self._mapped]
        start, stop = self._offsets[row], self._offsets[row + 1]
        return self._utf8[start:stop].tobytes().decode("utf-8", "surrogatepass")

    def at(self, rows: Int64) -> list[str]:
        """The strings of these rows, sooner than one by one."""
        tail, mapped = self._tail, self._mapped
        if not mapped:
            return [tail[row] for row in rows.tolist()]
        inside = rows < mapped
        first = np.where(inside, rows, 0)
        starts, stops = self._offsets[first].tolist(), self._offsets[first + 1].tolist()
        utf8 = self._utf8.data
        return [
            str(utf8[start:stop], "utf-8", "surrogatepass") if here else tail[row - mapped]
            for row, here, start, stop in zip(rows.tolist(), inside.tolist(), starts, stops, strict=True)
        ]

    def __iter__(self) -> Iterator[str]:
        for first in range(0, self._mapped, _CHUNK):
            offsets = self._offsets[first : first + _CHUNK + 1]
            utf8 = self._utf8[offsets[0] : offsets[-1]].tobytes()
            for start, stop in pairwise((offsets - offsets[0]).tolist()):
                yield utf8[start:stop].decode("utf-8", "surrogatepass")
        yield from self._tail

    def write(self, at: int, strings: Iterable[str]) -> None:
        """Put strings at row `at` and on, dropping what an interrupted call may have left there."""
        self._tail[at - self._mapped :] = strings


class _Pieces:
    """Rows [n, D] with room behind them, in several arrays where they are many: growing never copies all of them."""

    def __init__(self, dim: int, dtype: np.dtype[Any], new: New) -> None:
        self._room = max(1, _PIECE_BYTES // (dim * dtype.itemsize))  # rows of one piece
        self._new = new
        self._shape, self._dtype = (self._room, dim), dtype
        self._pieces = [Growing(np.empty((0, dim), dtype), new)]

    def write(self, at: int, rows: npt.NDArray[Any]) -> None:
        """Put rows at row `at` and on; rows before that are not touched."""
        while len(rows):
            piece, inside = divmod(at, self._room)
            if piece == len(self._pieces):  # the rows before fill their pieces, so this one will soon be needed whole
                self._pieces.append(Growing(self._new(self._shape, self._dtype)))
            part = rows[: self._room - inside]
            self._pieces[piece].write(inside, part)
            at, rows = at + len(part), rows[len(part) :]

    def front(self, n: int) -> Blocks:
        """The first n rows, at least one array."""
        starts = range(0, max(n, 1), self._room)
        return tuple(p.front(min(n - start, self._room)) for start, p in zip(starts, self._pieces, strict=False))


def _new_in(folder: Path) -> New:
    """Makes arrays in files of this folder that have no name and go with the array."""

    def new(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        with tempfile.TemporaryFile(dir=folder) as file:
            size = math.prod(shape) * dtype.itemsize
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an OSError here, a dead process later
            else:
                file.truncate(size)
            return np.asarray(np.memmap(file, dtype, "r+", shape=shape))

    return new


class _Tokens:
    """Append-only token hashes: a mapped block and one of what came later."""

    def __init__(self, mapped: TokenBlock | None = None, tail: TokenBlock | None = None) -> None:
        offsets, tokens = tail or (np.zeros(1, np.int64), np.zeros(0, np.uint8))
        self._mapped = mapped
        self._mapped_rows = 0 if mapped is None else len(mapped[0]) - 1
        self._offsets = Growing(offsets)
        self._tokens = Growing(tokens)

    def write(self, at: int, block: TokenBlock) -> None:
        """Put the rows of a block at row `at` and on; rows before that are not touched."""
        offsets, tokens = block
        row = at - self._mapped_rows
        start = int(self._offsets.buffer[row])
        self._tokens.write(TOKEN_BYTES * start, tokens)
        self._offsets.write(row + 1, offsets[1:] + start)

    def blocks(self, n: int) -> tuple[TokenBlock, ...]:
        offsets = self._offsets.front(n - self._mapped_rows + 1)
        tail = (offsets, self._tokens.front(TOKEN_BYTES * int(offsets[-1])))
        if self._mapped is None:
            return (tail,)
        return (self._mapped, tail) if len(offsets) > 1 else (self._mapped,)


@dataclass
class _Storage:
    """The columns behind the views of one layout: append-only, so views of different lengths share them."""

    mapped: npt.NDArray[Any] | None
    tail: _Pieces
    squared_norms: Growing
    importance: Growing
    sequence: Growing
    positions: Growing
    ids: _Strings
    texts: _Strings
    tokens: _Tokens
    sources: _Strings  # "" for None, else "=" and the source: "" is a source like any other
    attributes: dict[str, Attribute]
    source_codes: Attribute = field(default_factory=lambda: Attribute(str))  # made when a filter first asks
    coding: threading.Lock = field(default_factory=threading.Lock)

    @property
    def mapped_rows(self) -> int:
        return 0 if self.mapped is None else len(self.mapped)

    def blocks(self, n: int) -> Blocks:
        tail = self.tail.front(n - self.mapped_rows)
        if self.mapped is None:
            return tail
        return (self.mapped, *tail) if len(tail[0]) else (self.mapped,)

    def attribute(self, name: str, n: int) -> Attribute | None:
        """The column of this name, with at least n rows; None where there is none."""
        if name != "source":
            return self.attributes.get(name)
        codes = self.source_codes
        with self.coding:
            if codes.rows < n:
                sources = islice(self.sources, n) if codes.rows == 0 else self.sources[codes.rows : n]
                codes.write(codes.rows, [s[1:] if s else None for s in sources])
        return codes


def _marked(source: str | None) -> str:
    return "" if source is None else "=" + source


@dataclass(frozen=True, eq=False)
class StoreView:
    """One version of a store, unchanged whatever the store does next. R rows, removed ones included.

    blocks: the embeddings as stored, arrays [R_i, D] of one dtype, read one after the other: the mapped part, then what
    was added, 2 GiB an array.
    squared_norms: float64 [R], correctly rounded. importance: float64 [R]. alive: bool [R]. sequence: int64 [R],
    ascending. tokens: the token hashes of the texts, for n-gram guards. version: the number of changes the store had
    seen; layout: how often its rows were renumbered.
    """

    blocks: Blocks
    squared_norms: Float64
    importance: Float64
    alive: Bool
    sequence: Int64
    tokens: TokenRows
    version: int
    layout: int
    embedding_model: str
    _storage: _Storage = field(repr=False)
    selection: bytes = b""
    """What tells a view of some facts (`select`) from one of others, b"" for a view of all."""
    _selected: dict[bytes, StoreView] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> int:
        """R."""
        return len(self.alive)

    @property
    def dim(self) -> int:
        """D."""
        return int(self.blocks[0].shape[1])

    def __len__(self) -> int:
        """Facts that are not removed."""
        return int(np.count_nonzero(self.alive))

    @property
    def embeddings(self) -> npt.NDArray[Any]:
        """[R, D] as stored; a copy where there are several blocks."""
        return self.blocks[0] if len(self.blocks) == 1 else np.concatenate(self.blocks)

    @property
    def ids(self) -> list[str]:
        """Ids of the facts that are not removed, in order of their sequence."""
        return list(compress(self._storage.ids, self.alive.tolist()))

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return _index(self)

    def row_of(self, fact_id: str) -> int:
        """The row of a fact; KeyError where it is not there. The first call reads all ids."""
        return self._row_of[fact_id]

    def id_of(self, row: int) -> str:
        """The id of the fact in this row."""
        return str(self._storage.ids[row])

    def texts(self, rows: Iterable[int]) -> list[str]:
        """Texts of these rows."""
        return [self._storage.texts[int(row)] for row in rows]

    def attribute(self, name: str) -> list[Value | None]:
        """Values of a further column, one per fact in the order of ``ids``, None for facts without one.

        "source" is a column too. Raises KeyError where no fact was ever added with it.
        """
        column = self._storage.attribute(name, self.rows)
        if column is None:
            raise KeyError(f"attributes: expected one of {self.attribute_names}, got {name!r}")
        return column.values(np.flatnonzero(self.alive))

    @property
    def attribute_names(self) -> list[str]:
        """Names of the further columns."""
        return sorted(name for name in list(self._storage.attributes) if not name.startswith("_"))

    @property
    def attribute_types(self) -> dict[str, type]:
        """Types of the further columns by name: str, int, float or bool."""
        return {name: self._storage.attributes[name].kind for name in self.attribute_names}

    def rows_at_most(self, name: str, limit: int) -> Int64:
        """Rows of facts whose value in a column of int is not above a limit; none where there is no such column."""
        column = self._storage.attributes.get(name)
        if column is None:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.alive & column.at_most(limit, self.rows))

    def where(self, **wanted: Value | Iterable[Value | None] | None) -> Bool:
        """Which facts have these values: bool [len(self)] in the order of ``ids``, as `where=` of a ranking takes it.

        Each keyword is "source" or an attribute, with the value it must have or several of which it must have one;
        None is the absence of a value. Several keywords must all hold. Raises KeyError for an attribute that no fact
        has, TypeError for a value of another type than the attribute's.
        """
        return self._mask(wanted)[self.alive]

    def _mask(self, wanted: Mapping[str, Any]) -> Bool:
        mask = np.ones(self.rows, np.bool_)
        for name, values in wanted.items():
            column = None if name.startswith("_") else self._storage.attribute(name, self.rows)
            if column is None:
                raise KeyError(f"where: expected source or one of {self.attribute_names}, got {name!r}")
            mask &= column.equal(chosen(values), self.rows, f"where[{name!r}]")
        return mask

    def select(self, where: Where | None) -> StoreView:
        """This version with only the facts of which `where` holds: everything else is as if it had been removed.

        where: a mapping as the keywords of ``where``, a bool array [len(self)] in the order of ``ids``, or None for
        all. Raises what ``where`` raises, ValueError for another length, TypeError for another type.
        """
        if where is None:
            return self
        key = where_key(where, len(self), self.selection)
        found = self._selected.get(key)
        if found is None:
            alive = self.alive.copy()
            if isinstance(where, Mapping):
                alive &= self._mask(where)
            else:
                alive[alive] = np.asarray(where)
            alive.flags.writeable = False
            found = replace(self, alive=alive, selection=key, _selected={})
            for old in list(self._selected)[: 1 - _SELECTIONS]:
                self._selected.pop(old, None)
            self._selected[key] = found
        return found

    def facts(self, rows: Iterable[int]) -> list[Fact]:
        """The facts in these rows."""
        at = np.fromiter(rows, np.int64)
        storage = self._storage
        further = {name: column.values(at) for name, column in list(storage.attributes.items()) if name[0] != "_"}
        columns = zip(
            storage.ids.at(at),
            storage.texts.at(at),
            storage.sources.at(at),
            storage.positions.buffer[at].tolist(),
            self.importance[at].tolist(),
            self.sequence[at].tolist(),
            strict=True,
        )
        facts = [
            Fact(
                id=id,
                text=text,
                source=source[1:] if source else None,
                position=None if position == _NO_POSITION else position,
                importance=importance,
                sequence=sequence,
            )
            for id, text, source, position, importance, sequence in columns
        ]
        if not further:
            return facts
        return [
            replace(fact, attributes={name: v for name, values in further.items() if (v := values[i]) is not None})
            for i, fact in enumerate(facts)
        ]

    def sources(self, rows: Iterable[int]) -> list[str | None]:
        """Sources of these rows."""
        marked = self._storage.sources.at(np.fromiter(rows, np.int64))
        return [source[1:] if source else None for source in marked]

    def places(self, rows: Iterable[int]) -> list[tuple[str, int] | None]:
        """(source, position) of these rows, None where a fact lacks one of them."""
        out: list[tuple[str, int] | None] = []
        for row in rows:
            source, position = self._storage.sources[int(row)], int(self._storage.positions.buffer[int(row)])
            out.append((source[1:], position) if source and position != _NO_POSITION else None)
        return out

    def take(self, rows: Int64) -> npt.NDArray[Any]:
        """Copy of the embeddings of these rows, [M, D] as stored."""
        return take_rows(self.blocks, rows)


def _index(view: StoreView) -> dict[str, int]:
    ids = view.ids
    rows = dict(zip(ids, np.flatnonzero(view.alive).tolist(), strict=True))
    if len(rows) < len(ids):
        twice = next(i for i, row in zip(ids, np.flatnonzero(view.alive).tolist(), strict=True) if rows[i] != row)
        raise ValueError(f"ids: {twice!r} more than once: the store it was loaded from is damaged")
    return rows


class FactStore:
    """Facts with their embeddings.

    dim: D, at least 1. embedding_model: the identifier of the model that made the embeddings; sessions must name
    the same one (§2.5). dtype: float16, float32 or float64; vectors are cast to it once, when they are added,
    and never normalised. (A row whose largest magnitude lies outside 2^±200, which only float64 can hold, is stored
    times an exact power of two: its direction stays as it is.)

    Each text is tokenised and its tokens hashed once, when it is added, for the n-gram guard (§5): 7 bytes a token,
    kept with the store. tokenizer: any callable str -> list[str] with a name, None for `tokenize` (see
    `ngram.Tokenizer`). hash_key: bytes or an int, for stores whose authors may be hostile (see `ngram.TokenHasher`).
    Sessions over the store need a guard with the same ones.

    scratch: a folder, for more rows than memory holds. Rows that are added then lie in mapped files there, which have
    no name and go with the store; None keeps them in memory. A forked child must not add to such a store.

    Threads may call everything at once: changes take turns, ``view()`` never waits.
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
        self._new: New = np.empty if scratch is None else _new_in(Path(scratch))
        self.about: Mapping[str, Any] = {}
        """What its manifest says beside the facts, and `data`, the subfolder they are in."""
        self._hasher = TokenHasher(tokenizer, hash_key)
        self._lock = threading.RLock()
        self._row_of: dict[str, int] | None = {}  # None: to be made from the view when needed
        self._next_sequence = 0
        storage = _Storage(
            mapped=None,
            tail=_Pieces(self.dim, self.dtype, self._new),
            squared_norms=Growing(np.zeros(0)),
            importance=Growing(np.zeros(0)),
            sequence=Growing(np.zeros(0, np.int64)),
            positions=Growing(np.zeros(0, np.int64)),
            ids=_Strings(),
            texts=_Strings(),
            tokens=_Tokens(),
            sources=_Strings(),
            attributes={},
        )
        self._view = self._view_of(storage, np.zeros(0, np.bool_), version=0, layout=0)

    def _view_of(self, storage: _Storage, alive: Bool, version: int, layout: int) -> StoreView:
        alive.flags.writeable = False
        n = len(alive)
        return StoreView(
            blocks=storage.blocks(n),
            squared_norms=storage.squared_norms.front(n),
            importance=storage.importance.front(n),
            alive=alive,
            sequence=storage.sequence.front(n),
            tokens=TokenRows(storage.tokens.blocks(n), storage.texts, self.tokenizer_name, self.key_fingerprint),
            version=version,
            layout=layout,
            embedding_model=self.embedding_model,
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
        """The store as it is now; later changes do not show in it."""
        return self._view

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._view.version

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
        return f"FactStore({len(self)} facts, dim={self.dim}, dtype={self.dtype.name}, model={self.embedding_model!r})"

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

    @property
    def ids(self) -> list[str]:
        """Ids in order of their sequence."""
        return self._view.ids

    def get(self, ids: Iterable[str]) -> list[Fact]:
        """The facts of these ids. Raises KeyError naming an id that is not there, TypeError for one str."""
        wanted = check_strings(ids, "ids")
        with self._lock:
            rows = self._rows()
            missing = [i for i in wanted if i not in rows]
            if missing:
                raise KeyError(f"ids: {few(missing)} not in the store")
            return self._view.facts([rows[i] for i in wanted])

    def rows_of(self, ids: Iterable[str]) -> Int64:
        """The rows of these ids in the newest view. KeyError for one that is not there."""
        with self._lock:
            known = self._rows()
            return np.array([known[i] for i in ids], np.int64)

    def _rows(self) -> dict[str, int]:
        if self._row_of is None:
            self._row_of = _index(self._view)
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
        """Add facts that are not in the store yet.

        ids, texts: [M] strings, ids not empty; embeddings: [M, D] of any float dtype; importance: [M], finite and >= 0,
        default 1; source: [M] names of documents or None; position: [M] places in the source, 0 to 2^63 - 1 or None.
        attributes: further columns by name, each [M] of str, int, float or bool (one type a column) or None; they are
        what a ranking's `where` filters by, beside source. sequence: [M] numbers that ascend, above all that the store
        gave, in place of the next ones: for facts that were numbered elsewhere.
        on_invalid="skip" leaves out facts whose vector is not finite or all zeros and says which; "raise" is a
        ValueError naming them. Raises ValueError for an id that is there already or comes twice, for wrong lengths,
        dimensions and values, TypeError for wrong types. After an error the store is as it was.
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
        """Like add, but a fact that is there is replaced whole and takes a new sequence number (reading R26)."""
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
        rows, norms, flags = self._cast(embeddings, m)
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
            self.apply(found, found.sequence, [known[i] for i in old])
        return Added(len(found.ids), found.skipped)

    def check_kinds(self, columns: Attributes) -> None:
        """Raises TypeError where a column of these has another type than the store's of that name."""
        for name, (kind, _) in columns.items():
            column = self._view._storage.attributes.get(name)
            if column is not None:
                column.check_kind(kind, f"attributes[{name!r}]")

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
    def _write_rows(storage: _Storage, n: int, found: Checked, sequence: Int64) -> None:
        """Put facts at row n and on, where no view looks yet."""
        storage.tail.write(n - storage.mapped_rows, found.embeddings)
        storage.squared_norms.write(n, found.squared_norms)
        storage.importance.write(n, found.importance)
        storage.positions.write(n, found.positions)
        storage.sequence.write(n, sequence)
        storage.ids.write(n, found.ids)
        storage.texts.write(n, found.texts)
        storage.tokens.write(n, found.tokens)
        storage.sources.write(n, map(_marked, found.sources))
        for name, (kind, _) in found.attributes.items():
            if name not in storage.attributes:
                storage.attributes[name] = Attribute.missing(kind, n)
        nothing: list[Value | None] = [None] * len(found.ids)
        for name, column in storage.attributes.items():
            column.write(n, found.attributes[name][1] if name in found.attributes else nothing)

    def _cast(self, embeddings: Any, m: int) -> tuple[npt.NDArray[Any], Float64, npt.NDArray[np.uint8]]:
        a = as_array(embeddings, 2, "embeddings")
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
        """Remove facts; returns how many. They are gone for the next rank; their memory goes with ``compact()``.

        missing: "raise" is a KeyError naming ids that are not there (nothing is removed then), "ignore" passes them
        over.
        """
        if missing not in ("raise", "ignore"):
            raise ValueError(f"missing: expected 'raise' or 'ignore', got {missing!r}")
        wanted = list(dict.fromkeys(check_strings(ids, "ids")))
        with self._lock:
            known = self._rows()
            absent = [i for i in wanted if i not in known]
            if absent and missing == "raise":
                raise KeyError(f"ids: {few(absent)} not in the store")
            rows = [known[i] for i in wanted if i in known]
            self.apply(None, removed=rows)
        return len(rows)

    def compact(self) -> int:
        """Give back the memory of removed facts; returns their number. Order and sequence numbers stay."""
        with self._lock:
            view = self._view
            keep = np.flatnonzero(view.alive)
            removed = view.rows - len(keep)
            if not removed:
                return 0
            old = view._storage
            rows = _Pieces(self.dim, self.dtype, self._new)
            for start in range(0, len(keep), _CHUNK):
                rows.write(start, view.take(keep[start : start + _CHUNK]))
            new = _Storage(
                mapped=None,
                tail=rows,
                squared_norms=Growing(view.squared_norms[keep]),
                importance=Growing(view.importance[keep]),
                sequence=Growing(view.sequence[keep]),
                positions=Growing(old.positions.buffer[keep]),
                ids=_Strings(),
                texts=_Strings(),
                tokens=_Tokens(tail=take_tokens(view.tokens.blocks, keep)),
                sources=_Strings(),
                attributes={name: column.take(keep) for name, column in old.attributes.items()},
            )
            alive = view.alive.tolist()
            new.ids.write(0, compress(old.ids, alive))
            new.texts.write(0, compress(old.texts, alive))
            new.sources.write(0, compress(old.sources, alive))
            self._row_of = None
            self._view = self._view_of(new, np.ones(len(keep), np.bool_), view.version + 1, view.layout + 1)
            return removed

    def renumber(self) -> None:
        """Have whoever keeps something by row, such as a retriever, make it anew."""
        with self._lock:
            view = self._view
            self._view = self._view_of(view._storage, view.alive, view.version + 1, view.layout + 1)

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
            alive = view.alive.copy()
            self._view = self._view_of(view._storage, alive, self._view.version + 1, self._view.layout + 1)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        view: StoreView | None = None,
        about: Callable[[Path], Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the facts to a folder that ``load`` opens, replacing a store that is there.

        The data goes to a new subfolder, is synced to the disk, and only then named by the manifest, which is
        renamed into place: whoever opens the folder finds the old store or the new one, never half of one.
        Removed facts are left out; sequence numbers are kept. view: a version of this store, the newest for None.
        about: called with the subfolder when the data is in it; what it returns goes into the manifest, and is
        `about` of the store that is loaded. Saves into one folder take turns, across processes too, and the last one
        stays (on Windows, and on network mounts that know no flock, callers see to the turns).
        Raises FileExistsError where path is something other than a store or an empty folder.
        """
        folder = Path(path)
        with self._lock:
            saved, next_sequence = view or self._view, self._next_sequence
        check_store_folder(folder)
        _KIND.save(folder, lambda data: self._write(saved, data, next_sequence, about))

    def _write(
        self,
        view: StoreView,
        data: Path,
        next_sequence: int,
        about: Callable[[Path], Mapping[str, Any]] | None,
    ) -> dict[str, Any]:
        keep = np.flatnonzero(view.alive)
        _save_rows(data / "embeddings.npy", view, keep)
        arrays = {
            "squared_norms": view.squared_norms[keep],
            "importance": view.importance[keep],
            "sequence": view.sequence[keep],
            "positions": view._storage.positions.buffer[keep],
        }
        for name, array in arrays.items():
            with synced(data / f"{name}.npy") as file:
                np.save(file, array, allow_pickle=False)
        _save_tokens(data, view.tokens, keep)
        alive = view.alive.tolist()
        for name in _TEXTS:
            _save_strings(data, name, compress(getattr(view._storage, name), alive))
        attributes = {}
        for i, (name, column) in enumerate(sorted(view._storage.attributes.items())):
            attributes[name] = {"type": column.kind.__name__, "file": f"attribute-{i}"}
            column.save(data / f"attribute-{i}", keep)
        return {
            "dim": self.dim,
            "dtype": self.dtype.name,
            "embedding_model": self.embedding_model,
            "tokenizer": self.tokenizer_name,
            "hash_key": self.key_fingerprint,
            "unicode": unicodedata.unidata_version,
            "facts": len(keep),
            "next_sequence": next_sequence,
            "attributes": attributes,
            "about": {} if about is None else dict(about(data)),
            "files": {file.name: file.stat().st_size for file in sorted(data.iterdir())},
        }

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        mmap: bool = True,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        scratch: str | os.PathLike[str] | None = None,
    ) -> FactStore:
        """Open a folder that ``save`` wrote.

        mmap: map the embeddings, texts and tokens (they are read when touched) instead of reading them now. What is
        added later is kept beside the mapped part. Ids are indexed when the first is asked for, which takes about
        0.4 s for a million. tokenizer, hash_key: those of the store where it was made with
        some; the folder holds the tokenizer's name and the key's fingerprint alone. scratch: as for a new store.

        While others save into the folder, this is the store of the last save; what is mapped then stays as it is.

        Raises FileNotFoundError where there is no store, ValueError saying what is wrong for another tokenizer or
        key and where there is a damaged store or one of a later format. Nothing is ever unpickled.

        Checked are the manifest, the sizes and shapes of the files, and the ranges and order of all numbers but the
        vectors; ids that are there twice are found when ids are indexed. Not checked is what only a second look at all
        bytes could tell: bits that have changed inside the embeddings, texts, ids and tokens, or within the range of a
        number.
        """
        folder = Path(path)
        return _KIND.load(folder, lambda manifest: cls._read(folder, manifest, mmap, tokenizer, hash_key, scratch))

    @classmethod
    def _read(
        cls,
        folder: Path,
        manifest: dict[str, Any],
        mmap: bool,
        tokenizer: Tokenizer | None,
        hash_key: HashKey | None,
        scratch: str | os.PathLike[str] | None,
    ) -> FactStore:
        data = folder / manifest["data"]
        sizes = manifest["files"]
        further = _attribute_files(folder, manifest)
        for name in sorted(_FILES | {n for files in further.values() for n in files[2:]}):
            file, size = data / name, sizes.get(name)
            if type(size) is not int:
                raise ValueError(f"{folder / _KIND.file}: expected the size of {name} in files, found {size!r}")
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                raise ValueError(f"{file}: expected {size} bytes, found {'no file' if found is None else found}")
        n, dim = manifest["facts"], manifest["dim"]
        store = cls(
            dim,
            embedding_model=manifest["embedding_model"],
            dtype=manifest["dtype"],
            tokenizer=tokenizer,
            hash_key=hash_key,
            scratch=scratch,
        )
        store.check_hasher(manifest, f"{folder}")

        def numbers(name: str, dtype: Any, least: float, most: float) -> Growing:
            file = data / f"{name}.npy"
            a = read_array(file, dtype, (n,), mapped=False)
            if n and not (least <= a.min() and a.max() <= most):
                bad = int(np.flatnonzero(~((a >= least) & (a <= most)))[0])
                raise ValueError(f"{file}: expected {least:g} to {most:g}, found {a[bad]} in row {bad}")
            return Growing(a)

        def offsets(name: str) -> Int64:
            file = data / f"{name}.npy"
            a = read_array(file, np.int64, (n + 1,), mapped=mmap)
            if a[0] != 0 or (a[1:] < a[:-1]).any():
                raise ValueError(f"{file}: expected offsets from 0 on that never fall")
            return a

        def strings(name: str) -> _Strings:
            ends, file, size = offsets(f"{name}_offsets"), data / f"{name}.utf8", sizes[f"{name}.utf8"]
            if ends[-1] != size:
                raise ValueError(f"{data / name}_offsets.npy: expected {size} (the bytes of {file.name}) at the end")
            return _Strings(ends, np.memmap(file, np.uint8, "r") if mmap and size else np.fromfile(file, np.uint8))

        embeddings = read_array(data / "embeddings.npy", store.dtype, (n, dim), mapped=mmap)
        ends = offsets("token_offsets")
        tokens = read_array(data / "tokens.npy", np.uint8, (TOKEN_BYTES * int(ends[-1]),), mapped=mmap)
        sequence = numbers("sequence", np.int64, 0, manifest["next_sequence"] - 1)
        if (sequence.buffer[1:] <= sequence.buffer[:-1]).any():
            raise ValueError(f"{data / 'sequence.npy'}: expected ascending numbers")
        storage = _Storage(
            mapped=embeddings if n else None,
            tail=_Pieces(dim, store.dtype, store._new),
            squared_norms=numbers("squared_norms", np.float64, _FLOAT64.smallest_subnormal, _FLOAT64.max),
            importance=numbers("importance", np.float64, 0.0, _FLOAT64.max),
            sequence=sequence,
            positions=numbers("positions", np.int64, _NO_POSITION, _MAX_POSITION),
            ids=strings("ids"),
            texts=strings("texts"),
            tokens=_Tokens(mapped=(ends, tokens) if n else None),
            sources=strings("sources"),
            attributes={name: Attribute.load(kind, data / stem, n) for name, (kind, stem, *_) in further.items()},
        )
        store.path = folder
        about = manifest.get("about", {})
        store.about = {**(about if isinstance(about, dict) else {}), "data": manifest["data"]}
        store._row_of = None
        store._next_sequence = manifest["next_sequence"]
        store._view = store._view_of(storage, np.ones(n, np.bool_), version=0, layout=0)
        return store


def _save_rows(path: Path, view: StoreView, keep: Int64) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(view.blocks[0].dtype),
        "fortran_order": False,
        "shape": (len(keep), view.dim),
    }
    with synced(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(keep), _CHUNK):
            file.write(view.take(keep[start : start + _CHUNK]).tobytes())


def _save_tokens(data: Path, tokens: TokenRows, keep: Int64) -> None:
    lengths = np.concatenate([np.diff(offsets) for offsets, _ in tokens.blocks])[keep]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    with synced(data / "token_offsets.npy") as file:
        np.save(file, offsets, allow_pickle=False)
    header = {"descr": "|u1", "fortran_order": False, "shape": (TOKEN_BYTES * int(offsets[-1]),)}
    with synced(data / "tokens.npy") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(keep), _CHUNK):
            file.write(take_tokens(tokens.blocks, keep[start : start + _CHUNK])[1].tobytes())


def _save_strings(data: Path, name: str, strings: Iterator[str]) -> None:
    ends = [np.zeros(1, np.int64)]
    with synced(data / f"{name}.utf8") as file:
        while utf8 := [each.encode("utf-8", "surrogatepass") for each in islice(strings, _CHUNK)]:
            file.write(b"".join(utf8))
            ends.append(ends[-1][-1] + np.cumsum([len(each) for each in utf8], dtype=np.int64))
    with synced(data / f"{name}_offsets.npy") as file:
        np.save(file, np.concatenate(ends), allow_pickle=False)


def _attribute_files(folder: Path, manifest: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Of each attribute of a manifest: its type, the stem of its files and their names."""
    listed = manifest.get("attributes", {})
    try:
        found = {}
        for name, entry in listed.items():
            kind, stem = KINDS[entry["type"]], entry["file"]
            if not re.fullmatch(r"attribute-[0-9]{1,9}", stem):
                raise ValueError
            found[name] = (kind, stem, f"{stem}.npy", *([f"{stem}.json"] if kind is str else []))
    except (AttributeError, KeyError, TypeError, ValueError):
        what = "a type and a file for each of the attributes"
        raise ValueError(f"{folder / _KIND.file}: expected {what}, found {listed!r}") from None
    return found


def check_store_folder(folder: Path) -> None:
    """Raises FileExistsError unless a store may be saved there: nothing yet, an empty folder, or a store to replace.

    What a save that runs or was killed has put into a new folder counts as nothing.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a store or a new folder, found a file")
    if not folder.exists() or all(_UNFINISHED.fullmatch(path.name) for path in folder.iterdir()):
        return
    try:
        found = json.loads((folder / _KIND.file).read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FileExistsError(f"{folder}: expected a store or an empty folder, found other files")


def _same_length(values: Sequence[Any], m: int, name: str) -> None:
    if len(values) != m:
        raise ValueError(f"{name}: expected {m} entries (one per id), got {len(values)}")


def _numbers(values: Sequence[int], m: int) -> Int64:
    out = np.asarray(values)
    if out.shape != (m,) or (m and out.dtype.kind not in "iu"):
        raise ValueError(f"sequence: expected {m} integers (one per id), got {out.dtype} {list(out.shape)}")
    if m and (out[0] < 0 or out[-1] >= _MAX_POSITION or (out[1:] <= out[:-1]).any()):
        raise ValueError("sequence: expected ascending integers from 0 to 2^63 - 2")
    return out.astype(np.int64)


def _positions(values: Sequence[int | None] | None, m: int) -> Int64:
    if values is None:
        return np.full(m, _NO_POSITION, np.int64)
    out = list(values)
    _same_length(out, m, "position")
    for i, v in enumerate(out):
        if v is not None and (isinstance(v, bool) or not isinstance(v, int | np.integer) or v < 0):
            raise ValueError(f"position: expected an integer >= 0 or None, got {v!r} at {i}")
        if v is not None and v > _MAX_POSITION:
            raise ValueError(f"position: expected at most 2^63 - 1, got {v} at {i}")
    return np.array([_NO_POSITION if v is None else int(v) for v in out], np.int64)
