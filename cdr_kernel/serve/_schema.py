"""What goes over the wire: one set of structs for application/json and application/msgpack.

A vector is little-endian float32, base64 in JSON and bytes in msgpack, or a list of numbers. Numbers of a ranking come
back as the float64 they are, to the last bit in both formats.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from cdr_kernel.serve._errors import Refusal, invalid
from cdr_kernel.serve._schema_errors import of_schema

JSON = "application/json"
MSGPACK = "application/msgpack"

Vector: TypeAlias = Annotated[
    bytes | list[float],
    Meta(description="[D] little-endian float32, base64 in JSON and bytes in msgpack; or a list of numbers"),
]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Cosine: TypeAlias = Annotated[float, Meta(ge=-1.0, le=1.0)]
Value: TypeAlias = str | int | float | bool
Factor: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e9)]
"""Importance and the like: so large that nobody needs more, and products of them stay far from infinity."""


class Question(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What bodies of requests have in common: a field that is not known is an error."""


# facts


class NewFact(Question, kw_only=True, gc=False):
    """A fact to add. Without an embedding the server's --embed makes one from the text.

    text: may be blank; one of fewer than six tokens has no n-gram, so that the guard never acts on it. attributes:
    further columns, of one type each, that rankings may be limited by. expires_at: seconds since 1970 from when the
    fact is in no ranking, of durable stores alone.
    """

    id: Name
    text: str
    embedding: Vector | None = None
    importance: Factor = 1.0
    source: str | None = None
    position: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    attributes: dict[Name, Value] = {}
    expires_at: float | None = None


class AddFacts(Question, kw_only=True):
    """Facts to add or to replace. on_invalid="skip" leaves out those whose vector is not finite or all zeros."""

    embedding_model: Name
    facts: Annotated[list[NewFact], Meta(min_length=1)]
    on_invalid: Literal["raise", "skip"] = "raise"


class FactIds(Question, kw_only=True):
    """Facts to remove. missing="ignore" passes over ids that are not there."""

    ids: Annotated[list[Name], Meta(min_length=1)]
    missing: Literal["raise", "ignore"] = "raise"


class Quarantine(Question, kw_only=True):
    """Facts to take out of every ranking until they are released, and why."""

    ids: Annotated[list[Name], Meta(min_length=1)]
    reason: str | None = None


class Release(Question, kw_only=True):
    """Quarantined facts to let into rankings again, as the newest ones."""

    ids: Annotated[list[Name], Meta(min_length=1)]


class FactsChanged(msgspec.Struct):
    """How many facts were quarantined or released, and the version of the store since."""

    changed: int
    store_version: int


class FactsAdded(msgspec.Struct):
    """How many facts went in, which were left out, and the version of the store since."""

    added: int
    skipped: list[str]
    store_version: int


class FactsRemoved(msgspec.Struct):
    """How many facts are gone, and the version of the store since."""

    removed: int
    store_version: int


class FactBody(msgspec.Struct):
    """A fact as it is stored."""

    id: str
    text: str
    source: str | None
    position: int | None
    importance: float
    sequence: int
    attributes: dict[str, Value]


class SessionDefaults(msgspec.Struct):
    """What a new session has where its request says nothing; null: the default of `Session`. guard: as `NewSession`."""

    settings: SessionSettings
    guard: bool | None


class Stats(msgspec.Struct):
    """The tenant's store and sessions in this process. durable: whether facts outlast it. new_sessions: their
    defaults, the same for all tenants."""

    facts: int
    quarantined: int
    dim: int
    dtype: str
    embedding_model: str
    store_version: int
    durable: bool
    can_embed: bool
    sessions: int
    session_bytes: int
    row_cache_bytes: int
    new_sessions: SessionDefaults


# sessions


class NewSubQuery(Question, kw_only=True, gc=False):
    """An item of the task. Without an embedding the server's --embed makes one from the text."""

    id: Name
    label: Name
    text: str = ""
    embedding: Vector | None = None
    expected_words: Count | None = None
    marginal: bool = False


