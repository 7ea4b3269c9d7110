"""`cdr index` as a user calls it; `cdr ingest` is tested in test_ingest.py."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from commands import FACTS, VECTORS, fails, index_demo, invoke, json_of, start

from cdr_kernel import FactStore


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return index_demo(tmp_path_factory.mktemp("cli") / "store")


def test_index_says_what_it_made(store, tmp_path):
    loaded = FactStore.load(store)
    assert (len(loaded), loaded.dim, loaded.dtype.name, loaded.embedding_model) == (478, 384, "float32", "demo-model")
    assert loaded.get(["flat-model-01"])[0].source == "flat-model"
    arguments = ("index", FACTS, "--embeddings", VECTORS, "--model", "m", "-o", tmp_path / "s", "--json")
    part = json_of(invoke(*arguments, "--rows", "10:30", "--dtype", "float16"))
    expected = {"store": str(tmp_path / "s"), "facts": 20, "skipped": [], "dim": 384, "dtype": "float16", "model": "m"}
    expected["codes"] = False
    assert part == expected
    assert json_of(invoke(*arguments, "--rows", ":5"))["facts"] == 5
    assert json_of(invoke(*arguments, "--rows", "470:"))["facts"] == 8


def test_index_skips_what_is_asked_to_be_skipped(tmp_path):
    facts, vectors = tmp_path / "f.jsonl", tmp_path / "e.npy"
    facts.write_text('{"id": "a", "text": "x"}\n{"id": "b", "text": "y"}\n')
    np.save(vectors, np.array([[1.0, 2.0], [0.0, 0.0]]))
    arguments = ("index", facts, "--embeddings", vectors, "--model", "m", "-o", tmp_path / "s")
    assert "e.npy, row 1 (fact 'b', line 2 of" in fails(*arguments)
    assert not (tmp_path / "s").exists()
    result = invoke(*arguments, "--on-invalid", "skip", "--json")
    assert "1 fact left out" in result.stderr
    assert json_of(result)["skipped"] == ["b"]


@pytest.mark.skipif(os.name == "nt", reason="no FIFO")
@pytest.mark.parametrize("name", ["-", "/dev/stdin", "fifo"])
def test_index_reads_facts_from_a_pipe(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    content = Path(FACTS).read_bytes()
    path = tmp_path / "fifo" if name == "fifo" else name
    if name == "fifo":
        os.mkfifo(path)

    def index(content):
        process = start(
            "index",
            path,
            "--embeddings",
            VECTORS,
            "--model",
            "m",
            "-o",
            tmp_path / "s",
            "--json",
            stdin=subprocess.PIPE,
        )
        if name == "fifo":
            path.write_bytes(content)
        out, err = process.communicate(b"" if name == "fifo" else content, timeout=60)
        return process.returncode, out, err.decode()

    code, out, err = index(content)
    assert (code, err, json.loads(out)["facts"]) == (0, "", 478)
    code, _, err = index(b"\n[")
    shown = "standard input" if name == "-" else path
    assert code == 1
    assert err.startswith(f"error: {shown}, line 2: expected one JSON object, got '['")
    assert not list(tmp_path.glob("cdr-facts-*"))


def test_index_refuses(tmp_path):
    out = ["-o", tmp_path / "s"]
    vectors = ["--embeddings", VECTORS, "--model", "m"]
    assert "either --embeddings E.npy with --model, or --embed" in fails("index", FACTS, *out, code=2)
    assert "either --embeddings" in fails("index", FACTS, *out, *vectors, "--embed", "x", code=2)
    assert "--model: expected a name" in fails("index", FACTS, *out, *vectors[:2], "--model", " ", code=2)
    assert "expected --model with" in fails("index", FACTS, *out, *vectors[:2], code=2)
    for rows in ("x", "3", "5:5", "-1:4", "1:2:3"):
        assert "--rows: expected A:B" in fails("index", FACTS, *out, *vectors, "--rows", rows, code=2)
    assert "found 478 facts" in fails("index", FACTS, *out, *vectors, "--rows", "0:479")
    assert "float16" in fails("index", FACTS, *out, *vectors, "--dtype", "int8", code=2)
    assert "none.jsonl: No such file" in fails("index", tmp_path / "none.jsonl", *out, *vectors)
    assert "expected all-MiniLM-L6-v2 or the folder of a model, got 'x'" in fails("index", FACTS, *out, "--embed", "x")
    (tmp_path / "s").write_text("mine")
    assert "expected a store or a new folder, found a file" in fails("index", FACTS, *out, *vectors)
    assert (tmp_path / "s").read_text() == "mine"


def test_a_store_that_cannot_be_written_is_named_as_it_was_given(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "data-1f/embeddings.npy")

    monkeypatch.setattr("cdr_kernel.store._fact_store.FactStore.save", full)
    line = fails("index", FACTS, "--embeddings", VECTORS, "--model", "m", "-o", tmp_path / "s")
    assert line == f"error: {tmp_path / 's'}: the store could not be written (No space left on device)"
