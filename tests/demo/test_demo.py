"""The packaged corpus and what its runs show."""

from __future__ import annotations

import numpy as np
import pytest

from cdr_kernel import Session, cdr_rank, demo
from cdr_kernel.retrieve import Retriever


@pytest.fixture(scope="module")
def corpus():
    return demo.load()


@pytest.fixture(scope="module")
def runs(corpus):
    return demo.run_demo(corpus)


def test_the_corpus_is_whole(corpus):
    assert len(corpus.store) >= 400
    assert corpus.store.embedding_model == demo.EMBEDDING_MODEL
    assert corpus.task.query == "Kubernetes networking architecture"
    assert len(corpus.sub_queries) == len(corpus.task.items) == 8
    labelled = [item.fact_ids for item in corpus.task.items]
    assert all(labelled)
    assert all(id in corpus.store for ids in labelled for id in ids)
    assert demo.passing(corpus, demo.MIN_RELEVANCE) > 5 * corpus.task.k > demo.passing(corpus, 0.65)


def test_relevance_alone_packs_the_same_facts_in_every_window(corpus, runs):
    windows = runs["relevance"].windows
    assert [window["number"] for window in windows] == [1, 2, 3, 4, 5]
    assert len({tuple(window["envelope"]["ids"]) for window in windows}) == 1
    assert [window["fresh"] for window in windows] == [corpus.task.k, 0, 0, 0, 0]
    assert windows[0]["novelty_min"] == 1.0 > windows[4]["novelty_min"]
    fresh_session = Session(
        corpus.sub_queries, embedding_model=demo.EMBEDDING_MODEL, min_relevance=demo.MIN_RELEVANCE, guard=False
    )
    first = cdr_rank(corpus.query, Retriever(corpus.store), fresh_session, k=corpus.task.k)
    assert windows[4]["envelope"]["ids"] == first.ids


def test_cdr_starts_alike_and_packs_more(runs):
    relevance, cdr = runs["relevance"], runs["cdr"]
    assert cdr.windows[0]["envelope"]["ids"] == relevance.windows[0]["envelope"]["ids"]
    assert cdr.packed > 2 * relevance.packed
    assert cdr.windows[-1]["topics_reached"] > relevance.windows[-1]["topics_reached"]
    completeness = [runs[name].windows[-1]["report"]["completeness_score"] for name in ("cdr", "relevance")]
    assert completeness[0] > completeness[1]
    assert runs["cdr_without_guard"].windows[-1]["envelope"]["guard_activations"] == 0
    for record in runs.values():
        for window in record.windows:
            assert window["fresh"] + window["repeated"] == len(window["facts"]) == len(window["envelope"]["texts"])
            assert window["headers"]["CRP-Context-Coverage-Score"] == f"{window['novelty_min']:.2f}"


def test_the_conclusion_is_made_of_the_numbers(runs):
    text = demo.conclusion(runs)
    for record in runs.values():
        done = record.windows[-1]["report"]["completeness_score"]
        assert f"{record.packed} " in text
        assert f"{done:.2f}" in text


def test_what_remains_is_named_as_long_as_it_is_not_written(corpus):
    record = demo.run_demo(corpus, windows=6)["cdr"]
    assert demo.remaining(record, 1) == record.windows[0]["anchor"]
    for window in record.windows[1:]:
        told = demo.remaining(record, window["number"])
        assert told.startswith(window["anchor"])
        assert "Written in part: Flat network model (" in told
        assert [item.label for item in corpus.task.items if item.label not in told] == []
    last = record.windows[-1]
    assert (last["anchor"], last["report"]["completeness_score"] < 0.5) == ("", True)
    for window in record.windows:
        window["report"]["words_by_sub_query"] = {item.id: 10**6 for item in corpus.task.items}
    assert demo.remaining(record, len(record.windows)) == "Nothing remains."


@pytest.mark.parametrize("windows", [1, 20])
def test_other_numbers_of_windows(corpus, windows):
    runs = demo.run_demo(corpus, windows=windows, k=3)
    assert len(runs["relevance"].windows) == windows
    assert runs["relevance"].windows[-1]["exit"]["reason"] == "limit-reached"
    assert runs["cdr"].windows[-1]["exit"]["stop"]
    assert {len(window["facts"]) for window in runs["cdr"].windows} == {3}


def test_a_gate_that_nothing_passes(corpus):
    runs = demo.run_demo(corpus, min_relevance=0.99)
    for record in runs.values():
        (window,) = record.windows
        assert (window["written"], window["exit"]["reason"]) == (False, "ckf-exhausted")
        assert (window["novelty_mean"], window["topics_reached"], record.packed) == (None, 0, 0)
    assert "0 different facts" in demo.conclusion(runs)


def test_runs_are_the_same_every_time(corpus, runs):
    again = demo.run_demo(corpus)
    assert {name: record.windows for name, record in again.items()} == {
        name: record.windows for name, record in runs.items()
    }
    assert np.isfinite([fact["score"] for window in again["cdr"].windows for fact in window["facts"]]).all()
