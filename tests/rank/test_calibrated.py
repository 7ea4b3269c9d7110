"""The calibrated mode of a session: against its reference, and what it keeps from window to window."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import session_of_mode

from cdr_kernel import (
    _C,
    FactStore,
    NGramGuard,
    Retriever,
    Session,
    SubQuery,
    WindowReport,
    cdr_rank,
    crp_headers,
    pack_facts,
    rank_many,
    reference,
    run_windows,
)
from cdr_kernel.files._files import Task
from cdr_kernel.loop import guarantee_holds
from cdr_kernel.rank import _calibrated, _evidence
from cdr_kernel.rank._window_query import window_query
from cdr_kernel.report._run_record import RunRecord
from cdr_kernel.score._cdr_score import Factors, passing_scores

WORDS = ("pod", "Services", "traffic", "storage", "volume", "kubeProxy", "the", "network", "restarts")
MODEL = "toy"
PARTS = {
    "gate": st.sampled_from([-9.0, 0.0, 0.7, 2.0]),
    "min_qualified": st.sampled_from([0, 0, 4, 37, 200]),
    "gate_on": st.sampled_from(["best", "query"]),
    "lexical_weight": st.sampled_from([0.0, 0.25, 2.0]),
    "feedback_weight": st.sampled_from([0.0, 0.4, 1.5]),
    "lexical_feedback_weight": st.sampled_from([0.0, 0.5, 1.5]),
    "source_weight": st.sampled_from([0.0, 0.0, 0.4]),
    "need_floor": st.sampled_from([0.0, 0.35, 1.0]),
    "packed_penalty": st.sampled_from([0.0, 0.5, 1.0]),
    "centred_coverage": st.booleans(),
}


def some_store(r, n, dim):
    """Facts of a few words, some twice, some without a place in a document, some removed again."""
    rows = r.standard_normal((n, dim)) + 0.5
    if n > 6:
        rows[n // 2] = rows[1]
    texts = [" ".join(r.choice(WORDS, r.integers(0, 12))) or "x" for _ in range(n)]
    store = FactStore(dim, embedding_model=MODEL)
    store.add(
        [f"f{i}" for i in range(n)],
        texts,
        rows,
        importance=r.choice([0.5, 1.0, 1.0, 2.0], n),
        source=[f"s{i // 6}" if i % 11 else None for i in range(n)],
        position=[int(p) if p < 5 else None for p in r.integers(0, 6, n)],
    )
    store.remove([f"f{i}" for i in range(n) if i % 13 == 12])
    return store


def some_items(r, dim, count=3):
    return [
        SubQuery(f"q{j}", f"Q{j}", " ".join(r.choice(WORDS, 3)), r.standard_normal(dim) + 0.5) for j in range(count)
    ]


def as_reference(store, items, parts):
    view = store.view()
    alive = np.flatnonzero(view.alive)
    vectors = view.embeddings[alive].astype(np.float64)
    facts = [
        reference.Fact(v.tolist(), f.text, f.importance, 1.0, f.id, f.sequence, f.source, f.position)
        for f, v in zip(view.facts(alive), vectors, strict=True)
    ]
    listed = [reference.SubQuery(i.id, i.label, i.text, i.embedding.tolist()) for i in items]
    return facts, reference.CalibratedSession(listed, **parts)


def check(ranking, truth, share):
    """The same facts in the same order wherever scores differ, and the same numbers."""
    by_id = {s.fact.id: s for s in truth}
    assert set(ranking.ids) == set(by_id)
    assert ranking.new_share == (None if share is None else pytest.approx(share))
    for i, id in enumerate(ranking.ids):
        assert ranking.score[i] == pytest.approx(by_id[id].score, abs=1e-8)
        assert ranking.relevance[i] == pytest.approx(by_id[id].relevance, abs=1e-8)
        np.testing.assert_allclose(ranking.by_sub_query[i], by_id[id].by_sub_query, rtol=0, atol=1e-8)
        assert ranking.spec_novelty[i] == pytest.approx(by_id[id].spec_novelty, abs=1e-12)
    assert (np.diff(ranking.score) <= 0).all()
    sequence = np.array([fact.sequence for fact in ranking.facts])
    assert (np.diff(sequence)[np.diff(ranking.score) == 0.0] > 0).all()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.sampled_from([1, 5, 40]),
    guarded=st.booleans(),
    parts=st.fixed_dictionaries(PARTS),
)
def test_windows_are_those_of_the_reference(seed, n, guarded, parts):
    r = np.random.default_rng(seed)
    dim = 5
    if parts["source_weight"]:
        parts = {**parts, "feedback_weight": 0.0, "lexical_feedback_weight": 0.0}
    store, items, query = some_store(r, n, dim), some_items(r, dim), r.standard_normal(dim) + 0.5
    facts, twin = as_reference(store, items, parts)
    session = Session.calibrated(items, embedding_model=MODEL, guard=NGramGuard() if guarded else None, **parts)
    retriever = Retriever(store)
    for _ in range(3):
        multiplier = dict(zip(store.ids, r.choice([0.5, 1.0], len(store)).tolist(), strict=True))
        for fact in facts:
            fact.multiplier = multiplier[fact.id]
        ranking = cdr_rank(query, retriever, session, multiplier=multiplier)
        truth, share = reference.calibrated_rank(facts, query.tolist(), twin)
        check(ranking, truth, share)
        assert ranking.need == pytest.approx(reference.needs(twin))
        for k in (0, 2):
            assert cdr_rank(query, retriever, session, k=k, multiplier=multiplier).ids == ranking.ids[:k]
        envelope = pack_facts(ranking, 4, count_tokens=lambda text: 1)
        by_id = {s.fact.id: s for s in truth}
        there = [by_id[id] for id in envelope.ranking.ids]
        if there:
            assert envelope.min_novelty == pytest.approx(reference.min_novelty(there), abs=1e-12)  # R38
            assert guarantee_holds(envelope) == reference.guarantee_holds(there)
        in_place = [
            reference.CalibratedScored(s.fact, s.relevance, s.score, ranking.by_sub_query[ranking.ids.index(s.fact.id)])
            for s in truth
        ]  # its own numbers, so that ties fall alike
        packed = reference.pack_by_need(in_place, ranking.need, 4)
        assert envelope.ranking.ids == [s.fact.id for s in packed]
        if twin.direction is None:
            positions = reference.feedback_positions(facts, reference.lexical_scores(facts, twin))
            twin.direction = reference.feedback_direction(facts, positions)
            twin.words = reference.feedback_words(facts, positions)
        j = int(r.integers(len(items)))
        report = WindowReport(0.5, (f"q{j}",), {f"q{j}": float(r.choice([0.0, 0.3, 0.9]))}, embedding_model=MODEL)
        session.update(report, envelope.text, envelope=envelope)
        reference.update_session_after_window(
            twin, reference.Report(0.5, report.addressed, report.depth_by_sub_query), envelope.text if guarded else ""
        )
        twin.packed |= set(envelope.ranking.ids)


@pytest.fixture
def world():
    r = np.random.default_rng(7)
    store = some_store(r, 60, 6)
    return store, some_items(r, 6), r.standard_normal(6) + 0.5


def calibrated(items, **keywords):
    return Session.calibrated(items, embedding_model=MODEL, **{"gate": 0.5, **keywords})


def window(session, store, query, addressed=("q0",), retriever=None):
    ranking = cdr_rank(query, retriever or Retriever(store), session)
    envelope = pack_facts(ranking, 4, count_tokens=lambda text: 1)
    session.update(WindowReport(0.3, addressed, embedding_model=MODEL), "words", envelope=envelope)
    return envelope


@pytest.mark.parametrize("impl", ["cpp", "torch"])
@pytest.mark.parametrize("kind", ["scan", "flat"])
def test_every_path_gives_the_same_bits(world, impl, kind, monkeypatch):
    store, items, query = world
    plain, other = calibrated(items), calibrated(items)
    retriever = Retriever(store, kind)
    for _ in range(3):
        first = window(plain, store, query)
        monkeypatch.setenv("CDR_KERNEL_IMPL", impl)
        second = window(other, store, query, retriever=retriever)
        monkeypatch.delenv("CDR_KERNEL_IMPL")
        assert first.ranking.ids == second.ranking.ids
        assert first.ranking.score.tobytes() == second.ranking.score.tobytes()
        assert first.ranking.by_sub_query.tobytes() == second.ranking.by_sub_query.tobytes()


def test_many_sessions_of_both_modes_at_once(world):
    store, items, query = world
    sessions = [
        calibrated(items),
        Session(items, embedding_model=MODEL, min_relevance=-1.0),
        calibrated(items, gate=0.0, source_weight=0.4),
    ]
    window(sessions[0], store, query)
    together = rank_many([query, query + 1.0, query], Retriever(store), sessions, k=7)
    for session, asked, ranking in zip(sessions, [query, query + 1.0, query], together, strict=True):
        alone = cdr_rank(asked, Retriever(store), session, k=7)
        assert ranking.ids == alone.ids
        assert ranking.score.tobytes() == alone.score.tobytes()


def test_codes_of_a_scan_change_nothing(world):
    store, items, query = world
    plain, coded = Retriever(store), Retriever(store)
    coded.prepare()
    session = calibrated(items)
    for _ in range(2):
        first, second = cdr_rank(query, plain, session), cdr_rank(query, coded, session)
        assert first.ids == second.ids
        assert first.score.tobytes() == second.score.tobytes()
        window(session, store, query)


@pytest.mark.parametrize("seed", range(12))
def test_codes_find_the_same_facts_for_the_feedback(seed, monkeypatch):
    r = np.random.default_rng(seed)
    store, items, query = some_store(r, 300, 6), some_items(r, 6), r.standard_normal(6) + 0.5
    coded = Retriever(store)
    coded.prepare()
    texts = [" ".join(r.choice(WORDS, 4)) if i % 3 else "x" for i in range(40)]
    same = np.repeat(r.standard_normal((8, 6)) + 0.5, 5, axis=0)  # ties
    store.add([f"late{i}" for i in range(40)], texts, same)
    store.remove(store.ids[:150:7])
    monkeypatch.setattr(_evidence, "_SOME", 6)
    monkeypatch.setattr(_evidence, "_SAMPLE", 24)
    computed = []
    values = _evidence._values
    monkeypatch.setattr(_evidence, "_values", lambda *of: [computed.append(len(of[-1])), values(*of)][1])
    for weight in (0.0, 0.25, 3.0):
        session = calibrated(items, lexical_weight=weight)
        first = cdr_rank(query, Retriever(store), session)
        computed.clear()
        second = cdr_rank(query, coded, session)
        assert max(computed) < len(store)
        assert first.feedback.fact_ids == second.feedback.fact_ids
        assert first.score.tobytes() == second.score.tobytes()


@settings(derandomize=True, deadline=None)
@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_numbers_of_rows_are_found_whichever_are_fewer(known, rows):
    known, rows = (np.array(sorted(each), np.int64) for each in (known, rows))
    pair = (known, np.stack([known * 2.0 + 1.0, known * 3.0], axis=1))
    expected = [[row * 2.0 + 1.0, row * 3.0] if row in known else [0.0, 0.0] for row in rows.tolist()]
    assert _evidence._values_at(pair, rows).tolist() == expected
    assert _evidence._values_at((known, pair[1][:, 0]), rows).tolist() == [first for first, _ in expected]


@pytest.mark.parametrize("seed", range(40))
def test_codes_find_the_same_best_facts_for_every_bound(seed, monkeypatch):
    r = np.random.default_rng(seed)
    store, dim = FactStore(4, embedding_model=MODEL), 4
    texts = [" ".join(r.choice(WORDS, 2)) if r.random() < 0.5 else "x" for _ in range(60)]
    store.add([f"f{i}" for i in range(60)], texts, r.standard_normal((60, dim)).round(1) + 0.01)
    coded, plain, view = Retriever(store), Retriever(store), store.view()
    coded.prepare()
    monkeypatch.setattr(_evidence, "_SOME", int(r.integers(1, 40)))
    monkeypatch.setattr(_evidence, "_SAMPLE", int(r.integers(1, 60)))
    session = calibrated(some_items(r, dim), lexical_weight=float(r.choice([0.05, 0.25, 1.0, 3.0])))
    made = _evidence.gathered(session, session.settings, _evidence.LocalFacts(plain, view))
    for first, second in zip(
        _evidence.best_rows(made, plain, view), _evidence.best_rows(made, coded, view), strict=True
    ):
        assert first[1].tolist() == second[1].tolist()
        assert first[0].tobytes() == second[0].tobytes()


def test_codes_of_fewer_facts_than_the_feedback_takes(world):
    _, items, query = world
    store = FactStore(6, embedding_model=MODEL)
    store.add(["a", "b", "c"], ["network", "pod", "volume"], np.random.default_rng(3).standard_normal((3, 6)))
    coded = Retriever(store)
    coded.prepare()
    first, second = (
        cdr_rank(query, retriever, calibrated(items, gate=-9.0)) for retriever in (Retriever(store), coded)
    )
    assert first.feedback.fact_ids == second.feedback.fact_ids == ("a", "b", "c")
    assert first.score.tobytes() == second.score.tobytes()
    store.remove(["a", "b", "c"])
    assert len(cdr_rank(query, coded, calibrated(items))) == 0


@pytest.mark.parametrize("need_floor", [0.0, 0.35])
def test_scores_are_those_of_the_exact_routine(need_floor):
    r = np.random.default_rng(5)
    store, items, query = some_store(r, 120, 6), some_items(r, 6), r.standard_normal(6) + 0.5
    retriever, view = Retriever(store), store.view()
    session = calibrated(items, gate=-0.5, need_floor=need_floor, packed_penalty=0.5, guard=NGramGuard())
    multiplier = r.choice([0.0, 0.5, 1.3], len(store))
    factors = np.ones(view.rows)
    factors[view.alive] = multiplier
    for number in range(4):
        ranking = cdr_rank(query, retriever, session, multiplier=multiplier)
        asked = window_query(session.settings, query, retriever, session, session.state, view)
        rows = np.sort([view.row_of(id) for id in ranking.ids])
        assert rows.tolist() == retriever.candidates(asked.gates, view).tolist()
        packed = np.array([view.id_of(row) in session.state.packed for row in rows.tolist()])
        overlap = session.state.guard.overlap_rows(view.tokens, rows)
        given = Factors(view.importance[rows], np.where(packed, 0.5, 1.0) * factors[rows], overlap)
        exact = passing_scores(view.blocks, view.squared_norms, rows, asked.scoring(rows), given)
        exact = exact.take(np.lexsort((rows, -exact.score)))
        for name in ("score", "score_without_guard", "relevance", "coverage", "residual_pull", "novelty"):
            assert getattr(ranking, name).tobytes() == getattr(exact, name).tobytes()
        text = " ".join(ranking.facts[0].text for _ in range(3))
        report = WindowReport(0.5, (f"q{number % 3}",), {f"q{number % 3}": 1.0}, embedding_model=MODEL)
        session.update(report, text, envelope=pack_facts(ranking, 4, count_tokens=lambda text: 1))
    assert overlap.any()
    assert (exact.score < 0.0).any()


def test_later_windows_compute_no_values(world, monkeypatch):
    """But the specification's novelty of the packed facts, for the header."""
    store, items, query = world
    session, retriever = calibrated(items, guard=NGramGuard()), Retriever(store)
    window(session, store, query, retriever=retriever)
    calls, score_rows = [], _C.score_rows
    for name in ("column_values", "gate_rows"):
        monkeypatch.setattr(_C, name, lambda *_, name=name: calls.append(name))

    def scored(*arguments):
        calls.append(len(arguments[3]))
        return score_rows(*arguments)

    monkeypatch.setattr(_C, "score_rows", scored)
    ranking = cdr_rank(query, retriever, session)
    assert calls == []
    assert len(ranking) > 4 == len(pack_facts(ranking, 4, count_tokens=lambda text: 1).facts)
    assert calls == [4]


