"""The operations over HTTP: answers are those of the library, refusals say what is wrong and change nothing."""

from __future__ import annotations

import base64
import threading
import time

import numpy as np
import pytest
from serving import (
    DIM,
    MODEL,
    b64,
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
from sessions import session_of_mode
from starlette.testclient import TestClient

from cdr_kernel import Retriever, WindowReport, cdr_rank, cdr_score, crp_headers, pack_facts
from cdr_kernel.score import Columns
from cdr_kernel.serve import Settings, create_app

msgspec = pytest.importorskip("msgspec")

NUMBERS = [
    "score",
    "score_without_guard",
    "relevance",
    "coverage",
    "residual_pull",
    "novelty",
    "ngram_overlap",
    "ngram_penalty",
    "importance",
    "multiplier",
    "spec_novelty",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "store"
    make_store().save(path)
    return path


@pytest.fixture(scope="module")
def client(folder):
    with serving(folder) as client:
        yield client


def agrees(answer, ranking):
    """A rank's facts are the ranking's, to the last bit."""
    facts = answer["facts"]
    assert [fact["id"] for fact in facts] == ranking.ids
    for name in NUMBERS:
        assert [fact[name] for fact in facts] == getattr(ranking, name).tolist(), name
    assert [fact["text"] for fact in facts] == [fact.text for fact in ranking.facts]
    assert answer["qualified"] == ranking.qualified
    assert answer["guard_activations"] == ranking.guard_activations


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_windows_over_http_are_those_of_the_library(client, mode):
    settings = {"exclude_packed": True} if mode == "spec" else {"mode": "calibrated", "min_relevance": None}
    sid = created(client, **settings)
    own = same_session(exclude_packed=True)
    if mode == "calibrated":
        from cdr_kernel import Session

        own = Session.calibrated(own.sub_queries, embedding_model=MODEL)
    retriever = Retriever(make_store())
    coverage_scores = []
    for window in range(1, 4):
        answer = client.post(f"/v1/sessions/{sid}/rank", json=rank(k=6, token_budget=60))
        assert answer.status_code == 200, answer.text
        told = answer.json()
        ranking = cdr_rank(query(), retriever, own, k=6 if mode == "spec" else None)
        envelope = pack_facts(ranking, 60, max_facts=None if mode == "spec" else 6)
        exit = own.exit(envelope=envelope)
        assert told["window"] == window
        agrees(told, envelope.ranking)
        assert told["tokens"] == envelope.tokens
        assert told["skipped"] == envelope.skipped
        assert told["anchor"] == own.anchor()
        assert told["exit"]["reason"] == exit.reason
        assert told["coverage_score"] == min(1.0, *(fact["spec_novelty"] for fact in told["facts"]))
        coverage_scores.append(answer.headers["crp-context-coverage-score"])
        headers = {k: v for k, v in answer.headers.items() if k.startswith("crp-")}
        assert headers == {k.lower(): v for k, v in crp_headers(envelope, own, exit).items()}

        output = "\n".join(fact.text for fact in envelope.facts)
        completeness = 0.3 * window
        report = WindowReport(completeness, (f"s{window - 1}",))
        answer = client.post(
            f"/v1/sessions/{sid}/update", json=update([f"s{window - 1}"], output=output, completeness=completeness)
        )
        assert answer.status_code == 200, answer.text
        own.update(report, output, envelope=envelope, embedding_model=MODEL)
        exit = own.exit(report, envelope)
        told = answer.json()
        assert told["anchor"] == own.anchor()
        assert told["exit"] == {
            "stop": exit.stop,
            "reason": exit.reason,
            "also": list(exit.also),
            "escalate": exit.escalate,
            "detail": exit.detail,
            "novelty_ratio": exit.novelty_ratio,
        }
        assert told["session"]["window_count"] == window
        assert told["session"]["packed"] == len(own.packed)
        headers = {k: v for k, v in answer.headers.items() if k.startswith("crp-")}
        assert headers == {k.lower(): v for k, v in crp_headers(envelope, own, exit).items()}
    assert coverage_scores[0] == "1.00" > max(coverage_scores[1:])  # in both modes (R38)


def test_a_server_that_ranks_on_a_device_answers_the_same(tmp_path):
    make_store().save(tmp_path / "s")
    own, retriever = same_session(), Retriever(make_store())
    with serving(tmp_path / "s", device="cpu", device_dtype="float16") as client:
        sid = created(client)
        for window in range(2):
            answer = client.post(f"/v1/sessions/{sid}/rank", json=rank(k=6))
            assert answer.status_code == 200, answer.text
            agrees(answer.json(), cdr_rank(query(), retriever, own, k=6))
            client.post(f"/v1/sessions/{sid}/update", json=update([f"s{window}"], output="red green"))
            own.update(WindowReport(0.2, (f"s{window}",)), "red green", embedding_model=MODEL)


def test_json_and_msgpack_say_the_same(client):
    sid = created(client)
    plain = client.post(f"/v1/sessions/{sid}/rank", json=rank())
    body = msgspec.msgpack.encode({"embedding_model": MODEL, "query": query().tobytes(), "k": 5})
    headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    packed = client.post(f"/v1/sessions/{sid}/rank", content=body, headers=headers)
    assert packed.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(packed.content) == plain.json()
    listed = client.post(f"/v1/sessions/{sid}/rank", json=rank(query=query().astype(float).tolist()))
    assert listed.json() == plain.json()
    refused = client.post("/v1/facts/delete", content=b"\xc1", headers=headers)
    assert refused.status_code == 400
    assert msgspec.msgpack.decode(refused.content)["error"]["code"] == "malformed"


def test_facts_come_go_and_are_replaced(folder):
    with serving(folder) as client:
        sid = created(client)
        vector = b64(query())
        fact = {"id": "new/one", "text": "the very query", "embedding": vector, "source": "s", "position": 3}
        add = {"embedding_model": MODEL, "facts": [fact]}
        assert client.post("/v1/facts", json=add).json() == {"added": 1, "skipped": [], "store_version": 1}
        top = client.post(f"/v1/sessions/{sid}/rank", json=rank(k=1)).json()
        assert top["facts"][0]["id"] == "new/one"
        assert top["store_version"] == 1
        got = client.get("/v1/facts/new/one").json()
        assert got == {
            "id": "new/one",
            "text": "the very query",
            "source": "s",
            "position": 3,
            "importance": 1.0,
            "sequence": 60,
            "attributes": {},
        }
        again = client.post("/v1/facts", json=add)
        assert again.status_code == 422
        assert error_of(again)["field"] == "facts.id"
        assert client.put("/v1/facts", json=add).json()["added"] == 1
        assert client.get("/v1/facts/new/one").json()["sequence"] == 61
        assert client.delete("/v1/facts/new/one").json()["removed"] == 1
        assert client.delete("/v1/facts/new/one").status_code == 404
        assert client.get("/v1/facts/new/one").status_code == 404
        gone = client.post("/v1/facts/delete", json={"ids": ["f0", "nobody"]})
        assert gone.status_code == 404
        assert client.get("/v1/stats").json()["facts"] == 60
        some = client.post("/v1/facts/delete", json={"ids": ["f0", "nobody"], "missing": "ignore"})
        assert some.json()["removed"] == 1
        assert client.get("/v1/stats").json()["facts"] == 59
        zero = {"id": "z", "text": "", "embedding": b64(np.zeros(DIM))}
        refused = client.put("/v1/facts", json={"embedding_model": MODEL, "facts": [zero]})
        assert refused.status_code == 422
        skipped = client.put("/v1/facts", json={"embedding_model": MODEL, "facts": [zero], "on_invalid": "skip"})
        assert skipped.json()["skipped"] == ["z"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"),
    [
        ("POST", "/v1/sessions", {**new_session(), "embedding_model": "other"}, 409, "embedding_model"),
        ("POST", "/v1/rerank", {"model": "other", "query_embedding": b64(query()), "documents": ["a"]}, 409, "model"),
        ("PUT", "/v1/facts", {"embedding_model": "other", "facts": [{"id": "a", "text": ""}]}, 409, "embedding_model"),
        ("POST", "/v1/sessions", {"sub_queries": new_session()["sub_queries"]}, 422, "embedding_model"),
        ("POST", "/v1/sessions", {**new_session(), "surprise": 1}, 422, "surprise"),
        ("POST", "/v1/sessions", new_session(max_windows=21), 422, "settings.max_windows"),
        ("POST", "/v1/sessions", new_session(gate=1.0), 422, None),
        (
            "POST",
            "/v1/sessions",
            {"embedding_model": MODEL, "sub_queries": [{"id": "a", "label": "A", "embedding": [1.0]}]},
            422,
            "sub_queries[0].embedding",
        ),
        (
            "POST",
            "/v1/sessions",
            {"embedding_model": MODEL, "sub_queries": [{"id": "a", "label": "A"}]},
            422,
            "sub_queries[0].embedding",
        ),
        ("POST", "/v1/sessions/SID/rank", rank(embedding_model="other"), 409, "embedding_model"),
        ("POST", "/v1/sessions/SID/rank", rank(k=-1), 422, "k"),
        ("POST", "/v1/sessions/SID/rank", rank(k=10**6), 422, "k"),
        ("POST", "/v1/sessions/SID/rank", rank(query=None), 422, "query"),
        ("POST", "/v1/sessions/SID/rank", rank(query=None, text="hello"), 422, "query"),
        ("POST", "/v1/sessions/SID/rank", rank(query=[0.0] * DIM), 422, "query"),
        ("POST", "/v1/sessions/SID/rank", rank(pack="need"), 422, "pack"),
        ("POST", "/v1/sessions/SID/rank", rank(query="!"), 422, "query"),
        ("POST", "/v1/sessions/SID/rank", rank(multiplier={"f1": 2.0, "F1": 2.0}), 422, "multiplier"),
        ("POST", "/v1/sessions/SID/rank", rank(multiplier={"f1": -1}), 422, "multiplier[...]"),
        ("POST", "/v1/sessions/SID/rank", rank(where={"colour": "red"}), 422, "where"),
        ("POST", "/v1/sessions/SID/update", {**update(), "embedding_model": "other"}, 409, "embedding_model"),
        ("POST", "/v1/sessions/SID/update", update(["nobody"]), 422, "addressed"),
        ("POST", "/v1/sessions/SID/update", update(completeness=1.5), 422, "report.completeness_score"),
        ("POST", "/v1/sessions/SID/merge", {"branches": ["nobody"]}, 404, None),
        ("POST", "/v1/sessions/nobody/rank", rank(), 404, None),
        ("GET", "/v1/sessions/nobody", None, 404, None),
        ("POST", "/v1/rerank", {"model": MODEL, "query_embedding": b64(query()), "documents": ["a"]}, 422, None),
        ("POST", "/v1/rerank", {"model": MODEL, "documents": ["a"]}, 422, "query_embedding"),
        ("GET", "/v1/nowhere", None, 404, None),
        ("PATCH", "/v1/stats", None, 405, None),
    ],
)
def test_bad_input_says_what_is_wrong_and_changes_nothing(client, method, path, body, status, field):
    sid = created(client)
    before = client.get(f"/v1/sessions/{sid}").json()
    answer = client.request(method, path.replace("SID", sid), json=body)
    assert answer.status_code == status, answer.text
    error = error_of(answer)
    assert error["message"]
    if field is not None:
        assert error["field"] == field
    assert client.get(f"/v1/sessions/{sid}").json() == before
    assert client.get("/v1/stats").json()["facts"] == 60


def test_a_multiplier_weighs_the_facts_it_names_and_names_no_others(client):
    sid = created(client)
    last = client.post(f"/v1/sessions/{sid}/rank", json=rank(k=60)).json()["facts"][-1]["id"]
    told = client.post(f"/v1/sessions/{sid}/rank", json=rank(multiplier={last: 1e6})).json()
    ranking = cdr_rank(query(), Retriever(make_store()), same_session(), k=5, multiplier={last: 1e6})
    agrees(told, ranking)
    assert (told["facts"][0]["id"], told["facts"][0]["multiplier"]) == (last, 1e6)
    error = error_of(client.post(f"/v1/sessions/{sid}/rank", json=rank(multiplier={"f1": 2.0, "x": 1.0, "y": 0.0})))
    assert (error["field"], error["got"]) == ("multiplier", "'x', 'y'")
    assert error["expected"] == "ids of facts that are in the store"


def test_bodies_that_are_no_bodies(client):
    def post(headers=None, **more):
        return client.post("/v1/facts/delete", headers=headers or {"Content-Type": "application/json"}, **more)

    assert post(content=b"{").status_code == 400
    assert post(content=b"").status_code == 400
    assert post(content=b'{"ids": ["\xff"]}').status_code == 400
    assert post(content=b"[" * 100_000).status_code in (400, 422)
    assert post(content=b"a=1", headers={"Content-Type": "application/x-www-form-urlencoded"}).status_code == 415
    assert client.post("/v1/facts/delete", content=b'{"ids": ["f1"]}').status_code == 415
    assert error_of(post(json=[]))["message"]


def test_what_is_too_large_is_refused_before_it_is_read(folder):
    with serving(folder, max_body=2000) as client:
        answer = client.post("/v1/facts/delete", json={"ids": ["x" * 3000]})
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "too_large"

        def parts():
            for _ in range(10):
                yield b"x" * 1000

        assert client.post("/v1/facts/delete", content=parts()).status_code == 413
        assert client.get("/v1/stats").status_code == 200


def test_a_repeated_update_is_applied_once_and_answered_alike(client):
    sid = created(client)
    client.post(f"/v1/sessions/{sid}/rank", json=rank())
    headers = {"Idempotency-Key": "k1"}
    first = client.post(f"/v1/sessions/{sid}/update", json=update(), headers=headers)
    second = client.post(f"/v1/sessions/{sid}/update", json=update(), headers=headers)
    assert first.json() == second.json()
    assert second.headers["idempotency-replayed"] == "true"
    crp = [{k: v for k, v in a.headers.items() if k.startswith("crp-")} for a in (first, second)]
    assert crp[0] == crp[1]
    assert client.get(f"/v1/sessions/{sid}").json()["window_count"] == 1
    other = client.post(f"/v1/sessions/{sid}/update", json=update(["s1"]), headers=headers)
    assert other.status_code == 422
    assert error_of(other)["code"] == "idempotency_key_reused"
    bad = client.post(f"/v1/sessions/{sid}/update", json=update(["s1"]), headers={"Idempotency-Key": "x" * 300})
    assert bad.status_code == 422
    assert client.get(f"/v1/sessions/{sid}").json()["window_count"] == 1


def test_repeats_that_come_at_once_are_applied_once(client):
    sid = created(client)
    answers = []

    def send():
        answers.append(
            client.post(f"/v1/sessions/{sid}/update", json=update(), headers={"Idempotency-Key": "same"}).json()
        )

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer == answers[0] for answer in answers)
    assert client.get(f"/v1/sessions/{sid}").json()["window_count"] == 1


def test_fact_writes_and_sessions_are_made_once_per_key(folder):
    with serving(folder) as client:
        headers = {"Idempotency-Key": "w"}
        body = {"embedding_model": MODEL, "facts": [{"id": "n", "text": "t", "embedding": b64(query())}]}
        first = client.post("/v1/facts", json=body, headers=headers)
        second = client.post("/v1/facts", json=body, headers=headers)
        assert (first.status_code, first.json()) == (second.status_code, second.json()) == (200, first.json())
        ids = {
            client.post("/v1/sessions", json=new_session(), headers={"Idempotency-Key": "s"}).json()["id"] for _ in "ab"
        }
        assert len(ids) == 1
        assert client.get("/v1/stats").json()["sessions"] == 1


def test_updates_of_one_session_take_turns_and_none_is_lost(client):
    sid = created(client, max_windows=20)

    def send(i):
        assert client.post(f"/v1/sessions/{sid}/update", json=update([f"s{i % 3}"])).status_code == 200

    threads = [threading.Thread(target=send, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session = client.get(f"/v1/sessions/{sid}").json()
    assert session["window_count"] == 12
    assert sorted(entry["window_number"] for entry in session["coverage"]) == list(range(1, 13))


def test_a_deadline_that_passes_is_504_and_changes_nothing(client):
    sid = created(client)
    service = client.app.state.service
    for path, body in ((f"/v1/sessions/{sid}/update", update()), (f"/v1/sessions/{sid}/rank", rank())):
        release, answers = threading.Event(), []
        blocked = hold_pool(client, release)

        def send(path=path, body=body, answers=answers):
            answers.append(client.post(path, json=body, headers={"CDR-Deadline-Ms": "400"}))

        thread = threading.Thread(target=send)
        try:
            thread.start()
            while thread.is_alive() and not service.pool.waiting("default"):
                time.sleep(0.002)
            time.sleep(0.5)  # what waits in the pool is late now
        finally:
            release.set()
            thread.join()
        assert all(task.result() for task in blocked)
        assert answers[0].status_code == 504, answers[0].text
        assert error_of(answers[0])["code"] == "deadline"
    assert client.get(f"/v1/sessions/{sid}").json()["window_count"] == 0
    for bad in ("0", "-1", "soon", "1.5", "9" * 30):
        answer = client.get("/v1/stats", headers={"CDR-Deadline-Ms": bad})
        assert answer.status_code == 422
        assert error_of(answer)["field"] == "CDR-Deadline-Ms"


def test_more_than_the_queue_takes_is_429_at_once(folder):
    with serving(folder, max_queue=2, deadline_s=20) as client:
        service = client.app.state.service
        release = threading.Event()
        blocked = hold_pool(client, release, 30)
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(client.post("/v1/sessions", json=new_session())))
            for _ in range(2)
        ]
        try:
            for thread in threads:
                thread.start()
            until = time.monotonic() + 10
            while service.tenants["default"].in_flight < 2 and time.monotonic() < until:
                time.sleep(0.005)
            refused = client.post("/v1/sessions", json=new_session(), headers={"CDR-Deadline-Ms": "1000"})
            assert client.get("/readyz").status_code == 200
        finally:
            release.set()
            for thread in threads:
                thread.join()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused)["code"] == "overloaded"
        assert [answer.status_code for answer in answers] == [200, 200]
        assert all(task.result() for task in blocked)
        assert client.get("/v1/stats").json()["sessions"] == 2


