"""What changes do: facts in, out, quarantined, released, expired, each in one commit or not at all."""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime

import numpy as np
import pytest
from durables import DIM, MODEL, add, contents, made, reopened, snapshotted, vectors
from fact_stores import flip

from cdr_kernel import FactStore, Retriever
from cdr_kernel.durable import DurableStore, _mirror
from cdr_kernel.store import _expiry
from cdr_kernel.store import _fact_store as store_module


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


DAY = 86400.0


@pytest.fixture
def clock(monkeypatch):
    """The seconds that all clocks say, in a list of one."""
    said = [time.time()]
    monkeypatch.setattr(_expiry, "now", lambda: int(said[0] * 10**6))
    return said


def test_a_fact_past_its_time_is_withheld_and_nothing_is_written(store, clock):
    now = clock[0]
    soon = datetime.fromtimestamp(now + 1000, UTC)
    add(store, ["a", "b", "c", "d"], expires_at=[soon, now + 2000, None, now + 1000])
    store.quarantine(["d"])
    other = DurableStore.open(store.path)
    version = store.version
    clock[0] = now + 1500
    assert other.refresh()
    assert not other.refresh()
    assert other.facts.ids == ["b", "c"]
    assert other.quarantined() == {"d": None}
    assert "a" not in other
    assert (len(other), other.stats()["withheld"]) == (2, 1)
    with pytest.raises(KeyError, match="'a' not in the store"):
        other.facts.get(["a"])
    assert [fact.id for fact, _ in reopened(store)] == ["b", "c"]
    assert version == store.version == other.version
    other.release(["d"])
    assert other.facts.ids == ["b", "c"]  # it is past its time too
    add(other, ["late"], expires_at=[now - 1])
    assert other.facts.ids == ["b", "c"]
    assert other.remove(["late"]) == 1  # at once, whatever any clock says
    assert other.quarantine(["a"], "wrong") == 1
    assert other.stats()["withheld"] == 1


def test_what_a_wrong_clock_withheld_comes_back(store, clock):
    now = clock[0]
    add(store, ["a", "b", "c"], expires_at=[now + DAY, None, now + 400 * DAY])
    before, ranked = contents(store.facts), Retriever(store.facts)
    assert len(ranked.search(vectors(1)[0], min_relevance=-1.0).rows) == 3
    clock[0] = now + 365 * DAY
    store.refresh()
    assert store.facts.ids == ["b", "c"]
    store.snapshot()
    store.compact()
    assert store.expire() == 0
    with DurableStore.open(store.path) as wrong:
        assert wrong.facts.ids == ["b", "c"]
        clock[0] = now + 365 * DAY - 30  # a small step back lets nothing in
        assert not wrong.refresh()
    clock[0] = now
    assert store.refresh()
    assert contents(store.facts) == before
    assert len(ranked.search(vectors(1)[0], min_relevance=-1.0).rows) == 3
    assert reopened(store) == before  # from the snapshot that was written meanwhile
    shutil.rmtree(store.path / "snapshot")
    assert reopened(store) == before
    assert store.expire() == 0
    clock[0] = now + 8 * DAY
    assert store.expire() == 0  # the look of the wrong clock counts for nothing
    assert store.facts.ids == ["b", "c"]
    clock[0] = now + 15 * DAY
    assert store.expire() == 1
    clock[0] = now
    store.refresh()
    assert store.facts.ids == ["b", "c"]  # deleted for good


def test_a_fact_is_deleted_where_two_looks_a_week_apart_agree(store, clock):
    now = clock[0]
    add(store, ["a", "b", "c", "d"], expires_at=[now + 10, now + 8 * DAY, None, now + 10])
    store.quarantine(["d"])
    assert store.expire() == 0
    clock[0] = now + DAY
    assert store.expire() == 0
    clock[0] = now + 7.5 * DAY
    assert store.expire() == 0  # a week ago a's time was not past
    clock[0] = now + 9 * DAY
    assert store.expire() == 2  # it was at the look of the second day, and b's was not
    assert store.quarantined() == {}
    with DurableStore.open(store.path) as other:
        clock[0] = now + 15.9 * DAY
        assert other.expire() == 0  # the last look was before b's time
        assert other.facts.withheld.keys() == {"b"}
    clock[0] = now + 20 * DAY
    store.compact()
    assert store.facts.withheld == {}
    assert store.stats()["facts"] == 1
    clock[0] = now
    assert [fact.id for fact, _ in reopened(store)] == ["c"]


def test_what_is_past_its_time_can_be_deleted_at_once(store, clock):
    add(store, ["a", "b"], expires_at=[clock[0] - 1, None])
    assert store.expire(grace=0) == 1
    clock[0] -= 1000
    assert [fact.id for fact, _ in reopened(store)] == ["b"]
    for grace in (-1, True, "0", float("nan")):
        with pytest.raises(ValueError, match="grace: expected seconds of at least 0"):
            store.expire(grace=grace)


