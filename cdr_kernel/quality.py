"""Does retrieval hold quality over windows? The experiment, on a session as users run it.

    corpus = load_corpus(folder, embedding="title")
    outcome = evaluate(corpus, ranked(corpus), writers=("greedy", "lexical", "plan"))
    summarise(outcome)["completeness"]

A task has a query and sub-queries with labelled facts; each window packs k facts, a simulated writer says what it
addressed, and its output is the packed facts with a quarter of their tokens dropped. No model writes anything, labels
follow the structure of pages, and copied words flatter the n-gram guard: see docs/quality.md before quoting numbers.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cdr_kernel.arrays import Float64, Int64
from cdr_kernel.files import FileError, Task, read_array, read_facts, read_task_vectors, read_tasks
from cdr_kernel.lexical import TfIdf
from cdr_kernel.ngram import NGramGuard, Tokenizer, tokenize
from cdr_kernel.pack import pack_facts
from cdr_kernel.rank import cdr_rank
from cdr_kernel.retrieve import Retriever
from cdr_kernel.session import Session
from cdr_kernel.store import FactStore
from cdr_kernel.task import SubQuery, WindowReport

DROPPED = 0.25
"""Share of the packed facts' tokens that a simulated output leaves out."""

RESAMPLES = 2000
EMBEDDINGS = ("title", "text")
MODEL = "sentence-transformers/all-MiniLM-L6-v2"

_LEAST_DEPTH = 0.15  # a writer does not claim less
_LEAST_SIMILARITY = 0.04  # the lexical judge assigns nothing below
_LATER_CORPUS = "blog"  # rows from the first of it on are not part of the main store

_golden = re.compile(r"[a-z0-9]+(?:[.\-_][a-z0-9]+)*")


@lru_cache(maxsize=65536)
def golden(text: str) -> tuple[str, ...]:
    """Tokens of lower-case ASCII letters and digits, joined inside by . - and _: those of the recorded results."""
    return tuple(_golden.findall(text.lower()))


TOKENIZERS: Mapping[str, Tokenizer] = {"golden": golden, "default": tokenize}


@dataclass(frozen=True, eq=False)
class Case:
    """A task with its vectors and labels. query [D], subs [S, D]; labels: by row, the sub-queries it is about.

    expected: words that the finished task should have on each sub-query, float64 [S]. lenient: rows that count as
    relevant when labels are read generously. kind: what the task was made of.
    """

    task: Task
    query: Float64
    subs: Float64
    labels: Mapping[int, frozenset[int]]
    lenient: frozenset[int]
    expected: Float64
    kind: str

    @property
    def id(self) -> str:
        """The task's id."""
        return self.task.id

    @cached_property
    def sub_queries(self) -> tuple[SubQuery, ...]:
        """The items with their vectors."""
        return self.task.sub_queries(self.subs)

    @property
    def labelled(self) -> bool:
        """Whether it says which facts are about what."""
        return bool(self.labels)


@dataclass(frozen=True, eq=False)
class Corpus:
    """What an experiment runs on: facts in a store (row i is fact i), and tasks.

    texts: what a writer would copy, [N]. The store's texts are the strings that were embedded. words: [N] float64.
    """

    store: FactStore
    texts: Sequence[str]
    words: Float64
    cases: tuple[Case, ...]
    tokenizer: Tokenizer = golden

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def retriever(self) -> Retriever:
        """Over the store, shared by all runs."""
        return Retriever(self.store)

    @cached_property
    def units(self) -> npt.NDArray[np.float32]:
        """[N, D] unit rows, for baselines and for near-repeats."""
        rows = self.store.view().embeddings.astype(np.float32)
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))

    @cached_property
    def judge(self) -> TfIdf:
        """The word index of the texts without titles."""
        return TfIdf(self.texts)

    @cached_property
    def ngrams(self) -> list[npt.NDArray[np.uint64]]:
        """The distinct 6-grams of each text, hashed."""
        offsets, hashes = NGramGuard(tokenizer=self.tokenizer).ngram_hashes(self.texts)
        return [np.unique(hashes[a:b]) for a, b in pairwise(offsets)]


