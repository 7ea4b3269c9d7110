from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_kernel import _C, reference
from cdr_kernel.ngram import PROJECT_KEY, NGramGuard, _hash_bytes, _HashSetPython, tokenize

IMPLS = ["cpp", "python"]

SNIPPETS = [
    "Every pod gets its own IP address.",
    "kube-proxy",
    "snake_case v1.21",
    "Straße ǅ ﬁne ΐ",
    "cafe\u0301 café ｃａｆé",
    "東京都に住んでいます。",
    "ラーメン カﾞ ㌔",
    "中文分詞〇々 葛\U000e0100",
    "สวัสดีครับ น้ำ ๑๒",
    "ສະບາຍດີ",
    "ខ្មែរ ភាសា",
    "မြန်မာ ဘာသာ",
    "བོད་ཡིག",
    "السَّلامُ عليكم ١٢٣",
    "हिन्दी क्षत्रिय ४५",
    "👩‍👩‍👧‍👦 ❤️ 1️⃣ 🇦🇺 👍🏽",
    "\U00010400\U0001d7d8 \U00020000\U00030000",
    "\x00",
    "\ud83d",
    "\udc00x",
    "²½Ⅷ\u0345\u200d\u00ad\ufe0f",
]
anything = st.text(st.characters(exclude_categories=()))  # lone surrogates too
few_words = st.lists(st.sampled_from(["a", "b", "c", "D", "é", "東", "ก"]), max_size=30).map(" ".join)
texts = st.lists(st.one_of(anything, st.sampled_from(SNIPPETS)), max_size=8).map("".join) | few_words

GOLDEN_6 = [
    0x2C9DD30BA0581296,
    0xFA4BA8A19971BF32,
    0x5FC25D1FEDA41759,
    0x87DEBEB83596FBFE,
    0xF7E79706243951E2,
    0x11BBA0A1D3F3446D,
    0x0E809C998136B0EB,
]
GOLDEN_1 = [0x3E41F53E3A184271, 0x7D5AD1F6647F3BA5, 0x65B08EF5AF36A80B]
GOLDEN_2 = [0xE2E7D8C381A2794A]


class Whitespace:
    """Tokens of any content: empty ones, spaces, surrogates."""

    name = "one-space"

    def __call__(self, text: str) -> list[str]:
        return text.split(" ")


def truth(outputs: Sequence[str], facts: Sequence[str], n: int, tokens=reference.tokenize) -> list[int]:
    blacklist = set().union(*(reference.ngrams(tokens(output), n) for output in outputs))
    return [len(reference.ngrams(tokens(fact), n) & blacklist) for fact in facts]


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    ("text", "tokens"),
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
        ("\U00010400x \U00020000\U00020001", ["\U00010428x", "\U00020000", "\U00020001"]),
    ],
)
def test_tokens(text: str, tokens: list[str]) -> None:
    assert tokenize(text) == tokens
    assert reference.tokenize(text) == tokens


def test_every_ascii_character_and_a_sample_of_all_others() -> None:
    for code in (*range(0x80), *range(0x80, 0x110000, 37)):
        text = f"a{chr(code)}B ก{chr(code)}{chr(code)}1"
        assert tokenize(text) == reference.tokenize(text), hex(code)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_tokens_match_the_reference(text: str) -> None:
    assert tokenize(text) == reference.tokenize(text)
    for form in ("NFC", "NFD", "NFKC"):
        assert tokenize(unicodedata.normalize(form, text)) == tokenize(text)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(texts, max_size=5),
    st.lists(texts, max_size=3),
    st.integers(1, 12),
    st.sampled_from([None, Whitespace()]),
)
def test_twins_and_truth(facts: list[str], outputs: list[str], n: int, tokenizer: Whitespace | None) -> None:
    outputs = [*outputs, " ".join(facts[::2])]
    compiled, python = (NGramGuard(n, tokenizer=tokenizer, impl=impl) for impl in IMPLS)
    for output in outputs:
        compiled.update(output)
        python.update(output)
    assert compiled.hashes.tolist() == python.hashes.tolist()
    counts = truth(outputs, facts, n, tokenizer or reference.tokenize)
    for guard in (compiled, python):
        overlap = guard.overlap(facts)
        assert overlap.dtype == np.int32
        assert overlap.tolist() == counts
        assert guard.overlap_hashed(*guard.ngram_hashes(facts)).tolist() == counts
    for ours, twins in zip(compiled.ngram_hashes(facts), python.ngram_hashes(facts), strict=True):
        assert ours.dtype == twins.dtype
        assert ours.tolist() == twins.tolist()


