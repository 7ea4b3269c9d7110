"""The durable store: what was acknowledged is there, for every process, and ranks as a store made anew does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lance", reason="needs the extra store")

from cdr_kernel import (
    EmbeddingModelMismatch,
    FactStore,
    Retriever,
    Session,
    SubQuery,
    cdr_rank,
    durable,
    exchange,
    moments,
    replica,
    snapshot,
)
from cdr_kernel.durable import DurableStore

DIM, MODEL = 8, "toy"


def vectors(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, DIM)).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(folder):
    with DurableStore.create(folder, DIM, embedding_model=MODEL) as made:
        yield made


def add(store, ids, seed=0, **keywords):
    return store.add(ids, [f"text of {i}" for i in ids], vectors(len(ids), seed), **keywords)


def contents(facts):
    view = facts.view()
    rows = np.flatnonzero(view.alive)
    return [(fact, row.tobytes()) for fact, row in zip(view.facts(rows), view.take(rows), strict=True)]


def reopened(store, **keywords):
    with DurableStore.open(store.path, **keywords) as again:
        assert again.version == store.version
        return contents(again.facts)


def test_what_is_put_in_is_there_when_it_is_opened_again(store):
    attributes = {
        "tenant": ["x", None, "y"],
        "year": [1, 2, None],
        "score": [0.5, None, 1],
        "draft": [True, False, None],
    }
    added = add(
        store,
        ["a", "b", "c"],
        importance=[1, 2, 0.5],
        source=["s", "", None],
        position=[3, None, 0],
        attributes=attributes,
    )
    assert added == (3, ())
    store.upsert(["b", "d"], ["new b", "d"], vectors(2, 1))
    assert store.remove(["c", "missing"], missing="ignore") == 1
    assert store.facts.ids == ["a", "b", "d"]
    assert [fact.sequence for fact in store.facts.get(["a", "b", "d"])] == [0, 3, 4]
    assert reopened(store) == contents(store.facts)


def test_another_process_sees_it_after_a_refresh_and_before_every_change(store):
    add(store, ["a", "b"])
    other = DurableStore.open(store.path)
    add(store, ["c"], attributes={"tenant": ["x"]})
    store.remove(["a"])
    assert other.facts.ids == ["a", "b"]
    assert other.refresh()
    assert not other.refresh()
    assert contents(other.facts) == contents(store.facts)
    add(store, ["d"])
    with pytest.raises(ValueError, match="'d' in the store already"):
        add(other, ["d"])
    add(other, ["e"])
    assert store.refresh()
    assert contents(other.facts) == contents(store.facts) == reopened(store)
    assert [fact.sequence for fact in store.facts.get(["b", "c", "d", "e"])] == [1, 2, 3, 4]


def test_a_rank_is_that_of_a_store_made_anew(store):
    ids = [f"f{i}" for i in range(200)]
    add(store, ids, attributes={"tenant": [["x", "y"][i % 2] for i in range(200)]})
    store.upsert(ids[:20], ["again"] * 20, vectors(20, 3), attributes={"tenant": ["x"] * 20})
    store.remove(ids[50:90])
    plain = FactStore(DIM, embedding_model=MODEL)
    for fact, row in contents(store.facts):
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


def test_a_quarantined_fact_is_in_no_ranking_until_it_is_released(store):
    add(store, ["a", "b", "c"])
    other = DurableStore.open(store.path)
    assert store.quarantine(["b"], "wrong") == 1
    other.refresh()
    assert store.facts.ids == other.facts.ids == ["a", "c"]
    assert store.quarantined() == other.quarantined() == {"b": "wrong"}
    with pytest.raises(ValueError, match="'b' in the store already"):
        add(store, ["b"])
    store.upsert(["b", "d"], ["b again", "d"], vectors(2, 4))
    assert store.facts.ids == ["a", "c", "d"]
    assert [fact.id for fact, _ in reopened(store)] == ["a", "c", "d"]
    with pytest.raises(KeyError, match="'a' not quarantined"):
        store.release(["b", "a"])
    assert other.release(["b"]) == 1
    store.refresh()
    assert store.facts.ids == other.facts.ids == ["a", "c", "d", "b"]
    assert store.facts.get(["b"])[0].text == "b again"
    assert store.quarantined() == {}
    assert contents(store.facts) == contents(other.facts) == reopened(store)


def test_a_quarantined_fact_can_be_removed(store):
    add(store, ["a", "b"])
    store.quarantine(["a"])
    assert store.remove(["a", "b"]) == 2
    assert store.quarantined() == {}
    add(store, ["a"])
    assert store.facts.ids == ["a"]


def test_bad_openings_say_what_is_wrong(store, tmp_path):
    with pytest.raises(EmbeddingModelMismatch, match="expected embedding model 'toy', got 'other'"):
        DurableStore.open(store.path, embedding_model="other")
    with pytest.raises(ValueError, match="pass hash_key="):
        DurableStore.open(store.path, hash_key=7)
    with pytest.raises(FileNotFoundError, match="no durable store here"):
        DurableStore.open(tmp_path)
    with pytest.raises(FileExistsError, match="found a durable store"):
        DurableStore.create(store.path, DIM, embedding_model=MODEL)
    with pytest.raises(FileExistsError, match="found other files"):
        DurableStore.create(tmp_path, DIM, embedding_model=MODEL)
    with pytest.raises(ValueError, match="expected dimension 8, got 3"):
        store.add(["a"], ["a"], np.ones((1, 3)))
    store.close()
    with pytest.raises(ValueError, match="was closed"):
        add(store, ["a"])


def test_a_fact_past_its_time_is_gone_for_good(store, monkeypatch):
    now = time.time()
    soon = datetime.fromtimestamp(now + 1000, UTC)
    add(store, ["a", "b", "c", "d"], expires_at=[soon, now + 2000, None, now + 1000])
    store.quarantine(["d"])
    other = DurableStore.open(store.path)
    assert store.expire() == 0
    clock = now + 1500
    monkeypatch.setattr(moments, "now", lambda: int(clock * 10**6))
    assert other.refresh()
    assert other.facts.ids == ["b", "c"]
    assert other.quarantined() == {}
    clock = now  # a clock that goes back brings nothing back
    store.refresh()
    assert store.facts.ids == ["b", "c"]
    assert [fact.id for fact, _ in reopened(store)] == ["b", "c"]
    assert store.expire(now + 5000) == 1
    assert store.expire(soon) == 0
    add(store, ["a"])
    add(store, ["late"], expires_at=[now - 1])
    assert store.facts.ids == ["c", "a"]
    clock = now + 1e6
    assert [fact.id for fact, _ in reopened(store)] == ["c", "a"]


def test_expired_facts_are_out_where_nothing_can_be_written(store, monkeypatch):
    add(store, ["a", "b"], expires_at=[time.time() + 0.05, None])
    store.snapshot()

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "save.lock")

    monkeypatch.setattr(replica, "turn", refused)
    time.sleep(0.06)
    version = store.version
    with DurableStore.open(store.path) as again:
        assert again.facts.ids == ["b"]
        assert again.version == version
        assert not again.refresh()
        with pytest.raises(PermissionError):
            add(again, ["c"])
        assert again.facts.ids == ["b"]


def test_columns_may_come_later(store):
    add(store, ["a"], attributes={"tenant": ["x"]})
    add(store, ["b"], attributes={"year": [1]})
    add(store, ["c"], attributes={"score": [1.5], "tenant": ["y"]})
    with DurableStore.open(store.path) as other:
        add(other, ["d"], attributes={"score": [2], "draft": [True]})
    store.refresh()
    assert [dict(f.attributes) for f in store.facts.get(["a", "b", "c", "d"])] == [
        {"tenant": "x"},
        {"year": 1},
        {"score": 1.5, "tenant": "y"},
        {"score": 2.0, "draft": True},
    ]
    assert contents(store.facts) == reopened(store)
    version = store.version
    for attributes, error in (({"year": ["one"]}, TypeError), ({"status": ["live"]}, ValueError)):
        with pytest.raises(error, match="attributes"):
            add(store, ["e"], attributes=attributes)
    assert store.version == version


@pytest.mark.parametrize("where", ["ids", "texts", "source", "attribute"])
def test_what_no_utf8_can_hold_is_refused(store, where):
    bad = "lone \ud800"
    keywords = {"ids": ["a"], "texts": ["t"], "embeddings": vectors(1)}
    keywords |= {"attribute": {"attributes": {"tenant": [bad]}}}.get(where, {where: [bad]})
    with pytest.raises(ValueError, match="lone surrogates"):
        store.add(**keywords)
    assert store.version == 1


@pytest.mark.parametrize(
    "moments", [["never"], [True], [float("nan")], [-1], [datetime(2030, 1, 1)], [1, 2]]
)  # naive on purpose
def test_bad_expiries_are_refused(store, moments):
    with pytest.raises((TypeError, ValueError), match="expires_at"):
        add(store, ["a"], expires_at=moments)
    assert len(store) == 0


def test_numbers_are_given_once_even_when_the_newest_facts_are_removed(store):
    add(store, ["a", "b", "c"])
    store.remove(["b", "c"])
    store.compact()
    with DurableStore.open(store.path) as other:
        add(other, ["d"])
        assert other.facts.get(["d"])[0].sequence == 3
        other.remove(other.facts.ids)
    store.refresh()
    assert len(store) == 0
    add(store, ["e"])
    assert store.facts.get(["e"])[0].sequence == 4
    assert contents(store.facts) == reopened(store)


def test_an_empty_change_is_no_commit(store):
    assert add_nothing(store) == (0, ())
    assert store.remove([]) == store.quarantine([]) == store.release([]) == 0
    assert store.version == 1
    assert store.facts.ids == []


def add_nothing(store):
    return store.add([], [], np.zeros((0, DIM)))


def test_bad_vectors_may_be_skipped(store):
    rows = vectors(3)
    rows[1] = 0
    with pytest.raises(ValueError, match="all zeros as float32: 'b'"):
        store.add(["a", "b", "c"], ["a", "b", "c"], rows)
    added = store.add(["a", "b", "c"], ["a", "b", "c"], rows, expires_at=[None, 4e9, 5e9], on_invalid="skip")
    assert added == (2, ("b",))
    assert store.expire(4.5e9) == 0
    assert store.expire(5.5e9) == 1


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


# Snapshots


@pytest.fixture
def big(store):
    """A store with a snapshot that is worth damaging."""
    ids = [f"f{i}" for i in range(300)]
    add(store, ids, source=[f"s{i % 3}" for i in range(300)], attributes={"tenant": [f"t{i % 4}" for i in range(300)]})
    store.remove(ids[5:9])
    store.snapshot()
    return store


def data(store):
    return next(path for path in (store.path / "snapshot").iterdir() if path.is_dir() and path.name[:4] == "data")


def test_an_open_maps_the_snapshot_and_reads_what_came_later(big):
    with DurableStore.open(big.path) as first:
        assert first.stats()["snapshot_version"] == first.version
        assert first.facts.path == big.path / "snapshot"
        assert isinstance(first.facts.view().blocks[0].base, np.memmap)
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


FILES = ["embeddings.npy", "texts.utf8", "ids.utf8", "tokens.npy", "importance.npy", "attribute-0.npy", "sources.utf8"]


@pytest.mark.parametrize("name", FILES)
def test_a_changed_bit_in_a_snapshot_is_found_and_put_right(big, name, capsys):
    expected = contents(big.facts)
    damaged(data(big) / name)
    with DurableStore.open(big.path, verify=True) as again:
        if again.facts.path is not None:  # else what is checked at open told already
            assert name in again.verify()
            assert "is not as it was written; the facts are read from the record again" in capsys.readouterr().err
            assert "is not as it was written" in again.stats()["snapshot"]
        assert contents(again.facts) == expected
        add(again, ["more"])
    with DurableStore.open(big.path, verify=True) as third:
        assert third.verify() is None
        assert third.facts.ids == [*(fact.id for fact, _ in expected), "more"]


def test_retrievers_follow_when_a_snapshot_is_put_right(big, monkeypatch):
    damaged(data(big) / "embeddings.npy")
    started = threading.Event()
    check = snapshot.damage
    monkeypatch.setattr(snapshot, "damage", lambda *args: started.wait(30) and check(*args))
    with DurableStore.open(big.path) as again:
        retriever = Retriever(again.facts)
        query = vectors(1, 9)[0]
        wrong = retriever.search(query, min_relevance=-1.0)
        before = wrong.relevance
        started.set()
        assert again.verify() is not None
        right = retriever.search(query, min_relevance=-1.0)
        np.testing.assert_array_equal(right.relevance, Retriever(big.facts).search(query, min_relevance=-1.0).relevance)
        assert (before != right.relevance).any()


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
        lambda home, files: changed(home / "manifest.json", lambda m: m["about"].pop("checksums")),
        lambda home, files: changed(home / "manifest.json", lambda m: m["about"]["checksums"].pop("embeddings.npy")),
        lambda home, files: changed(home / "manifest.json", lambda m: m["about"]["checksums"].update(ids=1)),
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
    path.write_text(json.dumps(found))


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
    monkeypatch.setattr(durable, "WORTH_SNAPSHOT", 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "write", full)
    with DurableStore.open(big.path) as again:
        assert contents(again.facts) == contents(big.facts)
        with pytest.raises(OSError, match="No space left"):
            again.snapshot()


def test_an_open_that_had_much_to_read_leaves_a_snapshot(big, monkeypatch):
    shutil.rmtree(big.path / "snapshot")
    monkeypatch.setattr(durable, "WORTH_SNAPSHOT", 10)
    monkeypatch.setattr(replica, "_LONG_WORK", 10)
    with DurableStore.open(big.path) as first:
        assert first.facts.path == big.path / "snapshot"
        assert contents(first.facts) == contents(big.facts)


def test_codes_are_saved_with_a_snapshot_and_checked(folder, capsys):
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
    codes = snapshot.codes_folder(folder / "snapshot")
    damaged(codes / "first.npy")
    with DurableStore.open(folder, verify=True) as again:
        assert "first.npy" in again.verify()
        assert "the codes are made again" in capsys.readouterr().err
        assert snapshot.codes_folder(folder / "snapshot") is None
        found = Retriever(again.facts).search(vectors(1, 5)[0], min_relevance=0.2).rows
        np.testing.assert_array_equal(found[found < n], expected)


# Several writers


def test_writers_without_a_lock_lose_nothing(folder, monkeypatch):
    """On a mount that knows no locks Lance's own check of commits is all there is."""
    monkeypatch.setattr(replica, "turn", lambda path: contextlib.nullcontext(False))
    DurableStore.create(folder, DIM, embedding_model=MODEL).close()
    errors = []

    def write(name):
        try:
            with DurableStore.open(folder) as store:
                for i in range(6):
                    add(store, [f"{name}-{i}-{j}" for j in range(3)], attributes={f"of {name}": [i] * 3})
                    if i % 3 == 2:
                        store.remove([f"{name}-{i}-1"])
                        store.compact()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with DurableStore.open(folder) as store:
        expected = {f"{n}-{i}-{j}" for n in "abc" for i in range(6) for j in range(3)}
        assert set(store.facts.ids) == expected - {f"{n}-{i}-1" for n in "abc" for i in (2, 5)}
        assert len(set(store.facts.view().sequence.tolist())) == store.facts.view().rows
        store._replica.record.check_unique()


