"""The numbers by which tokens name facts: kept by upserts, copies and every kind of store, never read as another's."""

from __future__ import annotations

import numpy as np
import pytest

from cdr_kernel import FactStore
from cdr_kernel.shard import ShardedStore, partition
from cdr_kernel.shard._partition import manifest_of, open_shard
from cdr_kernel.store._numbering import MOST_BRANCHES, Numbering

DIM, MODEL = 4, "toy"
IDS = list("abcdef")
NUMBERS = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 7, "f": 5}  # b and c were upserted, e was removed and added again


def vectors(n):
    return np.random.default_rng(n).standard_normal((n, DIM)) + 0.5


def put(store, ids, how="add"):
    getattr(store, how)(list(ids), [f"text of {id}" for id in ids], vectors(len(ids)))


def changed(store):
    """A store in which `IDS` have `NUMBERS`."""
    put(store, "abcdef")
    put(store, "b", "upsert")
    store.remove(["e"])
    put(store, "e")
    put(store, "cb", "upsert")
    return store


def check(store, numbers=NUMBERS):
    """Both ways, and what is not there."""
    ids = [*numbers, "nobody"]
    assert store.numbers_of(ids).tolist() == [*numbers.values(), -1]
    named = np.array([*numbers.values(), 4, 99])  # 4 was e's, which was removed
    assert store.ids_of(named) == [*numbers, None, None]
    assert store.ids_of(named[:0]) == []
    assert store.numbers_of([]).tolist() == []


def made():
    return changed(FactStore(DIM, embedding_model=MODEL))


def test_an_upsert_keeps_the_number_and_an_add_gives_a_new_one():
    store = made()
    check(store)
    assert [fact.sequence for fact in store.get(["b", "c"])] == [9, 8]
    store.remove(["a"])
    assert store.ids_of(np.array([0, 1])) == [None, "b"]
    assert store.compact() > 0
    numbers = {id: number for id, number in NUMBERS.items() if id != "a"}
    check(store, numbers)
    put(store, "ab", "upsert")
    check(store, {**numbers, "a": store.next_sequence - 2})


def test_a_folder_keeps_numbers_and_whose_they_are(tmp_path):
    store = made()
    store.save(tmp_path / "s")
    loaded = FactStore.load(tmp_path / "s")
    check(loaded)
    assert loaded.numbering == store.numbering
    put(loaded, "b", "upsert")
    check(loaded)
    loaded.save(tmp_path / "s")
    check(FactStore.load(tmp_path / "s"))
    other = FactStore(DIM, embedding_model=MODEL)
    other.adopt(loaded)
    check(other)
    assert other.numbering == loaded.numbering
    assert store.empty().numbering != store.numbering


def test_two_copies_give_numbers_of_their_own(tmp_path):
    """Both give number 10, to different facts: the number of one is none of the other's."""
    made().save(tmp_path / "s")
    one, two = FactStore.load(tmp_path / "s"), FactStore.load(tmp_path / "s")
    put(one, "x")
    put(two, "y")
    put(two, "z")
    assert one.numbers_of("x").tolist() == two.numbers_of("y").tolist() == [10]
    assert [one.numbering.origin(n) == two.numbering.origin(n) for n in (9, 10, 11)] == [True, False, False]
    assert two.numbering.origin(10) == two.numbering.origin(11) != two.numbering.origin(9)
    two.save(tmp_path / "s")
    again = FactStore.load(tmp_path / "s")
    assert again.numbering == two.numbering
    put(again, "w")
    assert [again.numbering.origin(n) == two.numbering.origin(n) for n in (9, 10, 11, 12)] == [True, True, True, False]


def test_the_ids_that_a_store_remembers_are_bounded(tmp_path):
    store = made()
    for i in range(MOST_BRANCHES + 3):
        store.numbering = store.numbering.branched(10 + i)
    assert len(store.numbering.branches) == MOST_BRANCHES
    assert store.numbering.origin(11) is None
    assert store.numbering.origin(13) is not None
    store.save(tmp_path / "s")
    assert FactStore.load(tmp_path / "s").numbering == store.numbering


@pytest.mark.parametrize(
    "listed",
    [
        None, [], {}, [[0]], [[0, "x"]], [["0", "0" * 16]], [[-1, "0" * 16]], [[True, "0" * 16]], [[2**63, "0" * 16]],
        [[0, "0" * 17]], [[0, "G" * 16]], [[1, "0" * 16], [1, "1" * 16]], [[0, "0" * 16]] * 2,
        [[i, "0" * 16] for i in range(MOST_BRANCHES + 1)],
    ],
)  # fmt: skip
def test_a_damaged_numbering_is_refused(listed):
    with pytest.raises(ValueError, match=r"x\.json: expected numbering"):
        Numbering.read(listed, "x.json")


