"""What the calibrated mode asks of a store: z-scores, words, the task's own direction, documents, as columns.

    asked = ask(query, retriever, session, session.state, view)
    cdr_score(view.blocks, asked.columns, ...)

Whatever does not change from window to window is made once per task and version of the store, and kept with the
retriever. `reference.calibrated_rank` says the same plainly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cdr_kernel import _C
from cdr_kernel.arrays import Float64, Int64, as_vector
from cdr_kernel.calibrate import Calibration
from cdr_kernel.columns import RESIDUAL, Addend, Columns, coverage_centroid
from cdr_kernel.constants import FEEDBACK_FACTS, NO_DEVIATION, SOURCE_REACH, SOURCE_SHRINKAGE
from cdr_kernel.lexical import z_of_sparse
from cdr_kernel.retrieve import Retriever
from cdr_kernel.score import best_first
from cdr_kernel.session import Session
from cdr_kernel.store import StoreView
from cdr_kernel.task import Calibrated, Feedback, SessionState

_TASKS_KEPT = 8
_CHUNK = 65536


@dataclass(frozen=True, eq=False)
class Asked:
    """Columns of one window. In the calibrated mode `scored` are those of the sub-queries, the query and the others
    are gates alone; feedback: what fixes the task's direction, None where there is none."""

    columns: Columns
    scored: slice
    feedback: Feedback | None


@dataclass(frozen=True, eq=False)
class _Evidence:
    """Of one task in one version of a store. units [S, D]; scale, shift [S]: of z; word_shift [S] and addends belong
    to the words and documents; feedback: of a session that has none yet."""

    units: Float64
    scale: Float64
    shift: Float64
    word_shift: Float64
    addends: tuple[tuple[Int64, Float64] | None, ...]
    feedback: Feedback | None


def ask(query: Any, retriever: Retriever, session: Session, state: SessionState, view: StoreView) -> Asked:
    """The columns of a session for its next window; in mode "spec" those of `Session.columns`.

    query: [D] of the session's model; ValueError for another dimension, a zero or a non-finite vector, and where
    store and session differ in dimension.
    """
    parts = session.calibrated
    if parts is None:
        return Asked(session.columns(query, state=state), slice(0, 0), None)
    vector = as_vector(query, session.dim, "query")
    if session.dim != view.dim:
        raise ValueError(f"query: expected dimension {view.dim} (that of the store), got {session.dim}")
    calibration = retriever.moments.of(view)
    evidence = _kept(retriever, session, parts, view, calibration)
    held = state.feedback
    feedback = evidence.feedback if held is None else held
    if feedback is not None and feedback.direction is None:
        feedback = Feedback(feedback.fact_ids, _direction(view, calibration, _rows_of(view, feedback.fact_ids)))

    vectors, scale = evidence.scale[:, None] * evidence.units, evidence.scale
    shift = evidence.shift + evidence.word_shift
    direction = None if feedback is None or parts.source_weight else feedback.direction
    length = 0.0 if direction is None else float(np.linalg.norm(direction))
    if direction is not None and length > NO_DEVIATION:
        (along,), (moved,) = calibration.scale_shift(direction[None])
        if length > NO_DEVIATION * along:  # else the store does not spread along it: z is 0
            vectors = vectors + parts.feedback_weight * along * (direction / length)
            shift = shift + parts.feedback_weight * moved
            scale = np.linalg.norm(vectors, axis=1)
    flat = ~(scale > 0.0)  # no cosine tells facts apart: any vector does, its scale is 0
    vectors = np.where(flat[:, None], evidence.units, vectors)
    count = len(evidence.units)
    gates = evidence.units if parts.gate_on == "best" else evidence.units[:0]
    (query_scale,), (query_shift,) = calibration.scale_shift(vector[None])
    total = RESIDUAL + count + len(gates)
    gate = np.full(total, np.inf)
    gate[0], gate[RESIDUAL + count :] = parts.gate, parts.gate
    gate_only = np.zeros(total, np.bool_)
    gate_only[0], gate_only[RESIDUAL + count :] = True, True
    coverage = _centred(session, state) if parts.centred_coverage else None
    columns = Columns(
        query=vector,
        coverage=coverage,
        residual=np.vstack([vectors, gates]),
        scale=np.concatenate([[query_scale, 2.0], np.where(flat, 0.0, scale), evidence.scale[: len(gates)]]),
        shift=np.concatenate([[query_shift, 0.0], shift, evidence.shift[: len(gates)]]),
        weight=np.concatenate([[1.0, 1.0], session.need(state), np.ones(len(gates))]),
        gate=gate,
        clamp_novelty=True,
        gate_only=gate_only,
        addend=Addend.of([None, None, *evidence.addends, *[None] * len(gates)]),
        factors_above_zero=True,
    )
    return Asked(columns, slice(RESIDUAL, RESIDUAL + count), feedback)


def _kept(
    retriever: Retriever, session: Session, parts: Calibrated, view: StoreView, calibration: Calibration
) -> _Evidence:
    """The evidence, from the retriever where it has it."""
    key = (session.task_key, parts.lexical_weight, parts.feedback_weight, parts.source_weight, view.version)
    found: _Evidence | None = retriever.evidence.get(key)
    if found is None:
        found = _gathered(retriever, session, parts, view, calibration)
        kept = retriever.evidence
        kept[key] = found
        for old in list(kept)[:-_TASKS_KEPT]:
            kept.pop(old, None)
    return found