def test_the_header_is_the_novelty_of_the_specification(world):
    """R38: bit-equal to what mode "spec" has for the same facts after the same windows, however they are ranked."""
    store, items, query = world
    session, plain = calibrated(items), Session(items, embedding_model=MODEL, min_relevance=-1.0)
    for depth in (0.9, 0.4, 0.0):
        envelope = window(session, store, query, ("q0",))
        plain.update(WindowReport(0.3, ("q0",), embedding_model=MODEL), "words")
        report = WindowReport(0.3, ("q1",), {"q1": depth}, embedding_model=MODEL)
        session.update(report, "words")
        plain.update(report, "words")
        truth = cdr_rank(query, Retriever(store), plain)
        expected = dict(zip(truth.ids, truth.spec_novelty.tolist(), strict=True))
        assert truth.spec_novelty is truth.novelty
        ranking = cdr_rank(query, Retriever(store), session)
        best = cdr_rank(query, Retriever(store), session, k=5)
        envelope = pack_facts(ranking, 4, count_tokens=lambda text: 1)
        for made in (ranking, best, envelope.ranking, ranking.take([3, 1]), pickle.loads(pickle.dumps(ranking))):
            assert made.spec_novelty.tolist() == [expected[id] for id in made.ids]
        assert isinstance(envelope.ranking.novelty_source, np.ndarray)  # it does not hold on to the store
        assert (ranking.novelty == 1.0).all()
        assert envelope.min_novelty < 1.0


