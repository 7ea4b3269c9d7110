"""Concurrent ranks into one `rank_many`: whoever waits while a batch runs is in the next one.

Nobody waits for a batch to fill. A second thread ranks while the first one's batch is packed and answered, so that no
core waits; the C++ core releases the GIL and has threads of its own. Tenants take turns, and a batch is of one tenant.
Where one tenant's batches take long, a spare thread ranks for the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgspec

from cdr_kernel.rank import Ranking, rank_many
from cdr_kernel.retrieve import Retriever
from cdr_kernel.serve._errors import late, overloaded, unavailable
from cdr_kernel.serve._keys import DEFAULT_TENANT
from cdr_kernel.serve._turns import Company, where
from cdr_kernel.session import Session


@dataclass(eq=False)
class Ask:
    """One rank: what `cdr_rank` takes, and until when (`time.monotonic`) an answer is wanted.

    Asks go into one batch where `alike` is equal; k may differ, since the first k of a longer ranking are the ranking
    of k. Asks for all facts (k None) and those with one `where` go among themselves, one with a multiplier goes alone.

    alike: what asks of one batch have in common, None for one that goes alone. It is made once, with the ask and before
    any lock, and is a few bytes however long `where` is: whoever holds the lock compares nothing else.
    """

    query: Any
    session: Session
    k: int | None
    deadline: float
    multiplier: Mapping[str, float] | None = None
    where: Mapping[str, Any] | None = None
    since: float = field(default_factory=monotonic)
    future: asyncio.Future[Ranking] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    alike: tuple[bool, bytes] | None = field(init=False)

    def __post_init__(self) -> None:
        self.alike = None if self.multiplier is not None else (self.k is None, _digest(self.where))


class Lane:
    """The queue of one tenant over one retriever."""

    def __init__(self, retriever: Retriever, tenant: str = DEFAULT_TENANT) -> None:
        self.retriever = retriever
        self.tenant = tenant
        self.waiting: deque[Ask] = deque()


class Batcher:
    """The threads that rank.

    most: asks in a batch. threads: how many batches of a tenant at a time, see `Company`; spare: further ones, for the
    other tenants. depth: asks that may wait in a lane; one more is `overloaded`. report: called in the thread with
    (batch size, seconds each waited, seconds it ran).
    """

    def __init__(
        self,
        *,
        most: int,
        depth: int,
        threads: int = 1,
        spare: int = 0,
        report: Callable[[int, Sequence[float], float], object] | None = None,
    ) -> None:
        self._most = most
        self._depth = depth
        self._company = Company(threads)
        self._report = report
        self._turn = threading.Condition()
        self._lanes: deque[Lane] = deque()  # those with someone waiting, in the order of their turns
        self._current: dict[threading.Thread, Lane] = {}  # whose batch a thread ranks
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name="cdr-rank", daemon=True) for _ in range(threads + spare)
        ]
        for thread in self._threads:
            thread.start()

    async def rank(self, lane: Lane, ask: Ask) -> Ranking:
        """The ranking, or a `Refusal`: 429 where the lane is full, 504 where the deadline passes first."""
        ask.loop = asyncio.get_running_loop()
        ask.future = ask.loop.create_future()
        with self._turn:
            if self._closed:
                raise unavailable("draining", "the server is stopping")
            if len(lane.waiting) >= self._depth:
                raise overloaded()
            if not lane.waiting:
                self._lanes.append(lane)
            lane.waiting.append(ask)
            self._company.note(lane.tenant)
            self._turn.notify()
        try:
            async with asyncio.timeout(ask.deadline - monotonic()):
                return await ask.future
        except TimeoutError:
            raise late() from None
        finally:
            ask.future = None  # nobody waits any more; and what holds its own error, with a traceback, stays for long

    def running(self) -> list[dict[str, Any]]:
        """What is ranked now, as `Turns.running` says it."""
        with self._turn:
            current = list(self._current.items())
        frames = sys._current_frames()
        return [
            {"thread": thread.name, "tenant": lane.tenant, "job": "rank", "where": where(frames.get(thread.ident or 0))}
            for thread, lane in current
        ]

    def close(self, until: float = float("inf")) -> bool:
        """Rank whoever still waits, then end the threads; wait for that until this moment (`time.monotonic`). Whether
        all have ended."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        for thread in self._threads:
            thread.join(None if until == float("inf") else max(0.0, until - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        """Rank the next batch; False once there is none and none will come."""
        with self._turn:
            while (lane := self._whose_turn()) is None:
                if self._closed and not self._lanes:
                    self._turn.notify_all()  # those that wait for their turn end too
                    return False
                self._turn.wait()
            self._lanes.remove(lane)
            batch = self._take(lane)
            if lane.waiting:
                self._lanes.append(lane)
            self._current[threading.current_thread()] = lane
        if batch:
            self._rank(lane, batch)
        with self._turn:
            del self._current[threading.current_thread()]
            self._turn.notify()  # the lane may have its next turn
        return True

    def _whose_turn(self) -> Lane | None:
        """The next lane where someone waits and that has not its share of the threads."""
        share, working = self._company.share, list(self._current.values())
        return next((lane for lane in self._lanes if working.count(lane) < share), None)

    def _take(self, lane: Lane) -> list[Ask]:
        """The first that waits in time, and who can go with it, in their order."""
        batch: list[Ask] = []
        others: list[Ask] = []
        now = monotonic()
        while lane.waiting and len(batch) < self._most:
            ask = lane.waiting.popleft()
            if ask.deadline <= now or ask.future is None:
                continue  # its caller knows
            if not batch or (ask.alike is not None and ask.alike == batch[0].alike):
                batch.append(ask)
            else:
                others.append(ask)
        lane.waiting.extendleft(reversed(others))
        return batch

    def _rank(self, lane: Lane, batch: list[Ask]) -> None:
        start = monotonic()
        answers: list[Ranking | BaseException]
        try:
            answers = [*self._ranked(lane, batch)]
        except Exception as error:  # whose fault it was is found by asking for each alone
            answers = [error] if len(batch) == 1 else [self._alone(lane, ask) for ask in batch]
        if self._report is not None:
            self._report(len(batch), [start - ask.since for ask in batch], monotonic() - start)
        loop = batch[0].loop
        assert loop is not None
        try:
            loop.call_soon_threadsafe(_deliver, batch, answers)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more
        finally:
            del answers

    def _ranked(self, lane: Lane, batch: list[Ask]) -> list[Ranking]:
        ks = [ask.k for ask in batch if ask.k is not None]
        found = rank_many(
            [ask.query for ask in batch],
            lane.retriever,
            [ask.session for ask in batch],
            k=max(ks) if ks else None,
            multiplier=batch[0].multiplier,
            where=batch[0].where,
        )
        return [
            ranking if ask.k is None or len(ranking) <= ask.k else ranking.take(range(ask.k))
            for ask, ranking in zip(batch, found, strict=True)
        ]

    def _alone(self, lane: Lane, ask: Ask) -> Ranking | BaseException:
        try:
            return self._ranked(lane, [ask])[0]
        except Exception as error:  # goes to the one who asked
            return error


def _digest(where: Mapping[str, Any] | None) -> bytes:
    """What tells one filter from another; b"" for none."""
    if where is None:
        return b""
    return hashlib.blake2b(msgspec.json.encode(where, order="deterministic"), digest_size=16).digest()


def _deliver(batch: list[Ask], answers: list[Ranking | BaseException]) -> None:
    for ask, answer in zip(batch, answers, strict=True):
        if ask.future is None or ask.future.done():
            continue
        if isinstance(answer, BaseException):
            ask.future.set_exception(answer)
        else:
            ask.future.set_result(answer)
