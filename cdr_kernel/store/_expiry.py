"""Moments in time, as durable stores keep them: microseconds since 1970; and when facts expire."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from cdr_kernel.store._atomic_folder import draft, identity_of
from cdr_kernel.store._columns import EXPIRES as EXPIRES  # for those who import it from here
from cdr_kernel.store._fact_store import Checked, StoreView
from cdr_kernel.validation._arrays import Int64
from cdr_kernel.validation._scalars import check_order

GRACE = 7 * 86400.0
"""Seconds between the two looks at the clock that both must find a fact past its time before it is deleted."""
_LOOKS = 8  # that are noted at most in the time of grace
_LATEST = 253402300799  # seconds: the end of the year 9999


def now() -> int:
    """The present."""
    return time.time_ns() // 1000


def confirmed(path: Path, moment: int, grace: float) -> int | None:
    """The latest moment that had come for sure, as far as two looks at clocks can tell; None without such looks.

    The file has the moments of earlier looks, and gets this one. What had expired at a look that is at least `grace`
    seconds older than this one had expired by both. So one wrong clock deletes nothing that had not expired. Looks of
    clocks that were ahead of this moment are forgotten. A file that is gone or damaged counts as no look.

    Args:
        path: The file of the looks; whoever writes it has the turn.
        moment: This look, microseconds since 1970.
        grace: Seconds. With 0 this look is enough.
    """
    if grace == 0.0:
        return moment
    before, least = _looks(path), round(grace * 10**6)
    looks = [look for look in before if look <= moment]
    old, new = [look for look in looks if look <= moment - least], [look for look in looks if look > moment - least]
    if not new or moment - new[-1] >= least // _LOOKS:
        new.append(moment)
    looks = [*old[-1:], *new]
    if looks != before:
        said = {"looks": looks}
        with draft(path) as written:
            written.write_text(json.dumps({**said, "identity": identity_of(said)}), encoding="ascii")
            os.replace(written, path)
    return old[-1] if old else None


def _looks(path: Path) -> list[int]:
    """The moments of earlier looks, ascending."""
    try:
        said = json.loads(path.read_bytes())
        return sorted(said["looks"]) if said["identity"] == identity_of(said) else []
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


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
