"""kill -9 at random moments of `cdr ingest`, `cdr index` and `partition`: the old thing or the new one opens whole.

A process that has imported everything forks one child per attempt, and kills most of them so many seconds after they
have begun to write. After each kill
what is in the folder must be what was there before or what the attempt was to make, with all its files of one save.
What killed attempts leave must not add up, and an attempt that nobody kills must succeed and leave nothing of theirs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

DIM, MODEL = 16, "toy"
BESIDE = ("facts.jsonl", "queries.npz", "tasks.json")


@cache
def vector(word):
    return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(DIM)


def embed(texts):
    """Sums of a random vector per word."""
    return np.array([sum(map(vector, text.lower().split())) for text in texts], np.float32)


def inputs(folder):
    """Documents, facts and stores of two kinds, a and b."""
    from cdr_kernel import FactStore

    for i, name in enumerate("ab"):
        docs = folder / f"docs-{name}"
        docs.mkdir()
        for page in range(3 + i):
            sections = []
            for heading in range(4 + i):
                sentences = [f"Sentence {n} of section {heading} in page {page} of {name}." for n in range(80)]
                sections.append(f"## Heading {heading}\n\n{' '.join(sentences)}\n")
            (docs / f"page-{page}.md").write_text(f"# Page {page}\n\n" + "\n".join(sections))
        ids = [f"{name}{n}" for n in range(400 + 100 * i)]
        rows = np.random.default_rng(i).standard_normal((len(ids), DIM)).astype(np.float32)
        np.save(folder / f"{name}.npy", rows)
        lines = [json.dumps({"id": id, "text": f"text of {id}", "source": f"s{n % 9}"}) for n, id in enumerate(ids)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        store = FactStore(DIM, embedding_model=MODEL)
        store.add(ids, [f"text of {id}" for id in ids], rows, source=[f"s{n % 9}" for n in range(len(ids))])
        store.save(folder / f"store-{name}")


def make(kind, name, folder, output):
    """One attempt, in the child."""
    from cdr_kernel import FactStore
    from cdr_kernel.cli import _app
    from cdr_kernel.shard import partition

    if kind == "ingest":
        _app.app(["ingest", str(folder / f"docs-{name}"), "-o", str(output), "--embed", MODEL], standalone_mode=False)
    elif kind == "partition":
        partition(FactStore.load(folder / f"store-{name}"), output, shards=2)
    else:
        vectors = ["--embeddings", str(folder / f"{name}.npy"), "--model", MODEL]
        durable = ["--durable"] if kind == "durable" else []
        _app.app(["index", str(folder / f"{name}.jsonl"), *vectors, "-o", str(output), *durable], standalone_mode=False)


def contents(kind, output):
    """All that is in the place, of one save and whole; None for nothing."""
    from cdr_kernel import FactStore, Retriever
    from cdr_kernel.quality._experiment import load_corpus
    from cdr_kernel.shard import ShardedStore

    manifest = {"partition": "partition.json", "durable": "facts.lance"}.get(kind, "manifest.json")
    if not (output / manifest).exists():
        return None  # the first attempt has not come to its end
    if kind == "partition":
        with ShardedStore.open(output) as shards:
            return shards.get(shards.ids)
    if kind == "durable":
        from cdr_kernel.durable import DurableStore

        with DurableStore.open(output, verify=True) as durable:
            return durable.facts.get(durable.facts.ids)
    store = FactStore.load(output)
    if kind == "ingest":
        corpus = load_corpus(output)
        assert corpus.store.ids == store.ids
        assert all(case.labels for case in corpus.cases)
        return store.get(store.ids), len(corpus.cases)
    first = store.view().embeddings[0]
    found = Retriever(store).search(first, min_relevance=-1.0).rows  # with the codes, where they are
    assert len(found) == len(store)
    return store.get(store.ids)


def serve(folder):
    """Make what is asked for in a child, and kill it; one line of JSON each way."""
    import cdr_kernel.cli
    import cdr_kernel.files._documents
    import cdr_kernel.retrieve
    import cdr_kernel.shard
    from cdr_kernel.files import _embedders

    _embedders.load_embedder = lambda model: embed
    cdr_kernel.retrieve._retriever.WORTH_CODES = cdr_kernel.shard._partition.WORTH_CODES = 64  # so that codes are saved
    for line in sys.stdin:
        kind, name, output, seconds, at_once = json.loads(line)
        begun, tell = os.pipe()
        child = os.fork()
        if child == 0:
            run(kind, name, folder, Path(output), tell)
        os.close(tell)
        if not at_once:
            os.read(begun, 1)  # until it makes its first folder, or ends
        start = time.monotonic()
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(begun)
        print(json.dumps([status, time.monotonic() - start]), flush=True)


def run(kind, name, folder, output, tell):
    """One attempt in a child, which tells when it begins to write."""

    def told(event, _):
        if event == "os.mkdir" and not said:
            said.append(os.write(tell, b"."))

    said, code = [], 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.addaudithook(told)
    try:
        make(kind, name, folder, output)
        code = 0
    finally:
        os._exit(code)


@pytest.fixture(scope="module")
def attempt(tmp_path_factory):
    """Makes an attempt: (exit status, seconds that it took from where it began to write)."""
    folder = tmp_path_factory.mktemp("inputs")
    inputs(folder)
    one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}  # no threads but the one that forks
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    with subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **one, "PYTHONPATH": path},
    ) as process:

        def ask(kind, name, output, seconds=None, at_once=False):
            process.stdin.write(json.dumps([kind, name, str(output), seconds, at_once]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def names_in(output):
    """What lies in the folder and beside it, without the random part of names."""
    beside = [path.name for path in output.parent.iterdir() if path != output]
    inside = [path.name for path in output.iterdir()] if output.exists() else []
    return Counter(name.rpartition("-")[0] if "-" in name else name for name in [*beside, *inside])


def kill_and_check(attempt, kind, folder, kills, seed):
    """Counts of what was there after a kill: nothing, the old, the new, or the new of an attempt that had ended."""
    rng, found, truth, took = random.Random(seed), Counter(), {}, {}
    clean = {}
    for name in "ab":
        output = folder / f"clean-{name}" / "there"
        output.parent.mkdir()
        status, took[name] = attempt(kind, name, output)
        assert status == 0
        truth[name], clean[name] = contents(kind, output), names_in(output)
    assert truth["a"] != truth["b"]
    output = folder / "killed" / "there"
    output.parent.mkdir()
    there = None
    for i in range(kills):
        name = "b" if there == "a" else "a"
        status, _ = attempt(kind, name, output, rng.uniform(0.0, 1.1) * took[name], rng.random() < 0.1)
        assert status in (0, -signal.SIGKILL)
        now = contents(kind, output)
        assert now in ([None] if there is None else [truth[there]]) + [truth[name]]
        found["nothing" if now is None else "ended" if status == 0 else "new" if now == truth[name] else "old"] += 1
        there = None if now is None else name if now == truth[name] else there
        left = names_in(output)
        assert sum(left.values()) <= 2 * sum(clean[name].values()) + 2, left  # one attempt's and no more
        if i % 5 == 4 or i == kills - 1 or (kind == "durable" and there):
            if kind == "durable" and there:  # which replaces nothing
                output.rename(folder / f"done-{i}")
                there = None
            name = "b" if there == "a" else "a"
            assert attempt(kind, name, output)[0] == 0
            assert contents(kind, output) == truth[name]
            assert names_in(output) == clean[name]
            there = name
            if kind == "durable":
                output.rename(folder / f"whole-{i}")
                there = None
    assert sum(found.values()) == kills
    return found


@pytest.mark.parametrize("kind", ["ingest", "index", "partition"])
def test_a_killed_save_leaves_the_old_or_the_new(attempt, tmp_path, kind):
    kill_and_check(attempt, kind, tmp_path, 10, 1)


def test_a_killed_durable_index_leaves_nothing_or_all(attempt, tmp_path):
    pytest.importorskip("lance", reason="needs the extra store")
    kill_and_check(attempt, "durable", tmp_path, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ingest", "index", "partition", "durable"])
def test_many_more_kills(attempt, tmp_path, kind):
    if kind == "durable":
        pytest.importorskip("lance", reason="needs the extra store")
    found = kill_and_check(attempt, kind, tmp_path, 60 if kind == "durable" else 200, 2)
    print(f"{kind}: {dict(sorted(found.items()))}")
    assert found.keys() >= ({"nothing", "ended"} if kind == "durable" else {"old", "ended"})


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
