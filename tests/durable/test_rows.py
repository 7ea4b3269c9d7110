"""Facts as rows of the record: the same bits back, and what no row can hold."""

from __future__ import annotations

import numpy as np
import pytest
from durables import DIM, MODEL, add, contents, made, reopened, vectors

from cdr_kernel import FactStore
from cdr_kernel.durable import DurableStore


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(tmp_path):
    with made(tmp_path / "store") as store:
        yield store


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_vectors_come_back_bit_for_bit(folder, dtype):
    with DurableStore.create(folder, DIM, embedding_model=MODEL, dtype=dtype) as store:
        rows = vectors(5).astype(np.float64)
        if dtype == "float64":
            rows[0] *= 1e-250
        store.add(list("abcde"), list("abcde"), rows)
        plain = FactStore(DIM, embedding_model=MODEL, dtype=dtype)
        plain.add(list("abcde"), list("abcde"), rows)
        assert contents(store.facts) == contents(plain) == reopened(store)
        with DurableStore.open(folder) as again:
            np.testing.assert_array_equal(again.facts.view().squared_norms, plain.view().squared_norms)


@pytest.mark.parametrize("where", ["ids", "texts", "source", "attribute"])
def test_what_no_utf8_can_hold_is_refused(store, where):
    bad = "lone \ud800"
    keywords = {"ids": ["a"], "texts": ["t"], "embeddings": vectors(1)}
    keywords |= {"attribute": {"attributes": {"tenant": [bad]}}}.get(where, {where: [bad]})
    with pytest.raises(ValueError, match="lone surrogates"):
        store.add(**keywords)
    assert store.version == 1


@pytest.mark.parametrize("name", ["`", "q`", "status"])
def test_a_column_that_the_record_cannot_have_is_refused_before_anything_changes(store, tmp_path, name):
    add(store, ["a"])
    before, version = contents(store.facts), store.version
    with pytest.raises(ValueError, match="attributes: expected a name that"):
        store.add(["b"], ["b"], np.ones((1, DIM)), attributes={name: ["x"]})
    assert (contents(store.facts), store.version) == (before, version)
    add(store, ["c"])
    with DurableStore.open(store.path) as again:
        assert again.facts.ids == ["a", "c"]
    if name == "status":  # which a store in memory may have
        facts = FactStore(DIM, embedding_model=MODEL)
        facts.add(["b"], ["b"], np.ones((1, DIM)), attributes={name: ["x"]})
        with pytest.raises(ValueError, match="attributes: expected a name that"):
            DurableStore.from_facts(facts, tmp_path / "new")
        assert not (tmp_path / "new").exists()
