"""A session as the token that a gateway signs: 4,096 bytes at most, and a blob beside it where those do not suffice.

    token, blob = session.token_and_blob(store)             # blob is None where the token holds all
    Session.from_token(token, sub_queries, embedding_model="...", store=store, blob=blob)

The token is a head, a newline and a body. The head is canonical JSON in ASCII: id, settings that are not the default,
counters, the digest of the outputs where they are kept, and a SHA-256 of everything, the sub-queries included. The
body is canonical JSON of what has no number, a newline, and bits: words, coverage, packed facts, feedback. Where head
and body exceed the limit, the body is the blob, the token is the head alone, and the head has the SHA-256 of the blob.
Equal states give equal bytes.

Facts of a store go by the numbers that they were added with (`FactStore.numbers_of`); the head says whose the numbers
are. Facts that have no number go by their ids.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.session import _serialize
from cdr_kernel.session._bit_codes import BitReader, BitWriter
from cdr_kernel.session._serialize import SCHEMA
from cdr_kernel.session._settings import MODES
from cdr_kernel.session._task import CoverageEntry, SessionState, SubQuery
from cdr_kernel.spec.constants import MAX_DEPTH_FROM_WORDS
from cdr_kernel.store._numbering import Numbering
from cdr_kernel.text import NGramGuard
from cdr_kernel.validation._arrays import Int64
from cdr_kernel.validation._scalars import check_choice, check_order, check_strings, check_text

if TYPE_CHECKING:
    from cdr_kernel.session._session import Session

S = TypeVar("S", bound="Session")

TOKEN_LIMIT: Final = 4096
"""SPEC-007: bytes of a session token at most."""
BLOB_LIMIT: Final = 2**22
"""Bytes of a blob at most."""

_HEAD = "v id settings guard sha256"
_LARGEST_DENOMINATOR = 4096
_LARGEST_COMMON = 2**16
_CAP, _RAW, _RATIO = range(3)  # depth symbols: the largest depth from words, 64 bits, and from here on a ratio


class SessionToken(NamedTuple):
    """A session to be signed.

    token: 4,096 bytes at most.
    blob: What goes beside it, 4 MiB at most. None where the token has all.
    """

    token: bytes
    blob: bytes | None


class StoreBehind(ValueError):
    """A token names facts that its store has not seen yet: it was made with a newer version of the store."""


@runtime_checkable
class NumberedStore(Protocol):
    """What a token needs of a store: a `FactStore` or a `ShardedStore`."""

    numbering: Numbering

    @property
    def embedding_model(self) -> str:
        """The model of the embeddings."""

    @property
    def next_sequence(self) -> int:
        """The number that the next fact gets."""

    def numbers_of(self, ids: Iterable[str]) -> Int64:
        """See `FactStore.numbers_of`."""

    def ids_of(self, numbers: Int64) -> list[str | None]:
        """See `FactStore.ids_of`."""


def token_and_blob(session: Session, store: NumberedStore | None) -> SessionToken:
    """See `Session.token_and_blob`."""
    state = session._state
    _check_store(store, session.embedding_model)
    packed = state.packed if session.settings.keeps_packed else {}
    feedback = () if state.feedback is None else state.feedback.fact_ids
    numbers, origin = _numbers([*packed, *feedback], store)
    head: dict[str, Any] = {
        "v": SCHEMA,
        "id": session.id,
        "settings": _shortened(_serialize._settings(session.settings, session.embedding_model)),
        "guard": None if state.guard is None else _serialize._guard_settings(state.guard),
        **_serialize._counters(state),
    }
    if origin is not None:
        head["store"] = origin
    if session.settings.keep_outputs:
        head["outputs"] = _serialize._outputs_hash(state.outputs)
    body = _body(session, state, packed, numbers)
    head["sha256"] = _digest(head, session.sub_queries, body)
    token = _serialize._canonical(head).encode("ascii") + b"\n" + body
    if len(token) <= TOKEN_LIMIT:
        return SessionToken(token, None)
    token = _serialize._canonical({**head, "blob": hashlib.sha256(body).hexdigest()}).encode("ascii")
    if len(token) > TOKEN_LIMIT:
        raise ValueError(
            f"a session token holds at most {TOKEN_LIMIT} bytes, the session's id, settings and counters alone need "
            f"{len(token)}: use a shorter id, or `to_json`"
        )
    if len(body) > BLOB_LIMIT:
        raise ValueError(f"a blob holds at most {BLOB_LIMIT} bytes, this session needs {len(body)}: use `to_json`")
    return SessionToken(token, body)


def token(session: Session, store: NumberedStore | None) -> bytes:
    """See `Session.token`."""
    token, blob = token_and_blob(session, store)
    if blob is not None:
        name = "" if store is not None else " name the store of its facts, or"
        raise ValueError(
            f"a session token holds at most {TOKEN_LIMIT} bytes, the rest of this session needs {len(blob)} more:"
            f"{name} use `token_and_blob`"
        )
    return token


def from_token(
    kind: type[S],
    token: bytes,
    sub_queries: Iterable[SubQuery],
    *,
    embedding_model: str,
    guard: NGramGuard | None = None,
    store: NumberedStore | None = None,
    blob: bytes | None = None,
    outputs: Sequence[str] | None = None,
) -> S:
    """See `Session.from_token`."""
    check_text(embedding_model, "embedding_model")
    if guard is not None and not isinstance(guard, NGramGuard):
        raise TypeError(f"guard must be an NGramGuard or None, got {guard!r}")
    _check_store(store, embedding_model)
    check_order(sub_queries, "sub_queries")
    sub_queries = tuple(sub_queries)
    for item in sub_queries:
        if not isinstance(item, SubQuery):
            raise TypeError(f"sub_queries must hold SubQuery objects, got {type(item).__name__}")
    if outputs is not None:
        outputs = check_strings(outputs, "outputs")
    head, body = _opened(token, blob)
    try:
        model = head["settings"]["embedding_model"]
        if model != embedding_model:
            advice = f"the token is of a session of {model!r}, embedding_model= and its sub-queries must be of that too"
            raise EmbeddingModelMismatch("embedding_model", model, embedding_model, advice)
        stored = {name: value for name, value in head.items() if name not in ("sha256", "blob")}
        if _digest(stored, sub_queries, body) != head["sha256"]:
            raise ValueError(
                "the SHA-256 of the token differs: the sub-queries are not those of the token, bytes were changed, or "
                "another version made it"
            )
        check_text(head["id"], "id")
        own = _serialize._token_guard(head["guard"], guard)
        data = {**head, "settings": _completed(head["settings"])}
        texts = _serialize._token_outputs(head.get("outputs"), outputs)
        session = _serialize._from_settings(kind, data, sub_queries, own)
        _restore(session, data, body, store, texts)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a session token: {error.args[0] if error.args else error}") from error
    return session


def head_of(token: bytes) -> dict[str, Any]:
    """The readable part of a token: id, settings, counters, guard, store. ValueError for what is no token."""
    return _opened_head(token)[0]


# The head


def _opened(token: bytes, blob: bytes | None) -> tuple[dict[str, Any], bytes]:
    """The head and the body, which is in the token or in the blob."""
    head, body = _opened_head(token)
    if blob is not None and not isinstance(blob, bytes | bytearray):
        raise TypeError(f"blob must be bytes or None, got {type(blob).__name__}")
    if body is not None:
        if blob is not None:
            raise ValueError("the token holds all of its session, got a blob beside it: pass blob=None")
        return head, body
    if blob is None:
        raise ValueError("the token needs the blob that was made with it, got none: pass blob=")
    if len(blob) > BLOB_LIMIT:
        raise ValueError(f"a blob holds at most {BLOB_LIMIT} bytes, got {len(blob)}")
    if hashlib.sha256(blob).hexdigest() != head["blob"]:
        raise ValueError("the blob is not the one that was made with the token: its SHA-256 differs")
    return head, bytes(blob)


def _opened_head(token: bytes) -> tuple[dict[str, Any], bytes | None]:
    """The head, and the body where it is in the token."""
    if not isinstance(token, bytes | bytearray):
        raise TypeError(f"token must be bytes, got {type(token).__name__}")
    if len(token) > TOKEN_LIMIT:
        raise ValueError(f"a session token holds at most {TOKEN_LIMIT} bytes, got {len(token)}")
    text, newline, body = bytes(token).partition(b"\n")
    try:
        head = _serialize._parse(text.decode("ascii"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not a session token: {error}") from error
    further = [name for name in ("store", "blob", "outputs") if name in head]
    _serialize._check_fields(head, " ".join([_HEAD, _serialize._COUNTERS, *further]), "the head of the token")
    if _serialize._canonical(head).encode("ascii") != text:
        raise ValueError("not a session token: its head is not canonical JSON")
    if head["v"] != SCHEMA or type(head["v"]) is not int:
        raise ValueError(f"v must be {SCHEMA}, got {head['v']!r}")
    if ("blob" in head) == bool(newline):
        raise ValueError("a session token has a body or the SHA-256 of a blob, this one has both or neither")
    return head, None if "blob" in head else body


def _digest(head: dict[str, Any], sub_queries: Sequence[SubQuery], body: bytes) -> str:
    """SHA-256 of the head without its digests, all settings, the sub-queries and the body."""
    content = {
        "head": head,
        "settings": _completed(head["settings"]),
        "sub_queries": [[item.id, _serialize._pack_array(item.embedding, "<f8")] for item in sub_queries],
    }
    return hashlib.sha256(_serialize._canonical(content).encode("ascii") + b"\n" + body).hexdigest()


def _shortened(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that have their default."""
    default, canonical = _default_settings(settings["mode"]), _serialize._canonical
    return {name: value for name, value in settings.items() if canonical(value) != canonical(default.get(name))}


