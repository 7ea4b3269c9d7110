"""The guard counts what the reference counts, by the core and by plain Python, through copies, merges and states."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from python_ngrams import MULTIPLIER, crafted_text, ngram_hashes, token_hashes
from texts import SECRET, Whitespace, some_texts, texts
from timing import seconds

from cdr_kernel import _C, reference, repetition
from cdr_kernel.text import NGramGuard, _ngram_guard, _token_hashes, tokenize
from cdr_kernel.text._token_hashes import TOKEN_BYTES, TokenHasher

GOLDEN_6 = [
    0x5AF2616AD5E58E92,
    0x8EEA5758484C4228,
    0xE329FF7E7A498BF6,
    0x8831A65A283DE19D,
    0x5B39FD5BF09FDA60,
    0x329BD1213677B3A7,
    0x2A41F3B42F4D631C,
]
GOLDEN_1 = [0x4DB6262A8624CB9E, 0x8C8124A9759EB7B4, 0x6EF39AF9E2041618]
GOLDEN_2 = [0xCB4825D387982DC9]


def truth(outputs: Sequence[str], facts: Sequence[str], n: int, tokens=reference.tokenize) -> list[int]:
    blacklist = set().union(*(reference.ngrams(tokens(output), n) for output in outputs))
    return [len(reference.ngrams(tokens(fact), n) & blacklist) for fact in facts]


core_arguments = (
    st.lists(texts, max_size=5),
    st.lists(texts, max_size=3),
    st.integers(1, 12),
    st.sampled_from([None, Whitespace()]),
    st.sampled_from([None, SECRET, 7]),
)


@settings(max_examples=3_000, deadline=None)
@given(*core_arguments)
def test_the_core_is_plain_python_and_counts_the_truth(facts, outputs, n, tokenizer, key) -> None:
    check_core(facts, outputs, n, tokenizer, key)


@pytest.mark.slow
@settings(max_examples=50_000, deadline=None)
@given(*core_arguments)
def test_the_core_is_plain_python_at_length(facts, outputs, n, tokenizer, key) -> None:
    check_core(facts, outputs, n, tokenizer, key)


def check_core(
    facts: list[str], outputs: list[str], n: int, tokenizer: Whitespace | None, key: bytes | int | None
) -> None:
    outputs = [*outputs, " ".join(facts[::2])]
    guard, cut = NGramGuard(n, tokenizer=tokenizer, hash_key=key), tokenizer or reference.tokenize
    for output in outputs:
        guard.update(output)
    written = {h for output in outputs for h in ngram_hashes(output, n, cut, key)}
    assert guard.hashes.tolist() == sorted(written)
    counts = truth(outputs, facts, n, cut)
    assert counts == [len(written.intersection(ngram_hashes(fact, n, cut, key))) for fact in facts]
    overlap = guard.overlap(facts)
    assert overlap.dtype == np.int32
    assert overlap.tolist() == counts
    rows = guard.token_rows(facts)
    hashed = [token_hashes(cut(fact), key) for fact in facts]
    ((offsets, tokens),) = rows.blocks
    assert offsets.tolist() == [sum(map(len, hashed[:i])) for i in range(len(facts) + 1)]
    assert bytes(tokens) == b"".join(h.to_bytes(TOKEN_BYTES, "little") for row in hashed for h in row)
    some = np.arange(len(facts))[::-2].copy()
    assert guard.overlap_rows(rows).tolist() == counts
    assert guard.overlap_rows(rows, some).tolist() == counts[::-2]
    offsets, hashes = guard.ngram_hashes(facts)
    assert (offsets.dtype, hashes.dtype) == (np.int64, np.uint64)
    grams = [ngram_hashes(fact, n, cut, key) for fact in facts]
    assert offsets.tolist() == [sum(map(len, grams[:i])) for i in range(len(facts) + 1)]
    assert hashes.tolist() == [h for row in grams for h in row]


@pytest.mark.parametrize("n", [1, 2, 6, 31, 32])
def test_long_texts_with_many_repeats(n: int) -> None:
    rng = np.random.default_rng(n)
    words = np.array(["a", "bb", "CCC", "dddddddd", "e" * 300, "é"])
    facts = [" ".join(rng.choice(words, size)) for size in (0, 1, n - 1, n, n + 1, 400)]
    output = " . ".join(facts[::-1])
    guard = NGramGuard(n)
    guard.update(output)
    assert guard.overlap(facts).tolist() == truth([output], facts, n)
    assert len(guard) == len(reference.ngrams(reference.tokenize(output), n))


def test_distinct_ngrams_count_once() -> None:
    guard = NGramGuard()
    guard.update("one two three four five six")
    assert guard.overlap(["one two three four five six. " * 3]).tolist() == [1]
    guard.update("one two three four five six")
    assert len(guard) == 1


def test_order_and_borders_of_ngrams_count() -> None:
    guard = NGramGuard(2)
    guard.update("a b c")
    guard.update("d")
    assert guard.overlap(["b a", "ab c", "c d", "a b", "a c", "A, B; C"]).tolist() == [0, 0, 0, 1, 0, 2]


def test_written_forms_agree() -> None:
    guard = NGramGuard(3)
    guard.update("café Zürich ﬁne")
    assert guard.overlap(["cafe\u0301 Zu\u0308rich fine", "ＣＡＦＥ\u0301 ZÜRICH FINE"]).tolist() == [1, 1]


def test_scripts_without_spaces_overlap() -> None:
    guard = NGramGuard()
    guard.update("昨日、東京都に住んでいます。")
    assert guard.overlap(["彼は東京都に住んでいる", "สวัสดีครับ"]).tolist() == [3, 0]


def test_golden_hashes() -> None:
    """Stores and sessions keep these numbers: a change makes every one of them worthless."""
    text = "Every Pod gets its own cluster-wide IP address; 東京 café"
    _, hashes = NGramGuard(6).ngram_hashes([text])
    assert hashes.tolist() == GOLDEN_6
    _, hashes = NGramGuard(1).ngram_hashes(["pod", "café", "internationalisation"])
    assert hashes.tolist() == GOLDEN_1
    _, hashes = NGramGuard(2, tokenizer=Whitespace()).ngram_hashes(["\ud800 "])
    assert hashes.tolist() == GOLDEN_2


def test_hashes_of_ngrams_are_the_sum_they_are_said_to_be() -> None:
    tokens = token_hashes(("one", "two", "three"))
    base = 0x9E3779B97F4A7C15
    expected = sum(t * base ** (3 - i) for i, t in enumerate(tokens)) % 2**64
    assert NGramGuard(3).ngram_hashes(["One, two; THREE"])[1].tolist() == [expected]


@pytest.mark.parametrize("values", [[], [0], [0, 0, 5], range(1000), [2**64 - 1, 2**63, 0, 1]])
def test_hash_sets_hold_any_value(values: Sequence[int]) -> None:
    array = np.array(values, dtype=np.uint64)
    probes = np.array([*values, 0, 3, 2**64 - 1, 4096], dtype=np.uint64)
    made = _C.HashSet().union(array)
    assert made.values().tolist() == sorted(set(values))
    assert len(made) == len(set(values))
    assert made.contains(probes).tolist() == [p in set(values) for p in probes.tolist()]


def test_hash_set_grows_and_keeps_older_versions() -> None:
    values = np.random.default_rng(0).integers(0, 2**64, 50_000, dtype=np.uint64)
    first = _C.HashSet().union(values[:7])
    second = first.union(values)
    assert len(first) == 7
    assert second.values().tolist() == sorted(set(values.tolist()))
    assert 16 * len(second) <= second.nbytes <= 40 * len(second)
    assert second.contains(values).all()
    assert not second.contains(values + np.uint64(1)).any()
    assert first.contains(values).sum() == 7


def test_hashes_with_one_home_under_a_public_key_cost_no_more_than_others() -> None:
    n = 40_000
    inverse = pow(MULTIPLIER, -1, 2**64)
    crafted = np.array([inverse * (2**63 + i) % 2**64 for i in range(n)], np.uint64)
    random = np.random.default_rng(1).integers(0, 2**64, n, np.uint64)
    for values in (crafted, np.sort(crafted), np.arange(1, n + 1, dtype=np.uint64), crafted << np.uint64(20)):
        filled, usual = _C.HashSet().union(values), _C.HashSet().union(random)
        assert seconds(_C.HashSet().union, values) < 20 * seconds(_C.HashSet().union, random)
        assert seconds(filled.contains, values) < 20 * seconds(usual.contains, random)
        assert np.array_equal(filled.values(), np.unique(values))


def test_a_crafted_output_costs_no_more_than_another_of_its_length() -> None:
    crafted = crafted_text(12_000)
    random_words = random.Random(2)
    usual = " ".join(f"w{random_words.randrange(4096)}" for _ in range(12_006))

    def window(output: str) -> None:
        guard = NGramGuard()
        guard.update(output)
        guard.overlap([output])

    assert seconds(window, crafted) < 8 * seconds(window, usual)


def test_answers_do_not_depend_on_the_key_of_the_process() -> None:
    script = (
        "from cdr_kernel import NGramGuard\n"
        "guard = NGramGuard()\n"
        "guard.update('every pod gets its own address and every service gets a stable one')\n"
        "print(guard.hashes.tolist(), guard.overlap(['every pod gets its own address and more']).tolist())"
    )
    said = {subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(said) == 1


def test_order_of_updates_does_not_matter() -> None:
    outputs = ["a b c d e f g", "c d e f g h i", "東京都に住んでいます", ""]
    forward, backward = NGramGuard(), NGramGuard()
    for output in outputs:
        forward.update(output)
    for output in reversed(outputs):
        backward.update(output)
    assert forward.hashes.tolist() == backward.hashes.tolist()
    assert len(forward) == len(forward.hashes)


def test_copy_is_independent() -> None:
    guard = NGramGuard(2)
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


def test_merge_adds_the_other() -> None:
    one, two, both = NGramGuard(2), NGramGuard(2), NGramGuard(2)
    for output, guard in (("a b c", one), ("b c d", two)):
        guard.update(output)
        both.update(output)
    one.merge(two)
    one.merge(one)
    assert one.hashes.tolist() == both.hashes.tolist()
    assert two.overlap(["a b c d"]).tolist() == [2]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_guards_survive_pickle_and_copy(again) -> None:
    for tokenizer in (None, Whitespace(), str.split):
        guard = NGramGuard(2, tokenizer=tokenizer)
        guard.update("a b c")
        twin = again(guard)
        twin.update("c d")
        assert (len(guard), len(twin), twin.n, twin.tokenizer_name) == (2, 3, 2, guard.tokenizer_name)
        assert twin.overlap(["b c d"]).tolist() == [2]


def test_guard_from_hashes() -> None:
    guard = NGramGuard(3)
    guard.update("a b c d e")
    for hashes in (
        guard.hashes, guard.hashes[::-1], guard.hashes.astype(">u8"), guard.hashes.tolist(),
        np.repeat(guard.hashes, 2),
    ):  # fmt: skip
        twin = NGramGuard.from_hashes(hashes, n=3)
        assert twin.hashes.tolist() == guard.hashes.tolist()
        assert twin.overlap(["b c d e"]).tolist() == [2]
    guard.hashes[:] = 0
    assert guard.overlap(["b c d e"]).tolist() == [2]
    assert len(NGramGuard.from_hashes([])) == 0


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
        (lambda: NGramGuard(exact=1), TypeError, "exact: expected True or False, got 1"),
        (lambda: NGramGuard(max_ngrams=0), ValueError, "max_ngrams: expected at least 1, got 0"),
        (lambda: NGramGuard(max_ngrams=2.5), TypeError, "max_ngrams: expected int or None, got float"),
        (lambda: NGramGuard(hash_key="secret"), TypeError, "hash_key: expected bytes, an int or None, got str"),
        (lambda: NGramGuard(hash_key=True), TypeError, "hash_key: expected bytes, an int or None, got bool"),
        (lambda: NGramGuard(hash_key=b""), ValueError, "hash_key: expected at least one byte"),
        (lambda: NGramGuard(hash_key=-1), ValueError, "hash_key: expected an int in [0, 2**128)"),
        (lambda: NGramGuard(hash_key=2**128), ValueError, "hash_key: expected an int in [0, 2**128)"),
        (lambda: NGramGuard(tokenizer="words"), TypeError, "tokenizer: expected a callable"),
        (lambda: NGramGuard(tokenizer=lambda t: t.split()), ValueError, "tokenizer: expected one with a name"),
        (lambda: NGramGuard(tokenizer=Nameless()), ValueError, "tokenizer: expected one with a name"),
        (lambda: NGramGuard(tokenizer=Impostor()), ValueError, "belongs to cdr_kernel.tokenize"),
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
            "other: expected tokenizer 'nfkc-casefold-1', got 'str.split'",
        ),
        (
            lambda g: g.merge(NGramGuard(2, hash_key=SECRET)),
            ValueError,
            "other: expected hashes with the key of fingerprint",
        ),
        (lambda g: g.merge(NGramGuard(2, exact=True)), ValueError, "expected a guard of exact=False, got exact=True"),
        (
            lambda g: g.merge(NGramGuard(2, max_ngrams=5)),
            ValueError,
            "expected a guard of max_ngrams=None, got max_ngrams=5",
        ),
        (lambda g: g.overlap_rows(["a b"]), TypeError, "tokens: expected TokenRows, got list"),
        (lambda g: g.overlap_rows(TokenHasher().rows(["a b"]), np.array([1])), IndexError, "row 1 of 1"),
        (lambda g: g.overlap_rows(TokenHasher().rows(["a b"]), np.array([-1])), IndexError, "row -1 of 1"),
        (
            lambda g: g.overlap_rows(TokenHasher(Whitespace()).rows(["a b"])),
            ValueError,
            "the tokens of the facts: expected tokenizer 'nfkc-casefold-1', got 'one-space'",
        ),
        (
            lambda g: g.overlap_since(g.generation, TokenHasher(None, SECRET).rows(["a b"])),
            ValueError,
            "the tokens of the facts: expected hashes with the key",
        ),
    ],
)
def test_errors_leave_the_guard_as_it_was(call, error: type[Exception], message: str) -> None:
    guard = NGramGuard(2)
    guard.update("a b c")
    before = guard.hashes.tolist()
    with pytest.raises(error) as caught:
        call(guard)
    assert message in str(caught.value)
    assert guard.hashes.tolist() == before


@pytest.mark.parametrize(("tokenizer", "got"), [(one_word, "got str"), (number, "got int at position 0")])
def test_a_tokenizer_must_return_strings(tokenizer, got: str) -> None:
    guard = NGramGuard(1, tokenizer=tokenizer)
    with pytest.raises(TypeError, match=got):
        guard.update("a")
    assert len(guard) == 0


def test_the_extension_checks_its_arguments() -> None:
    ok = (np.array([0, 1]), np.zeros(7, np.uint8))
    damaged = [
        (np.array([0, 2]), ok[1]),
        (np.array([-1, 1]), ok[1]),
        (np.array([1, 0]), ok[1]),
        (np.array([-(2**62), 2**62]), ok[1]),
    ]
    for block in damaged:
        for call in (
            lambda b: _C.HashSet().union(np.array([1], np.uint64)).overlap(b, None, 1),
            lambda b: _C.token_ngrams(b, 1),
            lambda b: _C.take_tokens(b, None),
        ):
            with pytest.raises(ValueError, match="row 1 is damaged"):
                call((ok, block))
    for blocks in (
        (),
        (ok[0],),
        (ok * 2,),
        ((ok[0].astype(np.int32), ok[1]),),
        ((ok[0][:0], ok[1]),),
        ((np.array([[0, 1]]), ok[1]),),
        ((ok[0], ok[1][:6]),),
        ((ok[0], ok[1].astype(np.int8)),),
        ((np.zeros(14, np.uint8)[1:9].view(np.int64), ok[1]),),
    ):
        with pytest.raises(ValueError, match="tokens: expected"):
            _C.take_tokens(blocks, None)
    for n in (0, 33):
        with pytest.raises(ValueError, match="n: expected 1 to 32"):
            _C.token_ngrams((ok,), n)
        with pytest.raises(ValueError, match="n: expected 1 to 32"):
            _C.HashSet().overlap((ok,), None, n)
    for bits in (0, 57):
        with pytest.raises(ValueError, match="bits: expected 1 to 56"):
            _C.hash_texts(["a"], key=(0, 0), bits=bits)
    for bad in (["é"], [1], [None]):
        with pytest.raises(TypeError, match="expected str of ASCII, or bytes"):
            _C.hash_texts(bad, key=(0, 0), bits=56)
    with pytest.raises(TypeError):
        _C.HashSet().union(np.array([1.0]))


def test_readers_see_whole_updates() -> None:
    updates = [" ".join(f"w{u}x{i}" for i in range(60)) for u in range(40)]
    fact = " ".join(updates)
    guard = NGramGuard()
    seen: list[list[int]] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            tokens = guard.token_rows([fact, fact])
            while True:
                last = done.is_set()
                seen.append(guard.overlap_rows(tokens).tolist())
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


class TestKeys:
    def test_a_key_changes_hashes_and_not_counts(self) -> None:
        texts = some_texts(20)
        plain = NGramGuard(2)
        plain.update(texts[0])
        for key in (SECRET, b"k", 0, 2**128 - 1):
            keyed = NGramGuard(2, hash_key=key)
            keyed.update(texts[0])
            assert keyed.overlap(texts).tolist() == plain.overlap(texts).tolist()
            assert not set(keyed.hashes.tolist()) & set(plain.hashes.tolist())
            assert keyed.key_fingerprint != plain.key_fingerprint

    def test_an_int_is_sixteen_little_endian_bytes(self) -> None:
        number = int.from_bytes(SECRET, "little")
        assert TokenHasher(None, number).key_fingerprint == TokenHasher(None, SECRET).key_fingerprint

    def test_what_is_kept_and_shown_does_not_hold_the_key(self) -> None:
        guard = NGramGuard(2, hash_key=b"correct horse battery staple")
        guard.update("a b c")
        shown = repr(guard) + repr(guard._hasher) + repr(guard.state()) + repr(guard.token_rows(["a"]))
        assert "horse" not in shown
        assert len(guard.key_fingerprint) == 16

    def test_the_key_stays_with_copies(self) -> None:
        guard = NGramGuard(2, hash_key=SECRET)
        guard.update("a b c")
        for twin in (guard.copy(), copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
            twin.update("c d")
            assert twin.overlap(["a b c d"]).tolist() == [3]
            assert twin.key_fingerprint == guard.key_fingerprint


class TestSince:
    def test_counts_add_up(self) -> None:
        texts = some_texts(60)
        rows = TokenHasher().rows(texts)
        some = np.arange(0, 60, 3)
        guard = NGramGuard(2)
        counts = guard.overlap_rows(rows, some)
        for output in some_texts(9, seed=1):
            before = guard.generation
            guard.update(output)
            more = guard.overlap_since(before, rows, some)
            assert more is not None
            assert more.dtype == np.int32
            counts += more
            assert counts.tolist() == guard.overlap_rows(rows, some).tolist() == guard.overlap(texts)[::3].tolist()

    def test_several_updates_at_once_and_none(self) -> None:
        texts = some_texts(40)
        rows = TokenHasher().rows(texts)
        guard = NGramGuard(2)
        generations = [guard.generation]
        for output in some_texts(6, seed=2):
            guard.update(output)
            generations.append(guard.generation)
        total = guard.overlap_rows(rows)
        earlier = NGramGuard(2)
        for output, generation in zip([*some_texts(6, seed=2), ""], generations, strict=True):
            more = guard.overlap_since(generation, rows)
            assert more is not None
            assert (earlier.overlap(texts) + more).tolist() == total.tolist()
            earlier.update(output)
        assert not guard.overlap_since(guard.generation, rows).any()

    def test_an_update_without_news_is_the_same_generation(self) -> None:
        guard = NGramGuard(2)
        assert guard.generation == NGramGuard(2).generation
        guard.update("a b c")
        before = guard.generation
        guard.update("a b c")
        guard.update("x")
        assert guard.generation == before
        assert guard.copy().generation == before

    def test_branches_do_not_take_each_other_for_themselves(self) -> None:
        rows = TokenHasher().rows(["a b c d e f"])
        trunk = NGramGuard(2)
        trunk.update("a b")
        start = trunk.generation
        left, right = trunk.copy(), trunk.copy()
        left.update("b c")
        right.update("b c d")
        assert left.overlap_since(start, rows).tolist() == [1]
        assert right.overlap_since(start, rows).tolist() == [2]
        assert right.overlap_since(left.generation, rows) is None
        left_generation = left.generation
        left.merge(right)
        assert left.overlap_since(start, rows).tolist() == [2]
        assert left.overlap_since(left_generation, rows).tolist() == [1]
        assert left.overlap_since(right.generation, rows) is None

    def test_what_was_forgotten_has_to_be_counted_again(self) -> None:
        rows = TokenHasher().rows(["a b c d e f"])
        guard = NGramGuard(2)
        start = guard.generation
        guard.update("a b")
        then = guard.generation
        guard.clear()
        assert guard.overlap_since(then, rows) is None
        guard.update("a b c")
        assert guard.overlap_since(then, rows) is None
        assert guard.overlap_since(start, rows).tolist() == [2]
        bounded = NGramGuard(2, max_ngrams=3)
        bounded.update("a b c")
        then = bounded.generation
        bounded.update("c d")
        assert bounded.overlap_since(then, rows).tolist() == [1]
        bounded.update("d e")
        assert bounded.overlap_since(then, rows) is None

    def test_many_updates_stay_cheap_and_right(self) -> None:
        words = [f"w{i}" for i in range(200)]
        text = " ".join(words)
        rows = TokenHasher().rows([text])
        guard = NGramGuard(2)
        before, counts = guard.generation, guard.overlap_rows(rows)
        first = None
        for at in range(199):
            guard.update(" ".join(words[at : at + 2]))
            first = first or guard.generation
            more = guard.overlap_since(before, rows)
            assert more is not None
            counts, before = counts + more, guard.generation
            assert counts.tolist() == [at + 1]
        assert guard.overlap_since(first, rows) is None
        assert len(guard._state.layers) <= _ngram_guard._MAX_LAYERS


def newest(outputs: Sequence[str], n: int, limit: int) -> tuple[set[tuple[str, ...]], list[set[tuple[str, ...]]]]:
    """The n-grams that a guard bounded to `limit` knows after these outputs, and the windows that it knows."""
    windows: list[set[tuple[str, ...]]] = []
    for output in outputs:
        tokens = reference.tokenize(output)
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        windows.append(set(list(dict.fromkeys(reversed(grams)))[:limit]))
        while len(set().union(*windows)) > limit:
            del windows[0]
    return set().union(*windows), windows


class TestBounded:
    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(st.lists(st.sampled_from("abcdeé"), max_size=14).map(" ".join), max_size=8),
        st.integers(1, 3),
        st.integers(1, 12),
        st.booleans(),
        st.integers(0, 8),
    )
    def test_the_oldest_windows_go_first(self, outputs, n, limit, exact, resumed) -> None:
        guard = NGramGuard(n, max_ngrams=limit, exact=exact)
        for number, output in enumerate(outputs):
            if number == resumed:
                guard = NGramGuard.from_state(guard.state())
            guard.update(output)
            known, _ = newest(outputs[: number + 1], n, limit)
            assert len(guard) == len(known) <= limit
            facts = [*outputs, " ".join(outputs)]
            tokens = map(reference.tokenize, facts)
            assert guard.overlap(facts).tolist() == [len(reference.ngrams(t, n) & known) for t in tokens]

    def test_memory_stays_bounded(self) -> None:
        guard = NGramGuard(2, max_ngrams=1000)
        for number in range(100):
            guard.update(" ".join(f"w{number}x{i}" for i in range(300)))
            assert len(guard) <= 1000
        assert guard.nbytes < 200_000
        free = NGramGuard(2)
        for number in range(100):
            free.update(" ".join(f"w{number}x{i}" for i in range(300)))
        assert len(free) == 29_900
        assert 8 * 29_900 < free.nbytes < 100 * 29_900

    def test_merging_branches_keeps_their_windows_apart(self) -> None:
        trunk = NGramGuard(2, max_ngrams=4)
        trunk.update("a b")
        left, right = trunk.copy(), trunk.copy()
        left.update("b c d")
        right.update("x y")
        trunk.merge(left)
        trunk.merge(right)
        assert trunk.overlap(["a b c d", "x y"]).tolist() == [3, 1]
        trunk.update("y z")
        assert trunk.overlap(["a b c d", "x y z"]).tolist() == [2, 2]
        trunk.merge(trunk)
        assert len(trunk) == 4


class TestExact:
    @pytest.fixture
    def few_bits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Token hashes of three bits: most n-grams collide with others."""
        monkeypatch.setattr(_token_hashes, "_hash_bits", 3)

    def test_hits_are_verified_on_the_tokens(self, few_bits: None) -> None:
        outputs, facts = some_texts(4, seed=1, words=40), some_texts(80, words=40)
        plain, exact = NGramGuard(2), NGramGuard(2, exact=True)
        rows = exact.token_rows(facts)
        counts, before = exact.overlap_rows(rows), exact.generation
        for written in range(1, 5):
            for guard in (plain, exact):
                guard.update(outputs[written - 1])
            true = truth(outputs[:written], facts, 2)
            assert exact.overlap(facts).tolist() == exact.overlap_rows(rows).tolist() == true
            some = np.arange(79, -1, -2)
            assert exact.overlap_rows(rows, some).tolist() == true[::-2]
            more = exact.overlap_since(before, rows)
            assert more is not None
            counts, before = counts + more, exact.generation
            assert counts.tolist() == true
            assert (plain.overlap(facts) >= true).all() or len(plain) < len(exact)
            assert plain.overlap(facts).tolist() != true, "three bits must collide, else this test shows nothing"
        grams = set().union(*(reference.ngrams(reference.tokenize(output), 2) for output in outputs))
        assert len(exact) == len(grams) > len(plain)

    def test_whole_hashes_give_the_same_with_and_without(self) -> None:
        facts = some_texts(50)
        for tokenizer in (None, Whitespace()):
            plain, exact = (NGramGuard(3, exact=e, tokenizer=tokenizer) for e in (False, True))
            for output in ("", *facts[:5], "東京都に住んでいます café \ud800"):
                plain.update(output)
                exact.update(output)
            assert plain.hashes.tolist() == exact.hashes.tolist()
            assert plain.overlap(facts).tolist() == exact.overlap(facts).tolist()
            assert exact.nbytes > plain.nbytes

    def test_it_survives_copies_merges_and_states(self, few_bits: None) -> None:
        outputs, facts = some_texts(3, seed=1, words=40), some_texts(60, words=40)
        trunk = NGramGuard(2, exact=True)
        trunk.update(outputs[0])
        left, right = trunk.copy(), pickle.loads(pickle.dumps(trunk))
        left.update(outputs[1])
        right.update(outputs[2])
        trunk.merge(left)
        trunk.merge(right)
        trunk.merge(trunk)
        again = NGramGuard.from_state(trunk.state())
        for guard in (trunk, again, copy.deepcopy(again)):
            assert guard.exact
            assert guard.overlap(facts).tolist() == truth(outputs, facts, 2)
        trunk.clear()
        assert trunk.overlap(facts).tolist() == [0] * 60


