"""What the tests of the command share: the demo's files, its store, and ways to call `cdr`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from typer.testing import CliRunner

import cdr_kernel
from cdr_kernel.cli._app import app

PACKAGE = Path(cdr_kernel.__file__).parent
FACTS = str(PACKAGE / "demo" / "facts.jsonl")
VECTORS = str(PACKAGE / "demo" / "facts_minilm_f16.npy")
QUERIES = str(PACKAGE / "demo" / "queries_minilm_f16.npz")
TASK = str(PACKAGE / "demo" / "task.json")
GATE = ["--min-relevance", "0.3"]
WRITER = """
import json, sys, time
asked = json.load(sys.stdin)
if asked["window"] == {window}:
    {action}
print("Flat network model.", *(fact["text"] for fact in asked["facts"]))
"""


def index_demo(folder):
    """The demo corpus as `cdr index` stores it."""
    invoke("index", FACTS, "--embeddings", VECTORS, "--model", "demo-model", "-o", folder)
    return folder


def invoke(*arguments, code=0, env=None):
    """The result of a command in this process, which ends with this status."""
    result = CliRunner(env={"COLUMNS": "120", **(env or {})}).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    if code != 0 and result.exception is not None:
        assert isinstance(result.exception, SystemExit)
    return result


def json_of(result):
    """The one line of JSON, last on standard output."""
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def fails(*arguments, code=1):
    """The line on standard error of a command that ends with this status."""
    result = invoke(*arguments, code=code)
    assert "Traceback" not in result.stderr
    if code == 1:
        (line,) = [line for line in result.stderr.splitlines() if not line.startswith(("warning: ", "window "))]
        assert line.startswith("error: ")
        return line
    return " ".join(result.stderr.split())


def environment(**more):
    """The variables that a process of its own needs to find the package."""
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**inherited, "PYTHONPATH": path, **more}


def start(*arguments, **options):
    """A command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "cdr_kernel.cli._app", *(str(a) for a in arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), **options},
    )


def writer(tmp_path, window=0, action="pass"):
    """The command line of a writer that copies the facts, after an action of Python in one of the windows."""
    path = tmp_path / "writer.py"
    path.write_text(WRITER.format(window=window, action=action))
    return f"{sys.executable} {path}"


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
