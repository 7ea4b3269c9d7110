"""Inputs that have broken rankers like this one, at the doors that users come through: the library and the command.

Where an input is refused, the message is looked at, and that the store and the session are as they were.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch
from sessions import session_of_mode
from typer.testing import CliRunner

from cdr_kernel import (
    _C,
    Columns,
    EmbeddingModelMismatch,
    FactStore,
    NGramGuard,
    Retriever,
    Session,
    SubQuery,
    WindowReport,
    assess,
    available_impls,
    cdr_rank,
    cdr_score,
    depth_from_words,
    pack_facts,
    reference,
)
from cdr_kernel.cli._app import app
from cdr_kernel.retrieve._retriever import EXACT_KINDS, KINDS
from cdr_kernel.session._settings import settings_of

IMPLS = available_impls()
E1, E2 = [1.0, 0.0], [0.0, 1.0]
NAN, INF = float("nan"), float("inf")
RAW_ROWS = np.array([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0], [1.0, 0.2]])


def a_store(rows=RAW_ROWS, dtype="float32", **keywords):
    store = FactStore(len(rows[0]), embedding_model="m1", dtype=dtype)
    store.add([f"f{i}" for i in range(len(rows))], [f"text {i}" for i in range(len(rows))], rows, **keywords)
    return store


def a_session(vectors=(E1, E2), **settings):
    subs = [SubQuery(f"s{j}", f"S{j}", "", vector) for j, vector in enumerate(vectors)]
    return session_of_mode(subs, embedding_model="m1", **settings)


def state(store=None, session=None):
    """All that a failed call must leave alone."""
    found = []
    if store is not None:
        view = store.view()
        rows = np.flatnonzero(view.alive)
        found += [view.version, view.facts(rows), view.take(rows).tobytes(), store.ids]
    if session is not None:
        found.append(session.to_json())
    return found


@contextmanager
def refused(error, message, store=None, session=None):
    before = state(store, session)
    with pytest.raises(error, match=message):
        yield
    assert state(store, session) == before


def ranked(rows, query, *, kind="scan", session=None, k=None):
    """Ids, best first, through the whole door."""
    return cdr_rank(query, Retriever(a_store(rows), kind), session or a_session(), k=k).ids


class Command:
    """`cdr` on files in a folder."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, name, array):
        np.save(self.folder / name, np.asarray(array))
        return str(self.folder / name)

    def facts(self, n):
        path = self.folder / "facts.jsonl"
        path.write_text("".join(json.dumps({"id": f"f{i}", "text": f"text {i}"}) + "\n" for i in range(n)))
        return str(path)

    def run(self, *arguments, code=0):
        result = CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(a) for a in arguments])
        assert result.exit_code == code, result.output
        return result

    def error(self, *arguments, code=1):
        result = self.run(*arguments, code=code)
        assert "Traceback" not in result.output
        return " ".join(result.stderr.replace("│", " ").split())

    def index(self, rows, *more, name="store", code=0):
        arguments = ("index", self.facts(len(rows)), "--embeddings", self.write("rows.npy", rows), "--model", "m1")
        call = self.run if code == 0 else self.error
        return call(*arguments, "-o", self.folder / name, *more, **({} if code == 0 else {"code": code}))

    def rank(self, query, *more, name="store"):
        result = self.run("rank", self.folder / name, "--query", self.write("q.npy", query), "--json", *more)
        return [fact["id"] for fact in json.loads(result.stdout)["results"]]

    def refuses(self, query, *more, code=1):
        return self.error("rank", self.folder / "store", "--query", self.write("q.npy", query), *more, code=code)


@pytest.fixture
def command(tmp_path):
    return Command(tmp_path)


def query_doors(store, session):
    """Every call that takes a query."""
    retrievers = [Retriever(store, kind) for kind in KINDS]
    return [
        Columns.spec,
        session.columns,
        *(retriever.search for retriever in retrievers),
        *(lambda query, r=retriever: cdr_rank(query, r, session) for retriever in retrievers),
    ]


BAD_VECTORS = [
    ([NAN, 1.0], "not finite"),
    ([INF, 1.0], "not finite"),
    ([-INF, 1.0], "not finite"),
    ([0.0, -0.0], "all zeros"),
]


