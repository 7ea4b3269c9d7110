"""What the calibrated mode asks of a store: z-scores, words, the task's own direction, documents, as columns.

    asked = ask(query, retriever, session, session.state, view)
    cdr_score(view.blocks, asked.columns, ...)

Whatever does not change from window to window is made once per task and version of the store, and kept with the
retriever. `reference.calibrated_rank` says the same plainly.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from cdr_kernel import _C
from cdr_kernel.arrays import Float64, Int64, as_vector
from cdr_kernel.calibrate import Calibration
from cdr_kernel.columns import RESIDUAL, Addend, Columns, coverage_centroid
from cdr_kernel.constants import FEEDBACK_FACTS, NO_DEVIATION, SOURCE_REACH, SOURCE_SHRINKAGE
from cdr_kernel.lexical import SparseSums, WordCounts, above_mean, words
from cdr_kernel.retrieve import Retriever
from cdr_kernel.score import best_first
from cdr_kernel.session import Session
from cdr_kernel.store import StoreView
from cdr_kernel.task import Calibrated, Feedback, SessionState

_TASKS_KEPT = 16  # each under two names
_CHUNK = 65536


@dataclass(frozen=True, eq=False)
class Asked:
    """Columns of one window. In the calibrated mode `scored` are those of the sub-queries, the query and the others
    are gates alone; feedback: what fixes the task's direction, None where there is none."""

    columns: Columns
    scored: slice
    feedback: Feedback | None


@dataclass(frozen=True, eq=False)
class Evidence:
    """Of one task in one version of the facts, wherever they are. units [S, D]: the sub-queries; scale, shift [S]: of
    z; word_scale, word_shift [S]: of the BM25 of `texts`, whose words have these counts, weight included; feedback: the
    session's, or what it will be; shared_scale, shared_shift: of its words, which have shared_counts."""

    units: Float64
    scale: Float64
    shift: Float64
    texts: tuple[str, ...]
    counts: WordCounts | None
    word_scale: Float64
    word_shift: Float64
    feedback: Feedback | None = None
    shared_counts: WordCounts | None = None
    shared_scale: float = 0.0
    shared_shift: float = 0.0


Terms: TypeAlias = "tuple[tuple[str, float], ...]"
"""Words as `lexical.words` leaves them, each with a weight."""

Addends: TypeAlias = "tuple[tuple[Int64, Float64] | None, ...]"
"""What words and documents add to each sub-query's column: (rows, values)."""


class Facts(Protocol):
    """One version of the facts, as evidence is gathered of them."""

    def calibration(self) -> Calibration:
        """Of all facts."""

    def word_counts(self, texts: tuple[str, ...]) -> WordCounts:
        """Of all facts."""

    def word_sums(self, texts: tuple[str, ...], counts: WordCounts) -> list[SparseSums]:
        """Of the BM25 of each text over all facts."""

    def best(self, evidence: Evidence) -> tuple[tuple[str, ...], Float64]:
        """Ids and unit vectors [M, D] of the 5 best facts of each sub-query, each fact once, by sequence."""

    def vectors(self, ids: tuple[str, ...]) -> Float64:
        """Unit vectors [M, D] of those of these facts that are there, by sequence."""

    def texts(self, ids: tuple[str, ...]) -> list[str]:
        """Texts of those of these facts that are there, by sequence."""

    def term_counts(self, terms: tuple[str, ...]) -> WordCounts:
        """``word_counts`` of single words."""

    def term_sums(self, asked: tuple[Terms, ...], counts: WordCounts) -> list[SparseSums]:
        """Of the weighted BM25 of each over all facts."""


