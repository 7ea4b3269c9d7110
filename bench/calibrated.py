"""The calibrated mode at scale: the first window of a task, and the windows after it.

    python -m bench calibrated [--facts 100000] [--data FOLDER] [--tasks 4] [--source W] [--json]

Facts are grown from a folder of facts, vectors and tasks (see `python -m bench quality`), else from the demo, each with
the text of the fact that its vector came from. Before anything is timed the windows of a small store are compared with
those of the reference; up to 100,000 facts those of the large store with the exact routine's alone. A window is the
ranking and the packing, by need. What is made once per store is timed apart: codes, calibration, words.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import cdr_kernel.demo
from bench.data import Clusters, grow_with_base
from bench.measure import Times, machine, once, peak_rss_mb
from cdr_kernel import FactStore, Ranking, Retriever, Session, SubQuery, WindowReport, cdr_rank, pack_facts, reference
from cdr_kernel.quality._experiment import load_corpus

SMALL = 240
"""Facts of the store that the reference ranks."""
CHECKED = 100_000
"""Facts up to which codes are compared with none."""
WINDOWS = 5
MODEL = "grown"
PER_SOURCE = 40


@dataclass(frozen=True)
class Task:
    """query [D], sub-queries, facts per window."""

    query: Any
    sub_queries: tuple[SubQuery, ...]
    k: int


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench calibrated", description="The calibrated mode at scale.")
    p.add_argument("--facts", type=int, default=100_000, help="facts to grow (100000)")
    p.add_argument("--data", type=Path, help="folder of facts, vectors, tasks; or what cdr ingest wrote (the demo)")
    p.add_argument("--tasks", type=int, default=4, help="how many of the tasks, evenly spread (4)")
    p.add_argument("--source", type=float, default=0.0, help="weight of a fact's document (0)")
    p.add_argument("--json", action="store_true", help="one line of JSON, last on standard output")
    return p


def base_of(path: Path | None) -> tuple[Any, list[str], list[Task], str]:
    """Unit vectors [n, D] with their texts, tasks, and where they come from."""
    if path is None:
        demo = cdr_kernel.demo.load()
        view = demo.store.view()
        units = view.embeddings.astype(np.float64) / np.sqrt(view.squared_norms[:, None])
        return (
            units.astype(np.float32),
            view.texts(range(view.rows)),
            [Task(demo.query, demo.sub_queries, demo.task.k)],
            "demo-sized",
        )
    corpus = load_corpus(path)
    tasks = [Task(case.query, case.sub_queries, case.task.k) for case in corpus.cases]
    return np.asarray(corpus.units), corpus.store.view().texts(range(len(corpus))), tasks, path.name


def grown(clusters: Clusters, texts: Sequence[str], facts: int) -> FactStore:
    """A store of that many facts."""
    store = FactStore(clusters.base.shape[1], embedding_model=MODEL)
    for rows, base in grow_with_base(clusters, facts):
        numbers = range(len(store), len(store) + len(rows))
        store.add(
            [f"f{i}" for i in numbers],
            [texts[b] for b in base.tolist()],
            rows,
            source=[f"s{i // PER_SOURCE}" for i in numbers],
            position=[i % PER_SOURCE for i in numbers],
        )
    return store


def windows(task: Task, retriever: Retriever, settings: dict[str, Any]) -> tuple[list[float], list[Ranking]]:
    """Milliseconds and envelope of each window; every window covers the next sub-query a little."""
    session = Session.calibrated(task.sub_queries, embedding_model=MODEL, **settings)
    times, packed = [], []
    for number in range(WINDOWS):
        made: list[Any] = []

        def window(made: list[Any] = made) -> None:
            made.append(pack_facts(cdr_rank(task.query, retriever, session), task.k, count_tokens=lambda text: 1))

        times.append(once(window))
        (envelope,) = made
        packed.append(envelope.ranking)
        addressed = (task.sub_queries[number % len(task.sub_queries)].id,)
        session.update(WindowReport(0.2, addressed, embedding_model=MODEL), envelope.text, envelope=envelope)
    return times, packed


def check_against_reference(store: FactStore, tasks: Sequence[Task], settings: dict[str, Any]) -> None:
    """Two windows of each task: the same facts qualify, with the same numbers."""
    view, retriever = store.view(), Retriever(store)
    facts = [
        reference.Fact(v.tolist(), f.text, f.importance, 1.0, f.id, f.sequence, f.source, f.position)
        for f, v in zip(view.facts(range(len(store))), view.embeddings.astype(np.float64), strict=True)
    ]
    for task in tasks:
        session = Session.calibrated(task.sub_queries, embedding_model=MODEL, **settings)
        listed = [reference.SubQuery(i.id, i.label, i.text, i.embedding.tolist()) for i in task.sub_queries]
        twin = reference.CalibratedSession(listed, **settings)
        for item in task.sub_queries[:2]:
            ranking = cdr_rank(task.query, retriever, session)
            truth, share = reference.calibrated_rank(facts, task.query.tolist(), twin)
            numbers = {s.fact.id: [s.score, *s.by_sub_query] for s in truth}
            if set(ranking.ids) != set(numbers):
                raise SystemExit("other facts qualify than in the reference")
            if ranking.by_sub_query is None:
                raise SystemExit("the ranking has no numbers by sub-query: it is not one of the calibrated mode")
            found = np.column_stack([ranking.score, ranking.by_sub_query])
            if not np.allclose(found, [numbers[id] for id in ranking.ids], rtol=0, atol=1e-8):
                raise SystemExit("the numbers are not those of the reference")
            if ranking.new_share != share:
                raise SystemExit(f"the share of new facts is {ranking.new_share}, in the reference {share}")
            if twin.direction is None and not settings["source_weight"]:
                positions = reference.feedback_positions(facts, reference.lexical_scores(facts, twin))
                twin.direction = reference.feedback_direction(facts, positions)
                twin.words = reference.feedback_words(facts, positions)
            envelope = pack_facts(ranking, task.k, count_tokens=lambda text: 1)
            report = WindowReport(0.2, (item.id,), embedding_model=MODEL)
            session.update(report, "", envelope=envelope)
            reference.update_session_after_window(
                twin, reference.Report(0.2, report.addressed, report.depth_by_sub_query), ""
            )
            twin.packed |= set(envelope.ranking.ids)


def check_codes(expected: Sequence[Ranking], task: Task, retriever: Retriever, settings: dict[str, Any]) -> None:
    """The same windows without codes."""
    plain = Retriever(retriever.store)
    plain.moments, plain.lexical = retriever.moments, retriever.lexical
    plain.codes = lambda view: None  # type: ignore[method-assign]  # else it would make them in the background
    for first, second in zip(windows(task, plain, settings)[1], expected, strict=True):
        if first.ids != second.ids:
            raise SystemExit("the codes change what is packed")
        if first.score.tobytes() != second.score.tobytes():
            raise SystemExit("the codes change scores")


def main(arguments: list[str]) -> int:
    p = parser()
    a = p.parse_args(arguments)
    if a.facts < 1 or a.tasks < 1:
        p.error(f"--facts and --tasks: expected at least 1, got {a.facts} and {a.tasks}")
    settings: dict[str, Any] = {"source_weight": a.source}
    if a.source:
        settings.update(feedback_weight=0.0, lexical_feedback_weight=0.0)
    units, texts, tasks, name = base_of(a.data)
    tasks = tasks[:: max(1, len(tasks) // a.tasks)][: a.tasks]
    clusters = Clusters.of(units)
    check_against_reference(grown(clusters, texts, min(a.facts, SMALL)), tasks[:1], settings)
    print("the reference agrees", file=sys.stderr)
    store = grown(clusters, texts, a.facts)
    retriever, view = Retriever(store), store.view()
    once_ms = {
        "codes_ms": once(retriever.prepare),
        "moments_ms": once(lambda: retriever.moments.of(view)),
        "words_ms": once(lambda: retriever.lexical.bm25(view, [])),
    }
    print(", ".join(f"{what} {ms:.0f}" for what, ms in once_ms.items()), file=sys.stderr)
    first: list[float] = []
    later: list[float] = []
    qualified = []
    for number, task in enumerate(tasks):
        times, packed = windows(task, retriever, settings)
        if a.facts <= CHECKED:
            check_codes(packed, task, retriever, settings)
        if any(set(x.ids) & set(y.ids) for x, y in pairwise(packed)):
            raise SystemExit("a fact is packed twice")
        first.append(times[0])
        later += times[1:]
        qualified.append(packed[0].qualified)
        print(
            f"task {number + 1}: {len(task.sub_queries)} sub-queries, {packed[0].qualified} qualified, "
            + ", ".join(f"{t:.1f}" for t in times)
            + " ms",
            file=sys.stderr,
        )
    found = {
        "facts": a.facts,
        "base": name,
        "tasks": len(tasks),
        "source_weight": a.source,
        "first_ms": Times(tuple(first)).quantiles,
        "later_ms": Times(tuple(later)).quantiles,
        "qualified": float(np.mean(qualified)),
        "kept_bytes": retriever.evidence.nbytes + retriever.cache.nbytes,
        "kept_limit": retriever.evidence.limit + retriever.cache.limit,
        **{what: round(ms, 1) for what, ms in once_ms.items()},
        "peak_rss_mb": round(peak_rss_mb()),
        **machine(),
    }
    if a.json:
        print(json.dumps(found))
    else:
        print(
            f"first window {found['first_ms']} ms, later ones {found['later_ms']} ms, {found['kept_bytes']} bytes kept"
        )
    return 0