def test_assess_and_an_update_without_a_report_say_the_same(client):
    sid = created(client)
    output = "All about red. More about red things. Something on green."
    report = client.post(f"/v1/sessions/{sid}/assess", json={"output": output, "min_depth": 0.0}).json()
    assert report["words_by_sub_query"]
    assert client.get(f"/v1/sessions/{sid}").json()["window_count"] == 0
    plain = client.post(f"/v1/sessions/{sid}/assess", json={"output": output}).json()
    updated = client.post(f"/v1/sessions/{sid}/update", json={"embedding_model": MODEL, "output": output}).json()
    assert updated["report"] == plain
    assert updated["session"]["words"] == {"s0": 0, "s1": 0, "s2": 0} | plain["words_by_sub_query"]


def test_snapshot_merge_and_reset(client):
    sid = created(client)
    one = client.post(f"/v1/sessions/{sid}/snapshot").json()["id"]
    two = client.post(f"/v1/sessions/{sid}/snapshot").json()["id"]
    assert len({sid, one, two}) == 3
    client.post(f"/v1/sessions/{one}/update", json=update(["s0"]))
    client.post(f"/v1/sessions/{two}/update", json=update(["s1"]))
    assert client.get(f"/v1/sessions/{sid}").json()["window_count"] == 0
    merged = client.post(f"/v1/sessions/{sid}/merge", json={"branches": [one, two]}).json()
    assert merged["window_count"] == 2
    assert [entry["sub_query_id"] for entry in merged["coverage"]] == ["s0", "s1"]
    assert merged["residual"] == ["s2"]
    stale = client.post(f"/v1/sessions/{sid}/merge", json={"branches": [one]})
    assert stale.status_code == 422
    reset = client.post(f"/v1/sessions/{sid}/reset").json()
    assert (reset["window_count"], reset["coverage"], reset["ngrams"]) == (0, [], 0)


