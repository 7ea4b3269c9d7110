"""Candidates: the rows of a store that pass the relevance gate.

Always a threshold search, never a top-K before the gate: a top-K by relevance is what saturates windows (§1.1).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cdr_kernel import _C
from cdr_kernel.concurrency._forks import Lock, cached_property
from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.retrieve._bm25 import LexicalIndex
from cdr_kernel.retrieve._calibration import Moments
from cdr_kernel.retrieve._device_index import DeviceIndex
from cdr_kernel.retrieve._scan_index import ScanIndex
from cdr_kernel.retrieve._window_cache import CACHE_BYTES, KeptRows, RowCache, TaskCache
from cdr_kernel.score import Columns
from cdr_kernel.score._cdr_score import best_first, check_k
from cdr_kernel.score._columns import COVERAGE
from cdr_kernel.spec.constants import CDR_MIN_RELEVANCE
from cdr_kernel.store import FactStore
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.text._repr import one_line
from cdr_kernel.validation._arrays import Float64, Int64

if TYPE_CHECKING:
    from cdr_kernel.score._device_rows import DeviceRows

KINDS = ("scan", "device", "flat", "hnsw", "ivf")
EXACT_KINDS = ("scan", "device", "flat")

_CHUNK = 65536
WORTH_CODES = 16384
"""Rows from which a scan makes codes; below, the exact routine alone is as quick."""
_EF_SEARCH = 100
_ROWS_PER_LIST = 39  # what FAISS wants to train one centroid
_FLOAT32_EPS = float(np.finfo(np.float32).eps)
_FLOAT64_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class Candidates:
    """What a search returns.

    Attributes:
        rows: int64 [M], rows of the view: ascending, or nearest first with k.
        view: The version of the store that was searched.
        columns: The columns of the search.
    """

    rows: Int64
    view: StoreView
    columns: Columns = field(repr=False)

    __repr__ = one_line

    @cached_property
    def relevance(self) -> Float64:
        """Cosine of each row to the query, float64 [M]; computed when it is first asked for."""
        view = self.view
        return _C.column_values(view.blocks, view.squared_norms, self.columns.compiled, self.rows)[:, 0]

    def __len__(self) -> int:
        return len(self.rows)


class Retriever:
    """Finds the facts of a store that pass the relevance gate.

    Added facts are found by the next search; removed ones are masked. One retriever may serve many threads. It caches
    what it found for a session, so that later windows with the same query read only those rows. The cache holds
    sessions weakly.

    Args:
        store: The store.
        kind: "scan" (default, exact): int8 codes with a proven bound, and the exact routine for what they leave open.
            Codes are made in the background once a store has 16,384 rows, or at once by `prepare`. "device" (exact):
            the rows on a GPU, one fused pass with a proven bound for all sessions of a call. "flat" (exact): FAISS
            inner product with a margin, then the exact routine. "hnsw" (approximate): FAISS HNSW (M 16, efConstruction
            200, efSearch 100); the search widens until it leaves the gate. "ivf" (approximate): FAISS inverted lists,
            about sqrt(N) of them, of which `nprobe` are read. Approximate kinds may miss facts; every fact that they
            return passes. They read all rows if the gate lies at or below the least cosine that they find. FAISS kinds
            keep a float32 copy of the rows.
        nprobe: For kind "ivf": how many lists a search reads.
        cache_bytes: The most bytes that are cached between windows, and as many again for the calibrated mode.
            ``cache.nbytes`` and ``evidence.nbytes`` are what they hold.
        device_rows: For kind "device": the rows on their device, a `DeviceRows`. Default: on CUDA if there is one, else
            on the CPU.
    """

    def __init__(
        self,
        store: FactStore,
        kind: str = "scan",
        *,
        nprobe: int = 32,
        cache_bytes: int = CACHE_BYTES,
        device_rows: DeviceRows | None = None,
    ) -> None:
        if not isinstance(store, FactStore):
            raise TypeError(f"store: expected a FactStore, got {type(store).__name__}")
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        if isinstance(nprobe, bool) or not isinstance(nprobe, int | np.integer) or nprobe < 1:
            raise ValueError(f"nprobe: expected an integer of at least 1, got {nprobe!r}")
        if device_rows is not None and kind != "device":
            raise ValueError(f'device_rows belongs to kind "device", the kind is {kind!r}')
        self.store = store
        self.kind = kind
        self.nprobe = int(nprobe)
        self.moments = Moments()
        self.lexical = LexicalIndex()
        self._evidence = TaskCache(cache_bytes)
        self._cache = RowCache(cache_bytes)
        self._lock = Lock(self._forget_index)
        self._device = _device_index(device_rows) if kind == "device" else None
        self._codes: ScanIndex | None = None
        self._look = True
        self._coding: threading.Thread | None = None
        self._uncodable = -1  # the layout whose rows cannot be read
        self._forget_index()

    def __repr__(self) -> str:
        return f"<Retriever kind={self.kind} over {self.store!r}>"

    def _forget_index(self) -> None:
        self._index: Any = None
        self._indexed: tuple[int, int] = (-1, 0)  # layout and rows that the index holds

    @property
    def exact(self) -> bool:
        """Whether nothing that passes the gate can be missing."""
        return self.kind in EXACT_KINDS

    def search(self, query: Any, *, min_relevance: float = CDR_MIN_RELEVANCE, k: int | None = None) -> Candidates:
        """The facts whose cosine to the query is at least `min_relevance`.

        Args:
            query: [D].
            min_relevance: The gate.
            k: The nearest k of them. None returns all, in the order of their rows.

        Raises:
            ValueError: For a query that is zero, not finite or misshapen, a NaN gate, and k < 0.
        """
        check_k(k)
        columns = Columns.spec(query, min_relevance=min_relevance)
        view = self.store.view()
        found = Candidates(self.candidates(columns, view), view, columns)
        if k is None:
            return found
        return replace(found, rows=found.rows[best_first(found.relevance, found.rows, k)])

    def candidates(self, columns: Columns, view: StoreView) -> Int64:
        """Rows of the view, ascending, that are alive and pass a gate (approximate kinds may miss some).

        Raises ValueError where the columns and the store differ in dimension.
        """
        return self.candidates_each([columns], view)[0]

    def candidates_each(self, columns: Sequence[Columns], view: StoreView) -> list[Int64]:
        """``candidates`` for each of the columns; a scan reads its codes once for all of them."""
        for c in columns:
            if c.dim != view.dim:
                raise ValueError(f"query: expected dimension {view.dim} (that of the store), got {c.dim}")
        codes = self.codes(view)
        if codes is not None and not any(c.gated_addend for c in columns):
            return codes.candidates_each(list(columns), view)
        found = []
        for c in columns:
            subset = None if self.kind == "scan" else self._faiss_rows(c, view)
            passing = _C.gate_rows(view.blocks, view.squared_norms, c.compiled, subset, view.alive)
            found.append(passing if subset is None else subset[passing])
        return found

    def qualified(
        self, owners: Sequence[Any], columns: Sequence[Columns], view: StoreView, *, bounds: bool = False
    ) -> list[KeptRows]:
        """The rows that pass for each owner's columns: kept from its last window, or found now and kept.

        owners: sessions, or anything that can be held weakly; who asks another question is searched for again.
        bounds: whether to keep what a scan knows of their relevance, for a choice of the k best.
        """
        kept = [self._cache.get(owner, c, view) for owner, c in zip(owners, columns, strict=True)]
        missing = [i for i, each in enumerate(kept) if each is None]
        asked = [columns[i] for i in missing]
        codes = self.codes(view) if bounds and missing else None
        found: list[tuple[Any, ...]]
        if isinstance(codes, ScanIndex):
            found = [*codes.bounded_each(asked, view)]
        else:
            found = [(rows,) for rows in self.candidates_each(asked, view)] if missing else []
        for i, each in zip(missing, found, strict=True):
            kept[i] = self._cache.put(owners[i], columns[i], view, *each)
        return [each for each in kept if each is not None]

    @property
    def cache(self) -> RowCache:
        """What is kept for sessions."""
        return self._cache

    @property
    def evidence(self) -> TaskCache:
        """What is kept for tasks of the calibrated mode, by task and version of the store."""
        return self._evidence

    def prepare(self, advance: Callable[[int], object] | None = None) -> None:
        """Make the scan's codes for all present rows, or copy the rows to the device, and return when it is done.

        FAISS kinds do nothing here.

        Args:
            advance: Called with the number of rows that were coded since the last call.
        """
        if self._device is not None:
            self._device.rows.at(self.store.view())
        if self.kind == "scan":
            self._make_codes(self.store.view(), advance)

    def save(self) -> None:
        """Write the codes into the folder that the store was loaded from. The next retriever finds them there.

        The codes name the saved store that they belong to. A later save of the store removes them.

        Raises:
            ValueError: If the store was not loaded from a folder, has changed since, or was saved anew by another
                process, and if the retriever has no codes.
        """
        if self.kind != "scan":
            raise ValueError(f'codes are of kind "scan", the kind is {self.kind!r}')
        view = self.store.view()
        if self.store.path is None or view.version:
            raise ValueError("store: expected one that was loaded from a folder and has not changed since")
        self.prepare()
        assert self._codes is not None
        self._codes.save(self.store.path, view)

    def codes(self, view: StoreView) -> ScanIndex | DeviceIndex | None:
        """What finds rows without reading them on the host: the codes that serve this view, the device's rows, or None.

        Starts to make codes, or those of added rows, where it is time.
        """
        if self.kind != "scan":
            return self._device
        index = self._saved_codes(view) if self._codes is None else self._codes
        if index is not None:
            try:
                index.mapped_files.check()
            except DamagedFileError as error:
                warnings.warn(f"{error}; the codes are made again", stacklevel=2)
                self._codes = index = None
        if index is not None and index.layout != view.layout:
            index = None
        coded = 0 if index is None else index.rows
        worth = view.rows - coded >= max(WORTH_CODES, coded // 8) and view.layout != self._uncodable
        if worth and (self._coding is None or not self._coding.is_alive()):
            self._coding = threading.Thread(target=self._code, args=(view,), name="cdr-codes")
            self._coding.start()
        return index

    def _saved_codes(self, view: StoreView) -> ScanIndex | None:
        """Those in the store's folder, looked for once; codes of another store, or damaged ones, are made again."""
        path, self._look = (self.store.path if self._look else None), False
        if path is not None and view.layout == 0:
            try:
                self._codes = ScanIndex.load(path, view)
            except FileNotFoundError:
                pass
            except DamagedFileError as error:
                warnings.warn(f"{error}; the codes are made again", stacklevel=2)
            except (OSError, ValueError):  # codes that cannot be read, or of another store
                pass
        return self._codes

    def _code(self, view: StoreView) -> None:
        try:
            self._make_codes(view, _stop_at_exit)
        except _Abandoned:
            pass
        except (DamagedFileError, OSError):  # of the rows: whoever searches comes upon it too, and is told
            self._uncodable = view.layout

    def _make_codes(self, view: StoreView, advance: Callable[[int], object] | None) -> None:
        with self._lock:
            if self._codes is None or self._codes.layout != view.layout:
                self._codes = ScanIndex.build(view, advance=advance)
            else:
                self._codes.extend(view, advance=advance)

    def _faiss_rows(self, columns: Columns, view: StoreView) -> Int64 | None:
        """Rows that FAISS finds at the gates, ascending; None for all rows."""
        gates = _cosine_gates(columns)
        if gates is None:
            return None
        with self._lock:
            index = self._filled(view)
            if not self.exact and any(threshold <= _least(index, vector) for vector, threshold in gates):
                return None
            search = {"flat": _range_search, "hnsw": _hnsw_search, "ivf": _range_search}[self.kind]
            found = [search(index, vector, threshold) for vector, threshold in gates]
        rows = np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
        return rows[rows < view.rows]

    def _filled(self, view: StoreView) -> Any:
        """The index with every row of the view in it. Rows keep their numbers until the store is compacted."""
        layout, rows = self._indexed
        outgrown = self.kind == "ivf" and view.rows > 4 * rows
        if self._index is None or layout != view.layout or outgrown:
            self._index, layout, rows = _new_index(self.kind, view, self.nprobe), view.layout, 0
        for start in range(rows, view.rows, _CHUNK):
            self._index.add(_unit_rows(view, start, min(start + _CHUNK, view.rows)))
        self._indexed = (layout, max(rows, view.rows))
        return self._index


