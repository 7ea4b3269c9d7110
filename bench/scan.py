"""python -m bench scan: one window over many facts, beside what else one could use.

Everything is measured in one process and one run, since machines differ and are shared: quote ratios to
``read_pass_ms``, the time in which all cores read the float32 matrix once. Results are checked before they are timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench import baselines
from bench.data import Clusters, Float32, grow, load_base, load_queries, sentences, unit
from bench.measure import Times, each, keep, machine, once, peak_rss_mb, resident_mb
from cdr_kernel import (
    _C,
    Columns,
    FactStore,
    Retriever,
    Session,
    SubQuery,
    WindowReport,
    cdr_rank,
    cdr_score,
    rank_many,
    reference,
)

COVERED, RESIDUAL, BATCH = 20, 8, 64
SLICE = 2_000  # facts that the pure-Python peers get; their times are extrapolated
MODEL = "bench"


@dataclass
class Work:
    """A store of grown facts and what the windows ask of it."""

    store: FactStore
    retriever: Retriever
    queries: list[Float32]
    residuals: list[Float32]
    coverage: Float32
    gate: float
    k: int
    timed: int  # the first of the queries
    base: str

    @cached_property
    def rows(self) -> Float32:
        """[N, D] float32 unit rows for the peers: as stored, else a copy."""
        rows: Float32 = self.store.view().embeddings
        return rows if rows.dtype == np.float32 else unit(rows)

    def columns(self, i: int) -> Columns:
        """Query i, 20 coverage entries of depth .5, 8 residual vectors, the gate."""
        return Columns.spec(
            self.queries[i],
            coverage=self.coverage,
            depth_weights=np.full(len(self.coverage), 0.5),
            residual=self.residuals[i],
            min_relevance=self.gate,
        )

    def session(self, i: int) -> Session:
        """A session over query i's sub-queries, before its first window."""
        subs = [SubQuery(f"s{j}", f"S{j}", "", r) for j, r in enumerate(self.residuals[i])]
        return Session(subs, embedding_model=MODEL, min_relevance=max(self.gate, -1.0), guard=False)


def make_work(arguments: argparse.Namespace, folder: Path | None) -> tuple[Work, dict[str, Any]]:
    """Grow the facts, put them into a store, make the codes; with the seconds and the memory that took.

    folder: where the store and its codes are saved to and loaded from again, mapped; None leaves them in memory.
    """
    base, name = load_base(arguments.base, arguments.dim)
    pairs = load_queries(arguments.queries, base)
    clusters = Clusters.of(base)
    seconds: dict[str, Any] = {}
    resident: dict[str, Any] = {}

    def timed(what: str, call: Callable[[], Any]) -> Any:
        out: list[Any] = []
        seconds[f"{what}_s"] = round(once(lambda: out.append(call())) / 1e3, 2)
        resident[what] = resident_mb()
        _tell(f"{what}: {seconds[f'{what}_s']} s, resident {resident[what]} MiB")
        return out[0]

    def filled() -> FactStore:
        store = FactStore(arguments.dim, embedding_model=MODEL, dtype=arguments.dtype, scratch=folder)
        start = 0
        for rows in grow(clusters, arguments.facts):
            ids = range(start, start + len(rows))
            store.add([f"f{i}" for i in ids], sentences(ids, arguments.words), rows)
            start += len(rows)
            if start % (1 << 20) == 0:
                _tell(f"{start} facts added")
        return store

    coded = 0

    def advance(rows: int) -> None:
        nonlocal coded
        before, coded = coded, coded + rows
        if coded >> 20 > before >> 20:
            _tell(f"{coded} facts coded")

    store = timed("grow_and_add", filled)
    if folder is not None:
        timed("save", lambda: store.save(folder))
        del store
        store = FactStore.load(folder)
    retriever = Retriever(store)
    timed("build", lambda: retriever.prepare(advance))
    if folder is not None:
        timed("save_codes", retriever.save)
        del store, retriever
        store, retriever = timed("load", lambda: _opened(folder))
    everything = np.concatenate([subs for _, subs in pairs])
    chosen = np.random.default_rng(5).choice(len(everything), COVERED, replace=len(everything) < COVERED)
    work = Work(
        store=store,
        retriever=retriever,
        queries=[query for query, _ in pairs],
        residuals=[subs[np.arange(RESIDUAL) % len(subs)] for _, subs in pairs],
        coverage=everything[chosen],
        gate=-np.inf if arguments.gate is None else arguments.gate,
        k=arguments.k,
        timed=min(arguments.first, len(pairs)),
        base=name,
    )
    return work, {**seconds, "resident_mb": resident}