@pytest.mark.parametrize("n", [1, 2, 6, 31, 32])
def test_long_texts_with_many_repeats(impl: str, n: int) -> None:
    rng = np.random.default_rng(n)
    words = np.array(["a", "bb", "CCC", "dddddddd", "e" * 300, "é"])
    facts = [" ".join(rng.choice(words, size)) for size in (0, 1, n - 1, n, n + 1, 400)]
    output = " . ".join(facts[::-1])
    guard = NGramGuard(n, impl=impl)
    guard.update(output)
    assert guard.overlap(facts).tolist() == truth([output], facts, n)
    assert len(guard) == len(reference.ngrams(reference.tokenize(output), n))


def test_distinct_ngrams_count_once(impl: str) -> None:
    guard = NGramGuard(impl=impl)
    guard.update("one two three four five six")
    assert guard.overlap(["one two three four five six. " * 3]).tolist() == [1]
    guard.update("one two three four five six")
    assert len(guard) == 1


def test_order_and_borders_of_ngrams_count(impl: str) -> None:
    guard = NGramGuard(2, impl=impl)
    guard.update("a b c")
    guard.update("d")
    assert guard.overlap(["b a", "ab c", "c d", "a b", "a c", "A, B; C"]).tolist() == [0, 0, 0, 1, 0, 2]


def test_written_forms_agree(impl: str) -> None:
    guard = NGramGuard(3, impl=impl)
    guard.update("café Zürich ﬁne")
    assert guard.overlap(["cafe\u0301 Zu\u0308rich fine", "ＣＡＦＥ\u0301 ZÜRICH FINE"]).tolist() == [1, 1]


def test_scripts_without_spaces_overlap(impl: str) -> None:
    guard = NGramGuard(impl=impl)
    guard.update("昨日、東京都に住んでいます。")
    assert guard.overlap(["彼は東京都に住んでいる", "สวัสดีครับ"]).tolist() == [3, 0]


def test_golden_hashes(impl: str) -> None:
    """Stores and sessions keep these numbers: a change makes every one of them worthless."""
    text = "Every Pod gets its own cluster-wide IP address; 東京 café"
    _, hashes = NGramGuard(6, impl=impl).ngram_hashes([text])
    assert hashes.tolist() == GOLDEN_6
    _, hashes = NGramGuard(1, impl=impl).ngram_hashes(["pod", "café", "internationalisation"])
    assert hashes.tolist() == GOLDEN_1
    _, hashes = NGramGuard(2, impl=impl, tokenizer=Whitespace()).ngram_hashes(["\ud800 "])
    assert hashes.tolist() == GOLDEN_2


@pytest.mark.skipif(sys.hash_info.algorithm != "siphash13", reason="this Python hashes bytes another way")
def test_token_hash_is_siphash_1_3() -> None:
    """Without a seed Python's own hash of bytes is SipHash-1-3 with the all-zero key."""
    tokens = [bytes((7 * i + size) % 256 for i in range(size)) for size in range(1, 70)] + [b"x" * 300]
    script = f"print([hash(t) % 2**64 for t in {tokens!r}])"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, check=True, text=True,
    )  # fmt: skip
    expected = [int(h) for h in run.stdout.strip(" []\n").split(",")]
    assert [_hash_bytes(token, 0) for token in tokens] == expected
    offsets = np.cumsum([0, *map(len, tokens)])
    assert _C.hash_tokens(b"".join(tokens), offsets, key=0).tolist() == expected
    assert _C.hash_tokens(b"".join(tokens), offsets, key=PROJECT_KEY).tolist() != expected


