"""The words of the facts: BM25 kept with a store, and the TF-IDF judge."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timing import longest_wait, seconds

from cdr_kernel import FactStore, reference
from cdr_kernel.retrieve import _bm25
from cdr_kernel.retrieve._bm25 import (
    LexicalIndex,
    Postings,
    SparseSums,
    TfIdf,
    WordCounts,
    above_mean,
    words,
    z_of_sparse,
)
from cdr_kernel.spec.constants import STOP_WORDS
from cdr_kernel.text import _tokenize

TEXTS = [
    "Every Pod gets its own IP address",
    "CoreDNS names Services; a Service has a stable address",
    "NetworkPolicies restrict traffic between Pods",
    "",
    "traffic traffic traffic",
    "The of and",
]


def store_of(texts, start=0):
    store = FactStore(2, embedding_model="toy")
    add(store, texts, start)
    return store


def add(store, texts, start):
    store.add([str(start + i) for i in range(len(texts))], texts, [[1.0, 0.5]] * len(texts))


def plain_bm25(texts, query, k1=1.2, b=0.75):
    """Straight from the definition."""
    split = [words(t) for t in texts]
    n, mean = len(split), sum(map(len, split)) / len(split)
    out = []
    for f in split:
        s = 0.0
        for w in dict.fromkeys(words(query)):
            df = sum(w in other for other in split)
            tf = f.count(w)
            idf = math.log(1 + (n - df + 0.5) / (df + 0.5))
            s += idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(f) / mean))
        out.append(s)
    return out


def dense(found, n):
    rows, values = found
    out = np.zeros(n)
    out[rows] = values
    return out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NetworkPolicies restrict Pods", ["network", "polic", "restrict", "pod"]),
        ("kubeProxy is running, classes were added", ["kube", "proxy", "runn", "class", "add"]),
        ("IPv6 on 10.0.0.1 a x1", ["ipv6", "x1"]),
        ("", []),
        ("日本語", []),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


def test_the_stop_words_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.feature_extraction.text")
    assert sklearn.ENGLISH_STOP_WORDS == STOP_WORDS


def test_bm25_is_the_definition():
    for query in ("pod traffic traffic", "a stable address for Pods", "unheard of"):
        (found,) = LexicalIndex().bm25(store_of(TEXTS).view(), [query])
        np.testing.assert_allclose(dense(found, len(TEXTS)), plain_bm25(TEXTS, query), rtol=1e-12, atol=0)


def test_bm25_of_a_growing_and_shrinking_store_is_that_of_a_new_index():
    r = np.random.default_rng(3)
    vocabulary = [f"word{i}x" for i in range(40)]
    texts = [" ".join(r.choice(vocabulary, r.integers(0, 12))) for _ in range(200)]
    store, index, start = store_of([]), LexicalIndex(), 0
    old = store.view()
    while start < 200:
        size = int(r.integers(1, 30))
        add(store, texts[start : start + size], start)
        start += size
        if start > 60:
            store.remove([str(i) for i in r.integers(0, 60, 4)], missing="ignore")
        if start > 150 and store.view().layout == 0:
            store.compact()
        view = store.view()
        left = [texts[int(i)] for i in view.ids]
        query = " ".join(r.choice(vocabulary, 3))
        (found,) = index.bm25(view, [query])
        np.testing.assert_allclose(dense(found, view.rows)[view.alive], plain_bm25(left, query), rtol=1e-12, atol=1e-14)
    assert index.bm25(old, ["word1x"])[0][0].tolist() == []


def test_an_older_view_does_not_see_what_came_later():
    store, index = store_of(TEXTS), LexicalIndex()
    before = store.view()
    add(store, ["traffic"] * 3, 100)
    index.bm25(store.view(), ["traffic"])
    (found,) = index.bm25(before, ["traffic"])
    np.testing.assert_allclose(dense(found, len(TEXTS)), plain_bm25(TEXTS, "traffic"), rtol=1e-12)


def test_segments_stay_few():
    store, index = store_of([]), LexicalIndex()
    for i in range(100):
        add(store, [f"fact{i} common words"], i)
        index.bm25(store.view(), ["common"])
    assert len(index._indexed.segments) <= 8


def test_postings_of_nothing():
    empty = np.zeros(0, np.int64)
    postings = Postings.of(empty, empty, empty)
    assert [part.tolist() for part in postings.find(3)] == [[], []]
    assert LexicalIndex().bm25(store_of([]).view(), ["word"])[0][0].tolist() == []


def test_z_of_sparse_is_the_z_score_with_the_zeros():
    values, count = np.array([3.0, 1.0, 0.5]), 10
    full = np.concatenate([values, np.zeros(7)])
    scale, shift = z_of_sparse(values, count)
    np.testing.assert_allclose(full * scale + shift, (full - full.mean()) / full.std(), rtol=1e-13)
    assert z_of_sparse(values[:0], 10) == (0.0, 0.0)
    assert z_of_sparse(np.full(4, 2.0), 4) == (0.0, 0.0)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(1e-9, 1e6)), st.integers(0, 9), st.randoms(use_true_random=False))
def test_sums_are_exact_whatever_the_order_and_the_parts(values, zeros, random):
    count = len(values) + zeros
    exact = [Fraction(v) for v in values]
    sums = SparseSums.of(np.array(values))
    assert Fraction(sums.total, 2**1074) == sum(exact)
    assert Fraction(sums.squares, 2**1074) == sum(v * v for v in exact)
    random.shuffle(values)
    cut = random.randint(0, len(values))
    first, second = (SparseSums.of(np.array(some)) for some in (values[:cut], values[cut:]))
    assert first.plus(second) == sums
    if values:
        assert first.plus(second).z(count) == z_of_sparse(np.array(values), count)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-9, 1e6) | st.sampled_from([0.0, 2.0**-200, 2.0**200, 0.1]), st.integers(1, 50))))
def test_numbers_that_are_there_several_times(pairs):
    values, repeats = np.array([v for v, _ in pairs], np.float64), np.array([n for _, n in pairs], np.float64)
    once = SparseSums.of(values, repeats)
    assert once == SparseSums.of(np.repeat(values, repeats.astype(np.int64)))
    assert Fraction(once.total, 2**1074) == sum(Fraction(v) * n for v, n in pairs)
    assert Fraction(once.squares, 2**1074) == sum(Fraction(v) ** 2 * n for v, n in pairs)


def test_only_finite_numbers_are_summed():
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="finite"):
            SparseSums.of(np.array([1.0, bad]))


@pytest.mark.parametrize("pairs", [0, 1 << 22])
def test_sums_of_a_word_are_those_of_what_it_gives(pairs, monkeypatch):
    monkeypatch.setattr(_bm25, "_PAIRS", pairs)  # 0: no two facts are taken together
    r = np.random.default_rng(0)
    store = store_of([" ".join(r.choice(["alpha", "beta", "gamma"], r.integers(0, 30))) for _ in range(400)])
    store.remove([store.ids[i] for i in (3, 5, 399)])
    index, whole = LexicalIndex(), store.view()
    for view in (whole, whole.select(np.arange(len(whole)) % 3 == 0)):
        counts = index.term_counts(view, ["alpha", "beta", "gamma", "delta"])
        assert "delta" not in counts.frequency
        for term in ("alpha", "beta", "delta"):
            assert index.sums(view, term, counts) == SparseSums.of(index.weighted(view, [(term, 1.0)], counts)[1])


def test_parts_know_the_words_of_the_whole():
    whole = store_of(TEXTS)
    parts = [store_of(TEXTS[:2]), store_of([]), store_of(TEXTS[2:])]
    queries = ["traffic to a Service", "pods", "nowhere"]
    index, indexes = LexicalIndex(), [LexicalIndex() for _ in parts]
    counts = WordCounts(0, 0, {})
    for other, store in zip(indexes, parts, strict=True):
        counts = counts.plus(other.counts(store.view(), queries))
    assert counts == index.counts(whole.view(), queries)
    for j, found in enumerate(index.bm25(whole.view(), queries)):
        pieces = [
            dense(other.bm25(store.view(), queries, counts=counts)[j], len(store))
            for other, store in zip(indexes, parts, strict=True)
        ]
        assert np.concatenate(pieces).tobytes() == dense(found, len(TEXTS)).tobytes()


def test_tfidf_is_that_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.feature_extraction.text")
    queries = ["pod address", "traffic between services", "nothing known here"]
    vectorizer = sklearn.TfidfVectorizer(sublinear_tf=True, analyzer=words)
    expected = (vectorizer.fit_transform(TEXTS) @ vectorizer.transform(queries).T).toarray()
    np.testing.assert_allclose(TfIdf(TEXTS).similarity(queries), expected, rtol=0, atol=1e-14)


def test_texts_are_taken_in_piece_by_piece(monkeypatch):
    view = store_of(TEXTS * 3).view()
    whole = LexicalIndex().bm25(view, TEXTS)
    monkeypatch.setattr(_bm25, "_CHUNK", 2)
    for (rows, scores), (expected_rows, expected) in zip(LexicalIndex().bm25(view, TEXTS), whole, strict=True):
        assert rows.tolist() == expected_rows.tolist()
        assert scores.tobytes() == expected.tobytes()


@pytest.mark.parametrize("piece", [1, 4])
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("aBsies gGnN_éΣσ\u212aİK.'-:7\u0307\n", max_size=60) | st.text(max_size=40))
def test_the_words_of_a_long_text_are_the_reference_s(piece, monkeypatch, text):
    monkeypatch.setattr(_tokenize, "_PIECE", piece)
    assert words(text) == reference.lexical_words(text)


def test_other_threads_go_on_while_a_long_text_is_cut_into_words():
    text = "aB" * 1_500_000
    assert longest_wait(lambda: words(text)) < 0.25


def test_the_words_of_a_fact_that_has_many_take_time_in_proportion():
    def take(n):
        terms = [f"w{i}" for i in range(n)]
        counts = WordCounts(10, 10 * n, dict.fromkeys(terms, 1))
        texts, sums = [terms, terms[: n // 2]], [SparseSums(0, 0)] * n
        assert len(above_mean(texts, terms, counts, sums)) == n

    assert seconds(take, 8_000) < 8 * seconds(take, 2_000)


@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=6), min_size=1, max_size=4))
def test_words_above_the_mean_are_those_of_their_definition(texts):
    terms = sorted({word for text in texts for word in text} | {"e"})
    counts = WordCounts(9, 30, dict.fromkeys(terms, 2))
    expected = []
    for term in terms:
        scores = [
            reference_bm25(text.count(term), len(text), counts.frequency[term], counts)
            for text in texts
            if term in text
        ]
        if math.fsum(scores) / len(texts) > 1e-12:
            expected.append((term, pytest.approx(math.fsum(scores) / len(texts), rel=1e-12)))
    assert list(above_mean(texts, terms, counts, [SparseSums(0, 0)] * len(terms))) == expected


def reference_bm25(times, length, frequency, counts):
    """What BM25 gives a text for one word."""
    idf = math.log1p((counts.facts - frequency + 0.5) / (frequency + 0.5))
    return idf * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * length * counts.facts / counts.length))
