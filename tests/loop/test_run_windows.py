"""The loop: what a window consists of, when the writer is called, and what ends it."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from sessions import session_of_mode

from cdr_kernel import reference
from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.loop import Window, WindowPrompt, assemble, run_windows
from cdr_kernel.retrieve import Retriever
from cdr_kernel.session import Session, SessionEnded, SubQuery, WindowReport
from cdr_kernel.shard import ShardedRetriever, ShardedStore
from cdr_kernel.store import FactStore

MODEL = "m1"
TOPICS = ("dns", "cni", "bgp")
QUERY = np.array([1.0, 1.0, 1.0, 3.0])


def make_session(**kwargs) -> Session:
    items = [SubQuery(topic, topic.upper(), f"about {topic}", np.eye(4)[i]) for i, topic in enumerate(TOPICS)]
    gate = {} if kwargs.get("mode") == "calibrated" else {"min_relevance": 0.5}
    return session_of_mode(items, **{"embedding_model": MODEL, **gate, **kwargs})


def make_retriever(importance=None, model=MODEL, per_topic=4) -> Retriever:
    store = FactStore(4, embedding_model=model)
    ids, texts, rows = [], [], []
    for i, topic in enumerate(TOPICS):
        for j in range(per_topic):
            ids.append(f"{topic}{j}")
            texts.append(f"{topic} fact number {j}")
            rows.append(np.eye(4)[i] + QUERY * (1.0 - 0.01 * j))
    store.add(ids, texts, np.array(rows), importance=importance)
    return Retriever(store)


def reports(*steps: tuple[tuple[str, ...], float]) -> Callable[[str], WindowReport]:
    """An assessment that reports these steps one after the other, the last one again and again."""
    left = list(steps)

    def assess(output: str) -> WindowReport:
        addressed, completeness = left.pop(0) if len(left) > 1 else left[0]
        return WindowReport(completeness, addressed)

    return assess


NOTHING = reports(((), 0.1))


class Writer:
    def __init__(self) -> None:
        self.prompts: list[WindowPrompt] = []

    def __call__(self, prompt: WindowPrompt) -> str:
        self.prompts.append(prompt)
        return f"window {prompt.window} " + "x" * prompt.window


def run(writer, session, assess=NOTHING, *, retriever=None, **kwargs) -> list[Window]:
    options = {"token_budget": 1000, "max_facts": 3, **kwargs}
    return list(run_windows(writer, QUERY, retriever or make_retriever(), session, assess=assess, **options))


def test_five_windows_are_exactly_five():
    writer, session = Writer(), make_session()
    windows = run(writer, session)
    assert [window.number for window in windows] == [1, 2, 3, 4, 5]
    assert [prompt.window for prompt in writer.prompts] == [1, 2, 3, 4, 5]
    assert [window.exit.reason for window in windows] == [None] * 4 + ["limit-reached"]
    assert session.window_count == 5
    statuses = [window.headers["CRP-Context-Continuation-Status"] for window in windows]
    assert statuses == ["in-progress"] * 4 + ["limit-reached"]
    assert windows[-1].headers["CRP-Quality-Completeness"] == "0.10"


def test_a_task_ends_when_it_is_complete():
    writer, session = Writer(), make_session()
    assess = reports((("dns",), 0.4), (("cni", "bgp"), 0.95))
    first, second = run(writer, session, assess)
    assert second.exit.reason == "task-complete"
    assert [first.prompt.anchor, second.prompt.anchor] == [
        "Remaining sections to complete: DNS, CNI, BGP",
        "Remaining sections to complete: CNI, BGP",
    ]
    assert first.headers["CRP-Context-Coverage-Depth"] == "0"  # R14
    assert second.headers["CRP-Context-Coverage-Depth"] == "1"
    assert session.anchor() == ""


def test_a_window_holds_everything_that_made_it():
    writer, session = Writer(), make_session(max_windows=1)
    (window,) = run(writer, session)
    assert window.output == "window 1 x"
    assert window.report == WindowReport(0.1)
    assert len(window.ranking) == window.ranking.qualified == 12
    assert len(window.envelope.facts) == 3
    assert window.prompt.envelope is window.envelope
    assert window.band == "healthy"
    assert window.guarantee_holds
    assert session.packed == {fact.id: 1 for fact in window.envelope.facts}


def test_what_was_covered_gives_way_to_what_remains():
    session = make_session(max_windows=3)
    assess = reports((("dns",), 0.2), (("cni",), 0.4), (("bgp",), 0.6))
    windows = run(Writer(), session, assess, max_facts=4)
    assert {fact.id[:3] for fact in windows[1].envelope.facts} <= {"cni", "bgp"}
    assert {fact.id[:3] for fact in windows[2].envelope.facts} == {"bgp"}


@pytest.mark.parametrize(
    ("kwargs", "reason", "escalate"),
    [
        ({"safety_budget": 0.05}, "safety-budget-depleted", True),
        ({"min_relevance": 0.999}, "ckf-exhausted", False),
    ],
)
def test_no_unsafe_or_unsupported_window_is_written(kwargs, reason, escalate):
    writer, session = Writer(), make_session(**kwargs)
    before = json.loads(session.to_json())
    (window,) = run(writer, session, lambda output: pytest.fail("assess was called"))
    assert writer.prompts == []
    assert (window.number, window.output, window.report) == (1, None, None)  # R32
    assert (window.exit.reason, window.exit.escalate) == (reason, escalate)
    after = json.loads(session.to_json())
    last = after.pop("last_envelope")  # R37: what ended the session is remembered, and nothing else
    assert (before.pop("last_envelope"), before) == (None, after)
    assert last[1:] == [11, window.exit.detail]
    with pytest.raises(SessionEnded, match=reason):
        run(writer, session)
    assert window.headers["CRP-Context-Continuation-Status"] == reason


def test_nothing_that_fits_is_not_nothing_that_qualifies():
    """R39: the one is the caller's, and no reason to ingest more documents."""
    for options, says in (
        ({"token_budget": 1}, "token_budget: no fact fits into 1 token, 12 facts .* the shortest has 5"),
        ({"max_facts": 0}, "max_facts: no fact fits"),
        ({"max_facts": None, "k": 0}, "k: no fact fits"),
    ):
        session, writer = make_session(), Writer()
        before = session.to_json()
        with pytest.raises(ValueError, match=says):
            run(writer, session, **options)
        assert session.to_json() == before
        assert writer.prompts == []
    (nothing_qualifies,) = run(Writer(), make_session(min_relevance=0.999))
    assert nothing_qualifies.exit.detail == "no fact passed the relevance gate"
    assert (nothing_qualifies.band, nothing_qualifies.guarantee_holds) == (None, False)
    assert nothing_qualifies.headers["CRP-Context-Coverage-Score"] == "0.00"
    assert nothing_qualifies.headers["CRP-Context-Mode"] == "ckf-exhausted"


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_a_filter_that_leaves_nothing_is_named(mode):
    retriever = make_retriever()
    retriever.store.add(["en0"], ["an English fact"], QUERY[None], attributes={"lang": ["en"]})
    for where, detail in (
        ({"lang": ["de", "fr"]}, "no fact matches the filter (lang in ['de', 'fr'])"),
        ({"lang": iter(["de"]), "source": None}, "no fact matches the filter (lang = 'de' and source = None)"),
        (np.zeros(13, bool), "no fact matches the filter (a mask)"),
    ):
        (window,) = run(Writer(), make_session(mode=mode), retriever=retriever, where=where)
        assert (window.output, window.exit.reason, window.exit.detail) == (None, "ckf-exhausted", detail)
        assert window.ranking.considered == 0
        assert window.headers["CRP-Onboarding-Hint"]
    gate = {"min_relevance": 0.999} if mode == "spec" else {"gate": 99.0}
    (window,) = run(Writer(), make_session(mode=mode, **gate), retriever=retriever, where={"lang": None})
    assert window.exit.detail == "no fact that matches the filter (lang = None) passed the relevance gate"
    assert window.ranking.considered == 12
    empty = Retriever(FactStore(4, embedding_model=MODEL))
    (window,) = run(Writer(), make_session(mode=mode), retriever=empty)
    assert window.exit.detail == "the store has no facts"


