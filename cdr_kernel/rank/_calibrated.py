"""The calibrated mode: what a window asks of a store, and the ranking of the rows that passed its gate.

`_evidence` gathers what the columns are made of.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.concurrency._forks import cached_property
from cdr_kernel.rank._evidence import (
    Evidence,
    Facts,
    GivenAddend,
    LexicalAddend,
    LocalFacts,
    evidence_of,
    row_addend,
    task_of,
    version_of,
)
from cdr_kernel.rank._ranking import Ranking, StoredNovelty
from cdr_kernel.rank._window_query import SessionQuery, WindowQuery, activations, best_gated, window_query
from cdr_kernel.retrieve import Retriever
from cdr_kernel.retrieve._window_cache import KeptRows
from cdr_kernel.score import Columns, Scores
from cdr_kernel.score._cdr_score import Factors, best_first, ngram_penalty, passing_scores
from cdr_kernel.score._columns import RESIDUAL, coverage_centroid
from cdr_kernel.session import CalibratedSettings, Session
from cdr_kernel.session._task import SessionState
from cdr_kernel.spec.constants import NO_DEVIATION
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.validation._arrays import Float64, Int64, as_vector


@dataclass(frozen=True, eq=False, kw_only=True)
class CalibratedWindow(WindowQuery):
    """`WindowQuery` of the calibrated mode.

    `scored` are the columns of the sub-queries; the query scores nothing.

    Args:
        settings: Those of the session.
        added: What words and documents add for single rows.
    """

    settings: CalibratedSettings
    added: LexicalAddend | GivenAddend | None = None

    def at(self, gate: float) -> CalibratedWindow:
        """The same with another gate."""
        gates, columns = (
            replace(each, gate=np.where(each.gate < np.inf, gate, np.inf)) for each in (self.gates, self.columns)
        )
        return replace(self, gates=gates, columns=columns)

    def scoring(self, rows: Int64) -> Columns:
        """The columns that score these rows, int64 ascending."""
        assert self.added is not None
        return replace(self.columns, addend=row_addend(rows, self.added.of(rows)))

    def values(self, rows: Int64) -> Float64:
        """[M, 1 + S] of these rows, int64 ascending: relevance and the columns of the sub-queries.

        The retriever keeps them from window to window.
        """
        assert isinstance(self.added, LexicalAddend)
        added = self.added
        depends_on = self.columns.query.tobytes() + self.columns.gate.tobytes()

        def make() -> Float64:
            columns = replace(self.columns, addend=row_addend(rows, added.made(rows)))
            return _C.column_values(added.view.blocks, added.view.squared_norms, columns.compiled, rows)

        return added.kept("values", rows, make, depends_on)

    def with_enough(self, rows: Int64, retriever: Retriever, session: Session, view: StoreView) -> CalibratedWindow:
        """This query where enough of these rows, which passed, are there (`CalibratedSettings.min_qualified`).

        Else the query with the gate that so many facts of the view pass. It is kept for the windows to come.
        """
        least = self.settings.min_qualified
        gate = float(self.gates.gate[0])
        passed = int(np.count_nonzero(view.alive[rows]))
        if passed >= least or gate == -np.inf:
            return self
        lower = min(gate, lower_gate(best_gated(self.gates, least, view), least))
        if lower == gate:  # an approximate index missed some
            return self
        retriever.evidence.put(self.gate_key(session, version_of(view)), lower, 0)
        return self.at(lower)

    def gate_key(self, session: Session, version: tuple[Any, ...]) -> tuple[Any, ...]:
        """What tells the gate of one query from another's."""
        query = hashlib.blake2b(self.gates.query.tobytes(), digest_size=16).digest()
        settings = self.settings
        return ("gate", session.task_key, query, settings.gate, settings.min_qualified, settings.gate_on, *version)

    def session_query(
        self, session: Session, state: SessionState, kept: KeptRows, retriever: Retriever, view: StoreView
    ) -> CalibratedQuery:
        """The query together with the rows that passed its gate."""
        return CalibratedQuery(session, state, self, kept, retriever, view)


