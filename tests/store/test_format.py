"""A saved store comes back whole, or says what is wrong; saves and loads never meet half of one another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from fact_stores import change, contents, facts, filled, reseal

from cdr_kernel import FactStore
from cdr_kernel.store import _atomic_folder as folder_module
from cdr_kernel.store import _columns, _format


def written(change):
    """A change of the data that was there when the store was saved: its checksums are right."""

    def what(path, data, manifest):
        change(data)
        reseal(path / "manifest.json")

    return what


class TestSaveAndLoad:
    @pytest.mark.parametrize("mmap", [True, False])
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
    def test_round_trip(self, tmp_path, dtype, mmap):
        store = FactStore(3, embedding_model="m1", dtype=dtype)
        texts = ["plain", "", "ünï¢ødé 日本語 🎉", "lone \ud800 surrogate", "nul \0 inside", "line\nbreak"]
        store.add(
            [f"id {t}" for t in texts], texts, np.random.default_rng(0).standard_normal((6, 3)),
            importance=np.arange(6), source=["", None, "s", "=", "日本", "x"], position=[0, None, 2, 3, 4, 2**63 - 1],
        )  # fmt: skip
        store.remove(["id plain"])
        store.save(tmp_path / "s")
        loaded = FactStore.load(tmp_path / "s", mmap=mmap)
        assert contents(loaded) == contents(store)
        loaded.add(["next"], ["next"], [[1, 2, 3]])
        assert loaded.get(["next"])[0].sequence == 6
        assert isinstance(FactStore.load(tmp_path / "s", mmap=mmap).view().blocks[0], np.memmap) is False
        assert len(FactStore.load(tmp_path / "s")) == 5  # the file did not change

    def test_adding_to_a_mapped_store_and_saving_over_itself(self, tmp_path):
        filled(20).save(tmp_path)
        store = FactStore.load(tmp_path)
        store.add(*facts(5, 20), np.ones((5, 4)))
        store.upsert(["f2"], ["other"], np.full((1, 4), 3.0))
        assert [len(b) for b in store.view().blocks] == [20, 6]
        store.save(tmp_path)
        again = FactStore.load(tmp_path)
        assert contents(again) == contents(store)
        store.compact()
        assert contents(again) == contents(store)

    def test_all_ids_and_texts_are_read_in_pieces(self, tmp_path, monkeypatch):
        texts = ["", "a", "é", "\ud83d", "\ude00", "🎉", "", "last", ""]  # the halves of a pair stay two
        store = FactStore(1, embedding_model="m1")
        store.add([f"{i}{t}" for i, t in enumerate(texts)], texts, np.ones((9, 1)))
        store.save(tmp_path)
        for size in (1, 2, 3, 8, 9, 100):
            for module in (_columns, _format):
                monkeypatch.setattr(module, "CHUNK", size)
            loaded = FactStore.load(tmp_path)
            storage = loaded.view()._storage
            assert list(storage.texts) == list(storage.texts[:]) == texts
            assert loaded.ids == store.ids
            loaded.remove(["1a", "8"])
            loaded.add(["new"], ["new"], [[1.0]])
            assert [loaded.view().row_of(i) for i in loaded.ids] == [0, 2, 3, 4, 5, 6, 7, 9]
            loaded.save(tmp_path / str(size))
            assert contents(FactStore.load(tmp_path / str(size))) == contents(loaded)

    def test_empty_store(self, tmp_path):
        FactStore(7, embedding_model="m1").save(tmp_path / "s")
        store = FactStore.load(tmp_path / "s")
        assert (len(store), store.dim) == (0, 7)
        store.add(["a"], ["a"], np.ones((1, 7)))
        assert len(store) == 1

    def test_arrays_can_be_mapped_aligned(self, tmp_path):
        filled().save(tmp_path)
        data = next(tmp_path.glob("data-*"))
        for file in data.glob("*.npy"):
            assert np.load(file, mmap_mode="r", allow_pickle=False).offset % 64 == 0

    def test_a_failed_save_keeps_the_old_store(self, tmp_path, monkeypatch):
        old = filled(10)
        old.save(tmp_path)
        new = filled(30, seed=1)
        for module, name in (
            (_format, "_save_strings"),
            (_format, "_save_rows"),
            (folder_module, "sync_folder"),
        ):
            monkeypatch.setattr(module, name, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                new.save(tmp_path)
            monkeypatch.undo()
            assert contents(FactStore.load(tmp_path)) == contents(old)
            assert len(list(tmp_path.glob("data-*"))) == 1

    def test_killed_while_saving_the_old_store_opens(self, tmp_path):
        old = filled(10)
        old.save(tmp_path)
        script = f"""
            import os, numpy as np
            from cdr_kernel import FactStore; from cdr_kernel.store import _format as m
            s = FactStore(4, embedding_model="m1")
            s.add(["x"], ["x"], np.ones((1, 4)))
            m._save_strings = lambda *_: os._exit(9)
            s.save({str(tmp_path)!r})
        """
        assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode == 9
        assert contents(FactStore.load(tmp_path)) == contents(old)
        filled(3).save(tmp_path)
        assert len(list(tmp_path.glob("data-*"))) == 1  # what the dead process left is swept up

    def test_only_a_store_or_an_empty_folder_is_written_to(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(FileExistsError, match="found other files"):
            filled().save(tmp_path)
        with pytest.raises(FileExistsError, match="expected a store or a new folder, found a file"):
            filled().save(tmp_path / "notes.txt")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]
        for manifest in ('{"name": "a web app"}', "[1]", "not json"):
            (tmp_path / "manifest.json").write_text(manifest)
            with pytest.raises(FileExistsError, match="found other files"):
                filled().save(tmp_path)
            assert (tmp_path / "manifest.json").read_text() == manifest

    @pytest.mark.parametrize("where", ["_save_strings", "replace"])
    def test_killed_in_its_first_save_the_folder_can_be_saved_to(self, tmp_path, where):
        script = f"""
            import os, numpy as np
            from cdr_kernel import FactStore; from cdr_kernel.store import _format as m
            s = FactStore(4, embedding_model="m1")
            s.add(["x"], ["x"], np.ones((1, 4)))
            if {where!r} == "_save_strings":
                m._save_strings = lambda *_: os._exit(9)
            else:
                os.replace = lambda *_: os._exit(9)
            s.save({str(tmp_path / "s")!r})
        """
        assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode == 9
        assert any((tmp_path / "s").iterdir())
        with pytest.raises(FileNotFoundError, match="no store here"):
            FactStore.load(tmp_path / "s")
        (tmp_path / "s" / "scan-0123456789abcdef").mkdir()
        (tmp_path / "s" / "scan.json").write_text("")
        filled(3).save(tmp_path / "s")
        assert len(FactStore.load(tmp_path / "s")) == 3
        assert len(list((tmp_path / "s").glob("*data-*"))) == 1
        for theirs in ("data-2024", "data-0123456789ABCDEF", "manifest.json.bak"):
            (tmp_path / theirs).mkdir()
            (tmp_path / theirs / theirs).mkdir()
            with pytest.raises(FileExistsError, match="found other files"):
                filled().save(tmp_path / theirs)

    def test_two_first_saves_take_turns(self, tmp_path, monkeypatch):
        first, second = filled(10), filled(20)
        write = _format.write
        other = threading.Thread(target=second.save, args=(tmp_path / "s",))

        def write_slowly(*arguments):
            monkeypatch.undo()
            other.start()
            other.join(0.2)
            return write(*arguments)

        monkeypatch.setattr(_format, "write", write_slowly)
        first.save(tmp_path / "s")
        other.join()
        assert contents(FactStore.load(tmp_path / "s")) == contents(second)

    def test_a_failed_save_leaves_no_new_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_format, "_save_rows", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            filled().save(tmp_path / "new")
        assert not (tmp_path / "new").exists()

    def test_two_saves_into_one_folder_take_turns(self, tmp_path, monkeypatch):
        filled(3).save(tmp_path)
        first, second = filled(10), filled(20)
        other = threading.Thread(target=second.save, args=(tmp_path,))
        replace = os.replace

        def replace_late(*paths):
            monkeypatch.undo()
            other.start()
            other.join(0.3)  # it would have swept up what the first is about to name
            replace(*paths)

        monkeypatch.setattr(os, "replace", replace_late)
        first.save(tmp_path)
        other.join()
        assert contents(FactStore.load(tmp_path)) == contents(second)
        assert len(list(tmp_path.glob("data-*"))) == 1

    @pytest.mark.parametrize("mmap", [True, False])
    def test_a_load_while_another_saves(self, tmp_path, monkeypatch, mmap):
        filled(10).save(tmp_path)
        new = filled(20, seed=1)
        real = FactStore.__init__

        def save_first(*arguments, **keywords):
            monkeypatch.undo()
            new.save(tmp_path)
            return real(*arguments, **keywords)

        monkeypatch.setattr(FactStore, "__init__", save_first)
        assert contents(FactStore.load(tmp_path, mmap=mmap)) == contents(new)

    def test_processes_that_save_and_load_at_once(self, tmp_path):
        self.save_and_load_at_once(tmp_path, seconds=1.0)

    @pytest.mark.slow
    def test_processes_that_save_and_load_at_once_for_long(self, tmp_path):
        self.save_and_load_at_once(tmp_path, seconds=10.0)

    def save_and_load_at_once(self, tmp_path, seconds):
        script = f"""
            import sys, time, numpy as np
            from cdr_kernel import FactStore
            role, n = sys.argv[1], 300
            end, times, seen = time.time() + {seconds}, 0, set()
            if role != "load":
                store = FactStore(8, embedding_model="m1")
                store.add([f"{{role}}{{i}}" for i in range(n)], [f"{{role}} {{i}}" for i in range(n)], np.ones((n, 8)))
            while time.time() < end or not times:
                if role == "load":
                    view = FactStore.load({str(tmp_path)!r}, mmap=times % 2 == 0).view()
                    ids, texts = view.ids, view.texts(range(n))
                    assert view.take(np.arange(n)).all()
                    assert texts == [f"{{i[0]}} {{i[1:]}}" for i in ids], (ids, texts)
                    assert len(ids) == n and len({{i[0] for i in ids}}) == 1, ids
                    seen.add(ids[0])
                else:
                    store.save({str(tmp_path)!r})
                times += 1
            print(role, times, *sorted(seen))
        """
        start = FactStore(8, embedding_model="m1")
        start.add([f"a{i}" for i in range(300)], [f"a {i}" for i in range(300)], np.ones((300, 8)))
        start.save(tmp_path)
        processes = [
            subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), role], stdout=subprocess.PIPE, text=True)
            for role in ("a", "b", "load", "load")
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0, 0], outputs
        assert len(FactStore.load(tmp_path)) == 300
        assert len(list(tmp_path.glob("*data-*"))) == 1

    def damage(self, tmp_path, what):
        filled().save(tmp_path)
        data = next(tmp_path.glob("data-*"))
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        what(tmp_path, data, manifest)
        return tmp_path

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            (lambda p, d, m: (d / "ids.utf8").unlink(), "expected 20 bytes, found no file"),
            (lambda p, d, m: (d / "embeddings.npy").write_bytes(b"x"), "bytes, found 1"),
            (lambda p, d, m: (p / "manifest.json").write_text("{"), "not readable JSON"),
            (lambda p, d, m: (p / "manifest.json").write_text("[]"), "expected a manifest"),
            (lambda p, d, m: (p / "manifest.json").write_text(json.dumps({**m, "format_version": 99})), "version 99"),
            (lambda p, d, m: reseal(p / "manifest.json", dim="4"), "expected dim to be int"),
            (lambda p, d, m: reseal(p / "manifest.json", data="../x"), "name a subfolder"),
            (lambda p, d, m: reseal(p / "manifest.json", facts=11), r"expected .* \[11"),
            (written(lambda d: (d / "importance.npy").write_bytes(b"\0" * 208)), "not a readable array"),
            (lambda p, d, m: (d / "tokens.npy").unlink(), "found no file"),
            (lambda p, d, m: (p / "manifest.json").write_text("[" * 200000), "not readable JSON"),
            (lambda p, d, m: reseal(p / "manifest.json", dim=True), "dim to be int, found True"),
            (lambda p, d, m: reseal(p / "manifest.json", files={}), "size and the checksums of .* in files"),
            (
                lambda p, d, m: reseal(p / "manifest.json", files={**m["files"], "tokens.npy": True}),
                "size and the checksums of tokens.npy in files, found True",
            ),
            (lambda p, d, m: reseal(p / "manifest.json", next_sequence=9), "found 9 in row 9"),
            (
                written(lambda d: change(d / "importance.npy", 3, np.nan)),
                r"importance.npy: expected 0 to .*, found nan in row 3",
            ),
            (written(lambda d: change(d / "importance.npy", 3, -1)), "found -1.0 in row 3"),
            (written(lambda d: change(d / "importance.npy", 3, np.inf)), "found inf in row 3"),
            (
                written(lambda d: change(d / "squared_norms.npy", 3, 0)),
                "squared_norms.npy: expected .*, found 0.0 in row 3",
            ),
            (written(lambda d: change(d / "squared_norms.npy", 3, np.inf)), "found inf in row 3"),
            (written(lambda d: change(d / "sequence.npy", 3, 2)), "sequence.npy: expected ascending"),
            (written(lambda d: change(d / "sequence.npy", 0, -1)), "found -1 in row 0"),
            (
                written(lambda d: change(d / "first_sequence.npy", 3, 5)),
                "first_sequence.npy: expected each",
            ),
            (
                written(lambda d: change(d / "first_sequence.npy", 5, 3)),
                "first_sequence.npy: expected each",
            ),
            (written(lambda d: change(d / "first_sequence.npy", 0, -1)), "found -1 in row 0"),
            (
                written(lambda d: change(d / "positions.npy", 3, -7)),
                "positions.npy: expected -1 to .*, found -7 in row 3",
            ),
            (written(lambda d: change(d / "ids_offsets.npy", 5, 0)), "ids_offsets.npy: expected offsets from 0 on"),
            (written(lambda d: change(d / "texts_offsets.npy", 0, 1)), "expected offsets from 0 on"),
            (
                written(lambda d: change(d / "sources_offsets.npy", 10, 1)),
                r"sources_offsets.npy: expected 0 \(the bytes",
            ),
            (written(lambda d: change(d / "token_offsets.npy", 5, 10**9)), "token_offsets.npy: expected offsets"),
            (written(lambda d: np.save(d / "token_offsets.npy", np.zeros(11, np.int64))), r"expected uint8 \[0\]"),
            (lambda p, d, m: reseal(p / "manifest.json", tokenizer=None), "expected tokenizer to be str"),
        ],
    )
    def test_a_damaged_store_says_what_is_wrong(self, tmp_path, what, message):
        with pytest.raises(ValueError, match=message):
            FactStore.load(self.damage(tmp_path, what))

    @pytest.mark.parametrize("mmap", [True, False])
    def test_an_id_that_is_there_twice_is_named_when_ids_are_indexed(self, tmp_path, mmap):
        def twice(path, data, manifest):
            (data / "ids.utf8").write_bytes(b"f0f1f2f3f1f5f6f7f8f9")
            reseal(path / "manifest.json")

        store = FactStore.load(self.damage(tmp_path, twice), mmap=mmap)
        for ask in (lambda: "f3" in store, lambda: store.view().row_of("f3"), lambda: store.remove(["f3"])):
            with pytest.raises(ValueError, match="'f1' more than once: the store it was loaded from is damaged"):
                ask()

    def test_no_store_and_pickles(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no store here"):
            FactStore.load(tmp_path / "nowhere")

        def pickled(path, data, manifest):
            np.save(data / "importance.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
            reseal(path / "manifest.json")

        with pytest.raises(ValueError, match=r"importance\.npy: not a readable array"):
            FactStore.load(self.damage(tmp_path, pickled))