@dataclass(frozen=True, eq=False)
class _Here:
    """The facts of a view."""

    retriever: Retriever
    view: StoreView

    def calibration(self) -> Calibration:
        return self.retriever.moments.of(self.view)

    def word_counts(self, texts: tuple[str, ...]) -> WordCounts:
        return self.retriever.lexical.counts(self.view, texts)

    def word_sums(self, texts: tuple[str, ...], counts: WordCounts) -> list[SparseSums]:
        return word_sums(self.retriever, self.view, texts, counts)

    def best(self, evidence: Evidence) -> tuple[tuple[str, ...], Float64]:
        found = best_rows(evidence, word_addends(evidence, self.retriever, self.view), self.view)
        rows = np.unique(np.concatenate([rows for _, rows in found]))
        return tuple(map(self.view.id_of, rows.tolist())), unit_rows(self.view, rows)

    def vectors(self, ids: tuple[str, ...]) -> Float64:
        return unit_rows(self.view, rows_of(self.view, ids))

    def texts(self, ids: tuple[str, ...]) -> list[str]:
        return self.view.texts(rows_of(self.view, ids).tolist())

    def term_counts(self, terms: tuple[str, ...]) -> WordCounts:
        return self.retriever.lexical.term_counts(self.view, terms)

    def term_sums(self, asked: tuple[Terms, ...], counts: WordCounts) -> list[SparseSums]:
        return term_sums(self.retriever, self.view, asked, counts)


def ask(query: Any, retriever: Retriever, session: Session, state: SessionState, view: StoreView) -> Asked:
    """The columns of a session for its next window; in mode "spec" those of `Session.columns`.

    query: [D] of the session's model; ValueError for another dimension, a zero or a non-finite vector, and where
    store and session differ in dimension.
    """
    parts = session.calibrated
    if parts is None:
        return Asked(session.columns(query, state=state), slice(0, 0), None)
    facts = _Here(retriever, view)
    evidence, addends = _kept(retriever, session, parts, view, facts, state.feedback)
    return asked(query, session, state, facts, view.dim, evidence, addends)


def asked(
    query: Any,
    session: Session,
    state: SessionState,
    facts: Facts,
    dim: int,
    evidence: Evidence,
    addends: Addends | None = None,
) -> Asked:
    """``ask`` of mode "calibrated" for facts that may be elsewhere; their addends, if any, are then added there."""
    parts = session.calibrated
    assert parts is not None
    vector = as_vector(query, session.dim, "query")
    if session.dim != dim:
        raise ValueError(f"query: expected dimension {dim} (that of the store), got {session.dim}")
    calibration = facts.calibration()
    feedback = evidence.feedback
    vectors, scale = evidence.scale[:, None] * evidence.units, evidence.scale
    shift = evidence.shift + evidence.word_shift + evidence.shared_shift
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
        addend=None if addends is None else column_addends(addends, len(gates)),
        factors_above_zero=True,
    )
    return Asked(columns, slice(RESIDUAL, RESIDUAL + count), feedback)


def column_addends(addends: Addends, gates: int = 0) -> Addend:
    """As columns take them: query, coverage, the sub-queries, and so many gates."""
    return Addend.of([None, None, *addends, *[None] * gates])


def _kept(
    retriever: Retriever,
    session: Session,
    parts: Calibrated,
    view: StoreView,
    facts: Facts,
    held: Feedback | None,
) -> tuple[Evidence, Addends]:
    """The evidence and what it adds to single rows, from the retriever where it has it."""
    version = (view.version, view.selection)
    found: tuple[Evidence, Addends] | None = retriever.evidence.get((*task_of(session, parts, held), *version))
    if found is None:
        evidence = gathered(session, parts, facts, held)
        found = evidence, addends_of(evidence, parts, retriever, view)
        for each in (held, evidence.feedback):  # a later window holds what this one found
            keep(retriever, (*task_of(session, parts, each), *version), found)
    return found


def task_of(session: Session, parts: Calibrated, held: Feedback | None) -> tuple[Any, ...]:
    """What tells the evidence of one task from that of another in the same version of the facts."""
    weights = (parts.lexical_weight, parts.feedback_weight, parts.lexical_feedback_weight, parts.source_weight)
    if held is None:
        return (session.task_key, *weights, "")
    direction = b"" if held.direction is None else held.direction.tobytes()
    digest = hashlib.sha256(repr((held.fact_ids, held.words)).encode("utf-8", "surrogatepass") + direction)
    return (session.task_key, *weights, digest.hexdigest())