@pytest.mark.parametrize(
    ("defaults", "told"),
    [
        ({"min_relevance": 0.9, "max_windows": 7, "guard": False}, {"mode": "spec", "min_relevance": 0.9}),
        ({"mode": "calibrated", "gate": 1.0, "max_windows": 7, "guard": True}, {"mode": "calibrated", "gate": 1.0}),
    ],
)
def test_a_server_has_defaults_for_new_sessions(tmp_path, defaults, told):
    """§2.6: the gate is configurable per deployment; each session may say otherwise."""
    make_store().save(tmp_path / "s")
    mode, other = told["mode"], {"spec": "calibrated", "calibrated": "spec"}[told["mode"]]
    with serving(tmp_path / "s", new_sessions=defaults) as client:
        shown = client.get("/v1/stats").json()["new_sessions"]
        assert shown["guard"] is defaults["guard"]
        named = {name: value for name, value in shown["settings"].items() if value is not None}
        assert named == {name: value for name, value in defaults.items() if name != "guard"}
        body = new_session(min_relevance=None)

        def made(**settings):
            answer = client.post("/v1/sessions", json={**body, "settings": settings})
            assert answer.status_code == 200, answer.text
            return answer.json()

        plain = made()
        assert {name: plain["settings"][name] for name in told} == told
        assert (plain["mode"], plain["max_windows"]) == (mode, 7)
        assert (plain["ngrams"] is None) is not defaults["guard"]
        ranked = client.post(f"/v1/sessions/{plain['id']}/rank", json=rank()).json()
        settings = {name: value for name, value in defaults.items() if name != "guard"}
        own = session_of_mode(same_session().sub_queries, embedding_model=MODEL, **settings)
        assert 0 < ranked["qualified"] == cdr_rank(query(), Retriever(make_store()), own).qualified < 60
        value = {"min_relevance": 0.1} if mode == "spec" else {"gate": 0.1}
        changed = made(**value, max_windows=3)
        (name,) = value
        assert (changed["settings"][name], changed["max_windows"], changed["mode"]) == (value[name], 3, mode)
        others = made(mode=other)  # takes what both modes have
        assert (others["mode"], others["max_windows"], others["settings"][name]) == (other, 7, None)
        guarded = client.post("/v1/sessions", json={**body, "settings": {}, "guard": not defaults["guard"]}).json()
        assert (guarded["ngrams"] is None) is defaults["guard"]
        foreign = {"gate": 1.0} if mode == "spec" else {"min_relevance": 0.1}
        refused = client.post("/v1/sessions", json={**body, "settings": foreign})
        assert (refused.status_code, "belongs to mode" in error_of(refused)["message"]) == (422, True)


