"""The durable store: it ranks as a store made anew does, maps its snapshot, and trusts none of it."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from durables import DIM, MODEL, add, contents, made, reopened, snapshotted, vectors
from fact_stores import reseal

from cdr_kernel import DamagedFileError, FactStore, Retriever, Session, SubQuery, cdr_rank, explain
from cdr_kernel.durable import DurableStore, _durable_store, _mirror, _snapshot
from cdr_kernel.store import _checksums
from cdr_kernel.store import _fact_store as store_module

FILES = [
    "embeddings.npy",
    "texts.utf8",
    "ids.utf8",
    "tokens.npy",
    "importance.npy",
    "first_sequence.npy",
    "attribute-0.npy",
    "sources.utf8",
]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(tmp_path):
    with made(tmp_path / "store") as store:
        yield store


@pytest.fixture
def big(store):
    return snapshotted(store)


def test_a_rank_is_that_of_a_store_made_anew(store):
    ids = [f"f{i}" for i in range(200)]
    add(store, ids, attributes={"tenant": [["x", "y"][i % 2] for i in range(200)]})
    store.upsert(ids[:20], ["again"] * 20, vectors(20, 3), attributes={"tenant": ["x"] * 20})
    store.remove(ids[50:90])
    plain = FactStore(DIM, embedding_model=MODEL)
    for fact, (_, row) in contents(store.facts):
        plain.add(
            [fact.id],
            [fact.text],
            np.frombuffer(row, np.float32)[None],
            attributes={"tenant": [fact.attributes["tenant"]]},
        )
    query = vectors(1, 9)[0]
    again = DurableStore.open(store.path)
    for where in (None, {"tenant": "x"}):
        rankings = []
        for facts in (store.facts, again.facts, plain):
            session = Session([SubQuery("s", "S", "s", vectors(1, 8)[0])], embedding_model=MODEL, min_relevance=0.0)
            rankings.append(cdr_rank(query, Retriever(facts), session, k=30, where=where))
        assert rankings[0].ids == rankings[1].ids == rankings[2].ids
        for ranking in rankings[1:]:
            np.testing.assert_array_equal(ranking.score, rankings[0].score)


def data(store):
    return next(path for path in (store.path / "snapshot").iterdir() if path.is_dir() and path.name[:4] == "data")


def test_whoever_has_the_facts_alone_is_told_of_the_quarantine(store):
    ids = [f"f{i}" for i in range(20)]
    add(store, ids)
    retriever = Retriever(store.facts)
    session = Session([SubQuery("s", "S", "s", vectors(1, 8)[0])], embedding_model=MODEL, min_relevance=-1.0)
    query = vectors(1, 9)[0]
    store.quarantine(["f3"], "contradicts f4")
    store.quarantine(["f5"])
    store.snapshot()
    again = Retriever(DurableStore.open(store.path).facts)  # from the snapshot
    add(store, ["f20"], 3)
    for each in (retriever, again, Retriever(DurableStore.open(store.path).facts)):
        with pytest.raises(
            KeyError, match=r"'f3' is quarantined \(contradicts f4\), in no ranking until it is released"
        ):
            explain(query, each, session, "f3")
        with pytest.raises(KeyError, match="'f5' is quarantined, in no ranking"):
            explain(query, each, session, "f5")
        with pytest.raises(KeyError, match="'nobody' is not in the store"):
            explain(query, each, session, "nobody")
    store.release(["f3"])
    store.remove(["f5"])
    assert explain(query, retriever, session, "f3").status == "packed"
    with pytest.raises(KeyError, match="'f5' is not in the store"):
        explain(query, retriever, session, "f5")


def test_an_open_maps_the_snapshot_and_reads_what_came_later(big):
    with DurableStore.open(big.path) as first:
        assert first.stats()["snapshot_version"] == first.version
        assert first.facts.path == big.path / "snapshot"
        assert first.facts.view().identity is not None
        assert first.verify() is None
        assert first.stats()["snapshot"] == "checked"
    add(big, ["new"], 3)
    big.upsert(["f0"], ["again"], vectors(1, 4))
    big.quarantine(["f1"])
    big.release(["f1"])
    big.remove(["f2"])
    with DurableStore.open(big.path) as later:
        assert later.facts.path == big.path / "snapshot"
        assert later.facts.view().rows == 296 + 3
        assert contents(later.facts) == contents(big.facts)


def damaged(path, at=None):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 if at is None else at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_bit_in_a_snapshot_is_found_and_put_right(big, name, caplog):
    expected = contents(big.facts)
    damaged(data(big) / name)
    with DurableStore.open(big.path, verify=True) as again:
        if again.facts.path is not None:  # else what is checked at open told already
            assert name in again.verify()
            assert "is not as it was written; the facts are read from the record again" in caplog.text
            assert "is not as it was written" in again.stats()["snapshot"]
        assert contents(again.facts) == expected
        add(again, ["more"])
    with DurableStore.open(big.path, verify=True) as third:
        assert third.verify() is None
        assert third.facts.ids == [*(fact.id for fact, _ in expected), "more"]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(_checksums, "BLOCK", 4096)


def test_retrievers_follow_when_a_snapshot_is_put_right(small_blocks, big, monkeypatch):
    damaged(data(big) / "embeddings.npy")
    started = threading.Event()
    check = DurableStore._check
    monkeypatch.setattr(store_module, "_AT_ONCE", 0)
    monkeypatch.setattr(DurableStore, "_check", lambda *args: started.wait(30) and check(*args))
    with DurableStore.open(big.path) as again:
        retriever = Retriever(again.facts)
        query = vectors(1, 9)[0]
        assert not again.verified
        with pytest.raises(DamagedFileError, match=r"embeddings\.npy: block 1"):
            retriever.search(query, min_relevance=-1.0)
        started.set()
        assert again.verify() is not None
        assert again.verified
        right = retriever.search(query, min_relevance=-1.0)
        np.testing.assert_array_equal(right.relevance, Retriever(big.facts).search(query, min_relevance=-1.0).relevance)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda home, files: (files / "embeddings.npy").write_bytes((files / "embeddings.npy").read_bytes()[:-1]),
        lambda home, files: (files / "embeddings.npy").unlink(),
        lambda home, files: (home / "manifest.json").write_bytes((home / "manifest.json").read_bytes()[:100]),
        lambda home, files: (home / "manifest.json").write_bytes(b""),
        lambda home, files: (home / "manifest.json").unlink(),
        lambda home, files: shutil.rmtree(home),
        lambda home, files: changed(home / "manifest.json", lambda m: m["about"].pop("record")),
        lambda home, files: changed(home / "manifest.json", lambda m: m["files"].pop("embeddings.npy")),
        lambda home, files: changed(home / "manifest.json", lambda m: m["files"].update({"ids.utf8": 1})),
        lambda home, files: changed(home / "manifest.json", lambda m: m["about"]["record"].update(fingerprint="x")),
        lambda home, files: changed(home / "manifest.json", lambda m: m["about"]["record"].update(version=99)),
        lambda home, files: changed(home / "manifest.json", lambda m: m["about"]["record"].update(version="1")),
        lambda home, files: changed(home / "manifest.json", lambda m: m.update(embedding_model="other")),
    ],
)
def test_a_torn_or_foreign_snapshot_is_not_used(big, break_it):
    expected = contents(big.facts)
    break_it(big.path / "snapshot", data(big))
    with DurableStore.open(big.path) as again:
        assert again.facts.path is None
        assert contents(again.facts) == expected
        again.snapshot()
    with DurableStore.open(big.path, verify=True) as third:
        assert third.facts.path is not None
        assert third.verify() is None
        assert contents(third.facts) == expected


def changed(path, change):
    found = json.loads(path.read_bytes())
    change(found)
    reseal(path, **found)


def test_a_snapshot_of_a_record_that_was_put_back_is_not_used(big, tmp_path):
    """Same version number, other contents: a backup of the record was restored and written on."""
    big.close()
    shutil.copytree(big.path / "facts.lance", tmp_path / "backup")
    with DurableStore.open(big.path) as store:
        add(store, ["one"])
        store.snapshot()
    shutil.rmtree(big.path / "facts.lance")
    shutil.copytree(tmp_path / "backup", big.path / "facts.lance")
    with DurableStore.open(big.path) as store:
        add(store, ["two"])
        version = store.version
    with DurableStore.open(big.path) as again:
        assert again.version == version
        assert again.facts.ids[-1] == "two"
        assert "one" not in again.facts


def test_a_copied_folder_keeps_its_snapshot(big, tmp_path):
    big.close()
    shutil.copytree(big.path, tmp_path / "copy")
    with DurableStore.open(tmp_path / "copy", verify=True) as copy:
        assert copy.facts.path == tmp_path / "copy" / "snapshot"
        assert copy.verify() is None


def test_a_snapshot_that_cannot_be_written_harms_nothing(big, monkeypatch):
    shutil.rmtree(big.path / "snapshot")
    monkeypatch.setattr(_durable_store, "WORTH_SNAPSHOT", 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_snapshot, "write", full)
    with DurableStore.open(big.path) as again:
        assert contents(again.facts) == contents(big.facts)
        with pytest.raises(OSError, match="No space left"):
            again.snapshot()


def test_an_open_that_had_much_to_read_leaves_a_snapshot(big, monkeypatch):
    shutil.rmtree(big.path / "snapshot")
    monkeypatch.setattr(_durable_store, "WORTH_SNAPSHOT", 10)
    monkeypatch.setattr(_mirror, "_LONG_WORK", 10)
    with DurableStore.open(big.path) as first:
        assert first.facts.path == big.path / "snapshot"
        assert contents(first.facts) == contents(big.facts)


def test_codes_are_saved_with_a_snapshot_and_checked(folder):
    with DurableStore.create(folder, DIM, embedding_model=MODEL) as store:
        n = 17000
        store.add([f"f{i}" for i in range(n)], ["t"] * n, vectors(n))
        store.snapshot()
        expected = Retriever(store.facts).search(vectors(1, 5)[0], min_relevance=0.2).rows
    with DurableStore.open(folder, verify=True) as again:
        assert again.verify() is None
        retriever = Retriever(again.facts)
        assert retriever.codes(again.facts.view()).rows == n
        add(again, ["more"])
        assert retriever.codes(again.facts.view()).rows == n
    (codes,) = (path for path in (folder / "snapshot").glob("scan-*") if path.is_dir())
    damaged(codes / "first.npy")
    with DurableStore.open(folder, verify=True) as again:
        retriever = Retriever(again.facts)
        with pytest.warns(UserWarning, match=r"first\.npy: block 0 .*; the codes are made again"):
            found = retriever.search(vectors(1, 5)[0], min_relevance=0.2).rows
        np.testing.assert_array_equal(found[found < n], expected)
        retriever._coding.join()
        again.snapshot(codes=False)
        assert list((folder / "snapshot").glob("scan*")) == []  # codes of the snapshot before


def test_compaction_takes_the_bytes_of_removed_facts_away(store):
    add(store, ["secret", "open"])
    store.snapshot()
    store.upsert(["open"], ["replaced"], vectors(1, 2))
    store.remove(["secret"])
    (store.path / "facts.lance" / "data" / "left-by-a-killed-writer.lance").write_bytes(b"text of secret")
    for i in range(5):
        add(store, [f"more {i}"])
    assert store.stats()["fragments"] > 1
    store.compact()
    assert store.stats()["fragments"] == 1
    assert len(store.versions()) == 1
    assert not any(b"text of secret" in path.read_bytes() for path in store.path.rglob("*") if path.is_file())
    assert contents(store.facts) == reopened(store)
    with pytest.raises(ValueError, match="keep"):
        store.compact(keep=-1)
    add(store, ["later"])
    store.compact(keep=3600)
    assert len(store.versions()) > 1


def test_without_the_extra_it_is_named(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[store\]" in a checkout'):
        DurableStore.open(store.path)
    with pytest.raises(ImportError, match=r'pip install "\.\[store\]" in a checkout'):
        DurableStore.create(store.path, DIM, embedding_model=MODEL)


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    exec(re.search(r"^```python\n(.*?)^```", page, re.M | re.S)[1], {})
