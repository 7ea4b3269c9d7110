"""The store in memory: facts in, replaced, out; views that stay; tokens that are those of the texts."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import unicodedata

import numpy as np
import pytest
import torch
from fact_stores import change, contents, facts, filled
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_kernel import Columns, EmbeddingModelMismatch, Fact, FactStore, NGramGuard, Retriever, reference
from cdr_kernel.shard._sharded_retriever import ShardedStore
from cdr_kernel.store import _columns
from cdr_kernel.text._ngram_guard import TokenHasher, take_tokens


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

    @pytest.mark.parametrize(
        ("vector", "error", "got"),
        [
            (None, TypeError, "None"),
            ("1, 2", TypeError, "str '1, 2'"),
            ([1.0], ValueError, "1 numbers"),
            ([], ValueError, "0 numbers"),
            ([1.0, 2.0, 3.0], ValueError, "3 numbers"),
            ([1.0, None], TypeError, "one with NoneType at place 1"),
            (["1", "2"], TypeError, "one with str at place 0"),
            ([1.0, 2j], TypeError, "one with complex at place 1"),
            ([[1.0, 2.0]], TypeError, "one with list at place 0"),
            (np.ones((1, 2)), ValueError, r"an array of shape \[1, 2\]"),
            (np.array([1, None], object), TypeError, "one with NoneType at place 1"),
            (np.ma.masked_array([1.0, 2.0], [False, True]), ValueError, "masked values"),
            ({"a": 1}, TypeError, "dict"),
        ],
    )
    @pytest.mark.parametrize("place", [0, 2])
    def test_the_first_fact_without_a_vector_is_named(self, vector, error, got, place):
        vectors = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
        vectors[place] = vectors[3] = vector
        for store in (filled(1, 2), ShardedStore.split(filled(1, 2), shards=2)):
            before = store.ids
            for method in (store.add, store.upsert):
                message = rf"a vector of 2 numbers for fact '{'abcd'[place]}' \(position {place}\), got {got}"
                with pytest.raises(error, match=message):
                    method(list("abcd"), [""] * 4, vectors)
            assert store.ids == before

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
        monkeypatch.setattr(_columns, "_PIECE_BYTES", room * 4 * 4)
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
        told = str(EmbeddingModelMismatch("store", "m1", "m2"))
        assert told.startswith(
            "store: expected embedding model 'm1', got 'm2'; the session is of 'm1', the store of 'm2':"
        )
        none = EmbeddingModelMismatch("update", "m1", None, "name it")
        assert str(none) == "update: expected embedding model 'm1', no embedding model was named; name it"
        again = pickle.loads(pickle.dumps(none))
        assert (str(again), again.expected, again.got) == (str(none), "m1", None)


def shouting(text):
    return text.upper().split()


def test_a_blank_text_is_taken_and_never_guarded():
    store = FactStore(2, embedding_model="m1")
    texts = ["", " \n\t", "one two three four five", "one two three four five six"]
    store.add(["empty", "blank", "five", "six"], texts, [[1.0, 0.0]] * 4)
    guard = NGramGuard()
    guard.update(" ".join(texts))
    assert guard.overlap_rows(store.view().tokens).tolist() == [0, 0, 0, 1]


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
            assert not array.flags.owndata
            assert not array.flags.writeable
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


def test_facts_in_documents():
    store = FactStore(2, embedding_model="m")
    store.add(
        list("abcdef"),
        list("abcdef"),
        np.ones((6, 2)),
        source=["x", None, "y", "", "x", "y"],
        position=[2, 1, 0, 5, 0, 1],
    )
    store.add(["g"], ["g"], np.ones((1, 2)), source=["x"])
    store.remove(["e"])
    rows, sources, positions = store.view().in_documents()
    assert rows.tolist() == [0, 2, 3, 5]
    assert positions.tolist() == [2, 0, 5, 1]
    assert sources[1] == sources[3]
    assert len(set(sources.tolist())) == 3
    (some, *_) = store.view().select({"source": "y"}).in_documents()
    assert some.tolist() == [2, 5]
    assert [len(part) for part in FactStore(2, embedding_model="m").view().in_documents()] == [0, 0, 0]


def test_the_newest_number_grows_when_facts_come_alone(tmp_path):
    store = FactStore(2, embedding_model="m")
    assert store.newest == -1
    store.add(["a", "b"], ["a", "b"], np.eye(2))
    before = store.view()
    store.remove(["b"])
    store.compact()
    assert (store.newest, store.view().newest) == (1, 1)
    store.save(tmp_path / "s")
    loaded = FactStore.load(tmp_path / "s")
    assert loaded.newest == 1
    loaded.upsert(["a"], ["a"], np.eye(2)[:1])
    assert (loaded.newest, before.newest, before.select({"source": "x"}).newest) == (2, 1, 1)
