"""Asking shards: replicas, retries until a deadline, hedged requests, bounded numbers in flight.

A request only reads, or is a change that a shard takes once, so it may be asked again, and of another replica. What
comes back is checked before it is believed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from cdr_kernel.concurrency._forks import Lock, in_child
from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.shard._worker import Change, Reply, Request

_POLL = 0.002  # between looks for a replica with room
_BACK_OFF, _MOST_BACK_OFF = 0.02, 1.0
_KNOWN = 4096  # sessions and tasks remembered of a replica


class ReplicaLost(Exception):
    """A replica is gone or restarting: what it was asked may be asked again."""


class Superseded(Exception):
    """A version is asked for that the shards do not keep any more."""


class Replica(Protocol):
    """One copy of a shard, somewhere."""

    def submit(self, request: Request) -> Future[Reply]:
        """Ask it; returns at once."""

    def lost(self, error: BaseException) -> bool:
        """Whether an error of a request means that the replica is gone or restarting."""

    def restart(self) -> None:
        """Have it forget everything and open its shard again."""

    def close(self) -> None:
        """End it."""


@dataclass
class Counts:
    """What happened to requests, since a store was opened. last_error: of a replica that was lost."""

    requests: int = 0
    retries: int = 0
    hedges: int = 0
    restarts: int = 0
    resyncs: int = 0
    waits: int = 0
    missing: int = 0
    last_error: str = ""


class Slot:
    """A replica with what its coordinator knows of it."""

    def __init__(self, replica: Replica, version: int) -> None:
        self.replica = replica
        self.version = version
        self._all_answered()
        self.known: OrderedDict[Any, Any] = OrderedDict()
        self._lock = Lock()
        in_child(self._all_answered)

    def _all_answered(self) -> None:
        """Count no request; a forked child waits for none of its parent's."""
        self.in_flight = 0

    def take_turn(self, limit: float) -> bool:
        """Count one request more if that leaves no more than `limit` of them; `submit` is to follow."""
        with self._lock:
            if self.in_flight >= limit:
                return False
            self.in_flight += 1
            return True

    def submit(self, request: Request) -> Future[Reply]:
        """Ask it; it is counted as asked until it answers."""
        try:
            future = self.replica.submit(request)
        except BaseException as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Reply]) -> None:
        with self._lock:
            self.in_flight -= 1

    def remember(self, key: Any, value: Any) -> None:
        """That the replica has been sent something."""
        with self._lock:
            self.known[key] = value
            self.known.move_to_end(key)
            while len(self.known) > _KNOWN:
                self.known.popitem(last=False)

    def forget(self) -> None:
        """That it may know nothing."""
        with self._lock:
            self.known.clear()


class Group:
    """A shard: its replicas, and the changes since what is in its folder.

    keep: whether replicas may lose what was changed, and must then be told again.
    """

    def __init__(self, name: str, replicas: Iterable[Replica], version: int, *, keep: bool) -> None:
        self.name = name
        self.slots = [Slot(replica, version) for replica in replicas]
        self.keep = keep
        self._lock = Lock()
        self._base = version
        self._changes: list[Change] = []

    @property
    def base(self) -> int:
        """The version from which on changes are remembered."""
        return self._base

    @property
    def version(self) -> int:
        """Changes that were decided on, whether or not replicas have seen them."""
        with self._lock:
            return self._base + len(self._changes)

    def append(self, change: Change) -> None:
        """Decide on a change."""
        with self._lock:
            self._changes.append(change)

    def since(self, version: int, upto: int) -> tuple[int, tuple[Change, ...]]:
        """The changes after one version up to another, and the version that the first of them follows."""
        with self._lock:
            start = max(version, self._base)
            return start, tuple(self._changes[start - self._base : max(0, upto - self._base)])

    def trim(self, version: int) -> None:
        """Forget the changes up to a version."""
        with self._lock:
            del self._changes[: max(0, version - self._base)]
            self._base = max(self._base, version)


@dataclass
class Limits:
    """timeout: seconds for all that one call asks. hedge_after: seconds until a second replica is asked too, None for
    never. max_in_flight: requests that a replica has at a time; more wait for their turn."""

    timeout: float = 10.0
    hedge_after: float | None = None
    max_in_flight: int = 8

    def __post_init__(self) -> None:
        for name in ("timeout", "hedge_after", "max_in_flight"):
            value = getattr(self, name)
            if name == "hedge_after" and value is None:
                continue
            kind: Any = int if name == "max_in_flight" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind):
                raise TypeError(f"{name}: expected a number, got {value!r}")
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")