class TestNotANumberAndZero:
    """1 and 2: NaN, infinities and zero vectors, wherever a vector or a number comes in."""

    @pytest.mark.parametrize(("bad", "what"), BAD_VECTORS)
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
    def test_facts(self, bad, what, dtype):
        store = a_store(dtype=dtype)
        rows = [E1, bad, E2, bad]
        for method in (store.add, store.upsert):
            with refused(ValueError, f"embeddings: {what} as {dtype}: 'b', 'd'", store):
                method(list("abcd"), list("abcd"), rows)
        clean = a_store(dtype=dtype)
        clean.add(list("ac"), list("ac"), [E1, E2])
        assert store.add(list("abcd"), list("abcd"), rows, on_invalid="skip") == (2, ("b", "d"))
        session = a_session(min_relevance=-1.0)
        expected, found = (cdr_rank([1.0, 0.5], Retriever(s), session) for s in (clean, store))
        assert found.ids == expected.ids
        assert found.score.tolist() == expected.score.tolist()
        for impl in IMPLS:
            with pytest.raises(ValueError, match=f"embeddings: {what} in row 1 and 1 more"):
                cdr_score(np.array(rows, dtype), Columns.spec(E1), impl=impl)

    @pytest.mark.parametrize(("dtype", "tiny", "huge"), [("float16", 1e-9, 1e5), ("float32", 1e-60, 1e39)])
    def test_facts_that_the_stores_type_cannot_hold(self, dtype, tiny, huge):
        store = a_store(dtype=dtype)
        for value, what in ((tiny, "all zeros"), (huge, "not finite"), (10.0 * huge, "not finite")):
            with refused(ValueError, f"embeddings: {what} as {dtype}: 'a'", store):
                store.add(["a"], ["a"], [[value, 0.0]])

    @pytest.mark.parametrize(("bad", "what"), BAD_VECTORS)
    def test_questions(self, bad, what):
        store, session = a_store(), a_session()
        for door in query_doors(store, session):
            with refused(ValueError, f"query: {what}", store, session):
                door(bad)
        with pytest.raises(ValueError, match=f"coverage: {what} in row 1"):
            Columns.spec(E1, coverage=[E1, bad], depth_weights=[1, 1])
        with pytest.raises(ValueError, match=f"residual: {what} in row 1"):
            Columns.spec(E1, residual=[E1, bad])
        with pytest.raises(ValueError, match=f"the embedding of sub-query 'a': {what}"):
            SubQuery("a", "A", "", bad)

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_numbers(self, bad):
        store, session = a_store(), a_session()
        with refused(ValueError, "importance: expected finite", store):
            store.add(["a"], ["a"], [E1], importance=[bad])
        for multiplier in ({"f1": bad}, [1.0, bad, 1.0, 1.0]):
            with refused(ValueError, "multiplier: expected finite", store, session):
                cdr_rank(E1, Retriever(store), session, multiplier=multiplier)
        for setting in ("min_relevance", "completion_threshold", "safety_budget"):
            with pytest.raises(ValueError, match=f"{setting} must be a finite number"):
                a_session(**{setting: bad})
        with refused(ValueError, "safety_budget must be a finite number", session=session):
            session.safety_budget = bad
        for report, name in (
            (WindowReport(bad, ()), "completeness_score"),
            (WindowReport(0.5, ("s0",), {"s0": bad}), "the depth of 's0'"),
        ):
            with refused(ValueError, f"{name} must be a finite number", session=session):
                session.update(report, "", embedding_model="m1")
        with pytest.raises(ValueError, match="must be a finite number"):
            depth_from_words(bad, 10)
        with pytest.raises(ValueError, match="embed returned a vector that is not finite"):
            assess("One.", session.sub_queries, lambda texts: [[bad, 1.0]] * len(texts), min_similarity=0.1)

    def test_a_gate_that_is_no_number(self):
        with pytest.raises(ValueError, match="gate: expected numbers"):
            Retriever(a_store()).search(E1, min_relevance=NAN)
        for bad in (None, "0.5", True, [0.5]):
            with pytest.raises(TypeError, match="min_relevance: expected a number, got"):
                Retriever(a_store()).search(E1, min_relevance=bad)
            with pytest.raises(TypeError, match="min_relevance must be a number, got"):
                a_session(min_relevance=bad)

    def test_no_score_is_ever_not_a_number(self):
        r = np.random.default_rng(0)
        rows = r.standard_normal((50, 3)) * r.choice([1e-300, 1e-5, 1.0, 1e300], (50, 1))
        columns = Columns.spec(
            rows[0], coverage=rows[1:5], depth_weights=[0.0, 5e-324, 1.0, 0.5], residual=rows[5:9], min_relevance=-1.0
        )
        for impl, importance in product(IMPLS, (0.0, 5e-324, 1e308)):
            scores = cdr_score(rows, columns, importance=np.full(50, importance), impl=impl)
            assert len(scores) == 50
            assert not any(np.isnan(values).any() for values in vars(scores).values())

    @pytest.mark.parametrize(("bad", "what"), BAD_VECTORS)
    def test_command(self, command, bad, what):
        error = command.index([E1, bad], code=1)
        assert "row 1 (fact 'f1', line 2 of" in error
        assert what in error
        assert not (command.folder / "store").exists()
        command.index([E1, bad, E2], "--on-invalid", "skip")
        assert command.rank([1.0, 2.0], "--min-relevance", "0") == ["f2", "f0"]
        assert what in command.refuses(bad)
        for option in ("--coverage", "--residual"):
            assert what in command.refuses(E1, option, command.write("v.npy", [E1, bad]))
        assert "--min-relevance" in command.refuses(E1, "--min-relevance", "nan", code=2)


