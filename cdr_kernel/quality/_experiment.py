"""Does retrieval hold quality over windows? The experiment, on a session as users run it.

    corpus = load_corpus(folder, embedding="title")
    outcome = evaluate(corpus, ranked(corpus), writers=("greedy", "lexical", "plan"))
    summarise(outcome)["completeness"]

A task has a query and sub-queries with labelled facts; each window packs k facts, a simulated writer says what it
addressed, and its output is the packed facts with a quarter of their tokens dropped. No model writes anything, labels
follow the structure of pages, and copied words flatter the n-gram guard: see docs/quality.md before quoting numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cdr_kernel.quality._corpus import EMBEDDINGS, MODEL, TOKENIZERS, Case, Corpus, golden, load_corpus
from cdr_kernel.quality._methods import (
    Method,
    Ranked,
    baselines,
    pick_mmr,
    pick_relevance,
    pick_relevance_excluded,
    pick_round_robin,
    pick_xquad,
    ranked,
)
from cdr_kernel.quality._run import (
    DROPPED,
    LEAST_SIMILARITY,
    WRITERS,
    Run,
    Writer,
    write_greedy,
    write_lexical,
    write_plan,
)
from cdr_kernel.session import WindowReport
from cdr_kernel.validation._arrays import Float64

__all__ = [
    "DROPPED",
    "EMBEDDINGS",
    "MODEL",
    "RESAMPLES",
    "TOKENIZERS",
    "WRITERS",
    "Case",
    "Corpus",
    "Method",
    "Outcome",
    "Ranked",
    "Run",
    "TaskRow",
    "WindowRow",
    "Writer",
    "alpha_ndcg",
    "baselines",
    "difference",
    "evaluate",
    "golden",
    "interval",
    "load_corpus",
    "pick_mmr",
    "pick_relevance",
    "pick_relevance_excluded",
    "pick_round_robin",
    "pick_xquad",
    "ranked",
    "summarise",
    "write_greedy",
    "write_lexical",
    "write_plan",
]

RESAMPLES = 2000


@dataclass(frozen=True)
class WindowRow:
    """What one window packed. Shares are over k, the facts that were asked for; None without labels.

    new: never packed before; relevant: labelled, packed before or not; yield_: new and labelled; residual_yield: and
    about a sub-query not yet addressed; lenient_yield: new and relevant when labels are read generously; near: mean
    over the packed facts of the largest cosine to a fact packed before; repeated: share of the envelope's distinct
    6-grams that earlier envelopes had; reach: share of the sub-queries that are the best match, by words, of some fact
    delivered so far.
    """

    filled: float
    new: float
    near: float
    repeated: float
    reach: float
    addressed: int
    relevant: float | None
    yield_: float | None
    residual_yield: float | None
    lenient_yield: float | None


@dataclass(frozen=True)
class TaskRow:
    """One task under one writer: its windows, and what came of it (None without labels).

    completeness: mean over sub-queries of min(1, words of distinct delivered facts / expected words). subtopic_recall:
    share of sub-queries with a delivered fact. alpha_ndcg: with alpha .5 over all packed facts in order.
    """

    task: str
    kind: str
    windows: tuple[WindowRow, ...]
    completeness: float | None
    subtopic_recall: float | None
    alpha_ndcg: float | None


@dataclass(frozen=True)
class Outcome:
    """A method on all tasks: by writer, one row per task in their order."""

    method: str
    by_writer: Mapping[str, tuple[TaskRow, ...]] = field(default_factory=dict)


def evaluate(
    corpus: Corpus,
    method: Method,
    *,
    writers: Sequence[str] = tuple(WRITERS),
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run the method on every task with every writer. advance: called after each task.

    Raises ValueError for an unknown writer, and for "greedy" where a task has no labels.
    """
    for writer in writers:
        if writer not in WRITERS:
            raise ValueError(f"writers: expected some of {', '.join(WRITERS)}, got {writer!r}")
    unlabelled = [case.id for case in corpus.cases if not case.labelled]
    if unlabelled and "greedy" in writers:
        raise ValueError(f"writer 'greedy' needs labels (fact_ids), task {unlabelled[0]!r} has none")
    found: dict[str, list[TaskRow]] = {writer: [] for writer in writers}
    for case in corpus.cases:  # tasks outside, so that what a retriever keeps of a task serves all its writers
        for writer in writers:
            found[writer].append(_run_case(corpus, case, method, WRITERS[writer], seed))
        advance()
    return Outcome(method.name, {writer: tuple(rows) for writer, rows in found.items()})


