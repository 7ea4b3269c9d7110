"""A ranking: facts best first, with the numbers that put them there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cdr_kernel.rank import _tables
from cdr_kernel.score import Columns
from cdr_kernel.score._cdr_score import Factors, ngram_penalty, passing_scores
from cdr_kernel.session import CoverageEntry
from cdr_kernel.session._task import Feedback
from cdr_kernel.spec.constants import GUARD_ALERT_SHARE
from cdr_kernel.store._fact_store import Fact, StoreView
from cdr_kernel.store._stored_facts import ids_of, taken
from cdr_kernel.validation._arrays import Float64, Int64
from cdr_kernel.validation._scalars import counted

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from rich.console import Group


class StoredNovelty:
    """§2.2's novelty of some rows of a store, in the order of these rows, computed when numpy reads it.

    A ranking of the calibrated mode may hold a tenth of a store of millions. Only the packed facts need this number.

    view, rows: int64 [M], the facts. coverage: the entries that cover them.
    """

    def __init__(self, view: StoreView, rows: Int64, coverage: tuple[CoverageEntry, ...]) -> None:
        self.view = view
        self.rows = rows
        self.coverage = coverage

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, positions: Int64) -> StoredNovelty:
        return StoredNovelty(self.view, self.rows[positions], self.coverage)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """[M] float64, from the routine that scores mode "spec"."""
        if not self.coverage or not len(self.rows):
            return np.ones(len(self.rows), dtype)
        columns = Columns.spec(
            self.coverage[0].embedding,  # coverage alone is read: any query does
            coverage=np.stack([entry.embedding for entry in self.coverage]),
            depth_weights=np.array([entry.depth_weight for entry in self.coverage]),
            min_relevance=-math.inf,
        )
        order = np.argsort(self.rows)
        rows = self.rows[order]
        scores = passing_scores(self.view.blocks, self.view.squared_norms, rows, columns, Factors(None, None, None))
        novelty = np.empty(len(rows), dtype)
        novelty[order] = scores.novelty
        return novelty

    def __reduce__(self) -> tuple[Any, ...]:
        return np.asarray, (np.asarray(self),)


@dataclass(frozen=True, eq=False, repr=False)
class Ranking:
    """Facts with the numbers that put them in their order, best first. Every array has one entry for each fact.

    Attributes:
        facts: The facts. Without k this is a sequence that creates each fact when it is read.
        score: float64: importance x multiplier x max(relevance, residual_pull) x novelty x (1 - n-gram penalty) (§2.2,
            §5.2, reading R2).
        score_without_guard: float64: the score without the n-gram penalty.
        relevance: Cosine with the query, in [-1, 1]. In the calibrated mode: deviations above the store's mean.
        coverage: Weighted mean of the cosines with the coverage entries, in [-1, 1]. In the calibrated mode: centred,
            or 0.
        residual_pull: Largest cosine with a remaining sub-query, in [-1, 1]. In the calibrated mode: the need-weighted
            maximum over all sub-queries, in deviations.
        novelty: In [0.20, 2] (reading R3). `spec_novelty` is the specification's novelty in both modes.
        ngram_overlap: int32: how many distinct 6-grams of the fact were already written (reading R24).
        importance: >= 0.
        multiplier: >= 0.
        qualified: How many facts passed the gate, before k. In the calibrated mode without facts that are out for
            having been packed.
        guard_activations: How many of the qualified facts got an n-gram penalty (§8.3).
        coverage_depth: Coverage entries at ranking time (§8.2, reading R14).
        store_version: The version of the store that was ranked.
        new_share: Calibrated mode: of the facts that passed the gate, the share that was never packed. None if no fact
            passed, and in the specification's mode.
        by_sub_query: Calibrated mode: float64 [M, S], the scores by sub-query that packing by need uses.
        need: Calibrated mode: what each sub-query still needs, [S].
        feedback: Calibrated mode: what `Session.update` remembers of the task's direction.
        novelty_source: What `spec_novelty` is computed from.
        complete: False if shards could not be reached in time.
        missing_shards: The names of these shards.
        considered: How many facts match `where`. None if that is not known.
        filter: The `where` in words, "" for none.
        newest: The sequence number of the newest fact that could be ranked (reading R37). -1 if there was none, and if
            shards are missing, so that a session that ended by exhaustion may rank again.
    """

    facts: Sequence[Fact]
    score: Float64
    score_without_guard: Float64
    relevance: Float64
    coverage: Float64
    residual_pull: Float64
    novelty: Float64
    ngram_overlap: npt.NDArray[np.int32]
    importance: Float64
    multiplier: Float64
    qualified: int
    guard_activations: int
    coverage_depth: int
    store_version: int
    new_share: float | None = None
    by_sub_query: Float64 | None = None
    need: tuple[float, ...] = ()
    feedback: Feedback | None = None
    novelty_source: Float64 | StoredNovelty | None = None
    complete: bool = True
    missing_shards: tuple[str, ...] = ()
    considered: int | None = None
    filter: str = ""
    newest: int = -1

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def ids(self) -> list[str]:
        """Ids, best first."""
        return ids_of(self.facts)

    @property
    def ngram_penalty(self) -> Float64:
        """§5.2: min(0.80, 0.15 x overlap), in [0, 0.80]."""
        return ngram_penalty(self.ngram_overlap)

    @property
    def spec_novelty(self) -> Float64:
        """§2.2's novelty of each fact, whatever the mode (reading R38), in [0.20, 2].

        In mode "spec" it is `novelty`. In the calibrated mode it is what mode "spec" would have for the same facts
        after the same windows. A ranking without k computes it when it is read; an envelope has it.
        """
        return self.novelty if self.novelty_source is None else np.asarray(self.novelty_source)

    @property
    def guard_alert(self) -> bool:
        """§5.3: whether more than 20 % of the qualified facts got an n-gram penalty (reading R25)."""
        return self.guard_activations > GUARD_ALERT_SHARE * self.qualified

    def to_arrow(self) -> pyarrow.Table:
        """A `pyarrow.Table`, one row per fact, best first: rank (from 1), id, score, score_without_guard, relevance,
        coverage, residual_pull, novelty, ngram_overlap, ngram_penalty, importance, multiplier, source, position,
        sequence, text; by_sub_query, a list, where there is one. source and position may be null."""
        return _tables.arrow(self)

    def to_pandas(self) -> pandas.DataFrame:
        """`to_arrow` as a `pandas.DataFrame`. ImportError where pandas (extra `pandas`) is not installed."""
        return _tables.pandas_frame(self)

    def __repr__(self) -> str:
        best = f", best {self.facts[0].id!r} at {self.score[0]:.4f}" if self.facts else ""
        return f"<Ranking of {counted(len(self), 'fact')}, {self.qualified} qualified{best}{_tables.missing(self)}>"

    def __str__(self) -> str:
        return _tables.plain(_tables.shown(self))

    def __rich__(self) -> Group:
        return _tables.rich_table(_tables.shown(self))

    def _repr_html_(self) -> str:
        return _tables.html(_tables.shown(self))

    def take(self, positions: Any) -> Ranking:
        """The facts at these positions, in this order, with the same counters."""
        chosen = np.asarray(positions, dtype=np.int64).reshape(-1)
        arrays: dict[str, Any] = {
            name: value[chosen] for name, value in vars(self).items() if isinstance(value, np.ndarray | StoredNovelty)
        }
        return replace(self, facts=taken(self.facts, chosen), **arrays)
