"""What a tenant's requests, answers and sessions may hold is counted, and more is refused before it is there."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from sys import getsizeof

import numpy as np
import pytest
from serving import (
    DIM,
    MODEL,
    b64,
    bearer,
    created,
    error_of,
    hold_pool,
    make_store,
    new_session,
    query,
    rank,
    same_session,
    serving,
    sub_vectors,
    update,
    write_keys,
)

from cdr_kernel import WindowReport
from cdr_kernel.serve import _idempotency
from cdr_kernel.serve._budget import Budget
from cdr_kernel.serve._errors import Refusal
from cdr_kernel.serve._idempotency import LARGEST_BODY, Answers, Done
from cdr_kernel.serve._sessions import LocalSessions, size_of
from cdr_kernel.serve._window_memory import KeptWindow, packed_envelope

LARGE = "large " * 200_000
ONCE = {"Idempotency-Key": "once"}


@pytest.fixture
def folder(tmp_path):
    store = make_store()
    store.add(["large"], [LARGE], query(3)[None])
    store.save(tmp_path / "s")
    return tmp_path / "s"


def rerank(count=100, **more):
    documents = [{"id": "large"}] * count
    return {"model": MODEL, "query_embedding": b64(query()), "documents": documents, **more}


def test_a_fact_that_is_named_often_is_read_once(folder, monkeypatch):
    """100 times 1.2 MB would be 120 MB, of a body of 2 kB."""
    with serving(folder, max_answer=2 * len(LARGE)) as client:
        read = []
        view = type(client.app.state.service.tenants["default"].facts.facts.view())
        texts = view.texts
        monkeypatch.setattr(view, "texts", lambda self, rows: read.append(rows) or texts(self, rows))
        told = client.post("/v1/rerank", json=rerank()).json()
        assert len(told["results"]) == 100
        assert told["usage"]["total_tokens"] == 100 * len(LARGE) // 4
        assert len(read) == 1
        answer = client.post("/v1/rerank", json=rerank(return_documents=True))
        assert answer.status_code == 413
        told = error_of(answer)
        assert (told["code"], told["field"]) == ("too_large", "return_documents")
        assert f"at most {2 * len(LARGE)} bytes (--max-answer-mb)" in told["expected"]
        few = client.post("/v1/rerank", json=rerank(return_documents=True, top_n=1)).json()
        assert [each["document"]["text"] for each in few["results"]] == [LARGE]


def test_the_same_reranks_come_of_facts_named_twice(folder):
    """One that is named twice has two places, and its text in both."""
    with serving(folder) as client:
        documents = [{"id": "f1"}, {"id": "f2"}, {"id": "f1", "text": "own"}, {"text": "x", "embedding": b64(query(2))}]
        body = {"model": MODEL, "query_embedding": b64(query()), "documents": documents, "return_documents": True}
        told = client.post("/v1/rerank", json=body).json()
        text = {each["index"]: each["document"]["text"] for each in told["results"]}
        facts = {id: client.get(f"/v1/facts/{id}").json()["text"] for id in ("f1", "f2")}
        assert text == {0: facts["f1"], 1: facts["f2"], 2: "own", 3: "x"}
        assert len({each["relevance_score"] for each in told["results"] if each["index"] in (0, 2)}) == 1


@pytest.mark.parametrize("more", [{}, {"token_budget": 10**9}, {"pack": "greedy"}])
def test_an_envelope_that_is_too_large_is_413_before_it_is_made(folder, more):
    with serving(folder, max_answer=100_000) as client:
        sid = created(client)
        answer = client.post(f"/v1/sessions/{sid}/rank", json=rank(query=b64(query(3)), k=61, **more))
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "too_large"
        assert "--max-answer-mb" in error_of(answer)["expected"]
        small = client.post(f"/v1/sessions/{sid}/rank", json=rank(query=b64(query(3)), k=61, token_budget=2000))
        assert small.status_code == 200
        assert small.json()["skipped"] >= 1


def test_columns_of_facts_count_too(tmp_path):
    store = make_store(20)
    store.add([f"w{i}" for i in range(20)], ["t"] * 20, np.tile(query(3), (20, 1)), source=["s" * 10_000] * 20)
    store.save(tmp_path / "s")
    with serving(tmp_path / "s", max_answer=100_000) as client:
        sid = created(client)
        answer = client.post(f"/v1/sessions/{sid}/rank", json=rank(query=b64(query(3)), k=40))
        assert (answer.status_code, error_of(answer)["field"]) == (413, "k")


def test_bodies_of_a_tenant_are_counted_while_they_are_worked_on(folder, tmp_path):
    """One more than fits is turned away before it is read, and another tenant's is not."""
    for name in ("a", "b"):
        make_store().save(tmp_path / "both" / name)
    keys = write_keys(tmp_path / "keys.json", a="ka", b="kb")
    with serving(tmp_path / "both", keys=keys, max_body=100_000, request_bytes=250_000) as client:
        tenant = client.app.state.service.tenants["a"]
        paths = {name: f"/v1/sessions/{created(client, bearer('k' + name))}/assess" for name in ("a", "b")}
        body = json.dumps({"output": "word " * 18_000}).encode()
        headers = {"Content-Type": "application/json"}
        release, answers = threading.Event(), []
        hold_pool(client, release)

        def send():
            answers.append(client.post(paths["a"], content=body, headers=bearer("ka") | headers))

        threads = [threading.Thread(target=send) for _ in range(2)]
        try:
            for thread in threads:
                thread.start()
            while tenant.requests.used < 2 * len(body):
                assert any(thread.is_alive() for thread in threads)
            more = client.post(paths["a"], content=body, headers=bearer("ka") | headers)
            assert more.status_code == 429
            assert more.headers["retry-after"] == "1"
            assert "--request-mb" in error_of(more)["message"]
            assert client.get("/v1/stats", headers=bearer("ka")).status_code == 200
            other = client.app.state.service.tenants["b"].requests
            assert other.used == 0
        finally:
            release.set()
            for thread in threads:
                thread.join()
        assert [answer.status_code for answer in answers] == [200, 200]
        assert client.post(paths["b"], content=body, headers=bearer("kb") | headers).status_code == 200
        assert tenant.requests.used == tenant.answers.used == 0


