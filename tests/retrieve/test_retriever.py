from __future__ import annotations

import numpy as np
import pytest

from cdr_kernel import Columns, FactStore, Retriever, reference
from cdr_kernel.retrieve._retriever import EXACT_KINDS, KINDS


def clustered(n=1500, dim=24, seed=0, dtype="float32"):
    """A store in which some facts lie near the query and most do not, and the query."""
    r = np.random.default_rng(seed)
    query = r.standard_normal(dim)
    pull = r.random((n, 1)) ** 3
    vectors = pull * query + (1 - pull) * r.standard_normal((n, dim))
    store = FactStore(dim, embedding_model="m1", dtype=dtype)
    store.add([f"f{i}" for i in range(n)], [""] * n, vectors * r.random((n, 1)) * 5)
    return store, query


def passing(store, query, gate):
    view = store.view()
    rows = view.embeddings.astype(np.float64).tolist()
    alive = view.alive.tolist()
    return [i for i, row in enumerate(rows) if alive[i] and reference.cosine(row, query.tolist()) >= gate]


@pytest.mark.parametrize("kind", EXACT_KINDS)
@pytest.mark.parametrize("gate", [-1.0, -0.2, 0.0, 0.3, 0.55, 0.9, 1.0])
def test_exact_kinds_find_just_what_passes(kind, gate):
    store, query = clustered(400)
    retriever = Retriever(store, kind)
    assert retriever.exact
    found = retriever.search(query, min_relevance=gate)
    assert found.rows.tolist() == passing(store, query, gate)
    for row, relevance in zip(found.rows.tolist(), found.relevance.tolist(), strict=True):
        vector = found.view.embeddings[row].astype(np.float64).tolist()
        assert abs(relevance - reference.cosine(vector, query.tolist())) < 1e-12


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_exact_kinds_at_every_value_that_occurs(kind):
    store, query = clustered(60, 5)
    retriever = Retriever(store, kind)
    for row in store.view().embeddings.astype(np.float64).tolist():
        gate = reference.cosine(row, query.tolist())
        assert retriever.search(query, min_relevance=gate).rows.tolist() == passing(store, query, gate)


@pytest.mark.parametrize("kind", KINDS)
def test_added_and_removed_facts_are_seen_at_once(kind):
    store, query = clustered(300)
    retriever = Retriever(store, kind, nprobe=1000)
    assert len(retriever.search(query)) > 10
    store.add(["new"], [""], query[None])
    assert 300 in retriever.search(query).rows
    store.remove(["new"])
    assert 300 not in retriever.search(query).rows
    store.upsert(["f5"], [""], query[None])
    assert 301 in retriever.search(query).rows
    store.compact()
    rows = retriever.search(query).rows
    assert store.view().facts(rows[-1:])[0].id == "f5"
    assert rows.tolist() == passing(store, query, 0.55)
    near = query + np.random.default_rng(5).standard_normal((2000, 24)) * 0.3
    store.add([f"g{i}" for i in range(2000)], [""] * 2000, near)
    rows = retriever.search(query).rows.tolist()
    assert rows == passing(store, query, 0.55) or (kind == "hnsw" and len(rows) > 1900)


