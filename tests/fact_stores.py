"""What the tests of `FactStore` share: small stores, and all that is in one."""

from __future__ import annotations

import json

import numpy as np

from cdr_kernel import FactStore
from cdr_kernel.store import _checksums
from cdr_kernel.store._atomic_folder import identity_of
from cdr_kernel.text._ngram_guard import take_tokens


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


def reseal(manifest, **said):
    """Have a manifest say this too, and name its files as they are now: what then is wrong in it was written so."""
    found = json.loads(manifest.read_bytes())
    data = manifest.parent / found["data"]
    found = {**found, "files": _checksums.of_folder(data), **said}
    manifest.write_text(json.dumps({**found, "identity": identity_of(found)}))


def flip(file, at=None, bit=4):
    """Change one bit, in the middle or in this byte; again puts it right. In place: who has it mapped sees it."""
    with open(file, "r+b") as opened:
        size = opened.seek(0, 2)
        opened.seek(size // 2 if at is None else at % size)
        (byte,) = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ bit]))


def change(file, row, value):
    """In place, so that whoever has mapped the file sees it too."""
    np.load(file, mmap_mode="r+")[row] = value
