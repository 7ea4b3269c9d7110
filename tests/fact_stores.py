"""What the tests of `FactStore` share: small stores, and all that is in one."""

from __future__ import annotations

import numpy as np

from cdr_kernel import FactStore
from cdr_kernel.ngram import take_tokens


def facts(n, start=0):
    """n ids and texts."""
    return [f"f{i}" for i in range(start, start + n)], [f"text {i}" for i in range(start, start + n)]


def filled(n=10, dim=4, dtype="float32", seed=0):
    store = FactStore(dim, embedding_model="m1", dtype=dtype)
    ids, texts = facts(n)
    store.add(ids, texts, np.random.default_rng(seed).standard_normal((n, dim)))
    return store


def contents(store):
    """Everything a store says of its facts, to be compared."""
    view = store.view()
    rows = np.flatnonzero(view.alive)
    tokens = take_tokens(view.tokens.blocks, rows)
    return (
        view.facts(rows), view.take(rows).tobytes(), view.squared_norms[rows].tobytes(), store.embedding_model,
        view.first_sequence[rows].tolist(),
        store.dim, store.dtype, *(part.tobytes() for part in tokens), store.tokenizer_name, store.key_fingerprint,
    )  # fmt: skip


def change(file, row, value):
    """In place, so that whoever has mapped the file sees it too."""
    np.load(file, mmap_mode="r+")[row] = value
