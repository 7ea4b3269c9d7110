"""Shards in real Ray actors: killed, removed with their nodes, slow, wrong and behind, and the answer all the same."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sessions import session_of_mode

from cdr_kernel import FactStore, NGramGuard, Retriever, Session, SubQuery, WindowReport, cdr_rank, pack_facts
from cdr_kernel.shard import ShardedRetriever, _on_ray, partition
from cdr_kernel.shard._partition import ShardDamaged
from cdr_kernel.shard._sharded_retriever import ShardedStore, ShardsMissing
from cdr_kernel.shard._worker import ARRAYS, Answer, Reply, Request

MODEL = "toy"
DIM = 8
WORDS = ("pod", "Services", "traffic", "storage", "volume", "the", "network", "restarts", "every", "node")


def facts(r, n, start=0):
    axes = r.standard_normal((4, DIM)) + 0.5
    return {
        "ids": [f"f{start + i}" for i in range(n)],
        "texts": [" ".join(r.choice(WORDS, r.integers(0, 14))) for _ in range(n)],
        "embeddings": np.where(r.random((n, 1)) < 0.5, axes[r.integers(0, 4, n)], r.standard_normal((n, DIM)) + 0.5),
        "importance": r.choice([0.5, 1.0, 2.0], n),
        "source": [f"s{i // 5}" for i in range(n)],
        "position": list(range(n)),
        "attributes": {"language": [["en", "de", None][i % 3] for i in range(n)]},
    }


class Actor(_on_ray.ShardActor):
    """A shard that can be made slow and wrong."""

    delay = 0.0
    wrong = 0

    def answer(self, request):
        if request.method == "rank":
            time.sleep(self.delay)
        reply = super().answer(request)
        if request.method == "rank" and reply.status == "ok" and self.wrong:
            self.wrong -= 1
            first = reply.value[0]
            broken = {**first.arrays, "novelty": first.arrays["novelty"] * np.nan}
            return Reply("ok", reply.version, [Answer(**{**vars(first), "arrays": broken})])
        return reply

    def behave(self, delay=0.0, wrong=0):
        self.delay, self.wrong = delay, wrong


def same(ranking, truth):
    assert ranking.complete, ranking.missing_shards
    assert ranking.facts == truth.facts
    for name in ARRAYS:
        a, b = getattr(ranking, name), getattr(truth, name)
        assert (a is None) == (b is None), name
        assert a is None or a.tobytes() == np.asarray(b).tobytes(), name
    for name in ("qualified", "guard_activations", "coverage_depth", "store_version", "newest", "new_share", "need"):
        assert getattr(ranking, name) == getattr(truth, name), name


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 8, "object_store_memory": 200 << 20, "include_dashboard": False},
    )
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def world(tmp_path, cluster):
    r = np.random.default_rng(3)
    store = FactStore(DIM, embedding_model=MODEL)
    store.add(**facts(r, 120))
    store.save(tmp_path / "store")
    partition(store, tmp_path / "p", shards=3)
    items = [SubQuery(f"q{j}", f"Q{j}", "network traffic", r.standard_normal(DIM) + 0.5) for j in range(3)]
    return FactStore.load(tmp_path / "store"), items, r.standard_normal(DIM) + 0.5, tmp_path / "p"


@pytest.fixture
def on_ray(world, monkeypatch):
    """Opens the world's partition on Ray; closes it afterwards."""
    monkeypatch.setattr(_on_ray, "ShardActor", Actor)
    opened = []

    def open_(**keywords):
        store = _on_ray.open_on_ray(world[3], **{"timeout": 60.0, "num_cpus": 0.1, **keywords})
        opened.append(store)
        return store, ShardedRetriever(store)

    yield open_
    for store in opened:
        store.close()


def spec(items, **keywords):
    return session_of_mode(items, embedding_model=MODEL, **{"min_relevance": 0.2, **keywords})


def calibrated(items, **keywords):
    return Session.calibrated(items, embedding_model=MODEL, gate=0.0, **keywords)


