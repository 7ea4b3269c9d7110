"""What changes do: facts in, out, quarantined, released, expired, each in one commit or not at all."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import numpy as np
import pytest
from durables import DIM, add, contents, made, reopened, snapshotted, vectors

from cdr_kernel import moments, replica
from cdr_kernel.durable import DurableStore


@pytest.fixture
def store(tmp_path):
    with made(tmp_path / "store") as store:
        yield store


@pytest.fixture
def big(store):
    return snapshotted(store)


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
