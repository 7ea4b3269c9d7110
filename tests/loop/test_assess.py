"""From a window's output to a report: sentences, their sub-queries, words, depth and completeness."""

from __future__ import annotations

import importlib
import math
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timing import longest_wait, seconds

from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.loop import assess
from cdr_kernel.loop._assess import similarity_thresholds, split_sentences
from cdr_kernel.retrieve import Retriever
from cdr_kernel.session import Session, SubQuery
from cdr_kernel.store import FactStore
from cdr_kernel.text import _tokenize
from cdr_kernel.text._ngram_guard import tokenize

MODEL = "m1"
WORDS = ("dns", "cni", "bgp")


def embed(sentences: list[str]) -> np.ndarray:
    """How often each of WORDS is in a sentence, and one axis for everything else."""
    rows = [[tokenize(sentence).count(word) for word in WORDS] for sentence in sentences]
    return np.array([[*row, 0.01] for row in rows], dtype=np.float32)


def sub_queries(expected=10, count=3) -> list[SubQuery]:
    return [SubQuery(word, word.upper(), f"all about {word}", np.eye(4)[i], expected) for i, word in enumerate(WORDS)][
        :count
    ]


def make_store(rows) -> FactStore:
    store = FactStore(4, embedding_model=MODEL)
    store.add([str(i) for i in range(len(rows))], ["text"] * len(rows), np.asarray(rows))
    return store


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n\n --- \n ***\n", []),
        ("One. Two! Three? Four… five", ["One.", "Two!", "Three?", "Four…", "five"]),
        ("Version 1.30 of kube-proxy. Next", ["Version 1.30 of kube-proxy.", "Next"]),
        ('He said "stop." Then (so it is.) went', ['He said "stop."', "Then (so it is.)", "went"]),
        ("东京是首都。大阪也大！真的？好", ["东京是首都。", "大阪也大！", "真的？", "好"]),
        ("# Title\n- first item\n* second\n3. third\n12) fourth", ["Title", "first item", "second", "third", "fourth"]),
        ("no end\r\nsecond line\n\nthird", ["no end", "second line", "third"]),
        ("Wait... what?! Yes.", ["Wait...", "what?!", "Yes."]),
    ],
)
def test_sentences(text, sentences):
    assert split_sentences(text) == sentences


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.text("ab .!?。\n-#1)", max_size=60))
def test_splitting_loses_no_words_but_list_marks(text):
    kept = [token for sentence in split_sentences(text) for token in tokenize(sentence)]
    marks = [token for token in tokenize(text) if token.isdigit()]
    assert len(tokenize(text)) - len(marks) <= len(kept) <= len(tokenize(text))


def test_words_go_to_the_nearest_sub_query():
    output = "DNS names every service here. The cni sets up pods.\nUnrelated words go nowhere at all.\n- dns again"
    report = assess(output, sub_queries(), embed, min_similarity=0.5, embedding_model=MODEL)
    assert report.words_by_sub_query == {"dns": 7, "cni": 5}
    assert report.addressed == ("dns", "cni")
    assert report.depth_by_sub_query == {"dns": 0.7, "cni": 0.5}
    assert report.completeness_score == pytest.approx((0.7 + 0.5 + 0.0) / 3)
    assert report.embedding_model == MODEL


def test_all_sentences_are_embedded_in_one_call():
    calls = []

    def counting(sentences: list[str]) -> np.ndarray:
        calls.append(list(sentences))
        return embed(sentences)

    assess("dns one. cni two.\nbgp three", sub_queries(), counting, min_similarity=0.5)
    assert calls == [["dns one.", "cni two.", "bgp three"]]
    assess("", sub_queries(), counting, min_similarity=0.5)
    assert len(calls) == 1


def test_what_was_written_before_counts_for_completeness_and_not_for_depth():
    written = {"dns": 9, "bgp": 30, "elsewhere": 5}
    report = assess("dns one two three.", sub_queries(), embed, min_similarity=0.5, written=written)
    assert report.depth_by_sub_query == {"dns": 0.4}
    assert report.completeness_score == pytest.approx((1.0 + 0.0 + 1.0) / 3)
    assert report.words_by_sub_query == {"dns": 4}


