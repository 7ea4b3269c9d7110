"""Sessions in memory: forgotten after a while, and the least recently used first when room runs out."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest
from serving import MODEL, created, hold_pool, make_store, new_session, rank, same_session, serving, update

from cdr_kernel import Retriever, WindowReport, cdr_rank, pack_facts
from cdr_kernel.serve import _session_operations
from cdr_kernel.serve import _sessions as module
from cdr_kernel.serve._errors import Refusal
from cdr_kernel.serve._idempotency import Answers, Done
from cdr_kernel.serve._sessions import KEPT_ANSWERS, LocalSessions, size_of, with_answer
from cdr_kernel.serve._window_memory import KeptWindow, packed_envelope


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def sessions(**settings):
    gone = []
    made = LocalSessions(**{"ttl_s": 60.0, "most": 100, "max_bytes": 2**30, **settings}, evicted=gone.append)
    return made, gone


def here(kept, id):
    try:
        asyncio.run(kept.get(id))
    except Refusal:
        return False
    return True


def test_what_is_not_used_is_forgotten(clock):
    kept, gone = sessions()
    a, b = (asyncio.run(kept.create(same_session(id=name))).id for name in "ab")
    clock[0] += 40
    assert here(kept, a)
    clock[0] += 40
    assert not here(kept, b)
    assert here(kept, a)
    assert gone == ["ttl"]
    clock[0] += 61
    assert not here(kept, a)
    assert len(kept) == kept.nbytes == 0


def test_the_least_recently_used_goes_first(clock):
    kept, gone = sessions(most=2)
    for name in "ab":
        asyncio.run(kept.create(same_session(id=name)))
    assert here(kept, "a")
    asyncio.run(kept.create(same_session(id="c")))
    assert [here(kept, name) for name in "abc"] == [True, False, True]
    assert gone == ["lru"]


def test_memory_is_bounded_and_counted(clock):
    one = size_of(asyncio.run(sessions()[0].create(same_session(id="a"))))
    kept, gone = sessions(max_bytes=3 * one + one // 2)
    for i in range(10):
        asyncio.run(kept.create(same_session(id=f"s{i}")))
        assert kept.nbytes <= 3 * one + one // 2 + 100
    assert len(kept) == 3
    assert len(gone) == 7
    entry = asyncio.run(kept.get("s9"))
    before = entry.now
    twin = before.session.snapshot()
    twin.update(WindowReport(0.1, ("s0",)), " ".join(f"w{i}" for i in range(5000)), embedding_model=MODEL)
    asyncio.run(kept.commit(entry, before, twin, {}))
    assert not asyncio.run(kept.commit(entry, before, twin.snapshot(), {}))  # somebody was first
    assert len(kept) == 1  # the newest stays, whatever it takes
    assert kept.nbytes == size_of(entry) > 3 * one
    assert asyncio.run(kept.delete("s9"))
    assert kept.nbytes == 0


def test_the_outputs_that_a_session_keeps_are_counted():
    kept, _ = sessions()
    session = same_session(id="a", keep_outputs=True)
    session.update(WindowReport(0.1), "é" * 10**6, embedding_model=MODEL)
    assert size_of(asyncio.run(kept.create(session))) > 10**6 > size_of(asyncio.run(kept.create(same_session(id="b"))))


def test_a_session_that_went_meanwhile_is_not_changed():
    kept, _ = sessions()
    entry = asyncio.run(kept.create(same_session(id="a")))
    asyncio.run(kept.delete("a"))
    with pytest.raises(Refusal):
        asyncio.run(kept.commit(entry, entry.now, entry.now.session.snapshot(), {}))
    asyncio.run(kept.create(same_session(id="a")))
    with pytest.raises(KeyError):
        asyncio.run(kept.create(same_session(id="a")))


def test_the_last_answers_are_kept():
    answers = {}
    for i in range(KEPT_ANSWERS + 3):
        answers = with_answer(answers, f"k{i}", Done("d", 200, {}, b""))
    assert list(answers) == [f"k{i}" for i in range(3, KEPT_ANSWERS + 3)]
    assert with_answer(answers, None, Done("d", 200, {}, b"")) is answers
    kept = Answers(60.0, most=2)
    for name in "abc":
        asyncio.run(kept.put(name, Done(name, 200, {}, b"")))
    assert asyncio.run(kept.get("a")) is None
    assert asyncio.run(kept.get("c")).digest == "c"
    assert asyncio.run(Answers(0.0).get("c")) is None


def test_a_kept_window_is_the_envelope_without_its_texts():
    own, retriever = same_session(), Retriever(make_store())
    envelope = pack_facts(cdr_rank([1.0] + [0.1] * 7, retriever, own, k=9), 60)
    kept = KeptWindow.of(envelope, version=4)
    back = kept.envelope()
    assert back.ranking.ids == envelope.ranking.ids
    assert back.novelty_ratio() == envelope.novelty_ratio()
    assert back.min_novelty == envelope.min_novelty
    assert own.exit(envelope=back) == own.exit(envelope=envelope)
    assert all(fact.text == "" for fact in back.facts)
    some = packed_envelope([*envelope.ranking.ids[1:3], "x"], back, 0, {"x": 0.3})
    assert some.ranking.ids == [*envelope.ranking.ids[1:3], "x"]
    assert some.ranking.score.tolist() == [*envelope.ranking.score[1:3].tolist(), 0.0]
    assert (some.ranking.qualified, some.min_novelty) == (envelope.ranking.qualified, 0.3)
    without = packed_envelope([*envelope.ranking.ids, "x"], back, 0)
    assert (without.min_novelty, without.novelty_ratio()) == (envelope.min_novelty, envelope.novelty_ratio())
    alone = packed_envelope(["x", "y"], None, 3)
    assert (alone.ranking.ids, alone.ranking.coverage_depth) == (["x", "y"], 3)


def test_a_changed_session_keeps_what_ranks_found_for_it(tmp_path):
    """A later window reads what the first one found, though the session is another object by then."""
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s") as client:
        sid = created(client)
        client.post(f"/v1/sessions/{sid}/rank", json=rank())
        tenant = client.app.state.service.tenants["default"]
        entry = tenant.local.peek(sid)
        before = weakref.ref(entry.now.session)
        kept = tenant.retriever.cache._kept[entry.now.session]
        client.post(f"/v1/sessions/{sid}/update", json=update())
        assert entry.now.session is not before()
        assert tenant.retriever.cache._kept[entry.now.session] is kept
        gc.collect()
        assert before() is None
        client.delete(f"/v1/sessions/{sid}")
        del entry
        gc.collect()
        assert tenant.retriever.cache.nbytes == 0


def test_sessions_go_over_http_too(tmp_path):
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s", max_sessions=2) as client:
        ids = [created(client) for _ in range(3)]
        assert [client.get(f"/v1/sessions/{id}").status_code for id in ids] == [404, 200, 200]
        assert 'cdr_sessions_evicted_total{reason="lru"} 1.0' in client.get("/metrics").text
        assert client.post("/v1/sessions", json=new_session()).status_code == 200


def crowd(client, sends, seconds=60.0):
    """The answers to these requests to change one session, in the order in which they come: all are under way before
    one is done."""
    service, answers = client.app.state.service, []
    (entry,) = service.tenants["default"].local._entries.values()
    go = threading.Event()
    held = hold_pool(client, go, 120)
    threads = [threading.Thread(target=lambda send=send: answers.append(send())) for send in sends]
    try:
        for i, thread in enumerate(threads, start=1):
            thread.start()
            until = time.monotonic() + seconds
            while service.pool.waiting("default") + len(entry.lock._waiters or ()) < i:  # its work, or its turn
                assert time.monotonic() < until
                time.sleep(0.002)
        go.set()
        for thread in threads:
            thread.join()
    finally:
        go.set()
    assert all(each.result() for each in held)
    return answers


def test_changes_of_one_session_wait_for_their_turn_and_none_starts_again(tmp_path, monkeypatch):
    """Without turns all but one would find the session changed and do their work again, and again."""
    monkeypatch.setattr(_session_operations, "ATTEMPTS", 1)
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s") as client:
        path = f"/v1/sessions/{created(client, max_windows=20)}/update"
        answers = crowd(client, [lambda: client.post(path, json=update())] * 6)
    assert [answer.status_code for answer in answers] == [200] * 6
    assert sorted(answer.json()["session"]["window_count"] for answer in answers) == [1, 2, 3, 4, 5, 6]


def test_a_ranking_counts_for_the_first_of_two_updates_at_once(tmp_path):
    """The second one took the ranking of the session as it was, and then the first one changed the session."""
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s") as client:
        sid = created(client)
        assert client.post(f"/v1/sessions/{sid}/rank", json=rank()).json()["facts"]
        path = f"/v1/sessions/{sid}/update"
        answers = crowd(client, [lambda: client.post(path, json=update())] * 2)
    score = "crp-context-coverage-score"  # of an envelope
    assert {answer.json()["session"]["window_count"]: score in answer.headers for answer in answers} == {
        1: True,
        2: False,
    }


def a_window(version):
    envelope = pack_facts(cdr_rank([1.0] + [0.1] * 7, Retriever(make_store()), same_session(), k=9), 60)
    return KeptWindow.of(envelope, version)


def test_a_ranking_that_comes_late_does_not_replace_that_of_the_session_as_it_is(clock):
    kept, _ = sessions()
    entry = asyncio.run(kept.create(same_session(id="a")))
    old, new = a_window(entry.now.number), a_window(entry.now.number + 1)
    asyncio.run(kept.keep_window(entry, old))
    assert asyncio.run(kept.window_of(entry)) is old
    before = kept.nbytes
    assert asyncio.run(kept.commit(entry, entry.now, entry.now.session.snapshot(), {}))
    assert asyncio.run(kept.window_of(entry)) is None  # of no use any more
    assert kept.nbytes == size_of(entry) < before
    asyncio.run(kept.keep_window(entry, old))
    assert asyncio.run(kept.window_of(entry)) is None
    asyncio.run(kept.keep_window(entry, new))
    asyncio.run(kept.keep_window(entry, old))
    assert asyncio.run(kept.window_of(entry)) is new
