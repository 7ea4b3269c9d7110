"""The state of one task over its windows: coverage, residual, blacklist, counters, and the four exits.

    session = Session(sub_queries, embedding_model="all-MiniLM-L6-v2")
    columns = session.columns(query)                         # what the next window asks of the store
    session.update(report, output, envelope=envelope)        # after the window was written (§7.2)
    session.exit()                                           # §6

Every check comes before every change: an error leaves the session as it was.
"""

from __future__ import annotations

import copy
import hashlib
import math
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.concurrency._steps import finish
from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.score import Columns
from cdr_kernel.session import _serialize, _token
from cdr_kernel.session._envelope import PackedContext
from cdr_kernel.session._settings import (
    MODES,
    CalibratedKeywords,
    CalibratedSettings,
    Settings,
    SpecKeywords,
    SpecSettings,
    check_settings,
)
from cdr_kernel.session._task import (
    MOST_WORDS,
    CoverageEntry,
    EnvelopeTest,
    Exit,
    Feedback,
    SessionEnded,
    SessionState,
    SubQuery,
    WindowReport,
    check_outputs,
)
from cdr_kernel.session._token import NumberedStore, SessionToken
from cdr_kernel.spec.constants import (
    CKF_EXHAUSTED,
    DEFAULT_DEPTH,
    EXHAUSTION_RATIO,
    EXIT_REASONS,
    EXIT_SLACK,
    LIMIT_REACHED,
    MAX_DEPTH_FROM_WORDS,
    MAX_WINDOWS_LIMIT,
    SAFETY_BUDGET_DEPLETED,
    SAFETY_BUDGET_FLOOR,
    TASK_COMPLETE,
)
from cdr_kernel.text import NGramGuard
from cdr_kernel.text._ngram_guard import HashKey, Tokenizer
from cdr_kernel.text._repr import html_table
from cdr_kernel.validation._arrays import as_vector
from cdr_kernel.validation._scalars import (
    check_integer,
    check_number,
    check_order,
    check_strings,
    check_text,
)
from cdr_kernel.validation._warn import warn

_LONGEST_DETAIL = 200
"""Characters that a session remembers of an envelope's `Exit.detail`."""
_INSTEAD = {
    "max_windows": "raise it with session.extend(max_windows=...)",
    "sub_queries": "add to them with session.extend(sub_queries=...)",
}
_SETTINGS = frozenset().union(*(kind.names() for kind in MODES.values()))
_FIXED = frozenset({"sub_queries", "dim", "task_key", "id", "embedding_model", "settings", "mode"})
"""Attributes that nobody assigns once a session is made, beside the settings."""


