"""Log lines of JSON on standard error: who asked for what and how it went, never a text, a vector or a key."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import time
import traceback
from typing import Any

NAME = "cdr_kernel.serve"


def to_stderr() -> None:
    """Have this package's log lines go to standard error; for a process that serves and does nothing else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def event(name: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with its fields."""
    logging.getLogger(NAME).log(level, name, extra={"fields": fields})


class Seldom:
    """Log lines of what may happen thousands of times a second: one for each name in `period_s` seconds.

    A line says how often it has happened since the line before (`count`).
    """

    def __init__(self, period_s: float = 10.0) -> None:
        self._period_s = period_s
        self._last: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def event(self, name: str, what: str, level: int = logging.WARNING, **fields: Any) -> None:
        """Log an event unless its last line is too new. what: tells it from others of the same name."""
        now = time.monotonic()
        self._counts[what] = self._counts.get(what, 0) + 1
        if now - self._last.get(what, -math.inf) >= self._period_s:
            event(name, level, what=what, count=self._counts.pop(what), **fields)
            self._last[what] = now


def request_line(**fields: Any) -> None:
    """Log a request."""
    event("request", **fields)


def fault(error: BaseException, request_id: str) -> None:
    """Log where an error that nobody foresaw came from; not its message, which may hold what a request said."""
    event("fault", logging.ERROR, request_id=request_id, error=type(error).__name__, where=_frames(error))


def failed(error: Exception) -> None:
    """Log why the stores could not be opened: the type, the path and what is wrong with it.

    The message is logged of errors that this package and the system word, which are about paths and settings. Of any
    other the log has the place alone.
    """
    fields: dict[str, Any] = {"error": type(error).__name__}
    if isinstance(error, OSError) and error.strerror:
        fields["message"] = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, OSError | ValueError | TypeError | KeyError | ImportError):
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        fields["message"] = " ".join(str(message).split())
    else:
        fields["where"] = _frames(error)
    event("failed", logging.ERROR, **fields)


def lost(request_id: str, operation: str) -> None:
    """Log that a request was ended before its answer was on its way."""
    what = "it was not answered in the time that stopping has"
    event("lost", logging.ERROR, request_id=request_id, operation=operation, what=what)


def unread(request_id: str, operation: str, size: int) -> None:
    """Log that a client did not take its answer: it read too slowly, or went away."""
    what = "the client did not take the answer in time, or went away"
    event("unread", logging.WARNING, request_id=request_id, operation=operation, bytes=size, what=what)


def _frames(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-8:]]


def without_cancellations(record: logging.LogRecord) -> bool:
    """A filter for the loggers of an ASGI server, which has a traceback for what `lost` has said."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        return json.dumps(line, ensure_ascii=True, default=str)
