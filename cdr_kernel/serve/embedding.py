"""Texts to vectors for many requests by one thread: in batches, by turns, and only while somebody waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeAlias

import numpy as np

from cdr_kernel.serve.errors import late, unavailable

Embed: TypeAlias = Callable[[list[str]], Any]

BATCH = 32
"""Texts that are embedded in one turn: as many as a sentence-transformers model takes at once by itself."""
JOIN_S = 1.0
"""How long `close` waits for the batch that the model has begun."""
THREAD = "cdr-embed"


@dataclass(eq=False)
class _Job:
    """The different texts of one request, and the rows of those that are done."""

    embed: Embed
    texts: list[str]
    deadline: float
    future: asyncio.Future[np.ndarray[Any, Any]]
    rows: list[np.ndarray[Any, Any]] = field(default_factory=list)
    done: int = 0

    @property
    def wanted(self) -> bool:
        return not self.future.done() and monotonic() < self.deadline


class Embedding:
    """The thread that embeds, made with the first text. A request's batches take turns with those of others."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    async def rows(self, embed: Embed, texts: list[str], deadline: float) -> np.ndarray[Any, Any]:
        """Vectors [n, D] of n >= 1 texts, in their order; equal texts are embedded once.

        deadline: in `time.monotonic`. Raises `Refusal` 504 once it has passed, 503 after `close`, and what `embed`
        raises. A batch that has begun is finished then, whoever waits for it, and no other one is begun.
        """
        # The longest first, as such models go about it themselves: a batch takes as long as its longest text.
        different = sorted(dict.fromkeys(texts), key=len, reverse=True)
        job = _Job(embed, different, deadline, asyncio.get_running_loop().create_future())
        with self._turn:
            if self._closed:
                raise unavailable("draining", "the server is stopping")
            if self._thread is None:
                # A daemon: a process that ends does not wait for a model.
                self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
                self._thread.start()
            self._jobs.append(job)
            self._turn.notify()
        limit = asyncio.timeout(deadline - monotonic())
        try:
            async with limit:
                found = await job.future
        except TimeoutError:
            if not limit.expired():
                raise  # the model's own
            raise late() from None
        row_of = {text: row for row, text in enumerate(different)}
        return found[[row_of[text] for text in texts]]

    def close(self) -> None:
        """Begin no more; wait `JOIN_S` at most for what has begun (see `runs`)."""
        with self._turn:
            self._closed = True
            self._turn.notify()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                if job.wanted:  # one whose request has given up is dropped
                    self._go_on(job)
            except Exception as error:  # goes to the one who asked
                _tell(job, error)
            job = None  # so that nothing of it stays while none waits

    def _next(self) -> _Job | None:
        with self._turn:
            while not self._jobs and not self._closed:
                self._turn.wait()
            return None if self._closed else self._jobs.popleft()

    def _go_on(self, job: _Job) -> None:
        batch = job.texts[job.done : job.done + BATCH]
        job.rows.append(np.asarray(job.embed(batch)))
        job.done += len(batch)
        if job.done == len(job.texts):
            _tell(job, np.concatenate(job.rows))
            return
        with self._turn:
            self._jobs.append(job)


def runs() -> bool:
    """Whether a model still works in this process: its thread cannot be ended, only the process can."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def _tell(job: _Job, answer: np.ndarray[Any, Any] | Exception) -> None:
    try:
        job.future.get_loop().call_soon_threadsafe(_deliver, job.future, answer)
    except RuntimeError:
        return  # the loop is closed: nobody waits any more


def _deliver(future: asyncio.Future[np.ndarray[Any, Any]], answer: np.ndarray[Any, Any] | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
