"""The facts of some rows of a store, made when they are looked at.

    facts = StoredFacts(view, rows)                          # no fact is made yet
    facts[0], facts[:8], len(facts)

A ranking may hold a tenth of a store of millions, of which an envelope takes a dozen: what decides that are arrays. The
functions below read one thing of facts without making them where that can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from cdr_kernel.store._view import Fact, StoreView
from cdr_kernel.validation._arrays import Int64

_CHUNK = 4096  # facts made at a time


class StoredFacts(Sequence[Fact]):
    """Facts of a view in the order of these rows, int64 [M]; made anew at every look, from a version that stays as it
    was. Equal to the tuple of them, which is what it is pickled and copied as; a slice of it is that tuple's.

    It keeps the version of the store alive: ``tuple(facts)`` does not.
    """

    def __init__(self, view: StoreView, rows: Int64) -> None:
        self.view = view
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Fact: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Fact, ...]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self.view.facts(self.rows[at]))
        return self.view.facts(self.rows[at : at + 1] if at >= 0 else self.rows[[at]])[0]

    def __iter__(self) -> Iterator[Fact]:
        for start in range(0, len(self.rows), _CHUNK):
            yield from self.view.facts(self.rows[start : start + _CHUNK])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredFacts | tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        return f"<StoredFacts of {len(self)} rows>"


def taken(facts: Sequence[Fact], positions: Int64) -> Sequence[Fact]:
    """The facts at these positions, in this order."""
    if isinstance(facts, StoredFacts):
        return StoredFacts(facts.view, facts.rows[positions])
    return tuple(facts[i] for i in positions.tolist())


def ids_of(facts: Sequence[Fact]) -> list[str]:
    """Their ids."""
    return facts.view.ids_at(facts.rows) if isinstance(facts, StoredFacts) else [fact.id for fact in facts]


def sequences_of(facts: Sequence[Fact]) -> Int64:
    """Their sequence numbers, int64 [M]."""
    if isinstance(facts, StoredFacts):
        return facts.view.sequence[facts.rows]
    return np.array([fact.sequence for fact in facts], np.int64)


def text_of(facts: Sequence[Fact], position: int) -> str:
    """The text of the fact at this position."""
    return facts.view.text_of(int(facts.rows[position])) if isinstance(facts, StoredFacts) else facts[position].text
