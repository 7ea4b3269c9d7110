"""Facts that carry their own embeddings, as one matrix."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from cdr_kernel.validation._arrays import Float64, Int64, check_rows, is_tensor
from cdr_kernel.validation._scalars import check_order

SOUND = 0
"""``check_rows``'s flag of a row that is finite, not zero and in the safe range."""


def embedding_of(fact: Any) -> Any:
    """The embedding a fact carries: its ``_embedding`` or ``embedding``, else that of its ``.fact``; None for none.

    One that is None or empty does not count. It is returned as it is. Raises TypeError for one without a length.
    """
    inner = getattr(fact, "fact", None)
    for holder in (fact,) if inner is None else (fact, inner):
        for name in ("_embedding", "embedding"):
            vector = getattr(holder, name, None)
            if vector is not None and len(vector) > 0:
                return vector
    return None


def as_floats(vector: Any) -> Any:
    """Arrays and tensors as a list of Python floats; everything else as it is."""
    if isinstance(vector, np.ndarray) or is_tensor(vector):
        return vector.tolist()
    return vector


def pack_rows(vectors: Sequence[Any], dim: int) -> tuple[Float64, npt.NDArray[np.bool_]]:
    """Vectors of dim numbers each (lists, tuples, arrays, tensors) as float64 [n, dim], and which of them were numbers.

    Rows of a vector that holds something else are NaN. ``struct`` reads a list of floats four times as fast as
    ``np.array``.
    """
    memory = bytearray(8 * dim * len(vectors))
    out: Float64 = np.frombuffer(memory).reshape(len(vectors), dim)
    good = np.ones(len(vectors), np.bool_)
    write, size = struct.Struct(f"{dim}d").pack_into, 8 * dim
    for i, vector in enumerate(vectors):
        try:
            if isinstance(vector, list | tuple):
                write(memory, i * size, *vector)
            else:
                out[i] = as_floats(vector)
        except (struct.error, TypeError, ValueError, OverflowError):  # not numbers, or a number no float64 holds
            out[i] = np.nan
            good[i] = False
    return out, good


class FactArray(Sequence[Any]):
    """Facts with their embeddings held as one matrix; pass it wherever a list of such facts goes.

    facts: any objects, see ``embedding_of``. The embeddings are copied once, here: a fact whose embedding is replaced
    or changed afterwards keeps its old one until a new FactArray is made, while a plain list is read again in every
    call. The facts themselves are kept, not copied.

    dim: D, the most frequent dimension. matrix: float64 [n, D], read-only, the embeddings that have it. rows: int64
    [n], which facts those are. squared_norms, flags: [n], of ``check_rows``. odd: by position, the other facts'
    embeddings (another dimension, or not numbers), None for a fact without one.
    """

    def __init__(self, facts: Iterable[Any]) -> None:
        check_order(facts, "facts")
        self.facts = tuple(facts)
        vectors = [embedding_of(fact) for fact in self.facts]
        lengths = [0 if v is None else len(v) for v in vectors]
        counts = Counter(n for n in lengths if n)
        self.dim = counts.most_common(1)[0][0] if counts else 0
        at = [i for i, n in enumerate(lengths) if n and n == self.dim]
        self.odd: dict[int, Any] = {}
        if len(at) < len(vectors):
            self.odd = {i: _copy(v) for i, v in enumerate(vectors) if lengths[i] != self.dim or v is None}
        matrix, good = pack_rows([vectors[i] for i in at], self.dim)
        rows = np.array(at, np.int64)
        if not good.all():
            self.odd |= {i: _copy(vectors[i]) for i in rows[~good].tolist()}
            matrix, rows = matrix[good], rows[good]
        self.matrix: Float64 = matrix
        self.rows: Int64 = rows
        self.squared_norms, self.flags = check_rows((matrix,)) if self.dim else (np.zeros(0), np.zeros(0, np.uint8))
        for array in (self.matrix, self.rows, self.squared_norms, self.flags):
            array.flags.writeable = False

    @classmethod
    def of(cls, facts: Iterable[Any]) -> FactArray:
        """facts itself if it is one."""
        return facts if isinstance(facts, cls) else cls(facts)

    def vector(self, position: int) -> Any:
        """The held embedding of a fact as a list of floats (as it came where it is odd), None for none."""
        if position in self.odd:
            return self.odd[position]
        return self.matrix[np.searchsorted(self.rows, position)].tolist()

    def __len__(self) -> int:
        return len(self.facts)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.facts[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.facts)


def _copy(vector: Any) -> Any:
    vector = as_floats(vector)
    return list(vector) if isinstance(vector, list) else vector
