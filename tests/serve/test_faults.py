"""Damage and I/O errors of stores: 5xx answers, one line in the log, /readyz and /metrics."""

from __future__ import annotations

import errno
import json
import logging
import time

import pytest
from serving import MODEL, b64, created, error_of, make_store, query, rank, serving

pytest.importorskip("httpx2")

from cdr_kernel import DamagedFileError
from cdr_kernel.serve import faults
from cdr_kernel.serve._errors import of_library
from cdr_kernel.serve._logs import NAME
from cdr_kernel.serve.faults import StorageFault


@pytest.fixture
def folder(tmp_path):
    make_store().save(tmp_path / "s")
    return tmp_path / "s"


@pytest.fixture
def lines(caplog):
    """The fields of the log's `fault` and `sound` lines."""
    caplog.set_level(logging.INFO, NAME)
    seen = []

    class Handler(logging.Handler):
        def emit(self, record):
            if record.msg in ("fault", "sound"):
                seen.append({"event": record.msg, "level": record.levelname, **record.fields})

    handler = Handler()
    logging.getLogger(NAME).addHandler(handler)
    yield seen
    logging.getLogger(NAME).removeHandler(handler)


def failing(client, monkeypatch, error):
    """Have every look at facts fail with this error."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(type(client.app.state.service.tenants["default"].facts.facts), "get", fail)


@pytest.mark.parametrize(
    ("error", "status", "code", "cause"),
    [
        (
            DamagedFileError("/data/secret.npy: block 3 is not as it was written", "/data/secret.npy", 3),
            500,
            "damaged",
            "",
        ),
        (OSError(errno.EIO, "Input/output error", "/data/secret.npy"), 500, "io_error", "EIO"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/secret.npy"), 507, "no_space", "ENOSPC"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/data/secret.npy"), 507, "no_space", "EDQUOT"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/secret.npy"), 500, "io_error", "EACCES"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/data/secret.npy"), 500, "io_error", "ENOENT"),
        (OSError("LanceError(IO): /data/secret: No space left (os error 28)"), 507, "no_space", "ENOSPC"),
        (OSError("LanceError(IO): /data/secret: something else"), 500, "io_error", ""),
        (UnicodeDecodeError("utf-8", b"/data/secret\xff", 12, 13, "invalid start byte"), 500, "damaged", ""),
        (json.JSONDecodeError("Expecting value", "/data/secret", 0), 500, "damaged", ""),
    ],
)
def test_a_fault_of_the_store_is_not_the_clients(folder, lines, monkeypatch, error, status, code, cause):
    with serving(folder) as client:
        failing(client, monkeypatch, error)
        answers = [client.get("/v1/facts/f1") for _ in range(3)]
        for answer in answers:
            assert (answer.status_code, error_of(answer)["code"], error_of(answer)["field"]) == (status, code, None)
            assert cause in error_of(answer)["message"]
            assert "secret" not in answer.text
        assert len(lines) == 1, "one line in ten seconds"
        line = lines[0]
        assert (line["event"], line["level"], line["kind"], line["error"]) == ("fault", "ERROR", code, cause)
        assert (line["tenant"], line["operation"]) == ("default", "get_fact")
        assert line["request_id"] == answers[0].json()["request_id"]
        if not isinstance(error, ValueError) or isinstance(error, DamagedFileError):
            assert "secret" in line["file"] + line["message"]
        assert f'cdr_faults_total{{kind="{code}"}} 3.0' in client.get("/metrics").text
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == ((503, "damaged") if code == "damaged" else (200, "ok"))
        assert client.get("/livez").status_code == 200


def test_the_server_is_ready_again_once_the_store_is_sound(folder, lines, monkeypatch):
    monkeypatch.setattr(faults, "CHECK_S", 0.05)
    with serving(folder) as client:
        sound = []
        monkeypatch.setattr(
            type(client.app.state.service.tenants["default"].facts), "verify", lambda self, progress: check(sound)
        )

        def check(sound):
            if not sound:
                raise DamagedFileError("still damaged")

        with monkeypatch.context() as patch:
            failing(client, patch, DamagedFileError("damaged", "f", 1))
            assert client.get("/v1/facts/f1").status_code == 500
        time.sleep(0.3)
        assert client.get("/readyz").json()["status"] == "damaged"
        assert client.get("/v1/facts/f1").status_code == 200, "what is not damaged is answered"
        sound.append(True)
        until = time.monotonic() + 10
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert lines[-1] == {"event": "sound", "level": "INFO", "tenant": "default"}


def test_a_full_disk_refuses_writes_and_ranks_go_on(tmp_path, lines, monkeypatch):
    pytest.importorskip("lance", reason="needs the store extra")
    from cdr_kernel.durable import DurableStore
    from cdr_kernel.durable._dataset import Record

    DurableStore.from_facts(make_store(), tmp_path / "d").close()
    with serving(tmp_path / "d") as client:
        sid = created(client)
        full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "d"))
        body = {"embedding_model": MODEL, "facts": [{"id": "new", "text": "t", "embedding": b64(query())}]}
        with monkeypatch.context() as patch:
            patch.setattr(Record, "commit", lambda *_: (_ for _ in ()).throw(full))
            answer = client.post("/v1/facts", json=body)
            assert (answer.status_code, error_of(answer)["code"]) == (507, "no_space")
            assert client.delete("/v1/facts/f1").status_code == 507
            assert client.post(f"/v1/sessions/{sid}/rank", json=rank()).status_code == 200
            assert client.get("/readyz").status_code == 200
        assert [(line["error"], line["operation"]) for line in lines] == [("ENOSPC", "add_facts")]
        assert client.get("/v1/facts/f1").status_code == 200
        assert client.post("/v1/facts", json=body).json()["added"] == 1


@pytest.mark.parametrize("error", [ValueError("k: expected"), KeyError("ids"), TimeoutError("late"), RuntimeError()])
def test_other_errors_are_no_faults_of_the_store(error):
    assert StorageFault.of(error) is None


def test_errors_of_other_packages_are_not_the_clients():
    pyarrow = pytest.importorskip("pyarrow")
    refusal = of_library(pyarrow.lib.ArrowInvalid("Parquet magic bytes not found"))
    assert (refusal.status, refusal.detail.code) == (500, "io_error")
