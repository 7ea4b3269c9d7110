"""The exact scan index: int8 codes of the rows of a store, and bounds that find what passes without reading the rows.

Nothing here is approximate: a code only rejects or accepts a row on a proven bound (csrc/scan.h), and the exact
routine decides what is left. The rotation, the sample it is learned from and the codes change the time a search
takes, never what it finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.score import Columns
from cdr_kernel.spec.constants import COVERAGE_PENALTY_CAP, MIN_NOVELTY_FLOOR, NGRAM_PENALTY_CAP, NGRAM_PENALTY_STEP
from cdr_kernel.store import StoreView
from cdr_kernel.store._atomic_folder import Kind, synced
from cdr_kernel.store._checksums import Files
from cdr_kernel.store._format import KIND as STORE
from cdr_kernel.store._mapped_files import MappedFiles
from cdr_kernel.validation._arrays import Float32, Float64, Int64, as_array

FORMAT = "cdr-scan-index"
FORMAT_VERSION = 1
SAMPLE = 16384

_KIND = Kind(
    "scan index",
    file="scan.json",
    data="scan-",
    format=FORMAT,
    version=FORMAT_VERSION,
    fields={"dim": int, "rows": int, "alpha": str, "store": str},
)
_NUMBERS = 4  # rho, two betas and the scale per row
_CHUNK = 8192  # rows coded at a time
_ALIGNMENT = 64
_EXPONENT = 0.75  # weights are deviations to this power: measured, it gives the smallest error under one scale per row
_LEAST_WEIGHT = 1e-3  # of the largest: directions in which the sample does not vary
_FLOAT64_PCA = 1024  # dimensions beyond which the eigenvectors are computed in float32


@dataclass(frozen=True)
class _Run:
    """Codes of N consecutive rows: int8 [N, ..] of the first 64 dimensions, the next 64, the rest; float32 [N, 4]."""

    NAMES: ClassVar = ("first", "second", "third", "numbers")

    arrays: tuple[npt.NDArray[Any], ...]
    mapped: bool = False

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def numbers(self) -> Float32:
        return self.arrays[-1]

    @classmethod
    def empty(cls, n: int, dim: int) -> _Run:
        blocks = [_aligned((n, width), np.dtype(np.int8)) for width in _C.scan_widths(dim)]
        return cls((*blocks, _aligned((n, _NUMBERS), np.dtype(np.float32))))

    def part(self, start: int, stop: int) -> _Run:
        return _Run(tuple(a[start:stop] for a in self.arrays))


class _State:
    """What readers use, replaced as a whole."""

    def __init__(self, rotation: _C.Rotation, runs: tuple[_Run, ...], alpha: float) -> None:
        self.runs = runs
        self.alpha = alpha
        self.rows = sum(map(len, runs))
        self.compiled = _C.Codes(rotation, [run.arrays for run in runs], alpha)


class ScanIndex:
    """Codes of the first ``rows`` rows of a store's views; made by ``build`` or ``load``.

    Searches take any view of the layout that the index was made of: rows added since have no codes yet and are
    decided one by one until ``extend``. Threads may search while another extends.
    """

    def __init__(self, matrix: Float32, mean: Float32, weight: Float32, view: StoreView) -> None:
        self.dim = len(mean)
        self.layout = view.layout
        self.mapped_files = MappedFiles()
        self._matrix, self._mean, self._weight = matrix, mean, weight
        self._rotation = _C.Rotation(matrix, mean, weight)
        self._lock = Lock()
        self._state = _State(self._rotation, (), 0.0)

    @classmethod
    def build(
        cls,
        view: StoreView,
        *,
        sample: int = SAMPLE,
        seed: int = 0,
        rotation: Any = None,
        advance: Callable[[int], object] | None = None,
    ) -> ScanIndex:
        """Learn a rotation from `sample` rows chosen with `seed`, and code all rows of the view.

        rotation: [D, D], used in place of the principal axes; column i is direction i, best first. Any finite
        matrix gives the same answers; one that is not orthogonal, or whose first 64 directions say little, gives
        them slowly. Raises ValueError for a misshapen or non-finite one, or a sample < 1.
        """
        if isinstance(sample, bool) or not isinstance(sample, int | np.integer) or sample < 1:
            raise ValueError(f"sample: expected an integer of at least 1, got {sample!r}")
        matrix = None
        if rotation is not None:
            matrix = as_array(rotation, 2, "rotation").astype(np.float32)
            if matrix.shape != (view.dim, view.dim) or not np.isfinite(matrix).all():
                raise ValueError(f"rotation: expected finite [{view.dim}, {view.dim}], got shape {list(matrix.shape)}")
        index = cls(*_learn(view, int(sample), seed, matrix), view)
        index.extend(view, advance=advance)
        return index

    @property
    def rows(self) -> int:
        """Rows that have codes."""
        return self._state.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the rotation, in memory or mapped."""
        runs = sum(a.nbytes for run in self._state.runs for a in run.arrays)
        return runs + self._matrix.nbytes + self._mean.nbytes + self._weight.nbytes

    def __repr__(self) -> str:
        return f"ScanIndex({self.rows} rows, dim={self.dim}, {self.nbytes / 2**20:.1f} MiB)"

    def extend(self, view: StoreView, *, advance: Callable[[int], object] | None = None) -> int:
        """Code the rows that were added since, under the rotation that is there; returns how many.

        advance: called with the number of rows coded since the last call; what it raises ends the work, and the index
        stays as it was.
        """
        self._check(view)
        with self._lock:
            state = self._state
            added = view.rows - state.rows
            if added <= 0:
                return 0
            run = _Run.empty(added, self.dim)
            alpha = max(state.alpha, self._encode(view, state.rows, run, advance))
            runs = list(state.runs)
            while runs and not runs[-1].mapped and len(runs[-1]) <= 2 * len(run):
                run = _joined(runs.pop(), run)
            self._state = _State(self._rotation, (*runs, run), alpha)
        return added

    def candidates(self, columns: Columns, view: StoreView) -> Int64:
        """Rows of the view, ascending, that are alive and pass a gate: exactly those of ``_C.gate_rows``."""
        return self.candidates_each([columns], view)[0]

    def candidates_each(self, columns: list[Columns], view: StoreView) -> list[Int64]:
        """``candidates`` for each of the columns, reading the codes once for all of them."""
        self._check(view)
        for c in columns:
            self._check_columns(c)
        compiled = [c.compiled for c in columns]
        return self._state.compiled.threshold(view.blocks, view.squared_norms, compiled, view.alive)

    def bounded_each(self, columns: list[Columns], view: StoreView) -> list[tuple[Int64, Float32, Float32]]:
        """``candidates_each`` as (rows, low, high): float32 between which each row's cosine to the query lies.

        The bounds are narrow where the query is the one gate, else -1 to 1.
        """
        self._check(view)
        for c in columns:
            self._check_columns(c)
        compiled = [c.compiled for c in columns]
        return self._state.compiled.threshold_bounds(view.blocks, view.squared_norms, compiled, view.alive)

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
        """Positions in rows, ascending, that hold the k best by exact score and all that tie with them; a few more too.

        rows: int64 [M] rows of the view, or None for all that are alive (positions are then rows, and the factors
        have one entry per row of the view). importance, multiplier: float64 [M], finite and >= 0 with finite
        products, default 1; ngram_overlap: int32 [M] counts, default 0. Gates are not applied.
        """
        self._check(view)
        self._check_columns(columns)
        if not columns.plain:
            raise ValueError("columns: expected all of them to score, without addends, below zero as above")
        return self._state.compiled.top(
            view.blocks,
            view.squared_norms,
            columns.compiled,
            rows,
            view.alive if rows is None else None,
            importance,
            multiplier,
            ngram_overlap,
            COVERAGE_PENALTY_CAP,
            MIN_NOVELTY_FLOOR,
            NGRAM_PENALTY_STEP,
            NGRAM_PENALTY_CAP,
            k,
        )

    def save(self, folder: str | os.PathLike[str], view: StoreView) -> None:
        """Write the codes to a folder that ``load`` opens, replacing an index that is there.

        As with ``FactStore.save``: a new subfolder, synced, then named by the manifest, which is renamed into place;
        saves take turns. The codes name the saved store that they were made of and are of no other.

        Args:
            folder: The folder, as a rule that of the store.
            view: A view that the codes were made of, of a store that was loaded from a folder.

        Raises:
            FileExistsError: There is a file in place of the folder.
            ValueError: The view is of no saved store, some codes are of rows that were added since, or the folder holds
                another store by now. Save the store, load it and make the codes again.
        """
        home = Path(folder)
        state = self._state
        self._check(view)
        if home.exists() and not home.is_dir():
            raise FileExistsError(f"{home}: expected a folder, found a file")
        store = view.identity
        if store is None or state.rows > view.saved_rows:
            raise ValueError(
                f"view: expected codes of a store as it was loaded from a folder, found {state.rows} rows of which "
                f"{0 if store is None else view.saved_rows} were saved: save the store and load it again"
            )
        _KIND.save(home, lambda data: self._write(state, home, data, store))

    def _write(self, state: _State, home: Path, data: Path, store: str) -> dict[str, Any]:
        there = STORE.manifest(home)["identity"] if (home / STORE.file).is_file() else store
        if there != store:
            raise ValueError(f"{home}: the store was replaced since these codes were made: load it again")
        runs = state.runs or (_Run.empty(0, self.dim),)
        arrays = {name: [run.arrays[i] for run in runs] for i, name in enumerate(_Run.NAMES)}
        arrays |= {"matrix": [self._matrix], "mean": [self._mean], "weight": [self._weight]}
        for name, parts in arrays.items():
            _save_parts(data / f"{name}.npy", parts)
        return {
            "dim": self.dim,
            "rows": state.rows,
            "alpha": state.alpha.hex(),
            "store": store,
        }

    @classmethod
    def load(cls, folder: str | os.PathLike[str], view: StoreView) -> ScanIndex:
        """Map an index that ``save`` wrote of the first rows of this view.

        Every byte is checked first. Raises FileNotFoundError where there is none, DamagedFileError where it is not as
        it was written, ValueError where it is of another format or of another store. Nothing is ever unpickled.
        """
        home = Path(folder)
        return _KIND.load(home, lambda manifest: cls._read(home, manifest, view))

    @classmethod
    def _read(cls, home: Path, manifest: dict[str, Any], view: StoreView) -> ScanIndex:
        dim, n = manifest["dim"], manifest["rows"]
        if manifest["store"] != view.identity:
            raise ValueError(f"{home}: the codes are of other facts than the store's")
        if dim != view.dim or n > view.saved_rows:
            raise ValueError(
                f"{home}: expected codes of up to {view.saved_rows} rows [{view.dim}], found {n} of [{dim}]"
            )
        files = Files(home / manifest["data"], manifest["files"], home / _KIND.file)

        def read(name: str, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
            return files.array(f"{name}.npy", dtype, shape, mapped=True)

        index = cls(
            read("matrix", np.float32, (dim, dim)).copy(),
            read("mean", np.float32, (dim,)).copy(),
            read("weight", np.float32, (dim,)).copy(),
            view,
        )
        shapes = [(np.int8, (n, width)) for width in _C.scan_widths(dim)] + [(np.float32, (n, _NUMBERS))]
        run = _Run(tuple(read(name, *shape) for name, shape in zip(_Run.NAMES, shapes, strict=True)), mapped=True)
        files.check()  # before the first search, which reads most of it anyway
        try:
            alpha = float.fromhex(manifest["alpha"])
        except (ValueError, OverflowError):
            alpha = -1.0
        if not 0.0 <= alpha < np.inf:
            what = f"expected alpha to be a number, found {manifest['alpha']!r}"
            raise DamagedFileError(f"{home / _KIND.file}: {what}", home / _KIND.file)
        index._state = _State(index._rotation, (run,) if n else (), alpha)
        index.mapped_files = MappedFiles(home / manifest["data"] / f"{name}.npy" for name in _Run.NAMES)
        return index

    def _check(self, view: StoreView) -> None:
        if view.dim != self.dim:
            raise ValueError(f"view: expected dimension {self.dim} (that of the codes), got {view.dim}")
        if view.layout != self.layout:
            raise ValueError(f"view: expected layout {self.layout} (that of the codes), got {view.layout}")

    def _check_columns(self, columns: Columns) -> None:
        if columns.dim != self.dim:
            raise ValueError(f"columns: expected dimension {self.dim} (that of the codes), got {columns.dim}")
        if columns.gated_addend:
            raise ValueError("columns: expected no addend in a gated column, the codes know nothing of single rows")

    def _encode(self, view: StoreView, first: int, run: _Run, advance: Callable[[int], object] | None) -> float:
        """Fill the run with the codes of the rows from first on; returns the largest norm of their codes."""
        back = np.ascontiguousarray(self._matrix.T, np.float64)
        alpha = 0.0
        for start in range(0, len(run), _CHUNK):
            part = run.part(start, min(start + _CHUNK, len(run)))
            centred = _C.scan_center(view.blocks, view.squared_norms, self._rotation, first + start, len(part))
            with np.errstate(over="ignore", invalid="ignore"):
                rotated = centred @ self._matrix
            decoded, most = _C.scan_encode(rotated, self._rotation, *part.arrays)
            _C.scan_measure(
                view.blocks, view.squared_norms, self._rotation, first + start, most, decoded @ back, part.numbers
            )
            alpha = max(alpha, most)
            if advance is not None:
                advance(len(part))
        return alpha


def _learn(view: StoreView, sample: int, seed: int, matrix: Float32 | None) -> tuple[Float32, Float32, Float32]:
    """Rotation, mean and weights: the principal axes of a sample, largest variance first, if there is no matrix."""
    alive = np.flatnonzero(view.alive)
    if len(alive) > sample:
        alive = np.sort(np.random.default_rng(seed).choice(alive, sample, replace=False))
    rows = view.take(alive).astype(np.float64) / np.sqrt(view.squared_norms[alive, None])
    mean = rows.mean(axis=0).astype(np.float32) if len(rows) else np.zeros(view.dim, np.float32)
    rows -= mean
    if matrix is None:
        working = rows if view.dim <= _FLOAT64_PCA else rows.astype(np.float32)
        try:
            _, axes = np.linalg.eigh(working.T @ working)
        except np.linalg.LinAlgError:
            axes = np.eye(view.dim)
        matrix = np.ascontiguousarray(axes[:, ::-1], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        deviation = np.sqrt(np.square(rows @ matrix).sum(axis=0) / max(len(rows), 1))
    weight = deviation**_EXPONENT
    most = float(weight.max())
    if not 1e-20 < most < 1e20:
        return matrix, mean, np.ones(view.dim, np.float32)
    return matrix, mean, np.maximum(weight, _LEAST_WEIGHT * most).astype(np.float32)


def _aligned(shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array whose rows do not lie across cache lines where they need not."""
    size = shape[0] * shape[1] * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _joined(first: _Run, second: _Run) -> _Run:
    arrays = []
    for a, b in zip(first.arrays, second.arrays, strict=True):
        out = _aligned((len(a) + len(b), a.shape[1]), a.dtype)
        out[: len(a)], out[len(a) :] = a, b
        arrays.append(out)
    return _Run(tuple(arrays))


def _save_parts(path: Path, parts: list[npt.NDArray[Any]]) -> None:
    """One array of these parts, one after the other."""
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    header = {"descr": np.lib.format.dtype_to_descr(parts[0].dtype), "fortran_order": False, "shape": shape}
    with synced(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(part.data.cast("B") if part.size else b"")