def _opened(folder: Path) -> tuple[FactStore, Retriever]:
    """The store that was saved here, mapped, and a retriever that has found its codes."""
    store = FactStore.load(folder)
    retriever = Retriever(store)
    if retriever.codes(store.view()) is None:
        raise SystemExit("the saved codes were not found again")
    return store, retriever


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def first_window(work: Work, i: int) -> Any:
    """Ranking of query i by the scan: gate, then the k best by their codes, then their exact scores."""
    view, columns = work.store.view(), work.columns(i)
    rows = work.retriever.candidates(columns, view)
    codes = work.retriever.codes(view)
    assert codes is not None
    if work.k < len(rows):
        rows = rows[codes.top(columns, view, rows, work.k)]
    return cdr_score(view.blocks, columns, rows=rows, squared_norms=view.squared_norms, k=work.k)


def by_impl(work: Work, i: int, impl: str) -> Any:
    """The same by one implementation of cdr_score over all rows."""
    view = work.store.view()
    return cdr_score(view.blocks, work.columns(i), squared_norms=view.squared_norms, k=work.k, impl=impl)


def check(work: Work) -> bool:
    """Whether the scan finds, for every timed query, the set and the order of the float64 pass over all rows."""
    view = work.store.view()
    for i in range(work.timed):
        columns = work.columns(i)
        truth = _C.gate_rows(view.blocks, view.squared_norms, columns.compiled, None, view.alive)
        if not np.array_equal(work.retriever.candidates(columns, view), truth):
            return False
        ours, exact = first_window(work, i), by_impl(work, i, "cpp")
        if not (np.array_equal(ours.rows, exact.rows) and np.array_equal(ours.score, exact.score)):
            return False
    return True


def later_windows(work: Work) -> dict[str, Times]:
    """Windows 1 to 5 of a session per query through cdr_rank; each later window has one sub-query more covered."""
    ms: dict[int, list[float]] = {w: [] for w in range(1, 6)}
    for i in range(work.timed):
        runs = [_session_windows(work, i) for _ in range(3)]
        for window, values in ms.items():
            values.append(min(run[window - 1] for run in runs))
    return {f"window{w}": Times(tuple(values)) for w, values in ms.items()}


def _session_windows(work: Work, i: int) -> list[float]:
    session, query = work.session(i), work.queries[i]
    ms = []
    for _ in range(5):
        ms.append(once(lambda: cdr_rank(query, work.retriever, session, k=work.k)))
        addressed = (session.residual[0].id,) if session.residual else ()
        session.update(WindowReport(0.1, addressed), "", embedding_model=MODEL)
    return ms


def batches(work: Work) -> dict[str, float]:
    """Milliseconds per session of 64 first windows, in one rank_many and one by one."""
    chosen = [i % len(work.queries) for i in range(BATCH)]

    def batch() -> Any:
        return rank_many([work.queries[i] for i in chosen], work.retriever, [work.session(i) for i in chosen], k=work.k)

    def single() -> Any:
        return [cdr_rank(work.queries[i], work.retriever, work.session(i), k=work.k) for i in chosen]

    together, apart = batch(), single()
    if any(a.ids != b.ids or a.score.tobytes() != b.score.tobytes() for a, b in zip(together, apart, strict=True)):
        raise SystemExit("rank_many and cdr_rank differ")
    return {
        "per_session_ms_batch64": round(min(once(batch) for _ in range(3)) / BATCH, 4),
        "per_session_ms_one_by_one": round(min(once(single) for _ in range(3)) / BATCH, 4),
    }