class TestState:
    def test_states_of_another_kind_are_refused(self) -> None:
        guard = NGramGuard(2, tokenizer=Whitespace(), hash_key=SECRET)
        guard.update("a b c")
        state = guard.state()
        assert NGramGuard.from_state(state, tokenizer=Whitespace(), hash_key=SECRET).overlap(["a b"]).tolist() == [1]
        with pytest.raises(ValueError, match="made with tokenizer 'one-space', got 'nfkc-casefold-1': pass tokenizer="):
            NGramGuard.from_state(state, hash_key=SECRET)
        with pytest.raises(ValueError, match=r"key of fingerprint .*: pass hash_key="):
            NGramGuard.from_state(state, tokenizer=Whitespace())
        for change in ({"exact": True}, {"tokens": []}, {"more": 1}):
            with pytest.raises(ValueError, match="the guard must have"):
                NGramGuard.from_state({**state, **change}, tokenizer=Whitespace(), hash_key=SECRET)
        with pytest.raises(TypeError, match="dtype uint64"):
            NGramGuard.from_state({**state, "hashes": [np.zeros(2)]}, tokenizer=Whitespace(), hash_key=SECRET)


class TestRepetition:
    @pytest.mark.parametrize(
        ("text", "history", "n", "share"),
        [
            ("a b c d", [], 2, 0.0),
            ("a b c d", ["a b c d"], 2, 1.0),
            ("a b c d", ["x a b y", "c d"], 2, 2 / 3),
            ("a b a b", ["a b"], 2, 2 / 3),  # each occurrence counts
            ("a a a a", [], 2, 0.0),  # what a text repeats of itself does not
            ("a b c", ["a", "b", "c", "a b", "b c"], 3, 0.0),
            ("a b c", ["a b c"], 4, 0.0),  # no n-gram at all
            ("", ["a"], 1, 0.0),
            ("東京 ＡＢＣ", ["京 abc"], 1, 2 / 3),
        ],
    )
    def test_shares(self, text: str, history: list[str], n: int, share: float) -> None:
        assert repetition(text, history, n) == share

    def test_against_the_definition(self) -> None:
        history, text = some_texts(4, length=80), some_texts(1, seed=3, length=200)[0]
        for n in (1, 4, 6):
            tokens = reference.tokenize(text)
            grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
            known = set().union(*(reference.ngrams(reference.tokenize(h), n) for h in history))
            assert repetition(text, history, n) == sum(g in known for g in grams) / len(grams)
        assert repetition("A b", ["a b"], 2, tokenizer=Whitespace()) == 0.0

    def test_errors(self) -> None:
        for text, history in ((None, []), ("a", "a"), ("a", [None])):
            with pytest.raises(TypeError, match="expected"):
                repetition(text, history)
        with pytest.raises(ValueError, match="n: expected 1 to 32, got 0"):
            repetition("a", [], 0)