def test_packed_facts_may_be_named(client):
    sid = created(client, exclude_packed=True)
    first = [fact["id"] for fact in client.post(f"/v1/sessions/{sid}/rank", json=rank(k=4)).json()["facts"]]
    told = client.post(f"/v1/sessions/{sid}/update", json=update(packed=first[:2])).json()
    assert told["session"]["packed"] == 2
    known = told["exit"]["novelty_ratio"]
    assert known is not None
    second = [fact["id"] for fact in client.post(f"/v1/sessions/{sid}/rank", json=rank(k=4)).json()["facts"]]
    assert not set(first[:2]) & set(second)
    told = client.post(f"/v1/sessions/{sid}/update", json=update(["s1"], packed=["elsewhere"])).json()
    assert told["session"]["packed"] == 3
    assert told["exit"]["novelty_ratio"] == known  # R37: of the last envelope whose numbers are known


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
@pytest.mark.parametrize(
    ("asked", "field"), [({"token_budget": 1}, "token_budget"), ({"max_facts": 0}, "max_facts"), ({"k": 0}, "k")]
)
def test_an_envelope_that_nothing_fits_into_is_the_requests_fault(client, mode, asked, field):
    """R39: no exit, no advice to ingest more documents; the ranking before it stays the last one."""
    sid = created(client, **({} if mode == "spec" else {"mode": mode, "min_relevance": None}))
    first = client.post(f"/v1/sessions/{sid}/rank", json=rank()).json()["facts"]
    refused = client.post(f"/v1/sessions/{sid}/rank", json=rank(**asked))
    assert refused.status_code == 422
    error = error_of(refused)
    assert (error["code"], error["field"]) == ("invalid", field)
    assert f"{field}: no fact fits into" in error["message"]
    assert not any(name.startswith("crp-") for name in refused.headers)
    told = client.post(f"/v1/sessions/{sid}/update", json=update()).json()
    assert told["session"]["packed"] == len(first)


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_a_filter_that_leaves_nothing_is_exhaustion_and_named(client, mode):
    sid = created(client, **({} if mode == "spec" else {"mode": mode, "min_relevance": None}))
    answer = client.post(f"/v1/sessions/{sid}/rank", json=rank(where={"source": ["doc7", "doc8"]}))
    detail = "no fact matches the filter (source in ['doc7', 'doc8'])"
    assert (answer.status_code, answer.json()["exit"]["detail"]) == (200, detail)
    assert (answer.json()["coverage_score"], answer.json()["band"]) == (0.0, None)
    headers = {name: value for name, value in answer.headers.items() if name.startswith("crp-")}
    assert headers == {
        "crp-context-coverage-score": "0.00",
        "crp-context-coverage-depth": "0",
        "crp-context-ngram-guard-activations": "0",
        "crp-context-continuation-status": "ckf-exhausted",
        "crp-context-mode": "ckf-exhausted",
        "crp-onboarding-hint": "ingest-more-documents-for-continued-quality",
    }
    assert client.get(f"/v1/sessions/{sid}").json()["exit"]["detail"] == detail


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_a_packed_fact_from_elsewhere_loses_no_number(client, mode):
    """Of a fact of the store that was not ranked, and of one that is nowhere."""
    sid = created(client, **({} if mode == "spec" else {"mode": mode, "min_relevance": None}))
    store, own = make_store(), same_session()
    texts = "\n".join(fact.text for fact in store.get(store.ids))
    before = [fact["id"] for fact in client.post(f"/v1/sessions/{sid}/rank", json=rank(k=3)).json()["facts"]]
    first_exit = client.post(f"/v1/sessions/{sid}/update", json=update(["s0"], output=texts)).json()["exit"]
    own.update(WindowReport(0.2, ("s0",)), texts, embedding_model=MODEL)
    answer = client.post(f"/v1/sessions/{sid}/rank", json=rank(k=3))
    first = [fact["id"] for fact in answer.json()["facts"]]
    numbers = {fact["id"]: fact["spec_novelty"] for fact in answer.json()["facts"]}
    activations = answer.headers["crp-context-ngram-guard-activations"]
    if mode == "spec":
        assert int(activations) == answer.json()["qualified"] > 10
    known = cdr_rank(query(), Retriever(store), own)
    for id, novelty in zip(known.ids, known.spec_novelty.tolist(), strict=True):
        assert numbers.get(id, novelty) == novelty
    other = known.ids[int(np.argmin(known.spec_novelty))]
    assert other not in first
    told = client.post(f"/v1/sessions/{sid}/update", json=update(["s1"], packed=[*first, other, "nowhere"]))
    assert told.headers["crp-context-ngram-guard-activations"] == activations
    assert told.headers["crp-context-coverage-depth"] == "1"
    assert told.headers["crp-context-coverage-score"] == f"{known.spec_novelty.min():.2f}"
    assert told.json()["session"]["packed"] == len({*before, *first, other, "nowhere"})
    ratio = told.json()["exit"]["novelty_ratio"]
    if mode == "spec":  # exit 3 needs each fact's own score, so it stays as the last known envelope had it (R37)
        assert ratio == first_exit["novelty_ratio"] == 1.0
    else:
        assert 0.9 < ratio < first_exit["novelty_ratio"]


