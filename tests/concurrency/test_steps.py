"""Work in steps comes to the same as in one go, wherever the steps are, and pauses often."""

from __future__ import annotations

import importlib
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import texts

from cdr_kernel import FactStore, NGramGuard, Session, SubQuery, WindowReport, assess, pack_facts
from cdr_kernel.concurrency._steps import finish
from cdr_kernel.loop._assess import WordCount, has_token, sentence_candidates, split_sentences
from cdr_kernel.loop._assess import similarity_thresholds as thresholds_at_once
from cdr_kernel.rank._pack import pack_steps
from cdr_kernel.text import _token_hashes, tokenize
from cdr_kernel.text._tokenize import pieces

assess_module = importlib.import_module("cdr_kernel.loop._assess")
MODEL = "m1"
HYPOTHESIS = settings(deadline=None, max_examples=300, derandomize=True)
MIXED = (
    "ab1 \n.,=<>_-'\"東京カガｶﾞか\u3099\u0301\u0338\u0e01\u0e33\u0e4d\u1100\u1161한éſ\u0345\ud800"
    "\U00020000\U0001f600…。，\xa0ﷺ¨\u0f71\u0f72"
)
SENTENCES = "ab1.!?…\"')” \n\r\t。！？-#*•>)\u2028\x85"


def test_finish_takes_what_the_steps_return():
    def steps():
        yield
        yield 3
        return 7

    assert finish(steps()) == 7


@HYPOTHESIS
@given(st.one_of(texts, st.text(MIXED, max_size=20)), st.integers(1, 6))
def test_the_tokens_of_pieces_are_those_of_the_text(text, size):
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    assert [token for part in parts for token in tokenize(part)] == tokenize(text)


def test_no_mark_joins_a_character_after_which_a_text_is_cut():
    """Where one did, the pieces would have other tokens than the text."""
    ends = [c for c in map(chr, range(0x3100)) if len(list(pieces(f"x{c}y", 1))) > 1 and not tokenize(c)]
    assert len(ends) > 40
    marks = [c for c in map(chr, range(0x300, 0x3100)) if unicodedata.combining(c)]
    for end in ends:
        form = unicodedata.normalize("NFKC", end)
        assert all(unicodedata.normalize("NFKC", end + mark).startswith(form) for mark in marks), hex(ord(end))


def test_a_text_is_hashed_in_steps(monkeypatch):
    monkeypatch.setattr(_token_hashes, "PIECE", 8)
    monkeypatch.setattr(_token_hashes, "pieces", lambda text: pieces(text, 8))
    for text in ("red Green blue, stone river cloud", "Größe über 東京の駅。 naïve CAFÉ and so on", "", "x" * 50):
        guard, steps = NGramGuard(2), NGramGuard(2)
        guard._hasher.hashed_steps = lambda text, hasher=guard._hasher: (yield) or hasher.hashed([text])
        guard.update(text)
        window = steps.window_steps(text)
        assert len(steps) == 0
        steps.add(finish(window))
        assert steps.hashes.tolist() == guard.hashes.tolist()
        assert len(steps) or len(text) in (0, 50)
    assert sum(1 for _ in NGramGuard().window_steps("many words " * 20)) > 10


@HYPOTHESIS
@given(st.text(SENTENCES, max_size=24), st.integers(1, 5))
def test_sentences_are_the_same_wherever_blocks_end(text, size):
    whole = split_sentences(text)
    before, assess_module.PIECE = assess_module.PIECE, size
    try:
        assert split_sentences(text) == whole
        assert [part for part in sentence_candidates(text) if has_token(part)] == whole
    finally:
        assess_module.PIECE = before


def sub_queries(count=3):
    words = ["dns", "cni", "bgp"]
    return [SubQuery(word, word.upper(), f"all about {word}", np.eye(4)[i], 10) for i, word in enumerate(words)][:count]


def test_words_are_counted_in_steps_as_at_once():
    output = "The dns names services. A cni and the dns: pods. Unrelated. bgp bgp\n" * 400
    count, pauses = WordCount(sub_queries(), min_depth=0.0), 0
    for _ in count.by_words_steps(output):
        pauses += 1
    assert count.report() == assess(output, sub_queries(), min_depth=0.0)
    assert pauses > 3
    written = {"dns": 4}
    assert count.report(written, MODEL) == assess(
        output, sub_queries(), min_depth=0.0, written=written, embedding_model=MODEL
    )


