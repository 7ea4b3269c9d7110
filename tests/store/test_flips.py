"""One flipped bit in any file that answers come from: an error that names the file, or the answer of the whole files.

Each try copies a folder, flips one random bit of one random file in it, and opens and asks it as a program would. A
file may have bytes that mean nothing (padding, old versions, a note of Lance for itself): then the answer is the same.
"""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from fact_stores import flip

from cdr_kernel import DamagedFileError, FactStore, NGramGuard, Retriever, Session, SubQuery, cdr_rank
from cdr_kernel.files import _files
from cdr_kernel.files._files import json_text, read_facts, read_task_vectors, read_tasks
from cdr_kernel.retrieve import _retriever
from cdr_kernel.shard import ShardedRetriever, partition
from cdr_kernel.shard import _partition as partition_module
from cdr_kernel.shard._sharded_retriever import ShardedStore
from cdr_kernel.store import _checksums
from cdr_kernel.store import _fact_store as store_module

pytest.importorskip("lance", reason="needs the extra store")
pytest.importorskip("safetensors", reason="needs the extra store")

from cdr_kernel.durable import DurableStore

DIM, N, MODEL = 24, 400, "toy"
WORDS = ["pod", "node", "service", "volume", "route", "policy", "quota", "image"]


def sub_queries():
    rows = np.random.default_rng(7).standard_normal((3, DIM))
    return [SubQuery(f"s{i}", f"S {i}", WORDS[i], row) for i, row in enumerate(rows)]


QUERY = np.random.default_rng(8).standard_normal(DIM)
WHERE = {"language": ["en", None], "year": [2001, 2002, 2003]}


def facts(n=N, first=0):
    r = np.random.default_rng(first)
    return {
        "ids": [f"f{first + i}" for i in range(n)],
        "texts": [" ".join(r.choice(WORDS, 8)) for _ in range(n)],
        "embeddings": r.standard_normal((n, DIM)),
        "importance": r.random(n) + 0.5,
        "source": [None if i % 7 == 0 else f"doc{i % 9}.md" for i in range(n)],
        "position": [None if i % 5 == 0 else i for i in range(n)],
        "attributes": {
            "language": [["en", "de", None][i % 3] for i in range(n)],
            "year": [2000 + i % 6 for i in range(n)],
            "weight": [i / 8 for i in range(n)],
            "draft": [i % 2 == 0 for i in range(n)],
        },
    }


def ranked(retriever, **keywords):
    """All that a ranking says, after a window that wrote something."""
    guard = NGramGuard(2)
    guard.update("pod node service volume")
    session = Session(sub_queries(), embedding_model=MODEL, min_relevance=0.1, guard=guard)
    ranking = cdr_rank(QUERY, retriever, session, **keywords)
    return tuple(ranking.facts), ranking.score.tobytes(), ranking.ngram_overlap.tobytes(), ranking.qualified


def answers(store):
    """What a store answers, by every kind of file."""
    retriever = Retriever(store)
    retriever.codes(store.view())
    if retriever._coding is not None:
        retriever._coding.join()
    found = retriever.search(QUERY, min_relevance=0.2)
    view = store.view()
    rows = np.flatnonzero(view.alive)
    return (
        ranked(retriever),
        ranked(retriever, k=5, where=WHERE),
        (view.ids_at(found.rows), found.relevance.tobytes()),
        (view.facts(rows), view.take(rows).tobytes(), store.next_sequence, store.embedding_model),
    )


@dataclass
class Kind:
    """A kind of folder: made once, asked after every flip. flipped: patterns of the files that a try may take."""

    name: str
    make: object
    ask: object
    flipped: tuple[str, ...] = ("**/*",)
    repairs: bool = False  # whether damage is put right, so that no error may come
    errors: float = 0.3  # the least share of the flips that must be errors, for a test that does flip something


def plain(folder):
    store = FactStore(DIM, embedding_model=MODEL)
    store.add(**facts())
    store.remove(["f3", "f77"])
    store.save(folder)


def with_codes(folder):
    plain(folder)
    Retriever(FactStore.load(folder)).save()


def durable(folder, snapshot=False):
    with DurableStore.create(folder, DIM, embedding_model=MODEL) as store:
        store.add(**facts(250), expires_at=[1.0 if i % 50 == 0 else None for i in range(250)])
        store.remove(["f3", "f77"])
        store.quarantine(["f9"], "odd")
        if snapshot:
            store.snapshot()
        store.add(**facts(60, 250))
        store.upsert(["f20"], ["pod quota"], QUERY[None])
        store.release(["f9"])
        store.quarantine(["f10"], "odd")


def asked_durable(folder):
    with DurableStore.open(folder) as store:
        try:
            given = answers(store.facts)
        except DamagedFileError:  # of a snapshot that is mapped and not checked yet: it is put right in a moment
            store.verify()
            given = answers(store.facts)
        return given, store.quarantined(), store.facts.ids, store.facts.whole().ids


