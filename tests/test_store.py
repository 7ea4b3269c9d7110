from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_kernel import Columns, EmbeddingModelMismatch, Fact, FactStore, NGramGuard, Retriever, reference
from cdr_kernel import folder as folder_module
from cdr_kernel import store as store_module
from cdr_kernel.ngram import TokenHasher, take_tokens


def facts(n, start=0):
    return [f"f{i}" for i in range(start, start + n)], [f"text {i}" for i in range(start, start + n)]


def filled(n=10, dim=4, dtype="float32", seed=0):
    store = FactStore(dim, embedding_model="m1", dtype=dtype)
    ids, texts = facts(n)
    store.add(ids, texts, np.random.default_rng(seed).standard_normal((n, dim)))
    return store


def contents(store):
    view = store.view()
    rows = np.flatnonzero(view.alive)
    tokens = take_tokens(view.tokens.blocks, rows)
    return (
        view.facts(rows), view.take(rows).tobytes(), view.squared_norms[rows].tobytes(), store.embedding_model,
        store.dim, store.dtype, *(part.tobytes() for part in tokens), store.tokenizer_name, store.key_fingerprint,
    )  # fmt: skip


def change(file, row, value):
    """In place, so that whoever has mapped the file sees it too."""
    np.load(file, mmap_mode="r+")[row] = value


