"""The torch implementation: one matrix product of facts and columns, the formula on it, and a bound on its error.

It names the rows that belong to the answer and perhaps a few more; the exact routine decides (see ``score``). It
runs on whatever device the embeddings are on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from cdr_kernel.score._columns import COVERAGE, QUERY, RESIDUAL, Columns
from cdr_kernel.spec.constants import COVERAGE_PENALTY_CAP, MIN_NOVELTY_FLOOR, NGRAM_PENALTY_CAP, NGRAM_PENALTY_STEP
from cdr_kernel.validation._arrays import Float64, Int64, is_tensor, take_rows

if TYPE_CHECKING:
    from cdr_kernel.score._cdr_score import Factors

_CHUNK_BYTES = 64 << 20
_FLOAT32_SAFE = 2.0**40  # products and sums of numbers up to this size are far inside float32's range
_TINY = float(np.finfo(np.float64).tiny)  # more than what scores lose that are too small for a full mantissa


def torch_candidates(
    data: tuple[Any, ...],
    squared_norms: Float64 | None,
    sessions: Sequence[Columns],
    index: Int64 | None,
    factors: Sequence[Factors],
    k: int | None,
) -> list[Int64]:
    """For each session the positions (in index; None: rows) that may pass a gate and be among the k best.

    data: numpy blocks [N_i, D] with squared_norms float64 [N], or one tensor on a device without them. A chunk of
    rows (64 MiB in float32) is multiplied with the columns of all sessions at once, so memory stays bounded whatever
    N is. Nothing that belongs to the answer is left out.
    """
    if not sessions:
        return []
    device = data[0].device if is_tensor(data[0]) else torch.device("cpu")
    unit = torch.from_numpy(np.concatenate([_unit_columns(c) for c in sessions])).to(device)
    ends = np.cumsum([len(c.scale) for c in sessions]).tolist()
    norms = None if squared_norms is None else np.sqrt(squared_norms)
    if norms is not None and index is not None:
        norms = norms[index]
    found = [_Found(c, f, device, index) for c, f in zip(sessions, factors, strict=True)]
    for start, stop, rows in _chunks(data, index, unit.shape[1]):
        chunk_norms = None if norms is None else torch.from_numpy(norms[start:stop])
        x, bound = _dots(rows, chunk_norms, unit)
        for each, end in zip(found, ends, strict=True):
            each.look(x[:, end - len(each.columns.scale) : end], bound, start, keep_scores=k is not None)
    return [each.positions(k) for each in found]


class _Found:
    """What one session's formula says of the chunks so far."""

    def __init__(self, columns: Columns, factors: Factors, device: torch.device, index: Int64 | None) -> None:
        self.columns = columns
        self._index = index
        self._factors = factors
        self._device = device
        self._kept: list[Int64] = []
        self._lower: list[Float64] = []
        self._upper: list[Float64] = []

    def look(self, x: torch.Tensor, bound: float, start: int, keep_scores: bool) -> None:
        """x: [n, 2 + R] dot products of unit rows and unit columns, each off by at most bound."""
        c = self.columns
        if (
            max(np.abs(a[np.isfinite(a)]).max(initial=0.0) for a in (c.scale, c.shift, c.weight, c.gate))
            > _FLOAT32_SAFE
        ):
            x = x.double()
        ulp = torch.finfo(x.dtype).eps
        scale, shift, weight, gate = (
            torch.tensor(a, device=x.device, dtype=x.dtype) for a in (c.scale, c.shift, c.weight, c.gate)
        )
        values = x * scale + shift
        size = scale.abs() + shift.abs()
        if c.addend is not None:
            for j in range(len(c.scale)):
                added = self._added(*c.addend.column(j), start, len(x))
                if added is not None:
                    values[:, j] += torch.from_numpy(added).to(values)
                    size[j] += float(np.abs(added).max())
        off = scale.abs() * bound + 4 * ulp * size
        # The one column that is no unit vector. Its entries are summed already: what that lost is in the vector, and
        # the exact routine multiplies the same one, so D roundings of its length count, however many entries it has.
        if c.coverage is not None:
            vector, largest = c.coverage_parts
            off[COVERAGE] *= max(1.0, largest * float(np.linalg.norm(vector)))
        slack = off + 2 * ulp * gate.abs().nan_to_num(posinf=0.0)
        open_gate = gate == -torch.inf
        may = (values >= gate - slack) | open_gate
        sure = (values >= gate + slack) | open_gate
        may[:, COVERAGE] = False
        sure[:, COVERAGE] = False
        positions = torch.nonzero(may.any(1)).squeeze(1)
        self._kept.append(start + positions.cpu().numpy())
        if not keep_scores:
            return
        values, certain = values[positions].double(), sure.any(1)[positions]
        weight, off, size = weight.double(), off.double(), size.double()
        weighted = weight * values
        weighted[:, torch.from_numpy(np.array(c.gate_only)).to(weighted.device)] = -torch.inf
        weighted[:, COVERAGE] = weighted[:, QUERY]
        effective = weighted.amax(1)
        if c.gate_only is None or c.gate_only[RESIDUAL:].all():
            effective = effective.clamp(min=0.0)  # no residual pulls with 0 (§2.2)
        weight[COVERAGE] = 0.0
        pull_off = (weight.abs() * (off + 4 * ulp * size)).max()
        covered = values[:, COVERAGE] if c.coverage is not None else torch.zeros_like(effective)
        cover_off = off[COVERAGE] if c.coverage is not None else 0.0
        novelty = (1.0 - covered.clamp(max=COVERAGE_PENALTY_CAP)).clamp(min=MIN_NOVELTY_FLOOR)
        if c.clamp_novelty:
            novelty = novelty.clamp(max=1.0)
        strength = self._strength(start + positions.cpu().numpy())
        reach = effective.abs() + pull_off
        error = strength * (reach * cover_off + novelty * pull_off + 8 * ulp * reach * (novelty + 1.0)) + _TINY
        score = strength * effective * novelty
        if c.factors_above_zero:
            score = torch.where(effective > 0.0, score, effective)
            error = error + pull_off + 8 * ulp * reach
        lower = torch.where(certain, score - error, -torch.inf)
        self._upper.append((score + error).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).cpu().numpy())
        self._lower.append(lower.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).cpu().numpy())

    def _added(self, rows: Int64, values: Float64, start: int, count: int) -> Float64 | None:
        """A column's addends of the candidates from `start` on, float64 [count]; None where they have none."""
        if not len(rows):
            return None
        wanted = np.arange(start, start + count) if self._index is None else self._index[start : start + count]
        at = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
        return np.where(rows[at] == wanted, values[at], 0.0)

    def _strength(self, positions: Int64) -> torch.Tensor:
        """importance x multiplier x (1 - n-gram penalty) of candidates, float64."""
        f = self._factors.take(positions)
        strength = np.ones(len(positions))
        for values in (f.importance, f.multiplier):
            if values is not None:
                strength *= values
        if f.ngram_overlap is not None:
            strength *= 1.0 - np.minimum(NGRAM_PENALTY_CAP, f.ngram_overlap * NGRAM_PENALTY_STEP)
        return torch.from_numpy(strength).to(self._device)

    def positions(self, k: int | None) -> Int64:
        """Ascending. With k: those whose upper bound reaches the k-th best lower bound."""
        kept = np.concatenate(self._kept) if self._kept else np.zeros(0, np.int64)
        if k is None or k >= len(kept):
            return kept
        if k == 0:
            return kept[:0]
        lower = np.concatenate(self._lower)
        threshold = np.partition(lower, len(lower) - k)[len(lower) - k]
        return np.asarray(kept[np.concatenate(self._upper) >= threshold])


