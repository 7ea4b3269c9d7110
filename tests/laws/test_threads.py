"""Threads: whoever ranks sees one version of the store and one state of the session, whatever others do meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cdr_kernel import (
    _C,
    Columns,
    FactStore,
    Retriever,
    Session,
    SubQuery,
    WindowReport,
    available_impls,
    cdr_rank,
    cdr_score,
    reference,
)
from cdr_kernel.retrieve import _retriever as retrieve_module
from cdr_kernel.retrieve._retriever import KINDS
from cdr_kernel.validation import _arrays

DIM = 8
MODEL = "m1"
QUERY = np.array([3.0, 1.0, 0.0, -1.0, 2.0, 1.0, 1.0, 0.0])
SUBS = [SubQuery(f"s{j}", f"S{j}", "", QUERY + 2.0 * np.eye(DIM)[j]) for j in range(6)]
WORDS = ("pod", "service", "routes", "etcd", "node")


@pytest.fixture(autouse=True)
def _as_found():
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    _C.set_threads(0)


def bits(answer):
    return tuple(v.tobytes() for v in vars(answer).values() if isinstance(v, np.ndarray))


class World:
    """A store and a session, everything that was done to them, and what the truth is for any moment of that."""

    def __init__(self):
        self.store = FactStore(DIM, embedding_model=MODEL)
        self.session = Session(SUBS, embedding_model=MODEL, min_relevance=0.4)
        self.turn = threading.Lock()  # of whoever changes the store, so that its version can be written down
        self.facts = {}  # id -> (text, vector, importance, sequence)
        self.next = 0
        self.versions = {0: {}}
        self.updates = []

    def put(self, r, ids):
        ids = list(dict.fromkeys(ids))
        texts = [" ".join(r.choice(WORDS, 9)) for _ in ids]
        vectors = (QUERY + r.standard_normal((len(ids), DIM)) * 2).astype(np.float32)
        importance = r.choice([0.5, 1.0, 2.0], len(ids))
        with self.turn:
            self.store.upsert(ids, texts, vectors, importance=importance)
            for name, text, vector, weight in zip(ids, texts, vectors, importance.tolist(), strict=True):
                self.facts.pop(name, None)
                self.facts[name] = (text, vector, weight, self.next)
                self.next += 1
            self.versions[self.store.version] = dict(self.facts)

    def remove(self, ids):
        with self.turn:
            self.store.remove(ids, missing="ignore")
            for name in ids:
                self.facts.pop(name, None)
            self.versions[self.store.version] = dict(self.facts)

    def compact(self):
        with self.turn:
            self.store.compact()
            self.versions[self.store.version] = dict(self.facts)

    def update(self, r):
        name = f"s{len(self.updates) % len(SUBS)}"
        report = WindowReport(0.5, (name,), {name: float(r.random())})
        output = " ".join(r.choice(WORDS, 12))
        self.updates.append((report, output))
        self.session.update(report, output, embedding_model=MODEL)

    def rebuilt(self, version, depth):
        """The ranking of that version with the session after `depth` updates, made alone."""
        facts = self.versions[version]
        store = FactStore(DIM, embedding_model=MODEL)
        if facts:
            texts, vectors, importance, _ = zip(*facts.values(), strict=True)
            store.add(list(facts), texts, np.stack(vectors), importance=importance)
        return cdr_rank(QUERY, Retriever(store), self.sessions[depth])

    def by_reference(self, version, depth):
        session = reference.ReferenceSession(
            [reference.SubQuery(s.id, s.label, "", s.embedding.tolist()) for s in SUBS], min_relevance=0.4
        )
        for report, output in self.updates[:depth]:
            told = reference.Report(0.5, list(report.addressed), dict(report.depth_by_sub_query))
            reference.update_session_after_window(session, told, output)
        facts = [
            reference.Fact(vector.astype(float).tolist(), text, weight, id=name, sequence=number)
            for name, (text, vector, weight, number) in self.versions[version].items()
        ]
        return reference.cdr_rank(facts, QUERY.tolist(), session)

    def replay(self):
        """Sessions after 0, 1, 2, ... updates."""
        session = Session(SUBS, embedding_model=MODEL, min_relevance=0.4)
        self.sessions = [session.snapshot()]
        for report, output in self.updates:
            session.update(report, output, embedding_model=MODEL)
            self.sessions.append(session.snapshot())


def hammer(seconds):
    """8 readers, 2 that change the store and 1 that updates the session; every result against what it claims."""
    world = World()
    world.put(np.random.default_rng(0), [f"a{i}" for i in range(60)])
    retrievers = [Retriever(world.store, kind) for kind in ("scan", "flat")]
    done = threading.Event()
    sys.setswitchinterval(1e-5)

    def read(number):
        seen = []
        while not done.is_set():
            retriever = retrievers[number % 2]
            seen.append(cdr_rank(QUERY, retriever, world.session, k=(None, 5)[number // 2 % 2]))
            found = retriever.search(QUERY, min_relevance=0.4)
            assert {fact.id for fact in found.view.facts(found.rows)} <= set(found.view.ids)
        return seen

    def change(letter):
        r = np.random.default_rng(ord(letter))
        rounds = 0
        while not done.is_set():
            world.put(r, [f"{letter}{i}" for i in r.integers(0, 40, 3)])
            world.remove([f"{letter}{i}" for i in r.integers(0, 40, 2)])
            if rounds % 20 == 19:
                world.compact()
            time.sleep(0.004)
            rounds += 1
        return rounds

    def update():
        r = np.random.default_rng(9)
        rounds = 0
        while not done.is_set():
            world.update(r)
            time.sleep(0.02)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(11) as pool:
        readers = [pool.submit(read, number) for number in range(8)]
        changers = [pool.submit(change, "a"), pool.submit(change, "b"), pool.submit(update)]
        time.sleep(seconds)
        done.set()
        rankings = [ranking for reader in readers for ranking in reader.result()]
        assert all(changer.result() > 5 for changer in changers)

    world.replay()
    moments = sorted({(ranking.store_version, ranking.coverage_depth) for ranking in rankings})
    assert len(moments) > 20
    assert len({version for version, _ in moments}) > 10
    assert len({depth for _, depth in moments}) > 5
    truth = {moment: world.rebuilt(*moment) for moment in moments}
    for ranking in rankings:
        expected = truth[ranking.store_version, ranking.coverage_depth]
        numbers = [world.versions[ranking.store_version][name][3] for name in ranking.ids]
        assert ranking.ids == expected.ids[: len(ranking)]
        assert bits(ranking) == bits(expected.take(range(len(ranking))))
        assert [fact.sequence for fact in ranking.facts] == numbers
        assert (ranking.qualified, ranking.guard_activations) == (expected.qualified, expected.guard_activations)
    for moment in moments[:: len(moments) // 10]:
        by_reference = world.by_reference(*moment)
        assert [s.fact.id for s in by_reference] == truth[moment].ids
        np.testing.assert_allclose(truth[moment].score, [s.score for s in by_reference], rtol=0, atol=4e-12)


def test_every_ranking_is_of_one_moment():
    hammer(2.0)


@pytest.mark.slow
def test_every_ranking_is_of_one_moment_for_longer():
    hammer(5.0)


def slowed(monkeypatch, owner, name):
    """Let other threads run in the middle of what calls owner.name."""
    right = getattr(owner, name)

    def slow(*args):
        time.sleep(0.0005)
        return right(*args)

    monkeypatch.setattr(owner, name, slow)


def test_no_update_of_a_session_is_lost(monkeypatch):
    session = Session(SUBS, embedding_model=MODEL)
    slowed(monkeypatch, Session, "_remaining")

    def update(j):
        for i in range(10):
            session.update(WindowReport(0.5, (f"s{j}",), {}, {f"s{j}": 1}), f"{j} {i} a b c d", embedding_model=MODEL)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(update, range(6)))
    assert session.window_count == len(session.coverage) == 60
    assert session.words == {f"s{j}": 10 for j in range(6)}
    assert len(session.guard) == 60
    assert [entry.window_number for entry in session.coverage] == list(range(1, 61))


def test_no_change_of_a_store_is_lost(monkeypatch):
    store = FactStore(2, embedding_model=MODEL)
    slowed(monkeypatch, _arrays.Growing, "write")

    def change(j):
        for i in range(6):
            store.add([f"{j}.{i}"], [f"text {j}.{i}"], [[j + 1.0, i + 1.0]])
            if i % 2:
                store.remove([f"{j}.{i - 1}"])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(change, range(6)))
    kept = store.get(store.ids)
    assert store.version == 6 * 9
    assert sorted(fact.id for fact in kept) == sorted(f"{j}.{i}" for j in range(6) for i in (1, 3, 5))
    assert all(fact.text == f"text {fact.id}" for fact in kept)
    assert [fact.sequence for fact in kept] == sorted({fact.sequence for fact in kept})
    view = store.view()
    vectors = view.take(np.flatnonzero(view.alive)).tolist()
    assert vectors == [[float(n) + 1 for n in fact.id.split(".")] for fact in kept]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "scan"])
def test_one_retriever_fills_its_index_once(kind, monkeypatch):
    store = FactStore(DIM, embedding_model=MODEL)
    store.add([f"f{i}" for i in range(30)], [""] * 30, QUERY + np.random.default_rng(2).standard_normal((30, DIM)))
    retriever = Retriever(store, kind)
    slowed(monkeypatch, retrieve_module, "_unit_rows")
    for name in ("one", "two"):
        with ThreadPoolExecutor(6) as pool:
            found = set(pool.map(lambda _: retriever.search(QUERY, min_relevance=0.2).rows.tobytes(), range(12)))
        assert len(found) == 1
        store.add([name], [""], QUERY[None])
        assert store.view().row_of(name) in retriever.search(QUERY, min_relevance=0.99).rows


def many_rows(n=6000):
    r = np.random.default_rng(1)
    entries, pulls = r.standard_normal((3, DIM)), r.standard_normal((4, DIM))
    columns = Columns.spec(QUERY, coverage=entries, depth_weights=[0.1, 0.5, 0.9], residual=pulls, min_relevance=0.1)
    return r.standard_normal((n, DIM)).astype(np.float32), columns


@pytest.mark.parametrize("impl", available_impls())
def test_many_threads_score_at_once(impl):
    rows, columns = many_rows()
    expected = bits(cdr_score(rows, columns, k=50, impl=impl))

    def score(number):
        if number % 4 == 0:
            _C.set_threads(number % 7 + 1)
        return bits(cdr_score(rows, columns, k=50, impl=impl))

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(score, range(40))) == {expected}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_ranks_with_threads_of_its_own():
    rows, columns = many_rows()
    _C.set_threads(4)
    expected = b"".join(bits(cdr_score(rows, columns, impl="cpp")))
    done = threading.Event()

    def keep_busy():
        while not done.is_set():
            cdr_score(rows, columns, impl="cpp")

    busy = threading.Thread(target=keep_busy)  # the pool is likely in use at the moment of the fork
    busy.start()
    try:
        for _ in range(3):
            assert in_child(lambda: b"".join(bits(cdr_score(rows, columns, impl="cpp")))) == expected
    finally:
        done.set()
        busy.join()
    assert b"".join(bits(cdr_score(rows, columns, impl="cpp"))) == expected


def in_child(call):
    """What call returns in a forked child that must be done within 20 seconds."""
    receive, send = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            os.close(receive)
            with os.fdopen(send, "wb") as pipe:
                pipe.write(call())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0
    return content


def test_the_number_of_threads_is_checked():
    with pytest.raises(ValueError, match="threads: expected at least 0, got -1"):
        _C.set_threads(-1)
    _C.set_threads(3)
    assert _C.threads() == 3