def retriever_on(
    device: str | None, store: FactStore, *, dtype: str | None = None, cache_bytes: int = CACHE_BYTES
) -> Retriever:
    """A retriever of kind "scan", or of kind "device" on a torch device such as "cuda"; both answer the same.

    dtype: what the device holds the rows in, see `DeviceRows`. Raises what `DeviceRows` raises.
    """
    if device is None:
        return Retriever(store, cache_bytes=cache_bytes)
    from cdr_kernel.score._device_rows import DeviceRows

    return Retriever(store, "device", cache_bytes=cache_bytes, device_rows=DeviceRows(device, dtype=dtype))


def _device_index(rows: DeviceRows | None) -> DeviceIndex:
    import torch

    from cdr_kernel.score._device_rows import DeviceRows

    if rows is not None and not isinstance(rows, DeviceRows):
        raise TypeError(f"device_rows: expected DeviceRows, got {type(rows).__name__}")
    return DeviceIndex(DeviceRows("cuda" if torch.cuda.is_available() else "cpu") if rows is None else rows)


class _Abandoned(Exception):
    """The program ends while codes are made."""


def _stop_at_exit(_: int) -> None:
    if not threading.main_thread().is_alive():
        raise _Abandoned


def _unit_rows(view: StoreView, start: int, stop: int) -> npt.NDArray[np.float32]:
    rows = view.take(np.arange(start, stop)).astype(np.float64)
    return (rows / np.sqrt(view.squared_norms[start:stop, None])).astype(np.float32)


