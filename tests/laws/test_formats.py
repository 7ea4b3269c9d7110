"""What is written today is read tomorrow: stores with their codes, sessions, tokens, runs.

tests/data/first is what the first release will have written: until then a format is changed in place there, with the
same values. After it a format that changes takes another number, and the old one is still read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fact_stores import reseal

from cdr_kernel import FactStore, Retriever, Session, SubQuery, cdr_rank
from cdr_kernel.report import read_run, report_html

FIRST = Path(__file__).parents[1] / "data" / "first"


@pytest.fixture
def home(tmp_path):
    """A copy, since what is loaded may be locked or saved again."""
    shutil.copytree(FIRST, tmp_path / "first")
    return tmp_path / "first"


@pytest.fixture
def expected():
    return json.loads((FIRST / "expected.json").read_text())


def test_the_store(home, expected):
    store = FactStore.load(home / "store")
    assert (store.embedding_model, store.dim, store.dtype.name) == ("first", 8, "float32")
    facts = store.get(store.ids)
    assert {fact.id: fact.text for fact in facts} == expected["texts"]
    assert {fact.id: fact.sequence for fact in facts} == expected["sequence"]
    view = store.view()
    assert view.take(np.flatnonzero(view.alive)).tolist() == expected["rows"]
    (fact,) = store.get(["f8"])
    assert (fact.importance, fact.source, fact.position) == (3.0, "docs/a.md", 8)


def test_the_codes_beside_it_are_used(home):
    store = FactStore.load(home / "store")
    assert Retriever(store).codes(store.view()) is not None


def test_the_session_goes_on_where_it_was(home, expected):
    retriever = Retriever(FactStore.load(home / "store"))
    session = Session.from_json((home / "session.json").read_text())
    ranking = cdr_rank(expected["query"], retriever, session)
    assert ranking.ids == expected["ranking"]
    assert [score.hex() for score in ranking.score.tolist()] == expected["score"]
    assert ranking.ngram_overlap.tolist() == expected["overlap"]
    assert json.loads(session.to_json()) == json.loads((home / "session.json").read_text())


def test_the_calibrated_session_goes_on_where_it_was(home, expected):
    retriever = Retriever(FactStore.load(home / "store"))
    session = Session.from_json((home / "calibrated.json").read_text())
    ranking = cdr_rank(expected["query"], retriever, session)
    assert ranking.ids == expected["calibrated"]
    assert ranking.score == pytest.approx([float.fromhex(score) for score in expected["calibrated_score"]], rel=1e-9)


def test_the_token_belongs_to_its_sub_queries(home):
    session = Session.from_json((home / "session.json").read_text())
    subs = [SubQuery(s.id, s.label, s.text, s.embedding, s.expected_words, s.marginal) for s in session.sub_queries]
    again = Session.from_token((home / "session.token").read_bytes(), subs, embedding_model="first")
    assert [entry.sub_query_id for entry in again.coverage] == ["s1"]
    assert again.token() == (home / "session.token").read_bytes()


def test_the_run_makes_a_report(home):
    assert "Managing Resources for Containers" in report_html({"first": read_run(home / "run.json")})


@pytest.mark.parametrize(("file", "what"), [("manifest.json", "format_version"), ("scan.json", "format_version")])
def test_a_version_from_the_future_is_refused_or_left_alone(home, file, what):
    path = home / "store" / file
    reseal(path, **{what: 99})
    if file == "scan.json":  # codes can be made again
        store = FactStore.load(home / "store")
        assert Retriever(store).codes(store.view()) is None
    else:
        with pytest.raises(ValueError, match="version"):
            FactStore.load(home / "store")
