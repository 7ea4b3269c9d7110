"""The process of `cdr serve`: it listens, serves, and ends without losing what it accepted.

SIGTERM or SIGINT: /readyz says "draining", answers close their connections, and for `drain_s` seconds everything is
still served, so that whoever routes requests here can stop. Then the port is closed, a request whose body is not whole
soon after is turned away, what was accepted is finished, and the process exits with 0. A second signal ends it at once.

Nothing holds it longer than `stop_s` and a few seconds. What its threads do then is named in the log and left:
a thread of Python cannot be ended, so the process ends under it (`end_process`). The first signal begins a watch, which
does the same where the event loop is held too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import uvicorn

from cdr_kernel.serve import _logs
from cdr_kernel.serve._app import build
from cdr_kernel.serve._connections import Acceptor, Book, Connection, Limits
from cdr_kernel.serve._service import CLOSE_S, DRAINING, READY, Service
from cdr_kernel.serve._settings import Settings
from cdr_kernel.serve._turns import THREADS, where

BACKLOG = 2048
SPARE_FILES = 64
FILES_OF_A_TENANT = 16
"""Descriptors that are left for other files than connections, beside those that are open at the start."""
MOST_CONNECTIONS = 65_536
GRACE_S = 1.0
"""How long a body may still come once the port is closed; at most half of what stopping has."""
SEND_BUFFER = 1 << 18
"""Bytes of an answer that the system holds for a connection; of itself it takes megabytes for clients that do not read,
and tells that one reads only once a third of them is taken."""
WATCH_S = 3.0
"""How long after everything should have ended the watch ends the process."""
SWITCH_S = 0.0005
"""How long a thread that ranks or packs may keep the event loop, which turns requests away, from running."""


class _Server(uvicorn.Server):
    """uvicorn, with signals that drain, and connections that are taken many at a time."""

    def __init__(self, config: uvicorn.Config, service: Service, listener: socket.socket, book: Book) -> None:
        super().__init__(config)
        self._service = service
        self._listener = listener
        self._book = book
        self._told = 0
        self._drain: asyncio.Task[None] | None = None
        self._watched = False
        self.ended = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but that it does not listen by itself."""
        if os.name == "nt":  # whose event loop cannot wait for a socket to be readable
            await super().startup(sockets=[self._listener])
            return
        await super().startup(sockets=[])
        if not self.should_exit:
            acceptor: Any = Acceptor(self._listener, self._connection, self._exhausted)
            self.servers.append(acceptor)  # it has what uvicorn asks of a server

    def _connection(self) -> asyncio.Protocol:
        return Connection(self._book, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def _exhausted(self, error: OSError) -> None:
        what = "no connection could be taken: the process or the machine has no descriptor or memory left for one"
        name = errno.errorcode.get(error.errno or 0, "OSError")
        self._service.seldom.event("fault", what, logging.ERROR, error=name, message=error.strerror)
        self._book.make_room()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals over while serving; the status of the process is `run`'s to say."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {
            number: signal.signal(number, lambda number, _: self._signal(number, loop))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signal(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        if not self._watched:  # here, since the loop may not come to it
            self._watched = True
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        loop.call_soon_threadsafe(self._tell, number)

    def _tell(self, number: int) -> None:
        self._told += 1
        if self._told > 1:
            self.force_exit = self.should_exit = True
            return
        _logs.event("draining", signal=signal.Signals(number).name)
        self._service.stopping = True
        if self._service.state != READY:
            self.should_exit = True
            return
        self._service.state = DRAINING
        self._drain = asyncio.get_running_loop().create_task(self._end())

    def _watch(self) -> None:
        """End the process where it does not end."""
        settings = self._service.settings
        if self.ended.wait(settings.drain_s + _grace(settings) + CLOSE_S + WATCH_S):
            return
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        name_what_runs(self._service, [{"thread": "MainThread", "job": "the event loop", "where": where(main)}])
        end_process(1)

    async def _end(self) -> None:
        await asyncio.sleep(self._service.settings.drain_s)
        self._service.stop_reading(min(GRACE_S, self._service.settings.stop_s / 2))
        self.should_exit = True


def run(settings: Settings) -> int:
    """Serve until a signal says otherwise. 0: everything accepted was answered; 1: not, or the stores could not be
    opened (then raises what was wrong with them). OSError where the address is taken."""
    _logs.to_stderr()
    logging.getLogger("uvicorn").handlers[:] = logging.getLogger(_logs.NAME).handlers
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_logs.without_cancellations)
    problems: list[Exception] = []

    def failed(error: Exception) -> None:
        problems.append(error)
        server.should_exit = True

    sys.setswitchinterval(SWITCH_S)
    app = build(settings, failed=failed)
    service: Service = app.state.service
    service.hosts = settings.hosts
    if settings.token_key is None:
        _logs.event("warning", logging.WARNING, what="no token key: session tokens end with this process")
    with _listening(settings.host, settings.port) as listener:
        book = Book(_limits(settings, service), functools.partial(_report, service))
        server = _Server(_config(app, settings, book), service, listener, book)
        host, port = listener.getsockname()[:2]
        _logs.event("listening", host=host, port=port)
        server.run()
    server.ended.set()
    lost = service.accepted - service.completed - service.unread
    if service.cut_off:
        what = "bodies that were not whole when the port had closed: answered 503, nothing was changed"
        _logs.event("cut_off", logging.WARNING, requests=service.cut_off, what=what)
    name_what_runs(service)
    _logs.event("stopped", accepted=service.accepted, answered=service.completed, unread=service.unread, lost=lost)
    if problems:
        raise problems[0]
    return 0 if lost == 0 else 1


def _config(app: Any, settings: Settings, book: Book) -> uvicorn.Config:
    protocol: Any = functools.partial(Connection, book)
    keep_alive: Any = settings.keep_alive_s  # uvicorn's hint says int
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=_grace(settings),
        backlog=BACKLOG,
    )


def _limits(settings: Settings, service: Service) -> Limits:
    most = settings.max_connections
    return Limits(
        connections=most_connections(len(service.folders())) if most is None else most,
        header_timeout_s=settings.header_timeout_s,
        head_bytes=settings.max_head,
        headers=settings.max_headers,
    )


def most_connections(tenants: int) -> int:
    """How many connections a process has descriptors for, beside those that are open and those that stores need."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return MOST_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        taken = 32
    return max(8, min(MOST_CONNECTIONS, files - taken - SPARE_FILES - FILES_OF_A_TENANT * tenants))


def _report(service: Service, code: str) -> None:
    """Count a connection that was ended, and say so every now and then."""
    service.metrics.rejected.labels(code).inc()
    service.seldom.event("connection_ended", code)


def _grace(settings: Settings) -> int:
    """Seconds that uvicorn waits for what was accepted."""
    return max(1, round(settings.stop_s))


def name_what_runs(service: Service, more: Sequence[dict[str, Any]] = ()) -> None:
    """Log what threads still do, where they do something. more: what else runs."""
    running = [*service.running(), *more]
    if running:
        what = "work that did not end in the time that stopping has: the process ends without it"
        _logs.event("fault", logging.ERROR, what=what, running=running)


def threads_run() -> bool:
    """Whether a thread of a server still works in this process: it cannot be ended, only the process can."""
    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


def end_process(status: int) -> NoReturn:
    """End the process at once, whatever its threads do, once what was said is written."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads it: it ends all the same
            stream.flush()
    os._exit(status)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[Any]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # of all connections
    try:
        yield listener
    finally:
        listener.close()