def test_token_hash_depends_on_the_key() -> None:
    keys = [0, 1, PROJECT_KEY, 2**63, 2**64 - 1]
    ours = [_C.hash_tokens(b"pod", np.array([0, 3]), key=key)[0] for key in keys]
    assert ours == [_hash_bytes(b"pod", key) for key in keys]
    assert len(set(ours)) == len(keys)


@pytest.mark.parametrize("values", [[], [0], [0, 0, 5], range(1000), [2**64 - 1, 2**63, 0, 1]])
def test_hash_sets_hold_any_value(values: Sequence[int]) -> None:
    array = np.array(values, dtype=np.uint64)
    probes = np.array([*values, 0, 3, 2**64 - 1, 4096], dtype=np.uint64)
    offsets = np.arange(len(probes) + 1)
    for made in (_C.HashSet().union(array), _HashSetPython().union(array)):
        assert made.values().tolist() == sorted(set(values))
        assert len(made) == len(set(values))
        assert made.overlap(offsets, probes).tolist() == [int(p in set(values)) for p in probes.tolist()]


def test_hash_set_grows_and_keeps_older_versions() -> None:
    values = np.random.default_rng(0).integers(0, 2**64, 50_000, dtype=np.uint64)
    first = _C.HashSet().union(values[:7])
    second = first.union(values)
    assert len(first) == 7
    assert second.values().tolist() == sorted(set(values.tolist()))
    assert 16 * len(second) <= second.nbytes <= 32 * len(second)
    assert second.overlap(np.array([0, len(values)]), values).tolist() == [len(second)]


def test_order_of_updates_does_not_matter(impl: str) -> None:
    outputs = ["a b c d e f g", "c d e f g h i", "東京都に住んでいます", ""]
    forward, backward = NGramGuard(impl=impl), NGramGuard(impl=impl)
    for output in outputs:
        forward.update(output)
    for output in reversed(outputs):
        backward.update(output)
    assert forward.hashes.tolist() == backward.hashes.tolist()
    assert len(forward) == len(forward.hashes)


def test_copy_is_independent(impl: str) -> None:
    guard = NGramGuard(2, impl=impl)
    guard.update("a b c")
    branch = guard.copy()
    branch.update("x y")
    guard.update("c d e f")
    assert (len(guard), len(branch), branch.n) == (5, 3, 2)
    assert guard.overlap(["x y"]).tolist() == [0]
    guard.clear()
    assert (len(guard), guard.hashes.tolist(), len(branch)) == (0, [], 3)
    guard.update("a b")
    assert guard.overlap(["a b c"]).tolist() == [1]


def test_merge_adds_the_other(impl: str) -> None:
    one, two, both = NGramGuard(2, impl=impl), NGramGuard(2), NGramGuard(2)
    for output, guard in (("a b c", one), ("b c d", two)):
        guard.update(output)
        both.update(output)
    one.merge(two)
    one.merge(one)
    assert one.hashes.tolist() == both.hashes.tolist()
    assert two.overlap(["a b c d"]).tolist() == [2]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_guards_survive_pickle_and_copy(impl: str, again) -> None:
    for tokenizer in (None, Whitespace(), str.split):
        guard = NGramGuard(2, tokenizer=tokenizer, impl=impl)
        guard.update("a b c")
        twin = again(guard)
        twin.update("c d")
        assert (len(guard), len(twin), twin.n, twin.tokenizer_name) == (2, 3, 2, guard.tokenizer_name)
        assert twin.overlap(["b c d"]).tolist() == [2]