def _new_index(kind: str, view: StoreView, nprobe: int) -> Any:
    import faiss

    index: Any
    if kind == "flat":
        return faiss.IndexFlatIP(view.dim)
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(view.dim, 16, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 200
        index.hnsw.efSearch = 100
        return index
    lists = max(1, min(int(view.rows**0.5), view.rows // _ROWS_PER_LIST))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(view.dim), view.dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = min(nprobe, lists)
    index.cp.min_points_per_centroid = 1  # fewer only cost recall, and FAISS would print a warning
    sample = np.linspace(0, view.rows - 1, min(view.rows, lists * 256)).astype(np.int64)
    rows = view.take(sample).astype(np.float64) / np.sqrt(view.squared_norms[sample, None])
    if len(rows):
        index.train(rows.astype(np.float32))
    return index


def _cosine_gates(columns: Columns) -> list[tuple[npt.NDArray[np.float32], float]] | None:
    """(unit vector, a cosine that nothing passing the column's gate lies under), or None where all rows may pass."""
    vectors = np.vstack([columns.query[None], np.zeros((1, columns.dim)), columns.residual])
    gates = []
    for j in range(len(vectors)):
        gate, scale, shift = columns.gate[j], columns.scale[j], columns.shift[j]
        if j == COVERAGE or gate == np.inf:
            continue
        added = 0.0 if columns.addend is None else float(columns.addend.column(j)[1].max(initial=0.0))
        nearly = gate - 4 * _FLOAT64_EPS * (abs(gate) + abs(shift) + added)
        if gate == -np.inf or scale < 0.0 or (scale == 0.0 and shift + added >= nearly):
            return None
        if scale == 0.0:
            continue
        threshold = (gate - shift - added) / scale
        slack = (columns.dim + 16) * _FLOAT32_EPS + 4 * _FLOAT64_EPS * (abs(gate) + abs(shift) + added) / scale
        if threshold - slack <= -1.0:  # every cosine is above it, and FAISS would only look at some lists
            return None
        if threshold - slack <= 1.0:
            gates.append(((vectors[j] / np.linalg.norm(vectors[j])).astype(np.float32), threshold - slack))
    return gates


def _least(index: Any, vector: npt.NDArray[np.float32]) -> float:
    """About the least cosine of any row to this unit vector; infinity where there is no row.

    A gate at or below it excludes next to nothing. Then the exact routine reads all rows: an approximate index would
    leave out most of them, since it looks for near ones.
    """
    if index.ntotal == 0:
        return np.inf
    similarity, found = index.search(-vector[None], 1)
    return -float(similarity[0, 0]) if found[0, 0] >= 0 else np.inf


def _range_search(index: Any, vector: npt.NDArray[np.float32], threshold: float) -> Int64:
    found: Int64
    if index.ntotal == 0:
        return np.zeros(0, np.int64)
    _, _, found = index.range_search(vector[None], np.nextafter(np.float32(threshold), np.float32(-np.inf)))
    return found


def _hnsw_search(index: Any, vector: npt.NDArray[np.float32], threshold: float) -> Int64:
    """Nearest neighbours, ever more of them, until the farthest lies under the threshold."""
    faiss: Any = import_module("faiss")  # its stubs lack the class below
    found: Int64
    k = min(_EF_SEARCH, index.ntotal)
    while k:
        parameters = faiss.SearchParametersHNSW(efSearch=max(_EF_SEARCH, k))
        similarity, found = index.search(vector[None], k, params=parameters)
        if k == index.ntotal or similarity[0, -1] < threshold or found[0, -1] < 0:
            return np.asarray(found[0][(found[0] >= 0) & (similarity[0] >= threshold)])
        k = min(4 * k, index.ntotal)
    return np.zeros(0, np.int64)