def written(session, ranking):
    envelope = pack_facts(ranking, 3, count_tokens=lambda text: 1)
    session.update(WindowReport(0.2, ("q1",), embedding_model=MODEL), envelope.text, envelope=envelope)


def actor(store, shard=0, replica=0):
    return store.groups[shard].slots[replica].replica.actor


def behave(store, shard=0, replica=0, **how):
    import ray

    ray.get(actor(store, shard, replica).behave.remote(**how))


def kill(store, shard=0, replica=0):
    """As a crash does: the process is gone, and Ray may start another."""
    import ray

    ray.kill(actor(store, shard, replica), no_restart=False)


def restarted(store, shard=0, replica=0):
    """Kill it and wait until another process has taken its place."""
    import ray

    _, pid = ray.get(actor(store, shard, replica).place.remote())
    kill(store, shard, replica)
    while True:
        try:
            if ray.get(actor(store, shard, replica).place.remote())[1] != pid:
                return
        except ray.exceptions.RayActorError:
            time.sleep(0.05)


def later(seconds, what):
    timer = threading.Timer(seconds, what)
    timer.start()
    return timer


@pytest.mark.ray
def test_windows_are_those_of_one_store(world, on_ray):
    store, items, query, _ = world
    sharded, retriever = on_ray()
    sessions = [
        spec(items, guard=NGramGuard(2)),
        spec(items, exclude_packed=True, guard=NGramGuard(2, exact=True)),
        calibrated(items),
        calibrated(items, source_weight=0.4, packed_penalty=0.5),
    ]
    for i in range(3):
        for session in sessions:
            for k in (None, 4):
                truth = cdr_rank(query, Retriever(store), session, k=k, multiplier={"f3": 0.5})
                same(cdr_rank(query, retriever, session, k=k, multiplier={"f3": 0.5}), truth)
            for where in ({"language": ["en", None]}, np.arange(len(store)) % 3 > 0):
                truth = cdr_rank(query, Retriever(store), session, k=9, where=where)
                same(cdr_rank(query, retriever, session, k=9, where=where), truth)
            written(session, cdr_rank(query, retriever, session))
        more = facts(np.random.default_rng(i), 5, 500 + 5 * i)
        assert sharded.add(**more) == store.add(**more)
        assert sharded.remove(store.ids[i::40]) == store.remove(store.ids[i::40])
    assert sharded.ids == store.ids


@pytest.mark.ray
def test_an_actor_killed_in_the_middle_of_a_query(world, on_ray):
    store, items, query, _ = world
    sharded, retriever = on_ray()
    behave(sharded, delay=2.0)
    later(0.7, lambda: kill(sharded))
    same(cdr_rank(query, retriever, spec(items)), cdr_rank(query, Retriever(store), spec(items)))
    assert sharded.counts.retries >= 1


@pytest.mark.ray
def test_a_process_that_crashes(world, on_ray):
    import ray

    store, items, query, _ = world
    sharded, retriever = on_ray()
    _, pid = ray.get(actor(sharded).place.remote())
    behave(sharded, delay=1.5)
    later(0.5, lambda: os.kill(pid, 9))
    session = calibrated(items)
    same(cdr_rank(query, retriever, session), cdr_rank(query, Retriever(store), session))
    assert ray.get(actor(sharded).place.remote())[1] != pid


@pytest.mark.ray
def test_an_actor_that_was_ended_for_good_is_replaced(world, on_ray):
    import ray

    store, items, query, _ = world
    sharded, retriever = on_ray()
    ended = actor(sharded)
    ray.kill(ended)
    same(cdr_rank(query, retriever, spec(items)), cdr_rank(query, Retriever(store), spec(items)))
    assert actor(sharded) is not ended


