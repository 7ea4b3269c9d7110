"""What the tests of durable stores share: small stores, and all that is in one."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("lance", reason="needs the extra store")

from cdr_kernel.durable import DurableStore

DIM, MODEL = 8, "toy"


def vectors(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, DIM)).astype(np.float32)


def made(folder):
    """A new store without facts."""
    return DurableStore.create(folder, DIM, embedding_model=MODEL)


def add(store, ids, seed=0, **keywords):
    return store.add(ids, [f"text of {i}" for i in ids], vectors(len(ids), seed), **keywords)


def snapshotted(store):
    """The store with 296 facts and a snapshot that is worth damaging."""
    ids = [f"f{i}" for i in range(300)]
    add(store, ids, source=[f"s{i % 3}" for i in range(300)], attributes={"tenant": [f"t{i % 4}" for i in range(300)]})
    store.remove(ids[5:9])
    store.snapshot()
    return store


def contents(facts):
    """Facts, each with (the number it was added with, the bytes of its vector), in the order of their sequence."""
    view = facts.view()
    rows = np.flatnonzero(view.alive)
    parts = zip(view.facts(rows), view.first_sequence[rows].tolist(), view.take(rows), strict=True)
    return [(fact, (number, row.tobytes())) for fact, number, row in parts]


def reopened(store, **keywords):
    """What whoever opens the store now finds in it."""
    with DurableStore.open(store.path, **keywords) as again:
        assert again.version == store.version
        return contents(again.facts)