def test_a_fact_takes_the_place_of_one_that_is_past_its_time(store, clock):
    now = clock[0]
    add(store, ["a", "b"], expires_at=[now + 10, None])
    clock[0] = now + 20
    store.refresh()
    add(store, ["a"], seed=7)
    assert store.facts.ids == ["b", "a"]
    clock[0] = now
    store.refresh()
    assert store.facts.ids == ["b", "a"]
    assert [fact.id for fact, _ in reopened(store)] == ["b", "a"]
    clock[0] = now + 20
    with DurableStore.open(store.path) as other:
        assert other.facts.withheld == {}
        store.upsert(["b"], ["again"], vectors(1), expires_at=[now + 15])
        assert other.refresh()
        assert (other.facts.ids, list(other.facts.withheld)) == (["a"], ["b"])
        store.remove(["b"])
        other.refresh()
        assert other.facts.withheld == {}


def test_the_number_of_a_fact_names_it_whatever_the_clock_says(store, clock):
    now = clock[0]
    add(store, ["a", "b", "c"], expires_at=[now + 1000, None, now + 1000])
    numbers = store.facts.numbers_of(["a", "b", "c"])
    clock[0] = now + 2000
    store.refresh()
    assert store.facts.ids == ["b"]
    add(store, ["d"])
    store.upsert(["a"], ["a again"], vectors(1))
    added = [*numbers.tolist(), *store.facts.numbers_of(["d"]).tolist()]
    assert len(set(added)) == 4
    store.snapshot()
    with (
        DurableStore.open(store.path) as mapped,
        DurableStore.from_facts(mapped.facts, store.path.parent / "x") as copy,
    ):
        for each in (store, mapped, copy):
            for clock[0] in (now + 2000, now):
                each.refresh()
                assert each.facts.numbers_of(["a", "b", "c", "d"]).tolist() == added
                assert each.facts.ids_of(np.array(added)) == ["a", "b", "c", "d"]
            assert each.facts.ids == ["b", "c", "d", "a"]
    clock[0] = now + 2000
    store.refresh()
    store.remove(["c"])
    add(store, ["c"])
    assert store.facts.ids_of(numbers) == ["a", "b", None]
    assert store.facts.numbers_of(["c"])[0] > max(added)


def test_no_ranking_has_what_is_past_its_time_while_a_snapshot_is_taken_up(store, clock, monkeypatch):
    """Not for a moment: another thread may rank between any two steps."""
    now, seen = clock[0], []
    add(store, ["a", "b", "c"], expires_at=[now + 10, None, None])
    store.remove(["c"])
    clock[0] = now + 20
    store.refresh()
    adopt = FactStore.adopt

    def watched(facts, other):
        adopt(facts, other)
        seen.append(facts.view().ids)

    monkeypatch.setattr(FactStore, "adopt", watched)
    store.compact()
    store._replica.reread(store._replica.record, in_place=True)
    assert seen == [["b"], ["b"]]


def test_damage_to_the_ids_of_what_is_past_its_time_is_put_right(store, clock, monkeypatch):
    add(store, ["a", "b"], expires_at=[clock[0] - 1, None])
    store.snapshot()
    monkeypatch.setattr(store_module, "_AT_ONCE", 0)
    monkeypatch.setattr(DurableStore, "_check_behind", lambda self, facts: None)  # which would come upon it first
    (ids,) = (store.path / "snapshot").glob("*/ids.utf8")
    flip(ids, 0)
    with DurableStore.open(store.path) as again:
        assert (again.facts.ids, list(again.facts.withheld)) == (["b"], ["a"])
        assert "ids.utf8" in again.verify()


def test_a_store_in_memory_keeps_what_it_withholds(tmp_path):
    store = FactStore(DIM, embedding_model=MODEL)
    found = store.check(["a", "b", "c"], ["a", "b", "c"], vectors(3))
    store.apply(_expiry.expiring(found, [10, None, 10**9]))
    assert store.look(20) == (1, 0)
    assert store.look(20) == (0, 0)
    assert (store.ids, list(store.withheld), len(store.whole())) == (["b", "c"], ["a"], 3)
    assert store.compact() == 0
    store.remove(["b"])
    assert store.compact() == 1
    assert (store.ids, list(store.withheld), store.whole().ids) == (["c"], ["a"], ["a", "c"])
    store.save(tmp_path / "s")
    assert FactStore.load(tmp_path / "s").ids == ["a", "c"]
    other = FactStore(DIM, embedding_model=MODEL)
    other.adopt(store)
    assert other.look(-(10**9)) == (0, 1)
    assert other.ids == ["a", "c"]
    assert other.get(["a"])[0].text == "a"
    store.upsert(["a"], ["new"], vectors(1, 5))
    assert (store.ids, store.withheld) == (["c", "a"], {})
    assert store.numbers_of(["a"]) == 0
    assert store.ids_of(np.arange(4)) == ["a", None, "c", None]
    assert store.look(10**10) == (1, 0)
    assert store.remove(["c"]) == 1
    assert store.look(0) == (0, 0)


def test_expired_facts_are_out_where_nothing_can_be_written(store, monkeypatch):
    add(store, ["a", "b"], expires_at=[time.time() + 0.05, None])
    store.snapshot()

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "save.lock")

    monkeypatch.setattr(_mirror, "turn", refused)
    time.sleep(0.06)
    version = store.version
    with DurableStore.open(store.path) as again:
        assert again.facts.ids == ["b"]
        assert again.version == version
        assert not again.refresh()
        with pytest.raises(PermissionError):
            again.expire()
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
    assert store.expire(4.5e9, grace=0) == 0
    assert store.expire(5.5e9, grace=0) == 1


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
