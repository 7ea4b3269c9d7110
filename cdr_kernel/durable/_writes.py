"""What a writer puts into one commit: facts in, replaced, out, quarantined, released, past their time.

Each function runs in a writer's turn (`Replica.change`), commits to the newest version of the record and has the
replica follow; what there is nothing to do for is no commit. After an error both are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cdr_kernel.durable._dataset import LIVE, QUARANTINED
from cdr_kernel.durable._mirror import Replica
from cdr_kernel.durable._rows import from_rows, restated, to_rows
from cdr_kernel.store import FactStore
from cdr_kernel.store._expiry import EXPIRES
from cdr_kernel.store._fact_store import Added, Checked
from cdr_kernel.validation._arrays import Int64
from cdr_kernel.validation._scalars import few


def put(replica: Replica, found: Checked, *, replace: bool) -> Added:
    """Put facts in, in place of those of the same ids where `replace`; what is quarantined stays so.

    A fact that is past its time is replaced in either case.
    """
    facts, held, record = replica.facts, replica.held, replica.record
    there = [i for i in found.ids if i in facts or i in held]
    if there and not replace:
        raise ValueError(f"ids: {few(there)} in the store already (upsert replaces)")
    kinds = {name: kind for name, (kind, _) in found.attributes.items() if name != EXPIRES}
    for name, kind in kinds.items():
        known = record.attributes.get(name, kind)
        if kind is not known and (kind, known) != (int, float):
            raise TypeError(f"attributes[{name!r}]: expected {known.__name__} as in the store, got {kind.__name__}")
    if not found.ids:
        return Added(0, found.skipped)
    record = record.add_attributes(kinds)
    following = replica.next_sequence + len(found.ids)
    sequence = np.arange(replica.next_sequence, following)
    found = found._replace(first_sequence=facts._first_numbers(found.ids, sequence))
    statuses = [held.get(i) for i in found.ids]
    old_rows = _rows_of(facts, found.ids)
    old = [*facts.view().sequence[old_rows].tolist(), *(s[0] for s in statuses if s is not None)]
    table = to_rows(record.schema, found, sequence, [None if s is None else (s[1] or "") for s in statuses])
    made = record.commit(table, np.array(old, np.int64))
    live = np.array([i for i, s in enumerate(statuses) if s is None], np.int64)
    renumbered = {
        i: (number, *its[1:])
        for i, number, its in zip(found.ids, sequence.tolist(), statuses, strict=True)
        if its is not None
    }
    replica.follow(made, found.take(live), sequence[live], old_rows, held=held | renumbered, next_sequence=following)
    return Added(len(found.ids), found.skipped)


def remove(replica: Replica, ids: Sequence[str], *, missing: str) -> int:
    """Delete facts, quarantined ones and those past their time included; returns how many."""
    facts, held = replica.facts, replica.held
    _check_known(ids, lambda i: i in facts or i in held or i in facts.withheld, missing)
    rows = _rows_of(facts, ids)
    out = [*facts.view().sequence[rows].tolist(), *(held[i][0] for i in ids if i in held)]
    if out:
        made = replica.record.commit(None, np.array(out, np.int64))
        replica.follow(made, removed=rows, held=_without(held, ids))
    return len(out)


def quarantine(replica: Replica, ids: Sequence[str], reason: str | None) -> int:
    """Take facts out of rankings, or give quarantined ones a new reason; returns how many."""
    facts, held, record = replica.facts, replica.held, replica.record
    _check_known(ids, lambda i: i in facts or i in held or i in facts.withheld)
    if ids:
        live = [i for i in ids if i in facts or i in facts.withheld]
        rows = _rows_of(facts, live)
        view = facts.view()
        numbers = zip(view.sequence[rows].tolist(), view.first_sequence[rows].tolist(), strict=True)
        given = {i: (number, reason, first) for i, (number, first) in zip(live, numbers, strict=True)}
        given |= {i: (held[i][0], reason, held[i][2]) for i in ids if i in held}
        out = np.array([number for number, _, _ in given.values()], np.int64)
        made = record.commit(restated(record, out, QUARANTINED, reason), out)
        replica.follow(made, removed=rows, held=held | given)
    return len(ids)


def release(replica: Replica, ids: Sequence[str]) -> int:
    """Let quarantined facts into rankings again, as the newest; returns how many."""
    held, record = replica.held, replica.record
    _check_known(ids, lambda i: i in held, what="not quarantined")
    if ids:
        following = replica.next_sequence + len(ids)
        out = np.array([held[i][0] for i in ids], np.int64)
        table = restated(record, out, LIVE, None, np.arange(replica.next_sequence, following))
        found, sequence = from_rows(table, replica.facts, record)
        made = record.commit(table, out)
        replica.follow(made, found, sequence, held=_without(held, ids), next_sequence=following)
    return len(ids)


def expire(replica: Replica, moment: int) -> int:
    """Delete what expires at this moment (microseconds since 1970) or before, withheld or not; returns how many."""
    table = replica.record.read(["sequence", "expires_at"], "expires_at IS NOT NULL")
    out = table["sequence"].to_numpy()[table["expires_at"].cast("int64").to_numpy() <= moment]
    if len(out):
        made = replica.record.commit(None, out)
        view, gone = replica.facts.view(), set(out.tolist())
        rows = np.flatnonzero(replica.facts.whole().alive & np.isin(view.sequence, out))
        replica.follow(made, removed=rows, held={i: its for i, its in replica.held.items() if its[0] not in gone})
    return len(out)


def _rows_of(facts: FactStore, ids: Sequence[str]) -> Int64:
    """The rows of those of these ids that are there or withheld, in their order."""
    live = [i for i in ids if i in facts]
    rows = dict(zip(live, facts.rows_of(live).tolist(), strict=True)) | {
        i: facts.withheld[i] for i in ids if i in facts.withheld
    }
    return np.array([rows[i] for i in ids if i in rows], np.int64)


def _without(
    held: dict[str, tuple[int, str | None, int]], ids: Sequence[str]
) -> dict[str, tuple[int, str | None, int]]:
    gone = set(ids)
    return {i: its for i, its in held.items() if i not in gone}


def _check_known(
    ids: Sequence[str], there: Callable[[str], bool], missing: str = "raise", what: str = "not in the store"
) -> None:
    absent = [i for i in ids if not there(i)]
    if absent and missing == "raise":
        raise KeyError(f"ids: {few(absent)} {what}")
