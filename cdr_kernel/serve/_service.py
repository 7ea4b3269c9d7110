"""What all operations share: the tenants with their stores, the threads, the metrics, and whether there is service."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import numpy as np

from cdr_kernel.retrieve import Retriever, retriever_on
from cdr_kernel.retrieve._retriever import WORTH_CODES
from cdr_kernel.serve import _schema
from cdr_kernel.serve._batching import Batcher, Lane
from cdr_kernel.serve._budget import Budget, Held
from cdr_kernel.serve._embedding import Embedding
from cdr_kernel.serve._errors import Refusal, invalid, late, refuse, too_large_answer, unavailable
from cdr_kernel.serve._keys import DEFAULT_TENANT, Keys
from cdr_kernel.serve._logs import Seldom, fault
from cdr_kernel.serve._metrics import Metrics
from cdr_kernel.serve._redis_sessions import Redis
from cdr_kernel.serve._sessions import LocalSessions, Sessions
from cdr_kernel.serve._settings import Settings
from cdr_kernel.serve._signed_tokens import Signer
from cdr_kernel.serve._stores import Facts, open_facts
from cdr_kernel.serve._tracing import Tracing
from cdr_kernel.serve._turns import FOREVER, Turns, Work
from cdr_kernel.serve.faults import Faults, StorageFault

T = TypeVar("T")

LOADING, READY, DRAINING, FAILED = "loading", "ok", "draining", "unavailable"
SPARE = 1
"""Threads that work, and threads that rank, beside those of one tenant: for the others."""
CLOSE_S = 2.0
"""How long `Service.close` waits for what its threads have begun."""


@dataclass(eq=False)
class Tenant:
    """One tenant: its facts, its sessions, its queue. Nothing of it is shared with another.

    writing: its thread for changes to the store. A change waits for the disk and for other processes, so neither ranks
    nor another tenant's changes may wait with it. requests, answers: the bytes that its requests hold.
    """

    name: str
    facts: Facts
    retriever: Retriever
    lane: Lane
    sessions: Sessions
    local: LocalSessions
    signer: Signer
    requests: Budget
    answers: Budget
    writing: Turns
    in_flight: int = 0
    writes: asyncio.Lock = field(default_factory=asyncio.Lock)  # of facts
    starts: asyncio.Lock = field(default_factory=asyncio.Lock)  # of sessions, under an Idempotency-Key

    @property
    def model(self) -> str:
        """The embedding model of the facts."""
        return self.facts.facts.embedding_model

    @property
    def dim(self) -> int:
        """D of the facts."""
        return self.facts.facts.dim

    def check_model(self, named: str, field: str = "embedding_model") -> None:
        """Raises `Refusal` 409 for another model than the store's (R18). field: where it is named."""
        if named != self.model:
            raise invalid(field, f"{self.model!r}, the store's", repr(named), status=409, code="model_mismatch")


@dataclass
class Call:
    """One request at an operation.

    params: of the path. body: the decoded struct, None where there is none. deadline: in `time.monotonic`. key: its
    Idempotency-Key; digest: of the request, for it. label: what the log calls its work. msgpack: whether its answer is
    msgpack. held: the bytes that it holds.
    """

    service: Service
    tenant: Tenant
    params: dict[str, str]
    body: Any
    deadline: float
    key: str | None
    digest: str
    label: str
    msgpack: bool
    held: Held

    def check_deadline(self) -> None:
        """Raises `Refusal` 504 once the deadline has passed."""
        if monotonic() >= self.deadline:
            raise late()

    async def locked(self, lock: asyncio.Lock) -> None:
        """Take a lock, before the deadline."""
        try:
            async with asyncio.timeout(self.deadline - monotonic()):
                await lock.acquire()
        except TimeoutError:
            raise late() from None

    async def thread(self, work: Work[T]) -> T:
        """Do this in the pool, in turns with other tenants, before the deadline. What the library refuses becomes a
        `Refusal`."""
        return await self._run(self.service.pool, work, self.deadline)

    async def write(self, work: Callable[[], T]) -> T:
        """Change the store, in the tenant's thread for that; once begun it is finished. What the library refuses
        becomes a `Refusal`."""
        return await self._run(self.tenant.writing, work, FOREVER)

    async def _run(self, turns: Turns, work: Work[T], deadline: float) -> T:
        try:
            return await turns.run(self.tenant.name, self.label, work, deadline)
        except Exception as error:  # `refuse` raises it again where it is not the request's fault
            refuse(error)

    def answer(self, value: Any, headers: dict[str, str] | None = None, *, applied: bool = False) -> Answer:
        """An answer, encoded: for the pool, where it may be large. Raises `Refusal` 413 where it is too large, unless
        the request was applied already."""
        with self.service.stage("encode"):
            encoded, _ = _schema.encode(value, self.msgpack)
        most = self.service.settings.max_answer
        if len(encoded) > most and not applied:
            raise too_large_answer(most, len(encoded))
        return Answer(value, headers or {}, encoded)

    def hold(self, answer: Answer) -> None:
        """Count an encoded answer until it is taken. Raises `Refusal` 429 where too many are not taken yet."""
        if answer.encoded is not None:
            self.held.take_answer(len(answer.encoded))

    async def embed(self, texts: list[str], field: str) -> np.ndarray[Any, Any]:
        """Vectors of texts by the server's model, before the deadline. Raises `Refusal` where it has none for this
        tenant's store."""
        embedder = self.service.embedder_for(self.tenant)
        if embedder is None:
            own = self.service.settings.embed
            has = "this server embeds no texts" if own is None else f"this server embeds texts with {own!r}"
            raise invalid(field, f"a vector of {self.tenant.model!r}, the store's model ({has})", code="no_embedder")
        with self.service.stage("embed"):
            return await self.service.embedding.rows(
                embedder, texts, self.deadline, tenant=self.tenant.name, label=self.label
            )


