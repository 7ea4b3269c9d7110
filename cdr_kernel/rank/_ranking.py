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
from cdr_kernel.score._cdr_score import Factors, passing_scores
from cdr_kernel.session import CoverageEntry
from cdr_kernel.session._task import Feedback
from cdr_kernel.spec.constants import GUARD_ALERT_SHARE, NGRAM_PENALTY_CAP, NGRAM_PENALTY_STEP
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
    """Facts best first, each with the numbers that put it there; every array has one entry per fact.

    score: importance x multiplier x max(relevance, residual_pull) x novelty x (1 - n-gram penalty) (§2.2, §5.2,
    reading R2), float64; score_without_guard: without the last factor. relevance, coverage, residual_pull: cosines
    (coverage: their weighted mean), in [-1, 1]. novelty: in [0.20, 2] (reading R3). ngram_overlap: int32, distinct
    6-grams of the fact that were written already (reading R24). importance, multiplier: >= 0.

    qualified: how many facts passed the gate, before k; guard_activations: how many of these got an n-gram penalty
    (§8.3); coverage_depth: coverage entries at ranking time (§8.2, reading R14); store_version: the version ranked.

    In the calibrated mode relevance and residual_pull are in deviations above the store's mean, residual_pull is the
    need-weighted maximum over all sub-queries, coverage is centred or 0, and facts out for having been packed do not
    count as qualified. new_share: of those that passed the gate, the share never packed (None: none passed, or mode
    "spec"). by_sub_query: float64 [M, S], what packing by need goes by; need: [S]; feedback: see `Session.update`.
    novelty is this mode's own factor; `spec_novelty` is the specification's. novelty_source: what it is read from.

    considered: how many facts there were to rank: those that match `where`, None where that is not known. filter: that
    `where` in words, "" for none.

    facts: a tuple, or of a ranking without k a sequence that makes them when they are looked at (`stored`).

    newest: the sequence number of the newest fact that was there to be ranked, -1 where there was none (reading R37),
    and -1 where shards are missing, so that a session that ends by exhaustion may rank again.

    complete: whether all facts were looked at; only shards that could not be reached in time make it False
    (see `sharded`), and missing_shards names them. What a ranking shows of itself says so.
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
        penalty: Float64 = np.minimum(NGRAM_PENALTY_CAP, self.ngram_overlap * NGRAM_PENALTY_STEP)
        return penalty

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
