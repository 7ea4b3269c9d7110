"""Threads that work for many tenants: each tenant has a queue, and tenants take turns.

Work is a function, or a generator that yields wherever it may pause (see `concurrency._steps`). A turn is a few
milliseconds of one job; then the next tenant's oldest job has one, and the job waits at the end of its tenant's queue.
So a tenant with a hundred long jobs delays another one's short job by a turn, not by a hundred jobs. Where there are
several threads, one of them alone does what has proved to be long, whoever's it is: more of them would only contend for
the interpreter with the event loop. And where a step takes long, in the C++ core perhaps, there is a spare thread of
which this tenant gets no turn.

A job is dropped at its next turn once nobody waits for it: after its deadline, or where its request was cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from cdr_kernel.serve._errors import late, overloaded, unavailable

T = TypeVar("T")
Work: TypeAlias = Callable[[], T] | Generator[Any, None, T]

TURN_S = 0.005
"""How long a turn lasts; a step that takes longer is not cut."""
COMPANY_S = 1.0
"""How long a tenant counts as another one's company after it asked for something."""
LONG = 10
"""Turns after which a job is long."""
FOREVER = float("inf")
THREADS = "cdr-"
"""What the names of all threads of a server begin with."""


class Company:
    """Who asked for something lately. A tenant that is alone may use all its threads; in company each has one, since
    every further thread makes all others wait for the interpreter."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._last: dict[str, float] = {}  # when a tenant asked last

    def note(self, tenant: str) -> None:
        """A tenant asks for something."""
        self._last[tenant] = monotonic()

    @property
    def share(self) -> int:
        """How many threads may work for one tenant."""
        if len(self._last) > 1:
            before = monotonic() - COMPANY_S
            self._last = {tenant: last for tenant, last in self._last.items() if last > before}
        return 1 if len(self._last) > 1 else self._threads


@dataclass(eq=False)
class _Job:
    """Work of a tenant, and who waits for it. label: what the log calls it. turns: how many it has had."""

    tenant: str
    label: str
    steps: Generator[Any, None, Any]
    deadline: float
    future: asyncio.Future[Any]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)  # the span of the request
    turns: int = 0

    @property
    def wanted(self) -> bool:
        return not self.future.done() and monotonic() < self.deadline


class Turns:
    """See the module.

    name: of the threads. threads: how many may work for one tenant at a time, see `Company`. spare: further ones, for
    the other tenants. depth: jobs of one tenant that may wait or run, None for no limit; one more is `overloaded`.
    turn_s: how long a turn lasts.

    Threads begin with the first work, as daemons: a process that ends does not wait for them.
    """

    def __init__(
        self, name: str, threads: int = 1, *, spare: int = 0, depth: int | None = None, turn_s: float = TURN_S
    ) -> None:
        self._name = name
        self._company = Company(threads)
        self._most = threads + spare
        self._depth = depth
        self._turn_s = turn_s
        self._turn = threading.Condition()
        self._queues: dict[str, deque[_Job]] = {}  # of tenants with a job that waits, in the order of their turns
        self._long: dict[str, deque[_Job]] = {}  # the same of jobs that are long
        self._jobs: dict[str, int] = {}  # how many jobs of a tenant wait or run
        self._current: dict[threading.Thread, _Job | None] = {}
        self._closed = False

    async def run(self, tenant: str, label: str, work: Work[T], deadline: float = FOREVER) -> T:
        """What the work returns or raises.

        deadline: in `time.monotonic`; a function is finished once it has begun, whoever waits. Raises `Refusal` 504
        where the deadline passes first, 429 where the tenant's queue is full, 503 after `close`.
        """
        steps = work if isinstance(work, Generator) else _single(work)
        job = _Job(tenant, label, steps, deadline, asyncio.get_running_loop().create_future())
        with self._turn:
            if self._closed:
                raise unavailable("draining", "the server is stopping")
            if self._depth is not None and self._jobs.get(tenant, 0) >= self._depth:
                raise overloaded()
            self._jobs[tenant] = self._jobs.get(tenant, 0) + 1
            self._company.note(tenant)
            self._enqueue(job)
        limit = asyncio.timeout(None if deadline == FOREVER else deadline - monotonic())
        try:
            async with limit:
                result: T = await job.future
                return result
        except TimeoutError:
            if not limit.expired():
                raise  # the work's own
            raise late() from None
        finally:
            del job, steps, work  # a frame that holds what it raises keeps everything alive that the traceback has

    def waiting(self, tenant: str) -> int:
        """How many jobs of a tenant wait for a turn."""
        with self._turn:
            return len(self._queues.get(tenant, ())) + len(self._long.get(tenant, ()))

    def running(self) -> list[dict[str, Any]]:
        """What runs now: the thread, the tenant, the job and where it is in the code."""
        with self._turn:
            current = [(thread, job) for thread, job in self._current.items() if job is not None]
        frames = sys._current_frames()
        return [
            {
                "thread": thread.name,
                "tenant": job.tenant,
                "job": job.label,
                "where": where(frames.get(thread.ident or 0)),
            }
            for thread, job in current
        ]

    def close(self, until: float) -> bool:
        """Begin no more turns, and wait for those that have begun until this moment (`time.monotonic`). Whether all
        have ended; see `running` for the others."""
        with self._turn:
            self._closed = True
            self._queues.clear()
            self._long.clear()
            self._turn.notify_all()
        for thread in list(self._current):
            thread.join(max(0.0, until - monotonic()))
        return not any(thread.is_alive() for thread in self._current)

    def _is_long(self, job: _Job) -> bool:
        return self._most > 1 and job.turns >= LONG

    def _enqueue(self, job: _Job) -> None:
        queues = self._long if self._is_long(job) else self._queues
        queues.setdefault(job.tenant, deque()).append(job)
        if len(self._current) < self._most:
            idle = sum(each is None for each in self._current.values())
            if idle < sum(map(len, (*self._queues.values(), *self._long.values()))):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._current[thread] = None
                thread.start()
        self._turn.notify()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            result = self._work(job)
            with self._turn:
                self._current[threading.current_thread()] = None
                if result is None and not self._closed:
                    self._enqueue(job)
                elif self._jobs[job.tenant] == 1:
                    del self._jobs[job.tenant]
                else:
                    self._jobs[job.tenant] -= 1
            if result:  # told last: a client that has its answer also has its place in the queue back
                _tell(job.future, result[0])
            del job, result  # so that nothing of it stays while none waits

    def _next(self) -> _Job | None:
        with self._turn:
            while (job := self._whose_turn()) is None:
                if self._closed:
                    return None
                self._turn.wait()
            self._current[threading.current_thread()] = job
            return job

    def _whose_turn(self) -> _Job | None:
        """The oldest job of the next tenant that waits and has not its share of the threads."""
        share, working = self._company.share, [job for job in self._current.values() if job is not None]
        long_waits = self._long and not any(map(self._is_long, working))
        for queues in (self._long, self._queues) if long_waits else (self._queues,):
            for tenant, queue in queues.items():
                if sum(job.tenant == tenant for job in working) < share:
                    job = queue.popleft()
                    del queues[tenant]
                    if queue:
                        queues[tenant] = queue  # at the end: the other tenants come first
                    return job
        return None

    def _work(self, job: _Job) -> tuple[Any, ...] | None:
        """One turn of a job: None if the job goes on, else what it returned or raised; empty where nobody waits."""
        until = monotonic() + self._turn_s
        job.turns += 1
        try:
            while job.wanted:
                job.context.run(next, job.steps)
                if self._closed or monotonic() >= until:
                    return None
            job.steps.close()
        except StopIteration as end:
            return (end.value,)
        except BaseException as error:  # goes to the one who asked, and the thread goes on
            del job  # whose future will have the error, and the error's traceback has this frame
            return (error,)
        return ()


def where(frame: Any) -> list[str]:
    """Where a thread is: the innermost frames."""
    if frame is None:
        return []
    return [f"{each.filename}:{each.lineno} {each.name}" for each in traceback.extract_stack(frame)[-4:]]


def _single(work: Callable[[], T]) -> Generator[None, None, T]:
    """Work in one step."""
    return work()
    yield


def _tell(future: asyncio.Future[Any], result: Any) -> None:
    try:
        future.get_loop().call_soon_threadsafe(_deliver, future, result)
    except RuntimeError:
        return  # the loop is closed: nobody waits any more


def _deliver(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
