"""Shards against one store: the same ids, order, scores and breakdown, to the last bit."""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
from fact_stores import reseal
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import session_of_mode

from cdr_kernel import (
    DamagedFileError,
    EmbeddingModelMismatch,
    FactStore,
    NGramGuard,
    Retriever,
    Session,
    SubQuery,
    WindowReport,
    cdr_rank,
    explain,
    pack_facts,
    rank_many,
    run_windows,
)
from cdr_kernel.rank._explain import explain_vectors
from cdr_kernel.shard import ShardedRetriever, _messages, _sharded_store, partition
from cdr_kernel.shard import _partition as partition_module
from cdr_kernel.shard import _sharded_retriever as sharded_module
from cdr_kernel.shard._messages import Limits, ReplicaLost
from cdr_kernel.shard._partition import ShardDamaged, manifest_of, open_shard, owners
from cdr_kernel.shard._sharded_retriever import ShardedStore, ShardsMissing
from cdr_kernel.shard._sharded_store import ThreadReplica
from cdr_kernel.shard._worker import ARRAYS, Answer, Change, Reply, Request, Shard
from cdr_kernel.store import _expiry
from cdr_kernel.store import _fact_store as store_module

MODEL = "toy"
DIM = 5
WORDS = ("pod", "Services", "traffic", "storage", "volume", "kubeProxy", "the", "network", "restarts", "every", "node")


def facts(r, n, start=0, dim=DIM):
    """Keywords of an add: few directions, so that many scores tie; some facts in documents, some alone."""
    axes = r.standard_normal((4, dim)) + 0.5
    rows = np.where(r.random((n, 1)) < 0.5, axes[r.integers(0, 4, n)], r.standard_normal((n, dim)) + 0.5)
    return {
        "ids": [f"f{start + i}" for i in range(n)],
        "texts": [" ".join(r.choice(WORDS, r.integers(0, 14))) for _ in range(n)],
        "embeddings": rows,
        "importance": r.choice([0.0, 0.5, 1.0, 1.0, 2.0], n),
        "source": [None if r.random() < 0.2 else f"s{r.integers(0, 1 + n // 4)}" for _ in range(n)],
        "position": [None if r.random() < 0.1 else int(r.integers(0, 6)) for _ in range(n)],
        "attributes": {
            "language": [None if r.random() < 0.5 else str(r.choice(["en", "de"])) for _ in range(n)],
            "year": [2000 + int(r.integers(0, 3)) if r.random() < 0.06 else None for _ in range(n)],
        },
    }


def store_of(r, n, dim=DIM):
    store = FactStore(dim, embedding_model=MODEL)
    store.add(**facts(r, n, dim=dim))
    return store


def items_of(r, count=3, dim=DIM):
    return [
        SubQuery(f"q{j}", f"Q{j}", " ".join(r.choice(WORDS, 3)), r.standard_normal(dim) + 0.5) for j in range(count)
    ]


def same(ranking, truth):
    assert ranking.ids == truth.ids
    assert ranking.facts == truth.facts
    for name in ARRAYS:
        a, b = getattr(ranking, name), getattr(truth, name)
        assert (a is None) == (b is None), name
        if a is not None:
            b = np.asarray(b)  # what a store computes when it is read
            assert a.dtype == b.dtype, name
            assert a.shape == b.shape, name
            assert a.tobytes() == b.tobytes(), name
    for name in ("qualified", "guard_activations", "coverage_depth", "store_version", "newest", "new_share", "need"):
        assert getattr(ranking, name) == getattr(truth, name), name
    assert (ranking.considered, ranking.filter) == (truth.considered, truth.filter)
    assert (ranking.feedback is None) == (truth.feedback is None)
    if truth.feedback is not None:
        assert ranking.feedback.fact_ids == truth.feedback.fact_ids
        assert ranking.feedback.direction.tobytes() == truth.feedback.direction.tobytes()
    assert ranking.complete
    assert ranking.missing_shards == ()


def filter_of(r, store):
    """A filter, perhaps none: of values, of a column that few shards have, of none at all, or one flag a fact."""
    known = {"source", *store.view().attribute_names}
    given = {name: values for name, values in FILTERS.items() if name in known}
    names = [str(name) for name in r.choice([*given], min(len(given), int(r.integers(0, 3))), replace=False)]
    where = {name: given[name][int(r.integers(len(given[name])))] for name in names}
    what = r.choice(["none", "values", "values", "mask", "both"])
    if what == "none":
        return None
    mask = r.random(len(store)) < r.choice([0.0, 0.1, 0.6])
    return where if what == "values" else mask if what == "mask" else mask & store.view().where(**where)


FILTERS = {
    "source": ["s1", [None], ["s0", "s2", "s3", "nowhere"]],
    "language": ["en", ["de", None], None, []],
    "year": [2001, [2000.0, None], [2000, 2002]],
}


def change(r, store, sharded, start):
    """The same change of both; returns the first number that is free for ids."""
    what = r.choice(["nothing", "add", "remove", "upsert", "compact"])
    ids = store.ids
    some = [str(i) for i in r.choice(ids, min(len(ids), 3), replace=False)] if ids else []
    if what == "add":
        more = facts(r, int(r.integers(1, 9)), start)
        assert store.add(**more) == sharded.add(**more)
        start += 9
    elif what == "remove" and some:
        assert store.remove(some) == sharded.remove(some)
    elif what == "upsert" and some:
        more = facts(r, len(some) + 1, start)
        more["ids"] = [*some, f"f{start}"]
        assert store.upsert(**more) == sharded.upsert(**more)
        start += 1
    elif what == "compact":
        assert store.compact() == sharded.compact()
    assert sharded.version == store.version
    assert len(sharded) == len(store)
    return start


SPEC = st.fixed_dictionaries(
    {
        "min_relevance": st.sampled_from([-1.0, 0.2, 0.55, 0.9]),
        "first_window_pull": st.booleans(),
        "clamp_novelty": st.booleans(),
        "exclude_packed": st.booleans(),
        "guard": st.sampled_from(["none", "hashes", "exact", "bounded"]),
    }
)
CALIBRATED = st.fixed_dictionaries(
    {
        "mode": st.just("calibrated"),
        "gate": st.sampled_from([-9.0, 0.0, 0.7, 2.0]),
        "min_qualified": st.sampled_from([0, 5, 20, 200]),
        "gate_on": st.sampled_from(["best", "query"]),
        "lexical_weight": st.sampled_from([0.0, 0.25]),
        "feedback_weight": st.sampled_from([0.0, 0.4]),
        "lexical_feedback_weight": st.sampled_from([0.0, 0.5]),
        "source_weight": st.sampled_from([0.0, 0.4]),
        "packed_penalty": st.sampled_from([0.0, 0.5, 1.0]),
        "centred_coverage": st.booleans(),
        "guard": st.sampled_from(["none", "hashes"]),
    }
)


