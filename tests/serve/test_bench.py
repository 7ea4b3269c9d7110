"""The load generator: a small run has every number, and a server that answers wrongly is noticed."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from serving import Settings  # noqa: F401  # skips where the extra is missing

pytest.importorskip("uvicorn", reason="needs the serve extra")

from bench import serve
from cdr_kernel import FactStore, Retriever


def test_a_small_run_has_every_number(capsys):
    arguments = ["--json", "--facts", "300", "--sessions", "4", "--requests", "60", "--runs", "1", "--gate", "0.3"]
    assert serve.main(arguments) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["identical"] is True
    for name in (
        "p50_ms",
        "p99_ms",
        "rps",
        "errors",
        "rejected",
        "rss_growth",
        "p99_overload_ms",
        "p99_overload_opening_ms",
    ):
        assert told[name] == told["batched"][name]
        assert isinstance(told["unbatched"][name], int | float)
    for name in ("batched", "unbatched"):
        ended = told[name]["sigterm"]
        assert ended["accepted"] == ended["answered"]
        assert ended["status"] == 0
    assert told["errors"] == 0


def test_wrong_answers_are_noticed(tmp_path, monkeypatch):
    load = serve.Load([], [], 0.3, 5, ids=["a"])
    monkeypatch.setattr(serve.Load, "rank", lambda self, i, turn: b"")
    monkeypatch.setattr(serve.Load, "sub_queries", lambda self, i: [("s", [1.0, 0.0])])
    load.queries = [[1.0, 0.0]]
    store = FactStore(2, embedding_model=serve.MODEL)
    store.add(["x", "y"], ["", ""], [[1.0, 0.0], [0.9, 0.1]])

    def answered(status, facts):
        async def ask(self, request):
            return status, json.dumps({"facts": facts}).encode()

        monkeypatch.setattr(serve.Connection, "ask", ask)
        return asyncio.run(serve.check(load, 0, Retriever(store)))

    session = serve.Session([serve.SubQuery("s", "S", "s", [1.0, 0.0])], embedding_model=serve.MODEL, min_relevance=0.3)
    ranking = serve.cdr_rank([1.0, 0.0], Retriever(store), session, k=5)
    right = [{"id": id, "score": score} for id, score in zip(ranking.ids, ranking.score.tolist(), strict=True)]
    assert answered(200, right)
    assert not answered(429, right)
    assert not answered(200, right[::-1])
    assert not answered(200, right[:1])
    right[1]["score"] = float(np.nextafter(right[1]["score"], 2.0))
    assert not answered(200, right)
