"""cdr_score against what else one could run: time, GB/s and TFLOP/s beside a copy and a product on the same machine.

    python -m bench score --device cuda --rows 1000000 10000000 50000000 --sessions 1 8 64
    python -m bench score --device cpu

Every shape is checked first: each exact implementation must give cpp's facts and scores to the last bit, approximate
ones show their recall. Rows are clusters with noise, so that about one fact in a hundred passes the gate of a query.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from cdr_kernel import _C, Columns, FactStore, cdr_score
from cdr_kernel.score import available_impls
from cdr_kernel.score._bound_search import Factors32, bounds_torch, pack
from cdr_kernel.score._cdr_score import no_triton
from cdr_kernel.score._device_rows import DeviceRows
from cdr_kernel.validation._arrays import check_rows

CLUSTERS, NOISE, GATE = 100, 0.8, 0.55


def clustered(n: int, dim: int, sessions: int, residual: int, dtype: str, device: str) -> tuple[Any, list[Columns]]:
    """Rows [n, D] as a store's version on the host, and the columns of that many sessions in their third window."""
    g = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype)
    centres = torch.randn(CLUSTERS, dim, generator=g, device=device)
    rows = torch.empty(n, dim, dtype=kind)
    for start in range(0, n, 1 << 18):
        m = min(1 << 18, n - start)
        noise = torch.randn(m, dim, generator=g, device=device)
        some = centres[torch.randint(0, CLUSTERS, (m,), generator=g, device=device)] + NOISE * noise
        rows[start : start + m] = some.to(kind).cpu()
    r = np.random.default_rng(0)
    host = centres.double().cpu().numpy()
    columns = [
        Columns.spec(
            host[b % CLUSTERS] + 0.3 * r.standard_normal(dim),
            coverage=host[b % CLUSTERS] + 0.5 * r.standard_normal((2, dim)),
            depth_weights=[0.9, 0.4],
            residual=host[b % CLUSTERS] + 0.7 * r.standard_normal((residual, dim)),
            min_relevance=GATE,
        )
        for b in range(sessions)
    ]
    blocks = (rows.numpy(),)
    norms, _ = check_rows(blocks)
    view = replace(
        FactStore(dim, embedding_model="bench").view(),  # rows without texts
        blocks=blocks, squared_norms=norms, importance=np.ones(n), alive=np.ones(n, np.bool_), sequence=np.arange(n),
    )  # fmt: skip
    return view, columns


class Clock:
    """Times of a function in seconds: device events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device, repeat: int) -> None:
        self._cuda = device.type == "cuda"
        self._repeat = repeat

    def __call__(self, run: Callable[[], Any]) -> tuple[float, float, float]:
        """p20, p50, p80 after two calls that do not count."""
        seconds = []
        for i in range(self._repeat + 2):
            if self._cuda:
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                before.record()
                run()
                after.record()
                torch.cuda.synchronize()
                took = before.elapsed_time(after) / 1e3
            else:
                start = time.perf_counter()
                run()
                took = time.perf_counter() - start
            if i >= 2:
                seconds.append(took)
        p20, p50, p80 = np.percentile(seconds, [20, 50, 80]).tolist()
        return p20, p50, p80


def formula(
    rows: torch.Tensor, columns: Sequence[Columns], device: torch.device
) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """§2.2 in plain torch, in the rows' dtype: what one would write by hand. The function and what to call it with."""
    norms = [np.sqrt(np.array(c.compiled.squared_norms)) for c in columns]
    vectors = [np.vstack([c.query, c.coverage, c.residual]) for c in columns]
    unit = np.stack(
        [v / np.where(np.arange(len(n)) == 1, 1.0, n)[:, None] for v, n in zip(vectors, norms, strict=True)]
    )
    v = torch.from_numpy(unit).to(device, rows.dtype)
    inverse = 1.0 / torch.linalg.vector_norm(rows.float(), dim=1)

    def scores(rows: torch.Tensor, inverse: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = (rows @ v.reshape(-1, v.shape[2]).T).float() * inverse[:, None]
        x = x.reshape(len(rows), v.shape[0], v.shape[1])
        relevance, coverage, pull = x[:, :, 0], x[:, :, 1], x[:, :, 2:].amax(2)
        novelty = (1.0 - coverage.clamp(max=0.8)).clamp(min=0.2)
        return torch.where(relevance >= GATE, torch.maximum(relevance, pull) * novelty, -torch.inf).T

    return scores, (rows, inverse, v)


def ceilings(device: torch.device, dtype: torch.dtype, clock: Clock) -> tuple[float, float]:
    """Bytes/s of a copy, counting what is read and written; operations/s of a large product."""
    big = device.type == "cuda"
    data = torch.randn((1 << 28 if big else 1 << 25,), device=device)
    there = torch.empty_like(data)
    copied = 2 * data.numel() * 4 / clock(lambda: there.copy_(data))[1]
    n = 8192 if big else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype if big else torch.float32) for _ in range(2))
    return copied, 2 * n**3 / clock(lambda: a @ b)[1]