def session_of(items, keywords):
    guards = {
        "none": lambda: False,
        "hashes": lambda: NGramGuard(2),
        "exact": lambda: NGramGuard(2, exact=True),
        "bounded": lambda: NGramGuard(2, max_ngrams=12),
    }
    keywords = {**keywords, "guard": guards[keywords["guard"]]()}
    if keywords.get("source_weight"):
        keywords["feedback_weight"] = keywords["lexical_feedback_weight"] = 0.0
    return session_of_mode(items, embedding_model=MODEL, **keywords)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.sampled_from([0, 1, 7, 60]),
    shards=st.integers(1, 9),
    k=st.sampled_from([None, 0, 1, 3, 100]),
    keywords=st.one_of(SPEC, CALIBRATED),
    factors=st.sampled_from([None, "mapping", "array"]),
    filtered=st.booleans(),
)
def test_windows_are_those_of_one_store(seed, n, shards, k, keywords, factors, filtered):
    r = np.random.default_rng(seed)
    store, items, query = store_of(r, n), items_of(r), r.standard_normal(DIM) + 0.5
    store.remove([id for i, id in enumerate(store.ids) if i % 13 == 12])
    store.compact()
    with ShardedStore.split(store, shards=shards) as sharded:
        assert sharded.ids == store.ids
        session, retriever, elsewhere = session_of(items, keywords), Retriever(store), ShardedRetriever(sharded)
        start = 1000
        for _ in range(4):
            multiplier = None
            if factors == "mapping":
                multiplier = dict.fromkeys(store.ids[::3], 0.5)
            elif factors == "array":
                multiplier = r.choice([0.0, 0.5, 1.0], len(store))
            where = filter_of(r, store) if filtered else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # few facts reach the gate
                truth = cdr_rank(query, retriever, session, k=k, multiplier=multiplier, where=where)
                ranking = cdr_rank(query, elsewhere, session, k=k, multiplier=multiplier, where=where)
            same(ranking, truth)
            envelope = pack_facts(truth, 4, count_tokens=lambda text: 1)
            j = int(r.integers(len(items)))
            report = WindowReport(0.5, (f"q{j}",), {f"q{j}": float(r.choice([0.0, 0.3, 0.9]))}, embedding_model=MODEL)
            session.update(report, envelope.text, envelope=envelope)
            start = change(r, store, sharded, start)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), shards=st.integers(1, 9))
def test_several_sessions_at_once(seed, shards):
    r = np.random.default_rng(seed)
    store = store_of(r, 50)
    sessions = [
        Session(items_of(r), embedding_model=MODEL, min_relevance=0.1),
        Session.calibrated(items_of(r), embedding_model=MODEL, gate=0.3),
        Session(items_of(r), embedding_model=MODEL, exclude_packed=True),
    ]
    queries = r.standard_normal((3, DIM)) + 0.5
    with ShardedStore.split(store, shards=shards, by="id") as sharded:
        elsewhere = ShardedRetriever(sharded)
        for _ in range(2):
            truth = rank_many(queries, Retriever(store), sessions)
            for a, b in zip(rank_many(queries, elsewhere, sessions), truth, strict=True):
                same(a, b)
            for session, ranking in zip(sessions, truth, strict=True):
                envelope = pack_facts(ranking, 3, count_tokens=lambda text: 1)
                session.update(WindowReport(0.1, ("q1",), embedding_model=MODEL), envelope.text, envelope=envelope)


@pytest.fixture
def world(tmp_path):
    r = np.random.default_rng(7)
    store_of(r, 80).save(tmp_path / "store")
    return FactStore.load(tmp_path / "store"), items_of(r), r.standard_normal(DIM) + 0.5


def spec(items, **keywords):
    return session_of_mode(items, embedding_model=MODEL, **{"min_relevance": 0.3, **keywords})


def calibrated(items, **keywords):
    return Session.calibrated(items, embedding_model=MODEL, gate=0.0, **keywords)


def written(session, ranking, text=None):
    envelope = pack_facts(ranking, 3, count_tokens=lambda text: 1)
    report = WindowReport(0.2, ("q1",), embedding_model=MODEL)
    session.update(report, envelope.text if text is None else text, envelope=envelope)


def test_run_windows_is_the_same_loop(world):
    store, items, query = world
    seen = []
    with ShardedStore.split(store, shards=3) as sharded:
        for retriever in (Retriever(store), ShardedRetriever(sharded)):
            for session in (spec(items, max_windows=3), calibrated(items, max_windows=3)):
                windows = run_windows(
                    lambda prompt: prompt.envelope.text,
                    query,
                    retriever,
                    session,
                    token_budget=60,
                    k=5,
                    assess=lambda output: WindowReport(0.1, ("q0",)),
                )
                seen.append([(w.headers, w.exit, w.envelope.ranking.ids, w.prompt.anchor) for w in windows])
    assert seen[:2] == seen[2:]
    assert len(seen[0]) == 3


def test_a_partition_on_disk(world, tmp_path):
    store, items, query = world
    partition(tmp_path / "store", tmp_path / "shards", shards=4)
    truth = cdr_rank(query, Retriever(store), spec(items))
    with ShardedStore.open(tmp_path / "shards") as sharded:
        assert sharded.shards == ["shard-0", "shard-1", "shard-2", "shard-3"]
        ranking = cdr_rank(query, ShardedRetriever(sharded), spec(items))
        assert (ranking.ids, ranking.score.tobytes()) == (truth.ids, truth.score.tobytes())
        more = facts(np.random.default_rng(1), 5, 500)
        sharded.add(**more)
        store.add(**more)
        sharded.remove(["f3"])
        store.remove(["f3"])
        assert manifest_of(tmp_path / "shards")["facts"] == 80
        sharded.save()
        assert all(group.base == group.version for group in sharded.groups)
        sharded.save(tmp_path / "copy")
    for home in ("shards", "copy"):
        with ShardedStore.open(tmp_path / home) as again:
            assert again.ids == store.ids
            assert again.version == 2
            assert [f.sequence for f in again.get(["f500", "f0"])] == [80, 0]
            again.add(["new"], ["x"], [query])
            assert again.get(["new"])[0].sequence == 85


def test_sources_stay_together_and_ids_spread(world):
    store, _, _ = world
    for by in ("source", "id"):
        with ShardedStore.split(store, shards=5, by=by) as sharded:
            places = {}
            for group in sharded.groups:
                shard = group.slots[0].replica._shard
                for fact in shard.store.get(shard.store.ids):
                    places.setdefault(fact.source, set()).add(group.name)
            places.pop(None)
            assert all(len(names) == 1 for names in places.values()) == (by == "source")


def test_owners_move_only_to_what_was_added():
    keys = [f"k{i}" for i in range(20000)]
    four, five = owners(keys, list("abcd")), owners(keys, list("abcde"))
    assert set(five[four != five]) == {4}
    assert np.bincount(five).min() > 3700
    assert owners(keys[:5], list("abcd")).tolist() == [1, 3, 0, 0, 1]  # written down: what is on disk depends on it