@dataclass(frozen=True)
class Answer:
    """What an operation answers: a struct, and the body where it is encoded already."""

    value: Any
    headers: dict[str, str] = field(default_factory=dict)
    encoded: bytes | None = None


class Service:
    """The parts of one application. Made without opening anything; `load` opens the stores."""

    def __init__(self, settings: Settings, *, tracer_provider: Any = None) -> None:
        self.settings = settings
        self.keys = None if settings.keys is None else Keys.read(settings.keys)
        self.metrics = Metrics()
        self.tracing = Tracing(tracer_provider) if settings.otel or tracer_provider is not None else None
        self.state = LOADING
        self.problem: Exception | None = None
        self.tenants: dict[str, Tenant] = {}
        self.pool = Turns("cdr-work", settings.threads, spare=SPARE, depth=settings.max_queue)
        self.loading = Turns("cdr-load")
        self.embedding = Embedding()
        self.token_key = settings.token_key or secrets.token_bytes(32)
        self.shared: Redis | None = None if settings.redis is None else Redis(settings.redis)
        self.stopping = False
        self.hosts = settings.hosts if settings.allowed_hosts else None
        self.seldom = Seldom()
        self.faults = Faults(self.seldom, lambda kind: self.metrics.faults.labels(kind).inc())
        self.accepted = self.completed = self.cut_off = self.unread = 0
        self._read_until = float("inf")
        self._reading: set[asyncio.Timeout] = set()
        self._embedder: Callable[[list[str]], Any] | None = None
        self._batcher: Batcher | None = None

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a part of a request, and trace it where requests are traced."""
        with self.metrics.stage(name), contextlib.nullcontext() if self.tracing is None else self.tracing.part(name):
            yield

    @contextlib.asynccontextmanager
    async def reading(self, deadline: float) -> AsyncIterator[None]:
        """Read a body in here. Raises `Refusal` where it is not whole in time: 408 once the deadline has passed, 503
        where `stop_reading` was called before."""
        limit = asyncio.timeout(min(deadline, self._read_until) - monotonic())
        try:
            async with limit:
                self._reading.add(limit)
                yield
        except TimeoutError:
            if self._read_until == float("inf"):
                raise Refusal(408, "timeout", "the body did not come before the deadline") from None
            self.cut_off += 1
            raise unavailable("draining", "the server stops, and the body was not whole yet") from None
        finally:
            self._reading.discard(limit)

    def stop_reading(self, grace: float) -> None:
        """Wait no longer than these seconds for bodies that are not whole."""
        self._read_until = monotonic() + grace
        end = asyncio.get_running_loop().time() + grace
        for limit in self._reading:
            when = limit.when()
            if not limit.expired() and (when is None or when > end):
                limit.reschedule(end)

    @property
    def batcher(self) -> Batcher:
        """The thread that ranks."""
        assert self._batcher is not None, "load() makes it"
        return self._batcher

    def folders(self) -> dict[str, Path]:
        """The store folder of each tenant."""
        store = self.settings.store
        if self.keys is None:
            return {DEFAULT_TENANT: store}
        names = self.keys.tenants
        if len(names) == 1 and not (store / names[0]).exists():
            return {names[0]: store}
        return {name: store / name for name in names}

    def load(self) -> None:
        """Open every store and check all of it, with its codes and its ids; takes what that takes. Raises what is
        wrong, DamagedFileError for a store of which a block is not as it was written."""
        settings = self.settings
        if settings.embed is not None:
            from cdr_kernel.files._embedders import load_embedder

            self._embedder = load_embedder(settings.embed)
        self._batcher = Batcher(
            most=settings.max_batch,
            depth=settings.max_queue,
            threads=settings.rank_threads,
            spare=SPARE,
            report=self._batched,
        )
        opened = {name: open_facts(folder, settings.hash_key) for name, folder in self.folders().items()}
        models = dict.fromkeys(facts.facts.embedding_model for facts in opened.values())
        if settings.embed is not None and settings.embed not in models:  # it would embed nothing, and say so later
            raise ValueError(
                f"embed: expected {' or '.join(map(repr, models))}, what the vectors of {settings.store} are of, "
                f"got {settings.embed!r}"
            )
        found = {}
        for name, facts in opened.items():
            facts.verify(self._go_on)
            retriever = retriever_on(
                settings.device, facts.facts, dtype=settings.device_dtype, cache_bytes=settings.row_cache_bytes
            )
            if settings.device is not None:
                retriever.prepare()
            elif len(facts.facts) >= WORTH_CODES:
                retriever.codes(facts.facts.view())  # those that are saved beside the store, if any
                retriever.prepare(self._go_on)
            facts.facts.index_ids()  # not in the first request
            local = LocalSessions(
                ttl_s=settings.session_ttl_s,
                most=settings.max_sessions,
                max_bytes=settings.session_bytes,
                evicted=lambda reason: self.metrics.evicted.labels(reason).inc(),
                moved=retriever.cache.hand_over,
            )
            sessions: Sessions = local
            if self.shared is not None:
                sessions = self.shared.sessions(name, local, settings, self.pool)
            found[name] = Tenant(
                name=name,
                facts=facts,
                retriever=retriever,
                lane=Lane(retriever, name),
                sessions=sessions,
                local=local,
                signer=Signer(self.token_key, name),
                requests=Budget(settings.request_bytes, "bodies of requests that are worked on (--request-mb)"),
                answers=Budget(settings.answer_bytes, "answers that their readers have not taken (--answer-mb)"),
                writing=Turns("cdr-write"),
            )
            self.watch(found[name])
        self.tenants = found
        self.state = READY

    async def keep_fresh(self) -> None:
        """Look every now and then for what other processes have changed in durable stores, and for what is past its
        time; without end. Each tenant for itself: the store of one may wait for the disk."""
        while self.state == LOADING:
            await asyncio.sleep(self.settings.refresh_s)
        async with asyncio.TaskGroup() as group:
            for tenant in self.tenants.values():
                if tenant.facts.durable:
                    group.create_task(self._keep_fresh(tenant))

    async def _keep_fresh(self, tenant: Tenant) -> None:
        while True:
            await asyncio.sleep(self.settings.refresh_s)
            try:
                async with tenant.writes:
                    await tenant.writing.run(tenant.name, "refresh", tenant.facts.refresh)
            except Exception as error:  # the store as it is still serves; the log says what is wrong with it
                found = StorageFault.of(error)
                if found is None:
                    fault(error, "refresh")
                else:
                    self.note_fault(found, tenant, "refresh", "")

    def note_fault(self, found: StorageFault, tenant: Tenant, operation: str, request_id: str) -> None:
        """Count and log a fault of a tenant's store."""

        def check() -> Awaitable[None]:
            return self.loading.run(tenant.name, "check", lambda: tenant.facts.verify(self._go_on))

        self.faults.note(found, check, tenant=tenant.name, operation=operation, request_id=request_id)

    def watch(self, tenant: Tenant) -> None:
        """Have /metrics read a tenant's sizes when it is asked."""
        metrics, name = self.metrics, tenant.name
        metrics.store_facts.labels(name).set_function(lambda: len(tenant.facts.facts))
        metrics.sessions.labels(name).set_function(lambda: len(tenant.local))
        metrics.session_bytes.labels(name).set_function(lambda: tenant.local.nbytes)
        metrics.row_cache.labels(name).set_function(lambda: tenant.retriever.cache.nbytes)
        metrics.request_bytes.labels(name).set_function(lambda: tenant.requests.used)
        metrics.answer_bytes.labels(name).set_function(lambda: tenant.answers.used)

    def embedder_for(self, tenant: Tenant) -> Callable[[list[str]], Any] | None:
        """The server's model, if it is the one of this tenant's facts."""
        return self._embedder if self.settings.embed == tenant.model else None

    def turns(self) -> list[Turns]:
        """All threads that work, but those that rank."""
        return [self.pool, self.loading, self.embedding, *(tenant.writing for tenant in self.tenants.values())]

    def running(self) -> list[dict[str, Any]]:
        """What the threads do now, for the log."""
        ranks = [] if self._batcher is None else self._batcher.running()
        return [*(each for turns in self.turns() for each in turns.running()), *ranks]

    def close(self, within: float = CLOSE_S) -> None:
        """End the threads: wait for what they have begun, so many seconds in all. What goes on then is in `running`,
        and the stores stay open under it."""
        until = monotonic() + within
        ended = [True if self._batcher is None else self._batcher.close(until)]
        ended += [turns.close(until) for turns in self.turns()]
        if all(ended):
            for tenant in self.tenants.values():
                tenant.facts.close()
        if self.tracing is not None:
            self.tracing.close()

    def _go_on(self, count: int) -> None:
        if self.stopping:
            raise InterruptedError("told to stop while the stores were being opened")

    def _batched(self, size: int, waited: Any, seconds: float) -> None:
        self.metrics.batch.observe(size)
        queue, rank = self.metrics.stages.labels("queue"), self.metrics.stages.labels("rank")
        for wait in waited:
            queue.observe(wait)
            rank.observe(seconds)
