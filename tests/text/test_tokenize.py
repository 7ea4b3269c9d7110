"""Tokens are those of the reference, whatever the script."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from texts import Whitespace, texts
from timing import longest_wait

from cdr_kernel import reference
from cdr_kernel.text import NGramGuard, _tokenize, tokenize
from cdr_kernel.text._tokenize import _tamed, folded

MARKS = "\u0301\u0316\u0345\u0344\u0341\u0f71\u0f73\u0f75\u0f81\u3099\u0e48\u0e38\U0001d165\U0001e8d0\u20dd\ufe0f"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \t\n.,_-\x00", []),
        ("Kube-proxy routes v1.21_x", ["kube", "proxy", "routes", "v1", "21", "x"]),
        ("Straße", ["strasse"]),
        ("Ｃａｆé cafe\u0301", ["café", "café"]),
        ("ﬁne ²½", ["fine", "21", "2"]),
        ("東京へ行く2回", ["東", "京", "へ", "行", "く", "2", "回"]),
        ("カ\u3099ﾊﾟ", ["ガ", "パ"]),
        ("เก้าอี้9", ["เ", "ก้", "า", "อี้", "9"]),
        ("ខ្មែរ", ["ខ្", "មែ", "រ"]),
        ("ที่abcที่", ["ที่", "abc", "ที่"]),
        ("हिन्दी", ["हिन्दी"]),
        ("السَّلام ١٢٣", ["السَّلام", "١٢٣"]),
        ("\u0e34ab\u0e34", ["\u0e34ab\u0e34"]),
        ("a\ud800b\U0001f389c", ["a", "b", "c"]),
        ("“Curly” — it’s… a\xa0test\u2011case", ["curly", "it", "s", "a", "test", "case"]),
        ("a ← b", ["a", "b"]),
        ("a ←\u0338 b", ["a", "b"]),  # one character, an arrow with a stroke
        ("“x” ¨y ﬁ", ["x", "\u0308y", "fi"]),
        ("\U00010400x \U00020000\U00020001", ["\U00010428x", "\U00020000", "\U00020001"]),
    ],
)
def test_tokens(text: str, expected: list[str]) -> None:
    assert tokenize(text) == expected
    assert reference.tokenize(text) == expected


def test_every_ascii_character_and_a_sample_of_all_others() -> None:
    for code in (*range(0x80), *range(0x80, 0x110000, 37)):
        text = f"a{chr(code)}B ก{chr(code)}{chr(code)}1"
        assert tokenize(text) == reference.tokenize(text), hex(code)


@settings(max_examples=3_000, deadline=None)
@given(texts)
def test_tokens_match_the_reference(text: str) -> None:
    assert tokenize(text) == reference.tokenize(text)
    for form in ("NFC", "NFD", "NFKC"):
        assert tokenize(unicodedata.normalize(form, text)) == tokenize(text)


@settings(max_examples=200, deadline=None)
@given(st.text(MARKS, min_size=1, max_size=40), st.sampled_from(["a", "が", "Å", "ก", "한", "", " "]), st.booleans())
@example("".join(chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) == "Mn"), "a", True)
def test_long_runs_of_marks_have_the_tokens_they_had(marks: str, base: str, at_end: bool) -> None:
    text = f"x y{base}{marks * (1 + 600 // len(marks))}" + ("" if at_end else "b é")
    assert tokenize(text) == reference.tokenize(text)


@pytest.mark.parametrize("marks", ["\u0316\u0301", "\u0f73", "\u0344\u0316", "\U0001e8d0\u0316"])
def test_hostile_runs_of_marks_are_in_order_before_python_sorts_them(marks: str) -> None:
    text = "a" + marks * 200_000
    classes = [unicodedata.combining(c) for c in _tamed(text)]
    assert classes[1:] == sorted(classes[1:])
    (token,) = tokenize(text)  # sorting by insertion would take hours
    assert len(token) >= 200_000


@pytest.mark.parametrize("piece", [1, 5])
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_a_long_text_is_cut_into_pieces_of_the_same_tokens(piece: int, monkeypatch, text: str) -> None:
    monkeypatch.setattr(_tokenize, "_PIECE", piece)
    assert tokenize(text) == reference.tokenize(text)
    assert folded(text) == unicodedata.normalize("NFKC", text).casefold()


def test_no_character_is_cut_from_what_it_is_normalised_with(monkeypatch) -> None:
    monkeypatch.setattr(_tokenize, "_PIECE", 1)
    befores = ["a", "한", "ᄀ", "가", "ka\u0301", "が", "\u0bc6", "\u0cca", "\u1133", "=", "\ufdfa", "Å"]
    for code in (*range(0x2000), *range(0x3000, 0x3100), *range(0x3100, 0x1F000, 37)):
        text = "".join(f"{before}{chr(code)}" for before in befores)
        assert folded(text) == unicodedata.normalize("NFKC", text).casefold(), hex(code)


HOSTILE = {
    "letters that become words": "\ufdfa",
    "ideographs beyond the BMP": "\U00020000",
    "words": "é ",
    "ASCII words": "a ",
}


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_other_threads_go_on_while_a_long_text_is_cut_into_tokens(unit: str) -> None:
    text = unit * (1_200_000 // len(unit.encode())) + "b" + "\u0301\u0316" * 200
    tokenize(text[:20_000])  # what is made at the first text is made
    assert longest_wait(lambda: tokenize(text)) < 0.25


def test_names_of_tokenizers() -> None:
    def words(text: str) -> list[str]:
        return text.split()

    assert NGramGuard().tokenizer_name == "nfkc-casefold-1"
    assert NGramGuard(tokenizer=tokenize).tokenizer_name == "nfkc-casefold-1"
    assert NGramGuard(tokenizer=Whitespace()).tokenizer_name == "one-space"
    assert NGramGuard(tokenizer=words).tokenizer_name.endswith("words")
    assert NGramGuard(tokenizer=str.split).tokenizer_name == "str.split"
