"""Stores of every kind, opened by their path."""

from __future__ import annotations

import pytest

from cdr_kernel import FactStore, open_store, partition
from cdr_kernel.shard import ShardedStore


@pytest.fixture
def facts():
    store = FactStore(2, embedding_model="toy")
    store.add(["a", "b"], ["pods", "nodes"], [[1.0, 0.0], [0.0, 1.0]])
    return store


def test_a_folder_of_facts(facts, tmp_path):
    facts.save(tmp_path / "store")
    opened = open_store(tmp_path / "store")
    assert isinstance(opened, FactStore)
    assert opened.ids == ["a", "b"]


def test_a_partition(facts, tmp_path):
    partition(facts, tmp_path / "shards", shards=2)
    opened = open_store(tmp_path / "shards")
    assert isinstance(opened, ShardedStore)
    assert len(opened) == 2


def test_a_durable_store(facts, tmp_path):
    pytest.importorskip("lance")
    from cdr_kernel import DurableStore

    DurableStore.from_facts(facts, tmp_path / "durable").close()
    with open_store(tmp_path / "durable") as opened:
        assert isinstance(opened, DurableStore)
        assert sorted(opened.facts.ids) == ["a", "b"]


def test_a_folder_without_a_store(tmp_path):
    with pytest.raises(FileNotFoundError, match="manifest"):
        open_store(tmp_path)


def test_a_store_of_another_key(facts, tmp_path):
    facts.save(tmp_path / "store")
    with pytest.raises(ValueError, match="hash_key"):
        open_store(tmp_path / "store", hash_key=7)
