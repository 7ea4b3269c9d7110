"""The first half of a window: retrieve, score, guard, rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.concurrency._forks import cached_property
from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.rank import _tables
from cdr_kernel.rank._calibrated import Asked, ask, best_z, with_enough
from cdr_kernel.retrieve import Retriever
from cdr_kernel.retrieve._window_cache import KeptRows, Shares
from cdr_kernel.score import Columns, Scores
from cdr_kernel.score._cdr_score import Factors, best_first, check_k, check_product, passing_scores
from cdr_kernel.session import CoverageEntry, Session
from cdr_kernel.session._task import Feedback, SessionState
from cdr_kernel.spec.constants import GUARD_ALERT_SHARE, NGRAM_PENALTY_CAP, NGRAM_PENALTY_STEP
from cdr_kernel.store._attributes import Where
from cdr_kernel.store._fact_store import Fact, StoreView
from cdr_kernel.store._stored_facts import StoredFacts, ids_of, taken
from cdr_kernel.validation._arrays import Float64, Int64, as_array, factor
from cdr_kernel.validation._scalars import check_order, counted, few

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from rich.console import Group

Multiplier: TypeAlias = "Mapping[str, float] | npt.ArrayLike"

_OVERFLOWS = 2.0**1022  # importance times multiplier, from which a novelty of 2 may make a score infinite


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


class Ranks(Protocol):
    """What ranks facts that are elsewhere, in the place of a retriever: see `sharded.ShardedRetriever`."""

    @property
    def store(self) -> Any:
        """Its facts: their number, their embedding_model, and `newest` as a `FactStore` has it."""

    def rank_many(
        self,
        queries: Sequence[Any],
        sessions: Sequence[Session],
        *,
        k: int | None,
        multiplier: Multiplier | None,
        where: Where | None,
    ) -> list[Ranking]:
        """See `rank_many`."""


def cdr_rank(
    query: Any,
    retriever: Retriever | Ranks,
    session: Session,
    *,
    k: int | None = None,
    multiplier: Multiplier | None = None,
    where: Where | None = None,
) -> Ranking:
    """Rank the store's facts for the session's next window (§7.1): retrieve, score, guard, sort.

    query: [D], of the session's embedding model. k: how many facts to return, all that pass the gate for None.
    multiplier: a further factor per fact, finite and >= 0: a mapping from ids of the store (1 for those it lacks) or
    an array [len(store)] in the order of ``store.ids``. where: only facts of which this holds, as if the store had no
    others, down to the statistics of the calibrated mode: a mapping from "source" or attributes to the value that a
    fact must have or several of which it must have one (``{"tenant": "x", "source": ["a", "b"]}``; None is no value),
    or a bool array [len(store)] in the order of ``store.ids``, such as ``store.view().where(...)`` gives. Equal scores
    come in the order of their sequence numbers (reading R26). The session is not changed. Approximate retrievers may
    miss facts; the scores are exact all the same. Warns, once per session each, where no fact passes the gate (with the
    best cosine that there is) and where fewer than k do.

    Raises EmbeddingModelMismatch where store and session name different models (§2.5), ValueError where the store and
    the session's guard have different tokenizers or hash keys, KeyError for an attribute that no fact has and for ids
    of multiplier that are not in the store, ValueError and TypeError for a bad query, k, multiplier or where.
    """
    return rank_many([query], retriever, [session], k=k, multiplier=multiplier, where=where)[0]


def rank_many(
    queries: Sequence[Any],
    retriever: Retriever | Ranks,
    sessions: Sequence[Session],
    *,
    k: int | None = None,
    multiplier: Multiplier | None = None,
    where: Where | None = None,
) -> list[Ranking]:
    """``cdr_rank`` for several sessions at once, on one version of the store: the same rankings, sooner.

    queries: one [D] per session. A scan reads its codes once for all sessions that are in their first window or ask a
    new query. k, multiplier and where hold for all. Raises what ``cdr_rank`` raises, and ValueError for another
    number of queries than sessions; then nothing was ranked.
    """
    if not isinstance(retriever, Retriever) and not hasattr(retriever, "rank_many"):
        raise TypeError(f"retriever: expected a Retriever, got {type(retriever).__name__}")
    check_order(sessions, "sessions")
    for session in sessions:
        if not isinstance(session, Session):
            raise TypeError(f"session: expected a Session, got {type(session).__name__}")
    check_k(k)
    check_order(queries, "queries")
    if len(queries) != len(sessions):
        raise ValueError(f"queries: expected {len(sessions)} (one per session), got {len(queries)}")
    if not isinstance(retriever, Retriever):
        return retriever.rank_many(queries, sessions, k=k, multiplier=multiplier, where=where)
    everything = retriever.store.view()
    view = everything.select(where)
    states = []
    for session in sessions:
        if view.embedding_model != session.embedding_model:
            raise EmbeddingModelMismatch("store", session.embedding_model, view.embedding_model)
        states.append(session.state)  # one state, whatever other threads do to the session
    asked = [
        ask(query, retriever, session, state, view)
        for query, session, state in zip(queries, sessions, states, strict=True)
    ]
    factors = multipliers(multiplier, everything)
    by_relevance = all(c.coverage is None and len(c.residual) == 0 for c in (each.columns for each in asked))
    gates = [each.gates for each in asked]
    found = retriever.qualified(sessions, gates, view, bounds=k is not None and by_relevance)
    for i, (session, each) in enumerate(zip(sessions, asked, strict=True)):
        asked[i] = with_enough(each, found[i].rows, retriever, session, view)
        if asked[i] is not each:
            (found[i],) = retriever.qualified([session], [asked[i].gates], view)
    questions = [Question(*each, retriever, view) for each in zip(sessions, states, asked, found, strict=True)]
    return [each.ranking(k, factors) for each in _with_likely(questions, view, factors, k)]


def newest_in(retriever: Retriever | Ranks) -> int:
    """The sequence number of the newest fact that a retriever ranks, -1 where that is not known (reading R37)."""
    return int(getattr(getattr(retriever, "store", None), "newest", -1))


def _with_likely(questions: list[Question], view: StoreView, factors: Float64 | None, k: int | None) -> list[Question]:
    """The same; what may be among the k best is known, in one call, of those that score by the scan's relevance."""
    plain, found = [], []
    for i, each in enumerate(questions):
        kept = each.kept
        if each.by_relevance_alone and kept.low is not None and kept.high is not None:
            plain.append(i)
            found.append((kept.rows, kept.low, kept.high))
    if k is None or not plain:
        return questions
    out = list(questions)
    for i, likely in zip(plain, _C.likely(found, view.alive, view.importance, factors, k), strict=True):
        out[i] = replace(out[i], likely=likely)
    return out