class TestAdd:
    def test_facts_come_back_as_they_went_in(self):
        store = FactStore(2, embedding_model="m1")
        added = store.add(
            ["a", "b"], ["one", ""], [[1, 2], [3, 4]], importance=[0.0, 2.5], source=["doc", None], position=[3, None]
        )
        assert added == (2, ())
        assert store.get(["b", "a"]) == [
            Fact("b", "", None, None, 2.5, 1),
            Fact("a", "one", "doc", 3, 0.0, 0),
        ]
        assert len(store) == 2
        assert "a" in store
        assert "c" not in store
        with pytest.raises(TypeError, match="ids: expected a sequence of str, got one str"):
            store.get("ab")  # which has facts for its letters
        assert store.view().embeddings.tolist() == [[1, 2], [3, 4]]
        assert store.view().squared_norms.tolist() == [5.0, 25.0]

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
    def test_vectors_are_cast_once_and_never_normalised(self, dtype):
        store = FactStore(3, embedding_model="m1", dtype=dtype)
        vectors = np.random.default_rng(0).standard_normal((20, 3)) * 7
        store.add(*facts(20), vectors)
        assert store.view().embeddings.dtype == dtype
        assert store.view().embeddings.tolist() == vectors.astype(dtype).tolist()

    @pytest.mark.parametrize(
        "convert",
        [
            lambda a: a.tolist(), lambda a: a.astype(np.float16).astype(np.float64), np.asfortranarray,
            lambda a: np.repeat(a, 2, axis=1)[:, ::2], lambda a: a.astype(">f8"), torch.from_numpy,
        ],
    )  # fmt: skip
    def test_every_kind_of_array(self, convert):
        vectors = np.arange(1.0, 13.0).reshape(4, 3)
        store = FactStore(3, embedding_model="m1")
        store.add(*facts(4), convert(vectors))
        assert store.view().embeddings.tolist() == vectors.tolist()

    def test_float64_rows_out_of_range_keep_their_direction(self):
        store = FactStore(2, embedding_model="m1", dtype="float64")
        given = np.array([[1e300, 2e300], [1e-310, 0.0], [1.0, 2.0]])
        store.add(*facts(3), given)
        kept = store.view().embeddings
        assert kept[2].tolist() == [1.0, 2.0]
        assert kept[0, 1] == 2 * kept[0, 0]
        assert np.isfinite(store.view().squared_norms).all()
        assert (store.view().squared_norms > 0).all()
        assert given[0].tolist() == [1e300, 2e300]  # the caller's array is not touched

    @pytest.mark.parametrize(
        ("keywords", "error", "message"),
        [
            ({"ids": ["a", "a"]}, ValueError, "'a' more than once"),
            ({"ids": ["f1", "a"]}, ValueError, "'f1' in the store already"),
            ({"ids": ["a"]}, ValueError, "texts: expected 1 entries"),
            ({"ids": [1, 2]}, TypeError, "ids: expected str, got int at 0"),
            ({"ids": "ab"}, TypeError, "ids: expected a sequence of str, got one str"),
            ({"ids": ["a", ""]}, ValueError, "ids: expected names, got an empty string at 1"),
            ({"texts": ["x", None]}, TypeError, "texts: expected str, got NoneType at 1"),
            ({"embeddings": [[1, 2, 3, 4]]}, ValueError, "embeddings: expected 2 rows"),
            ({"embeddings": [[1, 2, 3], [1, 2, 3]]}, ValueError, "expected dimension 4, got 3"),
            ({"embeddings": [1, 2, 3, 4]}, ValueError, "expected 2 dimension"),
            ({"embeddings": [[np.nan, 2, 3, 4], [1, 2, 3, 4]]}, ValueError, "not finite as float32: 'a'"),
            ({"embeddings": [[0, 0, 0, 0], [1, 2, 3, 4]]}, ValueError, "all zeros as float32: 'a'"),
            ({"embeddings": [[1e300, 0, 0, 0], [1, 2, 3, 4]]}, ValueError, "not finite as float32: 'a'"),
            ({"importance": [1.0, -1.0]}, ValueError, "importance: expected finite and >= 0, got -1.0 at row 1"),
            ({"importance": [1.0, np.inf]}, ValueError, "importance: expected finite"),
            ({"importance": [1.0]}, ValueError, "importance: expected 2 entries"),
            ({"source": ["d"]}, ValueError, "source: expected 2 entries"),
            ({"source": ["d", 5]}, TypeError, "source: expected str or None, got int at 1"),
            ({"position": [0, -1]}, ValueError, "position: expected an integer >= 0 or None, got -1 at 1"),
            ({"position": [0, True]}, ValueError, "position: expected an integer"),
            (
                {"position": [2**63, 0]},
                ValueError,
                r"position: expected at most 2\^63 - 1, got 9223372036854775808 at 0",
            ),
            ({"position": [np.uint64(2**64 - 1), 0]}, ValueError, "position: expected at most"),
            ({"on_invalid": "ignore"}, ValueError, "on_invalid: expected 'raise' or 'skip'"),
        ],
    )
    def test_bad_input_is_named_and_changes_nothing(self, keywords, error, message):
        store = filled()
        before, version = contents(store), store.version
        good = {"ids": ["a", "b"], "texts": ["x", "y"], "embeddings": [[1, 2, 3, 4], [5, 6, 7, 8]]}
        for method in (store.add, store.upsert):
            if "f1" in keywords.get("ids", ()) and method == store.upsert:
                continue
            with pytest.raises(error, match=message):
                method(**{**good, **keywords})
        assert contents(store) == before
        assert store.version == version

    def test_skip_leaves_out_bad_vectors_and_says_which(self):
        store = FactStore(2, embedding_model="m1")
        vectors = [[np.nan, 0], [1, 0], [0, 0], [0, 1], [np.inf, 1]]
        assert store.add(list("abcde"), list("abcde"), vectors, importance=[1, 2, 3, 4, 5], on_invalid="skip") == (
            2, ("a", "c", "e"),
        )  # fmt: skip
        assert [(f.id, f.importance) for f in store.get(["b", "d"])] == [("b", 2.0), ("d", 4.0)]
        assert store.ids == ["b", "d"]

    def test_nothing_to_add(self):
        store = filled()
        version = store.version
        assert store.add([], [], []) == (0, ())
        assert store.add([], [], np.zeros((0, 4))) == (0, ())
        assert store.version == version

    def test_an_interrupted_add_leaves_no_trace(self, monkeypatch):
        store = filled()
        before = contents(store)
        tokens = store.view()._storage.tokens
        storage = store.view()._storage
        for growing in (storage.squared_norms, storage.sequence, tokens._tokens, tokens._offsets, tokens):

            def broken(at, values, growing=growing):
                type(growing).write(growing, at, values)
                raise KeyboardInterrupt

            monkeypatch.setattr(growing, "write", broken)
            with pytest.raises(KeyboardInterrupt):
                store.add(["x", "y"], ["x", "y"], np.ones((2, 4)))
            monkeypatch.undo()
            assert contents(store) == before
            assert "x" not in store
        store.add(["x"], ["the x"], np.full((1, 4), 2.0))
        assert store.get(["x"])[0].text == "the x"
        assert store.view().facts([10])[0].id == "x"
        assert len(store) == 11


