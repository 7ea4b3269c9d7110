"""The state of one task over its windows: coverage, residual, blacklist, counters, and the four exits.

    session = Session(sub_queries, embedding_model="all-MiniLM-L6-v2")
    columns = session.columns(query)                         # what the next window asks of the store
    session.update(report, output, envelope=envelope)        # after the window was written (§7.2)
    session.exit(report, envelope)                           # §6

Every check comes before every change: an error leaves the session as it was.
"""

from __future__ import annotations

import base64
import binascii
import copy
import hashlib
import json
import math
import threading
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from cdr_kernel.arrays import as_vector
from cdr_kernel.columns import Columns
from cdr_kernel.constants import (
    CALIBRATED_GATE,
    CDR_MIN_RELEVANCE,
    CKF_EXHAUSTED,
    COMPLETION_THRESHOLD,
    DEFAULT_DEPTH,
    EXHAUSTION_RATIO,
    EXIT_REASONS,
    EXIT_SLACK,
    FEEDBACK_WEIGHT,
    LEXICAL_WEIGHT,
    LIMIT_REACHED,
    MAX_DEPTH_FROM_WORDS,
    MAX_WINDOWS,
    MAX_WINDOWS_LIMIT,
    MIN_NEW_SHARE,
    NEED_FLOOR,
    SAFETY_BUDGET_DEPLETED,
    SAFETY_BUDGET_FLOOR,
    TASK_COMPLETE,
)
from cdr_kernel.ngram import HashKey, NGramGuard, Tokenizer
from cdr_kernel.store import EmbeddingModelMismatch

if TYPE_CHECKING:
    from cdr_kernel.pack import Envelope

MODES = ("spec", "calibrated")
GATES_ON = ("best", "query")
_DEFAULT_GATE = float(str(CDR_MIN_RELEVANCE))  # an object of its own, so that the same number given is told from it
EXHAUSTIONS = ("score", "novelty")
SCHEMA = 1
MOST_WORDS = 2**53
"""Up to here a float64 holds every count."""
TOKEN_LIMIT = 4096
"""SPEC-007: bytes of a session token at most."""