@dataclass(frozen=True)
class Question:
    """One session's question of one version of the store, and the rows that passed its gate."""

    session: Session
    state: SessionState
    asked: Asked
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
            and self.session.calibrated is None
            and not (self.session.exclude_packed and self.state.packed)
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
            return float(best_z(gates, 0, self.view)[0])
        rows = codes.top(gates, self.view, None, 1)  # all of them where no value is above zero
        return float(_C.column_values(self.view.blocks, self.view.squared_norms, gates.compiled, rows).max())

    def counted(self, k: int | None, factors: Float64 | None) -> tuple[Ranking, int, int]:
        """The k best (all for None), how many facts passed the gate, and how many of them were never packed."""
        if self.likely is not None:
            return self._of_likely(*self.likely, k, factors)
        view, parts = self.view, self.session.calibrated
        kept, guard = self.kept, self.state.guard
        if guard is not None:
            kept = self.retriever.cache.with_overlap(self.session, kept, guard, view)
        positions = np.flatnonzero(view.alive[kept.rows])
        fresh, passed = np.ones(len(positions), np.bool_), len(positions)
        if (self.session.exclude_packed or parts is not None) and self.state.packed:
            rows = kept.rows[positions]
            fresh = ~view.holds(rows, self.state.packed)
        new = int(np.count_nonzero(fresh))
        if self.session.exclude_packed or (parts is not None and parts.packed_penalty == 1.0):
            positions, fresh = positions[fresh], fresh[fresh]
        rows = kept.rows[positions]
        overlap = np.zeros(len(rows), np.int32) if kept.overlap is None else kept.overlap[positions]
        importance = view.importance[rows]
        multiplier = None if factors is None else factors[rows]
        if parts is not None and not fresh.all():
            penalty = np.where(fresh, 1.0, 1.0 - parts.packed_penalty)
            multiplier = penalty if multiplier is None else penalty * multiplier
        if k is not None and k < len(rows) and parts is None:
            chosen = self._best(kept, positions, importance, multiplier, overlap, k)
        else:
            chosen = np.arange(len(rows))
        given = Factors(importance, multiplier, overlap).take(chosen)
        if parts is None or self.asked.columns.coverage is not None:
            scores = passing_scores(view.blocks, view.squared_norms, rows[chosen], self.columns, given)
        else:
            scores = self._of_values(positions, given)
        best = best_first(scores.score, scores.rows, k)
        ranking = self._ranked(scores.take(best), given.take(best), len(rows), int(np.count_nonzero(overlap)), k)
        if parts is not None:
            ranking = self._by_sub_query(ranking, positions[best], new / passed if passed else None)
            novelty = StoredNovelty(view, scores.rows[best], self.state.coverage)
            ranking = replace(ranking, novelty_source=novelty if k is None else np.asarray(novelty))
        return ranking, passed, new

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

    @cached_property
    def _values(self) -> Float64:
        """[M, 1 + S] of the kept rows: relevance and the columns of the sub-queries, in the calibrated mode."""
        values = self.asked.values(self.kept.rows)
        assert values is not None
        return values

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
        penalty = np.minimum(NGRAM_PENALTY_CAP, given.ngram_overlap * NGRAM_PENALTY_STEP)
        score = np.where(pull > 0.0, base * (1.0 - penalty), base)
        return Scores(self.kept.rows[positions], score, base, values[:, 0], none, pull, np.ones(len(positions)))

    def _by_sub_query(self, ranking: Ranking, positions: Int64, new_share: float | None) -> Ranking:
        """The ranking of the kept rows at these positions with what the calibrated mode's packing and exits go by."""
        x = self._values[positions, 1:]
        factor = ranking.importance * ranking.multiplier * ranking.novelty * (1.0 - ranking.ngram_penalty)
        with np.errstate(over="ignore"):
            by_sub_query = np.where(x > 0.0, x * factor[:, None], x)
        return replace(
            ranking,
            new_share=new_share,
            by_sub_query=by_sub_query,
            need=tuple(self.asked.columns.weight[self.asked.scored].tolist()),
            feedback=self.asked.feedback,
        )

    def _best(
        self,
        kept: KeptRows,
        positions: Int64,
        importance: Float64,
        multiplier: Float64 | None,
        overlap: npt.NDArray[np.int32],
        k: int,
    ) -> Int64:
        """Indices into positions that may hold the k best, ascending: from kept cosines, else from the codes."""
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


