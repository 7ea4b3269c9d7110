"""What one window asks of a store, and the rows that passed its gate: in the specification's mode.

    asked = window_query(session.settings, query, retriever, session, session.state, view)
    kept = retriever.qualified([session], [asked.gates], view)
    ranking = asked.session_query(session, state, kept, retriever, view).ranking(k, factors)

`_calibrated` and `_calibrated_query` have the same for the calibrated mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.concurrency._forks import cached_property
from cdr_kernel.rank._ranking import Ranking
from cdr_kernel.retrieve import Retriever
from cdr_kernel.retrieve._window_cache import KeptRows, Shares
from cdr_kernel.score import Columns, Scores
from cdr_kernel.score._cdr_score import Factors, best_first, ngram_penalty, passing_scores
from cdr_kernel.session import Session, SpecSettings
from cdr_kernel.session._task import Feedback, SessionState
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.store._stored_facts import StoredFacts
from cdr_kernel.validation._arrays import Float64, Int64

_CHUNK = 65536
_OVERFLOWS = 2.0**1022  # importance times multiplier, from which a novelty of 2 may make a score infinite


@dataclass(frozen=True, eq=False)
class WindowQuery:
    """What one window asks of a store.

    Args:
        gates: The columns that decide which facts qualify.
        columns: The columns that score them. In the specification's mode they are the gates.
        scored: Which columns score sub-queries one by one. None does in the specification's mode.
        feedback: What fixes the task's direction, None where nothing does.
    """

    gates: Columns
    columns: Columns
    scored: slice = field(default_factory=lambda: slice(0, 0))
    feedback: Feedback | None = None

    def scoring(self, rows: Int64) -> Columns:
        """The columns that score these rows, int64 ascending."""
        return self.columns

    def with_enough(self, rows: Int64, retriever: Retriever, session: Session, view: StoreView) -> Self:
        """This query, with a lower gate where the mode asks for one because only these rows passed."""
        return self

    def session_query(
        self, session: Session, state: SessionState, kept: KeptRows, retriever: Retriever, view: StoreView
    ) -> SessionQuery:
        """The query together with the rows that passed its gate."""
        return SessionQuery(session, state, self, kept, retriever, view)


@singledispatch
def window_query(
    settings: object, query: Any, retriever: Retriever, session: Session, state: SessionState, view: StoreView
) -> WindowQuery:
    """What a session asks for its next window.

    Args:
        settings: Those of the session. They choose the mode.
        query: [D], of the session's model.
        retriever: What holds the facts.
        session: The session.
        state: Its state.
        view: The version of the store.

    Raises:
        ValueError: For another dimension, and for a query that is zero or not finite.
    """
    raise TypeError(f"settings: expected those of a session, got {type(settings).__name__}")


@window_query.register
def _(
    settings: SpecSettings, query: Any, retriever: Retriever, session: Session, state: SessionState, view: StoreView
) -> WindowQuery:
    columns = session.columns(query, state=state)
    return WindowQuery(columns, columns)


@dataclass(frozen=True)
class SessionQuery:
    """One session's query of one version of the store, and the rows that passed its gate."""

    session: Session
    state: SessionState
    asked: WindowQuery
    kept: KeptRows
    retriever: Retriever
    view: StoreView
    likely: tuple[int, Int64] | None = None
    """How many of the kept rows are alive, and the positions of those that may be among the k best, if known."""

    @cached_property
    def columns(self) -> Columns:
        """What scores the kept rows."""
        return self.asked.scoring(self.kept.rows)

    @property
    def by_relevance_alone(self) -> bool:
        """Whether a score is importance x multiplier x relevance, and nothing is left out."""
        columns, guard = self.asked.columns, self.state.guard
        return (
            columns.coverage is None
            and len(columns.residual) == 0
            and not (self.session.settings.reads_packed and self.state.packed)
            and (guard is None or len(guard) == 0)
        )

    def ranking(self, k: int | None, factors: Float64 | None) -> Ranking:
        """The k best (all for None)."""
        ranking, passed, _ = self.counted(k, factors)
        if passed < (1 if k is None else k):
            self.session.warn_of_gate(passed, len(self.view), k, self._best_of_the_gate)
        return ranking

    def _best_of_the_gate(self) -> float:
        """The largest value of any fact in a gated column, whatever the gate; there is at least one fact."""
        gates, codes = self.asked.gates.gates_alone(), self.retriever.codes(self.view)
        if codes is None or not gates.plain:
            return float(best_gated(gates, 0, self.view)[0])
        rows = codes.top(gates, self.view, None, 1)  # all of them where no value is above zero
        return float(_C.column_values(self.view.blocks, self.view.squared_norms, gates.compiled, rows).max())

    def counted(self, k: int | None, factors: Float64 | None) -> tuple[Ranking, int, int]:
        """The k best (all for None), how many facts passed the gate, and how many of them were never packed."""
        if self.likely is not None:
            return self._of_likely(*self.likely, k, factors)
        view, settings, guard = self.view, self.session.settings, self.state.guard
        kept = self.kept if guard is None else self.retriever.cache.with_overlap(self.session, self.kept, guard, view)
        positions = np.flatnonzero(view.alive[kept.rows])
        fresh, passed = np.ones(len(positions), np.bool_), len(positions)
        if settings.reads_packed and self.state.packed:
            fresh = ~view.holds(kept.rows[positions], self.state.packed)
        new = int(np.count_nonzero(fresh))
        if settings.drops_packed:
            positions, fresh = positions[fresh], fresh[fresh]
        rows = kept.rows[positions]
        overlap = np.zeros(len(rows), np.int32) if kept.overlap is None else kept.overlap[positions]
        multiplier = self._multiplied(None if factors is None else factors[rows], fresh)
        given = Factors(view.importance[rows], multiplier, overlap)
        ranking = self._best_ranked(kept, positions, given, k, new / passed if passed else None)
        return ranking, passed, new

    def _multiplied(self, multiplier: Float64 | None, fresh: npt.NDArray[np.bool_]) -> Float64 | None:
        """The multiplier with what the mode takes from packed facts. fresh: which were never packed."""
        return multiplier

    def _best_ranked(
        self, kept: KeptRows, positions: Int64, factors: Factors, k: int | None, new_share: float | None
    ) -> Ranking:
        """The ranking of the kept rows at these positions. new_share: of those that passed, the share never packed."""
        rows, chosen = kept.rows[positions], np.arange(len(positions))
        if k is not None and k < len(rows):
            chosen = self._likely_best(kept, positions, factors, k)
        given = factors.take(chosen)
        view = self.view
        scores = passing_scores(view.blocks, view.squared_norms, rows[chosen], self.columns, given)
        best = best_first(scores.score, scores.rows, k)
        return self._ranked(scores.take(best), given.take(best), len(rows), activations(factors), k)

    def _of_likely(
        self, passed: int, positions: Int64, k: int | None, factors: Float64 | None
    ) -> tuple[Ranking, int, int]:
        """What `counted` says, where all that may be among the k best is known."""
        view, rows = self.view, self.kept.rows[positions]
        guard = self.state.guard  # empty, but it refuses a store of other tokens
        overlap = np.zeros(len(rows), np.int32) if guard is None else guard.overlap_rows(view.tokens, rows)
        given = Factors(view.importance[rows], None if factors is None else factors[rows], overlap)
        scores = passing_scores(view.blocks, view.squared_norms, rows, self.asked.columns, given)
        best = best_first(scores.score, rows, k)
        return self._ranked(scores.take(best), given.take(best), passed, 0, k), passed, passed

    def _ranked(self, scores: Scores, given: Factors, qualified: int, guard_activations: int, k: int | None) -> Ranking:
        """The ranking of these facts, best first."""
        assert given.importance is not None
        assert given.ngram_overlap is not None
        return Ranking(
            facts=StoredFacts(self.view, scores.rows) if k is None else tuple(self.view.facts(scores.rows)),
            score=scores.score,
            score_without_guard=scores.score_without_guard,
            relevance=scores.relevance,
            coverage=scores.coverage,
            residual_pull=scores.residual_pull,
            novelty=scores.novelty,
            ngram_overlap=given.ngram_overlap,
            importance=given.importance,
            multiplier=np.ones(len(scores)) if given.multiplier is None else given.multiplier,
            qualified=qualified,
            guard_activations=guard_activations,
            coverage_depth=len(self.state.coverage),
            store_version=self.view.version,
            considered=len(self.view),
            filter=self.view.filter,
            newest=self.view.newest,
        )

    def _likely_best(self, kept: KeptRows, positions: Int64, factors: Factors, k: int) -> Int64:
        """Indices into positions that may hold the k best, ascending: from kept cosines, else from the codes."""
        importance, multiplier, overlap = factors.importance, factors.multiplier, factors.ngram_overlap
        assert importance is not None
        assert overlap is not None
        if k == 0:
            return positions[:0]
        strength = importance if multiplier is None else importance * multiplier
        if strength.max() > _OVERFLOWS:  # which no bound of a score foresees
            return np.arange(len(positions))
        columns = self.asked.columns
        by_relevance = columns.coverage is None and len(columns.residual) == 0
        if by_relevance and kept.low is not None:
            return kept.likely(positions, strength, _after_guard(overlap), k)
        codes = self.retriever.codes(self.view)
        if codes is not None and (by_relevance or not kept.worth_values):
            return codes.top(columns, self.view, kept.rows[positions], k, importance, multiplier, overlap)
        shares = np.zeros(len(self.session.sub_queries))
        entries = self.state.coverage
        total = math.fsum(entry.depth_weight for entry in entries)
        index = {item.id: j for j, item in enumerate(self.session.sub_queries)}
        for entry in entries if total else ():
            shares[index[entry.sub_query_id]] += entry.depth_weight / total
        pulling = self.state.residual if len(columns.residual) else ()
        remaining = np.array([index[item.id] for item in pulling], np.int64)
        kept = self.retriever.cache.with_values(self.session, kept, columns, self.session.embeddings, self.view)
        covered = Shares(shares, len(entries))
        chosen = kept.best(positions, columns, covered, remaining, strength * _after_guard(overlap), k)
        return np.searchsorted(positions, chosen)