@pytest.mark.parametrize("on_disk", [False, True])
def test_shards_are_added(world, tmp_path, on_disk):
    store, items, query = world
    if on_disk:
        partition(store, tmp_path / "p", shards=2)
    with ShardedStore.open(tmp_path / "p") if on_disk else ShardedStore.split(store, shards=2) as sharded:
        retriever, sessions = ShardedRetriever(sharded), [spec(items), calibrated(items, source_weight=0.4)]
        for session in sessions:
            written(session, cdr_rank(query, Retriever(store), session))
        before = [cdr_rank(query, retriever, session) for session in sessions]
        version = sharded.version
        moved = sharded.add_shards(3)
        assert sharded.shards == [f"shard-{i}" for i in range(5)]
        assert 0 < moved < 80
        assert sharded.version == version
        assert sharded.ids == store.ids
        for session, ranking in zip(sessions, before, strict=True):
            same(cdr_rank(query, retriever, session), ranking)
        more = facts(np.random.default_rng(1), 20, 500)
        store.add(**more)
        sharded.add(**more)
        for session in sessions:
            same(cdr_rank(query, retriever, session), cdr_rank(query, Retriever(store), session))
        sizes = [len(group.slots[0].replica._shard.store) for group in sharded.groups]
        assert sum(sizes) == 100
        assert all(sizes[2:])
    if on_disk:
        with ShardedStore.open(tmp_path / "p") as again:
            assert len(again.shards) == 5
            assert set(store.ids) - set(again.ids) == set(more["ids"])  # added after the save


class Lost(ThreadReplica):
    """A replica whose answers a test may take over: before(request) may raise or wait, after(request, reply) change."""

    before = staticmethod(lambda request: None)
    after = staticmethod(lambda request, reply: reply)
    restarts = 0

    def _answer(self, request):
        self.before(request)
        return self.after(request, super()._answer(request))

    def restart(self):
        self.restarts += 1
        super().restart()


@pytest.fixture
def faulty(world, tmp_path):
    """A store of three shards with two replicas each, whose requests may fail."""
    store, _, _ = world
    home = tmp_path / "p"
    partition(store, home, shards=3)
    pool = ThreadPoolExecutor(8)

    def start(name):
        return [Lost(lambda: Shard(*open_shard(home, name)), pool) for _ in range(2)]

    sharded = ShardedStore.of_manifest(
        home, manifest_of(home), start, tokenizer=None, hash_key=None, limits=Limits(timeout=5.0), pool=pool
    )
    yield sharded
    sharded.close()


def replicas(sharded, shard=1):
    return [slot.replica for slot in sharded.groups[shard].slots]


def fails(times):
    left = [times]

    def before(request):
        if left[0]:
            left[0] -= 1
            raise ReplicaLost

    return before


def test_a_lost_replica_is_asked_again(world, faulty):
    store, items, query = world
    for replica in replicas(faulty):
        replica.before = fails(2)
    same(
        cdr_rank(query, ShardedRetriever(faulty), calibrated(items)),
        cdr_rank(query, Retriever(store), calibrated(items)),
    )
    assert faulty.counts.retries >= 4


def test_enough_facts_qualify_over_all_shards(world):
    store, items, query = world
    with ShardedStore.split(store, shards=3) as sharded:
        elsewhere, here = ShardedRetriever(sharded), Retriever(store)
        for least in (0, 50, 70, 1000):
            session = Session.calibrated(items, embedding_model=MODEL, gate=1.5, min_qualified=least)
            for window in range(3):
                ranking = cdr_rank(query, elsewhere, session, k=30)
                same(ranking, cdr_rank(query, here, session, k=30))
                if not window:
                    assert ranking.qualified >= min(least, len(store))  # and what ties
                written(session, ranking)


