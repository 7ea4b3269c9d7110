"""The state of one task over its windows: coverage, residual, blacklist, counters, and the four exits.

    session = Session(sub_queries, embedding_model="all-MiniLM-L6-v2")
    columns = session.columns(query)                         # what the next window asks of the store
    session.update(report, output, envelope=envelope)        # after the window was written (§7.2)
    session.exit(report, envelope)                           # §6

Every check comes before every change: an error leaves the session as it was.
"""

from __future__ import annotations

import copy
import hashlib
import math
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from cdr_kernel import session_json
from cdr_kernel.arrays import as_vector
from cdr_kernel.checks import check_bool, check_choice, check_integer, check_number, check_order, check_text, counted
from cdr_kernel.columns import Columns
from cdr_kernel.constants import (
    CDR_MIN_RELEVANCE,
    CKF_EXHAUSTED,
    COMPLETION_THRESHOLD,
    DEFAULT_DEPTH,
    EXHAUSTION_RATIO,
    EXIT_REASONS,
    EXIT_SLACK,
    LIMIT_REACHED,
    MAX_DEPTH_FROM_WORDS,
    MAX_WINDOWS,
    MAX_WINDOWS_LIMIT,
    NEED_FLOOR,
    SAFETY_BUDGET_DEPLETED,
    SAFETY_BUDGET_FLOOR,
    TASK_COMPLETE,
)
from cdr_kernel.ngram import HashKey, NGramGuard, Tokenizer
from cdr_kernel.store import EmbeddingModelMismatch
from cdr_kernel.task import MOST_WORDS, Calibrated, CoverageEntry, Exit, Feedback, SessionState, SubQuery, WindowReport
from cdr_kernel.warn import warn

if TYPE_CHECKING:
    from cdr_kernel.pack import Envelope