@pytest.mark.ray
def test_a_node_that_goes_and_one_that_comes(world, on_ray, cluster):
    store, items, query, _ = world
    far = {"num_cpus": 1, "resources": {"far": 3}, "object_store_memory": 100 << 20}
    node = cluster.add_node(**far)
    cluster.wait_for_nodes()
    sharded, retriever = on_ray(options={"resources": {"far": 1}})
    truth = cdr_rank(query, Retriever(store), spec(items))
    same(cdr_rank(query, retriever, spec(items)), truth)
    for shard in range(3):
        behave(sharded, shard, delay=2.0)
    with ThreadPoolExecutor(1) as pool:  # nodes are to be started by the main thread
        running = pool.submit(cdr_rank, query, retriever, spec(items))
        time.sleep(0.5)
        cluster.remove_node(node)
        time.sleep(1.0)
        assert not running.done()
        node = cluster.add_node(**far)
        same(running.result(), truth)
    assert sharded.counts.retries >= 1
    cluster.remove_node(node)
    sharded.limits.timeout = 3.0  # nowhere to go: said, not hidden
    ranking = cdr_rank(query, retriever, spec(items))
    assert not ranking.complete
    assert ranking.missing_shards == ("shard-0", "shard-1", "shard-2")
    with pytest.raises(ShardsMissing, match="shard-0"):
        cdr_rank(query, ShardedRetriever(sharded, partial=False), spec(items))


@pytest.mark.ray
def test_a_shard_that_cannot_be_reached_is_named(world, on_ray):
    store, items, query, _ = world
    sharded, retriever = on_ray()
    same(cdr_rank(query, retriever, spec(items)), cdr_rank(query, Retriever(store), spec(items)))
    behave(sharded, 1, delay=6.0)
    sharded.limits.timeout = 2.0
    ranking = cdr_rank(query, retriever, spec(items))
    assert (ranking.complete, ranking.missing_shards) == (False, ("shard-1",))
    there = {*sharded.groups}
    assert len(there) == 3
    assert 0 < len(ranking) < 120


@pytest.mark.ray
def test_two_hundred_queries_while_actors_restart_in_turn(world, on_ray):
    store, items, query, _ = world
    sharded, retriever = on_ray(replicas=2, hedge_after=0.5)
    more = facts(np.random.default_rng(9), 6, 700)
    for each in (store, sharded):
        each.add(**more)  # which restarted actors must be told
    sessions = [spec(items, guard=NGramGuard(2)), calibrated(items)]
    for session in sessions:
        written(session, cdr_rank(query, Retriever(store), session))
    truths = [cdr_rank(query, Retriever(store), session, k=12) for session in sessions]
    stop = threading.Event()

    def restart():
        turn = 0
        while not stop.is_set():
            restarted(sharded, turn % 3, turn // 3 % 2)
            turn += 1
        return turn

    def rank(i):
        same(cdr_rank(query, retriever, sessions[i % 2], k=12), truths[i % 2])
        time.sleep(0.1)
        return 1

    with ThreadPoolExecutor(3) as pool:
        restarting = pool.submit(restart)
        try:
            assert sum(pool.map(rank, range(200))) == 200
        finally:
            stop.set()
        assert restarting.result() >= 3
    assert sharded.counts.retries + sharded.counts.resyncs > 0


@pytest.mark.ray
def test_a_slow_replica_is_hedged(world, on_ray):
    store, items, query, _ = world
    sharded, retriever = on_ray(replicas=2, hedge_after=0.2)
    truth = cdr_rank(query, Retriever(store), spec(items))
    same(cdr_rank(query, retriever, spec(items)), truth)
    for shard in range(3):
        behave(sharded, shard, 0, delay=20.0)
    for _ in range(4):  # two of them are left hanging at the slow ones, and the others go where it is less busy
        started = time.monotonic()
        same(cdr_rank(query, retriever, spec(items)), truth)
        assert time.monotonic() - started < 15.0
    assert sharded.counts.hedges >= 1
    assert sharded.counts.missing == 0


@pytest.mark.ray
def test_a_replica_takes_over_for_one_that_is_gone(world, on_ray, cluster):
    store, items, query, _ = world
    node = cluster.add_node(num_cpus=1, resources={"far": 3}, object_store_memory=100 << 20)
    cluster.wait_for_nodes()
    sharded, retriever = on_ray()
    far, _ = on_ray(options={"resources": {"far": 1}})
    for group, other in zip(sharded.groups, far.groups, strict=True):
        group.slots.insert(0, other.slots[0])
    truth = cdr_rank(query, Retriever(store), calibrated(items))
    same(cdr_rank(query, retriever, calibrated(items)), truth)
    cluster.remove_node(node)
    sharded.limits.hedge_after = 0.3
    started = time.monotonic()
    same(cdr_rank(query, retriever, calibrated(items)), truth)
    assert time.monotonic() - started < 30.0


@pytest.mark.ray
def test_a_shard_that_returns_nan_is_restarted(world, on_ray):
    import ray

    store, items, query, _ = world
    sharded, retriever = on_ray()
    pids = [ray.get(actor(sharded, shard).place.remote())[1] for shard in range(3)]
    behave(sharded, 2, wrong=1)
    same(cdr_rank(query, retriever, spec(items)), cdr_rank(query, Retriever(store), spec(items)))
    assert sharded.counts.restarts == 1
    after = [ray.get(actor(sharded, shard).place.remote())[1] for shard in range(3)]
    assert [a == b for a, b in zip(pids, after, strict=True)] == [True, True, False]


@pytest.mark.ray
def test_a_damaged_shard_is_named_until_it_is_mended(world, on_ray):
    store, items, query, home = world
    (path,) = home.glob("shards-*/shard-1/data-*/texts.utf8")
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 4]) + good[1:])
    _, retriever = on_ray()
    with pytest.raises(ShardDamaged, match=r"shard-1 is damaged: .*texts\.utf8: block 0 is not as it was written"):
        cdr_rank(query, retriever, spec(items))
    path.write_bytes(good)
    same(cdr_rank(query, retriever, spec(items)), cdr_rank(query, Retriever(store), spec(items)))


