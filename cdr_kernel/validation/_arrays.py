"""The arrays that callers may hand in, and what they become: checked, native, in the safe range."""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.spec.constants import SAFE_EXPONENT

Float32: TypeAlias = npt.NDArray[np.float32]
Float64: TypeAlias = npt.NDArray[np.float64]
Int64: TypeAlias = npt.NDArray[np.int64]
Blocks: TypeAlias = tuple[npt.NDArray[Any], ...]
"""[N_i, D] arrays of one dtype and dimension, read one after the other."""

New: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Makes an array of a shape and a dtype."""

_FLAGS = {1: "not finite", 2: "all zeros"}


def is_tensor(x: object) -> bool:
    """Whether x is a torch tensor; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_array(x: Any, ndim: int, name: str) -> npt.NDArray[Any]:
    """A numpy view or copy of x as native, aligned, C-ordered float16, float32 or float64.

    x: lists, tuples, numpy arrays of any layout and endianness, torch tensors (bfloat16 becomes float32,
    which is exact). Integers become float64. Raises TypeError for anything that is not numbers, ValueError for
    another number of dimensions than ndim, masked values, and tensors that are not dense (sparse, nested, quantised,
    float8, without storage). Of a list of vectors the first that is wrong is named. DamagedFileError for rows of a
    mapped store that are not as they were written.
    """
    if isinstance(x, np.ndarray):
        _C.check_read(x)  # it may be mapped from a store
    if ndim == 2 and isinstance(x, list | tuple) and any(map(_masked, x)):
        raise ValueError(f"{name}: expected no masked values")
    try:
        return _as_array(x, ndim, name)
    except (TypeError, ValueError):
        wrong = odd_row(x) if ndim == 2 else None
        if wrong is None:
            raise
        raise wrong.error(f"{name}: expected a vector of numbers in row {wrong.row}, got {wrong.got}") from None


class OddRow(NamedTuple):
    """A vector that is none, or of another length than it should be: which one, what came, and the error to raise."""

    row: int
    got: str
    error: type[Exception]


def odd_row(rows: Any, dim: int | None = None) -> OddRow | None:
    """The first of several vectors that is wrong; None where all are right, or rows is no list of vectors.

    dim: the length that all should have, by default that of the first.
    """
    if not isinstance(rows, list | tuple) and not (isinstance(rows, np.ndarray) and rows.dtype == object and rows.ndim):
        return None
    first = 0
    if len(rows) and isinstance(rows[0], Real):  # one vector, not several
        return None
    for i, row in enumerate(rows):
        if row is None or isinstance(row, str | bytes):
            return OddRow(i, "None" if row is None else f"{type(row).__name__} {row[:20]!r}", TypeError)
        try:
            vector = _as_array(row, 1, "row")
        except (TypeError, ValueError) as error:
            return OddRow(i, *_wrong_in(row, error))
        first = len(vector) if i == 0 else first
        if len(vector) != (dim or first):
            return OddRow(i, f"{len(vector)} numbers" + ("" if dim else f" where row 0 has {first}"), ValueError)
    return None


def _wrong_in(row: Any, error: Exception) -> tuple[str, type[Exception]]:
    """What is wrong with one vector, and the error to raise."""
    if _masked(row):
        return "masked values", ValueError
    shape = np.shape(row) if isinstance(row, np.ndarray) or is_tensor(row) else None
    if shape is not None and len(shape) != 1:
        return f"an array of shape {list(shape)}", ValueError
    for j, value in enumerate(row if isinstance(row, list | tuple | np.ndarray) else ()):
        if isinstance(value, bool) or not isinstance(value, Real):
            return f"one with {type(value).__name__} at place {j}", TypeError
    return f"an array of {row.dtype}" if isinstance(row, np.ndarray) else type(row).__name__, type(error)


def _as_array(x: Any, ndim: int, name: str) -> npt.NDArray[Any]:
    if _masked(x):
        raise ValueError(f"{name}: expected no masked values")
    try:
        if is_tensor(x):
            import torch

            x = x.detach().cpu().resolve_conj().resolve_neg()
            x = (x.float() if x.dtype == torch.bfloat16 else x).numpy()
        a = np.asarray(x)
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: nested, meta and other unusual tensors
        raise ValueError(f"{name}: expected a regular {ndim}-dimensional array of numbers ({error})") from None
    if a.size == 0 and a.ndim == 1 and ndim == 2:
        a = a.reshape(0, 0).astype(np.float64)
    if a.dtype.kind not in "fiu" or (a.dtype.kind == "f" and a.dtype.itemsize > 8):
        raise TypeError(f"{name}: expected float16, float32 or float64, got {_what(x, a)}")
    if a.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimension(s), got shape {list(a.shape)}")
    dtype = a.dtype.newbyteorder("=") if a.dtype.kind == "f" else np.dtype(np.float64)
    return np.require(a, dtype=dtype, requirements=["C", "A"])


def _masked(x: Any) -> bool:
    return isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x)


def _what(x: Any, a: npt.NDArray[Any]) -> str:
    """The dtype of what is no array of numbers; its type where it is no array at all."""
    return type(x).__name__ if a.ndim == 0 and a.dtype == object else str(a.dtype)


def check_rows(blocks: Blocks) -> tuple[Float64, npt.NDArray[np.uint8]]:
    """Correctly rounded squared norms float64 [N], and what is wrong with each row (0 = nothing)."""
    return _C.check_rows(blocks, SAFE_EXPONENT)