def test_the_header_falls_while_a_run_repeats_its_topic():
    """All facts stay new, so the mode's own measure says 1; the header says what the reader gets."""
    r = np.random.default_rng(11)
    centre = np.eye(8)[0]
    store = FactStore(8, embedding_model=MODEL)
    rows = np.concatenate([centre + 0.1 * r.standard_normal((60, 8)), r.standard_normal((300, 8))])
    store.add([f"f{i}" for i in range(360)], [f"fact {i}" for i in range(360)], rows)
    session = Session.calibrated([SubQuery("same", "Same", "the same", centre)], embedding_model=MODEL, gate=1.0)
    windows = list(
        run_windows(
            lambda prompt: prompt.envelope.text,
            centre,
            Retriever(store),
            session,
            token_budget=10_000,
            max_facts=5,
            assess=lambda output: WindowReport(0.2, ("same",), {"same": 0.9}),
        )
    )
    scores = [float(window.headers["CRP-Context-Coverage-Score"]) for window in windows]
    assert scores[0] == 1.0
    assert max(scores[1:]) < 0.40
    assert min(window.envelope.new_share for window in windows) > 0.5
    assert [window.guarantee_holds for window in windows] == [True, False, False, False, False]
    assert [window.band for window in windows] == ["healthy", *["low"] * 4]
    record = RunRecord(Task(0, "t", "q", 5, 5, ()))
    told = [record.add(window) for window in windows]
    assert [f"{each['novelty_min']:.2f}" for each in told] == [f"{score:.2f}" for score in scores]
    assert min(fact["spec_novelty"] for fact in told[1]["facts"]) == windows[1].envelope.ranking.spec_novelty.min()


