"""What the calibrated mode asks of a store: z-scores, words, the task's own direction, documents, as columns.

    asked = ask(query, retriever, session, session.state, view)
    rows = retriever.candidates(asked.gates, view)
    passing_scores(view.blocks, view.squared_norms, rows, asked.scoring(rows), ...)

Whatever does not change from window to window is made once per task and version of the store, and kept with the
retriever as long as there is room. What words and documents add is made for the rows that passed the gate alone.
`reference.calibrated_rank` says the same plainly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from cdr_kernel import _C
from cdr_kernel.retrieve import Retriever
from cdr_kernel.retrieve._bm25 import SparseSums, WordCounts, above_mean, words
from cdr_kernel.retrieve._calibration import Calibration
from cdr_kernel.retrieve._device_index import DeviceIndex
from cdr_kernel.retrieve._scan_index import ScanIndex
from cdr_kernel.score import Columns
from cdr_kernel.score._cdr_score import best_first
from cdr_kernel.score._columns import RESIDUAL, Addend, coverage_centroid
from cdr_kernel.session import Session
from cdr_kernel.session._task import Calibrated, Feedback, SessionState
from cdr_kernel.spec.constants import FEEDBACK_FACTS, NO_DEVIATION, SOURCE_REACH, SOURCE_SHRINKAGE
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.validation._arrays import Float64, Int64, as_vector

_CHUNK = 65536
_SOME = 256  # facts with the most words in common, for a bound
_SAMPLE = 4096  # facts at even distances, for the same
_SLACK = 1e-9  # far above what rounding moves a value by, far below what tells facts apart
_WORD = 128  # bytes of a word and its number, about

Sparse: TypeAlias = "tuple[Int64, Float64]"
"""Rows, ascending, and a number for each; 0 for all others."""


@dataclass(frozen=True, eq=False)
class Asked:
    """What one window asks. gates: who qualifies; columns: what scores those who do, in mode "spec" the same.

    In the calibrated mode `scored` are the columns of the sub-queries, and the query's scores nothing; feedback: what
    fixes the task's direction, None where there is none; added: what is added for single rows.
    """

    gates: Columns
    columns: Columns
    scored: slice
    feedback: Feedback | None
    added: Added | Given | None = None

    def at(self, gate: float) -> Asked:
        """The same with another gate."""
        gates, columns = (
            replace(each, gate=np.where(each.gate < np.inf, gate, np.inf)) for each in (self.gates, self.columns)
        )
        return replace(self, gates=gates, columns=columns)

    def scoring(self, rows: Int64) -> Columns:
        """The columns that score these rows, int64 ascending."""
        if self.added is None:
            return self.columns
        return replace(self.columns, addend=_addend(rows, self.added.of(rows)))

    def values(self, rows: Int64) -> Float64 | None:
        """[M, 1 + S] of these rows, int64 ascending: relevance and the columns of the sub-queries, which the retriever
        keeps from window to window; None in mode "spec"."""
        if self.added is None:
            return None
        assert isinstance(self.added, Added)
        asked = self.columns.query.tobytes() + self.columns.gate.tobytes()
        return self.added.kept("values", rows, lambda: self._values(rows), asked)

    def _values(self, rows: Int64) -> Float64:
        assert isinstance(self.added, Added)
        columns = replace(self.columns, addend=_addend(rows, self.added.made(rows)))
        return _C.column_values(self.added.view.blocks, self.added.view.squared_norms, columns.compiled, rows)


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

    @property
    def nbytes(self) -> int:
        """Bytes, about."""
        held = self.feedback
        arrays = [self.units, self.scale, self.shift, self.word_scale, self.word_shift]
        arrays += [held.direction] if held is not None and held.direction is not None else []
        known = [counts.frequency for counts in (self.counts, self.shared_counts) if counts is not None]
        named = [()] if held is None else [held.fact_ids, held.words or ()]
        return sum(a.nbytes for a in arrays) + _WORD * sum(map(len, [self.texts, *known, *named]))

    def one(self, j: int) -> Evidence:
        """Of one sub-query alone, as far as z and words go."""
        here = slice(j, j + 1)
        return replace(
            self,
            units=self.units[here],
            scale=self.scale[here],
            shift=self.shift[here],
            texts=self.texts[here],
            word_scale=self.word_scale[here],
            word_shift=self.word_shift[here],
        )


Terms: TypeAlias = "tuple[tuple[str, float], ...]"
"""Words as `lexical.words` leaves them, each with a weight."""


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
    """The facts of a view. known: rows by id of facts that it found itself, so that the view need not index all ids."""

    retriever: Retriever
    view: StoreView
    known: dict[str, int] = field(default_factory=dict)

    def calibration(self) -> Calibration:
        return self.retriever.moments.of(self.view)

    def word_counts(self, texts: tuple[str, ...]) -> WordCounts:
        return self.retriever.lexical.counts(self.view, texts)

    def word_sums(self, texts: tuple[str, ...], counts: WordCounts) -> list[SparseSums]:
        return word_sums(self.retriever, self.view, texts, counts)

    def best(self, evidence: Evidence) -> tuple[tuple[str, ...], Float64]:
        found = best_rows(evidence, self.retriever, self.view)
        rows = np.unique(np.concatenate([rows for _, rows in found]))
        ids = self.view.ids_at(rows)
        self.known.update(zip(ids, rows.tolist(), strict=True))
        return tuple(ids), unit_rows(self.view, rows)

    def vectors(self, ids: tuple[str, ...]) -> Float64:
        return unit_rows(self.view, self._rows_of(ids))

    def texts(self, ids: tuple[str, ...]) -> list[str]:
        return self.view.texts(self._rows_of(ids).tolist())

    def _rows_of(self, ids: tuple[str, ...]) -> Int64:
        if all(id in self.known for id in ids):
            return np.array(sorted(self.known[id] for id in ids), np.int64)
        return rows_of(self.view, ids)

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
        columns = session.columns(query, state=state)
        return Asked(columns, columns, slice(0, 0), None)
    facts = _Here(retriever, view)
    evidence = _kept(retriever, session, parts, view, facts, state.feedback)
    added = Added(evidence, parts, retriever, view, (*task_of(session, parts, evidence.feedback), *_version(view)))
    made = replace(asked(query, session, state, facts, view.dim, evidence), added=added)
    lower: float | None = retriever.evidence.get(gate_key(made, session, _version(view)))
    return made if lower is None else made.at(lower)


def with_enough(made: Asked, rows: Int64, retriever: Retriever, session: Session, view: StoreView) -> Asked:
    """What was asked, where enough of these rows, which passed, are there (`Calibrated.min_qualified`); else with the
    gate that so many facts of the view pass, which is kept for the windows to come."""
    if session.calibrated is None:
        return made
    least = session.calibrated.min_qualified
    gate = float(made.gates.gate[0])
    passed = int(np.count_nonzero(view.alive[rows]))
    if passed >= least or gate == -np.inf:
        return made
    lower = min(gate, lower_gate(best_z(made.gates, least, view), least))
    if lower == gate:  # an approximate index missed some
        return made
    retriever.evidence.put(gate_key(made, session, _version(view)), lower, 0)
    return made.at(lower)


def best_z(gates: Columns, most: int, view: StoreView) -> Float64:
    """The largest values that facts of the view have in their best gated column, so many and one more, descending."""
    best = np.zeros(0)
    alive = np.flatnonzero(view.alive)
    for start in range(0, len(alive), _CHUNK):
        rows = alive[start : start + _CHUNK]
        values = _C.column_values(view.blocks, view.squared_norms, gates.compiled, rows).max(axis=1)
        best = np.sort(np.concatenate([best, values]))[::-1][: most + 1]
    return best


def lower_gate(best: Float64, least: int) -> float:
    """The gate that `least` facts pass, given the values of at least one more, descending; where there are no more than
    that, all pass."""
    return float(best[least - 1]) - NO_DEVIATION if len(best) > least else -np.inf


def gate_key(made: Asked, session: Session, version: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells the gate of one question from another's."""
    parts = session.calibrated
    assert parts is not None
    query = hashlib.blake2b(made.gates.query.tobytes(), digest_size=16).digest()
    return ("gate", session.task_key, query, parts.gate, parts.min_qualified, parts.gate_on, *version)


