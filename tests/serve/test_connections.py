"""Connections: half-sent heads, heads without end, answers that nobody reads, and no descriptors left."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from typing import ClassVar

import pytest
from serving import make_store

from tests.serve.test_process import Process

pytest.importorskip("uvicorn", reason="needs the serve extra")

from cdr_kernel.serve._process import most_connections

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and limits are POSIX's here")

LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Half: "


class Client:
    """A connection to a server, byte by byte."""

    opened: ClassVar = []

    def __init__(self, process, data=b""):
        self.socket = socket.create_connection(("127.0.0.1", process.event("listening")["port"]), timeout=30)
        self.opened.append(self.socket)
        if data:
            self.send(data)

    def send(self, data):
        self.socket.sendall(data)

    def sent(self, data, times):
        """How often the data could be sent before the server closed."""
        for i in range(times):
            try:
                self.send(data)
            except (BrokenPipeError, ConnectionResetError):
                return i
            time.sleep(0.005)
        return times

    def rest(self):
        """What comes until the server closes."""
        parts = []
        try:
            while part := self.socket.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
        self.socket.close()
        return b"".join(parts)

    def head(self):
        """The head of the next answer, whose body is read too."""
        text = b""
        while b"\r\n\r\n" not in text:
            part = self.socket.recv(65536)
            assert part, text
            text += part
        head, _, body = text.partition(b"\r\n\r\n")
        size = int(re.search(rb"content-length: (\d+)", head.lower())[1])
        while len(body) < size:
            body += self.socket.recv(65536)
        return head

    def closed(self):
        """Whether the server has closed, without having said anything."""
        self.socket.settimeout(0.5)
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("connections") / "s"
    make_store().save(path)
    return path


@pytest.fixture
def serving(folder):
    """Starts servers, and ends them."""
    started = []

    def start(*options, limit=None):
        started.append(Limited(folder, *options, limit=limit) if limit else Process(folder, *options))
        started[-1].event("ready")
        return started[-1]

    yield start
    while Client.opened:
        Client.opened.pop().close()
    for process in started:
        process.tell(signal.SIGKILL)
        process.end()


class Limited(Process):
    """A server that may open so many files."""

    def __init__(self, store, *options, limit):
        self._limit = limit
        super().__init__(store, *options, program=("-c", f"{LIMITED.format(limit)}"))


LIMITED = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0})); "
    "sys.argv[0] = 'cdr'; from _cdr_main import main; main()"
)


def answered(process):
    """The status line of a request on a new connection."""
    client = Client(process, LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    return client.rest().split(b"\r\n")[0]


def refusal(text):
    """(status, code) of a whole answer."""
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def test_a_head_must_come_in_time(serving):
    process = serving("--header-timeout", "0.6")
    start = time.monotonic()
    half, silent, drip = Client(process, HALF), Client(process), Client(process)
    for byte in LIVE[:20]:
        drip.send(bytes([byte]))
        time.sleep(0.02)
    assert refusal(half.rest()) == (408, "head_timeout")
    assert silent.rest() == b""
    assert refusal(drip.rest()) == (408, "head_timeout")
    assert 0.4 < time.monotonic() - start < 10
    again = Client(process, LIVE)
    assert again.head().startswith(b"HTTP/1.1 200 ")
    again.send(HALF)
    assert refusal(again.rest()) == (408, "head_timeout")
    blank = Client(process, LIVE)
    blank.head()
    blank.send(b"\r\n")  # before a head, which is allowed; and then none comes
    assert blank.rest() == b""
    assert process.event("connection_ended")["what"] == "head_timeout"


def test_a_body_is_not_a_head(serving):
    process = serving("--header-timeout", "0.4", "--deadline", "3")
    head = (
        b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    )
    slow = Client(process, head)
    time.sleep(1.2)
    slow.send(b"{}")
    assert slow.head().startswith(b"HTTP/1.1 422 ")
    slow.send(LIVE)
    assert slow.head().startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 120 + b"\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: %s\r\n" % (i, b"a" * 900) for i in range(50)),
    ],
    ids=["a long field", "many fields", "a long address", "long together"],
)
def test_a_head_has_a_size(serving, head):
    process = serving()
    assert refusal(Client(process, head).rest()) == (431, "head_too_large")
    usual = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\nConnection: close\r\n\r\n"
    assert Client(process, usual).rest().startswith(b"HTTP/1.1 200 ")


def test_a_head_without_end_is_not_kept(serving):
    process = serving()
    assert Client(process, HALF).sent(b"a" * 65536, 200) < 200
    chunked = b"POST /livez HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    assert Client(process, chunked).sent(b"X-After: a\r\n" * 50, 200) < 200


def test_what_is_no_http_is_answered_and_not_logged_each_time(serving):
    process = serving()
    for _ in range(20):
        assert refusal(Client(process, b"\x16\x03\x01 hello\r\n\r\n").rest()) == (400, "malformed")
    assert answered(process) == b"HTTP/1.1 200 OK"
    lines = [line for line in process.lines if isinstance(line, dict) and line["event"] == "connection_ended"]
    assert len(lines) == 1
    assert all(isinstance(line, dict) for line in process.lines)


def test_an_offer_of_another_protocol_is_passed_over(serving):
    process = serving()
    client = Client(process, LIVE[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n\r\n")
    assert client.head().startswith(b"HTTP/1.1 200 ")
    assert all(isinstance(line, dict) and line["event"] != "connection_ended" for line in process.lines)


def test_an_idle_connection_goes(serving):
    process = serving("--keep-alive", "0.3")
    idle = Client(process, LIVE)
    assert idle.head().startswith(b"HTTP/1.1 200 ")
    assert idle.rest() == b""


def test_half_sent_heads_lock_nobody_out(serving):
    process = serving("--max-connections", "20", "--header-timeout", "30")
    half = [Client(process, HALF) for _ in range(60)]
    idle = Client(process, LIVE)
    assert idle.head().startswith(b"HTTP/1.1 200 ")
    for _ in range(5):
        assert answered(process) == b"HTTP/1.1 200 OK"
    idle.send(LIVE)
    assert idle.head().startswith(b"HTTP/1.1 200 "), "the connection that was used last stays"
    assert sum(client.closed() for client in half) >= 40
    assert process.event("connection_ended")["what"] == "too_many_connections"


def test_connections_with_requests_are_not_ended_for_others(serving):
    process = serving("--max-connections", "4")
    head = (
        b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    )
    busy = [Client(process, head) for _ in range(4)]
    for client in busy:
        client.send(b"{")
    time.sleep(0.5)
    head, _, body = Client(process, LIVE).rest().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in head
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    for client in busy:
        client.send(b"}")
        assert client.head().startswith(b"HTTP/1.1 422 ")


def test_a_server_of_300_files_serves_beside_280_half_sent_heads(serving):
    process = serving("--header-timeout", "30", limit=300)
    half = []
    for _ in range(280):
        half.append(Client(process, HALF))
    assert answered(process) == b"HTTP/1.1 200 OK"
    assert all(client.socket.fileno() >= 0 for client in half)
    assert not [line for line in process.lines if isinstance(line, dict) and line["event"] == "fault"]


def test_no_descriptors_left_is_a_fault_in_the_log_and_not_the_end(serving):
    process = serving("--header-timeout", "30", "--max-connections", "1000", limit=120)
    half = [Client(process, HALF) for _ in range(200)]
    fault = process.event("fault")
    assert (fault["level"], fault["error"]) == ("error", "EMFILE")
    assert "no connection could be taken" in fault["what"]
    before = time.process_time_ns(), cpu_seconds(process)
    time.sleep(1.0)
    assert cpu_seconds(process) - before[1] < 0.7, "it must not ask again and again"
    assert len([line for line in process.lines if isinstance(line, dict) and line["event"] == "fault"]) == 1
    for client in half:
        client.socket.close()
    assert answered(process) == b"HTTP/1.1 200 OK"


def cpu_seconds(process):
    """Seconds of processor time that a server has used."""
    with open(f"/proc/{process._process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_how_many_connections_there_may_be():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    script = (
        "import resource; from cdr_kernel.serve._process import most_connections; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000)); print(most_connections(1), most_connections(10))"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    one, ten = map(int, told.split())
    assert 850 < one < 930
    assert one - ten == 9 * 16
    assert most_connections(10**6) == 8
    assert most_connections(1) <= soft
    assert hard
