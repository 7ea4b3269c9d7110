"""The state of one task over its windows."""

from __future__ import annotations

from cdr_kernel.session._session import Session
from cdr_kernel.session._settings import CalibratedSettings, SpecSettings
from cdr_kernel.session._task import CoverageEntry, Exit, SessionEnded, SubQuery, WindowReport, depth_from_words
from cdr_kernel.session._token import SessionToken, StoreBehind

__all__ = [
    "CalibratedSettings",
    "CoverageEntry",
    "Exit",
    "Session",
    "SessionEnded",
    "SessionToken",
    "SpecSettings",
    "StoreBehind",
    "SubQuery",
    "WindowReport",
    "depth_from_words",
]