def load_corpus(
    folder: Path,
    *,
    embedding: str = "title",
    tasks: Path | None = None,
    queries: Path | None = None,
    tokenizer: str = "golden",
) -> Corpus:
    """The facts and tasks of a folder.

    The folder is either a store as `cdr ingest` leaves it, with tasks.json and queries.npz beside it, or holds
    facts.parquet (text, title, n_words, path, pos), facts_EMBEDDING_minilm_f16.npy, tasks_dev.json and
    queries_dev_minilm_f16.npz; rows from the first one of the corpus "blog" on are left out there. embedding: "title"
    takes the vectors, and as the store's texts the strings, of "title: text", "text" those of the text alone.
    tokenizer: a name in TOKENIZERS. tasks, queries: other files.

    Raises FileError for what is wrong in a file, OSError where one cannot be opened.
    """
    if embedding not in EMBEDDINGS:
        raise ValueError(f"embedding: expected one of {', '.join(EMBEDDINGS)}, got {embedding!r}")
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"tokenizer: expected one of {', '.join(TOKENIZERS)}, got {tokenizer!r}")
    if (folder / "facts.parquet").is_file():
        store, texts, words = _dataset(folder, embedding, TOKENIZERS[tokenizer])
        names = ("tasks_dev.json", "queries_dev_minilm_f16.npz")
    else:
        if embedding != "title":
            raise ValueError(f"embedding: expected 'title', the one that {folder} has, got {embedding!r}")
        saved = FactStore.load(folder).view()
        embedded, rows = saved.texts(range(saved.rows)), range(saved.rows)
        store = FactStore(saved.dim, embedding_model=saved.embedding_model, tokenizer=TOKENIZERS[tokenizer])
        known = saved.facts(rows)
        store.add(
            [fact.id for fact in known],
            embedded,
            saved.embeddings,
            importance=saved.importance,
            source=[fact.source for fact in known],
            position=[fact.position for fact in known],
        )
        texts = embedded
        if (folder / "facts.jsonl").is_file():  # without the titles that were embedded
            plain = {id: t for b in read_facts(folder / "facts.jsonl") for id, t in zip(b.ids, b.texts, strict=True)}
            texts = [plain.get(fact.id, fact.text) for fact in saved.facts(range(saved.rows))]
        words = np.array([len(text.split()) for text in texts], np.float64)
        names = ("tasks.json", "queries.npz")
    tasks = folder / names[0] if tasks is None else tasks
    queries = folder / names[1] if queries is None else queries
    cases = tuple(_cases(tasks, queries, store, words))
    return Corpus(store, texts, words, cases, TOKENIZERS[tokenizer])


def _dataset(folder: Path, embedding: str, tokenizer: Tokenizer) -> tuple[FactStore, list[str], Float64]:
    path = folder / "facts.parquet"
    pq = import_module("pyarrow.parquet")
    table = pq.read_table(path, columns=["title", "n_words", "corpus"])
    main = [corpus != _LATER_CORPUS for corpus in table["corpus"].to_pylist()]
    n = main.index(False) if False in main else len(main)
    if any(main[n:]):
        raise FileError(f"{path}: corpus: expected {_LATER_CORPUS!r} to come last")
    spec = str(folder / f"facts_{embedding}_minilm_f16.npy")
    rows = read_array(spec, 2)
    if len(rows) != len(main):
        raise FileError(f"{spec}: expected {len(main)} rows (one per fact), got {len(rows)}")
    store = FactStore(rows.shape[1], embedding_model=MODEL, tokenizer=tokenizer)
    titles = table["title"].to_pylist()
    texts: list[str] = []
    for batch in read_facts(path, stop=n):
        at = slice(batch.first, batch.first + len(batch))
        embedded = [f"{t}: {x}" if embedding == "title" else x for t, x in zip(titles[at], batch.texts, strict=True)]
        store.add(batch.ids, embedded, rows[at], source=batch.source, position=batch.position)
        texts += batch.texts
    return store, texts, np.array(table["n_words"].to_pylist()[:n], np.float64)


