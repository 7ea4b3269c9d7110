"""Two tenants on one server: whatever they do, each sees what it would see on a server of its own."""

from __future__ import annotations

import gc
import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from serving import (
    MODEL,
    b64,
    bearer,
    created,
    error_of,
    make_store,
    new_session,
    query,
    rank,
    serving,
    update,
    write_keys,
)

from cdr_kernel.durable import _durable_store

KEYS = {"acme": "key-of-acme", "zenith": "key-of-zenith"}
METRICS = "key-of-metrics"


@pytest.fixture
def folder(tmp_path):
    place_stores(tmp_path, "folder")
    return tmp_path


@pytest.fixture
def client(folder, tmp_path):
    keys = write_keys(tmp_path / "keys.json", **KEYS)
    with serving(folder, keys=keys, metrics_key=METRICS) as client:
        yield client


def test_without_a_key_nobody_is_let_in(client):
    for headers in ({}, bearer("wrong"), {"Authorization": "Basic x"}, bearer(METRICS)):
        for path in ("/v1/stats", "/v1/nowhere", "/v1"):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert error_of(answer)["code"] == "unauthorized"
    assert client.get("/livez").status_code == client.get("/readyz").status_code == 200


def test_metrics_are_for_their_own_key(client):
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers=bearer(KEYS["acme"])).status_code == 401
    assert 'tenant="zenith"' in client.get("/metrics", headers=bearer(METRICS)).text


def test_a_key_can_be_replaced(folder, tmp_path):
    keys = write_keys(tmp_path / "keys.json", acme=["old", "new"], zenith="z")
    with serving(folder, keys=keys) as client:
        sid = created(client, headers=bearer("old"))
        assert client.get(f"/v1/sessions/{sid}", headers=bearer("new")).status_code == 200
        assert client.get("/metrics", headers=bearer("new")).status_code == 401  # no metrics key, no metrics


def test_one_tenant_may_have_a_plain_store(tmp_path):
    make_store().save(tmp_path / "plain")
    keys = write_keys(tmp_path / "keys.json", only="k")
    with serving(tmp_path / "plain", keys=keys) as client:
        assert client.get("/v1/stats", headers=bearer("k")).json()["facts"] == 60


def test_a_full_queue_of_one_tenant_is_not_the_others(client):
    service = client.app.state.service
    service.tenants["acme"].in_flight = service.settings.max_queue
    assert client.get("/v1/stats", headers=bearer(KEYS["acme"])).status_code == 429
    assert client.get("/v1/stats", headers=bearer(KEYS["zenith"])).status_code == 200
    service.tenants["acme"].in_flight = 0


def test_tokens_and_idempotency_keys_are_of_one_tenant(client):
    a, z = (bearer(key) for key in KEYS.values())
    once = {"Idempotency-Key": "same"}
    ids = {client.post("/v1/sessions", json=new_session(), headers={**who, **once}).json()["id"] for who in (a, z)}
    assert len(ids) == 2
    sid = created(client, headers=a)
    token = client.post(f"/v1/sessions/{sid}/token", headers=a).json()["token"]
    body = {"embedding_model": MODEL, "token": token, "sub_queries": new_session()["sub_queries"]}
    assert error_of(client.post("/v1/sessions/resume", json=body, headers=z))["code"] == "invalid_token"


def view(answer):
    """What a tenant learns from an answer, but for ids that are drawn at random."""
    told = answer.json()
    told.pop("request_id", None)
    told.pop("id", None)
    if isinstance(told.get("session"), dict):
        told["session"].pop("id")
    headers = {k: v for k, v in answer.headers.items() if k.startswith("crp-") or k == "retry-after"}
    return answer.status_code, told, headers


