"""A store's rows on a device: copied once, grown with the store, streamed where they do not fit.

rows = DeviceRows("cuda", dtype="float16")
scores = cdr_score(rows.at(store.view()), columns, k=100)       # exact, whatever the dtype on the device
later = rows.at(store.view()).narrow(scores_of_all.rows)        # the next windows look at these rows only
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.score._bound_search import Factors32, Packed, Pass, Rows, Source, scaled32
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.validation._arrays import Blocks, Float64, Int64, scale_rows, take_rows

DTYPES = ("float16", "bfloat16", "float32", "int8")
BLOCK_ROWS = 1 << 20
GRAPH_ROWS = 1 << 18
"""Up to this many rows the launches take longer than the rows: they are recorded once and replayed."""

_CHUNK = 65536
_ALIGNED = 16
_GRAPHS = 8
_LARGEST_CODE = 127


def torch_device(device: str | torch.device) -> torch.device:
    """The device of a name such as "cuda", "cuda:1" or "cpu". ValueError for one that is not there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected one such as 'cuda', 'cuda:1' or 'cpu', got {str(device)!r}") from None
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: torch {torch.__version__} finds no CUDA device here, got {str(device)!r}")
        count = torch.cuda.device_count()
        if found.index is not None and found.index >= count:
            raise ValueError(f"device: expected one of cuda:0 to cuda:{count - 1}, got {str(device)!r}")
    elif found.type != "cpu":
        try:
            torch.zeros(1, device=found).tolist()  # a kind that this torch knows of and cannot use
        except Exception as error:  # each kind raises its own, and one may be there and out of memory
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"device: torch {torch.__version__} cannot use {str(device)!r} here ({why})") from error
    return found


