"""What objects show of themselves: one short line, and in a notebook a table without script."""

from __future__ import annotations

import numpy as np
import pytest

from cdr_kernel import (
    CalibratedSettings,
    FactStore,
    Retriever,
    Session,
    SpecSettings,
    SubQuery,
    WindowReport,
    cdr_rank,
    cdr_score,
    gate_report,
    pack_facts,
    run_windows,
)
from cdr_kernel.rank import explain

HOSTILE = "<script>alert('x')</script>\nof another line " * 20


@pytest.fixture(scope="module")
def objects():
    """One of each public class, with long texts and vectors."""
    r = np.random.default_rng(0)
    query = r.standard_normal(384)
    store = FactStore(384, embedding_model=HOSTILE[:60])
    store.add([f"f{i}{HOSTILE}" for i in range(50)], [HOSTILE] * 50, r.standard_normal((50, 384)))
    items = [SubQuery(f"s{i}", HOSTILE, HOSTILE, r.standard_normal(384)) for i in range(30)]
    keywords = {"embedding_model": store.embedding_model, "min_relevance": -1.0, "id": "one"}
    session, retriever = Session(items, **keywords), Retriever(store)
    report = WindowReport(0.1, tuple(f"s{i}" for i in range(30)), embedding_model=store.embedding_model)
    (window,) = run_windows(
        lambda prompt: HOSTILE, query, retriever, Session(items, max_windows=1, **keywords), token_budget=10_000,
        assess=lambda output, *rest, **options: report, max_facts=3,
    )  # fmt: skip
    ranking = cdr_rank(query, retriever, session, k=5)
    envelope = pack_facts(ranking, 10_000)
    session.update(report, HOSTILE, envelope=envelope)
    columns = session.columns(query)
    made = [
        store, store.view(), store.get(store.ids[:1])[0], items[0], session, retriever, ranking, envelope, report,
        retriever.search(query, min_relevance=-1.0), columns, cdr_score(store.view().embeddings, columns),
        gate_report(store, [query]), session.coverage[0], session.exit(), session.guard, window, window.prompt,
        SpecSettings(), CalibratedSettings(gate=1.5, gate_on="query"), explain(query, retriever, session, store.ids[0]),
    ]  # fmt: skip
    return {type(each).__name__: each for each in made}


def test_a_repr_is_one_short_line(objects):
    assert len(objects) == 21
    for name, each in objects.items():
        line = repr(each)
        assert "\n" not in line, name
        assert name in line
        if name not in ("Ranking", "Explanation"):  # they name a fact by its whole id
            assert len(line) < 250, name


def test_a_notebook_shows_no_script(objects):
    shown = {name: each._repr_html_() for name, each in objects.items() if hasattr(each, "_repr_html_")}
    assert {"FactStore", "Session", "Envelope", "Window", "GateReport", "Ranking"} <= set(shown)
    for name, html in shown.items():
        assert "<script" not in html, name
        assert "<table" in html


def test_what_is_shown(objects):
    assert repr(SpecSettings(max_windows=3)) == "SpecSettings(max_windows=3)"
    assert repr(objects["CalibratedSettings"]) == "CalibratedSettings(gate=1.5, gate_on='query')"
    assert "embedding=<float64 [384]>" in repr(objects["SubQuery"])
    assert repr(objects["Window"]) == f"<Window 1: 3 facts, {len(HOSTILE)} characters, exit limit-reached>"