class TestUpsertAndRemove:
    def test_upsert_replaces_whole_and_takes_a_new_sequence_number(self):
        store = FactStore(2, embedding_model="m1")
        store.add(["a", "b"], ["one", "two"], [[1, 0], [0, 1]], importance=[3, 3], source=["s", "s"])
        store.upsert(["a", "c"], ["new", "three"], [[5, 5], [1, 1]])
        assert store.ids == ["b", "a", "c"]
        assert store.get(["a"]) == [Fact("a", "new", None, None, 1.0, 2)]
        assert len(store) == 3

    def test_removed_facts_are_gone(self):
        store = filled()
        assert store.remove(["f3", "f3", "f9"]) == 2
        assert "f3" not in store
        assert store.ids == [f"f{i}" for i in range(9) if i != 3]
        with pytest.raises(KeyError, match="'f3' not in the store"):
            store.get(["f3"])
        store.add(["f3"], ["again"], np.ones((1, 4)))
        assert store.get(["f3"])[0].sequence == 10

    def test_removing_what_is_not_there_removes_nothing(self):
        store = filled()
        before = contents(store)
        with pytest.raises(KeyError, match="'nope' not in the store"):
            store.remove(["f1", "nope"])
        assert contents(store) == before
        assert store.remove(["f1", "nope"], missing="ignore") == 1
        with pytest.raises(ValueError, match="missing: expected"):
            store.remove([], missing="maybe")
        with pytest.raises(TypeError, match="one str"):
            store.remove("f1")

    def test_compact_keeps_facts_order_and_numbers(self):
        store = filled(50)
        store.remove([f"f{i}" for i in range(0, 50, 3)])
        before = contents(store)
        assert store.compact() == 17
        assert contents(store) == before
        assert store.view().rows == 33
        assert store.view().layout == 1
        assert store.compact() == 0
        store.add(["z"], ["z"], np.ones((1, 4)))
        assert store.get(["z"])[0].sequence == 50

    def test_a_view_stays_as_it_was(self):
        store = filled(5)
        view = store.view()
        was = (view.ids, view.embeddings.copy(), len(view), view.facts(range(5)))
        store.remove(["f0"])
        store.upsert(["f1"], ["other"], np.ones((1, 4)))
        store.add(*facts(500, 100), np.random.default_rng(1).standard_normal((500, 4)))
        store.compact()
        assert (view.ids, len(view), view.facts(range(5))) == (was[0], was[2], was[3])
        assert (view.embeddings == was[1]).all()

    @pytest.mark.parametrize("scratch", [False, True])
    @pytest.mark.parametrize("room", [1, 7, 30])
    def test_many_rows_lie_in_several_pieces(self, room, scratch, tmp_path, monkeypatch):
        whole = FactStore(4, embedding_model="m1")
        monkeypatch.setattr(store_module, "_PIECE_BYTES", room * 4 * 4)
        store = FactStore(4, embedding_model="m1", scratch=tmp_path if scratch else None)
        r, n, before = np.random.default_rng(0), 0, []
        for m in (0, 1, 3, 20, 6, 30):
            rows = r.standard_normal((m, 4))
            for each in (whole, store):
                each.add(*facts(m, n), rows)
            n += m
            before.append((store.view(), store.view().embeddings.copy()))
        assert [len(b) for b in store.view().blocks] == [room] * (60 // room) + [60 % room] * (60 % room > 0)
        for view, rows in before:
            assert (view.embeddings == rows).all()
            assert sum(map(len, view.blocks)) == view.rows
        columns = Columns.spec(r.standard_normal(4), min_relevance=0.2)
        for _ in range(2):
            retriever = Retriever(store)
            retriever.prepare()
            found = retriever.candidates(columns, store.view())
            assert found.tolist() == Retriever(whole).candidates(columns, whole.view()).tolist()
            assert contents(store) == contents(whole)
            for each in (whole, store):
                each.remove([f"f{i}" for i in range(0, 60, 4)], missing="ignore")
                each.compact()
        assert list(tmp_path.iterdir()) == []
        store.save(tmp_path)
        assert contents(FactStore.load(tmp_path)) == contents(whole)

    def test_a_scratch_folder_that_is_full_or_not_there(self, tmp_path, monkeypatch):
        with pytest.raises(FileNotFoundError, match="scratch: expected a folder, found none at"):
            FactStore(4, embedding_model="m1", scratch=tmp_path / "none")
        filled(20).save(tmp_path / "store")
        with pytest.raises(FileNotFoundError, match="scratch: expected a folder"):
            FactStore.load(tmp_path / "store", scratch=tmp_path / "none")
        store = FactStore.load(tmp_path / "store", scratch=tmp_path)
        before = contents(store)

        def full(*_):
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full, raising=False)
            with pytest.raises(OSError, match="no space left"):
                store.add(["a"], ["a"], np.ones((1, 4)))
        assert contents(store) == before
        store.add(["a"], ["a"], np.ones((1, 4)))
        assert len(store) == 21

    def test_a_view_finds_rows_by_id(self):
        store = filled(5)
        store.upsert(["f1"], ["other"], np.ones((1, 4)))
        store.remove(["f2"])
        assert [store.view().row_of(i) for i in ("f0", "f1", "f4")] == [0, 5, 4]
        with pytest.raises(KeyError):
            store.view().row_of("f2")

    def test_views_cannot_be_written(self):
        view = filled().view()
        for array in (view.embeddings, view.alive, view.importance, view.squared_norms, view.sequence):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


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
            monkeypatch.setattr(store_module, "_CHUNK", size)
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
            (store_module, "_save_strings"),
            (store_module, "_save_rows"),
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
            from cdr_kernel import FactStore, store as m
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
            from cdr_kernel import FactStore, store as m
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

    def test_two_first_saves_take_turns(self, tmp_path):
        first, second = filled(10), filled(20)
        write = first._write
        other = threading.Thread(target=second.save, args=(tmp_path / "s",))

        def write_slowly(*arguments):
            other.start()
            other.join(0.2)
            return write(*arguments)

        first._write = write_slowly
        first.save(tmp_path / "s")
        other.join()
        assert contents(FactStore.load(tmp_path / "s")) == contents(second)

    def test_a_failed_save_leaves_no_new_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(store_module, "_save_rows", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
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
            (lambda p, d, m: (p / "manifest.json").write_text(json.dumps({**m, "dim": "4"})), "expected dim to be int"),
            (lambda p, d, m: (p / "manifest.json").write_text(json.dumps({**m, "data": "../x"})), "name a subfolder"),
            (lambda p, d, m: (p / "manifest.json").write_text(json.dumps({**m, "facts": 11})), r"expected .* \[11"),
            (lambda p, d, m: (d / "importance.npy").write_bytes(b"\0" * 208), "not a readable array"),
            (lambda p, d, m: (d / "tokens.npy").unlink(), "found no file"),
            (lambda p, d, m: (p / "manifest.json").write_text("[" * 200000), "not readable JSON"),
            (
                lambda p, d, m: (p / "manifest.json").write_text(json.dumps({**m, "dim": True})),
                "dim to be int, found True",
            ),
            (lambda p, d, m: (p / "manifest.json").write_text(json.dumps({**m, "files": {}})), "size of .* in files"),
            (
                lambda p, d, m: (p / "manifest.json").write_text(
                    json.dumps({**m, "files": {**m["files"], "tokens.npy": True}})
                ),
                "size of tokens.npy in files, found True",
            ),
            (
                lambda p, d, m: (p / "manifest.json").write_text(json.dumps({**m, "next_sequence": 9})),
                "found 9 in row 9",
            ),
            (
                lambda p, d, m: change(d / "importance.npy", 3, np.nan),
                r"importance.npy: expected 0 to .*, found nan in row 3",
            ),
            (lambda p, d, m: change(d / "importance.npy", 3, -1), "found -1.0 in row 3"),
            (lambda p, d, m: change(d / "importance.npy", 3, np.inf), "found inf in row 3"),
            (
                lambda p, d, m: change(d / "squared_norms.npy", 3, 0),
                "squared_norms.npy: expected .*, found 0.0 in row 3",
            ),
            (lambda p, d, m: change(d / "squared_norms.npy", 3, np.inf), "found inf in row 3"),
            (lambda p, d, m: change(d / "sequence.npy", 3, 2), "sequence.npy: expected ascending"),
            (lambda p, d, m: change(d / "sequence.npy", 0, -1), "found -1 in row 0"),
            (lambda p, d, m: change(d / "positions.npy", 3, -7), "positions.npy: expected -1 to .*, found -7 in row 3"),
            (lambda p, d, m: change(d / "ids_offsets.npy", 5, 0), "ids_offsets.npy: expected offsets from 0 on"),
            (lambda p, d, m: change(d / "texts_offsets.npy", 0, 1), "expected offsets from 0 on"),
            (lambda p, d, m: change(d / "sources_offsets.npy", 10, 1), r"sources_offsets.npy: expected 0 \(the bytes"),
            (lambda p, d, m: change(d / "token_offsets.npy", 5, 10**9), "token_offsets.npy: expected offsets"),
            (lambda p, d, m: np.save(d / "token_offsets.npy", np.zeros(11, np.int64)), r"expected uint8 \[0\]"),
            (
                lambda p, d, m: (p / "manifest.json").write_text(json.dumps({**m, "tokenizer": None})),
                "expected tokenizer to be str",
            ),
        ],
    )
    def test_a_damaged_store_says_what_is_wrong(self, tmp_path, what, message):
        with pytest.raises(ValueError, match=message):
            FactStore.load(self.damage(tmp_path, what))

    @pytest.mark.parametrize("mmap", [True, False])
    def test_an_id_that_is_there_twice_is_named_when_ids_are_indexed(self, tmp_path, mmap):
        def twice(path, data, manifest):
            (data / "ids.utf8").write_bytes(b"f0f1f2f3f1f5f6f7f8f9")

        store = FactStore.load(self.damage(tmp_path, twice), mmap=mmap)
        for ask in (lambda: "f3" in store, lambda: store.view().row_of("f3"), lambda: store.remove(["f3"])):
            with pytest.raises(ValueError, match="'f1' more than once: the store it was loaded from is damaged"):
                ask()

    def test_no_store_and_pickles(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no store here"):
            FactStore.load(tmp_path / "nowhere")

        def pickled(path, data, manifest):
            file = data / "importance.npy"
            size = file.stat().st_size
            np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
            assert file.stat().st_size < 400
            manifest["files"]["importance.npy"] = file.stat().st_size
            (path / "manifest.json").write_text(json.dumps(manifest))
            assert size

        with pytest.raises(ValueError, match=r"importance\.npy: not a readable array"):
            FactStore.load(self.damage(tmp_path, pickled))


class TestConstruction:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"dim": 0}, ValueError, "dim: expected at least 1"),
            ({"dim": 2.0}, TypeError, "dim: expected an integer"),
            ({"dim": True}, TypeError, "dim: expected an integer"),
            ({"embedding_model": ""}, ValueError, "embedding_model: expected a name"),
            ({"embedding_model": None}, TypeError, "embedding_model: expected a str"),
            ({"dtype": "int8"}, ValueError, "dtype: expected one of float16, float32, float64"),
            ({"dtype": "fp16"}, ValueError, "dtype: expected one of"),
            ({"tokenizer": 5}, TypeError, "tokenizer: expected a callable"),
            ({"tokenizer": lambda text: [text]}, ValueError, "tokenizer: expected one with a name"),
            ({"hash_key": "secret"}, TypeError, "hash_key: expected bytes"),
        ],
    )
    def test_bad_arguments(self, arguments, error, message):
        with pytest.raises(error, match=message):
            FactStore(**{"dim": 4, "embedding_model": "m1", **arguments})

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_it_cannot_be_copied(self, copied):
        store = filled()
        with pytest.raises(TypeError, match=r"save it and load it again, or use view\(\)"):
            copied(store)

    def test_a_mismatch_is_a_value_error_that_names_both(self):
        assert issubclass(EmbeddingModelMismatch, ValueError)
        assert str(EmbeddingModelMismatch("update", "m1", "m2")) == "update: expected embedding model 'm1', got 'm2'"
        assert "no embedding model was named" in str(EmbeddingModelMismatch("update", "m1", None))


