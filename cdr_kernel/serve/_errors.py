"""Every refusal in one shape, and what an error of the library becomes on the wire.

{"error": {"code", "message", "field", "expected", "got"}, "request_id"}
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NoReturn

import msgspec

from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.serve.faults import DAMAGED, IO_ERROR, NO_SPACE, StorageFault
from cdr_kernel.session import SessionEnded
from cdr_kernel.spec.constants import CKF_EXHAUSTED, LIMIT_REACHED, SAFETY_BUDGET_DEPLETED, TASK_COMPLETE

NOT_FOUND = "there is no such {what}"

_LIBRARY = (  # how the library words its errors
    re.compile(r"^(?P<field>[\w ./\[\]'\"-]{1,120}?): expected (?P<expected>.*?)(?:, got (?P<got>.*))?$", re.S),
    re.compile(r"^(?P<field>[\w ./\[\]'\"-]{1,120}?) must (?P<expected>.*?)(?:, got (?P<got>.*))?$", re.S),
    re.compile(r"^(?P<field>[\w ./\[\]'\"-]{1,120}?) (?P<expected>names .*, the session has .*)$", re.S),
    re.compile(r"^(?P<field>[a-z_]+): .*$", re.S),
)

_HERE = (  # what it says to those who call it in Python, and for those who ask over HTTP: field, expected, got
    (
        re.compile(r"^ids: (?P<ids>.*) in the store already \(upsert replaces\)$", re.S),
        ("facts.id", "ids that are not in the store (PUT /v1/facts replaces those that are)", "{ids}"),
    ),
    (re.compile(r"^ids: (?P<ids>.*) more than once in one call$", re.S), ("facts.id", "each id once", "{ids} again")),
    (
        re.compile(
            r"^embeddings: (?P<what>[a-z ]+) as (?P<type>\w+): (?P<ids>.*) \(on_invalid='skip' .*\)$",
            re.S,
        ),
        (
            "facts.embedding",
            'finite numbers that are not all zeros ("on_invalid": "skip" leaves out facts with others)',
            "{what} as {type} in {ids}",
        ),
    ),
    (
        re.compile(r"^(?P<field>\w+\[.*\]): expected (?P<kind>\w+) as in the store, got (?P<got>\w+)$", re.S),
        ("{field}", "{kind}, as in the store", "{got}"),
    ),
    (
        re.compile(r"^(?P<field>\w+\[.*\]): expected values of one type, got (?P<got>[\w, ]+)$", re.S),
        ("{field}", "values of one type", "{got}"),
    ),
    (
        re.compile(r"^ids: (?P<ids>.*) not in the store$", re.S),
        ("ids", "ids of facts that are in the store", "{ids}"),
    ),
    (
        re.compile(r"^ids: (?P<ids>.*) not quarantined$", re.S),
        ("ids", "ids of facts that are quarantined", "{ids}"),
    ),
)
_TYPES = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false"}
"""What a type of Python is called in JSON."""


class ErrorDetail(msgspec.Struct):
    """What is wrong, for programs and for people. `field` names the part of the request, where one is to blame."""

    code: str
    message: str
    field: str | None = None
    expected: str | None = None
    got: str | None = None


class ErrorBody(msgspec.Struct):
    """The answer to a request that is refused: nothing was changed."""

    error: ErrorDetail
    request_id: str


class Refusal(Exception):
    """A request that is not done, with its status. fault: what was wrong with the store, where that is why."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        field: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        headers: dict[str, str] | None = None,
        fault: StorageFault | None = None,
    ) -> None:
        super().__init__(message)
        self.fault = fault
        self.status = status
        self.detail = ErrorDetail(code, message, field, expected, got)
        self.headers = headers or {}


def invalid(field: str, expected: str, got: str | None = None, *, status: int = 422, code: str = "invalid") -> Refusal:
    """Bad input: what was expected in this field, and what came."""
    came = "" if got is None else f", got {got}"
    return Refusal(status, code, f"{field}: expected {expected}{came}", field=field, expected=expected, got=got)


def not_found(what: str) -> Refusal:
    """One answer for what is not there, what was evicted and what is another's."""
    return Refusal(404, "not_found", NOT_FOUND.format(what=what))


def quarantined(id: str, reason: str | None) -> Refusal:
    """A fact that its tenant has taken out of every ranking."""
    why = "" if reason is None else f" ({reason})"
    return Refusal(404, "quarantined", f"the fact {id!r} is quarantined{why}: it is in no ranking until it is released")


def overloaded(message: str = "too many requests at once, try again") -> Refusal:
    """Too much at once."""
    return Refusal(429, "overloaded", message, headers={"Retry-After": "1"})


