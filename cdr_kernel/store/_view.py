"""One version of a store, which stays as it was while others add and remove: what whoever ranks works on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.concurrency._forks import cached_property
from cdr_kernel.store._attributes import Attribute, Value, Where, check_mask, chosen, mapping_key, rows_key, where_text
from cdr_kernel.store._columns import NO_POSITION, Storage
from cdr_kernel.text._repr import cut, one_line
from cdr_kernel.text._token_hashes import TokenRows
from cdr_kernel.validation._arrays import Blocks, Float64, Int64, take_rows
from cdr_kernel.validation._scalars import counted

Bool: TypeAlias = npt.NDArray[np.bool_]

_SELECTIONS = 8  # filtered views that a view keeps


@dataclass(frozen=True, slots=True)
class Fact:
    """One stored fact.

    Attributes:
        id: The id.
        text: The text.
        source: The document that it comes from, or None.
        position: Its place in the source, or None.
        importance: Finite and >= 0.
        sequence: Grows with every add (reading R26).
        attributes: The further columns that have a value for it.
    """

    id: str
    text: str
    source: str | None
    position: int | None
    importance: float
    sequence: int
    attributes: Mapping[str, Value] = field(default_factory=dict, hash=False)

    __repr__ = one_line


@dataclass(frozen=True, eq=False)
class StoreView:
    """One version of a store. Later changes of the store do not affect it. It has R rows, removed ones included.

    Attributes:
        blocks: The embeddings, arrays [R_i, D] of one dtype, read one after the other. Mapped rows are checked by
            whoever reads them: the package's own loops, `take` and `embeddings` do so.
        squared_norms: float64 [R], correctly rounded.
        importance: float64 [R].
        alive: bool [R]: whether the fact was not removed.
        sequence: int64 [R], ascending.
        first_sequence: int64 [R]: the number with which a fact was first added. An upsert keeps it.
        tokens: Token hashes of the texts, for n-gram guards.
        version: The number of changes that the store had seen.
        layout: How often the rows were renumbered.
        newest: The largest sequence number so far, -1 for none. It grows when facts are added or replaced.
    """

    blocks: Blocks
    squared_norms: Float64
    importance: Float64
    alive: Bool
    sequence: Int64
    first_sequence: Int64
    tokens: TokenRows
    version: int
    layout: int
    embedding_model: str
    newest: int
    _storage: Storage = field(repr=False)
    selection: bytes = b""
    """What tells a view of some facts (`select`) from one of others, b"" for a view of all: the mapping of names to
    values, which holds for every version, or the very rows that a mask stands for."""
    filter: str = ""
    """What `select` was given, in words, "" for a view of all."""
    _selected: dict[bytes, StoreView] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        chosen = f", {self.filter}" if self.filter else ""
        return cut(f"<StoreView of {counted(len(self), 'fact')}, dim={self.dim}, version={self.version}{chosen}>")

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
        return self._count

    @cached_property
    def _count(self) -> int:
        return int(np.count_nonzero(self.alive))

    @property
    def embeddings(self) -> npt.NDArray[Any]:
        """[R, D] as stored; a copy where there are several blocks. Raises DamagedFileError where what is mapped is not
        as it was written."""
        for block in self.blocks:
            _C.check_read(block)
        return self.blocks[0] if len(self.blocks) == 1 else np.concatenate(self.blocks)

    @property
    def identity(self) -> str | None:
        """What tells the saved store that the first rows were loaded from; None where they were not."""
        return self._storage.identity

    @property
    def saved_rows(self) -> int:
        """How many rows that saved store has."""
        return self._storage.mapped_rows

    @property
    def ids(self) -> list[str]:
        """Ids of the facts that are not removed, in order of their sequence."""
        return list(compress(self._storage.ids, self.alive.tolist()))

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return indexed(self)

    def row_of(self, fact_id: str) -> int:
        """The row of a fact; KeyError where it is not there. The first call reads all ids."""
        return self._row_of[fact_id]

    def rows_numbered(self, numbers: Int64) -> Int64:
        """The row of the fact that was added with each of these sequence numbers, int64 [M]; -1 where it is gone."""
        alive = np.flatnonzero(self.alive)
        if not len(alive):
            return np.full(len(numbers), -1, np.int64)
        first = self.first_sequence[alive]
        order = np.argsort(first, kind="stable")  # they ascend but for facts that were upserted
        places = order[np.minimum(np.searchsorted(first, numbers, sorter=order), len(order) - 1)]
        return np.where(first[places] == numbers, alive[places], -1)

    def id_of(self, row: int) -> str:
        """The id of the fact in this row."""
        return str(self._storage.ids[row])

    def ids_at(self, rows: Int64) -> list[str]:
        """The ids of the facts in these rows, int64 [M]."""
        return self._storage.ids.at(rows)

    def holds(self, rows: Int64, ids: Collection[str]) -> Bool:
        """Which of these rows, int64 [M], hold one of the facts of these ids, bool [M]; reads few of the rows' ids."""
        return self._storage.ids.among(rows, ids)

    def text_of(self, row: int) -> str:
        """The text of the fact in this row."""
        return str(self._storage.texts[row])

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
        """Which facts have these values, as `where=` of a ranking takes it.

        Args:
            wanted: Each keyword is "source" or an attribute, with one value or several allowed values. None means no
                value. A fact must match all keywords.

        Returns:
            bool [len(self)] in the order of `ids`.

        Raises:
            KeyError: For an attribute that no fact has.
            TypeError: For a value of another type than the attribute's.
        """
        return self._mask(wanted)[self.alive]

    def _mask(self, wanted: Mapping[str, Any]) -> Bool:
        mask = np.ones(self.rows, np.bool_)
        for name, values in wanted.items():
            mask &= self._column(name).equal(chosen(values), self.rows, f"where[{name!r}]")
        return mask

    def _column(self, name: object) -> Attribute:
        """The column that a filter names. TypeError for a name that is no str, KeyError where there is no such one."""
        if not isinstance(name, str):
            raise TypeError(f"where: expected names that are str, got {type(name).__name__}")
        column = None if name.startswith("_") else self._storage.attribute(name, self.rows)
        if column is None:
            raise KeyError(f"where: expected source or one of {self.attribute_names}, got {name!r}")
        return column

    def select(self, where: Where | None) -> StoreView:
        """This version with only the facts that match, as if all others had been removed.

        Args:
            where: A mapping as the keywords of `where`, a bool array [len(self)] in the order of `ids`, or None for all
                facts.

        Raises:
            KeyError: For an attribute that no fact has.
            ValueError: For an array of another length.
            TypeError: For another type.
        """
        if where is None:
            return self
        alive: Bool | None = None
        if isinstance(where, Mapping):
            for name in where:  # before anything is made of the values, of which there may be many
                self._column(name)
            wanted = {name: chosen(values) for name, values in where.items()}  # some can be read only once
            key = mapping_key(wanted, self.selection)
        else:
            alive = self.alive.copy()
            alive[alive] = check_mask(where, len(self))
            key = rows_key(alive, self.layout)
        found = self._selected.get(key)
        if found is None:
            if alive is None:
                alive = self.alive & self._mask(wanted)
            alive.flags.writeable = False
            text = " and ".join(
                filter(None, (self.filter, where_text(wanted if isinstance(where, Mapping) else where)))
            )
            found = replace(self, alive=alive, selection=key, filter=text, _selected={})
            for old in list(self._selected)[: 1 - _SELECTIONS]:
                self._selected.pop(old, None)
            self._selected[key] = found
        return found

    def facts(self, rows: Iterable[int]) -> list[Fact]:
        """The facts in these rows. Raises DamagedFileError where a file that they are mapped from was cut short."""
        at = np.fromiter(rows, np.int64)
        storage = self._storage
        storage.mapped_files.check()
        further = {name: column.values(at) for name, column in list(storage.attributes.items()) if name[0] != "_"}
        attributes: list[dict[str, Value]] = [{} for _ in at]
        for name, values in further.items():
            for of_fact, value in zip(attributes, values, strict=True):
                if value is not None:
                    of_fact[name] = value
        return list(
            map(
                Fact,  # its fields in their order
                storage.ids.at(at),
                storage.texts.at(at),
                (source[1:] if source else None for source in storage.sources.at(at)),
                (None if position == NO_POSITION else position for position in storage.positions.buffer[at].tolist()),
                self.importance[at].tolist(),
                self.sequence[at].tolist(),
                attributes,
            )
        )

    def sources(self, rows: Iterable[int]) -> list[str | None]:
        """Sources of these rows."""
        marked = self._storage.sources.at(np.fromiter(rows, np.int64))
        return [source[1:] if source else None for source in marked]

    def in_documents(self) -> tuple[Int64, Int64, Int64]:
        """(rows, sources, positions) of the facts that have both, rows ascending; sources: numbers that are equal for
        equal sources. The first call reads all sources."""
        column = self._storage.attribute("source", self.rows)
        assert column is not None
        sources, positions = column.numbers(self.rows), self._storage.positions.buffer[: self.rows]
        rows = np.flatnonzero(self.alive & (sources >= 0) & (positions != NO_POSITION))
        return rows, sources[rows].astype(np.int64), positions[rows]

    def take(self, rows: Int64) -> npt.NDArray[Any]:
        """Copy of the embeddings of these rows, [M, D] as stored."""
        return take_rows(self.blocks, rows)


def indexed(view: StoreView) -> dict[str, int]:
    """The row of every fact by its id. Raises ValueError where an id is there twice."""
    ids = view.ids
    rows = dict(zip(ids, np.flatnonzero(view.alive).tolist(), strict=True))
    if len(rows) < len(ids):
        twice = next(i for i, row in zip(ids, np.flatnonzero(view.alive).tolist(), strict=True) if rows[i] != row)
        raise ValueError(f"ids: {twice!r} more than once: the store it was loaded from is damaged")
    return rows
