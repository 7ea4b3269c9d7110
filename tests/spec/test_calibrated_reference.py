"""The reference of the calibrated mode against itself written in numpy, and small cases worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cdr_kernel import FactStore, reference
from cdr_kernel.retrieve._bm25 import LexicalIndex, words
from cdr_kernel.spec.reference import CalibratedSession, Entry, Fact, SubQuery

WORDS = ("pod", "Services", "traffic", "storage", "volume", "kubeProxy", "the", "network")


def world(seed=0, n=30, dim=6, subs=3, sources=True):
    r = np.random.default_rng(seed)
    rows = r.standard_normal((n, dim)) + 0.5
    facts = [
        Fact(
            row.tolist(),
            " ".join(r.choice(WORDS, r.integers(1, 9))),
            id=str(i),
            source=f"s{i // 7}" if sources and i % 11 else None,
            position=i % 7,
        )
        for i, row in enumerate(rows)
    ]
    items = [
        SubQuery(f"q{j}", f"Q{j}", " ".join(r.choice(WORDS, 3)), (r.standard_normal(dim) + 0.5).tolist())
        for j in range(subs)
    ]
    return facts, items, (r.standard_normal(dim) + 0.5).tolist()


def in_numpy(facts, items, a=0.25, c=0.4, b=0.5, w=0.0):
    """[N, S]: the same scores in whole-array arithmetic."""

    def z(x):
        return (x - x.mean(0)) / np.maximum(1e-9, x.std(0))

    units = np.array([f.embedding for f in facts])
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    subs = np.array([i.embedding for i in items])
    subs /= np.linalg.norm(subs, axis=1, keepdims=True)
    bm25 = np.array([reference.bm25([f.content for f in facts], i.text) for i in items]).T
    x = z(units @ subs.T) + a * z(bm25)
    if w:
        out = x.copy()
        for i, f in enumerate(facts):
            if f.source is None:
                continue
            group = [n for n, other in enumerate(facts) if other.source == f.source]
            at = group.index(i)
            near = [(1 / abs(d), group[at + d]) for d in (-3, -2, -1, 1, 2, 3) if 0 <= at + d < len(group)]
            total = max(1.0, sum(weight for weight, _ in near))
            a_j = sum((weight * x[n] for weight, n in near), np.zeros(x.shape[1])) / total
            out[i] += w * (a_j + x[group].max(1).sum() / (len(group) + 5) + x[group].mean(1).sum() / (len(group) + 5))
        return out
    best = np.unique(np.argsort(-x, axis=0, kind="stable")[:5])
    g = units[best].mean(0) - units.mean(0)
    split = [words(f.content) for f in facts]
    known = sorted({word for text in split for word in text})
    impact = np.array([reference.bm25([f.content for f in facts], word) for word in known]).T
    above = np.maximum(0.0, impact[best].mean(0) - impact.mean(0))
    return x + c * z((units @ g)[:, None]) + b * z((impact @ above)[:, None])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keywords", [{}, {"a": 0.0, "c": 1.0, "b": 0.0}, {"c": 0.0, "b": 1.0}, {"a": 0.5, "w": 0.4}])
def test_sub_query_scores(seed, keywords):
    facts, items, _ = world(seed)
    names = {
        "a": "lexical_weight",
        "c": "feedback_weight",
        "b": "lexical_feedback_weight",
        "w": "source_weight",
    }
    session = CalibratedSession(items, **{names[key]: value for key, value in keywords.items()})
    np.testing.assert_allclose(
        np.array(reference.sub_query_scores(facts, session)).T, in_numpy(facts, items, **keywords), atol=1e-12
    )


def test_words_and_bm25_are_those_of_the_index():
    facts, items, _ = world(4)
    for text in [f.content for f in facts] + ["NetworkPolicies running, IPv6 10.0.0.1 日本"]:
        assert reference.lexical_words(text) == words(text)
    store = FactStore(6, embedding_model="toy")
    store.add([f.id for f in facts], [f.content for f in facts], [f.embedding for f in facts])
    for (rows, values), item in zip(LexicalIndex().bm25(store.view(), [i.text for i in items]), items, strict=True):
        dense = np.zeros(len(facts))
        dense[rows] = values
        np.testing.assert_allclose(dense, reference.bm25([f.content for f in facts], item.text), rtol=1e-12)


def test_z_scores():
    assert reference.z_scores([1.0, 3.0]) == [-1.0, 1.0]
    assert reference.z_scores([2.0, 2.0, 2.0]) == [0.0, 0.0, 0.0]
    assert reference.z_scores([0.1] * 3) == [0.0] * 3


def test_feedback_is_fixed_once_it_is_given():
    facts, items, _ = world()
    session = CalibratedSession(items)
    free = reference.sub_query_scores(facts, session)
    positions = reference.feedback_positions(facts, reference.lexical_scores(facts, session))
    assert 5 <= len(positions) <= 15
    session.direction = reference.feedback_direction(facts, positions)
    assert reference.sub_query_scores(facts, session) == free
    session.words = reference.feedback_words(facts, positions)
    assert list(session.words) == sorted(session.words)
    assert reference.sub_query_scores(facts, session) == free
    session.words = {"pod": 1.0}
    assert reference.sub_query_scores(facts, session) != free
    session.words = None
    session.direction = [1.0, 0, 0, 0, 0, 0]
    assert reference.sub_query_scores(facts, session) != free


def test_feedback_words_are_those_that_the_chosen_facts_have_more_of():
    texts = ["pods pods", "pods volumes", "volumes", "networks"]
    facts = [Fact([1.0], text) for text in texts]
    found = reference.feedback_words(facts, [0, 1])
    pod = reference.bm25(texts, "pod")
    assert found == {"pod": pytest.approx(sum(pod) / 2 - sum(pod) / 4)}  # volume: as many elsewhere
    evidence = reference.word_evidence(texts, found)
    assert evidence == pytest.approx([found["pod"] * x for x in pod])
    assert reference.feedback_words(facts, [0, 1, 2, 3]) == {}


def test_needs():
    items = [SubQuery(str(j), "L", "t", [1.0]) for j in range(4)]
    covered = [Entry([1.0], d, sub_query_id=i) for i, d in (("0", 0.9), ("1", 0.45), ("2", 0.3), ("2", 0.3))]
    session = CalibratedSession(items, coverage_set=covered)
    assert reference.needs(session) == pytest.approx([0.35, 0.5, 0.35, 1.0])
    session.need_floor = 0.0
    assert reference.needs(session) == pytest.approx([0.0, 0.5, 1 / 3, 1.0])
    session.coverage_set = [Entry([1.0], 1.0, sub_query_id=str(j)) for j in range(4)]
    assert reference.needs(session) == [1.0] * 4


def test_the_gate_packed_facts_and_the_share_of_new_ones():
    facts, items, query = world(2)
    session = CalibratedSession(items, gate=0.5, min_qualified=0)
    everything, share = reference.calibrated_rank(facts, query, session)
    assert share == 1.0
    assert 5 < len(everything) < 30
    session.packed = {everything[0].fact.id, everything[3].fact.id}
    rest, share = reference.calibrated_rank(facts, query, session)
    assert [s.fact.id for s in rest] == [s.fact.id for s in everything if s.fact.id not in session.packed]
    assert share == pytest.approx(1 - 2 / len(everything))
    session.packed_penalty = 0.5
    halved, again = reference.calibrated_rank(facts, query, session)
    assert again == share
    best = next(s for s in halved if s.fact is everything[0].fact)
    assert best.score == pytest.approx(everything[0].score / 2)
    session.gate_on = "query"
    assert len(reference.calibrated_rank(facts, query, session)[0]) < len(everything)
    session.gate = 99.0
    assert reference.calibrated_rank(facts, query, session) == ([], None)
    assert reference.calibrated_rank([], query, session) == ([], None)


def test_enough_facts_qualify():
    facts, items, query = world(2)
    session = CalibratedSession(items, min_qualified=0)
    strict = reference.calibrated_rank(facts, query, session)[0]
    assert 0 < len(strict) < 12
    session.min_qualified = 12
    enough, share = reference.calibrated_rank(facts, query, session)
    assert (len(enough), share) == (12, 1.0)
    assert {s.fact.id for s in strict} < {s.fact.id for s in enough}
    session.min_qualified = len(strict)
    assert reference.calibrated_rank(facts, query, session)[0] == strict
    session.min_qualified = 31
    assert len(reference.calibrated_rank(facts, query, session)[0]) == 30


def test_factors_act_above_zero_only():
    facts, items, query = world(3)
    session = CalibratedSession(items, gate=-99.0)
    plain = {s.fact.id: s for s in reference.calibrated_rank(facts, query, session)[0]}
    for fact in facts:
        fact.importance_weight = 0.5
    for s in reference.calibrated_rank(facts, query, session)[0]:
        before = plain[s.fact.id]
        assert s.score == pytest.approx(before.score * (0.5 if before.score > 0 else 1.0))
        assert s.by_sub_query == pytest.approx([x * (0.5 if x > 0 else 1.0) for x in before.by_sub_query])


def test_centred_coverage_takes_nothing_from_facts_that_lean_the_other_way():
    items = [SubQuery("a", "A", "t", [1.0, 0.0]), SubQuery("b", "B", "t", [0.0, 1.0])]
    facts = [Fact([1.0, 0.1]), Fact([0.1, 1.0]), Fact([1.0, 1.0])]
    entries = [Entry([1.0, 0.0], 0.9, sub_query_id="a")]
    session = CalibratedSession(items, gate=-9.0, coverage_set=entries, centred_coverage=True, feedback_weight=0.0)
    plain = CalibratedSession(items, gate=-9.0, coverage_set=entries, feedback_weight=0.0)
    ratio = {}
    for s in reference.calibrated_rank(facts, [1.0, 1.0], session)[0]:
        (before,) = [p for p in reference.calibrated_rank(facts, [1.0, 1.0], plain)[0] if p.fact is s.fact]
        ratio[tuple(s.fact.embedding)] = s.score / before.score
    near, mean = math.cos(math.atan(0.1)), math.cos(math.atan(0.1)) * 1.1 / 2
    assert ratio[(1.0, 0.1)] == pytest.approx(max(0.2, 1 - min(0.8, 2 * (near - mean))))
    assert ratio[(0.1, 1.0)] == pytest.approx(1.0)


def test_packing_takes_turns_by_need():
    scored = [
        reference.CalibratedScored(Fact([1.0], id=str(i)), 0.0, 0.0, [float(x), float(y)])
        for i, (x, y) in enumerate([(9, 0), (8, 9), (7, 1), (0, 8), (1, 1)])
    ]
    packed = reference.pack_by_need(scored, [1.0, 0.4], 4)
    assert [s.fact.id for s in packed] == ["0", "1", "3", "2"]  # needs 1 .4; .5 .4; .33 .4; .33 .2
    assert [s.fact.id for s in reference.pack_by_need(scored, [0.4, 1.0], 1)] == ["1"]
    assert len(reference.pack_by_need(scored, [1.0, 1.0], 9)) == 5
    assert reference.pack_by_need([], [1.0], 3) == []
