"""kill -9 at random moments: every acknowledged change is there, no half of another, and ranks equal a store made anew.

Two writers at a time change one store until they are killed. Each says on its standard output what it begins and what
was acknowledged; after the kill the store must be what was acknowledged, with or without the whole of what had begun.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

DIM, MODEL, WRITERS = 16, "toy", 2


def vector(fact_id, revision):
    return np.random.default_rng(zlib.crc32(f"{fact_id} {revision}".encode())).normal(size=DIM).astype(np.float32)


def text(fact_id, revision):
    return f"revision {revision} of {fact_id} " + "and so on " * (revision % 5)


def columns(ids, revision):
    return {
        "ids": ids,
        "texts": [text(i, revision) for i in ids],
        "embeddings": np.stack([vector(i, revision) for i in ids]),
        "importance": [1.0 + revision % 3] * len(ids),
        "source": [f"source {revision % 7}"] * len(ids),
        "attributes": {"revision": [revision] * len(ids)},
    }


def applied(model, operation):
    """The model after an operation: {id: (revision, quarantined)} in the order of the facts' numbers."""
    kind, ids, revision = operation
    after = dict(model)
    for i in ids:
        held = i in after and after[i][1]
        if kind == "quarantine":
            after[i] = (after[i][0], True)
            continue
        was = after.pop(i, None)
        if kind in ("add", "upsert"):
            after[i] = (revision, held)
        elif kind == "release":
            after[i] = (was[0], False)
    return after


def planned(rng, model, name, revision):
    """The next operation of a writer that left its facts as in the model."""
    mine = list(model)
    held = [i for i in mine if model[i][1]]
    kind = rng.choices(
        ["add", "upsert", "remove", "quarantine", "release", "snapshot", "compact"], [30, 20, 14, 8, 8, 10, 10]
    )[0]
    if kind == "add":
        return kind, [f"{name}-{revision}-{i}" for i in range(rng.randint(1, 60))], revision
    if kind == "upsert" and mine:
        return kind, [*rng.sample(mine, min(len(mine), rng.randint(1, 20))), f"{name}-{revision}-new"], revision
    if kind in ("remove", "quarantine") and mine:
        return kind, rng.sample(mine, min(len(mine), rng.randint(1, 15 if kind == "remove" else 4))), revision
    if kind == "release" and held:
        return kind, rng.sample(held, min(len(held), 2)), revision
    return ("compact" if kind == "compact" else "snapshot"), [], revision


def write_on(path, name, seed):
    """The writer: opens the store and changes it until it is killed."""
    from cdr_kernel.durable import DurableStore

    rng = random.Random(seed)
    print(json.dumps(["begin", ["open", [], 0]]), flush=True)
    store = DurableStore.open(path)
    rows = store.facts.get([i for i in store.facts.ids if i.startswith(name)])
    model = {fact.id: (fact.attributes["revision"], False) for fact in rows}
    model |= {i: (0, True) for i in store.quarantined() if i.startswith(name)}
    print(json.dumps(["done", ["open", [], 0]]), flush=True)
    revision = seed * 1000
    while True:
        revision += 1
        operation = planned(rng, model, name, revision)
        kind, ids, _ = operation
        print(json.dumps(["begin", operation]), flush=True)
        if kind in ("add", "upsert"):
            getattr(store, kind)(**columns(ids, revision))
        elif kind in ("remove", "quarantine", "release"):
            getattr(store, kind)(ids)
        else:
            getattr(store, kind)()
        print(json.dumps(["done", operation]), flush=True)
        model = applied(model, operation)


