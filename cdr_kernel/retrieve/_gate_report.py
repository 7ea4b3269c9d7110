"""What a relevance gate lets through in one store: a cosine says as much about the embedding model as about relevance.

report = gate_report(store, queries, k=10)
report.passing[0.55], report.suggested               # facts per query at §2.6's default; a gate that fits
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdr_kernel import _C
from cdr_kernel.score import Columns
from cdr_kernel.score._cdr_score import check_k
from cdr_kernel.spec.constants import CDR_MIN_RELEVANCE, MAX_WINDOWS
from cdr_kernel.store import FactStore
from cdr_kernel.store._fact_store import StoreView, view_of
from cdr_kernel.text._repr import html_table, one_line
from cdr_kernel.validation._arrays import Float64, Int64, as_vectors

SPEC_GATES = (0.50, 0.55, 0.65)
"""§2.6: permissive, default, strict."""

LEVELS = (0.5, 0.9, 0.95, 0.99, 0.999)
SERVED = 0.9
"""Share of the queries that a suggested gate must leave enough facts."""

_STEP = 0.01


@dataclass(frozen=True, eq=False)
class GateReport:
    """How Q queries relate to the facts of one store.

    Attributes:
        embedding_model: The store's.
        facts: How many facts the store has.
        queries: Q.
        wanted: The facts that a task needs: k x windows.
        passing: By gate, int64 [Q]: how many facts have at least that cosine.
        quantiles: By level, float64 [Q]: the cosine that this share of the facts stays below.
        largest: float64 [Q]: the best cosine.
        deviations: By gate: how many standard deviations of the query's cosines the gate lies above their mean, the
            median over queries. NaN if the cosines do not vary.
        suggested: See `suggest_min_relevance`.
    """

    embedding_model: str
    facts: int
    queries: int
    wanted: int
    passing: Mapping[float, Int64]
    quantiles: Mapping[float, Float64]
    largest: Float64
    deviations: Mapping[float, float]
    suggested: float | None

    __repr__ = one_line

    def _repr_html_(self) -> str:
        gates = {
            f"gate {gate:g}": f"{np.median(counts):g} facts pass for the median query"
            for gate, counts in self.passing.items()
        }
        suggested = "none" if self.suggested is None else f"{self.suggested:.3f}"
        rows = {"model": self.embedding_model, "facts": self.facts, "queries": self.queries, "wanted": self.wanted}
        return html_table("GateReport", {**rows, **gates, "suggested gate": suggested})

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: medians, extremes and shares."""

        def spread(values: Any) -> dict[str, float]:
            ends = np.quantile(values, [0.0, 0.1, 0.5, 0.9, 1.0])
            return dict(zip(("min", "p10", "median", "p90", "max"), ends.tolist(), strict=True))

        return {
            "model": self.embedding_model,
            "facts": self.facts,
            "queries": self.queries,
            "wanted": self.wanted,
            "gates": [
                {
                    "gate": gate,
                    "passing": spread(counts),
                    "queries_with_too_few": int(np.count_nonzero(counts < self.wanted)),
                    "deviations": None if np.isnan(self.deviations[gate]) else self.deviations[gate],
                }
                for gate, counts in self.passing.items()
            ],
            "quantiles": {f"{level:g}": spread(values) for level, values in self.quantiles.items()},
            "largest": spread(self.largest),
            "suggested_min_relevance": self.suggested,
        }


def gate_report(
    store: FactStore | StoreView,
    queries: Any,
    *,
    k: int = 10,
    windows: int = MAX_WINDOWS,
    gates: tuple[float, ...] = SPEC_GATES,
) -> GateReport:
    """How many facts pass the gate for each of these queries, at several gates and in quantiles.

    Args:
        store: A store or a view of one.
        queries: [Q, D].
        k: Facts per envelope.
        windows: Windows per task. A gate that leaves fewer than k x windows facts cannot fill them.
        gates: The gates.

    Raises:
        ValueError: For no query, an empty store, and bad vectors, k or windows.
        TypeError: For what is no store. A `Retriever` has one: ``retriever.store``.
    """
    view = view_of(store)
    vectors = as_vectors(queries, view.dim, "queries")
    check_k(k)
    check_k(windows)
    if not len(vectors) or not len(view):
        raise ValueError(f"queries: expected queries and facts, got {len(vectors)} and {len(view)}")
    alive = np.flatnonzero(view.alive)
    wanted = k * windows
    cosines_of = (np.sort(_cosines(view, vector, alive)) for vector in vectors)
    passing: list[list[int]] = []
    quantiles, largest, enough, deviations = [], [], [], []
    for cosines in cosines_of:
        passing.append([len(cosines) - int(np.searchsorted(cosines, gate)) for gate in gates])
        quantiles.append(np.quantile(cosines, LEVELS))
        largest.append(cosines[-1])
        enough.append(cosines[max(0, len(cosines) - max(1, wanted))])
        spread = float(cosines.std())
        deviations.append([(gate - float(cosines.mean())) / spread if spread > 0.0 else np.nan for gate in gates])
    counts, levels, z = np.array(passing), np.array(quantiles), np.array(deviations)
    reach = float(np.sort(enough)[len(enough) - math.ceil(SERVED * len(enough))])
    return GateReport(
        embedding_model=view.embedding_model,
        facts=len(view),
        queries=len(vectors),
        wanted=wanted,
        passing={gate: counts[:, i] for i, gate in enumerate(gates)},
        quantiles={level: levels[:, i] for i, level in enumerate(LEVELS)},
        largest=np.array(largest),
        deviations={gate: float(np.median(z[:, i])) for i, gate in enumerate(gates)},
        suggested=round(np.floor(reach / _STEP + 1e-9) * _STEP, 2) if wanted <= len(view) else None,
    )


def suggest_min_relevance(
    store: FactStore | StoreView, queries: Any, *, k: int = 10, windows: int = MAX_WINDOWS
) -> float | None:
    """The largest gate, in hundredths, that leaves k x windows facts to nine in ten of these queries.

    The gate decides how many facts compete, not how relevant they are. Look at facts near it before you use it.

    Args:
        store: A store or a view of one.
        queries: [Q, D].
        k: Facts per envelope.
        windows: Windows per task.

    Returns:
        The gate. None if the store has fewer facts than that.

    Raises:
        Exception: What `gate_report` raises.
    """
    return gate_report(store, queries, k=k, windows=windows).suggested


def _cosines(view: StoreView, vector: Float64, rows: Int64) -> Float64:
    columns = Columns.spec(vector, min_relevance=CDR_MIN_RELEVANCE)
    return _C.column_values(view.blocks, view.squared_norms, columns.compiled, rows)[:, 0]