def _cases(tasks: Path, queries: Path, store: FactStore, words: Float64) -> Iterable[Case]:
    checked = read_tasks(tasks)
    raw = json.loads(tasks.read_text("utf-8-sig"))
    view = store.view()
    for task, record in zip(checked, raw.get("tasks", [raw]), strict=True):
        query, subs = read_task_vectors(queries, task, store.dim)

        def rows(ids: Iterable[object], where: str, task: Task = task) -> list[int]:
            try:
                return [view.row_of(str(i)) for i in ids]
            except KeyError as error:
                raise FileError(f"{tasks}: task {task.id!r}: {where}: no fact {error} in the store") from None

        labels: dict[int, set[int]] = {}
        for j, item in enumerate(task.items):
            for row in rows(item.fact_ids or (), f"fact_ids of {item.id!r}"):
                labels.setdefault(row, set()).add(j)
        about = {row: frozenset(js) for row, js in labels.items()}
        own = [sum(words[row] for row in about if j in about[row]) for j in range(len(task.items))]
        known = [item.expected_words for item in task.items]
        others = rows(record.get("other_on_page_ids", ()), "other_on_page_ids")
        linked = [str(i) for i in record.get("linked_ids", ()) if str(i) in store]
        yield Case(
            task=task,
            query=query,
            subs=subs,
            labels=about,
            lenient=frozenset([*about, *others, *rows(linked, "linked_ids")]),
            expected=np.array([o if e is None else e for o, e in zip(own, known, strict=True)], np.float64),
            kind=str(record.get("kind", "")),
        )


class Run:
    """One task on its way through its windows: what was packed, and what a writer made of it.

    used: by row, the last window (1-based) that packed it. depth: reported so far, [S], at most 1 each.
    """

    def __init__(self, corpus: Corpus, case: Case, seed: int) -> None:
        self.corpus = corpus
        self.case = case
        self.k = case.task.k
        self.windows = case.task.windows
        self.window = 0
        self.used: dict[int, int] = {}
        self.depth = np.zeros(len(case.subs))
        self.addressed: list[tuple[int, float, int]] = []
        self.random = np.random.default_rng([seed, zlib.crc32(case.id.encode())])

    @property
    def remaining(self) -> list[int]:
        """Sub-queries that no window addressed; all of them once there are none."""
        done = {j for j, _, _ in self.addressed}
        return [j for j in range(len(self.depth)) if j not in done] or list(range(len(self.depth)))

    @property
    def fresh(self) -> npt.NDArray[np.bool_]:
        """[N]: not packed yet."""
        fresh = np.ones(len(self.corpus), np.bool_)
        fresh[list(self.used)] = False
        return fresh

    @cached_property
    def relevance(self) -> npt.NDArray[np.float32]:
        """[N] cosines to the query."""
        return _cosines(self.corpus.units, self.case.query[None])[:, 0]

    @cached_property
    def similarity(self) -> npt.NDArray[np.float32]:
        """[N, S] cosines to the sub-queries."""
        return _cosines(self.corpus.units, self.case.subs)

    @cached_property
    def lexical(self) -> Float64:
        """[N, S] of the judge that knows words only."""
        return self.corpus.judge.similarity([item.text for item in self.case.task.items])

    def output(self, rows: Sequence[int]) -> str:
        """The packed facts with a quarter of their tokens dropped at random."""
        kept: list[str] = []
        for row in rows:
            tokens = self.corpus.tokenizer(self.corpus.texts[row])
            keep = self.random.random(len(tokens)) >= DROPPED
            kept += [token for token, stays in zip(tokens, keep, strict=True) if stays]
        return " ".join(kept)

    def close(self, rows: Sequence[int], addressed: Sequence[tuple[int, float]]) -> None:
        """The window is over."""
        self.window += 1
        self.used.update(dict.fromkeys(rows, self.window))
        for j, depth in addressed:
            self.addressed.append((j, depth, self.window))
            self.depth[j] = min(1.0, self.depth[j] + depth)


