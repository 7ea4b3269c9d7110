"""cdr_rank over whole sessions against the reference: same facts, same order, same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from sessions import session_of_mode

from cdr_kernel import (
    EmbeddingModelMismatch,
    FactStore,
    NGramGuard,
    Retriever,
    Session,
    SubQuery,
    WindowReport,
    cdr_rank,
    reference,
)
from cdr_kernel.text import _token_hashes

DIM = 12


def world(n=120, seed=0, dtype="float32", **settings):
    r = np.random.default_rng(seed)
    query = r.standard_normal(DIM)
    words = [f"w{i}" for i in range(40)]
    store = FactStore(DIM, embedding_model="m1", dtype=dtype)
    texts = [" ".join(r.choice(words, 14)) for _ in range(n)]
    vectors = query * 0.6 + r.standard_normal((n, DIM))
    vectors[n // 2] = vectors[1]
    store.add([f"f{i}" for i in range(n)], texts, vectors, importance=r.choice([0.0, 0.5, 1.0, 2.0], n))
    subs = [SubQuery(f"s{j}", f"S{j}", f"sub {j}", query * 0.5 + r.standard_normal(DIM)) for j in range(5)]
    session = session_of_mode(subs, embedding_model="m1", **{"min_relevance": 0.3, **settings})
    return store, session, query, r


def truth(store, session, query, k=None, multiplier=None):
    """The reference's ranking of the store for the session's state."""
    view = store.view()
    rows = np.flatnonzero(view.alive).tolist()
    facts = [
        reference.Fact(
            embedding=view.embeddings[row].astype(np.float64).tolist(),
            content=fact.text,
            importance_weight=fact.importance,
            multiplier=(multiplier or {}).get(fact.id, 1.0),
            id=fact.id,
            sequence=fact.sequence,
        )
        for row, fact in zip(rows, view.facts(rows), strict=True)
    ]
    return reference.cdr_rank(facts, list(map(float, query)), mirror(session), k=k)


def mirror(session):
    """The session's state as the reference keeps it; the blacklist comes from the outputs it was told."""
    blacklist = set()
    for output in getattr(session, "told", []):
        blacklist.update(reference.ngrams(reference.tokenize(output)))
    return reference.ReferenceSession(
        coverage_set=[reference.Entry(e.embedding.tolist(), e.depth_weight, e.window_number) for e in session.coverage],
        residual_set=[reference.SubQuery(s.id, s.label, s.text, s.embedding.tolist()) for s in session.residual],
        ngram_blacklist=blacklist,
        min_relevance=session.settings.min_relevance,
        first_window_pull=session.settings.first_window_pull,
        clamp_novelty=session.settings.clamp_novelty,
    )


def agree(ranking, expected):
    assert ranking.ids == [s.fact.id for s in expected]
    for at, s in enumerate(expected):
        bound = 1e-12 * s.fact.importance_weight * s.fact.multiplier
        assert abs(ranking.score[at] - s.score) <= bound
        assert abs(ranking.score_without_guard[at] - s.score_without_guard) <= bound
        for name in ("relevance", "coverage", "residual_pull", "novelty"):
            assert abs(getattr(ranking, name)[at] - getattr(s, name)) <= 1e-12
        assert ranking.ngram_overlap[at] == s.ngram_overlap
        assert ranking.ngram_penalty[at] == pytest.approx(s.ngram_penalty)


