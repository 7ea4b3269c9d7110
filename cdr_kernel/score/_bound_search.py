"""Upper bounds of scores: columns packed with the margin of the arithmetic, and the search that needs nothing else.

A fast pass over the rows (Triton on a GPU, plain torch elsewhere) writes for every row a float32 that is never below
the row's exact score. The rows with the largest bounds are scored exactly; once the next bound lies below the k-th best
exact score nothing that was not fetched can belong to the answer.

docs/proofs.md has the proofs: claims B1 to B6, and E4 for coverage functionals.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cdr_kernel.score._columns import COVERAGE, QUERY, RESIDUAL, Columns
from cdr_kernel.spec.constants import COVERAGE_PENALTY_CAP, MIN_NOVELTY_FLOOR, NGRAM_PENALTY_CAP, NGRAM_PENALTY_STEP
from cdr_kernel.validation._arrays import Float64, Int64

if TYPE_CHECKING:
    from cdr_kernel.score._cdr_score import Factors

ULP = 2.0**-23
FEW_COLUMNS = 4
"""Up to this many columns in all are plain products and sums of float32; more go through the matrix units."""

_OUT_BYTES = 4 << 30
_CHUNK_BYTES = 64 << 20
_TINY = float(np.finfo(np.float64).tiny)  # more than what scores lose that are too small for a full mantissa
_LARGEST = 2.0**20  # settings beyond it are not bounded: every row that may pass is fetched


class Rows(NamedTuple):
    """Rows as a pass reads them.

    values: [R, D]; picked: int64 [n], the rows to look at (None: all). scale: float32 [R], 1 / |row| (for int8 times
    the scale of its codes), 0 where it is not known; None: to be computed. error: float32 [R] or None. alive: uint8 [R]
    or None.
    """

    values: torch.Tensor
    picked: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    error: torch.Tensor | None = None
    alive: torch.Tensor | None = None


class Factors32(NamedTuple):
    """importance, multiplier: float32 [n], each over a power of two; overlap: int32 [B, n]; None: 1, 1 and 0."""

    importance: torch.Tensor | None = None
    multiplier: torch.Tensor | None = None
    overlap: torch.Tensor | None = None

    def take(self, place: Any) -> Factors32:
        """The factors of the candidates at this slice or at these positions."""
        return Factors32(*(None if f is None else f[..., place] for f in self))

    def of(self, order: Int64) -> Factors32:
        """The factors of these sessions."""
        if self.overlap is None or len(self.overlap) == 1:
            overlap = None if self.overlap is None else self.overlap.expand(len(order), -1)
        else:
            overlap = self.overlap[torch.from_numpy(order).to(self.overlap.device)]
        return self._replace(overlap=overlap)


@dataclass(frozen=True, eq=False)
class Packed:
    """Columns of B sessions as a pass reads them; the layout is that of ``score_bounds_kernel``.

    order: which sessions, int64 [B]; unit: float64 [B], the power of two that their bounds are to be multiplied with.
    """

    vectors: torch.Tensor
    columns: torch.Tensor
    sessions: torch.Tensor
    order: Int64
    unit: Float64
    group: int
    parts: int
    tiles: int
    groups: int
    dot: bool
    precision: str
    weighted: bool

    @property
    def count(self) -> int:
        """B."""
        return len(self.order)


Pass = Callable[[Packed, Rows, Factors32, torch.Tensor], None]
"""Writes the bounds of rows to a tensor [B, n] float32."""


def product_dtype(rows: torch.dtype) -> torch.dtype:
    """The dtype of the factors of the product over rows of this dtype."""
    return {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16, torch.int8: torch.float16}.get(
        rows, torch.float32
    )


def pack(
    sessions: Sequence[Columns],
    dtype: torch.dtype,
    dim: int,
    *,
    norms: bool,
    device: torch.device,
    limits: tuple[int, int] = (32, 128),
    precision: str = "tf32",
    loss: float = 0.0,
) -> list[Packed]:
    """The columns of sessions for rows of this dtype, one Packed per launch.

    dim: D of the rows as held, at least that of the columns (zeros are added). norms: whether the rows' scales are
    given. limits: sessions side by side and columns in a tile. precision: of float32 factors, "tf32" or "ieee". loss:
    what products may lose beside that, relative to |row| |column|.
    Sessions of similar size share a launch, so that few padding columns are multiplied; small ones share one always.
    """
    sizes = np.array([len(c.scale) for c in sessions])
    classes = _power_of_two(sizes)
    if len(sessions) and _power_of_two(len(sessions)) * classes.max() <= limits[1] and len(sessions) <= limits[0]:
        classes[:] = classes.max()
    return [
        _pack_class([sessions[i] for i in order.tolist()], order, dtype, dim, norms, device, limits, precision, loss)
        for order in (np.flatnonzero(classes == size) for size in np.unique(classes))
    ]


def _pack_class(
    sessions: list[Columns],
    order: Int64,
    dtype: torch.dtype,
    dim: int,
    norms: bool,
    device: torch.device,
    limits: tuple[int, int],
    precision: str,
    loss: float,
) -> Packed:
    roles = max(len(c.scale) for c in sessions)
    group = min(limits[0], int(_power_of_two(len(sessions))))
    groups = -(-len(sessions) // group)
    parts = min(int(_power_of_two(roles)), max(1, limits[1] // group))
    dot = groups > 1 or group * int(_power_of_two(roles)) > FEW_COLUMNS
    parts = max(parts, -(-16 // group)) if dot else int(_power_of_two(roles))
    tiles = -(-roles // parts)
    product = product_dtype(dtype) if dot else torch.float32
    # docs/proofs.md, B2.
    arithmetic = (dim + 16) * ULP * (2.0 if dot else 1.0) + loss
    if dot and product == torch.float32 and precision == "tf32":
        arithmetic += 2.0**-9 + 2.0**-20
    if not norms:
        arithmetic += (dim + 16) * ULP
    if dtype == torch.float64:
        arithmetic += ULP
    settings = _Settings(sessions, roles)
    place = np.arange(len(sessions)) // group, slice(0, roles), np.arange(len(sessions)) % group
    vectors = np.zeros((groups, tiles * parts, group, dim))
    vectors[place[0], :roles, place[2], : settings.dim] = settings.vectors
    held = torch.from_numpy(vectors).to(product)
    back = held.double().numpy()
    distance = np.sqrt(np.square(vectors - back).sum(axis=-1)) + 1e-14
    length = np.sqrt(np.square(back).sum(axis=-1))
    margin = (1.01 * (distance + arithmetic * length))[place]
    numbers = np.zeros((groups, tiles * parts, group, 3), np.float32)
    numbers[..., :2] = -np.inf
    numbers[place] = settings.column_numbers(margin)
    each = np.zeros((groups, group, 8), np.float32)
    each[place[0], place[2]] = settings.session_numbers(margin[:, COVERAGE])
    return Packed(
        vectors=held.reshape(groups, tiles, parts * group, dim).to(device),
        columns=torch.from_numpy(
            np.ascontiguousarray(numbers.reshape(groups, tiles, parts, group, 3).transpose(0, 1, 4, 2, 3))
        ).to(device),
        sessions=torch.from_numpy(np.ascontiguousarray(each.transpose(0, 2, 1))).to(device),
        order=order,
        unit=settings.unit,
        group=group,
        parts=parts,
        tiles=tiles,
        groups=groups,
        dot=dot,
        precision=precision,
        weighted=settings.weighted,
    )


def _power_of_two(n: Any) -> Any:
    """The least power of two that is at least n."""
    return np.left_shift(1, np.ceil(np.log2(np.maximum(n, 1))).astype(np.int64))


def _up(x: Any) -> npt.NDArray[np.float32]:
    """float32, rounded up."""
    with np.errstate(over="ignore", under="ignore"):
        y = np.asarray(x, np.float64).astype(np.float32)
    out: npt.NDArray[np.float32] = np.where(y < x, np.nextafter(y, np.float32(np.inf)), y)
    return out


class _Settings:
    """What B sessions ask, in numbers of moderate size: arrays [B, roles], columns that a session lacks are no gate.

    What columns add for single rows is taken at its largest for all rows, and where factors act above zero only the
    bound is never below zero: both keep it an upper bound.

    Values of query and residual are in units of a power of two at or above every scale and shift, their weights in
    units of one at or above every weight (1 where all weights are 1); unit: their product, that of the scores.
    """

    def __init__(self, sessions: Sequence[Columns], roles: int) -> None:
        shape = (len(sessions), roles)
        self.dim = sessions[0].dim
        self.scale, self.shift, self.weight = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.gate, norms, cover_sizes = np.full(shape, np.inf), np.ones(shape), np.zeros(len(sessions))
        self.vectors = np.zeros((*shape, self.dim))
        self.pulls = np.zeros(shape, np.bool_)  # all but coverage: the columns that may be gates
        self.gate_only = np.zeros(shape, np.bool_)
        self.most_added, self.least_added = np.zeros(shape), np.zeros(shape)
        for b, c in enumerate(sessions):
            n = len(c.scale)
            self.scale[b, :n], self.shift[b, :n], self.weight[b, :n], self.gate[b, :n] = (
                c.scale, c.shift, c.weight, c.gate,
            )  # fmt: skip
            norms[b, :n] = np.sqrt(c.compiled.squared_norms)
            self.vectors[b, QUERY], self.vectors[b, RESIDUAL:n] = c.query, c.residual
            self.vectors[b, COVERAGE], cover_sizes[b] = c.coverage_parts  # its square may be out of range
            norms[b, COVERAGE] = np.linalg.norm(self.vectors[b, COVERAGE]) or 1.0
            self.pulls[b, :n] = True
            if c.gate_only is not None:
                self.gate_only[b, :n] = c.gate_only
            for j in range(0 if c.addend is None else n):
                assert c.addend is not None
                added = c.addend.column(j)[1]
                self.most_added[b, j], self.least_added[b, j] = added.max(initial=0.0), added.min(initial=0.0)
        self.pulls[:, COVERAGE] = False
        floors = [
            self.gate_only[b, RESIDUAL : len(c.scale)].all() or c.factors_above_zero for b, c in enumerate(sessions)
        ]
        self.floor = np.where(np.array(floors), 0.0, -np.inf)
        self.novelty_cap = np.array([1.0 if c.clamp_novelty else np.inf for c in sessions])
        covered = np.array([c.coverage is not None for c in sessions])
        with np.errstate(over="ignore"):
            self.cover_scale = self.scale[:, COVERAGE] * (norms[:, COVERAGE] * cover_sizes)
        self.cover_shift = self.shift[:, COVERAGE] * covered

        self.size = np.abs(self.shift) + np.maximum(self.most_added, -self.least_added)
        sizes = np.where(self.pulls, np.maximum(np.abs(self.scale), self.size), 0.0).max(axis=1)
        self.value_unit = _unit_of(sizes)[:, None]
        weights = np.abs(np.where(self.pulls, self.weight, 0.0)).max(axis=1)
        plain = ((self.weight == 1.0) | ~self.pulls).all(axis=1)
        self.weighted = not plain.all()
        self.weight_unit = np.where(plain, 1.0, _unit_of(weights))[:, None]
        with np.errstate(over="ignore"):
            self.unit = (self.value_unit * self.weight_unit)[:, 0]
        factor = self.scale / self.value_unit
        factor[:, COVERAGE] = 1.0
        self.vectors *= (factor / norms)[..., None]

    def column_numbers(self, margin: Float64) -> npt.NDArray[np.float32]:
        """[B, roles, 3]: what to add for the gate, what to add for the pull, the weight. margin: [B, roles]."""
        with np.errstate(over="ignore"):
            size = (np.abs(self.scale) + self.size) / self.value_unit
            over = (self.shift + self.most_added - self.gate) / self.value_unit
            gate = _up(over + np.where(np.isfinite(over), margin + 4 * ULP * (size + np.abs(over)), 0.0))
            weight = self.weight / self.weight_unit
            shift = (self.shift + np.where(weight >= 0.0, self.most_added, self.least_added)) / self.value_unit
            pull = _up(weight * shift + np.abs(weight) * (margin + 4 * ULP * size))
        pull = np.where(self.gate_only, np.float32(-np.inf), pull)
        numbers = np.stack([gate, pull, weight.astype(np.float32)], axis=-1)
        return np.where(self.pulls[..., None], numbers, np.array([-np.inf, -np.inf, 0.0], np.float32))

    def session_numbers(self, margin: Float64) -> npt.NDArray[np.float32]:
        """[B, 8], in the order in which the kernel reads them. margin: [B], of the coverage columns."""
        size = np.abs(self.cover_scale) + np.abs(self.cover_shift)
        bounded = (size <= _LARGEST) & np.isfinite(self.unit)
        scale, shift = np.where(bounded, self.cover_scale, 0.0), np.where(bounded, self.cover_shift, 0.0)
        off = np.where(bounded, np.abs(scale) * margin + 4 * ULP * size, 0.0)
        relative = np.abs(self.scale) / self.value_unit
        gated = np.where(self.pulls & (self.gate != np.inf), relative, 0.0)
        pulled = np.where(self.pulls, np.abs(self.weight) / self.weight_unit * relative, 0.0)
        numbers = [
            scale.astype(np.float32),
            -_up(off - shift),
            _up(2.0 * off * (1 + 4 * ULP)),
            self.novelty_cap,
            _up(1.05 * gated.max(axis=1)),
            _up(1.05 * pulled.max(axis=1)),
            _up(1.05 * np.abs(scale)),
            np.where(bounded, self.floor, np.inf),
        ]
        return np.stack(numbers, axis=-1).astype(np.float32)


def _unit_of(sizes: Float64) -> Float64:
    """The power of two at or above each size; 1 for 0."""
    unit: Float64 = 2.0 ** np.ceil(np.log2(np.where(sizes > 0.0, sizes, 1.0)))
    return unit


def scaled32(values: Float64 | None) -> tuple[npt.NDArray[np.float32] | None, float]:
    """A factor as float32 in [0, 2], and the power of two that it is to be multiplied with."""
    if values is None or not len(values) or (values == 1.0).all():
        return None, 1.0
    largest = float(values.max())
    unit = 2.0 ** min(np.ceil(np.log2(largest)), 1023.0) if largest > 0.0 else 1.0
    with np.errstate(under="ignore"):
        return (values / unit).astype(np.float32), float(unit)


def bounds_torch(packed: Packed, rows: Rows, factors: Factors32, out: torch.Tensor) -> None:
    """``score_bounds_kernel`` in plain torch, in chunks of rows."""
    n = out.shape[1]
    size = max(1, _CHUNK_BYTES // (4 * (rows.values.shape[1] + 4 * packed.groups * packed.vectors[0, ..., 0].numel())))
    for start in range(0, n, size):
        place = slice(start, min(start + size, n))
        row: Any = place if rows.picked is None else rows.picked[place]
        x = rows.values[row].to(packed.vectors.dtype).float()
        if rows.scale is None:
            square = x.square().sum(1)
            known = (square > 2.0**-80) & (square < 2.0**80)
            scale = square.rsqrt()
        else:
            scale = rows.scale[row]
            known = scale > 0.0
        error = None if rows.error is None else rows.error[row]
        alive = None if rows.alive is None else rows.alive[row]
        out[:, place] = _chunk_bounds(packed, x, scale, known, error, alive, factors.take(place))


def _chunk_bounds(
    p: Packed,
    x: torch.Tensor,
    scale: torch.Tensor,
    known: torch.Tensor,
    error: torch.Tensor | None,
    alive: torch.Tensor | None,
    factors: Factors32,
) -> torch.Tensor:
    """[B, n]."""
    n, roles = len(x), p.tiles * p.parts
    values = (p.vectors.float().reshape(-1, x.shape[1]) @ x.T) * scale
    values = values.reshape(p.groups, roles, p.group, n)
    gate, pull, weight = p.columns.transpose(1, 2).reshape(p.groups, 3, roles, p.group, 1).unbind(1)
    s = p.sessions.transpose(0, 1)[..., None]  # [8, groups, GROUP, 1]
    nearest_gate = (values + gate).amax(1)  # [groups, GROUP, n]
    effective = (values * weight + pull if p.weighted else values + pull).amax(1)
    least = values[:, COVERAGE] * s[0] + s[1]
    most = least + s[2]
    if error is not None:
        nearest_gate = nearest_gate + error * s[4]
        effective = effective + error * s[5]
        least, most = least - error * s[6], most + error * s[6]
    effective = torch.maximum(effective, s[7])
    newest, oldest = ((1.0 - a.clamp(max=COVERAGE_PENALTY_CAP)).clamp(min=MIN_NOVELTY_FLOOR) for a in (least, most))
    score = effective * torch.minimum(torch.where(effective >= 0.0, newest, oldest), s[3])
    score, nearest_gate = (a.reshape(-1, n)[: p.count] for a in (score, nearest_gate))
    for factor in (factors.importance, factors.multiplier):
        if factor is not None:
            score = score * factor
    if factors.overlap is not None:
        score = score * (1.0 - (factors.overlap * NGRAM_PENALTY_STEP).clamp(max=NGRAM_PENALTY_CAP))
    # docs/proofs.md: B4, B5.
    score = score + (score.abs() * 2.0**-19 + 2.0**-100)
    score = torch.where(known & ~score.isnan(), score, torch.inf)
    candidate = (nearest_gate >= 0.0) | ~known
    if alive is not None:
        candidate = candidate & (alive != 0)
    return torch.where(candidate, score, -torch.inf)


class Source:
    """N rows where a pass can read them, in parts; see also `DeviceView`.

    parts: (first row, Rows) each. index: int64 [n], the only rows to look at (None: all N), on the host.
    """

    def __init__(self, parts: Sequence[tuple[int, Rows]], index: Int64 | None = None) -> None:
        self._parts = parts
        self.index = index
        self.device = parts[0][1].values.device
        self.dtype = parts[0][1].values.dtype
        self.dim = parts[0][1].values.shape[1]
        self.norms = parts[0][1].scale is not None
        last, rows = parts[-1]
        self.count = last + len(rows.values) if index is None else len(index)

    def importance32(self) -> tuple[torch.Tensor | None, float] | None:
        """The importance that is there already, see ``scaled32``; None: none is."""
        return None

    def parts(self) -> Iterator[tuple[slice | torch.Tensor, Rows]]:
        """(which candidates, their rows), in turn: a Rows may be overwritten once the next one is asked for."""
        for first, rows in self._parts:
            stop = first + len(rows.values)
            if self.index is None:
                yield slice(first, stop), rows
                continue
            here = (self.index >= first) & (self.index < stop)
            if here.all():
                yield slice(0, self.count), rows._replace(picked=torch.from_numpy(self.index - first).to(self.device))
            elif here.any():
                local = torch.from_numpy(self.index[here] - first).to(self.device)
                yield torch.from_numpy(np.flatnonzero(here)).to(self.device), rows._replace(picked=local)

    def bounds(self, packed: Packed, factors: Factors32, run: Pass) -> torch.Tensor:
        """[B, n] float32."""
        out = torch.empty((packed.count, self.count), dtype=torch.float32, device=self.device)
        for place, rows in self.parts():
            if isinstance(place, slice):
                run(packed, rows, factors.take(place), out[:, place])
            else:
                part = torch.empty((packed.count, len(place)), dtype=torch.float32, device=self.device)
                run(packed, rows, factors.take(place), part)
                out[:, place] = part
        return out


def bounded_candidates(
    source: Source,
    sessions: Sequence[Columns],
    factors: Sequence[Factors],
    k: int | None,
    run: Pass,
    kth_best: Callable[[int, Int64], float],
    limits: tuple[int, int] = (32, 128),
    loss: float = 0.0,
) -> list[Int64]:
    """For each session the positions, ascending, of the candidates that may pass a gate and be among the k best.

    kth_best(b, positions): the k-th best exact score of session b among these candidates, -inf if fewer pass.
    """
    found: list[Int64] = [np.zeros(0, np.int64)] * len(sessions)
    if not sessions or source.count == 0 or k == 0:
        return found
    at_once = max(1, _OUT_BYTES // (4 * source.count))
    for start in range(0, len(sessions), at_once):
        some = slice(start, start + at_once)
        held, unit = _factors32(source, factors[some])
        for packed in pack(
            sessions[some],
            source.dtype,
            source.dim,
            norms=source.norms,
            device=source.device,
            limits=limits,
            loss=loss,
        ):
            bounds = source.bounds(packed, held.of(packed.order), run)
            for b, session in enumerate((start + packed.order).tolist()):
                found[session] = _reach(bounds[b], float(packed.unit[b]) * unit, k, kth_best, session)
    return found


def _factors32(source: Source, factors: Sequence[Factors]) -> tuple[Factors32, float]:
    """The factors where the rows are, and the power of two that bounds are to be multiplied with."""
    units, tensors = [], []
    resident = source.importance32()
    for name in ("importance", "multiplier"):
        if name == "importance" and resident is not None:
            tensor, unit = resident
        else:
            values, unit = scaled32(getattr(factors[0], name))
            tensor = None if values is None else torch.from_numpy(values).to(source.device)
        tensors.append(tensor)
        units.append(unit)
    counts = [f.ngram_overlap for f in factors]
    overlap = None
    if any(o is not None and o.any() for o in counts):
        shared = all(o is counts[0] for o in counts)
        rows = [np.zeros(source.count, np.int32) if o is None else o for o in (counts[:1] if shared else counts)]
        overlap = torch.from_numpy(np.stack(rows)).to(source.device)
    with np.errstate(over="ignore"):
        return Factors32(tensors[0], tensors[1], overlap), float(np.prod(units))


def _reach(
    bounds: torch.Tensor, unit: float, k: int | None, kth_best: Callable[[int, Int64], float], session: int
) -> Int64:
    """The candidates whose bounds reach the k-th best exact score; the over-fetch doubles until that is certain."""
    if k is None or not np.isfinite(16.0 * unit):  # scores may be infinite before the n-gram factor makes them less
        return torch.nonzero(bounds > -torch.inf).squeeze(1).cpu().numpy()
    wanted = min(len(bounds), 2 * k + 64)
    while True:
        top, at = torch.topk(bounds, wanted)
        upper, positions = top.double().cpu().numpy(), at.cpu().numpy()
        passing = upper > -np.inf
        upper, positions = upper[passing] * unit + _TINY, positions[passing]
        best = kth_best(session, np.sort(positions))
        if np.isnan(best):  # infinity less infinity (docs/proofs.md, B6)
            best = -np.inf
        if len(positions) < wanted or wanted == len(bounds) or upper[-1] < best:
            return np.sort(positions[upper >= best])
        wanted = min(len(bounds), 2 * wanted)


def bounded_search(
    impl: str,
    data: tuple[Any, ...],
    squared_norms: Float64 | None,
    sessions: Sequence[Columns],
    index: Int64 | None,
    factors: Sequence[Factors],
    k: int | None,
    source: Source | None = None,
) -> list[Int64]:
    """For each session the positions (in index; None: rows) of what may pass a gate and be among the k best.

    impl: who makes the bounds, the Triton kernel ("triton") or plain torch ("torch").
    data: numpy blocks [N_i, D] with squared_norms float64 [N], or one tensor on a device without them.
    source: where the rows are if not in data (host blocks, or one tensor on a device); data is then their host copy.
    """
    from cdr_kernel.score._cdr_score import exact_scores

    if source is None:
        source = _source(data, squared_norms, index)
    run: Pass = bounds_torch
    limits, loss = (32, 128), {"highest": 0.0, "high": 2.0**-9}.get(torch.get_float32_matmul_precision(), 2.0**-6)
    if impl == "triton":
        from cdr_kernel.score import _triton

        run = _triton.launch
        limits = _triton.tile_limits(_triton.capability(source.device), source.norms)
        loss = 0.0  # the kernel names its own precision

    def kth_best(session: int, positions: Int64) -> float:
        rows = positions if index is None else index[positions]
        scores = exact_scores(data, squared_norms, rows, sessions[session], factors[session].take(positions), k)
        return float(scores.score[-1]) if k is not None and len(scores) == k else -np.inf

    return bounded_candidates(source, sessions, factors, k, run, kth_best, limits, loss)


def _source(data: tuple[Any, ...], squared_norms: Float64 | None, index: Int64 | None) -> Source:
    """Host blocks, or one tensor on a device, as they are."""
    parts, first = [], 0
    for block in data:
        if isinstance(block, torch.Tensor):
            parts.append((first, Rows(block if block.stride(-1) == 1 else block.contiguous())))
            continue
        scale = None
        if squared_norms is not None:
            norms = np.sqrt(squared_norms[first : first + len(block)])
            inside = (norms > 2.0**-40) & (norms < 2.0**40)
            scale = torch.from_numpy(np.where(inside, 1.0 / norms, 0.0).astype(np.float32))
        parts.append((first, Rows(_borrowed(block), scale=scale)))
        first += len(block)
    return Source(parts, index)


def _borrowed(a: npt.NDArray[Any]) -> torch.Tensor:
    """a as a tensor without a copy. torch warns of arrays that are read-only; nobody writes to this one."""
    if a.flags.writeable:
        return torch.from_numpy(a)
    memory = (ctypes.c_byte * a.nbytes).from_address(a.ctypes.data)
    alias: npt.NDArray[Any] = np.ndarray(a.shape, a.dtype, buffer=memoryview(memory).cast("B"))
    return torch.from_numpy(alias)