def scale_rows(rows: Float64) -> Float64:
    """Rows float64 [n, D] times an exact power of two each, so that the largest magnitude is in [1, 2)."""
    _, exponents = np.frexp(np.abs(rows).max(axis=1, keepdims=True))
    scaled: Float64 = np.ldexp(rows, 1 - exponents)
    return scaled


def as_vectors(x: Any, dim: int | None, name: str) -> Float64:
    """Query-side vectors as float64 [n, D], each finite, non-zero and in the safe range.

    Vectors whose largest magnitude lies outside 2^±200 are scaled by an exact power of two, which leaves their
    direction as it is (readings, "Exact arithmetic"). Raises ValueError naming the first bad vector; TypeError
    for a dtype that is not a float or an integer. dim None takes the dimension that comes.
    """
    a: Float64 = as_array(x, 2, name).astype(np.float64)
    if len(a) == 0:
        return np.zeros((0, dim or 0))
    if a.shape[1] != (dim or a.shape[1]) or a.shape[1] == 0:
        raise ValueError(f"{name}: expected dimension {dim or 'of at least 1'}, got {a.shape[1]}")
    (a,), _ = safe_blocks((a,), name)
    return a


def as_vector(x: Any, dim: int | None, name: str) -> Float64:
    """One vector as float64 [D]; the rules of as_vectors."""
    a: Float64 = as_array(x, 1, name).astype(np.float64)
    if len(a) != (dim or len(a)) or len(a) == 0:
        raise ValueError(f"{name}: expected dimension {dim or 'of at least 1'}, got {len(a)}")
    _, flags = check_rows((a[None],))
    if flags[0] in _FLAGS:
        raise ValueError(f"{name}: {_FLAGS[int(flags[0])]}")
    return scale_rows(a[None])[0] if flags[0] else a


def as_blocks(embeddings: Any, dim: int) -> Blocks:
    """embeddings, or a tuple of arrays, as a tuple of [N_i, D] arrays of one dtype and dimension.

    dim: the D of an empty list, which has none.
    """
    if (
        isinstance(embeddings, tuple)
        and embeddings
        and all(isinstance(b, np.ndarray) and b.ndim == 2 for b in embeddings)
    ):
        blocks = tuple(as_array(b, 2, "embeddings") for b in embeddings)
        for b in blocks[1:]:
            if b.dtype != blocks[0].dtype or b.shape[1] != blocks[0].shape[1]:
                raise ValueError(
                    f"embeddings: expected blocks of {blocks[0].dtype} [N, {blocks[0].shape[1]}], "
                    f"got {b.dtype} {list(b.shape)}"
                )
        return blocks
    a = as_array(embeddings, 2, "embeddings")
    if a.shape == (0, 0):
        a = a.reshape(0, dim)
    if a.shape[1] == 0:
        raise ValueError(f"embeddings: expected at least one dimension, got shape {list(a.shape)}")
    return (a,)


def safe_blocks(blocks: Blocks, name: str = "embeddings") -> tuple[Blocks, Float64]:
    """The blocks and their squared norms; rows outside the safe range are scaled in a copy. Bad rows raise."""
    squared_norms, flags = check_rows(blocks)
    bad = np.flatnonzero((flags == 1) | (flags == 2))
    if len(bad):
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ValueError(f"{name}: {_FLAGS[int(flags[bad[0]])]} in row {bad[0]}{more}")
    far = np.flatnonzero(flags == 3)
    if len(far):
        rows = np.concatenate(blocks)
        rows[far] = scale_rows(rows[far])
        blocks = (rows,)
        squared_norms, _ = check_rows(blocks)
    return blocks, squared_norms


def factor(values: Any, n: int, name: str) -> Float64 | None:
    """importance or multiplier as float64 [n], finite and >= 0 (reading R28); None stays None."""
    if values is None:
        return None
    a = as_array(values, 1, name).astype(np.float64)
    if len(a) != n:
        raise ValueError(f"{name}: expected {n} entries (one per row), got {len(a)}")
    bad = np.flatnonzero(~(np.isfinite(a) & (a >= 0.0)))
    if len(bad):
        raise ValueError(f"{name}: expected finite and >= 0, got {a[bad[0]]} at row {bad[0]}")
    return a


def take_rows(blocks: Blocks, rows: Int64) -> npt.NDArray[Any]:
    """Copy of these rows, [M, D]."""
    out = np.empty((len(rows), blocks[0].shape[1]), blocks[0].dtype)
    start = 0
    for block in blocks:
        here = (rows >= start) & (rows < start + len(block))
        inside = rows[here] - start
        _C.check_read(block, inside)
        out[here] = block[inside]
        start += len(block)
    return out


class Growing:
    """An array [n, ...] with room behind it. Views of its front stay valid when more is written."""

    def __init__(self, values: npt.NDArray[Any], new: New = np.empty) -> None:
        self.buffer = values
        self._new = new

    def write(self, at: int, values: npt.NDArray[Any]) -> None:
        """Put values at row `at` and on; rows before that are not touched."""
        end = at + len(values)
        if end > len(self.buffer) or not self.buffer.flags.writeable:
            buffer = self._new((max(end, 2 * at, 16), *self.buffer.shape[1:]), self.buffer.dtype)
            buffer[:at] = self.buffer[:at]
            self.buffer = buffer
        self.buffer[at:end] = values

    def front(self, n: int) -> npt.NDArray[Any]:
        view = self.buffer[:n]
        view.flags.writeable = False
        return view