def test_a_body_of_unknown_length_is_counted_as_it_comes(folder):
    with serving(folder, max_body=100_000, request_bytes=100_000) as client:
        budget = client.app.state.service.tenants["default"].requests
        path = f"/v1/sessions/{created(client)}/assess"
        used = []

        def parts():
            yield b'{"output": "'
            for _ in range(8):
                yield b"word " * 2000
                used.append(budget.used)
            yield b'"}'

        headers = {"Content-Type": "application/json"}
        assert client.post(path, content=parts(), headers=headers).status_code == 200
        assert budget.used == 0
        budget.used = 50_000  # of others
        assert client.post(path, content=parts(), headers=headers).status_code == 429
        assert budget.used == 50_000


def test_answers_that_nobody_reads_are_counted(folder):
    with serving(folder, max_answer=4_000_000, answer_bytes=4_000_000) as client:
        budget = client.app.state.service.tenants["default"].answers
        budget.used = 3_000_000  # of answers that are not taken
        answer = client.get("/v1/facts/large")
        assert answer.status_code == 429
        assert "--answer-mb" in error_of(answer)["message"]
        assert client.get("/v1/facts/f1").status_code == 200
        assert budget.used == 3_000_000
        budget.used = 4_000_000
        for _ in range(2):  # nobody is let in, whatever is asked for
            assert client.get("/v1/stats").status_code == 429
        budget.used = 0
        assert client.get("/v1/facts/large").status_code == 200
        assert budget.used == 0


def test_a_change_whose_answer_finds_no_room_changes_nothing(folder):
    """429 means that nothing was done, so it is said before anything is."""
    with serving(folder, max_answer=2_000_000, answer_bytes=2_000_000) as client:
        task = new_session(max_windows=20)
        task["sub_queries"][0]["text"] = LARGE
        budget = client.app.state.service.tenants["default"].answers
        sid = client.post("/v1/sessions", json=task).json()["id"]
        before = client.get(f"/v1/sessions/{sid}").json()
        budget.used = 1_500_000
        for path, body in (
            ("", task),
            (f"/{sid}/update", update()),
            (f"/{sid}/reset", None),
            (f"/{sid}/snapshot", None),
        ):
            assert client.post(f"/v1/sessions{path}", json=body).status_code == 429
        assert client.delete(f"/v1/sessions/{sid}").status_code == 429
        budget.used = 0
        assert client.get(f"/v1/sessions/{sid}").json() == before
        assert len(client.app.state.service.tenants["default"].local) == 1
        assert client.post(f"/v1/sessions/{sid}/update", json=update()).status_code == 200


