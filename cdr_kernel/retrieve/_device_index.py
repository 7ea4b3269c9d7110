"""The index of a retriever of kind "device": which rows pass the gates, and which may be among the k best.

The device computes a bound for every row (see `score._bound_search`), in the dtype of its rows. The exact routine on
the host decides the rows that the bounds leave open. So the answers are those of a scan, to the last bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.score import Columns
from cdr_kernel.score._cdr_score import Factors, choose_impl
from cdr_kernel.score._columns import QUERY
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.validation._arrays import Float64, Int64

if TYPE_CHECKING:
    from cdr_kernel.score._device_rows import DeviceRows


class DeviceIndex:
    """Searches over rows on a device; safe to share among threads.

    rows: where they are kept. The passes are Triton's where it runs on that device, else plain torch.
    """

    def __init__(self, rows: DeviceRows) -> None:
        self.rows = rows
        impl = choose_impl(None, rows.device)
        self._impl = "torch" if impl == "cpp" else impl

    def candidates_each(self, columns: list[Columns], view: StoreView) -> list[Int64]:
        """For each of the columns the rows of the view, int64 ascending, that are alive and pass a gate; one pass over
        the rows for all of them."""
        gates = [c.gates_alone() for c in columns]
        found = self._search(gates, view, None, [Factors(None, None, None)] * len(gates), None)
        return [
            rows[_C.gate_rows(view.blocks, view.squared_norms, c.compiled, rows)]
            for rows, c in zip(found, gates, strict=True)
        ]

    def top(
        self,
        columns: Columns,
        view: StoreView,
        rows: Int64 | None,
        k: int,
        importance: Float64 | None = None,
        multiplier: Float64 | None = None,
        ngram_overlap: npt.NDArray[np.int32] | None = None,
    ) -> Int64:
        """Positions in rows, ascending, that hold the k best by exact score and all that tie with them.

        As `ScanIndex.top`: rows are int64 [M] of the view, None for all that are alive; gates are not applied.
        """
        gate = np.full(len(columns.gate), np.inf)
        gate[QUERY] = -np.inf
        factors = Factors(importance, multiplier, ngram_overlap)
        return self._search([replace(columns, gate=gate)], view, rows, [factors], k)[0]

    def _search(
        self, columns: list[Columns], view: StoreView, rows: Int64 | None, factors: list[Factors], k: int | None
    ) -> list[Int64]:
        from cdr_kernel.score._bound_search import bounded_search

        there = self.rows.at(view)
        source = (there if rows is None else there.narrow(rows)).source(False)
        return bounded_search(self._impl, view.blocks, view.squared_norms, columns, rows, factors, k, source)
