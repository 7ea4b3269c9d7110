"""The README's Python blocks run as they stand, one after the other, in an empty folder; docs/cli.md is complete."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cdr_kernel import demo
from cdr_kernel.cli._app import app
from cdr_kernel.files._files import read_task_vectors, read_tasks

README = Path(__file__).parent.parent / "README.md"
FORMATS = README.parent / "docs" / "cli.md"


def test_the_python_blocks_run(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)
    assert "'CRP-Context-Continuation-Status': 'task-complete'" in capsys.readouterr().out.splitlines()[-1]


def test_the_quickstart_has_at_most_fifteen_lines():
    first = re.search(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    assert first
    assert len(first[1].strip().splitlines()) <= 15


@pytest.mark.parametrize("command", ["pytest", "cdr demo"])
def test_the_two_commands_stand_once_each(command):
    assert len(re.findall(rf"^pip install .*&& {command}$", README.read_text(), re.M)) == 1


def test_the_readme_is_short():
    raw = README.read_bytes()
    assert len(raw) <= 10_000
    assert raw.count(b"\n") <= 130


def test_the_architecture_page_names_every_room():
    text = (README.parent / "docs" / "architecture.md").read_text()
    rooms = [path.parent.name for path in (README.parent / "cdr_kernel").glob("*/__init__.py")]
    assert len(rooms) > 10
    rows = re.findall(r"^\| `(\w+)/` \|", text, re.M)
    assert set(rooms) <= set(rows)
    assert len(set(rows)) == len(rows), "a room has two rows"


def test_the_sample_task_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = FORMATS.read_text()
    path = tmp_path / "task.json"
    path.write_text(re.search(r"^```json\n(.*?)^```", text, re.M | re.S)[1])
    (task,) = read_tasks(path)
    scope = {"numpy": np, "query_vector": np.ones(3), "sub_query_vectors": np.eye(2, 3)}
    exec(re.search(r"^```python\n(.*?)^```", text, re.M | re.S)[1], scope)
    query, subs = read_task_vectors(tmp_path / "q.npz", task, 3)
    assert (query.shape, subs.shape) == ((3,), (2, 3))


def keys(value):
    """The names in a document, without those that are data: of headers, sub-queries, versions and variables."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    data = ("headers", "depth_by_sub_query", "words_by_sub_query", "versions", "environment", "runs")
    return set(value).union(*(keys(part) for name, part in value.items() if name not in data))


def test_the_formats_name_every_field(tmp_path):
    package = Path(demo.__file__).parent
    store, run, asked = tmp_path / "store", tmp_path / "run.json", tmp_path / "asked.json"
    (tmp_path / "w.py").write_text(f"import sys; open({str(asked)!r}, 'w').write(sys.stdin.read()); print('DNS')")
    facts, task, vectors = (package / name for name in ("facts.jsonl", "task.json", "queries_minilm_f16.npz"))
    writer = f"{sys.executable} {tmp_path / 'w.py'}"
    commands = (
        ["index", facts, "--embeddings", package / "facts_minilm_f16.npy", "--model", "m", "-o", store],
        ["rank", store, "--query", f"{vectors}:0:query", "--residual", f"{vectors}:0:subs", "--explain", "dns-02"],
        ["run", store, task, "--vectors", vectors, "--writer", writer, "-o", run, "--windows", "1"],
        ["demo", "--windows", "1"],
        ["doctor"],
    )
    documents = []
    for command in commands:
        done = CliRunner().invoke(app, [str(part) for part in command] + ["--json"])
        assert done.exit_code == 0, done.output
        documents.append(json.loads(done.stdout.splitlines()[-1]))
    documents += [json.loads(run.read_text()), json.loads(asked.read_text())]
    named = set(re.findall(r"`([a-z_]+)`", FORMATS.read_text()))
    assert keys(documents) <= named
