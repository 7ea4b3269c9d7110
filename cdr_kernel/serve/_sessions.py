"""The sessions of one tenant, in this process: for a while since their last use, and as many as there is room for.

A session that is served is never changed in place. Who changes one makes a snapshot, changes that, and `commit`s it: a
rank that runs meanwhile keeps the state it began with, and an error leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import getsizeof
from time import monotonic
from typing import Protocol

from cdr_kernel.serve._errors import invalid, not_found
from cdr_kernel.serve._idempotency import Answers, Done
from cdr_kernel.serve._window_memory import KeptWindow
from cdr_kernel.session import Session

KEPT_ANSWERS = 16
"""Answers of updates that a session keeps, the last ones."""


def new_id() -> str:
    """An id that nobody guesses."""
    return uuid.uuid4().hex


@dataclass(frozen=True, eq=False)
class Version:
    """A session at one moment. number: no other version of it has this one. answers: of its last updates by
    Idempotency-Key. nbytes: see `size_of_session`, which is asked where it is not known."""

    session: Session
    number: int = 1
    answers: dict[str, Done] = field(default_factory=dict)
    nbytes: int = 0

    def __post_init__(self) -> None:
        if not self.nbytes:
            object.__setattr__(self, "nbytes", size_of_session(self.session, self.answers))


@dataclass(eq=False)
class Entry:
    """A session that is served.

    now: replaced as a whole by every change, so whoever takes it once has one consistent version. window: of its last
    ranking. thresholds: what `similarity_thresholds` says, once it was asked. lock: held by whoever changes it.
    """

    id: str
    now: Version
    window: KeptWindow | None = None
    thresholds: dict[str, float] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    nbytes: int = 0
    used: float = 0.0


def with_answer(answers: dict[str, Done], key: str | None, done: Done) -> dict[str, Done]:
    """The kept answers and one more."""
    if key is None:
        return answers
    kept = [*((k, v) for k, v in answers.items() if k != key), (key, done)]
    return dict(kept[-KEPT_ANSWERS:])


def size_of_session(session: Session, answers: dict[str, Done]) -> int:
    """About what a session takes in memory with its kept answers, bytes. Takes a while where it has packed many facts:
    for the pool."""
    state = session.state
    vectors = 2 * session.embeddings.nbytes
    texts = sum(getsizeof(item.id) + getsizeof(item.label) + getsizeof(item.text) + 400 for item in session.sub_queries)
    guard = 0 if state.guard is None else state.guard.nbytes
    feedback = 0
    if state.feedback is not None:
        direction = 0 if state.feedback.direction is None else state.feedback.direction.nbytes
        words = sum(90 + getsizeof(word) for word, _ in state.feedback.words or ())
        feedback = direction + words + sum(8 + getsizeof(id) for id in state.feedback.fact_ids)
    packed = sum(map(getsizeof, state.packed)) + 100 * len(state.packed)
    outputs = sum(map(getsizeof, state.outputs))
    changing = packed + outputs + 200 * len(state.coverage) + 100 * len(state.words) + guard + feedback
    kept = sum(getsizeof(key) + done.nbytes for key, done in answers.items())
    return 2000 + vectors + texts + changing + kept


def check_size(session: Session, answers: dict[str, Done], most: int) -> int:
    """What `size_of_session` says. Raises `Refusal` 413 for more than a tenant's sessions may take together."""
    size = size_of_session(session, answers)
    if size > most:
        expected = f"a session of at most {most} bytes (--session-mb): shorter outputs, or fewer windows and names"
        raise invalid("session", expected, f"{size} bytes", status=413, code="too_large")
    return size


def size_of(entry: Entry) -> int:
    """About what a session takes in memory as it is served, bytes."""
    window = 0 if entry.window is None else entry.window.nbytes
    return entry.now.nbytes + window + 100 * len(entry.thresholds or ())


class Sessions(Protocol):
    """Where the sessions of a tenant are: here, or shared through Redis.

    answers: kept for requests that belong to no session.
    """

    answers: Answers

    async def get(self, id: str) -> Entry:
        """The session as it is now, which is thereby used. Raises `Refusal` 404."""

    async def create(self, session: Session, *, id: str | None = None, answers: dict[str, Done] | None = None) -> Entry:
        """A session from now on. Raises KeyError where the id is taken."""

    async def commit(
        self, entry: Entry, before: Version, session: Session, answers: dict[str, Done], *, nbytes: int = 0
    ) -> bool:
        """Put a changed snapshot of a version in its place; False, and nothing done, where somebody else was first.
        nbytes: what `size_of_session` says of it, 0 where it was not asked."""

    async def keep_window(self, entry: Entry, window: KeptWindow) -> None:
        """Remember a ranking until the next commit."""

    async def window_of(self, entry: Entry) -> KeptWindow | None:
        """The last ranking, by whichever replica; it may be of an earlier version."""

    async def delete(self, id: str) -> bool:
        """Forget a session; whether there was one."""