def test_texts_of_ten_megabytes() -> None:
    parts = ["x" * 70_000, "Ω" * 30_000, "東" * 99, "na\u0308h " * 40, "word and word ", "\x00\ud800", "🎉 ก็ "]
    tokens_of = {part: reference.tokenize(part) for part in parts}
    chosen = random.Random(0).choices(parts, weights=[4, 1, 1, 1, 1, 1, 1], k=350)
    text = " ".join(chosen)
    assert len(text) > 10_000_000
    tokens = [token for part in chosen for token in tokens_of[part]]
    assert tokenize(text) == tokens
    guard = NGramGuard(3)
    guard.update(text)
    grams = reference.ngrams(tokens, 3)
    assert len(guard) == len(grams)
    assert guard.overlap([text, "", " ".join(chosen[:9])]).tolist() == [
        len(grams), 0, len(reference.ngrams([t for part in chosen[:9] for t in tokens_of[part]], 3)),
    ]  # fmt: skip


def test_ten_megabytes_of_words() -> None:
    draw = random.Random(0)
    words = [f"word{i}" for i in range(5000)]
    text = " ".join(draw.choices(words, k=1_200_000))
    assert len(text) > 10_000_000
    guard = NGramGuard()
    guard.update(text)
    assert len(guard) == len(reference.ngrams(text.split()))
    assert guard.overlap([text, text[1_000_000:]])[0] == len(guard)


@pytest.mark.parametrize("exact", [False, True])
def test_matches_are_what_overlap_counts(exact):
    guard = NGramGuard(3, exact=exact)
    guard.update("a b c d, and e f g; a b c again")
    text = "x A b c d y e f g z a b c"
    found = guard.matches(text)
    assert found == [(1, ("a", "b", "c")), (2, ("b", "c", "d")), (6, ("e", "f", "g"))]
    assert len(found) == guard.overlap([text])[0]
    assert guard.matches("too short") == guard.matches("") == []
    with pytest.raises(TypeError, match="text"):
        guard.matches(b"bytes")


def test_a_frozen_guard_refuses_every_change_and_gives_a_copy_that_takes_them():
    guard, other = NGramGuard(2), NGramGuard(2)
    guard.update("one two three")
    guard.freeze()
    for change in (lambda: guard.update("four five"), lambda: guard.merge(other), guard.clear):
        with pytest.raises(TypeError, match=r"change guard\.copy\(\), or call session\.update"):
            change()
    assert guard.overlap(["one two", "four five"]).tolist() == [1, 0]
    free = guard.copy()
    free.update("four five")
    assert (len(free), len(guard), len(pickle.loads(pickle.dumps(guard)))) == (3, 2, 2)
