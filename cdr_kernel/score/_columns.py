"""What a window asks of the store, as columns: query, coverage centroid and residual vectors with their settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.spec.constants import CDR_MIN_RELEVANCE
from cdr_kernel.text._repr import one_line
from cdr_kernel.validation._arrays import Float64, Int64, as_array, as_vector, as_vectors, check_rows

QUERY, COVERAGE, RESIDUAL = 0, 1, 2
"""Positions in scale, shift, weight and gate; RESIDUAL is the first of them."""

_ENTRIES_AT_ONCE = 1024


def coverage_centroid(entries: Float64, depth_weights: Float64) -> Float64 | None:
    """The vector whose dot product with a unit fact is §2.2's coverage score; None where that score is 0.

    entries: [C, D] float64, non-zero; depth_weights: [C] float64 in [0, 1]. Equivalent to:
    ``(depth_weights / depth_weights.sum()) @ (entries / norms)``, summed in the order of the entries. A total
    depth of 0 covers nothing (reading R5).

    It is off by at most (C + 5) 2^-53 in length: a weight, a norm, a quotient, a product and C sums round once each.
    Whoever sums coverage in another order must count C roundings too; whoever multiplies this vector need not.
    """
    total = float(_C.exact_sum(depth_weights))
    if total == 0.0:
        return None
    squared_norms, _ = check_rows((entries,))
    norms, weights = np.sqrt(squared_norms)[:, None], (depth_weights / total)[:, None]
    centroid = np.zeros(entries.shape[1])
    for start in range(0, len(entries), _ENTRIES_AT_ONCE):
        some = slice(start, start + _ENTRIES_AT_ONCE)
        for term in weights[some] * (entries[some] / norms[some]):
            centroid += term  # one after the other: numpy's own sums may take another order
    return centroid


class Addend(NamedTuple):
    """What columns add to the values of single rows: column j has rows[starts[j]:starts[j + 1]], ascending, and the
    values that belong to them. starts: int64 [3 + R]; rows: int64, places in the embeddings; values: float64, finite.
    """

    starts: Int64
    rows: Int64
    values: Float64

    @classmethod
    def of(cls, columns: Sequence[tuple[Int64, Float64] | None]) -> Addend:
        """From (rows, values) per column in the order of Columns, None for a column that adds nothing."""
        none = (np.zeros(0, np.int64), np.zeros(0))
        pairs = [none if pair is None else pair for pair in columns]
        starts = np.cumsum([0, *(len(rows) for rows, _ in pairs)])
        return cls(starts, np.concatenate([r for r, _ in pairs]), np.concatenate([v for _, v in pairs]))

    def column(self, j: int) -> tuple[Int64, Float64]:
        """(rows, values) of a column."""
        here = slice(int(self.starts[j]), int(self.starts[j + 1]))
        return self.rows[here], self.values[here]


@dataclass(frozen=True, eq=False)
class Columns:
    """The query, coverage and residual of one window as columns, in this order.

    A fact f has the column values ``scale * cos(f, v) + shift + addend``; for coverage ``scale * dot(f, v) / |f| +
    shift``. It is a candidate if the value of any column reaches that column's gate. Its effective relevance is the
    largest ``weight * value`` over query and residual. `Columns.spec` is the specification: scale 1, shift 0, weight 1,
    and a gate on the query alone.

    Args:
        query: [D] float64.
        coverage: [D] float64, a linear functional of the unit fact. None if nothing is covered.
        residual: [R, D] float64.
        scale: [2 + R] float64.
        shift: [2 + R] float64.
        weight: [2 + R] float64. That of coverage is not used.
        gate: [2 + R] float64. Infinity means that the column is no gate. That of coverage is not used.
        clamp_novelty: Whether novelty is at most 1 (reading R3).
        gate_only: bool [2 + R]: columns that take no part in the effective relevance. None is none of them.
        addend: What is added for single rows. None is nothing.
        factors_above_zero: Whether importance, multiplier, novelty and n-gram penalty leave an effective relevance
            alone that is not above 0.

    Raises:
        ValueError: For vectors that are zero, not finite or misshapen, and for settings that are NaN or misshapen.
    """

    query: Float64
    coverage: Float64 | None
    residual: Float64
    scale: Float64
    shift: Float64
    weight: Float64
    gate: Float64
    clamp_novelty: bool = False
    gate_only: npt.NDArray[np.bool_] | None = None
    addend: Addend | None = None
    factors_above_zero: bool = False
    compiled: Any = field(init=False, repr=False)

    __repr__ = one_line

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
        gate_only = np.zeros(len(vectors), np.bool_)
        if self.gate_only is not None:
            gate_only = np.array(self.gate_only)
            if gate_only.dtype != np.bool_ or gate_only.shape != (len(vectors),):
                raise ValueError(f"gate_only: expected {len(vectors)} bools, got {self.gate_only!r}")
        addend = self.addend
        if addend is not None:
            values = as_array(addend.values, 1, "addend").astype(np.float64)
            if not np.isfinite(values).all():
                raise ValueError("addend: expected finite values")
            addend = Addend(np.asarray(addend.starts, np.int64), np.asarray(addend.rows, np.int64), values)
        compiled = _C.Columns(
            vectors,
            squared_norms,
            **settings,
            has_coverage=coverage is not None,
            clamp_novelty=bool(self.clamp_novelty),
            gate_only=gate_only,
            factors_above_zero=bool(self.factors_above_zero),
            addend_starts=None if addend is None else addend.starts,
            addend_rows=None if addend is None else addend.rows,
            addend_values=None if addend is None else addend.values,
        )
        for name, value in {
            "query": query,
            "coverage": coverage,
            "residual": residual,
            **settings,
            "gate_only": gate_only,
            "addend": addend,
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
        """The columns of CRP-SPEC-024 §2.2 to §2.7.

        Args:
            query: [D].
            coverage: [C, D], the coverage entries.
            depth_weights: [C], in [0, 1].
            residual: [R, D], the remaining sub-queries.
            min_relevance: The gate of §2.6 on cos(fact, query). -inf is no gate.
            first_window_pull: Whether the residual pulls while there is no coverage entry (§2.7, reading R1).
            clamp_novelty: Whether novelty is at most 1 (reading R3).

        Raises:
            ValueError: For a vector that is zero, not finite or misshapen, a depth outside [0, 1], and NaN.
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

    def gates_alone(self) -> Columns:
        """The same without coverage and the columns that are no gate, which need not be multiplied."""
        keep = np.flatnonzero(self.gate < np.inf)
        if self.addend is not None or (self.coverage is None and len(keep) >= len(self.residual) + 1):
            return self
        pulls = keep[keep >= RESIDUAL]
        at = np.concatenate([np.arange(RESIDUAL), pulls])
        return Columns(
            query=self.query,
            coverage=None,
            residual=self.residual[pulls - RESIDUAL],
            scale=self.scale[at],
            shift=self.shift[at],
            weight=self.weight[at],
            gate=self.gate[at],
        )

    @property
    def gated_addend(self) -> bool:
        """Whether what is added for single rows decides who passes."""
        return self.addend is not None and bool((np.diff(self.addend.starts)[self.gate < np.inf] > 0).any())

    @property
    def plain(self) -> bool:
        """Whether scores are made of scale, shift and weight alone."""
        gates_only = self.gate_only is not None and bool(self.gate_only.any())
        return not (gates_only or self.factors_above_zero or (self.addend is not None and len(self.addend.rows)))

    @property
    def coverage_parts(self) -> tuple[Float64, float]:
        """The coverage functional as a vector [D] whose largest magnitude is 1, and the number that it is to be
        multiplied with; zeros and 0 where nothing is covered. No square of it leaves the range of float64."""
        largest = 0.0 if self.coverage is None else float(np.abs(self.coverage).max())
        if self.coverage is None or largest == 0.0:
            return np.zeros(self.dim), 0.0
        return self.coverage / largest, largest

    @property
    def dim(self) -> int:
        """D."""
        return len(self.query)