def test_the_spec_is_the_default_and_computes_none_of_it(world):
    store, items, query = world
    session, retriever = Session(items, embedding_model=MODEL, min_relevance=-1.0), Retriever(store)
    ranking = cdr_rank(query, retriever, session)
    assert session.mode == "spec"
    assert ranking.by_sub_query is ranking.new_share is ranking.feedback is None
    assert retriever.moments._sums is None
    assert retriever.lexical._indexed.segments == ()
    assert not retriever.evidence


def test_defaults(world):
    session = Session.calibrated(world[1], embedding_model=MODEL)
    parts = session.settings
    assert (parts.gate, parts.gate_on, parts.lexical_weight, parts.feedback_weight) == (2.0, "best", 0.25, 0.4)
    assert parts.lexical_feedback_weight == 0.5
    assert (parts.source_weight, parts.need_floor, parts.packed_penalty, parts.min_new_share) == (0.0, 0.35, 1.0, 0.15)
    assert parts.centred_coverage is False
    assert session.guard is None
    assert parts.min_qualified == 200
    assert calibrated(world[1]).settings.min_qualified == 0  # a gate that is given is taken at its word
    assert calibrated(world[1], min_qualified=7).settings.min_qualified == 7


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"min_relevance": 0.55}, ValueError, 'min_relevance belongs to mode "spec".*use gate'),
        ({"exclude_packed": True}, ValueError, "use packed_penalty"),
        ({"exhaustion": "novelty"}, ValueError, "use min_new_share"),
        ({"first_window_pull": True}, ValueError, "first_window_pull belongs"),
        ({"clamp_novelty": True}, ValueError, "clamp_novelty belongs"),
        ({"gate": np.nan}, ValueError, "gate"),
        ({"gate": "2"}, TypeError, "gate"),
        ({"min_qualified": -1}, ValueError, "min_qualified"),
        ({"min_qualified": 2.5}, TypeError, "min_qualified"),
        ({"gate_on": "worst"}, ValueError, "'best', 'query'"),
        ({"lexical_weight": -0.1}, ValueError, "lexical_weight"),
        ({"need_floor": 1.1}, ValueError, "need_floor"),
        ({"packed_penalty": 2}, ValueError, "packed_penalty"),
        ({"centred_coverage": 1}, TypeError, "centred_coverage"),
        ({"source_weight": 0.4, "feedback_weight": 0.4}, ValueError, "source_weight replaces feedback_weight"),
        ({"source_weight": 0.4, "lexical_feedback_weight": 1}, ValueError, "replaces lexical_feedback_weight"),
        ({"lexical_feedback_weight": -1}, ValueError, "lexical_feedback_weight"),
    ],
)
def test_settings_are_checked(world, keywords, error, message):
    with pytest.raises(error, match=message):
        Session.calibrated(world[1], embedding_model=MODEL, **keywords)