def keep(retriever: Retriever, key: Any, found: Any) -> None:
    """Keep what a task found with the retriever, for the last few tasks."""
    kept = retriever.evidence
    kept[key] = found
    for old in list(kept)[:-_TASKS_KEPT]:
        kept.pop(old, None)


def gathered(session: Session, parts: Calibrated, facts: Facts, held: Feedback | None = None) -> Evidence:
    """The evidence of a session's task; held: the session's feedback, if it has one."""
    subs = np.stack([item.embedding for item in session.sub_queries])
    units = subs / np.linalg.norm(subs, axis=1, keepdims=True)
    calibration = facts.calibration()
    scale, shift = calibration.scale_shift(units)
    texts = tuple(item.text for item in session.sub_queries)
    word_scale, word_shift = np.zeros(len(units)), np.zeros(len(units))
    counts = None
    if parts.lexical_weight and calibration.count:
        counts = facts.word_counts(texts)
        z = [sums.z(calibration.count) for sums in facts.word_sums(texts, counts)]
        word_scale, word_shift = parts.lexical_weight * np.array(z).T
    evidence = Evidence(units, scale, shift, texts, counts, word_scale, word_shift)
    if held is None:
        unused = parts.source_weight or not (parts.feedback_weight or parts.lexical_feedback_weight)
        if unused or not calibration.count:
            return evidence
        ids, vectors = facts.best(evidence)
        held = _feedback(parts, facts, calibration, ids, vectors)
    elif held.direction is None or held.words is None:
        held = _feedback(parts, facts, calibration, held.fact_ids, facts.vectors(held.fact_ids))
    evidence = replace(evidence, feedback=held)
    if not held.words or parts.source_weight or not calibration.count:
        return evidence
    counts = facts.term_counts(tuple(term for term, _ in held.words))
    (sums,) = facts.term_sums((held.words,), counts)
    spread, moved = sums.z(calibration.count)
    weight = parts.lexical_feedback_weight
    return replace(evidence, shared_counts=counts, shared_scale=weight * spread, shared_shift=weight * moved)


def _feedback(
    parts: Calibrated, facts: Facts, calibration: Calibration, ids: tuple[str, ...], vectors: Float64
) -> Feedback:
    """Of these facts, of which those that are still there have these unit vectors."""
    found: Terms = ()
    if parts.lexical_feedback_weight and len(vectors):
        texts = [words(text) for text in facts.texts(ids)]
        terms = tuple(sorted({term for text in texts for term in text}))
        counts = facts.term_counts(terms)
        sums = facts.term_sums(tuple(((term, 1.0),) for term in terms), counts)
        found = above_mean(texts, terms, counts, sums)
    return Feedback(ids, _direction(vectors, calibration), found)


def addends_of(evidence: Evidence, parts: Calibrated, retriever: Retriever, view: StoreView) -> Addends:
    """What words and documents add to rows of this view."""
    addends = word_addends(evidence, retriever, view)
    if parts.source_weight:
        return _with_sources(evidence, addends, parts.source_weight, view)
    if evidence.shared_counts is None or evidence.feedback is None or not evidence.shared_scale:
        return addends
    rows, values = retriever.lexical.weighted(view, evidence.feedback.words or (), evidence.shared_counts)
    shared = np.zeros(view.rows)
    shared[rows] = evidence.shared_scale * values
    return tuple(_plus(pair, shared) for pair in addends)


def _plus(pair: tuple[Int64, Float64] | None, dense: Float64) -> tuple[Int64, Float64]:
    """An addend and a number for every row."""
    total = dense.copy()
    if pair is not None:
        total[pair[0]] += pair[1]
    rows = np.flatnonzero(total)
    return rows, total[rows]


