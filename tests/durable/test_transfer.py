"""One file for all facts: what cannot be written or read is said before anything is done."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("lance", reason="needs the store extra")
pytest.importorskip("safetensors", reason="needs the store extra")

import safetensors
from fact_stores import flip
from safetensors.numpy import load_file, save_file

from cdr_kernel.durable import DurableStore, _transfer


@pytest.fixture
def store(tmp_path):
    with DurableStore.create(tmp_path / "store", 4, embedding_model="m") as made:
        made.add(["a", "b"], ["x", "y"], np.eye(4)[:2], attributes={"lang": ["en", None], "year": [1, 2]})
        yield made


@pytest.fixture
def file(store, tmp_path):
    store.export(tmp_path / "facts")
    return tmp_path / "facts"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("none/facts", FileNotFoundError, "none to be a folder that is there"),
        ("file/facts", NotADirectoryError, "file to be a folder that is there"),
        ("folder", IsADirectoryError, "expected a file to write to, found a folder"),
    ],
)
def test_a_place_that_is_none_is_refused(store, tmp_path, name, error, said):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=said) as caught:
        store.export(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_takes_nothing_leaves_the_old_file(store, file, monkeypatch):
    before = file.read_bytes()

    def full(*args, **kwargs):
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match=r"facts: could not be written .*No space left"):
        store.export(file)
    assert file.read_bytes() == before
    assert {path.name for path in file.parent.iterdir()} == {"store", "facts"}


@pytest.mark.parametrize(("name", "error"), [("nothing", FileNotFoundError), ("store", IsADirectoryError)])
def test_what_is_no_file_is_not_read(file, tmp_path, name, error):
    with pytest.raises(error, match=f"{name}: expected a file of exported facts, found"):
        DurableStore.from_export(tmp_path / name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_that_is_cut_off_anywhere_is_not_read(file, tmp_path):
    whole, cut = file.read_bytes(), tmp_path / "cut"
    for size in {0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut: expected a safetensors file"):
            _transfer.Exchanged(cut)
    for other in (whole + b"x", b"{}\n", b"PK\x03\x04" * 100, b'{"id": "a", "text": "x"}\n' * 50):
        cut.write_bytes(other)
        with pytest.raises(ValueError, match="cut: expected a safetensors file"):
            _transfer.Exchanged(cut)


def rewritten(file, metadata=None, **tensors):
    """The file with other settings or tensors, as another program writes it, without checksums."""
    with safetensors.safe_open(file, "numpy") as opened:
        about = {**opened.metadata(), **(metadata or {})}
    del about["identity"], about["checksums"]
    save_file({**load_file(file), **tensors}, file, metadata=about)
    return file


def test_tensors_of_other_types_are_not_read(file):
    whole = file.read_bytes()
    tensors = load_file(file)
    for name, tensor in tensors.items():
        for kind in (np.uint8, np.int64, np.float32, np.float64):
            if tensor.dtype == kind:
                continue
            file.write_bytes(whole)
            with pytest.raises(ValueError, match=rf"facts: {name}: expected {tensor.dtype.name}, found "):
                _transfer.Exchanged(rewritten(file, **{name: tensor.astype(kind)}))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"format": "other"}, "expected format 'cdr-facts' version 1, found 'other' version '1'"),
        ({"format_version": "2"}, "found 'cdr-facts' version '2'"),
        ({"dtype": "int8"}, "expected the settings of a store"),
        ({"dtype": "nonsense"}, "expected the settings of a store"),
        ({"dtype": "float64"}, "embedding: expected float64, found F32"),
        ({"dim": "5"}, "embedding: expected shape"),
        ({"next_sequence": "x"}, "expected the settings of a store"),
        ({"attributes": '{"lang": "bytes"}'}, "expected the settings of a store"),
    ],
)
def test_settings_that_are_none_are_not_read(file, metadata, said):
    with pytest.raises(ValueError, match=said):
        _transfer.Exchanged(rewritten(file, metadata))


@pytest.mark.parametrize("by", ["us", "another program"])
def test_what_was_written_is_read(file, by):
    found = _transfer.Exchanged(file if by == "us" else rewritten(file))
    assert (found.facts, found.dim, found.attributes) == (2, 4, {"lang": str, "year": int})
    (batch,) = found.batches()
    assert (batch["id"], batch["text"]) == (["a", "b"], ["x", "y"])
    assert batch["attributes"] == {"lang": ["en", None], "year": [1, 2]}


def test_a_flipped_bit_gives_no_other_facts(file):
    def read():
        found = _transfer.Exchanged(file)
        batches = [{**batch, "embedding": batch["embedding"].tobytes()} for batch in found.batches()]
        return found.about, found.next_sequence, found.attributes, batches

    truth, named = read(), 0
    for at in range(file.stat().st_size):
        flip(file, at, 1 << at % 8)
        said = None
        try:
            found = read()
        except ValueError as error:
            said = str(error)
        if said is None:
            assert found == truth
        else:
            assert str(file) in said
            named += 1
        flip(file, at, 1 << at % 8)
    assert named > 0.9 * file.stat().st_size
