"""Facts behind the server: durable ones outlast it and are shared, filters limit rankings, quarantine holds."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from fact_stores import flip
from serving import (
    DIM,
    MODEL,
    b64,
    bearer,
    created,
    error_of,
    make_store,
    query,
    rank,
    same_session,
    serving,
    write_keys,
)

from cdr_kernel import DamagedFileError, FactStore, Retriever, cdr_rank
from cdr_kernel.store import _fact_store as store_module

pytest.importorskip("lance", reason="needs the store extra")
pytest.importorskip("safetensors", reason="needs the store extra")

from starlette.testclient import TestClient

from cdr_kernel.durable import DurableStore
from cdr_kernel.serve import Settings, create_app
from cdr_kernel.serve._app import build


@pytest.fixture
def folder(tmp_path):
    DurableStore.from_facts(make_store(), tmp_path / "d").close()
    return tmp_path / "d"


def facts(*ids, **more):
    return {
        "embedding_model": MODEL,
        "facts": [{"id": id, "text": f"text of {id}", "embedding": b64(query()), **more} for id in ids],
    }


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_acknowledged_facts_outlast_the_process(folder):
    with serving(folder) as client:
        assert client.get("/v1/stats").json()["durable"] is True
        assert client.post("/v1/facts", json=facts("new", attributes={"lang": "en"})).json()["added"] == 1
        assert client.delete("/v1/facts/f0").json()["removed"] == 1
    with serving(folder) as client:
        assert client.get("/v1/stats").json()["facts"] == 60
        told = client.get("/v1/facts/new").json()
        assert (told["text"], told["attributes"]) == ("text of new", {"lang": "en"})
        assert client.get("/v1/facts/f0").status_code == 404
        sid = created(client)
        assert client.post(f"/v1/sessions/{sid}/rank", json=rank(k=1)).json()["facts"][0]["id"] == "new"


def test_what_another_process_commits_shows(folder):
    with serving(folder, refresh_s=0.05) as client, DurableStore.open(folder) as other:
        other.add(["theirs"], ["text"], query()[None])
        until(lambda: client.get("/v1/facts/theirs").status_code == 200)
        client.put("/v1/facts", json=facts("ours"))
        assert other.refresh()
        assert "ours" in other


def test_quarantined_facts_are_in_no_ranking(folder):
    with serving(folder) as client:
        sid = created(client)
        first = client.post(f"/v1/sessions/{sid}/rank", json=rank(k=1)).json()["facts"][0]["id"]
        held = client.post("/v1/facts/quarantine", json={"ids": [first], "reason": "wrong"})
        assert held.json()["changed"] == 1
        assert client.post(f"/v1/sessions/{sid}/rank", json=rank(k=1)).json()["facts"][0]["id"] != first
        assert client.get("/v1/stats").json()["quarantined"] == 1
        told = error_of(client.get(f"/v1/facts/{first}"))
        assert told["code"] == "quarantined"
        assert told["message"] == f"the fact '{first}' is quarantined (wrong): it is in no ranking until it is released"
        documents = {"model": MODEL, "query_embedding": b64(query()), "documents": [{"id": first}]}
        told = error_of(client.post("/v1/rerank", json=documents))
        assert (told["field"], told["got"]) == ("documents[0].id", f"'{first}', which is quarantined")
        assert error_of(client.get("/v1/facts/nobody"))["code"] == "not_found"
        assert client.post("/v1/facts/quarantine", json={"ids": ["f59"]}).json()["changed"] == 1
        assert "'f59' is quarantined: it" in error_of(client.get("/v1/facts/f59"))["message"]
        assert client.delete("/v1/facts/f59").json()["removed"] == 1
        assert error_of(client.get("/v1/facts/f59"))["code"] == "not_found"
        assert client.post("/v1/facts/release", json={"ids": ["f59x"]}).status_code == 404
        assert client.post("/v1/facts/release", json={"ids": [first]}).json()["changed"] == 1
        assert client.get(f"/v1/facts/{first}").json()["id"] == first
        assert client.post(f"/v1/sessions/{sid}/rank", json=rank(k=1)).json()["facts"][0]["id"] == first


def test_a_quarantine_is_told_to_its_own_tenant_alone(tmp_path):
    for name in ("a", "z"):
        DurableStore.from_facts(make_store(prefix=name), tmp_path / name).close()
    keys = write_keys(tmp_path / "keys.json", a="ka", z="kz")
    with serving(tmp_path, keys=keys) as client:
        held = client.post("/v1/facts/quarantine", json={"ids": ["a1"], "reason": "secret"}, headers=bearer("ka"))
        assert held.json()["changed"] == 1
        assert error_of(client.get("/v1/facts/a1", headers=bearer("ka")))["code"] == "quarantined"
        foreign, absent = (error_of(client.get(f"/v1/facts/{id}", headers=bearer("kz"))) for id in ("a1", "nobody"))
        assert foreign == absent
        assert foreign["code"] == "not_found"


def test_facts_expire(folder):
    with serving(folder, refresh_s=0.05) as client:
        client.post("/v1/facts", json=facts("brief", expires_at=time.time() + 0.3))
        client.post("/v1/facts", json=facts("long", expires_at=time.time() + 3600))
        until(lambda: client.get("/v1/facts/brief").status_code == 404)
        assert client.get("/v1/facts/long").status_code == 200


def test_a_folder_that_is_read_has_no_quarantine(tmp_path):
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s") as client:
        assert client.get("/v1/stats").json()["durable"] is False
        for path, body in (
            ("/v1/facts/quarantine", {"ids": ["f1"]}),
            ("/v1/facts/release", {"ids": ["f1"]}),
            ("/v1/facts", facts("x", expires_at=2e9)),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 422
            assert error_of(refused)["code"] == "not_durable"
        assert client.get("/v1/stats").json()["facts"] == 60


@pytest.mark.parametrize("where", [{"source": "doc1"}, {"source": ["doc0", "doc2"]}, {"lang": "en"}, {"lang": None}])
def test_filters_limit_rankings_as_in_the_library(tmp_path, where):
    store = make_store()
    store.add(["en1", "en2"], ["a", "b"], [query(), query(2)], attributes={"lang": ["en", "en"]})
    store.save(tmp_path / "s")
    expected = cdr_rank(query(), Retriever(store), same_session(), k=5, where=where)
    with serving(tmp_path / "s") as client:
        sid = created(client)
        told = client.post(f"/v1/sessions/{sid}/rank", json=rank(where=where)).json()
        assert [fact["id"] for fact in told["facts"]] == expected.ids
        assert [fact["score"] for fact in told["facts"]] == expected.score.tolist()
        assert told["qualified"] == expected.qualified
        assert told["facts"][0]["attributes"] == dict(expected.facts[0].attributes)


def test_filters_that_are_none(tmp_path):
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s") as client:
        sid = created(client)
        for where, field in (({"colour": "red"}, "where"), ({"source": 3}, None), ({"source": {"a": 1}}, None)):
            refused = client.post(f"/v1/sessions/{sid}/rank", json=rank(where=where))
            assert refused.status_code == 422, where
            assert field is None or error_of(refused)["field"] == field


def test_ranks_and_looks_do_not_wait_for_a_write(folder):
    with serving(folder) as client:
        sid = created(client)
        tenant = client.app.state.service.tenants["default"]
        go, begun = threading.Event(), threading.Event()
        add = tenant.facts.add

        def slow(*args, **columns):
            begun.set()
            assert go.wait(20)
            return add(*args, **columns)

        tenant.facts.add = slow
        writers = [threading.Thread(target=client.post, args=("/v1/facts",), kwargs={"json": facts(n)}) for n in "xyz"]
        try:
            for writer in writers:
                writer.start()
            assert begun.wait(20)
            for _ in range(4):
                assert client.post(f"/v1/sessions/{sid}/rank", json=rank()).status_code == 200
                assert client.get("/v1/stats").json()["facts"] == 60
                assert created(client)
            late = client.put("/v1/facts", json=facts("late"), headers={"CDR-Deadline-Ms": "50"})
            assert late.status_code == 504
        finally:
            go.set()
            for writer in writers:
                writer.join()
        assert client.get("/v1/stats").json()["facts"] == 63
        assert client.get("/v1/facts/late").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "again", "come", "gone", "held"),
    [
        ("POST", "", facts("new"), 422, {"new"}, set(), {"f2"}),
        ("PUT", "", facts("f1"), 200, set(), set(), {"f2"}),
        ("POST", "/delete", {"ids": ["f1"]}, 404, set(), {"f1"}, {"f2"}),
        ("POST", "/delete", {"ids": ["f1"], "missing": "ignore"}, 200, set(), {"f1"}, {"f2"}),
        ("POST", "/quarantine", {"ids": ["f1"], "reason": "r"}, 200, set(), {"f1"}, {"f1", "f2"}),
        ("POST", "/release", {"ids": ["f2"]}, 404, {"f2"}, set(), set()),
    ],
)
def test_a_repeat_at_another_replica_without_redis_is_a_second_write(
    folder, method, path, body, again, come, gone, held
):
    headers = {"Idempotency-Key": "k"}
    with serving(folder, refresh_s=600) as one, serving(folder, refresh_s=600) as two:
        assert one.post("/v1/facts/quarantine", json={"ids": ["f2"]}).status_code == 200
        first, repeat = (one.request(method, f"/v1/facts{path}", json=body, headers=headers) for _ in "ab")
        assert first.status_code == 200
        assert repeat.json() == first.json()
        second = two.request(method, f"/v1/facts{path}", json=body, headers=headers)
        assert second.status_code == again, second.text
        assert "idempotency-replayed" not in second.headers
    with DurableStore.open(folder) as now:
        assert set(now.facts.ids) == ({f"f{i}" for i in range(60)} - {"f2"} | come) - gone
        assert set(now.quarantined()) == held


def test_replicas_that_write_at_once_lose_nothing(folder):
    with serving(folder, refresh_s=0.05) as one, serving(folder, refresh_s=0.05) as two:
        statuses = []

        def write(client, i):
            statuses.append(client.post("/v1/facts", json=facts(f"n{i}")).status_code)

        threads = [threading.Thread(target=write, args=each) for i in range(6) for each in ((one, i), (two, i))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] * 6 + [422] * 6  # each id once
        for client in (one, two):
            until(lambda client=client: client.get("/v1/stats").json()["facts"] == 66)


def test_refusals_are_in_the_words_of_the_api(folder, tmp_path):
    make_store().save(tmp_path / "read")
    wrong = b64(np.full(DIM, np.nan))
    there = "ids that are not in the store (PUT /v1/facts replaces those that are)"
    finite = 'finite numbers that are not all zeros ("on_invalid": "skip" leaves out facts with others)'
    for store in (folder, tmp_path / "read"):
        with serving(store) as client:
            assert client.post("/v1/facts", json=facts("old", attributes={"year": 1})).status_code == 200
            two = facts("n", "m", attributes={"x": 1})
            two["facts"][1]["attributes"] = {"x": "one"}
            short = facts("n", "m")
            short["facts"][1]["embedding"] = [1.0]
            sid = created(client)
            for path, body, *said in (
                ("facts", facts("f1", "n", "f2"), "facts.id", there, "'f1', 'f2'"),
                ("facts", facts("n", "n"), "facts.id", "each id once", "'n' again"),
                ("facts", facts("n", embedding=wrong), "facts.embedding", finite, "not finite as float32 in 'n'"),
                ("facts", short, "facts[1].embedding", "8 numbers", "1"),
                (
                    "facts",
                    facts("n", attributes={"year": "x"}),
                    "attributes['year']",
                    "an integer, as in the store",
                    "a string",
                ),
                ("facts", two, "attributes['x']", "values of one type", "an integer, a string"),
                ("facts/delete", {"ids": ["n", "f1"]}, "ids", "ids of facts that are in the store", "'n'"),
                (f"sessions/{sid}/rank", rank(where={"no": 1}), "where", "source or one of ['year']", "'no'"),
            ):
                answer = client.post(f"/v1/{path}", json=body)
                told = error_of(answer)
                assert [told[name] for name in ("field", "expected", "got")] == said
                assert told["message"] == "{}: expected {}, got {}".format(*said)
                assert (answer.status_code, told["code"]) in ((422, "invalid"), (404, "not_found"))
            assert client.get("/v1/stats").json()["facts"] == 61
    with serving(folder) as client:
        told = error_of(client.post("/v1/facts/release", json={"ids": ["f1"]}))
    assert (told["field"], told["expected"], told["got"]) == ("ids", "ids of facts that are quarantined", "'f1'")


def test_ids_are_indexed_before_the_first_request(folder, tmp_path, monkeypatch):
    make_store().save(tmp_path / "read")
    asked = []
    with monkeypatch.context() as patched:
        patched.setattr("cdr_kernel.store._fact_store.indexed", lambda view: asked.append(view) or {})
        store = FactStore.load(tmp_path / "read")
        assert not asked
        store.index_ids()
        store.index_ids()
    assert len(asked) == 1
    for opened in (folder, tmp_path / "read"):
        with serving(opened) as client:
            facts = client.app.state.service.tenants["default"].facts.facts
            assert facts._row_of is not None


def ranked(client):
    answer = client.post(f"/v1/sessions/{created(client)}/rank", json=rank())
    assert answer.status_code == 200, answer.text
    return answer.json()["facts"]


def test_a_server_is_ready_when_all_it_answers_from_is_checked(tmp_path, monkeypatch):
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s") as client:
        truth = ranked(client)
    monkeypatch.setattr(store_module, "_AT_ONCE", 0)
    monkeypatch.setattr(store_module, "_check_behind", lambda files: None)
    going, verify = threading.Event(), FactStore.verify
    monkeypatch.setattr(FactStore, "verify", lambda *args: going.wait(20) and verify(*args))
    app = create_app(Settings(store=tmp_path / "s"))
    with TestClient(app) as client:
        assert client.get("/readyz").json()["status"] == "loading"
        assert client.get("/readyz").status_code == 503
        going.set()
        until(lambda: client.get("/readyz").status_code == 200)
        assert all(tenant.facts.facts.verified for tenant in app.state.service.tenants.values())
        assert ranked(client) == truth
    flip(next((tmp_path / "s").glob("data-*/texts.utf8")))
    failed = []
    app = build(Settings(store=tmp_path / "s"), failed=failed.append)
    with TestClient(app) as client:
        until(lambda: client.get("/readyz").json()["status"] == "unavailable")
    (error,) = failed
    assert isinstance(error, DamagedFileError)
    assert "texts.utf8: block 0 is not as it was written" in str(error)


def test_a_damaged_snapshot_is_put_right_before_the_server_is_ready(folder, monkeypatch):
    with DurableStore.open(folder) as store:
        store.snapshot()
    flip(next((folder / "snapshot").glob("data-*/embeddings.npy")))
    monkeypatch.setattr(store_module, "_AT_ONCE", 0)
    with serving(folder) as client:
        assert ranked(client)
        assert client.get("/v1/stats").json()["facts"] == 60