def test_a_packed_fact_from_elsewhere_leaves_the_task_its_direction(client):
    ids = {}
    for packed in (None, ["nowhere"]):
        sid = created(client, mode="calibrated", min_relevance=None)
        client.post(f"/v1/sessions/{sid}/rank", json=rank(k=3))
        client.post(f"/v1/sessions/{sid}/update", json=update(packed=packed))
        state = client.app.state.service.tenants["default"].local.peek(sid).now.session.state
        ids[packed is None] = state.feedback.fact_ids
    assert ids[True] == ids[False]


def test_what_an_update_cannot_know_is_in_no_header(client):
    sid = created(client)
    names = ("crp-context-ngram-guard-activations", "crp-context-coverage-score")
    told = client.post(f"/v1/sessions/{sid}/update", json=update(["s0"]))  # nothing was ranked
    assert [told.headers.get(name) for name in names] == [None, None]
    assert told.headers["crp-context-coverage-depth"] == "0"
    told = client.post(f"/v1/sessions/{sid}/update", json=update(["s1"], packed=["f1"]))  # a fact of the store
    assert [told.headers.get(name) is None for name in names] == [True, False]
    activations = client.post(f"/v1/sessions/{sid}/rank", json=rank()).headers[names[0]]
    told = client.post(f"/v1/sessions/{sid}/update", json=update(["s2"], packed=["nowhere"]))
    assert [told.headers.get(name) for name in names] == [activations, None]
    client.post(f"/v1/sessions/{sid}/rank", json=rank())
    told = client.post(f"/v1/sessions/{sid}/update", json=update([], packed=[]))
    assert [told.headers.get(name) for name in names][1] == "0.00"
    assert told.json()["exit"]["reason"] is None  # that nothing was packed is not the store's fault


def test_a_ranking_of_an_earlier_state_does_not_count_for_an_update(client):
    sid = created(client)
    client.post(f"/v1/sessions/{sid}/rank", json=rank())
    client.post(f"/v1/sessions/{sid}/reset")
    told = client.post(f"/v1/sessions/{sid}/update", json=update()).json()
    assert told["session"]["packed"] == 0


