"""The durable store: how long it takes to put facts in, to open, to catch up and to read the record again.

    python -m bench store [--facts 1000000] [--dim 384] [--dtype float32] [--folder DIR] [--json]

Facts are random; what is opened is compared with what was put in before times are told. "warm" opens are those of files
that the system has in memory; pylance is imported before. --folder keeps the store there and takes one that is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Times, machine, once, peak_rss_mb
from cdr_kernel.durable import DurableStore

BATCH = 50_000
MODEL = "random"
SMALL = 100  # facts of one small commit


def _vectors(first: int, count: int, dim: int) -> Any:
    return np.random.default_rng(first).standard_normal((count, dim), dtype=np.float32)


def _put(store: DurableStore, verb: str, first: int, count: int) -> None:
    numbers = range(first, first + count)
    getattr(store, verb)(
        [f"fact-{i}" for i in numbers],
        [f"the text of fact number {i}, a sentence of some dozen words as facts often are" for i in numbers],
        _vectors(first, count, store.dim),
        source=[f"document {i % 1000}" for i in numbers],
        attributes={"tenant": [f"tenant {i % 50}" for i in numbers]},
    )


def _check(store: DurableStore, facts: int) -> None:
    """Some facts of every batch are what was put in."""
    view = store.facts.view()
    if len(store) != facts:
        raise SystemExit(f"the store has {len(store)} facts, {facts} were put in")
    for first in range(0, facts, BATCH):
        rows = np.array([first, min(first + BATCH, facts) - 1])
        expected = _vectors(first, min(BATCH, facts - first), store.dim).astype(store.facts.dtype)
        if not np.array_equal(view.take(rows), expected[[0, -1]]):
            raise SystemExit(f"the vectors of the facts {rows.tolist()} are not those that were put in")
        if [fact.id for fact in view.facts(rows)] != [f"fact-{row}" for row in rows]:
            raise SystemExit(f"the facts {rows.tolist()} are not those that were put in")


def _cpu(call: Callable[[], Any]) -> float:
    """Milliseconds of processor that a call takes in its own thread, whatever else the machine does."""
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e3


def measure(folder: Path, facts: int, dim: int, dtype: str, opens: int) -> dict[str, Any]:
    """All numbers, milliseconds unless the name says seconds."""
    result: dict[str, Any] = {"facts": facts, "dim": dim, "dtype": dtype}
    if not folder.exists():
        start = time.perf_counter()
        with DurableStore.create(folder, dim, embedding_model=MODEL, dtype=dtype) as store:
            for first in range(0, facts, BATCH):
                _put(store, "add", first, min(BATCH, facts - first))
            result["ingest_s"] = time.perf_counter() - start
            result["snapshot_s"] = once(lambda: store.snapshot(codes=False)) / 1e3
    with DurableStore.open(folder, verify=True) as store:
        if (damage := store.verify()) is not None:
            raise SystemExit(f"the store is damaged: {damage}")
        _check(store, facts)

    def opened() -> None:
        with DurableStore.open(folder):
            pass

    result["warm_open_ms"] = Times(tuple(once(opened) for _ in range(opens))).quantiles
    result["warm_open_cpu_ms"] = Times(tuple(_cpu(opened) for _ in range(opens))).quantiles
    with DurableStore.open(folder) as store:
        result["verify_s"] = once(store.verify) / 1e3
        result["first_id_ms"] = once(lambda: "fact-0" in store)
        small = [once(lambda i=i: _put(store, "add", facts + SMALL * i, SMALL)) for i in range(5)]
        result["add_100_ms"] = Times(tuple(small)).quantiles
        again = [once(lambda i=i: _put(store, "upsert", facts + SMALL * i, SMALL)) for i in range(5)]
        result["upsert_100_ms"] = Times(tuple(again)).quantiles
        result["open_with_a_tail_ms"] = Times(tuple(once(opened) for _ in range(opens))).quantiles
        gone = [[f"fact-{i}" for i in range(facts + SMALL * j, facts + SMALL * (j + 1))] for j in range(5)]
        result["remove_100_ms"] = Times(tuple(once(lambda ids=ids: store.remove(ids)) for ids in gone)).quantiles
        _check(store, facts)
        result["record_mb"] = store.stats()["record_bytes"] / 2**20
        result["snapshot_mb"] = store.stats()["snapshot_bytes"] / 2**20
    aside = folder / "aside"
    (folder / "snapshot").rename(aside)
    try:
        start = time.perf_counter()
        with DurableStore.open(folder) as store:
            result["rebuild_s"] = time.perf_counter() - start
            _check(store, facts)
    finally:
        shutil.rmtree(folder / "snapshot", ignore_errors=True)
        aside.rename(folder / "snapshot")
    result["peak_rss_mb"] = peak_rss_mb()
    return result


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench store")
    parser.add_argument("--facts", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--opens", type=int, default=7)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if args.folder is not None:
        result = measure(args.folder, args.facts, args.dim, args.dtype, args.opens)
    else:
        with tempfile.TemporaryDirectory() as home:
            result = measure(Path(home) / "store", args.facts, args.dim, args.dtype, args.opens)
    result |= machine()
    if args.json:
        print(json.dumps(result))
        return 0
    for name, value in result.items():
        shown = ", ".join(f"{q} {v:.1f}" for q, v in value.items()) if isinstance(value, dict) else value
        print(f"{name:22} {shown:.2f}" if isinstance(shown, float) else f"{name:22} {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