def shards(folder):
    store = FactStore(DIM, embedding_model=MODEL)
    store.add(**facts())
    partition(store, folder, shards=3)


def asked_shards(folder):
    with ShardedStore.open(folder, verify=False) as store:
        retriever = ShardedRetriever(store)
        return ranked(retriever), ranked(retriever, k=5, where=WHERE), store.get(store.ids), store.version


def ingested(folder):
    store = FactStore(DIM, embedding_model=MODEL)
    given = facts(40)
    store.add(**given)
    items = [{"id": s.id, "label": s.label, "text": s.text} for s in sub_queries()]
    subs = np.stack([s.embedding for s in sub_queries()])
    np.savez(folder.with_name("q.npz"), **{"0:query": QUERY, "0:subs": subs})
    lines = [{"id": id, "text": text} for id, text in zip(given["ids"], given["texts"], strict=True)]
    beside = {
        "facts.jsonl": _files.json_lines(lines),
        "tasks.json": json_text({"schema": 1, "tasks": [{"id": "t", "query": "q", "sub_queries": items}]}),
    }
    content = {name: text.encode() for name, text in beside.items()}
    store.save(folder, beside={**content, "queries.npz": folder.with_name("q.npz").read_bytes()})


def asked_ingested(folder):
    (task,) = read_tasks(folder / "tasks.json")
    query, subs = read_task_vectors(folder / "queries.npz", task, DIM)
    texts = [text for batch in read_facts(folder / "facts.jsonl") for text in batch.texts]
    return task, query.tobytes(), subs.tobytes(), texts, answers(FactStore.load(folder))


def exported(folder):
    durable(folder / "d")
    with DurableStore.open(folder / "d") as store:
        store.export(folder / "facts.safetensors")


def asked_exported(folder):
    with DurableStore.from_export(folder / "facts.safetensors", folder / "new") as store:
        return answers(store.facts), store.quarantined()


KINDS = [
    Kind("store", plain, lambda folder: answers(FactStore.load(folder))),
    Kind("codes", with_codes, lambda folder: answers(FactStore.load(folder)), ("scan*", "scan*/*"), repairs=True),
    Kind("record", durable, asked_durable, errors=0.1),
    Kind("snapshot", lambda f: durable(f, snapshot=True), asked_durable, ("snapshot/**/*",), repairs=True),
    Kind("shards", shards, asked_shards),
    Kind("beside", ingested, asked_ingested, ("facts.jsonl", "tasks.json", "queries.npz", "manifest.json")),
    Kind("export", exported, asked_exported, ("facts.safetensors",)),
]


@pytest.fixture
def small(monkeypatch):
    """Small stores behave as large ones do: they have codes, several blocks, and are checked block by block."""
    monkeypatch.setattr(_checksums, "BLOCK", 2048)
    monkeypatch.setattr(store_module, "_check_behind", lambda files: None)
    for module in (_retriever, partition_module):
        monkeypatch.setattr(module, "WORTH_CODES", 100)


def files_of(folder, patterns):
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file() and path.stat().st_size}
    return sorted(path for path in found if path.name != "save.lock")


def silently_wrong(kind, tries, tmp_path, monkeypatch):
    """Flips that gave another answer without a word, of so many; what came of the others."""
    whole, seen, wrong = tmp_path / "whole", Counter(), []
    kind.make(whole)
    r = np.random.default_rng(len(kind.name))
    there = files_of(whole, kind.flipped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shutil.copytree(whole, tmp_path / "copy")
        truth = kind.ask(tmp_path / "copy")
        for i in range(tries):
            monkeypatch.setattr(store_module, "_AT_ONCE", [0, 64 << 20][i % 2])  # as it is read, or at the load
            path = there[r.integers(len(there))]
            at, bit = int(r.integers(path.stat().st_size)), 1 << int(r.integers(8))
            shutil.rmtree(tmp_path / "copy")
            shutil.copytree(whole, tmp_path / "copy")
            flip(tmp_path / "copy" / path.relative_to(whole), at, bit)
            try:
                same, said = kind.ask(tmp_path / "copy") == truth, ""
            except (ValueError, OSError) as error:
                same, said = False, str(error)
            seen["same" if same else "error"] += 1
            if not same and path.name not in said:
                wrong.append((str(path.relative_to(whole)), at, bit, said))
    return wrong, seen


def check(kind, tries, tmp_path, monkeypatch):
    wrong, seen = silently_wrong(kind, tries, tmp_path, monkeypatch)
    assert wrong == []
    if kind.repairs:
        assert seen["same"] == tries
    else:
        assert seen["error"] >= kind.errors * tries


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_flipped_bit_gives_no_other_answer(kind, small, tmp_path, monkeypatch):
    check(kind, 43, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_thousand_flipped_bits_give_no_other_answer(kind, small, tmp_path, monkeypatch):
    check(kind, 1000, tmp_path, monkeypatch)
