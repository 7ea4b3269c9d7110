"""Several who change one store at once, and those who look on."""

from __future__ import annotations

import contextlib
import threading

import pytest
from durables import DIM, MODEL, add, contents, made, reopened, vectors

from cdr_kernel import Retriever
from cdr_kernel.durable import DurableStore, _mirror


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(tmp_path):
    with made(tmp_path / "store") as store:
        yield store


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


def test_writers_without_a_lock_lose_nothing(folder, monkeypatch):
    """On a mount that knows no locks Lance's own check of commits is all there is."""
    monkeypatch.setattr(_mirror, "turn", lambda path: contextlib.nullcontext(False))
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