def _cosines(units: npt.NDArray[np.float32], vectors: Float64) -> npt.NDArray[np.float32]:
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return np.asarray(units @ unit.T)


# Writers: what a window addressed, [(sub-query, depth)].

Writer: TypeAlias = Callable[[Run, Sequence[int]], list[tuple[int, float]]]


def write_plan(run: Run, rows: Sequence[int]) -> list[tuple[int, float]]:
    """The next sub-queries in the task's order at depth .9, whatever the envelope holds."""
    pace = _pace(run)
    return [(j, 0.9) for j in range(len(run.depth))[run.window * pace : (run.window + 1) * pace]]


def write_greedy(run: Run, rows: Sequence[int]) -> list[tuple[int, float]]:
    """The sub-queries with most labelled words in the envelope; a fact written before counts no words."""
    written = np.zeros(len(run.depth))
    for row in rows:
        if row not in run.used:
            for j in run.case.labels.get(row, ()):
                written[j] += run.corpus.words[row] / len(run.case.labels[row])
    return _most_written(run, written)


def write_lexical(run: Run, rows: Sequence[int]) -> list[tuple[int, float]]:
    """As greedy, but a fact counts for the sub-query whose words it shares most: no labels, no embeddings."""
    written = np.zeros(len(run.depth))
    for row in rows:
        best = int(run.lexical[row].argmax())
        if run.lexical[row, best] > _LEAST_SIMILARITY and row not in run.used:
            written[best] += run.corpus.words[row]
    return _most_written(run, written)


def _pace(run: Run) -> int:
    return max(1, math.ceil(len(run.depth) / run.windows))


def _most_written(run: Run, written: Float64) -> list[tuple[int, float]]:
    expected = run.case.expected
    share = np.divide(written, expected, out=np.where(written > 0, 1.0, 0.0), where=expected > 0)
    most = np.argsort(-written, kind="stable")[: _pace(run)].tolist()
    return [(j, float(min(0.9, share[j]))) for j in most if written[j] > 0 and share[j] >= _LEAST_DEPTH]


WRITERS: Mapping[str, Writer] = {"greedy": write_greedy, "lexical": write_lexical, "plan": write_plan}


# Methods: who picks the rows of a window. `start` is called once per run.


class Method:
    """Picks each window's facts. A baseline is a function of the run."""

    def __init__(self, name: str, pick: Callable[[Run], Sequence[int]]) -> None:
        self.name = name
        self._pick = pick

    def start(self, corpus: Corpus, case: Case) -> Method:
        """What picks for one run."""
        return self

    def pick(self, run: Run) -> list[int]:
        """Rows for the next window, best first, at most the task's k."""
        return [int(row) for row in self._pick(run)]

    def close(self, run: Run, report: WindowReport, output: str) -> None:
        """The window was written."""


class Ranked(Method):
    """The product: a session made with `settings`, `cdr_rank`, `pack_facts` and `Session.update`."""

    def __init__(self, name: str, settings: Mapping[str, Any], pack: str) -> None:
        super().__init__(name, lambda run: ())
        self.settings = settings
        self.pack = pack

    def start(self, corpus: Corpus, case: Case) -> Method:
        return _RankedRun(self.name, self.settings, self.pack, corpus, case)


