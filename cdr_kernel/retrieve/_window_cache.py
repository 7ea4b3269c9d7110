"""What a retriever keeps of a session between windows, so that later windows read only the rows that qualified.

With one query the facts that pass the gate are the same in every window of a session. They are found once; a later
window looks at these rows and at what was added since, and leaves out what was removed. Which of them may be among the
k best the scan's codes tell, of most rows their first 64 bytes. Where there are no codes, or few rows, the cosines to
all of the session's sub-queries are computed once and kept, and later windows combine those numbers. Both only choose:
what is returned is computed by the exact routine as ever.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.concurrency._forks import Lock, cached_property
from cdr_kernel.score import Columns
from cdr_kernel.score._columns import RESIDUAL
from cdr_kernel.spec.constants import COVERAGE_PENALTY_CAP, MIN_NOVELTY_FLOOR
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.text import NGramGuard
from cdr_kernel.text._ngram_guard import Generation
from cdr_kernel.validation._arrays import Float32, Float64, Int64

CACHE_BYTES = 256 << 20
FEW_ROWS = 1024
"""Up to here all cosines cost one window little more than a look at the codes, and the windows after it less."""
_ULP = float(np.finfo(np.float64).eps)
_TINY = float(np.finfo(np.float64).tiny)  # more than what numbers lose that are too small for a full mantissa


class Shares(NamedTuple):
    """What a session covered: shares float64 [S], of each sub-query (the sum of its depths over that of all), and how
    many entries that is."""

    shares: Float64
    entries: int


@dataclass(frozen=True, eq=False)
class KeptRows:
    """The rows int64 [M], ascending, that passed a question's gates among the first ``upto`` rows of a layout.

    Good for views from ``version`` on: rows removed before it are missing, rows removed later are still in it.
    values: float64 [M, 1 + S], the cosines to the query and to each of ``vectors`` [S, D], or None as long as no
    window has asked for them. low, high: float32, between which the cosines to the query lie, where the scan told.
    overlap: int32, n-gram counts of the first rows as of ``generation`` of the session's guard.
    """

    question: bytes
    layout: int
    version: int
    upto: int
    rows: Int64
    vectors: Float64
    values: Float64 | None = None
    low: Float32 | None = None
    high: Float32 | None = None
    overlap: npt.NDArray[np.int32] | None = None
    generation: Generation | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the arrays that are kept."""
        return self.rows.nbytes + sum(
            a.nbytes for a in (self.values, self.low, self.high, self.overlap) if a is not None
        )

    @property
    def worth_values(self) -> bool:
        """Whether cosines of all these rows, kept, are the cheaper way to the k best where there are codes too."""
        return self.values is not None or len(self.rows) <= FEW_ROWS

    def before(self, row: int) -> KeptRows:
        """What is kept of the rows under this number."""
        m = int(np.searchsorted(self.rows, row))
        return replace(
            self,
            upto=min(self.upto, row),
            rows=self.rows[:m],
            values=None if self.values is None else self.values[:m],
            low=None if self.low is None else self.low[:m],
            high=None if self.high is None else self.high[:m],
            overlap=None if self.overlap is None else self.overlap[:m],
        )

    def likely(self, positions: Int64, before: Float64, after: Float64 | float, k: int) -> Int64:
        """Indices into positions, ascending, that may hold the k best scores and all that tie with them.

        For scores ``before * max(cosine to the query, 0) * after``, as they are where nothing is covered and nothing
        pulls; before and after: [len(positions)], >= 0. The bounds go through the same products as the cosine itself
        (docs/proofs.md, K5).
        """
        assert self.low is not None
        assert self.high is not None
        whole = len(positions) == len(self.rows)
        low, high = (before * np.maximum(a if whole else a[positions], 0.0) * after for a in (self.low, self.high))
        return np.flatnonzero(high >= np.partition(low, len(low) - k)[len(low) - k])

    def best(
        self, positions: Int64, columns: Columns, coverage: Shares, remaining: Int64, strength: Float64 | None, k: int
    ) -> Int64:
        """Those of the positions, ascending, that may hold the k best scores, and all that tie with them.

        coverage: the share of each of ``vectors`` in it; remaining: the vectors that pull; strength:
        [len(positions)], what multiplies effective relevance and novelty, default 1.

        The cosines are the exact routine's own. Only the coverage is summed in another order, which docs/proofs.md
        bounds (K1 to K4).
        """
        assert self.values is not None
        values = self.values[positions]
        effective = values[:, 0]
        pull = values[:, 1 + remaining].max(axis=1) if len(remaining) else 0.0
        effective = np.maximum(effective, pull)
        covered = values[:, 1:] @ coverage.shares
        novelty = np.maximum(1.0 - np.minimum(covered, COVERAGE_PENALTY_CAP), MIN_NOVELTY_FLOOR)
        if columns.clamp_novelty:
            novelty = np.minimum(novelty, 1.0)
        score = effective * novelty
        off = np.abs(effective) * (4.0 * (columns.dim + coverage.entries + 16) * _ULP)
        if strength is not None:
            score, off = score * strength, off * strength + _TINY
        lower = score - off
        threshold = np.partition(lower, len(lower) - k)[len(lower) - k]
        return np.asarray(positions[score + off >= threshold])