@pytest.mark.parametrize("name", ["gate", "lexical_weight", "packed_penalty", "min_new_share"])
def test_parts_of_the_mode_need_the_mode(world, name):
    with pytest.raises(ValueError, match=f'{name} belongs to mode "calibrated"'):
        session_of_mode(world[1], embedding_model=MODEL, **{name: 0.1})


def test_columns_need_a_store(world):
    with pytest.raises(ValueError, match="use cdr_rank"):
        calibrated(world[1]).columns(world[2])


def test_packed_facts_do_not_return(world):
    store, items, query = world
    session = calibrated(items)
    seen = []
    for _ in range(4):
        seen += window(session, store, query).ranking.ids
    assert len(seen) == len(set(seen)) == 16


def test_each_feedback_can_be_turned_off(world):
    store, items, query = world
    seen = {}
    for vectors in (0.0, 0.4):
        for words in (0.0, 0.5):
            session = calibrated(items, feedback_weight=vectors, lexical_feedback_weight=words)
            ranking = cdr_rank(query, Retriever(store), session)
            assert (ranking.feedback is None) == (vectors == words == 0.0)
            seen[vectors, words] = ranking.score.tobytes()
    assert len(set(seen.values())) == 4


def test_the_direction_is_fixed_at_the_first_window(world):
    store, items, query = world
    session, twin = calibrated(items), calibrated(items)
    before = cdr_rank(query, Retriever(store), session)
    assert session.state.feedback is None  # ranking changes nothing
    window(session, store, query)
    made = session.state.feedback
    assert made.fact_ids == before.feedback.fact_ids
    near = np.mean([item.embedding for item in items], axis=0)
    store.add(["new1", "new2"], ["network traffic"] * 2, [near, near])
    assert cdr_rank(query, Retriever(store), session).feedback is made
    window(session, store, query)
    assert session.state.feedback is made
    assert set(cdr_rank(query, Retriever(store), twin).feedback.fact_ids) >= {"new1", "new2"}