@window_query.register
def _(
    settings: CalibratedSettings,
    query: Any,
    retriever: Retriever,
    session: Session,
    state: SessionState,
    view: StoreView,
) -> CalibratedWindow:
    facts = LocalFacts(retriever, view)
    evidence = evidence_of(retriever, session, settings, view, facts, state.feedback)
    key = (*task_of(session, settings, evidence.feedback), *version_of(view))
    added = LexicalAddend(evidence, settings, retriever, view, key)
    made = replace(calibrated_window(query, session, settings, state, facts, view.dim, evidence), added=added)
    lower: float | None = retriever.evidence.get(made.gate_key(session, version_of(view)))
    return made if lower is None else made.at(lower)


def calibrated_window(
    query: Any,
    session: Session,
    settings: CalibratedSettings,
    state: SessionState,
    facts: Facts,
    dim: int,
    evidence: Evidence,
) -> CalibratedWindow:
    """The columns of a window over facts that may be elsewhere. What is added for single rows is `added` there.

    Raises:
        ValueError: Where store and session differ in dimension, and for a query of another dimension, zero or not
            finite.
    """
    vector = as_vector(query, session.dim, "query")
    if session.dim != dim:
        raise ValueError(f"query: expected dimension {dim} (that of the store), got {session.dim}")
    calibration = facts.calibration()
    feedback = evidence.feedback
    vectors, scale = evidence.scale[:, None] * evidence.units, evidence.scale
    shift = evidence.shift + evidence.word_shift + evidence.shared_shift
    direction = None if feedback is None or settings.source_weight else feedback.direction
    length = 0.0 if direction is None else float(np.linalg.norm(direction))
    if direction is not None and length > NO_DEVIATION:
        (along,), (moved,) = calibration.scale_shift(direction[None])
        if length > NO_DEVIATION * along:  # else the store does not spread along it: z is 0
            vectors = vectors + settings.feedback_weight * along * (direction / length)
            shift = shift + settings.feedback_weight * moved
            scale = np.linalg.norm(vectors, axis=1)
    flat = ~(scale > 0.0)  # no cosine tells facts apart: any vector does, its scale is 0
    vectors = np.where(flat[:, None], evidence.units, vectors)
    count = len(evidence.units)
    on = count if settings.gate_on == "best" else 0
    (query_scale,), (query_shift,) = calibration.scale_shift(vector[None])
    gates = Columns(
        query=vector,
        coverage=None,
        residual=evidence.units[:on],
        scale=np.concatenate([[query_scale, 0.0], evidence.scale[:on]]),
        shift=np.concatenate([[query_shift, 0.0], evidence.shift[:on]]),
        weight=np.ones(RESIDUAL + on),
        gate=np.array([settings.gate, np.inf, *[settings.gate] * on]),
    )
    columns = Columns(
        query=vector,
        coverage=_centred(session, state) if settings.centred_coverage else None,
        residual=vectors,
        scale=np.concatenate([[query_scale, 2.0], np.where(flat, 0.0, scale)]),
        shift=np.concatenate([[query_shift, 0.0], shift]),
        weight=np.concatenate([[1.0, 1.0], session.need(state)]),
        gate=np.array([settings.gate, *[np.inf] * (1 + count)]),  # so that relevance is exact where it decides
        clamp_novelty=True,
        gate_only=np.array([True, *[False] * (1 + count)]),
        factors_above_zero=True,
    )
    return CalibratedWindow(gates, columns, slice(RESIDUAL, RESIDUAL + count), feedback, settings=settings)


def lower_gate(best: Float64, least: int) -> float:
    """The gate that `least` facts pass, given the values of at least one more, descending; where there are no more than
    that, all pass."""
    return float(best[least - 1]) - NO_DEVIATION if len(best) > least else -np.inf