def _completed(settings: Any) -> dict[str, Any]:
    """What `_shortened` was given."""
    return {**_default_settings(settings.get("mode", "spec")), **settings}


@cache
def _default_settings(mode: str) -> dict[str, Any]:
    """The settings that a session of this mode has by default."""
    return {**asdict(MODES[check_choice(mode, "mode", tuple(MODES))]()), "mode": "spec"}


# The body


def _body(session: Session, state: SessionState, packed: Mapping[str, int], numbers: Sequence[int | None]) -> bytes:
    """What is left of the state: JSON of the facts without a number, a newline, and bits.

    packed: the packed facts that go in, with their windows. numbers: of them and of the feedback's facts.
    """
    bits = BitWriter()
    bits.numbers([state.words[item.id] for item in session.sub_queries])
    _put_coverage(bits, [(session._index[entry.sub_query_id], entry) for entry in state.coverage])
    unnumbered: dict[str, Any] = {}
    windows: dict[int, list[int]] = {}
    for (id, window), number in zip(packed.items(), numbers, strict=False):
        if number is None:
            unnumbered.setdefault("packed", {})[id] = window
        else:
            windows.setdefault(window, []).append(number)
    _put_packed(bits, windows)
    bits.bits(state.feedback is not None, 1)
    if state.feedback is not None:
        feedback = list(zip(state.feedback.fact_ids, numbers[len(packed) :], strict=True))
        foreign = [[place, id] for place, (id, number) in enumerate(feedback) if number is None]
        if foreign:
            unnumbered["feedback"] = foreign
        _put_ordered(bits, [number for _, number in feedback if number is not None])
    return _serialize._canonical(unnumbered).encode("ascii") + b"\n" + bits.to_bytes()