def too_large_answer(most: int, size: int | None = None, field: str = "the answer") -> Refusal:
    """An answer that would be too large. field: what of the request makes it so; size: None where it is not known."""
    expected = f"what makes an answer of at most {most} bytes (--max-answer-mb): ask for less at a time"
    return invalid(field, expected, f"{'more' if size is None else size} bytes", status=413, code="too_large")


def misdirected(named: list[str], hosts: Collection[str]) -> Refusal:
    """A request for a host that this server is not: perhaps of a page in a browser, under a name of its own."""
    expected = f"one of {', '.join(sorted(hosts))} (--allowed-host names others)"
    got = ", ".join(named)[:100] or "none"
    message = f"Host: expected {expected}, got {got}"
    return Refusal(421, "misdirected", message, field="Host", expected=expected, got=got)


def late() -> Refusal:
    """The deadline has passed, and nothing was changed."""
    return Refusal(504, "deadline", "the deadline passed before this was done; nothing was changed")


def internal() -> Refusal:
    """A fault of the server."""
    return Refusal(500, "internal", "a fault of the server, see its log for this request_id")


def unavailable(code: str, message: str) -> Refusal:
    """Not now."""
    return Refusal(503, code, message, headers={"Retry-After": "1"})


_OPENS = {
    TASK_COMPLETE: "more sub_queries (POST .../extend)",
    LIMIT_REACHED: "a higher max_windows (POST .../extend)",
    CKF_EXHAUSTED: "new facts, and then a rank",
    SAFETY_BUDGET_DEPLETED: "a higher safety_budget (POST .../extend)",
}


def ended(error: SessionEnded) -> Refusal:
    """No other window of a session that has ended, and what opens it again."""
    opens = " and ".join(_OPENS[reason] for reason in error.reasons)
    message = f"the session has ended: {', also '.join(error.reasons)}. What opens it again: {opens}; or POST .../reset"
    return Refusal(409, "session_ended", message, headers={"CRP-Context-Continuation-Status": error.reasons[0]})


_FAULTS = {
    DAMAGED: (500, "a file of the store is damaged"),
    NO_SPACE: (507, "the disk is full, and nothing was changed"),
    IO_ERROR: (500, "the store could not be read or written"),
}


def of_fault(fault: StorageFault) -> Refusal:
    """A request that the store failed. It names no file: the log does."""
    status, what = _FAULTS[fault.kind]
    cause = f" ({fault.cause})" if fault.cause else ""
    return Refusal(status, fault.kind, f"{what}{cause}: see the server's log for this request_id", fault=fault)


def of_library(error: Exception) -> Refusal | None:
    """What a ValueError, TypeError, KeyError, SessionEnded or fault of a store becomes; None for any other error."""
    fault = StorageFault.of(error)
    if fault is not None:
        return of_fault(fault)
    if isinstance(error, SessionEnded):
        return ended(error)
    if isinstance(error, EmbeddingModelMismatch):
        expected, got = f"embedding model {error.expected!r}", None if error.got is None else repr(error.got)
        return Refusal(409, "model_mismatch", str(error), field="embedding_model", expected=expected, got=got)
    if isinstance(error, KeyError):
        message = str(error.args[0]) if error.args else "not found"
        return _here(message, 404, "not_found") or Refusal(404, "not_found", message)
    if isinstance(error, ValueError | TypeError):
        message = str(error)
        return _here(message, 422, "invalid") or Refusal(422, "invalid", message, **_worded(message))
    return None


def _here(message: str, status: int, code: str) -> Refusal | None:
    """A message of `_HERE` in the words of the API."""
    for pattern, parts in _HERE:
        found = pattern.match(message)
        if found is not None:
            said = found.groupdict()
            for name in ("kind", "got"):
                if name in said:
                    said[name] = ", ".join(_TYPES.get(each, each) for each in said[name].split(", "))
            field, expected, got = (part.format_map(said) for part in parts)
            return invalid(field, expected, got, status=status, code=code)
    return None


def _worded(message: str) -> dict[str, Any]:
    for pattern in _LIBRARY:
        found = pattern.match(message)
        if found is not None:
            parts = {"expected": None, "got": None, **found.groupdict()}
            return {name: parts[name] for name in ("field", "expected", "got")}
    return {}


def refuse(error: Exception) -> NoReturn:
    """Raise what `of_library` makes of it, else the error itself."""
    refusal = of_library(error)
    try:
        if refusal is None:
            raise error
        raise refusal from error
    finally:
        del error, refusal  # a frame that holds what it raises keeps everything alive that the traceback has