def test_the_safety_budget_and_the_exits(client):
    sid = created(client, max_windows=2)
    client.post(f"/v1/sessions/{sid}/rank", json=rank())
    answer = client.post(f"/v1/sessions/{sid}/update", json=update(["s0"], safety_budget=0.05))
    exit = answer.json()["exit"]
    assert (exit["stop"], exit["reason"], exit["escalate"]) == (True, "safety-budget-depleted", True)
    assert answer.headers["crp-context-continuation-status"] == "safety-budget-depleted"
    refused = client.post(f"/v1/sessions/{sid}/rank", json=rank())
    assert (refused.status_code, error_of(refused)["code"]) == (409, "session_ended")
    answer = client.post(f"/v1/sessions/{sid}/update", json=update(["s1"], completeness=0.74, safety_budget=0.9))
    assert answer.headers["crp-context-continuation-status"] == "limit-reached"
    assert answer.headers["crp-quality-completeness"] == "0.74"
    nothing = created(client, min_relevance=1.0)
    answer = client.post(f"/v1/sessions/{nothing}/rank", json=rank())
    assert answer.headers["crp-context-mode"] == "ckf-exhausted"
    assert answer.headers["crp-onboarding-hint"] == "ingest-more-documents-for-continued-quality"
    assert answer.json()["facts"] == []


def ends(client, sid, how):
    """Bring a session to one of its exits."""
    path = f"/v1/sessions/{sid}"
    if how == "ckf-exhausted":
        answer = client.post(f"{path}/rank", json=rank(query=b64(-query())))
    else:
        more = {
            "task-complete": {"addressed": ("s0", "s1", "s2"), "completeness": 1.0},
            "limit-reached": {},
            "safety-budget-depleted": {"safety_budget": 0.1},
        }[how]
        client.post(f"{path}/rank", json=rank())
        answer = client.post(f"{path}/update", json=update(**more))
    assert answer.headers["crp-context-continuation-status"] == how
    return answer


@pytest.mark.parametrize("how", ["task-complete", "limit-reached", "ckf-exhausted", "safety-budget-depleted"])
def test_a_session_that_has_ended_stays_ended(client, how):
    sid = created(client, max_windows=1 if how == "limit-reached" else 5)
    path = f"/v1/sessions/{sid}"
    told = ends(client, sid, how).json()["exit"]
    before = client.get(path).json()
    assert before["exit"] == told
    token = client.post(f"{path}/token").json()
    for part, body in (("rank", rank()), ("update", update(["s1"]))):
        refused = client.post(f"{path}/{part}", json=body)
        error = error_of(refused)
        assert (refused.status_code, error["code"]) == (409, "session_ended")
        assert refused.headers["crp-context-continuation-status"] == how
        assert f"ended: {how}. What opens it again: " in error["message"]
        assert client.get(path).json() == before
    branch = client.post(f"{path}/snapshot").json()
    assert client.post(f"/v1/sessions/{branch['id']}/rank", json=rank()).status_code == 409
    client.delete(path)
    body = {"embedding_model": MODEL, "sub_queries": new_session()["sub_queries"]}
    again = client.post(
        "/v1/sessions/resume", json={**body, **{k: token[k] for k in ("token", "blacklist", "outputs")}}
    )
    assert again.json() == {**before, "packed": 0}
    assert client.post(f"{path}/rank", json=rank()).status_code == 409
    fresh = client.post(f"{path}/reset").json()["exit"]
    assert fresh["stop"] == (how == "safety-budget-depleted")


def test_what_opens_a_session_again(tmp_path):
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s") as client:

        def status(sid, **extension):
            if extension:
                body = {"embedding_model": MODEL, **extension}
                extended = client.post(f"/v1/sessions/{sid}/extend", json=body)
                assert extended.status_code == 200, extended.text
                assert not extended.json()["exit"]["stop"]
            return client.post(f"/v1/sessions/{sid}/rank", json=rank()).status_code

        limit, done, poor, unsafe = (created(client, max_windows=n) for n in (1, 5, 5, 5))
        ends(client, limit, "limit-reached")
        assert [status(limit), status(limit, max_windows=2)] == [409, 200]
        ends(client, done, "task-complete")
        more = {"id": "more", "label": "More", "text": "about wheels", "embedding": b64(sub_vectors(1, seed=9)[0])}
        assert [status(done), status(done, sub_queries=[more])] == [409, 200]
        assert client.get(f"/v1/sessions/{done}").json()["residual"] == ["more"]
        ends(client, unsafe, "safety-budget-depleted")
        assert [status(unsafe), status(unsafe, safety_budget=0.5)] == [409, 200]
        ends(client, poor, "ckf-exhausted")
        client.delete("/v1/facts/f1")
        assert status(poor) == 409
        fact = {"id": "new", "text": "the very query", "embedding": b64(query())}
        assert client.post("/v1/facts", json={"embedding_model": MODEL, "facts": [fact]}).status_code == 200
        early = client.post(f"/v1/sessions/{poor}/update", json=update())
        assert (early.status_code, error_of(early)["code"]) == (409, "session_ended"), "nothing was ranked yet"
        assert status(poor) == 200
        updated = client.post(f"/v1/sessions/{poor}/update", json=update()).json()
        assert (updated["exit"]["stop"], updated["session"]["packed"]) == (False, 5)
        again = client.post(f"/v1/sessions/{limit}/update", json=update(max_windows=3)).json()
        assert (again["session"]["max_windows"], again["exit"]["stop"]) == (3, False)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_windows": 21}, "max_windows"),
        ({"max_windows": 1}, "max_windows"),
        ({"safety_budget": 2}, "safety_budget"),
        ({"sub_queries": new_session(1)["sub_queries"]}, None),
        ({"sub_queries": [{"id": "d", "label": "D", "embedding": [1.0]}]}, "sub_queries[0].embedding"),
        (
            {"sub_queries": [{"id": f"n{i}", "label": "N", "embedding": [1.0] * DIM} for i in range(1022)]},
            "sub_queries",
        ),
        ({"embedding_model": "other"}, "embedding_model"),
    ],
)
def test_a_bad_extension_changes_nothing(client, body, field):
    sid = created(client)
    before = client.get(f"/v1/sessions/{sid}").json()
    answer = client.post(f"/v1/sessions/{sid}/extend", json={"embedding_model": MODEL, **body})
    assert answer.status_code in (409, 422)
    assert field is None or error_of(answer)["field"] == field
    assert client.get(f"/v1/sessions/{sid}").json() == before


