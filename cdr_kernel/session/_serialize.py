"""A session as JSON, whole, and back, every field checked. `session._token` has the token that a gateway signs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from cdr_kernel.session._settings import MODES, Settings
from cdr_kernel.session._task import EnvelopeTest, Feedback, SessionState, SubQuery, check_outputs
from cdr_kernel.text import NGramGuard, Tokenizer
from cdr_kernel.text._token_hashes import HashKey
from cdr_kernel.validation._scalars import check_choice, check_integer, check_number, check_strings, check_text

if TYPE_CHECKING:
    from cdr_kernel.session._session import Session

S = TypeVar("S", bound="Session")
SCHEMA = 1
_COUNTERS = "window_count completeness safety_budget last_envelope"


def to_json(session: Session) -> str:
    """See `Session.to_json`."""
    state = session._state
    return _canonical(
        {
            "schema": SCHEMA,
            "id": session.id,
            "dim": session.dim,
            "settings": _settings(session.settings, session.embedding_model),
            "sub_queries": [
                {
                    "id": item.id,
                    "label": item.label,
                    "text": item.text,
                    "embedding": _pack_array(item.embedding, "<f8"),
                    "expected_words": item.expected_words,
                    "marginal": item.marginal,
                }
                for item in session.sub_queries
            ],
            "coverage": [
                {
                    "sub_query_id": entry.sub_query_id,
                    "depth_weight": entry.depth_weight,
                    "window_number": entry.window_number,
                }
                for entry in state.coverage
            ],
            "residual": [item.id for item in state.residual],
            "words": dict(state.words),
            "packed": dict(state.packed),
            "guard": None if state.guard is None else _pack_guard(state.guard),
            "outputs": list(state.outputs) if session.settings.keep_outputs else None,
            **_counters(state),
            **_feedback_data(session, state),
        }
    )


def from_json(kind: type[S], text: str, *, tokenizer: Tokenizer | None = None, hash_key: HashKey | None = None) -> S:
    """See `Session.from_json`."""
    data = _parse(text)
    try:
        return _from_data(kind, data, tokenizer, hash_key)
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a session: {_message(error)}") from error


def _counters(state: SessionState) -> dict[str, object]:
    """What JSON and token both have of the state, one small value each.

    To add a field: name it in `_COUNTERS`, put its value here, and read it in `_restore`.
    """
    return {
        "window_count": state.window_count,
        "completeness": state.completeness,
        "safety_budget": state.safety_budget,
        "last_envelope": _envelope_data(state),
    }


def _feedback_data(session: Session, state: SessionState) -> dict[str, object]:
    if not session.settings.fixes_direction:
        return {}
    made = state.feedback
    if made is None:
        return {"feedback": None}
    direction = None if made.direction is None else _pack_array(made.direction, "<f8")
    words = None if made.words is None else [list(pair) for pair in made.words]
    return {"feedback": {"fact_ids": list(made.fact_ids), "direction": direction, "words": words}}


def _settings(settings: Settings, embedding_model: str) -> dict[str, object]:
    return {"embedding_model": embedding_model, "mode": settings.mode, **asdict(settings)}


def _envelope_data(state: SessionState) -> list[object] | None:
    """What is remembered of the last envelope: ratio (null: infinite), newest fact, and why the store is exhausted."""
    last = state.last_envelope
    return None if last is None else [last.ratio if math.isfinite(last.ratio) else None, last.newest, last.detail]


def _outputs_hash(outputs: Sequence[str]) -> str:
    return hashlib.sha256(_canonical(list(outputs)).encode("ascii")).hexdigest()


def _from_data(kind: type[S], data: dict[str, Any], tokenizer: Tokenizer | None, hash_key: HashKey | None) -> S:
    fields = f"schema id dim settings sub_queries coverage residual words packed guard outputs {_COUNTERS}"
    _check_fields(data, fields + _extra_fields(data), "the session")
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA}, got {data['schema']!r}")
    dim = check_integer(data["dim"], "dim", 1)
    sub_queries = []
    for item in _check_list(data["sub_queries"], "sub_queries"):
        _check_fields(item, "id label text embedding expected_words marginal", "a sub-query")
        where = f"the embedding of sub-query {item['id']!r}"
        sub_queries.append(SubQuery(**{**item, "embedding": _unpack_array(item["embedding"], "<f8", where, dim)}))
    guard: NGramGuard | Literal[False] = False
    if data["guard"] is not None:
        stored = _unpack_guard(data["guard"])
        guard = NGramGuard.from_state(stored, tokenizer=tokenizer, hash_key=hash_key)
    check_text(data["id"], "id")
    session = _from_settings(kind, data, sub_queries, guard)
    coverage = []
    for item in _check_list(data["coverage"], "coverage"):
        _check_fields(item, "sub_query_id depth_weight window_number", "a coverage entry")
        coverage.append((item["sub_query_id"], item["depth_weight"], item["window_number"]))
    _restore(session, data, coverage, data["words"], data["outputs"])
    if data["residual"] != [item.id for item in session.residual]:
        raise ValueError(f"residual must be what coverage leaves, got {data['residual']!r}")
    return session


def _from_settings(
    kind: type[S], data: dict[str, Any], sub_queries: Sequence[SubQuery], guard: NGramGuard | Literal[False] | None
) -> S:
    stored = data["settings"]
    kind_of = MODES[check_choice(stored.get("mode") if isinstance(stored, dict) else None, "mode", tuple(MODES))]
    own = sorted(kind_of.names())
    _check_fields(stored, f"embedding_model mode {' '.join(own)}", "settings")
    settings = kind_of(**{name: stored[name] for name in own})
    rest: dict[str, Any] = {"id": data["id"], "safety_budget": data["safety_budget"], "guard": guard}
    return kind(sub_queries, embedding_model=stored["embedding_model"], settings=settings, **rest)


def _restore(
    session: Session, data: dict[str, Any], coverage: Iterable[tuple[Any, Any, Any]], words: object, outputs: object
) -> None:
    """Replace the fresh state of a session just made by a stored one, checked. The residual is what coverage leaves."""
    count = check_integer(data["window_count"], "window_count", 0)
    entries = tuple(
        session._entry(
            session._check_id(id, "coverage"),
            check_number(depth, f"the depth of {id!r}", 0.0, 1.0),
            check_integer(window, "window_number", 1, count),
        )
        for id, depth, window in coverage
    )
    remaining = session._remaining(entries)
    if not isinstance(words, dict) or set(words) != set(session._index):
        raise ValueError(f"words must have a count for each sub-query, got {words!r}")
    if not isinstance(data["packed"], dict):
        raise TypeError(f"packed must be an object, got {data['packed']!r}")
    packed = {id: check_integer(n, f"the window of fact {id!r}", 1, count) for id, n in data["packed"].items()}
    session._state = replace(
        session._state,
        coverage=entries,
        residual=remaining,
        window_count=count,
        completeness=check_number(data["completeness"], "completeness", 0.0, 1.0),
        words={id: check_integer(words[id], f"the words of {id!r}", 0) for id in session._index},
        packed=packed,
        feedback=_read_feedback(session, data.get("feedback")),
        last_envelope=_read_envelope(data["last_envelope"]),
        outputs=_read_outputs(session, outputs, count),
    )


def _read_envelope(stored: object) -> EnvelopeTest | None:
    if stored is None:
        return None
    parts = _check_list(stored, "last_envelope")
    if len(parts) != 3:
        raise ValueError(f"last_envelope must be null or [ratio, newest, detail], got {stored!r}")
    ratio, newest, detail = parts
    ratio = math.inf if ratio is None else check_number(ratio, "the ratio of last_envelope")
    return EnvelopeTest(
        ratio,
        check_text(detail, "the detail of last_envelope", empty=True),
        check_integer(newest, "the newest fact of last_envelope", -1),
    )


def _read_outputs(session: Session, stored: object, count: int) -> tuple[str, ...]:
    if not session.settings.keep_outputs:
        if stored is not None:
            raise ValueError("outputs must be null where the session does not keep them")
        return ()
    texts = check_strings(_check_list(stored, "outputs"), "outputs")
    if len(texts) > count:
        raise ValueError(f"outputs must have at most one text for each of the {count} windows, got {len(texts)}")
    return check_outputs(tuple(texts))


def _token_outputs(stored: object, outputs: Sequence[str] | None) -> list[str] | None:
    """The outputs of a token's session as far as they are given, None where it keeps none."""
    if stored is None:
        if outputs is not None:
            raise ValueError("outputs: the session of the token keeps none, got some")
        return None
    if outputs is not None and _outputs_hash(outputs) != stored:
        raise ValueError("outputs: expected those of the token's session, got others: the SHA-256 differs")
    return list(outputs or ())