class TestRangeOfTheNorm:
    """3: overflow and underflow."""

    @pytest.mark.parametrize(("impl", "kind"), list(product(IMPLS, EXACT_KINDS)))
    @pytest.mark.parametrize(
        ("dtype", "values"),
        [
            ("float32", [3e38, 1e-38, 1e-45]),
            ("float64", [3e38, 1e-38, 1e308, 1e-308, 5e-324, 2.0**200, 2.0**201, 2.0**-200, 2.0**-201]),
            ("float16", [65504.0, 6e-5, 6e-8]),
        ],
    )
    def test_the_cosine_is_one(self, impl, kind, dtype, values, monkeypatch):
        monkeypatch.setenv("CDR_KERNEL_IMPL", impl)
        rows = np.array(values)[:, None] * [1.0, 1.0]
        retriever = Retriever(a_store(rows, dtype), kind)
        for scale in (1.0, 2.0**300, 2.0**-300, 5e-324):
            session = a_session([[scale, scale]], min_relevance=1.0, first_window_pull=True)
            ranking = cdr_rank([scale, scale], retriever, session)
            assert ranking.relevance.tolist() == ranking.residual_pull.tolist() == [1.0] * len(values)
            session.update(WindowReport(0.1, ("s0",), {"s0": 1.0}), "", embedding_model="m1")
            assert cdr_rank([scale, scale], retriever, session).novelty.tolist() == [0.2] * len(values)

    def test_command(self, command):
        command.index(np.array([[3e38, 3e38], [1e-38, 1e-38], [1, -1]], np.float32))
        assert command.rank([1.0, 1.0], "--min-relevance", "1") == ["f0", "f1"]


class TestCosineBeyondOne:
    """4."""

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_a_thousand_facts_identical_to_query_and_coverage(self, impl, dtype):
        rows = np.random.default_rng(1).standard_normal((1000, 13)).astype(dtype)
        for row in rows:
            columns = Columns.spec(row, coverage=row[None], depth_weights=[0.9], residual=row[None])
            scores = cdr_score(row[None], columns, impl=impl)
            assert 1.0 - 1e-15 < scores.relevance[0] <= 1.0
            assert 1.0 - 1e-15 < scores.residual_pull[0] <= 1.0
            assert abs(scores.coverage[0] - 1.0) < 1e-15
            assert scores.novelty[0] == 0.20
            away = Columns.spec(row, min_relevance=-1.0)  # at the gate, where cosines are exact
            assert cdr_score(-row[None], away, impl=impl).relevance[0] == -1.0


class TestTheGatesEdge:
    """5."""

    @pytest.mark.parametrize(("impl", "kind"), list(product(IMPLS, EXACT_KINDS)))
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
    def test_exactly_at_the_gate(self, impl, kind, dtype, monkeypatch):
        monkeypatch.setenv("CDR_KERNEL_IMPL", impl)
        store = a_store([[11.0, 15.0, 7.0, 2.0, 1.0]], dtype)
        query = [1.0, 0.0, 0.0, 0.0, 0.0]
        for gate, passes in ((0.55, 1), (np.nextafter(0.55, 1.0), 0), (np.nextafter(0.55, 0.0), 1)):
            session = a_session([query], min_relevance=float(gate))
            assert cdr_rank(query, Retriever(store, kind), session).qualified == passes
            assert len(Retriever(store, kind).search(query, min_relevance=gate)) == passes

    @pytest.mark.parametrize("kind", EXACT_KINDS)
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
    def test_identical_vectors_at_a_gate_of_one(self, kind, dtype):
        store = a_store(np.random.default_rng(2).standard_normal((300, 21)), dtype)
        retriever = Retriever(store, kind)
        for row, vector in enumerate(store.view().embeddings):
            assert retriever.search(vector, min_relevance=1.0).rows.tolist() == [row]
            assert retriever.search(vector.astype(np.float64) * 3.0, min_relevance=0.999999).rows.tolist() == [row]

    def test_command(self, command):
        command.index([[11.0, 15.0, 7.0, 2.0, 1.0]])
        query = [1.0, 0.0, 0.0, 0.0, 0.0]
        assert command.rank(query) == command.rank(query, "--min-relevance", "0.55") == ["f0"]
        assert command.rank(query, "--min-relevance", "0.5500000000000002") == []


class TestTies:
    """6."""

    @pytest.mark.parametrize(("impl", "kind", "threads"), list(product(IMPLS, EXACT_KINDS, (1, 2, 7))))
    def test_the_lowest_sequence_first(self, impl, kind, threads, monkeypatch):
        monkeypatch.setenv("CDR_KERNEL_IMPL", impl)
        store = a_store(np.tile([1.0, 2.0, 3.0], (1000, 1)))
        store.upsert(["f0", "f500"], ["text 0", "text 500"], [[1.0, 2.0, 3.0]] * 2)
        store.remove(["f1"])
        order = [f"f{i}" for i in range(2, 1000) if i != 500] + ["f0", "f500"]
        session, retriever = a_session([[0.0, 0.0, 1.0]]), Retriever(store, kind)
        _C.set_threads(threads)
        try:
            for k in (1, 3, 10, 999, None):
                assert cdr_rank([1.0, 2.0, 2.0], retriever, session, k=k).ids == order[:k]
                assert retriever.search([1.0, 2.0, 2.0], k=10).rows.tolist() == list(range(2, 12))
        finally:
            _C.set_threads(0)

    def test_command(self, command):
        command.index(np.tile([1.0, 2.0, 3.0], (100, 1)))
        assert command.rank([1.0, 2.0, 2.0], "--k", "3") == ["f0", "f1", "f2"]
        assert command.rank([1.0, 2.0, 2.0], "--k", "10")[:3] == ["f0", "f1", "f2"]