def _gathered(
    retriever: Retriever, session: Session, parts: Calibrated, view: StoreView, calibration: Calibration
) -> _Evidence:
    subs = np.stack([item.embedding for item in session.sub_queries])
    units = subs / np.linalg.norm(subs, axis=1, keepdims=True)
    scale, shift = calibration.scale_shift(units)
    word_shift = np.zeros(len(units))
    addends: list[tuple[Int64, Float64] | None] = [None] * len(units)
    if parts.lexical_weight and len(view):
        for j, (rows, values) in enumerate(retriever.lexical.bm25(view, [s.text for s in session.sub_queries])):
            word_scale, moved = z_of_sparse(values, len(view))
            word_shift[j] = parts.lexical_weight * moved
            if word_scale:
                addends[j] = (rows, parts.lexical_weight * word_scale * values)
    evidence = _Evidence(units, scale, shift, word_shift, tuple(addends), None)
    if not len(view):
        return evidence
    if parts.source_weight:
        return _with_sources(evidence, parts.source_weight, view)
    if not parts.feedback_weight:
        return evidence
    best = np.unique(np.concatenate(_best_rows(evidence, view)))
    ids = tuple(view.id_of(row) for row in best.tolist())
    feedback = Feedback(ids, _direction(view, calibration, best))
    return _Evidence(units, scale, shift, word_shift, tuple(addends), feedback)


def _values(evidence: _Evidence, view: StoreView, rows: Int64) -> Float64:
    """[M, S] of z and words."""
    count = RESIDUAL + len(evidence.units)
    columns = Columns(
        query=evidence.units[0],
        coverage=None,
        residual=evidence.units,
        scale=np.concatenate([[0.0, 0.0], evidence.scale]),
        shift=np.concatenate([[0.0, 0.0], evidence.shift + evidence.word_shift]),
        weight=np.ones(count),
        gate=np.full(count, np.inf),
        addend=Addend.of([None, None, *evidence.addends]),
    )
    return _C.column_values(view.blocks, view.squared_norms, columns.compiled, rows)[:, 1:]


def _best_rows(evidence: _Evidence, view: StoreView) -> list[Int64]:
    """For each sub-query the rows of its 5 best facts, ties by sequence."""
    alive = np.flatnonzero(view.alive)
    best = [alive[:0]] * len(evidence.units)
    values = [np.zeros(0)] * len(evidence.units)
    for start in range(0, len(alive), _CHUNK):
        rows = alive[start : start + _CHUNK]
        for j, found in enumerate(_values(evidence, view, rows).T):
            both, those = np.concatenate([values[j], found]), np.concatenate([best[j], rows])
            order = best_first(both, those, FEEDBACK_FACTS)
            values[j], best[j] = both[order], those[order]
    return best


def _direction(view: StoreView, calibration: Calibration, rows: Int64) -> Float64:
    """The mean of these facts' unit vectors less the store's; zeros for no facts."""
    if not len(rows):
        return np.zeros(view.dim)
    units = view.take(rows).astype(np.float64) / np.sqrt(view.squared_norms[rows, None])
    direction: Float64 = units.mean(0) - calibration.mean
    return direction


def _rows_of(view: StoreView, ids: tuple[str, ...]) -> Int64:
    rows = []
    for id in ids:
        try:
            rows.append(view.row_of(id))
        except KeyError:  # removed since
            continue
    return np.array(sorted(rows), np.int64)


def _with_sources(evidence: _Evidence, weight: float, view: StoreView) -> _Evidence:
    """The evidence with what a fact's document adds to every column."""
    alive = np.flatnonzero(view.alive)
    places = view.places(alive.tolist())
    known = np.array([place is not None for place in places], np.bool_)
    rows = alive[known]
    if not len(rows):
        return evidence
    names = [place[0] for place in places if place is not None]
    positions = np.array([place[1] for place in places if place is not None])
    _, source = np.unique(np.array(names, object), return_inverse=True)
    order = np.lexsort((rows, positions, source))
    rows, source = rows[order], source[order]
    x = np.concatenate([_values(evidence, view, rows[i : i + _CHUNK]) for i in range(0, len(rows), _CHUNK)])
    near, total = np.zeros_like(x), np.zeros(len(rows))
    for distance in range(1, SOURCE_REACH + 1):
        first = np.flatnonzero(source[:-distance] == source[distance:])  # empty where there are fewer facts
        second = first + distance
        near[first] += x[second] / distance
        near[second] += x[first] / distance
        total[first] += 1.0 / distance
        total[second] += 1.0 / distance
    facts = np.bincount(source) + SOURCE_SHRINKAGE
    prior = (np.bincount(source, x.max(1)) + np.bincount(source, x.mean(1))) / facts
    more = weight * (near / np.maximum(1.0, total)[:, None] + prior[source][:, None])
    addends = []
    for j, pair in enumerate(evidence.addends):
        dense = np.zeros(view.rows)
        dense[rows] = more[:, j]
        if pair is not None:
            dense[pair[0]] += pair[1]
        at = np.flatnonzero(dense)
        addends.append((at, dense[at]))
    return _Evidence(
        evidence.units, evidence.scale, evidence.shift, evidence.word_shift, tuple(addends), evidence.feedback
    )


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
