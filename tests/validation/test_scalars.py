"""Whatever must come in an order is refused as a set, whose order is random; what keeps an order is taken."""

from __future__ import annotations

import numpy as np
import pytest

from cdr_kernel import (
    Columns,
    FactStore,
    NGramGuard,
    Retriever,
    Session,
    SubQuery,
    WindowReport,
    assess,
    cdr_rank,
    cdr_score,
    rank_many,
)
from cdr_kernel.adapters._facts import FactArray
from cdr_kernel.shard._sharded_retriever import ShardedStore
from cdr_kernel.store._expiry import microseconds
from cdr_kernel.validation._scalars import check_order

IDS, TEXTS, ROWS = ["b", "a"], ["text b", "text a"], np.eye(2)


def store_of(ids=IDS, texts=TEXTS, **more):
    store = FactStore(2, embedding_model="m1")
    store.add(ids, texts, ROWS, **more)
    return store


def subs():
    return [SubQuery("s", "S", "s", [1.0, 0.0]), SubQuery("t", "T", "t", [0.0, 1.0])]


def session_of(items=None):
    return Session(subs() if items is None else items, embedding_model="m1", min_relevance=-1.0)


def report(addressed):
    return WindowReport(0.5, addressed)


UNORDERED = {
    "ids": lambda make: store_of(ids=make(IDS)),
    "texts": lambda make: store_of(texts=make(TEXTS)),
    "source": lambda make: store_of(source=make(["x", "y"])),
    "position": lambda make: store_of(position=make([1, 2])),
    "sequence": lambda make: store_of(sequence=make([1, 2])),
    "attributes['t']": lambda make: store_of(attributes={"t": make(["x", "y"])}),
    "ids of get": lambda make: store_of().get(make(IDS)),
    "ids of shards": lambda make: ShardedStore.split(store_of(), shards=2).get(make(IDS)),
    "expires_at": lambda make: microseconds(make([1.0, 2.0]), 2),
    "sub_queries": lambda make: session_of(make(subs())),
    "sub_queries of a token": lambda make: Session.from_token(session_of().token(), make(subs()), embedding_model="m1"),
    "sub_queries of an assessment": lambda make: assess("some words", make(subs())),
    "addressed": lambda make: session_of().update(report(make(["s", "t"])), "", embedding_model="m1"),
    "branches": lambda make: session_of().merge(make([session_of(), session_of()])),
    "queries": lambda make: rank_many(make([(1.0, 0.0)] * 2), Retriever(store_of()), [session_of(), session_of()]),
    "sessions": lambda make: rank_many([(1.0, 0.0)] * 2, Retriever(store_of()), make([session_of(), session_of()])),
    "columns": lambda make: cdr_score(ROWS, make([Columns.spec([1.0, 0.0]), Columns.spec([0.0, 1.0])])),
    "facts": lambda make: FactArray(make([object(), object()])),
    "texts of a guard": lambda make: NGramGuard().overlap(make(TEXTS)),
}


@pytest.mark.parametrize("name", UNORDERED)
@pytest.mark.parametrize("make", [set, frozenset])
def test_a_set_is_refused_where_the_order_matters(name, make):
    with pytest.raises(TypeError, match=f"expected a list or another sequence, got a {make.__name__}, whose order"):
        UNORDERED[name](make)


def test_what_was_refused_changed_nothing():
    store, session = store_of(), session_of()
    before = store.version, session.to_json()
    with pytest.raises(TypeError):
        store.upsert({"c", "d"}, TEXTS, ROWS)
    with pytest.raises(TypeError):
        session.update(report({"s", "t"}), "words", embedding_model="m1")
    assert (store.version, session.to_json()) == before


def test_what_keeps_an_order_is_taken():
    for make in (list, tuple, np.array, iter, lambda ids: (i for i in ids), lambda ids: dict.fromkeys(ids).keys()):
        assert store_of(ids=make(IDS)).ids == IDS
        assert store_of(texts=make(TEXTS)).view().texts([0, 1]) == TEXTS
    for make in (tuple, iter, lambda items: {item.id: item for item in items}.values()):
        assert [item.id for item in session_of(make(subs())).sub_queries] == ["s", "t"]
    check_order({}.keys(), "names")


def test_a_set_is_taken_where_the_order_does_not_matter():
    store = store_of(attributes={"t": ["x", "y"]})
    assert cdr_rank([1.0, 0.0], Retriever(store), session_of(), where={"t": {"x", "z"}}).ids == ["b"]
    assert store.remove({"a", "b"}) == 2
