"""Moments in time, as durable stores keep them: microseconds since 1970; and when facts expire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np

from cdr_kernel.arrays import Int64
from cdr_kernel.checks import check_order
from cdr_kernel.store import Checked, StoreView

EXPIRES = "_expires_at"
"""The column of a store in memory that holds when a fact expires, which no filter sees."""
_LATEST = 253402300799  # seconds: the end of the year 9999


def now() -> int:
    """The present."""
    return time.time_ns() // 1000


def microsecond(moment: object, where: str) -> int:
    """A datetime with a time zone, or seconds since 1970, as microseconds since 1970.

    where: what errors call it. Raises TypeError for other types, ValueError for no time zone and other ranges.
    """
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ValueError(f"{where}: expected a time with its zone, got {moment.isoformat()} without")
        return round((moment - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))
    if isinstance(moment, bool) or not isinstance(moment, int | float | np.integer | np.floating):
        raise TypeError(f"{where}: expected a datetime, seconds since 1970 or None, got {type(moment).__name__}")
    if not 0.0 <= moment <= _LATEST:
        raise ValueError(f"{where}: expected 0 to {_LATEST} seconds since 1970, got {moment}")
    return round(moment * 10**6)


def microseconds(moments: Sequence[datetime | float | None] | None, m: int) -> list[int | None]:
    """When each of m facts expires; None for never, and for all where nothing was given."""
    if moments is None:
        return [None] * m
    check_order(moments, "expires_at")
    listed = list(moments)
    if len(listed) != m:
        raise ValueError(f"expires_at: expected {m} entries (one per id), got {len(listed)}")
    return [None if each is None else microsecond(each, f"expires_at[{i}]") for i, each in enumerate(listed)]


def expiring(found: Checked, expiries: Sequence[int | None]) -> Checked:
    """The facts with when each expires, microseconds since 1970 or None for never."""
    if all(moment is None for moment in expiries):
        return found
    return found._replace(attributes={**found.attributes, EXPIRES: (int, list(expiries))})


def expiries_of(view: StoreView, rows: Int64) -> list[int | None]:
    """When the facts in these rows expire, as `expiring` takes it."""
    column = view._storage.attributes.get(EXPIRES)
    return [None] * len(rows) if column is None else column.values(rows)
