"""What the experiment of `quality` is made on: a store with tasks whose sub-queries have labelled facts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cdr_kernel.exceptions import FileError
from cdr_kernel.files._files import Task, read_array, read_facts, read_task_vectors, read_tasks
from cdr_kernel.retrieve import Retriever
from cdr_kernel.retrieve._bm25 import TfIdf
from cdr_kernel.session import SubQuery
from cdr_kernel.store import FactStore
from cdr_kernel.store._format import KIND
from cdr_kernel.text import NGramGuard, Tokenizer, tokenize
from cdr_kernel.validation._arrays import Float64

EMBEDDINGS = ("title", "text")
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
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
    split = TOKENIZERS[tokenizer]
    if (folder / "facts.parquet").is_file():
        store, texts, words = _dataset(folder, embedding, split)
        files = [folder / "tasks_dev.json", folder / "queries_dev_minilm_f16.npz"]
        return _corpus(store, texts, words, files, tasks, queries, split)
    if embedding != "title":
        raise ValueError(f"embedding: expected 'title', the one that {folder} has, got {embedding!r}")

    def read(manifest: Mapping[str, Any]) -> Corpus:
        saved = FactStore.load(folder)
        store, texts, words = _ingested(folder, saved, split)
        files = [folder / "tasks.json", folder / "queries.npz"]
        found = _corpus(store, texts, words, files, tasks, queries, split)
        KIND.check_same(folder, manifest["data"])  # else some of it may be of the store before, some of this one
        return found

    return KIND.load(folder, read)


def _corpus(
    store: FactStore,
    texts: list[str],
    words: Float64,
    files: Sequence[Path],
    tasks: Path | None,
    queries: Path | None,
    tokenizer: Tokenizer,
) -> Corpus:
    """A corpus whose tasks and queries are in these files, or in others where those are given."""
    asked = (files[0] if tasks is None else tasks, files[1] if queries is None else queries)
    return Corpus(store, texts, words, tuple(_cases(*asked, store, words)), tokenizer)


def _ingested(folder: Path, saved: FactStore, tokenizer: Tokenizer) -> tuple[FactStore, list[str], Float64]:
    """The facts that `cdr ingest` saved, their texts without titles where they are there, and how long these are."""
    view = saved.view()
    rows = range(view.rows)
    store = FactStore(view.dim, embedding_model=view.embedding_model, tokenizer=tokenizer)
    known = view.facts(rows)
    store.add(
        [fact.id for fact in known],
        [fact.text for fact in known],
        view.embeddings,
        importance=view.importance,
        source=[fact.source for fact in known],
        position=[fact.position for fact in known],
    )
    texts = [fact.text for fact in known]
    if KIND.beside(folder / "facts.jsonl").is_file():  # without the titles that were embedded
        plain = {id: t for b in read_facts(folder / "facts.jsonl") for id, t in zip(b.ids, b.texts, strict=True)}
        texts = [plain.get(fact.id, fact.text) for fact in known]
    return store, texts, np.array([len(text.split()) for text in texts], np.float64)


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
    raw = json.loads(KIND.beside(tasks).read_text("utf-8-sig"))
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