def test_packed_facts_can_be_excluded():
    session = make_session(exclude_packed=True, max_windows=20)
    windows = run(Writer(), session, max_facts=5)
    packed = [fact.id for window in windows for fact in window.envelope.facts]
    assert len(packed) == len(set(packed)) == 12
    assert windows[-1].output is None
    assert windows[-1].exit.detail == "no fact that was not packed before passed the relevance gate"
    assert session.window_count == 3


def test_a_session_at_its_limit_writes_nothing_more():
    session = make_session(max_windows=2)
    run(Writer(), session)
    writer = Writer()
    with pytest.raises(SessionEnded, match=r"limit-reached.*session\.extend\(max_windows=\.\.\.\)"):
        run(writer, session)
    assert writer.prompts == []
    assert session.window_count == 2
    session.extend(max_windows=3)
    (window,) = run(writer, session)
    assert (window.number, window.exit.reason) == (3, "limit-reached")


def test_a_resumed_session_that_was_complete_writes_nothing():
    session = make_session()
    run(Writer(), session, reports((TOPICS, 1.0)))
    again = Session.from_json(session.to_json())
    assert again.exit().reason == "task-complete"
    writer = Writer()
    with pytest.raises(SessionEnded, match="task-complete"):
        run(writer, again)
    assert (writer.prompts, again.to_json()) == ([], session.to_json())


