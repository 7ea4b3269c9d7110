"""Ten thousand coverage entries: whatever they are, every way to the k best finds those of the whole ranking.

The facts lie so close together that only rounding tells their scores apart. A bound that leaves out roundings then
drops a fact that belongs to the answer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cdr_kernel import (
    Columns,
    FactStore,
    Retriever,
    Session,
    SubQuery,
    available_impls,
    cdr_rank,
    cdr_score,
    reference,
)
from cdr_kernel.adapters import _crprotocol_6
from cdr_kernel.adapters._facts import FactArray
from cdr_kernel.score._columns import coverage_centroid
from cdr_kernel.score._device_rows import DeviceRows
from cdr_kernel.session import CoverageEntry
from cdr_kernel.shard import ShardedRetriever
from cdr_kernel.shard._sharded_retriever import ShardedStore
from tests.laws.test_exact import bits, running

ENTRIES, DIM, FACTS = 10_000, 4, 1000
SHAPES = ("grouped", "alternating", "sizes", "random", "opposite", "nearly opposite", "tiny")
SEEDS = {"grouped": (0, 1, 5)}  # the others: 0


def entries_of(shape, r, count=ENTRIES, dim=DIM):
    """Six vectors [6, D], which of them each entry is, and the depths."""
    vectors = r.standard_normal((6, dim))
    if "opposite" in shape:
        vectors[3:] = -vectors[:3]
    which = np.sort(r.integers(0, 6, count))
    depths = np.full(count, float(r.choice([0.9, 0.7, 0.15, 0.3])))
    if shape in ("alternating", "opposite", "nearly opposite"):
        which = np.arange(count) % 6
    if shape == "nearly opposite":
        depths[-1] = 1e-5
    if shape == "sizes":
        depths = r.permutation(np.geomspace(1.0, 1e-300, count))
    if shape == "random":
        which, depths = r.integers(0, 6, count), r.random(count)
    if shape == "tiny":
        depths[:] = 5e-324
    return vectors, which, depths


def facts_of(r, query, centroid, n=FACTS):
    """[n, D] facts that differ in everything but their cosine to the query and their product with the centroid."""
    dim = len(query)
    basis, _ = np.linalg.qr(np.column_stack([query, centroid, r.standard_normal((dim, dim - 2))]))
    basis[:, 0] *= np.sign(query @ basis[:, 0])
    around = r.standard_normal((n, dim - 2))
    around /= np.linalg.norm(around, axis=1)[:, None]
    return 0.7 * basis[:, 0] + 0.3 * basis[:, 1] + around @ basis[:, 2:].T


def world(shape, seed):
    r = np.random.default_rng(seed)
    vectors, which, depths = entries_of(shape, r)
    centroid = coverage_centroid(vectors[which], depths)
    query = r.standard_normal(DIM)
    store = FactStore(DIM, embedding_model="m1", dtype="float64")
    store.add([f"f{i}" for i in range(FACTS)], [""] * FACTS, facts_of(r, query, centroid))
    subs = [SubQuery(f"s{j}", f"S{j}", "", vector) for j, vector in enumerate(vectors)]
    session = Session(subs, embedding_model="m1", min_relevance=-1.0, guard=False)
    coverage = tuple(
        CoverageEntry(f"s{j}", subs[j].embedding, depth, 1)
        for j, depth in zip(which.tolist(), depths.tolist(), strict=True)
    )
    return store, session.supposing(replace(session.state, coverage=coverage, residual=())), query


@pytest.mark.parametrize(("shape", "seed"), [(shape, seed) for shape in SHAPES for seed in SEEDS.get(shape, (0,))])
def test_the_k_best_are_those_of_the_whole_ranking(shape, seed, monkeypatch):
    store, session, query = world(shape, seed)
    retrievers = {kind: Retriever(store, kind) for kind in ("scan", "device", "flat")}
    retrievers["codes"], retrievers["few"] = Retriever(store), Retriever(store)
    for name in ("codes", "few"):
        retrievers[name].prepare()
    retrievers["shards"] = ShardedRetriever(ShardedStore.split(store, shards=3))
    whole = cdr_rank(query, retrievers["scan"], session)
    for name, retriever in retrievers.items():
        monkeypatch.setattr("cdr_kernel.retrieve._window_cache.FEW_ROWS", 0 if name == "codes" else 10**6)
        for k in (1, 20):
            best = cdr_rank(query, retriever, session, k=k)
            assert best.ids == whole.ids[:k], name
            assert best.score.tobytes() == whole.score[:k].tobytes(), name


@pytest.mark.parametrize("shape", SHAPES)
def test_every_implementation_finds_the_same(shape):
    r = np.random.default_rng(3)
    vectors, which, depths = entries_of(shape, r)
    query = r.standard_normal(DIM)
    columns = Columns.spec(query, coverage=vectors[which], depth_weights=depths, min_relevance=-1.0)
    for dtype in ("float32", "float64"):
        rows = facts_of(r, query, columns.coverage, 300).astype(dtype)
        whole = cdr_score(rows, columns, k=len(rows))
        store = FactStore(DIM, embedding_model="m1", dtype=dtype)
        store.add([str(i) for i in range(300)], [""] * 300, rows)
        on_device = DeviceRows("cpu").at(store.view())
        for impl in available_impls():
            with running(impl):
                for k in (1, 20):
                    expected = bits(whole.take(np.arange(k)))
                    assert bits(cdr_score(rows, columns, k=k)) == expected
                    assert bits(cdr_score(on_device, columns, k=k)) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_the_references(shape):
    store, session, query = world(shape, 0)
    ranking = cdr_rank(query, Retriever(store), session, k=20)
    twin = reference.ReferenceSession(
        coverage_set=[reference.Entry(entry.embedding.tolist(), entry.depth_weight) for entry in session.coverage],
        residual_set=[],
        min_relevance=-1.0,
    )
    cosines = {}

    def cosine(a, b):
        key = tuple(a), tuple(b)
        if key not in cosines:
            cosines[key] = reference_cosine(a, b)
        return cosines[key]

    reference_cosine, reference.cosine = reference.cosine, cosine
    try:
        rows = store.view().embeddings[[store.view().row_of(id) for id in ranking.ids[:4]]]
        facts = [reference.Fact(tuple(row), "", 1.0, 1.0, id=i, sequence=i) for i, row in enumerate(rows.tolist())]
        truth = {s.fact.id: s for s in reference.cdr_rank(facts, query.tolist(), twin)}
    finally:
        reference.cosine = reference_cosine
    for place in range(4):
        for name in ("score", "relevance", "coverage", "novelty"):
            assert abs(getattr(ranking, name)[place] - getattr(truth[place], name)) <= 1e-12, name


@pytest.mark.parametrize("count", [1, 2, 1023, 1025, 3000])
@pytest.mark.parametrize("dim", [1, 3, 40])
def test_a_centroid_is_summed_in_the_order_of_the_entries(count, dim):
    r = np.random.default_rng(count)
    entries, depths = r.standard_normal((count, dim)), r.random(count) + 1e-9
    total = np.zeros(dim)
    for entry, depth in zip(entries, depths, strict=True):
        norm = np.sqrt(Columns.spec(entry).compiled.squared_norms[0])
        total += (depth / reference.math.fsum(depths)) * (entry / norm)
    assert coverage_centroid(entries, depths).tobytes() == total.tobytes()


class Item:
    def __init__(self, embedding, depth_weight=1.0):
        self.embedding, self.depth_weight = embedding, depth_weight


@pytest.mark.parametrize("depth", [0.1, 0.7, 0.9])
def test_the_drop_in_of_crprotocol_knows_how_far_its_numbers_may_be_off(depth):
    """Equal entries: every sum rounds the same way, so the two orders drift apart."""
    r = np.random.default_rng(1)
    vector = r.standard_normal(2)
    rows = (0.3 * vector + 0.1 * r.standard_normal((5, 2))).tolist()
    facts, entries = FactArray([Item(row) for row in rows]), [Item(vector.tolist(), depth)] * ENTRIES
    columns, slack = _crprotocol_6.Task(facts, vector.tolist(), entries, [], None, -1.0)._columns()
    coverage = cdr_score((facts.matrix,), columns, squared_norms=facts.squared_norms).coverage
    plain = [_crprotocol_6.coverage_score(row, entries) for row in rows]
    assert np.abs(coverage - plain).max() <= slack < 1e-10
