"""What is wrong with a body is said in the words of the other refusals."""

from __future__ import annotations

import datetime
import json

import pytest

pytest.importorskip("msgspec", reason="needs the serve extra")

import msgspec

from cdr_kernel.serve import _schema
from cdr_kernel.serve._errors import Refusal

M = {"embedding_model": "m"}
SUB = {"id": "a", "label": "A"}
FACT = {"id": "a", "text": "t"}


def refused(kind, body, packed=False):
    media, encode = (_schema.MSGPACK, msgspec.msgpack.encode) if packed else (_schema.JSON, json.dumps)
    data = body if isinstance(body, bytes) else encode(body)
    with pytest.raises(Refusal) as caught:
        _schema.decode(data.encode() if isinstance(data, str) else data, media, kind)
    return caught.value


CASES = [
    (_schema.RankFacts, {**M, "k": -1}, "k", "an integer, at least 0", "-1"),
    (_schema.RankFacts, {**M, "k": 2**60}, "k", "an integer, at most 9007199254740992", "1152921504606846976"),
    (_schema.RankFacts, {**M, "k": 1.5}, "k", "an integer", "a number"),
    (_schema.RankFacts, {**M, "query": 3}, "query", "bytes (base64 in JSON), a list or null", "an integer"),
    (_schema.RankFacts, {**M, "query": ["a"]}, "query[0]", "a number", "a string"),
    (_schema.RankFacts, {**M, "where": {"": 1}}, "where", "keys that are each a string of at least 1 character", None),
    (
        _schema.RankFacts,
        {**M, "where": {"a": {"b": 1}}},
        "where[...]",
        "true or false, an integer, a number, a string, a list or null",
        "an object",
    ),
    (_schema.RankFacts, {**M, "where": []}, "where", "an object or null", "a list"),
    (_schema.RankFacts, {**M, "multiplier": {"a": -1}}, "multiplier[...]", "a number, at least 0", None),
    (_schema.RankFacts, {**M, "pack": "x"}, "pack", '"greedy" or "need"', "'x'"),
    (_schema.RankFacts, {**M, "text": ""}, "text", "a string of at least 1 character", "''"),
    (_schema.AddFacts, {**M, "facts": []}, "facts", "a list of at least 1 item", "0 items"),
    (_schema.AddFacts, {**M, "facts": [FACT], "on_invalid": "x"}, "on_invalid", '"raise" or "skip"', "'x'"),
    (
        _schema.AddFacts,
        {**M, "facts": [FACT, {**FACT, "id": "x" * 2000}]},
        "facts[1].id",
        "a string of at most 1024 characters",
        "2000 characters",
    ),
    (_schema.AddFacts, {**M, "facts": [{**FACT, "text": None}]}, "facts[0].text", "a string", "null"),
    (_schema.AddFacts, {**M, "facts": [3]}, "facts[0]", "an object", "an integer"),
    (_schema.AddFacts, [], None, "an object", "a list"),
    (_schema.NewSession, {"embedding_model": 3}, "embedding_model", "a string", "an integer"),
    (_schema.NewSession, {}, "embedding_model", "this field", "nothing"),
    (_schema.NewSession, {**M, "sub_queries": [{"id": "a"}]}, "sub_queries[0].label", "this field", "nothing"),
    (_schema.NewSession, {"x": 1}, "x", "no such field", "it"),
    (_schema.NewSession, {**M, "sub_queries": [{**SUB, "x": 1}]}, "sub_queries[0].x", "no such field", "it"),
    (
        _schema.NewSession,
        {**M, "sub_queries": [SUB], "settings": {"gate_on": "x" * 50}},
        "settings.gate_on",
        '"best" or "query"',
        "50 characters",
    ),
    (_schema.Rerank, {"model": "m", "documents": [3]}, "documents[0]", "a string or an object", "an integer"),
    (_schema.Rerank, {"model": "m", "documents": ["x"], "depths": [0, 2]}, "depths[1]", "a number, at most 1", "2"),
    (_schema.Rerank, {"model": "m", "documents": ["x"], "return_documents": 1}, "return_documents", None, "an integer"),
    (_schema.MergeSessions, {"branches": ["a"] * 65}, "branches", "a list of at most 64 items", "65 items"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "body", "field", "expected", "got"), CASES)
def test_a_body_that_is_not_of_the_schema_says_where_and_how(kind, body, field, expected, got, packed):
    refusal = refused(kind, body, packed)
    told = refusal.detail
    assert (refusal.status, told.code) == (422, "invalid")
    assert (told.field, told.expected, told.got) == (field, expected or "true or false", got)
    assert told.message.startswith(f"{field or 'the body'}: ")
    assert "`" not in told.message
    assert "$" not in told.message


@pytest.mark.parametrize(
    ("body", "field", "expected", "got"),
    [
        (b'{"embedding_model": "m", "query": "!"}', "query", "base64", "'!'"),
        (b'{"embedding_model": "m", "k": 1e400}', "k", "a number that 64 bits hold", "a larger one"),
        (b'{"embedding_model": "m", "query": [1, 1e400]}', "query[1]", "a number that 64 bits hold", "a larger one"),
    ],
)
def test_what_json_alone_can_say(body, field, expected, got):
    told = refused(_schema.RankFacts, body).detail
    assert (told.field, told.expected, told.got) == (field, expected, got)


@pytest.mark.parametrize(
    ("body", "field", "expected", "got"),
    [
        ({1: 2}, None, "keys that are each a string", "an integer"),
        ({**M, "where": {1: 2}}, "where", "keys that are each a string", "an integer"),
        ({**M, "text": b"x"}, "text", "a string or null", "bytes (base64 in JSON)"),
        ({**M, "text": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}, "text", "a string or null", None),
    ],
)
def test_what_msgpack_alone_can_say(body, field, expected, got):
    told = refused(_schema.RankFacts, body, packed=True).detail
    assert (told.field, told.expected) == (field, expected)
    assert told.got == (got or "an extension of msgpack")


@pytest.mark.parametrize("name", ["mode", "exhaustion", "gate_on"])
def test_every_choice_of_the_settings_is_told(name):
    told = refused(_schema.NewSession, {**M, "sub_queries": [SUB], "settings": {name: "none"}}).detail
    assert told.field == f"settings.{name}"
    assert told.expected.count('"') == 4


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"k": 3, ', b'"\\ud800"', b"nonsense", b'{"embedding_model": "m"}x', b"\xff"]
)
def test_what_cannot_be_read_is_400(data):
    refusal = refused(_schema.RankFacts, data)
    assert (refusal.status, refusal.detail.code, refusal.detail.field) == (400, "malformed", None)


@pytest.mark.parametrize("data", [b'{"k": -1, ', b'{"k": -1, "text": "\xff"}', b'{"k": -1, "k": ' + b"[" * 5000])
def test_what_is_wrong_before_the_body_breaks_off_is_told(data):
    told = refused(_schema.RankFacts, data).detail
    assert (told.field, told.expected, told.got) == ("k", "an integer, at least 0", None)


def test_a_field_that_came_twice():
    told = refused(_schema.RankFacts, b'{"query": ["a"], "query": 3}').detail
    assert (told.field, told.expected, told.got) == ("query[0]", "a number", "a string")
    told = refused(_schema.Rerank, b'{"depths": [2], "depths": 3}').detail
    assert (told.field, told.expected, told.got) == ("depths[0]", "a number, at most 1", None)