def test_what_the_retriever_keeps_follows_the_store(world):
    store, items, query = world
    session, retriever = calibrated(items), Retriever(store)
    first = cdr_rank(query, retriever, session)
    assert cdr_rank(query, retriever, session).ids == first.ids
    kept = len(retriever.evidence)
    window(session, store, query, retriever=retriever)
    cdr_rank(query, retriever, session)  # now with the feedback that the first window found
    assert len(retriever.evidence) == kept
    store.remove(first.ids[:2])
    store.add(["late"], ["storage volume"], [items[0].embedding])
    assert cdr_rank(query, retriever, session).ids == cdr_rank(query, Retriever(store), session).ids
    for _ in range(20):
        cdr_rank(query, retriever, calibrated(some_items(np.random.default_rng(_), 6)))
    assert len(retriever.evidence) > 20
    assert 0 < retriever.evidence.nbytes <= retriever.evidence.limit


@pytest.mark.parametrize("keywords", [{}, {"source_weight": 0.4}])
def test_what_is_kept_is_bounded_by_bytes(world, keywords):
    store, _, query = world
    roomy, tight, none = Retriever(store), Retriever(store, cache_bytes=9000), Retriever(store, cache_bytes=0)
    for seed in range(6):
        session = calibrated(some_items(np.random.default_rng(seed), 6), **keywords)
        for _ in range(2):
            first = cdr_rank(query, roomy, session)
            for retriever in (tight, none):
                again = cdr_rank(query, retriever, session)
                assert again.ids == first.ids
                assert again.by_sub_query.tobytes() == first.by_sub_query.tobytes()
                assert again.score.tobytes() == first.score.tobytes()
            window(session, store, query, retriever=roomy)
    assert roomy.evidence.nbytes > 9000 >= tight.evidence.nbytes > 0
    assert none.evidence.nbytes == len(none.evidence) == 0


def test_what_is_added_for_rows_is_made_for_those_that_passed(world):
    store, items, query = world
    session, retriever, view = calibrated(items), Retriever(store), store.view()
    asked = window_query(session.settings, query, retriever, session, session.state, view)
    rows = retriever.candidates(asked.gates, view)
    scoring = asked.scoring(rows)
    assert asked.columns.addend is None
    assert 0 < len(rows) < len(store)
    assert set(scoring.addend.rows.tolist()) <= set(rows.tolist())
    every = asked.scoring(np.arange(view.rows))
    for j in range(scoring.scale.size):
        known = dict(zip(*map(np.ndarray.tolist, every.addend.column(j)), strict=True))
        added = dict(zip(*map(np.ndarray.tolist, scoring.addend.column(j)), strict=True))
        assert added == {row: known[row] for row in rows.tolist() if row in known}


def test_json_keeps_everything(world):
    store, items, query = world
    session = calibrated(items, guard=NGramGuard(), centred_coverage=True)
    empty = Session.from_json(session.to_json())
    assert empty.settings == session.settings
    window(session, store, query)
    again = Session.from_json(session.to_json())
    assert again.to_json() == session.to_json()
    a, b = (cdr_rank(query, Retriever(store), s) for s in (session, again))
    assert a.ids == b.ids
    assert a.score.tobytes() == b.score.tobytes()
    stored = json.loads(session.to_json())
    kept = stored["feedback"]
    assert kept["words"] == sorted(kept["words"])
    for broken in (
        3,
        {"fact_ids": "x", "direction": None, "words": None},
        {"fact_ids": [], "direction": None},
        {**kept, "words": None},
        {**kept, "words": ["pod"]},
        {**kept, "words": [["pod"]]},
        {**kept, "words": [["pod", -1.0]]},
        {**kept, "words": [[1, 1.0]]},
    ):
        with pytest.raises(ValueError, match="feedback"):
            Session.from_json(json.dumps({**stored, "feedback": broken}))
    with pytest.raises(ValueError, match="feedback"):
        Session.from_json(json.dumps({name: value for name, value in stored.items() if name != "feedback"}))