def test_new_facts_open_a_store_that_was_exhausted():
    session, retriever = make_session(exclude_packed=True, max_windows=20), make_retriever()
    ended = run(Writer(), session, retriever=retriever)[-1]
    assert (ended.number, ended.output, ended.exit.reason) == (5, None, "ckf-exhausted")
    retriever.store.remove(["dns0"])
    retriever.store.compact()
    writer = Writer()
    with pytest.raises(SessionEnded, match="new facts"):
        run(writer, session, retriever=retriever)
    assert writer.prompts == []
    retriever.store.add(["new"], ["a new fact"], np.array([np.eye(4)[0] + QUERY]))
    first, second = run(writer, Session.from_json(session.to_json()), retriever=retriever)
    assert [fact.id for fact in first.envelope.facts] == ["new"]
    assert (first.output, second.output, second.exit.reason) == ("window 5 xxxxx", None, "ckf-exhausted")
    shards = ShardedRetriever(ShardedStore.split(retriever.store, shards=2))
    with contextlib.closing(shards.store):
        assert run(Writer(), session, retriever=shards)[0].envelope.facts[0].id == "new"


def test_the_output_is_assembled_where_the_task_is_complete_or_the_limit_reached():
    complete = run(Writer(), make_session(), reports((("dns",), 0.4), (("cni", "bgp"), 0.95)))
    assert [window.document for window in complete] == [None, "window 1 x\n\nwindow 2 xx"]
    at_limit = run(Writer(), make_session(max_windows=3))
    assert at_limit[-1].document == assemble(window.output for window in at_limit)
    assert run(Writer(), make_session(exclude_packed=True))[-1].document is None  # exit 3 emits none
    assert assemble(["a\n\n", "", " \n", "\r\n  b"]) == reference.assemble(["a", "  b"]) == "a\n\n  b"


@pytest.mark.parametrize("keeps", [False, True])
def test_a_session_that_goes_on_knows_the_outputs_that_it_keeps(keeps):
    session, seen = make_session(max_windows=3, keep_outputs=keeps), []

    def summary(outputs: list[str]) -> str:
        seen.append(len(outputs))
        return ""

    for _ in run_windows(Writer(), QUERY, make_retriever(), session, token_budget=100, assess=NOTHING):
        break
    again = Session.from_json(session.to_json())
    last = run(Writer(), again, backward_summary=summary)[-1]
    assert seen == ([1, 2] if keeps else [1])
    assert last.document == ("window 1 x\n\nwindow 2 xx\n\nwindow 3 xxx" if keeps else None)


def test_a_budget_that_runs_out_in_a_window_ends_the_loop_after_it():
    session = make_session()

    def spend(prompt: WindowPrompt) -> str:
        session.safety_budget -= 0.45
        return "text"

    windows = run(spend, session)
    assert [window.output for window in windows] == ["text", "text"]
    assert windows[-1].exit.reason == "safety-budget-depleted"
    assert windows[-1].exit.escalate


