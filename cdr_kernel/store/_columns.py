"""The columns behind a store: append-only, in memory or mapped from a folder with what came later behind it."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cdr_kernel._C import CheckedFile
from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.store._attributes import Attribute
from cdr_kernel.store._checksums import Files
from cdr_kernel.store._mapped_files import MappedFiles
from cdr_kernel.text._token_hashes import TOKEN_BYTES, TokenBlock
from cdr_kernel.validation._arrays import Blocks, Growing, Int64, New

NO_POSITION = -1
MAX_POSITION = 2**63 - 1
EXPIRES = "_expires_at"
"""The column of a store in memory that holds when a fact expires, which no filter sees."""
CHUNK = 65536  # rows read or written at a time
_PIECE_BYTES = 2 << 30  # of rows in memory that lie in one array


class Strings(Sequence[str]):
    """Append-only strings: a mapped part (UTF-8 bytes and offsets) and a list of what came later.

    file: that the bytes are mapped from; those of a string are checked before they are read.
    """

    def __init__(
        self,
        offsets: Int64 | None = None,
        utf8: npt.NDArray[np.uint8] | None = None,
        file: CheckedFile | None = None,
    ) -> None:
        # as plain arrays: a memmap's own type makes every look at one string several times as dear
        self._offsets = np.zeros(1, np.int64) if offsets is None else np.asarray(offsets)
        self._utf8 = np.zeros(0, np.uint8) if utf8 is None else np.asarray(utf8)
        self._file = file
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
        if self._file is not None and not self._file.verified:
            self._file.check(int(start), int(stop))
        return self._utf8[start:stop].tobytes().decode("utf-8", "surrogatepass")

    def at(self, rows: Int64) -> list[str]:
        """The strings of these rows, sooner than one by one."""
        tail, mapped = self._tail, self._mapped
        if not mapped:
            return [tail[row] for row in rows.tolist()]
        inside = rows < mapped
        first = np.where(inside, rows, 0)
        begin, end = self._offsets[first], self._offsets[first + 1]
        self._check(begin, end)
        starts, stops = begin.tolist(), end.tolist()
        utf8 = self._utf8.data
        return [
            str(utf8[start:stop], "utf-8", "surrogatepass") if here else tail[row - mapped]
            for row, here, start, stop in zip(rows.tolist(), inside.tolist(), starts, stops, strict=True)
        ]

    def among(self, rows: Int64, wanted: Collection[str]) -> npt.NDArray[np.bool_]:
        """Which of these rows hold one of the wanted strings, bool [len(rows)].

        Of the mapped rows only those are read whole whose length and last bytes are those of a wanted one.
        """
        found = np.zeros(len(rows), np.bool_)
        late = np.flatnonzero(rows >= self._mapped)
        tail, known = self._tail, frozenset(wanted)
        found[late] = [tail[row] in known for row in (rows[late] - self._mapped).tolist()]
        early = np.flatnonzero(rows < self._mapped)
        texts = [text.encode("utf-8", "surrogatepass") for text in known]
        if not len(early) or not texts:
            return found
        ends = np.cumsum([0, *map(len, texts)])
        keys = np.unique(_keys(np.frombuffer(b"".join(texts), np.uint8), ends[:-1], ends[1:]))
        starts, stops = self._offsets[rows[early]], self._offsets[rows[early] + 1]
        self._check(starts, stops)
        of_rows = _keys(self._utf8, starts, stops)
        at = np.minimum(np.searchsorted(keys, of_rows), len(keys) - 1)
        likely = early[keys[at] == of_rows]
        found[likely] = [text in known for text in self.at(rows[likely])]
        return found

    def __iter__(self) -> Iterator[str]:
        for first in range(0, self._mapped, CHUNK):
            offsets = self._offsets[first : first + CHUNK + 1]
            if self._file is not None:
                self._file.check(int(offsets[0]), int(offsets[-1]))
            utf8 = self._utf8[offsets[0] : offsets[-1]].tobytes()
            for start, stop in pairwise((offsets - offsets[0]).tolist()):
                yield utf8[start:stop].decode("utf-8", "surrogatepass")
        yield from self._tail

    def _check(self, starts: Int64, stops: Int64) -> None:
        if self._file is not None and not self._file.verified:
            self._file.check_spans(starts, stops)

    def write(self, at: int, strings: Iterable[str]) -> None:
        """Put strings at row `at` and on, dropping what an interrupted call may have left there."""
        self._tail[at - self._mapped :] = strings


def _keys(utf8: npt.NDArray[np.uint8], starts: Int64, stops: Int64) -> npt.NDArray[np.uint64]:
    """A number for each string of these bytes, equal for equal strings: of its last six bytes and its length."""
    length = stops - starts
    keys = length.astype(np.uint64) & np.uint64(0xFFFF)
    for back in range(1, 7):
        there = length >= back
        keys <<= np.uint64(8)
        keys[there] |= utf8[(stops - back)[there]]
    return keys


class Pieces:
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


def new_in(folder: Path) -> New:
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


class Tokens:
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
class Storage:
    """The columns behind the views of one layout: append-only, so views of different lengths share them."""

    mapped: npt.NDArray[Any] | None
    tail: Pieces
    squared_norms: Growing
    importance: Growing
    sequence: Growing
    first_sequence: Growing
    positions: Growing
    ids: Strings
    texts: Strings
    tokens: Tokens
    sources: Strings  # "" for None, else "=" and the source: "" is a source like any other
    attributes: dict[str, Attribute]
    mapped_files: MappedFiles = field(default_factory=MappedFiles)
    source_codes: Attribute = field(default_factory=lambda: Attribute(str))  # made when a filter first asks
    coding: Lock = field(default_factory=Lock)
    files: Files | None = None  # that the mapped part lies in
    identity: str | None = None  # of the saved store that the mapped part is

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


def marked(source: str | None) -> str:
    return "" if source is None else "=" + source
