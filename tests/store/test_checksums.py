"""Checksums by block: what has changed, and where; and that nothing is read before it was checked."""

from __future__ import annotations

import gc
import os
import threading
import zlib

import numpy as np
import pytest
from fact_stores import contents, filled, flip

from cdr_kernel import _C, Columns, DamagedFileError, FactStore, Retriever, cdr_score
from cdr_kernel.store import _checksums
from cdr_kernel.store import _fact_store as store_module
from cdr_kernel.store._checksums import Files

BLOCK = 4096


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_checksums, "BLOCK", 16)
    (tmp_path / "long").write_bytes(bytes(range(40)))
    (tmp_path / "empty").write_bytes(b"")
    return tmp_path


def crc32c(data):
    """Bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_checksum_is_crc_32c():
    assert _C.crc32c(b"123456789") == _C.crc32c(b"123456789", generic=True) == 0xE3069283 == crc32c(b"123456789")
    assert _C.crc32c(b"") == 0
    assert _C.crc32c(b"123456789") != zlib.crc32(b"123456789")
    data = np.random.default_rng(0).bytes(3 * 12288 + 100)
    for size in (*range(20), 4095, 4096, 4097, 12287, 12288, 12289, 24576, 3 * 12288 + 99):
        for start in (0, 1):
            part = data[start : start + size]
            expected = _C.crc32c(part, generic=True)
            assert _C.crc32c(part) == expected
            assert _C.crc32c(part[size // 3 :], _C.crc32c(part[: size // 3])) == expected
            assert size > 5000 or crc32c(part) == expected


def test_every_change_is_found_with_its_block(folder):
    listed = _checksums.of_folder(folder)
    assert {name: (each["bytes"], len(each["crc32c"])) for name, each in listed.items()} == {
        "long": (40, 3 * 8),
        "empty": (0, 0),
    }
    assert listed["long"] == _checksums.of_bytes(bytes(range(40)))

    def check():
        files = Files(folder, listed, folder / "manifest.json")
        assert not files.content("empty")
        return files.content("long")

    good = check()
    assert good == bytes(range(40))
    for at in range(40):
        flip(folder / "long", at)
        with pytest.raises(DamagedFileError, match=f"long: block {at // 16} is not as it was written") as caught:
            check()
        assert (caught.value.file, caught.value.block) == (folder / "long", at // 16)
        flip(folder / "long", at)
    (folder / "long").write_bytes(good[:32])
    with pytest.raises(DamagedFileError, match="long: expected 40 bytes, found 32"):
        check()
    (folder / "long").write_bytes(good)
    (folder / "empty").write_bytes(b"x")
    with pytest.raises(DamagedFileError, match="empty: expected 0 bytes, found 1"):
        check()
    (folder / "empty").unlink()
    with pytest.raises(DamagedFileError, match="empty: expected 0 bytes, found no file"):
        check()


@pytest.mark.parametrize("listed", [None, 5, {}, {"bytes": 40}, {"bytes": 40, "crc32c": "zz"}, {"bytes": -1}])
def test_a_file_without_checksums_is_not_opened(folder, listed):
    with pytest.raises(DamagedFileError, match=r"manifest\.json: expected the size and the checksums of long"):
        Files(folder, {"long": listed}, folder / "manifest.json").file("long")
    with pytest.raises(DamagedFileError, match="long: expected checksums of 3 blocks, found 1"):
        Files(folder, {"long": {"bytes": 40, "crc32c": "0" * 8}}, folder / "manifest.json").file("long")


def test_a_file_that_becomes_shorter_is_an_error_and_not_the_end(folder):
    file = Files(folder, _checksums.of_folder(folder), folder / "manifest.json").file("long")
    file.check(0, 16)
    os.truncate(folder / "long", 16)
    with pytest.raises(DamagedFileError, match="long: expected 40 bytes, found 16"):
        file.check()
    file.check(0, 16)


def test_a_file_that_is_whole_is_held_open_no_longer(folder):
    file = Files(folder, _checksums.of_folder(folder), folder / "manifest.json").file("long")
    held = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 1
    assert file.unverified_bytes == 40
    assert [file.check_next(16) for _ in range(4)] == [16, 16, 8, 0]
    assert file.verified
    assert file.unverified_bytes == 0
    if os.path.isdir("/proc/self/fd"):
        assert len(os.listdir("/proc/self/fd")) == held - 1


def test_views_of_a_mapped_array_know_their_file(folder):
    listed = _checksums.of_folder(folder)
    for view in (
        lambda a: a,
        lambda a: a[16:].view(np.int64),
        lambda a: a.reshape(5, 8)[2:4],
        lambda a: np.asarray(a)[::-1][::2],
        lambda a: memoryview(a)[20:36],
    ):
        file = Files(folder, listed, folder / "manifest.json")
        part = np.asarray(view(file.mapped("long")))
        _C.check_read(part)
        flip(folder / "long", 20)
        _C.check_read(np.asarray(view(file.mapped("long"))))  # it was checked before
        with pytest.raises(DamagedFileError, match="long: block 1"):
            _C.check_read(np.asarray(view(Files(folder, listed, folder / "manifest.json").mapped("long"))))
        flip(folder / "long", 20)
        assert part.size
    _C.check_read(np.zeros(3))
    _C.check_read(np.arange(40, dtype=np.uint8), np.array([2]))


class TestLazily:
    """A store that is mapped and not checked at once, as one of more than 64 MiB."""

    @pytest.fixture
    def saved(self, tmp_path, monkeypatch):
        monkeypatch.setattr(store_module, "_AT_ONCE", 0)
        monkeypatch.setattr(store_module, "_check_behind", lambda files: None)
        monkeypatch.setattr(_checksums, "BLOCK", BLOCK)
        store = filled(2000, dim=16)
        store.save(tmp_path)
        return tmp_path, store

    def file(self, folder, name):
        (data,) = folder.glob("data-*")
        return data / name

    def test_a_load_reads_no_more_than_it_must(self, saved):
        folder, store = saved
        loaded = FactStore.load(folder)
        assert not loaded.verified
        large = sum(self.file(folder, name).stat().st_size for name in ("embeddings.npy", "texts.utf8", "tokens.npy"))
        assert loaded.view()._storage.files.unverified_bytes > 0.9 * large
        told = []
        loaded.verify(told.append)
        assert loaded.verified
        assert sum(told) >= 0.9 * large
        loaded.verify(lambda count: pytest.fail("checked again"))
        assert contents(loaded) == contents(store)
        assert FactStore.load(folder, verify=True).verified
        assert filled().verified

    @pytest.mark.parametrize(
        ("name", "row", "read"),
        [
            ("embeddings.npy", 1500, lambda store, rows: store.view().take(rows)),
            ("embeddings.npy", 1500, lambda store, rows: _C.gate_rows(*asked(store), rows)),
            ("embeddings.npy", 1500, lambda store, rows: _C.column_values(*asked(store), rows)),
            ("texts.utf8", 1500, lambda store, rows: store.view().texts(rows)),
            ("texts.utf8", 1500, lambda store, rows: store.view().facts(rows)),
            ("ids.utf8", 1500, lambda store, rows: store.view().ids_at(rows)),
            ("ids.utf8", 1500, lambda store, rows: store.view().holds(rows, {"f1"})),
            ("tokens.npy", 1500, lambda store, rows: _C.take_tokens(store.view().tokens.blocks, rows)),
        ],
    )
    def test_what_is_read_is_checked_and_nothing_else(self, saved, name, row, read):
        folder, store = saved
        path = self.file(folder, name)
        far, near = np.array([3, 100]), np.array([3, row])
        size = path.stat().st_size
        flip(path, size * row // 2000 + 64)
        loaded = FactStore.load(folder)
        truth = read(store, far)
        found = read(loaded, far)
        assert repr(found) == repr(truth)
        for _ in range(2):
            with pytest.raises(DamagedFileError, match=f"{name}: block") as caught:
                read(loaded, near)
            assert caught.value.block == (size * row // 2000 + 64) // BLOCK
        with pytest.raises(DamagedFileError, match=name):
            loaded.verify()
        assert not loaded.verified
        assert repr(read(loaded, far)) == repr(truth)

    @pytest.mark.parametrize(
        ("name", "read"),
        [
            ("embeddings.npy", lambda store: store.view().embeddings),
            ("embeddings.npy", lambda store: cdr_score(store.view().blocks, COLUMNS)),
            ("embeddings.npy", lambda store: cdr_score(store.view().blocks[0][::2], COLUMNS)),
            ("embeddings.npy", lambda store: Retriever(store).search(np.ones(16), min_relevance=0.1)),
            ("embeddings.npy", lambda store: Retriever(store).prepare()),
            ("embeddings.npy", lambda store: store.compact() or (store.remove(["f1"]), store.compact())),
            ("ids.utf8", lambda store: store.ids),
            ("ids.utf8", lambda store: "f3" in store),
            ("texts.utf8", lambda store: list(store.view()._storage.texts)),
            ("sources.utf8", lambda store: store.view().where(source="x")),
        ],
    )
    def test_what_reads_all_of_it_comes_upon_it(self, saved, name, read):
        folder, _ = saved
        store = FactStore.load(folder)
        if name == "sources.utf8":
            store.upsert(["f7"], ["t"], np.ones((1, 16)), source=["s"] * 1)
            store.save(folder)
        flip(self.file(folder, name))
        loaded = FactStore.load(folder)
        with pytest.raises(DamagedFileError, match=f"{name}: block"):
            read(loaded)

    def test_a_save_never_writes_damage_anew(self, saved, tmp_path):
        folder, _ = saved
        flip(self.file(folder, "embeddings.npy"))
        loaded = FactStore.load(folder)
        for target in (folder, folder / "other"):
            with pytest.raises(DamagedFileError, match=r"embeddings\.npy"):
                loaded.save(target)
        assert not (folder / "other").exists()

    def test_many_threads_check_at_once(self, saved):
        folder, store = saved
        loaded = FactStore.load(folder)
        wrong = []

        def read(seed):
            rows = np.random.default_rng(seed).integers(0, 2000, 300)
            if loaded.view().take(rows).tobytes() != store.view().take(rows).tobytes():
                wrong.append(seed)
            loaded.verify()

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert loaded.verified

    def test_the_rest_is_checked_behind_a_load(self, saved, monkeypatch):
        folder, _ = saved
        monkeypatch.undo()
        monkeypatch.setattr(_checksums, "BLOCK", BLOCK)
        monkeypatch.setattr(store_module, "_AT_ONCE", 0)
        loaded = behind(FactStore.load(folder))
        assert loaded.verified
        flip(self.file(folder, "embeddings.npy"))
        with pytest.warns(RuntimeWarning, match=r"embeddings\.npy: block .*: whatever reads it raises this"):
            loaded = behind(FactStore.load(folder))
        assert not loaded.verified
        del loaded
        gc.collect()


COLUMNS = Columns.spec(np.ones(16), min_relevance=0.1)


def asked(store):
    return store.view().blocks, store.view().squared_norms, COLUMNS.compiled


def behind(store):
    """The store when the threads that check have ended."""
    for thread in threading.enumerate():
        if thread.name == "cdr-verify":
            thread.join(30)
    return store


@pytest.mark.parametrize("mapped", [True, False])
def test_a_damaged_array_is_named_whatever_its_header_says(tmp_path, mapped):
    """Checksums that are right, so that the header is all that is wrong."""

    def read():
        files = Files(tmp_path, _checksums.of_folder(tmp_path), tmp_path / "manifest.json")
        return files.array("a.npy", np.float64, (3, 4), mapped=mapped)

    file = tmp_path / "a.npy"
    np.save(file, np.arange(12.0).reshape(3, 4))
    good = file.read_bytes()
    assert read().tolist() == np.arange(12.0).reshape(3, 4).tolist()
    np.savez(tmp_path / "z.npz", a=np.arange(12.0))
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    header = good[10:128]
    bad = [
        (tmp_path / "z.npz").read_bytes(),
        (tmp_path / "pickled.npy").read_bytes(),
        b"",
        good[:60],
        good[:-1],
        good.replace(b"False", b"True "),
        good.replace(b"<f8", b">f8"),
        good.replace(b"(3, 4)", b"(-3,4)"),
        good.replace(b"(3, 4)", b"(3,4.)"),
        good.replace(b"(3, 4)", b"9**9**"),
        *(good.replace(header, (text + b" " * 118)[:117] + b"\n") for text in NO_HEADERS),
    ]
    for raw in bad:
        file.write_bytes(raw)
        with pytest.raises(DamagedFileError, match=r"a\.npy: (not a readable array|expected float64 \[3, 4\])"):
            read()


NO_HEADERS = [
    b"(" * 50,
    b"{" * 50,
    b"'" * 3,
    b"5",
    b"[{}]",
    b"{}",
    b"\xff" * 20,
    b"\0" * 20,
    b"{'descr': '', 'fortran_order': False, 'shape': (3, 4), }",
    b"{'descr': ('<f8',), 'fortran_order': False, 'shape': (3, 4), }",
    b"{'descr': [()], 'fortran_order': False, 'shape': (3, 4), }",
    b"{'descr': '<f8', 'fortran_order': 1, 'shape': (3, 4), }",
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (999999999999999999999, 4), }",
    b"{'descr': '(((', 'fortran_order': False, 'shape': (3, 4), }",
]