class RowCache:
    """KeptRows by owner, held weakly: they go when the owner does, or when others need the room."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self._lock = Lock(self.clear)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._kept: weakref.WeakKeyDictionary[Any, KeptRows] = weakref.WeakKeyDictionary()
        self._used: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._clock = 0
        self._at_most = 0  # bytes; what went with its owners is still in it, until the limit is reached

    @property
    def nbytes(self) -> int:
        """Bytes kept for all owners."""
        with self._lock:
            return sum(kept.nbytes for kept in self._kept.values())

    def get(self, owner: Any, columns: Columns, view: StoreView) -> KeptRows | None:
        """What is kept of this owner if it asks the same of the same layout, with the rows added since."""
        with self._lock:
            kept = self._kept.get(owner)
        if kept is None or kept.layout != view.layout or view.version < kept.version:
            return None
        if kept.question != _question(columns, view):
            return None
        if kept.upto > view.rows:
            return kept.before(view.rows)
        if kept.upto < view.rows:
            added = np.arange(kept.upto, view.rows)
            passing = added[_C.gate_rows(view.blocks, view.squared_norms, columns.compiled, added)]
            kept = replace(
                kept,
                upto=view.rows,
                rows=np.concatenate([kept.rows, passing]),
                low=None,
                high=None,
                values=None
                if kept.values is None
                else np.concatenate([kept.values, _values(view, columns, kept.vectors, passing)]),
            )
        self._put(owner, kept)
        return kept

    def put(
        self,
        owner: Any,
        columns: Columns,
        view: StoreView,
        rows: Int64,
        low: Float32 | None = None,
        high: Float32 | None = None,
    ) -> KeptRows:
        """Keep the rows that were found alive in this view for its owner, with bounds of their relevance if known."""
        none = np.zeros((0, columns.dim))
        kept = KeptRows(_question(columns, view), view.layout, view.version, view.rows, rows, none, low=low, high=high)
        self._put(owner, kept)
        return kept

    def hand_over(self, before: Any, after: Any) -> None:
        """Keep for one owner what was kept for another: for a session that takes its predecessor's place."""
        with self._lock:
            kept = self._kept.pop(before, None)
            if kept is not None:
                self._clock += 1
                self._kept[after] = kept
                self._used[after] = self._clock

    def with_values(self, owner: Any, kept: KeptRows, columns: Columns, vectors: Float64, view: StoreView) -> KeptRows:
        """The same with the cosines to these vectors [S, D], computed once."""
        if kept.values is None or kept.vectors is not vectors:
            kept = replace(
                kept, vectors=vectors, low=None, high=None, values=_values(view, columns, vectors, kept.rows)
            )
            self._put(owner, kept)
        return kept

    def with_overlap(self, owner: Any, kept: KeptRows, guard: NGramGuard, view: StoreView) -> KeptRows:
        """The same with the n-gram counts of all rows: the kept ones advanced by what was written since."""
        counted, rows = kept.overlap, kept.rows
        known = 0 if counted is None else len(counted)
        generation = guard.generation
        since = None
        if counted is not None and kept.generation is not None:
            since = guard.overlap_since(kept.generation, view.tokens, rows[:known])
        if counted is None or since is None:
            overlap = guard.overlap_rows(view.tokens, rows)
        else:
            overlap = np.concatenate([counted + since, guard.overlap_rows(view.tokens, rows[known:])])
        kept = replace(kept, overlap=overlap, generation=generation)
        self._put(owner, kept)
        return kept

    def _put(self, owner: Any, kept: KeptRows) -> None:
        with self._lock:
            self._clock += 1
            before = self._kept.get(owner)
            self._at_most += kept.nbytes - (0 if before is None else before.nbytes)
            self._kept[owner] = kept
            self._used[owner] = self._clock
            if self._at_most <= self.limit:
                return
            self._at_most = sum(each.nbytes for each in self._kept.values())
            for other in sorted(self._kept, key=lambda each: self._used[each]):
                if self._at_most <= self.limit:
                    break
                self._at_most -= self._kept.pop(other).nbytes


_ENTRY = 2048  # bytes of an entry's own


class TaskCache:
    """What tasks found in one store, by key: what was not used for longest goes when others need the room.

    Nothing that alone needs more than ``limit`` bytes is kept. Safe to share among threads.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self._lock = Lock(self.clear)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._total = 0

    @property
    def nbytes(self) -> int:
        """Bytes kept for all tasks."""
        return self._total

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Any) -> Any:
        """What is kept under this key, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: Any, value: Any, nbytes: int) -> None:
        """Keep a value whose arrays have so many bytes."""
        nbytes += _ENTRY
        with self._lock:
            _, before = self._kept.pop(key, (None, 0))
            self._total -= before
            if nbytes > self.limit:
                return
            self._kept[key] = (value, nbytes)
            self._total += nbytes
            while self._total > self.limit:
                _, (_, gone) = self._kept.popitem(last=False)
                self._total -= gone


def _question(columns: Columns, view: StoreView) -> bytes:
    """What decides who passes: which facts are asked, and every gated column's vector and settings."""
    parts: list[npt.NDArray[Any]] = [columns.query, columns.gate[:1], columns.scale[:1], columns.shift[:1]]
    for j in np.flatnonzero(columns.gate[RESIDUAL:] < np.inf):
        at = RESIDUAL + j
        parts += [
            columns.residual[j],
            columns.gate[at : at + 1],
            columns.scale[at : at + 1],
            columns.shift[at : at + 1],
        ]
    if columns.addend is not None and columns.gated_addend:
        parts += list(columns.addend)
    return view.selection + b"".join(part.tobytes() for part in parts)


def _values(view: StoreView, columns: Columns, vectors: Float64, rows: Int64) -> Float64:
    """Exact cosines to the query, at its gate, and to the vectors: [len(rows), 1 + S]."""
    question = Columns.spec(
        columns.query, residual=vectors, min_relevance=float(columns.gate[0]), first_window_pull=True
    )
    return _C.column_values(view.blocks, view.squared_norms, question.compiled, rows)
