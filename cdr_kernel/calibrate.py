"""What a cosine means in one store: the mean and deviation of every vector's cosines, without a scan.

    calibration = Moments().of(store.view())
    scale, shift = calibration.scale_shift(vectors)          # z = scale * cos(fact, vector) + shift

The mean of cos(f, v) over a store is v·m / |v| and its variance v·C·v / v·v, with the mean m and the covariance C of
the unit rows. Both are sums over rows, so they follow a store as it grows and shrinks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdr_kernel.arrays import Float64, Int64, as_vectors
from cdr_kernel.constants import NO_DEVIATION
from cdr_kernel.store import Bool, StoreView

_BLOCK = 4096
_RECOMPUTED_AT = 0.1  # share of the counted rows that were subtracted


@dataclass(frozen=True, eq=False)
class Calibration:
    """Mean [D] and covariance [D, D] float64 of the unit rows of the `count` facts that are not removed.

    The covariance is that of the population (divided by count). Zeros where there are no facts.
    """

    mean: Float64
    covariance: Float64
    count: int

    def scale_shift(self, vectors: Any) -> tuple[Float64, Float64]:
        """(scale [n], shift [n]) that turn cosines to these vectors [n, D] into z-scores over the store.

        Equivalent to ``z = (cos - cos.mean()) / cos.std()``. Where the deviation is 0 both are 0, and so is z.
        Raises ValueError for zero, non-finite and misshapen vectors.
        """
        given = as_vectors(vectors, len(self.mean), "vectors")
        unit = given / np.linalg.norm(given, axis=1, keepdims=True)
        deviation = np.sqrt(np.maximum(0.0, np.einsum("nd,de,ne->n", unit, self.covariance, unit, optimize=True)))
        known = deviation > NO_DEVIATION
        scale = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=known)
        return scale, np.where(known, -scale * (unit @ self.mean), 0.0)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over the counted rows of layout `layout`, of unit row - origin, which keeps small spreads exact."""

    layout: int
    origin: Float64
    first: Float64  # [D]
    second: Float64  # [D, D]
    counted: Bool  # by row
    subtracted: int


class Moments:
    """The calibration of one store, brought up to date by every question. Safe to share among threads.

    Rows are added in blocks of 4,096 and subtracted when their facts are removed; after a tenth of them was
    subtracted, or the store was compacted, everything is summed anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: _Sums | None = None
        self._made: tuple[Bool, Calibration] | None = None

    def of(self, view: StoreView) -> Calibration:
        """The calibration of this version of the store."""
        with self._lock:
            if self._made is not None and self._made[0] is view.alive:
                return self._made[1]
            self._sums = self._summed(view)
            calibration = _calibration(self._sums, len(view), view.dim)
            self._made = (view.alive, calibration)
            return calibration

    def _summed(self, view: StoreView) -> _Sums:
        held = self._sums
        if held is not None and held.layout == view.layout and len(held.counted) <= view.rows:
            counted = np.zeros(view.rows, np.bool_)
            counted[: len(held.counted)] = held.counted
            gone = np.flatnonzero(counted & ~view.alive)
            came = np.flatnonzero(view.alive & ~counted)
            subtracted = held.subtracted + len(gone)
            if subtracted <= _RECOMPUTED_AT * np.count_nonzero(counted):
                first, second = held.first.copy(), held.second.copy()
                _add(first, second, view, came, held.origin, 1.0)
                _add(first, second, view, gone, held.origin, -1.0)
                return _Sums(view.layout, held.origin, first, second, view.alive, subtracted)
        rows = np.flatnonzero(view.alive)
        origin = _units(view, rows[:1])[0] if len(rows) else np.zeros(view.dim)
        first, second = np.zeros(view.dim), np.zeros((view.dim, view.dim))
        _add(first, second, view, rows, origin, 1.0)
        return _Sums(view.layout, origin, first, second, view.alive, 0)


def _units(view: StoreView, rows: Int64) -> Float64:
    unit: Float64 = view.take(rows).astype(np.float64) / np.sqrt(view.squared_norms[rows, None])
    return unit


def _add(first: Float64, second: Float64, view: StoreView, rows: Int64, origin: Float64, sign: float) -> None:
    for start in range(0, len(rows), _BLOCK):
        x = _units(view, rows[start : start + _BLOCK]) - origin
        first += sign * x.sum(0)
        second += sign * (x.T @ x)


def _calibration(sums: _Sums, count: int, dim: int) -> Calibration:
    if not count:
        return Calibration(np.zeros(dim), np.zeros((dim, dim)), 0)
    offset = sums.first / count
    return Calibration(sums.origin + offset, sums.second / count - np.outer(offset, offset), count)
