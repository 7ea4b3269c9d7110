"""Whole stores into and out of a record: facts of a store in memory, and the file that `durable._transfer` knows.

What comes in goes into the record of a draft alone, batch by batch; whoever opens it has the facts in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from cdr_kernel.durable import _transfer
from cdr_kernel.durable._dataset import LIVE, Record
from cdr_kernel.durable._rows import check_text, to_rows
from cdr_kernel.store import FactStore
from cdr_kernel.store._expiry import EXPIRES, expiries_of, expiring
from cdr_kernel.store._fact_store import Checked, StoreView
from cdr_kernel.validation._arrays import Int64

Advance: TypeAlias = Callable[[int], object]

_BATCH = 65536


def facts_into(record: Record, empty: FactStore, facts: FactStore, advance: Advance | None = None) -> None:
    """Put all facts of a store into a new record, in their order and with their sequence numbers.

    empty: a store that checks them, of the record's dimension and dtype. advance: told of facts as they are done.
    """
    view = facts.whole()
    rows = np.flatnonzero(view.alive)
    for start in range(0, len(rows), _BATCH):
        part = rows[start : start + _BATCH]
        record = _append(record, of_view(view, part, empty), view.sequence[part])
        if advance is not None:
            advance(len(part))
    _end(record, facts.next_sequence)


def exchanged_into(
    record: Record, empty: FactStore, found: _transfer.Exchanged, advance: Advance | None = None
) -> None:
    """Put all facts of an exchanged file into a new record: the same numbers, times and quarantine."""
    last = -1
    for batch in found.batches():
        sequence = np.array(batch["sequence"], np.int64)
        if sequence[0] <= last or (np.diff(sequence) <= 0).any():
            raise ValueError(f"{found.path}: sequence: expected ascending numbers")
        last = int(sequence[-1])
        names = ("id", "text", "embedding", "importance", "source", "position", "attributes")
        first = np.array(batch["first_sequence"], np.int64)
        if (first < 0).any() or (first > sequence).any():
            raise ValueError(f"{found.path}: first_sequence: expected 0 up to the number in sequence")
        checked = expiring(empty.check(*(batch[name] for name in names)), batch["expires_at"])
        checked = checked._replace(first_sequence=first)
        held = [
            None if status == LIVE else (reason or "")
            for status, reason in zip(batch["status"], batch["reason"], strict=True)
        ]
        record = _append(record, checked, sequence, held, batch["added_at"])
        if advance is not None:
            advance(len(sequence))
    _end(record, found.next_sequence)


def exported(record: Record, file: Path, next_sequence: int) -> int:
    """Write all facts of a version, quarantined ones included, to an exchanged file; returns how many.

    next_sequence: the least number that the next fact of a store made of it may get.
    """
    table = record.read().sort_by("sequence")
    following = max(next_sequence, int(table["sequence"][-1].as_py()) + 1 if table.num_rows else 0)
    _transfer.write(file, table, record.about, record.attributes, following)
    return int(table.num_rows)


def _append(
    record: Record,
    found: Checked,
    sequence: Int64,
    held: Sequence[str | None] | None = None,
    added_at: Sequence[int] | None = None,
) -> Record:
    check_text(found)
    record = record.add_attributes({name: kind for name, (kind, _) in found.attributes.items() if name != EXPIRES})
    nothing = [None] * len(found.ids) if held is None else held
    return record.commit(to_rows(record.schema, found, sequence, nothing, added_at))


def _end(record: Record, next_sequence: int) -> None:
    record.check_unique()
    record.persist_next(next_sequence)


def of_view(view: StoreView, rows: Int64, store: FactStore) -> Checked:
    """Facts of another store, as this one takes them, with when they expire and the numbers they were added with."""
    facts = view.facts(rows)
    names = view.attribute_names
    found = store.check(
        [fact.id for fact in facts],
        [fact.text for fact in facts],
        view.take(rows),
        [fact.importance for fact in facts],
        [fact.source for fact in facts],
        [fact.position for fact in facts],
        {name: [fact.attributes.get(name) for fact in facts] for name in names},
    )
    return expiring(found, expiries_of(view, rows))._replace(first_sequence=view.first_sequence[rows])