class Writer:
    """A process that writes, and what it said."""

    def __init__(self, path, name, seed):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
        command = [sys.executable, __file__, str(path), name, str(seed)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.name, self.lines, self.opened = name, [], threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
            if self.lines[-1] == ["done", ["open", [], 0]]:
                self.opened.set()
        self.opened.set()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait() == -signal.SIGKILL, self.process.stderr.read()  # else it ended by itself: an error
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()

    def outcomes(self, model):
        """(models that may hold now, what was under way)."""
        for said, operation in self.lines:
            if said == "done":
                model = applied(model, operation)
        if self.lines and self.lines[-1][0] == "begin":
            under_way = self.lines[-1][1]
            return [model, applied(model, under_way)], under_way[0]
        return [model], "between"


def check(path, candidates):
    """The store is one of the candidates, whole, from its snapshot and from its record; returns which."""
    from cdr_kernel import FactStore, Retriever, Session, SubQuery, cdr_rank
    from cdr_kernel.durable import DurableStore

    snapshot, aside = path / "snapshot", path.parent / "aside"
    with DurableStore.open(path, verify=True) as store:
        assert store.verify() is None
        quarantined = set(store.quarantined())
        facts = store.facts
        view = facts.view()
        rows = np.flatnonzero(view.alive)
        found = view.facts(rows)
        for fact, row in zip(found, view.take(rows), strict=True):  # no half-fact
            revision = fact.attributes["revision"]
            np.testing.assert_array_equal(row, vector(fact.id, revision))
            expected = (text(fact.id, revision), 1.0 + revision % 3, f"source {revision % 7}")
            assert (fact.text, fact.importance, fact.source) == expected
        state = {fact.id: (fact.attributes["revision"], False) for fact in found}
        sequences = [fact.sequence for fact in found]
        assert sequences == sorted(set(sequences))
        fitting = []
        for candidate in candidates:
            merged = {i: value for part in candidate for i, value in part.items()}
            live = {i: value for i, value in merged.items() if not value[1]}
            if live == state and quarantined == merged.keys() - live.keys():
                fitting.append(candidate)
        assert fitting, "acknowledged changes are missing, or half of one is there"
        for part in fitting[0]:  # each writer's facts in the order it put them in
            mine = [i for i, (_, held) in part.items() if not held]
            assert [fact.id for fact in found if fact.id in part] == mine
        if snapshot.exists():
            snapshot.rename(aside)
        with DurableStore.open(path) as rebuilt:
            stores = [facts, rebuilt.facts]
        if aside.exists():
            aside.rename(snapshot)
        plain = FactStore(DIM, embedding_model=MODEL)
        for fact in found:
            plain.add(**columns([fact.id], fact.attributes["revision"]))
        rankings = []
        for each in (*stores, plain):
            session = Session([SubQuery("s", "S", "s", vector("s", 0))], embedding_model=MODEL, min_relevance=0.0)
            rankings.append(cdr_rank(vector("q", 0), Retriever(each), session, k=50))
        for ranking in rankings[1:]:
            assert ranking.ids == rankings[0].ids
            np.testing.assert_array_equal(ranking.score, rankings[0].score)
    return fitting[0]


def kill_and_check(folder, kills, seed):
    """Counts of what was under way when a writer was killed."""
    from cdr_kernel.durable import DurableStore

    rng = random.Random(seed)
    path = folder / "store"
    DurableStore.create(path, DIM, embedding_model=MODEL).close()
    models = tuple({} for _ in range(WRITERS))
    killed, acknowledged, largest = Counter(), 0, 0
    for round_ in range(kills // WRITERS):
        writers = [Writer(path, f"w{i}", seed * 100_000 + round_ * WRITERS + i + 1) for i in range(WRITERS)]
        if rng.random() < 0.9:
            for writer in writers:
                writer.opened.wait(60)
            time.sleep(rng.uniform(0.0, 0.8))
        else:
            time.sleep(rng.uniform(0.3, 1.2))  # while it starts and opens
        for writer in writers:
            writer.kill()
        outcomes = [writer.outcomes(model) for writer, model in zip(writers, models, strict=True)]
        killed.update(under_way for _, under_way in outcomes)
        acknowledged += sum(said == "done" for writer in writers for said, _ in writer.lines)
        models = check(path, list(product(*(possible for possible, _ in outcomes))))
        largest = max(largest, sum(map(len, models)))
    print(
        f"{sum(killed.values())} kills under way: {dict(sorted(killed.items()))}; {acknowledged} operations "
        f"acknowledged, up to {largest} facts, nothing lost"
    )
    return killed


def test_nothing_acknowledged_is_lost(tmp_path):
    pytest.importorskip("lance", reason="needs the extra store")
    assert sum(kill_and_check(tmp_path, 10, 1).values()) == 10


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_in_200_kills(tmp_path):
    pytest.importorskip("lance", reason="needs the extra store")
    killed = kill_and_check(tmp_path, 200, 2)
    assert sum(killed.values()) == 200
    assert {"add", "upsert", "remove", "snapshot", "compact"} <= killed.keys()


if __name__ == "__main__":
    write_on(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
