"""The HTTP service on a real Ray Serve: the answers of the library."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import serving  # skips without the serve extras

from cdr_kernel import Retriever, cdr_rank
from cdr_kernel.serve import Settings
from cdr_kernel.serve._on_ray import deployment


def asked(port, method, path, body=None):
    """(status, answer) of a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, method=method)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    serve = pytest.importorskip("ray.serve", reason="the ray-serve extra is not installed")
    folder = tmp_path_factory.mktemp("served") / "store"
    store = serving.make_store()
    store.save(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(deployment(Settings(store=folder, access_log=False), num_cpus=0.5), route_prefix="/")
        until = time.monotonic() + 60.0
        while asked(port, "GET", "/readyz")[0] != 200:
            assert time.monotonic() < until
            time.sleep(0.1)
        yield port, store
        serve.shutdown()
    finally:
        ray.shutdown()


@pytest.mark.ray
def test_a_window_over_http(service):
    port, store = service
    status, session = asked(port, "POST", "/v1/sessions", serving.new_session())
    assert status == 200, session
    status, ranked = asked(port, "POST", f"/v1/sessions/{session['id']}/rank", serving.rank())
    assert status == 200, ranked
    truth = cdr_rank(serving.query(), Retriever(store), serving.same_session(), k=5)
    assert [fact["id"] for fact in ranked["facts"]] == truth.ids
    assert [fact["score"] for fact in ranked["facts"]] == truth.score.tolist()


@pytest.mark.ray
def test_a_wrong_request_is_refused(service):
    port, _ = service
    status, _ = asked(port, "POST", "/v1/sessions/nobody/rank", serving.rank())
    assert status == 404


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"min_replicas": 0}, "min_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas"),
        ({"target_requests": 0.0}, "target_requests"),
        ({"max_replicas": 2}, "redis and token_key"),
    ],
)
def test_settings_are_checked(tmp_path, keywords, message):
    with pytest.raises(ValueError, match=message):
        deployment(Settings(store=tmp_path), **keywords)


@pytest.fixture
def scaled(service, tmp_path):
    """A second application with up to two replicas, which share sessions in Redis."""
    pytest.importorskip("redis", reason="needs the redis extra")
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (apt-get install redis-server)")
    from ray import serve

    from tests.serve.test_redis import Server

    port, store = service
    store.save(tmp_path / "store")
    redis = Server(tmp_path)
    try:
        settings = Settings(store=tmp_path / "store", access_log=False, redis=redis.url, token_key=b"k" * 32)
        app = deployment(settings, max_replicas=2, target_requests=1.0, num_cpus=0.5, name="scaled")
        serve.run(app, name="scaled", route_prefix="/scaled")
        yield port, store
        serve.delete("scaled")
    finally:
        redis.stop()


def running(name):
    """Replicas of an application that run."""
    from ray import serve

    return serve.status().applications[name].deployments[name].replica_states.get("RUNNING", 0)


@pytest.mark.ray
@pytest.mark.slow
def test_replicas_are_added_under_load_and_share_sessions(scaled):
    port, store = scaled
    until = time.monotonic() + 60.0
    while asked(port, "GET", "/scaled/readyz")[0] != 200:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert running("scaled") == 1
    truth = cdr_rank(serving.query(), Retriever(store), serving.same_session(), k=5)
    ids = []
    for _ in range(12):
        status, session = asked(port, "POST", "/scaled/v1/sessions", serving.new_session())
        assert status == 200, session
        ids.append(session["id"])
    stop = threading.Event()

    def load(id):
        count = 0
        while not stop.is_set():
            status, ranked = asked(port, "POST", f"/scaled/v1/sessions/{id}/rank", serving.rank())
            assert status == 200, ranked
            assert [fact["score"] for fact in ranked["facts"]] == truth.score.tolist()
            count += 1
        return count

    with ThreadPoolExecutor(len(ids)) as pool:
        counts = [pool.submit(load, id) for id in ids]
        try:
            until = time.monotonic() + 240.0
            while running("scaled") < 2:
                assert time.monotonic() < until, "no second replica came"
                time.sleep(0.5)
            time.sleep(5.0)  # both answer now, about sessions that were opened by one
        finally:
            stop.set()
        assert all(count.result() > 0 for count in counts)
