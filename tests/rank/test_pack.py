"""Packing: which facts a token budget takes, and what the envelope says about them."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_kernel import FactStore, reference
from cdr_kernel.rank import Envelope, Ranking, _pack, pack_facts
from cdr_kernel.rank._pack import count_tokens_default
from cdr_kernel.store._fact_store import Fact
from cdr_kernel.store._stored_facts import StoredFacts

MAX = sys.float_info.max
HYPOTHESIS = settings(deadline=None, max_examples=100, derandomize=True)


def make_ranking(texts, *, relevance=0.8, novelty=1.0, overlap=0, importance=1.0, **counters) -> Ranking:
    n = len(texts)

    def column(value) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=np.float64), n).copy()

    overlaps = np.broadcast_to(np.asarray(overlap, dtype=np.int32), n).copy()
    base = column(importance) * column(relevance) * column(novelty)
    return Ranking(
        facts=tuple(Fact(f"f{i}", text, None, None, 1.0, i) for i, text in enumerate(texts)),
        score=base * (1.0 - np.minimum(0.8, overlaps * 0.15)),
        score_without_guard=base,
        relevance=column(relevance),
        coverage=1.0 - column(novelty),
        residual_pull=column(0.0),
        novelty=column(novelty),
        ngram_overlap=overlaps,
        importance=column(importance),
        multiplier=column(1.0),
        **{"qualified": n, "guard_activations": 0, "coverage_depth": 0, "store_version": 1, **counters},
    )


def as_scored(ranking: Ranking) -> list[reference.Scored]:
    """As the reference sees a ranking."""
    return [
        reference.Scored(
            fact=reference.Fact([1.0]),
            relevance=float(ranking.relevance[i]),
            coverage=0.0,
            residual_pull=0.0,
            novelty=float(ranking.novelty[i]),
            ngram_overlap=int(ranking.ngram_overlap[i]),
            ngram_penalty=reference.ngram_penalty(int(ranking.ngram_overlap[i])),
            score_without_guard=float(ranking.score_without_guard[i]),
            score=float(ranking.score[i]),
        )
        for i in range(len(ranking))
    ]


def packed(envelope: Envelope) -> list[str]:
    return [fact.id for fact in envelope.facts]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 1), ("a", 1), ("abcd", 1), ("abcde", 2), ("é" * 4, 2), ("東京", 2), ("𝄞", 1), ("\ud800", 1)],
)
def test_tokens_without_a_tokenizer_are_a_quarter_of_the_bytes(text, tokens):
    assert count_tokens_default(text) == tokens


def test_a_fact_that_does_not_fit_is_passed_over():
    ranking = make_ranking(["x" * 5, "x" * 50, "x" * 5], qualified=9, guard_activations=4, coverage_depth=7)
    envelope = pack_facts(ranking, 10, count_tokens=len)
    assert packed(envelope) == ["f0", "f2"]
    assert (envelope.tokens, envelope.token_budget, envelope.skipped) == (10, 10, 1)
    assert envelope.text == "xxxxx\nxxxxx"
    counters = envelope.ranking.qualified, envelope.ranking.guard_activations, envelope.ranking.coverage_depth
    assert counters == (9, 4, 7)


def test_what_a_full_budget_leaves_is_skipped():
    assert pack_facts(make_ranking(["aa", "b", "c"]), 2, count_tokens=len).skipped == 2
    nothing = pack_facts(make_ranking(["aa", "b"]), 0)
    assert (packed(nothing), nothing.tokens, nothing.skipped) == ([], 0, 2)


def test_max_facts_ends_packing():
    ranking = make_ranking(["a"] * 5)
    assert packed(pack_facts(ranking, 100, max_facts=2)) == ["f0", "f1"]
    assert packed(pack_facts(ranking, 100, max_facts=0)) == []
    assert pack_facts(ranking, 100, max_facts=2).skipped == 0
    assert len(packed(pack_facts(ranking, 100, max_facts=np.int64(9)))) == 5


def test_an_envelope_that_nothing_fits_into_says_what_is_too_small():
    """R39: not that the store has nothing."""
    ranking = make_ranking(["aaaa", "bb", "ccc"])
    for budget, more, says in (
        (1, {}, "token_budget: no fact fits into 1 token, 3 facts passed the relevance gate and the shortest has 2:"),
        (0, {}, "token_budget: no fact fits into 0 tokens, 3 facts passed the relevance gate: raise"),
        (1, {"max_facts": 2}, "token_budget: no fact fits into 1 token"),
        (9, {"max_facts": 0}, "max_facts: no fact fits into an envelope of 0 facts, 3 facts passed the relevance gate"),
    ):
        envelope = pack_facts(ranking, budget, count_tokens=len, **more)
        assert (envelope.facts, envelope.coverage_score) == ((), 0.0)
        with pytest.raises(ValueError, match=says):
            envelope.check_fits()
    with pytest.raises(ValueError, match=r"^k: no fact fits into an envelope of 0 facts, 3 facts passed"):
        pack_facts(ranking.take([]), 9).check_fits()
    pack_facts(ranking, 2, count_tokens=len).check_fits()
    pack_facts(make_ranking([]), 0, max_facts=0).check_fits()  # the store's fault
    away = pack_facts(make_ranking([], complete=False, missing_shards=("shard-1",)), 9)
    with pytest.raises(TimeoutError, match="no answer came in time from 'shard-1'"):
        away.check_fits()


@pytest.mark.parametrize(
    ("considered", "filter", "packed_before", "says"),
    [
        (7, "", False, "no fact passed the relevance gate"),
        (None, "", False, "no fact passed the relevance gate"),
        (7, "", True, "no fact that was not packed before passed the relevance gate"),
        (0, "", True, "the store has no facts"),
        (0, "(lang = 'de')", True, "no fact matches the filter (lang = 'de')"),
        (7, "(lang = 'de')", False, "no fact that matches the filter (lang = 'de') passed the relevance gate"),
    ],
)
def test_an_empty_envelope_says_why(considered, filter, packed_before, says):
    assert pack_facts(make_ranking([], considered=considered, filter=filter), 9).why_empty(packed_before) == says


@HYPOTHESIS
@given(st.lists(st.integers(1, 12), max_size=12), st.integers(0, 40), st.none() | st.integers(0, 12))
def test_packing_is_greedy(lengths, budget, max_facts):
    ranking = make_ranking(["x" * n for n in lengths])
    envelope = pack_facts(ranking, budget, count_tokens=len, max_facts=max_facts)
    expected, left, skipped = [], budget, 0
    for i, n in enumerate(lengths):
        if max_facts is not None and len(expected) >= max_facts:
            break
        if n <= left:
            expected.append(f"f{i}")
            left -= n
        else:
            skipped += 1
    assert packed(envelope) == expected
    assert (envelope.tokens, envelope.skipped) == (budget - left, skipped)


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None, "3", float("nan")])
def test_a_token_count_must_be_a_positive_int(count):
    with pytest.raises(ValueError, match=r"count_tokens.*'f0'"):
        pack_facts(make_ranking(["a"]), 10, count_tokens=lambda text: count)


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"token_budget": -1}, ValueError),
        ({"token_budget": True}, TypeError),
        ({"token_budget": 10.0}, TypeError),
        ({"token_budget": None}, TypeError),
        ({"max_facts": -1}, ValueError),
        ({"max_facts": False}, TypeError),
        ({"max_facts": 2.0}, TypeError),
    ],
)
def test_limits_are_checked(kwargs, error):
    with pytest.raises(error, match=next(iter(kwargs))):
        pack_facts(make_ranking(["a"]), **{"token_budget": 10, **kwargs})


@pytest.mark.parametrize(
    ("novelty", "least"),
    [([1.0, 0.74, 0.9], 0.74), ([2.0], 1.0), ([0.2, 1.5], 0.2), ([0.2 - 1e-17], 0.2), ([], None)],
)
def test_the_least_novelty_is_clamped(novelty, least):
    envelope = pack_facts(make_ranking(["a"] * len(novelty), novelty=novelty), 100)
    assert envelope.min_novelty == least  # R3, R13


def test_only_packed_facts_count():
    ranking = make_ranking(["a", "b" * 99], novelty=[0.9, 0.3], importance=[1.0, 0.1])
    envelope = pack_facts(ranking, 1)
    assert envelope.min_novelty == 0.9
    assert envelope.novelty_ratio() == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("ratios", "mean"),
    [
        ([MAX] * 4, MAX),
        ([MAX] * 3, MAX),
        ([MAX] * 7, MAX),
        ([MAX, MAX, 5e-324], MAX / 3 * 2),
        ([MAX, 0.0, 0.0], MAX / 3),
        ([1e308, 1.5e308], 1.25e308),
        ([np.inf, 1.0], np.inf),
        ([np.inf, MAX, MAX], np.inf),
    ],
)
def test_importances_that_sum_to_infinity(ratios, mean):
    envelope = pack_facts(make_ranking(["a"] * len(ratios), relevance=1.0, importance=ratios), 100)
    assert envelope.novelty_ratio() == mean
    assert envelope.novelty_ratio() == reference.novelty_ratio(as_scored(envelope.ranking))
    assert envelope.novelty_ratio("novelty") == 1.0
    tiny = pack_facts(make_ranking(["a"] * 2, relevance=[1e-9, 0.5], importance=MAX), 100)
    tiny.ranking.score[:] = MAX  # over a relevance that small beyond float64
    assert tiny.novelty_ratio() == reference.novelty_ratio(as_scored(tiny.ranking)) == np.inf


@HYPOTHESIS
@given(st.lists(st.floats(1e300, MAX) | st.floats(0.0, 1.0), min_size=1, max_size=12))
def test_a_mean_is_in_range_whatever_the_sum_is(importance):
    ranking = make_ranking(["a"] * len(importance), relevance=1.0, importance=importance)
    ratio = pack_facts(ranking, 100).novelty_ratio()
    assert ratio == reference.novelty_ratio(as_scored(ranking))
    exact = sum(map(Fraction, importance)) / len(importance)
    assert abs(Fraction(ratio) - exact) <= exact * Fraction(2) ** -51 + Fraction(2) ** -1073


def test_an_empty_envelope_has_the_ratio_0():
    empty = pack_facts(make_ranking([]), 10)
    assert empty.novelty_ratio() == empty.novelty_ratio("novelty") == 0.0  # R12
    assert (empty.text, empty.facts, empty.min_novelty) == ("", (), None)
    with pytest.raises(ValueError, match="'novelty'"):
        empty.novelty_ratio("mean")


@HYPOTHESIS
@given(
    st.lists(
        st.tuples(
            st.floats(-1.0, 1.0).filter(lambda x: x == 0.0 or abs(x) > 1e-3),
            st.floats(0.2, 2.0),
            st.integers(0, 8),
            st.floats(0.0, 2.0),
        ),
        max_size=8,
    ),
    st.sampled_from(["score", "novelty"]),
)
def test_the_ratio_is_the_reference_s(rows, exhaustion):
    relevance, novelty, overlap, importance = ([row[i] for row in rows] for i in range(4))
    ranking = make_ranking(
        ["a"] * len(rows), relevance=relevance, novelty=novelty, overlap=overlap, importance=importance
    )
    envelope = pack_facts(ranking, 100)
    assert envelope.novelty_ratio(exhaustion) == reference.novelty_ratio(as_scored(ranking), exhaustion)
    assert envelope.min_novelty == reference.min_novelty(as_scored(ranking))


def by_need(ranking: Ranking, lengths: list[int], budget: int, most: int | None) -> tuple[list[int], int]:
    """Packing by need with every list whole, and how many facts were passed over."""
    values, sequence = ranking.by_sub_query.tolist(), [fact.sequence for fact in ranking.facts]
    lists = [sorted(range(len(values)), key=lambda i: (-values[i][j], sequence[i])) for j in range(len(ranking.need))]
    got, seen, taken, tokens = [0] * len(lists), [], [], 0
    while len(seen) < len(values) and len(taken) != most and tokens < budget:
        j = max(range(len(lists)), key=lambda j: ranking.need[j] / (got[j] + 1))
        seen.append(next(i for i in lists[j] if i not in seen))
        if tokens + lengths[seen[-1]] <= budget:
            taken.append(seen[-1])
            tokens += lengths[seen[-1]]
            got[j] += 1
    return taken, len(values) - len(taken) if tokens == budget and len(taken) != most else len(seen) - len(taken)


@HYPOTHESIS
@given(data=st.data(), first=st.sampled_from([1, 2, 64]))
def test_packing_by_need_is_that_of_whole_lists(data, first):
    n, subs = data.draw(st.integers(0, 24)), data.draw(st.integers(1, 4))
    number = st.sampled_from([-1.0, -0.0, 0.0, 1.0, 2.0, MAX, np.inf, 5e-324]) | st.floats(-5.0, 5.0)
    values = np.array(data.draw(st.lists(st.lists(number, min_size=subs, max_size=subs), min_size=n, max_size=n)))
    need = tuple(data.draw(st.lists(st.sampled_from([0.0, 0.35, 0.5, 1.0]), min_size=subs, max_size=subs)))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    sequence = data.draw(st.permutations(range(n)))
    budget, most = data.draw(st.sampled_from([0, 1, 4, 12, 10**6])), data.draw(st.none() | st.integers(0, n))
    ranking = make_ranking(["x" * n for n in lengths])
    ranking = replace(
        ranking,
        facts=tuple(replace(fact, sequence=s) for fact, s in zip(ranking.facts, sequence, strict=True)),
        by_sub_query=values.reshape(n, subs),
        need=need,
    )
    with patch.object(_pack, "_FIRST", first):
        envelope = pack_facts(ranking, budget, count_tokens=len, max_facts=most)
    taken, skipped = by_need(ranking, lengths, budget, most)
    assert packed(envelope) == [f"f{i}" for i in taken]
    assert envelope.skipped == skipped
    if budget == 10**6:
        scored = [
            reference.CalibratedScored(
                reference.Fact([1.0], id=f.id, sequence=f.sequence), 0.0, 0.0, ranking.by_sub_query[i].tolist()
            )
            for i, f in enumerate(ranking.facts)
        ]
        plain = reference.pack_by_need(scored, need, n if most is None else most)
        assert packed(envelope) == [each.fact.id for each in plain]


def test_packing_by_need_orders_and_makes_few_facts(monkeypatch):
    r = np.random.default_rng(0)
    store = FactStore(2, embedding_model="m")
    store.add([f"f{i}" for i in range(3000)], ["x" * int(n) for n in r.integers(1, 9, 3000)], r.normal(size=(3000, 2)))
    view, values = store.view(), r.normal(size=(3000, 3))
    plain = replace(make_ranking(["x"] * 3000), by_sub_query=values, need=(1.0, 0.7, 0.35))
    ranking = replace(plain, facts=StoredFacts(view, np.arange(3000)))
    made, ordered = [], []
    of, best = type(view).facts, _pack.best_first
    monkeypatch.setattr(type(view), "facts", lambda self, rows: made.extend(rows) or of(self, rows))
    monkeypatch.setattr(_pack, "best_first", lambda *given: ordered.append(given[2]) or best(*given))
    envelope = pack_facts(ranking, 40, count_tokens=len)
    assert sorted(made) == sorted(fact.sequence for fact in envelope.facts)
    assert ordered == [64, 64, 64]
    assert isinstance(envelope.ranking.facts, tuple)
    whole = pack_facts(replace(plain, facts=tuple(ranking.facts)), 40, count_tokens=len)
    assert envelope.facts == whole.facts
    ordered.clear()
    made.clear()
    assert pack_facts(ranking, 2, count_tokens=lambda text: 3).skipped == 3000
    assert made == []
    assert ordered == [64, 256, 1024, 4096]
    with pytest.raises(ValueError, match=r"count_tokens.*'f"):
        pack_facts(ranking, 2, count_tokens=lambda text: 0)