def _restore(
    session: Session, data: dict[str, Any], body: bytes, store: NumberedStore | None, outputs: Sequence[str] | None
) -> None:
    """Replace the fresh state of a session just made by what the head and the body say."""
    text, _, raw = body.partition(b"\n")
    try:
        unnumbered = _serialize._parse(text.decode("ascii"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not a session token: {error}") from error
    if unnumbered.keys() - {"packed", "feedback"}:
        raise ValueError(f"the body may have the fields packed and feedback, got {sorted(unnumbered)}")
    ids, bits = list(session._index), BitReader(raw)
    words = bits.numbers(len(ids))
    coverage = [(_at(ids, index), depth, window) for index, depth, window in _read_coverage(bits)]
    windows = _read_packed(bits)
    ordered = _read_ordered(bits) if bits.bits(1) else None
    bits.end()
    packed_numbers = [number for numbers in windows.values() for number in numbers]
    names = iter(_ids([*packed_numbers, *(ordered or ())], data.get("store"), store))
    packed: dict[str, Any] = {}
    for window, numbers in windows.items():
        packed |= {id: window for id in (next(names) for _ in numbers) if id is not None}
    foreign = unnumbered.get("packed", {})
    if not isinstance(foreign, dict) or ((windows or foreign) and not session.settings.keeps_packed):
        raise ValueError(f"packed must be an object, and only where packed facts matter, got {foreign!r:.200}")
    feedback: list[Any] | None = None if ordered is None else list(names)
    for entry in _serialize._check_list(unnumbered.get("feedback", []), "feedback"):
        place, id = _serialize._check_list(entry, "a fact of feedback")
        if feedback is None or type(place) is not int or not 0 <= place <= len(feedback) or not isinstance(id, str):
            raise ValueError(f"feedback must list [place, id] in its order, got {entry!r:.200}")
        feedback.insert(place, id)
    if feedback is not None and not session.settings.fixes_direction:
        raise ValueError('feedback belongs to mode "calibrated", the token is of another')
    _serialize._restore(
        session,
        {**data, "packed": packed | foreign, "feedback": feedback and [id for id in feedback if id is not None]},
        coverage,
        dict(zip(ids, words, strict=True)),
        outputs,
    )


def _put_coverage(bits: BitWriter, entries: Sequence[tuple[int, CoverageEntry]]) -> None:
    """Coverage entries, each with the index of its sub-query."""
    bits.number(len(entries))
    indices, windows = [i for i, _ in entries], [entry.window_number for _, entry in entries]
    bits.numbers([_folded(b - a - 1) for a, b in pairwise([-1, *indices])])
    bits.numbers([_folded(b - a) for a, b in pairwise([0, *windows])])
    depths: dict[int, list[float]] = {}
    for i, entry in entries:
        depths.setdefault(i, []).append(entry.depth_weight)
    coded = {i: _ratios(depths[i]) for i in sorted(depths)}
    bits.numbers([denominator - 1 for denominator, _ in coded.values()])
    remaining = {i: iter(symbols) for i, (_, symbols) in coded.items()}
    symbols = [next(remaining[i]) for i in indices]
    bits.numbers(symbols)
    for symbol, (_, entry) in zip(symbols, entries, strict=True):
        if symbol == _RAW:
            bits.bits(*_raw(entry.depth_weight))


def _read_coverage(bits: BitReader) -> list[tuple[int, float, int]]:
    """(index of the sub-query, depth, window) of each coverage entry."""
    count = bits.number()
    indices, windows, last = [], [], -1
    for step in bits.numbers(count):
        last += _unfolded(step) + 1
        indices.append(last)
    last = 0
    for step in bits.numbers(count):
        last += _unfolded(step)
        windows.append(last)
    covered = sorted(set(indices))
    denominators = {i: less + 1 for i, less in zip(covered, bits.numbers(len(covered)), strict=True)}
    depths = []
    for i, symbol in zip(indices, bits.numbers(count), strict=True):
        if symbol == _CAP:
            depths.append(MAX_DEPTH_FROM_WORDS)
        elif symbol == _RAW:
            depths.append(math.nan)  # which follows
        else:
            depths.append((symbol - _RATIO) / denominators[i])
    depths = [_double(bits.bits(64)) if math.isnan(depth) else depth for depth in depths]
    return list(zip(indices, depths, windows, strict=True))


def _ratios(depths: Sequence[float]) -> tuple[int, list[int]]:
    """(denominator, symbols) of the depths of one sub-query, which are words over expected words mostly."""
    fractions, denominator = [], 1
    for depth in depths:
        fraction: Fraction | None = Fraction(depth).limit_denominator(_LARGEST_DENOMINATOR)
        assert fraction is not None
        common = math.lcm(denominator, fraction.denominator)
        if common > _LARGEST_COMMON or _raw(fraction.numerator / fraction.denominator) != _raw(depth):
            fraction = None
        elif depth != MAX_DEPTH_FROM_WORDS:
            denominator = common
        fractions.append(fraction)
    symbols = []
    for depth, fraction in zip(depths, fractions, strict=True):
        if depth == MAX_DEPTH_FROM_WORDS:
            symbols.append(_CAP)
        else:
            symbols.append(_RAW if fraction is None else _RATIO + int(fraction * denominator))
    return denominator, symbols


def _put_packed(bits: BitWriter, windows: dict[int, list[int]]) -> None:
    """Numbers of packed facts by window."""
    ordered = [(window, sorted(windows[window])) for window in sorted(windows)]
    bits.number(len(ordered))
    bits.numbers([b - a - 1 for a, b in pairwise([0, *(window for window, _ in ordered)])])
    bits.numbers([len(numbers) - 1 for _, numbers in ordered])
    bits.numbers([b - a - 1 for _, numbers in ordered for a, b in pairwise([-1, *numbers])])


def _read_packed(bits: BitReader) -> dict[int, list[int]]:
    """See `_put_packed`."""
    count, window = bits.number(), 0
    windows: dict[int, list[int]] = {}
    for step in bits.numbers(count):
        window += step + 1
        windows[window] = []
    sizes = [less + 1 for less in bits.numbers(count)]
    steps = iter(bits.numbers(sum(sizes)))
    for numbers, size in zip(windows.values(), sizes, strict=True):
        last = -1
        for _ in range(size):
            last += next(steps) + 1
            numbers.append(last)
    return windows


def _put_ordered(bits: BitWriter, numbers: Sequence[int]) -> None:
    """Distinct numbers whose order is kept: they ascend, unless facts were upserted before they were chosen."""
    ascending = all(a < b for a, b in pairwise(numbers))
    bits.number(len(numbers))
    bits.bits(ascending, 1)
    bits.numbers([b - a - 1 if ascending else _folded(b - a) for a, b in pairwise([-1, *numbers])])


def _read_ordered(bits: BitReader) -> list[int]:
    """See `_put_ordered`."""
    count, ascending = bits.number(), bits.bits(1)
    numbers, last = [], -1
    for step in bits.numbers(count):
        last += step + 1 if ascending else _unfolded(step)
        numbers.append(last)
    if any(number < 0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError("the facts of feedback must have distinct numbers >= 0")
    return numbers


# Facts and their numbers


def _check_store(store: object, embedding_model: str) -> None:
    """Raises TypeError for what is no store, EmbeddingModelMismatch for a store of another model."""
    if store is None:
        return
    if not isinstance(store, NumberedStore):
        inner = (name for name in ("store", "facts") if isinstance(getattr(store, name, None), NumberedStore))
        hint = next((f": pass its .{name}" for name in inner), "")
        raise TypeError(f"store: expected a FactStore or a ShardedStore, got {type(store).__name__}{hint}")
    if store.embedding_model != embedding_model:
        raise EmbeddingModelMismatch("store", embedding_model, store.embedding_model)


def _numbers(ids: Sequence[str], store: NumberedStore | None) -> tuple[list[int | None], str | None]:
    """(the number of each fact, None for one that has none; whose the numbers are, None where there are none)."""
    if store is None or not ids:
        return [None] * len(ids), None
    numbers = store.numbers_of(ids).tolist()
    origin = store.numbering.origin  # read after the numbers, so that it knows all of them
    usable = {number for number in numbers if number >= 0 and origin(number) is not None}
    return [number if number in usable else None for number in numbers], origin(max(usable)) if usable else None


def _ids(numbers: Sequence[int], origin: object, store: NumberedStore | None) -> list[str | None]:
    """The id of the fact of each number, None where it was removed. origin: whose the numbers are."""
    if not numbers:
        return []
    if not isinstance(origin, str):
        raise ValueError("the token names facts by number, and no store")
    if store is None:
        raise ValueError(f"the token names facts by the numbers of the store {origin}, got no store: pass store=")
    largest = max(numbers)
    if store.numbering.origin(largest) != origin:
        own = store.numbering.branches[-1][1]
        raise ValueError(
            f"the token names facts by the numbers of the store {origin}, got the store {own}, which has not given them"
        )
    if largest >= store.next_sequence:
        raise StoreBehind(
            f"the token names fact number {largest}, the store has given numbers up to {store.next_sequence - 1}: "
            "pass the newest version of the store"
        )
    return store.ids_of(np.array(numbers, np.int64))


def _at(ids: Sequence[str], index: int) -> str:
    """The id of the sub-query at an index."""
    if not 0 <= index < len(ids):
        raise ValueError(f"coverage has the index {index}, the session has {len(ids)} sub-queries")
    return ids[index]


def _folded(value: int) -> int:
    """An integer as one >= 0, small where it is near 0."""
    return 2 * value if value >= 0 else -2 * value - 1


def _unfolded(value: int) -> int:
    """What `_folded` was given."""
    return -(value + 1) // 2 if value % 2 else value // 2


def _raw(depth: float) -> tuple[int, int]:
    """The bits of a double, and how many they are."""
    return int.from_bytes(struct.pack(">d", depth), "big"), 64


def _double(bits: int) -> float:
    """The double of these bits."""
    value: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    return value