@pytest.mark.parametrize("kind", ["scan", "prepared scan", "flat"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("keywords", [{}, {"first_window_pull": True}, {"clamp_novelty": True}])
def test_five_windows_with_adds_and_removes_between_them(kind, dtype, keywords):
    store, session, query, r = world(dtype=dtype, **keywords)
    retriever = Retriever(store, kind.split()[-1])
    if kind == "prepared scan":
        retriever.prepare()
    session.told = []
    for window in range(5):
        multiplier = {id: float(r.random()) for id in store.ids[::2]} if window % 2 else None
        ranking = cdr_rank(query, retriever, session, multiplier=multiplier)
        expected = truth(store, session, query, multiplier=multiplier)
        agree(ranking, expected)
        assert ranking.qualified == len(expected)
        assert ranking.guard_activations == reference.guard_activations(expected)
        assert ranking.guard_alert == reference.guard_alert(expected)
        assert ranking.coverage_depth == len(session.coverage)
        agree(cdr_rank(query, retriever, session, k=7, multiplier=multiplier), expected[:7])
        output = " ".join(f.text for f in ranking.facts[:4])
        report = WindowReport(0.1 * window, (f"s{window}",), {f"s{window}": float(r.random())})
        session.update(report, output, embedding_model="m1")
        session.told.append(output)
        store.remove([ranking.ids[-1]])
        store.upsert([ranking.ids[-2], f"n{window}"], ["new text", "more"], query + r.standard_normal((2, DIM)))
    assert ranking.guard_activations > 0


def test_ties_come_in_the_order_of_their_sequence():
    store = FactStore(3, embedding_model="m1")
    store.add([f"f{i:04}" for i in range(1000)], ["same"] * 1000, np.tile([1.0, 2.0, 2.0], (1000, 1)))
    store.upsert(["f0000"], ["same"], [[1.0, 2.0, 2.0]])
    session = Session([SubQuery("a", "A", "a", [0.0, 0.0, 1.0])], embedding_model="m1")
    retriever = Retriever(store)
    order = [f"f{i:04}" for i in range(1, 1000)] + ["f0000"]
    for k in (1, 3, 10, None):
        assert cdr_rank([1.0, 2.0, 2.0], retriever, session, k=k).ids == order[:k]
    store.compact()
    assert cdr_rank([1.0, 2.0, 2.0], retriever, session).ids == order


@pytest.mark.parametrize(("k", "count"), [(10, 3), (0, 0), (2, 2), (None, 3)])
def test_k_against_n(k, count):
    store = FactStore(2, embedding_model="m1")
    session = Session([SubQuery("a", "A", "a", [0.0, 1.0])], embedding_model="m1")
    assert len(cdr_rank([1.0, 0.0], Retriever(store), session, k=k)) == 0
    store.add(list("abc"), list("abc"), [[1, 0], [1, 0.1], [1, 0.2]])
    assert len(cdr_rank([1.0, 0.0], Retriever(store), session, k=k)) == count


def test_falsy_values_are_honoured():
    store = FactStore(2, embedding_model="m1")
    store.add(list("abc"), list("abc"), [[0.1, 1], [-1, 0.5], [1, 0]], importance=[1.0, 1.0, 0.0])
    session = Session([SubQuery("a", "A", "a", [0.0, 1.0])], embedding_model="m1", min_relevance=0.0)
    ranking = cdr_rank([1.0, 0.0], Retriever(store), session)
    assert ranking.ids == ["a", "c"]  # b lies under 0.0; c passes with importance 0
    assert ranking.score[1] == 0.0


def test_exclude_packed():
    store, session, query, _ = world(exclude_packed=True)
    retriever = Retriever(store)
    first = cdr_rank(query, retriever, session, k=5)
    assert len(first) == 5
    session.update(WindowReport(0.0, ()), "", packed=first.ids, embedding_model="m1")
    second = cdr_rank(query, retriever, session)
    assert not set(first.ids) & set(second.ids)
    assert second.qualified == cdr_rank(query, retriever, world()[1]).qualified - 5


def test_the_multiplier_as_an_array_and_its_errors():
    store, session, query, r = world(20)
    store.remove(["f3"])
    retriever = Retriever(store)
    factors = r.random(19)
    by_id = dict(zip(store.ids, factors.tolist(), strict=True))
    agree(cdr_rank(query, retriever, session, multiplier=factors), truth(store, session, query, multiplier=by_id))
    with pytest.raises(ValueError, match="multiplier: expected 19 entries"):
        cdr_rank(query, retriever, session, multiplier=np.ones(20))
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="multiplier: expected finite"):
            cdr_rank(query, retriever, session, multiplier={"f1": bad})
    agree(cdr_rank(query, retriever, session, multiplier={}), truth(store, session, query))
    some = {"f7": 3.0, "f1": 0.0}
    agree(cdr_rank(query, retriever, session, multiplier=some), truth(store, session, query, multiplier=some))
    with pytest.raises(KeyError, match="multiplier: 'f3', 'F1' not in the store"):  # one was removed, one never was
        cdr_rank(query, retriever, session, multiplier={"f1": 2.0, "f3": 2.0, "F1": 2.0})
    many = dict.fromkeys("abcdefg", 1.0)
    with pytest.raises(KeyError, match="'a', 'b', 'c', 'd', 'e' and 2 more not in the store"):
        cdr_rank(query, retriever, session, multiplier=many)


def test_another_model_is_refused():
    store, _, query, _ = world()
    session = Session([SubQuery("a", "A", "a", np.ones(DIM))], embedding_model="m2")
    with pytest.raises(EmbeddingModelMismatch, match="'m2', got 'm1'; the session is of 'm2', the store of 'm1'"):
        cdr_rank(query, Retriever(store), session)


def halves(text):
    return text.casefold().split()


@pytest.mark.parametrize("keywords", [{"tokenizer": halves}, {"hash_key": 7}])
def test_a_guard_of_another_tokenizer_or_key_is_refused(keywords):
    query = np.ones(2)
    items = [SubQuery("a", "A", "a", [0.0, 1.0])]
    store = FactStore(2, embedding_model="m1", **keywords)
    store.add(["f"], ["one two three"], [[1.0, 1.0]])
    session = Session(items, embedding_model="m1")
    before = session.to_json()
    with pytest.raises(ValueError, match="the tokens of the facts: expected"):
        cdr_rank(query, Retriever(store), session)
    assert session.to_json() == before
    assert len(cdr_rank(query, Retriever(store), Session(items, embedding_model="m1", guard=False))) == 1
    session = Session(items, embedding_model="m1", guard=NGramGuard(2, **keywords))
    session.update(WindowReport(0.0), "Two THREE four", embedding_model="m1")
    assert cdr_rank(query, Retriever(store), session).ngram_overlap.tolist() == [1]


def test_texts_are_not_read_for_the_guard(tmp_path, monkeypatch):
    store, session, query, _ = world()
    store.save(tmp_path)
    store = FactStore.load(tmp_path)
    store.add(["new"], ["w1 w2 w3 w4 w5 w6 w7"], query[None])
    session.update(WindowReport(0.0), " ".join(store.get(["f1", "new"])[i].text for i in (0, 1)), embedding_model="m1")
    whole = cdr_rank(query, Retriever(store), session)
    assert whole.guard_activations >= 2
    read = []
    view_of_row = type(store.view()._storage.texts).__getitem__
    monkeypatch.setattr(
        type(store.view()._storage.texts), "__getitem__", lambda self, row: read.append(row) or view_of_row(self, row)
    )
    monkeypatch.setattr(type(store._hasher), "tokens", None)
    few = cdr_rank(query, Retriever(store), session, k=2)
    assert few.ngram_overlap.tolist() == whole.ngram_overlap[:2].tolist()
    assert len(read) <= 3 * len(few)  # id, text and source of what is returned


@pytest.mark.parametrize("exact", [False, True])
def test_exact_guards_rank_as_if_nothing_collided(exact, monkeypatch):
    monkeypatch.setattr(_token_hashes, "_hash_bits", 4)
    store, _, query, _ = world()
    session = Session([SubQuery("a", "A", "a", query)], embedding_model="m1", guard=NGramGuard(2, exact=exact))
    output = "w1 w2 w3 w4 w5 w6 w7 w8 w9"
    session.update(WindowReport(0.0), output, embedding_model="m1")
    ranking = cdr_rank(query, Retriever(store), session)
    blacklist = reference.ngrams(reference.tokenize(output), 2)
    true = [reference.count_matching_ngrams(fact.text, blacklist, 2) for fact in ranking.facts]
    assert (ranking.ngram_overlap.tolist() == true) == exact


def test_bad_queries_and_k():
    store, session, query, _ = world()
    before = session.to_json()
    for bad in (np.zeros(DIM), np.full(DIM, np.inf), query[:3], query[None]):
        with pytest.raises(ValueError, match="query: "):
            cdr_rank(bad, Retriever(store), session)
    with pytest.raises(ValueError, match="k: expected at least 0"):
        cdr_rank(query, Retriever(store), session, k=-1)
    assert session.to_json() == before


def test_take_keeps_counters_and_breakdown():
    store, session, query, _ = world()
    ranking = cdr_rank(query, Retriever(store), session)
    part = ranking.take([4, 1])
    assert part.ids == [ranking.ids[4], ranking.ids[1]]
    assert part.score.tolist() == [ranking.score[4], ranking.score[1]]
    assert (part.qualified, part.coverage_depth) == (ranking.qualified, ranking.coverage_depth)
    assert len(ranking.take([])) == 0


@pytest.mark.parametrize("kind", ["scan", "device"])
@pytest.mark.parametrize("k", [None, 1])
def test_an_importance_times_a_multiplier_that_is_not_finite(kind, k):
    store, session, query, _ = world()
    store.upsert(["f3"], ["far away"], [-query], importance=[1e308])
    for multiplier in ({"f3": 10.0}, np.full(len(store), 10.0)):
        with pytest.raises(ValueError, match="importance times multiplier is not finite"):
            cdr_rank(query, Retriever(store, kind), session, k=k, multiplier=multiplier)


@pytest.mark.parametrize("kind", ["scan", "device"])
@pytest.mark.parametrize("importance", [[1.7e308, 1.6e308, 1.0], [5e-324, 5e-324, 0.0]])
def test_the_k_best_where_scores_leave_what_float64_holds(kind, importance):
    """Infinite by a novelty above 1, before an n-gram penalty that must not make them finite again; or rounded to 0."""
    store, _, query, r = world(200)
    texts = [f"w{i % 3} is a text" for i in range(200)]
    vectors = query + 0.7 * r.standard_normal((200, DIM))
    store.upsert(store.ids, texts, vectors, importance=r.choice(importance, 200))
    subs = [SubQuery("s0", "S0", "zero", -query), SubQuery("s1", "S1", "one", query)]
    session = Session(subs, embedding_model="m1", min_relevance=0.1, guard=NGramGuard(n=4))
    retriever = Retriever(store, kind)
    retriever.prepare()
    report = WindowReport(0.2, addressed=("s0",), depth_by_sub_query={"s0": 0.9})
    session.update(report, "w1 is a text", embedding_model="m1")
    everything = cdr_rank(query, retriever, session)
    assert 0 < np.isinf(everything.score).sum() < 199 or 0 < (everything.score == 0.0).sum() < 199
    assert everything.ngram_overlap.any()
    for k in range(1, 190):
        best = cdr_rank(query, retriever, session, k=k)
        assert best.ids == everything.ids[:k]
        assert best.score.tobytes() == everything.score[:k].tobytes()