class Tenants(RuleBasedStateMachine):
    """Every request of a tenant goes to the shared server and to one that it has for itself, and is answered alike.

    Sessions have other ids on the two; foreign ones are asked for like ones that never were.
    """

    shared = None  # set by the test: a client, and the folder of stores
    alone = None
    numbers = itertools.count()

    @initialize()
    def begin(self):
        self.sessions = {name: [] for name in KEYS}  # (id on the shared server, id on the tenant's own)
        self.facts = {name: [] for name in KEYS}

    def both(self, who, method, path, body=None, ids=("", ""), key=None):
        answers = []
        for client, id in ((self.shared, ids[0]), (self.alone[who], ids[1])):
            headers = {**bearer(KEYS[who]), **({} if key is None else {"Idempotency-Key": key})}
            filled = path.replace("SID", id)
            answers.append(client.request(method, filled, json=body, headers=headers))
        assert view(answers[0]) == view(answers[1]), (method, path)
        return answers

    def session(self, who, data):
        return data.draw(st.sampled_from(self.sessions[who])) if self.sessions[who] else None

    @rule(who=st.sampled_from(sorted(KEYS)), exclude=st.booleans())
    def create(self, who, exclude):
        answers = self.both(who, "POST", "/v1/sessions", new_session(exclude_packed=exclude))
        self.sessions[who].append(tuple(answer.json()["id"] for answer in answers))

    @rule(who=st.sampled_from(sorted(KEYS)), data=st.data(), seed=st.integers(0, 3))
    def rank(self, who, data, seed):
        ids = self.session(who, data)
        if ids:
            self.both(who, "POST", "/v1/sessions/SID/rank", rank(query=b64(query(seed))), ids)

    @rule(who=st.sampled_from(sorted(KEYS)), data=st.data(), sub=st.sampled_from(["s0", "s1", "s2", "nobody"]))
    def update(self, who, data, sub):
        ids = self.session(who, data)
        if ids:
            self.both(who, "POST", "/v1/sessions/SID/update", update([sub]), ids)

    @rule(who=st.sampled_from(sorted(KEYS)), data=st.data())
    def delete(self, who, data):
        ids = self.session(who, data)
        if ids:
            self.both(who, "DELETE", "/v1/sessions/SID", None, ids)
            self.sessions[who].remove(ids)
            self.both(who, "GET", "/v1/sessions/SID", None, ids)

    @rule(who=st.sampled_from(sorted(KEYS)), key=st.sampled_from([None, "k1", "k2"]), shared=st.booleans())
    def add(self, who, key, shared):
        name = "the-same-id" if shared else f"n{next(self.numbers)}"
        fact = {"id": name, "text": f"of {who}", "embedding": b64(query(len(name))), "attributes": {"owner": who}}
        self.both(who, "PUT", "/v1/facts", {"embedding_model": MODEL, "facts": [fact]}, key=key)
        self.facts[who].append(name)

    @rule(who=st.sampled_from(sorted(KEYS)), data=st.data())
    def remove(self, who, data):
        if self.facts[who]:
            self.both(who, "POST", "/v1/facts/delete", {"ids": [data.draw(st.sampled_from(self.facts[who]))]})

    def names(self):
        """Ids of facts that one of the tenants has or had."""
        return st.sampled_from(self.facts["acme"] + self.facts["zenith"] + ["acme0", "zenith0", "the-same-id"])

    @rule(who=st.sampled_from(sorted(KEYS)), data=st.data())
    def look_at_a_fact(self, who, data):
        self.both(who, "GET", f"/v1/facts/{data.draw(self.names())}")

    @rule(who=st.sampled_from(sorted(KEYS)), data=st.data(), key=st.sampled_from([None, "k1", "q1"]))
    def quarantine(self, who, data, key):
        name = data.draw(self.names())
        answers = self.both(who, "POST", "/v1/facts/quarantine", {"ids": [name], "reason": f"of {who}"}, key=key)
        if answers[0].status_code == 200 and key is None:
            assert error_of(self.both(who, "GET", f"/v1/facts/{name}")[0])["code"] == "quarantined"

    @rule(who=st.sampled_from(sorted(KEYS)), data=st.data(), key=st.sampled_from([None, "k2", "q1"]))
    def release(self, who, data, key):
        self.both(who, "POST", "/v1/facts/release", {"ids": [data.draw(self.names())]}, key=key)

    @rule(who=st.sampled_from(sorted(KEYS)), data=st.data(), column=st.sampled_from(["source", "owner", "nothing"]))
    def rank_some(self, who, data, column):
        ids = self.session(who, data)
        value = data.draw(st.sampled_from(["doc1", None, ["doc0", None], "acme", "zenith", 3]))
        if ids:
            self.both(who, "POST", "/v1/sessions/SID/rank", rank(where={column: value}), ids)

    @rule(who=st.sampled_from(sorted(KEYS)), data=st.data(), factor=st.sampled_from([0.0, 0.5, 9.0]))
    def rank_weighted(self, who, data, factor):
        ids = self.session(who, data)
        if ids:
            self.both(who, "POST", "/v1/sessions/SID/rank", rank(multiplier={data.draw(self.names()): factor}), ids)

    @rule(who=st.sampled_from(sorted(KEYS)), data=st.data(), path=st.sampled_from(["", "/rank", "/update", "/token"]))
    def probe(self, who, data, path):
        other = next(name for name in KEYS if name != who)
        foreign = self.session(other, data)
        if foreign:
            body = {"": None, "/rank": rank(), "/update": update(), "/token": None}[path]
            method = "POST" if path else "GET"
            self.both(who, method, f"/v1/sessions/SID{path}", body, (foreign[0], "0" * 32))

    @rule(who=st.sampled_from(sorted(KEYS)))
    def rerank(self, who):
        documents = [{"id": "the-same-id"}, {"text": "x", "embedding": b64(query(7))}]
        self.both(who, "POST", "/v1/rerank", {"model": MODEL, "query_embedding": b64(query()), "documents": documents})

    @invariant()
    def statistics_are_ones_own(self):
        for who in KEYS:
            try:
                self.both(who, "GET", "/v1/stats")
            except AssertionError:  # what is kept for a session goes once its errors are collected
                gc.collect()
                self.both(who, "GET", "/v1/stats")

    def teardown(self):
        for who, ids in self.sessions.items():
            for pair in ids:
                self.both(who, "DELETE", "/v1/sessions/SID", None, pair)


def place_stores(folder, kind):
    """A store of each tenant in this folder."""
    for seed, name in enumerate(KEYS):
        store = make_store(30, seed=seed, prefix=name)
        if kind == "durable":
            _durable_store.DurableStore.from_facts(store, folder / name).close()
        else:
            store.save(folder / name)


@pytest.mark.parametrize("kind", ["folder", "durable"])
@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_two_tenants_are_kept_apart(tmp_path, examples, kind):
    if kind == "durable":
        pytest.importorskip("lance", reason="needs the store extra")
    both = write_keys(tmp_path / "both.json", **KEYS)
    keys = {name: write_keys(tmp_path / f"{name}.json", **{name: key}) for name, key in KEYS.items()}
    for place in ("shared", "alone"):  # a store that is changed by both servers would not tell them apart
        place_stores(tmp_path / place, kind)
    with (
        serving(tmp_path / "shared", keys=both) as shared,
        serving(tmp_path / "alone" / "acme", keys=keys["acme"]) as acme,
        serving(tmp_path / "alone" / "zenith", keys=keys["zenith"]) as zenith,
    ):
        Tenants.shared, Tenants.alone = shared, {"acme": acme, "zenith": zenith}
        run_state_machine_as_test(
            Tenants,
            settings=settings(
                max_examples=examples,
                stateful_step_count=25,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),  # a busy machine is slow
            ),
        )