@pytest.mark.ray
def test_stale_versions_and_old_blacklists_are_noticed(world, on_ray):
    import ray

    store, items, query, home = world
    sharded, retriever = on_ray()
    session = spec(items, guard=NGramGuard(2))
    written(session, cdr_rank(query, retriever, session))
    more = facts(np.random.default_rng(1), 9, 800)
    for each in (store, sharded):
        each.add(**more)
        each.remove(["f5", "f801"])
    truth = cdr_rank(query, Retriever(store), session)
    same(cdr_rank(query, retriever, session), truth)
    for shard in range(3):
        restarted(sharded, shard)
        reply = ray.get(actor(sharded, shard).answer.remote(Request("applied", 10**6)))
        assert (reply.status, reply.version) == ("stale", 0)  # without its changes
    resyncs = sharded.counts.resyncs
    same(cdr_rank(query, retriever, session), truth)
    assert sharded.counts.resyncs >= resyncs + 3
    written(session, truth)
    same(cdr_rank(query, retriever, session), cdr_rank(query, Retriever(store), session))
    sharded.save()  # and now it comes back with them
    for shard in range(3):
        kill(sharded, shard)
    same(cdr_rank(query, retriever, session), cdr_rank(query, Retriever(store), session))
    with ShardedStore.open(home) as again:
        assert again.ids == store.ids


@pytest.mark.ray
def test_a_slow_shard_is_not_flooded(world, on_ray):
    store, items, query, _ = world
    sharded, retriever = on_ray(max_in_flight=2)
    behave(sharded, delay=0.1)
    truth = cdr_rank(query, Retriever(store), spec(items))
    most, stop = [0], threading.Event()

    def watch():
        while not stop.wait(0.005):
            most[0] = max(most[0], sharded.groups[0].slots[0].in_flight)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        for ranking in pool.map(lambda _: cdr_rank(query, retriever, spec(items)), range(16)):
            same(ranking, truth)
    stop.set()
    watcher.join()
    assert most[0] == 2
    assert sharded.counts.waits > 0


