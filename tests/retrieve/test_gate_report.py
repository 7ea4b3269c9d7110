"""Advice on the relevance gate, and the warning where it leaves too few facts."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from sessions import session_of_mode

from cdr_kernel import (
    FactStore,
    Retriever,
    Session,
    SubQuery,
    WindowReport,
    cdr_rank,
    gate_report,
    pack_facts,
    rank_many,
    run_windows,
    suggest_min_relevance,
)
from cdr_kernel.adapters._session_book import Sessions
from cdr_kernel.retrieve._retriever import EXACT_KINDS
from cdr_kernel.shard import ShardedRetriever
from cdr_kernel.shard._sharded_retriever import ShardedStore


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
    session = Session.calibrated([SubQuery("a", "A", "a", query)], embedding_model="toy", gate=1.0)
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


def near_and_far(seed=0, n=300, dim=8):
    """Facts of which none is nearer to the query than 0.5, and the query."""
    r = np.random.default_rng(seed)
    query = np.eye(dim)[0]
    rows = r.standard_normal((n, dim))
    rows[:, 0] = 0.0
    rows /= np.linalg.norm(rows, axis=1)[:, None]
    cosines = np.linspace(-0.5, 0.5, n)
    rows = rows * np.sqrt(1 - cosines**2)[:, None] + cosines[:, None] * query
    store = FactStore(dim, embedding_model="toy", dtype="float64")
    store.add([f"f{i}" for i in range(n)], [f"text {i}" for i in range(n)], rows, source=["a", "b", None] * (n // 3))
    return store, query


def session_of(query, **settings):
    subs = [SubQuery("a", "A", "a", query), SubQuery("b", "B", "b", np.roll(query, 1))]
    return session_of_mode(subs, embedding_model="toy", **settings)


def ways_to(store):
    prepared = Retriever(store)
    prepared.prepare()
    shards = ShardedRetriever(ShardedStore.split(store, shards=3))
    return {kind: Retriever(store, kind) for kind in EXACT_KINDS} | {"codes": prepared, "shards": shards}


@pytest.mark.parametrize("kind", [*EXACT_KINDS, "codes", "shards"])
def test_a_gate_that_no_fact_passes_warns_once_with_the_best_cosine(kind):
    store, query = near_and_far()
    retriever, session = ways_to(store)[kind], session_of(query)
    with pytest.warns(
        UserWarning, match=r"^0 of 300 facts reach the gate of 0\.55: the best cosine is 0\.500\. A gate"
    ):
        assert cdr_rank(query, retriever, session).ids == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cdr_rank(query, retriever, session)
        cdr_rank(query, retriever, session_of(query), k=0)  # nothing was wanted
        cdr_rank(query, retriever, session_of(query), where={"source": "nobody"})  # there is no fact to pass
        cdr_rank(query, retriever, session_of(query, min_relevance=0.5))  # one passes
    session.update(WindowReport(0.1, ("a",)), "", embedding_model="toy")  # the sub-queries pull from now on
    other = session_of(query, min_relevance=0.9)
    other.update(WindowReport(0.1, ("a",)), "", embedding_model="toy")
    with pytest.warns(UserWarning, match=r"0 of 200 facts reach the gate of 0\.9: the best cosine is 0\.497\."):
        cdr_rank(query, retriever, other, k=3, where={"source": ["a", "b"]})
    with pytest.warns(UserWarning, match=r"0 of 100 facts reach the gate of 0\.55: the best cosine is -0\.169\."):
        cdr_rank(-query, retriever, session_of(query), where=np.arange(300) >= 200)


def test_a_best_cosine_just_under_the_gate_is_told_from_it():
    store, query = store_of([0.9, 0.5499999, 0.3]), [1.0, 0.0]
    store.remove([store.ids[0]])
    with pytest.warns(UserWarning, match=r"gate of 0\.55: the best cosine is 0\.54999"):
        cdr_rank(query, Retriever(store), Session([SubQuery("a", "A", "a", query)], embedding_model="toy"))


@pytest.mark.parametrize("kind", ["scan", "codes", "shards"])
def test_a_calibrated_gate_that_no_fact_passes_warns_in_deviations(kind):
    store, query = near_and_far()
    with pytest.warns(UserWarning, match=r"0 of 300 facts reach the gate of 9 deviations: the best fact has [1-3]\."):
        cdr_rank(query, ways_to(store)[kind], session_of(query, mode="calibrated", gate=9.0), k=3)


def test_an_approximate_index_that_finds_none_says_so(monkeypatch):
    store, query = near_and_far()
    retriever = Retriever(store, "ivf")
    monkeypatch.setattr(retriever, "_faiss_rows", lambda columns, view: np.zeros(0, np.int64))
    with pytest.warns(UserWarning, match=r"best cosine is 0\.500\. The index is approximate and missed it"):
        cdr_rank(query, retriever, session_of(query, min_relevance=0.3))


def line_of(call):
    """Calls it and returns the line of this file that the warning names."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    return caught[0].lineno


@pytest.mark.parametrize("gate", [0.55, 0.498])  # none passes, fewer than k pass
def test_a_warning_names_the_line_that_called_the_package(gate):
    store, query = near_and_far()
    elsewhere = ShardedRetriever(ShardedStore.split(store, shards=2))
    here = Retriever(store)

    def fresh():
        return session_of(query, min_relevance=gate)

    def windows(retriever):
        return run_windows(lambda prompt: "x", query, retriever, fresh(), token_budget=99,
                           assess=lambda text: WindowReport(1.0, ("a", "b")), k=3)  # fmt: skip

    rows = store.view().embeddings
    calls = [
        lambda: cdr_rank(query, here, fresh(), k=3),
        lambda: cdr_rank(query, elsewhere, fresh(), k=3),
        lambda: rank_many([query], here, [fresh()], k=3),
        lambda: rank_many([query], elsewhere, [fresh()], k=3),
        lambda: next(windows(here)),
        lambda: list(windows(elsewhere)),
        lambda: Sessions(fresh()).rank(query, here, k=3),
        lambda: Sessions(fresh()).rerank(query, store.ids, [""] * 300, rows, k=3),
    ]
    for call in calls:
        assert line_of(call) == call.__code__.co_firstlineno


def test_other_warnings_name_it_too():
    store, query = near_and_far()
    session = session_of(query, min_relevance=-1.0)
    store.add(["light"], [""], query[None], importance=[0.1])
    ranking = cdr_rank(query, Retriever(store), session, where=np.arange(301) == 300)
    envelope = pack_facts(ranking, 10)
    call = lambda: session.exit(envelope=envelope)  # noqa: E731  # its line is what counts
    assert line_of(call) == call.__code__.co_firstlineno