@pytest.mark.parametrize("kind", KINDS)
def test_removals_never_starve_k(kind):
    store = FactStore(3, embedding_model="m1")
    store.add([f"f{i}" for i in range(10)], [""] * 10, np.tile([1.0, 2.0, 3.0], (10, 1)))
    retriever = Retriever(store, kind)
    store.remove([f"f{i}" for i in range(9)])
    found = retriever.search([1.0, 2.0, 3.0], k=5)
    assert found.rows.tolist() == [9]


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_approximate_kinds_find_most_and_nothing_wrong(kind):
    store, query = clustered(4000)
    retriever = Retriever(store, kind)
    assert not retriever.exact
    for gate in (0.3, 0.55, 0.8):
        found, truth = set(retriever.search(query, min_relevance=gate).rows), set(passing(store, query, gate))
        assert found <= truth
        assert len(found) >= 0.9 * len(truth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", [-np.inf, -1e300, -5.0, -1.0, -0.9999999, -0.95])
def test_a_gate_that_excludes_nothing_returns_every_fact(kind, gate):
    store, query = clustered(4000)
    store.remove(["f7", "f3999"])
    rows = Retriever(store, kind).search(query, min_relevance=gate).rows
    assert rows.tolist() == [i for i in range(3999) if i != 7]


@pytest.mark.parametrize("kind", KINDS)
def test_facts_that_all_lie_near_the_query_are_all_found(kind):
    """As the vectors of some embedding models do: their least cosine is far above the default gate."""
    r = np.random.default_rng(1)
    store = FactStore(16, embedding_model="m1")
    store.add([f"f{i}" for i in range(4000)], [""] * 4000, np.ones(16) + 0.2 * r.standard_normal((4000, 16)))
    retriever = Retriever(store, kind)
    for gate in (0.0, 0.55):
        assert len(retriever.search(np.ones(16), min_relevance=gate)) == 4000
    two = Columns(np.ones(16), None, [np.eye(16)[0]], np.ones(3), np.zeros(3), np.ones(3), [0.55, np.inf, 0.9])
    assert len(retriever.candidates(two, store.view())) == 4000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", [1.0000001, 1.5, 1e300, np.inf])
def test_a_gate_that_nothing_can_reach_finds_nothing(kind, gate):
    store, query = clustered(300)
    assert len(Retriever(store, kind).search(query, min_relevance=gate)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_store_and_one_fact(kind):
    store = FactStore(2, embedding_model="m1")
    retriever = Retriever(store, kind)
    assert len(retriever.search([1.0, 0.0])) == 0
    store.add(["a"], [""], [[1.0, 0.1]])
    assert retriever.search([1.0, 0.0]).rows.tolist() == [0]
    store.remove(["a"])
    assert len(retriever.search([1.0, 0.0])) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_k_takes_the_nearest_and_ties_in_order(kind):
    store = FactStore(2, embedding_model="m1")
    store.add(list("abcde"), [""] * 5, [[1, 1], [2, 2], [1, 0], [3, 3], [0, 1]])
    retriever = Retriever(store, kind)
    assert retriever.search([1, 1], min_relevance=0.0, k=4).rows.tolist() == [0, 1, 3, 2]
    assert retriever.search([1, 1], min_relevance=0.0, k=0).rows.tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_any_of_several_gated_columns(kind):
    store, query = clustered(500)
    other = np.random.default_rng(9).standard_normal(24)
    columns = Columns(
        query=query, coverage=None, residual=other[None], scale=[2.0, 1.0, 3.0], shift=[0.5, 0.0, -0.25],
        weight=[1.0, 1.0, 1.0], gate=[1.6, np.inf, 0.8],
    )  # fmt: skip
    view = store.view()
    found = set(Retriever(store, kind, nprobe=1000).candidates(columns, view).tolist())
    expected = set(passing(store, query, 0.55)) | set(passing(store, other, 0.35))
    assert found == expected if kind != "hnsw" else found <= expected


def test_norms_out_of_float32_range_do_not_reach_faiss():
    store = FactStore(2, embedding_model="m1", dtype="float64")
    store.add(["a", "b", "c"], [""] * 3, [[1e250, 1e250], [1e-250, 1e-250], [-1.0, 1.0]])
    for kind in KINDS:
        assert Retriever(store, kind).search([1e-300, 1e-300], min_relevance=0.99).rows.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kind": "annoy"}, ValueError, "kind: expected one of scan, device, flat, hnsw, ivf"),
        ({"nprobe": 0}, ValueError, "nprobe: expected an integer of at least 1"),
        ({"store": [1]}, TypeError, "store: expected a FactStore, got list"),
    ],
)
def test_bad_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        Retriever(**{"store": clustered(3)[0], **arguments})


def test_counts_may_be_numpy_integers():
    store, query = clustered(200)
    found = [Retriever(store, "ivf", nprobe=n).search(query).rows.tolist() for n in (4, np.int64(4), np.uint8(4))]
    assert found[0] == found[1] == found[2]
    with pytest.raises(ValueError, match="nprobe: expected an integer"):
        Retriever(store, "ivf", nprobe=np.float64(4))


@pytest.mark.parametrize("kind", KINDS)
def test_bad_searches(kind):
    store, query = clustered(20)
    retriever = Retriever(store, kind)
    for bad, message in (
        (np.zeros(24), "query: all zeros"),
        (np.full(24, np.nan), "query: not finite"),
        (query[:5], "query: expected dimension 24"),
        (query[None], "query: expected 1 dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            retriever.search(bad)
    with pytest.raises(ValueError, match="k: expected at least 0"):
        retriever.search(query, k=-1)
    with pytest.raises(ValueError, match="gate"):
        retriever.search(query, min_relevance=np.nan)
