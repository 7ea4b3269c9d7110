"""Large bodies in steps: the same structs and the same refusals as in one go, and no more values than are allowed."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from serving import MODEL, b64, new_session, query, rank, update

from cdr_kernel.concurrency._steps import finish
from cdr_kernel.serve import _decoding, _schema
from cdr_kernel.serve._decoding import decode_steps
from cdr_kernel.serve._errors import Refusal

msgspec = pytest.importorskip("msgspec")

VECTOR = query().tobytes()  # base64 in JSON
TASK = new_session(mode="spec")
for item in TASK["sub_queries"]:
    item["embedding"] = VECTOR
FACT = {"id": "a", "text": "red", "embedding": [1.5, 2], "attributes": {"lang": "en", "year": 3}, "position": 4}
RIGHT = [
    (_schema.AddFacts, {"embedding_model": MODEL, "facts": [FACT, {"id": "b", "text": "", "embedding": VECTOR}]}),
    (_schema.FactIds, {"ids": ["a", "b, c", "é"], "missing": "ignore"}),
    (_schema.Quarantine, {"ids": ["a"], "reason": None}),
    (_schema.NewSession, TASK),
    (_schema.UpdateSession, update(["s0", "s1"], packed=["a", "b"], safety_budget=0.5)),
    (_schema.AssessOutput, {"output": "a, b"}),
    (_schema.MergeSessions, {"branches": ["x"]}),
    (
        _schema.RankFacts,
        rank(query=VECTOR, where={"lang": ["en", None], "year": 3}, multiplier={"a": 2.0}, pack="need"),
    ),
    (_schema.RankFacts, {"embedding_model": MODEL, "query": [1, 2.5]}),
    (
        _schema.Rerank,
        {"model": MODEL, "query": "q", "documents": ["a", FACT | {"importance": 2}], "covered": [[1, 2], [3]]},
    ),
]
del RIGHT[-1][1]["documents"][1]["attributes"], RIGHT[-1][1]["documents"][1]["position"]
WRONG = [None, 0, -1, 1.5, True, "", "x" * 2000, [], [None], {}, {"a": [[]]}, [1, "a"], {"id": 3}, "not base64!"]


def outcome(read):
    try:
        return read()
    except Refusal as refusal:
        return refusal.status, refusal.detail, str(refusal)


def both(body, media, kind):
    whole = outcome(lambda: _schema.decode(body, media, kind))
    steps = outcome(lambda: finish(decode_steps(body, media, kind)))
    return whole, steps


def mutated(value, r):
    """The value with something wrong in one place, or missing, or more of it."""
    if isinstance(value, dict) and value and r.random() < 0.8:
        name = r.choice(sorted(value))
        how = r.random()
        if how < 0.15:
            return {key: part for key, part in value.items() if key != name}
        if how < 0.3:
            return value | {"unknown": 1}
        return value | {name: mutated(value[name], r)}
    if isinstance(value, list) and value and r.random() < 0.8:
        at = r.randrange(len(value))
        return [*value[:at], mutated(value[at], r), *value[at + 1 :]]
    return r.choice(WRONG)


@pytest.mark.parametrize(("kind", "value"), RIGHT, ids=lambda part: getattr(part, "__name__", ""))
@pytest.mark.parametrize("media", [_schema.JSON, _schema.MSGPACK])
def test_a_body_is_the_same_in_steps(kind, value, media, monkeypatch):
    """Nearly everything goes through the steps, however small; what is wrong is refused with the same code."""
    monkeypatch.setattr(_decoding, "WHOLE", 12)
    encode = msgspec.json.encode if media == _schema.JSON else msgspec.msgpack.encode
    whole, steps = both(encode(value), media, kind)
    assert whole == steps
    assert isinstance(whole, kind)
    assert type(steps) is kind
    r = random.Random(kind.__name__)
    for _ in range(150):
        body = encode(mutated(value, r))
        whole, steps = both(body, media, kind)
        if isinstance(whole, tuple):
            # Which of two mistakes is told may differ, and what came is not looked up in what is too large for that.
            assert steps[0] == whole[0], body
            assert steps[1].code == whole[1].code
            assert steps[1].field is not None or whole[1].field is None
        else:
            assert whole == steps, body


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (_schema.FactIds, {"ids": [""]}),
        (_schema.FactIds, {"ids": []}),
        (_schema.AddFacts, {"embedding_model": MODEL, "facts": [FACT | {"importance": -1}]}),
        (_schema.AddFacts, {"embedding_model": MODEL, "facts": [FACT, FACT | {"embedding": ["x"]}]}),
        (_schema.AddFacts, {"embedding_model": MODEL, "facts": [FACT, {"text": "no id"}]}),
        (_schema.RankFacts, rank(pack="best")),
        (_schema.RankFacts, rank(multiplier={"a": -1.0})),
        (_schema.RankFacts, rank(where={"": 1})),
        (_schema.UpdateSession, update(completeness=2)),
        (_schema.NewSession, {**new_session(), "sub_queries": new_session()["sub_queries"] * 400}),
    ],
)
def test_what_is_wrong_is_told_in_the_same_words(kind, value, monkeypatch):
    body = json.dumps(value).encode()
    whole = outcome(lambda: _schema.decode(body, _schema.JSON, kind))
    monkeypatch.setattr(_decoding, "WHOLE", 40)
    steps = outcome(lambda: finish(decode_steps(body, _schema.JSON, kind)))
    assert steps[0] == whole[0] == 422
    assert (steps[1].field, steps[1].expected) == (whole[1].field, whole[1].expected)


@pytest.mark.parametrize("media", [_schema.JSON, _schema.MSGPACK])
@pytest.mark.parametrize(
    ("kind", "value", "field"),
    [
        (_schema.FactIds, {"ids": ["a"] * 3000}, "ids"),
        (_schema.RankFacts, rank(query=VECTOR, multiplier={f"f{i}": 1 for i in range(3000)}), "multiplier"),
        (_schema.RankFacts, rank(query=VECTOR, where={"lang": list(range(3000))}), "where"),
        (_schema.RankFacts, rank(query=[1] * 3000), "query"),
        (_schema.Rerank, {"model": MODEL, "documents": ["a"], "covered": [[1], [1] * 3000]}, "covered[1]"),
        (_schema.AddFacts, {"embedding_model": MODEL, "facts": [FACT] * 3000}, "facts"),
        (
            _schema.AddFacts,
            {"embedding_model": MODEL, "facts": [FACT | {"embedding": [1] * 3000}]},
            "facts[0].embedding",
        ),
    ],
)
def test_more_values_than_are_allowed_are_413(kind, value, field, media, monkeypatch):
    for name, most in {"WHOLE": 100, "MOST_VALUES": 2000, "MOST_OBJECTS": 2000, "MOST_BRACES": 5000}.items():
        monkeypatch.setattr(_decoding, name, most)
    monkeypatch.setattr(_decoding, "MOST_NESTED", 2000)
    encode = msgspec.json.encode if media == _schema.JSON else msgspec.msgpack.encode
    status, detail, _ = outcome(lambda: finish(decode_steps(encode(value), media, kind)))
    assert (status, detail.code) == (413, "too_large")
    assert detail.field.startswith(field.partition("[")[0])
    assert "at most" in detail.expected


def test_a_long_list_is_read_in_many_steps():
    facts = [{"id": f"f{i}", "text": "t", "embedding": b64(np.ones(8))} for i in range(2000)]
    body = json.dumps({"embedding_model": MODEL, "facts": facts}).encode()
    assert len(body) > _decoding.WHOLE
    steps = decode_steps(body, _schema.JSON, _schema.AddFacts)
    assert sum(1 for _ in steps) > 2000 // _decoding.STEP
    assert len(finish(decode_steps(body, _schema.JSON, _schema.AddFacts)).facts) == 2000
