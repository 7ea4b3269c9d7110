"""Facts made when they are looked at: equal to those made at once, and few of them made."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_kernel.store import FactStore
from cdr_kernel.store._fact_store import Fact
from cdr_kernel.store._stored_facts import StoredFacts, ids_of, sequences_of, taken, text_of

HYPOTHESIS = settings(deadline=None, max_examples=60, derandomize=True)
IDS = ["a", "", "é", "tenant-000001", "tenant-000002", "\ud800", "other-000001", "x" * 70000 + "-000001", "1", "000001"]


def filled(ids, folder=None, later=()):
    """A store of facts with these ids; with a folder all but `later` of them mapped from it."""
    r = np.random.default_rng(0)
    store = FactStore(3, embedding_model="m")

    def add(some):
        n = len(some)
        store.add(
            some,
            [f"text of {i[:9]}" for i in some],
            r.standard_normal((n, 3)),
            importance=r.uniform(0.0, 2.0, n),
            source=[None if i % 3 else f"s{i}" for i in range(n)],
            position=list(range(n)),
        )

    add(ids)
    if folder is not None:
        store.save(folder)
        store = FactStore.load(folder)
    if later:
        add(later)
    return store


def test_it_is_the_tuple_of_its_facts():
    view = filled(["a", "b", "c", "d"]).view()
    rows = np.array([2, 0, 3])
    facts, made = StoredFacts(view, rows), tuple(view.facts(rows))
    assert facts == made
    assert made == facts
    assert facts != made[:2]
    assert facts != list(made)
    assert hash(facts) == hash(made)
    assert [*facts] == [*made]
    assert len(facts) == 3
    for at in (0, 1, 2, -1, -3, slice(None), slice(1, 9), slice(None, None, -1), slice(0, 0)):
        assert facts[at] == made[at]
    with pytest.raises(IndexError):
        facts[3]
    with pytest.raises(IndexError):
        facts[-4]
    assert made[1] in facts
    assert facts.index(made[2]) == 2
    assert type(pickle.loads(pickle.dumps(facts))) is tuple
    assert pickle.loads(pickle.dumps(facts)) == copy.copy(facts) == made
    assert repr(facts) == "<StoredFacts of 3 rows>"


def test_what_is_read_of_it_is_that_of_the_tuple():
    view = filled(["a", "b", "c", "d"]).view()
    facts = StoredFacts(view, np.array([3, 1, 2]))
    for each in (facts, tuple(facts)):
        assert ids_of(each) == ["d", "b", "c"]
        assert sequences_of(each).tolist() == [3, 1, 2]
        assert text_of(each, 1) == "text of b"
        assert ids_of(taken(each, np.array([2, 0]))) == ["c", "d"]
    assert sequences_of(()).dtype == np.int64


def test_a_version_stays_as_it_was():
    store = filled(["a", "b", "c"])
    facts = StoredFacts(store.view(), np.arange(3))
    before = tuple(facts)
    store.remove(["a"])
    store.upsert(["b"], ["another"], [[1.0, 0.0, 0.0]])
    store.compact()
    assert facts == before


@pytest.mark.parametrize("mapped", [False, True])
@HYPOTHESIS
@given(data=st.data())
def test_rows_that_hold_wanted_ids(tmp_path_factory, mapped, data):
    ids = data.draw(st.permutations(IDS))
    named = [id for id in ids if id]
    split = data.draw(st.integers(1, len(named)))
    folder = tmp_path_factory.mktemp("store") / "s" if mapped else None
    view = filled(named[:split], folder, named[split:]).view()
    rows = np.array(data.draw(st.lists(st.integers(0, view.rows - 1), max_size=14)), np.int64)
    wanted = data.draw(st.sets(st.sampled_from(IDS)))
    assert view.holds(rows, wanted).tolist() == [view.id_of(row) in wanted for row in rows.tolist()]
    assert view.ids_at(rows) == [view.id_of(row) for row in rows.tolist()]


def test_few_ids_are_read_for_the_wanted_ones(tmp_path, monkeypatch):
    view = filled([f"f{i}" for i in range(300)], tmp_path / "s").view()
    strings, read = view._storage.ids, []
    at = type(strings).at
    monkeypatch.setattr(type(strings), "at", lambda self, rows: read.extend(rows.tolist()) or at(self, rows))
    assert view.holds(np.arange(300), ["f7", "f250", "f999"]).nonzero()[0].tolist() == [7, 250]
    assert read == [7, 250]


def test_facts_are_made_one_by_one(monkeypatch):
    view = filled([f"f{i}" for i in range(9)]).view()
    facts, made = StoredFacts(view, np.arange(9)), []
    of = type(view).facts
    monkeypatch.setattr(type(view), "facts", lambda self, rows: made.extend(rows) or of(self, rows))
    assert isinstance(facts[4], Fact)
    assert ids_of(facts)[8] == "f8"
    assert made == [4]
