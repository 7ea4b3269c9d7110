"""Later windows and batches: what is kept of a session changes nothing but the time."""

from __future__ import annotations

import contextlib
import gc
import shutil
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest

from cdr_kernel import FactStore, Retriever, Session, SubQuery, WindowReport, cdr_rank, cdr_score, rank_many
from cdr_kernel.retrieve._scan_index import ScanIndex
from cdr_kernel.retrieve._window_cache import RowCache, TaskCache
from tests.rank.test_cdr_rank import agree, truth, world


def same(a, b):
    assert a.ids == b.ids
    for name in ("score", "score_without_guard", "relevance", "coverage", "residual_pull", "novelty", "ngram_overlap"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
    assert (a.qualified, a.guard_activations, a.store_version) == (b.qualified, b.guard_activations, b.store_version)


def advance(session, r, output=""):
    addressed = tuple(s.id for s in session.residual[:1])
    depths = {i: float(r.choice([0.0, 0.15, 0.9])) for i in addressed}
    session.update(WindowReport(0.1, addressed, depths), output, embedding_model="m1")
    session.told = [*getattr(session, "told", []), output]


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("few", [0, 10**9])
@pytest.mark.parametrize("keywords", [{}, {"first_window_pull": True}, {"clamp_novelty": True, "min_relevance": -1.0}])
def test_a_kept_window_equals_a_fresh_one(prepared, few, keywords, monkeypatch):
    monkeypatch.setattr("cdr_kernel.retrieve._window_cache.FEW_ROWS", few)
    store, session, query, r = world(400, **keywords)
    retriever = Retriever(store)
    for window in range(6):
        if prepared and window == 2:
            retriever.prepare()
        for k in (1, 9, None):
            same(cdr_rank(query, retriever, session, k=k), cdr_rank(query, Retriever(store), session, k=k))
        ranking = cdr_rank(query, retriever, session, k=6)
        advance(session, r, " ".join(f.text for f in ranking.facts[:3]))
        store.remove(ranking.ids[:2])
        store.add([f"n{window}-{i}" for i in range(5)], ["w1 w2 w3 w4 w5 w6"] * 5, query + r.standard_normal((5, 12)))
    agree(cdr_rank(query, retriever, session, k=20), truth(store, session, query, k=20))


def test_only_new_rows_are_searched(monkeypatch):
    store, session, query, r = world(300)
    retriever = Retriever(store)
    cdr_rank(query, retriever, session, k=5)
    advance(session, r)
    monkeypatch.setattr(Retriever, "candidates_each", lambda *_: pytest.fail("searched again"))
    first = cdr_rank(query, retriever, session, k=5)
    assert retriever.cache.nbytes > 0
    store.add(["new"], ["new"], query[None] * 2)
    assert cdr_rank(query, retriever, session, k=5).qualified == first.qualified + 1
    with pytest.raises(pytest.fail.Exception):
        cdr_rank(query + 1.0, retriever, session, k=5)  # another question


def test_many_rows_are_looked_at_by_their_codes_and_few_are_kept_with_their_cosines(monkeypatch):
    store, session, query, r = world(300)
    retriever = Retriever(store)
    retriever.prepare()
    cdr_rank(query, retriever, session, k=5)
    advance(session, r)
    bare = retriever.cache.nbytes
    monkeypatch.setattr("cdr_kernel.retrieve._window_cache.FEW_ROWS", 20)
    monkeypatch.setattr(RowCache, "with_values", lambda *_: pytest.fail("read the stored rows"))
    many = cdr_rank(query, retriever, session, k=5)
    assert many.qualified > 20
    assert retriever.cache.nbytes == bare // 16 * 20  # the same rows with their bounds, and n-gram counts
    monkeypatch.undo()
    same(cdr_rank(query, retriever, session, k=5), many)
    assert retriever.cache.nbytes > bare
    monkeypatch.setattr("cdr_kernel.retrieve._window_cache.FEW_ROWS", 20)
    monkeypatch.setattr(ScanIndex, "top", lambda *_: pytest.fail("asked the codes for what is kept"))
    same(cdr_rank(query, retriever, session, k=5), many)


def test_a_changed_query_gate_or_layout_is_noticed():
    store, session, query, r = world(300)
    retriever = Retriever(store)
    for _ in range(3):
        for question in (query, query + r.standard_normal(12)):
            same(cdr_rank(question, retriever, session, k=9), cdr_rank(question, Retriever(store), session, k=9))
        advance(session, r)
        store.remove([store.ids[3]])
        store.compact()


def test_an_older_view_is_not_served_from_a_newer_one():
    store, session, query, _ = world(100)
    retriever = Retriever(store)
    old, columns = store.view(), session.columns(query)
    before = retriever.candidates(columns, old).tolist()
    store.remove([old.id_of(before[0])])
    assert retriever.qualified([session], [columns], store.view())[0].rows.tolist() == before[1:]
    assert retriever.qualified([session], [columns], old)[0].rows.tolist() == before


def test_what_is_kept_goes_with_the_session():
    store, session, query, _ = world(300)
    retriever = Retriever(store)
    cdr_rank(query, retriever, session)
    assert retriever.cache.nbytes > 0
    del session
    gc.collect()
    assert retriever.cache.nbytes == 0


def test_memory_is_bounded_least_recently_used_first():
    store, _, query, _ = world(300)
    columns = world()[1].columns(query)

    class Owner:
        pass

    owners = [Owner() for _ in range(4)]
    rows = np.arange(100)
    cache = RowCache(limit=3 * rows.nbytes)
    view = store.view()
    for owner in owners[:3]:
        cache.put(owner, columns, view, rows)
    assert cache.get(owners[0], columns, view) is not None
    cache.put(owners[3], columns, view, rows)
    assert cache.nbytes == 3 * rows.nbytes
    assert [cache.get(owner, columns, view) is not None for owner in owners] == [True, False, True, True]
    cache.put(Owner(), columns, view, np.arange(10**4))
    assert cache.nbytes <= cache.limit


def test_what_went_with_its_owner_takes_no_room_from_others():
    store, _, query, _ = world(300)
    columns = world()[1].columns(query)

    class Owner:
        pass

    rows, view = np.arange(100), store.view()
    cache = RowCache(limit=3 * rows.nbytes)
    stays = [Owner(), Owner()]
    for owner in stays:
        cache.put(owner, columns, view, rows)
    for _ in range(10):
        cache.put(Owner(), columns, view, rows)
        gc.collect()
    successor = Owner()
    cache.hand_over(stays.pop(), successor)
    gc.collect()
    cache.hand_over(Owner(), Owner())  # nothing is kept for it
    assert all(cache.get(owner, columns, view) is not None for owner in (*stays, successor))
    assert cache.nbytes == 2 * rows.nbytes


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("k", [None, 0, 7])
def test_a_batch_ranks_as_one_by_one(prepared, k):
    store, _, _, r = world(500)
    retriever = Retriever(store)
    if prepared:
        retriever.prepare()
    asked = [world(5, seed=seed, min_relevance=gate)[1:3] for seed, gate in ((1, 0.2), (2, 0.4), (3, -1.0), (4, 0.99))]
    for _ in range(3):
        sessions, queries = [s for s, _ in asked], [q for _, q in asked]
        batch = rank_many(queries, retriever, sessions, k=k)
        for query, session, ranking in zip(queries, sessions, batch, strict=True):
            same(ranking, cdr_rank(query, Retriever(store), session, k=k))
            advance(session, r)
    assert rank_many([], retriever, []) == []


@pytest.mark.parametrize("k", [1, 7, 90])
@pytest.mark.parametrize("strength", ["equal", "any", "one far above", "none"])
def test_many_first_windows_rank_as_one_by_one(strength, k):
    store, _, _, r = world(5)
    n = 600
    importance = {"equal": np.ones(n), "any": r.random(n), "none": np.zeros(n)}.get(strength, np.full(n, 1e-3))
    if strength == "one far above":
        importance[300] = 1e6
    facts = np.round(r.standard_normal((n, 12))) + 0.5  # some are alike
    store.add([f"many{i}" for i in range(n)], ["w1"] * n, facts, importance=importance)
    store.remove([f"many{i}" for i in range(0, n, 9)])
    retriever = Retriever(store)
    retriever.prepare()
    asked = [world(5, seed=i, min_relevance=(0.0, 0.3, 0.6, -1.0)[i % 4], guard=False)[1:3] for i in range(12)]
    for by_multiplier in (False, True):
        sessions, queries = [s for s, _ in asked], [q for _, q in asked]
        factors = r.choice([0.0, 0.5, 2.0], len(store)) if by_multiplier else None
        for best in (3, 0):  # what was kept is ranked again without the best of it
            batch = rank_many(queries, retriever, sessions, k=k, multiplier=factors)
            for query, session, ranking in zip(queries, sessions, batch, strict=True):
                same(ranking, cdr_rank(query, Retriever(store), session, k=k, multiplier=factors))
            store.remove({id for ranking in batch for id in ranking.ids[:best]})
            factors = None if factors is None else r.choice([0.0, 0.5, 2.0], len(store))
        asked = [world(5, seed=20 + i, min_relevance=0.2, guard=False)[1:3] for i in range(9)]


def test_many_first_windows_whose_scores_are_hardly_above_zero():
    r = np.random.default_rng(41)
    n, dim = 600, 12
    facts = r.standard_normal((n, dim)) + np.ones(dim)
    store = FactStore(dim, embedding_model="m1")
    store.add([f"f{i}" for i in range(n)], [""] * n, facts, importance=np.full(n, 1e-322))
    retriever = Retriever(store)
    retriever.prepare()
    queries = [np.ones(dim) + 0.3 * r.standard_normal(dim) for _ in range(12)]
    subs = [SubQuery("a", "A", "", r.standard_normal(dim))]
    for k in (1, 7, 90):
        sessions = [Session(subs, embedding_model="m1", min_relevance=0.1, guard=False) for _ in queries]
        batch = rank_many(queries, retriever, sessions, k=k)  # of many relevances and few scores
        for query, session, ranking in zip(queries, sessions, batch, strict=True):
            same(ranking, cdr_rank(query, Retriever(store), session, k=k))


def test_a_batch_is_checked_before_anything_is_ranked():
    store, session, query, _ = world(50)
    retriever = Retriever(store)
    with pytest.raises(ValueError, match="queries: expected 2"):
        rank_many([query], retriever, [session, session])
    with pytest.raises(ValueError, match="query: "):
        rank_many([query, query[:3]], retriever, [session, session])
    with pytest.raises(ValueError, match="k: expected"):
        rank_many([query], retriever, [session], k=-1)
    assert retriever.cache.nbytes == 0


def test_codes_are_made_in_the_background_and_change_nothing():
    r = np.random.default_rng(0)
    store = FactStore(8, embedding_model="m1")
    n = 17000
    store.add([f"f{i}" for i in range(n)], [""] * n, r.standard_normal((n, 8)))
    retriever, query = Retriever(store), r.standard_normal(8)
    before = retriever.search(query, min_relevance=0.6)
    retriever._coding.join()
    assert retriever.codes(store.view()) is not None
    after = retriever.search(query, min_relevance=0.6)
    assert before.rows.tolist() == after.rows.tolist()
    assert before.relevance.tobytes() == after.relevance.tobytes()
    store.add([f"g{i}" for i in range(n)], [""] * n, r.standard_normal((n, 8)))
    assert len(retriever.search(query, min_relevance=0.6)) > len(after)
    retriever._coding.join()
    assert retriever.codes(store.view()).rows == 2 * n


def saved_and_loaded(tmp_path, n=17000):
    r = np.random.default_rng(0)
    store = FactStore(8, embedding_model="m1")
    store.add([f"f{i}" for i in range(n)], [""] * n, r.standard_normal((n, 8)))
    store.save(tmp_path)
    return FactStore.load(tmp_path), r.standard_normal(8)


def test_saved_codes_are_found_again(tmp_path, monkeypatch):
    store, query = saved_and_loaded(tmp_path)
    first = Retriever(store)
    coded = []
    first.prepare(coded.append)
    assert sum(coded) == 17000
    first.save()
    monkeypatch.setattr(ScanIndex, "build", lambda *_, **__: pytest.fail("made again"))
    again = Retriever(FactStore.load(tmp_path))
    assert again.codes(again.store.view()).rows == 17000
    for gate in (0.5, 0.9, -1.0):
        a, b = first.search(query, min_relevance=gate), again.search(query, min_relevance=gate)
        assert (a.rows.tolist(), a.relevance.tobytes()) == (b.rows.tolist(), b.relevance.tobytes())


def test_stale_or_damaged_codes_are_made_again(tmp_path):
    store, query = saved_and_loaded(tmp_path)
    Retriever(store).save()
    store.remove(["f3"])
    store.save(tmp_path)
    for damage in (False, True):
        retriever = Retriever(FactStore.load(tmp_path))
        with pytest.warns(UserWarning, match="codes are made again") if damage else contextlib.nullcontext():
            truth = retriever.search(query, min_relevance=0.5)
        retriever._coding.join()
        assert retriever.search(query, min_relevance=0.5).rows.tolist() == truth.rows.tolist()
        retriever.save()
        (tmp_path / "scan.json").write_text("{")


def test_codes_of_the_store_before_are_not_used(tmp_path):
    """400 changed rows that neither their norms nor a few samples would tell: all numbers are 1 or -1."""
    n, r = 17000, np.random.default_rng(0)
    rows = r.choice([-1.0, 1.0], (n, 64))
    sampled = np.unique(np.linspace(0, n - 1, 256).astype(np.int64))
    changed = np.setdiff1d(np.arange(100, 600), sampled)[:400]
    query = r.choice([-1.0, 1.0], 64)
    ids, texts = [f"f{i}" for i in range(n)], [""] * n
    for save_codes in (True, False):
        store = FactStore(64, embedding_model="m1")
        store.add(ids, texts, rows)
        store.save(tmp_path)
        loaded = FactStore.load(tmp_path)
        if save_codes:
            Retriever(loaded).save()
            assert Retriever(loaded).codes(loaded.view()) is not None
            old = {path.name: path for path in tmp_path.glob("scan*")}
            assert len(old) == 2
            shutil.copytree(tmp_path, tmp_path.with_name("before"))
        rows[changed] = query
    truth = changed.tolist()
    assert list(tmp_path.glob("scan*")) == []  # they went with the store they were of
    for put_back in (False, True):
        if put_back:  # by hand
            for name in old:
                there = tmp_path.with_name("before") / name
                (shutil.copytree if there.is_dir() else shutil.copy)(there, tmp_path / name)
        retriever = Retriever(FactStore.load(tmp_path))
        assert retriever._saved_codes(retriever.store.view()) is None
        assert retriever.search(query, min_relevance=0.99).rows.tolist() == truth
        retriever._coding.join()
        assert retriever.search(query, min_relevance=0.99).rows.tolist() == truth


def test_only_unchanged_loaded_stores_save_codes(tmp_path):
    store, _ = saved_and_loaded(tmp_path, 10)
    with pytest.raises(ValueError, match="loaded from a folder and has not changed"):
        Retriever(FactStore(8, embedding_model="m1")).save()
    store.remove(["f1"])
    with pytest.raises(ValueError, match="loaded from a folder and has not changed"):
        Retriever(store).save()


def test_a_program_that_ends_does_not_wait_for_codes():
    script = """
        import numpy as np, time
        from cdr_kernel import FactStore, Retriever
        n = 60000
        store = FactStore(64, embedding_model="m")
        store.add([str(i) for i in range(n)], [""] * n, np.random.default_rng(0).standard_normal((n, 64)))
        Retriever(store).search(np.ones(64))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_view_with_fewer_rows_is_served_from_the_front():
    store, session, query, r = world(200)
    retriever = Retriever(store)
    cdr_rank(query, retriever, session, k=5)
    old = store.view()
    store.add([f"n{i}" for i in range(50)], ["w1 w2"] * 50, query + r.standard_normal((50, 12)))
    advance(session, r, "w1 w2 w3 w4 w5 w6 w7")
    whole = cdr_rank(query, retriever, session)
    columns = session.columns(query)
    (kept,) = retriever.qualified([session], [columns], old)
    assert kept.rows.tolist() == retriever.candidates(columns, old).tolist()
    assert len(kept.values) == len(kept.rows)
    same(cdr_rank(query, retriever, session), whole)


@pytest.mark.parametrize("guarded", [False, True])
def test_the_bounds_of_a_scan_choose_the_best(guarded):
    store, session, query, r = world(3000, min_relevance=-0.2)
    retriever = Retriever(store)
    retriever.prepare()
    if guarded:
        words = " ".join(fact.text for fact in store.view().facts(range(40)))
        session.update(WindowReport(0.1, ()), words, embedding_model="m1")
    multiplier = r.choice([0.0, 0.5, 1.0, 3.0], len(store))
    queries = [query + 0.5 * r.standard_normal(12) for _ in range(6)]
    for asked in (queries[:1], queries):
        for k in (1, 5, 200):
            batch = rank_many(asked, retriever, [session] * len(asked), k=k, multiplier=multiplier)
            for q, ranking in zip(asked, batch, strict=True):
                same(ranking, cdr_rank(q, Retriever(store), session, k=k, multiplier=multiplier))


@pytest.mark.parametrize("guard", [None, False])
@pytest.mark.parametrize("factors", [True, False])
def test_a_batch_of_first_windows_on_codes(guard, factors):
    r = np.random.default_rng(31)
    n, dim = 3000, 24
    x = r.standard_normal((n, dim))
    x[r.integers(0, n, 300)] = x[7]  # ties
    store = FactStore(dim, embedding_model="m1")
    ids = [f"f{i}" for i in range(n)]
    importance = r.choice([0.0, 0.5, 1.0], n)
    store.add(ids, [f"text of fact {i} as it was put into the store" for i in range(n)], x, importance=importance)
    retriever = Retriever(store)
    retriever.prepare()
    queries = [x[7] + 0.3 * r.standard_normal(dim), *r.standard_normal((6, dim))]
    subs = [SubQuery("a", "A", "", r.standard_normal(dim))]
    multiplier = r.choice([0.0, 1.0, 2.0], n) if factors else None
    for removed in ((), ids[3:900:2]):
        store.remove(removed)
        view = store.view()
        alive = np.flatnonzero(view.alive)
        given = None if multiplier is None else multiplier[alive]
        for k in (0, 5, 400, 5000):
            sessions = [Session(subs, embedding_model="m1", min_relevance=0.1, guard=guard) for _ in queries]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # fewer than k pass
                rankings = rank_many(queries, retriever, sessions, k=k, multiplier=given)
            for query, session, ranking in zip(queries, sessions, rankings, strict=True):
                columns = session.columns(query)
                arguments = {"importance": view.importance[alive], "multiplier": given, "rows": alive}
                want = cdr_score(view.blocks, columns, k=k, **arguments)
                assert ranking.ids == [ids[row] for row in want.rows]
                assert ranking.score.tobytes() == want.score.tobytes()
                assert ranking.qualified == len(cdr_score(view.blocks, columns, **arguments))
                assert ranking.guard_activations == 0


def test_what_tasks_found_goes_when_it_was_not_used_for_longest():
    cache = TaskCache(limit=10_000)
    for name in "abc":
        cache.put(name, name.upper(), 1000)
    assert (len(cache), cache.get("a"), cache.get("x")) == (3, "A", None)
    assert 3000 < cache.nbytes <= 10_000
    cache.put("d", "D", 1000)
    assert (cache.get("a"), cache.get("b"), cache.get("d")) == ("A", None, "D")
    before = cache.nbytes
    cache.put("d", "again", 1000)
    assert (cache.get("d"), cache.nbytes) == ("again", before)
    cache.put("e", "too large", 10_000)
    assert (cache.get("e"), cache.get("d"), cache.nbytes) == (None, "again", before)
    cache.put("d", "too large now", 10_000)
    assert cache.get("d") is None
    assert cache.nbytes < before