class TestKAgainstN:
    """7."""

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("n", [0, 1, 3])
    def test_k(self, impl, kind, n, monkeypatch):
        monkeypatch.setenv("CDR_KERNEL_IMPL", impl)
        store = FactStore(2, embedding_model="m1")
        ids = [f"f{i}" for i in range(n)]
        store.add(ids, ids, RAW_ROWS[:n])
        retriever, session = Retriever(store, kind), a_session()
        columns = Columns.spec(E1)
        for k in (0, 1, n, n + 1, 10, 10**20, np.int64(2), None):
            expected = n if k is None else min(k, n)
            assert len(cdr_rank(E1, retriever, session, k=k)) == expected
            assert len(retriever.search(E1, k=k)) == expected
            assert len(cdr_score(RAW_ROWS[:n].tolist(), columns, k=k)) == expected
            assert len(cdr_score(RAW_ROWS[:n], columns, k=k)) == expected
        for bad, error in (
            (-1, ValueError),
            (-(10**20), ValueError),
            (1.0, TypeError),
            (True, TypeError),
            ("1", TypeError),
        ):
            for call in (
                lambda k: cdr_rank(E1, retriever, session, k=k),
                lambda k: retriever.search(E1, k=k),
                lambda k: cdr_score(RAW_ROWS, columns, k=k),
            ):
                with refused(error, "k: expected", store, session):
                    call(bad)

    def test_command(self, command):
        command.index(RAW_ROWS[:3])
        assert len(command.rank(E1, "--k", "10")) == 3
        assert command.rank(E1, "--k", "0") == []
        assert "--k" in command.refuses(E1, "--k", "-1", code=2)
        assert "at least one fact" in command.error(
            "index", command.facts(0), "--embeddings", command.write("none.npy", np.zeros((0, 2))), "--model", "m1",
            "-o", command.folder / "empty",
        )  # fmt: skip


class TestFalsyParameters:
    """8: a 0 is a 0, an empty string is no default."""

    def test_gate(self):
        rows = [[0.1, 1.0], [-0.1, 1.0], [0.0, 1.0]]
        session = a_session(min_relevance=0.0)
        assert session.settings.min_relevance == 0.0
        assert set(ranked(rows, E1, session=session)) == {"f0", "f2"}
        assert len(Retriever(a_store(rows)).search(E1, min_relevance=0.0)) == 2
        assert Session.from_json(session.to_json()).settings == session.settings
        twin = Session.from_token(session.token(), session.sub_queries, embedding_model="m1")
        assert twin.settings == session.settings

    def test_importance_and_multiplier(self):
        store = a_store(importance=[0.0, 1.0, 0.0, 1.0])
        assert [fact.importance for fact in store.get(store.ids)] == [0.0, 1.0, 0.0, 1.0]
        ranking = cdr_rank(E1, Retriever(store), a_session(), multiplier={"f1": 0.0})
        assert ranking.ids == ["f3", "f0", "f1", "f2"]
        assert ranking.score[1:].tolist() == [0.0, 0.0, 0.0]
        assert ranking.multiplier.tolist() == [1.0, 1.0, 0.0, 1.0]

    def test_depth(self):
        session = a_session()
        session.update(WindowReport(0.0, ("s0",), {"s0": 0.0}), "", embedding_model="m1")
        assert session.coverage[0].depth_weight == 0.0
        assert session.completeness == 0.0
        ranking = cdr_rank(E1, Retriever(a_store()), session)
        assert ranking.novelty.tolist() == [1.0] * len(ranking)
        assert depth_from_words(0, 100) == 0.0

    def test_settings(self):
        session = a_session(completion_threshold=0.0, safety_budget=0.0)
        assert (session.settings.completion_threshold, session.safety_budget) == (0.0, 0.0)
        assert session.exit().escalate
        assert SubQuery("a", "A", "", E1, expected_words=0).expected_words == 0
        report = assess("nothing", [SubQuery("a", "A", "else", E1)], min_depth=0.0, expected_words=0)
        assert report.completeness_score == 1.0
        assert assess("A", [SubQuery("a", "A", "", E1)], written={"a": 0}).words_by_sub_query == {"a": 1}

    def test_nothing_fits_into_nothing(self):
        ranking = cdr_rank(E1, Retriever(a_store()), a_session())
        assert len(pack_facts(ranking, 0).facts) == 0
        assert len(pack_facts(ranking, 100, max_facts=0).facts) == 0

    @pytest.mark.parametrize("empty", ["", 0, False])
    def test_an_empty_name_is_not_the_default(self, empty):
        with pytest.raises(ValueError, match="impl: expected"):
            cdr_score(RAW_ROWS, Columns.spec(E1), impl=empty)
        with pytest.raises(ValueError, match="kind: expected"):
            Retriever(a_store(), empty)
        with pytest.raises(ValueError, match="exhaustion must be one of"):
            a_session(exhaustion=empty)
        with pytest.raises(ValueError, match="mode must be one of"):
            settings_of(empty)
        with pytest.raises((ValueError, TypeError), match="embedding_model"):
            FactStore(2, embedding_model=empty)

    def test_a_tokenizer_that_is_falsy(self):
        class Letters(list):
            name = "letters"

            def __call__(self, text):
                return list(text)

        guard = NGramGuard(2, tokenizer=Letters())
        guard.update("abc")
        assert guard.overlap(["xbc", "x bc"]).tolist() == [1, 1]

    def test_empty_texts_and_sources(self):
        store = FactStore(2, embedding_model="m1")
        store.add(["0"], [""], [E1], source=[""], position=[0])
        (fact,) = store.get(["0"])
        assert (fact.id, fact.text, fact.source, fact.position, fact.sequence) == ("0", "", "", 0, 0)
        ranking = cdr_rank(E1, Retriever(store), a_session(), multiplier={"0": 0.5})
        assert ranking.ids == ["0"]
        assert ranking.score.tolist() == [0.5]

    def test_command(self, command):
        command.index([[0.1, 1.0], [-0.1, 1.0], [0.0, 1.0]])
        assert command.rank(E1, "--min-relevance", "0") == ["f0", "f2"]
        coverage = command.write("c.npy", [E1])
        options = ("--min-relevance", "0", "--coverage", coverage, "--json")
        query = command.write("q.npy", E1)
        found = {
            depth: json.loads(
                command.run("rank", command.folder / "store", "--query", query, *options, "--depths", depth).stdout
            )
            for depth in ("0", "1")
        }
        assert [fact["novelty"] for fact in found["0"]["results"]] == [1.0, 1.0]
        assert found["1"]["results"][0]["novelty"] < 1.0


