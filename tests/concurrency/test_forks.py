"""A child that is forked while threads work: it finds every lock free, and what they guard whole."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref

import numpy as np
import pytest
from sessions import session_of_mode

from cdr_kernel import (
    FactStore,
    NGramGuard,
    Retriever,
    SubQuery,
    WindowReport,
    cdr_rank,
)
from cdr_kernel.concurrency._forks import Lock, Threads, cached_property, in_child
from cdr_kernel.retrieve._bm25 import LexicalIndex
from cdr_kernel.retrieve._calibration import Moments
from cdr_kernel.retrieve._window_cache import RowCache, TaskCache
from cdr_kernel.shard import ShardedRetriever, ShardedStore

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

DIM = 8
MODEL = "m1"
QUERY = np.arange(1.0, DIM + 1.0)


def in_fork(call, limit_s=10):
    """The exit status of a forked child that makes the call: 0 where it returned within this many seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(limit_s)
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Held:
    """Locks that another thread has taken, for a block."""

    def __init__(self, *locks):
        self.locks = locks
        self.taken, self.done = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hold)

    def hold(self):
        for lock in self.locks:
            lock.__enter__()
        self.taken.set()
        self.done.wait(60)
        for lock in reversed(self.locks):
            lock.__exit__(None, None, None)

    def __enter__(self):
        self.thread.start()
        assert self.taken.wait(10)

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()


def store_of(n=40, seed=0):
    store = FactStore(DIM, embedding_model=MODEL)
    random = np.random.default_rng(seed)
    words = ("pod", "service", "routes", "etcd", "node", "kubelet")
    texts = [" ".join(random.choice(words, 12)) for _ in range(n)]
    sources = [f"d{i % 4}" for i in range(n)]
    store.add([f"f{i}" for i in range(n)], texts, random.standard_normal((n, DIM)) + 1.0, source=sources)
    return store


def session_of(**settings):
    subs = [SubQuery(f"s{j}", f"S{j}", "pods and nodes", QUERY + 2.0 * np.eye(DIM)[j]) for j in range(3)]
    return session_of_mode(subs, embedding_model=MODEL, **(settings or {"min_relevance": -1.0}))


def report(session):
    return WindowReport(completeness_score=0.1, addressed=(session.residual[0].id,))


def locks_of(*roots):
    """Every lock that is reached from these objects through attributes, lists, tuples and dicts."""
    found, seen, waiting = [], set(), list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | np.ndarray | str | bytes | threading.Thread):
            continue
        seen.add(id(each))
        if isinstance(each, Lock):
            found.append(each)
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif type(each).__module__.startswith("cdr_kernel"):
            waiting += getattr(each, "__dict__", {}).values()
    return found


