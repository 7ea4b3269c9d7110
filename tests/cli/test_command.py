"""How commands end: errors, warnings, signals."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from commands import FACTS, GATE, QUERIES, TASK, VECTORS, index_demo, invoke, json_of, start, wait_for, writer


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return index_demo(tmp_path_factory.mktemp("cli") / "store")


def test_an_error_is_one_line_of_json_too(tmp_path):
    result = invoke("rank", tmp_path, "--query", f"{QUERIES}:0:query", "--json", code=1)
    assert result.stderr == f"error: {json_of(result)['error']}\n"


@pytest.mark.parametrize("error", [RuntimeError("odd\nthing"), RecursionError("deep"), TypeError("x"), IndexError("y")])
def test_any_error_is_one_line(store, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("cdr_kernel.cdr_score", fail)
    arguments = ("rank", store, "--query", f"{QUERIES}:0:query", "--json")
    result = invoke(*arguments, code=1)
    line = f"{type(error).__name__}: {' '.join(str(error).split())} (CDR_KERNEL_DEBUG=1 shows where)"
    assert (result.stderr, json_of(result)) == (f"error: {line}\n", {"error": line})
    debugged = invoke(*arguments, code=1, env={"CDR_KERNEL_DEBUG": "1"}).stderr
    assert debugged.startswith("Traceback")
    assert debugged.endswith(f"error: {line}\n")


def test_warnings_go_to_standard_error(tmp_path):
    facts = tmp_path / "f.jsonl"
    lines = [{**json.loads(line), "importance": 0.1} for line in Path(FACTS).read_text().splitlines()]
    facts.write_text("\n".join(map(json.dumps, lines)))
    invoke("index", facts, "--embeddings", VECTORS, "--model", "m", "-o", tmp_path / "s")
    result = invoke("run", tmp_path / "s", TASK, "--vectors", QUERIES, "--writer", "extract", "--json", *GATE)
    found = json_of(result)
    assert found["exit"]["reason"] == "ckf-exhausted"
    (window,) = found["windows"]
    assert (window["facts"], window["written"], window["topics_reached"], window["words"]) == (10, False, 0, 0)
    assert result.stderr.startswith("warning: the facts of window 1 have a mean importance of 0.1")


@pytest.mark.skipif(os.name == "nt", reason="no such signals for another process")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_the_finished_windows_and_ends_the_writer(store, tmp_path, number):
    path, started, late = tmp_path / "run.json", tmp_path / "started", tmp_path / "late"
    action = f"open({str(started)!r}, 'w').close(); time.sleep(2); open({str(late)!r}, 'w').close()"
    command = writer(tmp_path, window=2, action=action)
    process = start("run", store, TASK, "--vectors", QUERIES, "--writer", command, "-o", path, "--json", *GATE)
    wait_for(started)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (128 + number, b"")
    assert err.decode().splitlines()[-1] == "interrupted"
    run = json.loads(path.read_text())
    assert (run["complete"], run["error"], len(run["windows"])) == (False, "interrupted", 1)
    time.sleep(2.2)
    assert not late.exists()
