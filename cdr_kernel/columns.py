"""What a window asks of the store, as columns: query, coverage centroid and residual vectors with their settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from cdr_kernel import _C
from cdr_kernel.arrays import Float64, as_array, as_vector, as_vectors, check_rows
from cdr_kernel.constants import CDR_MIN_RELEVANCE

QUERY, COVERAGE, RESIDUAL = 0, 1, 2
"""Positions in scale, shift, weight and gate; RESIDUAL is the first of them."""


def coverage_centroid(entries: Float64, depth_weights: Float64) -> Float64 | None:
    """The vector whose dot product with a unit fact is §2.2's coverage score; None where that score is 0.

    entries: [C, D] float64, non-zero; depth_weights: [C] float64 in [0, 1]. Equivalent to:
    ``(depth_weights / depth_weights.sum()) @ (entries / norms)``, summed in the order of the entries. A total
    depth of 0 covers nothing (reading R5).
    """
    total = float(_C.exact_sum(depth_weights))
    if total == 0.0:
        return None
    squared_norms, _ = check_rows((entries,))
    centroid = np.zeros(entries.shape[1])
    for entry, norm, weight in zip(entries, np.sqrt(squared_norms), depth_weights, strict=True):
        centroid += (weight / total) * (entry / norm)
    return centroid


@dataclass(frozen=True, eq=False)
class Columns:
    """What a window asks of the store: one column per vector, in the order query, coverage, residual.

    query: [D] float64; coverage: [D] float64 or None, a linear functional of the unit fact (no entry covers
    anything where it is None); residual: [R, D] float64. scale, shift, weight, gate: [2 + R] float64.
    A fact f has the column values ``scale * cos(f, v) + shift`` (coverage: ``scale * dot(f, v) / |f| + shift``);
    it is a candidate if any column's value is at or above that column's gate (infinity: the column is no gate);
    its effective relevance is the largest ``weight * value`` over query and residual. The coverage column's
    weight and gate are not used.

    The specification is the setting scale 1, shift 0, weight 1, gate on the query alone: ``Columns.spec``.
    Raises ValueError for zero, non-finite or misshapen vectors and for settings that are NaN or misshapen.
    """

    query: Float64
    coverage: Float64 | None
    residual: Float64
    scale: Float64
    shift: Float64
    weight: Float64
    gate: Float64
    clamp_novelty: bool = False
    compiled: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        query = as_vector(self.query, None, "query")
        dim = len(query)
        residual = as_vectors(self.residual, dim, "residual")
        coverage = None
        if self.coverage is not None:
            coverage = as_array(self.coverage, 1, "coverage").astype(np.float64)
            if coverage.shape != (dim,) or not np.isfinite(coverage).all():
                raise ValueError(f"coverage: expected {dim} finite numbers, got shape {list(coverage.shape)}")
        vectors = np.vstack([query[None], np.zeros((1, dim)) if coverage is None else coverage[None], residual])
        settings = {}
        for name in ("scale", "shift", "weight", "gate"):
            a = as_array(getattr(self, name), 1, name).astype(np.float64)
            if a.shape != (len(vectors),):
                raise ValueError(f"{name}: expected {len(vectors)} entries, got {len(a)}")
            if np.isnan(a).any() or (name != "gate" and not np.isfinite(a).all()):
                raise ValueError(f"{name}: expected numbers, got {a.tolist()}")
            settings[name] = a
        squared_norms, _ = check_rows((vectors,))
        compiled = _C.Columns(
            vectors,
            squared_norms,
            **settings,
            has_coverage=coverage is not None,
            clamp_novelty=bool(self.clamp_novelty),
        )
        for name, value in {
            "query": query,
            "coverage": coverage,
            "residual": residual,
            **settings,
            "compiled": compiled,
        }.items():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(self, name, value)

    @classmethod
    def spec(
        cls,
        query: Any,
        *,
        coverage: Any = None,
        depth_weights: Any = None,
        residual: Any = None,
        min_relevance: float = CDR_MIN_RELEVANCE,
        first_window_pull: bool = False,
        clamp_novelty: bool = False,
    ) -> Columns:
        """The columns of CRP-SPEC-024 §2.2-2.7.

        query: [D]; coverage: [C, D] entries with depth_weights [C] in [0, 1]; residual: [R, D]. min_relevance:
        the gate of §2.6 on cos(fact, query), a number (-inf: no gate). While there is no coverage entry the
        residual does not pull (§2.7, reading R1) unless first_window_pull. clamp_novelty: novelty at most 1
        (reading R3). Raises ValueError for a zero, non-finite or misshapen vector, a depth outside [0, 1], a NaN.
        """
        q = as_vector(query, None, "query")
        entries = as_vectors([] if coverage is None else coverage, len(q), "coverage")
        pulls = as_vectors([] if residual is None else residual, len(q), "residual")
        depths = as_array([] if depth_weights is None else depth_weights, 1, "depth_weights").astype(np.float64)
        if len(depths) != len(entries):
            raise ValueError(f"depth_weights: expected {len(entries)} (one per coverage entry), got {len(depths)}")
        if isinstance(min_relevance, bool) or not isinstance(min_relevance, Real):
            raise TypeError(f"min_relevance: expected a number, got {min_relevance!r}")
        outside = np.flatnonzero(~((depths >= 0.0) & (depths <= 1.0)))
        if len(outside):
            raise ValueError(f"depth_weights: expected 0 to 1, got {depths[outside[0]]} at entry {outside[0]}")
        if len(entries) == 0 and not first_window_pull:
            pulls = pulls[:0]
        count = RESIDUAL + len(pulls)
        gate = np.full(count, np.inf)
        gate[QUERY] = min_relevance
        return cls(
            query=q,
            coverage=coverage_centroid(entries, depths) if len(entries) else None,
            residual=pulls,
            scale=np.ones(count),
            shift=np.zeros(count),
            weight=np.ones(count),
            gate=gate,
            clamp_novelty=clamp_novelty,
        )

    @property
    def dim(self) -> int:
        """D."""
        return len(self.query)
