"""Sessions of a mode that a test is given by its name."""

from __future__ import annotations

from typing import Any

from cdr_kernel import Session


def session_of_mode(sub_queries: Any, *, mode: Any = "spec", **keywords: Any) -> Session:
    """A session of this mode."""
    if mode == "calibrated":
        return Session.calibrated(sub_queries, **keywords)
    return Session(sub_queries, **keywords)