def test_guard_from_hashes(impl: str) -> None:
    guard = NGramGuard(3, impl=impl)
    guard.update("a b c d e")
    for hashes in (
        guard.hashes, guard.hashes[::-1], guard.hashes.astype(">u8"), guard.hashes.tolist(),
        np.repeat(guard.hashes, 2),
    ):  # fmt: skip
        twin = NGramGuard.from_hashes(hashes, n=3, impl=impl)
        assert twin.hashes.tolist() == guard.hashes.tolist()
        assert twin.overlap(["b c d e"]).tolist() == [2]
    guard.hashes[:] = 0
    assert guard.overlap(["b c d e"]).tolist() == [2]
    assert len(NGramGuard.from_hashes([], impl=impl)) == 0


def test_names_of_tokenizers() -> None:
    def words(text: str) -> list[str]:
        return text.split()

    assert NGramGuard().tokenizer_name == "nfkc-casefold-1"
    assert NGramGuard(tokenizer=tokenize).tokenizer_name == "nfkc-casefold-1"
    assert NGramGuard(tokenizer=Whitespace()).tokenizer_name == "one-space"
    assert NGramGuard(tokenizer=words).tokenizer_name.endswith("words")
    assert NGramGuard(tokenizer=str.split).tokenizer_name == "str.split"


def one_word(text: str) -> str:
    return text


def number(text: str) -> list[int]:
    return [len(text)]


class Impostor:
    name = "nfkc-casefold-1"

    def __call__(self, text: str) -> list[str]:
        return [text]


class Nameless:
    def __call__(self, text: str) -> list[str]:
        return [text]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: NGramGuard(0), ValueError, "n: expected 1 to 32, got 0"),
        (lambda: NGramGuard(33), ValueError, "n: expected 1 to 32, got 33"),
        (lambda: NGramGuard(2.0), TypeError, "n: expected int, got float"),
        (lambda: NGramGuard(True), TypeError, "n: expected int, got bool"),
        (lambda: NGramGuard(impl="torch"), ValueError, 'impl: expected "cpp" or "python", got \'torch\''),
        (lambda: NGramGuard(tokenizer="words"), TypeError, "tokenizer: expected a callable"),
        (lambda: NGramGuard(tokenizer=lambda t: t.split()), ValueError, "tokenizer: expected one with a name"),
        (lambda: NGramGuard(tokenizer=Nameless()), ValueError, "tokenizer: expected one with a name"),
        (lambda: NGramGuard(tokenizer=Impostor()), ValueError, "belongs to cdr_kernel.ngram.tokenize"),
        (lambda: NGramGuard.from_hashes(np.array([1])), TypeError, "expected dtype uint64, got int64"),
        (lambda: NGramGuard.from_hashes([1.5]), TypeError, "hashes: expected a uint64 array"),
        (lambda: NGramGuard.from_hashes([-1]), ValueError, "hashes: expected integers in"),
        (lambda: NGramGuard.from_hashes([2**64]), ValueError, "hashes: expected integers in"),
        (lambda: NGramGuard.from_hashes(np.zeros((1, 1), np.uint64)), ValueError, "expected shape"),
        (lambda: tokenize(b"a"), TypeError, "text: expected str, got bytes"),
    ],
)
def test_errors_at_the_door(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.update(None), TypeError, "text: expected str, got NoneType"),
        (lambda g: g.update(["a b"]), TypeError, "text: expected str, got list"),
        (lambda g: g.overlap("a b"), TypeError, "texts: expected a sequence of str, got str"),
        (lambda g: g.overlap(3), TypeError, "texts: expected a sequence of str, got int"),
        (lambda g: g.overlap(["a", "b", b"c"]), TypeError, "texts[2]: expected str, got bytes"),
        (lambda g: g.ngram_hashes(["a", None]), TypeError, "texts[1]: expected str, got NoneType"),
        (lambda g: g.merge("a b"), TypeError, "other: expected NGramGuard, got str"),
        (lambda g: g.merge(NGramGuard(3)), ValueError, "expected a guard of n=2, got n=3"),
        (
            lambda g: g.merge(NGramGuard(2, tokenizer=str.split)),
            ValueError,
            "expected a guard of tokenizer 'nfkc-casefold-1', got 'str.split'",
        ),
        (lambda g: g.overlap_hashed([0, 1], [1, 2]), ValueError, "offsets: expected [M + 1], ascending"),
        (lambda g: g.overlap_hashed([1, 2], [1, 2]), ValueError, "offsets: expected [M + 1], ascending"),
        (lambda g: g.overlap_hashed([0, 3, 1, 2], [1, 2]), ValueError, "offsets: expected [M + 1], ascending"),
        (lambda g: g.overlap_hashed(np.zeros(0, int), []), ValueError, "offsets: expected [M + 1], ascending"),
        (lambda g: g.overlap_hashed([0.0, 2.0], [1, 2]), TypeError, "offsets: expected dtype int64"),
    ],
)
def test_errors_leave_the_guard_as_it_was(impl: str, call, error: type[Exception], message: str) -> None:
    guard = NGramGuard(2, impl=impl)
    guard.update("a b c")
    before = guard.hashes.tolist()
    with pytest.raises(error) as caught:
        call(guard)
    assert message in str(caught.value)
    assert guard.hashes.tolist() == before