def shouting(text):
    return text.upper().split()


ALL = [
    "every",
    "pod",
    "gets",
    "its",
    "own",
    "address",
    "and",
    "a",
    "service",
    "gives",
    "pods",
    "one",
    "name",
    "東京",
    "café",
]
WORDS = st.lists(st.sampled_from(ALL), max_size=12).map(" ".join)


class TestTokens:
    def test_they_are_those_of_the_texts(self):
        for keywords in ({}, {"hash_key": b"secret"}, {"tokenizer": shouting}, {"tokenizer": str.split, "hash_key": 5}):
            store = FactStore(2, embedding_model="m1", **keywords)
            texts = ["One two", "", "東京 cafe\u0301 \ud800"]
            store.add(list("abc"), texts, np.ones((3, 2)))
            hasher = TokenHasher(keywords.get("tokenizer"), keywords.get("hash_key"))
            tokens = store.view().tokens
            assert [list(a) for a in take_tokens(tokens.blocks, None)] == [list(a) for a in hasher.hashed(texts)]
            assert tokens.tokenizer_name == store.tokenizer_name == hasher.tokenizer_name
            assert tokens.key_fingerprint == store.key_fingerprint == hasher.key_fingerprint
            assert len(tokens) == 3

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("upsert"), st.lists(st.tuples(st.sampled_from("abcdefgh"), WORDS), max_size=4)),
                st.tuples(st.just("remove"), st.sets(st.sampled_from("abcdefgh"), max_size=3)),
                st.tuples(st.sampled_from(["compact", "map", "read", "view", "write"]), WORDS),
            ),
            max_size=14,
        ),
        st.booleans(),
    )
    def test_counts_survive_whatever_a_store_goes_through(self, tmp_path_factory, steps, exact):
        path = tmp_path_factory.mktemp("store")
        store = FactStore(1, embedding_model="m1")
        guard = NGramGuard(2, exact=exact)
        written, texts, seen = [], {}, []
        for name, given_ in steps:
            if name == "upsert":
                facts = dict(given_)
                store.upsert(list(facts), list(facts.values()), np.ones((len(facts), 1)))
                for fact in facts:
                    texts.pop(fact, None)
                texts.update(facts)
            elif name == "remove":
                store.remove(given_, missing="ignore")
                for fact in given_:
                    texts.pop(fact, None)
            elif name == "compact":
                store.compact()
            elif name in ("map", "read"):
                store.save(path)
                store = FactStore.load(path, mmap=name == "map")
            elif name == "view":
                seen.append((store.view(), list(texts.values())))
            else:
                guard.update(given_)
                written.append(given_)
            for view, expected in (*seen, (store.view(), list(texts.values()))):
                rows = np.flatnonzero(view.alive)
                blacklist = set().union(*(reference.ngrams(reference.tokenize(w), 2) for w in written))
                true = [reference.count_matching_ngrams(text, blacklist, 2) for text in expected]
                assert view.texts(rows) == expected
                assert guard.overlap_rows(view.tokens, rows).tolist() == guard.overlap(expected).tolist() == true

    def test_they_are_mapped_and_take_less_than_eight_bytes(self, tmp_path):
        store = FactStore(1, embedding_model="m1")
        store.add([str(i) for i in range(50)], ["nine words in each of the fifty texts here"] * 50, np.ones((50, 1)))
        store.save(tmp_path)
        tokens = FactStore.load(tmp_path).view().tokens
        assert tokens.nbytes == 50 * 9 * 7 + 51 * 8 < 8 * tokens.tokens
        for array in tokens.blocks[0]:
            assert isinstance(array.base, np.memmap)
        assert store.remove(map(str, range(50))) == 50
        store.save(tmp_path)
        assert FactStore.load(tmp_path).view().tokens.tokens == 0

    def test_the_manifest_names_the_tokenizer_and_never_the_key(self, tmp_path):
        store = FactStore(1, embedding_model="m1", tokenizer=shouting, hash_key=b"a very secret key")
        store.add(["a"], ["some words"], [[1.0]])
        store.save(tmp_path)
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        assert manifest["tokenizer"] == "shouting"
        assert manifest["hash_key"] == store.key_fingerprint
        assert manifest["unicode"] == unicodedata.unidata_version
        assert not any(b"secret" in file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file())
        again = FactStore.load(tmp_path, tokenizer=shouting, hash_key=b"a very secret key")
        assert contents(again) == contents(store)
        again.add(["b"], ["more words"], [[1.0]])
        guard = NGramGuard(1, tokenizer=shouting, hash_key=b"a very secret key")
        guard.update("words")
        assert guard.overlap_rows(again.view().tokens).tolist() == [1, 1]
        for keywords, message in (
            ({}, "with tokenizer 'shouting', got 'nfkc-casefold-1': pass tokenizer="),
            ({"tokenizer": str.split, "hash_key": b"a very secret key"}, "got 'str.split': pass tokenizer="),
            ({"tokenizer": shouting}, "key of fingerprint .*: pass hash_key="),
            ({"tokenizer": shouting, "hash_key": b"a very secret kex"}, "pass hash_key="),
        ):
            with pytest.raises(ValueError, match=message):
                FactStore.load(tmp_path, **keywords)

    def test_a_tokenizer_that_fails_adds_nothing(self):
        def picky(text):
            if "!" in text:
                raise OSError("no exclamations")
            return text.split() if "?" not in text else [1]

        store = FactStore(1, embedding_model="m1", tokenizer=picky)
        store.add(["a"], ["fine"], [[1.0]])
        before, version = contents(store), store.version
        for text, error in (("oh!", OSError), ("what?", TypeError)):
            with pytest.raises(error):
                store.add(["b", "c"], ["fine", text], [[1.0], [1.0]])
        assert contents(store) == before
        assert store.version == version
        assert store.add(["b", "c"], ["fine", "what?"], [[1.0], [np.nan]], on_invalid="skip").added == 1

    def test_offsets_damaged_since_are_found_when_their_row_is_read(self, tmp_path):
        filled().save(tmp_path)
        store = FactStore.load(tmp_path)
        change(next(tmp_path.glob("data-*")) / "token_offsets.npy", 4, -3)
        guard = NGramGuard(1)
        guard.update("text")
        assert guard.overlap_rows(store.view().tokens, np.array([0, 2, 9])).tolist() == [1, 1, 1]
        for row in (3, 4):
            with pytest.raises(ValueError, match=f"row {row} is damaged"):
                guard.overlap_rows(store.view().tokens, np.array([row]))
        with pytest.raises(ValueError, match="damaged"):
            store.save(tmp_path / "copy")
        store.add(["new"], ["text"], np.ones((1, 4)))
        assert guard.overlap_rows(store.view().tokens, np.array([10])).tolist() == [1]