@pytest.mark.parametrize("by", ["source", "id"])
def test_shards_keep_the_numbers_of_the_whole(tmp_path, by):
    store = made()
    partition(store, tmp_path / "p", shards=3, by=by)
    assert manifest_of(tmp_path / "p")["numbering"] == store.numbering.listed()
    with ShardedStore.open(tmp_path / "p") as sharded:
        check(sharded)
        assert sharded.numbering == store.numbering
        put(sharded, "bf", "upsert")
        sharded.remove(["a"])
        put(sharded, "a", "upsert")
        numbers = {**NUMBERS, "a": 12}
        check(sharded, numbers)
        assert sharded.numbering.origin(12) != sharded.numbering.origin(9) == store.numbering.origin(9)
        sharded.add_shards(2)
        check(sharded, numbers)
        sharded.compact()
        sharded.save()
        check(sharded, numbers)
    with ShardedStore.open(tmp_path / "p") as again:
        check(again, numbers)
        assert again.numbering == sharded.numbering
    partition(tmp_path / "p", tmp_path / "q", shards=1)
    with ShardedStore.open(tmp_path / "q") as again:
        check(again, numbers)
    part, _ = open_shard(tmp_path / "q", "shard-0")
    assert part.numbering != sharded.numbering  # a shard is not the store


def test_a_store_that_was_split_goes_on_with_its_numbers():
    store = FactStore(DIM, embedding_model=MODEL)
    put(store, "abcdef")
    numbering = store.numbering
    with ShardedStore.split(store, shards=3, by="id") as sharded:
        put(sharded, "b", "upsert")
        sharded.remove(["e"])
        put(sharded, "e")
        put(sharded, "cb", "upsert")
        check(sharded)
        assert sharded.numbering == numbering


class TestDurable:
    @pytest.fixture(autouse=True)
    def needs_lance(self):
        pytest.importorskip("lance", reason="needs the extra store")

    def open(self, folder):
        from cdr_kernel.durable import DurableStore

        return DurableStore.open(folder)

    @pytest.fixture
    def folder(self, tmp_path):
        from cdr_kernel.durable import DurableStore

        with DurableStore.create(tmp_path / "d", DIM, embedding_model=MODEL) as store:
            changed(store)
        return tmp_path / "d"

    def test_the_record_keeps_numbers(self, folder):
        with self.open(folder) as store:
            check(store.facts)
            numbering = store.facts.numbering
            store.snapshot()
            put(store, "b", "upsert")
        with self.open(folder) as store:  # from the snapshot, and what came since
            check(store.facts)
            store.compact()
            check(store.facts)
            put(store, "g")
            assert store.facts.numbering == numbering  # one record, however many open it
        with self.open(folder) as one, self.open(folder) as two:
            put(one, "h")
            put(two, "i")
            one.refresh()
            assert one.facts.numbers_of("ghi").tolist() == two.facts.numbers_of("ghi").tolist() == [11, 12, 13]

    def test_quarantine_keeps_the_number(self, folder):
        with self.open(folder) as store:
            store.quarantine(["b", "d"], "wrong")
            check(store.facts)
            put(store, "b", "upsert")
            store.quarantine(["b"], "still")
            check(store.facts)
        with self.open(folder) as store:
            assert store.quarantined() == {"d": "wrong", "b": "still"}
            check(store.facts)
            store.release(["b", "d"])
            check(store.facts)
            assert [fact.sequence for fact in store.facts.get(["b", "d"])] == [11, 12]
        with self.open(folder) as store:
            check(store.facts)

    def test_shards_of_its_facts_give_numbers_of_their_own(self, folder):
        with self.open(folder) as store, ShardedStore.split(store.facts, shards=2) as sharded:
            put(store, "x")
            put(sharded, "y")
            check(sharded)
            assert store.facts.numbers_of("x").tolist() == sharded.numbers_of("y").tolist() == [10]
            assert sharded.numbering.origin(9) == store.facts.numbering.origin(9)
            assert sharded.numbering.origin(10) != store.facts.numbering.origin(10)

    def test_no_number_is_given_twice(self, folder):
        with self.open(folder) as store:
            put(store, "z")
            store.remove(["z"])
        with self.open(folder) as store:
            assert store.facts.next_sequence == 11
            check(store.facts)

    def test_copies_have_the_numbers_and_give_their_own(self, folder, tmp_path):
        from cdr_kernel.durable import DurableStore

        pytest.importorskip("safetensors", reason="needs the extra store")
        with self.open(folder) as store:
            store.quarantine(["d"], None)
            store.export(tmp_path / "all.safetensors")
            facts = store.facts
        with DurableStore.from_export(tmp_path / "all.safetensors", tmp_path / "e") as copy:
            check(copy.facts)
            put(copy, "x")
            assert copy.facts.numbering.origin(9) == facts.numbering.origin(9)
            assert copy.facts.numbering.origin(10) != facts.numbering.origin(10)
        with DurableStore.from_facts(made(), tmp_path / "f") as copy:
            check(copy.facts)

    def test_shards_in_datasets(self, folder, tmp_path):
        from cdr_kernel.shard import LanceHome

        home = LanceHome(str(tmp_path / "lance"), cache=str(tmp_path / "cache"))
        with self.open(folder) as store:
            partition(store.facts, home, shards=2)
            numbering = store.facts.numbering
        with ShardedStore.open(home) as sharded:
            check(sharded)
            assert sharded.numbering == numbering
            put(sharded, "b", "upsert")
            sharded.save()
        with ShardedStore.open(home) as sharded:
            check(sharded)
