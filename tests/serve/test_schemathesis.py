"""Requests made up from the served OpenAPI document: no 500, and nothing answered that the document does not say."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from serving import MODEL, b64, bearer, make_store, new_session, query, rank, serving, update, write_keys

schemathesis = pytest.importorskip("schemathesis", reason="needs the serve-test extra")
msgspec = pytest.importorskip("msgspec")
openapi = pytest.importorskip("schemathesis.specs.openapi.checks")

CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_headers_conformance,
    openapi.response_schema_conformance,
]
KEY = "a-key"


@schemathesis.serializer("application/msgpack")
def msgpack(context, value):
    """How made-up bodies become msgpack, which holds no integers beyond 64 bits."""
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:
        reject()


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schemathesis")
    make_store().save(folder / "s")
    with serving(folder / "s", keys=write_keys(folder / "keys.json", one=KEY)) as client:
        yield client


@pytest.fixture(scope="module")
def api(client):
    async def running(scope, receive, send):
        """The application, which starts and ends with `client` and not with every request."""
        if scope["type"] == "lifespan":
            for done in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{done}.complete"})
        else:
            await client.app(scope, receive, send)

    return schemathesis.openapi.from_asgi("/openapi.json", running)


@pytest.fixture
def session(client):
    """The id of a session that is there, with a ranking."""
    answer = client.post("/v1/sessions", json=new_session(), headers=bearer(KEY))
    sid = answer.json()["id"]
    assert client.post(f"/v1/sessions/{sid}/rank", json=rank(), headers=bearer(KEY)).status_code == 200
    return sid


def operations():
    from cdr_kernel.serve._operations import OPERATIONS

    return [pytest.param(o, id=o.name) for o in OPERATIONS]


@pytest.mark.parametrize("operation", operations())
@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_made_up_requests_are_answered_as_the_document_says(client, api, session, operation, examples):
    described = api[operation.path][operation.method]
    made = 0

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described.as_strategy())
    def run(case):
        nonlocal made
        made += 1
        if "session_id" in case.path_parameters and made % 4:
            case.path_parameters["session_id"] = session
        if isinstance(case.body, dict) and made % 3:
            _make_sense_of(case.body, packed=case.media_type == "application/msgpack")
        answer = case.call(headers=bearer(KEY))
        late = answer.status_code == 504 and "CDR-Deadline-Ms" in case.headers  # as it asked for
        case.validate_response(answer, checks=CHECKS[1:] if late else CHECKS)

    run()
    assert made >= min(examples, 5)


def _make_sense_of(body, packed):
    """Put in place what no generator finds: the store's model and vectors of its dimension."""
    for name in ("embedding_model", "model"):
        if name in body:
            body[name] = MODEL
    for name in ("query", "query_embedding", "embedding"):
        if isinstance(body.get(name), str | list | bytes) or (name == "embedding" and "id" in body):
            body[name] = query().tobytes() if packed else b64(query())
    for value in body.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                _make_sense_of(item, packed)


def test_the_document_describes_every_route(client, api):
    routes = {
        (method, route.path.replace("{fact_id:path}", "{fact_id}"))
        for route in client.app.router.routes
        for method in (route.methods or ()) - {"HEAD"}
    }
    described = {(operation.ok().method.upper(), operation.ok().path) for operation in api.get_all_operations()}
    assert routes - described == {("GET", "/metrics"), ("GET", "/openapi.json")}
    assert described <= routes


def test_answers_that_succeed_are_as_described(client, api, session):
    """Made-up requests seldom succeed: these do, and their answers have the schema too."""
    own = {"id": "described", "text": "red", "embedding": b64(query())}  # made-up requests may have removed the others
    calls = [
        ("PUT", "/v1/facts", {"embedding_model": MODEL, "facts": [own]}, None),
        ("POST", "/v1/sessions", new_session(), None),
        ("GET", "/v1/sessions/{session_id}", None, session),
        ("POST", "/v1/sessions/{session_id}/rank", rank(), session),
        ("POST", "/v1/sessions/{session_id}/update", update(), session),
        ("POST", "/v1/sessions/{session_id}/assess", {"output": "red"}, session),
        ("POST", "/v1/sessions/{session_id}/token", None, session),
        ("POST", "/v1/sessions/{session_id}/snapshot", None, session),
        ("POST", "/v1/sessions/{session_id}/reset", None, session),
        ("GET", "/v1/stats", None, None),
        (
            "POST",
            "/v1/rerank",
            {
                "model": MODEL,
                "query_embedding": b64(query()),
                "documents": [{"id": "described"}],
                "return_documents": True,
            },
            None,
        ),
        ("DELETE", "/v1/sessions/{session_id}", None, session),
    ]
    for method, path, body, sid in calls:
        more = {} if body is None else {"body": body, "media_type": "application/json"}
        case = api[path][method].Case(path_parameters={"session_id": sid} if sid else {}, **more)
        answer = case.call(headers=bearer(KEY))
        assert answer.status_code == 200, (path, answer.text)
        case.validate_response(answer, checks=CHECKS)