def recall(found: Any, best: Sequence[Any]) -> float:
    hits = [len(set(f) & set(b.rows.tolist())) / max(1, len(b)) for f, b in zip(found, best, strict=True)]
    return float(np.mean(hits))


def run_shape(
    n: int, sessions: int, options: argparse.Namespace, device: torch.device, clock: Clock
) -> list[dict[str, Any]]:
    """One row per way of doing it."""
    view, columns = clustered(n, options.dim, sessions, options.residual, options.dtype, options.device)
    host = view.blocks[0]
    best = cdr_score(view.blocks, columns, k=options.k, squared_norms=view.squared_norms, impl="cpp")
    count = options.residual + 2
    moved = host.nbytes + 4 * n * (1 + sessions)
    operations = 2.0 * n * options.dim * sessions * count
    table: list[dict[str, Any]] = []

    def timed(name: str, run: Callable[[], Any], *, read: float = moved, work: float = operations, **more: Any) -> None:
        p20, p50, p80 = clock(run)
        table.append({
            "name": name, "p20_ms": 1e3 * p20, "p50_ms": 1e3 * p50, "p80_ms": 1e3 * p80, "GB/s": read / p50 / 1e9,
            "TFLOP/s": work / p50 / 1e12, **more,
        })  # fmt: skip

    def missing(name: str, why: str = "not installed") -> None:
        table.append({"name": name, "note": why})

    def same(found: Sequence[Any]) -> bool:
        return all(
            f.rows.tobytes() == b.rows.tobytes() and f.score.tobytes() == b.score.tobytes()
            for f, b in zip(found, best, strict=True)
        )

    resident = DeviceRows(device, dtype=None).at(view)
    rows = resident._parts[0][1].values[:, : options.dim] if len(resident._parts) == 1 else None
    norms = view.squared_norms
    ways: dict[str, Callable[[], Any]] = {}
    if device.type == "cpu":
        ways["cdr_score cpp"] = lambda: cdr_score(view.blocks, columns, k=options.k, squared_norms=norms, impl="cpp")
        ways["cdr_score torch"] = lambda: cdr_score(
            view.blocks, columns, k=options.k, squared_norms=norms, impl="torch"
        )
    for impl in ("triton", "torch"):
        if impl in available_impls(device):
            ways[f"cdr_score {impl}, rows resident"] = lambda impl=impl: cdr_score(
                resident, columns, k=options.k, impl=impl
            )
    for name, way in ways.items():
        if not same(way()):
            sys.exit(f"{name}: other facts or scores than cpp at {n} rows, {sessions} sessions")
        timed(name, way, exact=True)
    source = resident.source(False)
    run, limits = bounds_torch, (32, 128)
    if device.type == "cuda" and not no_triton(device):
        from cdr_kernel.score import _triton

        run = _triton.launch
        limits = _triton.tile_limits(_triton.capability(device), True)
    packed = pack(columns, source.dtype, source.dim, norms=True, device=device, limits=limits)
    timed("the fused pass alone", lambda: [source.bounds(p, Factors32(), run) for p in packed])

    try:
        dense = rows if rows is not None else torch.from_numpy(host).to(device)
        scores, given = formula(dense, columns, device)

        def top(scores: Callable[[], torch.Tensor]) -> Callable[[], Any]:
            return lambda: torch.topk(scores(), min(options.k, n), dim=1)

        memory = 4.0 * n * sessions * count * 3
        if memory > options.memory:
            missing("torch eager", f"needs {memory / 2**30:.0f} GiB")
            missing("torch.compile", f"needs {memory / 2**30:.0f} GiB")
        else:
            eager = top(lambda: scores(*given))
            timed("torch eager", eager, recall=recall(eager().indices.tolist(), best))
            if options.compile:
                compiled = torch.compile(scores)
                whole = top(lambda: compiled(*given))
                timed("torch.compile", whole, recall=recall(whole().indices.tolist(), best))
            else:
                missing("torch.compile", "left out (--compile)")
        query = torch.from_numpy(np.stack([c.query for c in columns])).to(device, dense.dtype)
        plain = top(lambda: (dense @ query.T).T)
        timed("plain product of the queries + topk", plain, work=2.0 * n * options.dim * sessions,
              recall=recall(plain().indices.tolist(), best))  # fmt: skip
        faiss_row(device, host, columns, options, timed, missing, best)
        cuvs_row(device, dense, query, options, timed, missing, best)
    except torch.OutOfMemoryError:
        missing("the other baselines", "out of memory")
    for row in table:
        row.update(rows=n, sessions=sessions)
    return table


