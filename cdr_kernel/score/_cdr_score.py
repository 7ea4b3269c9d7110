"""The batched op: embeddings and columns in, exact scores of the facts that pass the gate out.

An implementation (``impl``) finds the rows that may pass the gate and, with ``k``, may be among the k best; one
float64 routine then computes every number that is returned, so all implementations answer alike to the last bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.score._columns import Columns
from cdr_kernel.spec.constants import COVERAGE_PENALTY_CAP, MIN_NOVELTY_FLOOR, NGRAM_PENALTY_CAP, NGRAM_PENALTY_STEP
from cdr_kernel.text._repr import one_line
from cdr_kernel.validation._arrays import Blocks, Float64, Int64, as_array, as_blocks, factor, is_tensor, safe_blocks
from cdr_kernel.validation._scalars import check_order

if TYPE_CHECKING:
    import torch

    from cdr_kernel.score._device_rows import DeviceView

IMPLS = ("cpp", "torch", "triton")


@dataclass(frozen=True, eq=False)
class Scores:
    """The facts that pass the gate, with the parts of their scores. Every array has M entries.

    Rounding may exceed the ranges below by a few last bits, at most one for every dimension and coverage entry.

    Attributes:
        rows: int64, rows of the embeddings: ascending, or best first with k (ties by row).
        score: With the n-gram penalty of §5.2 (reading R2).
        score_without_guard: Without it.
        relevance: In [-1, 1] for the specification's columns.
        coverage: In [-1, 1].
        residual_pull: In [-1, 1] for the specification's columns.
        novelty: In [0.20, 2] (reading R3: literal, unclamped).
    """

    rows: Int64
    score: Float64
    score_without_guard: Float64
    relevance: Float64
    coverage: Float64
    residual_pull: Float64
    novelty: Float64

    __repr__ = one_line

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, positions: Int64) -> Scores:
        """The scores at these positions, in this order."""
        return Scores(**{name: getattr(self, name)[positions] for name in self.__dataclass_fields__})


def best_first(score: Float64, rows: Int64, k: int | None = None) -> Int64:
    """Positions of the k largest scores (all for None), best first, equal scores by the lower row (reading R26)."""
    positions = np.arange(len(score))
    if k is not None and k < len(score):
        if k == 0:
            return positions[:0]
        positions = np.flatnonzero(score >= np.partition(score, len(score) - k)[len(score) - k])
    return positions[np.lexsort((rows[positions], -score[positions]))][:k]


def ngram_penalty(overlap: npt.ArrayLike) -> Float64:
    """§5.2: what repeated n-grams take from a score, min(0.80, 0.15 x overlap).

    Args:
        overlap: How many n-grams of a fact were already written: an integer, or an array of them.
    """
    penalty: Float64 = np.minimum(NGRAM_PENALTY_CAP, np.asarray(overlap) * NGRAM_PENALTY_STEP)
    return penalty


def check_k(k: int | None) -> None:
    """Raises TypeError or ValueError unless k is None or an integer >= 0."""
    if k is None:
        return
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise TypeError(f"k: expected an integer or None, got {type(k).__name__}")
    if k < 0:
        raise ValueError(f"k: expected at least 0, got {k}")


def check_product(importance: Float64, multiplier: Float64) -> None:
    """Raises ValueError where a product of the two is not finite."""
    with np.errstate(over="ignore"):
        if not np.isfinite(importance * multiplier).all():
            raise ValueError("multiplier: importance times multiplier is not finite")


def available_impls(device: Any = "cpu") -> tuple[str, ...]:
    """The implementations that `impl=` takes for data on this device, the default first.

    Args:
        device: A torch device or its name.
    """
    default = _default(device)
    missing = {"cpp": "", "torch": no_torch(), "triton": no_triton(device)}
    return tuple(i for i in dict.fromkeys([default, *IMPLS]) if not missing[i])


def choose_impl(impl: str | None, device: Any = "cpu") -> str:
    """impl itself if it runs here, else CDR_KERNEL_IMPL, else cpp for CPU data, triton or torch for the rest.

    device: a torch.device or its name. Without ``impl`` and CDR_KERNEL_IMPL, triton is taken for CUDA tensors where
    Triton is installed and the GPU is of compute capability 8.0 or later. Raises ValueError for an unknown name and
    for triton on a device it does not run on, ImportError for what is asked for and not installed.
    """
    asked = os.environ.get("CDR_KERNEL_IMPL") or _default(device) if impl is None else impl
    where = "CDR_KERNEL_IMPL" if impl is None else "impl"
    if asked not in IMPLS:
        raise ValueError(f"{where}: expected one of {', '.join(IMPLS)}, got {asked!r}")
    if asked != "cpp" and (reason := no_torch()):
        raise ImportError(f"{where}: {reason}")
    if asked == "triton":
        if not triton_installed():
            raise ImportError(f"{where}: {no_triton(device)}")
        if reason := no_triton(device):
            raise ValueError(f"{where}: {reason}")
    return asked


def _default(device: Any) -> str:
    kind = str(device).split(":")[0]
    if kind == "cpu":
        return "cpp"
    return "triton" if kind == "cuda" and not no_triton(device) else "torch"


@cache
def triton_installed() -> bool:
    """Whether Triton could be imported; it is not, to find out."""
    return find_spec("triton") is not None


def no_torch() -> str:
    """Why torch cannot be used; empty where it is installed. It is not imported, to find out."""
    return "" if find_spec("torch") else "torch is not installed: pip install torch"


def no_triton(device: Any) -> str:
    """Why triton cannot be used for data on this device; empty where it can."""
    if reason := no_torch():
        return reason
    if not triton_installed():
        return 'triton is not installed: pip install ".[gpu]" in a checkout'
    kind = str(device).split(":")[0]
    if kind != "cuda":
        interpreted = kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        return "" if interpreted else f"triton runs on CUDA (on the CPU only under TRITON_INTERPRET=1), not on {kind}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(torch.device(device))
        if capability < (8, 0):
            return f"triton needs compute capability 8.0, {device} has {capability[0]}.{capability[1]}"
    return ""


def _overlaps(values: Any, sessions: int, n: int) -> list[npt.NDArray[np.int32] | None]:
    if values is None:
        return [None] * sessions
    if is_tensor(values):
        values = values.detach().cpu().numpy()
    a = np.asarray(values)
    if a.dtype.kind not in "iu":
        raise TypeError(f"ngram_overlap: expected integers, got {a.dtype}")
    if a.shape not in ((n,), (sessions, n)):
        raise ValueError(f"ngram_overlap: expected [{n}] or [{sessions}, {n}], got {list(a.shape)}")
    if a.size and (a.min() < 0 or a.max() > np.iinfo(np.int32).max):
        raise ValueError(f"ngram_overlap: expected counts >= 0, got {a.min()} to {a.max()}")
    a = np.broadcast_to(a, (sessions, n))
    return [np.ascontiguousarray(row, dtype=np.int32) for row in a]


@overload
def cdr_score(
    embeddings: Any,
    columns: Columns,
    *,
    importance: Any = ...,
    multiplier: Any = ...,
    ngram_overlap: Any = ...,
    rows: Any = ...,
    k: int | None = ...,
    squared_norms: Float64 | None = ...,
    impl: str | None = ...,
) -> Scores: ...
@overload
def cdr_score(
    embeddings: Any,
    columns: Sequence[Columns],
    *,
    importance: Any = ...,
    multiplier: Any = ...,
    ngram_overlap: Any = ...,
    rows: Any = ...,
    k: int | None = ...,
    squared_norms: Float64 | None = ...,
    impl: str | None = ...,
) -> list[Scores]: ...
def cdr_score(
    embeddings: Any,
    columns: Columns | Sequence[Columns],
    *,
    importance: Any = None,
    multiplier: Any = None,
    ngram_overlap: Any = None,
    rows: Any = None,
    k: int | None = None,
    squared_norms: Float64 | None = None,
    impl: str | None = None,
) -> Scores | list[Scores]:
    """The exact CDR scores (§2.2, §5.2) of the facts that pass the gate (§2.6).

    Equivalent to, for one session of the specification:
        cos = F.normalize(embeddings) @ F.normalize(vectors).T
        score = importance * multiplier * maximum(cos_query, cos_residual.amax(1)) * novelty * (1 - ngram_penalty)

    Args:
        embeddings: [N, D] float16, float32 or float64 (torch: bfloat16 too), any layout, of any length. A tuple of such
            arrays is read as one array of their rows. Or a `DeviceView`: the rows of a store on a device, which knows
            the removed rows and the store's importance.
        columns: The columns of one session, or a sequence of B of them. They may differ in their numbers of coverage
            and residual vectors.
        importance: [N] or, with rows, [M]; finite and >= 0. Default 1, or the store's for a `DeviceView`.
        multiplier: [N] or, with rows, [M]; finite and >= 0. Default 1.
        ngram_overlap: Counts, [N] or, with rows, [M], or one such row for each session. Default 0.
        rows: int64 [M]: the only rows to look at. Default all N.
        k: The number of facts to return, best first. None returns all that pass, in the order of their rows.
        squared_norms: float64 [N], as a `StoreView` has them, to save computing them again. The rows are then trusted.
            Not used on a device.
        impl: "cpp" (every row in float64; the default on the CPU), "torch" (upper bounds in float32 on the tensor's
            device, then the exact routine for what may pass) or "triton" (the same bounds in one fused kernel; the
            default on CUDA devices).

    Returns:
        The scores of the session, or a list of B of them.

    Raises:
        ValueError: For an argument out of range or misshapen, and for rows that are zero or not finite.
        TypeError: For an argument of a wrong type.
        IndexError: For rows that are not there.
        ImportError: For an impl that is not installed.
    """
    single = isinstance(columns, Columns)
    if not isinstance(columns, Columns | Iterable):
        raise TypeError(f"columns: expected Columns or a sequence of them, got {type(columns).__name__}")
    check_order(columns, "columns")
    sessions: list[Columns] = [columns] if isinstance(columns, Columns) else list(columns)
    for c in sessions:
        if not isinstance(c, Columns):
            raise TypeError(f"columns: expected Columns or a sequence of them, got {type(c).__name__}")
    check_k(k)
    resident = _resident(embeddings, rows)
    if resident is not None:
        embeddings, squared_norms, rows = resident.blocks, resident.squared_norms, resident.index
    on_host = not (is_tensor(embeddings) and embeddings.device.type != "cpu")
    impl = choose_impl(impl, (resident or embeddings).device if resident or not on_host else "cpu")
    data: tuple[Any, ...] = (
        as_blocks(embeddings, sessions[0].dim if sessions else 1) if on_host else _device_rows(embeddings)
    )
    n = sum(len(b) for b in data)
    for c in sessions:
        if data[0].shape[1] != c.dim:
            raise ValueError(f"columns: expected dimension {data[0].shape[1]} (that of the rows), got {c.dim}")
    if not on_host:
        squared_norms = None
    elif squared_norms is None:
        data, squared_norms = safe_blocks(data)
    else:
        squared_norms = as_array(squared_norms, 1, "squared_norms").astype(np.float64, copy=False)
        if len(squared_norms) != n:
            raise ValueError(f"squared_norms: expected {n} entries (one per row), got {len(squared_norms)}")
    index = None if rows is None else _index(rows, n)
    count = n if index is None else len(index)
    of_store = resident is not None and importance is None
    weights = resident.importance if of_store and resident else factor(importance, count, "importance")
    factors = factor(multiplier, count, "multiplier")
    if weights is not None and factors is not None:
        check_product(weights, factors)

    overlaps = _overlaps(ngram_overlap, len(sessions), count)
    each = [Factors(weights, factors, overlap) for overlap in overlaps]
    if impl == "cpp":
        found = [np.arange(count) if resident is None else resident.living()] * len(sessions)
    else:
        from cdr_kernel.score._bound_search import bounded_search

        source = None if resident is None else resident.source(of_store)
        found = bounded_search(impl, data, squared_norms, sessions, index, each, k, source)
    results = []
    for c, positions, f in zip(sessions, found, each, strict=True):
        at = positions if index is None else index[positions]
        results.append(exact_scores(data, squared_norms, at, c, f.take(positions), k))
    return results[0] if single else results


def _index(rows: Any, n: int) -> Int64:
    a = np.asarray(rows)
    if a.ndim != 1 or (a.size and a.dtype.kind not in "iu"):
        raise ValueError(f"rows: expected integers [M], got {a.dtype} {list(a.shape)}")
    if a.size and (a.min() < 0 or a.max() >= n):
        raise IndexError(f"rows: expected 0 to {n - 1}, got {a.min()} to {a.max()}")
    return np.ascontiguousarray(a, dtype=np.int64)


@dataclass(frozen=True)
class Factors:
    """What multiplies the scores, one entry per candidate: float64, float64, int32; None stands for 1, 1 and 0."""

    importance: Float64 | None
    multiplier: Float64 | None
    ngram_overlap: npt.NDArray[np.int32] | None

    def take(self, positions: Int64) -> Factors:
        """The factors of the candidates at these positions."""

        def at(values: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
            return None if values is None else np.ascontiguousarray(values[positions])

        return Factors(at(self.importance), at(self.multiplier), at(self.ngram_overlap))


def exact_scores(
    data: tuple[Any, ...], squared_norms: Float64 | None, rows: Int64, c: Columns, factors: Factors, k: int | None
) -> Scores:
    """The exact scores of those of rows that pass; with k of the k best. data without squared norms is on a device."""
    if squared_norms is None:
        scores, kept = _exact(*_copied(data[0], rows), c, factors, k)
    else:
        scores, kept = _exact(data, squared_norms, rows, c, factors, k)
    return replace(scores, rows=rows[kept])


def _resident(embeddings: Any, rows: Any) -> DeviceView | None:
    """embeddings as a DeviceView narrowed to rows; None for everything else."""
    device = sys.modules.get("cdr_kernel.score._device_rows")
    if device is None or not isinstance(embeddings, device.DeviceView):
        return None
    view: DeviceView = embeddings
    return view if rows is None else view.narrow(_index(rows, view.rows))


def passing_scores(blocks: Blocks, squared_norms: Float64, rows: Int64, c: Columns, factors: Factors) -> Scores:
    """The exact scores of rows of which it is known that they pass."""
    values = _C.score_rows(
        blocks,
        squared_norms,
        c.compiled,
        rows,
        factors.importance,
        factors.multiplier,
        factors.ngram_overlap,
        COVERAGE_PENALTY_CAP,
        MIN_NOVELTY_FLOOR,
        NGRAM_PENALTY_STEP,
        NGRAM_PENALTY_CAP,
    )
    return Scores(rows, *values)


def _exact(
    blocks: Blocks, squared_norms: Float64, rows: Int64, c: Columns, factors: Factors, k: int | None
) -> tuple[Scores, Int64]:
    """The exact scores of those of rows that pass, and their positions in rows; with k the best only."""
    passing = _C.gate_rows(blocks, squared_norms, c.compiled, rows)
    factors = factors.take(passing)
    scores = passing_scores(blocks, squared_norms, rows[passing], c, factors)
    if k is None:
        return scores, passing
    best = best_first(scores.score, scores.rows, k)
    return scores.take(best), passing[best]


def _copied(tensor: torch.Tensor, rows: Int64) -> tuple[Blocks, Float64, Int64]:
    """A host copy of these rows of a tensor on a device, with its squared norms and row numbers."""
    import torch

    copied = tensor[torch.from_numpy(rows).to(tensor.device)]
    blocks, squared_norms = safe_blocks((as_array(copied, 2, "embeddings"),))
    return blocks, squared_norms, np.arange(len(rows))


def _device_rows(tensor: torch.Tensor) -> tuple[torch.Tensor]:
    if tensor.ndim != 2:
        raise ValueError(f"embeddings: expected 2 dimension(s), got shape {list(tensor.shape)}")
    if not tensor.is_floating_point():
        raise TypeError(f"embeddings: expected float16, bfloat16, float32 or float64, got {tensor.dtype}")
    return (tensor.detach(),)