class Session:
    """The state of one task, from its first window to its exit. Plain data; safe to read while it is updated.

    Args:
        sub_queries: The task's decomposition: at least one, ids unique, one dimension.
        embedding_model: The model of all embeddings, the store's (§2.5, R18).
        settings: `SpecSettings`, the formula of the specification, or `CalibratedSettings`, an extension.
        safety_budget: In [0, 1] (§6, exit 4). It can be assigned later.
        guard: The n-gram guard (§5), which is copied. Its tokenizer and hash key must be the store's. None makes an
            empty one in the specification's mode, and none in the calibrated mode. False turns it off.
        id: The name of the session. None makes a random hex string.
        keywords: The short form of `settings=SpecSettings(...)`. `Session.calibrated` is that of the other mode.

    Literal exit 3 (`exhaustion="score"`) can fire through importance or the n-gram penalty only, since novelty never
    falls below 0.20. A warning says so when importance alone would end window 1.

    Raises:
        TypeError: For a value of a wrong type.
        ValueError: For a value out of range, and for settings together with keywords.
        AttributeError: When a setting is assigned later. `extend` raises max_windows and adds sub-queries.
    """

    sub_queries: tuple[SubQuery, ...]
    dim: int
    task_key: str
    settings: Settings

    def __init__(
        self,
        sub_queries: Iterable[SubQuery],
        *,
        embedding_model: str,
        settings: Settings | None = None,
        safety_budget: float = 1.0,
        guard: NGramGuard | Literal[False] | None = None,
        id: str | None = None,
        **keywords: Unpack[SpecKeywords],
    ) -> None:
        check_order(sub_queries, "sub_queries")
        self._set_task(_checked_items(sub_queries))
        self.id = uuid.uuid4().hex if id is None else check_text(id, "id")
        self.embedding_model = check_text(embedding_model, "embedding_model")
        if settings is None:
            self.settings = SpecSettings.of(**keywords)
        elif keywords:
            raise ValueError(f"settings: expected settings or keywords, got both: {', '.join(keywords)}")
        else:
            self.settings = check_settings(settings)
        budget = check_number(safety_budget, "safety_budget", 0.0, 1.0)
        own: NGramGuard | None
        if guard is None and self.settings.guarded:
            own = NGramGuard()
        elif guard is None or guard is False:
            own = None
        elif isinstance(guard, NGramGuard):
            own = guard.copy()
        else:
            raise TypeError(f"guard must be an NGramGuard, None or False, got {guard!r}")
        self._lock = Lock()
        self._warned = False
        self._warned_of_gate = False
        self._warned_of_none = False
        self._state = self._fresh_state(own, budget)

    @classmethod
    def calibrated(
        cls,
        sub_queries: Iterable[SubQuery],
        *,
        embedding_model: str,
        safety_budget: float = 1.0,
        guard: NGramGuard | Literal[False] | None = None,
        id: str | None = None,
        **keywords: Unpack[CalibratedKeywords],
    ) -> Self:
        """A session of the calibrated mode.

        Args:
            sub_queries: As for `Session`, and so are embedding_model, safety_budget, guard and id.
            embedding_model: See there.
            safety_budget: See there.
            guard: See there.
            id: See there.
            keywords: Those of `CalibratedSettings`. None stands for the default. A gate is taken as it is: where one
                is given, min_qualified is 0 unless it is given too.
        """
        settings = CalibratedSettings.of(**keywords)
        rest: dict[str, Any] = {"safety_budget": safety_budget, "guard": guard, "id": id}
        return cls(sub_queries, embedding_model=embedding_model, settings=settings, **rest)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTINGS or (name in _FIXED and (name in self.__dict__ or name == "mode")):
            instead = _INSTEAD.get(name, f"make a Session with another {name}")
            raise AttributeError(f"{name} of a session is fixed once it is made: {instead}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in _FIXED or name in _SETTINGS:
            raise AttributeError(f"{name} of a session is fixed once it is made: it cannot be deleted")
        super().__delattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values, _lock=Lock())

    def __repr__(self) -> str:
        state = self._state
        return (
            f"Session({self.id!r}, window_count={state.window_count}, coverage={len(state.coverage)}, "
            f"residual={len(state.residual)} of {len(self.sub_queries)}, "
            f"completeness={state.completeness:.2f})"
        )

    def _repr_html_(self) -> str:
        state = self._state
        rows = {
            "mode": self.mode,
            "windows": f"{state.window_count} of at most {self.max_windows}",
            "completeness": f"{state.completeness:.2f}",
            "coverage": f"{len(state.coverage)} entries",
            "remaining": ", ".join(item.label for item in state.residual) or "nothing",
        }
        return html_table(f"Session {self.id}", rows)

    @property
    def mode(self) -> str:
        """The name of the mode: "spec" or "calibrated"."""
        return self.settings.mode

    @property
    def max_windows(self) -> int:
        """The limit of windows (R16). `extend` raises it."""
        return self.settings.max_windows

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
        """The n-gram guard as it is now, None when it is off. An update puts another one in its place.

        It can be read and copied; what would change it is a TypeError.
        """
        return self._state.guard

    @property
    def outputs(self) -> tuple[str, ...]:
        """The texts of the windows so far, where `keep_outputs` is on (R40), else empty. After `from_token` without
        outputs, of the windows since."""
        return self._state.outputs

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
        """The columns of the next window, in the specification's mode.

        Args:
            query: [D], from the session's model.
            state: An earlier `session.state`, to go with its guard and packed facts. None is the present one.

        Raises:
            ValueError: For a query of another dimension, zero or not finite, and in the calibrated mode, whose columns
                need a store. Use `cdr_rank` there.
        """
        state = self._state if state is None else state
        covered = [self._index[entry.sub_query_id] for entry in state.coverage]
        remaining = [self._index[item.id] for item in state.residual]
        return self.settings.columns(
            as_vector(query, self.dim, "query"),
            self._embeddings[covered] if covered else None,
            np.array([entry.depth_weight for entry in state.coverage]) if covered else None,
            self._embeddings[remaining] if remaining else None,
        )

    def need(self, state: SessionState | None = None) -> NDArray[np.float64]:
        """What each sub-query still needs: max(floor, 1 - min(1, depth / 0.9)), [S] float64.

        The depth is the sum of the depths that were reported for it, at most 1. If nothing is needed any more, which
        takes a floor of 0, all have 1.

        Args:
            state: As in `columns`.
        """
        state = self._state if state is None else state
        reported = _depths(state.coverage)
        depth = np.array([reported.get(item.id, 0.0) for item in self.sub_queries])
        need = np.maximum(self.settings.need_floor, 1.0 - np.minimum(1.0, depth / MAX_DEPTH_FROM_WORDS))
        return need if need.any() else np.ones_like(need)

    def update(
        self,
        report: WindowReport,
        output: str,
        *,
        envelope: PackedContext | None = None,
        packed: Sequence[str] | None = None,
        embedding_model: str | None = None,
    ) -> None:
        """Record a completed window (§7.2): coverage, residual, blacklist, words and window count.

        This only records (R37), so a session that has ended takes an update too. An addressed sub-query leaves the
        residual (R8; R36: once its depth reaches residual_depth). One that was addressed before gets another coverage
        entry (R19). Everything is checked first, so an error leaves the session as it was.

        Args:
            report: What the window achieved.
            output: The text of the window, for the blacklist.
            envelope: The packed facts of the window. The session remembers them as packed, and what exit 3 says of
                them. In the calibrated mode the first envelope fixes the task's direction.
            packed: Ids of the facts that the window got, in place of those of the envelope.
            embedding_model: The model of the update, here or in the report (R18).

        Raises:
            EmbeddingModelMismatch: For another model, or none.
            ValueError: For an unknown sub-query, an id that is addressed twice, a depth of an id that was not
                addressed, a number out of range, and more text than `keep_outputs` takes.
            TypeError: For a wrong type, such as a ranking that was not packed.
        """
        finish(self.update_steps(report, output, envelope=envelope, packed=packed, embedding_model=embedding_model))

    def update_steps(
        self,
        report: WindowReport,
        output: str,
        *,
        envelope: PackedContext | None = None,
        packed: Sequence[str] | None = None,
        embedding_model: str | None = None,
    ) -> Generator[None, None, None]:
        """`update` in steps: the output's n-grams are read in pieces, then everything changes in one."""
        completeness, depths, words = self._check_report(report)
        check_text(output, "output", empty=True)
        if envelope is not None:
            _check_envelope(envelope)
        named = {embedding_model, report.embedding_model}
        for name in named - {None} or named:
            if name != self.embedding_model:
                own = self.embedding_model
                advice = f"the session is of {own!r}: update it with vectors of that, named here or in the report"
                raise EmbeddingModelMismatch("the update of a session", own, name, advice)
        fact_ids = [] if envelope is None else envelope.ranking.ids
        if packed is not None:
            if not isinstance(packed, Sequence):
                raise TypeError(f"packed must be a sequence of ids, got {type(packed).__name__}")
            fact_ids = check_strings(packed, "packed")
        found = envelope.ranking.feedback if envelope is not None and self.settings.fixes_direction else None
        reader = self._state.guard
        ngrams = None if reader is None else (yield from reader.window_steps(output))
        with self._lock:
            before = self._state
            number = before.window_count + 1
            outputs = before.outputs
            if self.settings.keep_outputs:
                outputs = check_outputs((*outputs, output))
            guard = before.guard
            if guard is not None and ngrams is not None:
                guard = guard.copy()
                guard.add(ngrams)
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
                last_envelope=self._known_test(before, envelope),
                outputs=outputs,
            )

    def exit(self, report: WindowReport | None = None, envelope: PackedContext | None = None) -> Exit:
        """Test the four exits on the session as it is now (§6; R9 to R12, R15, R37). Changes nothing.

        Completion is not tested before the first report, exhaustion not before the first envelope (R32). A store that
        was exhausted stays so until a ranking saw newer facts than the last one. A value that equals its limit up to
        1e-9 counts as equal (R10): a budget of 0.10 and a completeness at the threshold fire, a ratio of 0.15 does not.

        Args:
            report: The report to test. None is the last one.
            envelope: The envelope to test. None is the last one.

        Raises:
            ValueError: For a completeness outside [0, 1], and for an envelope that is empty for another reason than the
                store (R39).
            TypeError: For what is no report or envelope.
        """
        state = self._state
        completeness = state.completeness if report is None else self._check_completeness(report)
        reported = report is not None or state.window_count > 0
        if envelope is not None:
            _check_envelope(envelope)
            envelope.check_fits()
        tested = self._known_test(state, envelope)
        depleted = state.safety_budget <= SAFETY_BUDGET_FLOOR + EXIT_SLACK
        true = {
            TASK_COMPLETE: reported
            and completeness >= self.settings.completion_threshold - EXIT_SLACK
            and all(item.marginal for item in state.residual),
            LIMIT_REACHED: state.window_count >= self.max_windows,
            CKF_EXHAUSTED: tested is not None and tested.detail != "",
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
            detail="" if tested is None else tested.detail,
            novelty_ratio=None if tested is None else tested.ratio,
        )

    def before_window(self, envelope: PackedContext) -> Exit:
        """Test the exits on an envelope before its window is written (R32).

        If one is true, the session has ended and remembers what exit 3 said of this envelope (R37).

        Args:
            envelope: The packed facts of the window.

        Returns:
            What ``exit(envelope=envelope)`` returns.
        """
        exit = self.exit(envelope=envelope)
        if exit.stop:
            with self._lock:
                self._state = replace(self._state, last_envelope=self._known_test(self._state, envelope))
        return exit

    def check_open(self, newest: int = -1) -> None:
        """Raise SessionEnded if the session has ended, so that no other window begins (R37).

        It has ended if an exit is true after a window, or for an envelope that `before_window` remembered. A session
        that ended by exhaustion alone may rank again once the store has newer facts.

        Args:
            newest: The sequence number of the newest fact in the store that is ranked next (`store.newest`).

        Raises:
            SessionEnded: If the session has ended.
        """
        state = self._state
        last = state.last_envelope
        if state.window_count == 0 and last is None:
            return
        exit = self.exit()
        new_facts = last is not None and newest > last.newest
        if exit.stop and not (exit.reason == CKF_EXHAUSTED and not exit.also and new_facts):
            raise SessionEnded(self.id, exit)

    def extend(self, *, max_windows: int | None = None, sub_queries: Iterable[SubQuery] = ()) -> None:
        """Raise the limit of windows, or give the task more sub-queries. Both may open a session that has ended (R37).

        Do not add sub-queries while another thread ranks for the session. After an error nothing was changed.

        Args:
            max_windows: At least the present limit, at most 20 (R16).
            sub_queries: With new ids and the dimension of the task. They remain to be addressed.

        Raises:
            ValueError: For a lower limit, a known id, and another dimension.
            TypeError: For a wrong type.
        """
        more = _checked_items((*self.sub_queries, *_items(sub_queries)))
        limit = self.max_windows
        if max_windows is not None:
            limit = check_integer(max_windows, "max_windows", 1, MAX_WINDOWS_LIMIT)
        if limit < self.max_windows:
            raise ValueError(f"max_windows must be at least the present {self.max_windows}, got {limit}")
        with self._lock:
            self.__dict__["settings"] = replace(self.settings, max_windows=limit)
            if len(more) > len(self.sub_queries):
                state = self._state
                self._set_task(more)
                self._state = replace(
                    state,
                    residual=self._remaining(state.coverage),
                    words={**dict.fromkeys(self._index, 0), **state.words},
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
        if gate is not None:
            twin.__dict__["settings"] = self.settings.with_gate(gate)
        return twin

    def merge(self, branches: Sequence[Session]) -> None:
        """Merge branches, which are snapshots of this session that went on (R34).

        Coverage entries are appended in branch order, with the window numbers of the branches. Window counts and words:
        this session's plus what each branch added. Completeness: the largest. Safety budget: this session's minus what
        the branches spent, at least 0. Blacklist and packed facts: the union. Task direction: this session's, else that
        of the first branch that has one. Outputs: in branch order. Last envelope: the last one in which the store was
        not exhausted, else the last.

        Args:
            branches: The branches.

        Raises:
            ValueError: For a branch that does not continue this session's state, or comes twice. Nothing was changed
                then.
            TypeError: For what is no session.
        """
        finish(self.merge_steps(branches))

    def merge_steps(self, branches: Sequence[Session]) -> Generator[None, None, None]:
        """`merge` in steps, one branch at a time. Nobody else may change the session between them."""
        check_order(branches, "branches")
        branches = tuple(branches)
        for branch in branches:
            if not isinstance(branch, Session):
                raise TypeError(f"branches must hold Session objects, got {type(branch).__name__}")
        if len({id(branch) for branch in branches}) < len(branches):
            raise ValueError("a branch can be merged once, got the same session twice")
        states = [branch._state for branch in branches]
        while True:  # again where the session was changed between the steps
            base = self._state
            merged = yield from self._merged_steps(base, branches, states)
            with self._lock:
                if self._state is base:
                    self._state = merged
                    return

    def _merged_steps(
        self, base: SessionState, branches: Sequence[Session], states: Sequence[SessionState]
    ) -> Generator[None, None, SessionState]:
        """The state after a merge."""
        for number, (branch, state) in enumerate(zip(branches, states, strict=True)):
            self._check_descent(base, branch, state, f"branch {number}")
            yield
        coverage, packed = base.coverage, dict(base.packed)
        guard = None if base.guard is None else base.guard.copy()
        for state in states:
            coverage += state.coverage[len(base.coverage) :]
            for id_, window in state.packed.items():
                packed[id_] = max(window, packed.get(id_, 0))
            if guard is not None and state.guard is not None:
                guard.merge(state.guard)
            yield
        outputs = check_outputs((*base.outputs, *(t for s in states for t in s.outputs[len(base.outputs) :])))
        spent = math.fsum(base.safety_budget - state.safety_budget for state in states)
        return SessionState(
            coverage=coverage,
            residual=self._remaining(coverage),
            window_count=base.window_count + sum(s.window_count - base.window_count for s in states),
            completeness=max([base.completeness, *(state.completeness for state in states)]),
            words={id: n + sum(state.words[id] - n for state in states) for id, n in base.words.items()},
            packed=packed,
            guard=guard,
            safety_budget=max(0.0, base.safety_budget - spent),
            feedback=_fixed(base.feedback, next((s.feedback for s in states if s.feedback is not None), None)),
            last_envelope=_last_of(base, states),
            outputs=outputs,
        )

    def anchor(self, max_chars: int | None = None) -> str:
        """The Residual Task Anchor (§4.2, R31): what remains, in one sentence. "" if nothing does.

        Args:
            max_chars: At least 1. A longer sentence keeps as many labels from the front as fit, and ends in "(+n
                more)". The form without a label may still be longer. None is no limit.
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
        lengths = list(accumulate(len(label) + 2 for label in labels))  # with the ", " after each
        for count in range(len(labels) - 1, 0, -1):
            more = f" (+{len(labels) - count} more)"
            if len(opening) + lengths[count - 1] - 2 + len(more) <= max_chars:
                return f"{opening}{', '.join(labels[:count])}{more}"
        return f"{opening}(+{len(labels)} more)"

    def to_json(self) -> str:
        """The full state, embeddings and blacklist hashes included, as canonical JSON (schema 1).

        Vectors are base64 of little-endian float64, hashes of little-endian uint64. A replaced tokenizer goes
        in by its name only, a hash key by its fingerprint.
        """
        return _serialize.to_json(self)

    @classmethod
    def from_json(cls, text: str, *, tokenizer: Tokenizer | None = None, hash_key: HashKey | None = None) -> Self:
        """The session that `to_json` wrote, equal to the last bit.

        tokenizer, hash_key: needed when the guard had its own; name and fingerprint must be those in the file.
        ValueError that says what is wrong for anything that `to_json` does not write.
        """
        return _serialize.from_json(cls, text, tokenizer=tokenizer, hash_key=hash_key)

    def token(self, store: NumberedStore | None = None) -> bytes:
        """What a gateway signs and hands around: 4,096 bytes at most (SPEC-007).

        It has the settings, the counters, coverage, words, and a SHA-256 of all of it and of the sub-queries. The facts
        of the calibrated mode's direction are in it too, and the packed facts under `exclude_packed` or a
        `packed_penalty`. It has no texts, no embeddings and no blacklist. Of the outputs that are
        kept it has a SHA-256, and of the last envelope what exit 3 said.

        Args:
            store: The `FactStore` or `ShardedStore` of the session's facts. They are named by their numbers there,
                about 2 bytes each. None names facts by their ids.

        Returns:
            A head of canonical JSON in ASCII, a newline, and binary data. Equal states give equal bytes.

        Raises:
            ValueError: If 4,096 bytes do not suffice. `token_needs_blob` says so in advance.
            EmbeddingModelMismatch: If the store is of another model.
        """
        return _token.token(self, store)

    def token_needs_blob(self, store: NumberedStore | None = None) -> bool:
        """Whether the session as it is now needs a blob beside its token. See `token_and_blob`."""
        return _token.token_and_blob(self, store).blob is not None

    def token_and_blob(self, store: NumberedStore | None = None) -> SessionToken:
        """The token, and the rest of the session where 4,096 bytes do not suffice.

        The token has the SHA-256 of the blob, so who signs the token signs both.

        Args:
            store: As in `token`.

        Returns:
            `token`: bytes, 4,096 at most. `blob`: bytes for `from_token`, 4 MiB at most; None where the token has all.

        Raises:
            ValueError: If the id and the settings alone exceed a token, or the rest a blob. Use `to_json` then.
            EmbeddingModelMismatch: If the store is of another model.
        """
        return _token.token_and_blob(self, store)

    @classmethod
    def from_token(
        cls,
        token: bytes,
        sub_queries: Iterable[SubQuery],
        *,
        embedding_model: str,
        guard: NGramGuard | None = None,
        store: NumberedStore | None = None,
        blob: bytes | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Self:
        """The session behind a token, given the task's sub-queries again.

        A fact that was upserted since is the same fact. A fact that was removed since is left out: if its id is added
        again, that is a new fact.

        Args:
            token: What `token` or `token_and_blob` returned.
            sub_queries: Those of the session, in the same order.
            embedding_model: The session's.
            guard: The blacklist so far, which the token cannot hold (see `NGramGuard.from_hashes`). None starts an
                empty one, or none where the session had none.
            store: The store whose numbers the token uses, as it is now. None where it was made without one.
            blob: What `token_and_blob` returned beside the token.
            outputs: `session.outputs`, needed where the session keeps them: the token has only their digest (R40).

        Raises:
            EmbeddingModelMismatch: For another model.
            ValueError: For other sub-queries or outputs, another store or blob, and for anything that `token` does not
                write.
                `StoreBehind` where the store has not seen all facts of the token yet.
        """
        rest: dict[str, Any] = {"guard": guard, "store": store, "blob": blob, "outputs": outputs}
        return _token.from_token(cls, token, sub_queries, embedding_model=embedding_model, **rest)

    def _set_task(self, items: tuple[SubQuery, ...]) -> None:
        """Take these sub-queries, which are checked, for the task."""
        embeddings = np.stack([item.embedding for item in items])
        embeddings.setflags(write=False)
        texts = "\0".join(item.text for item in items).encode("utf-8", "surrogatepass")
        key = hashlib.sha256(embeddings.tobytes() + texts).hexdigest()
        self._index = {item.id: i for i, item in enumerate(items)}
        self._embeddings = embeddings
        self.__dict__.update(sub_queries=items, dim=embeddings.shape[1], task_key=key)

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
        """What is not addressed, or not to the depth that takes it out (R8, R36)."""
        depths, enough = _depths(coverage), self.settings.residual_depth - EXIT_SLACK
        return tuple(item for item in self.sub_queries if depths.get(item.id, -1.0) < enough)

    def _known_test(self, state: SessionState, envelope: PackedContext | None) -> EnvelopeTest | None:
        """What exit 3 says of this envelope, of the last one for None, None where there was none (R37).

        An envelope that is empty for another reason than the store says nothing (R39).
        """
        last = state.last_envelope
        if envelope is None or envelope.misfit is not None:
            return last
        ranking = envelope.ranking
        ratio, exhausted = self.settings.exhaustion_of(envelope)
        if not exhausted and last is not None and last.detail and ranking.newest <= last.newest:
            return last
        detail = self.settings.why_exhausted(envelope, ratio, bool(state.packed)) if exhausted else ""
        return EnvelopeTest(ratio, detail[:_LONGEST_DETAIL], ranking.newest)

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

    def _warn_of_importance(self, envelope: PackedContext) -> None:
        """R11: once, when importance alone would end window 1 as if the store were exhausted."""
        importance = envelope.ranking.importance[envelope.ranking.relevance > 0.0]
        if self._warned or not self.settings.scores_exhaust or not len(importance):
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
        gate, unit = self.settings.gate, self.settings.unit
        advice = "A gate measures the embedding model as much as relevance: see gate_report() or `cdr gate`"
        if passing == 0 and facts and k != 0 and best is not None and not self._warned_of_none:
            largest = best()
            self._warned_of_none = True
            shown = f"{largest:.3f}" if round(largest, 3) != round(gate, 3) else repr(largest)
            if largest >= gate:
                advice = 'The index is approximate and missed it: use kind="scan", or a larger nprobe'
            warn(f"0 of {facts} facts reach the gate of {gate:g}{unit}: {self.settings.best_value(shown)}. {advice}")
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
        if branch.settings.keep_outputs != self.settings.keep_outputs:
            raise ValueError(f"{name} and this session must both keep outputs or both keep none")
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
            and state.outputs[: len(base.outputs)] == base.outputs
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


def _last_of(base: SessionState, branches: Sequence[SessionState]) -> EnvelopeTest | None:
    """The last envelope after a fan-out: the store has something new as long as a branch found something."""
    found = [state.last_envelope for state in branches if state.last_envelope != base.last_envelope]
    tested = [test for test in found if test is not None]
    useful = [test for test in tested if not test.detail]
    return (useful or tested)[-1] if tested else base.last_envelope


def _depths(coverage: Iterable[CoverageEntry]) -> dict[str, float]:
    """How thoroughly each sub-query was addressed: the sum of the depths reported for it, at most 1."""
    reported: dict[str, list[float]] = {}
    for entry in coverage:
        reported.setdefault(entry.sub_query_id, []).append(entry.depth_weight)
    return {id: min(1.0, math.fsum(depths)) for id, depths in reported.items()}


def _items(sub_queries: Iterable[SubQuery]) -> tuple[SubQuery, ...]:
    items = tuple(sub_queries)
    for item in items:
        if not isinstance(item, SubQuery):
            raise TypeError(f"sub_queries must hold SubQuery objects, got {type(item).__name__}")
    return items


def _checked_items(sub_queries: Iterable[SubQuery]) -> tuple[SubQuery, ...]:
    """The sub-queries of a task: at least one, with ids of their own, of one dimension."""
    items = _items(sub_queries)
    if not items:
        raise ValueError("a session needs at least one sub-query, got none")
    ids = [item.id for item in items]
    if len(set(ids)) < len(ids):
        raise ValueError(f"sub-query ids must be unique, got {ids}")
    dim = len(items[0].embedding)
    for item in items:
        if len(item.embedding) != dim:
            raise ValueError(
                f"all sub-queries must have one dimension: {items[0].id!r} has {dim}, "
                f"{item.id!r} has {len(item.embedding)}"
            )
    return items


def _check_envelope(envelope: object) -> None:
    if not isinstance(envelope, PackedContext):
        advice = ": pack it first, as pack_facts(ranking, token_budget)" if type(envelope).__name__ == "Ranking" else ""
        raise TypeError(f"envelope: expected an Envelope, got {type(envelope).__name__}{advice}")