def test_a_budget_says_what_is_too_much_at_all():
    budget = Budget(100, "bodies (--request-mb)")
    with pytest.raises(Refusal) as caught:
        budget.take(101)
    assert (caught.value.status, caught.value.detail.code) == (413, "too_large")
    budget.take(60)
    with pytest.raises(Refusal) as caught:
        budget.take(41)
    assert caught.value.status == 429
    budget.take(40)
    with pytest.raises(Refusal):
        budget.check()


def test_a_large_answer_under_a_key_is_kept_as_done(folder):
    """The request is not done twice, and what is kept of it is small."""
    with serving(folder) as client:
        task = new_session(max_windows=20)
        task["sub_queries"][0]["text"] = LARGE
        tenant = client.app.state.service.tenants["default"]
        first = client.post("/v1/sessions", json=task, headers=ONCE)
        sid = first.json()["id"]
        again = client.post("/v1/sessions", json=task, headers=ONCE)
        assert again.status_code == 409
        assert error_of(again)["code"] == "answer_not_kept"
        assert again.headers["idempotency-replayed"] == "true"
        assert f"GET /v1/sessions/{sid} shows the session" in error_of(again)["message"]
        assert len(tenant.local) == 1
        assert tenant.sessions.answers.nbytes < 2000
        other = client.post("/v1/sessions", json=new_session(), headers=ONCE)
        assert error_of(other)["code"] == "idempotency_key_reused"
        size = tenant.local.nbytes
        for i in range(3):
            key = {"Idempotency-Key": f"window {i}"}
            assert client.post(f"/v1/sessions/{sid}/update", json=update(), headers=key).status_code == 200
            assert client.post(f"/v1/sessions/{sid}/update", json=update(), headers=key).status_code == 409
        assert client.get(f"/v1/sessions/{sid}").json()["window_count"] == 3
        assert tenant.local.nbytes < size + 10_000


def done(size):
    return Done("d", 200, {}, b"x" * size)


