"""Replicas that share sessions through Redis: a real one, started here (Debian's redis-server)."""

from __future__ import annotations

import asyncio
import builtins
import shutil
import subprocess
import threading
import time

import pytest
from serving import (
    MODEL,
    Settings,
    bearer,
    created,
    error_of,
    make_store,
    query,
    rank,
    same_session,
    serving,
    update,
    write_keys,
)

from cdr_kernel import Retriever, WindowReport, cdr_rank, pack_facts
from cdr_kernel.serve._redis_sessions import Redis
from cdr_kernel.serve._sessions import LocalSessions, new_id
from cdr_kernel.serve._turns import Turns
from cdr_kernel.serve._window_memory import KeptWindow

redis = pytest.importorskip("redis", reason="needs the redis extra")

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(
        shutil.which("redis-server") is None, reason="needs redis-server (apt-get install redis-server)"
    ),
]


class Server:
    """A Redis behind a socket in a folder, where nobody else can be, that keeps nothing on disk."""

    def __init__(self, folder):
        self._socket = folder / "s"
        assert len(str(self._socket)) < 100  # as long as such a path may be
        self.url = f"unix://{self._socket}?db=0"
        self.start()

    def start(self):
        command = ["redis-server", "--port", "0", "--unixsocket", self._socket, "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, cwd=self._socket.parent, stdout=subprocess.DEVNULL)
        self.client = redis.Redis.from_url(self.url)
        until = time.monotonic() + 60
        while True:
            try:
                self.client.ping()
                return
            except redis.exceptions.ConnectionError:
                assert time.monotonic() < until
                time.sleep(0.02)

    def stop(self):
        self.client.close()
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = Server(tmp_path_factory.mktemp("redis"))
    yield started
    started.stop()


@pytest.fixture
def folder(tmp_path):
    make_store().save(tmp_path / "s")
    return tmp_path / "s"


@pytest.fixture
def replicas(folder, server):
    with serving(folder, redis=server.url) as one, serving(folder, redis=server.url) as two:
        yield one, two


def everywhere(replicas, sends):
    """What these functions of a client answer, all at once, on one replica after the other in turn."""
    answers = [None] * len(sends)

    def run(i, send):
        answers[i] = send(replicas[i % len(replicas)])

    threads = [threading.Thread(target=run, args=each) for each in enumerate(sends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_a_session_of_one_replica_is_there_on_the_other(replicas):
    one, two = replicas
    sid = created(one, exclude_packed=True)
    ranks = [client.post(f"/v1/sessions/{sid}/rank", json=rank()).json() for client in replicas]
    assert ranks[0] == ranks[1]
    told = two.post(f"/v1/sessions/{sid}/update", json=update()).json()  # takes the ranking that the other made
    assert told["session"]["packed"] == 5
    assert told["exit"]["novelty_ratio"] is not None
    assert one.get(f"/v1/sessions/{sid}").json() == told["session"]
    ranks = [client.post(f"/v1/sessions/{sid}/rank", json=rank()).json() for client in replicas]
    assert ranks[0] == ranks[1]
    assert ranks[0]["window"] == 2
    one.delete(f"/v1/sessions/{sid}")
    assert two.get(f"/v1/sessions/{sid}").status_code == 404


@pytest.mark.parametrize("how", ["task-complete", "ckf-exhausted"])
def test_a_session_that_ended_on_one_replica_has_ended_on_the_other(replicas, how):
    one, two = replicas
    sid = created(one)
    if how == "task-complete":
        body = update(["s0", "s1", "s2"], completeness=1.0, output="All of it.")
        answer = one.post(f"/v1/sessions/{sid}/update", json=body)
        assert answer.json()["document"] == "All of it."
    else:
        answer = one.post(f"/v1/sessions/{sid}/rank", json=rank(query=[-x for x in query().tolist()]))
    assert answer.json()["exit"]["reason"] == how
    for client in (two, one):
        refused = client.post(f"/v1/sessions/{sid}/rank", json=rank())
        assert (refused.status_code, error_of(refused)["code"]) == (409, "session_ended")
        assert client.get(f"/v1/sessions/{sid}").json()["exit"] == answer.json()["exit"]


def test_no_update_is_lost_between_replicas(replicas):
    sid = created(replicas[0], max_windows=20)
    sends = [
        lambda client, i=i: client.post(f"/v1/sessions/{sid}/update", json=update([f"s{i % 3}"])) for i in range(16)
    ]
    answers = everywhere(replicas, sends)
    assert [answer.status_code for answer in answers] == [200] * 16
    for client in replicas:
        session = client.get(f"/v1/sessions/{sid}").json()
        assert session["window_count"] == 16
        assert [entry["window_number"] for entry in session["coverage"]] == list(range(1, 17))
    assert sorted(answer.json()["session"]["window_count"] for answer in answers) == list(range(1, 17))


def test_a_repeat_on_another_replica_is_applied_once(replicas):
    one, two = replicas
    sid = created(one)
    headers = {"Idempotency-Key": "k"}
    sends = [lambda client: client.post(f"/v1/sessions/{sid}/update", json=update(), headers=headers)] * 8
    answers = everywhere(replicas, sends)
    assert {answer.text for answer in answers} == {answers[0].text}
    assert two.get(f"/v1/sessions/{sid}").json()["window_count"] == 1
    body = {"ids": ["f1"]}
    first = one.post("/v1/facts/delete", json=body, headers={"Idempotency-Key": "d"})
    second = two.post("/v1/facts/delete", json=body, headers={"Idempotency-Key": "d"})
    assert first.json() == second.json()
    assert second.headers["idempotency-replayed"] == "true"


def test_branches_merge_from_anywhere(replicas):
    one, two = replicas
    sid = created(one)
    branch = one.post(f"/v1/sessions/{sid}/snapshot").json()["id"]
    two.post(f"/v1/sessions/{branch}/update", json=update(["s1"]))
    merged = one.post(f"/v1/sessions/{sid}/merge", json={"branches": [branch]}).json()
    assert merged["coverage"][0]["sub_query_id"] == "s1"
    assert two.get(f"/v1/sessions/{sid}").json() == merged


def test_sessions_end_in_redis_too(folder, server):
    with serving(folder, redis=server.url, session_ttl_s=60) as client:
        sid = created(client)
        key = f"cdr:default:session:{sid}"
        assert 0 < server.client.pttl(key) <= 60_000
        assert server.client.pexpire(key, 20_000)
        assert client.get(f"/v1/sessions/{sid}").status_code == 200
        assert server.client.pttl(key) > 20_000  # since it was used
        server.client.pexpire(key, 1)
        until = time.monotonic() + 60
        while server.client.exists(key):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert client.get(f"/v1/sessions/{sid}").status_code == 404


def test_a_small_replica_reads_again_what_it_forgot(folder, server):
    with serving(folder, redis=server.url, max_sessions=1) as client:
        ids = [created(client) for _ in range(3)]
        for id in ids * 2:
            assert client.post(f"/v1/sessions/{id}/update", json=update()).status_code == 200
        assert [client.get(f"/v1/sessions/{id}").json()["window_count"] for id in ids] == [2, 2, 2]
        assert client.get("/v1/stats").json()["sessions"] == 1


def test_tenants_do_not_meet_in_redis(tmp_path, server):
    for name in ("a", "b"):
        make_store().save(tmp_path / name)
    keys = write_keys(tmp_path / "keys.json", a="ka", b="kb")
    with serving(tmp_path, redis=server.url, keys=keys) as client:
        sid = created(client, headers=bearer("ka"))
        foreign = client.get(f"/v1/sessions/{sid}", headers=bearer("kb"))
        absent = client.get(f"/v1/sessions/{'0' * 32}", headers=bearer("kb"))
        assert foreign.status_code == absent.status_code == 404
        assert error_of(foreign) == error_of(absent)
        for odd in ("..", "a:session", "*", "x" * 500):
            assert client.get(f"/v1/sessions/{odd}", headers=bearer("kb")).status_code == 404
        assert client.get(f"/v1/sessions/{sid}", headers=bearer("ka")).status_code == 200


def test_without_redis_nothing_is_changed_and_the_replica_is_not_ready(folder, tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("redis"))
    try:
        with serving(folder, redis=server.url) as client:
            sid = created(client)
            server.stop()
            for answer in (
                client.post(f"/v1/sessions/{sid}/update", json=update()),
                client.get(f"/v1/sessions/{sid}"),
                client.post(f"/v1/sessions/{sid}/rank", json=rank()),
            ):
                assert answer.status_code == 503
                assert error_of(answer)["code"] == "sessions_unavailable"
                assert answer.headers["retry-after"] == "1"
            assert client.get("/readyz").status_code == 503
            assert client.get("/v1/stats").status_code == 200
            server.start()
            assert client.get("/readyz").status_code == 200
            assert client.get(f"/v1/sessions/{sid}").status_code == 404  # this Redis keeps nothing
            assert created(client)
    finally:
        server.stop()


def test_a_replica_does_not_serve_what_another_has_changed(replicas):
    """Both have the session at hand; whatever one does to it, the other answers from what it is now."""
    one, two = replicas
    sid = created(one, max_windows=20)
    for client in replicas:
        assert client.get(f"/v1/sessions/{sid}").status_code == 200
    for window in range(1, 5):
        writer, reader = (one, two) if window % 2 else (two, one)
        told = writer.post(f"/v1/sessions/{sid}/update", json=update([f"s{window % 3}"])).json()
        assert told["session"]["window_count"] == window
        assert reader.get(f"/v1/sessions/{sid}").json() == told["session"]
        assert reader.post(f"/v1/sessions/{sid}/rank", json=rank()).json()["window"] == window + 1


def test_redis_holds_no_more_of_a_tenant_than_it_may(folder, server):
    """The least recently used session goes for all replicas, and what expires is not counted any more."""
    keys = write_keys(folder.parent / "keys.json", acme="a")
    own = bearer("a")
    settings = {"redis": server.url, "keys": keys}
    with serving(folder, redis_sessions=3, **settings) as one, serving(folder, redis_sessions=3, **settings) as two:
        ids = [created(client, headers=own) for client in (one, two, one)]
        assert two.get(f"/v1/sessions/{ids[0]}", headers=own).status_code == 200  # the second is the oldest now
        ids.append(created(two, headers=own))
        found = [one.get(f"/v1/sessions/{id}", headers=own).status_code for id in ids]
        assert found == [200, 404, 200, 200]
        sizes = server.client.hgetall("cdr:acme:session::sizes")
        told = {name: int(size) for name, size in sizes.items()}
        assert told.pop(b"") == sum(told.values())
        assert set(told) == {ids[i].encode() for i in (0, 2, 3)}
        assert told[ids[0].encode()] == server.client.hstrlen(f"cdr:acme:session:{ids[0]}", "data")
        one.post(f"/v1/sessions/{ids[0]}/rank", json=rank(), headers=own)
        after = int(server.client.hget("cdr:acme:session::sizes", ids[0]))
        assert after == told[ids[0].encode()] + server.client.hstrlen(f"cdr:acme:session:{ids[0]}", "window")
        assert one.delete(f"/v1/sessions/{ids[0]}", headers=own).status_code == 200
        assert int(server.client.hget("cdr:acme:session::sizes", "")) == sum(told.values()) - told[ids[0].encode()]
    with serving(folder, redis_bytes=told[ids[2].encode()] * 3 // 2, **settings) as client:
        ids = [created(client, headers=own) for _ in range(3)]
        assert [client.get(f"/v1/sessions/{id}", headers=own).status_code for id in ids] == [404, 404, 200]


@pytest.fixture
def stores(server):
    """Runs a coroutine function with the sessions of two replicas in one loop."""

    def run(work):
        async def both():
            connections = [Redis(server.url) for _ in "ab"]
            settings = Settings(store="s")
            made = [
                each.sessions("t", LocalSessions(ttl_s=60, most=10, max_bytes=2**30), settings, Turns("cdr-work"))
                for each in connections
            ]
            try:
                return await work(*made)
            finally:
                for each in connections:
                    await each.close()

        return asyncio.run(both())

    return run


def changed(session):
    twin = session.snapshot()
    twin.update(WindowReport(0.1, ("s0",)), "red green", embedding_model=MODEL)
    return twin


def test_the_second_of_two_commits_of_one_version_is_refused(stores):
    async def work(one, two):
        mine = await one.create(same_session(id=new_id()))
        theirs = await two.get(mine.id)
        before = theirs.now
        assert before.number == mine.now.number
        assert await one.commit(mine, mine.now, changed(mine.now.session), {})
        assert not await two.commit(theirs, before, changed(before.session), {})
        assert theirs.now is before  # nothing was done
        again = await two.get(mine.id)
        assert again.now.number == mine.now.number != before.number
        assert again.now.session.window_count == 1

    stores(work)


def test_a_commit_over_a_session_that_was_read_again_meanwhile_keeps_what_was_read(stores):
    async def work(one, two):
        mine = await one.create(same_session(id=new_id()))
        theirs = await two.get(mine.id)
        before = theirs.now
        assert await two.commit(theirs, before, changed(before.session), {})
        newest = theirs.now
        read = await one.get(mine.id)
        assert read is mine
        assert mine.now.number == newest.number
        assert not await one.commit(mine, before, changed(before.session), {})
        assert mine.now.number == newest.number

    stores(work)


def test_the_ranking_of_a_session_as_it_was_is_not_kept(stores):
    async def work(one, two):
        mine = await one.create(same_session(id=new_id()))
        envelope = pack_facts(cdr_rank(query(), Retriever(make_store()), mine.now.session, k=5), 60)
        old = KeptWindow.of(envelope, mine.now.number)
        await one.keep_window(mine, old)
        theirs = await two.get(mine.id)
        assert (await two.window_of(theirs)).version == old.version
        assert await one.commit(mine, mine.now, changed(mine.now.session), {})
        assert await two.window_of(theirs) is None
        await two.keep_window(theirs, old)  # it ranked for the session as it was
        assert await one.window_of(mine) is None
        await one.keep_window(mine, KeptWindow.of(envelope, mine.now.number))
        await two.keep_window(theirs, old)
        assert (await one.window_of(mine)).version == mine.now.number

    stores(work)


def test_an_id_that_is_taken_is_not_taken_twice(stores):
    async def work(one, two):
        mine = await one.create(same_session(id=new_id()))
        number = mine.now.number
        with pytest.raises(KeyError):
            await two.create(same_session(id=mine.id))
        assert (await one.get(mine.id)).now.number == number

    stores(work)


def test_a_session_that_two_read_at_once_is_one(stores):
    async def work(one, two):
        id, seen = (await one.create(same_session(id=new_id()))).id, []

        async def look():
            seen.append((await two.get(id)).now)

        await asyncio.gather(*(look() for _ in range(8)))
        assert len(set(map(builtins.id, seen))) == 1

    stores(work)


def test_a_commit_does_not_hide_the_one_that_followed_it(stores, monkeypatch):
    """Another replica commits, and this one reads that, before the answer to this one's commit is looked at."""

    async def work(one, two):
        mine = await one.create(same_session(id=new_id()))
        script = one._redis.script

        async def slow(*args):
            done = await script(*args)
            monkeypatch.undo()
            theirs = await two.get(mine.id)
            assert await two.commit(theirs, theirs.now, changed(theirs.now.session), {})
            await one.get(mine.id)
            return done

        monkeypatch.setattr(one._redis, "script", slow)
        assert await one.commit(mine, mine.now, changed(mine.now.session), {})
        assert mine.now.session.window_count == 2

    stores(work)