def _centred(session: Session, state: SessionState) -> Float64 | None:
    """The vector whose dot product with a unit fact is its coverage less its mean cosine to all sub-queries."""
    if not state.coverage:
        return None
    entries = np.stack([entry.embedding for entry in state.coverage])
    centroid = coverage_centroid(entries, np.array([entry.depth_weight for entry in state.coverage]))
    if centroid is None:
        return None
    subs = np.stack([item.embedding for item in session.sub_queries])
    centred: Float64 = centroid - (subs / np.linalg.norm(subs, axis=1, keepdims=True)).mean(0)
    return centred


@dataclass(frozen=True)
class CalibratedQuery(SessionQuery):
    """`SessionQuery` of the calibrated mode."""

    asked: CalibratedWindow

    @property
    def by_relevance_alone(self) -> bool:
        """Never: a score is made of sub-queries."""
        return False

    def _multiplied(self, multiplier: Float64 | None, fresh: npt.NDArray[np.bool_]) -> Float64 | None:
        if fresh.all():
            return multiplier
        penalty = np.where(fresh, 1.0, self.asked.settings.packed_factor)
        return penalty if multiplier is None else penalty * multiplier

    def _best_ranked(
        self, kept: KeptRows, positions: Int64, factors: Factors, k: int | None, new_share: float | None
    ) -> Ranking:
        view, rows = self.view, kept.rows[positions]
        if self.asked.columns.coverage is None:
            scores = self._of_values(positions, factors)
        else:
            scores = passing_scores(view.blocks, view.squared_norms, rows, self.columns, factors)
        best = best_first(scores.score, scores.rows, k)
        ranking = self._ranked(scores.take(best), factors.take(best), len(rows), activations(factors), k)
        novelty = StoredNovelty(view, scores.rows[best], self.state.coverage)
        return replace(
            ranking,
            new_share=new_share,
            by_sub_query=self._by_sub_query(ranking, positions[best]),
            need=tuple(self.asked.columns.weight[self.asked.scored].tolist()),
            feedback=self.asked.feedback,
            novelty_source=novelty if k is None else np.asarray(novelty),
        )

    @cached_property
    def _values(self) -> Float64:
        """[M, 1 + S] of the kept rows: relevance and the columns of the sub-queries."""
        return self.asked.values(self.kept.rows)

    def _of_values(self, positions: Int64, given: Factors) -> Scores:
        """What `passing_scores` makes of the kept rows at these positions, where nothing is covered."""
        assert given.importance is not None
        assert given.ngram_overlap is not None
        values, none = self._values[positions], np.zeros(len(positions))
        weight = self.asked.columns.weight[self.asked.scored]
        pull = weight[0] * values[:, 1]
        for j in range(1, len(weight)):
            each = weight[j] * values[:, 1 + j]
            pull = np.where(each > pull, each, pull)
        strength = given.importance * (1.0 if given.multiplier is None else given.multiplier)
        with np.errstate(over="ignore"):  # infinite, as the compiled routine has it
            base = np.where(pull > 0.0, strength * pull, pull)
        penalty = ngram_penalty(given.ngram_overlap)
        score = np.where(pull > 0.0, base * (1.0 - penalty), base)
        return Scores(self.kept.rows[positions], score, base, values[:, 0], none, pull, np.ones(len(positions)))

    def _by_sub_query(self, ranking: Ranking, positions: Int64) -> Float64:
        """[M, S]: what packing by need goes by, of the kept rows at these positions."""
        x = self._values[positions, 1:]
        factor = ranking.importance * ranking.multiplier * ranking.novelty * (1.0 - ranking.ngram_penalty)
        with np.errstate(over="ignore"):
            by_sub_query: Float64 = np.where(x > 0.0, x * factor[:, None], x)
        return by_sub_query