@dataclass
class Peer:
    """Something else that one could use: its times, or why there are none."""

    what: str
    times: Times | None
    note: str = ""


def peers(work: Work) -> list[Peer]:
    """The frozen baselines, FAISS, usearch, the plain reference and crprotocol, each checked before it is timed."""
    found = [*_frozen(work)]
    for name, make in {
        "faiss_flat_range": _faiss_flat,
        "faiss_fp16": _faiss_approximate("SQfp16"),
        "faiss_int8": _faiss_approximate("SQ8"),
        "usearch_exact": _usearch,
        "reference": _reference,
        "crprotocol": _crprotocol,
        "device_rank": _device,
    }.items():
        gc.collect()
        try:
            found.append(make(work))
        except ImportError as error:
            found.append(Peer(name, None, f"not installed ({error.name})"))
    return found


def _frozen(work: Work) -> list[Peer]:
    import torch

    rows = work.rows
    centroids = [np.asarray(work.columns(i).coverage, np.float32) for i in range(work.timed)]

    def gate_first(i: int) -> Any:
        return baselines.numpy_gate_first(rows, work.queries[i], centroids[i], work.residuals[i], work.gate)

    writeable = torch.from_numpy(np.array(rows))
    columns = [
        torch.from_numpy(np.concatenate([work.queries[i][None], centroids[i][None], work.residuals[i]]))
        for i in range(work.timed)
    ]

    def skinny(i: int) -> Any:
        return baselines.torch_skinny(writeable, columns[i], work.gate, work.k)

    for i in range(work.timed):
        exact = by_impl(work, i, "cpp")
        kept, scores = gate_first(i)
        _close(exact, kept[np.argsort(-scores, kind="stable")[: work.k]], np.sort(scores)[::-1][: work.k], "numpy")
        values, at = skinny(i)
        real = torch.isfinite(values)
        _close(exact, at[real].numpy(), values[real].numpy(), "torch_skinny")
    return [
        Peer("numpy_gate_first", _timed(work, gate_first), "float32"),
        Peer("torch_skinny", _timed(work, skinny), "float32"),
    ]


def _close(exact: Any, rows: Any, scores: Any, name: str) -> None:
    """Raises unless a float32 peer gives the exact scores within float32's error, and so the rows but for near ties."""
    if (
        abs(len(exact) - len(rows)) > 3
        or np.abs(exact.score[: len(scores)] - scores[: len(exact)]).max(initial=0) > 1e-5
    ):
        raise SystemExit(f"{name}: its scores are not those of the exact routine")


def _timed(work: Work, call: Callable[[int], Any], count: int | None = None) -> Times:
    return each(lambda i=i: call(i) for i in range(min(count or work.timed, work.timed)))


def _faiss_flat(work: Work) -> Peer:
    faiss = import_module("faiss")
    index = faiss.IndexFlatIP(work.rows.shape[1])
    index.add(work.rows)
    gate = np.float32(max(work.gate, -1.1))

    def search(i: int) -> Any:
        return index.range_search(work.queries[i][None], gate)

    for i in range(work.timed):
        found = len(search(i)[2])
        truth = len(work.retriever.candidates(work.columns(i), work.store.view()))
        if abs(found - truth) > 1e-4 * len(work.rows) + 5:
            raise SystemExit(f"faiss_flat_range: found {found} rows at the gate, the exact pass {truth}")
    return Peer("faiss_flat_range", _timed(work, search), "float32, the gate alone")