def test_kept_answers_are_bounded_in_bytes_and_in_time(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(_idempotency, "monotonic", lambda: now[0])
    answers = Answers(60.0, most=8, max_bytes=50_000)

    def get(key):
        return asyncio.run(answers.get(key))

    for i in range(8):
        asyncio.run(answers.put(f"k{i}", done(10_000)))
        assert answers.nbytes <= 50_000
    assert [get(f"k{i}").size for i in range(8)] == [10_000] * 4 + [0] * 4  # the oldest are notes that it was done
    assert all(get(f"k{i}").digest == "d" for i in range(8))
    asyncio.run(answers.put("k7", done(10)))
    assert len(answers) == 8
    now[0] += 61
    assert get("k7") is None
    assert len(answers) == answers.nbytes == 0
    assert done(5).without_body().without_body().size == 5
    assert LARGEST_BODY < _idempotency.MOST_BYTES


def test_names_count_with_their_length():
    """What 150 bytes each were, however long."""
    local = LocalSessions(ttl_s=60, most=10, max_bytes=2**30)
    entry = asyncio.run(local.create(same_session(id="a")))
    before = size_of(entry)
    names = [f"{i}".ljust(1000, "é") for i in range(500)]
    twin = entry.now.session.snapshot()
    twin.update(WindowReport(0.1, ("s0",)), "red", envelope=packed_envelope(names, None, 0), embedding_model=MODEL)
    asyncio.run(local.commit(entry, entry.now, twin, {}))
    assert local.nbytes == size_of(entry) > before + sum(map(getsizeof, names)) > before + 500_000
    window = KeptWindow.of(packed_envelope(names, None, 0), entry.now.number)
    assert window.nbytes > sum(map(getsizeof, names))
    words = KeptWindow.of(packed_envelope([], None, 0), 1)
    full = type(words)(**{**{f: getattr(words, f) for f in words.__struct_fields__}, "direction": b"x" * 9000})
    assert full.nbytes == words.nbytes + 9000
    entry.thresholds = {"s0": 0.5}
    assert size_of(entry) > local.nbytes


def test_a_session_that_would_be_too_large_is_refused_and_stays(folder):
    with serving(folder, session_bytes=200_000) as client:
        sid = created(client, max_windows=20)
        before = client.get(f"/v1/sessions/{sid}").json()
        output = " ".join(f"w{i}" for i in range(20_000))
        for body in (update(output=output), update(packed=[f"{i}".ljust(1000) for i in range(300)])):
            answer = client.post(f"/v1/sessions/{sid}/update", json=body)
            assert answer.status_code == 413
            assert "--session-mb" in error_of(answer)["expected"]
        assert client.get(f"/v1/sessions/{sid}").json() == before
        task = new_session()
        task["sub_queries"][0]["text"] = LARGE
        assert client.post("/v1/sessions", json=task).status_code == 413
        assert len(client.app.state.service.tenants["default"].local) == 1
        assert client.post(f"/v1/sessions/{sid}/update", json=update()).status_code == 200


def test_a_blacklist_that_makes_too_large_a_token_is_413(folder):
    with serving(folder, max_answer=10_000) as client:
        sid = created(client, max_windows=20)
        client.post(f"/v1/sessions/{sid}/update", json=update(output=" ".join(f"w{i}" for i in range(3000))))
        answer = client.post(f"/v1/sessions/{sid}/token")
        assert (answer.status_code, error_of(answer)["field"]) == (413, "blacklist")


def test_what_is_refused_leaves_nothing_behind(folder):
    """An error whose traceback holds the error again keeps the texts of its request until the garbage collector
    comes: with one refusal after the other that is all memory."""
    requests = [
        lambda client, sid: client.post("/v1/rerank", json=rerank(return_documents=True)),
        lambda client, sid: client.post(f"/v1/sessions/{sid}/rank", json=rank(query=b64(query(3)), k=61)),
        lambda client, sid: client.post(f"/v1/sessions/{sid}/rank", json=rank(where={"nothing": ["x"] * 50})),
        lambda client, sid: client.post(f"/v1/sessions/{sid}/update", json=update(["nobody"])),
    ]
    with serving(folder, max_answer=1_000_000) as client:
        sid = created(client)
        for send in requests:
            send(client, sid)
            gc.collect()
            gc.disable()
            try:
                assert {send(client, sid).status_code for _ in range(5)} <= {413, 422}
                left = sum(type(each) is Refusal for each in gc.get_objects())
                assert left < 3  # a thread may still be leaving its frames; a cycle would leave all five
            finally:
                gc.enable()


def test_one_tenants_store_that_hangs_holds_no_other_tenants_changes(tmp_path):
    """Each has a thread of its own for changes, which may wait for a disk."""
    names = ["a", "b", "c", "d"]
    for name in names:
        make_store().save(tmp_path / "stores" / name)
    keys = write_keys(tmp_path / "keys.json", **{name: f"k{name}" for name in names})
    facts = {"embedding_model": MODEL, "facts": [{"id": "n", "text": "t", "embedding": b64(query())}]}
    with serving(tmp_path / "stores", keys=keys) as client:
        service, go, answers = client.app.state.service, threading.Event(), []
        for name in names[:3]:
            service.tenants[name].facts.upsert = lambda *args, **more: go.wait(60) and None

        def send(name):
            answers.append(client.put("/v1/facts", json=facts, headers=bearer(f"k{name}")).status_code)

        threads = [threading.Thread(target=send, args=(name,)) for name in names[:3]]
        try:
            for thread in threads:
                thread.start()
            while len(service.running()) < 3:
                assert all(thread.is_alive() for thread in threads)
            assert client.put("/v1/facts", json=facts, headers=bearer("kd")).status_code == 200
            assert answers == []
        finally:
            go.set()
            for thread in threads:
                thread.join()


def test_sub_queries_of_many_numbers_are_read_in_the_pool(folder):
    body = new_session()
    for item, row in zip(body["sub_queries"], sub_vectors(), strict=True):
        item["embedding"] = row.tolist()
    with serving(folder) as client:
        assert client.post("/v1/sessions", json=body).status_code == 200
        body["sub_queries"][1]["embedding"] = [1.0] * (DIM + 1)
        answer = client.post("/v1/sessions", json=body)
        assert (answer.status_code, error_of(answer)["field"]) == (422, "sub_queries[1].embedding")
