"""explain: its numbers are the ranking's, and every change it names does what it says when it is made."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from sessions import session_of_mode
from typer.testing import CliRunner

from cdr_kernel import FactStore, NGramGuard, Retriever, Session, SubQuery, WindowReport, cdr_rank, explain, pack_facts
from cdr_kernel.cli._app import app
from cdr_kernel.rank._explain import STATUSES, explain_vectors

DIM = 12
NUMBERS = "score score_without_guard relevance coverage residual_pull novelty ngram_overlap ngram_penalty importance"


class World:
    """A store, a session some windows old, and the means to make both again with one thing changed."""

    def __init__(self, seed, windows=2, n=60, **settings):
        self.r = r = np.random.default_rng(seed)
        self.query = r.standard_normal(DIM)
        words = [f"w{i}" for i in range(30)]
        self.facts = {f"f{i}": " ".join(r.choice(words, int(r.integers(8, 30)))) for i in range(n)}
        self.vectors = self.query * 0.6 + r.standard_normal((n, DIM))
        self.importance = dict(zip(self.facts, r.choice([0.0, 0.5, 1.0, 2.0], n, p=[0.1, 0.2, 0.5, 0.2]), strict=True))
        self.settings = {"mode": "spec", **settings}
        if self.settings["mode"] == "spec":
            self.settings.setdefault("min_relevance", 0.3)
        else:
            self.settings.setdefault("gate", 0.8)
        self.subs = [
            SubQuery(f"s{j}", f"S{j}", f"w{j} w{j + 1}", self.query * 0.5 + r.standard_normal(DIM)) for j in range(5)
        ]
        self.told = []
        store, session = self.store(), self.session()
        for window in range(windows):
            envelope = pack_facts(cdr_rank(self.query, Retriever(store), session), 10**6, max_facts=5)
            output = " ".join(f.text for f in envelope.facts[:3])
            addressed = (f"s{window}",)
            self.told.append((WindowReport(0.1, addressed, {addressed[0]: 0.3 + 0.2 * window}), output, envelope))
            session.update(*self.told[-1][:2], envelope=envelope, embedding_model="m1")

    def store(self, **changed):
        importance, facts = (
            {**self.importance, **changed.get("importance", {})},
            {**self.facts, **changed.get("texts", {})},
        )
        store = FactStore(DIM, embedding_model="m1")
        store.add(list(facts), list(facts.values()), self.vectors, importance=[importance[i] for i in facts])
        return store

    def session(self, without=(), unpacked=(), guard=None, **settings):
        """As told, without the sub-queries covered or the facts packed that are named."""
        session = session_of_mode(self.subs, embedding_model="m1", guard=guard, **{**self.settings, **settings})
        for report, output, envelope in self.told:
            left = tuple(id for id in report.addressed if id not in without)
            depths = {id: report.depth_by_sub_query[id] for id in left}
            keep = [i for i, fact in enumerate(envelope.facts) if fact.id not in unpacked]
            kept = replace(envelope, ranking=envelope.ranking.take(keep))
            session.update(
                replace(report, addressed=left, depth_by_sub_query=depths), output, envelope=kept, embedding_model="m1"
            )
        return session

    def packed(self, store=None, session=None, multiplier=None, budget=10**6, max_facts=None, count_tokens=None):
        ranking = cdr_rank(
            self.query, Retriever(store or self.store()), session or self.session(), multiplier=multiplier
        )
        more = {} if count_tokens is None else {"count_tokens": count_tokens}
        return pack_facts(ranking, budget, max_facts=max_facts, **more).ranking.ids


def check(world, why, room, multiplier=None):
    """Make every change and rank again; what has a bound must fail just beyond it. The names that came up."""
    id = why.fact.id
    gate = {}
    if why.min_relevance is not None:
        name = "min_relevance" if why.mode == "spec" else "gate"
        gate = {name: why.min_relevance}
        above = world.session(**{name: math.nextafter(why.min_relevance, 9.0)})
        assert id in cdr_rank(world.query, Retriever(world.store()), world.session(**gate)).ids or id in above.packed
        assert id not in cdr_rank(world.query, Retriever(world.store()), above).ids

    def packed(store=None, session=None, factor=multiplier, **other):
        return id in world.packed(store, session or world.session(**gate), factor, **{**room, **other})

    assert packed() == (why.place is not None)
    for change in why.changes:
        needed, short = change.needed, None
        if isinstance(needed, float):
            short = math.nextafter(needed, 0.0)
        elif isinstance(needed, int) and change.bound:
            short = needed + (1 if change.bound == "at most" else -1)
        if change.name == "importance":
            assert packed(world.store(importance={id: needed}))
            assert not packed(world.store(importance={id: short}))
        elif change.name == "multiplier":
            assert packed(factor={**(multiplier or {}), id: needed})
            assert not packed(factor={**(multiplier or {}), id: short})
        elif change.name == "max_facts":
            assert packed(max_facts=needed)
            assert not packed(max_facts=short)
        elif change.name == "token_budget":
            assert packed(budget=needed)
        elif change.name == "tokens":
            text = why.fact.text

            def counted(tokens, text=text):
                return lambda other: tokens if other == text else room["count_tokens"](other)

            assert packed(count_tokens=counted(needed))
            assert not packed(count_tokens=counted(short))
        elif change.name == "ngram_overlap":
            length = len(why.fact.text.split())
            if 5 + short > length:
                continue
            made = [world.store(texts={id: with_overlap(world, count, length)}) for count in (needed, short)]
            assert packed(made[0])
            assert not packed(made[1])
        elif change.name == "guard":
            assert packed(session=world.session(guard=False, **gate))
        elif change.name == "packed":
            assert packed(session=world.session(unpacked=(id,), **gate))
        elif change.name == "covered":
            assert packed(session=world.session(without=(change.needed.lower(),), **gate))
        else:
            assert change.name in ("novelty", "relevance")
            factors = {"relevance": max(why.relevance, why.residual_pull), "novelty": why.novelty}
            assert factors[change.name] == change.now
            ratio = needed / change.now
            assert packed(factor={**(multiplier or {}), id: why.multiplier * ratio * (1 + 1e-9)})
            assert not packed(factor={**(multiplier or {}), id: why.multiplier * ratio * (1 - 1e-9)})
    return {change.name for change in why.changes}


def with_overlap(world, count, length):
    """A text of so many tokens with so many blacklisted 6-grams."""
    written = world.told[0][1].split()
    guard = NGramGuard()
    for _, output, _ in world.told:
        guard.update(output)
    start = written[: 5 + count] if count else []
    text = " ".join([*start, *(f"fresh{i}" for i in range(length))][:length])
    assert guard.overlap([text])[0] == count
    return text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("settings", "room"),
    [
        ({}, {"max_facts": 5}),
        ({}, {"budget": 60, "count_tokens": lambda text: len(text.split())}),
        ({"exclude_packed": True}, {"max_facts": 5, "budget": 70, "count_tokens": lambda text: len(text.split())}),
        ({"min_relevance": 0.6}, {"max_facts": 3}),
        ({"mode": "calibrated"}, {"max_facts": 5}),
        ({"mode": "calibrated", "packed_penalty": 0.6}, {"max_facts": 6}),
        ({"mode": "calibrated", "gate": 1.5, "min_qualified": 9}, {"max_facts": 5}),
        ({"mode": "calibrated", "gate": 1.5, "guard": True, "centred_coverage": True}, {"max_facts": 4}),
        ({"mode": "calibrated"}, {"budget": 60, "count_tokens": lambda text: len(text.split())}),
    ],
)
def test_every_change_does_what_it_says(seed, settings, room):
    guarded = settings.pop("guard", None) if "guard" in settings else None
    world = World(seed, **settings)
    if guarded:
        first = world.session

        def session(guard=None, **other):
            return first(guard=NGramGuard() if guard is None else guard, **other)

        world.session = session
    multiplier = {"f3": 0.5, "f4": 1.5} if seed % 2 else None
    asked = {"max_facts": room.get("max_facts"), "token_budget": room.get("budget")}
    if "count_tokens" in room:
        asked["count_tokens"] = room["count_tokens"]
    retriever, current = Retriever(world.store()), world.session()
    before = current.to_json()
    ranking = cdr_rank(world.query, retriever, current, multiplier=multiplier)
    statuses, names = set(), set()
    for id in list(world.facts)[::3]:
        why = explain(world.query, retriever, current, id, multiplier=multiplier, **asked)
        statuses.add(why.status)
        names |= check(world, why, room, multiplier)
        if id in ranking.ids:
            at = ranking.ids.index(id)
            assert why.rank == at + 1
            for name in NUMBERS.split():
                assert getattr(why, name) == getattr(ranking, name)[at], name
            assert why.multiplier == ranking.multiplier[at]
    assert current.to_json() == before
    assert statuses <= set(STATUSES)
    assert names


def test_all_kinds_of_changes_come_up():
    """The checks above would pass over a change that is never proposed."""
    names = set()
    for seed in range(3):
        for settings in ({}, {"exclude_packed": True}):
            world = World(seed, **settings)
            retriever, current = Retriever(world.store()), world.session()
            for id in world.facts:
                for room in ({"max_facts": 5}, {"token_budget": 90}):
                    names |= {change.name for change in explain(world.query, retriever, current, id, **room).changes}
    assert names == {
        "importance", "multiplier", "ngram_overlap", "novelty", "relevance", "max_facts", "token_budget", "tokens",
        "guard", "packed", "covered",
    }  # fmt: skip


def test_pulls_and_pushes_add_up():
    world = World(7)
    retriever, session = Retriever(world.store()), world.session()
    ranking = cdr_rank(world.query, retriever, session)
    for at in (0, 5, len(ranking) - 1):
        why = explain(world.query, retriever, session, ranking.ids[at])
        assert why.status == "packed"
        assert why.changes == ()
        assert math.isclose(math.fsum(push.share for push in why.pushes), why.coverage, abs_tol=1e-12)
        assert {push.sub_query_id for push in why.pushes} == {"s0", "s1"}
        pulling = [pull for pull in why.pulls if pull.weight]
        assert {pull.sub_query_id for pull in pulling} == {"s2", "s3", "s4"}
        assert pulling[0].value == why.residual_pull
        assert [pull.pulled for pull in why.pulls] == [why.residual_pull > why.relevance] + [False] * 4
        product = why.importance * max(why.relevance, why.residual_pull) * why.novelty * (1 - why.ngram_penalty)
        assert math.isclose(product, why.score, rel_tol=1e-12)


def test_in_the_first_window_nothing_pulls_or_pushes():
    world = World(1, windows=0)
    why = explain(world.query, Retriever(world.store()), world.session(), "f0", max_facts=1)
    assert why.pushes == ()
    assert not any(pull.weight or pull.pulled for pull in why.pulls)
    assert "nothing pulls" in str(why)


def test_the_ngrams_are_shown_as_passages():
    store = FactStore(2, embedding_model="m1")
    text = "One two three four five six seven, but eight nine ten eleven twelve thirteen fourteen."
    store.add(["a", "b"], [text, "x"], [[1.0, 0.0], [1.0, 0.1]])
    session = Session([SubQuery("s", "S", "s", [1.0, 0.0])], embedding_model="m1")
    for exact in (False, True):
        session = Session(session.sub_queries, embedding_model="m1", guard=NGramGuard(exact=exact))
        session.update(
            WindowReport(0.1),
            "one TWO three four five six seven. Eight nine ten eleven twelve thirteen",
            embedding_model="m1",
        )
        why = explain([1.0, 0.0], Retriever(store), session, "a", max_facts=1)
        assert why.ngram_overlap == 3
        assert why.ngrams == ("one two three four five six seven", "eight nine ten eleven twelve thirteen")
        assert "eight nine ten" in str(why)


def test_plain_vectors_agree_with_a_session():
    world = World(3)
    retriever, session = Retriever(world.store()), world.session(guard=False)
    entries, depths = [e.embedding for e in session.coverage], [e.depth_weight for e in session.coverage]
    residual = [s.embedding for s in session.residual]
    for id in ("f0", "f9"):
        one = explain(world.query, retriever, session, id, max_facts=4)
        two = explain_vectors(
            world.query,
            retriever,
            id,
            coverage=entries,
            depth_weights=depths,
            residual=residual,
            min_relevance=0.3,
            max_facts=4,
        )
        assert (one.score, one.rank, one.status, one.place) == (two.score, two.rank, two.status, two.place)
        assert [(c.name, c.bound, c.now) for c in one.changes] == [(c.name, c.bound, c.now) for c in two.changes]
        assert [p.share for p in one.pushes] == [p.share for p in two.pushes]


def test_errors_come_before_anything_else():
    world = World(0)
    retriever, session = Retriever(world.store()), world.session()
    with pytest.raises(KeyError, match="'nobody' is not in the store"):
        explain(world.query, retriever, session, "nobody")
    with pytest.raises(TypeError, match="fact_id"):
        explain(world.query, retriever, session, 3)
    with pytest.raises(TypeError, match="retriever: expected a Retriever, got FactStore"):
        explain(world.query, world.store(), session, "f1")
    with pytest.raises(TypeError, match="retriever: expected a Retriever, got FactStore"):
        explain_vectors(world.query, world.store(), "f1")
    with pytest.raises(TypeError, match="session: expected a Session, got Retriever"):
        explain(world.query, retriever, retriever, "f1")
    with pytest.raises(ValueError, match="query"):
        explain(np.ones(DIM + 1), retriever, session, "f1")
    with pytest.raises(ValueError, match="max_facts"):
        explain(world.query, retriever, session, "f1", max_facts=-1)
    with pytest.raises(ValueError, match="depth_weights"):
        explain_vectors(world.query, retriever, "f1", coverage=np.ones((2, DIM)), depth_weights=[0.5])


def test_a_fact_that_an_approximate_index_missed_is_called_that():
    world = World(2, windows=0)
    retriever = Retriever(world.store())
    retriever.candidates_each = lambda columns, view: [np.array([0], np.int64) for _ in columns]
    ids = cdr_rank(world.query, Retriever(world.store()), world.session()).ids
    why = explain(world.query, retriever, world.session(), ids[-1], max_facts=1)
    assert (why.status, why.rank, why.changes) == ("not found", None, ())


def test_what_is_shown_is_escaped_and_on_one_line():
    store = FactStore(2, embedding_model="m1")
    hostile = "<script>alert(1)</script>\x1b[31m [bold]x[/bold]\n\u202e" + "y" * 1000
    store.add(["<b>", "c"], [hostile, "plain"], [[1.0, 0.0], [1.0, 0.2]])
    session = Session([SubQuery("s", "<i>S</i>", "s", [1.0, 0.0])], embedding_model="m1")
    why = explain([1.0, 0.0], Retriever(store), session, "<b>", max_facts=1)
    ranking = cdr_rank([1.0, 0.0], Retriever(store), session)
    for value in (why, ranking):
        page = value._repr_html_()
        assert "<script>" not in page
        assert "<b><" not in page
        assert "&lt;script&gt;" in page
        assert "\x1b" not in page + str(value)
        from rich.console import Console

        console = Console(width=60, record=True, file=io.StringIO())
        console.print(value)
        assert "\x1b[31m" not in console.export_text()
    assert "[bold]x[/bold]" in str(ranking)


def test_rank_explain_on_the_command_line(tmp_path):
    world = World(5)
    world.store().save(tmp_path / "store")
    np.save(tmp_path / "q.npy", world.query)
    np.save(tmp_path / "c.npy", np.stack([s.embedding for s in world.subs[:2]]))
    np.save(tmp_path / "r.npy", np.stack([s.embedding for s in world.subs[2:]]))
    files = [str(tmp_path / name) for name in ("store", "q.npy", "c.npy", "r.npy")]
    line = [
        "rank",
        files[0],
        "--query",
        files[1],
        "--coverage",
        files[2],
        "--residual",
        files[3],
        "--min-relevance",
        "0.3",
    ]
    everything = json.loads(CliRunner().invoke(app, [*line, "--json", "--k", "60"]).stdout)
    outside = everything["results"][8]
    done = CliRunner().invoke(app, [*line, "--k", "5", "--explain", outside["id"], "--json"])
    why = json.loads(done.stdout.splitlines()[-1])["explanation"]
    assert why["rank"] == 9
    assert why["score"] == outside["score"]
    assert {"importance", "max_facts"} <= {change["name"] for change in why["changes"]}
    shown = CliRunner().invoke(app, [*line, "--k", "5", "--explain", outside["id"]])
    assert shown.exit_code == 0
    assert "max facts at least 9 (now 5)" in shown.stdout
    missing = CliRunner().invoke(app, [*line, "--explain", "nobody"])
    assert missing.exit_code == 1
    assert "'nobody' is not in the store" in missing.output