def _faiss_approximate(kind: str) -> Callable[[Work], Peer]:
    def make(work: Work) -> Peer:
        faiss = import_module("faiss")
        index = faiss.index_factory(work.rows.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
        index.train(work.rows[:100_000])
        index.add(work.rows)

        def search(i: int) -> Any:
            return index.search(work.queries[i][None], work.k)[1][0]

        recall = []
        for i in range(work.timed):
            scores = work.rows @ work.queries[i]
            recall.append(len(np.intersect1d(np.argpartition(-scores, work.k)[: work.k], search(i))) / work.k)
        name = {"SQfp16": "faiss_fp16", "SQ8": "faiss_int8"}[kind]
        note = f"approximate, top {work.k} by relevance, recall {np.mean(recall):.4f}"
        return Peer(name, _timed(work, search, 10), note)

    return make


def _usearch(work: Work) -> Peer:
    index = import_module("usearch.index")
    k = min(work.k, len(work.rows))

    def search(i: int) -> Any:
        return index.search(work.rows, work.queries[i][None], k, index.MetricKind.IP, exact=True)

    for i in range(min(work.timed, 10)):
        found = search(i)
        nearest = np.sort(np.partition(work.rows @ work.queries[i], -k)[-k:])[::-1]
        keys = np.asarray(found.keys).reshape(-1).astype(np.int64)
        for values in (1.0 - np.asarray(found.distances).reshape(-1), work.rows[keys] @ work.queries[i]):
            if len(values) != k or np.abs(values - nearest).max(initial=0) > 1e-5:
                raise SystemExit("usearch_exact: what it finds are not the nearest rows")
    return Peer("usearch_exact", _timed(work, search, 10), f"float32, top {k} by relevance")


def _slice(work: Work, residual: Any) -> tuple[Float32, Any]:
    """The rows that the pure-Python peers get, and their exact scores for the first query."""
    rows = work.rows[:SLICE]
    columns = Columns.spec(
        work.queries[0],
        coverage=work.coverage,
        depth_weights=np.full(len(work.coverage), 0.5),
        residual=residual,
        min_relevance=work.gate,
    )
    return rows, cdr_score(rows, columns)


def _reference(work: Work) -> Peer:
    rows, exact = _slice(work, work.residuals[0])
    facts = [reference.Fact(row) for row in rows.astype(np.float64).tolist()]
    session = reference.ReferenceSession(
        coverage_set=[reference.Entry(c, 0.5) for c in work.coverage.astype(np.float64).tolist()],
        residual_set=[
            reference.SubQuery(str(j), "", "", r) for j, r in enumerate(work.residuals[0].astype(np.float64).tolist())
        ],
        min_relevance=work.gate,
    )
    query = work.queries[0].astype(np.float64).tolist()
    out: list[Any] = []
    ms = once(lambda: out.extend(reference.cdr_rank(facts, query, session))) * len(work.rows) / len(rows)
    if not np.allclose([each.score for each in out], np.sort(exact.score)[::-1], rtol=0, atol=1e-12):
        raise SystemExit("reference: its scores are not those of the exact routine")
    return Peer("reference", Times((ms,)), f"extrapolated from {len(facts)} facts")


def _crprotocol(work: Work) -> Peer:
    """It adds the pull to the novelty, and clamps it: equal to the specification where nothing pulls or is opposed."""
    cdr, state = import_module("crp.envelope.cdr"), import_module("crp.state.coverage_set")

    @dataclass
    class Fact:
        id: int
        embedding: list[float]

    rows, exact = _slice(work, None)
    facts = [Fact(i, row) for i, row in enumerate(rows.tolist())]
    covered = state.CoverageSet(MODEL)
    covered.update(
        [{"id": str(i), "text": "", "embedding": c, "depth_weight": 0.5} for i, c in enumerate(work.coverage.tolist())],
        window_number=1,
    )
    query = work.queries[0].tolist()

    def rank() -> Any:
        return cdr.cdr_rank(facts, query, covered, min_relevance=max(work.gate, -1.0))

    scores = {each.fact.id: each.cdr_score for each in rank().ranked if not each.excluded}
    comparable = exact.coverage >= 0.0
    theirs = [scores.get(row, np.nan) for row in exact.rows[comparable].tolist()]
    if not np.allclose(theirs, exact.score[comparable], rtol=0, atol=1e-9):
        raise SystemExit("crprotocol: without residuals its scores are not those of the exact routine")
    covered.set_residual([state.ResidualItem("", r, str(j)) for j, r in enumerate(work.residuals[0].tolist())])
    return Peer(
        "crprotocol", Times((once(rank) * len(work.rows) / len(facts),)), f"extrapolated from {len(facts)} facts"
    )


def _device(work: Work) -> Peer:
    """cdr_rank by a retriever of kind "device" on a GPU, whose answers are the scan's to the last bit."""
    import torch

    if not torch.cuda.is_available():
        return Peer("device_rank", None, "no CUDA device")
    device = Retriever(work.store, "device")
    device.prepare()

    def rank(i: int, retriever: Retriever = device) -> Any:
        return cdr_rank(work.queries[i], retriever, work.session(i), k=work.k)

    for i in range(work.timed):
        exact, found = rank(i, work.retriever), rank(i)
        if exact.ids != found.ids or exact.score.tobytes() != found.score.tobytes():
            raise SystemExit("device_rank: not the answer of the scan")
    return Peer("device_rank", _timed(work, rank), torch.cuda.get_device_name())


def main(argv: Sequence[str]) -> None:
    """Parse, measure, print, and keep a CSV row per measurement where --keep asks for it."""
    parser = argparse.ArgumentParser(prog="python -m bench scan", description=__doc__)
    parser.add_argument("--facts", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--dtype", choices=("float16", "float32", "float64"), default="float32", help="of the store")
    parser.add_argument("--words", type=int, default=0, help="words in the text of a fact (default: texts are empty)")
    parser.add_argument("--gate", type=float, help="cosine to the query (default: none)")
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--base", help="E.npy to grow the facts from (default: the demo's, demo-sized)")
    parser.add_argument("--queries", help="Q.npz with i:query, i:subs (default: the demo's)")
    parser.add_argument("--first", type=int, default=44, help="how many of the queries are timed")
    parser.add_argument("--no-peers", action="store_true", help="leave out what else one could use")
    parser.add_argument(
        "--mapped",
        action="store_true",
        help="fill the store on the disk, save it and its codes, load both again, mapped, and rank there (no peers: "
        "these need all rows in memory)",
    )
    parser.add_argument("--folder", help="where --mapped makes its temporary folder (default: the system's)")
    parser.add_argument("--keep", action="store_true", help="append the rows to bench/results/scan.csv")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.folder and not arguments.mapped:
        parser.error("--folder: only --mapped writes to a folder")
    if arguments.folder and not Path(arguments.folder).is_dir():
        parser.error(f"--folder: expected a folder that exists, got {arguments.folder}")
    if not arguments.mapped:
        measure(arguments, None)
        return
    with tempfile.TemporaryDirectory(prefix="cdr-bench-", dir=arguments.folder) as folder:
        measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, folder: Path | None) -> None:
    """Do what the arguments ask, with a store that is saved to this folder or stays in memory."""
    warnings.filterwarnings("ignore", ".* facts reach the gate")  # of some queries few do: that is in the data
    work, made = make_work(arguments, folder)
    identical = check(work)
    if not identical:
        raise SystemExit("the scan does not find what the exact pass over all rows finds: nothing was timed")
    view = work.store.view()
    _tell("checked")
    read = Times(tuple(once(lambda: _C.read_pass(view.blocks)) for _ in range(7)))
    rows = {"cpp_impl": _timed(work, lambda i: by_impl(work, i, "cpp"), 10 if folder is None else 2)}
    if folder is None:
        rows["torch_impl"] = _timed(work, lambda i: by_impl(work, i, "torch"), 10)
    else:  # let go of the pages that the passes over all rows have read: a window does not read them
        made["resident_mb"]["exact_passes"] = resident_mb()
        work.store, work.retriever = _opened(folder)
        view = work.store.view()
    rows |= {
        "scan": _timed(work, lambda i: work.retriever.search(work.queries[i], min_relevance=work.gate)),
        "candidates": _timed(work, lambda i: work.retriever.candidates(work.columns(i), view)),
        "rank": _timed(work, lambda i: first_window(work, i)),
        **later_windows(work),
    }
    _tell("windows timed")
    batch = batches(work)
    made["resident_mb"]["rank"] = resident_mb()
    _tell(f"ranked: resident {made['resident_mb']['rank']} MiB")
    read_ms = min((*read.ms, *(once(lambda: _C.read_pass(view.blocks)) for _ in range(7))))
    others = [] if arguments.no_peers or folder is not None else peers(work)
    codes = work.retriever.codes(view)
    assert codes is not None
    stored = sum(block.nbytes for block in view.blocks)
    result: dict[str, Any] = {
        **machine(),
        "facts": arguments.facts,
        "dim": arguments.dim,
        "dtype": arguments.dtype,
        "mapped": folder is not None,
        "words": arguments.words,
        "gate": arguments.gate,
        "k": work.k,
        "base": work.base,
        "queries": work.timed,
        "identical": identical,
        "read_pass_ms": round(read_ms, 3),
        "read_pass_gb_s": round(stored / read_ms / 1e6, 1),
        **{f"{name}_ms_p{q}": round(times.quantile(q), 3) for name, times in rows.items() for q in (20, 50, 80)},
        **batch,
        **{f"{peer.what}_ms_p50": None if peer.times is None else round(peer.times.quantile(50), 3) for peer in others},
        "notes": {peer.what: peer.note for peer in others},
        "bytes_per_fact": round(codes.nbytes / arguments.facts, 1),
        "kept_bytes": work.retriever.cache.nbytes,
        "peak_rss_mb": round(peak_rss_mb()),
        **made,
    }
    if folder is not None:
        on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        result["disk_bytes_per_fact"] = round(on_disk / arguments.facts, 1)
    if arguments.keep:
        shape = f"{arguments.facts} x {arguments.dim}, gate {arguments.gate}, k {work.k}, from {work.base}"
        where = "" if folder is None else "mapped"
        measured = [("read_pass", Times((read_ms,)), where), *((name, times, where) for name, times in rows.items())]
        measured += [
            (name.replace("_ms", ""), Times((ms,)), f"{BATCH} first windows, milliseconds a session")
            for name, ms in batch.items()
        ]
        measured += [(peer.what, peer.times, peer.note) for peer in others if peer.times is not None]
        keep(
            "scan",
            (
                {"what": what, "shape": shape, "dtype": arguments.dtype, "note": note}
                | {f"{q}_ms": value for q, value in times.quantiles.items()}
                for what, times, note in measured
            ),
        )
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{result['machine']}; {result['system']}; {result['commit']}")
    kind = arguments.dtype if folder is None else f"{arguments.dtype}, mapped,"
    print(f"{arguments.facts} x {arguments.dim} {kind} from {work.base}, gate {arguments.gate}, k {work.k}")
    print(f"read pass {read_ms:.1f} ms ({result['read_pass_gb_s']} GB/s); build {made['build_s']} s; ", end="")
    if folder is not None:
        print(f"save {made['save_s']} s, of the codes {made['save_codes_s']} s; load {made['load_s']} s; ", end="")
        print(f"{result['disk_bytes_per_fact']} bytes on disk per fact; ", end="")
    print(f"{result['bytes_per_fact']} bytes of codes per fact; peak {result['peak_rss_mb']} MiB")
    print(f"{'':18}{'p20 ms':>10}{'p50 ms':>10}{'p80 ms':>10}{'p50 / read':>12}")
    for name, times, note in [*((n, t, "") for n, t in rows.items()), *((p.what, p.times, p.note) for p in others)]:
        if times is None:
            print(f"{name:18}{note}")
            continue
        p20, p50, p80 = (times.quantile(q) for q in (20, 50, 80))
        print(f"{name:18}{p20:10.2f}{p50:10.2f}{p80:10.2f}{p50 / read_ms:12.3f}  {note}")
    for name, value in batch.items():
        print(f"{name:28}{value:10.3f}")