def test_one_sentence_that_is_long_is_counted_in_steps():
    count = WordCount(sub_queries(1))
    assert sum(1 for _ in count.by_words_steps("dns and more " * 50_000)) > 5
    assert count.report().words_by_sub_query == {"dns": 150_000}


def test_words_are_counted_by_vectors_in_batches():
    sentences = [f"{word} number {i}." for i in range(30) for word in ("dns", "cni", "nothing")]

    def embed(some):
        return np.array([[each.count("dns"), each.count("cni"), 0, 0.01] for each in some])

    count, least = WordCount(sub_queries()), dict.fromkeys(("dns", "cni", "bgp"), 0.5)
    for start in range(0, len(sentences), 7):
        some = sentences[start : start + 7]
        count.add_vectors(some, embed(some), least)
    assert count.report() == assess(" ".join(sentences), sub_queries(), embed, min_similarity=0.5)


def test_thresholds_are_taken_in_steps(monkeypatch):
    r = np.random.default_rng(0)
    store = FactStore(4, embedding_model=MODEL)
    store.add([str(i) for i in range(500)], ["t"] * 500, r.standard_normal((500, 4)))
    whole = thresholds_at_once(store, sub_queries())
    monkeypatch.setattr(assess_module, "_GROUP", 2)
    monkeypatch.setattr(assess_module, "CHUNK_ROWS", 100)
    steps = list(assess_module.threshold_steps(store, sub_queries()))
    assert len(steps) == 2 * 5
    assert thresholds_at_once(store, sub_queries()) == pytest.approx(whole)


def session():
    return Session(sub_queries(), embedding_model=MODEL)


def report(*addressed):
    return WindowReport(0.1, addressed, embedding_model=MODEL)


def test_an_update_in_steps_changes_everything_in_the_last(monkeypatch):
    monkeypatch.setattr(_token_hashes, "PIECE", 100)
    steps, whole, output = session(), session(), "some words that are long enough " * 30
    update = steps.update_steps(report("dns"), output)
    next(update)
    steps.update(report("cni"), "between the steps of the other one")
    before = steps.state
    for _ in update:
        assert steps.state is before
    whole.update(report("cni"), "between the steps of the other one")
    whole.update(report("dns"), output)
    assert steps.to_json().replace(steps.id, "") == whole.to_json().replace(whole.id, "")


def test_a_merge_in_steps_begins_again_where_the_session_was_changed():
    base = session()
    base.update(report("dns"), "the first window of this task says this")
    branches = [base.snapshot() for _ in range(3)]
    for branch, name in zip(branches, ("cni", "bgp", "cni"), strict=True):
        branch.update(report(name), f"the branch of {name} says something else")
    whole = base.snapshot()
    whole.merge(branches)
    merge = base.merge_steps(branches)
    next(merge)
    base.safety_budget = 1.0  # a change that leaves everything as it was, in a new state
    assert sum(1 for _ in merge) > 6
    assert base.to_json() == whole.to_json()
    with pytest.raises(ValueError, match="does not continue"):
        finish(base.merge_steps([session()]))


def test_packing_in_steps_shows_the_facts_as_they_are_made():
    from cdr_kernel import Retriever, cdr_rank

    store = FactStore(4, embedding_model=MODEL)
    rows = np.tile([1.0, 0, 0, 0], (300, 1)) + np.random.default_rng(0).standard_normal((300, 4)) * 0.05
    store.add([f"f{i}" for i in range(300)], [f"text {i}" for i in range(300)], rows)
    ranking = cdr_rank([1.0, 0, 0, 0], Retriever(store), session(), k=300)
    whole, made = pack_facts(ranking, 400), []
    steps = pack_steps(ranking, 400)
    try:
        while True:
            made.append(next(steps))
    except StopIteration as end:
        envelope = end.value
    assert envelope.ranking.ids == whole.ranking.ids
    assert (envelope.tokens, envelope.skipped) == (whole.tokens, whole.skipped)
    assert [fact for each in made for fact in each] == list(envelope.facts)
    assert len(made) > 5
