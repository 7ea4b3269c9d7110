"""A file of facts and its vectors become a store."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cdr_kernel.exceptions import FileError
from cdr_kernel.files import _files
from cdr_kernel.files._build_store import FactFile

MODEL = "m"


@pytest.fixture
def six(tmp_path, monkeypatch):
    """Six facts and their vectors, read two at a time."""
    monkeypatch.setattr(_files, "BATCH_ROWS", 2)
    facts = tmp_path / "facts.jsonl"
    facts.write_text("\n".join(json.dumps({"id": f"f{i}", "text": f"text {i}", "pos": i}) for i in range(6)))
    vectors = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)
    np.save(tmp_path / "e.npy", vectors)
    return facts, tmp_path / "e.npy", vectors


def test_the_store_has_every_fact_with_its_vector(six):
    facts, path, vectors = six
    told = []
    file = FactFile(facts, str(path))
    store, skipped = file.build(embedding_model=MODEL, advance=told.append)
    assert (len(file), len(store), skipped, store.embedding_model, told) == (6, 6, [], MODEL, [2, 2, 2])
    assert store.ids == [f"f{i}" for i in range(6)]
    np.testing.assert_array_equal(store.view().embeddings, vectors)
    assert [fact.position for fact in store.get(["f4", "f1"])] == [4, 1]


def test_rows_take_facts_and_vectors_alike(six):
    facts, path, vectors = six
    store, _ = FactFile(facts, str(path), start=1, stop=4).build(embedding_model=MODEL, dtype="float64")
    assert store.ids == ["f1", "f2", "f3"]
    np.testing.assert_array_equal(store.view().embeddings, vectors[1:4].astype(np.float64))
    for start, stop in ((6, None), (0, 7), (3, 3)):
        with pytest.raises(FileError, match=f"expected the rows {start}:{stop or ''}, found 6 facts"):
            FactFile(facts, str(path), start=start, stop=stop)


def test_a_function_embeds_the_texts(six):
    facts, _, _ = six
    seen = []

    def embed(texts):
        seen.extend(texts)
        return np.array([[float(text[-1]), 1.0] for text in texts])

    store, _ = FactFile(facts, embed, name="toy").build(embedding_model="toy")
    assert seen == [f"text {i}" for i in range(6)]
    assert store.view().embeddings[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_vectors_that_do_not_fit(six, tmp_path):
    facts, path, vectors = six
    np.save(path, vectors[:5])
    with pytest.raises(FileError, match=r"expected 6 rows .* got 5"):
        FactFile(facts, str(path))
    np.save(path, vectors[:, :0])
    with pytest.raises(FileError, match="dimension of at least 1, got 0"):
        FactFile(facts, str(path))
    np.save(path, vectors)
    (tmp_path / "empty").touch()
    with pytest.raises(FileError, match="expected at least one fact"):
        FactFile(tmp_path / "empty", str(path))


@pytest.mark.parametrize(("value", "what"), [(0.0, "all zeros"), (np.nan, "not finite"), (1e300, "not finite")])
def test_a_bad_vector_is_named_or_skipped(six, value, what):
    facts, path, vectors = six
    vectors = vectors.astype(np.float64)
    vectors[3] = value
    np.save(path, vectors)
    with pytest.raises(
        FileError,
        match=rf"e\.npy, row 3 \(fact 'f3', line 4 of .*as float32, got one that is {what}; --on-invalid skip",
    ):
        FactFile(facts, str(path)).build(embedding_model=MODEL)
    store, skipped = FactFile(facts, str(path)).build(embedding_model=MODEL, on_invalid="skip")
    assert (skipped, store.ids) == (["f3"], ["f0", "f1", "f2", "f4", "f5"])
    with pytest.raises(FileError, match="found none"):
        FactFile(facts, str(path), start=3, stop=4).build(embedding_model=MODEL, on_invalid="skip")


@pytest.mark.parametrize("row", [1, 4])
def test_an_id_that_comes_twice(six, row):
    facts, path, _ = six
    content = facts.read_text().splitlines()
    content[row] = content[0]
    facts.write_text("\n".join(content))
    with pytest.raises(FileError, match=rf"line {row + 1}: id: expected one that is new, got 'f0' as in line 1"):
        FactFile(facts, str(path)).build(embedding_model=MODEL)