def test_the_last_update_answers_the_whole_text(client, monkeypatch):
    sid, plain = created(client, max_windows=2), created(client, max_windows=2, keep_outputs=False)
    path = f"/v1/sessions/{sid}"
    first = client.post(f"{path}/update", json=update(output="First window.")).json()
    assert first["document"] is None
    exported = client.post(f"{path}/token").json()
    assert exported["outputs"] == ["First window."]
    last = client.post(f"{path}/update", json=update(["s1"], output="Second window."), headers={"Idempotency-Key": "k"})
    assert last.json()["document"] == "First window.\n\nSecond window."
    replayed = client.post(
        f"{path}/update", json=update(["s1"], output="Second window."), headers={"Idempotency-Key": "k"}
    )
    assert (replayed.json(), replayed.headers["idempotency-replayed"]) == (last.json(), "true")
    for _ in range(2):
        none = client.post(f"/v1/sessions/{plain}/update", json=update(output="First window.")).json()
    assert (none["exit"]["reason"], none["document"]) == ("limit-reached", None)
    assert client.post(f"/v1/sessions/{plain}/token").json()["outputs"] is None
    body = {"embedding_model": MODEL, "sub_queries": new_session()["sub_queries"], "blacklist": exported["blacklist"]}
    for outputs, document in ((exported["outputs"], "First window.\n\nThird."), (None, None), (["Other."], "refused")):
        client.delete(path)
        again = client.post("/v1/sessions/resume", json={**body, "token": exported["token"], "outputs": outputs})
        if document == "refused":
            assert error_of(again)["field"] == "outputs"
            break
        assert client.post(f"{path}/update", json=update(output="Third.")).json()["document"] == document
    monkeypatch.setattr("cdr_kernel.session._task.MOST_OUTPUT_CHARACTERS", 20)
    full = created(client)
    client.post(f"/v1/sessions/{full}/update", json=update(output="First window."))
    refused = client.post(f"/v1/sessions/{full}/update", json=update(output="Second window."))
    assert (refused.status_code, error_of(refused)["field"]) == (422, "outputs")


def test_a_sub_query_that_is_addressed_in_part_remains(client):
    sid = created(client, residual_depth=0.7)
    report = {"completeness_score": 0.2, "addressed": ["s0", "s1"], "depth_by_sub_query": {"s0": 0.4, "s1": 0.7}}
    told = client.post(f"/v1/sessions/{sid}/update", json={**update(), "report": report}).json()
    assert told["session"]["residual"] == ["s0", "s2"]
    assert told["anchor"] == "Remaining sections to complete: Label 0, Label 2"


def test_rerank_scores_are_those_of_cdr_score(client):
    r = np.random.default_rng(9)
    rows = r.standard_normal((6, DIM)).astype(np.float32)
    covered, residual = sub_vectors(2, seed=5), sub_vectors(1, seed=6)
    body = {
        "model": MODEL,
        "query": "what",
        "query_embedding": b64(query()),
        "documents": [{"text": f"d{i}", "embedding": b64(row), "importance": 1.0 + i} for i, row in enumerate(rows)],
        "covered": [b64(v) for v in covered],
        "depths": [0.2, 0.9],
        "residual": [b64(v) for v in residual],
    }
    told = client.post("/v1/rerank", json=body).json()
    columns = Columns.spec(
        query(), coverage=covered, depth_weights=np.array([0.2, 0.9]), residual=residual, min_relevance=-1.0
    )
    expected = cdr_score(rows.astype(np.float64), columns, importance=1.0 + np.arange(6), k=6)
    assert [item["index"] for item in told["results"]] == expected.rows.tolist()
    assert [item["relevance_score"] for item in told["results"]] == expected.score.tolist()
    assert "document" not in told["results"][0]
    assert told["usage"]["total_tokens"] == 7
    top = client.post("/v1/rerank", json={**body, "top_n": 2, "return_documents": True}).json()["results"]
    assert [item["index"] for item in top] == expected.rows[:2].tolist()
    assert top[0]["document"]["text"] == f"d{top[0]['index']}"
    stored = client.post(
        "/v1/rerank", json={"model": MODEL, "query_embedding": b64(query()), "documents": [{"id": "f3"}, {"id": "f4"}]}
    ).json()["results"]
    assert {item["index"] for item in stored} == {0, 1}
    gone = client.post(
        "/v1/rerank", json={"model": MODEL, "query_embedding": b64(query()), "documents": [{"id": "gone"}]}
    )
    assert error_of(gone)["field"] == "documents[0].id"
    other = error_of(client.post("/v1/rerank", json={**body, "model": "rerank-v3.5"}))
    assert (other["code"], other["field"], other["expected"], other["got"]) == (
        "model_mismatch",
        "model",
        "'m1', the store's",
        "'rerank-v3.5'",
    )


def test_a_server_that_embeds_takes_texts(folder):
    vectors = {"what": query(), "about red": sub_vectors()[0], "a document": sub_vectors()[1]}
    with serving(folder, embed=None) as client:
        service = client.app.state.service
        service._embedder = lambda texts: np.stack([vectors.get(text, query()) for text in texts])
        object.__setattr__(service.settings, "embed", MODEL)
        items = [{"id": "s0", "label": "L", "text": "about red"}]
        body = {"embedding_model": MODEL, "sub_queries": items, "settings": {"min_relevance": 0.3}}
        sid = client.post("/v1/sessions", json=body).json()["id"]
        by_text = client.post(f"/v1/sessions/{sid}/rank", json={"embedding_model": MODEL, "text": "what", "k": 5})
        by_vector = client.post(f"/v1/sessions/{sid}/rank", json=rank())
        assert by_text.json() == by_vector.json()
        facts = [{"id": "t", "text": "what"}, {"id": "u", "text": "other", "embedding": b64(query(4))}]
        assert client.post("/v1/facts", json={"embedding_model": MODEL, "facts": facts}).json()["added"] == 2
        told = client.post("/v1/rerank", json={"model": MODEL, "query": "what", "documents": ["a document", "what"]})
        assert told.json()["results"][0]["index"] == 1
        report = client.post(f"/v1/sessions/{sid}/assess", json={"output": "what. What else."}).json()
        assert set(report["words_by_sub_query"]) <= {"s0"}