@dataclass(eq=False)
class Call:
    """One question to one shard. arguments: of a replica, and whether it must be sent all that it may lack; check:
    whether a value can be right; only: the one replica to ask, None for any."""

    group: Group
    method: str
    version: int
    arguments: Callable[[Slot, bool], tuple[Any, ...]]
    check: Callable[[Any], bool] = lambda value: True
    only: Slot | None = None
    value: Any = None
    answered: bool = False
    _pending: dict[Slot, float] = field(default_factory=dict)
    _next: float = 0.0
    _failures: int = 0
    _avoid: Slot | None = None
    _damaged: set[Slot] = field(default_factory=set)

    def start(self, now: float, limits: Limits, counts: Counts, waiting: Waiting) -> float:
        """Ask a replica if it is time to; returns when it will be time to look again."""
        if self._pending:
            if limits.hedge_after is None or len(self._pending) > 1 or self.only is not None:
                return float("inf")
            due = max(self._next, next(iter(self._pending.values())) + limits.hedge_after)
            if now < due:
                return due
            slot = self._choose(limits, [s for s in self.group.slots if s not in self._pending])
            if slot is None:
                self._next = now + _POLL
                return self._next
            counts.hedges += 1
        else:
            if now < self._next:
                return self._next
            slots = self.group.slots if self.only is None else [self.only]
            slot = self._choose(limits, slots)
            if slot is None:
                counts.waits += 1
                self._next = now + _POLL
                return self._next
        self._send(slot, now, False, slot.version, counts, waiting)
        return float("inf") if limits.hedge_after is None else now + limits.hedge_after

    def _choose(self, limits: Limits, slots: Sequence[Slot]) -> Slot | None:
        """The least busy replica with room, one that just failed last."""
        for slot in sorted(slots, key=lambda slot: (slot is self._avoid, slot.in_flight)):
            if slot not in self._damaged and slot.take_turn(limits.max_in_flight):
                return slot
        return None

    def _send(
        self,
        slot: Slot,
        now: float,
        full: bool,
        since: int,
        counts: Counts,
        waiting: Waiting,
    ) -> None:
        since, changes = self.group.since(since, self.version)
        request = Request(self.method, self.version, self.arguments(slot, full), since, changes)
        counts.requests += 1
        self._pending[slot] = now
        waiting[slot.submit(request)] = (self, slot)

    def take(
        self,
        slot: Slot,
        future: Future[Reply],
        now: float,
        counts: Counts,
        waiting: Waiting,
    ) -> None:
        """What a replica answered."""
        if self.answered:
            return
        self._pending.pop(slot, None)
        error = future.exception()
        if isinstance(error, DamagedFileError):
            counts.last_error = f"{self.group.name}: {error}"
            self._damaged.add(slot)
            if self.only is not None:  # it is told of the change when it is whole again
                self.answered = True
            elif self._damaged.issuperset(self.group.slots):
                raise error
            else:
                self._failed(slot, now, counts)
            return
        if error is not None:
            if not slot.replica.lost(error):
                raise error
            counts.last_error = f"{self.group.name}: {error!r}"
            self._failed(slot, now, counts)
            return
        reply = future.result()
        if reply.status == "ok":
            slot.version = max(slot.version, reply.version)
            if self.check(reply.value):
                self.value, self.answered = reply.value, True
                return
            slot.replica.restart()
            counts.restarts += 1
            self._failed(slot, now, counts)
            return
        counts.resyncs += 1
        if reply.status == "need":
            self._again(slot, now, True, slot.version, counts, waiting)
            return
        if reply.version >= self.version:
            raise Superseded
        slot.version = reply.version
        slot.forget()
        if reply.version < self.group.base:  # its folder was replaced since it was opened
            slot.replica.restart()
            counts.restarts += 1
            self._failed(slot, now, counts)
            return
        self._again(slot, now, False, reply.version, counts, waiting)

    def _again(self, slot: Slot, now: float, full: bool, since: int, counts: Counts, waiting: Waiting) -> None:
        """Ask a replica that has just answered once more, whatever waits."""
        slot.take_turn(float("inf"))
        self._send(slot, now, full, since, counts, waiting)

    def _failed(self, slot: Slot, now: float, counts: Counts) -> None:
        slot.forget()
        self._avoid = slot
        counts.retries += 1
        self._next = now + min(_MOST_BACK_OFF, _BACK_OFF * 2**self._failures)
        self._failures += 1


Waiting: TypeAlias = "dict[Future[Reply], tuple[Call, Slot]]"


def ask_all(calls: Sequence[Call], deadline: float, limits: Limits, counts: Counts) -> list[Call]:
    """Ask until all have answered or the deadline (of ``time.monotonic``) has passed; returns those that did not.

    Raises what a shard raised, and Superseded.
    """
    waiting: Waiting = {}
    while True:
        open_calls = [call for call in calls if not call.answered]
        now = time.monotonic()
        if not open_calls or now >= deadline:
            counts.missing += len(open_calls)
            return open_calls
        wake = deadline
        for call in open_calls:
            wake = min(wake, call.start(now, limits, counts, waiting))
        pause = max(0.0, wake - time.monotonic())
        if not waiting:
            time.sleep(min(pause, deadline - now))
            continue
        done, _ = wait(waiting, timeout=pause if pause > 0 else _POLL, return_when=FIRST_COMPLETED)
        now = time.monotonic()
        for future in done:
            call, slot = waiting.pop(future)
            call.take(slot, future, now, counts, waiting)
