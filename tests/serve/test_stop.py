"""The process ends within the time that stopping has, whatever it does, and says what it leaves; clients that do not
read are cut off and counted."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import suppress

import pytest
from serving import MODEL, b64, created, make_store, new_session, query

from tests.serve.test_process import Process, Raw, post, wait_until_in_flight

httpx = pytest.importorskip("httpx2")

from tests.serve import test_process  # noqa: E402  # it needs httpx2 too

pytestmark = test_process.pytestmark

LARGE = "large " * 2_000_000
GET_LARGE = b"GET /v1/facts/large HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(autouse=True)
def none_left(monkeypatch):
    """Ends the processes of a test that has failed."""
    begun, begin = [], Process.__init__
    monkeypatch.setattr(
        Process, "__init__", lambda self, *args, **more: begun.append(self) or begin(self, *args, **more)
    )
    yield
    for each in begun:
        each._process.kill()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    made = make_store(200)
    made.add(["large"], [LARGE], query(3)[None])
    folder = tmp_path_factory.mktemp("stop") / "s"
    made.save(folder)
    return folder


def counts(process):
    told = process.event("stopped")
    assert told["accepted"] == told["answered"] + told["unread"] + told["lost"]
    return told


def read(connection, size=1 << 16):
    part = connection._socket.recv(size)
    assert part
    return part


def wait_for(process, name, number):
    until = time.monotonic() + 60
    while sum(isinstance(line, dict) and line["event"] == name for line in list(process.lines)) < number:
        assert time.monotonic() < until, process.lines
        time.sleep(0.01)


def test_a_client_that_does_not_read_is_cut_off(store):
    process = Process(store, "--send-timeout", "0.5", "--drain", "0", "--no-access-log")
    process.event("ready")
    start = time.monotonic()
    still = [Raw(process, GET_LARGE) for _ in range(3)]
    wait_for(process, "unread", 3)
    assert time.monotonic() - start < 30
    told = process.event("unread")
    assert (told["operation"], told["level"]) == ("get_fact", "warning")
    assert told["bytes"] > len(LARGE)
    for each in still:
        size = 0
        with suppress(ConnectionResetError):
            while part := each._socket.recv(1 << 20):
                size += len(part)
        assert size < len(LARGE)
        each._socket.close()
    with httpx.Client(base_url=process.url) as client:
        assert client.get("/v1/facts/large").json()["text"] == LARGE
    process.tell(signal.SIGTERM)
    assert process.end() == 0
    assert counts(process)["unread"] == 3


def test_a_client_that_reads_slowly_gets_all(store):
    process = Process(store, "--send-timeout", "3", "--drain", "0", "--no-access-log")
    process.event("ready")
    slow = Raw(process, GET_LARGE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    size = 0
    for _ in range(12):
        time.sleep(0.3)  # longer than --send-timeout together
        size += len(read(slow))
    size += len(slow.rest())
    assert size > len(LARGE)
    process.tell(signal.SIGTERM)
    assert process.end() == 0
    assert counts(process)["unread"] == 0


def test_a_client_that_leaves_has_not_been_answered(store):
    process = Process(store, "--drain", "0", "--no-access-log")
    process.event("ready")
    for _ in range(3):
        gone = Raw(process, GET_LARGE)
        read(gone)
        gone._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        gone._socket.close()
    wait_for(process, "unread", 3)
    process.tell(signal.SIGTERM)
    assert process.end() == 0
    assert counts(process)["answered"] == 0


def test_an_answer_that_is_not_read_when_it_stops_is_not_called_answered(store):
    process = Process(store, "--send-timeout", "60", "--drain", "0", "--stop", "1", "--no-access-log")
    process.event("ready")
    still = Raw(process, GET_LARGE)
    read(still)
    start = time.monotonic()
    process.tell(signal.SIGTERM)
    status = process.end()
    assert time.monotonic() - start < 20
    assert status == 0  # it was the client
    assert counts(process) | {"answered": 0, "unread": 1, "lost": 0} == counts(process)
    assert not any(isinstance(line, dict) and line["event"] == "lost" for line in process.lines)
    still._socket.close()


STUCK = """
import sys, threading
from cdr_kernel.cli import _app as cli
from cdr_kernel.serve import _process as run, _schema as schema, _service as service
from cdr_kernel.serve import _session_operations as session_operations, _stores as stores

where = sys.argv.pop(1)
run.CLOSE_S = service.CLOSE_S = 0.5
run.WATCH_S = 0.5 if where == "loop" else 60

def stuck(*args, **more):
    threading.Event().wait()

if where == "pool":
    session_operations.WordCount.by_words_steps = lambda self, output: stuck
elif where == "write":
    stores.FolderFacts.add = stuck
elif where == "rank":
    service.Batcher._ranked = stuck
elif where == "loading":
    service.Service.load = stuck
elif where == "loop":
    schema.wants_msgpack = stuck
cli.main()
"""
"""`cdr`, with something that never ends in one of its threads."""
FACT = {"id": "n", "text": "t", "embedding": b64(query())}
REQUESTS = {
    "pool": ("assess", {"output": "red"}),
    "write": ("/v1/facts", {"embedding_model": MODEL, "facts": [FACT]}),
    "rank": ("rank", {"embedding_model": MODEL, "query": b64(query()), "k": 5}),
    "loop": ("/v1/sessions", new_session()),
}


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize(("place", "job"), [("pool", "assess_output"), ("write", "add_facts"), ("rank", "rank")])
def test_work_that_never_ends_does_not_hold_it(store, place, job, signals):
    stop = "1" if signals == 1 else "300"
    process = Process(store, "--drain", "0", "--stop", stop, "--deadline", "300", program=("-c", STUCK, place))
    process.event("ready")
    path, body = REQUESTS[place]
    if not path.startswith("/"):
        with httpx.Client(base_url=process.url) as client:
            path = f"/v1/sessions/{created(client)}/{path}"
    stuck = Raw(process, post(path, body))
    wait_until_in_flight(process, 1)
    start = time.monotonic()
    process.tell(signal.SIGTERM)
    if signals == 2:
        process.event("draining")
        process.tell(signal.SIGTERM)
    assert process.end() == 1
    assert time.monotonic() - start < 20
    told = process.event("fault")
    (running,) = told["running"]
    assert running["job"].startswith(job)
    assert any(frame.endswith(" stuck") for frame in running["where"])
    assert process.event("lost")["operation"].startswith(job)
    assert counts(process)["lost"] == 1
    assert b" 200 " not in stuck.rest()
    assert all(isinstance(line, dict) for line in process.lines)


def test_stores_that_are_never_open_do_not_hold_it(store):
    process = Process(store, "--drain", "0", "--stop", "1", program=("-c", STUCK, "loading"))
    process.event("listening")
    with httpx.Client(base_url=process.url) as client:
        assert client.get("/readyz").status_code == 503
    process.tell(signal.SIGTERM)
    assert process.end() == 0
    (running,) = process.event("fault")["running"]
    assert running["job"] == "opening the stores"


def test_an_event_loop_that_never_comes_back_does_not_hold_it(store):
    process = Process(store, "--drain", "0", "--stop", "1", program=("-c", STUCK, "loop"))
    process.event("ready")
    stuck = Raw(process, post(*REQUESTS["loop"]))
    time.sleep(0.5)
    start = time.monotonic()
    process.tell(signal.SIGTERM)
    assert process.end() == 1
    assert time.monotonic() - start < 20
    running = process.event("fault")["running"][-1]
    assert running["job"] == "the event loop"
    assert any(frame.endswith(" stuck") for frame in running["where"])
    stuck._socket.close()