def with_likely(
    queries: list[SessionQuery], view: StoreView, factors: Float64 | None, k: int | None
) -> list[SessionQuery]:
    """The same; what may be among the k best is known, in one call, of those that score by the scan's relevance."""
    plain, found = [], []
    for i, each in enumerate(queries):
        kept = each.kept
        if each.by_relevance_alone and kept.low is not None and kept.high is not None:
            plain.append(i)
            found.append((kept.rows, kept.low, kept.high))
    if k is None or not plain:
        return queries
    out = list(queries)
    for i, likely in zip(plain, _C.likely(found, view.alive, view.importance, factors, k), strict=True):
        out[i] = replace(out[i], likely=likely)
    return out


def best_gated(gates: Columns, most: int, view: StoreView) -> Float64:
    """The largest values that facts of the view have in their best gated column, so many and one more, descending."""
    best = np.zeros(0)
    alive = np.flatnonzero(view.alive)
    for start in range(0, len(alive), _CHUNK):
        rows = alive[start : start + _CHUNK]
        values = _C.column_values(view.blocks, view.squared_norms, gates.compiled, rows).max(axis=1)
        best = np.sort(np.concatenate([best, values]))[::-1][: most + 1]
    return best


def activations(factors: Factors) -> int:
    """How many of these facts get an n-gram penalty (§8.3)."""
    assert factors.ngram_overlap is not None
    return int(np.count_nonzero(factors.ngram_overlap))


def _after_guard(overlap: npt.NDArray[np.int32]) -> Float64 | float:
    """What the n-gram penalty leaves of a score."""
    return 1.0 - ngram_penalty(overlap) if overlap.any() else 1.0
