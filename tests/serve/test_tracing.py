"""Traces: a span per request, a child of the caller's, with its parts; nothing of what the request says."""

from __future__ import annotations

import pytest
from serving import (
    Settings,
    TestClient,
    b64,
    create_app,
    created,
    make_store,
    query,
    rank,
    update,
    wait_until_ready,
)

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the otel extra")
export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
processors = pytest.importorskip("opentelemetry.sdk.trace.export")

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def exporter():
    return export.InMemorySpanExporter()


@pytest.fixture
def client(tmp_path, exporter):
    make_store(prefix="quux-").save(tmp_path / "s")  # no hexadecimal id has such a name in it
    provider = sdk.TracerProvider()
    provider.add_span_processor(processors.SimpleSpanProcessor(exporter))
    app = create_app(Settings(store=tmp_path / "s", access_log=False), tracer_provider=provider)
    with TestClient(app, raise_server_exceptions=False) as client:
        wait_until_ready(client)
        yield client


def told(spans):
    """All that spans say."""
    return [
        repr((each.name, dict(each.attributes), each.events, each.links, each.status.description)) for each in spans
    ]


def test_a_request_is_a_span_with_its_parts(client, exporter):
    sid = created(client)
    exporter.clear()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    facts = client.post(f"/v1/sessions/{sid}/rank", json=rank(), headers=headers).json()["facts"]
    client.post(f"/v1/sessions/{sid}/update", json=update(output="a secret output"), headers=headers)
    client.get("/v1/nowhere", headers=headers)
    spans = exporter.get_finished_spans()
    whole = {span.name: span for span in spans if span.parent and f"{span.parent.span_id:016x}" == PARENT}
    assert set(whole) == {"POST rank_facts", "POST update_session", "GET none"}
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    assert whole["GET none"].attributes["http.response.status_code"] == 404

    def parts(name):
        return {span.name for span in spans if span.parent.span_id == whole[name].context.span_id}

    assert parts("POST rank_facts") == {"decode", "rank", "pack", "encode"}
    assert parts("POST update_session") == {"decode", "commit", "encode"}
    assert any("cdr.request_id" in each for each in told(spans))
    secrets = ["secret", "quux-", b64(query()), *(fact["text"] for fact in facts)]
    assert len(secrets) == 8
    assert [(secret, each) for secret in secrets for each in told(spans) if secret in each] == []


def test_what_is_wrong_with_a_request_is_a_type_without_its_words(client, exporter):
    service = client.app.state.service
    exporter.clear()
    assert client.post("/v1/facts/delete", json={"ids": ["quux-59x"]}).status_code == 404
    assert client.post("/v1/sessions", json={"quux-field": 1}).status_code == 422
    service.tenants["default"].facts.remove = lambda ids, **_: {}[ids[0]] / 0
    assert client.post("/v1/facts/delete", json={"ids": ["quux-1"]}).status_code == 404
    service.tenants["default"].facts.remove = lambda ids, **_: 1 / 0
    assert client.post("/v1/facts/delete", json={"ids": ["quux-1"]}).status_code == 500
    spans = exporter.get_finished_spans()
    assert {span.status.description for span in spans} == {None, "Refusal", "ZeroDivisionError"}
    assert [each for each in told(spans) if "quux" in each] == []