def test_threads_share_one_store(store):
    retriever, query = Retriever(store.facts), vectors(1, 9)[0]
    errors = []

    def write(name):
        try:
            for i in range(5):
                add(store, [f"{name}-{i}"])
                retriever.search(query, min_relevance=-1.0)
                store.upsert([f"{name}-{i}"], ["again"], vectors(1, i))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert set(store.facts.ids) == {f"{n}-{i}" for n in "abcd" for i in range(5)}
    assert contents(store.facts) == reopened(store)


def test_a_commit_that_fails_changes_nothing(big, monkeypatch):
    import lance

    before, version = contents(big.facts), big.version

    def full(*_, **__):
        raise OSError(
            "LanceError(IO): Generic error: No space left on device (os error 28), /x/rust/lance/src/a.rs:1:2"
        )

    monkeypatch.setattr(lance.fragment, "write_fragments", full)
    for change in (
        lambda: add(big, ["x"]),
        lambda: big.upsert(["f0"], ["x"], vectors(1)),
        lambda: big.quarantine(["f0"]),
    ):
        with pytest.raises(OSError, match="No space left on device") as caught:
            change()
        assert caught.value.errno == 28
        assert "rust" not in str(caught.value)
    monkeypatch.undo()
    assert (contents(big.facts), big.version, big.quarantined()) == (before, version, {})
    assert reopened(big) == before