def test_json_of_the_source_option(world):
    session = calibrated(world[1], source_weight=0.4)
    assert Session.from_json(session.to_json()).settings == session.settings


def test_a_token_keeps_the_ids_and_the_ranking(world):
    store, items, query = world
    session = calibrated(items)
    window(session, store, query)
    again = Session.from_token(session.token(), items, embedding_model=MODEL)
    assert again.packed == session.packed
    assert again.state.feedback.fact_ids == session.state.feedback.fact_ids
    assert again.state.feedback.direction is again.state.feedback.words is None
    a, b = (cdr_rank(query, Retriever(store), s) for s in (session, again))
    assert a.ids == b.ids
    np.testing.assert_allclose(a.score, b.score, rtol=0, atol=1e-12)
    window(again, store, query)
    assert again.state.feedback.direction is not None
    assert again.state.feedback.words == session.state.feedback.words
    store.remove(session.state.feedback.fact_ids)
    cdr_rank(query, Retriever(store), Session.from_token(session.token(), items, embedding_model=MODEL))


def test_snapshot_merge_and_reset(world):
    store, items, query = world
    session = calibrated(items)
    branches = [session.snapshot(), session.snapshot()]
    packed = [window(b, store, query, (f"q{i}",)).ranking.ids for i, b in enumerate(branches)]
    session.merge(branches)
    assert session.state.feedback is branches[0].state.feedback
    assert set(session.packed) == {*packed[0], *packed[1]}
    later = session.snapshot()
    window(later, store, query)
    session.merge([later])
    assert session.state.feedback is branches[0].state.feedback
    stranger = later.snapshot()
    object.__setattr__(stranger._state, "feedback", None)
    session.reset()
    assert session.state.feedback is None
    assert not session.packed


def test_a_branch_of_another_direction_is_refused(world):
    store, items, query = world
    session = calibrated(items)
    window(session, store, query)
    other = Session.from_json(session.to_json().replace(session.state.feedback.fact_ids[0], "f999"))
    with pytest.raises(ValueError, match="does not continue"):
        session.merge([other])


def test_the_store_is_exhausted_by_the_share_of_new_facts(world):
    store, items, query = world
    session = calibrated(items, gate=1.5, min_new_share=0.5, max_windows=20)
    shares = []
    while True:
        ranking = cdr_rank(query, Retriever(store), session)
        envelope = pack_facts(ranking, 1, count_tokens=lambda text: 1)
        exit = session.exit(envelope=envelope)
        shares.append(exit.novelty_ratio)
        if exit.stop:
            break
        session.update(WindowReport(0.1, embedding_model=MODEL), "x", envelope=envelope)
    assert exit.reason == "ckf-exhausted"
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert 0.0 < shares[-1] < 0.5 <= shares[-2]
    assert "share of facts never packed" in exit.detail
    assert crp_headers(envelope, session, exit)["CRP-Context-Mode"] == "ckf-exhausted"


def test_no_fact_passes(world):
    store, items, query = world
    session = calibrated(items, gate=99.0, min_new_share=0.0)
    envelope = pack_facts(cdr_rank(query, Retriever(store), session), 5)
    exit = session.exit(envelope=envelope)
    assert (exit.reason, exit.novelty_ratio, exit.detail) == ("ckf-exhausted", 0.0, "no fact passed the relevance gate")


def test_enough_facts_qualify_in_a_small_store(world):
    store, items, query = world
    few = cdr_rank(query, Retriever(store), calibrated(items, gate=1.5))
    assert 0 < few.qualified < 20
    for kind in ("scan", "flat"):
        retriever = Retriever(store, kind)
        session = calibrated(items, gate=1.5, min_qualified=20)
        seen = []
        for number in range(3):
            ranking = cdr_rank(query, retriever, session)
            assert ranking.qualified == 20 - 4 * number
            assert set(few.ids) <= set(ranking.ids) | set(seen)
            seen += window(session, store, query, retriever=retriever).ranking.ids
        assert len(set(seen)) == 12
    everything = cdr_rank(query, Retriever(store), calibrated(items, gate=1.5, min_qualified=1000))
    assert everything.qualified == len(store)
    fine = cdr_rank(query, Retriever(store), calibrated(items, gate=1.5, min_qualified=few.qualified))
    assert fine.ids == few.ids
    assert fine.relevance.tobytes() == few.relevance.tobytes()