def test_little_is_not_addressed():
    output = "dns here."
    at_limit = assess(output, sub_queries(expected=10), embed, min_similarity=0.5, min_depth=0.2)
    assert at_limit.addressed == ("dns",)
    below = assess(output, sub_queries(expected=14), embed, min_similarity=0.5)
    assert below.addressed == ()
    assert below.words_by_sub_query == {"dns": 2}
    assert below.completeness_score == pytest.approx(2 / 14 / 3)
    assert assess(output, sub_queries(expected=14), embed, min_similarity=0.5, min_depth=0.0).addressed == ("dns",)


def test_depth_ends_at_nine_tenths():
    report = assess("dns " * 50, sub_queries(), embed, min_similarity=0.5)
    assert report.depth_by_sub_query == {"dns": 0.9}
    assert report.completeness_score == pytest.approx(1 / 3)


def test_expected_words_have_a_default():
    output = "dns " * 50
    assert assess(output, sub_queries(None), embed, min_similarity=0.5).depth_by_sub_query == {"dns": 0.25}
    report = assess(output, sub_queries(None), embed, min_similarity=0.5, expected_words=100)
    assert report.depth_by_sub_query == {"dns": 0.5}
    nothing_expected = assess(output, sub_queries(0), embed, min_similarity=0.5)
    assert nothing_expected.depth_by_sub_query == {"dns": 0.5}
    assert nothing_expected.completeness_score == 1.0


def test_an_empty_output_addresses_nothing():
    report = assess("", sub_queries(), embed, min_similarity=0.5, written={"dns": 5})
    assert report.addressed == ()
    assert report.completeness_score == pytest.approx(0.5 / 3)


def test_the_threshold_is_inclusive_and_may_differ():
    items = sub_queries()

    def exact(sentences: list[str]) -> list[list[float]]:
        return [[3.0, 4.0, 0.0, 0.0]] * len(sentences)

    assert assess("some words", items, exact, min_similarity=0.8).words_by_sub_query == {"cni": 2}
    assert assess("some words", items, exact, min_similarity=0.81).words_by_sub_query == {}
    own = {"dns": 0.65, "cni": 0.9, "bgp": 0.1}
    assert assess("some words", items, exact, min_similarity=own).words_by_sub_query == {}
    assert assess("some words", items, exact, min_similarity=-1).words_by_sub_query == {"cni": 2}


@pytest.mark.parametrize(
    ("thresholds", "owner"),
    [
        ({"dns": 0.6, "cni": 0.81, "bgp": 0.5}, "dns"),  # the nearest one's own threshold is not reached
        ({"dns": 0.6, "cni": 0.8, "bgp": -1.0}, "cni"),  # the nearest of those that are
        ({"dns": 0.61, "cni": 0.81, "bgp": 0.0}, "bgp"),
        ({"dns": 0.61, "cni": 0.81, "bgp": 0.1}, None),
    ],
)
def test_a_sentence_counts_for_the_best_whose_own_threshold_it_reaches(thresholds, owner):
    def exact(sentences: list[str]) -> list[list[float]]:
        return [[3.0, 4.0, 0.0, 0.0]] * len(sentences)

    report = assess("some words", sub_queries(), exact, min_similarity=thresholds)
    assert report.words_by_sub_query == ({owner: 2} if owner else {})


def test_a_zero_vector_is_similar_to_nothing():
    report = assess("some words", sub_queries(), lambda s: np.zeros((len(s), 4)), min_similarity=-1.0)
    assert report.words_by_sub_query == {}


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e300])
def test_the_length_of_vectors_does_not_matter(scale):
    report = assess("dns words", sub_queries(), lambda s: embed(s).astype(np.float64) * scale, min_similarity=0.9)
    assert report.words_by_sub_query == {"dns": 2}


# the default threshold


def test_the_default_threshold_is_the_95th_percentile_of_the_store():
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((300, 4)).astype(np.float32)
    store = make_store(rows)
    store.remove([str(i) for i in range(0, 300, 3)])
    alive = np.delete(rows, np.arange(0, 300, 3), axis=0).astype(np.float64)
    cosines = alive / np.linalg.norm(alive, axis=1, keepdims=True)
    expected = {word: np.percentile(cosines[:, i], 95) for i, word in enumerate(WORDS)}
    thresholds = similarity_thresholds(store, sub_queries())
    assert thresholds == pytest.approx(expected, abs=1e-12)
    assert similarity_thresholds(store.view(), sub_queries()) == thresholds
    output = "dns words here. cni words"
    by_store = assess(output, sub_queries(), embed, store=store, embedding_model=MODEL)
    by_value = assess(output, sub_queries(), embed, min_similarity=thresholds, embedding_model=MODEL)
    assert by_store == by_value
    assert by_store.words_by_sub_query == {"dns": 3, "cni": 2}