@pytest.mark.parametrize(("tokenizer", "got"), [(one_word, "got str"), (number, "got int at position 0")])
def test_a_tokenizer_must_return_strings(impl: str, tokenizer, got: str) -> None:
    guard = NGramGuard(1, tokenizer=tokenizer, impl=impl)
    with pytest.raises(TypeError, match=got):
        guard.update("a")
    assert len(guard) == 0


def test_the_extension_checks_its_arguments() -> None:
    ok = np.array([0, 1])
    one = np.array([7], dtype=np.uint64)
    for offsets in (np.array([0, 2]), np.array([-1, 1]), np.array([0, 5, 1]), np.zeros((1, 2), int), np.zeros(0, int)):
        with pytest.raises(ValueError, match="offsets"):
            _C.hash_texts(b"a", offsets, key=0)
        with pytest.raises(ValueError, match="offsets"):
            _C.hash_tokens(b"a", offsets, key=0)
        with pytest.raises(ValueError, match="offsets"):
            _C.token_ngrams(offsets, one, 1)
        with pytest.raises(ValueError, match="offsets"):
            _C.HashSet().overlap(offsets, one)
        with pytest.raises(ValueError, match="offsets"):
            _C.HashSet().overlap_tokens(offsets, one, 1)
    for n in (0, 33):
        with pytest.raises(ValueError, match="n: expected 1 to 32"):
            _C.token_ngrams(ok, one, n)
        with pytest.raises(ValueError, match="n: expected 1 to 32"):
            _C.HashSet().overlap_tokens(ok, one, n)
    with pytest.raises(TypeError):
        _C.HashSet().union(np.array([1.0]))


def test_readers_see_whole_updates(impl: str) -> None:
    updates = [" ".join(f"w{u}x{i}" for i in range(60)) for u in range(40)]
    fact = " ".join(updates)
    guard = NGramGuard(impl=impl)
    seen: list[list[int]] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            offsets, hashes = guard.ngram_hashes([fact, fact])
            while True:
                last = done.is_set()
                seen.append(guard.overlap_hashed(offsets, hashes).tolist())
                if last:
                    return
        except BaseException as error:
            failures.append(error)

    def write(mine: list[str]) -> None:
        for text in mine:
            guard.update(text)

    readers = [threading.Thread(target=read) for _ in range(4)]
    writers = [threading.Thread(target=write, args=(updates[i::2],)) for i in range(2)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not failures
    assert len(guard) == 40 * 55
    assert [40 * 55] * 2 in seen
    for first, second in seen:
        assert first == second
        assert first % 55 == 0