def asked(query: Any, session: Session, state: SessionState, facts: Facts, dim: int, evidence: Evidence) -> Asked:
    """``ask`` of mode "calibrated" for facts that may be elsewhere; what is added for single rows is `added` there."""
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
    on = count if parts.gate_on == "best" else 0
    (query_scale,), (query_shift,) = calibration.scale_shift(vector[None])
    gates = Columns(
        query=vector,
        coverage=None,
        residual=evidence.units[:on],
        scale=np.concatenate([[query_scale, 0.0], evidence.scale[:on]]),
        shift=np.concatenate([[query_shift, 0.0], evidence.shift[:on]]),
        weight=np.ones(RESIDUAL + on),
        gate=np.array([parts.gate, np.inf, *[parts.gate] * on]),
    )
    columns = Columns(
        query=vector,
        coverage=_centred(session, state) if parts.centred_coverage else None,
        residual=vectors,
        scale=np.concatenate([[query_scale, 2.0], np.where(flat, 0.0, scale)]),
        shift=np.concatenate([[query_shift, 0.0], shift]),
        weight=np.concatenate([[1.0, 1.0], session.need(state)]),
        gate=np.array([parts.gate, *[np.inf] * (1 + count)]),  # so that relevance is exact where it decides
        clamp_novelty=True,
        gate_only=np.array([True, *[False] * (1 + count)]),
        factors_above_zero=True,
    )
    return Asked(gates, columns, slice(RESIDUAL, RESIDUAL + count), feedback)


