"""The process: it listens, drains on SIGTERM without losing what it accepted, and says what is wrong at the start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from serving import MODEL, b64, created, make_store, new_session, query, rank, update

from cdr_kernel.serve import _logs
from cdr_kernel.store import _atomic_folder

httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn", reason="needs the serve extra")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's here")


class Process:
    """`cdr serve` on a free port; `lines` are its log."""

    def __init__(self, store, *options, program=("-m", "cdr_kernel")):
        command = [sys.executable, *program, "serve", str(store), "--port", "0", *options]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self._process.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else line)

    def event(self, name, seconds=60.0):
        until = time.monotonic() + seconds
        while True:
            found = [line for line in list(self.lines) if isinstance(line, dict) and line["event"] == name]
            if found:
                return found[0]
            assert time.monotonic() < until, (name, self.lines)
            time.sleep(0.01)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.event('listening')['port']}"

    def tell(self, number):
        self._process.send_signal(number)

    def end(self, seconds=60.0):
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self._reader.join(10)
        self._process.stdout.close()
        self._process.stderr.close()
        return status


@pytest.fixture
def store(tmp_path):
    make_store(2000).save(tmp_path / "s")
    return tmp_path / "s"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_loses_no_accepted_request(store, number):
    process = Process(store, "--no-access-log", "--drain", "0.3")
    process.event("ready")
    with httpx.Client(base_url=process.url, timeout=60) as client:
        ids = [created(client, max_windows=20) for _ in range(8)]
    seen = {"answered": len(ids), "refused": 0}
    lock = threading.Lock()
    stop = threading.Event()
    bad = []

    def load(i):
        turn = i
        with httpx.Client(base_url=process.url, timeout=60) as client:
            while not stop.is_set():
                path = f"/v1/sessions/{ids[i]}"
                turn += 1
                # Sessions come back from the limit of windows, which would end them.
                changes = (f"{path}/update", update(["s1"])) if turn % 9 else (f"{path}/reset", None)
                path, body = (f"{path}/rank", rank(k=50)) if i % 2 == 0 else changes
                try:
                    status = client.post(path, json=body).status_code
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    with lock:
                        seen["refused"] += 1
                    return
                if status != 200:
                    bad.append(status)
                with lock:
                    seen["answered"] += 1

    threads = [threading.Thread(target=load, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60
    while seen["answered"] < 40 and time.monotonic() < until:
        time.sleep(0.01)
    process.tell(number)
    status = process.end()
    stop.set()
    for thread in threads:
        thread.join()
    told = process.event("stopped")
    assert bad == []
    assert told["accepted"] == told["answered"] == seen["answered"] > 20
    assert status == 0
    assert process.event("draining")["signal"] == signal.Signals(number).name


def test_while_it_drains_it_serves_but_is_not_ready(store):
    process = Process(store, "--drain", "300")
    process.event("ready")
    with httpx.Client(base_url=process.url) as client:
        assert client.get("/readyz").status_code == 200
        process.tell(signal.SIGTERM)
        process.event("draining")
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert answer.headers["connection"] == "close"
        assert client.get("/livez").status_code == 200
        assert created(client)
    process.tell(signal.SIGTERM)  # enough
    assert process.end() == 0
    assert any(line.get("operation") == "create_session" for line in process.lines if isinstance(line, dict))


def test_a_second_signal_ends_it_at_once(store):
    process = Process(store, "--drain", "300")
    process.event("ready")
    process.tell(signal.SIGTERM)
    process.event("draining")
    process.tell(signal.SIGTERM)
    assert process.end(30) == 0


def test_what_is_wrong_is_said_and_the_status_is_1(tmp_path):
    for arguments, said in (
        ([tmp_path / "nothing"], "no store here"),
        ([tmp_path, "--host", "0.0.0.0"], "expected --keys"),
        ([tmp_path, "--keys", tmp_path / "none.json"], "none.json"),
    ):
        command = [sys.executable, "-m", "cdr_kernel", "serve", *map(str, arguments), "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert said in done.stderr.splitlines()[-1]
        assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_store_that_cannot_be_opened_is_an_error_in_the_log(tmp_path, store):
    for options, error, said in (
        ([tmp_path / "nothing"], "FileNotFoundError", f"{tmp_path / 'nothing'}: no store here"),
        ([store, "--embed", "no-model"], "ValueError", "got 'no-model'"),
    ):
        process = Process(*options)
        told = process.event("failed")
        assert process.end() == 1
        assert (told["level"], told["error"]) == ("error", error)
        assert said in told["message"]


def test_of_errors_in_foreign_words_the_log_has_the_place_alone(caplog):
    caplog.set_level("INFO", logger=_logs.NAME)
    try:
        raise RuntimeError("a text of a fact")
    except RuntimeError as error:
        _logs.failed(error)
    _logs.failed(PermissionError(13, "Permission denied", "/a/store"))
    _logs.failed(KeyError("tenant 'a' not there"))
    fields = [record.fields for record in caplog.records]
    assert "text of a fact" not in str(fields)
    assert "test_of_errors_in_foreign_words" in fields[0]["where"][-1]
    assert [each.get("message") for each in fields] == [None, "/a/store: Permission denied", "tenant 'a' not there"]


def test_a_port_that_is_taken(store):
    process = Process(store)
    port = process.event("listening")["port"]
    command = [sys.executable, "-m", "cdr_kernel", "serve", str(store), "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "in use" in done.stderr
    process.event("ready")
    process.tell(signal.SIGTERM)
    assert process.end() == 0


class Raw:
    """A connection that sends what it is told, which may be half a request."""

    def __init__(self, process, sent):
        self._socket = socket.create_connection(("127.0.0.1", process.event("listening")["port"]), timeout=60)
        self._socket.sendall(sent)

    def rest(self):
        """All that comes until the other side ends it."""
        parts = []
        while part := self._socket.recv(65536):
            parts.append(part)
        self._socket.close()
        return b"".join(parts)

    def send(self, more):
        self._socket.sendall(more)


def wait_until_in_flight(process, requests, seconds=60.0):
    until = time.monotonic() + seconds
    with httpx.Client(base_url=process.url) as client:
        while f"cdr_requests_in_flight {requests + 1}.0" not in client.get("/metrics").text:  # this one is too
            assert time.monotonic() < until
            time.sleep(0.01)


HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{}\r\n\r\n"


def post(path, body, sent=None):
    """The bytes of a request, of its body as many as `sent` says."""
    data = json.dumps(body).encode()
    return HEAD.format(path, f"Content-Length: {len(data)}").encode() + data[:sent]


def test_bodies_that_never_end_do_not_hold_it(store):
    process = Process(store, "--drain", "2")
    process.event("ready")
    whole = post("/v1/sessions", new_session())
    slow = [Raw(process, post("/v1/sessions", new_session(), 20 * i)) for i in range(3)]
    chunked = HEAD.format("/v1/facts", "Transfer-Encoding: chunked") + '5\r\n{"emb\r\n'
    slow.append(Raw(process, chunked.encode()))
    headless = Raw(process, whole[:40])
    late = Raw(process, whole[:-7])
    wait_until_in_flight(process, 5)
    process.tell(signal.SIGTERM)
    process.event("draining")
    late.send(whole[-7:])
    assert late.rest().startswith(b"HTTP/1.1 200 ")
    for each in slow:
        answer = each.rest()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"draining"' in answer
        assert b"retry-after: 1" in answer.lower()
    assert headless.rest() == b""
    assert process.end() == 0
    told = process.event("stopped")
    assert told["accepted"] == told["answered"] >= 6
    assert process.event("cut_off")["requests"] == 4
    assert all(isinstance(line, dict) for line in process.lines)


def test_many_who_connect_at_once_are_answered(store):
    process = Process(store, "--no-access-log", "--drain", "0")
    process.event("ready")
    asked = [Raw(process, b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") for _ in range(300)]
    assert {each.rest()[:15] for each in asked} == {b"HTTP/1.1 200 OK"}
    process.tell(signal.SIGTERM)
    assert process.end() == 0
    assert process.event("stopped")["answered"] == 300


def test_what_is_not_done_in_time_is_lost_with_a_line_that_says_so(tmp_path):
    durable = pytest.importorskip("cdr_kernel.durable._durable_store", reason="needs the store extra")
    pytest.importorskip("lance", reason="needs the store extra")
    durable.DurableStore.from_facts(make_store(), tmp_path / "d").close()
    process = Process(tmp_path / "d", "--drain", "0", "--stop", "1")
    process.event("ready")
    fact = {"id": "n", "text": "t", "embedding": b64(query())}
    with _atomic_folder.turn(tmp_path / "d"):  # nobody else may write
        stuck = Raw(process, post("/v1/facts", {"embedding_model": MODEL, "facts": [fact]}))
        wait_until_in_flight(process, 1)
        process.tell(signal.SIGTERM)
        told = process.event("lost")
        with pytest.raises(ConnectionRefusedError):  # all handles on the port are closed by now
            Raw(process, b"")
    assert process.end() == 1
    assert told["operation"] == "add_facts"
    assert [line.get("status") for line in process.lines if line.get("operation") == "add_facts"] == [None, 500]
    assert process.event("stopped")["accepted"] == process.event("stopped")["answered"] + 1
    assert stuck.rest().startswith(b"HTTP/1.1 500 ")
    assert all(isinstance(line, dict) for line in process.lines)


STUCK = """
import threading
from cdr_kernel.cli import _app as cli
from cdr_kernel.files import _embedders as embedder

embedder.load_embedder = lambda model: lambda texts: threading.Event().wait()
cli.main()
"""
"""`cdr`, with a model that takes for ever."""


@pytest.mark.parametrize("signals", [1, 2])
def test_a_model_that_is_at_work_does_not_hold_it(store, signals):
    options = ("--embed", MODEL, "--drain", "0", "--stop", "1" if signals == 1 else "300")
    process = Process(store, *options, program=("-c", STUCK))
    process.event("ready")
    facts = [{"id": "n", "text": "t"}]
    stuck = Raw(process, post("/v1/facts", {"embedding_model": MODEL, "facts": facts}))
    wait_until_in_flight(process, 1)
    process.tell(signal.SIGTERM)
    process.event("draining")
    if signals == 2:
        process.tell(signal.SIGTERM)
    assert process.end() == 1
    assert process.event("lost")["operation"] == "add_facts"
    assert process.event("stopped")["accepted"] == process.event("stopped")["answered"] + 1
    assert b" 200 " not in stuck.rest()
    assert all(isinstance(line, dict) for line in process.lines)