def everything(mode):
    """A store, its retriever and a session of a mode, each used once, and what a child does with them."""
    retriever = Retriever(store_of())
    session = session_of() if mode == "spec" else session_of(mode=mode, gate=-9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session.update(report(session), "the pods and their nodes", embedding_model=MODEL)
        cdr_rank(QUERY, retriever, session, k=5, where={"source": ["d0", "d1"]})

    def work():
        warnings.simplefilter("ignore")
        ranking = cdr_rank(QUERY, retriever, session, k=5, where={"source": ["d0", "d2"]})
        assert len(ranking) == 5
        session.update(report(session), "routes of services", embedding_model=MODEL)
        assert session.snapshot().window_count == 2
        retriever.store.remove(["f0"])
        retriever.store.upsert(["f1"], ["a new text"], [QUERY])
        assert retriever.store.get(["f1"])[0].text == "a new text"
        assert len(cdr_rank(QUERY, retriever, session)) <= 39
        retriever.prepare()

    return locks_of(retriever, session), work


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_a_child_finds_every_lock_free(mode):
    locks, work = everything(mode)
    assert len(locks) >= 8, "the store, its columns, the retriever, its caches, words, moments, the session, its guard"
    for lock in locks:
        with Held(lock):
            assert in_fork(work) == 0
    with Held(*locks):
        assert in_fork(work) == 0
    work()  # in the parent all is as before


def test_a_child_asks_the_shards_of_its_parent_with_threads_of_its_own():
    store = ShardedStore.split(store_of(), shards=3)
    retriever, session = ShardedRetriever(store), session_of()
    expected = [fact.id for fact in cdr_rank(QUERY, retriever, session, k=5).facts]
    slot = store._snapshot.groups[0].slots[0]
    slot.in_flight = 64  # as if as many requests as may be were on their way

    def work():
        assert [fact.id for fact in cdr_rank(QUERY, retriever, session, k=5).facts] == expected

    locks = locks_of(store, retriever, session)
    assert len(locks) > 10
    with Held(*locks):
        assert in_fork(work) == 0
    slot.in_flight = 0
    work()
    store.close()


def test_children_rank_while_threads_of_the_parent_rank():
    """100 forks, at moments when a thread of the parent may have any lock."""
    retriever = Retriever(store_of(400), cache_bytes=20_000)  # so small that entries go all the time
    bases = [session_of(), session_of(mode="calibrated", gate=-9.0)]
    stop = threading.Event()

    def keep_ranking(number):
        base = bases[number % 2]
        session = base.snapshot()
        while not stop.is_set():
            ranking = cdr_rank(QUERY + number, retriever, session, k=5)
            if session.window_count == 2:
                session = base.snapshot()
            session.update(report(session), ranking.facts[0].text, embedding_model=MODEL)
            retriever.store.upsert([f"f{number}"], ["pod routes"], [QUERY])

    def work():
        for base in bases:
            assert len(cdr_rank(QUERY, retriever, base.snapshot(), k=5)) == 5

    threads = [threading.Thread(target=keep_ranking, args=(i,)) for i in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # else threads seldom change in the middle of anything
    for thread in threads:
        thread.start()
    try:
        end = time.monotonic() + 10
        statuses = []
        while len(statuses) < 100 and time.monotonic() < end:
            statuses.append(in_fork(work))
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert len(statuses) > 10
    assert set(statuses) == {0}


def test_a_lock_stays_with_the_thread_that_forked():
    lock = Lock()

    def tried():
        free = []

        def take():
            with lock:
                free.append(True)

        other = threading.Thread(target=take, daemon=True)
        other.start()
        other.join(0.2)
        return bool(free)

    def work():
        assert not tried()
        with lock:
            pass
        assert not tried()
        lock.__exit__(None, None, None)
        assert tried()

    with lock, lock:
        lock.__exit__(None, None, None)
        assert in_fork(work) == 0
        lock.__enter__()
    assert tried()


def test_what_a_thread_was_changing_is_mended_in_the_child_alone():
    class Pair:
        def __init__(self):
            self.lock = Lock(self.mend)
            self.mended = 0

        def mend(self):
            self.mended += 1

    pair, free = Pair(), Pair()

    def work():
        assert (pair.mended, free.mended) == (1, 0)

    with Held(pair.lock):
        assert in_fork(work) == 0
    assert (pair.mended, free.mended) == (0, 0)


def test_a_lock_does_not_keep_alive_what_it_guards():
    cache = TaskCache()
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


@pytest.mark.parametrize("cache", [RowCache, TaskCache])
def test_a_cache_that_was_being_changed_starts_empty(cache):
    kept = cache(10_000)

    def work():
        assert kept.nbytes == 0
        if cache is TaskCache:
            kept.put("a", 1, 8)
            assert kept.get("a") == 1

    if cache is TaskCache:
        kept.put("before", 1, 8)
    else:
        kept._at_most = 10**9
    with Held(kept._lock):
        assert in_fork(work) == 0


def test_a_pool_has_threads_in_a_child():
    pool = Threads(2, "some")
    assert pool.submit(lambda: 1).result() == 1
    assert in_fork(lambda: pool.submit(lambda: 1).result(5)) == 0
    pool.shutdown()


def test_a_cached_property_is_made_in_a_child_while_the_parent_makes_it():
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self):
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                go_on.wait(10)
            return object()

    slow = Slow()
    other = threading.Thread(target=lambda: slow.value)
    other.start()
    assert begun.wait(10)
    assert in_fork(lambda: Slow().value) == 0
    go_on.set()
    other.join()
    assert slow.value is slow.value
    assert isinstance(Slow.value, cached_property)


def test_objects_that_went_are_not_called_in_a_child():
    class Counter:
        def __init__(self):
            self.calls = 0
            in_child(self.again)

        def again(self):
            self.calls += 1

    stays, goes = Counter(), Counter()
    del goes

    def work():
        assert stays.calls == 1

    assert in_fork(work) == 0
    assert stays.calls == 0


def test_copies_have_locks_of_their_own():
    session = session_of()
    twin, guard = session.snapshot(), NGramGuard()
    assert twin._lock is not session._lock
    assert guard.copy()._lock is not guard._lock
    assert copy.copy(session)._lock is not session._lock
    for made in (Moments(), LexicalIndex()):
        assert isinstance(made._lock, Lock)