def test_every_file_of_a_commit_is_synced_before_it_is_acknowledged(store, monkeypatch):
    add(store, ["a", "b", "c"])
    synced = set()
    sync = os.fsync

    def noted(handle):
        synced.add(Path(os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    home = store.path / "facts.lance"
    for change in (
        lambda: add(store, ["d"]),
        lambda: store.upsert(["a"], ["again"], vectors(1)),
        lambda: store.remove(["b"]),
        lambda: add(store, ["e"], attributes={"new": [1]}),
        lambda: store.quarantine(["c"]),
    ):
        before = {path for path in home.rglob("*") if path.is_file()}
        synced.clear()
        change()
        new = {path for path in home.rglob("*") if path.is_file()} - before
        files = {
            path for path in new if path.parent.name in ("data", "_deletions", "_versions") and path.suffix != ".json"
        }
        assert any(path.suffix == ".manifest" for path in files)
        assert files <= synced
        assert {path.parent for path in files} <= synced


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


def test_a_reader_goes_on_while_others_compact(store):
    add(store, ["a", "b"])
    other = DurableStore.open(store.path)
    for i in range(4):
        add(store, [f"c{i}"])
        store.remove([f"c{i}"] if i % 2 else [])
        store.compact()
        assert other.quarantined() == {}
        assert other.facts.ids == ["a", "b"]
        assert other.stats()["facts"] == 2
    assert len(other.versions()) == 1
    assert other.refresh()
    assert contents(other.facts) == contents(store.facts)


# One file


def test_an_export_comes_back_whole(big, tmp_path):
    add(big, ["plain", "kept"], expires_at=[None, 4e9], importance=[0.25, 3], position=[7, None])
    big.quarantine(["f0", "kept"], "doubtful")
    big.quarantine(["f1"])
    assert big.export(tmp_path / "x.safetensors") == 298
    with DurableStore.from_export(tmp_path / "x.safetensors", tmp_path / "again") as again:
        assert contents(again.facts) == contents(big.facts)
        assert again.quarantined() == big.quarantined() == {"f0": "doubtful", "f1": None, "kept": "doubtful"}
        assert again.stats()["next_sequence"] == big.stats()["next_sequence"]
        assert again.expire(5e9) == 1
        again.release(["f0"])
        assert again.facts.ids[-1] == "f0"
        again.export(tmp_path / "y.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "store", "x.safetensors", "y.safetensors"]


def test_an_export_of_nothing_comes_back(store, tmp_path):
    assert store.export(tmp_path / "x.safetensors") == 0
    with DurableStore.from_export(tmp_path / "x.safetensors", tmp_path / "again") as again:
        assert again.facts.ids == []
        add(again, ["a"])


def test_bad_exports_are_refused_and_leave_nothing(big, tmp_path):
    from safetensors.numpy import load_file, save_file

    big.export(tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(raw[:-10])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    save_file({"a": np.zeros(3)}, str(tmp_path / "foreign.safetensors"))
    with exchange.Exchanged(tmp_path / "x.safetensors")._file as opened:
        metadata = opened.metadata()
    for name, change in {
        "twice": lambda t: t.update({"id.utf8": np.frombuffer(b"a" * len(t["id.utf8"]), np.uint8)}),
        "offsets": lambda t: t.update({"text.offsets": t["text.offsets"][::-1].copy()}),
        "short": lambda t: t.update(importance=t["importance"][1:]),
        "zeros": lambda t: t.update(embedding=np.zeros_like(t["embedding"])),
        "order": lambda t: t.update(sequence=t["sequence"][::-1].copy()),
        "lacking": lambda t: t.pop("text.utf8"),
    }.items():
        tensors = load_file(str(tmp_path / "x.safetensors"))
        change(tensors)
        save_file(tensors, str(tmp_path / f"{name}.safetensors"), metadata=metadata)
    names = ["torn", "empty", "foreign", "twice", "offsets", "short", "zeros", "order", "lacking"]
    for name in names:
        with pytest.raises(ValueError, match=r"safetensors|once|all zeros|twice"):
            DurableStore.from_export(tmp_path / f"{name}.safetensors", tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        DurableStore.from_export(tmp_path / "none.safetensors", tmp_path / "new")
    with pytest.raises(FileExistsError, match="found a durable store"):
        DurableStore.from_export(tmp_path / "x.safetensors", big.path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "new"))]


def test_a_store_in_memory_becomes_durable(tmp_path):
    plain = FactStore(DIM, embedding_model=MODEL, hash_key=b"key", dtype="float16")
    plain.add(["a", "b", "c"], ["a", "b", "c"], vectors(3), source=["s", None, ""], attributes={"t": ["x", None, "y"]})
    plain.remove(["b"])
    plain.upsert(["a"], ["again"], vectors(1, 2), position=[4])
    with DurableStore.from_facts(plain, tmp_path / "new") as store:
        assert contents(store.facts) == contents(plain)
        add(store, ["d"])
        assert store.facts.get(["d"])[0].sequence == plain.next_sequence
    with pytest.raises(ValueError, match="hash_key="):
        DurableStore.open(tmp_path / "new")
    with DurableStore.open(tmp_path / "new", hash_key=b"key") as again:
        assert again.facts.ids == ["c", "a", "d"]


def test_a_lance_dataset_of_others_is_refused(tmp_path):
    import lance
    import pyarrow as pa

    lance.write_dataset(pa.table({"a": [1]}), str(tmp_path / "facts.lance"))
    with pytest.raises(ValueError, match="found another Lance dataset"):
        DurableStore.open(tmp_path)


def test_a_later_format_is_refused(store):
    import lance

    lance.dataset(str(store.path / "facts.lance")).update_schema_metadata({"cdr:format_version": "2"})
    with pytest.raises(ValueError, match="format version 2, this version reads 1"):
        DurableStore.open(store.path)


def test_without_the_extra_it_is_named(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(ImportError, match=r"cdr-kernel\[store\]"):
        DurableStore.open(store.path)
    with pytest.raises(ImportError, match=r"cdr-kernel\[store\]"):
        DurableStore.create(store.path, DIM, embedding_model=MODEL)


@pytest.mark.parametrize("left", [0, 50, -1])
def test_a_commit_that_a_power_cut_has_torn_is_set_aside(store, capsys, left):
    """Its manifest was renamed into place but never synced, so nobody was told of it."""
    add(store, ["a"])
    expected = contents(store.facts)
    add(store, ["b"])
    (store.path / "snapshot").mkdir()
    manifest = min((store.path / "facts.lance" / "_versions").glob("*.manifest"))
    manifest.write_bytes(manifest.read_bytes()[:left])
    with DurableStore.open(store.path) as again:
        assert contents(again.facts) == expected
        assert "torn before anybody was told" in capsys.readouterr().err
        add(again, ["c"])
    with DurableStore.open(store.path) as third:
        assert third.facts.ids == ["a", "c"]


def test_a_record_that_is_damaged_otherwise_is_an_error(store):
    add(store, ["a"])
    add(store, ["b"])
    for file in (store.path / "facts.lance" / "data").iterdir():
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises((ValueError, OSError)):
        DurableStore.open(store.path)
    assert len(list((store.path / "facts.lance" / "_versions").glob("*.manifest"))) == 3


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "store.md").read_text()
    rng = np.random.default_rng(0)
    scope = {
        "ids": [f"f{i}" for i in range(40)],
        "texts": ["t"] * 40,
        "embeddings": rng.normal(size=(40, 384)),
        "sources": ["s"] * 40,
        "tenants": ["x", "y"] * 20,
        "moments": [None] * 40,
        "query": rng.normal(size=384),
        "session": Session(
            [SubQuery("s", "S", "s", rng.normal(size=384))], embedding_model="all-MiniLM-L6-v2", min_relevance=-1.0
        ),
    }
    exec(re.search(r"^```python\n(.*?)^```", page, re.M | re.S)[1], scope)
    assert len(scope["ranking"]) == 19
    assert len(scope["store"]) == 39


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


def test_only_the_newest_version_may_be_torn_and_a_damaged_store_is_not_made_anew(store):
    add(store, ["a"])
    manifests = list((store.path / "facts.lance" / "_versions").glob("*.manifest"))
    for manifest in manifests:
        manifest.write_bytes(manifest.read_bytes() + b"\n")  # Lance panics at these
    for _ in range(2):
        with pytest.raises((ValueError, OSError)):
            DurableStore.open(store.path)
    assert len(list((store.path / "facts.lance" / "_versions").glob("*.torn"))) == 1
    with pytest.raises(FileExistsError, match="a durable store"):
        DurableStore.create(store.path, DIM, embedding_model=MODEL)
    for manifest in (store.path / "facts.lance" / "_versions").glob("*.manifest"):
        manifest.unlink()
    with pytest.raises(FileExistsError, match="a durable store that is damaged"):
        DurableStore.create(store.path, DIM, embedding_model=MODEL)
