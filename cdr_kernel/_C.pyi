from typing import Any

import numpy as np
import numpy.typing as npt

class Columns:
    def __init__(
        self,
        vectors: npt.NDArray[np.float64],
        squared_norms: npt.NDArray[np.float64],
        scale: npt.NDArray[np.float64],
        shift: npt.NDArray[np.float64],
        weight: npt.NDArray[np.float64],
        gate: npt.NDArray[np.float64],
        has_coverage: bool,
        clamp_novelty: bool,
        gate_only: npt.NDArray[np.bool_] | None = None,
        factors_above_zero: bool = False,
        addend_starts: npt.NDArray[np.int64] | None = None,
        addend_rows: npt.NDArray[np.int64] | None = None,
        addend_values: npt.NDArray[np.float64] | None = None,
    ) -> None: ...
    @property
    def squared_norms(self) -> list[float]: ...

def check_rows(
    blocks: tuple[npt.NDArray[Any], ...], safe_exponent: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint8]]: ...
def gate_rows(
    blocks: tuple[npt.NDArray[Any], ...],
    squared_norms: npt.NDArray[np.float64],
    columns: Columns,
    index: npt.NDArray[np.int64] | None = None,
    alive: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.int64]: ...
def score_rows(
    blocks: tuple[npt.NDArray[Any], ...],
    squared_norms: npt.NDArray[np.float64],
    columns: Columns,
    index: npt.NDArray[np.int64] | None,
    importance: npt.NDArray[np.float64] | None,
    multiplier: npt.NDArray[np.float64] | None,
    ngram_overlap: npt.NDArray[np.int32] | None,
    penalty_cap: float,
    novelty_floor: float,
    ngram_step: float,
    ngram_cap: float,
) -> tuple[
    npt.NDArray[np.float64],
    npt.NDArray[np.float64],
    npt.NDArray[np.float64],
    npt.NDArray[np.float64],
    npt.NDArray[np.float64],
    npt.NDArray[np.float64],
]: ...
def column_values(
    blocks: tuple[npt.NDArray[Any], ...],
    squared_norms: npt.NDArray[np.float64],
    columns: Columns,
    index: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.float64]: ...
def exact_sum(values: npt.NDArray[np.float64]) -> float: ...
def crc32c(data: Any, crc: int = 0, generic: bool = False) -> int: ...
def block_sums(path: str, block: int) -> tuple[int, bytes]: ...
def check_read(array: npt.NDArray[Any], rows: npt.NDArray[np.int64] | None = None) -> None: ...

class CheckedFile:
    def __init__(self, path: str, bytes: int, sums: bytes, block: int, mapped: bool = True) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def verified(self) -> bool: ...
    @property
    def unverified_bytes(self) -> int: ...
    def check(self, start: int = 0, stop: int | None = None) -> None: ...
    def check_spans(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> None: ...
    def check_next(self, most: int, parallel: bool = False) -> int: ...

def threads() -> int: ...
def set_threads(n: int) -> None: ...
def simd() -> str: ...
def set_simd(level: str) -> None: ...
def simd_levels() -> list[str]: ...
def hash_texts(
    texts: list[str | bytes], *, key: tuple[int, int], bits: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]: ...
def hash_tokens(tokens: list[str | bytes], *, key: tuple[int, int], bits: int) -> npt.NDArray[np.uint8]: ...
def take_tokens(
    blocks: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]], ...], index: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]: ...
def token_ngrams(
    blocks: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]], ...], n: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]: ...

class HashSet:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def union(self, hashes: npt.NDArray[np.uint64]) -> HashSet: ...
    def values(self) -> npt.NDArray[np.uint64]: ...
    def contains(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]: ...
    def overlap(
        self,
        blocks: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]], ...],
        index: npt.NDArray[np.int64] | None,
        n: int,
    ) -> npt.NDArray[np.int32]: ...

class Rotation:
    def __init__(
        self, matrix: npt.NDArray[np.float32], mean: npt.NDArray[np.float32], weight: npt.NDArray[np.float32]
    ) -> None: ...

class Codes:
    def __init__(
        self,
        rotation: Rotation,
        runs: list[tuple[npt.NDArray[Any], ...]],  # int8, int8, int8, float32
        alpha: float,
    ) -> None: ...
    def threshold(
        self,
        blocks: tuple[npt.NDArray[Any], ...],
        squared_norms: npt.NDArray[np.float64],
        columns: list[Columns],
        alive: npt.NDArray[np.bool_] | None = None,
    ) -> list[npt.NDArray[np.int64]]: ...
    def threshold_bounds(
        self,
        blocks: tuple[npt.NDArray[Any], ...],
        squared_norms: npt.NDArray[np.float64],
        columns: list[Columns],
        alive: npt.NDArray[np.bool_] | None = None,
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]]: ...
    def top(
        self,
        blocks: tuple[npt.NDArray[Any], ...],
        squared_norms: npt.NDArray[np.float64],
        columns: Columns,
        index: npt.NDArray[np.int64] | None,
        alive: npt.NDArray[np.bool_] | None,
        importance: npt.NDArray[np.float64] | None,
        multiplier: npt.NDArray[np.float64] | None,
        ngram_overlap: npt.NDArray[np.int32] | None,
        penalty_cap: float,
        novelty_floor: float,
        ngram_step: float,
        ngram_cap: float,
        k: int,
    ) -> npt.NDArray[np.int64]: ...

def scan_widths(dim: int) -> tuple[int, int, int]: ...
def scan_center(
    blocks: tuple[npt.NDArray[Any], ...],
    squared_norms: npt.NDArray[np.float64],
    rotation: Rotation,
    first: int,
    n: int,
) -> npt.NDArray[np.float32]: ...
def scan_encode(
    rotated: npt.NDArray[np.float32],
    rotation: Rotation,
    first: npt.NDArray[np.int8],
    second: npt.NDArray[np.int8],
    third: npt.NDArray[np.int8],
    numbers: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float64], float]: ...
def scan_measure(
    blocks: tuple[npt.NDArray[Any], ...],
    squared_norms: npt.NDArray[np.float64],
    rotation: Rotation,
    first: int,
    alpha: float,
    rebuilt: npt.NDArray[np.float64],
    numbers: npt.NDArray[np.float32],
) -> None: ...
def likely(
    found: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]],
    alive: npt.NDArray[np.bool_],
    importance: npt.NDArray[np.float64],
    multiplier: npt.NDArray[np.float64] | None,
    k: int,
) -> list[tuple[int, npt.NDArray[np.int64]]]: ...
def read_pass(blocks: tuple[npt.NDArray[Any], ...]) -> int: ...
