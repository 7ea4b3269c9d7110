from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_kernel import FactStore, NGramGuard
from cdr_kernel.text.tokenizers import EncoderTokenizer, IcuTokenizer


def encode(text: str) -> list[int]:
    return [sum(word.encode()) for word in text.split()]


class TestIcu:
    @pytest.fixture(autouse=True)
    def icu(self):
        pytest.importorskip("icu4py", reason="needs the icu extra")

    @pytest.mark.parametrize(
        ("text", "tokens"),
        [
            ("", []),
            (" ... \x00", []),
            ("Hello, WÖRLD!", ["hello", "wörld"]),
            ("ｃａｎ't cafe\u0301", ["can't", "café"]),
            ("ภาษาไทยง่าย", ["ภาษา", "ไทย", "ง่าย"]),
            ("🎉x 𐐀b 🎉", ["x", "𐐨b"]),
            ("a\ud800b", ["a", "b"]),
        ],
    )
    def test_tokens(self, text, tokens):
        assert IcuTokenizer("th")(text) == tokens

    def test_words_of_chinese_and_japanese(self):
        assert IcuTokenizer()("東京都に住んでいます。")[0] == "東京"

    def test_the_name_tells_version_and_locale(self):
        import icu4py

        assert IcuTokenizer("th").name == f"icu-{icu4py.icu_version}-th"
        assert IcuTokenizer().name != IcuTokenizer("th").name
        assert pickle.loads(pickle.dumps(IcuTokenizer("th"))).name == IcuTokenizer("th").name

    @settings(max_examples=200, deadline=None)
    @given(st.text(st.characters(exclude_categories=())))
    def test_any_text(self, text):
        tokens = IcuTokenizer()(text)
        assert all(any(c.isalnum() for c in token) for token in tokens)

    def test_a_store_and_its_guard(self, tmp_path):
        store = FactStore(1, embedding_model="m1", tokenizer=IcuTokenizer("th"))
        store.add(["a"], ["ภาษาไทยง่ายมาก"], [[1.0]])
        guard = NGramGuard(2, tokenizer=IcuTokenizer("th"))
        guard.update("ไทยง่าย")
        store.save(tmp_path)
        store = FactStore.load(tmp_path, tokenizer=IcuTokenizer("th"))
        assert guard.overlap_rows(store.view().tokens).tolist() == [1]
        with pytest.raises(ValueError, match="pass tokenizer="):
            FactStore.load(tmp_path, tokenizer=IcuTokenizer("en"))


def test_without_icu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "icu4py", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[icu\]" in a checkout'):
        IcuTokenizer()
    with pytest.raises(TypeError, match="locale: expected str"):
        IcuTokenizer(5)


class TestEncoder:
    def test_counts_are_of_ids(self):
        guard = NGramGuard(2, tokenizer=EncoderTokenizer(encode, name="sums"))
        guard.update("ab c d")
        assert guard.tokenizer_name == "sums"
        assert guard.overlap(["ba c", "ab  c  d", "AB c"]).tolist() == [1, 2, 0]

    def test_ids_come_in_any_kind_of_sequence(self):
        for ids in ([1, 2**40], (1, 2**40), np.array([1, 2**40]), iter([1, 2**40])):
            assert EncoderTokenizer(lambda _, ids=ids: ids, name="any")("text") == ["1", str(2**40)]

    def test_encoders_see_no_lone_surrogate(self):
        seen = []
        tokenizer = EncoderTokenizer(lambda text: seen.append(text) or [], name="seen")
        for text in ("plain", "é", "\ud800é\udfff"):
            tokenizer(text)
        assert seen == ["plain", "é", "\ufffdé\ufffd"]

    def test_a_real_encoder(self):
        tokenizers = pytest.importorskip("tokenizers")
        model = tokenizers.models.WordLevel({"[UNK]": 0, "every": 1, "pod": 2, "gets": 3}, unk_token="[UNK]")
        encoder = tokenizers.Tokenizer(model)
        encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        guard = NGramGuard(2, tokenizer=EncoderTokenizer(lambda text: encoder.encode(text).ids, name="word-level"))
        guard.update("every pod gets")
        assert guard.overlap(["now every pod", "pod gets it"]).tolist() == [1, 1]

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: EncoderTokenizer("cl100k", name="x"), TypeError, "encode: expected a callable"),
            (lambda: EncoderTokenizer(encode, name=""), ValueError, "name: expected the name of an encoder"),
            (lambda: EncoderTokenizer(encode, name=None), TypeError, "name: expected str"),
            (lambda: EncoderTokenizer(str.split, name="x")("a b"), TypeError, "encode of 'x': expected a sequence"),
            (lambda: EncoderTokenizer(len, name="x")("a b"), TypeError, "encode of 'x': expected a sequence"),
        ],
    )
    def test_errors(self, make, error, message):
        with pytest.raises(error, match=message):
            make()
