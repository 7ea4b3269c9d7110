"""What a cosine means in one store: the mean and deviation of every vector's cosines, without a scan.

    calibration = Moments().of(store.view())
    scale, shift = calibration.scale_shift(vectors)          # z = scale * cos(fact, vector) + shift

The mean of cos(f, v) over a store is v·m / |v| and its variance v·C·v / v·v, with the mean m and the covariance C of
the unit rows. Both come from sums over rows that are kept as exact integers: unit rows are rounded to multiples of
2^-41 once, and from there on nothing is rounded before the end. So a store's calibration does not depend on the order
in which facts came, on those that came and went, or on how many parts the facts are spread over. The rounding moves a
coordinate by 2^-42 at most, a fact's cosine to a unit vector by √D 2^-42, and the deviation of the cosines by no more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.spec.constants import NO_DEVIATION
from cdr_kernel.store._fact_store import Bool, StoreView
from cdr_kernel.validation._arrays import Float64, Int64, as_vectors

_BLOCK = 2048  # rows whose products, at most 2^42 each, float64 sums exactly
_HIGH, _LOW = 2.0**20, 2.0**21  # a coordinate is high / 2^20 + low / 2^41, with |high| <= 2^20 and |low| <= 2^20
_BASE = 20  # bits of the lower part of a sum of products
_MASK = (1 << _BASE) - 1
_SELECTIONS = 4  # of some facts, whose sums are kept


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


@dataclass(eq=False)
class Sums:
    """Exact sums over the unit rows of some facts; those of two sets of facts that share none add up.

    A row is 2D integers, the D high parts of its coordinates and the D low ones. first: [2, D] int64, their sums.
    upper, lower: [3, D, D] int64; upper * 2^20 + lower are the sums of the products of the high parts, of the low ones,
    and of high + low, which less the other two are those of high and low, both ways: three symmetric products where
    one of all 2D parts has the work of four. The low parts cannot be left out: they are all there is to a store whose
    facts are nearly alike. Good for 2^31 facts.
    """

    count: int
    first: Int64
    upper: Int64
    lower: Int64

    @classmethod
    def zero(cls, dim: int) -> Sums:
        """Of no facts."""
        square = (3, dim, dim)
        return cls(0, np.zeros((2, dim), np.int64), np.zeros(square, np.int64), np.zeros(square, np.int64))

    def copy(self) -> Sums:
        """The same, in arrays of its own."""
        return Sums(self.count, self.first.copy(), self.upper.copy(), self.lower.copy())

    def __iadd__(self, other: Sums) -> Sums:
        self.count += other.count
        self.first += other.first
        self.upper += other.upper
        self.lower += other.lower
        return self

    def add(self, view: StoreView, rows: Int64, sign: int = 1) -> None:
        """Take in these rows of a view; with sign -1 take them out."""
        for start in range(0, len(rows), _BLOCK):
            some = rows[start : start + _BLOCK]
            low = view.take(some).astype(np.float64) / np.sqrt(view.squared_norms[some, None])
            low *= _HIGH
            high = np.rint(low)
            low -= high
            low *= _LOW
            np.rint(low, out=low)
            self.first += sign * np.stack([high.sum(0), low.sum(0)]).astype(np.int64)
            for i, part in enumerate((high, low, high + low)):
                products = (part.T @ part).astype(np.int64)
                self.upper[i] += sign * (products >> _BASE)
                self.lower[i] += sign * (products & _MASK)
        self.count += sign * len(rows)

    def calibration(self) -> Calibration:
        """Mean and covariance, rounded from the exact sums."""
        dim, n = self.first.shape[1], self.count
        if not n:
            return Calibration(np.zeros(dim), np.zeros((dim, dim)), 0)
        # the products about the mean rounded to integers, c: sum((a - c)(b - c)) leaves nothing large to cancel
        first = np.vstack([self.first, self.first.sum(0)])
        c = np.rint(first[:2] / n).astype(np.int64)
        c = np.vstack([c, c.sum(0)])
        rest = first - n * c
        upper = self.upper - _outer(c, first >> _BASE)
        lower = self.lower - _outer(c, first & _MASK) - _outer(rest, c)
        for parts in (upper, lower):
            parts[2] -= parts[0] + parts[1]
        upper += lower >> _BASE
        mean = rest / n
        crossed = np.outer(mean[0], mean[1])
        high, low, both = (upper * 2.0**_BASE + (lower & _MASK)) / n
        high -= np.outer(mean[0], mean[0])
        low -= np.outer(mean[1], mean[1])
        both -= crossed + crossed.T
        unit = 1.0 / (_HIGH * _LOW)
        covariance = high / _HIGH**2 + both * (unit / _HIGH) + low * unit**2
        return Calibration((c[0] + mean[0]) / _HIGH + (c[1] + mean[1]) * unit, covariance, n)


def _outer(a: Int64, b: Int64) -> Int64:
    """Of each of some vectors [n, D] with its counterpart, [n, D, D]."""
    return a[:, :, None] * b[:, None, :]


class Moments:
    """The calibration of one store, brought up to date by every question. Safe to share among threads.

    Rows are added when they come and subtracted when their facts are removed; after the store was compacted
    everything is summed anew. Views of some facts (`StoreView.select`)
    have sums of their own, of which the last few are kept.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._sums: Sums | None = None
        self._counted: tuple[int, Bool] = (-1, np.zeros(0, np.bool_))  # layout and rows that the sums are of
        self._made: tuple[Bool, Calibration] | None = None
        self._limited: dict[bytes, Moments] = {}  # by the view's selection

    def of(self, view: StoreView) -> Calibration:
        """The calibration of this version of the store, or of the facts that the view is limited to."""
        if view.selection:
            return self._of_some(view).of(replace(view, selection=b""))
        with self._lock:
            if self._made is not None and self._made[0] is view.alive:
                return self._made[1]
            calibration = self._summed(view).calibration()
            self._made = (view.alive, calibration)
            return calibration

    def sums(self, view: StoreView) -> Sums:
        """The sums of this version of the store, the caller's own."""
        if view.selection:
            return self._of_some(view).sums(replace(view, selection=b""))
        with self._lock:
            return self._summed(view).copy()

    def _of_some(self, view: StoreView) -> Moments:
        with self._lock:
            moments = self._limited.pop(view.selection, None) or Moments()
            self._limited[view.selection] = moments
            for old in list(self._limited)[:-_SELECTIONS]:
                del self._limited[old]
            return moments

    def _summed(self, view: StoreView) -> Sums:
        sums, (layout, counted) = self._sums, self._counted
        if sums is None or layout != view.layout or len(counted) > view.rows:
            sums, counted = Sums.zero(view.dim), view.alive[:0]
        before = np.zeros(view.rows, np.bool_)
        before[: len(counted)] = counted
        gone = np.flatnonzero(before & ~view.alive)
        came = np.flatnonzero(view.alive & ~before)
        if len(gone) > len(view) - len(came):  # fewer stayed than went
            sums, gone, came = Sums.zero(view.dim), gone[:0], np.flatnonzero(view.alive)
        self._sums = None  # until it is whole again
        sums.add(view, came)
        sums.add(view, gone, -1)
        self._sums, self._counted = sums, (view.layout, view.alive)
        return sums
