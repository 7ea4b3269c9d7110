"""The HTTP service on a real Ray Serve: the answers of the library."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request

import pytest
import serving  # skips without the serve extras

from cdr_kernel import Retriever, cdr_rank
from cdr_kernel.ray_serve import deployment
from cdr_kernel.serve import Settings


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