def _read_feedback(session: Session, stored: object) -> Feedback | None:
    if stored is None:
        return None
    ids, direction, listed = stored, None, None
    if isinstance(stored, dict):
        _check_fields(stored, "fact_ids direction words", "feedback")
        ids, direction, listed = stored["fact_ids"], stored["direction"], stored["words"]
        if (direction is None) != (listed is None):
            raise ValueError("feedback must have both direction and words or neither")
    checked = tuple(check_text(id, "a fact of feedback", empty=True) for id in _check_list(ids, "feedback"))
    if direction is None:
        return Feedback(checked)
    vector = _unpack_array(direction, "<f8", "the direction of feedback", session.dim)
    if not np.isfinite(vector).all():
        raise ValueError("the direction of feedback must be finite")
    words = []
    for pair in _check_list(listed, "the words of feedback"):
        if len(_check_list(pair, "a word of feedback")) != 2:
            raise ValueError(f"a word of feedback must be [word, weight], got {pair!r}")
        word, weight = check_text(pair[0], "a word of feedback"), pair[1]
        words.append((word, check_number(weight, f"the weight of {word!r} in feedback", 0.0)))
    return Feedback(checked, vector, tuple(words))


def _extra_fields(data: dict[str, Any]) -> str:
    settings = data.get("settings")
    mode = MODES.get(str(settings.get("mode"))) if isinstance(settings, dict) else None
    return " feedback" if mode is not None and mode.fixes_direction else ""


