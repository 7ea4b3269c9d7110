"""The command itself: its ways in, its help, what it prints to whatever stands at the other end, the doctor."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from commands import PACKAGE, QUERIES, environment, index_demo, invoke, json_of, start, wait_for

import cdr_kernel


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return index_demo(tmp_path_factory.mktemp("cli") / "store")


def test_version_and_help():
    assert invoke("--version").stdout == f"cdr-kernel {cdr_kernel.__version__}\n"
    for command in ("demo", "index", "ingest", "rank", "run", "gate", "doctor"):
        assert command in invoke("--help").stdout
        assert "--json" in invoke(command, "--help").stdout


def test_help_loads_nothing_heavy():
    heavy = ("torch", "faiss", "pyarrow", "transformers", "sentence_transformers")
    code = (
        "import sys; sys.argv = ['cdr', '--help']\n"
        "from cdr_kernel.cli._app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("columns", ["30", "60", "80", "200"])
def test_tables_fit_the_terminal(store, columns):
    width = int(columns)
    rows = invoke("rank", store, "--query", f"{QUERIES}:0:query", env={"COLUMNS": columns}).stdout.splitlines()
    assert len(rows) >= 12
    assert max(map(len, rows)) <= width
    text = invoke("demo", env={"COLUMNS": columns}).stdout
    assert max(map(len, text.splitlines())) <= width
    if width >= 80:
        assert "novelty  least  topics  words" in text


def test_no_file_steers_the_terminal(tmp_path):
    escape = "\x1b]0;owned\x07"
    facts, vectors, task = tmp_path / "f.jsonl", tmp_path / "e.npy", tmp_path / "t.json"
    facts.write_text("".join(json.dumps({"id": f"{escape}{i}", "text": f"{escape} text"}) + "\n" for i in range(2)))
    np.save(vectors, np.array([[1.0, 2.0], [0.0, 0.0]]))
    model = ("--model", escape)
    index = ("index", facts, "--embeddings", vectors, *model, "-o", tmp_path / "s", "--on-invalid", "skip")
    item = {"id": escape, "label": escape, "text": escape}
    task.write_text(json.dumps({"id": "t", "query": escape, "sub_queries": [item]}))
    np.savez(tmp_path / "q.npz", **{"0:query": np.ones(2), "0:subs": np.ones((1, 2))})
    run = ("run", tmp_path / "s", task, "--vectors", tmp_path / "q.npz", "--writer", "extract", "--k", "1")
    results = [invoke(*index), invoke(*run), invoke(*run, "--task-id", escape, code=1)]
    results.append(invoke("rank", tmp_path / "s", "--query", vectors, "--model", "m", code=1))
    for result in results:
        assert "owned" in result.output
        assert not {"\x1b", "\x07"} & set(result.output)


def test_output_for_terminals_that_know_no_unicode(store, tmp_path):
    facts, vectors, odd = tmp_path / "f.jsonl", tmp_path / "e.npy", tmp_path / "odd"
    facts.write_text(json.dumps({"id": "\x1b[31mü", "text": "[bold]é\x1b[0m \ud800 two\nlines"}))
    np.save(vectors, np.ones((1, 3), np.float32))
    invoke("index", facts, "--embeddings", vectors, "--model", "m", "-o", odd)
    plain = environment(PYTHONIOENCODING="ascii", NO_COLOR="1", TERM="dumb", COLUMNS="120")
    shown = subprocess.run(
        [sys.executable, "-m", "cdr_kernel.cli._app", "rank", odd, "--query", vectors],
        env=plain,
        capture_output=True,
        check=True,
    )
    assert b"\x1b" not in shown.stdout
    assert b"[bold]??[0m ? two lines" in shown.stdout
    found = json_of(invoke("rank", odd, "--query", vectors, "--json"))["results"][0]
    assert (found["id"], found["text"]) == ("\x1b[31mü", "[bold]é\x1b[0m \ud800 two\nlines")


@pytest.mark.skipif(os.name == "nt", reason="no such signals for another process")
def test_ctrl_c_while_importing_shows_no_traceback(tmp_path):
    slow, started = tmp_path / "cdr_kernel", tmp_path / "started"
    slow.mkdir()
    (slow / "__init__.py").write_text(f"import time; open({str(started)!r}, 'w').close(); time.sleep(60)")
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PACKAGE.parent)!r}]; import _cdr_main; _cdr_main.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    wait_for(started)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"interrupted\n")


@pytest.mark.parametrize("entry", [["-m", "cdr_kernel"], ["-c", "import _cdr_main; _cdr_main.main()"]])
def test_the_ways_in(entry):
    command = [sys.executable, *entry, "--version"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == f"cdr-kernel {cdr_kernel.__version__}\n"
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"cdr": "_cdr_main:main"}


@pytest.mark.parametrize("arguments", [["rank"], ["rank", "x", "--nope"], ["nope"], ["demo", "--k", "0"]])
def test_wrong_usage_is_one_line_of_json_too(arguments):
    process = start(*arguments, "--json")
    out, err = process.communicate(timeout=60)
    (line,) = out.decode().splitlines()
    assert process.returncode == 2
    assert json.loads(line)["error"] in " ".join(err.decode().split())
    process = start(*arguments)
    assert process.communicate(timeout=60) == (b"", err)


@pytest.mark.skipif(os.name == "nt", reason="pipes of another kind")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["demo"],
        ["rank", "STORE", "--query", f"{QUERIES}:0:query", "--k", "478", "--min-relevance", "-1", "--json"],
    ],
)
def test_a_closed_pipe_is_no_error(store, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "cdr_kernel.cli._app", *(str(store) if a == "STORE" else a for a in arguments)],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=environment(),
        check=False,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["demo"], ["demo", "--json"]])
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "cdr_kernel.cli._app", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    (line,) = process.stderr.decode().splitlines()
    assert process.returncode == 1
    assert line == "error: standard output: No space left on device"


def test_doctor_knows_the_machine():
    found = json_of(invoke("doctor", "--json"))
    assert found["versions"]["cdr_kernel"] == cdr_kernel.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["simd"] in found["simd_levels"]
    assert found["threads"] >= 1
    assert found["impl_for_cpu"] in found["impls"]
    assert found["problems"] == []
    text = invoke("doctor").stdout
    for part in ("torch", "SIMD", "threads", "GPU", "facts on the CPU"):
        assert part in text


def test_doctor_survives_what_is_missing(monkeypatch):
    for name in ("torch", "faiss"):
        monkeypatch.setitem(sys.modules, name, None)
    wrong = {"CDR_KERNEL_IMPL": "warp", "CDR_KERNEL_THREADS": "many", "CDR_KERNEL_SPEED": "9"}
    result = invoke("doctor", "--json", env=wrong)
    found = json_of(result)
    assert (found["versions"]["torch"], found["versions"]["faiss"], found["gpus"]) == (None, None, [])
    assert (found["impls"], found["impl_for_cuda"]) == (["cpp"], None)
    assert found["environment"].items() >= wrong.items()
    for name in ("torch", "faiss", "impl_for_cpu", "CDR_KERNEL_THREADS", "CDR_KERNEL_SPEED"):
        assert any(problem.startswith(f"{name}: ") for problem in found["problems"])
    shown = invoke("doctor", env=wrong)
    assert re.search(r"torch +missing", shown.stdout)
    assert "warning: faiss: not installed: pip install faiss-cpu" in shown.stderr
    assert re.search(r"implementations +cpp\n", shown.stdout)
    assert re.search(r"facts on a GPU +none\n", shown.stdout)


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_doctor_lists_nothing_that_is_installed_and_cannot_be_imported(package, monkeypatch, tmp_path):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise OSError('a library of it is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("cdr_kernel.score._cdr_score.triton_installed", lambda: True)
    found = json_of(invoke("doctor", "--json", env={"CDR_KERNEL_IMPL": ""}))
    assert found["versions"][package] is None
    assert found["impls"] == {"torch": ["cpp"], "triton": ["cpp", "torch"]}[package]
    assert found["impl_for_cuda"] is None
    assert f"{package}: a library of it is missing" in found["problems"]