def test_a_copied_fact_is_penalised_in_the_next_window():
    session = make_session(max_windows=2)
    retriever = make_retriever()
    text = "dns fact zero has many words in it, more than six"
    retriever.store.upsert(["dns0"], [text], np.array([np.eye(4)[0] + QUERY]))
    windows = run(lambda prompt: prompt.envelope.text, session, retriever=retriever)
    assert text in windows[0].output
    assert windows[0].headers["CRP-Context-NGram-Guard-Activations"] == "0"
    assert windows[1].headers["CRP-Context-NGram-Guard-Activations"] == "1"


def test_the_backward_summary_is_asked_for_when_there_is_something_to_sum_up():
    writer, seen = Writer(), []

    def summary(outputs: list[str]) -> str:
        seen.append(list(outputs))
        outputs.clear()
        return f"{len(seen)} so far"

    run(writer, make_session(max_windows=3), backward_summary=summary)
    assert [prompt.backward_summary for prompt in writer.prompts] == [None, "1 so far", "2 so far"]
    assert seen == [["window 1 x"], ["window 1 x", "window 2 xx"]]
    writer = Writer()
    run(writer, make_session(max_windows=2))
    assert [prompt.backward_summary for prompt in writer.prompts] == [None, None]


def test_stopping_early_leaves_a_session_that_goes_on():
    session, writer = make_session(), Writer()
    for window in run_windows(writer, QUERY, make_retriever(), session, token_budget=100, assess=NOTHING):
        if window.number == 2:
            break
    assert session.window_count == 2
    assert [window.number for window in run(writer, session)] == [3, 4, 5]
    assert [prompt.window for prompt in writer.prompts] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("where", ["generate", "assess", "unknown id", "no text", "count_tokens", "other model"])
def test_an_error_leaves_the_session_as_it_was(where):
    def generate(prompt: WindowPrompt) -> str:
        if prompt.window == 2 and where == "generate":
            raise RuntimeError(where)
        return None if prompt.window == 2 and where == "no text" else "text"

    def assess(output: str) -> WindowReport:
        if session.window_count == 1 and where == "assess":
            raise RuntimeError(where)
        if session.window_count == 1 and where == "unknown id":
            return WindowReport(0.5, ("nope",))
        if session.window_count == 1 and where == "other model":
            return WindowReport(0.5, ("dns",), embedding_model="m2")
        return WindowReport(0.5, ("cni",))

    def count_tokens(text: str) -> int:
        return 0 if session.window_count == 1 and where == "count_tokens" else 1

    session = make_session()
    windows = run_windows(
        generate, QUERY, make_retriever(), session, token_budget=9, assess=assess, count_tokens=count_tokens
    )
    next(windows)
    before = session.to_json()
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        next(windows)
    assert session.to_json() == before
    where = "nowhere"
    assert [window.number for window in run(Writer(), session)] == [2, 3, 4, 5]


def test_the_models_of_store_and_session_must_agree():
    session = make_session()
    before = session.to_json()
    with pytest.raises(EmbeddingModelMismatch):
        run(Writer(), session, retriever=make_retriever(model="m2"))
    assert session.to_json() == before


def test_what_is_no_retriever_or_session_is_refused():
    retriever = make_retriever()
    with pytest.raises(TypeError, match="retriever: expected a Retriever, got FactStore"):
        run(Writer(), make_session(), retriever=retriever.store)
    with pytest.raises(TypeError, match="session: expected a Session, got Retriever"):
        run(Writer(), retriever, retriever=retriever)


def test_k_and_multiplier_reach_the_ranking():
    (window,) = run(Writer(), make_session(max_windows=1), k=2, multiplier={"bgp3": 9.0})
    assert len(window.ranking) == 2
    assert window.ranking.qualified == 12
    assert window.envelope.facts[0].id == "bgp3"


def test_importance_that_alone_ends_window_1_is_told():
    retriever = make_retriever(importance=[0.1] * 12)
    with pytest.warns(UserWarning, match="importance"):
        (window,) = run(Writer(), make_session(), retriever=retriever)
    assert (window.output, window.exit.reason) == (None, "ckf-exhausted")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(run(Writer(), make_session(exhaustion="novelty"), retriever=retriever)) == 5