class SessionSettings(Question, kw_only=True):
    """Settings of `Session`; what is left out has the server's default (`GET /v1/stats`), else its own. keep_outputs:
    true unless it is false here or there, so that the update that completes a task or reaches the limit answers the
    whole text."""

    mode: Literal["spec", "calibrated"] | None = None
    min_relevance: Cosine | None = None
    max_windows: Annotated[int, Meta(ge=1, le=20)] | None = None
    completion_threshold: Share | None = None
    safety_budget: Share | None = None
    first_window_pull: bool | None = None
    clamp_novelty: bool | None = None
    exhaustion: Literal["score", "novelty"] | None = None
    exclude_packed: bool | None = None
    residual_depth: Share | None = None
    keep_outputs: bool | None = None
    gate: float | None = None
    min_qualified: Annotated[int, Meta(ge=0)] | None = None
    gate_on: Literal["best", "query"] | None = None
    lexical_weight: Factor | None = None
    feedback_weight: Factor | None = None
    lexical_feedback_weight: Factor | None = None
    source_weight: Factor | None = None
    need_floor: Share | None = None
    packed_penalty: Share | None = None
    centred_coverage: bool | None = None
    min_new_share: Share | None = None


class NewSession(Question, kw_only=True):
    """A task: its sub-queries and how to rank for it. guard: whether the n-gram guard (§5) takes part; None is the
    server's default, else the mode's."""

    embedding_model: Name
    sub_queries: Annotated[list[NewSubQuery], Meta(min_length=1, max_length=1024)]
    settings: SessionSettings = msgspec.field(default_factory=SessionSettings)
    guard: bool | None = None


class SubQueryBody(msgspec.Struct):
    """A sub-query without its vector. expected_words and marginal as in the task."""

    id: str
    label: str
    text: str
    expected_words: int | None
    marginal: bool


class CoverageBody(msgspec.Struct):
    """§2.1: a sub-query that a window addressed, how deeply, and which window."""

    sub_query_id: str
    depth_weight: float
    window_number: int


class ExitBody(msgspec.Struct):
    """§6: whether to stop, and why. See `Exit`."""

    stop: bool
    reason: str | None
    also: list[str]
    escalate: bool
    detail: str
    novelty_ratio: float | None


class SessionBody(msgspec.Struct):
    """A session as it is.

    settings: what it was made with, null for those of the other mode. safety_budget: what is left of it. ngrams: size
    of the blacklist, None without a guard. packed: facts packed so far. exit: §6, tested on the last report and the
    last envelope.
    """

    id: str
    embedding_model: str
    mode: str
    settings: SessionSettings
    sub_queries: list[SubQueryBody]
    coverage: list[CoverageBody]
    residual: list[str]
    window_count: int
    max_windows: int
    completeness: float
    safety_budget: float
    words: dict[str, int]
    packed: int
    ngrams: int | None
    anchor: str
    exit: ExitBody


class Report(Question, kw_only=True):
    """What the window's output achieved (DPE Stage 8, §3.1). See `WindowReport`."""

    completeness_score: Share
    addressed: list[Name] = []
    depth_by_sub_query: dict[str, Share] = {}
    words_by_sub_query: dict[str, Count] = {}


class UpdateSession(Question, kw_only=True):
    """A window was written. report: None has the server assess the output. safety_budget: what is left of it.
    max_windows: a higher limit.

    packed: ids of the facts the writer got; None means those of the session's last ranking in this window. Other ids
    are remembered as packed too. The counters stay those of the ranking; coverage_score is over the packed facts that
    the ranking or the store has. In mode "spec" exit 3 then stays as it was: it needs the score of every packed fact.
    """

    embedding_model: Name
    output: str
    report: Report | None = None
    packed: list[Name] | None = None
    safety_budget: Share | None = None
    max_windows: Annotated[int, Meta(ge=1, le=20)] | None = None


class Updated(msgspec.Struct):
    """The session after the update, the exit decision of §6 and the report that was applied. document: the whole text,
    where the task is complete or the limit reached and the session keeps its outputs; else None."""

    session: SessionBody
    exit: ExitBody
    anchor: str
    report: Report
    document: str | None


class ExtendSession(Question, kw_only=True):
    """What may open a session that has ended: a higher limit of windows, more sub-queries, another safety budget."""

    embedding_model: Name
    max_windows: Annotated[int, Meta(ge=1, le=20)] | None = None
    sub_queries: Annotated[list[NewSubQuery], Meta(max_length=1024)] = []
    safety_budget: Share | None = None


class AssessOutput(Question, kw_only=True):
    """Say what an output achieved, without changing the session. See `assess`; by words where the server cannot
    embed."""

    output: str
    min_depth: Share | None = None
    expected_words: Count | None = None