def _after_guard(overlap: npt.NDArray[np.int32]) -> Float64 | float:
    """What the n-gram penalty leaves of a score."""
    return 1.0 - np.minimum(NGRAM_PENALTY_CAP, overlap * NGRAM_PENALTY_STEP) if overlap.any() else 1.0


def multipliers(values: Multiplier | None, view: StoreView) -> Float64 | None:
    """A multiplier as float64 [R], one entry per row of the view. ValueError where a fact's importance times it is not
    finite."""
    if values is None:
        return None
    given: npt.ArrayLike
    if isinstance(values, Mapping):
        rows, given = known_rows(values, view), list(values.values())
    else:
        rows, given = np.flatnonzero(view.alive), values
    out = np.ones(view.rows)
    checked = factor(as_array(given, 1, "multiplier"), len(rows), "multiplier")
    if checked is not None:
        check_product(view.importance[rows], checked)
        out[rows] = checked
    return out


def known_rows(ids: Iterable[str], view: StoreView) -> Int64:
    """The rows of facts that a multiplier names. KeyError naming those that are not there."""
    rows, unknown = [], []
    for id in ids:
        try:
            rows.append(view.row_of(id))
        except KeyError:
            unknown.append(id)
    check_named(unknown)
    return np.array(rows, np.int64)


def check_named(unknown: Sequence[str]) -> None:
    """Raises KeyError for ids that a multiplier names and no fact has."""
    if unknown:
        raise KeyError(f"multiplier: {few(unknown)} not in the store")