def check_dtype(dtype: str | None) -> None:
    """ValueError for what `DeviceRows` does not hold rows in."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)} or None, got {dtype!r}")


class DeviceRows:
    """The rows of one store on a device.

    Answers stay exact in every dtype: the distance of each held row from the stored row is measured and becomes part of
    its bound. Threads may share one. ``release()`` frees the memory; views that are still held keep what they use.

    Args:
        device: "cuda", "cuda:1" or "cpu".
        dtype: float16, bfloat16, float32 or int8 (codes with a scale for each row). None is the store's (float32 for
            float64).
        memory: The most bytes of rows on the device. The rest stays in pinned host memory in the same dtype and is
            streamed block by block in every pass, copies beside computation. None holds everything on the device.

    Raises:
        ValueError: For a dtype or a device that is not there.
    """

    def __init__(
        self, device: str | torch.device = "cuda", *, dtype: str | None = None, memory: int | None = None
    ) -> None:
        check_dtype(dtype)
        if memory is not None and memory < 0:
            raise ValueError(f"memory: expected a number of bytes or None, got {memory!r}")
        self.device = torch_device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.memory = memory
        self._asked = dtype
        self._lock = Lock()
        self._blocks: list[_Block] = []
        self._rows = 0
        self._storage: object = None  # what the rows are copies of; another one after compaction
        self._importance: tuple[Float64, tuple[torch.Tensor | None, float]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        with self._lock:
            here = sum(_size(b.scale) + _size(b.error) + (_size(b.values) if b.resident else 0) for b in self._blocks)
            factor = None if self._importance is None else self._importance[1][0]
            return here + _size(factor)

    @property
    def pinned_nbytes(self) -> int:
        """Bytes held in host memory for streaming."""
        with self._lock:
            return sum(_size(b.values) for b in self._blocks if not b.resident)

    def release(self) -> None:
        """Forget every row. The next ``at`` copies them again."""
        with self._lock:
            self._blocks, self._rows, self._storage, self._importance = [], 0, None, None

    def at(self, view: StoreView) -> DeviceView:
        """The rows of this view, copying what is not here yet.

        A view of another store, or of one that was compacted since, replaces everything. TypeError for what is no view.
        """
        if not isinstance(view, StoreView):
            raise TypeError(f"view: expected a StoreView, such as store.view(), got {type(view).__name__}")
        with self._lock:
            if view._storage is not self._storage:
                self.release()
                self._storage = view._storage
            for start in range(self._rows, view.rows, _CHUNK):
                self._append(view, start, min(start + _CHUNK, view.rows))
            alive = None
            if not view.alive.all():
                alive = torch.from_numpy(view.alive.astype(np.uint8)).to(self.device)
            parts, first = [], 0
            for block in self._blocks:
                stop = min(block.rows, view.rows - first)
                if stop <= 0:
                    break
                here = None if alive is None else alive[first : first + stop]
                parts.append((first, block.front(stop, here), block.resident))
                first += stop
            found = DeviceView(view, self.device, tuple(parts), self._importance_of(view))
            _settle(self.device)
            return found

    def _importance_of(self, view: StoreView) -> tuple[torch.Tensor | None, float]:
        known = self._importance
        if known is None or len(known[0]) != view.rows:
            values, unit = scaled32(view.importance)
            tensor = None if values is None else torch.from_numpy(values).to(self.device)
            known = self._importance = (view.importance, (tensor, unit))
        return known[1]

    def _append(self, view: StoreView, start: int, stop: int) -> None:
        dtype = self._asked or {"float16": "float16"}.get(view.blocks[0].dtype.name, "float32")
        values, scale, error = _converted(
            take_rows(view.blocks, np.arange(start, stop)), view.squared_norms[start:stop], dtype
        )
        at = 0
        while at < len(values):
            if not self._blocks or self._blocks[-1].rows == BLOCK_ROWS:
                self._blocks.append(_Block(self.device, True))
            block = self._blocks[-1]
            some = slice(at, at + min(len(values) - at, BLOCK_ROWS - block.rows))
            if block.rows == 0 and self.memory is not None:
                full = sum(_size(b.values) for b in self._blocks if b.resident)
                block.resident = full + BLOCK_ROWS * values.element_size() * values.shape[1] <= self.memory
            block.append(values[some], scale[some], None if error is None else error[some])
            at = some.stop
        self._rows = stop


class _Block:
    """Up to BLOCK_ROWS rows. Tensors are never written again below the rows that they hold, so slices stay valid."""

    def __init__(self, device: torch.device, resident: bool) -> None:
        self.device = device
        self.resident = resident
        self.rows = 0
        self.values: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None
        self.error: torch.Tensor | None = None

    def append(self, values: torch.Tensor, scale: torch.Tensor, error: torch.Tensor | None) -> None:
        stop = self.rows + len(values)
        self.values = self._grown(self.values, values, stop, host=not self.resident)
        self.scale = self._grown(self.scale, scale, stop)
        if error is not None:
            self.error = self._grown(self.error, error, stop)
        self.rows = stop

    def _grown(self, held: torch.Tensor | None, more: torch.Tensor, stop: int, host: bool = False) -> torch.Tensor:
        if held is None or len(held) < stop:
            room = stop if held is None else min(BLOCK_ROWS, max(stop, 2 * len(held)))
            shape = (room, *more.shape[1:])
            if host:
                grown = torch.empty(shape, dtype=more.dtype, pin_memory=self.device.type == "cuda")
            else:
                grown = torch.empty(shape, dtype=more.dtype, device=self.device)
            if held is not None:
                grown[: self.rows] = held[: self.rows]
            held = grown
        held[self.rows : stop] = more
        return held

    def front(self, n: int, alive: torch.Tensor | None) -> Rows:
        values, scale = self.values, self.scale
        if values is None or scale is None:
            raise RuntimeError("an empty block has no rows")
        error = None if self.error is None else self.error[:n]
        return Rows(values[:n], scale=scale[:n], error=error, alive=alive)


def _size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _converted(
    rows: npt.NDArray[Any], squared_norms: Float64, dtype: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows [n, D] as held: values [n, D'], D' a multiple of 16, their scales float32 and their errors float32 or None.

    Rows of the same dtype are held as they are, without an error. Others are held as rounded unit rows, and what the
    rounding did to each is measured in float64.
    """
    n, dim = rows.shape
    same = rows.dtype.name == dtype
    padded = np.zeros((n, -(-dim // _ALIGNED) * _ALIGNED), rows.dtype if same else np.float64)
    padded[:, :dim] = rows
    norms = np.sqrt(squared_norms)
    far = np.flatnonzero(~((norms > 2.0**-40) & (norms < 2.0**40)))
    if len(far):
        scaled = scale_rows(padded[far].astype(np.float64))
        padded[far] = scaled
        norms[far] = np.linalg.norm(scaled, axis=1)
    if same:
        return torch.from_numpy(padded), torch.from_numpy((1.0 / norms).astype(np.float32)), None
    unit = padded / norms[:, None]
    scale = np.ones(n, np.float32)
    if dtype == "int8":
        scale = (np.abs(unit).max(axis=1, initial=0.0) / _LARGEST_CODE).astype(np.float32)
        held = torch.from_numpy(np.clip(np.rint(unit / scale[:, None]), -_LARGEST_CODE, _LARGEST_CODE).astype(np.int8))
    else:
        held = torch.from_numpy(unit).to(getattr(torch, dtype))
    back = held.double().numpy() * scale.astype(np.float64)[:, None]
    # docs/proofs.md, B3.
    error = np.linalg.norm(unit - back, axis=1) * (1 + 1e-6) + 1e-10
    return held, torch.from_numpy(scale), torch.from_numpy(error.astype(np.float32))


@dataclass(frozen=True, eq=False)
class DeviceView:
    """One version of a store on a device: what ``cdr_score`` takes in place of embeddings.

    view: the store's version, whose rows give the exact scores. index: int64 [n], the only rows to look at.
    """

    view: StoreView
    device: torch.device
    _parts: tuple[tuple[int, Rows, bool], ...] = field(repr=False)
    _importance: tuple[torch.Tensor | None, float] = field(repr=False)
    index: Int64 | None = None
    _local: tuple[tuple[Any, torch.Tensor, int], ...] = field(default=(), repr=False)
    _graphs: _Graphs = field(default_factory=lambda: _Graphs(), repr=False)

    @property
    def rows(self) -> int:
        """Rows of the store's version, removed ones included."""
        return self.view.rows

    @property
    def blocks(self) -> Blocks:
        """The rows on the host."""
        return self.view.blocks

    @property
    def squared_norms(self) -> Float64:
        """float64 [rows]."""
        return self.view.squared_norms

    @property
    def importance(self) -> Float64:
        """float64 [rows], or [n] with an index: the store's."""
        return self.view.importance if self.index is None else self.view.importance[self.index]

    def living(self) -> Int64:
        """Positions of the candidates that are not removed."""
        return np.flatnonzero(self.view.alive if self.index is None else self.view.alive[self.index])

    def narrow(self, rows: Int64) -> DeviceView:
        """This view with only these rows as candidates, which stay on the device for every later call.

        With the same query the facts that pass the gate are the same in every window of a session, so a session's
        later windows need only those of its first one, and what was added since.
        """
        local: list[tuple[Any, torch.Tensor, int]] = []
        ascending = bool((rows[1:] > rows[:-1]).all())
        for number, (first, part, _) in enumerate(self._parts):
            stop = first + len(part.values)
            if ascending:
                a, b = np.searchsorted(rows, [first, stop]).tolist()
                place: Any = slice(a, b)
                some = rows[a:b]
            else:
                here = np.flatnonzero((rows >= first) & (rows < stop))
                place, some = torch.from_numpy(here).to(self.device), rows[here]
            if len(some):
                local.append((place, torch.from_numpy(some - first).to(self.device), number))
        tensor, unit = self._importance
        if tensor is not None:
            index = torch.from_numpy(rows).to(self.device)
            tensor = (tensor if self.index is None else self._whole_importance())[index]
        _settle(self.device)
        return replace(self, index=rows, _local=tuple(local), _importance=(tensor, unit), _graphs=_Graphs())

    def _whole_importance(self) -> torch.Tensor:
        values, _ = scaled32(self.view.importance)
        return torch.from_numpy(np.ones(self.rows, np.float32) if values is None else values).to(self.device)

    def source(self, own_importance: bool) -> Source:
        """The rows for a pass; own_importance: scores are multiplied with the store's importance."""
        return _ViewSource(self, own_importance)


class _ViewSource(Source):
    def __init__(self, view: DeviceView, own_importance: bool) -> None:
        self._view = view
        self._own_importance = own_importance
        self.index = view.index
        self.device = view.device
        first = view._parts[0][1].values if view._parts else torch.zeros((0, view.view.dim))
        self.dtype, self.dim = first.dtype, first.shape[1]
        self.norms = True
        self.count = view.rows if view.index is None else len(view.index)

    def importance32(self) -> tuple[torch.Tensor | None, float] | None:
        return self._view._importance if self._own_importance else None

    def parts(self) -> Iterator[tuple[slice | torch.Tensor, Rows]]:
        view, cold = self._view, []
        if view.index is None:
            wanted: list[tuple[Any, torch.Tensor | None, int]] = [
                (slice(first, first + len(part.values)), None, i) for i, (first, part, _) in enumerate(view._parts)
            ]
        else:
            wanted = list(view._local)
        for place, index, number in wanted:
            _, part, resident = view._parts[number]
            if resident:
                yield place, part._replace(picked=index)
            else:
                cold.append((place, index, part))
        yield from _streamed(cold, view.device)

    def bounds(self, packed: Packed, factors: Factors32, run: Pass) -> torch.Tensor:
        resident = all(part[2] for part in self._view._parts)
        fixed = factors.multiplier is None and factors.overlap is None
        fixed &= factors.importance is None or factors.importance is self._view._importance[0]
        if not (fixed and resident and self.count <= GRAPH_ROWS):
            return super().bounds(packed, factors, run)
        make = super().bounds
        return self._view._graphs.bounds(packed, factors, run, lambda columns: make(columns, factors, run))


def _cuda(device: torch.device) -> Any:
    """torch.cuda for a device that has streams, else None."""
    return torch.cuda if device.type == "cuda" else None


def _settle(device: torch.device) -> None:
    """Wait for the copies of this stream: a view may be used on any other."""
    cuda = _cuda(device)
    if cuda:
        cuda.current_stream(device).synchronize()


def _streamed(
    parts: Sequence[tuple[Any, torch.Tensor | None, Rows]], device: torch.device
) -> Iterator[tuple[Any, Rows]]:
    """Parts whose values are in host memory, each in one of two buffers on the device, the next one on its way.

    The copies run on a stream of their own: a buffer is filled once the work on its last contents is done, and work on
    a buffer starts once it is filled. On the CPU there are no streams and the same steps follow one another.
    """
    if not parts:
        return
    cuda = _cuda(device)
    sizes = [len(rows.values) if index is None else len(index) for _, index, rows in parts]
    like = parts[0][2].values
    buffers = [torch.empty((max(sizes), like.shape[1]), dtype=like.dtype, device=device) for _ in range(2)]
    if cuda:
        work, copies = cuda.current_stream(device), cuda.Stream(device)
        filled, free = [[cuda.Event() for _ in range(2)] for _ in range(2)]
        for event in free:
            event.record(work)

    def fetch(i: int) -> None:
        _, index, rows = parts[i]
        values = rows.values if index is None else rows.values[index.cpu()]
        buffer = buffers[i % 2][: sizes[i]]
        if not cuda:
            buffer.copy_(values)
            return
        with cuda.stream(copies):
            copies.wait_event(free[i % 2])
            buffer.copy_(values, non_blocking=index is None)
            filled[i % 2].record(copies)

    fetch(0)
    for i, (place, index, rows) in enumerate(parts):
        if i + 1 < len(parts):
            fetch(i + 1)
        if cuda:
            work.wait_event(filled[i % 2])
        beside = [t if t is None or index is None else t[index] for t in (rows.scale, rows.error, rows.alive)]
        yield place, Rows(buffers[i % 2][: sizes[i]], None, *beside)
        if cuda:
            free[i % 2].record(work)


class _Graphs:
    """Passes over one view, each recorded once as a CUDA graph and replayed with other columns of the same shape.

    On the CPU the same copies into fixed tensors are made and the pass is run again.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: dict[Any, tuple[Packed, torch.Tensor | None, Any, Any]] = {}

    def bounds(
        self, packed: Packed, factors: Factors32, run: Pass, make: Callable[[Packed], torch.Tensor]
    ) -> torch.Tensor:
        """make(packed), recorded the first time that columns of this shape come."""
        shape = (run, tuple(packed.vectors.shape), packed.vectors.dtype, packed.group, packed.parts, packed.count)
        key = (*shape, packed.dot, packed.precision, packed.weighted, factors.importance is None)
        device = packed.vectors.device
        with self._lock:
            known = self._known.pop(key, None) or self._record(packed, make, device)
            while len(self._known) >= _GRAPHS:
                del self._known[next(iter(self._known))]
            self._known[key] = known
            fixed, out, graph, done = known
            cuda = _cuda(device)
            if cuda:
                cuda.current_stream(device).wait_event(done)  # another stream's replay may still read what is fixed
            for name in ("vectors", "columns", "sessions"):
                getattr(fixed, name).copy_(getattr(packed, name))
            if graph is None or out is None:
                return make(fixed)
            with cuda.device(device):
                graph.replay()
                result = out.clone()
                done.record(cuda.current_stream(device))
            return result

    def _record(
        self, packed: Packed, make: Callable[[Packed], torch.Tensor], device: torch.device
    ) -> tuple[Packed, torch.Tensor | None, Any, Any]:
        fixed = replace(
            packed, vectors=packed.vectors.clone(), columns=packed.columns.clone(), sessions=packed.sessions.clone()
        )
        cuda = _cuda(device)
        if not cuda:
            return fixed, None, None, None
        with cuda.device(device):
            now, aside = cuda.current_stream(device), cuda.Stream(device)
            aside.wait_stream(now)
            with cuda.stream(aside):
                make(fixed)  # compiles what is not compiled yet, which a recording cannot hold
            now.wait_stream(aside)
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, capture_error_mode="thread_local"):
                out = make(fixed)
            done = cuda.Event()
            done.record(now)
        return fixed, out, graph, done
