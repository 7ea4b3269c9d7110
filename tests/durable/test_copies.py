"""Whole stores in and out: everything comes back, or nothing is left."""

from __future__ import annotations

import numpy as np
import pytest
from durables import DIM, MODEL, add, contents, made, snapshotted, vectors

from cdr_kernel import FactStore
from cdr_kernel.durable import DurableStore, _mirror, _transfer


@pytest.fixture
def store(tmp_path):
    with made(tmp_path / "store") as store:
        yield store


@pytest.fixture
def big(store):
    return snapshotted(store)


def test_an_export_comes_back_whole(big, tmp_path):
    add(big, ["plain", "kept"], expires_at=[None, 4e9], importance=[0.25, 3], position=[7, None])
    big.quarantine(["f0", "kept"], "doubtful")
    big.quarantine(["f1"])
    assert big.export(tmp_path / "x.safetensors") == 298
    with DurableStore.from_export(tmp_path / "x.safetensors", tmp_path / "again") as again:
        assert contents(again.facts) == contents(big.facts)
        assert again.quarantined() == big.quarantined() == {"f0": "doubtful", "f1": None, "kept": "doubtful"}
        assert again.stats()["next_sequence"] == big.stats()["next_sequence"]
        assert again.expire(5e9, grace=0) == 1
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
    with _transfer.Exchanged(tmp_path / "x.safetensors")._file as opened:
        metadata = opened.metadata()
    for name, change in {
        "twice": lambda t: t.update({"id.utf8": np.frombuffer(b"a" * len(t["id.utf8"]), np.uint8)}),
        "offsets": lambda t: t.update({"text.offsets": t["text.offsets"][::-1].copy()}),
        "short": lambda t: t.update(importance=t["importance"][1:]),
        "zeros": lambda t: t.update(embedding=np.zeros_like(t["embedding"])),
        "order": lambda t: t.update(sequence=t["sequence"][::-1].copy()),
        "first": lambda t: t.update(first_sequence=t["sequence"] + 1),
        "lacking": lambda t: t.pop("text.utf8"),
    }.items():
        tensors = load_file(str(tmp_path / "x.safetensors"))
        change(tensors)
        save_file(tensors, str(tmp_path / f"{name}.safetensors"), metadata=metadata)
    names = ["torn", "empty", "foreign", "twice", "offsets", "short", "zeros", "order", "first", "lacking"]
    for name in names:
        with pytest.raises(ValueError, match=r"safetensors|once|all zeros|twice|first_sequence: expected 0 up"):
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


def test_nobody_is_told_that_a_new_store_has_no_snapshot(big, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_mirror, "_LONG_WORK", 1)
    caplog.set_level("INFO", "cdr_kernel")
    DurableStore.from_facts(big.facts, tmp_path / "copied").close()
    big.export(tmp_path / "f.safetensors")
    DurableStore.from_export(tmp_path / "f.safetensors", tmp_path / "exchanged").close()
    assert caplog.messages == []
    DurableStore.open(tmp_path / "copied").close()
    assert "reading 296 facts from the record, its snapshot is missing" in caplog.text