def test_health_metrics_and_the_document(client):
    sid = created(client)
    client.post(f"/v1/sessions/{sid}/rank", json=rank())
    assert client.get("/livez").json()["status"] == "ok"
    assert client.get("/readyz").json()["status"] == "ok"
    text = client.get("/metrics").text
    for name in (
        'cdr_requests_total{operation="rank_facts",status="200"}',
        'cdr_stage_seconds_count{stage="rank"}',
        "cdr_batch_size_count",
        "cdr_qualified_facts_count",
        "cdr_gate_passed_facts_total",
        "cdr_guard_activations_total",
        'cdr_exits_total{reason="in-progress"}',
        'cdr_store_facts{tenant="default"} 60.0',
        'cdr_session_bytes{tenant="default"}',
        "process_resident_memory_bytes",
    ):
        assert name in text, name
    described = client.get("/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    paths = {f"{m.upper()} {p}" for p, item in described["paths"].items() for m in item}
    assert "POST /v1/sessions/{session_id}/rank" in paths
    headers = described["paths"]["/v1/sessions/{session_id}/rank"]["post"]["responses"]["200"]["headers"]
    assert "CRP-Context-Coverage-Score" in headers


def test_request_ids_are_taken_over_or_made(client):
    assert client.get("/livez", headers={"X-Request-ID": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = client.get("/livez", headers={"X-Request-ID": "a b\tc"}).headers["x-request-id"]
    assert len(made) == 32


def test_logs_hold_no_texts_vectors_or_keys(tmp_path, folder, caplog):
    make_store().save(tmp_path / "one")
    keys = write_keys(tmp_path / "keys.json", one="secret-key")
    with caplog.at_level("INFO", logger="cdr_kernel.serve"), serving(tmp_path, keys=keys, access_log=True) as client:
        client.headers["Authorization"] = "Bearer secret-key"
        sid = created(client)
        client.post(f"/v1/sessions/{sid}/rank", json=rank())
        client.post(f"/v1/sessions/{sid}/update", json=update(output="an output nobody may log"))
        service = client.app.state.service
        service.tenants["one"].facts.remove = lambda ids, **_: 1 / 0
        answer = client.delete("/v1/facts/f1")
        assert answer.status_code == 500
        assert error_of(answer)["code"] == "internal"
    lines = [repr(vars(record)) for record in caplog.records]
    assert any("rank_facts" in line for line in lines)
    assert any("ZeroDivisionError" in line for line in lines)
    for line in lines:
        for secret in ("nobody may log", "secret-key", b64(query()), "stone river"):
            assert secret not in line


def test_a_store_that_cannot_be_opened_is_unavailable(tmp_path):
    from starlette.testclient import TestClient

    from cdr_kernel.serve import Settings, create_app

    app = create_app(Settings(store=tmp_path / "nothing"))
    with TestClient(app) as client:
        until = time.monotonic() + 10
        while client.get("/readyz").json()["status"] == "loading" and time.monotonic() < until:
            time.sleep(0.01)
        assert client.get("/readyz").json()["status"] == "unavailable"
        assert client.get("/v1/stats").status_code == 503
        assert client.get("/livez").status_code == 200
    assert isinstance(app.state.service.problem, FileNotFoundError)


def test_texts_with_lone_surrogates_can_be_answered(tmp_path):
    store = make_store(3)
    store.add(["s"], ["broken \ud800 text"], query()[None])
    store.save(tmp_path / "s")
    with serving(tmp_path / "s") as client:
        assert client.get("/v1/facts/s").json()["text"] == "broken \ufffd text"


def test_the_blacklist_travels_with_a_token(client):
    sid = created(client)
    client.post(f"/v1/sessions/{sid}/rank", json=rank())
    client.post(f"/v1/sessions/{sid}/update", json=update(), headers={"Idempotency-Key": "once"})
    told = client.post(f"/v1/sessions/{sid}/token").json()
    assert len(base64.b64decode(told["blacklist"])) == 16  # two 6-grams of seven words
    body = {
        "embedding_model": MODEL,
        "token": told["token"],
        "sub_queries": new_session()["sub_queries"],
        "blacklist": told["blacklist"],
    }
    here = client.post("/v1/sessions/resume", json=body)
    assert here.status_code == 409
    before = client.delete(f"/v1/sessions/{sid}").json()
    other = {**body, "blacklist": base64.b64encode(bytes(16)).decode()}
    assert error_of(client.post("/v1/sessions/resume", json=other))["field"] == "blacklist"
    after = client.post("/v1/sessions/resume", json=body).json()
    assert after["id"] == sid
    assert after == {**before, "packed": 0}  # a token holds packed facts only where they matter
    again = client.post(f"/v1/sessions/{sid}/update", json=update(), headers={"Idempotency-Key": "once"})
    assert again.headers["idempotency-replayed"] == "true"
    assert client.get(f"/v1/sessions/{sid}").json()["window_count"] == 1


def test_under_a_prefix(tmp_path):
    make_store().save(tmp_path / "s")
    settings = Settings(store=tmp_path / "s", access_log=False)
    with TestClient(create_app(settings), root_path="/under") as client:
        until = time.monotonic() + 30.0
        while client.get("/under/readyz").status_code != 200:
            assert time.monotonic() < until
        for path in ("/under/v1/sessions", "/v1/sessions"):  # a proxy leaves the prefix there, or takes it away
            answer = client.post(path, json=new_session())
            assert answer.status_code == 200, answer.text