class _RankedRun(Ranked):
    """Mode "spec" pulls from the second window on, also where the first one addressed nothing, as the recorded
    experiment does. That lies between the two readings of R1, so window 1 has a session of its own."""

    def __init__(self, name: str, settings: Mapping[str, Any], pack: str, corpus: Corpus, case: Case) -> None:
        super().__init__(name, settings, pack)
        self._corpus = corpus
        self._case = case
        self._session = self._first = self._made(settings)
        if settings["mode"] == "spec":
            self._session = self._made({**settings, "first_window_pull": True})

    def _made(self, settings: Mapping[str, Any]) -> Session:
        case, model = self._case, self._corpus.store.embedding_model
        return Session(case.sub_queries, embedding_model=model, max_windows=case.task.windows, **settings)

    def pick(self, run: Run) -> list[int]:
        session = self._session if run.window else self._first
        k = run.k if self.pack == "greedy" else None
        ranking = cdr_rank(self._case.query, self._corpus.retriever, session, k=k)
        self._envelope = pack_facts(ranking, run.k, count_tokens=lambda text: 1, pack=self.pack)
        view = self._corpus.store.view()
        return [view.row_of(fact.id) for fact in self._envelope.facts]

    def close(self, run: Run, report: WindowReport, output: str) -> None:
        model = self._corpus.store.embedding_model
        self._session.update(report, output, envelope=self._envelope, embedding_model=model)


def ranked(
    corpus: Corpus, *, mode: str = "spec", guard: bool | None = None, pack: str | None = None, **settings: Any
) -> Ranked:
    """The method whose sessions have these settings. guard None: on for mode "spec", else off. pack: "greedy" or
    "need"; None is "need" for mode "calibrated", else "greedy"."""
    on = mode == "spec" if guard is None else guard
    made = NGramGuard(tokenizer=corpus.tokenizer) if on else False
    packing = ("greedy" if mode == "spec" else "need") if pack is None else pack
    parts = [mode, *(["need"] if packing == "need" else []), *(["guard"] if on else [])]
    return Ranked(" + ".join(parts), {"mode": mode, "guard": made, **settings}, packing)


def _top(score: npt.NDArray[Any], k: int, allowed: npt.NDArray[np.bool_] | None = None) -> Int64:
    """Rows of the k largest scores, best first, equal ones by row."""
    rows = np.arange(len(score)) if allowed is None else np.flatnonzero(allowed)
    if k < len(rows):
        cut = np.partition(score[rows], len(rows) - k)[len(rows) - k]
        rows = rows[score[rows] >= cut]
    return np.asarray(rows[np.lexsort((rows, -score[rows]))][:k])


def _listed(rows: Int64) -> list[int]:
    listed: list[int] = rows.tolist()
    return listed


def pick_relevance(run: Run) -> Sequence[int]:
    """The nearest to the query."""
    return _listed(_top(run.relevance, run.k))


def pick_relevance_excluded(run: Run) -> Sequence[int]:
    """The nearest to the query among what was never packed."""
    return _listed(_top(run.relevance, run.k, run.fresh))


def pick_round_robin(run: Run) -> Sequence[int]:
    """The nearest to each sub-query not addressed yet, in turn, without what was packed: the practitioner's way."""
    lists = [_top(run.similarity[:, j], 4 * run.k, run.fresh).tolist() for j in run.remaining]
    taken: dict[int, None] = {}
    while len(taken) < run.k and any(lists):
        for rows in lists:
            while rows and rows[0] in taken:
                rows.pop(0)
            if rows and len(taken) < run.k:
                taken[rows.pop(0)] = None
    return list(taken)


def pick_mmr(run: Run, weight: float = 0.5, pool: int = 200) -> Sequence[int]:
    """Maximal marginal relevance over the nearest 200 that were never packed."""
    found = _top(run.relevance, pool, run.fresh)
    units, relevance = run.corpus.units[found], run.relevance[found]
    nearest = np.zeros(len(found), np.float32)
    chosen: list[int] = []
    left = np.ones(len(found), np.bool_)
    for _ in range(min(run.k, len(found))):
        best = int(np.where(left, weight * relevance - (1 - weight) * nearest, -np.inf).argmax())
        left[best] = False
        chosen.append(int(found[best]))
        nearest = np.maximum(nearest, units @ units[best])
    return chosen