def _run_case(corpus: Corpus, case: Case, method: Method, writer: Writer, seed: int) -> TaskRow:
    run = Run(corpus, case, seed)
    picker = method.start(corpus, case)
    labels, count = case.labels, len(case.subs)
    delivered: list[int] = []
    words = np.zeros(count)
    grams: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
    reached: set[int] = set()
    windows = []
    for _ in range(run.windows):
        rows = picker.pick(run)
        new = [row for row in rows if row not in run.used]
        useful = [row for row in new if row in labels]
        done = {j for j, _, _ in run.addressed}
        near = 0.0
        if run.used and rows:
            near = float((corpus.units[rows] @ corpus.units[sorted(run.used)].T).max(1).mean())
        own = np.unique(np.concatenate([corpus.ngrams[row] for row in rows])) if rows else grams[:0]
        repeated = float(np.isin(own, grams).mean()) if len(own) and len(grams) else 0.0
        grams = np.union1d(grams, own)
        for row in useful:
            for j in labels[row]:
                words[j] += corpus.words[row] / len(labels[row])
        reached |= {int(run.lexical[row].argmax()) for row in rows if run.lexical[row].max() > LEAST_SIMILARITY}
        delivered += rows
        addressed = writer(run, rows)
        output = run.output(rows)

        def share(these: Sequence[int], k: int = run.k) -> float | None:
            return len(these) / k if case.labelled else None

        windows.append(
            WindowRow(
                filled=len(rows) / run.k,
                new=len(new) / run.k,
                near=near,
                repeated=repeated,
                reach=len(reached) / count,
                addressed=len(addressed),
                relevant=share([row for row in rows if row in labels]),
                yield_=share(useful),
                residual_yield=share([row for row in useful if labels[row] - done]),
                lenient_yield=share([row for row in new if row in case.lenient]),
            )
        )
        run.close(rows, addressed)
        report = WindowReport(
            completeness_score=_completeness(words, case.expected),
            addressed=tuple(case.task.items[j].id for j, _ in addressed),
            depth_by_sub_query={case.task.items[j].id: depth for j, depth in addressed},
        )
        picker.close(run, report, output)
    about = {j for row in delivered for j in labels.get(row, ())}
    return TaskRow(
        task=case.id,
        kind=case.kind,
        windows=tuple(windows),
        completeness=_completeness(words, case.expected) if case.labelled else None,
        subtopic_recall=len(about) / count if case.labelled else None,
        alpha_ndcg=alpha_ndcg(delivered, labels, count) if case.labelled else None,
    )


def _completeness(words: Float64, expected: Float64) -> float:
    done = np.divide(words, expected, out=np.ones_like(words), where=expected > 0)
    return float(np.minimum(1.0, done).mean())