def _unit_columns(c: Columns) -> Float64:
    """[2 + R, D]: query and residual as unit vectors, the coverage functional (zeros if none) as it is."""
    norms = np.sqrt(np.array(c.compiled.squared_norms))
    norms[COVERAGE] = 1.0
    coverage = np.zeros(c.dim) if c.coverage is None else c.coverage
    unit: Float64 = np.vstack([c.query[None], coverage[None], c.residual]) / norms[:, None]
    return unit


def _chunks(data: tuple[Any, ...], index: Int64 | None, dim: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(start, stop, rows [stop - start, D]) over the candidates."""
    size = max(1, _CHUNK_BYTES // (4 * dim))
    if index is None:
        start = 0
        for block in data:
            tensor = block if is_tensor(block) else borrowed(block)
            for part in tensor.split(size) if len(tensor) else ():
                yield start, start + len(part), part
                start += len(part)
        return
    for start in range(0, len(index), size):
        rows = index[start : start + size]
        if is_tensor(data[0]):
            part = data[0][torch.from_numpy(rows).to(data[0].device)]
        else:
            part = torch.from_numpy(take_rows(data, rows))
        yield start, start + len(rows), part


def borrowed(a: npt.NDArray[Any]) -> torch.Tensor:
    """a as a tensor without a copy. torch warns of arrays that are read-only; nobody writes to this one."""
    if a.flags.writeable:
        return torch.from_numpy(a)
    memory = (ctypes.c_byte * a.nbytes).from_address(a.ctypes.data)
    alias: npt.NDArray[Any] = np.ndarray(a.shape, a.dtype, buffer=memoryview(memory).cast("B"))
    return torch.from_numpy(alias)


def _dots(rows: torch.Tensor, norms: torch.Tensor | None, unit: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Dot products [n, C] of the rows' directions with the columns, and a bound on their error.

    (D + 16) units of roundoff cover the norm, the division, the vector's own rounding and the sum in any order;
    a reduced matmul precision (TF32, bfloat16) rounds both factors once more.
    """
    x = rows.double() if rows.dtype == torch.float64 else rows.float()
    if norms is None:
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        bad = torch.nonzero(~(torch.isfinite(norms) & (norms > 0)))
        if len(bad):
            raise ValueError(f"embeddings: a row is not finite or all zeros (row {int(bad[0])} of its chunk)")
    in_range = ((norms > 1.0 / _FLOAT32_SAFE) & (norms < _FLOAT32_SAFE)).all() and unit.abs().max() < _FLOAT32_SAFE
    if x.dtype == torch.float32 and not in_range:
        x = x.double()  # sums would leave float32's range
    bound = (unit.shape[1] + 16) * torch.finfo(x.dtype).eps
    if x.dtype == torch.float32:
        bound += {"highest": 0.0, "high": 2.0**-9}.get(torch.get_float32_matmul_precision(), 2.0**-6)
    return (x @ unit.to(x.dtype).T) / norms.to(x.dtype)[:, None], bound