def faiss_row(device: Any, host: Any, columns: Any, options: Any, timed: Any, missing: Any, best: Any) -> None:
    name = "FAISS flat, top-k of the queries"
    if find_spec("faiss") is None:
        return missing(name)
    faiss: Any = import_module("faiss")
    if device.type == "cuda" and not hasattr(faiss, "StandardGpuResources"):
        return missing(name, "the FAISS here has no GPU part")
    if host.nbytes > options.memory:
        return missing(name, "its float32 copy does not fit")
    index = faiss.IndexFlatIP(options.dim)
    if device.type == "cuda":
        index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), device.index or 0, index)
    for start in range(0, len(host), 1 << 18):
        some = host[start : start + (1 << 18)].astype(np.float32)
        index.add(some / np.linalg.norm(some, axis=1, keepdims=True))
    queries = np.stack([c.query for c in columns]).astype(np.float32)
    found = index.search(queries, min(options.k, len(host)))[1]
    timed(name, lambda: index.search(queries, min(options.k, len(host))), read=4.0 * host.size,
          work=2.0 * host.size * len(columns), recall=recall(found.tolist(), best))  # fmt: skip
    return None


def cuvs_row(device: Any, dense: Any, query: Any, options: Any, timed: Any, missing: Any, best: Any) -> None:
    name = "cuVS brute force, top-k of the queries"
    if find_spec("cuvs") is None:
        return missing(name)
    if device.type != "cuda":
        return missing(name, "needs a GPU")
    brute_force: Any = import_module("cuvs.neighbors.brute_force")
    index = brute_force.build(dense, metric="inner_product")
    found = brute_force.search(index, query, min(options.k, len(dense)))[1]
    timed(name, lambda: brute_force.search(index, query, min(options.k, len(dense))),
          work=2.0 * dense.numel() * len(query), recall=recall(torch.as_tensor(found).tolist(), best))  # fmt: skip
    return None


def machine(device: torch.device) -> dict[str, Any]:
    """Where these numbers come from."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    triton = import_module("triton").__version__ if find_spec("triton") else None
    return {
        "device": name, "torch": torch.__version__, "triton": triton, "threads": _C.threads(), "cores": os.cpu_count(),
        "commit": done.stdout.strip() or None,
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench score", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--rows", type=int, nargs="+", default=None, help="default: 100,000; on cuda 1, 10, 50 million")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--residual", type=int, default=8)
    parser.add_argument(
        "--dtype", default=None, choices=["float16", "float32"], help="default: float32; on cuda float16"
    )
    parser.add_argument("-k", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=None, help="default: 5; on cuda 30")
    parser.add_argument("--memory", type=float, default=None, help="bytes that a baseline may take beside the rows")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    parser.add_argument("--json", action="store_true", help="one line, last on standard output")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        sys.exit("no CUDA device here: --device cpu gives the same table for cpp and torch")
    options.rows = options.rows or ([10**6, 10**7, 5 * 10**7] if cuda else [10**5])
    options.dtype = options.dtype or ("float16" if cuda else "float32")
    options.memory = options.memory or (40 * 2**30 if cuda else 4 * 2**30)
    clock = Clock(device, options.repeat or (30 if cuda else 5))
    copied, multiplied = ceilings(device, getattr(torch, options.dtype), clock)
    found = {**machine(device), "copy_GB/s": copied / 1e9, "matmul_TFLOP/s": multiplied / 1e12,
             "dim": options.dim, "dtype": options.dtype, "residual": options.residual, "k": options.k}  # fmt: skip

    def note(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    note("measured on " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()))
    heads = " ".join(f"{head:>9}" for head in ("p20 ms", "p50 ms", "p80 ms"))
    note(f"{'rows':>9} {'B':>3} {'':<40} {heads} {'GB/s':>8} {'TFLOP/s':>8}  recall")
    table = []
    for n in options.rows:
        for sessions in options.sessions:
            for row in run_shape(n, sessions, options, device, clock):
                table.append(row)
                if "note" in row:
                    note(f"{n:>9} {sessions:>3} {row['name']:<40} {row['note']}")
                    continue
                quality = "exact" if row.get("exact") else f"{row['recall']:.3f}" if "recall" in row else ""
                note(f"{n:>9} {sessions:>3} {row['name']:<40} {row['p20_ms']:9.3f} {row['p50_ms']:9.3f}"
                     f" {row['p80_ms']:9.3f} {row['GB/s']:8.1f} {row['TFLOP/s']:8.3f} {quality:>7}")  # fmt: skip
    if options.json:
        print(json.dumps({**found, "table": table}))


if __name__ == "__main__":
    main(sys.argv[1:])