def alpha_ndcg(delivered: Sequence[int], labels: Mapping[int, frozenset[int]], count: int, alpha: float = 0.5) -> float:
    """alpha-nDCG of the packed rows in their order over `count` sub-queries; a repeated row gains nothing.

    The ideal takes, at each place, a labelled fact of the sub-query that had the fewest so far.
    """

    def gain(order: Iterable[Iterable[int]]) -> float:
        seen = np.zeros(count)
        total = 0.0
        for rank, topics in enumerate(order):
            topics = list(topics)
            total += sum((1 - alpha) ** seen[j] for j in topics) / math.log2(2 + rank)
            for j in topics:
                seen[j] += 1
        return total

    left = [sum(j in about for about in labels.values()) for j in range(count)]
    ideal: list[list[int]] = []
    had = np.zeros(count)
    for _ in delivered:
        open_ = [j for j in range(count) if left[j] > 0]
        if not open_:
            break
        j = min(open_, key=lambda j: had[j])
        left[j] -= 1
        had[j] += 1
        ideal.append([j])
    best = gain(ideal)
    seen: set[int] = set()
    found = []
    for row in delivered:
        found.append(sorted(labels.get(row, ())) if row not in seen else [])
        seen.add(row)
    return gain(found) / best if best else 0.0


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean, resampling the values (tasks) 2,000 times."""
    x = np.asarray(values, np.float64)
    means = x[np.random.default_rng(seed).integers(0, len(x), (RESAMPLES, len(x)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def _per_task(outcome: Outcome, value: Callable[[TaskRow], float | None]) -> list[float | None]:
    """By task, the mean over writers."""
    return [_mean(map(value, rows)) for rows in zip(*outcome.by_writer.values(), strict=True)]


def _by_window(rows: Iterable[TaskRow], name: str) -> list[float | None]:
    listed = list(rows)
    count = max(len(row.windows) for row in listed)
    return [_mean(getattr(row.windows[w], name) for row in listed if w < len(row.windows)) for w in range(count)]


def summarise(outcome: Outcome) -> dict[str, Any]:
    """Means over tasks and writers as plain data, with the 95 % interval of completeness over tasks.

    per_writer has the same of each writer, with each task's completeness, new and yield; per_task the means over
    writers.
    """

    def about(rows: Sequence[TaskRow]) -> dict[str, Any]:
        return {
            "yield_by_window": _by_window(rows, "yield_"),
            "new_by_window": _by_window(rows, "new"),
            "filled_by_window": _by_window(rows, "filled"),
            "residual_yield_by_window": _by_window(rows, "residual_yield"),
            "lenient_yield_by_window": _by_window(rows, "lenient_yield"),
            "near_by_window": _by_window(rows, "near"),
            "repeated_by_window": _by_window(rows, "repeated"),
            "reach_by_window": _by_window(rows, "reach"),
            "srecall": _mean(row.subtopic_recall for row in rows),
            "andcg": _mean(row.alpha_ndcg for row in rows),
        }

    def done(values: Sequence[float | None]) -> dict[str, Any]:
        known = [v for v in values if v is not None]
        return {"completeness": _mean(known), "ci": list(interval(known)) if known else None}

    every = [row for rows in outcome.by_writer.values() for row in rows]
    tasks = [row.task for row in next(iter(outcome.by_writer.values()))]
    completeness = _per_task(outcome, lambda row: row.completeness)
    return {
        "method": outcome.method,
        "tasks": len(tasks),
        **done(completeness),
        **about(every),
        "per_writer": {
            writer: {
                **done([row.completeness for row in rows]),
                **about(rows),
                "per_task": {
                    row.task: {
                        "completeness": row.completeness,
                        "new": [w.new for w in row.windows],
                        "yield": [w.yield_ for w in row.windows],
                    }
                    for row in rows
                },
            }
            for writer, rows in outcome.by_writer.items()
        },
        "per_task": dict(zip(tasks, completeness, strict=True)),
    }


def difference(outcome: Outcome, other: Outcome) -> dict[str, Any] | None:
    """Completeness of the first less that of the second, task by task: mean, 95 % interval, how often which is better.

    None without labels.
    """
    pairs = zip(*(_per_task(o, lambda row: row.completeness) for o in (outcome, other)), strict=True)
    gains = [a - b for a, b in pairs if a is not None and b is not None]
    if not gains:
        return None
    return {
        "to": other.method,
        "mean": float(np.mean(gains)),
        "ci": list(interval(gains)),
        "better": sum(gain > 0 for gain in gains),
        "worse": sum(gain < 0 for gain in gains),
        "tasks": len(gains),
    }
