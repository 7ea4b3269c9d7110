"""What the tests of the server share: small stores, an application that is loaded, requests that are right."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from sessions import session_of_mode

from cdr_kernel import FactStore, SubQuery

pytest.importorskip("uvicorn", reason="needs the serve extra")
pytest.importorskip("msgspec", reason="needs the serve extra")
pytest.importorskip("prometheus_client", reason="needs the serve extra")
pytest.importorskip("httpx2", reason="needs the serve-test extra")

from starlette.testclient import TestClient

from cdr_kernel.serve import Settings, create_app
from cdr_kernel.serve._service import SPARE

MODEL = "m1"
DIM = 8
WORDS = ["red", "green", "blue", "stone", "river", "cloud", "paper", "wheel", "glass", "light"]


def make_store(n=60, *, seed=0, prefix="f", model=MODEL):
    """n facts round one direction, so that most pass a gate of .3."""
    r = np.random.default_rng(seed)
    store = FactStore(DIM, embedding_model=model)
    rows = r.standard_normal((n, DIM)) * 0.5
    rows[:, 0] += 1.0
    texts = [" ".join(r.choice(WORDS, 9)) for _ in range(n)]
    store.add([f"{prefix}{i}" for i in range(n)], texts, rows, source=[f"doc{i % 3}" for i in range(n)])
    return store


def b64(vector):
    """A vector as JSON carries it."""
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


def query(seed=1):
    """A float32 query near the facts."""
    q = np.random.default_rng(seed).standard_normal(DIM) * 0.3
    q[0] += 1.0
    return q.astype(np.float32)


def sub_vectors(n=3, seed=2):
    """float32 [n, D]."""
    rows = np.random.default_rng(seed).standard_normal((n, DIM)) * 0.6
    rows[:, 0] += 0.8
    return rows.astype(np.float32)


def new_session(n=3, **settings):
    """The body of a POST /v1/sessions."""
    items = [
        {"id": f"s{i}", "label": f"Label {i}", "text": f"about {WORDS[i]}", "embedding": b64(v)}
        for i, v in enumerate(sub_vectors(n))
    ]
    return {"embedding_model": MODEL, "sub_queries": items, "settings": {"min_relevance": 0.3, **settings}}


def same_session(n=3, **settings):
    """The session that `new_session` makes, in process."""
    items = [SubQuery(f"s{i}", f"Label {i}", f"about {WORDS[i]}", v) for i, v in enumerate(sub_vectors(n))]
    return session_of_mode(items, embedding_model=MODEL, min_relevance=0.3, **settings)


def update(addressed=("s0",), *, output="red green blue stone river cloud paper", completeness=0.2, **more):
    """The body of an update."""
    report = {"completeness_score": completeness, "addressed": list(addressed)}
    return {"embedding_model": MODEL, "output": output, "report": report, **more}


def rank(**more):
    """The body of a rank."""
    return {"embedding_model": MODEL, "query": b64(query()), "k": 5, **more}


def write_keys(path, **keys):
    """A file of keys: tenant=key or tenant=[key, ...]."""
    entries = [
        {"tenant": tenant, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for tenant, given in keys.items()
        for key in ([given] if isinstance(given, str) else given)
    ]
    path.write_text(json.dumps({"keys": entries}))
    return path


def bearer(key):
    """The header that shows a key."""
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def serving(folder, **settings):
    """A client of an application over the store in this folder, once it is ready."""
    app = create_app(Settings(store=folder, **{"access_log": False, **settings}))
    with TestClient(app, raise_server_exceptions=False) as client:
        wait_until_ready(client)
        yield client


def wait_until_ready(client, seconds=30.0):
    """Until /readyz says ok."""
    until = time.monotonic() + seconds
    while client.get("/readyz").status_code != 200:
        assert time.monotonic() < until, client.get("/readyz").text
        time.sleep(0.01)


def created(client, headers=None, **settings):
    """The id of a new session."""
    answer = client.post("/v1/sessions", json=new_session(**settings), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def hold_pool(client, release, seconds=60.0):
    """Work of other tenants that holds all threads of the pool until `release` is set: futures of it."""
    pool, threads = client.app.state.service.pool, client.app.state.service.settings.threads + SPARE
    hold = partial(pool.run, label="hold", work=partial(release.wait, seconds))
    held = [client.portal.start_task_soon(hold, f"another{i}") for i in range(threads)]
    until = time.monotonic() + seconds
    while len(pool.running()) < threads:
        assert time.monotonic() < until
        time.sleep(0.002)
    return held


def error_of(answer):
    """The error of a refusal, whose shape is checked."""
    told = answer.json()
    assert set(told) == {"error", "request_id"}, told
    assert set(told["error"]) == {"code", "message", "field", "expected", "got"}
    assert told["request_id"] == answer.headers["x-request-id"]
    return told["error"]