def pick_xquad(run: Run, weight: float = 0.5, low: float = 0.2, high: float = 0.7, pool: int = 500) -> Sequence[int]:
    """xQuAD: relevance mixed with how much of each sub-query's remaining share a fact serves; packed facts count."""

    def probability(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.clip((x - low) / (high - low), 0, 1)

    found = _top(np.maximum(run.relevance, run.similarity.max(1)), pool, run.fresh)
    serves, relevance = probability(run.similarity[found]), probability(run.relevance[found])
    open_share = np.ones(len(run.depth))
    for row in run.used:
        open_share *= 1 - probability(run.similarity[row])
    chosen: list[int] = []
    left = np.ones(len(found), np.bool_)
    for _ in range(min(run.k, len(found))):
        share = open_share / max(float(open_share.max()), 1e-12)
        value = (1 - weight) * relevance + weight * (serves @ share) / max(float(share.sum()), 1e-12)
        best = int(np.where(left, value, -np.inf).argmax())
        left[best] = False
        chosen.append(int(found[best]))
        open_share = open_share * (1 - serves[best])
    return chosen


def _pick_pyversity(strategy: str) -> Callable[[Run], Sequence[int]]:
    diversify = import_module("pyversity").diversify

    def pick(run: Run, pool: int = 200) -> Sequence[int]:
        found = _top(run.relevance, pool, run.fresh)
        result = diversify(run.corpus.units[found], run.relevance[found], run.k, strategy=strategy, diversity=0.5)
        return _listed(found[np.asarray(result.indices)])

    return pick


@dataclass(slots=True)
class _ForeignFact:
    id: int
    embedding: list[float]


def _pick_crprotocol() -> Callable[[Run], Sequence[int]]:
    rank = import_module("crp.envelope.cdr").cdr_rank
    sets = import_module("crp.state.coverage_set")

    def pick(run: Run, gate: float = 0.55, pool: int = 400) -> Sequence[int]:
        found = _top(run.relevance, pool, run.relevance >= gate)
        covered = sets.CoverageSet("m")
        for window in range(1, run.window + 1):
            entries = [
                {"id": str(j), "text": "", "embedding": run.case.subs[j].tolist(), "depth_weight": depth}
                for j, depth, when in run.addressed
                if when == window
            ]
            if entries:
                covered.update(entries, window_number=window)
        if run.window:
            done = {j for j, _, _ in run.addressed}
            left = [j for j in range(len(run.depth)) if j not in done]
            covered.set_residual([sets.ResidualItem("", run.case.subs[j].tolist(), str(j)) for j in left])
        facts = [_ForeignFact(int(i), run.corpus.units[i].tolist()) for i in found]
        result = rank(facts, run.case.query.tolist(), covered, min_relevance=gate)
        return [scored.fact.id for scored in result.ranked[: run.k]]

    return pick


_BASELINES: Mapping[str, Callable[[], Callable[[Run], Sequence[int]]]] = {
    "relevance": lambda: pick_relevance,
    "relevance_excluded": lambda: pick_relevance_excluded,
    "mmr": lambda: pick_mmr,
    "round_robin": lambda: pick_round_robin,
    "xquad": lambda: pick_xquad,
    "pyversity_dpp": lambda: _pick_pyversity("dpp"),
    "pyversity_cover": lambda: _pick_pyversity("cover"),
    "crprotocol": _pick_crprotocol,
}


def baselines(names: Iterable[str] | None = None) -> list[Method]:
    """The baselines of these names; None: all that can be had here (pyversity and crprotocol where installed)."""
    made = []
    for name in _BASELINES if names is None else names:
        if name not in _BASELINES:
            raise ValueError(f"baselines: expected some of {', '.join(_BASELINES)}, got {name!r}")
        try:
            made.append(Method(name, _BASELINES[name]()))
        except ImportError as error:
            if names is not None:
                package = name.partition("_")[0]
                raise ImportError(f"baseline {name!r}: {error}; pip install {package}") from None
    return made


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
        reached |= {int(run.lexical[row].argmax()) for row in rows if run.lexical[row].max() > _LEAST_SIMILARITY}
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


# Summaries


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