class TestDimensions:
    """9: vectors of another dimension, on any side."""

    def test_library(self):
        store, session = a_store(), a_session()
        three = [1.0, 0.0, 0.0]
        for door in query_doors(store, session)[1:]:
            with refused(ValueError, "query: expected dimension 2", store, session):
                door(three)
        for name in ("coverage", "residual"):
            with pytest.raises(ValueError, match=f"{name}: expected dimension 2, got 3"):
                Columns.spec(E1, **{name: [three]}, depth_weights=[1.0] if name == "coverage" else None)
        with refused(ValueError, "embeddings: expected dimension 2, got 3", store):
            store.add(["a"], ["a"], [three])
        with pytest.raises(ValueError, match="all sub-queries must have one dimension: 's0' has 2, 's1' has 3"):
            a_session([E1, three])
        for impl in IMPLS:
            with pytest.raises(ValueError, match="columns: expected dimension 2"):
                cdr_score(RAW_ROWS, Columns.spec(three), impl=impl)
            with pytest.raises(ValueError, match="columns: expected dimension 2"):
                cdr_score(RAW_ROWS, [Columns.spec(E1), Columns.spec(three)], impl=impl)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_session_and_a_store_that_differ(self, kind):
        store, session = a_store(), a_session([[1.0, 0.0, 0.0]])
        for query, expected in ((E1, "expected dimension 3, got 2"), ([1.0, 0.0, 0.0], "expected dimension 2")):
            with refused(ValueError, f"query: {expected}", store, session):
                cdr_rank(query, Retriever(store, kind), session)
        with pytest.raises(ValueError, match="embed must return shape"):
            assess("One.", session.sub_queries, lambda texts: [E1] * len(texts), min_similarity=0.1)
        with pytest.raises(ValueError, match="the store has dimension 2, the sub-queries have 3"):
            assess("One.", session.sub_queries, lambda texts: [[1.0, 0.0, 0.0]] * len(texts), store=store)

    def test_entries_and_depths_that_differ_in_number(self):
        for depths in (None, [], [1.0], [1.0] * 3):
            with pytest.raises(ValueError, match="depth_weights: expected 2"):
                Columns.spec(E1, coverage=[E1, E2], depth_weights=depths)

    def test_command(self, command):
        command.index(RAW_ROWS)
        three = command.write("three.npy", [[1.0, 0.0, 0.0]])
        assert "expected dimension 2, got 3" in command.refuses([1.0, 0.0, 0.0])
        for option in ("--coverage", "--residual"):
            assert "expected dimension 2, got 3" in command.refuses(E1, option, three)
        coverage = command.write("two.npy", [E1, E2, E1])
        assert "expected 3 numbers" in command.refuses(E1, "--coverage", coverage, "--depths", "1,1", code=2)
        assert "expected 3 rows" in command.error(
            "index", command.facts(3), "--embeddings", command.write("two.npy", [E1, E2]), "--model", "m1", "-o",
            command.folder / "other",
        )  # fmt: skip
        assert not (command.folder / "other").exists()


