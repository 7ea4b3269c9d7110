"""The first half of a window: retrieve, score, guard, rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.rank import _calibrated  # noqa: F401  # registers its mode
from cdr_kernel.rank._ranking import Ranking
from cdr_kernel.rank._window_query import window_query, with_likely
from cdr_kernel.retrieve import Retriever
from cdr_kernel.score._cdr_score import check_k, check_product
from cdr_kernel.session import Session
from cdr_kernel.store._attributes import Where
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.validation._arrays import Float64, Int64, as_array, factor
from cdr_kernel.validation._scalars import check_order, few

Multiplier: TypeAlias = "Mapping[str, float] | npt.ArrayLike"


class Ranks(Protocol):
    """What ranks facts that are elsewhere, in the place of a retriever: see `ShardedRetriever`."""

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

    The session is not changed. Facts with equal scores are ordered by their sequence numbers (reading R26). An
    approximate retriever may miss facts; the scores of the others are exact.

    Args:
        query: The query embedding, [D], from the session's model.
        retriever: A `Retriever` over the store, or a `ShardedRetriever`.
        session: The session.
        k: The number of facts to return. None returns all that pass the gate.
        multiplier: A further factor for each fact, finite and >= 0. Either a mapping from fact ids (1 for ids that it
            lacks) or an array [len(store)] in the order of ``store.ids``.
        where: A filter. The answer is that of a store with only the facts that match, its statistics included. Either a
            mapping from "source" or attribute names to a value or to several allowed values, such as ``{"tenant": "x",
            "source": ["a", "b"]}`` (None means no value), or a bool array [len(store)] in the order of ``store.ids``.

    Returns:
        The ranking, best first.

    Raises:
        EmbeddingModelMismatch: If store and session name different models (§2.5).
        KeyError: If `where` names an attribute that no fact has, or `multiplier` an id that is not in the store.
        ValueError: For a bad query, k, multiplier or where, and if the store and the session's guard have different
            tokenizers or hash keys.
        TypeError: For an argument of a wrong type.

    Warns:
        UserWarning: Once per session, if no fact passes the gate, and once if fewer than k do.
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
    """Rank for several sessions at once, on one version of the store. The rankings are those of `cdr_rank`.

    A scan reads its codes once for all sessions that are in their first window or have a new query, so this is faster
    than one call for each session.

    Args:
        queries: One query embedding [D] for each session.
        retriever: As in `cdr_rank`.
        sessions: The sessions.
        k: As in `cdr_rank`, for all sessions.
        multiplier: As in `cdr_rank`, for all sessions.
        where: As in `cdr_rank`, for all sessions.

    Returns:
        One ranking for each session, in their order.

    Raises:
        ValueError: If there are not as many queries as sessions. Nothing was ranked then.
        Exception: What `cdr_rank` raises.
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
        window_query(session.settings, query, retriever, session, state, view)
        for query, session, state in zip(queries, sessions, states, strict=True)
    ]
    factors = multipliers(multiplier, everything)
    by_relevance = all(each.columns.coverage is None and len(each.columns.residual) == 0 for each in asked)
    found = retriever.qualified(sessions, [each.gates for each in asked], view, bounds=k is not None and by_relevance)
    made = []
    for session, state, each, kept in zip(sessions, states, asked, found, strict=True):
        enough = each.with_enough(kept.rows, retriever, session, view)
        if enough is not each:
            (kept,) = retriever.qualified([session], [enough.gates], view)
        made.append(enough.session_query(session, state, kept, retriever, view))
    return [each.ranking(k, factors) for each in with_likely(made, view, factors, k)]


def newest_in(retriever: Retriever | Ranks) -> int:
    """The sequence number of the newest fact that a retriever ranks, -1 where that is not known (reading R37)."""
    return int(getattr(getattr(retriever, "store", None), "newest", -1))


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