@dataclass(frozen=True, eq=False)
class Added:
    """What words and documents add to the columns of a task's sub-queries. key: names the evidence and the version."""

    evidence: Evidence
    parts: Calibrated
    retriever: Retriever
    view: StoreView
    key: tuple[Any, ...]

    def of(self, rows: Int64) -> Float64:
        """[M, S] for these rows, int64 ascending; kept with the retriever."""
        return self.kept("added", rows, lambda: self.made(rows))

    def kept(self, name: str, rows: Int64, make: Callable[[], Float64], asked: bytes = b"") -> Float64:
        """What is made of these rows, from the retriever where it has it. asked: what it depends on beside the task."""
        key = (name, *self.key, hashlib.blake2b(asked + rows.tobytes(), digest_size=16).digest())
        found: Float64 | None = self.retriever.evidence.get(key)
        if found is None:
            found = make()
            self.retriever.evidence.put(key, found, found.nbytes)
        return found

    def made(self, rows: Int64) -> Float64:
        """``of``, made now."""
        evidence, retriever, view = self.evidence, self.retriever, self.view
        total = _of_rows(_words(evidence, retriever, view), rows)
        if self.parts.source_weight:
            total += _taken(self._documents(), rows)
        elif evidence.shared_counts is not None and evidence.feedback is not None and evidence.shared_scale:
            shared = _weighted(retriever, view, evidence.feedback.words or (), evidence.shared_counts)
            total += evidence.shared_scale * _taken(shared, rows)[:, None]
        return total

    def _documents(self) -> tuple[Int64, Float64]:
        key = ("documents", *self.key)
        found: tuple[Int64, Float64] | None = self.retriever.evidence.get(key)
        if found is None:
            found = _of_documents(self.evidence, self.parts.source_weight, self.retriever, self.view)
            self.retriever.evidence.put(key, found, found[0].nbytes + found[1].nbytes)
        return found


@dataclass(frozen=True, eq=False)
class Given:
    """What was `Added` elsewhere to the rows that are asked for, [M, S]."""

    values: Float64

    def of(self, rows: Int64) -> Float64:
        """See `Added`."""
        return self.values


def _addend(rows: Int64, added: Float64) -> Addend:
    """As columns take it: query, coverage, the sub-queries."""
    each = [(rows[values != 0.0], values[values != 0.0]) for values in added.T]
    return Addend.of([None, None, *each])


def _taken(pair: tuple[Int64, Float64], rows: Int64) -> Float64:
    """Of numbers [n] or [n, S] that belong to some rows, ascending, those of these rows, zeros for rows without."""
    known, values = pair
    out = np.zeros((len(rows), *values.shape[1:]))
    if len(known) and len(rows):
        near = slice(*np.searchsorted(known, [rows[0], rows[-1] + 1]).tolist())
        known, values = known[near], values[near]
    if 0 < len(known) < len(rows):  # the fewer are looked for among the more
        at = np.searchsorted(rows, known)
        here = rows[at] == known
        out[at[here]] = values[here]
    elif len(known):
        at = np.minimum(np.searchsorted(known, rows), len(known) - 1)
        here = known[at] == rows
        out[here] = values[at[here]]
    return out


def _version(view: StoreView) -> tuple[Any, ...]:
    return view.version, view.selection


def _kept(
    retriever: Retriever,
    session: Session,
    parts: Calibrated,
    view: StoreView,
    facts: Facts,
    held: Feedback | None,
) -> Evidence:
    """The evidence, from the retriever where it has it."""
    found: Evidence | None = retriever.evidence.get((*task_of(session, parts, held), *_version(view)))
    if found is None:
        found = gathered(session, parts, facts, held)
        for each in (held, found.feedback):  # a later window holds what this one found
            retriever.evidence.put((*task_of(session, parts, each), *_version(view)), found, found.nbytes)
    return found


