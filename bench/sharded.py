"""python -m bench sharded: what shards cost, the constants for sizing, and a simulation of very many facts.

    python -m bench sharded --facts 200000 --shards 2 --json
    python -m bench sharded --constants constants.json --json      # the simulation alone, from what an earlier run gave

Rankings over shards, in this process and in Ray actors, are checked to be those of one store, to the last bit, before
anything is timed. The simulation draws from the measured times with a seed: the same constants give the same numbers.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cdr_kernel.demo
from bench.data import Clusters, grow, load_base, load_queries
from bench.measure import Times, machine, once
from cdr_kernel import _C, FactStore, Ranking, Retriever, Session, SubQuery, WindowReport, cdr_rank, pack_facts
from cdr_kernel.cli._terminal import print_json, say
from cdr_kernel.shard import ShardedRetriever, partition
from cdr_kernel.shard._messages import Slot
from cdr_kernel.shard._partition import facts_in, open_shard, put
from cdr_kernel.shard._sharded_retriever import ShardedStore, merged
from cdr_kernel.shard._worker import ARRAYS, Request, Shard

MODEL = "bench"
BILLION = 10**9
SHARD_COUNTS = (8, 16, 32, 64, 128, 256)
PERCENTILES = (50, 90, 99, 99.9)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench sharded", description=__doc__.split("\n\n")[0])
    p.add_argument("--facts", type=int, default=100_000)
    p.add_argument("--shards", type=int, default=2)
    p.add_argument("--dim", type=int, default=384)
    p.add_argument("--k", type=int, default=32)
    p.add_argument("--gate", type=float, default=0.55)
    p.add_argument("--queries-timed", type=int, default=60, help="(60)")
    p.add_argument("--base", help="base vectors, .npy [n, D] (the demo's: flattering)")
    p.add_argument("--queries", help="query and sub-query vectors, .npz (the demo's)")
    p.add_argument("--ray", choices=["on", "off"], default="on", help="whether to start Ray actors (on)")
    p.add_argument("--constants", type=Path, help="skip measuring: a file with the JSON of an earlier run")
    p.add_argument("--simulated", type=int, default=20_000, help="queries of the simulation (20000)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", action="store_true", help="one line of JSON, last on standard output")
    return p


# --- the simulation -------------------------------------------------------------------------------------------------


def simulate(
    constants: dict[str, Any], *, facts: int = BILLION, queries: int = 20_000, seed: int = 0
) -> list[dict[str, Any]]:
    """Latencies of a query over `facts` facts in S shards, with and without hedging, in milliseconds.

    A shard of F facts takes ``fixed_ms + F * per_fact_ms`` on one core, times how much dearer than the median the query
    is (drawn once for all shards), times how much longer than at best this request takes, and its answer travels for a
    while: all drawn from what was measured. A query waits for the slowest of S shards, twice: for the keys, and for the
    texts of the k best from the shards that have them. A hedged request goes to a replica once the 95th percentile of
    all requests has passed; the first answer counts. No queues: it is the latency of one query at a time.
    """
    r = np.random.default_rng(seed)
    dearness, noise = np.array(constants["query_factors"]), np.array(constants["noise_factors"])
    trips = np.array(constants["round_trip_ms"])
    rows = []
    for shards in SHARD_COUNTS:
        service = constants["fixed_ms"] + facts / shards * constants["per_fact_ms"]
        row: dict[str, Any] = {"shards": shards, "facts_per_shard": facts // shards, "service_ms": round(service, 3)}
        row["gb_per_shard"] = round(facts / shards * constants["bytes_per_fact"] / 1e9, 1)
        row["queries_per_s_per_core"] = round(1e3 / service, 2)
        row["bytes_per_query"] = round(shards * constants["wire_bytes_per_shard"])
        for name, hedged in (("plain", False), ("hedged", True)):
            total = np.zeros(queries)
            for start in range(0, queries, 1000):
                size = (min(1000, queries - start), shards)

                work = service * r.choice(dearness, size[0])[:, None]

                def one(size: tuple[int, int] = size, work: Any = work) -> Any:
                    return work * r.choice(noise, size) + r.choice(trips, size)

                first = one()
                if hedged:
                    after = np.percentile(first, 95)
                    first = np.where(first > after, np.minimum(first, after + one()), first)
                second = r.choice(trips, (size[0], min(shards, constants["k"]))).max(1)
                total[start : start + size[0]] = first.max(1) + second + constants["merge_ms_per_shard"] * shards
            row[name] = {f"p{p:g}": round(float(np.percentile(total, p)), 2) for p in PERCENTILES}
        rows.append(row)
    return rows


# --- what is measured -----------------------------------------------------------------------------------------------


def made(a: argparse.Namespace) -> tuple[FactStore, list[tuple[Any, Any]], str]:
    """A store of grown facts, queries with their sub-queries, and where they come from."""
    base, name = load_base(a.base, a.dim)
    lines = (Path(cdr_kernel.demo.__file__).parent / "facts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    store = FactStore(a.dim, embedding_model=MODEL)
    for rows in grow(Clusters.of(base), a.facts):
        start = len(store)
        numbers = range(start, start + len(rows))
        store.add(
            [f"f{i}" for i in numbers],
            [texts[i % len(texts)] for i in numbers],
            rows,
            source=[f"s{i // 20}" for i in numbers],
            position=[i % 20 for i in numbers],
        )
    return store, load_queries(a.queries, base), name


def session_of(subs: Any, gate: float) -> Session:
    items = [SubQuery(f"s{j}", f"S{j}", "", sub) for j, sub in enumerate(subs)]
    return Session(items, embedding_model=MODEL, min_relevance=gate)


def windows(retriever: Any, pairs: Sequence[tuple[Any, Any]], a: argparse.Namespace) -> list[tuple[Ranking, Ranking]]:
    """The first and the second window of every query."""
    out = []
    for query, subs in pairs:
        session = session_of(subs, a.gate)
        first = cdr_rank(query, retriever, session, k=a.k)
        envelope = pack_facts(first, 2000)
        session.update(WindowReport(0.2, ("s0",), embedding_model=MODEL), envelope.text, envelope=envelope)
        out.append((first, cdr_rank(query, retriever, session, k=a.k)))
    return out


def identical(a: list[tuple[Ranking, Ranking]], b: list[tuple[Ranking, Ranking]]) -> bool:
    """Whether all windows have the same facts and the same bits."""
    for one, other in zip(a, b, strict=True):
        for x, y in zip(one, other, strict=True):
            if x.ids != y.ids or x.qualified != y.qualified or not y.complete:
                return False
            for name in ARRAYS:
                mine, theirs = getattr(x, name), getattr(y, name)
                if mine is not None and mine.tobytes() != theirs.tobytes():
                    return False
    return True


def timed(retriever: Any, pairs: Sequence[tuple[Any, Any]], a: argparse.Namespace) -> Times:
    """Milliseconds of first windows, one query after another, each the best of three."""
    ms = []
    for query, subs in pairs[: a.queries_timed]:
        ms.append(
            min(once(lambda q=query, s=subs: cdr_rank(q, retriever, session_of(s, a.gate), k=a.k)) for _ in "123")
        )
    return Times(tuple(ms))


def requests_of(sharded: ShardedStore, pairs: Sequence[tuple[Any, Any]], a: argparse.Namespace) -> list[list[Request]]:
    """The requests that the first shard gets for first windows, and for second ones."""
    seen: list[list[Request]] = [[], []]
    submit, group, number = Slot.submit, sharded.groups[0], [0]

    def spy(slot: Slot, request: Request) -> Any:
        if request.method == "rank" and slot in group.slots:
            seen[number[0] % 2].append(request)
            number[0] += 1
        return submit(slot, request)

    Slot.submit = spy  # type: ignore[method-assign]  # only while these queries run
    try:
        windows(ShardedRetriever(sharded), pairs, a)
    finally:
        Slot.submit = submit  # type: ignore[method-assign]  # as it was
    return seen


def service(shard: Shard, requests: Sequence[Request], repeats: int = 7) -> Any:
    """[requests, repeats] milliseconds of one core that a shard takes, each time as the first window of a session.

    Processor time, which neighbours on the machine do not show in; what they do shows in the round trips.
    """
    ms = []
    threads = _C.threads()
    _C.set_threads(1)
    try:
        for request in requests:
            for i in range(repeats):
                (ask,), *rest = request.args
                again = type(ask)(**{**vars(ask), "token": f"{ask.token}-{i}-{time.monotonic_ns()}"})
                fresh = Request("rank", request.version, ((again,), *rest))
                start = time.thread_time()
                shard.answer(fresh)
                ms.append((time.thread_time() - start) * 1e3)
    finally:
        _C.set_threads(threads)
    return np.array(ms).reshape(len(requests), repeats)


def measure(a: argparse.Namespace) -> dict[str, Any]:
    """Checks, times and constants."""
    tell: Callable[[str], None] = say if a.json else print
    store, pairs, base = made(a)
    tell(f"{len(store):,} facts of {a.dim} dimensions, {len(pairs)} queries ({base})")
    whole = Retriever(store)
    whole.prepare()
    truth = windows(whole, pairs, a)
    result: dict[str, Any] = {
        "facts": len(store),
        "dim": a.dim,
        "shards": a.shards,
        "k": a.k,
        "base": base,
        **machine(),
    }
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "p"
        partition(store, home, shards=a.shards)
        size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
        with ShardedStore.open(home) as sharded:
            sharded.prepare()
            retriever = ShardedRetriever(sharded)
            result["in_process_identical"] = identical(truth, windows(retriever, pairs, a))
            result["one_store_ms"] = timed(whole, pairs, a).quantiles
            result["in_process_ms"] = timed(retriever, pairs, a).quantiles
            first, later = requests_of(sharded, pairs, a)
            shard = sharded.groups[0].slots[0].replica._shard  # type: ignore[attr-defined]  # a ThreadReplica
            facts = len(shard.store)
            ms = service(shard, first)
            replies = [shard.answer(request) for request in first]
            sizes = {
                name: round(float(np.median([len(pickle.dumps(each, 5)) for each in some])))
                for name, some in (("first", first), ("later", later), ("reply", replies))
            }
            packed = [pickle.dumps(reply, 5) for reply in replies]
            start = time.thread_time()
            for reply in packed:
                merged([pickle.loads(reply).value[0] for _ in range(64)], a.k)
            merging = (time.thread_time() - start) * 1e3 / (64 * len(packed))
            texts = len(pickle.dumps(truth[0][0].facts, 5))
        small = Shard(_head(home, max(1000, facts // 8)))
        small.answer(Request("prepare", 0))
        few = service(small, first)
        best, least = ms.min(1), float(np.median(few.min(1)))
        median = float(np.median(best))
        per_fact = max(0.0, (median - least) / max(1, facts - len(small.store)))
        fixed = max(0.0, median - per_fact * facts)
        result["constants"] = {
            "bytes_per_fact": round(size / len(store), 1),
            "facts_per_gb": round(1e9 * len(store) / size),
            "per_fact_ms": float(per_fact),
            "fixed_ms": fixed,
            "query_factors": [round(x, 4) for x in sorted((best / median).tolist())],
            "noise_factors": [round(x, 4) for x in sorted((ms / best[:, None]).ravel().tolist())],
            "first_request_bytes": sizes["first"],
            "later_request_bytes": sizes["later"],
            "reply_bytes": sizes["reply"],
            "texts_bytes": texts,
            "wire_bytes_per_shard": sizes["first"] + sizes["reply"],
            "queries_per_s_per_core": round(1e3 / median, 1),
            "facts_per_shard": facts,
            "merge_ms_per_shard": round(merging, 5),
            "round_trip_ms": [1.0],
            "k": a.k,
        }
        if a.ray == "on":
            result |= on_ray(home, truth, pairs, a, result)
    return result


def _head(home: Path, count: int) -> FactStore:
    """The first facts of the first shard."""
    whole, _ = open_shard(home, "shard-0")
    few = whole.empty()
    put(few, facts_in(whole.view(), np.arange(min(count, len(whole)))))
    return few


def on_ray(
    home: Path, truth: list[tuple[Ranking, Ranking]], pairs: Sequence[tuple[Any, Any]], a: argparse.Namespace,
    result: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The same with actors; adds the measured round trips to the constants."""
    from cdr_kernel.shard import open_on_ray
    from cdr_kernel.shard._on_ray import ray_module

    ray = ray_module()
    ray.init(
        num_cpus=max(2, a.shards),
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        with open_on_ray(home, timeout=120.0) as sharded:
            sharded.prepare()
            retriever = ShardedRetriever(sharded)
            same = identical(truth, windows(retriever, pairs, a))
            times = timed(retriever, pairs, a)
            actor = sharded.groups[0].slots[0].replica.actor  # type: ignore[attr-defined]  # a RayReplica
            empty = Request("applied", 0)
            trips = [once(lambda: ray.get(actor.answer.remote(empty))) for _ in range(300)][50:]
            started = time.perf_counter()
            ray.kill(actor, no_restart=False)
            back = cdr_rank(pairs[0][0], retriever, session_of(pairs[0][1], a.gate), k=a.k)
            restart = time.perf_counter() - started
    finally:
        ray.shutdown()
    result["constants"]["round_trip_ms"] = [round(t, 3) for t in sorted(trips)]
    return {
        "ray_identical": same and back.ids == truth[0][0].ids,
        "ray_ms": times.quantiles,
        "ray_overhead_p50_ms": round(times.quantile(50) - result["in_process_ms"]["p50"], 3),
        "ray_restart_s": round(restart, 2),
    }


def main(arguments: list[str]) -> int:
    """Measure, or take what was measured, and simulate."""
    a = parser().parse_args(arguments)
    if a.constants is not None:
        found = json.loads(a.constants.read_text().strip().splitlines()[-1])
        result = {"constants": found.get("constants", found)}
    else:
        result = measure(a)
    result["simulation"] = {
        "facts": BILLION,
        "seed": a.seed,
        "rows": simulate(result["constants"], queries=a.simulated, seed=a.seed),
    }
    failed = not (result.get("in_process_identical", True) and result.get("ray_identical", True))
    if a.json:
        print_json(result)
    else:
        report(result)
    if failed:
        print("the rankings differ: no number above counts", file=sys.stderr)
    return int(failed)


def report(result: dict[str, Any]) -> None:
    """For people."""
    for name in ("one_store_ms", "in_process_ms", "ray_ms", "ray_overhead_p50_ms", "ray_restart_s"):
        if name in result:
            print(f"{name:24} {result[name]}")
    for name, value in result["constants"].items():
        if not isinstance(value, list):
            print(f"{name:24} {value}")
    for row in result["simulation"]["rows"]:
        print(row)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