def term_sums(retriever: Retriever, view: StoreView, asked: tuple[Terms, ...], counts: WordCounts) -> list[SparseSums]:
    """The sums of each one's weighted BM25 over the rows of this view."""
    return [SparseSums.of(retriever.lexical.weighted(view, terms, counts)[1]) for terms in asked]


def word_sums(retriever: Retriever, view: StoreView, texts: tuple[str, ...], counts: WordCounts) -> list[SparseSums]:
    """The sums of each text's BM25 over the rows of this view."""
    return [SparseSums.of(values) for _, values in retriever.lexical.bm25(view, texts, counts=counts)]


def word_addends(evidence: Evidence, retriever: Retriever, view: StoreView) -> Addends:
    """What words add to rows of this view."""
    if evidence.counts is None:
        return (None,) * len(evidence.units)
    found = retriever.lexical.bm25(view, evidence.texts, counts=evidence.counts)
    return tuple(
        (rows, scale * values) if scale else None
        for scale, (rows, values) in zip(evidence.word_scale.tolist(), found, strict=True)
    )


def _values(evidence: Evidence, addends: Addends, view: StoreView, rows: Int64) -> Float64:
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
        addend=column_addends(addends),
    )
    return _C.column_values(view.blocks, view.squared_norms, columns.compiled, rows)[:, 1:]


def best_rows(evidence: Evidence, addends: Addends, view: StoreView) -> list[tuple[Float64, Int64]]:
    """For each sub-query the values and rows of its 5 best facts, ties by sequence."""
    alive = np.flatnonzero(view.alive)
    best = [(np.zeros(0), alive[:0])] * len(evidence.units)
    for start in range(0, len(alive), _CHUNK):
        rows = alive[start : start + _CHUNK]
        for j, found in enumerate(_values(evidence, addends, view, rows).T):
            values, those = np.concatenate([best[j][0], found]), np.concatenate([best[j][1], rows])
            order = best_first(values, those, FEEDBACK_FACTS)
            best[j] = values[order], those[order]
    return best


def _direction(vectors: Float64, calibration: Calibration) -> Float64:
    """The mean of facts' unit vectors less the store's; zeros for no facts."""
    if not len(vectors):
        return np.zeros(len(calibration.mean))
    direction: Float64 = vectors.mean(0) - calibration.mean
    return direction


def unit_rows(view: StoreView, rows: Int64) -> Float64:
    """Unit vectors of these rows, [M, D]."""
    units: Float64 = view.take(rows).astype(np.float64) / np.sqrt(view.squared_norms[rows, None])
    return units


def rows_of(view: StoreView, ids: tuple[str, ...]) -> Int64:
    """Rows of those of these facts that are there, ascending."""
    rows = []
    for id in ids:
        try:
            rows.append(view.row_of(id))
        except KeyError:  # removed since
            continue
    return np.array(sorted(rows), np.int64)


def _with_sources(evidence: Evidence, in_words: Addends, weight: float, view: StoreView) -> Addends:
    """The addends with what a fact's document adds to every column."""
    alive = np.flatnonzero(view.alive)
    places = view.places(alive.tolist())
    known = np.array([place is not None for place in places], np.bool_)
    rows = alive[known]
    if not len(rows):
        return in_words
    names = [place[0] for place in places if place is not None]
    positions = np.array([place[1] for place in places if place is not None])
    _, source = np.unique(np.array(names, object), return_inverse=True)
    order = np.lexsort((rows, positions, source))
    rows, source = rows[order], source[order]
    x = np.concatenate([_values(evidence, in_words, view, rows[i : i + _CHUNK]) for i in range(0, len(rows), _CHUNK)])
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
    for j, pair in enumerate(in_words):
        dense = np.zeros(view.rows)
        dense[rows] = more[:, j]
        addends.append(_plus(pair, dense))
    return tuple(addends)


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
