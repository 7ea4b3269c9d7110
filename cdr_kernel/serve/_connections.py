"""Connections of the process: uvicorn's own, which tell the application how its client reads, and have limits.

uvicorn waits without end for the head of a request, and takes heads of any size and any number of connections. Here
each of these has a limit. Where there are too many connections, the one that has been without a request for longest
goes, so that idle ones and half-sent heads cannot lock others out.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cdr_kernel.serve import _schema
from cdr_kernel.serve._errors import ErrorBody, Refusal, overloaded
from cdr_kernel.serve._sessions import new_id
from cdr_kernel.serve._writer import CONNECTION

ACCEPTED_AT_ONCE = 64
"""Connections that are taken in one turn of the loop, so that those who connect in an overload are seen, and turned
away, while they are fresh."""
ACCEPT_PAUSE_S = 0.2
"""How long no connection is taken where the process has no descriptor left for one."""
BUFFER = 1 << 14
"""Bytes that may wait in this process for a client to read; more, and nothing is written until all are taken."""
LINGER_S = 10.0
"""How long a connection that is closed waits for its client to take the rest of an answer."""
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True)
class Limits:
    """What a connection may take. See `Settings`."""

    connections: int
    header_timeout_s: float
    head_bytes: int
    headers: int


class Book:
    """The connections that have no request, the one that has been without one for longest first.

    report: called with the code of each connection that is ended: "too_many_connections", "head_timeout",
    "head_too_large", "malformed", "unread".
    """

    def __init__(self, limits: Limits, report: Callable[[str], object]) -> None:
        self.limits = limits
        self.report = report
        self.waiting: OrderedDict[Connection, None] = OrderedDict()

    def make_room(self, newest: Connection | None = None) -> bool:
        """End the connection that has been without a request for longest, but not the newest; whether there was one."""
        oldest = next((each for each in self.waiting if each is not newest), None)
        if oldest is not None:
            self.report("too_many_connections")
            oldest.end()
        return oldest is not None


class Connection(HttpToolsProtocol):
    """A connection, which an application finds in `scope["extensions"]`. The first argument is ours, the others are
    uvicorn's."""

    gone = False
    """Whether the client went away."""
    cut = False
    """Whether something had not been taken then."""

    def __init__(self, book: Book, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._book = book
        self._limits = book.limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = self._ended = False
        self._received = self._parsed = self._count = 0  # bytes of the head, those of its parts, its fields

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=BUFFER, low=0)
        self._wait_for_head()
        if len(self.connections) > self._limits.connections and not self._book.make_room(self):
            self._refuse(overloaded_by_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.gone, self.cut = True, self.flow is not None and self.flow.write_paused
        self._ended = True
        self._stop_waiting_for_head()
        self._book.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, within the limits. What is no HTTP is answered, and counted instead of logged."""
        if self._ended:
            return
        self._unset_keepalive_if_required()
        if not self._busy:
            self._wait_for_head()
        self._received += len(data) if self._in_head else 0
        try:
            self.parser.feed_data(data)
            if self._in_head and self._received > self._limits.head_bytes:
                raise _TooLarge
        except httptools.HttpParserUpgrade:
            pass  # to what we do not speak: the request is answered as it is
        except _TooLarge:
            self._refuse(too_large(self._limits))
        except httptools.HttpParserError as error:
            large = isinstance(error.__context__, _TooLarge)
            self._refuse(too_large(self._limits) if large else Refusal(400, "malformed", "this is no HTTP request"))

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        super().on_message_begin()
        extensions: dict[str, Any] = {CONNECTION: self}
        self.scope["extensions"] = extensions
        self._in_head = True
        self._received = self._parsed = self._count = 0

    def on_url(self, url: bytes) -> None:
        """A part of the address has come."""
        self._take(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head has come, or one behind a body."""
        self._count += 1
        self._take(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _take(self, size: int) -> None:
        self._parsed += size
        if self._parsed > self._limits.head_bytes or self._count > self._limits.headers:
            raise _TooLarge

    def on_headers_complete(self) -> None:
        """The head is whole: the request begins."""
        self._in_head = False
        self._stop_waiting_for_head()
        self._book.waiting.pop(self, None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """An answer was handed over; it may not have been sent yet."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._linger()
        elif not self._busy:
            self._book.waiting[self] = None

    def timeout_keep_alive_handler(self) -> None:
        """No further request has come."""
        self.end()

    def end(self) -> None:
        """Close the connection, which has no request."""
        self._ended = True
        self._stop_waiting_for_head()
        self._book.waiting.pop(self, None)
        if not self.transport.is_closing():
            self.transport.close()
        self._linger()

    def _linger(self) -> None:
        if self.transport.get_write_buffer_size():
            self.loop.call_later(LINGER_S, self.transport.abort)

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._late)
            self._book.waiting.setdefault(self, None)

    def _late(self) -> None:
        self._head_timer = None
        if self._ended or self._busy:
            return
        if not self._in_head:  # it said nothing at all
            self._book.report("head_timeout")
            self.end()
            return
        seconds = self._limits.header_timeout_s
        self._refuse(Refusal(408, "head_timeout", f"the head of the request did not come within {seconds:g} s"))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal where no other answer is under way, and close the connection."""
        self._book.report(refusal.detail.code)
        if self._busy:
            self._ended = True
            self.transport.abort()
            return
        self.transport.write(as_bytes(refusal))
        self.end()

    def _stop_waiting_for_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _TooLarge(Exception):
    """The head has more bytes or fields than it may."""


def too_large(limits: Limits) -> Refusal:
    """A head that is too large."""
    most = f"at most {limits.head_bytes} bytes in at most {limits.headers} fields"
    return Refusal(431, "head_too_large", f"the head of the request: expected {most}", expected=most)


def overloaded_by_connections() -> Refusal:
    """More connections than there may be, all of them with a request."""
    message = "too many connections at once, try again"
    return Refusal(503, "too_many_connections", message, headers=overloaded().headers)


def as_bytes(refusal: Refusal) -> bytes:
    """A refusal as a whole HTTP answer, after which the connection is closed."""
    body, media = _schema.encode(ErrorBody(refusal.detail, new_id()), False)
    fields = {"content-type": media, "content-length": str(len(body)), "connection": "close", **refusal.headers}
    head = "".join(f"{name.lower()}: {value}\r\n" for name, value in fields.items())
    line: bytes = STATUS_LINE[refusal.status]
    return line + head.encode() + b"\r\n" + body


class Acceptor:
    """Takes connections from a listening socket, many at a time, and says so where there is no descriptor for one.

    make: makes the protocol of a connection. exhausted: called with the error where the process or the machine has no
    descriptors or memory left; may free some.
    """

    def __init__(
        self, listener: socket.socket, make: Callable[[], asyncio.Protocol], exhausted: Callable[[OSError], object]
    ) -> None:
        self._listener = listener
        self._make = make
        self._exhausted = exhausted
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._go_on()

    def _go_on(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # of that connection, which is gone, or of all
                if error.errno not in _EXHAUSTED:
                    continue
                self._loop.remove_reader(self._listener.fileno())
                self._retry = self._loop.call_later(ACCEPT_PAUSE_S, self._go_on)
                self._exhausted(error)
                return
            task = self._loop.create_task(self._serve(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            if accepted.family in (socket.AF_INET, socket.AF_INET6):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make, accepted)
        except OSError:  # the client went away at once
            accepted.close()

    def close(self) -> None:
        """Take no more."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        elif self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    async def wait_closed(self) -> None:
        """Until those that were taken are served."""
        while self._tasks:
            await asyncio.wait(self._tasks)