def test_sequence_numbers_given_elsewhere(tmp_path):
    store = FactStore(2, embedding_model="toy")
    store.add(["a", "b", "c"], ["x"] * 3, [[1, 0], [0, 0], [0, 1]], sequence=[3, 4, 9], on_invalid="skip")
    assert store.view().sequence.tolist() == [3, 9]
    assert store.next_sequence == 10
    store.upsert(["a"], ["y"], [[1, 1]], sequence=[20])
    store.add(["d"], ["x"], [[1, 1]])
    assert [f.sequence for f in store.get(["a", "d"])] == [20, 21]
    for bad, message in (
        ([21], "at least 22"),
        ([5, 5], "expected 1 integers"),
        ([-1], "ascending"),
        ([0.5], "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            store.add(["e"], ["x"], [[1, 1]], sequence=bad)
    with pytest.raises(ValueError, match="ascending"):
        store.add(["e", "f"], ["x"] * 2, [[1, 1]] * 2, sequence=[31, 30])
    assert "e" not in store
    store.save(tmp_path / "s")
    assert FactStore.load(tmp_path / "s").view().sequence.tolist() == [9, 20, 21]


def test_an_empty_store_of_the_same_kind():
    store = FactStore(3, embedding_model="toy", dtype="float16", hash_key=b"secret")
    store.add(["a"], ["x"], [[1, 2, 3]])
    other = store.empty()
    assert (len(other), other.dim, other.dtype, other.embedding_model) == (0, 3, np.float16, "toy")
    assert (other.tokenizer_name, other.key_fingerprint) == (store.tokenizer_name, store.key_fingerprint)
