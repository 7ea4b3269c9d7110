"""`cdr rank` and `cdr gate` as a user calls them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from commands import GATE, QUERIES, TASK, fails, index_demo, invoke, json_of

from cdr_kernel import Retriever, Session, WindowReport, cdr_rank, demo
from cdr_kernel.files import _embedders


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return index_demo(tmp_path_factory.mktemp("cli") / "store")


def test_rank_agrees_with_the_library(store):
    found = json_of(invoke("rank", store, "--query", f"{QUERIES}:0:query", "--k", "7", "--json", *GATE))
    corpus = demo.load()
    session = Session(corpus.sub_queries, embedding_model=demo.EMBEDDING_MODEL, min_relevance=0.3)
    ranking = cdr_rank(corpus.query, Retriever(corpus.store), session, k=7)
    assert [result["id"] for result in found["results"]] == ranking.ids
    assert [result["score"] for result in found["results"]] == ranking.score.tolist()
    assert (found["qualified"], found["facts"], found["model"]) == (ranking.qualified, 478, "demo-model")
    for kind in ("flat", "hnsw", "ivf"):
        other = json_of(invoke("rank", store, "--query", f"{QUERIES}:0:query", "--kind", kind, "--json", *GATE))
        assert other["results"][0] == found["results"][0]


def test_rank_with_coverage_and_residual(store, tmp_path):
    corpus = demo.load()
    vectors = np.stack([item.embedding for item in corpus.sub_queries])
    np.save(tmp_path / "c.npy", vectors[:2])
    np.save(tmp_path / "r.npy", vectors[2:])
    arguments = ["rank", store, "--query", f"{QUERIES}:0:query", "--json", *GATE]
    sets = ["--coverage", tmp_path / "c.npy", "--residual", tmp_path / "r.npy"]
    session = Session(corpus.sub_queries, embedding_model=demo.EMBEDDING_MODEL, min_relevance=0.3, guard=False)
    depths = {"0": 0.9, "1": 0.2}
    session.update(WindowReport(0.2, tuple(depths), depths), "", embedding_model=demo.EMBEDDING_MODEL)
    ranking = cdr_rank(corpus.query, Retriever(corpus.store), session, k=10)
    results = json_of(invoke(*arguments, *sets, "--depths", ".9,.2"))["results"]
    assert [result["id"] for result in results] == ranking.ids
    for name in ("score", "coverage", "residual_pull", "novelty"):
        assert [result[name] for result in results] == getattr(ranking, name).tolist()

    same = json_of(invoke(*arguments, *sets, "--depths", ".5"))["results"]
    assert json_of(invoke(*arguments, *sets))["results"] == same != results
    alone = invoke(*arguments, *sets[2:])
    assert "warning: --residual pulls only beside --coverage" in alone.stderr
    assert {result["residual_pull"] for result in json_of(alone)["results"]} == {0.0}
    pulled = json_of(invoke(*arguments, *sets[2:], "--first-window-pull"))["results"]
    assert all(result["residual_pull"] > 0.0 for result in pulled)
    for depths in ("2", ".1,.2,.3", "x", ""):
        assert "--depths: expected 2 numbers" in fails(*arguments, *sets, "--depths", depths, code=2)
    assert "--depths goes with --coverage" in fails(*arguments, "--depths", ".5", code=2)


def test_rank_refuses(store, tmp_path):
    query = ["--query", f"{QUERIES}:0:query"]
    np.save(tmp_path / "short.npy", np.ones(3))
    assert "short.npy: expected dimension 384, got 3" in fails("rank", store, "--query", tmp_path / "short.npy")
    assert "expected an array '9:query'" in fails("rank", store, "--query", f"{QUERIES}:9:query")
    assert "no store here" in fails("rank", tmp_path, *query)
    other = fails("rank", store, *query, "--model", "m")
    assert "--model: expected embedding model 'demo-model', got 'm'; the store is of 'demo-model'" in other
    assert "is a text: expected --embed MODEL" in fails("rank", store, "--query", "pods", code=2)
    for name in ("queries.np", "q.npx", "none/q.npz:"):
        assert f"{name}: no such file, expected Q.npy" in fails("rank", store, "--query", name)
    assert "q.npy: No such file" in fails("rank", store, "--query", "q.npy")
    assert "q.npz: No such file" in fails("rank", store, "--query", "q.npz:0")
    assert "expected a NumPy array" in fails("rank", store, "--query", TASK)
    assert "expected Q.npy" in fails("rank", store, "--query", " ", code=2)
    assert "--embed is for a text" in fails("rank", store, *query, "--embed", "m", code=2)
    for wrong in (["--k", "-1"], ["--min-relevance", "1.5"], ["--min-relevance", "nan"], ["--kind", "x"]):
        fails("rank", store, *query, *wrong, code=2)
    assert json_of(invoke("rank", store, *query, "--k", "0", "--json"))["results"] == []
    nothing = invoke("rank", store, *query, "--min-relevance", "0.99", "--json")
    assert json_of(nothing)["results"] == []
    assert re.search(r"no fact reaches --min-relevance 0\.99; the largest cosine .* is 0\.\d\d\d", nothing.stderr)


def test_one_fact_is_one_fact(tmp_path):
    facts, vectors, one = tmp_path / "f.jsonl", tmp_path / "e.npy", tmp_path / "one"
    facts.write_text('{"id": "a", "text": "pods"}\n')
    np.save(vectors, np.ones((1, 4), np.float32))
    said = invoke("index", facts, "--embeddings", vectors, "--model", "m", "-o", one).stdout
    assert ": 1 fact, 4 x float32" in said
    found = invoke("rank", one, "--query", vectors, "--k", "1").stdout
    assert "1 fact at or above the gate of 0.55, the best 1 shown" in found
    assert ": 1 fact, 1 query, m" in invoke("gate", one, "--queries", vectors).stdout


def test_a_filter_that_leaves_nothing_or_little_is_named(store):
    query = ["rank", store, "--query", f"{QUERIES}:0:query", "--min-relevance", "0.99"]
    none = invoke(*query, "--where", "source=zzz").stderr
    assert "warning: the filter leaves none of the 478 facts of this store" in none
    assert "cosine" not in none
    corpus = demo.load()
    source = corpus.store.get(corpus.store.ids[:1])[0].source
    view = corpus.store.view().select({"source": source})
    session = Session(corpus.sub_queries, embedding_model=demo.EMBEDDING_MODEL, min_relevance=-1.0, guard=False)
    own, whole = (
        cdr_rank(corpus.query, Retriever(corpus.store), session, where=where).relevance.max()
        for where in ({"source": source}, None)
    )
    assert len(view) < 478
    assert own < whole
    some = invoke(*query, "--where", f"source={source}").stderr
    assert f"the largest cosine to the query among the facts that the filter leaves is {own:.3f}" in some


def test_rank_says_when_the_gate_leaves_fewer_than_k(store):
    result = invoke("rank", store, "--query", f"{QUERIES}:0:query", "--min-relevance", "0.7", "--k", "50")
    assert "fewer than --k 50: see `cdr gate`" in result.stderr


def test_gate(store, tmp_path):
    found = json_of(invoke("gate", store, "--queries", f"{QUERIES}:0:subs", "--json", "--k", "5"))
    assert (found["facts"], found["wanted"], found["model"]) == (478, 25, "demo-model")
    assert [row["gate"] for row in found["gates"]] == [0.5, 0.55, 0.65]
    counts = [row["passing"]["median"] for row in found["gates"]]
    assert counts == sorted(counts, reverse=True)
    assert 0 < found["suggested_min_relevance"] < 1
    text = invoke("gate", store, "--queries", f"{QUERIES}:0:subs", "--k", "5").stdout
    assert f"--min-relevance {found['suggested_min_relevance']:g} leaves 25 facts to nine queries in ten." in text
    assert "expected a NumPy array" in fails("gate", store, "--queries", TASK)
    np.save(tmp_path / "cube.npy", np.ones((1, 1, 1)))
    assert "expected shape [N, D], got [1, 1, 1]" in fails("gate", store, "--queries", tmp_path / "cube.npy")


def test_gate_takes_one_query_as_a_vector_or_as_a_text(store, tmp_path, monkeypatch):
    one = json_of(invoke("gate", store, "--queries", f"{QUERIES}:0:query", "--json"))
    corpus = demo.load()
    np.save(tmp_path / "q.npy", corpus.query[None])
    assert json_of(invoke("gate", store, "--queries", tmp_path / "q.npy", "--json")) == one
    assert one["queries"] == 1
    monkeypatch.setattr(_embedders, "load_embedder", lambda model: lambda texts: np.array([corpus.query] * len(texts)))
    asked = ("gate", store, "--queries", "how pods talk", "--json")
    assert json_of(invoke(*asked, "--embed", "demo-model")) == one
    assert "--queries 'how pods talk' is no file, so it is a text: expected --embed" in fails(*asked, code=2)
    assert "expected Q.npy, FILE.npz:KEY or a text" in fails("gate", store, "--queries", " ", code=2)
    assert "--embed is for a text, but --queries" in fails(
        "gate", store, "--queries", f"{QUERIES}:0:subs", "--embed", "demo-model", code=2
    )
