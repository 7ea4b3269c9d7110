"""What commands work on: stores and models."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
from commands import FACTS, QUERIES, TASK, fails, index_demo, invoke, json_of


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return index_demo(tmp_path_factory.mktemp("cli") / "store")


def test_a_store_of_any_damage_is_one_line(store, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(store, bad)
    manifest = bad / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_text("[" * 100_000)
    assert str(bad) in fails("rank", bad, "--query", f"{QUERIES}:0:query")
    manifest.write_bytes(good)
    array = next(bad.glob("data-*/importance.npy"))
    content = array.read_bytes()
    for old, new in ((b"'descr'", b"'descr\n"), (b"(478,)", b"([[[[["), (b"'<f8'", b"{1:2}"), (b"'<f8'", b"'(,)'")):
        assert old in content
        array.write_bytes(content.replace(old, new))
        assert str(bad) in fails("rank", bad, "--query", f"{QUERIES}:0:query")


def test_embedding_without_the_extra_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    line = fails("index", FACTS, "-o", tmp_path / "s", "--embed", "all-MiniLM-L6-v2")
    assert 'pip install ".[embed]"' in line


def test_embedding_with_a_model(tmp_path, monkeypatch, store):
    def load(model):
        assert model == "toy"
        return lambda texts: np.array([[len(text), 1.0 + text.count("e"), 1.0] for text in texts])

    monkeypatch.setattr("cdr_kernel.files._embedders.load_embedder", load)
    made = json_of(invoke("index", FACTS, "--embed", "toy", "-o", tmp_path / "s", "--json"))
    assert (made["model"], made["dim"], made["facts"]) == ("toy", 3, 478)
    found = json_of(invoke("rank", tmp_path / "s", "--query", "what now", "--embed", "toy", "--json"))
    assert len(found["results"]) == 10
    done = json_of(invoke("run", tmp_path / "s", TASK, "--embed", "toy", "--writer", "extract", "--json"))
    assert done["complete"]
    assert "--embed: expected embedding model 'demo-model', got 'toy'" in fails(
        "rank", store, "--query", "what", "--embed", "toy"
    )