class TestModelChanged:
    """10: another model of the same dimension."""

    def test_library(self):
        store, session = a_store(), a_session()
        report = WindowReport(0.5, ("s0",))
        cases = [
            ({"embedding_model": "m2"}, report, "'m1', got 'm2'; the session is of 'm1': update it"),
            ({}, report, "no embedding model was named; the session is of 'm1'"),
            ({}, WindowReport(0.5, ("s0",), embedding_model="m2"), "'m1', got 'm2'"),
            ({"embedding_model": "m1"}, WindowReport(0.5, ("s0",), embedding_model="m2"), "'m1', got 'm2'"),
            ({"embedding_model": ""}, report, "'m1', got ''"),
        ]
        for keywords, told, message in cases:
            with refused(EmbeddingModelMismatch, message, store, session):
                session.update(told, "text of a window that is long enough", **keywords)
        other = Session(session.sub_queries, embedding_model="m2")
        with refused(EmbeddingModelMismatch, "'m2', got 'm1'", store, other):
            cdr_rank(E1, Retriever(store), other)
        with pytest.raises(EmbeddingModelMismatch, match="'m1', got 'm2'; the token is of a session of 'm1'"):
            Session.from_token(session.token(), session.sub_queries, embedding_model="m2")
        with refused(ValueError, "another embedding model", session=session):
            session.merge([other])
        with pytest.raises(EmbeddingModelMismatch, match="'m1', got 'm2'; the store is of 'm1'"):
            assess("One.", session.sub_queries, lambda t: [E1] * len(t), store=store, embedding_model="m2")

    def test_a_loaded_store_keeps_its_model(self, tmp_path):
        a_store().save(tmp_path)
        with pytest.raises(EmbeddingModelMismatch, match="'m2', got 'm1'"):
            cdr_rank(E1, Retriever(FactStore.load(tmp_path)), Session(a_session().sub_queries, embedding_model="m2"))

    def test_command(self, command):
        command.index(RAW_ROWS)
        assert "--model: expected embedding model 'm1', got 'm2'" in command.refuses(E1, "--model", "m2")


class TestBudget:
    """12: packing goes on past what does not fit. (11, concurrency, is in test_threads.py.)"""

    @staticmethod
    def ranking():
        rows = [[1.0, 0.1 * i] for i in range(3)]
        store = FactStore(2, embedding_model="m1")
        store.add(["a", "b", "c"], ["5", "50", "5"], rows)
        return cdr_rank(E1, Retriever(store), a_session())

    def test_first_and_third(self):
        envelope = pack_facts(self.ranking(), 10, count_tokens=int)
        assert [fact.id for fact in envelope.facts] == ["a", "c"]
        assert (envelope.tokens, envelope.skipped) == (10, 1)

    @pytest.mark.parametrize("budget", range(0, 70, 3))
    def test_never_above_the_budget(self, budget):
        envelope = pack_facts(self.ranking(), budget, count_tokens=int)
        assert envelope.tokens == sum(int(fact.text) for fact in envelope.facts) <= budget

    @pytest.mark.parametrize("count", [0, -1, 1.5, NAN, None, True, "5"])
    def test_a_count_that_is_none(self, count):
        with pytest.raises(ValueError, match=r"count_tokens must return an int >= 1, got .* for fact 'a'"):
            pack_facts(self.ranking(), 10, count_tokens=lambda text: count)

    @pytest.mark.parametrize(
        ("budget", "error"), [(-1, ValueError), (10.0, TypeError), (None, TypeError), (True, TypeError)]
    )
    def test_a_budget_that_is_none(self, budget, error):
        for keywords in ({"token_budget": budget}, {"token_budget": 10, "max_facts": budget}):
            if keywords == {"token_budget": 10, "max_facts": None}:
                continue
            with pytest.raises(error, match=r"(token_budget|max_facts) must be"):
                pack_facts(self.ranking(), **keywords)


