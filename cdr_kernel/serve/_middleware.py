"""The door: every request gets an id, shows its key, and is let in or turned away before its body is read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from time import perf_counter
from typing import Any, TypeAlias

from cdr_kernel.serve import _schema
from cdr_kernel.serve._budget import Held
from cdr_kernel.serve._errors import ErrorBody, Refusal, internal, misdirected, overloaded, unavailable
from cdr_kernel.serve._keys import DEFAULT_TENANT, bearer
from cdr_kernel.serve._logs import fault, lost, request_line, unread
from cdr_kernel.serve._service import DRAINING, LOADING, READY, Service, Tenant
from cdr_kernel.serve._sessions import new_id
from cdr_kernel.serve._settings import host_name
from cdr_kernel.serve._writer import Writer

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

DEADLINE = "CDR-Deadline-Ms"
REQUEST_ID = "X-Request-ID"
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Door:
    """ASGI middleware round the whole application.

    What it lets in finds in scope["state"]: request_id, tenant (under /v1), and puts there the operation's name.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._service.tracing is None:
            await self._serve(scope, receive, send)
        else:
            told = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            with self._service.tracing.request(scope["method"], told) as span:
                status = await self._serve(scope, receive, send)
                operation = scope["state"]["operation"]
                span.update_name(f"{scope['method']} {operation}")
                span.set_attribute("http.request.method", scope["method"])
                span.set_attribute("http.response.status_code", status)
                span.set_attribute("cdr.operation", operation)
                span.set_attribute("cdr.request_id", scope["state"]["request_id"])

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answer; the status."""
        service, start = self._service, perf_counter()
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if _ID.fullmatch(given) else new_id()
        state["operation"] = "none"
        status = 500
        sent, started = 0, False
        writer = Writer(send, scope, service.settings.send_timeout_s)

        async def respond(message: Message) -> None:
            nonlocal status, sent, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                extra = [(REQUEST_ID.lower().encode(), state["request_id"].encode())]
                if service.state == DRAINING:
                    extra.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *extra]
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await writer.send(message)

        tenant: Tenant | None = None
        service.accepted += 1
        service.metrics.in_flight.inc()
        try:
            if service.hosts is not None:
                named = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"host"]
                if len(named) != 1 or host_name(named[0]) not in service.hosts:
                    await self._turn_away(misdirected(named, service.hosts), state, headers, respond)
                    return 421
            path = scope["path"].removeprefix(scope.get("root_path", ""))  # a proxy may have put it under a prefix
            if path == "/v1" or path.startswith("/v1/"):
                try:
                    tenant = self._admitted(headers.get(b"authorization"))
                except Refusal as refusal:
                    await self._turn_away(refusal, state, headers, respond)
                    return refusal.status
                tenant.in_flight += 1
                state["tenant"], state["held"] = tenant, Held(tenant.requests, tenant.answers)
            await self._app(scope, receive, respond)
        except asyncio.CancelledError:
            if not started:
                lost(state["request_id"], state["operation"])
            raise
        except Exception as error:  # nobody foresaw it: the log says where it came from, the answer does not
            fault(error, state["request_id"])
            if started:
                raise
            await refuse(internal(), state["request_id"], headers.get(b"accept", b""), respond)
        finally:
            if tenant is not None:
                tenant.in_flight -= 1
                state["held"].release()
            service.completed += writer.taken
            if started and not writer.taken:
                service.unread += 1
                service.metrics.unread.labels(state["operation"]).inc()
                unread(state["request_id"], state["operation"], sent)
            seconds = perf_counter() - start
            service.metrics.in_flight.dec()
            service.metrics.requests.labels(state["operation"], str(status)).inc()
            service.metrics.seconds.labels(state["operation"]).observe(seconds)
            if service.settings.access_log:
                request_line(
                    request_id=state["request_id"],
                    tenant=None if tenant is None else tenant.name,
                    method=scope["method"],
                    operation=state["operation"],
                    status=status,
                    ms=round(seconds * 1e3, 3),
                    bytes_out=sent,
                )
        return status

    async def _turn_away(self, refusal: Refusal, state: Any, headers: Mapping[bytes, str], respond: Send) -> None:
        self._service.metrics.rejected.labels(refusal.detail.code).inc()
        await refuse(refusal, state["request_id"], headers.get(b"accept", b""), respond)

    def _admitted(self, authorization: str | None) -> Tenant:
        service, name = self._service, DEFAULT_TENANT
        if service.keys is not None:
            key = bearer(authorization)
            found = service.keys.tenant(key or "")
            if key is None or found is None:
                raise Refusal(
                    401, "unauthorized", "Authorization: expected a known key", headers={"WWW-Authenticate": "Bearer"}
                )
            name = found
        if service.state not in (READY, DRAINING):
            why = "the stores are being opened" if service.state == LOADING else "the stores could not be opened"
            raise unavailable(service.state, why)
        tenant = service.tenants[name]
        if tenant.in_flight >= service.settings.max_queue:
            raise overloaded()
        tenant.answers.check()
        return tenant


async def refuse(refusal: Refusal, request_id: str, accept: Any, send: Send) -> None:
    """Answer a refusal."""
    accepted = accept.decode("latin-1") if isinstance(accept, bytes) else accept
    body, media = _schema.encode(ErrorBody(refusal.detail, request_id), _schema.wants_msgpack(accepted))
    headers = [(b"content-type", media.encode()), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
