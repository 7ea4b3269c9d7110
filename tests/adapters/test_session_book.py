"""What every adapter carries, without a framework."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from sessions import session_of_mode

from cdr_kernel import (
    EmbeddingModelMismatch,
    FactStore,
    NGramGuard,
    Retriever,
    Session,
    SessionEnded,
    SubQuery,
    WindowReport,
    cdr_rank,
    pack_facts,
)
from cdr_kernel.adapters._session_book import Sessions, breakdown, text_id

R = np.random.default_rng(5)
QUERY = R.standard_normal(16)
VECTORS = (QUERY + 0.9 * R.standard_normal((60, 16))).tolist()
IDS = [f"d{i}" for i in range(60)]
TEXTS = [f"Fact {i} is about the topic {i % 7} and says the words {i} and {i + 1} once more." for i in range(60)]
IMPORTANCE = [1.0 + (i % 3) / 2 for i in range(60)]
SUBS = [SubQuery(str(i), f"part {i}", f"topic {i}", QUERY + R.standard_normal(16)) for i in range(5)]


def session(**options):
    return session_of_mode(SUBS, embedding_model="m", **options)


def output_of(places):
    return "\n".join(TEXTS[i] for i in places)


@pytest.mark.parametrize("options", [{}, {"exclude_packed": True}, {"guard": False}, {"first_window_pull": True}])
def test_reranking_is_cdr_rank_over_the_same_documents(options):
    store = FactStore(16, embedding_model="m", dtype="float64")
    store.add(IDS, TEXTS, VECTORS, importance=IMPORTANCE)
    retriever, twin = Retriever(store), session(**options)
    sessions = Sessions(session(**options))
    seen = set()
    for window in range(2):
        expected = cdr_rank(QUERY, retriever, twin, k=25)
        places, ranking = sessions.rerank(QUERY, IDS, TEXTS, VECTORS, importance=IMPORTANCE, k=25)
        assert [IDS[i] for i in places] == ranking.ids == expected.ids
        assert ranking.score.tobytes() == expected.score.tobytes()
        assert sessions.handed_out().facts == ranking.facts
        report = WindowReport(0.2 * (window + 1), addressed=(str(window),), depth_by_sub_query={str(window): 0.8})
        twin.update(report, output_of(places), envelope=pack_facts(expected, 10**6), embedding_model="m")
        exit = sessions.update(output_of(places), report)
        assert not exit.stop
        assert sessions.handed_out() is None
        assert bool(seen & set(places)) is (window > 0 and not options.get("exclude_packed"))
        seen |= set(places)
    assert sessions.get().packed.keys() == {IDS[i] for i in seen}


def test_ranking_a_store_is_cdr_rank():
    store = FactStore(16, embedding_model="m")
    store.add(IDS, TEXTS, VECTORS)
    sessions = Sessions(session())
    ranking = sessions.rank(QUERY, Retriever(store), k=5)
    assert ranking.ids == cdr_rank(QUERY, Retriever(store), session(), k=5).ids
    assert sessions.handed_out().facts == ranking.facts
    assert breakdown(ranking, 0)["score"] == ranking.score[0]


def test_documents_below_the_gate_and_repeated_ids_are_left_out():
    vectors = [*VECTORS[:3], (-QUERY).tolist(), VECTORS[0]]
    places, ranking = Sessions(session()).rerank(QUERY, [*"abcda"], ["t"] * 5, vectors)
    assert sorted(places) == [0, 1, 2]
    assert ranking.qualified == 3
    assert Sessions(session()).rerank(QUERY, [], [], [])[0] == []


def test_an_empty_envelope_that_was_asked_for_is_refused():
    """R39: k = 0 is no sign of an exhausted store; documents below the gate are."""
    store = FactStore(16, embedding_model="m")
    store.add(IDS, TEXTS, VECTORS)
    sessions = Sessions(session())
    for rank in (
        lambda: sessions.rank(QUERY, Retriever(store), k=0),
        lambda: sessions.rerank(QUERY, IDS, TEXTS, VECTORS, k=0),
    ):
        with pytest.raises(ValueError, match="k: no fact fits into an envelope of 0 facts, 58 facts passed"):
            rank()
    assert sessions.handed_out() is None
    sessions.rerank(QUERY, ["a"], ["t"], [(-QUERY).tolist()], k=0)
    assert sessions.exit().detail == "no fact passed the relevance gate"


def test_bad_documents_raise():
    sessions = Sessions(session())
    for vectors in ([[0.0] * 16], [[np.nan] * 16], [[1.0] * 3]):
        with pytest.raises(ValueError):  # noqa: PT011  # the store's own messages
            sessions.rerank(QUERY, ["a"], ["t"], vectors)
    assert sessions.handed_out() is None
    calibrated = Session.calibrated(SUBS, embedding_model="m")
    with pytest.raises(ValueError, match="whole store"):
        Sessions(calibrated).rerank(QUERY, IDS, TEXTS, VECTORS)


@pytest.mark.parametrize("kind", ["mapping", "function"])
def test_many_sessions_by_id(kind):
    held = {"a": session(), "b": session()}
    sessions = Sessions(held if kind == "mapping" else held.__getitem__)
    for name in held:
        sessions.rerank(QUERY, IDS, TEXTS, VECTORS, k=3, session_id=name)
    sessions.update("words", WindowReport(0.5, ("0",)), session_id="a")
    assert (held["a"].window_count, held["b"].window_count) == (1, 0)
    assert sessions.handed_out("a") is None
    assert len(sessions.handed_out("b").facts) == 3
    with pytest.raises(ValueError, match="name one"):
        sessions.get()
    with pytest.raises(KeyError):
        sessions.get("c")
    held["c"] = session()
    assert sessions.get("c") is held["c"]
    held["d"] = None
    with pytest.raises(TypeError, match="expected a Session"):
        sessions.get("d")


def test_one_session_has_its_own_id_only():
    one = session(id="mine")
    assert Sessions(one).get("mine") is one
    with pytest.raises(ValueError, match="one session 'mine'"):
        Sessions(one).get("other")
    with pytest.raises(TypeError, match="expected a Session"):
        Sessions("mine")


def test_the_report_is_given_asked_for_or_counted():
    output = "A sentence about part 3. " * 20
    counted = Sessions(session())
    counted.update(output)
    assert [e.sub_query_id for e in counted.get().coverage] == ["3"]
    first = counted.get().completeness
    counted.update("A sentence about part 1. " * 20)
    assert counted.get().completeness == pytest.approx(2 * first), "words of earlier windows count"
    asked = Sessions(session(), assess=lambda text: WindowReport(len(text) / 1000, ("4",)))
    asked.update(output)
    assert [e.sub_query_id for e in asked.get().coverage] == ["4"]
    asked.update(output, WindowReport(1.0, ("2",)))
    assert [e.sub_query_id for e in asked.get().coverage] == ["4", "2"]


def test_exits_are_told_before_and_after_a_window():
    sessions = Sessions(session(max_windows=1))
    assert not sessions.exit().stop
    assert sessions.update("words", WindowReport(0.1)).reason == "limit-reached"
    assert sessions.exit().reason == "limit-reached"
    empty = Sessions(session(min_relevance=0.999))
    empty.rerank(QUERY, IDS, TEXTS, VECTORS)
    assert empty.exit().reason == "ckf-exhausted"


def test_an_update_that_fails_changes_nothing():
    sessions = Sessions(session())
    sessions.rerank(QUERY, IDS, TEXTS, VECTORS, k=2)
    before = sessions.get().to_json()
    with pytest.raises(EmbeddingModelMismatch):
        sessions.update("words", WindowReport(0.5, embedding_model="other"))
    with pytest.raises(ValueError, match="unknown"):
        sessions.update("words", WindowReport(0.5, ("unknown",)))
    assert sessions.get().to_json() == before
    assert len(sessions.handed_out().facts) == 2


def test_a_guard_with_its_own_key_needs_it_here_too():
    one = session(guard=NGramGuard(hash_key=7))
    with pytest.raises(ValueError, match="hash_key"):
        Sessions(one).rerank(QUERY, IDS, TEXTS, VECTORS)
    sessions = Sessions(one, hash_key=7)
    sessions.update(TEXTS[0], WindowReport(0.1))
    places, ranking = sessions.rerank(QUERY, IDS, TEXTS, VECTORS)
    assert ranking.ngram_overlap[places.index(0)] > 0


def test_nothing_of_a_session_is_kept_when_it_is_gone():
    held = {"a": session()}
    sessions = Sessions(held)
    sessions.rerank(QUERY, IDS, TEXTS, VECTORS, session_id="a")
    watched = weakref.ref(held.pop("a"))
    gc.collect()
    assert watched() is None
    assert not sessions._rankings


def test_ids_of_texts():
    texts = ["a", "b", "", "ü", "\ud800"]
    assert len({text_id(t) for t in texts}) == 5
    assert text_id("a") == text_id("a")


def test_a_session_that_has_ended_gets_no_other_window():
    store = FactStore(16, embedding_model="m", dtype="float64")
    store.add(IDS, TEXTS, VECTORS)
    retriever, done = Retriever(store), WindowReport(0.95, tuple(item.id for item in SUBS))
    sessions = Sessions(session())
    sessions.rank(QUERY, retriever, k=3)
    assert sessions.update("words", done).reason == "task-complete"
    for again in (sessions, Sessions(Session.from_json(sessions.get().to_json()))):
        assert again.exit().reason == "task-complete"
        before = again.get().to_json()
        for call in (
            lambda again=again: again.rank(QUERY, retriever, k=3),
            lambda again=again: again.rerank(QUERY, IDS, TEXTS, VECTORS),
            lambda again=again: again.update("more words"),
        ):
            with pytest.raises(SessionEnded, match="task-complete"):
                call()
        assert (again.get().to_json(), again.handed_out()) == (before, None)


def test_new_facts_and_new_documents_open_an_exhausted_session():
    store = FactStore(16, embedding_model="m", dtype="float64")
    store.add(IDS[:8], TEXTS[:8], VECTORS[:8])
    retriever, packing = Retriever(store), {"exclude_packed": True, "max_windows": 20}
    ranked, reranked = Sessions(session(**packing)), Sessions(session(**packing))

    def documents(n):
        return reranked.rerank(QUERY, IDS[:n], TEXTS[:n], VECTORS[:n])[1]

    for sessions, hand_out in (
        (ranked, lambda n: ranked.rank(QUERY, retriever, k=None)),
        (reranked, documents),
    ):
        assert len(hand_out(8)) == 8
        sessions.update("words", WindowReport(0.1))
        assert len(hand_out(8)) == 0
        assert sessions.exit().reason == "ckf-exhausted"
        with pytest.raises(SessionEnded, match="new facts"):
            sessions.update("words", WindowReport(0.1))
        with pytest.raises(SessionEnded, match="new facts"):
            hand_out(8)
        if len(store) == 8:
            store.add(IDS[8:9], TEXTS[8:9], VECTORS[8:9])
        for _ in range(2):
            assert len(hand_out(9)) == 1
            assert not sessions.exit().stop
        sessions.update("words", WindowReport(0.2))
        assert (sessions.get().window_count, sessions.exit().stop) == (2, False)
    resumed = Sessions(Session.from_json(reranked.get().to_json()))
    assert len(resumed.rerank(QUERY, IDS[:9], TEXTS[:9], VECTORS[:9])[0]) == 0
    assert resumed.exit().stop
    twin = Sessions(Session.from_json(resumed.get().to_json()))
    with pytest.raises(SessionEnded):
        twin.rerank(QUERY, IDS[:9], TEXTS[:9], VECTORS[:9])
