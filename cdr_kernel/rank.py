"""The first half of a window: retrieve, score, guard, rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cdr_kernel.arrays import Float64, Int64, as_array, factor
from cdr_kernel.constants import GUARD_ALERT_SHARE, NGRAM_PENALTY_CAP, NGRAM_PENALTY_STEP
from cdr_kernel.ngram import NGramGuard
from cdr_kernel.retrieve import Retriever
from cdr_kernel.score import best_first, cdr_score, check_k
from cdr_kernel.session import Session
from cdr_kernel.store import EmbeddingModelMismatch, Fact, StoreView

Multiplier: TypeAlias = "Mapping[str, float] | npt.ArrayLike"


@dataclass(frozen=True, eq=False)
class Ranking:
    """Facts best first, each with the numbers that put it there; every array has one entry per fact.

    score: importance x multiplier x max(relevance, residual_pull) x novelty x (1 - n-gram penalty) (§2.2, §5.2,
    reading R2), float64; score_without_guard: without the last factor. relevance, coverage, residual_pull: cosines
    (coverage: their weighted mean), in [-1, 1]. novelty: in [0.20, 2] (reading R3). ngram_overlap: int32, distinct
    6-grams of the fact that were written already (reading R24). importance, multiplier: >= 0.

    qualified: how many facts passed the gate, before k; guard_activations: how many of these got an n-gram penalty
    (§8.3); coverage_depth: coverage entries at ranking time (§8.2, reading R14); store_version: the version ranked.
    """

    facts: tuple[Fact, ...]
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

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def ids(self) -> list[str]:
        """Ids, best first."""
        return [fact.id for fact in self.facts]

    @property
    def ngram_penalty(self) -> Float64:
        """§5.2: min(0.80, 0.15 x overlap), in [0, 0.80]."""
        penalty: Float64 = np.minimum(NGRAM_PENALTY_CAP, self.ngram_overlap * NGRAM_PENALTY_STEP)
        return penalty

    @property
    def guard_alert(self) -> bool:
        """§5.3: whether more than 20 % of the qualified facts got an n-gram penalty (reading R25)."""
        return self.guard_activations > GUARD_ALERT_SHARE * self.qualified

    def take(self, positions: Any) -> Ranking:
        """The facts at these positions, in this order, with the same counters."""
        chosen = np.asarray(positions, dtype=np.int64).reshape(-1)
        arrays: dict[str, Any] = {
            name: value[chosen] for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        return replace(self, facts=tuple(self.facts[i] for i in chosen.tolist()), **arrays)


def cdr_rank(
    query: Any,
    retriever: Retriever,
    session: Session,
    *,
    k: int | None = None,
    multiplier: Multiplier | None = None,
) -> Ranking:
    """Rank the store's facts for the session's next window (§7.1): retrieve, score, guard, sort.

    query: [D], of the session's embedding model. k: how many facts to return, all that pass the gate for None.
    multiplier: a further factor per fact, finite and >= 0: a mapping from ids (1 for ids it lacks) or an array
    [len(store)] in the order of ``store.ids``. Equal scores come in the order of their sequence numbers (reading
    R26). The session is not changed. Approximate retrievers may miss facts; the scores are exact all the same.

    Raises EmbeddingModelMismatch where store and session name different models (§2.5), ValueError where the store and
    the session's guard have different tokenizers or hash keys, ValueError and TypeError for a bad query, k or
    multiplier.
    """
    check_k(k)
    view = retriever.store.view()
    if view.embedding_model != session.embedding_model:
        raise EmbeddingModelMismatch("store", session.embedding_model, view.embedding_model)
    state = session.state  # one state, whatever other threads do to the session
    columns = session.columns(query, state=state)
    rows = retriever.candidates(columns, view)
    if session.exclude_packed and state.packed:
        rows = rows[[view.id_of(row) not in state.packed for row in rows.tolist()]]
    factors = _multiplier(multiplier, view)
    overlap = _overlap(state.guard, view, rows)
    scores = cdr_score(
        view.blocks,
        columns,
        rows=rows,
        squared_norms=view.squared_norms,
        importance=view.importance[rows],
        multiplier=None if factors is None else factors[rows],
        ngram_overlap=overlap,
    )
    best = best_first(scores.score, scores.rows, k)
    chosen = scores.rows[best]
    return Ranking(
        facts=tuple(view.facts(chosen)),
        score=scores.score[best],
        score_without_guard=scores.score_without_guard[best],
        relevance=scores.relevance[best],
        coverage=scores.coverage[best],
        residual_pull=scores.residual_pull[best],
        novelty=scores.novelty[best],
        ngram_overlap=overlap[best],
        importance=view.importance[chosen],
        multiplier=np.ones(len(chosen)) if factors is None else factors[chosen],
        qualified=len(rows),
        guard_activations=int(np.count_nonzero(overlap)),
        coverage_depth=len(state.coverage),
        store_version=view.version,
    )


def _overlap(guard: NGramGuard | None, view: StoreView, rows: Int64) -> npt.NDArray[np.int32]:
    return np.zeros(len(rows), np.int32) if guard is None else guard.overlap_rows(view.tokens, rows)


def _multiplier(values: Multiplier | None, view: StoreView) -> Float64 | None:
    """values as float64 [R], one entry per row of the view."""
    if values is None:
        return None
    alive = np.flatnonzero(view.alive)
    given = np.array([values.get(i, 1.0) for i in view.ids]) if isinstance(values, Mapping) else values
    out = np.ones(view.rows)
    checked = factor(as_array(given, 1, "multiplier"), len(alive), "multiplier")
    out[alive] = checked if checked is not None else 1.0
    return out