class LocalSessions:
    """Sessions in memory.

    ttl_s, most, max_bytes: as in `Settings`; the newest session stays whatever it takes. evicted: called with "ttl" or
    "lru" for each that goes. moved: called with (before, after) where a commit replaces a session.
    """

    def __init__(
        self,
        *,
        ttl_s: float,
        most: int,
        max_bytes: int,
        evicted: Callable[[str], object] | None = None,
        moved: Callable[[Session, Session], object] | None = None,
    ) -> None:
        self.answers = Answers(ttl_s)
        self._ttl_s = ttl_s
        self._most = most
        self._max_bytes = max_bytes
        self._evicted = evicted or (lambda reason: None)
        self._moved = moved or (lambda before, after: None)
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def peek(self, id: str) -> Entry | None:
        """The entry, if it is here and in time; it is then the most recently used one."""
        self.sweep()
        entry = self._entries.get(id)
        if entry is not None:
            entry.used = monotonic()
            self._entries.move_to_end(id)
        return entry

    async def get(self, id: str) -> Entry:
        """See `Sessions`."""
        entry = self.peek(id)
        if entry is None:
            raise not_found("session")
        return entry

    async def create(self, session: Session, *, id: str | None = None, answers: dict[str, Done] | None = None) -> Entry:
        """See `Sessions`."""
        entry = Entry(id or session.id, Version(session, answers=answers or {}))
        if self.peek(entry.id) is not None:
            raise KeyError(entry.id)
        self.put(entry)
        return entry

    def put(self, entry: Entry) -> None:
        """Hold an entry, in place of one with its id."""
        self.drop(entry.id)
        entry.used = monotonic()
        self._entries[entry.id] = entry
        self.measure(entry)

    def measure(self, entry: Entry) -> None:
        """Take an entry's size again, and make room."""
        if self._entries.get(entry.id) is not entry:
            return
        before, entry.nbytes = entry.nbytes, size_of(entry)
        self.nbytes += entry.nbytes - before
        while len(self._entries) > 1 and (len(self._entries) > self._most or self.nbytes > self._max_bytes):
            oldest = next(iter(self._entries))
            if oldest == entry.id:  # measured, not used: the others are newer, and it may stay
                self._entries.move_to_end(oldest)
                continue
            self.drop(oldest)
            self._evicted("lru")

    async def commit(
        self, entry: Entry, before: Version, session: Session, answers: dict[str, Done], *, nbytes: int = 0
    ) -> bool:
        """See `Sessions`. Raises `Refusal` 404 where the session has gone meanwhile."""
        if self._entries.get(entry.id) is not entry:
            raise not_found("session")
        if entry.now is not before:
            return False
        self.replace(entry, Version(session, before.number + 1, answers, nbytes))
        return True

    def replace(self, entry: Entry, version: Version) -> None:
        """What a commit does to an entry."""
        self._moved(entry.now.session, version.session)
        entry.now, entry.window = version, None
        self.measure(entry)

    async def keep_window(self, entry: Entry, window: KeptWindow) -> None:
        """See `Sessions`."""
        if window.version == entry.now.number:
            entry.window = window
            self.measure(entry)

    async def window_of(self, entry: Entry) -> KeptWindow | None:
        """See `Sessions`."""
        return entry.window

    async def delete(self, id: str) -> bool:
        """See `Sessions`."""
        self.sweep()
        return self.drop(id)

    def drop(self, id: str) -> bool:
        """Forget an entry; whether there was one."""
        entry = self._entries.pop(id, None)
        if entry is not None:
            self.nbytes -= entry.nbytes
            entry.nbytes = 0
        return entry is not None

    def sweep(self) -> None:
        """Forget what was not used for so long."""
        since = monotonic() - self._ttl_s
        while self._entries:
            oldest = next(iter(self._entries.values()))
            if oldest.used > since:
                return
            self.drop(oldest.id)
            self._evicted("ttl")
