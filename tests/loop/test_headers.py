"""Every header of §6 and §8, the bands of §8.1 and the guarantee of §9."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import session_of_mode

from cdr_kernel import reference
from cdr_kernel.loop import band, crp_headers, guarantee_holds
from cdr_kernel.loop._headers import ONBOARDING_HINT
from cdr_kernel.rank import Envelope, Ranking, pack_facts
from cdr_kernel.session import Exit, Session, SubQuery, WindowReport
from cdr_kernel.spec.constants import EXIT_REASONS
from cdr_kernel.store._fact_store import Fact

HYPOTHESIS = settings(deadline=None, max_examples=100, derandomize=True)


def make_envelope(novelty, *, qualified=None, guard_activations=0, coverage_depth=0) -> Envelope:
    n = len(novelty)
    column = np.array(novelty, dtype=np.float64)
    ranking = Ranking(
        facts=tuple(Fact(f"f{i}", "text", None, None, 1.0, i) for i in range(n)),
        score=0.8 * column,
        score_without_guard=0.8 * column,
        relevance=np.full(n, 0.8),
        coverage=1.0 - column,
        residual_pull=np.zeros(n),
        novelty=column,
        ngram_overlap=np.zeros(n, dtype=np.int32),
        importance=np.ones(n),
        multiplier=np.ones(n),
        qualified=n if qualified is None else qualified,
        guard_activations=guard_activations,
        coverage_depth=coverage_depth,
        store_version=1,
    )
    return pack_facts(ranking, 100)


def make_session(completeness=0.0, **kwargs) -> Session:
    session = session_of_mode([SubQuery("a", "A", "about a", [1.0, 0.0])], embedding_model="m1", **kwargs)
    if completeness:
        session.update(WindowReport(completeness, embedding_model="m1"), "output")
    return session


def ended(reason: str | None, also=()) -> Exit:
    return Exit(reason is not None, reason, tuple(also), False, "", None)


def test_a_window_in_progress():
    envelope = make_envelope([0.9, 0.74, 1.3], guard_activations=3, coverage_depth=18)
    assert crp_headers(envelope, make_session()) == {
        "CRP-Context-Coverage-Score": "0.74",
        "CRP-Context-Coverage-Depth": "18",
        "CRP-Context-NGram-Guard-Activations": "3",
        "CRP-Context-Continuation-Status": "in-progress",
    }
    assert crp_headers(envelope, make_session(), ended(None)) == crp_headers(envelope, make_session())


def test_the_limit_tells_what_was_achieved():
    headers = crp_headers(make_envelope([1.0]), make_session(0.74), ended("limit-reached"))
    assert headers["CRP-Context-Continuation-Status"] == "limit-reached"
    assert headers["CRP-Quality-Completeness"] == "0.74"
    assert "CRP-Context-Mode" not in headers


def test_an_exhausted_store_says_what_to_do():
    headers = crp_headers(make_envelope([], coverage_depth=4), make_session(0.74), ended("ckf-exhausted"))
    assert headers == {
        "CRP-Context-Coverage-Score": "0.00",
        "CRP-Context-Coverage-Depth": "4",
        "CRP-Context-NGram-Guard-Activations": "0",
        "CRP-Context-Continuation-Status": "ckf-exhausted",
        "CRP-Context-Mode": "ckf-exhausted",
        "CRP-Onboarding-Hint": "ingest-more-documents-for-continued-quality",
    }


@pytest.mark.parametrize(
    ("reason", "also", "emitted"),
    [
        ("task-complete", ("ckf-exhausted",), True),
        ("task-complete", ("limit-reached", "ckf-exhausted"), True),
        ("limit-reached", ("ckf-exhausted", "safety-budget-depleted"), True),
        ("ckf-exhausted", ("safety-budget-depleted",), True),
        ("limit-reached", ("safety-budget-depleted",), False),
        ("safety-budget-depleted", (), False),
        (None, (), False),
    ],
)
def test_exhaustion_is_told_whatever_else_is_true(reason, also, emitted):
    for novelty, score in (([], "0.00"), ([0.2], "0.20")):
        headers = crp_headers(make_envelope(novelty), make_session(0.5), ended(reason, also))
        assert headers["CRP-Context-Continuation-Status"] == (reason or "in-progress")
        assert headers["CRP-Context-Coverage-Score"] == score  # R39
        assert headers.get("CRP-Context-Mode") == ("ckf-exhausted" if emitted else None)
        assert headers.get("CRP-Onboarding-Hint") == (ONBOARDING_HINT if emitted else None)


@pytest.mark.parametrize("reason", EXIT_REASONS)
def test_the_status_is_the_reason(reason):
    headers = crp_headers(make_envelope([0.5]), make_session(0.5), ended(reason))
    assert headers["CRP-Context-Continuation-Status"] == reason


@pytest.mark.parametrize(
    ("novelty", "shown"),
    [([2.0, 1.7], "1.00"), ([0.2, 2.0], "0.20"), ([0.746, 1.0], "0.75"), ([1.0], "1.00"), ([0.5], "0.50")],
)
def test_the_coverage_score_is_the_clamped_least_novelty(novelty, shown):
    assert crp_headers(make_envelope(novelty), make_session())["CRP-Context-Coverage-Score"] == shown  # R3, R30


def test_the_depth_is_that_of_packing_time():
    envelope = make_envelope([1.0], coverage_depth=2)
    session = make_session()
    session.update(WindowReport(0.5, ("a",), embedding_model="m1"), "output")
    assert crp_headers(envelope, session)["CRP-Context-Coverage-Depth"] == "2"  # R14


@pytest.mark.parametrize(
    ("score", "name"),
    [
        (1.0, "healthy"),
        (0.7000001, "healthy"),
        (0.70, "moderate"),
        (0.40, "moderate"),
        (0.3999999, "low"),
        (0.20, "low"),
    ],
)
def test_bands(score, name):
    assert band(score) == name == reference.band(score)


@pytest.mark.parametrize(
    ("novelty", "qualified", "holds"),
    [([0.41], 1, True), ([0.40], 1, False), ([1.0, 0.3], 2, False), ([], 5, False), ([], 0, False), ([1.9], 9, True)],
)
def test_the_guarantee(novelty, qualified, holds):
    assert guarantee_holds(make_envelope(novelty, qualified=qualified)) is holds  # R35


@HYPOTHESIS
@given(
    st.lists(st.floats(0.2, 2.0), max_size=5),
    st.floats(0.01, 1.0),
    st.sampled_from([None, *EXIT_REASONS]),
    st.lists(st.sampled_from(EXIT_REASONS), max_size=3),
    st.integers(0, 30),
)
def test_headers_are_those_of_the_reference(novelty, completeness, reason, also, depth):
    scored = [
        reference.Scored(reference.Fact([1.0]), 0.8, 1.0 - value, 0.0, value, 0, 0.0, 0.8 * value, 0.8 * value)
        for value in novelty
    ]
    outcome = ended(reason, also if reason else ())
    expected = reference.headers(
        scored,
        scored,
        coverage_depth=depth,
        completeness=completeness,
        exit=reference.Exit(**vars(outcome)),
    )
    envelope = make_envelope(novelty, coverage_depth=depth)
    assert crp_headers(envelope, make_session(completeness), outcome) == expected
    assert guarantee_holds(envelope) == reference.guarantee_holds(scored)