class Clock:
    """Time that passes only while somebody sleeps: whoever answers does so in none, however busy the machine is."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0.0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (_messages, sharded_module, _sharded_store):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(_messages, "wait", lambda futures, timeout, return_when: wait(futures, return_when=return_when))
    return clock


@pytest.mark.parametrize("method", ["rank", "numbered", "moments", "best", "best_gated"])
def test_a_shard_that_stays_away_is_named(world, faulty, clock, method):
    store, items, query = world
    faulty.limits.timeout = 4.0
    gone = {fact.id for fact in replicas(faulty)[0]._shard.store.get(replicas(faulty)[0]._shard.store.ids)}

    def before(request):
        if request.method == method:
            raise ReplicaLost

    for replica in replicas(faulty):
        replica.before = before
    session = calibrated(items, min_qualified=1000 if method == "best_gated" else 0)
    ranking = cdr_rank(query, ShardedRetriever(faulty), session, k=300)
    assert not ranking.complete
    assert ranking.missing_shards == ("shard-1",)
    assert ranking.newest == -1  # a session that ends with this ranking may ask again
    assert 0 < len(ranking) < 70
    assert not gone & set(ranking.ids)
    assert faulty.counts.missing == 1
    assert 3.0 <= clock.now < 3.1  # three quarters of what there was
    for replica in replicas(faulty):
        replica.before = fails(0)
    faulty.limits.timeout = 5.0
    same(cdr_rank(query, ShardedRetriever(faulty), session), cdr_rank(query, Retriever(store), session))


def test_an_incomplete_ranking_may_be_refused(world, faulty, clock):
    _, items, query = world
    faulty.limits.timeout = 0.5
    for replica in replicas(faulty):
        replica.before = fails(10**9)
    with pytest.raises(ShardsMissing, match="shard-1") as caught:
        cdr_rank(query, ShardedRetriever(faulty, partial=False), spec(items))
    assert caught.value.names == ("shard-1",)


def test_all_shards_away(world, faulty, clock):
    _, items, query = world
    faulty.limits.timeout = 0.2
    for shard in range(3):
        for replica in replicas(faulty, shard):
            replica.before = fails(10**9)
    for session in (spec(items), calibrated(items)):
        ranking = cdr_rank(query, ShardedRetriever(faulty), session)
        assert (len(ranking), ranking.qualified, ranking.complete) == (0, 0, False)
        assert ranking.missing_shards == ("shard-0", "shard-1", "shard-2")
        assert len(pack_facts(ranking, 10).facts) == 0
        with pytest.raises(TimeoutError, match="no answer came in time from 'shard-0', 'shard-1', 'shard-2'"):
            session.exit(envelope=pack_facts(ranking, 10))  # what is not known is no exhaustion
    with pytest.raises(ShardsMissing):
        faulty.add(["x"], ["x"], [query])
    assert len(faulty) == 80


def test_numbers_that_cannot_be_are_not_believed(world, faulty):
    store, items, query = world
    session = spec(items)

    def broken(value):
        score = value[0].arrays["score"].copy()
        score[:1] = np.nan
        return [Answer(**{**vars(value[0]), "arrays": {**value[0].arrays, "score": score}})]

    for replica in replicas(faulty):
        left = [1]

        def after(request, reply, left=left):
            if request.method == "rank" and left[0]:
                left[0] -= 1
                return Reply(reply.status, reply.version, broken(reply.value))
            return reply

        replica.after = after
    same(cdr_rank(query, ShardedRetriever(faulty), session), cdr_rank(query, Retriever(store), session))
    assert sum(replica.restarts for replica in replicas(faulty)) == 2


def test_a_restarted_replica_is_told_what_it_missed(world, faulty):
    store, items, query = world
    session, retriever = spec(items), ShardedRetriever(faulty)
    written(session, cdr_rank(query, retriever, session), "every pod node traffic network storage")
    more = facts(np.random.default_rng(3), 12, 900)
    for each in (store, faulty):
        each.add(**more)
        each.remove(["f1", "f900"])
    truth = cdr_rank(query, Retriever(store), session)
    same(cdr_rank(query, retriever, session), truth)
    before = faulty.counts.resyncs
    for shard in range(3):
        for replica in replicas(faulty, shard):
            ThreadReplica.restart(replica)  # forgets changes, sessions and blacklists; nobody is told
    same(cdr_rank(query, retriever, session), truth)
    assert faulty.counts.resyncs >= before + 3
    written(session, truth, "the network of every node")
    same(cdr_rank(query, retriever, session), cdr_rank(query, Retriever(store), session))


def test_an_old_blacklist_is_noticed(world, faulty):
    store, items, query = world
    session, retriever = spec(items, guard=NGramGuard(1)), ShardedRetriever(faulty)
    for text in ("every pod", "node traffic"):
        written(session, cdr_rank(query, retriever, session), text)
        for shard in range(3):
            for replica in replicas(faulty, shard):
                for known in replica._shard._sessions.values():
                    known.guard, known.digest = NGramGuard(1), "another"
        same(cdr_rank(query, retriever, session), cdr_rank(query, Retriever(store), session))


def test_later_windows_are_sent_new_hashes_alone(world, faulty):
    _, items, query = world
    session, retriever = spec(items), ShardedRetriever(faulty)
    sent = []
    for replica in replicas(faulty):
        replica.before = lambda request: sent.extend(request.args[0] if request.method == "rank" else ())
    for group in faulty.groups:
        del group.slots[1:]
    for i in range(4):
        written(session, cdr_rank(query, retriever, session), f"window {i} says something else than others said {i}")
    assert [ask.session is not None for ask in sent] == [True, False, False, False]
    assert sent[0].blacklist.state is not None
    assert [len(ask.blacklist.hashes) for ask in sent[1:]] == [4, 3, 3]
    assert len(session.guard) == 13


def test_shards_on_devices_beside_shards_that_scan(world, tmp_path):
    store, items, query = world
    partition(store, tmp_path / "shards", shards=3)
    for device, dtype in (("cpu", "float16"), ({"shard-1": "cpu"}, None)):
        sharded = ShardedStore.open(tmp_path / "shards", device=device, device_dtype=dtype)
        for session in (spec(items), calibrated(items)):
            found = cdr_rank(query, ShardedRetriever(sharded), session, k=20)
            same(found, cdr_rank(query, Retriever(store), session, k=20))
        sharded.add_shards(1)
        same(cdr_rank(query, ShardedRetriever(sharded), spec(items)), cdr_rank(query, Retriever(store), spec(items)))
        sharded.close()
        partition(store, tmp_path / "shards", shards=3)
    with pytest.raises(KeyError, match=r"device: expected names of shards .*shard-0.*, got shard-9"):
        ShardedStore.open(tmp_path / "shards", device={"shard-9": "cuda"})


def test_a_slow_replica_is_hedged(world, faulty):
    store, items, query = world
    release = threading.Event()
    faulty.limits.hedge_after = 0.05
    replicas(faulty)[0].before = lambda request: release.wait(4.0)
    started = time.monotonic()
    same(cdr_rank(query, ShardedRetriever(faulty), spec(items)), cdr_rank(query, Retriever(store), spec(items)))
    assert faulty.counts.hedges >= 1
    assert time.monotonic() - started < 4.0
    release.set()


def test_a_replica_has_no_more_requests_than_allowed(world, faulty):
    store, items, query = world
    faulty.limits.max_in_flight = 2
    lock, now, most = threading.Lock(), [0], [0]
    for group in faulty.groups:
        del group.slots[1:]

    def before(request):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)

    def after(request, reply):
        with lock:
            now[0] -= 1
        return reply

    replica = replicas(faulty)[0]
    replica.before, replica.after = before, after
    truth = cdr_rank(query, Retriever(store), spec(items))
    with ThreadPoolExecutor(8) as pool:
        for ranking in pool.map(lambda _: cdr_rank(query, ShardedRetriever(faulty), spec(items)), range(16)):
            same(ranking, truth)
    assert most[0] == 2
    assert faulty.counts.waits > 0


def test_a_failed_submit_counts_as_an_answer(world, faulty):
    store, items, query = world
    first = replicas(faulty)[0]
    first.submit = lambda request: (_ for _ in ()).throw(ReplicaLost)
    same(cdr_rank(query, ShardedRetriever(faulty), spec(items)), cdr_rank(query, Retriever(store), spec(items)))
    assert faulty.groups[1].slots[0].in_flight == 0


def test_an_error_of_a_shard_is_raised(world, faulty):
    _, items, query = world

    def before(request):
        raise OSError("the disk is gone")

    replicas(faulty)[0].before = before
    with pytest.raises(OSError, match="the disk is gone"):
        cdr_rank(query, ShardedRetriever(faulty), spec(items))


def test_rankings_go_on_while_facts_and_shards_come_and_go(world, tmp_path):
    store, items, query = world
    versions = {}
    lock = threading.Lock()
    home = tmp_path / "p"
    partition(store, home, shards=2)
    with ShardedStore.open(home, replicas=2) as sharded:
        retriever = ShardedRetriever(sharded)

        def record():
            with lock:
                truth = cdr_rank(query, Retriever(store), spec(items))
                versions[store.version] = (truth.ids, truth.score.tobytes())

        record()
        seen, stop = [], threading.Event()

        def rank():
            while not stop.is_set():
                ranking = cdr_rank(query, retriever, spec(items))
                assert ranking.complete
                seen.append((ranking.store_version, (ranking.ids, ranking.score.tobytes())))

        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(rank) for _ in range(3)]
            for i in range(30):
                more = facts(np.random.default_rng(i), 2, 1000 + 2 * i)
                store.add(**more)
                record()
                sharded.add(**more)
                if i % 3 == 0:
                    store.remove([store.ids[i]])
                    record()
                    sharded.remove([sharded.ids[i]])
                if i in (10, 20):
                    sharded.add_shards(1)
            stop.set()
            for future in running:
                future.result()
    assert len({version for version, _ in seen}) > 3
    assert all(versions[version] == result for version, result in seen)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    shards=st.integers(1, 5),
    keywords=st.one_of(SPEC, CALIBRATED),
    factors=st.sampled_from([None, "mapping", "array"]),
    room=st.sampled_from([{}, {"max_facts": 4}, {"token_budget": 60, "max_facts": 9}]),
)
def test_an_explanation_is_that_of_one_store(seed, shards, keywords, factors, room):
    r = np.random.default_rng(seed)
    store, items, query = store_of(r, 40), items_of(r), r.standard_normal(DIM) + 0.5
    session = session_of(items, keywords)
    with ShardedStore.split(store, shards=shards) as sharded, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few facts reach the gate
        here, elsewhere = Retriever(store), ShardedRetriever(sharded)
        multiplier = {
            None: None,
            "mapping": dict.fromkeys(store.ids[::3], 0.5),
            "array": r.choice([0.0, 0.5, 1.0], len(store)),
        }[factors]
        for _ in range(2):
            ranking = cdr_rank(query, here, session, multiplier=multiplier)
            for id in {*ranking.ids[:1], *ranking.ids[6:7], *(str(id) for id in r.choice(store.ids, 2))}:
                truth = explain(query, here, session, id, multiplier=multiplier, **room)
                found = explain(query, elsewhere, session, id, multiplier=multiplier, **room)
                assert found.as_dict() == truth.as_dict()
                assert found.fact == truth.fact
                assert str(found) == str(truth)
            written(session, ranking)


def test_an_explanation_needs_all_shards_and_the_fact(world, faulty, clock):
    store, items, query = world
    retriever = ShardedRetriever(faulty)
    with pytest.raises(KeyError, match="fact_id: 'nothing' is not in the store"):
        explain(query, retriever, spec(items), "nothing")
    with pytest.raises(TypeError, match="fact_id"):
        explain(query, retriever, spec(items), 3)
    truth = explain_vectors(query, Retriever(store), "f3", coverage=[query], depth_weights=[0.5])
    found = explain_vectors(query, retriever, "f3", coverage=[query], depth_weights=[0.5])
    assert found.as_dict() == truth.as_dict()
    changed = [1]

    def change(request):  # between two questions of one explanation
        if changed and request.method == "rank":
            changed.pop()
            faulty.remove(["f5"])

    replicas(faulty, 0)[0].before = replicas(faulty, 0)[1].before = change
    store.remove(["f5"])
    assert explain(query, retriever, spec(items), "f3").as_dict() == (
        explain(query, Retriever(store), spec(items), "f3").as_dict()
    )
    assert not changed
    for method in ("copied", "rank", "added"):
        for replica in replicas(faulty, 0) + replicas(faulty, 1) + replicas(faulty, 2):
            replica.before = fails(0)

        def before(request, method=method):
            if request.method == method:
                raise ReplicaLost

        shard = next(i for i, group in enumerate(faulty.groups) if group.name == faulty._find(["f3"])["f3"])
        for replica in replicas(faulty, shard):
            replica.before = before
        with pytest.raises(ShardsMissing, match=f"shard-{shard}"):
            explain(query, retriever, calibrated(items), "f3")


def test_what_does_not_fit_is_refused_as_by_one_store(world, tmp_path):
    store, items, query = world
    with ShardedStore.split(store, shards=3) as sharded, ShardedStore.split(store, shards=3, by="id") as by_id:
        for each in (sharded, by_id):
            for call, error, message in (
                (lambda s: s.add(["f1", "new"], ["x"] * 2, [query] * 2), ValueError, "'f1' in the store already"),
                (lambda s: s.add(["a", "a"], ["x"] * 2, [query] * 2), ValueError, "more than once"),
                (lambda s: s.add(["a"], ["x"], [[np.nan] * DIM]), ValueError, "not finite"),
                (lambda s: s.add(["a"], ["x"], [query], importance=[-1.0]), ValueError, "importance"),
                (lambda s: s.add(["a"], ["x"], [query], sequence=[5]), ValueError, "at least 80"),
                (lambda s: s.remove(["f1", "no"]), KeyError, "'no' not in the store"),
                (lambda s: s.remove("f1"), TypeError, "one str"),
                (lambda s: s.remove([3]), TypeError, "int at 0"),
                (lambda s: s.remove(["f1"], missing="what"), ValueError, "missing"),
                (lambda s: s.get(["no"]), KeyError, "'no' not in the store"),
                (lambda s: s.save(), ValueError, "home"),
                (lambda s: s.add_shards(0), ValueError, "shards"),
            ):
                with pytest.raises(error, match=message):
                    call(each)
            assert each.version == store.version
            assert each.ids == store.ids
            assert "f1" in each
            assert "no" not in each
            assert 3 not in each
            assert each.remove(["no"], missing="ignore") == 0
            assert each.add(["bad"], ["x"], [[0.0] * DIM], on_invalid="skip").skipped == ("bad",)
        retriever = ShardedRetriever(sharded)
        other = Session(items, embedding_model="other")
        with pytest.raises(EmbeddingModelMismatch, match=f"the session is of 'other', the store of '{MODEL}'"):
            cdr_rank(query, retriever, other)
        with pytest.raises(ValueError, match="fingerprint"):
            cdr_rank(query, retriever, spec(items, guard=NGramGuard(hash_key=b"x")))
        with pytest.raises(ValueError, match="dimension 5"):
            cdr_rank([1.0, 2.0], retriever, spec(items_of(np.random.default_rng(0), dim=2)))
        with pytest.raises(ValueError, match="dimension 5"):
            cdr_rank([1.0, 2.0], retriever, calibrated(items_of(np.random.default_rng(0), dim=2)))
        with pytest.raises(ValueError, match="expected 80 entries"):
            cdr_rank(query, retriever, spec(items), multiplier=[1.0])
        with pytest.raises(ValueError, match="multiplier"):
            cdr_rank(query, retriever, spec(items), multiplier={"f1": -1.0})
        with pytest.raises(KeyError, match="multiplier: 'f-1', 'no' not in the store"):
            cdr_rank(query, retriever, spec(items), multiplier={"f-1": 2.0, "f1": 2.0, "no": 0.5})
        with pytest.raises(ValueError, match="by='source'"):
            cdr_rank(query, ShardedRetriever(by_id), calibrated(items, source_weight=0.4))
    with pytest.raises(TypeError, match="ShardedStore"):
        ShardedRetriever(store)
    with pytest.raises(TypeError, match="Retriever"):
        cdr_rank(query, store, spec(items))
    retriever = Retriever(store)
    with pytest.raises(TypeError, match="store: expected a FactStore, got Retriever"):
        ShardedStore.split(retriever, shards=2)
    with pytest.raises(TypeError, match="home: expected the path of a folder or a Home, got FactStore"):
        ShardedStore.open(store)
    with pytest.raises(TypeError, match=r"store: expected a FactStore, the path of a saved one .*, got Retriever"):
        partition(retriever, tmp_path / "shards", shards=2)
    with pytest.raises(TypeError, match="home: expected the path of a folder or a Home, got Retriever"):
        partition(store, retriever, shards=2)
    for bad, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="shards"):
            ShardedStore.split(store, shards=bad)
    with pytest.raises(ValueError, match="by"):
        ShardedStore.split(store, shards=2, by="text")
    for name, value in (("timeout", 0), ("hedge_after", -1.0), ("max_in_flight", 0), ("timeout", float("nan"))):
        with pytest.raises(ValueError, match=name):
            ShardedStore.split(store, shards=2, **{name: value})
    with pytest.raises(TypeError, match="max_in_flight"):
        ShardedStore.split(store, shards=2, max_in_flight=1.5)


def test_a_partition_goes_into_no_folder_of_others(world, tmp_path):
    store, _, _ = world
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="expected a partition or an empty folder, found other files"):
        partition(store, mine, shards=2)
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]
    for _ in range(2):  # a partition is replaced
        partition(store, tmp_path / "new", shards=2)


@pytest.mark.parametrize(("shards", "by"), [(1, "source"), (2, "id"), (7, "source")])
def test_a_partition_of_a_partition(world, tmp_path, shards, by):
    store, items, query = world
    partition(store, tmp_path / "p", shards=4)
    with ShardedStore.open(tmp_path / "p") as sharded:
        more = facts(np.random.default_rng(1), 30, 500)
        for each in (store, sharded):
            each.add(**more)
            each.remove(["f7", "f529"])
            each.compact()
        sharded.save()
        version = sharded.version
    partition(tmp_path / "p", tmp_path / "q", shards=shards, by=by)
    partition(store, tmp_path / "whole", shards=shards, by=by)
    with ShardedStore.open(tmp_path / "q") as sharded, ShardedStore.open(tmp_path / "whole") as whole:
        assert (len(sharded.shards), sharded.by, sharded.version) == (shards, by, version)
        assert sharded.get(sharded.ids) == store.get(store.ids)
        assert sharded.attribute_types == store.view().attribute_types
        for group, other in zip(sharded.groups, whole.groups, strict=True):
            parts = [each.slots[0].replica._shard.store for each in (group, other)]
            assert parts[0].ids == parts[1].ids
        for session in (spec(items), calibrated(items)):
            same(cdr_rank(query, ShardedRetriever(sharded), session), cdr_rank(query, Retriever(store), session))
        for each in (sharded, store):
            each.add(["new"], ["x"], [query])
        assert sharded.get(["new"]) == store.get(["new"])


def test_a_damaged_partition_is_refused(world, tmp_path):
    store, _, _ = world
    with pytest.raises(FileNotFoundError, match="partition"):
        ShardedStore.open(tmp_path)
    partition(store, tmp_path / "p", shards=2)
    path = tmp_path / "p" / "partition.json"
    stores = manifest_of(tmp_path / "p")["stores"]
    for change, message in (
        ({"shards": {}}, "expected a version for every shard"),
        ({"shards": {"shard-0": 0, "shard-1": -1}}, "expected a version for every shard"),
        ({"by": "text"}, "by: expected one of"),
        ({"dim": "5"}, "expected dim to be int"),
        ({"shards": {"shard-0": 0, "shard-3": 0}}, "expected the store of every shard"),
        ({"stores": 5}, "expected the store of every shard"),
        ({"attributes": {"year": "date"}}, "types of attributes"),
        ({"attributes": None}, "expected attributes to be dict"),
        ({"stores": {**stores, "shard-1": stores["shard-0"]}}, "not the store that the partition was made of"),
    ):
        good = path.read_bytes()
        reseal(path, **change)
        with pytest.raises(ValueError, match=message):
            ShardedStore.open(tmp_path / "p")
        path.write_bytes(good)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError):
        partition(store, tmp_path / "file", shards=2)


def flip(path, at=-1, bit=4):
    written = bytearray(path.read_bytes())
    written[at] ^= bit
    path.write_bytes(written)


def test_a_flipped_bit_of_the_manifest_gives_no_other_partition(world, tmp_path):
    store, items, query = world
    partition(store, tmp_path / "p", shards=2)
    path = tmp_path / "p" / "partition.json"
    good, told = path.read_bytes(), manifest_of(tmp_path / "p")
    for at in range(len(good)):
        for bit in (1, 2, 4, 16, 128):
            flip(path, at, bit)
            with suppress(ValueError):
                assert manifest_of(tmp_path / "p") == told
            path.write_bytes(good)
    path.write_bytes(good.replace(b'"next_sequence": ', b'"next_sequence": 9'))
    with pytest.raises(ValueError, match=r"partition\.json: not as it was written"):
        ShardedStore.open(tmp_path / "p")
    with pytest.raises(ValueError, match=r"partition\.json: not as it was written"):
        partition(tmp_path / "p", tmp_path / "q", shards=3)
    path.write_bytes(good)
    with ShardedStore.open(tmp_path / "p") as sharded:
        same(cdr_rank(query, ShardedRetriever(sharded), spec(items)), cdr_rank(query, Retriever(store), spec(items)))


def shard_folder(home, name="shard-1"):
    return home / manifest_of(home)["data"] / name


def test_a_flipped_bit_in_any_file_of_a_shard_is_named(world, tmp_path, monkeypatch):
    store, _, _ = world
    home = tmp_path / "p"
    partition(store, home, shards=3)
    folder = shard_folder(home)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "save.lock" and path.stat().st_size]
    assert {"embeddings.npy", "texts.utf8", "manifest.json", "attribute-0.json"} <= {path.name for path in files}
    for path in files:
        for at in (0, path.stat().st_size // 2, -1):
            flip(path, at)
            with pytest.raises(ShardDamaged, match="shard-1 is damaged") as caught:
                ShardedStore.open(home)
            assert path.name in str(caught.value)
            flip(path, at)
    (path,) = folder.glob("data-*/texts.utf8")
    path.rename(tmp_path / "texts.utf8")
    with pytest.raises(ShardDamaged, match=r"shard-1 is damaged.*texts\.utf8"):
        ShardedStore.open(home)
    (tmp_path / "texts.utf8").rename(path)
    flip(path)
    monkeypatch.setattr(store_module, "_AT_ONCE", 0)
    monkeypatch.setattr(store_module, "_check_behind", lambda files: None)
    with ShardedStore.open(home, verify=False) as sharded:  # checks what is read alone
        assert sharded.ids == store.ids
        with pytest.raises(DamagedFileError, match=r"texts\.utf8: block 0"):
            sharded.get(store.ids)
    flip(path)
    with ShardedStore.open(home) as sharded:
        assert sharded.ids == store.ids
        sharded.save(tmp_path / "again")
    flip(next(shard_folder(tmp_path / "again").glob("data-*/ids.utf8")))
    with pytest.raises(ShardDamaged, match=r"shard-1.*ids\.utf8"):
        ShardedStore.open(tmp_path / "again")


def test_damaged_codes_of_a_shard_are_made_again(tmp_path, monkeypatch):
    r = np.random.default_rng(5)
    store, items, query = store_of(r, 300), items_of(r), r.standard_normal(DIM) + 0.5
    monkeypatch.setattr(partition_module, "WORTH_CODES", 50)
    partition(store, tmp_path / "p", shards=2)
    folder = shard_folder(tmp_path / "p")
    (codes,) = (path for path in folder.glob("scan-*") if path.is_dir())
    ShardedStore.open(tmp_path / "p").close()
    shutil.copytree(tmp_path / "p", tmp_path / "q")
    for home, file in (("p", max(codes.iterdir(), key=lambda path: path.stat().st_size)), ("q", folder / "scan.json")):
        place = tmp_path / home / file.relative_to(tmp_path / "p")
        place.write_bytes(place.read_bytes().replace(b"0x1", b"0x2")) if home == "q" else flip(place)
        with ShardedStore.open(tmp_path / home) as sharded:
            with pytest.warns(UserWarning, match=r"as it was written.*; the codes are made again"):
                ranking = cdr_rank(query, ShardedRetriever(sharded), spec(items))
            same(ranking, replace(cdr_rank(query, Retriever(store), spec(items)), store_version=0))


def test_a_whole_replica_answers_for_a_damaged_one(world, faulty):
    store, items, query = world
    truth = cdr_rank(query, Retriever(store), spec(items))

    def before(request):
        raise ShardDamaged("shard-1 is damaged: texts.utf8")

    first, second = replicas(faulty)
    first.before = before
    for _ in range(4):
        same(cdr_rank(query, ShardedRetriever(faulty), spec(items)), truth)
    assert faulty.counts.last_error == "shard-1: shard-1 is damaged: texts.utf8"
    more = facts(np.random.default_rng(1), 9, 500)
    for each in (store, faulty):
        each.add(**more)
    same(cdr_rank(query, ShardedRetriever(faulty), spec(items)), cdr_rank(query, Retriever(store), spec(items)))
    first.before = fails(0)
    second.before = before  # the first one was mended, and must be told what it missed
    same(cdr_rank(query, ShardedRetriever(faulty), spec(items)), cdr_rank(query, Retriever(store), spec(items)))
    first.before = before
    with pytest.raises(ShardDamaged, match=r"texts\.utf8"):
        cdr_rank(query, ShardedRetriever(faulty), spec(items))


def test_a_blacklist_that_was_merged_wrongly_is_noticed(world, faulty):
    store, items, query = world
    session, retriever = spec(items, guard=NGramGuard(1)), ShardedRetriever(faulty)
    written(session, cdr_rank(query, retriever, session), "every pod")
    same(cdr_rank(query, retriever, session), cdr_rank(query, Retriever(store), session))
    for shard in range(3):
        for replica in replicas(faulty, shard):
            for known in replica._shard._sessions.values():
                known.guard = NGramGuard(1)  # not what its digest says, and it is to be added to
    written(session, cdr_rank(query, Retriever(store), session), "node traffic")
    resyncs = faulty.counts.resyncs
    same(cdr_rank(query, retriever, session), cdr_rank(query, Retriever(store), session))
    assert faulty.counts.resyncs >= resyncs + 3


def test_versions_that_are_too_old_are_not_answered(world):
    store, _, _ = world
    shard = Shard(store)
    for i in range(40):
        shard.answer(Request("applied", i + 1, (), i, (Change(facts=facts(np.random.default_rng(i), 1, 1000 + i)),)))
    assert shard.answer(Request("applied", 40)).value == 120
    assert shard.answer(Request("applied", 30)).value == 110
    assert shard.answer(Request("applied", 3)).status == "stale"
    again = shard.answer(Request("applied", 40, (), 39, (Change(facts=facts(np.random.default_rng(39), 1, 1039)),)))
    assert again.value == 120  # a change that is there is not made twice
    assert shard.answer(Request("applied", 50)).version == 40


def test_columns_have_one_type_in_all_shards(world):
    store, _, query = world
    with ShardedStore.split(store, shards=4, by="id") as sharded:
        for each in (store, sharded):
            each.add(["a", "b"], ["x"] * 2, [query] * 2, attributes={"weight": [0.5, None]})
            with pytest.raises(TypeError, match="expected float as in the store, got str"):
                each.add(["c"], ["x"], [query], attributes={"weight": ["heavy"]})
            with pytest.raises(TypeError, match="expected str as in the store, got int"):
                each.add(["c"], ["x"], [query], attributes={"language": [3]})
            ids = [f"n{i}" for i in range(20)]
            each.add(ids, ["x"] * 20, [query] * 20, attributes={"weight": list(range(20))})
        assert sharded.version == store.version
        sharded.add_shards(2)
        assert sharded.get(sharded.ids) == store.get(store.ids)
        assert {type(fact.attributes["weight"]) for fact in sharded.get(ids)} == {float}
        here, elsewhere = Retriever(store), ShardedRetriever(sharded)
        for where in ({"weight": [3]}, {"weight": [2.0, 0.5]}, {"weight": [3, None], "language": ["en"]}):
            once = {name: iter(values) for name, values in where.items()}
            same(
                cdr_rank(query, elsewhere, spec(world[1]), where=once),
                cdr_rank(query, here, spec(world[1]), where=where),
            )


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ({"colour": "red"}, KeyError, r"expected source or one of \['language', 'year'\], got 'colour'"),
        ({"_expires_at": 3}, KeyError, "expected source or one of"),
        ({"year": "2001"}, TypeError, r"where\['year'\]: expected int as in the store, got str"),
        ({"source": 3}, TypeError, r"where\['source'\]: expected str"),
        ({"language": ["en", 3]}, TypeError, "values of one type"),
        ({3: "x"}, TypeError, "expected names that are str"),
        ({"language": {"a": 1}}, TypeError, "expected a value or several"),
        ([True], ValueError, "expected 80 entries"),
        ([1] * 80, TypeError, "expected a mapping or a bool array"),
    ],
)
def test_a_wrong_filter_is_refused_as_by_one_store(world, tmp_path, where, error, message):
    store, items, query = world
    partition(store, tmp_path / "p", shards=3)
    with ShardedStore.open(tmp_path / "p") as opened, ShardedStore.split(store, shards=3) as split:
        for retriever in (Retriever(store), ShardedRetriever(opened), ShardedRetriever(split)):
            with pytest.raises(error, match=message):
                cdr_rank(query, retriever, spec(items), where=where)


def test_a_filter_does_not_starve_k(world):
    store, items, query = world
    with ShardedStore.split(store, shards=4) as sharded:
        for where in ({"language": "en"}, np.arange(80) % 7 == 0):
            count = len(store.view().select(where))
            assert 5 < count < 40
            for session in (spec(items, min_relevance=-1.0), calibrated(items)):
                ranking = cdr_rank(query, ShardedRetriever(sharded), session, k=count, where=where)
                same(ranking, cdr_rank(query, Retriever(store), session, k=count, where=where))
                assert session.mode == "calibrated" or len(ranking) == count


def test_a_gate_that_starves_a_filter_is_warned_of_alike(world):
    store, items, query = world
    with ShardedStore.split(store, shards=4) as sharded:
        said, where = [], {"language": ["en", None]}
        relevance = cdr_rank(query, Retriever(store), spec(items, min_relevance=-1.0), where=where).relevance
        gate = float(np.sort(relevance)[-4])
        for retriever in (Retriever(store), ShardedRetriever(sharded)):
            with pytest.warns(UserWarning, match="facts reach the gate") as caught:
                cdr_rank(query, retriever, spec(items, min_relevance=gate), k=len(relevance), where=where)
            said.append(str(caught[0].message))
    assert said[0] == said[1]


def test_a_column_without_values_is_a_column(world, tmp_path):
    store, items, query = world
    gone = [fact.id for fact in store.get(store.ids) if "year" in fact.attributes]
    assert gone
    store.remove(gone)
    partition(store, tmp_path / "p", shards=3)
    with ShardedStore.open(tmp_path / "p") as sharded:
        sharded.save(tmp_path / "again")
    for home in ("p", "again"):
        with ShardedStore.open(tmp_path / home) as sharded:
            assert sharded.attribute_types == store.view().attribute_types == {"language": str, "year": int}
            for where in ({"year": 2001}, {"year": None}):
                same(
                    cdr_rank(query, ShardedRetriever(sharded), calibrated(items), where=where),
                    replace(cdr_rank(query, Retriever(store), calibrated(items), where=where), store_version=0),
                )


def test_the_statistics_of_a_few_filters_are_kept(world):
    store, items, query = world
    with ShardedStore.split(store, shards=3) as sharded:
        retriever = ShardedRetriever(sharded)
        for i in range(9):
            cdr_rank(query, retriever, calibrated(items), k=5, where=np.arange(80) > i)
        asked = sharded.counts.requests
        cdr_rank(query, retriever, calibrated(items), k=5, where=np.arange(80) > 8)
        assert sharded.counts.requests - asked == 3  # the ranking alone
        assert len(sharded.snapshot().cache["calibrations"]) == 5


HOUR = 3600 * 10**6


def test_what_expires_does_so_in_shards(tmp_path, monkeypatch):
    r, start = np.random.default_rng(5), _expiry.now()
    store = FactStore(DIM, embedding_model=MODEL)
    hours = r.choice([None, 1, 2], 60).tolist()
    expiries = [None if hour is None else start + hour * HOUR for hour in hours]
    store.apply(_expiry.expiring(store.check(**facts(r, 60)), expiries))
    store.add(**facts(r, 9, 100))  # never
    items, query = items_of(r), r.standard_normal(DIM) + 0.5

    def check(sharded, hour, version):
        """Ranks as the one store with what has expired by then removed."""
        whole = FactStore(DIM, embedding_model=MODEL)
        whole.adopt(store)
        whole.remove([id for id, at in zip(store.ids, hours, strict=False) if at is not None and at <= hour])
        assert sharded.ids == whole.ids
        for session in (spec(items), calibrated(items, source_weight=0.4)):
            truth = replace(cdr_rank(query, Retriever(whole), session), store_version=version)
            same(cdr_rank(query, ShardedRetriever(sharded), session), truth)
        return len(store) - len(whole)

    partition(store, tmp_path / "p", shards=3)
    partition(tmp_path / "p", tmp_path / "q", shards=2)
    with ShardedStore.open(tmp_path / "q", replicas=2) as sharded, ShardedStore.split(store, shards=2) as own:
        assert sharded.expire() == own.expire() == 0
        sharded.add_shards(2)
        for each in (sharded, own):
            version = each.version
            gone = each.expire((start + HOUR) / 1e6)
            assert gone == check(each, 1, version + 1) == hours.count(1)
            assert each.expire((start + HOUR) / 1e6) == 0
        with pytest.raises(ValueError, match="now: expected a time with its zone"):
            sharded.expire(datetime(2030, 1, 1))
        sharded.save(tmp_path / "later")
    monkeypatch.setattr(_expiry, "now", lambda: start + 2 * HOUR)
    for home in ("p", "later"):
        with ShardedStore.open(tmp_path / home) as late:
            check(late, 2, late.version)
            assert not late.attribute_types.keys() - {"language", "year"}
            assert explain(query, ShardedRetriever(late), spec(items), "f100").fact.id == "f100"


def test_a_fact_has_its_number_while_a_clock_withholds_it(monkeypatch):
    r, start = np.random.default_rng(6), _expiry.now() + 10**12
    store = FactStore(DIM, embedding_model=MODEL)
    store.apply(_expiry.expiring(store.check(**facts(r, 30)), [start] * 30))
    ids, numbers = store.ids, store.numbers_of(store.ids)
    with ShardedStore.split(store, shards=2) as sharded:
        ask = sharded._ask_each

        def then_expired(*arguments):
            found = ask(*arguments)
            monkeypatch.setattr(sharded, "_ask_each", ask)
            sharded.expire(start / 1e6 + 1)
            return found

        monkeypatch.setattr(sharded, "_ask_each", then_expired)
        np.testing.assert_array_equal(sharded.numbers_of(ids), numbers)
        assert len(sharded) == 0
        np.testing.assert_array_equal(sharded.numbers_of(ids), numbers)


def test_a_session_with_more_sub_queries_is_asked_for_anew(world):
    store, items, query = world
    more = SubQuery("more", "More", " ".join(WORDS[:3]), np.eye(DIM)[1] + 0.5)
    with ShardedStore.split(store, shards=3) as sharded:
        for make in (spec, calibrated):
            one, many = make(items), make(items)
            for session, retriever in ((one, Retriever(store)), (many, ShardedRetriever(sharded))):
                written(session, cdr_rank(query, retriever, session))
                session.extend(sub_queries=[more])
                written(session, cdr_rank(query, retriever, session), "what was written")
            same(cdr_rank(query, ShardedRetriever(sharded), many), cdr_rank(query, Retriever(store), one))


@pytest.mark.parametrize("by", ["source", "id"])
def test_what_a_wrong_clock_withheld_comes_back_in_shards(tmp_path, by):
    r, start = np.random.default_rng(6), _expiry.now() + 10**12
    store = FactStore(DIM, embedding_model=MODEL)
    expiries = [None if i % 3 else start + (1 + i % 2) * HOUR for i in range(90)]
    store.apply(_expiry.expiring(store.check(**facts(r, 90)), expiries))
    items, query = items_of(r), r.standard_normal(DIM) + 0.5

    def check(sharded, hours):
        whole = FactStore(DIM, embedding_model=MODEL)
        whole.adopt(store)
        whole.look(start + round(hours * HOUR))
        assert sharded.ids == whole.ids
        assert len(sharded) == len(whole)
        numbers = whole.numbers_of(store.ids)
        assert sharded.numbers_of(store.ids).tolist() == numbers.tolist()
        assert sharded.ids_of(numbers) == whole.ids_of(numbers) == store.ids
        truth = cdr_rank(query, Retriever(whole), spec(items))
        found = cdr_rank(query, ShardedRetriever(sharded), spec(items))
        same(found, replace(truth, store_version=found.store_version))

    partition(store, tmp_path / "p", shards=2, by=by)
    with ShardedStore.open(tmp_path / "p", replicas=2) as sharded, ShardedStore.split(store, shards=3, by=by) as own:
        for each in (sharded, own):
            assert each.expire((start + 5 * HOUR) / 1e6) == 30  # a clock that is ahead
            check(each, 5)
            assert each.add_shards(1) > 0
            assert each.compact() > 0  # what moved, not what is withheld
            check(each, 5)
        sharded.save(tmp_path / "later")
        for each in (sharded, own):
            assert each.expire((start + 1.5 * HOUR) / 1e6) == 0
            check(each, 1.5)
            assert each.expire(start / 1e6) == 0
            check(each, 0)
    with ShardedStore.open(tmp_path / "later") as later:
        check(later, 0)  # nothing was lost with what was saved
        assert later.expire((start + 5 * HOUR) / 1e6) == 30
        past = [id for id, moment in zip(store.ids, expiries, strict=True) if moment is not None]
        version = len(later)
        assert later.remove(past[:2]) == 2
        later.add([past[2]], ["new"], r.standard_normal((1, DIM)), source=["elsewhere"])
        with pytest.raises(KeyError, match="not in the store"):
            later.remove([past[0]])
        later.upsert([past[3]], ["new"], r.standard_normal((1, DIM)))
        assert later.numbers_of(past[:5]).tolist() == [-1, -1, *store.numbers_of(past[2:5])]
        assert len(later) == version + 2
        later.expire(start / 1e6)
        assert len(later) == len(later.ids) == 88
        assert [fact.text for fact in later.get(past[2:5])][:2] == ["new", "new"]