def task_of(session: Session, parts: Calibrated, held: Feedback | None) -> tuple[Any, ...]:
    """What tells the evidence of one task from that of another in the same version of the facts."""
    weights = (parts.lexical_weight, parts.feedback_weight, parts.lexical_feedback_weight, parts.source_weight)
    if held is None:
        return (session.task_key, *weights, "")
    direction = b"" if held.direction is None else held.direction.tobytes()
    digest = hashlib.sha256(repr((held.fact_ids, held.words)).encode("utf-8", "surrogatepass") + direction)
    return (session.task_key, *weights, digest.hexdigest())


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


def term_sums(retriever: Retriever, view: StoreView, asked: tuple[Terms, ...], counts: WordCounts) -> list[SparseSums]:
    """The sums of each one's weighted BM25 over the rows of this view."""
    if len(asked) == 1:  # of a task's words, and wanted again for what they add
        return [SparseSums.of(_weighted(retriever, view, asked[0], counts)[1])]
    found = []
    for terms in asked:
        if len(terms) == 1 and terms[0][1] == 1.0:
            found.append(retriever.lexical.sums(view, terms[0][0], counts))
        else:
            found.append(SparseSums.of(retriever.lexical.weighted(view, terms, counts)[1]))
    return found


def word_sums(retriever: Retriever, view: StoreView, texts: tuple[str, ...], counts: WordCounts) -> list[SparseSums]:
    """The sums of each text's BM25 over the rows of this view."""
    return [SparseSums.of(values) for _, values in _bm25(retriever, view, texts, counts)]


def _bm25(retriever: Retriever, view: StoreView, texts: tuple[str, ...], counts: WordCounts) -> list[Sparse]:
    """BM25 of each text over the rows of this view; kept, since a first window wants it several times."""
    key = ("words", texts, *_counted(counts), *_version(view))
    found: list[Sparse] | None = retriever.evidence.get(key)
    if found is None:
        found = retriever.lexical.bm25(view, texts, counts=counts)
        retriever.evidence.put(key, found, sum(rows.nbytes + values.nbytes for rows, values in found))
    return found


def _weighted(retriever: Retriever, view: StoreView, terms: Terms, counts: WordCounts) -> Sparse:
    """Weighted BM25 of a task's words, kept likewise."""
    key = ("terms", terms, *_counted(counts), *_version(view))
    found: Sparse | None = retriever.evidence.get(key)
    if found is None:
        found = retriever.lexical.weighted(view, terms, counts)
        retriever.evidence.put(key, found, found[0].nbytes + found[1].nbytes)
    return found


def _counted(counts: WordCounts) -> tuple[Any, ...]:
    return counts.facts, counts.length, tuple(sorted(counts.frequency.items()))


def _words(evidence: Evidence, retriever: Retriever, view: StoreView) -> list[Sparse | None]:
    """What words add to each sub-query's column, None for nothing."""
    if evidence.counts is None:
        return [None] * len(evidence.units)
    found = _bm25(retriever, view, evidence.texts, evidence.counts)
    return [
        (rows, scale * values) if scale else None
        for scale, (rows, values) in zip(evidence.word_scale.tolist(), found, strict=True)
    ]


def _of_rows(words: list[Sparse | None], rows: Int64) -> Float64:
    """[M, S] of these rows."""
    total = np.zeros((len(rows), len(words)))
    for j, pair in enumerate(words):
        if pair is not None:
            total[:, j] = _taken(pair, rows)
    return total


def _values(evidence: Evidence, words: list[Sparse | None], view: StoreView, rows: Int64) -> Float64:
    """[M, S] of z and words; rows ascend."""
    count = RESIDUAL + len(evidence.units)
    columns = Columns(
        query=evidence.units[0],
        coverage=None,
        residual=evidence.units,
        scale=np.concatenate([[0.0, 0.0], evidence.scale]),
        shift=np.concatenate([[0.0, 0.0], evidence.shift + evidence.word_shift]),
        weight=np.ones(count),
        gate=np.full(count, np.inf),
        addend=_addend(rows, _of_rows(words, rows)),
    )
    return _C.column_values(view.blocks, view.squared_norms, columns.compiled, rows)[:, 1:]


