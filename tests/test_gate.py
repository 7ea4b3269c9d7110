"""Advice on the relevance gate, and the warning where it leaves too few facts."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from cdr_kernel import FactStore, Retriever, Session, SubQuery, cdr_rank, gate_report, suggest_min_relevance


def store_of(cosines):
    """Facts with these cosines to the first axis."""
    rows = [[c, np.sqrt(1 - c * c)] for c in cosines]
    store = FactStore(2, embedding_model="toy", dtype="float64")
    store.add([f"f{i}" for i in range(len(rows))], ["x"] * len(rows), rows)
    return store


def test_the_report_counts():
    store = store_of(np.linspace(0.0, 0.99, 100))
    report = gate_report(store, [[1.0, 0.0], [0.0, 1.0]], k=2, windows=3)
    assert report.passing[0.55].tolist()[0] == 45
    assert report.passing[0.50].tolist()[0] == 50
    assert report.largest[0] == pytest.approx(0.99)
    assert report.quantiles[0.5][0] == pytest.approx(0.495)
    assert (report.facts, report.queries, report.wanted, report.embedding_model) == (100, 2, 6, "toy")
    cosines = np.linspace(0.0, 0.99, 100)
    alone = gate_report(store, [[1.0, 0.0]])
    assert alone.deviations[0.65] == pytest.approx((0.65 - cosines.mean()) / cosines.std())
    json.dumps(report.as_dict(), allow_nan=False)


def test_the_suggestion_leaves_enough_facts_to_nine_queries_in_ten():
    r = np.random.default_rng(0)
    store = FactStore(8, embedding_model="toy")
    rows = r.standard_normal((500, 8)) + 0.7
    store.add([str(i) for i in range(500)], ["x"] * 500, rows)
    queries = r.standard_normal((40, 8)) + 0.7
    gate = suggest_min_relevance(store, queries, k=10, windows=5)
    assert gate == round(gate, 2)
    passing = [len(Retriever(store).search(q, min_relevance=gate)) for q in queries]
    above = [len(Retriever(store).search(q, min_relevance=gate + 0.01)) for q in queries]
    assert np.mean(np.array(passing) >= 50) >= 0.9 > np.mean(np.array(above) >= 50)
    assert gate_report(store, queries, k=10).suggested == gate


def test_removed_facts_do_not_count_and_a_store_may_be_too_small():
    store = store_of([0.9, 0.8, 0.7])
    store.remove(["f0"])
    report = gate_report(store, [[1.0, 0.0]], k=1, windows=2)
    assert report.passing[0.65].tolist() == [2]
    assert report.suggested == 0.7
    assert suggest_min_relevance(store, [[1.0, 0.0]], k=1, windows=3) is None


def test_equal_facts_have_no_deviations():
    report = gate_report(store_of([0.6, 0.6]), [[1.0, 0.0]], k=1, windows=1)
    assert report.as_dict()["gates"][0]["deviations"] is None


@pytest.mark.parametrize(
    ("queries", "keywords", "message"),
    [
        ([], {}, "expected queries and facts"),
        ([[1.0, 0.0, 0.0]], {}, "dimension 2"),
        ([[0.0, 0.0]], {}, "all zeros"),
        ([[1.0, 0.0]], {"k": -1}, "k"),
    ],
)
def test_bad_input_is_refused(queries, keywords, message):
    with pytest.raises(ValueError, match=message):
        gate_report(store_of([0.5]), queries, **keywords)


def test_a_gate_that_leaves_fewer_than_k_warns_once():
    store, query = store_of([0.9, 0.4, 0.3]), [1.0, 0.0]
    item = SubQuery("a", "A", "a", query)
    session = Session([item], embedding_model="toy")
    with pytest.warns(UserWarning, match=r"1 of 3 facts reach the gate of 0\.55, fewer than k = 2"):
        cdr_rank(query, Retriever(store), session, k=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cdr_rank(query, Retriever(store), session, k=2)
        cdr_rank(query, Retriever(store), Session([item], embedding_model="toy"), k=1)
        cdr_rank(query, Retriever(store), Session([item], embedding_model="toy"))
        cdr_rank(query, Retriever(store), Session([item], embedding_model="toy"), k=9)  # the store has no more


def test_a_calibrated_gate_warns_too():
    store, query = store_of([0.9, 0.4, 0.3]), [1.0, 0.0]
    session = Session([SubQuery("a", "A", "a", query)], embedding_model="toy", mode="calibrated", gate=1.0)
    with pytest.warns(UserWarning, match=r"facts reach the gate of 1 deviations, fewer than k = 3"):
        cdr_rank(query, Retriever(store), session, k=3)


def test_what_is_no_store_is_refused():
    store = store_of([0.9, 0.8])
    assert gate_report(store.view(), [[1.0, 0.0]]).facts == 2
    for given, message in (
        (Retriever(store), r"store: expected a FactStore or a StoreView, got Retriever: pass its \.store$"),
        ("facts.store", "store: expected a FactStore or a StoreView, got str$"),
        (None, "got NoneType$"),
    ):
        for ask in (gate_report, suggest_min_relevance):
            with pytest.raises(TypeError, match=message):
                ask(given, [[1.0, 0.0]])
