"""The session: what a window changes, what ends the loop, and what survives storage."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import session_of_mode
from timing import seconds

from cdr_kernel import reference
from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.rank import Envelope, Ranking
from cdr_kernel.session import (
    CalibratedSettings,
    Session,
    SessionEnded,
    SpecSettings,
    SubQuery,
    WindowReport,
    depth_from_words,
)
from cdr_kernel.session._settings import settings_of
from cdr_kernel.spec.constants import EXIT_REASONS, Depth
from cdr_kernel.store._fact_store import Fact
from cdr_kernel.text import NGramGuard

MODEL = "m1"
NAMES = ("a", "b", "c")
OUTPUT = "one two three four five six seven eight"
HYPOTHESIS = settings(deadline=None, max_examples=60, derandomize=True)


def sub_query(name: str, i: int = 0, dim: int = 4, **kwargs) -> SubQuery:
    return SubQuery(name, name.upper(), f"about {name}", np.eye(dim)[i], **kwargs)


def make_session(names=NAMES, marginal=(), **kwargs) -> Session:
    items = [sub_query(name, i, marginal=name in marginal) for i, name in enumerate(names)]
    return session_of_mode(items, **{"embedding_model": MODEL, "id": "s", **kwargs})


def make_envelope(
    n=1,
    *,
    relevance=0.8,
    novelty=1.0,
    overlap=0,
    importance=1.0,
    qualified=None,
    skipped=0,
    ids=None,
    newest=-1,
) -> Envelope:
    ids = ids or [f"f{i}" for i in range(n)]
    full = np.full(n, 1.0)
    penalty = min(0.8, overlap * 0.15)
    base = importance * relevance * novelty
    ranking = Ranking(
        facts=tuple(Fact(id, f"text {id}", None, None, importance, i) for i, id in enumerate(ids)),
        score=full * base * (1.0 - penalty),
        score_without_guard=full * base,
        relevance=full * relevance,
        coverage=full * (1.0 - novelty),
        residual_pull=full * 0.0,
        novelty=full * novelty,
        ngram_overlap=np.full(n, overlap, dtype=np.int32),
        importance=full * importance,
        multiplier=full,
        qualified=n if qualified is None else qualified,
        guard_activations=n if overlap else 0,
        coverage_depth=0,
        store_version=1,
        newest=newest,
    )
    return Envelope(ranking, tokens=n, token_budget=100, skipped=skipped)


def report(addressed=(), completeness=0.5, model: str | None = MODEL, **kwargs) -> WindowReport:
    return WindowReport(completeness, tuple(addressed), embedding_model=model, **kwargs)


# construction


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"gate": 1.0}, ValueError, 'gate belongs to mode "calibrated", the mode is "spec"'),
        ({"settings": SpecSettings(), "max_windows": 3}, ValueError, "expected settings or keywords, got both"),
        ({"settings": {"max_windows": 3}}, TypeError, "settings must be SpecSettings or CalibratedSettings"),
        ({"embedding_model": ""}, ValueError, "embedding_model"),
        ({"embedding_model": None}, TypeError, "embedding_model"),
        ({"min_relevance": float("nan")}, ValueError, "min_relevance"),
        ({"min_relevance": 1.5}, ValueError, "min_relevance"),
        ({"min_relevance": True}, TypeError, "min_relevance"),
        ({"min_relevance": "0.5"}, TypeError, "min_relevance"),
        ({"max_windows": 0}, ValueError, "1 to 20"),
        ({"max_windows": 21}, ValueError, "1 to 20"),
        ({"max_windows": 5.0}, TypeError, "max_windows"),
        ({"max_windows": True}, TypeError, "max_windows"),
        ({"completion_threshold": 1.01}, ValueError, "completion_threshold"),
        ({"safety_budget": -0.1}, ValueError, "safety_budget"),
        ({"safety_budget": float("inf")}, ValueError, "safety_budget"),
        ({"safety_budget": False}, TypeError, "safety_budget"),
        ({"first_window_pull": 1}, TypeError, "first_window_pull"),
        ({"clamp_novelty": None}, TypeError, "clamp_novelty"),
        ({"exclude_packed": "no"}, TypeError, "exclude_packed"),
        ({"residual_depth": 1.01}, ValueError, "residual_depth"),
        ({"residual_depth": True}, TypeError, "residual_depth"),
        ({"keep_outputs": 1}, TypeError, "keep_outputs"),
        ({"exhaustion": "mean"}, ValueError, "'novelty'"),
        ({"guard": True}, TypeError, "guard"),
        ({"id": ""}, ValueError, "id"),
    ],
)
def test_settings_are_checked(kwargs, error, says):
    with pytest.raises(error, match=says):
        make_session(**kwargs)


def test_settings_of_a_mode_by_its_name():
    assert settings_of("spec", max_windows=3) == SpecSettings(max_windows=3)
    assert settings_of("calibrated", gate=1.5, lexical_weight=None) == CalibratedSettings(gate=1.5, min_qualified=0)
    for mode in ("other", None):
        with pytest.raises(ValueError, match="'spec'"):
            settings_of(mode)
    with pytest.raises(ValueError, match=r'exclude_packed belongs to mode "spec", .*: use packed_penalty'):
        settings_of("calibrated", exclude_packed=True)
    with pytest.raises(TypeError, match="gates is no setting of a session"):
        settings_of("calibrated", gates=1.0)
    with pytest.raises(TypeError, match=r"mode is no setting of a session, .* use Session\.calibrated"):
        Session([sub_query("a")], embedding_model=MODEL, mode="calibrated")


@pytest.mark.parametrize(
    ("items", "error", "says"),
    [
        ([], ValueError, "at least one"),
        (["a"], TypeError, "SubQuery"),
        ([sub_query("a"), sub_query("a", 1)], ValueError, "unique"),
        ([sub_query("a"), sub_query("b", dim=3)], ValueError, "dimension"),
    ],
)
def test_sub_queries_are_checked(items, error, says):
    with pytest.raises(error, match=says):
        Session(items, embedding_model=MODEL)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"id": ""}, ValueError),
        ({"id": 3}, TypeError),
        ({"label": " "}, ValueError),
        ({"text": None}, TypeError),
        ({"embedding": [0.0, 0.0]}, ValueError),
        ({"embedding": [1.0, float("nan")]}, ValueError),
        ({"embedding": [1.0, float("inf")]}, ValueError),
        ({"embedding": [[1.0, 2.0]]}, ValueError),
        ({"embedding": []}, ValueError),
        ({"embedding": 3.0}, ValueError),
        ({"embedding": ["x"]}, TypeError),
        ({"expected_words": -1}, ValueError),
        ({"expected_words": True}, TypeError),
        ({"expected_words": 10.0}, TypeError),
        ({"marginal": 1}, TypeError),
    ],
)
def test_a_sub_query_is_checked(change, error):
    good = {"id": "a", "label": "A", "text": "t", "embedding": [1.0, 2.0]}
    assert SubQuery(**good).expected_words is None
    with pytest.raises(error):
        SubQuery(**{**good, **change})


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4", ">f8"])
def test_embeddings_are_read_only_float64_copies(dtype):
    given = np.array([1.0, 9.0, 2.0, 9.0], dtype=dtype)[::2]
    item = SubQuery("a", "A", "t", given)
    given[:] = 7.0
    assert item.embedding.dtype == np.float64
    assert item.embedding.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        item.embedding[0] = 5.0


def test_words_and_packed_cannot_be_changed_from_outside():
    session = make_session()
    for view in (session.words, session.packed):
        with pytest.raises(TypeError):
            view["a"] = 3


def test_zero_is_a_value_and_not_unset():
    session = make_session(min_relevance=0.0, completion_threshold=0.0, safety_budget=0.0)
    assert session.settings.min_relevance == session.settings.completion_threshold == session.safety_budget == 0.0
    assert SubQuery("a", "A", "", [1.0], expected_words=0).expected_words == 0
    session.update(report(["a"], 0.0, depth_by_sub_query={"a": 0.0}), "")
    assert session.coverage[0].depth_weight == 0.0


def test_a_new_session():
    session = make_session()
    assert session.residual == session.sub_queries
    assert (session.coverage, session.window_count, session.completeness) == ((), 0, 0.0)
    assert session.words == {"a": 0, "b": 0, "c": 0}
    assert session.packed == {}
    assert session.guard is not None
    assert len(session.guard) == 0
    assert session.guard.n == 6
    assert session.dim == 4
    assert make_session(guard=False).guard is None
    assert Session([sub_query("a")], embedding_model=MODEL).id != Session([sub_query("a")], embedding_model=MODEL).id


def test_a_given_guard_is_copied():
    guard = NGramGuard(3)
    guard.update("a b c")
    session = make_session(guard=guard)
    guard.update("d e f")
    assert session.guard is not None
    assert (session.guard.n, len(session.guard)) == (3, 1)
    session.update(report(), "x y z")
    assert len(guard) == 2


# §3: depth and update


def test_depth_from_words_has_the_examples_of_the_specification():
    assert depth_from_words(280, 300) == 0.90
    assert depth_from_words(60, 300) == 0.20
    assert depth_from_words(0, 300) == 0.0
    assert depth_from_words(10, 0) == depth_from_words(10, -1) == 0.5
    assert [float(depth) for depth in Depth] == [0.90, 0.70, 0.40, 0.15]


@pytest.mark.parametrize("words", [(-1, 10), (float("nan"), 10), (1, float("nan")), (float("inf"), 10)])
def test_depth_from_words_refuses_what_is_no_count(words):
    with pytest.raises(ValueError, match=r"actual|expected"):
        depth_from_words(*words)
    with pytest.raises(TypeError):
        depth_from_words(True, 10)


def test_update_appends_and_removes():
    session = make_session()
    session.update(report(["a"], depth_by_sub_query={"a": Depth.ADEQUATE}, words_by_sub_query={"a": 5, "b": 2}), OUTPUT)
    session.update(report(["b", "a"], 0.7, words_by_sub_query={"a": 1}), OUTPUT)
    entries = [(entry.sub_query_id, entry.depth_weight, entry.window_number) for entry in session.coverage]
    assert entries == [("a", 0.70, 1), ("b", 0.5, 2), ("a", 0.5, 2)]  # R15, R19, R33
    assert [item.id for item in session.residual] == ["c"]  # R8
    assert session.window_count == 2
    assert session.completeness == 0.7
    assert session.words == {"a": 6, "b": 2, "c": 0}
    assert session.guard is not None
    assert session.guard.overlap([OUTPUT]).tolist() == [3]
    assert session.coverage[2].embedding is session.sub_queries[0].embedding


def test_update_remembers_the_last_window_that_packed_a_fact():
    session = make_session()
    session.update(report(), OUTPUT, envelope=make_envelope(2, ids=["x", "y"]))
    session.update(report(), OUTPUT, envelope=make_envelope(2, ids=["y", "z"]))
    session.update(report(), OUTPUT)
    assert session.packed == {"x": 1, "y": 2, "z": 2}


def test_an_update_replaces_the_guard_and_leaves_the_published_one_alone():
    session = make_session()
    before = session.state
    session.update(report(["a"]), OUTPUT)
    assert before.guard is not None
    assert len(before.guard) == 0
    assert before.coverage == ()


@pytest.mark.parametrize(
    ("bad", "kwargs", "error"),
    [
        (report(["nope"]), {}, ValueError),
        (report([3]), {}, TypeError),
        (report(["a", "b", "a"]), {}, ValueError),
        (WindowReport(0.5, "a", embedding_model=MODEL), {}, TypeError),
        (report(["a"], depth_by_sub_query={"b": 0.5}), {}, ValueError),
        (report(["a"], depth_by_sub_query={"nope": 0.5}), {}, ValueError),
        (report(["a"], depth_by_sub_query={"a": -0.1}), {}, ValueError),
        (report(["a"], depth_by_sub_query={"a": 1.0000001}), {}, ValueError),
        (report(["a"], depth_by_sub_query={"a": float("nan")}), {}, ValueError),
        (report(["a"], depth_by_sub_query={"a": True}), {}, TypeError),
        (report(["a"], depth_by_sub_query={"a": None}), {}, TypeError),
        (report(["a"], -0.01), {}, ValueError),
        (report(["a"], 1.01), {}, ValueError),
        (report(["a"], float("nan")), {}, ValueError),
        (report(["a"], True), {}, TypeError),
        (report(["a"], None), {}, TypeError),
        (report(["a"], words_by_sub_query={"a": -1}), {}, ValueError),
        (report(["a"], words_by_sub_query={"a": 1.5}), {}, TypeError),
        (report(["a"], words_by_sub_query={"nope": 1}), {}, ValueError),
        (report(["a"]), {"output": None}, TypeError),
        (report(["a"]), {"output": b"bytes"}, TypeError),
        (report(["a"], model=None), {}, EmbeddingModelMismatch),
        (report(["a"], model="m2"), {}, EmbeddingModelMismatch),
        (report(["a"], model="m2"), {"embedding_model": MODEL}, EmbeddingModelMismatch),
        (report(["a"]), {"embedding_model": "m2"}, EmbeddingModelMismatch),
        (report(["a"], model=""), {}, EmbeddingModelMismatch),
        ({"completeness_score": 0.5}, {}, TypeError),
        (None, {}, TypeError),
    ],
)
def test_a_bad_update_changes_nothing(bad, kwargs, error):
    session = make_session()
    session.update(report(["b"]), OUTPUT, envelope=make_envelope(2))
    before = session.to_json()
    with pytest.raises(error):
        session.update(bad, **{"output": OUTPUT, **kwargs})
    assert session.to_json() == before


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("addressed", None, TypeError, "addressed must be a sequence of ids, got None"),
        ("addressed", 5, TypeError, "addressed must be a sequence of ids, got 5"),
        ("addressed", b"a", TypeError, "addressed must be a sequence of ids, got b'a'"),
        ("addressed", (None,), TypeError, "addressed must name sub-queries by their id, got None"),
        ("addressed", (["a"],), TypeError, "addressed must name sub-queries by their id"),
        ("depth_by_sub_query", None, TypeError, "depth_by_sub_query must be a mapping by id, got None"),
        ("depth_by_sub_query", {5: 0.5}, TypeError, "depth_by_sub_query must name sub-queries by their id, got 5"),
        ("words_by_sub_query", 7, TypeError, "words_by_sub_query must be a mapping by id, got 7"),
        ("words_by_sub_query", {None: 1}, TypeError, "words_by_sub_query must name sub-queries by their id"),
        ("words_by_sub_query", {"a": 2**53 + 1}, ValueError, "the words of 'a' must be 0 to 9007199254740992, got"),
        ("words_by_sub_query", {"a": 10**400}, ValueError, "the words of 'a' must be 0 to 9007199254740992"),
    ],
)
def test_an_update_says_what_is_wrong_with_a_report(field, value, error, message):
    session = make_session()
    good = WindowReport(0.5, ("a",), embedding_model=MODEL)
    with pytest.raises(error, match=message):
        session.update(dataclasses.replace(good, **{field: value}), OUTPUT)
    assert session.window_count == 0


def test_the_most_words():
    session = make_session()
    session.update(report(["a"], words_by_sub_query={"a": 2**53}), OUTPUT)
    session.update(report(["a"], words_by_sub_query={"a": 2**53}), OUTPUT)
    assert Session.from_json(session.to_json()).words["a"] == 2**54
    with pytest.raises(ValueError, match="expected_words of sub-query 'a' must be 0 to 9007199254740992"):
        SubQuery("a", "A", "", [1.0], expected_words=2**53 + 1)


def test_a_tokenizer_that_fails_changes_nothing():
    def tokens(text: str) -> list[str]:
        if "boom" in text:
            raise RuntimeError("boom")
        return text.split()

    session = make_session(guard=NGramGuard(tokenizer=tokens))
    before = session.to_json()
    with pytest.raises(RuntimeError):
        session.update(report(["a"]), "boom")
    assert session.to_json() == before


def test_the_model_may_come_with_the_call():
    session = make_session()
    session.update(report(["a"], model=None), OUTPUT, embedding_model=MODEL)
    assert session.window_count == 1


@pytest.mark.parametrize("value", [1.5, -0.01, float("nan"), True, "1"])
def test_the_safety_budget_is_checked_when_it_is_set(value):
    session = make_session(safety_budget=0.5)
    with pytest.raises((ValueError, TypeError), match="safety_budget"):
        session.safety_budget = value
    assert session.safety_budget == 0.5
    session.safety_budget = 0
    assert session.safety_budget == 0.0


reports = st.lists(
    st.tuples(
        st.lists(st.sampled_from(NAMES), unique=True),
        st.dictionaries(st.sampled_from(NAMES), st.floats(0.0, 1.0)),
        st.floats(0.0, 1.0),
        st.lists(st.sampled_from(["one", "two", "three"]), max_size=20).map(" ".join),
    ),
    max_size=6,
)


def play(session: Session, windows) -> None:
    for number, (addressed, depths, completeness, output) in enumerate(windows):
        known = {name: depth for name, depth in depths.items() if name in addressed}
        words = dict.fromkeys(addressed, number + 1)
        session.update(
            WindowReport(completeness, tuple(addressed), known, words, session.embedding_model),
            output,
            envelope=make_envelope(1, ids=[f"f{number % 3}"]),
        )


def as_reference(session: Session, **options) -> reference.ReferenceSession:
    """A session of the reference over the same task."""
    items = [
        reference.SubQuery(item.id, item.label, item.text, item.embedding.tolist(), item.marginal)
        for item in session.sub_queries
    ]
    return reference.ReferenceSession(items, **options)


def scored_like(envelope: Envelope) -> list[reference.Scored]:
    """The facts of an envelope as the reference ranks them."""
    ranking = envelope.ranking
    names = ("relevance", "coverage", "residual_pull", "novelty", "ngram_overlap", "ngram_penalty")
    return [
        reference.Scored(
            reference.Fact([1.0]),
            *(getattr(ranking, name)[i].item() for name in (*names, "score_without_guard", "score")),
        )
        for i in range(len(ranking))
    ]


envelopes = st.one_of(
    st.none(),
    st.builds(
        make_envelope,
        st.integers(0, 2),
        novelty=st.sampled_from([0.2, 0.6, 1.0]),
        overlap=st.integers(0, 3),
        relevance=st.sampled_from([0.8, -0.5]),
        newest=st.integers(-1, 3),
    ),
)


@HYPOTHESIS
@given(
    reports,
    st.lists(envelopes, min_size=6, max_size=6),
    st.floats(0.0, 1.0),
    st.integers(1, 20),
    st.sampled_from([(), ("c",), NAMES]),
    st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)
def test_updates_and_exits_are_those_of_the_reference(windows, packed, budget, max_windows, marginal, depth):
    settings = {"safety_budget": budget, "max_windows": max_windows, "residual_depth": depth}
    session = make_session(marginal=marginal, keep_outputs=True, **settings)
    truth = as_reference(session, **settings)
    for (addressed, depths, completeness, output), envelope in zip(windows, packed, strict=False):
        known = {name: depth for name, depth in depths.items() if name in addressed}
        facts, newest = (None, -1) if envelope is None else (scored_like(envelope), envelope.ranking.newest)
        last = reference.Report(completeness, addressed, known)
        before = vars(session.exit(None, envelope))
        assert before == vars(reference.should_stop(truth, None, facts, newest))
        session.update(report(addressed, completeness, depth_by_sub_query=known), output, envelope=envelope)
        reference.update_session_after_window(truth, last, output, facts, newest)
        assert vars(session.exit()) == vars(reference.should_stop(truth))
        ours = session.exit(report(addressed, completeness), envelope)
        assert vars(ours) == vars(reference.should_stop(truth, last, facts, newest))
        for number in (-1, 0, 3):
            assert ended(session, number) == reference.has_ended(truth, number)
    assert [(entry.depth_weight, entry.window_number) for entry in session.coverage] == [
        (entry.depth_weight, entry.window_number) for entry in truth.coverage_set
    ]
    assert [item.id for item in session.residual] == [item.id for item in truth.remaining]
    assert session.guard is not None
    assert len(session.guard) == len(truth.ngram_blacklist)
    assert (session.window_count, session.completeness) == (truth.window_count, truth.completeness)
    assert list(session.outputs) == truth.outputs


def ended(session: Session, newest: int = -1) -> bool:
    """Whether the session refuses another window."""
    try:
        session.check_open(newest)
    except SessionEnded:
        return True
    return False


# columns


def test_columns_ask_for_what_the_state_says():
    session = make_session(min_relevance=0.25, clamp_novelty=True)
    query = [1.0, 1.0, 0.0, 1.0]
    first = session.columns(query)
    assert first.coverage is None
    assert first.residual.shape == (0, 4)  # R1
    assert first.gate.tolist() == [0.25, float("inf")]
    assert first.clamp_novelty is True
    session.update(report(["a", "b"], depth_by_sub_query={"a": 0.9, "b": 0.3}), OUTPUT)
    columns = session.columns(query)
    assert columns.coverage is not None
    np.testing.assert_allclose(columns.coverage, [0.75, 0.25, 0.0, 0.0])
    assert columns.residual.tolist() == [[0.0, 0.0, 1.0, 0.0]]
    session.update(report(["c"]), OUTPUT)
    assert session.columns(query).residual.shape == (0, 4)


def test_first_window_pull_is_a_choice():
    assert make_session(first_window_pull=True).columns(np.ones(4)).residual.shape == (3, 4)


@pytest.mark.parametrize("query", [[1.0, 2.0, 3.0], [0.0] * 4, [float("nan")] * 4, [[1.0] * 4], 1.0])
def test_columns_refuse_a_bad_query(query):
    session = make_session()
    with pytest.raises(ValueError, match="query"):
        session.columns(query)


def test_readers_see_whole_states_while_another_thread_updates():
    session = make_session()
    failures: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            state = session.state
            stored = json.loads(session.to_json())
            twin = session.snapshot()
            sizes = {
                (len(state.coverage), state.window_count),
                (len(stored["coverage"]), stored["window_count"]),
                (len(twin.coverage), twin.window_count),
            }
            if any(entries != count for entries, count in sizes):
                failures.append(f"torn state {sizes}")
            if (len(twin.guard or ()) > 0) != (twin.window_count > 0):
                failures.append("guard and count do not belong together")
            session.columns(np.ones(4))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for number in range(100):
        session.update(report([NAMES[number % 3]]), OUTPUT)
    done.set()
    for reader in readers:
        reader.join()
    assert not failures
    assert session.window_count == 100


def test_concurrent_updates_are_not_lost():
    session = make_session()
    threads = [
        threading.Thread(target=lambda: [session.update(report(["a"]), OUTPUT) for _ in range(25)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.window_number for entry in session.coverage] == list(range(1, 101))


# §6: exits


def test_task_complete():
    session = make_session()
    assert not session.exit(report(NAMES, 0.92)).stop  # residual is not empty
    session.update(report(NAMES, 0.92), OUTPUT)
    outcome = session.exit(report(NAMES, 0.92))
    assert (outcome.stop, outcome.reason, outcome.also, outcome.detail) == (True, "task-complete", (), "")
    assert outcome.novelty_ratio is None
    assert session.exit(report(NAMES, 0.92 - 1e-12)).reason == "task-complete"
    assert not session.exit(report(NAMES, 0.919)).stop
    assert session.exit() == outcome  # R37: the report is remembered
    assert not make_session(completion_threshold=0.0, marginal=NAMES).exit().stop  # R32: no report, no completion


def test_marginal_items_may_remain():
    session = make_session(marginal=["c"])
    session.update(report(["a", "b"], 0.95), OUTPUT)
    assert session.exit(report((), 0.95)).reason == "task-complete"  # R9


def test_five_windows_are_the_limit():
    session = make_session()
    reasons = []
    for _ in range(5):
        session.update(report(), OUTPUT)
        reasons.append(session.exit(report()).reason)
    assert reasons == [None] * 4 + ["limit-reached"]  # R15


def test_two_ngram_matches_at_the_floor_exhaust_the_store():
    session = make_session()
    outcome = session.exit(report(), make_envelope(20, novelty=0.2, overlap=2))
    assert outcome.reason == "ckf-exhausted"  # R11
    assert outcome.novelty_ratio == pytest.approx(0.14)
    assert "0.140" in outcome.detail
    assert not session.exit(report(), make_envelope(20, novelty=0.2, overlap=1)).stop
    assert not session.exit(report(), make_envelope(20, novelty=0.2)).stop


def test_limits_that_are_met_up_to_rounding_are_met():
    budget = 1.0 - 0.35 - 0.35 - 0.15 - 0.05
    assert budget > 0.10
    assert make_session(safety_budget=budget).exit().reason == "safety-budget-depleted"  # R10
    assert not make_session(safety_budget=0.1001).exit().stop
    at_limit = make_envelope(1, relevance=0.43, importance=1.25, novelty=0.3, overlap=4)
    assert at_limit.novelty_ratio() < 0.15
    assert not make_session().exit(report(), at_limit).stop
    assert make_session().exit(report(), make_envelope(1, importance=0.749, novelty=0.2)).stop


def test_the_order_of_section_6_decides_and_the_rest_is_told():
    session = make_session(max_windows=1, safety_budget=0.05)
    session.update(report(NAMES, 1.0), OUTPUT)
    empty = make_envelope(0)
    outcome = session.exit(report(NAMES, 1.0), empty)
    assert (outcome.reason, *outcome.also) == EXIT_REASONS
    assert outcome.escalate
    session.update(report(completeness=0.5), OUTPUT)
    outcome = session.exit(None, make_envelope(1))
    assert (outcome.reason, outcome.also, outcome.escalate) == ("limit-reached", ("safety-budget-depleted",), True)
    assert not make_session(max_windows=1).exit().escalate


def test_an_empty_envelope_says_why():
    session = make_session()
    details = [
        session.exit(None, make_envelope(0)),
        session.exit(None, make_envelope(1, relevance=-0.5)),
    ]
    assert [outcome.reason for outcome in details] == ["ckf-exhausted"] * 2
    assert [outcome.novelty_ratio for outcome in details] == [0.0] * 2
    assert details[0].detail == "no fact passed the relevance gate"  # R12
    assert details[1].detail == "no packed fact has a relevance above zero"  # R27
    fussy = make_session(exclude_packed=True)
    assert fussy.exit(None, make_envelope(0)).detail == details[0].detail
    fussy.update(report(), OUTPUT, envelope=make_envelope(1))
    assert "not packed before" in fussy.exit(None, make_envelope(0)).detail


@pytest.mark.parametrize("options", [{}, {"mode": "calibrated"}, {"max_windows": 1}])
def test_an_envelope_that_nothing_fits_into_is_no_exhaustion(options):
    session = make_session(**options)
    session.update(report(), OUTPUT)
    for empty, says in ((make_envelope(0, qualified=3, skipped=3), "100 tokens"), (make_envelope(0, qualified=3), "k")):
        before = session.to_json()
        for tested in (
            lambda envelope=empty: session.exit(report(), envelope),
            lambda envelope=empty: session.before_window(envelope),
        ):
            with pytest.raises(ValueError, match=f"{says}.*no fact fits|no fact fits into {says}"):  # R39
                tested()
            assert session.to_json() == before
        known = session.state.last_envelope
        session.update(report(), OUTPUT, envelope=empty)  # which records alone (R37)
        assert session.state.last_envelope == known
        assert "ckf-exhausted" not in (session.exit().reason, *session.exit().also)


def test_exhaustion_by_novelty_leaves_importance_out():
    envelope = make_envelope(3, importance=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not make_session(exhaustion="novelty").exit(None, envelope).stop
        assert make_session(exhaustion="novelty").exit(None, make_envelope(3, novelty=0.2, overlap=2)).stop


@pytest.mark.parametrize("importance", [0.0, 0.1, 0.15])
def test_low_importance_warns_once(importance):
    session = make_session()
    envelope = make_envelope(3, importance=importance)
    with pytest.warns(UserWarning, match="importance"):
        outcome = session.exit(None, envelope)
    assert outcome.stop == (importance < 0.15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.exit(None, envelope)
        make_session().exit(None, make_envelope(3, importance=0.16))
        later = make_session()
        later.update(report(), OUTPUT)
        later.exit(None, envelope)


def test_low_importance_also_warns_after_window_1():
    session = make_session()
    session.update(report(), OUTPUT)
    with pytest.warns(UserWarning, match="importance"):
        session.exit(report(), make_envelope(1, importance=0.1))


@pytest.mark.parametrize("completeness", [float("nan"), 1.5, True, "1"])
def test_exit_checks_the_completeness(completeness):
    session = make_session()
    with pytest.raises((ValueError, TypeError), match="completeness_score"):
        session.exit(report((), completeness))


# R37: what has ended stays so


def at_limit(**kwargs) -> Session:
    session = make_session(max_windows=1, **kwargs)
    session.update(report(["a"]), OUTPUT)
    return session


def complete(**kwargs) -> Session:
    session = make_session(**kwargs)
    session.update(report(NAMES, 0.92), OUTPUT)
    return session


def exhausted(**kwargs) -> Session:
    session = make_session(**kwargs)
    session.update(report(["a"]), OUTPUT, envelope=make_envelope(2, novelty=0.2, overlap=3, newest=7))
    return session


def exhausted_at_once(**kwargs) -> Session:
    session = make_session(**kwargs)
    assert session.before_window(make_envelope(0, newest=7)).stop
    return session


def depleted(**kwargs) -> Session:
    session = make_session(safety_budget=0.1, **kwargs)
    session.update(report(["a"]), OUTPUT)
    return session


def never_safe(**kwargs) -> Session:
    session = make_session(safety_budget=0.1, **kwargs)
    assert session.before_window(make_envelope(1, newest=7)).stop
    return session


ENDS = {
    at_limit: "limit-reached",
    complete: "task-complete",
    exhausted: "ckf-exhausted",
    exhausted_at_once: "ckf-exhausted",
    depleted: "safety-budget-depleted",
    never_safe: "safety-budget-depleted",
}


def merged(session: Session) -> Session:
    branch = session.snapshot()
    session.merge([branch, session.snapshot()])
    return session


def branched(session: Session) -> Session:
    """A fresh session that takes over what this one did."""
    fresh = make_session(safety_budget=session.safety_budget, max_windows=session.max_windows)
    fresh.merge([session])
    return fresh


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "carried",
    [
        lambda session: session,
        lambda session: Session.from_json(session.to_json()),
        lambda session: Session.from_token(
            session.token(), session.sub_queries, embedding_model=MODEL, guard=session.guard
        ),
        lambda session: session.snapshot(),
        lambda session: pickle.loads(pickle.dumps(session)),
        copy.deepcopy,
        merged,
        branched,
    ],
    ids=["itself", "json", "token", "snapshot", "pickle", "deepcopy", "merged", "branched"],
)
def test_a_session_that_has_ended_stays_ended(end, carried):
    first = end().exit()
    session = carried(end())
    exit = session.exit()
    assert exit == first
    assert (exit.stop, exit.reason) == (True, ENDS[end])
    assert session.exit(envelope=make_envelope(3)).stop  # whatever else is asked of the store
    with pytest.raises(SessionEnded, match=ENDS[end]) as refused:
        session.check_open()
    assert refused.value.exit == exit
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    session.update(report(completeness=float(exit.reason == "task-complete")), OUTPUT)  # which only records
    assert session.exit().stop
    session.reset()
    session.check_open()
    assert session.exit().stop == (exit.reason == "safety-budget-depleted")


def test_what_opens_a_session_again():
    session = at_limit()
    session.extend(max_windows=2)
    session.check_open()
    assert (session.max_windows, session.exit().stop) == (2, False)
    assert Session.from_json(session.to_json()).max_windows == 2
    session = depleted()
    session.safety_budget = 0.2
    session.check_open()
    session = complete()
    session.extend(sub_queries=[sub_query("d", 3)])
    session.check_open()
    assert not session.exit().stop
    session = exhausted(safety_budget=0.1)
    assert ended(session, 8), "new facts do not make it safe"
    session.safety_budget = 0.5
    assert not ended(session, 8)
    with pytest.raises(SessionEnded, match=r"new facts.*reset"):
        session.check_open(7)


def test_new_facts_let_an_exhausted_store_be_tested_again():
    session = exhausted()
    for newest in (-1, 6, 7):
        assert session.exit(envelope=make_envelope(3, newest=newest)).detail == session.exit().detail
    fresh = make_envelope(3, newest=8)
    assert not session.exit(envelope=fresh).stop
    assert session.exit().stop, "a test alone changes nothing"
    session.update(report(["b"]), OUTPUT, envelope=fresh)
    session.check_open()
    assert session.exit().novelty_ratio == 1.0
    assert session.before_window(make_envelope(0, newest=9)).reason == "ckf-exhausted"
    assert ended(session, 9)


def test_a_fan_out_goes_on_while_one_branch_finds_something():
    session = make_session()
    poor, rich, idle = (session.snapshot() for _ in range(3))
    poor.update(report(["a"]), OUTPUT, envelope=make_envelope(0))
    rich.update(report(["b"]), OUTPUT, envelope=make_envelope(2))
    both = session.snapshot()
    both.merge([poor, rich, idle])
    assert not both.exit().stop
    session.merge([poor, idle])
    assert session.exit().reason == "ckf-exhausted"


def test_extend_is_checked():
    session = at_limit()
    before = session.to_json()
    bad = [
        ({"max_windows": 21}, ValueError, "1 to 20"),
        ({"max_windows": 2.0}, TypeError, "max_windows"),
        ({"sub_queries": [sub_query("a")]}, ValueError, "unique"),
        ({"sub_queries": [sub_query("d", dim=5)]}, ValueError, "dimension"),
        ({"sub_queries": ["d"]}, TypeError, "SubQuery"),
    ]
    for wrong, error, says in bad:
        with pytest.raises(error, match=says):
            session.extend(**{"max_windows": 3, **wrong})
    assert session.to_json() == before
    session.extend(max_windows=4)
    with pytest.raises(ValueError, match="at least the present 4, got 3"):
        session.extend(max_windows=3)


def test_more_sub_queries_are_as_if_they_had_been_there():
    session, twin = make_session(), make_session((*NAMES, "d"))
    play(session, [(["a"], {"a": 0.3}, 0.4, OUTPUT)])
    play(twin, [(["a"], {"a": 0.3}, 0.4, OUTPUT)])
    session.extend(sub_queries=twin.sub_queries[3:])
    assert session.to_json() == twin.to_json()
    assert session.task_key == twin.task_key
    assert session.columns(np.ones(4)).residual.tolist() == twin.columns(np.ones(4)).residual.tolist()
    again = Session.from_token(session.token(), twin.sub_queries, embedding_model=MODEL, guard=session.guard)
    assert again.token() == session.token()
    session.update(report(["d"]), OUTPUT)
    assert [item.id for item in session.residual] == ["b", "c"]


@pytest.mark.parametrize("packed", [{"a"}, "a", [1]])
def test_packed_facts_are_named_in_a_sequence(packed):
    session = make_session()
    with pytest.raises(TypeError, match="packed"):
        session.update(report(), OUTPUT, packed=packed)
    session.update(report(), OUTPUT, packed=["x"], envelope=make_envelope(2, newest=3))
    assert (session.packed, session.exit().novelty_ratio) == ({"x": 1}, 1.0)


def test_a_ranking_is_packed_first():
    session, ranking = make_session(), make_envelope(2).ranking
    for call in (
        lambda: session.update(report(), OUTPUT, envelope=ranking),
        lambda: session.exit(report(), ranking),
        lambda: session.before_window(ranking),
    ):
        with pytest.raises(TypeError, match=r"expected an Envelope, got Ranking: pack it first, as pack_facts"):
            call()
    with pytest.raises(TypeError, match="expected an Envelope, got list"):
        session.update(report(), OUTPUT, envelope=["f0"])
    assert (session.window_count, session.packed) == (0, {})


# what nobody changes behind a session's back


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_settings_are_fixed(mode):
    session = make_session(mode=mode)
    before = session.to_json()
    for name in [name for name in vars(session) if not name.startswith("_")]:
        with pytest.raises(AttributeError, match=f"{name} of a session is fixed"):
            setattr(session, name, 100)
        with pytest.raises(AttributeError, match=f"{name} of a session is fixed"):
            delattr(session, name)
    with pytest.raises(AttributeError, match=r"session\.extend\(max_windows=\.\.\.\)"):
        session.max_windows = 100
    assert Session.from_json(session.to_json()).to_json() == before
    if session.mode == "calibrated":
        with pytest.raises(AttributeError):
            session.settings.gate = 1.0


def test_a_session_hands_out_nothing_that_changes_it():
    session = make_session()
    play(session, [(["a"], {"a": 0.3}, 0.4, OUTPUT)])
    before = session.to_json()
    other = NGramGuard()
    for guard in (session.guard, session.state.guard):
        assert guard is not None
        for change_it in (lambda g: g.update("x " * 9), lambda g: g.merge(other), lambda g: g.clear()):
            with pytest.raises(TypeError, match="guard of a session cannot be changed"):
                change_it(guard)
        free = guard.copy()
        free.update("six words that are not there yet")
        assert len(free) > len(guard)
    for counts in (session.words, session.packed, session.state.words, session.state.packed):
        with pytest.raises(TypeError):
            counts["a"] = 9
    assert session.to_json() == before


# R36: what is addressed in part


def test_a_sub_query_remains_until_it_is_deep_enough():
    session = make_session(residual_depth=0.7)
    session.update(report(["a", "b"], depth_by_sub_query={"a": 0.4, "b": 0.7}), OUTPUT)
    assert [item.id for item in session.residual] == ["a", "c"]
    assert session.anchor() == "Remaining sections to complete: A, C"
    assert session.columns(np.ones(4)).residual.tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    for twin in (
        Session.from_json(session.to_json()),
        Session.from_token(session.token(), session.sub_queries, embedding_model=MODEL, guard=session.guard),
        session.snapshot(),
    ):
        assert twin.settings.residual_depth == 0.7
        twin.update(report(["a"], depth_by_sub_query={"a": 0.3}), OUTPUT)
        assert [item.id for item in twin.residual] == ["c"]
    left, right = session.snapshot(), session.snapshot()
    left.update(report(["c"], depth_by_sub_query={"c": 0.4}), OUTPUT)
    right.update(report(["c"], depth_by_sub_query={"c": 0.4}), OUTPUT)
    session.merge([left, right])
    assert [item.id for item in session.residual] == ["a"]
    whole = make_session(residual_depth=1.0)
    for _ in range(10):
        assert len(whole.residual) == 3
        whole.update(report(NAMES, depth_by_sub_query=dict.fromkeys(NAMES, 0.1)), OUTPUT)
    assert whole.residual == ()


# R40: outputs


def test_outputs_go_along_in_json_and_their_digest_in_the_token(monkeypatch):
    session = make_session(keep_outputs=True)
    assert Session.from_token(session.token(), session.sub_queries, embedding_model=MODEL).outputs == ()
    for output in ("first \ud800", "second"):
        session.update(report(), output)
    assert session.outputs == ("first \ud800", "second")
    assert Session.from_json(session.to_json()).outputs == session.outputs
    token = session.token()
    assert b"second" not in token
    given = {"embedding_model": MODEL, "guard": session.guard}
    twin = Session.from_token(token, session.sub_queries, outputs=session.outputs, **given)
    assert twin.to_json() == session.to_json()
    for wrong in ((), ("first", "second")):
        with pytest.raises(ValueError, match="outputs: expected those"):
            Session.from_token(token, session.sub_queries, outputs=wrong, **given)
    without = Session.from_token(token, session.sub_queries, **given)
    without.update(report(), "third")
    assert (without.outputs, Session.from_json(without.to_json()).outputs) == (("third",), ("third",))
    plain = make_session()
    plain.update(report(), "second")
    assert plain.outputs == ()
    with pytest.raises(ValueError, match="keeps none"):
        Session.from_token(plain.token(), plain.sub_queries, outputs=[], embedding_model=MODEL)
    left, right = session.snapshot(), session.snapshot()
    left.update(report(), "left")
    right.update(report(), "right")
    session.merge([left, right])
    assert session.outputs[2:] == ("left", "right")
    with pytest.raises(ValueError, match="both keep outputs"):
        make_session(keep_outputs=True).merge([make_session()])
    monkeypatch.setattr("cdr_kernel.session._task.MOST_OUTPUT_CHARACTERS", 27)
    before = session.to_json()
    with pytest.raises(ValueError, match=r"at most 27 characters in all, got 28.*keep_outputs=False"):
        session.update(report(), "twice!")
    assert session.to_json() == before
    session.reset()
    assert session.outputs == ()


# reset, snapshot, merge


def test_reset_is_the_state_before_the_first_window():
    session = make_session(safety_budget=0.8)
    fresh = session.to_json()
    play(session, [(["a"], {"a": 0.3}, 0.4, OUTPUT)])
    assert session.to_json() != fresh
    session.reset()
    assert session.to_json() == fresh  # R17
    session.safety_budget = 0.3
    session.reset()
    assert session.safety_budget == 0.3


def test_a_snapshot_is_independent():
    session = make_session()
    play(session, [(["a"], {}, 0.4, OUTPUT)])
    before = session.to_json()
    branch = session.snapshot()
    assert branch.to_json() == before
    assert branch.guard is not None
    branch.guard.copy().update("words that neither of them ever wrote")
    assert branch.to_json() == session.to_json() == before
    play(branch, [(["b"], {}, 0.6, "six words that are not there yet")])
    branch.safety_budget = 0.2
    assert session.to_json() == before
    after = branch.to_json()
    session.reset()
    assert branch.to_json() == after


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_session_can_be_copied_and_pickled(copied):
    session = make_session()
    play(session, [(["a"], {}, 0.4, OUTPUT)])
    twin = copied(session)
    assert twin.to_json() == session.to_json()
    twin.update(report(["b"]), OUTPUT)
    assert session.window_count == 1


def test_merge_appends_what_each_branch_added():
    session = make_session(safety_budget=0.9)
    first = "the first window wrote these six words"
    session.update(report(["a"], 0.3, words_by_sub_query={"a": 10}), first, envelope=make_envelope(1, ids=["x"]))
    left, right = session.snapshot(), session.snapshot()
    left.update(report(["b"], 0.6, words_by_sub_query={"a": 1, "b": 5}), OUTPUT, envelope=make_envelope(1, ids=["x"]))
    left.update(report(["a"], 0.7), OUTPUT)
    right.update(report(["b"], 0.5, words_by_sub_query={"b": 7}), "right " * 9, envelope=make_envelope(1, ids=["y"]))
    left.safety_budget, right.safety_budget = 0.8, 0.6
    session.merge([left, right])
    entries = [(entry.sub_query_id, entry.window_number) for entry in session.coverage]
    assert entries == [("a", 1), ("b", 2), ("a", 3), ("b", 2)]
    assert [item.id for item in session.residual] == ["c"]
    assert session.window_count == 4
    assert session.completeness == 0.7
    assert session.words == {"a": 11, "b": 12, "c": 0}
    assert session.packed == {"x": 2, "y": 2}
    assert session.safety_budget == pytest.approx(0.5)
    assert session.guard is not None
    assert session.guard.overlap([first, OUTPUT, "right " * 9]).tolist() == [2, 3, 1]
    for branch in (left, right):
        branch.safety_budget = 0.0
    session.merge([])
    assert session.window_count == 4


def test_spent_budgets_add_up_to_the_floor():
    session = make_session(safety_budget=0.5)
    branches = [session.snapshot() for _ in range(3)]
    for branch in branches:
        branch.safety_budget = 0.2
    session.merge(branches)
    assert session.safety_budget == 0.0


@HYPOTHESIS
@given(reports, reports)
def test_merging_one_branch_is_having_been_that_branch(before, after):
    session = make_session()
    play(session, before)
    branch = session.snapshot()
    play(branch, after)
    expected = json.loads(branch.to_json())
    expected["completeness"] = max(session.completeness, branch.completeness)
    session.merge([branch])
    assert json.loads(session.to_json()) == expected


@HYPOTHESIS
@given(reports, st.lists(reports, max_size=3))
def test_merging_unchanged_branches_adds_nothing(before, others):
    session = make_session()
    play(session, before)
    branches = [session.snapshot() for _ in others]
    for branch, windows in zip(branches, others, strict=True):
        play(branch, windows)
    twin = session.snapshot()
    idle = session.snapshot()
    session.merge(branches)
    twin.merge([idle, *branches, idle.snapshot()])
    assert twin.to_json() == session.to_json()
    assert session.window_count == len(before) + sum(map(len, others))


def stranger(windows=((["a"], {}, 0.4, OUTPUT),), **kwargs) -> Session:
    """A session that did what the base of the next test did, but for what the arguments change."""
    session = make_session(**{"safety_budget": 0.9, **kwargs})
    play(session, windows)
    return session


def moved() -> Session:
    items = [sub_query(name, 3 - i) for i, name in enumerate(NAMES)]
    session = Session(items, embedding_model=MODEL, safety_budget=0.9)
    session.update(report(["a"], words_by_sub_query={"a": 1}), OUTPUT, envelope=make_envelope(1))
    return session


@pytest.mark.parametrize(
    "other",
    [
        lambda: stranger(windows=()),
        lambda: stranger(names=["a", "b"]),
        moved,
        lambda: stranger([(["a"], {"a": 0.8}, 0.4, OUTPUT)]),
        lambda: stranger([(["a"], {}, 0.4, "something else was written here before now")]),
        lambda: stranger(safety_budget=1.0),
        lambda: stranger(guard=False),
        lambda: stranger(embedding_model="m2"),
    ],
)
def test_merge_refuses_what_does_not_descend(other):
    session = stranger()
    session.snapshot().merge([stranger()])
    before = session.to_json()
    good = session.snapshot()
    play(good, [(["b"], {}, 0.5, OUTPUT)])
    with pytest.raises(ValueError, match="branch 1"):
        session.merge([good, other()])
    assert session.to_json() == before


def test_merge_refuses_the_same_branch_twice_and_what_is_no_session():
    session = make_session()
    branch = session.snapshot()
    with pytest.raises(ValueError, match="twice"):
        session.merge([branch, branch])
    with pytest.raises(TypeError, match="Session"):
        session.merge([None])


def test_merge_refuses_a_snapshot_from_before_the_session_went_on():
    session = make_session()
    branch = session.snapshot()
    play(session, [(["a"], {}, 0.4, OUTPUT)])
    play(branch, [(["b"], {}, 0.4, OUTPUT)])
    with pytest.raises(ValueError, match="branch 0"):
        session.merge([branch])


# §4: the anchor


def test_the_anchor_names_what_remains():
    session = make_session()
    assert session.anchor() == "Remaining sections to complete: A, B, C"
    session.update(report(["b"]), OUTPUT)
    assert session.anchor() == "Remaining sections to complete: A, C"
    assert session.anchor(38) == "Remaining sections to complete: A, C"
    session.update(report(NAMES), OUTPUT)
    assert session.anchor() == session.anchor(1) == ""


@HYPOTHESIS
@given(st.lists(st.text("xy", min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 120))
def test_a_short_anchor_is_the_reference_s(labels, max_chars):
    items = [SubQuery(str(i), label, "", [1.0]) for i, label in enumerate(labels)]
    anchor = Session(items, embedding_model=MODEL).anchor(max_chars)
    remaining = [reference.SubQuery(str(i), label, "", [1.0]) for i, label in enumerate(labels)]
    assert anchor == reference.residual_task_anchor(remaining, max_chars)
    assert len(anchor) <= max_chars or anchor == f"Remaining sections to complete: (+{len(labels)} more)"


def test_a_short_anchor_of_many_labels_takes_time_in_proportion():
    def session(n):
        items = [SubQuery(f"s{i}", "x" * 40, "", np.ones(2)) for i in range(n)]
        return Session(items, embedding_model=MODEL)

    assert seconds(session(4_000).anchor, 100) < 6 * seconds(session(1_000).anchor, 100)


@pytest.mark.parametrize("value", [0, -3, True, 10.0])
def test_max_chars_is_checked(value):
    with pytest.raises((ValueError, TypeError), match="max_chars"):
        make_session().anchor(value)


# storage


def whitespace_tokens(text: str) -> list[str]:
    return text.split()


@HYPOTHESIS
@given(
    reports,
    st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), min_size=2, max_size=2).filter(any),
    st.floats(-1.0, 1.0),
    st.floats(0.0, 1.0),
    st.text(),
)
def test_json_brings_back_the_same_session(windows, vector, gate, budget, label):
    items = [
        SubQuery(name, f"{label}!", label, vector, expected_words=i or None, marginal=bool(i))
        for i, name in enumerate(NAMES)
    ]
    session = Session(items, embedding_model=MODEL, min_relevance=gate, safety_budget=budget, max_windows=7)
    play(session, windows)
    stored = session.to_json()
    twin = Session.from_json(stored)
    assert twin.to_json() == stored
    assert twin.guard is not None
    assert session.guard is not None
    assert twin.guard.hashes.tolist() == session.guard.hashes.tolist()
    assert [item.embedding.tobytes() for item in twin.sub_queries] == [item.embedding.tobytes() for item in items]
    assert [item.id for item in twin.residual] == [item.id for item in session.residual]
    twin.update(report(["a"], 0.1), OUTPUT)
    session.update(report(["a"], 0.1), OUTPUT)
    assert twin.to_json() == session.to_json()


def test_json_keeps_every_setting():
    session = make_session(
        first_window_pull=True,
        clamp_novelty=True,
        exhaustion="novelty",
        exclude_packed=True,
        completion_threshold=0.0,
        max_windows=20,
        min_relevance=-0.5,
        guard=False,
    )
    twin = Session.from_json(session.to_json())
    assert twin.to_json() == session.to_json()
    assert twin.guard is None
    assert (twin.settings.first_window_pull, twin.settings.clamp_novelty, twin.settings.exclude_packed) == (
        True,
        True,
        True,
    )
    assert (twin.settings.exhaustion, twin.settings.completion_threshold, twin.settings.min_relevance) == (
        "novelty",
        0.0,
        -0.5,
    )


def test_json_of_a_replaced_tokenizer_needs_it_again():
    session = make_session(guard=NGramGuard(2, tokenizer=whitespace_tokens))
    session.update(report(), "one-two three-four five")
    stored = session.to_json()
    with pytest.raises(ValueError, match="tokenizer"):
        Session.from_json(stored)
    twin = Session.from_json(stored, tokenizer=whitespace_tokens)
    assert twin.guard is not None
    assert twin.guard.overlap(["one-two three-four"]).tolist() == [1]


def stored_session() -> dict:
    session = make_session()
    play(session, [(["a"], {"a": 0.3}, 0.4, OUTPUT), (["b"], {}, 0.5, OUTPUT)])
    return json.loads(session.to_json())


def change(path: str, value):
    def apply(data: dict) -> None:
        *parents, last = path.split(".")
        for name in parents:
            data = data[int(name) if name.isdigit() else name]
        key = int(last) if last.isdigit() else last
        if value is KeyError:
            del data[key]
        else:
            data[key] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 2),
        ("schema", KeyError),
        ("extra", 1),
        ("dim", 3),
        ("dim", None),
        ("id", ""),
        ("id", 7),
        ("settings", None),
        ("settings.mode", "other"),
        ("settings.mode", KeyError),
        ("settings.embedding_model", None),
        ("settings.max_windows", 21),
        ("settings.max_windows", 5.5),
        ("settings.min_relevance", 1e999),
        ("settings.first_window_pull", 0),
        ("sub_queries", []),
        ("sub_queries", {}),
        ("sub_queries.0", 3),
        ("sub_queries.0.id", "b"),
        ("sub_queries.0.label", None),
        ("sub_queries.0.embedding", "%%%"),
        ("sub_queries.0.embedding", "AAAA"),
        ("sub_queries.0.embedding", "A" * 42 + "A="),
        ("sub_queries.0.embedding", None),
        ("coverage", None),
        ("coverage.0", []),
        ("coverage.0.sub_query_id", "nope"),
        ("coverage.0.depth_weight", 1.5),
        ("coverage.0.depth_weight", float("nan")),
        ("coverage.0.window_number", 0),
        ("coverage.0.window_number", 3),
        ("residual", ["b", "c"]),
        ("residual", ["c", "c"]),
        ("residual", None),
        ("window_count", -1),
        ("window_count", True),
        ("completeness", 1.5),
        ("completeness", "0.5"),
        ("words", {"a": 1}),
        ("words", None),
        ("words.a", -1),
        ("packed", []),
        ("packed.f0", 0),
        ("packed.f0", 9),
        ("safety_budget", 2),
        ("safety_budget", 10**400),
        ("guard", 1),
        ("guard.n", 0),
        ("guard.hashes", "AAAA"),
        ("guard.tokenizer", "other"),
        ("settings.residual_depth", 2),
        ("settings.keep_outputs", True),
        ("settings.keep_outputs", KeyError),
        ("outputs", []),
        ("last_envelope", {}),
        ("last_envelope", [0.1, 2]),
        ("last_envelope.0", "0.1"),
        ("last_envelope.1", -2),
        ("last_envelope.2", None),
    ],
)
def test_json_that_is_no_session_is_refused(path, value):
    data = stored_session()
    assert Session.from_json(json.dumps(data)).window_count == 2
    change(path, value)(data)
    with pytest.raises(ValueError, match=r"\w"):
        Session.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "[" * 100_000, '{"schema": 1}'])
def test_text_that_is_no_session_is_refused(text):
    with pytest.raises(ValueError, match="session"):
        Session.from_json(text)


def test_from_json_wants_a_str():
    with pytest.raises(TypeError, match="str"):
        Session.from_json(b"{}")


@pytest.mark.parametrize(
    ("settings", "keywords"),
    [
        ({}, {}),
        ({"hash_key": b"secret"}, {"hash_key": b"secret"}),
        ({"max_ngrams": 12}, {}),
        ({"exact": True}, {}),
        ({"exact": True, "max_ngrams": 12, "tokenizer": whitespace_tokens}, {"tokenizer": whitespace_tokens}),
    ],
)
def test_guards_of_every_kind_resume_with_equal_counts(settings, keywords):
    outputs = [OUTPUT, "one two three, one two four \ud83d\ude00 \ude00", OUTPUT + " five six", "six seven eight nine"]
    session = make_session(guard=NGramGuard(2, **settings))
    for output in outputs[:2]:
        session.update(report(), output)
    stored = session.to_json()
    assert "secret" not in stored
    assert b"secret" not in session.token()
    resumed = [
        Session.from_json(stored, **keywords),
        Session.from_token(session.token(), session.sub_queries, embedding_model=MODEL, guard=session.guard),
        session.snapshot(),
    ]
    branch = session.snapshot()
    branch.update(report(), outputs[2])
    branch.update(report(), outputs[3])
    merged = session.snapshot()
    merged.merge([branch])
    for output in outputs[2:]:
        for one in (session, *resumed):
            one.update(report(), output)
    expected = NGramGuard(2, **settings)
    for output in outputs:
        expected.update(output)
    for one in (*resumed, merged):
        assert one.guard.overlap(outputs).tolist() == expected.overlap(outputs).tolist()
        assert one.guard.hashes.tolist() == session.guard.hashes.tolist()
        assert one.guard.max_ngrams == expected.max_ngrams
        assert one.guard.exact == expected.exact
    assert Session.from_json(stored, **keywords).to_json() == stored


def test_a_session_of_another_key_is_refused():
    session = make_session(guard=NGramGuard(2, hash_key=b"one"))
    session.update(report(), OUTPUT)
    for wrong in (None, b"two"):
        with pytest.raises(ValueError, match="pass hash_key="):
            Session.from_json(session.to_json(), hash_key=wrong)
        with pytest.raises(ValueError, match="pass guard="):
            Session.from_token(
                session.token(),
                session.sub_queries,
                embedding_model=MODEL,
                guard=None if wrong is None else NGramGuard(2, hash_key=wrong),
            )
    trunk = make_session(guard=NGramGuard(2))
    with pytest.raises(ValueError, match="key"):
        trunk.merge([session])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("guard.key", "0" * 16),
        ("guard.exact", 1),
        ("guard.exact", True),
        ("guard.max_ngrams", 0),
        ("guard.tokens", "W10="),
        ("guard.hashes", [1]),
        ("guard.hashes", ["AAAA"]),
    ],
)
def test_json_of_a_damaged_guard_is_refused(path, value):
    data = stored_session()
    change(path, value)(data)
    with pytest.raises(ValueError, match=r"\w"):
        Session.from_json(json.dumps(data))


@pytest.mark.parametrize("tokens", ["", "!", "e30=", "WzFd", "W1sxXV0=", "/w=="])
def test_json_of_damaged_tokens_is_refused(tokens):
    session = make_session(guard=NGramGuard(2, exact=True))
    session.update(report(), OUTPUT)
    data = json.loads(session.to_json())
    data["guard"]["tokens"] = tokens
    with pytest.raises(ValueError, match=r"\w"):
        Session.from_json(json.dumps(data))