def check_number(value: object, name: str, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a float in [low, high]. TypeError for what is no number (bool included), ValueError for NaN,
    an infinity, or a number outside the range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {number}")
    if not low <= number <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {number!r}")
    return number


def check_integer(value: object, name: str, low: int, high: int | None = None) -> int:
    """`value` as an int in low..high. TypeError for what is no integer (bool included), ValueError
    outside."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {f'at least {low}' if high is None else f'{low} to {high}'}, got {number}")
    return number


def _check_bool(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _check_text(value: object, name: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {value!r}")
    if not empty and not value.strip():
        raise ValueError(f"{name} must not be empty")
    return value


def _check_choice(value: object, name: str, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    return value


@dataclass(frozen=True, eq=False)
class SubQuery:
    """One item of the task's decomposition (§2.1).

    id: unique in its session. label: what the anchor calls it (§4.2). text: what was embedded.
    embedding: [D], any float dtype, list or tensor; kept as a read-only float64 copy. It must come from the
    model of the store's facts (§2.5).
    expected_words: int, 0 to 2^53, that the finished task should have on it, None where unknown.
    marginal: a complete task may leave it undone (R9).

    Raises TypeError or ValueError for a wrong type, an empty id or label, a vector that is zero, not finite
    or not one-dimensional.
    """

    id: str
    label: str
    text: str
    embedding: NDArray[np.float64]
    expected_words: int | None = None
    marginal: bool = False

    def __post_init__(self) -> None:
        _check_text(self.id, "the id of a sub-query")
        where = f"sub-query {self.id!r}"
        _check_text(self.label, f"the label of {where}")
        _check_text(self.text, f"the text of {where}", empty=True)
        _check_bool(self.marginal, f"marginal of {where}")
        if self.expected_words is not None:
            words = check_integer(self.expected_words, f"expected_words of {where}", 0, MOST_WORDS)
            object.__setattr__(self, "expected_words", words)
        vector = np.array(as_vector(self.embedding, None, f"the embedding of {where}"))
        vector.setflags(write=False)
        object.__setattr__(self, "embedding", vector)


@dataclass(frozen=True, eq=False)
class CoverageEntry:
    """§2.1: a sub-query that a window addressed.

    embedding: that of the sub-query, [D] float64, read-only. depth_weight: how thoroughly, in [0, 1].
    window_number: by which window, from 1 (R15).
    """

    sub_query_id: str
    embedding: NDArray[np.float64]
    depth_weight: float
    window_number: int


@dataclass(frozen=True)
class WindowReport:
    """What one window's output achieved: the specification's DPE Stage 8 report (§3.1).

    completeness_score: of the whole task so far, in [0, 1].
    addressed: ids of the sub-queries that this window's output covered, each once.
    depth_by_sub_query: depth in [0, 1] of addressed ids; one that is missing counts as 0.5 (R33).
    words_by_sub_query: words of this window's output on a sub-query, addressed or not, 0 to 2^53.
    embedding_model: the model behind the embeddings (R18); may be given to `Session.update` instead.

    `Session.update` checks all of it.
    """

    completeness_score: float
    addressed: tuple[str, ...] = ()
    depth_by_sub_query: Mapping[str, float] = field(default_factory=dict)
    words_by_sub_query: Mapping[str, int] = field(default_factory=dict)
    embedding_model: str | None = None


@dataclass(frozen=True)
class Exit:
    """Whether the window loop ends, and why (§6).

    reason: the first true exit in the order of §6, one of `constants.EXIT_REASONS`, or None. also: every
    other true one, in that order. escalate: the safety budget is used up, whatever the reason (R10).
    detail: why the store counts as exhausted, empty when it does not. novelty_ratio: the mean of exit 3 (mode
    "calibrated": the share of never packed facts among the qualified), None when no envelope was given.
    """

    stop: bool
    reason: str | None
    also: tuple[str, ...]
    escalate: bool
    detail: str
    novelty_ratio: float | None


def depth_from_words(actual: float, expected: float) -> float:
    """§3.2, R7: min(0.90, actual / expected); 0.5 (§3.1) when nothing was expected (expected <= 0).

    actual: words written, >= 0. ValueError for a negative or non-finite count, TypeError for no number.
    """
    actual = check_number(actual, "actual", 0.0)
    expected = check_number(expected, "expected")
    if expected <= 0.0:
        return DEFAULT_DEPTH
    return min(MAX_DEPTH_FROM_WORDS, actual / expected)


@dataclass(frozen=True)
class Calibrated:
    """The parts of the calibrated mode, an extension beside the specification's formula.

    Every cosine is taken in deviations above the store's mean (z). A sub-query's score of a fact is z plus evidence.

    gate: z that a candidate must reach, on gate_on: "best" of query and sub-queries, or "query".
    lexical_weight: share of the z-score of BM25 of the sub-query's text, >= 0.
    feedback_weight: share of the z-score along the task's own direction, >= 0: from the store's mean to the mean of
    the 5 best facts of each sub-query, fixed at the first window.
    source_weight: share of the evidence of a fact's document, >= 0: its neighbours in it and how well it serves the
    task. Above 0 it replaces the feedback. It needs facts with a source and a position, and prefers documents that
    serve the task.
    need_floor: what a sub-query keeps of its need, however deep it was written about, in [0, 1].
    packed_penalty: what a packed fact loses, in [0, 1]; 1 takes it out.
    centred_coverage: whether coverage takes part, as 2 * (mean cosine to what is covered - to all sub-queries).
    min_new_share: the store counts as exhausted when a smaller share of the qualified facts was never packed.

    Raises TypeError or ValueError for what is out of range.
    """

    gate: float = CALIBRATED_GATE
    gate_on: str = "best"
    lexical_weight: float = LEXICAL_WEIGHT
    feedback_weight: float = FEEDBACK_WEIGHT
    source_weight: float = 0.0
    need_floor: float = NEED_FLOOR
    packed_penalty: float = 1.0
    centred_coverage: bool = False
    min_new_share: float = MIN_NEW_SHARE

    def __post_init__(self) -> None:
        highest = {"need_floor": 1.0, "packed_penalty": 1.0, "min_new_share": 1.0}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "gate_on":
                _check_choice(value, item.name, GATES_ON)
            elif item.name == "centred_coverage":
                _check_bool(value, item.name)
            else:
                low = -math.inf if item.name == "gate" else 0.0
                number = check_number(value, item.name, low, highest.get(item.name, math.inf))
                object.__setattr__(self, item.name, number)


@dataclass(frozen=True, eq=False)
class Feedback:
    """What fixes the direction of a task: the facts it was made of, and the direction [D] float64.

    direction is None where only the ids are known (after a token): the next ranking makes it from the facts that are
    still there.
    """

    fact_ids: tuple[str, ...]
    direction: NDArray[np.float64] | None


@dataclass(frozen=True, eq=False)
class SessionState:
    """Everything of a session that a window changes, as one immutable value.

    A session replaces it as a whole, so whoever takes `session.state` once reads one consistent state, also
    while another thread updates. What is in it is never changed in place.
    """

    coverage: tuple[CoverageEntry, ...]
    residual: tuple[SubQuery, ...]
    window_count: int
    completeness: float
    words: dict[str, int]
    packed: dict[str, int]
    guard: NGramGuard | None
    safety_budget: float
    feedback: Feedback | None = None


class Session:
    """The state of one task, from its first window to its exit. Plain data; safe to read while it is updated.

    sub_queries: the task's decomposition, at least one, ids unique, one dimension.
    embedding_model: the model of all embeddings, the store's (§2.5, R18).
    mode: "spec", the formula of the specification, or "calibrated", an extension (see `Calibrated`).
    min_relevance: the gate on query relevance, in [-1, 1] (§2.6; default 0.55). Of mode "spec" alone.
    max_windows: 1 to 20 (R16). completion_threshold: in [0, 1] (§6, exit 1).
    safety_budget: in [0, 1] (§6, exit 4).
    first_window_pull: residual pull while nothing is covered (R1: off). clamp_novelty: novelty <= 1 in scores
    (R3: off). exhaustion: "score" is exit 3 literally, "novelty" keeps importance out of it (R11).
    exclude_packed: never pack a fact twice (R20: off).
    guard: the n-gram guard (§5), which is copied; None makes an empty one (mode "calibrated": none), False turns it
    off. Its tokenizer and hash key must be the store's.
    id: names the session; a random hex string unless given.
    gate, gate_on, lexical_weight, feedback_weight, source_weight, need_floor, packed_penalty, centred_coverage,
    min_new_share: the parts of mode "calibrated", see `Calibrated`; kept in `session.calibrated`, which is None in
    mode "spec". first_window_pull, clamp_novelty, exhaustion and exclude_packed are of mode "spec" alone.

    Literal exit 3 ("score") can fire through importance or the n-gram penalty only, since novelty never falls
    below 0.20; a warning says so when importance alone would end window 1.

    Raises ValueError or TypeError that name what is wrong. The settings are fixed once made; `safety_budget`
    alone can be assigned.
    """

    def __init__(
        self,
        sub_queries: Iterable[SubQuery],
        *,
        embedding_model: str,
        mode: str = "spec",
        min_relevance: float = _DEFAULT_GATE,
        max_windows: int = MAX_WINDOWS,
        completion_threshold: float = COMPLETION_THRESHOLD,
        safety_budget: float = 1.0,
        first_window_pull: bool = False,
        clamp_novelty: bool = False,
        exhaustion: str = "score",
        exclude_packed: bool = False,
        guard: NGramGuard | Literal[False] | None = None,
        id: str | None = None,
        gate: float | None = None,
        gate_on: str | None = None,
        lexical_weight: float | None = None,
        feedback_weight: float | None = None,
        source_weight: float | None = None,
        need_floor: float | None = None,
        packed_penalty: float | None = None,
        centred_coverage: bool | None = None,
        min_new_share: float | None = None,
    ) -> None:
        self.sub_queries = tuple(sub_queries)
        for item in self.sub_queries:
            if not isinstance(item, SubQuery):
                raise TypeError(f"sub_queries must hold SubQuery objects, got {type(item).__name__}")
        if not self.sub_queries:
            raise ValueError("a session needs at least one sub-query, got none")
        self._index = {item.id: i for i, item in enumerate(self.sub_queries)}
        if len(self._index) < len(self.sub_queries):
            raise ValueError(f"sub-query ids must be unique, got {[item.id for item in self.sub_queries]}")
        self.dim = len(self.sub_queries[0].embedding)
        for item in self.sub_queries:
            if len(item.embedding) != self.dim:
                raise ValueError(
                    f"all sub-queries must have one dimension: {self.sub_queries[0].id!r} has {self.dim}, "
                    f"{item.id!r} has {len(item.embedding)}"
                )
        self._embeddings = np.stack([item.embedding for item in self.sub_queries])
        self._embeddings.setflags(write=False)
        texts = "\0".join(item.text for item in self.sub_queries).encode("utf-8", "surrogatepass")
        self.task_key = hashlib.sha256(self._embeddings.tobytes() + texts).hexdigest()
        self.id = uuid.uuid4().hex if id is None else _check_text(id, "id")
        self.embedding_model = _check_text(embedding_model, "embedding_model")
        self.mode = _check_choice(mode, "mode", MODES)
        parts = {
            "gate": gate,
            "gate_on": gate_on,
            "lexical_weight": lexical_weight,
            "feedback_weight": feedback_weight,
            "source_weight": source_weight,
            "need_floor": need_floor,
            "packed_penalty": packed_penalty,
            "centred_coverage": centred_coverage,
            "min_new_share": min_new_share,
        }
        chosen: dict[str, Any] = {name: value for name, value in parts.items() if value is not None}
        if self.mode == "spec":
            if chosen:
                raise ValueError(f'{next(iter(chosen))} belongs to mode "calibrated", the mode is "spec"')
            self.calibrated = None
        else:
            foreign = {
                "min_relevance": min_relevance is not _DEFAULT_GATE,
                "first_window_pull": first_window_pull,
                "clamp_novelty": clamp_novelty,
                "exhaustion": exhaustion != "score",
                "exclude_packed": exclude_packed,
            }
            for name, given in foreign.items():
                if given:
                    instead = {
                        "min_relevance": "gate",
                        "exhaustion": "min_new_share",
                        "exclude_packed": "packed_penalty",
                    }
                    use = f": use {instead[name]}" if name in instead else ""
                    raise ValueError(f'{name} belongs to mode "spec", the mode is "calibrated"{use}')
            if chosen.get("source_weight") and chosen.get("feedback_weight"):
                raise ValueError("source_weight replaces feedback_weight: expected one of them, got both")
            self.calibrated = Calibrated(**chosen)
        self.min_relevance = check_number(min_relevance, "min_relevance", -1.0, 1.0)
        self.max_windows = check_integer(max_windows, "max_windows", 1, MAX_WINDOWS_LIMIT)
        self.completion_threshold = check_number(completion_threshold, "completion_threshold", 0.0, 1.0)
        self.first_window_pull = _check_bool(first_window_pull, "first_window_pull")
        self.clamp_novelty = _check_bool(clamp_novelty, "clamp_novelty")
        self.exhaustion = _check_choice(exhaustion, "exhaustion", EXHAUSTIONS)
        self.exclude_packed = _check_bool(exclude_packed, "exclude_packed")
        budget = check_number(safety_budget, "safety_budget", 0.0, 1.0)
        own: NGramGuard | None
        if guard is None and self.mode == "spec":
            own = NGramGuard()
        elif guard is None or guard is False:
            own = None
        elif isinstance(guard, NGramGuard):
            own = guard.copy()
        else:
            raise TypeError(f"guard must be an NGramGuard, None or False, got {guard!r}")
        self._lock = threading.Lock()
        self._warned = False
        self._warned_of_gate = False
        self._state = self._fresh_state(own, budget)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values, _lock=threading.Lock())

    def __repr__(self) -> str:
        state = self._state
        return (
            f"Session({self.id!r}, window_count={state.window_count}, coverage={len(state.coverage)}, "
            f"residual={len(state.residual)} of {len(self.sub_queries)}, "
            f"completeness={state.completeness:.2f})"
        )

    @property
    def embeddings(self) -> NDArray[np.float64]:
        """The sub-queries' vectors, [S, D] float64, read-only."""
        return self._embeddings

    @property
    def state(self) -> SessionState:
        """The whole changing state at this moment, as one immutable value."""
        return self._state

    @property
    def coverage(self) -> tuple[CoverageEntry, ...]:
        """The coverage set in the order it grew (§2.1)."""
        return self._state.coverage

    @property
    def residual(self) -> tuple[SubQuery, ...]:
        """The sub-queries that no window has addressed yet, in the task's order (R8)."""
        return self._state.residual

    @property
    def window_count(self) -> int:
        """Windows completed (R15)."""
        return self._state.window_count

    @property
    def completeness(self) -> float:
        """The completeness last reported, 0.0 at the start."""
        return self._state.completeness

    @property
    def words(self) -> Mapping[str, int]:
        """Words written so far by sub-query id, read-only, as of now."""
        return MappingProxyType(self._state.words)

    @property
    def packed(self) -> Mapping[str, int]:
        """The last window (1-based) that packed a fact, by fact id, read-only, as of now."""
        return MappingProxyType(self._state.packed)

    @property
    def guard(self) -> NGramGuard | None:
        """The n-gram guard as it is now, None when it is off. An update puts another one in its place."""
        return self._state.guard

    @property
    def safety_budget(self) -> float:
        """What is left of the safety budget, in [0, 1] (§6, exit 4). Can be assigned."""
        return self._state.safety_budget

    @safety_budget.setter
    def safety_budget(self, value: float) -> None:
        budget = check_number(value, "safety_budget", 0.0, 1.0)
        with self._lock:
            self._state = replace(self._state, safety_budget=budget)

    def columns(self, query: Any, *, state: SessionState | None = None) -> Columns:
        """What the next window asks of the store.

        query: [D] from the session's model; ValueError for another dimension, a zero or a non-finite vector.
        state: a state taken before with `session.state`, to go with its guard and packed facts.

        Of mode "spec". The calibrated mode asks of a store, see `evidence.ask`: a ValueError here.
        """
        if self.calibrated is not None:
            raise ValueError('session.columns is of mode "spec": the calibrated mode needs a store, use cdr_rank')
        state = self._state if state is None else state
        covered = [self._index[entry.sub_query_id] for entry in state.coverage]
        remaining = [self._index[item.id] for item in state.residual]
        return Columns.spec(
            as_vector(query, self.dim, "query"),
            coverage=self._embeddings[covered] if covered else None,
            depth_weights=np.array([entry.depth_weight for entry in state.coverage]) if covered else None,
            residual=self._embeddings[remaining] if remaining else None,
            min_relevance=self.min_relevance,
            first_window_pull=self.first_window_pull,
            clamp_novelty=self.clamp_novelty,
        )

    def need(self, state: SessionState | None = None) -> NDArray[np.float64]:
        """What each sub-query still needs, in [floor, 1]: max(floor, 1 - min(1, depth / 0.9)), [S] float64.

        depth: the sum of the depths reported for it, at most 1. Where nothing has any need left, which takes a floor of
        0, all have 1. state: as in `columns`.
        """
        state = self._state if state is None else state
        floor = NEED_FLOOR if self.calibrated is None else self.calibrated.need_floor
        reported: list[list[float]] = [[] for _ in self.sub_queries]
        for entry in state.coverage:
            reported[self._index[entry.sub_query_id]].append(entry.depth_weight)
        depth = np.minimum(1.0, [math.fsum(depths) for depths in reported])
        need = np.maximum(floor, 1.0 - np.minimum(1.0, depth / MAX_DEPTH_FROM_WORDS))
        return need if need.any() else np.ones_like(need)

    def update(
        self,
        report: WindowReport,
        output: str,
        *,
        envelope: Envelope | None = None,
        embedding_model: str | None = None,
    ) -> None:
        """§7.2 after a completed window: coverage, residual, blacklist, words and window count.

        output: the window's text, for the blacklist. envelope: its facts are remembered as packed, and in the
        calibrated mode the first one fixes the task's direction.
        embedding_model: the model the update comes from, here or in the report (R18).

        What is addressed leaves the residual (R8), and is appended again when it was addressed before (R19).
        Everything is checked first, so an error leaves the session as it was: EmbeddingModelMismatch for
        another model or none; ValueError for an unknown sub-query, an id addressed twice, a depth of an id
        that was not addressed, a number out of range; TypeError for a wrong type.
        """
        completeness, depths, words = self._check_report(report)
        _check_text(output, "output", empty=True)
        named = {embedding_model, report.embedding_model}
        for name in named - {None} or named:
            if name != self.embedding_model:
                raise EmbeddingModelMismatch("the update of a session", self.embedding_model, name)
        fact_ids = () if envelope is None else tuple(fact.id for fact in envelope.facts)
        found = None if envelope is None or self.calibrated is None else envelope.ranking.feedback
        with self._lock:
            before = self._state
            number = before.window_count + 1
            guard = before.guard
            if guard is not None:
                guard = guard.copy()
                guard.update(output)
            coverage = before.coverage + tuple(self._entry(id, depth, number) for id, depth in depths.items())
            self._state = replace(
                before,
                coverage=coverage,
                residual=self._remaining(coverage),
                window_count=number,
                completeness=completeness,
                words={id: n + words.get(id, 0) for id, n in before.words.items()},
                packed={**before.packed, **dict.fromkeys(fact_ids, number)},
                guard=guard,
                feedback=_fixed(before.feedback, found),
            )

    def exit(self, report: WindowReport | None = None, envelope: Envelope | None = None) -> Exit:
        """§6: the four exits, tested on the session as it is now (R9 to R12, R15).

        Before a window there is no report (R32): completion is then not tested. Without an envelope
        exhaustion is not tested. What equals its limit up to 1e-9 counts as equal (R10): a budget of 0.10 and
        a completeness at the threshold fire, a ratio of 0.15 does not. Changes nothing; raises as `update`
        does for a completeness that is no number in [0, 1].
        """
        completeness = None if report is None else self._check_completeness(report)
        state = self._state
        if envelope is None:
            ratio, exhausted = None, False
        elif self.calibrated is None:
            ratio = envelope.novelty_ratio(self.exhaustion)
            exhausted = ratio < EXHAUSTION_RATIO - EXIT_SLACK
        else:
            ratio = envelope.new_share
            exhausted = not len(envelope.ranking) or ratio < self.calibrated.min_new_share - EXIT_SLACK
        depleted = state.safety_budget <= SAFETY_BUDGET_FLOOR + EXIT_SLACK
        true = {
            TASK_COMPLETE: completeness is not None
            and completeness >= self.completion_threshold - EXIT_SLACK
            and all(item.marginal for item in state.residual),
            LIMIT_REACHED: state.window_count >= self.max_windows,
            CKF_EXHAUSTED: exhausted,
            SAFETY_BUDGET_DEPLETED: depleted,
        }
        reasons = [reason for reason in EXIT_REASONS if true[reason]]
        if envelope is not None and state.window_count == (0 if report is None else 1):
            self._warn_of_importance(envelope)
        return Exit(
            stop=bool(reasons),
            reason=reasons[0] if reasons else None,
            also=tuple(reasons[1:]),
            escalate=depleted,
            detail="" if envelope is None or not exhausted else self._exhaustion_detail(state, envelope, ratio),
            novelty_ratio=ratio,
        )

    def reset(self) -> None:
        """§2.7, R17: back to before the first window. The id, the model, the settings and what is left of the
        safety budget stay."""
        with self._lock:
            guard = self._state.guard
            if guard is not None:
                guard = guard.copy()
                guard.clear()
            self._state = self._fresh_state(guard, self._state.safety_budget)

    def snapshot(self) -> Session:
        """An independent copy of this moment, with the same id, for one branch of a fan-out (R34)."""
        state = self._state
        twin = copy.copy(self)
        if state.guard is not None:
            state = replace(state, guard=state.guard.copy())
        twin._state = state
        return twin

    def merge(self, branches: Sequence[Session]) -> None:
        """R34: take over what each branch, a snapshot of this session, did since.

        Coverage entries are appended in branch order with the window numbers the branches gave them. Window
        counts and words: this session's plus what each branch added. Completeness: the largest. Safety
        budget: this session's less what each branch spent, 0 at least. Blacklist and packed facts: united,
        the latest window. The task's direction: this session's, else the first branch's that has one.

        ValueError, and nothing changed, for a branch that does not continue this session's state (one with
        more safety budget included), or that comes twice. TypeError for what is no session.
        """
        branches = tuple(branches)
        for branch in branches:
            if not isinstance(branch, Session):
                raise TypeError(f"branches must hold Session objects, got {type(branch).__name__}")
        if len({id(branch) for branch in branches}) < len(branches):
            raise ValueError("a branch can be merged once, got the same session twice")
        states = [branch._state for branch in branches]
        with self._lock:
            base = self._state
            for number, (branch, state) in enumerate(zip(branches, states, strict=True)):
                self._check_descent(base, branch, state, f"branch {number}")
            coverage, packed = base.coverage, dict(base.packed)
            guard = None if base.guard is None else base.guard.copy()
            for state in states:
                coverage += state.coverage[len(base.coverage) :]
                for id_, window in state.packed.items():
                    packed[id_] = max(window, packed.get(id_, 0))
                if guard is not None and state.guard is not None:
                    guard.merge(state.guard)
            spent = math.fsum(base.safety_budget - state.safety_budget for state in states)
            self._state = SessionState(
                coverage=coverage,
                residual=self._remaining(coverage),
                window_count=base.window_count + sum(s.window_count - base.window_count for s in states),
                completeness=max([base.completeness, *(state.completeness for state in states)]),
                words={id: n + sum(state.words[id] - n for state in states) for id, n in base.words.items()},
                packed=packed,
                guard=guard,
                safety_budget=max(0.0, base.safety_budget - spent),
                feedback=_fixed(base.feedback, next((s.feedback for s in states if s.feedback is not None), None)),
            )

    def anchor(self, max_chars: int | None = None) -> str:
        """The Residual Task Anchor (§4.2, R31): what remains, in one sentence; "" when nothing does.

        max_chars: int >= 1. A longer sentence keeps as many labels from the front as fit and ends in "(+n
        more)"; only the form without a label may still be longer.
        """
        if max_chars is not None:
            max_chars = check_integer(max_chars, "max_chars", 1)
        labels = [item.label for item in self._state.residual]
        if not labels:
            return ""
        opening = "Remaining sections to complete: "
        anchor = opening + ", ".join(labels)
        if max_chars is None or len(anchor) <= max_chars:
            return anchor
        for kept in range(len(labels) - 1, 0, -1):
            anchor = f"{opening}{', '.join(labels[:kept])} (+{len(labels) - kept} more)"
            if len(anchor) <= max_chars:
                return anchor
        return f"{opening}(+{len(labels)} more)"

    def to_json(self) -> str:
        """The full state, embeddings and blacklist hashes included, as canonical JSON (schema 1).

        Vectors are base64 of little-endian float64, hashes of little-endian uint64. A replaced tokenizer goes
        in by its name only, a hash key by its fingerprint.
        """
        state = self._state
        return _canonical(
            {
                "schema": SCHEMA,
                "id": self.id,
                "dim": self.dim,
                "settings": self._settings(),
                "sub_queries": [
                    {
                        "id": item.id,
                        "label": item.label,
                        "text": item.text,
                        "embedding": _pack_array(item.embedding, "<f8"),
                        "expected_words": item.expected_words,
                        "marginal": item.marginal,
                    }
                    for item in self.sub_queries
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
                "window_count": state.window_count,
                "completeness": state.completeness,
                "words": state.words,
                "packed": state.packed,
                "safety_budget": state.safety_budget,
                "guard": None if state.guard is None else _pack_guard(state.guard),
                **self._feedback_data(state, with_direction=True),
            }
        )

    @classmethod
    def from_json(cls, text: str, *, tokenizer: Tokenizer | None = None, hash_key: HashKey | None = None) -> Self:
        """The session that `to_json` wrote, equal to the last bit.

        tokenizer, hash_key: needed when the guard had its own; name and fingerprint must be those in the file.
        ValueError that says what is wrong for anything that `to_json` does not write.
        """
        data = _parse(text)
        try:
            return cls._from_data(data, tokenizer, hash_key)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a session: {_message(error)}") from error

    def token(self) -> bytes:
        """What a gateway signs and hands around (SPEC-007): canonical JSON in ASCII, 4,096 bytes at most.

        It holds the settings, the counters, coverage and residual by index into the sub-queries, the model's
        id and a SHA-256 of the coverage state. It does not hold texts, embeddings or the blacklist, and the
        packed facts only under `exclude_packed` or a `packed_penalty`. ValueError if it does not fit: use `to_json`
        then.
        """
        state = self._state
        payload: dict[str, object] = {
            "v": SCHEMA,
            "id": self.id,
            "dim": self.dim,
            "settings": self._settings(),
            "covered": [self._index[entry.sub_query_id] for entry in state.coverage],
            "windows": [entry.window_number for entry in state.coverage],
            "depths": _pack_array(np.array([entry.depth_weight for entry in state.coverage]), "<f8"),
            "residual": [self._index[item.id] for item in state.residual],
            "window_count": state.window_count,
            "completeness": state.completeness,
            "words": [state.words[item.id] for item in self.sub_queries],
            "safety_budget": state.safety_budget,
            "guard": None if state.guard is None else _guard_settings(state.guard),
            "packed": state.packed if self._needs_packed else {},
            "sha256": self._coverage_hash(state),
            **self._feedback_data(state, with_direction=False),
        }
        token = _canonical(payload).encode("ascii")
        if len(token) > TOKEN_LIMIT:
            raise ValueError(f"a session token holds at most {TOKEN_LIMIT} bytes, this one needs {len(token)}")
        return token

    @classmethod
    def from_token(
        cls,
        token: bytes,
        sub_queries: Iterable[SubQuery],
        *,
        embedding_model: str,
        guard: NGramGuard | None = None,
    ) -> Self:
        """The session behind a token, given the task's sub-queries again.

        guard: the blacklist so far, which the token cannot hold (see `NGramGuard.from_hashes`); None starts
        an empty one, or none where the session had none.
        EmbeddingModelMismatch for another model; ValueError for sub-queries that are not those of the token,
        and for anything that `token` does not write.
        """
        if not isinstance(token, bytes | bytearray):
            raise TypeError(f"token must be bytes, got {type(token).__name__}")
        if len(token) > TOKEN_LIMIT:
            raise ValueError(f"a session token holds at most {TOKEN_LIMIT} bytes, got {len(token)}")
        _check_text(embedding_model, "embedding_model")
        if guard is not None and not isinstance(guard, NGramGuard):
            raise TypeError(f"guard must be an NGramGuard or None, got {guard!r}")
        sub_queries = tuple(sub_queries)
        try:
            data = _parse(bytes(token).decode("ascii"))
        except UnicodeDecodeError as error:
            raise ValueError(f"not a session token: {error}") from error
        try:
            model = data["settings"]["embedding_model"]
            if model != embedding_model:
                raise EmbeddingModelMismatch("the session of the token", model, embedding_model)
            return cls._from_token_data(data, sub_queries, guard)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a session token: {_message(error)}") from error

    def _fresh_state(self, guard: NGramGuard | None, safety_budget: float) -> SessionState:
        return SessionState(
            coverage=(),
            residual=self.sub_queries,
            window_count=0,
            completeness=0.0,
            words=dict.fromkeys(self._index, 0),
            packed={},
            guard=guard,
            safety_budget=safety_budget,
        )

    def _entry(self, sub_query_id: str, depth: float, window: int) -> CoverageEntry:
        return CoverageEntry(sub_query_id, self.sub_queries[self._index[sub_query_id]].embedding, depth, window)

    def _remaining(self, coverage: Iterable[CoverageEntry]) -> tuple[SubQuery, ...]:
        addressed = {entry.sub_query_id for entry in coverage}
        return tuple(item for item in self.sub_queries if item.id not in addressed)

    def _check_id(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{where} must name sub-queries by their id, got {value!r}")
        if value not in self._index:
            raise ValueError(f"{where} names sub-query {value!r}, the session has {list(self._index)}")
        return value

    def _check_completeness(self, report: WindowReport) -> float:
        if not isinstance(report, WindowReport):
            raise TypeError(f"report must be a WindowReport, got {type(report).__name__}")
        return check_number(report.completeness_score, "completeness_score", 0.0, 1.0)

    def _check_report(self, report: WindowReport) -> tuple[float, dict[str, float], dict[str, int]]:
        completeness = self._check_completeness(report)
        if isinstance(report.addressed, str | bytes) or not isinstance(report.addressed, Iterable):
            raise TypeError(f"addressed must be a sequence of ids, got {report.addressed!r}")
        for name in ("depth_by_sub_query", "words_by_sub_query"):
            if not isinstance(getattr(report, name), Mapping):
                raise TypeError(f"{name} must be a mapping by id, got {getattr(report, name)!r}")
        depths: dict[str, float] = {}
        for id in report.addressed:
            if self._check_id(id, "addressed") in depths:
                raise ValueError(f"addressed names sub-query {id!r} twice")
            depths[id] = DEFAULT_DEPTH
        for id, depth in dict(report.depth_by_sub_query).items():
            if self._check_id(id, "depth_by_sub_query") not in depths:
                raise ValueError(f"depth_by_sub_query has a depth for {id!r}, which is not among addressed")
            depths[id] = check_number(depth, f"the depth of {id!r}", 0.0, 1.0)
        words = {
            self._check_id(id, "words_by_sub_query"): check_integer(n, f"the words of {id!r}", 0, MOST_WORDS)
            for id, n in dict(report.words_by_sub_query).items()
        }
        return completeness, depths, words

    def _exhaustion_detail(self, state: SessionState, envelope: Envelope, ratio: float | None) -> str:
        """Why exit 3 is true (R12, R27)."""
        ranking = envelope.ranking
        if len(ranking) and self.calibrated is not None:
            return f"the share of facts never packed {ratio:.3f} is below {self.calibrated.min_new_share:g}"
        if len(ranking):
            if not (ranking.relevance > 0.0).any():
                return "no packed fact has a relevance above zero"
            return f"the mean novelty ratio {ratio:.3f} is below {EXHAUSTION_RATIO}"
        if envelope.skipped:
            return f"no fact that passed the relevance gate fits into {envelope.token_budget} tokens"
        if ranking.qualified:
            return f"none of the {ranking.qualified} facts that passed the relevance gate was left to pack"
        if (self.exclude_packed or envelope.ranking.new_share is not None) and state.packed:
            return "no fact that was not packed before passed the relevance gate"
        return "no fact passed the relevance gate"

    def _warn_of_importance(self, envelope: Envelope) -> None:
        """R11: once, when importance alone would end window 1 as if the store were exhausted."""
        importance = envelope.ranking.importance[envelope.ranking.relevance > 0.0]
        if self._warned or self.calibrated is not None or self.exhaustion != "score" or not len(importance):
            return
        mean = math.fsum(importance) / len(importance)
        if mean <= EXHAUSTION_RATIO + EXIT_SLACK:
            self._warned = True
            warnings.warn(
                f"the facts of window 1 have a mean importance of {mean:.3g}: at or below {EXHAUSTION_RATIO} "
                f"importance alone counts as {CKF_EXHAUSTED}. Scale importance to about 1, or use "
                'exhaustion="novelty"',
                stacklevel=3,
            )

    def warn_of_gate(self, passing: int, facts: int, k: int) -> None:
        """A warning, once per session, when of so many facts fewer than k pass the gate. Silent when the store has
        no more, and when none passes, which ends the loop and says so."""
        if self._warned_of_gate or not 0 < passing < k <= facts:
            return
        self._warned_of_gate = True
        gate = f"{self.min_relevance:g}" if self.calibrated is None else f"{self.calibrated.gate:g} deviations"
        warnings.warn(
            f"{passing} of {facts} facts reach the gate of {gate}, fewer than k = {k}. A gate measures the embedding "
            "model as much as relevance: see gate_report() or `cdr gate`",
            stacklevel=6,  # whoever called cdr_rank
        )

    def _check_descent(self, base: SessionState, branch: Session, state: SessionState, name: str) -> None:
        def key(entries: Iterable[CoverageEntry]) -> list[tuple[str, float, int]]:
            return [(entry.sub_query_id, entry.depth_weight, entry.window_number) for entry in entries]

        same_task = (
            branch.embedding_model == self.embedding_model
            and list(branch._index) == list(self._index)
            and np.array_equal(branch._embeddings, self._embeddings)
        )
        if not same_task:
            raise ValueError(f"{name} has other sub-queries or another embedding model than this session")
        if (base.guard is None) != (state.guard is None):
            raise ValueError(f"{name} and this session must both have an n-gram guard or both have none")
        blacklist_kept = (
            base.guard is None
            or state.guard is None
            or state.guard.max_ngrams is not None  # which forgets
            or bool(np.isin(base.guard.hashes, state.guard.hashes, assume_unique=True).all())
        )
        continues = (
            key(state.coverage[: len(base.coverage)]) == key(base.coverage)
            and state.window_count >= base.window_count
            and all(state.words[id] >= n for id, n in base.words.items())
            and all(state.packed.get(id, 0) >= n for id, n in base.packed.items())
            and state.safety_budget <= base.safety_budget
            and blacklist_kept
            and (base.feedback is None or (state.feedback or base.feedback).fact_ids == base.feedback.fact_ids)
        )
        if not continues:
            raise ValueError(
                f"{name} does not continue this session's state: merge snapshots taken from it "
                f"(window {base.window_count}, {len(base.coverage)} coverage entries) before it went on"
            )

    @property
    def _needs_packed(self) -> bool:
        return self.exclude_packed or (self.calibrated is not None and self.calibrated.packed_penalty > 0.0)

    def _feedback_data(self, state: SessionState, *, with_direction: bool) -> dict[str, object]:
        if self.calibrated is None:
            return {}
        made = state.feedback
        if made is None:
            return {"feedback": None}
        if not with_direction:
            return {"feedback": list(made.fact_ids)}
        direction = None if made.direction is None else _pack_array(made.direction, "<f8")
        return {"feedback": {"fact_ids": list(made.fact_ids), "direction": direction}}

    def _settings(self) -> dict[str, object]:
        if self.calibrated is not None:
            return {
                "embedding_model": self.embedding_model,
                "mode": self.mode,
                "max_windows": self.max_windows,
                "completion_threshold": self.completion_threshold,
                **asdict(self.calibrated),
            }
        return {
            "embedding_model": self.embedding_model,
            "mode": self.mode,
            "min_relevance": self.min_relevance,
            "max_windows": self.max_windows,
            "completion_threshold": self.completion_threshold,
            "first_window_pull": self.first_window_pull,
            "clamp_novelty": self.clamp_novelty,
            "exhaustion": self.exhaustion,
            "exclude_packed": self.exclude_packed,
        }

    def _coverage_hash(self, state: SessionState) -> str:
        content = {
            "embedding_model": self.embedding_model,
            "sub_queries": [[item.id, _pack_array(item.embedding, "<f8")] for item in self.sub_queries],
            "coverage": [[e.sub_query_id, e.depth_weight, e.window_number] for e in state.coverage],
        }
        return hashlib.sha256(_canonical(content).encode("ascii")).hexdigest()

    @classmethod
    def _from_data(cls, data: dict[str, Any], tokenizer: Tokenizer | None, hash_key: HashKey | None) -> Self:
        fields = (
            "schema id dim settings sub_queries coverage residual window_count completeness words packed "
            "safety_budget guard"
        )
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
        _check_text(data["id"], "id")
        session = cls._from_settings(data, sub_queries, guard)
        coverage = []
        for item in _check_list(data["coverage"], "coverage"):
            _check_fields(item, "sub_query_id depth_weight window_number", "a coverage entry")
            coverage.append((item["sub_query_id"], item["depth_weight"], item["window_number"]))
        session._restore(data, coverage, data["residual"], data["words"])
        return session

    @classmethod
    def _from_token_data(
        cls, data: dict[str, Any], sub_queries: tuple[SubQuery, ...], guard: NGramGuard | None
    ) -> Self:
        fields = (
            "v id dim settings covered windows depths residual window_count completeness words safety_budget "
            "guard packed sha256"
        )
        _check_fields(data, fields + _extra_fields(data), "the token")
        if data["v"] != SCHEMA:
            raise ValueError(f"v must be {SCHEMA}, got {data['v']!r}")
        own = _token_guard(data["guard"], guard)
        _check_text(data["id"], "id")
        session = cls._from_settings(data, sub_queries, own)
        ids = list(session._index)

        def named(indices: object, name: str) -> list[str]:
            checked = [check_integer(i, f"an index in {name}", 0) for i in _check_list(indices, name)]
            if any(i >= len(ids) for i in checked):
                raise ValueError(f"{name} has an index beyond the {len(ids)} sub-queries given, got {checked}")
            return [ids[i] for i in checked]

        covered = named(data["covered"], "covered")
        windows = _check_list(data["windows"], "windows")
        depths = _unpack_array(data["depths"], "<f8", "depths", len(covered)).tolist()
        words = _check_list(data["words"], "words")
        if len(windows) != len(covered) or len(words) != len(ids) or data["dim"] != session.dim:
            raise ValueError(
                f"the sub-queries are not those of the token: it has {len(words)} of dimension "
                f"{data['dim']!r}, got {len(ids)} of dimension {session.dim}"
            )
        session._restore(
            data,
            list(zip(covered, depths, windows, strict=True)),
            named(data["residual"], "residual"),
            dict(zip(ids, words, strict=True)),
        )
        if session._coverage_hash(session._state) != data["sha256"]:
            raise ValueError("the sub-queries or the coverage are not those of the token: the SHA-256 differs")
        return session

    @classmethod
    def _from_settings(
        cls, data: dict[str, Any], sub_queries: Sequence[SubQuery], guard: NGramGuard | Literal[False] | None
    ) -> Self:
        settings = data["settings"]
        own = "min_relevance first_window_pull clamp_novelty exhaustion exclude_packed"
        if _extra_fields(data):
            own = " ".join(item.name for item in fields(Calibrated))
            if settings.get("source_weight"):  # it replaces the feedback, and the two are not given together
                settings = {**settings, "feedback_weight": None}
        _check_fields(settings, f"embedding_model mode max_windows completion_threshold {own}", "settings")
        return cls(sub_queries, id=data["id"], safety_budget=data["safety_budget"], guard=guard, **settings)

    def _restore(
        self, data: dict[str, Any], coverage: Iterable[tuple[Any, Any, Any]], residual: object, words: object
    ) -> None:
        """Replace the fresh state of a session just made by a stored one, checked."""
        count = check_integer(data["window_count"], "window_count", 0)
        entries = tuple(
            self._entry(
                self._check_id(id, "coverage"),
                check_number(depth, f"the depth of {id!r}", 0.0, 1.0),
                check_integer(window, "window_number", 1, count),
            )
            for id, depth, window in coverage
        )
        remaining = self._remaining(entries)
        if residual != [item.id for item in remaining]:
            raise ValueError(f"residual must be what coverage leaves, got {residual!r}")
        if not isinstance(words, dict) or set(words) != set(self._index):
            raise ValueError(f"words must have a count for each sub-query, got {words!r}")
        if not isinstance(data["packed"], dict):
            raise TypeError(f"packed must be an object, got {data['packed']!r}")
        packed = {id: check_integer(n, f"the window of fact {id!r}", 1, count) for id, n in data["packed"].items()}
        self._state = replace(
            self._state,
            coverage=entries,
            residual=remaining,
            window_count=count,
            completeness=check_number(data["completeness"], "completeness", 0.0, 1.0),
            words={id: check_integer(words[id], f"the words of {id!r}", 0) for id in self._index},
            packed=packed,
            feedback=self._read_feedback(data.get("feedback")),
        )

    def _read_feedback(self, stored: object) -> Feedback | None:
        if stored is None:
            return None
        ids, direction = stored, None
        if isinstance(stored, dict):
            _check_fields(stored, "fact_ids direction", "feedback")
            ids, direction = stored["fact_ids"], stored["direction"]
        checked = tuple(_check_text(id, "a fact of feedback", empty=True) for id in _check_list(ids, "feedback"))
        if direction is None:
            return Feedback(checked, None)
        vector = _unpack_array(direction, "<f8", "the direction of feedback", self.dim)
        if not np.isfinite(vector).all():
            raise ValueError("the direction of feedback must be finite")
        return Feedback(checked, vector)


def _extra_fields(data: dict[str, Any]) -> str:
    settings = data.get("settings")
    return " feedback" if isinstance(settings, dict) and settings.get("mode") == "calibrated" else ""


def _fixed(held: Feedback | None, found: Feedback | None) -> Feedback | None:
    """What is held stays; only a direction that is missing is taken over."""
    return found if held is None or (held.direction is None and found is not None) else held


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
