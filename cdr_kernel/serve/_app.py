"""The application: the table of operations behind the door."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from time import monotonic
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import cdr_kernel
from cdr_kernel.concurrency._steps import finish
from cdr_kernel.serve import _schema
from cdr_kernel.serve._budget import Held
from cdr_kernel.serve._decoding import decode_steps
from cdr_kernel.serve._errors import ErrorBody, ErrorDetail, Refusal, invalid, of_library
from cdr_kernel.serve._idempotency import HEADER as IDEMPOTENCY_KEY
from cdr_kernel.serve._idempotency import check_key, digest_of
from cdr_kernel.serve._keys import bearer, same
from cdr_kernel.serve._limits import check_lists
from cdr_kernel.serve._logs import event
from cdr_kernel.serve._logs import failed as log_failed
from cdr_kernel.serve._metrics import CONTENT_TYPE
from cdr_kernel.serve._middleware import DEADLINE, Door
from cdr_kernel.serve._openapi import document
from cdr_kernel.serve._operations import OPERATIONS, Operation
from cdr_kernel.serve._service import CLOSE_S, FAILED, READY, Call, Service
from cdr_kernel.serve._settings import Settings
from cdr_kernel.serve.faults import DAMAGED

SMALL = 65_536
"""Bodies up to here are decoded on the spot, larger ones in the pool and in steps."""


def build(
    settings: Settings, *, failed: Callable[[Exception], object] | None = None, tracer_provider: Any = None
) -> Starlette:
    """The application over a store. `app.state.service` has its parts.

    The stores are opened while it already listens; until then /readyz says "loading". failed: called with what went
    wrong where they cannot be. tracer_provider: OpenTelemetry's, instead of the one that settings.otel makes.
    """
    service = Service(settings, tracer_provider=tracer_provider)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load(service, failed))
        fresh = asyncio.create_task(service.keep_fresh())
        try:
            yield
        finally:
            fresh.cancel()
            service.faults.close()
            await asyncio.wait({loading}, timeout=CLOSE_S)
            loading.cancel()
            await asyncio.to_thread(service.close)
            if service.shared is not None:
                await service.shared.close()

    app = Starlette(lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.service = service
    for operation in OPERATIONS:
        path = operation.path.replace("{fact_id}", "{fact_id:path}")
        app.router.add_route(path, _endpoint(service, operation), methods=[operation.method], include_in_schema=False)
    described = document(cdr_kernel.__version__, keys=service.keys is not None)
    for path, process in {
        "/livez": _livez,
        "/readyz": _readyz,
        "/metrics": _metrics,
        "/openapi.json": _openapi(described),
    }.items():
        app.router.add_route(path, _named(service, path[1:], process), methods=["GET"], include_in_schema=False)
    for route in app.router.routes:  # of Starlette, whose patterns end before a last newline
        assert isinstance(route, Route)
        route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + r"\Z", re.DOTALL)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Door, service=service)
    return app


async def _load(service: Service, failed: Callable[[Exception], object] | None) -> None:
    try:
        await service.loading.run("all", "opening the stores", service.load)
    except Exception as error:  # whatever is wrong with a store: nothing can be served
        service.state, service.problem = FAILED, error
        log_failed(error)
        if failed is not None:
            failed(error)
        return
    event("ready", tenants=len(service.tenants), facts=sum(len(t.facts.facts) for t in service.tenants.values()))


def _endpoint(service: Service, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    def failed(request: Request, refusal: Refusal) -> Response:
        if refusal.fault is not None:
            service.note_fault(refusal.fault, request.state.tenant, operation.name, request.state.request_id)
        return _refused(request, refusal.status, refusal.detail, refusal.headers)

    async def endpoint(request: Request) -> Response:
        request.state.operation = operation.name
        since = monotonic()
        try:
            deadline = since + _allowed(request.headers.get(DEADLINE), service.settings.deadline_s)
            key = check_key(request.headers.get(IDEMPOTENCY_KEY)) if operation.keyed else None
            held: Held = request.state.held
            async with service.reading(deadline):
                raw = await _body(request, service.settings.max_body, held)
            call = Call(
                service=service,
                tenant=request.state.tenant,
                params=request.path_params,
                body=None,
                deadline=deadline,
                key=key,
                digest="",
                label=f"{operation.name} {request.state.request_id}",
                msgpack=_schema.wants_msgpack(request.headers.get("accept")),
                held=held,
            )
            with service.stage("decode"):
                decode = _decode_steps(call, request, operation, raw)
                if len(raw) <= SMALL:
                    finish(decode)
                else:
                    await call.thread(decode)
            del raw, decode  # the struct has it all
            check_lists(call.body, service.settings)
            call.check_deadline()
            answer = await operation.run(call)
            if answer.encoded is None:
                answer = call.answer(answer.value, answer.headers, applied=operation.keyed)
            assert answer.encoded is not None
            held.take_answer(len(answer.encoded), applied=operation.keyed)
        except Refusal as refusal:
            return failed(request, refusal)
        except Exception as error:
            refusal_ = of_library(error)
            if refusal_ is None:
                raise
            return failed(request, refusal_)
        return Response(answer.encoded, 200, answer.headers, _schema.MSGPACK if call.msgpack else _schema.JSON)

    return endpoint


def _decode_steps(call: Call, request: Request, operation: Operation, raw: bytes) -> Generator[None, None, None]:
    """Puts a large body into a call, and its digest for an Idempotency-Key."""
    if call.key is not None:
        call.digest = digest_of(request.method, request.url.path, raw)
        yield
    if operation.body is not None:
        call.body = yield from decode_steps(raw, request.headers.get("content-type"), operation.body)


def _allowed(given: str | None, most: float) -> float:
    """Seconds that a request may take."""
    if given is None:
        return most
    if not (given.isascii() and given.isdecimal()) or len(given) > 9 or int(given) < 1:
        raise invalid(DEADLINE, "milliseconds, an integer from 1 on", repr(given[:40]))
    return min(most, int(given) / 1e3)


async def _body(request: Request, most: int, held: Held) -> bytes:
    """The body, which is counted. Raises `Refusal` 413 or 429 before it is read where it says how long it is, else once
    it is too long."""
    length = request.headers.get("content-length", "")
    told = int(length) if length.isdecimal() else 0
    if told > most:
        raise _too_large(most, length)
    held.take_request(told)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise _too_large(most, f"more than {most}")
            if size > held.request_bytes:
                held.take_request(len(part))
            parts.append(part)
    except ClientDisconnect:  # nobody is there to read this
        raise Refusal(400, "disconnected", "the client went away before its body was whole") from None
    return b"".join(parts)


def _too_large(most: int, got: str) -> Refusal:
    return invalid("body", f"at most {most} bytes", f"{got} bytes", status=413, code="too_large")


def _refused(request: Request, status: int, detail: ErrorDetail, headers: Any = None) -> Response:
    told = ErrorBody(detail, getattr(request.state, "request_id", ""))
    body, media = _schema.encode(told, _schema.wants_msgpack(request.headers.get("accept")))
    return Response(body, status, headers, media)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    return _refused(request, error.status_code, ErrorDetail(code, str(error.detail)), error.headers)


Process = Callable[[Service, Request], Awaitable[Response]]


def _named(service: Service, name: str, process: Process) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        request.state.operation = name
        return await process(service, request)

    return endpoint


def _health(status: str, code: int) -> Response:
    return Response(_schema.encode(_schema.Health(status, cdr_kernel.__version__), False)[0], code, None, _schema.JSON)


async def _livez(service: Service, request: Request) -> Response:
    return _health("ok", 200)


async def _readyz(service: Service, request: Request) -> Response:
    status = service.state
    if status == READY and service.shared is not None and not await service.shared.alive():
        status = FAILED
    if status == READY and service.faults.damaged:
        status = DAMAGED
    return _health(status, 200 if status == READY else 503)


async def _metrics(service: Service, request: Request) -> Response:
    """Numbers of all tenants: with keys, for whoever has the metrics key alone."""
    if service.keys is not None and not same(
        bearer(request.headers.get("authorization")), service.settings.metrics_key
    ):
        told = ErrorDetail("unauthorized", "Authorization: expected the metrics key")
        return _refused(request, 401, told, {"WWW-Authenticate": "Bearer"})
    return Response(service.metrics.text(), 200, None, CONTENT_TYPE)


def _openapi(described: dict[str, Any]) -> Process:
    body = _schema.encode(described, False)[0]

    async def answer(service: Service, request: Request) -> Response:
        return Response(body, 200, None, _schema.JSON)

    return answer