class TestFiltersStarveK:
    """13."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_removed_facts(self, kind):
        store = a_store(np.tile([1.0, 2.0], (10, 1)))
        retriever, session = Retriever(store, kind), a_session()
        assert len(cdr_rank([1.0, 2.0], retriever, session, k=5)) == 5
        store.remove([f"f{i}" for i in range(10) if i != 7])
        ranking = cdr_rank([1.0, 2.0], retriever, session, k=5)
        assert ranking.ids == ["f7"]
        assert retriever.search([1.0, 2.0], k=5).rows.tolist() == [7]
        store.remove(["f7"])
        assert cdr_rank([1.0, 2.0], retriever, session, k=5).ids == []

    @pytest.mark.parametrize("kind", KINDS)
    def test_packed_facts(self, kind):
        retriever = Retriever(a_store(np.tile([1.0, 2.0], (10, 1))), kind)
        session = a_session(exclude_packed=True)
        envelope = pack_facts(cdr_rank([1.0, 2.0], retriever, session, k=9), 1000)
        session.update(WindowReport(0.1, ()), "", envelope=envelope, embedding_model="m1")
        assert cdr_rank([1.0, 2.0], retriever, session, k=5).ids == ["f9"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_facts_that_the_query_is_far_from(self, kind):
        rows = np.random.default_rng(3).standard_normal((200, 8))
        rows[:, 0] = -np.abs(rows[:, 0])
        rows[150] = np.eye(8)[0] + 0.01
        session = a_session([np.eye(8)[1]])
        assert ranked(rows, np.eye(8)[0], session=session, kind=kind, k=5) == ["f150"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_many_removed_facts_that_are_nearer(self, kind):
        r = np.random.default_rng(4)
        query = np.ones(8)
        rows = np.vstack([query + 0.05 * r.standard_normal((1000, 8)), query + 0.5 * r.standard_normal((20, 8))])
        store, session = a_store(rows), a_session([query])
        store.remove([f"f{i}" for i in range(1000)])
        expected = cdr_rank(query, Retriever(store), session).ids
        found = cdr_rank(query, Retriever(store, kind), session, k=5).ids
        assert len(expected) > 10
        assert len(found) == 5
        assert set(found) <= set(expected)

    def test_command(self, command):
        command.index([E2, E2, [1.0, 0.1], E2])
        for kind in KINDS:
            assert command.rank(E1, "--kind", kind, "--k", "5") == ["f2"]


def strided(a):
    wide = np.full([2 * n for n in a.shape], 7.0, a.dtype)
    every_second = wide[tuple(slice(None, None, 2) for _ in a.shape)]
    every_second[...] = a
    return every_second


def unaligned(a):
    raw = bytearray(1) + bytearray(a.tobytes())
    return np.frombuffer(raw, a.dtype, offset=1).reshape(a.shape)


def frozen(a):
    a = a.copy()
    a.flags.writeable = False
    return a


ARRAYS = {
    "list": lambda a: a.tolist(),
    "tuple": lambda a: tuple(tuple(r) if isinstance(r, list) else r for r in a.tolist()),
    "list of arrays": list,
    "float16": lambda a: a.astype(np.float16),
    "float32": lambda a: a.astype(np.float32),
    "float64": lambda a: a,
    "big-endian": lambda a: a.astype(">f8"),
    "big-endian float16": lambda a: a.astype(">f2"),
    "Fortran order": np.asfortranarray,
    "strided": strided,
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "read-only": frozen,
    "unaligned": unaligned,
    "torch": torch.from_numpy,
    "torch float16": lambda a: torch.from_numpy(a).half(),
    "torch bfloat16": lambda a: torch.from_numpy(a).bfloat16(),
    "torch with gradient": lambda a: torch.from_numpy(a).clone().requires_grad_(),
    "torch strided": lambda a: torch.from_numpy(strided(a)),
}


class TestArrayTypes:
    """14."""

    NUMBERS = np.array([[3.0, 1.0, 2.0], [1.0, 2.0, 1.0], [2.0, 2.0, 3.0], [1.0, 0.0, 0.5]])  # exact as float16

    def answers(self, convert):
        a = self.NUMBERS
        query, subs = convert(a[0] + 0.5), [convert(a[1]), convert(a[2])]
        store = FactStore(3, embedding_model="m1")
        store.add(list("abcd"), list("abcd"), convert(a), importance=convert(np.array([1.0, 2.0, 0.5, 1.0])))
        session = a_session(subs, min_relevance=0.1)
        session.update(WindowReport(0.5, ("s0",)), "", embedding_model="m1")
        multiplier = convert(np.array([1.0, 1.0, 0.5, 1.0]))
        ranking = cdr_rank(query, Retriever(store), session, multiplier=multiplier)
        columns = Columns.spec(
            query, coverage=convert(a[1:3]), depth_weights=convert(np.array([0.5, 0.25])), residual=convert(a[2:])
        )
        scores = [cdr_score(convert(a), columns, multiplier=multiplier, impl=impl).score.tolist() for impl in IMPLS]
        return ranking.ids, ranking.score.tolist(), scores

    @pytest.mark.parametrize("kind", ARRAYS)
    def test_every_kind_ranks_alike(self, kind):
        assert self.answers(ARRAYS[kind]) == self.answers(np.array)

    @pytest.mark.parametrize(
        ("bad", "error", "message"),
        [
            ([["a", "b"]], TypeError, "got one with str at place 0"),
            (np.ones((1, 2), complex), TypeError, "got complex128"),
            (np.ones((1, 2), bool), TypeError, "got bool"),
            (np.ones((1, 2), object), TypeError, "got an array of object"),
            ([[None, 1.0]], TypeError, "got one with NoneType at place 0"),
            (None, TypeError, "got NoneType"),
            (np.ones((1, 2, 2)), ValueError, "got shape .1, 2, 2."),
            ([1.0, 2.0], ValueError, "got shape .2."),
            (3.0, ValueError, "got shape .."),
            ([[1.0], [1.0, 2.0]], ValueError, "got . numbers"),
            (torch.ones(1, 2).to_sparse(), ValueError, "expected a regular 2-dimensional array"),
            (torch.ones(1, 2, dtype=torch.complex64), TypeError, "got complex64"),
            (np.ma.array([[1.0, 2.0]], mask=[[False, True]]), ValueError, "expected no masked values"),
            (np.ones((1, 0)), ValueError, "expected"),
        ],
    )
    def test_what_is_no_array_of_numbers(self, bad, error, message):
        store, session = a_store(), a_session()
        with refused(error, f"embeddings: .*{message}", store):
            store.add(["a"], ["a"], bad)
        for impl in IMPLS:
            with pytest.raises(error, match=f"embeddings: .*{message}"):
                cdr_score(bad, Columns.spec(E1), impl=impl)
        for door in query_doors(store, session):
            with refused((TypeError, ValueError), "query: expected", store, session):
                door("no" if isinstance(bad, list) and bad == [1.0, 2.0] else bad)

    def test_norms_and_objects_of_another_kind(self):
        store, session = a_store(), a_session()
        for norms, error in (([1.0], ValueError), ([[1.0]] * 4, ValueError), (["1"] * 4, TypeError)):
            with pytest.raises(error, match="squared_norms: expected"):
                cdr_score(RAW_ROWS, Columns.spec(E1), squared_norms=norms)
        with refused(TypeError, "retriever: expected a Retriever, got FactStore", store, session):
            cdr_rank(E1, store, session)
        with pytest.raises(TypeError, match="session: expected a Session, got NoneType"):
            cdr_rank(E1, Retriever(store), None)
        for columns in (None, 3, [E1]):
            with pytest.raises(TypeError, match="columns: expected Columns or a sequence of them"):
                cdr_score(RAW_ROWS, columns)

    def test_arrays_of_callers_are_neither_changed_nor_kept(self):
        rows, query, entries = RAW_ROWS.copy(), np.array([1.0, 0.1]), np.array([[0.3, 1.0]])
        store, session = a_store(rows, "float64"), a_session([query, entries[0]])
        columns = Columns.spec(query, coverage=entries, depth_weights=[1.0])
        first = cdr_rank(query, Retriever(store), session).score.tolist()
        scores = cdr_score(RAW_ROWS, columns).score.tolist()
        assert rows.tolist() == RAW_ROWS.tolist()
        asked = query.copy()
        rows[:], query[:], entries[:] = NAN, NAN, NAN
        assert cdr_rank(asked, Retriever(store), session).score.tolist() == first
        assert cdr_score(RAW_ROWS, columns).score.tolist() == scores

    def test_command(self, command):
        for dtype in (np.float16, np.float32, np.float64, ">f4"):
            command.index(RAW_ROWS.astype(dtype), name=f"store-{np.dtype(dtype).str[1:]}")
            assert command.rank(np.array(E1, dtype), name=f"store-{np.dtype(dtype).str[1:]}") == [
                "f0",
                "f3",
                "f2",
                "f1",
            ]
        assert "expected float16, float32 or float64, got int64" in command.index(RAW_ROWS.astype(int), code=1)
        assert "expected shape [N, D], got [4]" in command.error(
            "index", command.facts(4), "--embeddings", command.write("flat.npy", RAW_ROWS[:, 0]), "--model", "m1", "-o",
            command.folder / "other",
        )  # fmt: skip


class TestSumsOfWeights:
    """15."""

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("entries", [1, 2, 5])
    def test_a_sum_of_zero_covers_nothing(self, impl, entries):
        columns = Columns.spec(E1, coverage=[E1] * entries, depth_weights=[0.0] * entries)
        scores = cdr_score(RAW_ROWS, columns, impl=impl)
        assert scores.coverage.tolist() == [0.0] * 4
        assert scores.novelty.tolist() == [1.0] * 4

    @pytest.mark.parametrize("depth", [5e-324, 1e-300, 1.0])
    def test_equal_depths_weigh_alike_however_small(self, depth):
        columns = Columns.spec(E1, coverage=[E1, E2], depth_weights=[depth, depth])
        coverage = cdr_score(RAW_ROWS, columns).coverage
        expected = [
            reference.coverage_score(reference.Fact(row), [reference.Entry(E1, depth), reference.Entry(E2, depth)])
            for row in RAW_ROWS.tolist()
        ]
        np.testing.assert_allclose(coverage, expected, rtol=0, atol=1e-15)

    @pytest.mark.parametrize("bad", [-0.1, -5e-324, 1.0000000000000002, NAN, INF, -INF])
    def test_a_depth_outside(self, bad):
        session = a_session()
        with refused(ValueError, "the depth of 's1' must be", session=session):
            session.update(WindowReport(0.5, ("s0", "s1"), {"s0": 0.5, "s1": bad}), "words", embedding_model="m1")
        with pytest.raises(ValueError, match=r"depth_weights: expected 0 to 1, got .* at entry 1"):
            Columns.spec(E1, coverage=[E1, E2], depth_weights=[0.5, bad])

    @pytest.mark.parametrize("bad", ["0.5", None, True, [0.5]])
    def test_a_depth_that_is_no_number(self, bad):
        session = a_session()
        with refused(TypeError, "the depth of 's0' must be a number", session=session):
            session.update(WindowReport(0.5, ("s0",), {"s0": bad}), "words", embedding_model="m1")

    def test_command(self, command):
        command.index(RAW_ROWS)
        coverage = command.write("c.npy", [E1, E2])
        for depths in ("-0.1,1", "nan", "1.1", "", "0.5,", "x"):
            error = command.refuses(E1, "--coverage", coverage, "--depths", depths, code=2)
            assert "expected 2 numbers in 0..1" in error
        result = command.run(
            "rank", command.folder / "store", "--query", command.write("q.npy", E1), "--coverage", coverage, "--depths",
            "0,0", "--json",
        )  # fmt: skip
        assert {fact["novelty"] for fact in json.loads(result.stdout)["results"]} == {1.0}