def _token_guard(stored: object, guard: NGramGuard | None) -> NGramGuard | Literal[False]:
    if stored is None:
        if guard is not None:
            raise ValueError("the session of the token has no n-gram guard, got one")
        return False
    if not isinstance(stored, list) or len(stored) != 5:
        raise ValueError(f"guard must be null or [n, tokenizer, key, exact, max_ngrams], got {stored!r}")
    n, _, _, exact, max_ngrams = stored
    own = NGramGuard(n, exact=exact, max_ngrams=max_ngrams) if guard is None else guard
    if _guard_settings(own) != stored:
        raise ValueError(f"the token is of an n-gram guard {stored}, got {_guard_settings(own)}: pass guard=")
    return own


def _guard_settings(guard: NGramGuard) -> list[object]:
    return [guard.n, guard.tokenizer_name, guard.key_fingerprint, guard.exact, guard.max_ngrams]


def _pack_guard(guard: NGramGuard) -> dict[str, object]:
    state = guard.state()
    state["hashes"] = [_pack_array(hashes, "<u8") for hashes in state["hashes"]]
    if state["tokens"] is not None:
        # bytes, since JSON would take two lone surrogates of a token for one character
        text = json.dumps(state["tokens"], ensure_ascii=False, separators=(",", ":"))
        state["tokens"] = base64.b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")
    return state


def _unpack_guard(data: object) -> dict[str, Any]:
    _check_fields(data, "n tokenizer key exact max_ngrams hashes tokens", "the guard")
    assert isinstance(data, dict)
    state = dict(data)
    state["hashes"] = [
        _unpack_array(hashes, "<u8", "the hashes of the guard") for hashes in _check_list(state["hashes"], "hashes")
    ]
    if state["tokens"] is not None:
        raw = _unpack_array(state["tokens"], "u1", "the tokens of the guard").tobytes()
        state["tokens"] = _check_list(json.loads(raw.decode("utf-8", "surrogatepass")), "tokens")
    return state


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _parse(text: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise TypeError(f"a session is read from a str, got {type(text).__name__}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a session: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"a session is a JSON object, got {type(data).__name__}")
    return data


def _message(error: Exception) -> str:
    return str(error.args[0]) if error.args else str(error)


def _check_fields(data: object, names: str, where: str) -> None:
    if not isinstance(data, dict) or set(data) != set(names.split()):
        got = sorted(data) if isinstance(data, dict) else data
        raise ValueError(f"{where} must have the fields {sorted(names.split())}, got {got!r}")


def _check_list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list, got {value!r}")
    return value


def _pack_array(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")


def _unpack_array(value: object, dtype: str, name: str, length: int | None = None) -> NDArray[Any]:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be base64 text, got {value!r}")
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name} is not base64: {error}") from error
    size = np.dtype(dtype).itemsize
    if len(raw) % size or (length is not None and len(raw) != length * size):
        expected = f"a multiple of {size}" if length is None else f"{length * size}"
        raise ValueError(f"{name} must have {expected} bytes, got {len(raw)}")
    return np.frombuffer(raw, dtype=dtype).astype(np.dtype(dtype).newbyteorder("="))