def test_enough_facts_qualify_among_some(world):
    store, items, query = world
    where, view = np.arange(len(store)) % 2 == 0, store.view()
    some = FactStore(6, embedding_model=MODEL)
    rows = np.flatnonzero(view.alive)[where]
    ids, texts = [fact.id for fact in view.facts(rows)], view.texts(rows.tolist())
    some.add(ids, texts, view.take(rows), importance=view.importance[rows])
    settings = {"gate": 1.5, "min_qualified": 15}
    retriever = Retriever(store)
    for _ in range(2):
        found = cdr_rank(query, retriever, calibrated(items, **settings), where=where)
        alone = cdr_rank(query, Retriever(some), calibrated(items, **settings))
        assert found.qualified == alone.qualified == 15
        assert found.ids == alone.ids
        cdr_rank(query, retriever, calibrated(items, **settings))  # of all facts: another gate


def test_the_gate_is_lowered_once(world, monkeypatch):
    store, items, query = world
    retriever, calls = Retriever(store), []
    best_gated = _calibrated.best_gated
    monkeypatch.setattr(_calibrated, "best_gated", lambda *of: [calls.append(1), best_gated(*of)][1])
    for least in (20, 1000):
        calls.clear()
        sessions = [calibrated(items, gate=1.5, min_qualified=least) for _ in range(2)]
        for _ in range(3):
            for session in sessions:
                window(session, store, query, retriever=retriever)
        assert calls == [1]


def test_an_empty_store_and_one_of_equal_facts(world):
    _, items, query = world
    store = FactStore(6, embedding_model=MODEL)
    assert len(cdr_rank(query, Retriever(store), calibrated(items))) == 0
    store.add(["a", "b", "c"], ["pod"] * 3, [items[0].embedding] * 3)
    for keywords in ({}, {"source_weight": 0.4}):
        assert len(cdr_rank(query, Retriever(store), calibrated(items, **keywords))) == 0
        found = cdr_rank(query, Retriever(store), calibrated(items, gate=0.0, **keywords))
        assert found.ids == ["a", "b", "c"]  # no deviation: z is 0 everywhere
        assert found.score.tolist() == [0.0] * 3


def test_texts_without_words_and_queries_without_texts(world):
    store, _, query = world
    items = [SubQuery("a", "A", "", query), SubQuery("b", "B", "日本語", query + 1)]
    session = calibrated(items)
    assert (
        cdr_rank(query, Retriever(store), session).ids
        == cdr_rank(query, Retriever(store), calibrated(items, lexical_weight=0.0)).ids
    )


def test_dimension_and_vector_are_checked(world):
    store, items, _ = world
    for bad in ([0.0] * 6, [1.0] * 5, [np.nan] * 6):
        with pytest.raises(ValueError, match="query"):
            cdr_rank(bad, Retriever(store), calibrated(items))
    with pytest.raises(ValueError, match="dimension"):
        cdr_rank([1.0] * 5, Retriever(store), calibrated(some_items(np.random.default_rng(0), 5)))


def test_run_windows_packs_by_need(world):
    store, items, query = world
    seen = {}
    for pack in (None, "greedy"):
        session = calibrated(items, max_windows=3)
        windows = run_windows(
            lambda prompt: prompt.envelope.text,
            query,
            Retriever(store),
            session,
            token_budget=10_000,
            k=3,
            max_facts=3,
            assess=lambda output: WindowReport(0.1, ("q0",)),
            pack=pack,
        )
        seen[pack] = [w.envelope.ranking.ids for w in windows if w.output is not None]
    expected = calibrated(items)
    for ids in seen[None]:
        ranking = cdr_rank(query, Retriever(store), expected)
        envelope = pack_facts(ranking, 3, count_tokens=lambda text: 1)
        assert ids == envelope.ranking.ids
        expected.update(WindowReport(0.1, ("q0",), embedding_model=MODEL), "", envelope=envelope)
    assert seen["greedy"] != seen[None]
    assert seen["greedy"][0] == cdr_rank(query, Retriever(store), calibrated(items), k=3).ids


def test_packing_by_need_takes_a_calibrated_ranking_and_goes_past_what_does_not_fit(world):
    store, items, query = world
    spec = cdr_rank(query, Retriever(store), Session(items, embedding_model=MODEL, min_relevance=-1.0))
    with pytest.raises(ValueError, match="takes a ranking of mode"):
        pack_facts(spec, 10, pack="need")
    with pytest.raises(ValueError, match="'best'"):
        pack_facts(spec, 10, pack="best")
    ranking = cdr_rank(query, Retriever(store), calibrated(items))
    free = pack_facts(ranking, 10**6, count_tokens=lambda text: 1)
    assert sorted(free.ranking.ids) == sorted(ranking.ids)
    first = free.facts[0].text
    small = pack_facts(ranking, 5, count_tokens=lambda text: 9 if text == first else 1)
    assert len(small.facts) == 5
    assert first not in [fact.text for fact in small.facts]
    assert small.skipped == len(ranking) - 5