class MergeSessions(Question, kw_only=True):
    """Branches (snapshots of this session) to take over, in this order; they stay until they expire."""

    branches: Annotated[list[Name], Meta(min_length=1, max_length=64)]


class TokenBody(msgspec.Struct):
    """A signed session. blacklist: the guard's n-gram hashes, little-endian uint64. blob: the rest of a session that
    exceeds 4,096 bytes. outputs: the texts of the windows. The token signs these but does not hold them; null where
    there are none. expires_in_s: how long the token is taken."""

    token: str
    blacklist: bytes | None
    blob: bytes | None
    expires_in_s: int
    outputs: list[str] | None


class ResumeSession(Question, kw_only=True):
    """A token from this or another replica, and the task's sub-queries again. blacklist: as exported; without it the
    guard starts empty. blob: as exported. outputs: as exported; without them no document is answered at the end."""

    embedding_model: Name
    token: Annotated[str, Meta(min_length=1, max_length=262_144)]
    sub_queries: Annotated[list[NewSubQuery], Meta(min_length=1, max_length=1024)]
    blacklist: bytes | None = None
    blob: bytes | None = None
    outputs: list[str] | None = None


# ranking


class RankFacts(Question, kw_only=True):
    """Rank for the session's next window. query: a vector; text: instead of one, where the server embeds.

    k: facts to rank. where: only facts that have these values, or one of several, in "source" or attributes (null: no
    value), as if the store had no others. token_budget, max_facts, pack: what of them goes into the envelope (see
    `pack_facts`). multiplier: a further factor per fact id, 1 for facts that it does not name; ids that
    are not in the store are 422, and so are those of quarantined and expired facts, which are not in it.
    """

    embedding_model: Name
    query: Vector | None = None
    text: Annotated[str, Meta(min_length=1)] | None = None
    k: Count = 100
    token_budget: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    max_facts: Count | None = None
    pack: Literal["greedy", "need"] | None = None
    multiplier: dict[str, Factor] | None = None
    where: dict[Name, Value | list[Value | None] | None] | None = None


class RankedFact(msgspec.Struct):
    """A fact of the envelope and every number behind its place. See `Ranking`.

    novelty: the factor of its score; spec_novelty: §2.2's, which coverage_score is the least of, whatever the mode.
    """

    id: str
    text: str
    source: str | None
    position: int | None
    sequence: int
    attributes: dict[str, Value]
    score: float
    score_without_guard: float
    relevance: float
    coverage: float
    residual_pull: float
    novelty: float
    ngram_overlap: int
    ngram_penalty: float
    importance: float
    multiplier: float
    spec_novelty: float


class Ranked(msgspec.Struct):
    """The envelope of a window, best first, and what goes with it.

    qualified: facts that passed the gate; guard_activations: of these, those with an n-gram penalty (§8.3);
    guard_alert: more than 20 % of them (§5.3); coverage_score: §8.1, 0 without facts; band: §8.1, null without facts;
    guarantee_holds: §9. exit: §6, tested before the writer.
    """

    window: int
    facts: list[RankedFact]
    tokens: int
    skipped: int
    qualified: int
    guard_activations: int
    guard_alert: bool
    coverage_depth: int
    coverage_score: float
    band: str | None
    guarantee_holds: bool
    store_version: int
    exit: ExitBody
    anchor: str


class Document(Question, kw_only=True, gc=False):
    """A document to rank: a text with a vector, or the id of a fact of the store, or a text for --embed."""

    text: str | None = None
    id: Name | None = None
    embedding: Vector | None = None
    importance: Factor = 1.0


class Rerank(Question, kw_only=True):
    """Cohere's and Jina's request, and what CDR adds: vectors, importance, what is covered and what remains.

    model: the store's embedding model. query: a text (for --embed) or a vector in query_embedding. top_n: results, all
    for None. min_relevance: a gate; without one every document gets a place. covered: vectors of what earlier outputs
    covered, with depths in [0, 1] (0.5); residual: vectors of what remains, which pull once something is covered, or
    with first_window_pull.
    """

    model: Name
    query: str | None = None
    query_embedding: Vector | None = None
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    min_relevance: Cosine | None = None
    covered: list[Vector] = []
    depths: list[Share] | None = None
    residual: list[Vector] = []
    first_window_pull: bool = False


class RerankDocument(msgspec.Struct):
    """The document, where return_documents asks for it."""

    text: str


