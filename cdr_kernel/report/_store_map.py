"""A flat map of a store for people to look at: where a task's sub-queries and facts lie among the rest.

Two directions are the axes, the principal ones of the task's sub-queries and query (of the store's facts where a task
has fewer than three of them). The same store and task give the same map. It shows two of many dimensions: what lies
together on it need not be alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.validation._arrays import Float64

MOST_POINTS = 1500
"""Facts of the store that a map shows; of more, evenly spaced ones."""

_DECIMALS = 4


class StoreMap:
    """A map of one version of a store for one task. view: the store; query: [D]; sub_queries: [S, D]."""

    def __init__(self, view: StoreView, query: Any, sub_queries: Any) -> None:
        self._view = view
        task = _units(np.vstack([np.asarray(query, np.float64)[None], np.asarray(sub_queries, np.float64)]))
        alive = np.flatnonzero(view.alive)
        shown = alive[np.linspace(0, len(alive) - 1, min(len(alive), MOST_POINTS)).round().astype(np.int64)]
        rows = _units(view.take(shown).astype(np.float64)) if len(shown) else np.zeros((0, view.dim))
        spanning = task if len(task) > 3 or len(rows) < 3 else rows
        self._centre = spanning.mean(0)
        _, lengths, directions = np.linalg.svd(spanning - self._centre, full_matrices=False)
        axes = np.zeros((2, view.dim))
        axes[: min(2, len(directions))] = directions[:2]
        largest = np.abs(axes).argmax(axis=1)
        axes *= np.where(axes[[0, 1], largest] < 0.0, -1.0, 1.0)[:, None]  # a direction has no sign of its own
        self._axes = axes
        total = float((lengths**2).sum())
        self.share = [float(x) for x in (lengths[:2] ** 2 / total if total else np.zeros(2)).round(_DECIMALS)]
        self._points, places = self._flat(rows), self._flat(task)
        self._query, self._sub_queries = places[0], places[1:]

    def _flat(self, units: Float64) -> list[list[float]]:
        flat: list[list[float]] = ((units - self._centre) @ self._axes.T).round(_DECIMALS).tolist()
        return flat

    def places(self, ids: Iterable[str]) -> list[list[float] | None]:
        """[x, y] of facts, None for one that this version of the store does not have."""
        out: list[list[float] | None] = []
        for id in ids:
            try:
                row = self._view.row_of(id)
            except KeyError:
                out.append(None)
            else:
                out += self._flat(_units(self._view.take(np.array([row])).astype(np.float64)))
        return out

    def as_dict(self) -> dict[str, Any]:
        """For a RUN.json: `points` [n, 2] of facts of the store, `query`, `sub_queries` in order, and `share`, what
        each axis shows of the spread of what spans the map."""
        return {
            "points": self._points,
            "query": self._query,
            "sub_queries": self._sub_queries,
            "share": self.share,
        }


def _units(rows: Float64) -> Float64:
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scaled = rows / largest
    units: Float64 = scaled / np.linalg.norm(scaled, axis=1, keepdims=True)
    return units