def test_a_large_store_is_sampled_evenly(monkeypatch):
    module = importlib.import_module("cdr_kernel.loop._assess")  # the package's own `assess` is the function
    monkeypatch.setattr(module, "SAMPLE_ROWS", 10)
    monkeypatch.setattr(module, "CHUNK_ROWS", 3)
    angles = np.linspace(0.0, np.pi, 50)
    rows = np.stack([np.cos(angles), np.sin(angles), 0 * angles, 0 * angles], axis=1)
    cosines = np.cos(angles[::5].astype(np.float32))
    got = similarity_thresholds(make_store(rows), sub_queries())["dns"]
    assert got == pytest.approx(np.percentile(cosines, 95), abs=1e-6)


def test_embedding_needs_a_threshold():
    with pytest.raises(ValueError, match=r"min_similarity=, or store="):
        assess("dns", sub_queries(), embed)
    with pytest.raises(ValueError, match="empty store"):
        assess("dns", sub_queries(), embed, store=make_store(np.zeros((0, 4))))
    three = FactStore(3, embedding_model=MODEL)
    three.add(["x"], ["t"], [[1.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match="dimension"):
        assess("dns", sub_queries(), embed, store=three)
    with pytest.raises(EmbeddingModelMismatch):
        assess("dns", sub_queries(), embed, store=make_store(np.eye(4)), embedding_model="m2")
    with pytest.raises(TypeError, match=r"store: expected a FactStore or a StoreView, got Retriever: pass its \.store"):
        assess("dns", sub_queries(), embed, store=Retriever(make_store(np.eye(4))), embedding_model=MODEL)
    with pytest.raises(TypeError, match="store: expected a FactStore or a StoreView, got Retriever"):
        similarity_thresholds(Retriever(make_store(np.eye(4))), sub_queries())


# checks


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ([[1.0, 0.0, 0.0]], r"\[1, 4\]"),
        ([[1.0, 0.0, 0.0, 0.0]] * 2, r"\[1, 4\]"),
        ([], r"\[1, 4\]"),
        ([1.0, 0.0, 0.0, 0.0], "embed"),
        ([[1.0, 0.0, float("nan"), 0.0]], "not finite for 'dns words'"),
        ([[1.0, 0.0, float("inf"), 0.0]], "not finite"),
        ([[1.0], [2.0, 3.0]], "embed"),
        (None, "embed"),
        ([["a", "b", "c", "d"]], "embed"),
    ],
)
def test_what_embed_returns_is_checked(result, says):
    with pytest.raises((ValueError, TypeError), match=says):
        assess("dns words", sub_queries(), lambda sentences: result, min_similarity=0.5)


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"output": None}, TypeError, "output"),
        ({"sub_queries": []}, ValueError, "at least one"),
        ({"sub_queries": ["dns"]}, TypeError, "SubQuery"),
        ({"sub_queries": sub_queries() + sub_queries()}, ValueError, "unique"),
        ({"sub_queries": [*sub_queries(), SubQuery("x", "X", "", [1.0])]}, ValueError, "dimension"),
        ({"min_similarity": float("nan")}, ValueError, "min_similarity"),
        ({"min_similarity": 1.5}, ValueError, "min_similarity"),
        ({"min_similarity": True}, TypeError, "min_similarity"),
        ({"min_similarity": {"dns": 0.5}}, ValueError, "cni"),
        ({"min_similarity": {"dns": 0.5, "cni": None, "bgp": 0.5}}, TypeError, "cni"),
        ({"min_depth": -0.1}, ValueError, "min_depth"),
        ({"min_depth": float("nan")}, ValueError, "min_depth"),
        ({"expected_words": -1}, ValueError, "expected_words"),
        ({"expected_words": 1.5}, TypeError, "expected_words"),
        ({"written": {"dns": -1}}, ValueError, "dns"),
        ({"written": {"dns": True}}, TypeError, "dns"),
    ],
)
def test_arguments_are_checked(kwargs, error, says):
    arguments = {"output": "dns", "sub_queries": sub_queries(), "embed": embed, "min_similarity": 0.5}
    assess(**arguments)
    with pytest.raises(error, match=says):
        assess(**{**arguments, **kwargs})


