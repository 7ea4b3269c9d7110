"""What the calibrated mode knows of one task in one version of a store: z-scores, words, direction, documents.

Whatever does not change from window to window is made once per task and version of the store, and the retriever keeps
it as long as there is room. What words and documents add is made for the rows that passed the gate alone.
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
from cdr_kernel.score._columns import RESIDUAL, Addend
from cdr_kernel.session import CalibratedSettings, Session
from cdr_kernel.session._task import Feedback
from cdr_kernel.spec.constants import FEEDBACK_FACTS, SOURCE_REACH, SOURCE_SHRINKAGE
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.validation._arrays import Float64, Int64

_CHUNK = 65536
_SOME = 256  # facts with the most words in common, for a bound
_SAMPLE = 4096  # facts at even distances, for the same
_SLACK = 1e-9  # far above what rounding moves a value by, far below what tells facts apart
_WORD = 128  # bytes of a word and its number, about
Sparse: TypeAlias = "tuple[Int64, Float64]"
"""Rows, ascending, and a number for each; 0 for all others."""


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
"""Words as `retrieve._bm25.words` leaves them, each with a weight."""


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
class LocalFacts:
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


def evidence_of(
    retriever: Retriever,
    session: Session,
    settings: CalibratedSettings,
    view: StoreView,
    facts: Facts,
    held: Feedback | None,
) -> Evidence:
    """The evidence, from the retriever where it has it."""
    found: Evidence | None = retriever.evidence.get((*task_of(session, settings, held), *version_of(view)))
    if found is None:
        found = gathered(session, settings, facts, held)
        for each in (held, found.feedback):  # a later window holds what this one found
            retriever.evidence.put((*task_of(session, settings, each), *version_of(view)), found, found.nbytes)
    return found


def task_of(session: Session, settings: CalibratedSettings, held: Feedback | None) -> tuple[Any, ...]:
    """What tells the evidence of one task from that of another in the same version of the facts."""
    weights = (
        settings.lexical_weight,
        settings.feedback_weight,
        settings.lexical_feedback_weight,
        settings.source_weight,
    )
    if held is None:
        return (session.task_key, *weights, "")
    direction = b"" if held.direction is None else held.direction.tobytes()
    digest = hashlib.sha256(repr((held.fact_ids, held.words)).encode("utf-8", "surrogatepass") + direction)
    return (session.task_key, *weights, digest.hexdigest())


def gathered(session: Session, settings: CalibratedSettings, facts: Facts, held: Feedback | None = None) -> Evidence:
    """The evidence of a session's task; held: the session's feedback, if it has one."""
    subs = np.stack([item.embedding for item in session.sub_queries])
    units = subs / np.linalg.norm(subs, axis=1, keepdims=True)
    calibration = facts.calibration()
    scale, shift = calibration.scale_shift(units)
    texts = tuple(item.text for item in session.sub_queries)
    word_scale, word_shift = np.zeros(len(units)), np.zeros(len(units))
    counts = None
    if settings.lexical_weight and calibration.count:
        counts = facts.word_counts(texts)
        z = [sums.z(calibration.count) for sums in facts.word_sums(texts, counts)]
        word_scale, word_shift = settings.lexical_weight * np.array(z).T
    evidence = Evidence(units, scale, shift, texts, counts, word_scale, word_shift)
    if held is None:
        unused = settings.source_weight or not (settings.feedback_weight or settings.lexical_feedback_weight)
        if unused or not calibration.count:
            return evidence
        ids, vectors = facts.best(evidence)
        held = _feedback(settings, facts, calibration, ids, vectors)
    elif held.direction is None or held.words is None:
        held = _feedback(settings, facts, calibration, held.fact_ids, facts.vectors(held.fact_ids))
    evidence = replace(evidence, feedback=held)
    if not held.words or settings.source_weight or not calibration.count:
        return evidence
    counts = facts.term_counts(tuple(term for term, _ in held.words))
    (sums,) = facts.term_sums((held.words,), counts)
    spread, moved = sums.z(calibration.count)
    weight = settings.lexical_feedback_weight
    return replace(evidence, shared_counts=counts, shared_scale=weight * spread, shared_shift=weight * moved)


def _feedback(
    settings: CalibratedSettings, facts: Facts, calibration: Calibration, ids: tuple[str, ...], vectors: Float64
) -> Feedback:
    """Of these facts, of which those that are still there have these unit vectors."""
    found: Terms = ()
    if settings.lexical_feedback_weight and len(vectors):
        texts = [words(text) for text in facts.texts(ids)]
        terms = tuple(sorted({term for text in texts for term in text}))
        counts = facts.term_counts(terms)
        sums = facts.term_sums(tuple(((term, 1.0),) for term in terms), counts)
        found = above_mean(texts, terms, counts, sums)
    return Feedback(ids, _direction(vectors, calibration), found)


@dataclass(frozen=True, eq=False)
class LexicalAddend:
    """What words and documents add to the columns of a task's sub-queries. key: names the evidence and the version."""

    evidence: Evidence
    settings: CalibratedSettings
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
        if self.settings.source_weight:
            total += _values_at(self._documents(), rows)
        elif evidence.shared_counts is not None and evidence.feedback is not None and evidence.shared_scale:
            shared = _weighted(retriever, view, evidence.feedback.words or (), evidence.shared_counts)
            total += evidence.shared_scale * _values_at(shared, rows)[:, None]
        return total

    def _documents(self) -> tuple[Int64, Float64]:
        key = ("documents", *self.key)
        found: tuple[Int64, Float64] | None = self.retriever.evidence.get(key)
        if found is None:
            found = _of_documents(self.evidence, self.settings.source_weight, self.retriever, self.view)
            self.retriever.evidence.put(key, found, found[0].nbytes + found[1].nbytes)
        return found


@dataclass(frozen=True, eq=False)
class GivenAddend:
    """What was `LexicalAddend` elsewhere to the rows that are asked for, [M, S]."""

    values: Float64

    def of(self, rows: Int64) -> Float64:
        """See `LexicalAddend`."""
        return self.values


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
    key = ("words", texts, *_counted(counts), *version_of(view))
    found: list[Sparse] | None = retriever.evidence.get(key)
    if found is None:
        found = retriever.lexical.bm25(view, texts, counts=counts)
        retriever.evidence.put(key, found, sum(rows.nbytes + values.nbytes for rows, values in found))
    return found


def _weighted(retriever: Retriever, view: StoreView, terms: Terms, counts: WordCounts) -> Sparse:
    """Weighted BM25 of a task's words, kept likewise."""
    key = ("terms", terms, *_counted(counts), *version_of(view))
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
            total[:, j] = _values_at(pair, rows)
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
        addend=row_addend(rows, _of_rows(words, rows)),
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
            found = found + _values_at(pair, sample)
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
    settings = [_values(evidence, words, view, rows[i : i + _CHUNK]) for i in range(0, len(rows), _CHUNK)]
    order = np.lexsort((rows, positions, source))
    source, x = source[order], np.concatenate(settings)[order]
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


def row_addend(rows: Int64, added: Float64) -> Addend:
    """As columns take it: query, coverage, the sub-queries."""
    each = [(rows[values != 0.0], values[values != 0.0]) for values in added.T]
    return Addend.of([None, None, *each])


def _values_at(pair: tuple[Int64, Float64], rows: Int64) -> Float64:
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


def version_of(view: StoreView) -> tuple[Any, ...]:
    return view.version, view.selection
