"""A mapped file that is cut short is an error that names it, not the end of the process."""

from __future__ import annotations

import os

import numpy as np
import pytest

from cdr_kernel import FactStore, Retriever, Session, SubQuery, cdr_rank, explain, gate_report
from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.retrieve import _retriever
from cdr_kernel.shard import partition
from cdr_kernel.store._mapped_files import MappedFiles

DIM, N = 16, 6000
MAPPED = {"embeddings.npy", "tokens.npy", "token_offsets.npy"} | {
    f"{name}{end}" for name in ("ids", "texts", "sources") for end in (".utf8", "_offsets.npy")
}


def filled(n=N, **keywords):
    rows = np.random.default_rng(3).standard_normal((n, DIM)).astype(np.float32)
    ids = [f"f{i}" for i in range(n)]
    store = FactStore(DIM, embedding_model="toy", **keywords)
    store.add(ids, [f"the text of {i}" for i in ids], rows, source=[f"s{i % 5}" for i in range(n)])
    return store


def session():
    return Session([SubQuery("s", "S", "s", np.ones(DIM))], embedding_model="toy", min_relevance=-1.0)


@pytest.fixture
def folder(tmp_path):
    filled().save(tmp_path / "store")
    return tmp_path / "store"


def data_in(folder):
    (data,) = folder.glob("data-*")
    return data


def test_what_is_mapped_is_watched(folder):
    store = FactStore.load(folder)
    files = store.view()._storage.mapped_files._files
    assert {os.path.basename(path) for path, _ in files} == MAPPED
    assert FactStore.load(folder, mmap=False).view()._storage.mapped_files._files == ()


@pytest.mark.parametrize("name", sorted(MAPPED))
def test_a_pass_over_a_file_that_was_cut_short_is_an_error(folder, tmp_path, name):
    store = FactStore.load(folder)
    retriever, path = Retriever(store), data_in(folder) / name
    before = cdr_rank(np.ones(DIM), retriever, session(), k=5)
    lazy, content = cdr_rank(np.ones(DIM), retriever, session()), path.read_bytes()
    os.truncate(path, 64)
    passes = [
        lambda: cdr_rank(np.ones(DIM), retriever, session(), k=5),
        lambda: retriever.search(np.ones(DIM), k=5),
        lambda: gate_report(store, np.ones((1, DIM))),
        lambda: explain(np.ones(DIM), retriever, session(), "f1"),
        lambda: partition(store, tmp_path / "shards", shards=2),
        lambda: store.save(tmp_path / "other"),
        lambda: store.get(["f7"]),
        lambda: store.ids,
        lambda: retriever.prepare(),
        lambda: lazy.facts[0],  # which is made when it is looked at
    ]
    for each in passes:
        what = rf"{name}: expected {len(content)} bytes, found 64: it was cut short"
        with pytest.raises(DamagedFileError, match=what) as error:
            each()
        assert error.value.file == path
    path.write_bytes(content)  # as it was, in place
    assert cdr_rank(np.ones(DIM), retriever, session(), k=5).ids == before.ids


def test_a_store_that_was_replaced_stays_whole_for_whoever_has_it_open(folder):
    store = FactStore.load(folder)
    filled(50).save(folder)
    assert len(cdr_rank(np.ones(DIM), Retriever(store), session(), k=5).ids) == 5
    assert len(store.ids) == N


def test_a_file_of_the_same_name_that_is_another_is_not_looked_at(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"1234")
    files = MappedFiles([path])
    (tmp_path / "b").write_bytes(b"1")
    os.replace(tmp_path / "b", path)
    files.check()


def test_codes_that_were_cut_short_are_made_again(folder, monkeypatch):
    monkeypatch.setattr(_retriever, "WORTH_CODES", 64)
    Retriever(FactStore.load(folder)).save()
    retriever = Retriever(FactStore.load(folder))
    before = cdr_rank(np.ones(DIM), retriever, session(), k=5)
    assert retriever._codes is not None
    (codes,) = folder.glob("scan-*/first.npy")
    os.truncate(codes, 64)
    with pytest.warns(UserWarning, match=r"first\.npy: .* it was cut short; the codes are made again"):
        assert cdr_rank(np.ones(DIM), retriever, session(), k=5).ids == before.ids
    retriever._coding.join()
    assert retriever.codes(retriever.store.view()).rows == N
    assert cdr_rank(np.ones(DIM), retriever, session(), k=5).ids == before.ids


@pytest.mark.parametrize("change", [False, True])
def test_a_snapshot_that_was_cut_short_is_put_right_from_the_record(tmp_path, caplog, change):
    pytest.importorskip("lance", reason="needs the extra store")
    from cdr_kernel.durable import DurableStore

    with DurableStore.from_facts(filled(300), tmp_path / "d") as made:
        made.snapshot()
    with DurableStore.open(tmp_path / "d", verify=True) as store:
        retriever = Retriever(store.facts)
        before = cdr_rank(np.ones(DIM), retriever, session(), k=5)
        os.truncate(data_in(tmp_path / "d" / "snapshot") / "texts.utf8", 64)
        with pytest.raises(DamagedFileError, match=r"texts\.utf8"):
            cdr_rank(np.ones(DIM), retriever, session(), k=5)
        assert store.remove(["f0"]) == 1 if change else store.refresh()
        assert "texts.utf8: expected" in caplog.text
        assert "it was cut short" in store.stats()["snapshot"]
        assert cdr_rank(np.ones(DIM), retriever, session(), k=5).ids == before.ids
    with DurableStore.open(tmp_path / "d", verify=True) as again:
        assert again.stats()["snapshot"] == "checked"
