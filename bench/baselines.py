"""Frozen baselines: what one would write without this package. They are not to be improved with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

CAP, FLOOR = 0.80, 0.20


def numpy_gate_first(unit_rows: Float32, query: Float32, coverage: Float32, residual: Float32, gate: float) -> Any:
    """One float32 product for the gate, then the formula on the rows that pass: (rows, scores)."""
    relevance = unit_rows @ query
    rows = np.flatnonzero(relevance >= gate)
    return rows, _formula(unit_rows[rows], relevance[rows], coverage, residual)


def _formula(rows: Float32, relevance: Float32, coverage: Float32, residual: Float32) -> Float32:
    effective = np.maximum(relevance, (rows @ residual.T).max(1)) if len(residual) else relevance
    novelty = np.maximum(1 - np.minimum(rows @ coverage, CAP), FLOOR)
    scores: Float32 = effective * novelty
    return scores


def torch_skinny(unit_rows: Any, columns: Any, gate: float, k: int) -> Any:
    """All columns in one skinny float32 product, then the formula on every row and a top-k. columns: [2 + R, D] tensor,
    query, coverage centroid, residual."""
    import torch

    x = unit_rows @ columns.T
    relevance, coverage = x[:, 0], x[:, 1]
    effective = torch.maximum(relevance, x[:, 2:].amax(1)) if x.shape[1] > 2 else relevance
    novelty = (1 - coverage.clamp(max=CAP)).clamp(min=FLOOR)
    scores = torch.where(relevance >= gate, effective * novelty, -torch.inf)
    return torch.topk(scores, min(k, len(scores)))