class RerankResult(msgspec.Struct, omit_defaults=True):
    """index: of the document in the request. relevance_score: importance x max(relevance, residual pull) x novelty."""

    index: int
    relevance_score: float
    relevance: float
    coverage: float
    residual_pull: float
    novelty: float
    document: RerankDocument | None = None


class RerankUsage(msgspec.Struct):
    """Jina's count; here a text's tokens are its UTF-8 bytes / 4."""

    total_tokens: int


class Reranked(msgspec.Struct):
    """Best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: RerankUsage
    meta: dict[str, Any]


# what is asked of the process itself


class Health(msgspec.Struct):
    """status: "ok", "loading", "draining", "damaged" or "unavailable"."""

    status: str
    version: str


def vector(value: bytes | list[float], dim: int, name: str) -> npt.NDArray[Any]:
    """[dim] float32 of bytes, float64 of a list. Raises `Refusal` for another length."""
    if isinstance(value, bytes):
        if len(value) != 4 * dim:
            raise invalid(name, f"{dim} float32 numbers ({4 * dim} bytes)", f"{len(value)} bytes")
        return np.frombuffer(value, "<f4")
    if len(value) != dim:
        raise invalid(name, f"{dim} numbers", str(len(value)))
    return np.array(value, np.float64)


def matrix(values: list[bytes | list[float]], dim: int, name: str) -> npt.NDArray[Any]:
    """[len(values), dim] of vectors, as in `vector`. name: of one of them, with {} for its number."""
    if values and all(isinstance(value, bytes) and len(value) == 4 * dim for value in values):
        return np.frombuffer(b"".join(values), "<f4").reshape(len(values), dim)  # type: ignore[arg-type]  # all bytes
    rows = [vector(value, dim, name.format(i)) for i, value in enumerate(values)]
    return np.array(rows, np.float64) if rows else np.zeros((0, dim))


def decode(body: bytes, content_type: str | None, kind: type[Any]) -> Any:
    """A request's body as its struct. Raises `Refusal`: 415, 400 or 422."""
    read = msgspec.msgpack.decode if checked_media(content_type) == MSGPACK else msgspec.json.decode
    try:
        return read(body, type=kind)
    except msgspec.DecodeError as error:
        raise of_schema(error, kind, lambda: read(body)) from None
    except UnicodeDecodeError as error:
        raise Refusal(400, "malformed", f"the body could not be read: {error.reason}") from None


def checked_media(content_type: str | None) -> str:
    """The format of a body. Raises `Refusal` 415 for another one.

    A body without a type is refused: a page in somebody's browser can send one to a server on loopback unasked.
    """
    media = (content_type or "none").partition(";")[0].strip().lower()
    if media == MSGPACK:
        return MSGPACK
    if media == JSON or media.endswith("+json"):
        return JSON
    raise Refusal(
        415,
        "unsupported_media_type",
        f"Content-Type: expected {JSON} or {MSGPACK}, got {media}",
        field="Content-Type",
        expected=f"{JSON} or {MSGPACK}",
        got=media,
    )


def wants_msgpack(accept: str | None) -> bool:
    """Whether an Accept header names msgpack, with a quality that is not below JSON's (RFC 9110, 12.5.1)."""
    if accept is None or MSGPACK not in accept.lower():
        return False
    qualities: dict[str, float] = {}
    for item in accept.lower().split(","):
        media, *parameters = (part.strip() for part in item.split(";"))
        given = [
            value.strip() for name, _, value in (each.partition("=") for each in parameters) if name.strip() == "q"
        ]
        qualities[media] = _quality(given[0]) if given else 1.0
    json = next((qualities[media] for media in (JSON, "application/*", "*/*") if media in qualities), 0.0)
    return qualities.get(MSGPACK, 0.0) >= max(json, 0.001)


def _quality(text: str) -> float:
    """The number of a quality value (RFC 9110, 12.4.2); 0 for what is none."""
    return float(text) if re.fullmatch(r"0(\.\d{0,3})?|1(\.0{0,3})?", text) else 0.0


def encode(value: Any, msgpack: bool) -> tuple[bytes, str]:
    """The body of an answer, and its media type. Lone surrogates, which no encoding has, become U+FFFD."""
    encoder = msgspec.msgpack.encode if msgpack else msgspec.json.encode
    try:
        body = encoder(value)
    except UnicodeEncodeError:
        body = encoder(_clean(msgspec.to_builtins(value, builtin_types=(bytes,))))
    return body, MSGPACK if msgpack else JSON


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value