# without an embedder


def test_without_an_embedder_shared_rare_words_decide():
    output = "The dns answers here. A cni plugin and dns. All about nothing in particular."
    report = assess(output, sub_queries())
    assert report.words_by_sub_query == {"dns": 4 + 5}  # the first of equals takes the second sentence
    assert assess("about all", sub_queries()).words_by_sub_query == {}
    assert assess("CNI!", sub_queries()).words_by_sub_query == {"cni": 1}


def test_a_rare_word_weighs_more_than_a_shared_one():
    items = [
        SubQuery("a", "one", "pods and services", [1.0]),
        SubQuery("b", "two", "pods and routes", [1.0]),
        SubQuery("c", "three", "meshes", [1.0]),
    ]
    assert assess("pods and routes", items).words_by_sub_query == {"b": 3}
    assert assess("and meshes", items).words_by_sub_query == {"c": 2}


def test_one_sub_query_needs_any_shared_word():
    report = assess("All of it. Nothing here", sub_queries(count=1))
    assert report.words_by_sub_query == {"dns": 3}


def test_a_report_fits_the_session_it_is_for():
    items = sub_queries()
    session = Session(items, embedding_model=MODEL)
    for output in ("dns one two three.", "dns more. bgp one two three four five six seven eight nine ten"):
        report = assess(output, items, embed, min_similarity=0.5, written=session.words, embedding_model=MODEL)
        session.update(report, output)
    assert session.words == {"dns": 6, "cni": 0, "bgp": 11}
    assert session.completeness == pytest.approx((0.6 + 0.0 + 1.0) / 3)
    assert [item.id for item in session.residual] == ["cni"]


@pytest.mark.parametrize("piece", [1, 4])
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("ab.!…\"') \n\r\u2028\x85。-#1é\xa0", max_size=60))
def test_the_sentences_of_a_long_text_are_those_of_a_short_one(piece, monkeypatch, text):
    expected = split_sentences(text)
    lines = [re.sub(r"^\s*(?:[-*+•>]|#{1,6}|\d{1,3}[.)])\s+", "", line) for line in text.splitlines()]
    ends = r"(?<=[。！？])|(?:(?<=[.!?…])|(?<=[.!?…][\"'”’)\]]))\s+"
    assert expected == [part.strip() for line in lines for part in re.split(ends, line) if tokenize(part)]
    monkeypatch.setattr(_tokenize, "_PIECE", piece)
    assert split_sentences(text) == expected


def test_other_threads_go_on_while_a_long_text_is_cut_into_sentences():
    text = "a." * 1_500_000
    assert longest_wait(lambda: split_sentences(text)) < 0.25


def test_many_sub_queries_do_not_make_every_sentence_dear():
    output = "nothing of this is about it\n" * 4_000

    def task(n):
        return [SubQuery(f"s{i}", f"topic{i}", f"words{i} of{i} that{i}", np.ones(2)) for i in range(n)]

    few, many = task(2), task(1_000)
    assert seconds(assess, output, many) < 5 * seconds(assess, output, few)


@given(
    st.lists(st.sets(st.sampled_from("abcdefg"), max_size=4), min_size=1, max_size=5),
    st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4), max_size=4),
)
def test_a_sentence_goes_to_the_sub_query_that_shares_the_most_with_it(vocabularies, sentences):
    items = [SubQuery(f"s{i}", "zz", " ".join(sorted(v)), np.ones(2)) for i, v in enumerate(vocabularies)]
    with_label = [v | {"zz"} for v in vocabularies]
    total = len(items)
    weight = {
        token: math.log(total / sum(token in v for v in with_label)) if total > 1 else 1.0
        for token in set().union(*with_label)
    }
    expected: dict[str, int] = {}
    for sentence in sentences:
        shared = [math.fsum(weight[token] for token in v & set(sentence)) for v in with_label]
        best = shared.index(max(shared))
        if shared[best] > 0.0:
            expected[f"s{best}"] = expected.get(f"s{best}", 0) + len(sentence)
    report = assess("\n".join(" ".join(sentence) for sentence in sentences), items)
    assert report.words_by_sub_query == expected