MODES = ("spec", "calibrated")
_DEFAULT_GATE = float(str(CDR_MIN_RELEVANCE))  # an object of its own, so that the same number given is told from it
EXHAUSTIONS = ("score", "novelty")


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
    gate, min_qualified, gate_on, lexical_weight, feedback_weight, lexical_feedback_weight, source_weight, need_floor,
    packed_penalty, centred_coverage, min_new_share: the parts of mode "calibrated", see `Calibrated`; kept in
    `session.calibrated`, which is None in mode "spec". first_window_pull, clamp_novelty, exhaustion and
    exclude_packed are of mode "spec" alone.

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
        min_qualified: int | None = None,
        gate_on: str | None = None,
        lexical_weight: float | None = None,
        feedback_weight: float | None = None,
        lexical_feedback_weight: float | None = None,
        source_weight: float | None = None,
        need_floor: float | None = None,
        packed_penalty: float | None = None,
        centred_coverage: bool | None = None,
        min_new_share: float | None = None,
    ) -> None:
        check_order(sub_queries, "sub_queries")
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
        self.id = uuid.uuid4().hex if id is None else check_text(id, "id")
        self.embedding_model = check_text(embedding_model, "embedding_model")
        self.mode = check_choice(mode, "mode", MODES)
        parts = {
            "gate": gate,
            "min_qualified": 0 if min_qualified is None and gate is not None else min_qualified,
            "gate_on": gate_on,
            "lexical_weight": lexical_weight,
            "feedback_weight": feedback_weight,
            "lexical_feedback_weight": lexical_feedback_weight,
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
            for name in ("feedback_weight", "lexical_feedback_weight"):
                if chosen.get("source_weight") and chosen.get(name):
                    raise ValueError(f"source_weight replaces {name}: expected one of them, got both")
            self.calibrated = Calibrated(**chosen)
        self.min_relevance = check_number(min_relevance, "min_relevance", -1.0, 1.0)
        self.max_windows = check_integer(max_windows, "max_windows", 1, MAX_WINDOWS_LIMIT)
        self.completion_threshold = check_number(completion_threshold, "completion_threshold", 0.0, 1.0)
        self.first_window_pull = check_bool(first_window_pull, "first_window_pull")
        self.clamp_novelty = check_bool(clamp_novelty, "clamp_novelty")
        self.exhaustion = check_choice(exhaustion, "exhaustion", EXHAUSTIONS)
        self.exclude_packed = check_bool(exclude_packed, "exclude_packed")
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
        self._warned_of_none = False
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
        check_text(output, "output", empty=True)
        named = {embedding_model, report.embedding_model}
        for name in named - {None} or named:
            if name != self.embedding_model:
                own = self.embedding_model
                advice = f"the session is of {own!r}: update it with vectors of that, named here or in the report"
                raise EmbeddingModelMismatch("the update of a session", own, name, advice)
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

    def task(self) -> Session:
        """A session of the same task, settings and id before its first window, without a guard."""
        twin = copy.copy(self)
        twin._state = self._fresh_state(None, 1.0)
        return twin

    def snapshot(self) -> Session:
        """An independent copy of this moment, with the same id, for one branch of a fan-out (R34)."""
        state = self._state
        twin = copy.copy(self)
        if state.guard is not None:
            state = replace(state, guard=state.guard.copy())
        twin._state = state
        return twin

    def supposing(self, state: SessionState, gate: float | None = None) -> Session:
        """A copy in another state, and with another gate where one is given (of the mode it has), for what-ifs.

        state: one of this session, or `dataclasses.replace` of one. Nothing is checked.
        """
        twin = self.snapshot()
        twin._state = state
        if gate is not None and self.calibrated is not None:
            twin.calibrated = replace(self.calibrated, gate=gate, min_qualified=0)
        elif gate is not None:
            twin.min_relevance = gate
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
        check_order(branches, "branches")
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
        return session_json.to_json(self)

    @classmethod
    def from_json(cls, text: str, *, tokenizer: Tokenizer | None = None, hash_key: HashKey | None = None) -> Self:
        """The session that `to_json` wrote, equal to the last bit.

        tokenizer, hash_key: needed when the guard had its own; name and fingerprint must be those in the file.
        ValueError that says what is wrong for anything that `to_json` does not write.
        """
        return session_json.from_json(cls, text, tokenizer=tokenizer, hash_key=hash_key)

    def token(self) -> bytes:
        """What a gateway signs and hands around (SPEC-007): canonical JSON in ASCII, 4,096 bytes at most.

        It holds the settings, the counters, coverage and residual by index into the sub-queries, the model's
        id and a SHA-256 of the coverage state. It does not hold texts, embeddings or the blacklist, and the
        packed facts only under `exclude_packed` or a `packed_penalty`. ValueError if it does not fit: use `to_json`
        then.
        """
        return session_json.token(self)

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
        return session_json.from_token(cls, token, sub_queries, embedding_model=embedding_model, guard=guard)

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
        check_order(report.addressed, "addressed")
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
            return f"none of the {counted(ranking.qualified, 'fact')} that passed the relevance gate was left to pack"
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
            warn(
                f"the facts of window 1 have a mean importance of {mean:.3g}: at or below {EXHAUSTION_RATIO} "
                f"importance alone counts as {CKF_EXHAUSTED}. Scale importance to about 1, or use "
                'exhaustion="novelty"'
            )

    def warn_of_gate(self, passing: int, facts: int, k: int | None, best: Callable[[], float] | None = None) -> None:
        """A warning when of so many facts none passes the gate, and one when fewer than k do, each once per session.
        Silent when the store has no more facts than pass, and when none is wanted.

        k: None for all that pass. best: called for the largest value that the gate was compared with, when the warning
        says it; without it nothing is said of a gate that no fact passes.
        """
        parts = self.calibrated
        gate = self.min_relevance if parts is None else parts.gate
        unit = "" if parts is None else " deviations"
        advice = "A gate measures the embedding model as much as relevance: see gate_report() or `cdr gate`"
        if passing == 0 and facts and k != 0 and best is not None and not self._warned_of_none:
            largest = best()
            self._warned_of_none = True
            shown = f"{largest:.3f}" if round(largest, 3) != round(gate, 3) else repr(largest)
            said = f"the best cosine is {shown}" if parts is None else f"the best fact has {shown}"
            if largest >= gate:
                advice = 'The index is approximate and missed it: use kind="scan", or a larger nprobe'
            warn(f"0 of {facts} facts reach the gate of {gate:g}{unit}: {said}. {advice}")
        elif k is not None and 0 < passing < k <= facts and not self._warned_of_gate:
            self._warned_of_gate = True
            warn(f"{passing} of {facts} facts reach the gate of {gate:g}{unit}, fewer than k = {k}. {advice}")

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


def _fixed(held: Feedback | None, found: Feedback | None) -> Feedback | None:
    """What is held stays; only a direction that is missing is taken over."""
    return found if held is None or (held.direction is None and found is not None) else held
