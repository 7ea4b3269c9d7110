"""The demo: one task on a packaged corpus, by relevance alone and by CDR. No model and no network are needed.

Facts, task and their embeddings (all-MiniLM-L6-v2, float16) lie beside this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdr_kernel.files._files import Task, read_array, read_facts, read_task_vectors, read_tasks
from cdr_kernel.loop import ExtractWriter, Window, WindowPrompt, run_windows
from cdr_kernel.loop._assess import DEFAULT_EXPECTED_WORDS
from cdr_kernel.rank import cdr_rank, pack_facts
from cdr_kernel.report._run_record import RunRecord
from cdr_kernel.report._store_map import StoreMap
from cdr_kernel.retrieve import Retriever
from cdr_kernel.session import Session, SubQuery
from cdr_kernel.spec.constants import CALIBRATED_GATE
from cdr_kernel.store import FactStore
from cdr_kernel.store._stored_facts import sequences_of
from cdr_kernel.validation._arrays import Float64

EMBEDDING_MODEL = "all-MiniLM-L6-v2"
MIN_RELEVANCE = 0.30
"""The gate of the demo. §2.6's default of .55 is for models with higher cosines: with this one it leaves hardly more
facts than five windows take."""
NO_BUDGET = 2**31 - 1
"""A token budget that the number of facts always undercuts."""

TITLES = {
    "relevance": "By relevance alone (every window ranked as window 1, §2.7)",
    "cdr": "By CDR (coverage, residual pull, n-gram guard)",
}


@dataclass(frozen=True, eq=False)
class Demo:
    """The packaged corpus: a store, one task, and the vectors of its query [D] and sub-queries."""

    store: FactStore
    task: Task
    query: Float64
    sub_queries: tuple[SubQuery, ...]


def load() -> Demo:
    """The packaged corpus, task and vectors."""
    folder = Path(__file__).parent
    embeddings = read_array(str(folder / "facts_minilm_f16.npy"), 2)
    store = FactStore(embeddings.shape[1], embedding_model=EMBEDDING_MODEL)
    for batch in read_facts(folder / "facts.jsonl"):
        store.add(batch.ids, batch.texts, embeddings[batch.first : batch.first + len(batch)], source=batch.source)
    task = read_tasks(folder / "task.json")[0]
    query, vectors = read_task_vectors(folder / "queries_minilm_f16.npz", task, store.dim)
    return Demo(store, task, query, task.sub_queries(vectors))


def passing(demo: Demo, min_relevance: float) -> int:
    """How many facts pass a gate."""
    return len(Retriever(demo.store).search(demo.query, min_relevance=min_relevance))


def run_demo(
    demo: Demo, *, min_relevance: float = MIN_RELEVANCE, windows: int | None = None, k: int | None = None
) -> dict[str, RunRecord]:
    """The task's windows under "relevance", "cdr" and "cdr_without_guard", each written by copying the packed facts.

    min_relevance: in [-1, 1]; windows: 1 to 20; k: facts per envelope; None takes the task's.
    All keep a session, so that novelty means the same in each; by relevance alone it does not rank.
    """
    windows = demo.task.windows if windows is None else windows
    k = demo.task.k if k is None else k
    retriever = Retriever(demo.store)
    runs = {}
    where = StoreMap(demo.store.view(), demo.query, np.stack([item.embedding for item in demo.sub_queries]))
    for name, play in {"relevance": _by_relevance, "cdr": _by_cdr, "cdr_without_guard": _by_cdr}.items():
        session = Session(
            demo.sub_queries,
            embedding_model=EMBEDDING_MODEL,
            min_relevance=min_relevance,
            max_windows=windows,
            guard=False if name == "cdr_without_guard" else None,
        )
        record = RunRecord(demo.task, where)
        for window in play(demo.query, retriever, session, k):
            record.add(window)
        runs[name] = record
    return runs


def documents(
    demo: Demo, runs: dict[str, RunRecord], *, min_relevance: float, windows: int | None = None, k: int | None = None
) -> dict[str, dict[str, Any]]:
    """The runs by relevance and by CDR, and one in the calibrated mode, as documents for a report."""
    windows = demo.task.windows if windows is None else windows
    k = demo.task.k if k is None else k
    session = Session.calibrated(demo.sub_queries, embedding_model=EMBEDDING_MODEL, max_windows=windows)
    calibrated = RunRecord(demo.task, runs["cdr"].map)
    for window in _by_cdr(demo.query, Retriever(demo.store), session, k):
        calibrated.add(window)
    store = {"path": None, "facts": len(demo.store), "dim": demo.store.dim, "dtype": demo.store.dtype.name}

    def document(record: RunRecord, **settings: Any) -> dict[str, Any]:
        settings = {**settings, "windows": windows, "k": k, "writer": "extract"}
        return record.document(settings=settings, model=EMBEDDING_MODEL, store=store, complete=True)

    return {
        "Relevance alone": document(runs["relevance"], mode="relevance", min_relevance=min_relevance, guard=True),
        "CDR": document(runs["cdr"], mode="spec", min_relevance=min_relevance, guard=True),
        "Calibrated": document(calibrated, mode="calibrated", gate=CALIBRATED_GATE, guard=False),
    }


def _by_cdr(query: Float64, retriever: Retriever, session: Session, k: int) -> Iterator[Window]:
    writer = ExtractWriter(retriever.store, session)
    return run_windows(
        writer, query, retriever, session, token_budget=NO_BUDGET, assess=writer.assess, k=k, max_facts=k
    )


def _by_relevance(query: Float64, retriever: Retriever, session: Session, k: int) -> Iterator[Window]:
    """Every window ranked as window 1: importance x relevance (§2.7), through to the last window or an empty one."""
    writer = ExtractWriter(retriever.store, session)
    while session.window_count < session.max_windows:
        number, anchor = session.window_count + 1, session.anchor()
        ranking = cdr_rank(query, retriever, session)
        sequence = sequences_of(ranking.facts)
        ranking = ranking.take(np.lexsort((sequence, -(ranking.importance * ranking.relevance))))
        envelope = pack_facts(ranking, NO_BUDGET, max_facts=k)
        prompt = WindowPrompt(number, anchor, envelope)
        output, report, exit = None, None, session.exit(envelope=envelope)
        if len(envelope.facts):
            output = writer(prompt)
            report = writer.assess(output)
            session.update(report, output, packed=envelope.ranking.ids)
            exit = session.exit()  # without an envelope: relevance alone knows no exhaustion after window 1
        yield Window.of(session, prompt, ranking, output, report, exit)
        if output is None:
            return


def remaining(record: RunRecord, number: int) -> str:
    """What remains before the window of this number: the anchor, and what earlier windows wrote about in part.

    A sub-topic leaves the anchor as soon as it is addressed (§7.2, reading R36), however little of it was written.
    """
    earlier = [window["report"] for window in record.windows[: number - 1]]
    parts = []
    for item in record.task.items:
        words = sum(report["words_by_sub_query"].get(item.id, 0) for report in earlier if report is not None)
        expected = DEFAULT_EXPECTED_WORDS if item.expected_words is None else item.expected_words
        if any(report is not None and item.id in report["addressed"] for report in earlier) and words < expected:
            parts.append(f"{item.label} ({words} of {expected} words)")
    anchor = record.windows[number - 1]["anchor"]
    told = [anchor] if anchor else []
    if parts:
        told.append(f"Written in part: {', '.join(parts)}")
    return ". ".join(told) or "Nothing remains."


def conclusion(runs: dict[str, RunRecord]) -> str:
    """What the numbers of the runs show, in plain words, good or bad."""
    relevance, cdr, unguarded = (_Result.of(runs[name]) for name in ("relevance", "cdr", "cdr_without_guard"))
    total = len(runs["cdr"].task.items)
    text = (
        f"Relevance alone put {relevance.facts} different facts into {relevance.slots} places, reached "
        f"{relevance.topics} of {total} sub-topics and a completeness of {relevance.completeness:.2f}; CDR {cdr.facts} "
        f"into {cdr.slots}, {cdr.topics} sub-topics, {cdr.completeness:.2f}; CDR without the n-gram guard "
        f"{unguarded.facts} into {unguarded.slots}, {unguarded.topics}, {unguarded.completeness:.2f}."
    )
    return text + (
        " This writer copies facts word for word, which flatters the guard; completeness counts the words of facts"
        " near a sub-topic, each fact once; fresh facts are not yet fresh prose."
    )


@dataclass(frozen=True)
class _Result:
    """Of the windows that were written: different facts, places filled, sub-topics reached, completeness."""

    facts: int
    slots: int
    topics: int
    completeness: float

    @classmethod
    def of(cls, record: RunRecord) -> _Result:
        written = [window for window in record.windows if window["written"]]
        return cls(
            facts=record.packed,
            slots=sum(len(window["facts"]) for window in written),
            topics=written[-1]["topics_reached"] if written else 0,
            completeness=written[-1]["report"]["completeness_score"] if written else 0.0,
        )
