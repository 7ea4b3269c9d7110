"""What may be opened, made and put right: torn commits, damage, other people's data."""

from __future__ import annotations

import numpy as np
import pytest
from durables import DIM, MODEL, add, contents, made, reopened, vectors

from cdr_kernel import EmbeddingModelMismatch
from cdr_kernel.durable import DurableStore, _layout


@pytest.fixture
def store(tmp_path):
    with made(tmp_path / "store") as store:
        yield store


def test_bad_openings_say_what_is_wrong(store, tmp_path):
    with pytest.raises(EmbeddingModelMismatch, match=r"'toy', got 'other'; the store in .* is of 'toy'"):
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


@pytest.mark.parametrize("left", [0, 50, -1])
def test_a_commit_that_a_power_cut_has_torn_is_set_aside(store, caplog, left):
    """Its manifest was renamed into place but never synced, so nobody was told of it."""
    add(store, ["a"])
    expected = contents(store.facts)
    acknowledged = store.path / "facts.lance" / "_acknowledged"
    told = acknowledged.read_bytes()
    add(store, ["b"])
    acknowledged.write_bytes(told)
    (store.path / "snapshot").mkdir()
    manifest = min((store.path / "facts.lance" / "_versions").glob("*.manifest"))
    manifest.write_bytes(manifest.read_bytes()[:left])
    with DurableStore.open(store.path) as again:
        assert contents(again.facts) == expected
        assert "torn before anybody was told" in caplog.text
        add(again, ["c"])
    with DurableStore.open(store.path) as third:
        assert third.facts.ids == ["a", "c"]


@pytest.mark.parametrize("left", [0, -1])
def test_a_commit_that_was_acknowledged_is_never_set_aside(store, left):
    add(store, ["a"])
    store.upsert(["a"], ["again"], vectors(1), attributes={"tenant": ["x"]})
    manifest = min((store.path / "facts.lance" / "_versions").glob("*.manifest"))
    good = manifest.read_bytes()
    manifest.write_bytes(good[:left])
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{manifest.name}: damaged, its end was there"):
            DurableStore.open(store.path)
    manifest.write_bytes(good)
    assert reopened(store) == contents(store.facts)


def test_a_torn_commit_in_a_folder_that_cannot_be_written_is_named(store, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder / "save.lock"))

    add(store, ["a"])
    manifest = min((store.path / "facts.lance" / "_versions").glob("*.manifest"))
    manifest.write_bytes(manifest.read_bytes()[:9])
    monkeypatch.setattr(_layout, "turn", refuse)
    with pytest.raises(ValueError, match=r"\.manifest: expected .* bytes, found 9"):
        DurableStore.open(store.path)


def test_nor_is_one_before_an_acknowledged_commit_that_is_gone(store):
    """As whoever renames a damaged commit leaves it."""
    add(store, ["a"])
    add(store, ["b"])
    add(store, ["c"])
    newest, before = sorted((store.path / "facts.lance" / "_versions").glob("*.manifest"))[:2]
    newest.rename(newest.with_suffix(".torn"))
    with DurableStore.open(store.path) as again:
        assert again.facts.ids == ["a", "b"]
    before.write_bytes(before.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{before.name}: damaged, its end was there"):
        DurableStore.open(store.path)


def test_a_record_that_is_damaged_otherwise_is_an_error(store):
    add(store, ["a"])
    add(store, ["b"])
    for file in (store.path / "facts.lance" / "data").iterdir():
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises((ValueError, OSError)):
        DurableStore.open(store.path)
    assert len(list((store.path / "facts.lance" / "_versions").glob("*.manifest"))) == 3


def test_only_the_newest_version_may_be_torn_and_a_damaged_store_is_not_made_anew(store):
    add(store, ["a"])
    manifests = list((store.path / "facts.lance" / "_versions").glob("*.manifest"))
    for manifest in manifests:
        manifest.write_bytes(manifest.read_bytes() + b"\n")  # Lance panics at these
    (store.path / "facts.lance" / "_acknowledged").write_text("")  # as a power cut may leave it
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