def best_rows(evidence: Evidence, retriever: Retriever, view: StoreView) -> list[tuple[Float64, Int64]]:
    """For each sub-query the values and rows of its 5 best facts, ties by sequence."""
    words = _words(evidence, retriever, view)
    codes = retriever.codes(view)
    if codes is not None and len(view) and bool((evidence.scale > 0.0).all()):
        return _best_by_codes(evidence, words, codes, view)
    alive = np.flatnonzero(view.alive)
    best = [(np.zeros(0), alive[:0])] * len(evidence.units)
    for start in range(0, len(alive), _CHUNK):
        rows = alive[start : start + _CHUNK]
        for j, found in enumerate(_values(evidence, words, view, rows).T):
            values, those = np.concatenate([best[j][0], found]), np.concatenate([best[j][1], rows])
            order = best_first(values, those, FEEDBACK_FACTS)
            best[j] = values[order], those[order]
    return best


def _best_by_codes(
    evidence: Evidence, words: list[Sparse | None], codes: ScanIndex | DeviceIndex, view: StoreView
) -> list[tuple[Float64, Int64]]:
    """The same from the codes of a scan: only rows that may be among the 5 best are computed.

    The 5th best of some rows, a sample and those with the most words, is a bound. A scan for all sub-queries finds the
    rows whose cosine alone reaches the bound, or the sample's largest where that is less; to any other row words must
    add what this leaves of the bound.
    """
    shift = evidence.shift + evidence.word_shift
    alive = np.flatnonzero(view.alive)
    sample = alive[np.unique(np.linspace(0, len(alive) - 1, min(len(alive), _SAMPLE)).astype(np.int64))]
    sampled = _values(evidence, [None] * len(words), view, sample)
    each = [evidence.one(j) for j in range(len(evidence.units))]
    alone, enough = [], []
    for j, (one, pair) in enumerate(zip(each, words, strict=True)):
        (unit,), (scale,) = one.units, one.scale
        found, nearest = sampled[:, j], float(sampled[:, j].max())
        if pair is not None:
            found = found + _taken(pair, sample)
            worded = pair[0][best_first(pair[1], pair[0], _SOME)]
            worded = np.sort(worded[~np.isin(worded, sample)])
            found = np.concatenate([found, _values(one, [pair], view, worded)[:, 0]])
        bound = float(np.sort(found)[-FEEDBACK_FACTS]) if len(found) >= FEEDBACK_FACTS else -np.inf
        slack = _SLACK * (1.0 + sum(map(abs, (bound, nearest, scale, shift[j])))) if np.isfinite(bound) else 0.0
        gate = min(bound, nearest) - slack
        enough.append(_at_least(pair, bound - gate - slack))
        alone.append(
            Columns(
                query=unit,
                coverage=None,
                residual=evidence.units[:0],
                scale=np.array([scale, 0.0]),
                shift=np.array([shift[j], 0.0]),
                weight=np.ones(RESIDUAL),
                gate=np.array([gate, np.inf]),
            )
        )
    best = []
    by_cosine = codes.candidates_each(alone, view)
    for one, pair, near, worded in zip(each, words, by_cosine, enough, strict=True):
        rows = np.union1d(near, worded)
        values = _values(one, [pair], view, rows)[:, 0]
        order = best_first(values, rows, FEEDBACK_FACTS)
        best.append((values[order], rows[order]))
    return best


def _at_least(pair: Sparse | None, least: float) -> Int64:
    """Rows with at least so much."""
    return np.zeros(0, np.int64) if pair is None else pair[0][pair[1] >= least]


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


def _of_documents(evidence: Evidence, weight: float, retriever: Retriever, view: StoreView) -> tuple[Int64, Float64]:
    """Rows that have a document, ascending, and what it adds to every column, [n, S]."""
    rows, source, positions = view.in_documents()
    if not len(rows):
        return rows, np.zeros((0, len(evidence.units)))
    words = _words(evidence, retriever, view)
    parts = [_values(evidence, words, view, rows[i : i + _CHUNK]) for i in range(0, len(rows), _CHUNK)]
    order = np.lexsort((rows, positions, source))
    source, x = source[order], np.concatenate(parts)[order]
    near, total = np.zeros_like(x), np.zeros(len(rows))
    for distance in range(1, SOURCE_REACH + 1):
        first = np.flatnonzero(source[:-distance] == source[distance:])  # empty where there are fewer facts
        second = first + distance
        near[first] += x[second] / distance
        near[second] += x[first] / distance
        total[first] += 1.0 / distance
        total[second] += 1.0 / distance
    facts = np.bincount(source) + SOURCE_SHRINKAGE  # a source without facts here has 0 over the shrinkage
    prior = (np.bincount(source, x.max(1)) + np.bincount(source, x.mean(1))) / facts
    more = np.empty_like(x)
    more[order] = weight * (near / np.maximum(1.0, total)[:, None] + prior[source][:, None])
    return rows, more


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