@pytest.mark.ray
def test_shards_are_added_while_queries_run(world, on_ray):
    store, items, query, home = world
    sharded, retriever = on_ray()
    truth = cdr_rank(query, Retriever(store), spec(items))
    stop = threading.Event()

    def rank():
        count = 0
        while not stop.is_set():
            same(cdr_rank(query, retriever, spec(items)), truth)
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(rank) for _ in range(2)]
        moved = sharded.add_shards(2)
        stop.set()
        assert all(future.result() > 0 for future in running)
    assert moved > 0
    assert len(sharded.shards) == 5
    for mode in (spec, calibrated):
        same(cdr_rank(query, retriever, mode(items)), cdr_rank(query, Retriever(store), mode(items)))
    kill(sharded, 4)
    same(cdr_rank(query, retriever, spec(items)), truth)
    with ShardedStore.open(home) as again:
        assert again.shards == sharded.shards


@pytest.mark.ray
def test_actors_rank_on_devices(world):
    store, items, query, home = world
    own = {"shard-0": "cpu"}
    with _on_ray.open_on_ray(home, num_cpus=0.1, timeout=240.0, device=own, device_dtype="float16") as sharded:
        for session in (spec(items), calibrated(items)):
            found = cdr_rank(query, ShardedRetriever(sharded), session)
            same(found, cdr_rank(query, Retriever(store), session))


@pytest.mark.ray
def test_actors_open_their_shards_from_lance(world, cluster, tmp_path):
    pytest.importorskip("lance", reason="needs the extra store")
    from cdr_kernel.shard import LanceHome

    store, items, query, _ = world
    home = LanceHome(f"file://{tmp_path}/lance", cache=str(tmp_path / "cache"))
    partition(store, home, shards=3)
    with _on_ray.open_on_ray(home, replicas=2, num_cpus=0.1, timeout=240.0) as sharded:
        retriever = ShardedRetriever(sharded)
        for session in (spec(items), calibrated(items)):
            same(cdr_rank(query, retriever, session), cdr_rank(query, Retriever(store), session))
        more = facts(np.random.default_rng(1), 9, 800)
        for each in (store, sharded):
            each.add(**more)
        sharded.save()
        assert all(group.base == group.version for group in sharded.groups)
        for shard in range(3):
            for replica in range(2):
                restarted(sharded, shard, replica)
        for session in (spec(items), calibrated(items)):
            same(cdr_rank(query, retriever, session), cdr_rank(query, Retriever(store), session))
    with ShardedStore.open(home) as again:
        assert again.ids == store.ids


@pytest.mark.ray
def test_more_actors_than_processors_all_start(world, on_ray):
    sharded, retriever = on_ray(replicas=4, num_cpus=_on_ray.open_on_ray.__kwdefaults__["num_cpus"])
    store, items, query, _ = world
    ray = pytest.importorskip("ray")
    assert sum(len(group.slots) for group in sharded.groups) > ray.cluster_resources()["CPU"]
    ray.get([slot.replica.actor.place.remote() for group in sharded.groups for slot in group.slots], timeout=120)
    same(cdr_rank(query, retriever, spec(items)), cdr_rank(query, Retriever(store), spec(items)))


@pytest.mark.ray
def test_actors_that_wait_for_what_they_reserve_are_warned_of(world, on_ray):
    with pytest.warns(RuntimeWarning, match=r"3 of 3 actors .* 1 s: they reserve 300 CPU, the cluster has 8 CPU \("):
        _, retriever = on_ray(num_cpus=100, timeout=1.0)
    ranking = cdr_rank(world[2], retriever, spec(world[1]))
    assert not ranking.complete
    assert "INCOMPLETE: no answer from 'shard-0', 'shard-1'" in str(ranking)
    with pytest.warns(RuntimeWarning, match=r"they reserve 3 GPU, the cluster has 0 GPU \(0 free\)"):
        on_ray(num_cpus=0, num_gpus=1, timeout=1.0)


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[ray\]" in a checkout'):
        _on_ray.open_on_ray(tmp_path)


@pytest.mark.ray
def test_arguments_are_checked(world, cluster):
    for bad in ({"replicas": 0}, {"threads": True}, {"timeout": 0.0}, {"max_in_flight": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            _on_ray.open_on_ray(world[3], **bad)
    with pytest.raises(FileNotFoundError):
        _on_ray.open_on_ray(world[3] / "nowhere")
