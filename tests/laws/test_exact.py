"""Everything that ranks against the reference, on worlds that hypothesis makes up.

The rule is that of the exact arithmetic: the same facts; the same order wherever the reference's scores differ by more
than 1e-12 x importance x multiplier; equal rows in the order of their sequence numbers; every number within its bound;
and equal bits whatever the implementation, the retriever, the SIMD level and the number of threads. An approximate
index may miss facts: what it finds has the same numbers in the same order.

Hypothesis draws what matters (sizes, types, kinds of vectors, the gate, k, filters, how many entries are covered) and a
seed; numpy fills the arrays from it. CDR_LAW_EXAMPLES says how many worlds the slow tests look at.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sessions import session_of_mode

from cdr_kernel import (
    _C,
    Columns,
    FactStore,
    NGramGuard,
    Retriever,
    SubQuery,
    WindowReport,
    available_impls,
    cdr_rank,
    cdr_score,
    constants,
    reference,
)
from cdr_kernel.retrieve._retriever import EXACT_KINDS, KINDS
from cdr_kernel.session import CoverageEntry

TOLERANCE = 1e-12
EXAMPLES = int(os.environ.get("CDR_LAW_EXAMPLES", "20000"))
APPROXIMATE_KINDS = tuple(kind for kind in KINDS if kind not in EXACT_KINDS)
NUMBERS = ("score", "score_without_guard", "relevance", "coverage", "residual_pull", "novelty")
ALIKE = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example]
)

# The reference's own functions, remembered: they are pure, and windows ask for the same cosines again and again.
_cosine = lru_cache(1 << 16)(reference.cosine)
_tokenize = lru_cache(1 << 12)(reference.tokenize)


@pytest.fixture(autouse=True, scope="module")
def _quick():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products: several threads would only wait for each other
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "cosine", lambda a, b: _cosine(tuple(a), tuple(b)))
        patch.setattr(reference, "tokenize", _tokenize)
        yield
    torch.set_num_threads(threads)


@contextmanager
def running(impl=None, simd=None, threads=0):
    level, asked = _C.simd(), os.environ.get("CDR_KERNEL_IMPL")
    _C.set_simd(simd or level)
    _C.set_threads(threads)
    if impl:
        os.environ["CDR_KERNEL_IMPL"] = impl
    try:
        yield
    finally:
        _C.set_simd(level)
        _C.set_threads(0)
        os.environ.pop("CDR_KERNEL_IMPL", None)
        if asked is not None:
            os.environ["CDR_KERNEL_IMPL"] = asked


def bits(answer):
    """A Scores or a Ranking down to its last bit."""
    values = (getattr(answer, field.name) for field in fields(answer))
    return tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in values)


def compare(ids, answer, truth, k=None, entries=0):
    """AssertionError unless the answer, ids best first, is what the reference's ranking (all of it) allows.

    entries: of the coverage, which rounds once for each.
    """
    dim = len(truth[0].fact.embedding) if truth else 0
    tolerance = max(TOLERANCE, (dim + entries + 20) * 2.0**-53)
    by_id = {s.fact.id: s for s in truth}
    assert set(ids) <= set(by_id), "facts that do not pass the gate"
    assert len(ids) == len(set(ids)) == (len(truth) if k is None else min(k, len(truth)))
    chosen = [by_id[i] for i in ids]
    strength = np.array([s.fact.importance_weight * s.fact.multiplier for s in chosen])
    for name in NUMBERS:
        expected = np.array([getattr(s, name) for s in chosen])
        bound = tolerance * (strength if name.startswith("score") else 1.0)
        off = np.abs(getattr(answer, name) - expected) > bound
        assert not off.any(), f"{name} of {np.asarray(ids, object)[off][:5]}"
    assert not (answer.novelty < constants.MIN_NOVELTY_FLOOR).any()
    assert not (np.abs([answer.relevance, answer.residual_pull]) > 1.0).any()

    left_out = [s for s in truth if s.fact.id not in set(ids)]
    score = np.array([s.score for s in [*chosen, *left_out]])
    strength = np.array([s.fact.importance_weight * s.fact.multiplier for s in [*chosen, *left_out]])
    margin = tolerance * np.maximum(strength[:, None], strength[None, : len(chosen)])
    better = score[:, None] > score[None, : len(chosen)] + margin  # [i, j]: i must stand before j
    assert not np.tril(better, -1).any(), "a better fact stands behind a worse one, or was left out"

    sequence = np.array([s.fact.sequence for s in chosen])
    equal = np.diff(answer.score) == 0.0
    assert not (np.diff(answer.score) > 0.0).any()
    assert not (np.diff(sequence)[equal] < 0).any(), "equal scores out of order"
    alike = defaultdict(list)
    for position, s in enumerate([*chosen, *left_out]):
        key = (tuple(s.fact.embedding), s.fact.importance_weight, s.fact.multiplier, s.ngram_overlap)
        alike[key].append((s.fact.sequence, position < len(chosen)))
    for group in alike.values():
        inside = [number for number, included in group if included]
        assert inside == sorted(number for number, _ in group)[: len(inside)], "equal rows out of order"


# What the worlds are made of

DTYPES = ("float16", "float32", "float64")
EXPONENTS = {"float16": (0, -9, 6), "float32": (0, -120, 100), "float64": (0, -900, 700)}
VECTORS = ("normal", "integers", "few", "permuted", "opposite")
WEIGHTS = np.array([0.0, 1e-6, 0.25, 1.0, 1.0, 3.0, 1e6])
DEPTHS = np.array([0.0, 0.15, 0.4, 0.5, 0.9, 1.0])
WORDS = ("pod", "Café", "東京", "node-7", "ΣΑΣ", "x")
MANY = (100, 1000, 3000, 10_000)
MANY_DEPTHS = ("chosen", "equal", "sizes", "tiny")
SOURCES = ("a", "b", None)
WHERES = ({"source": "a"}, {"source": ["b", None]}, {"t": [0, 2]}, {"t": [None, 1], "source": ["a", "b"]})
"""Filters by a fact's source and its attribute t, 0 to 2 or none."""


def some_vectors(r, kind, n, query):
    """[n, D] float64, none of them zero."""
    dim = len(query)
    if kind == "integers":
        rows = r.integers(-2, 3, (n, dim)).astype(np.float64)
    elif kind == "few":
        rows = some_vectors(r, "integers", 3, query)[r.integers(0, 3, n)]
    elif kind == "permuted":
        rows = r.permuted(np.tile(r.integers(-3, 4, dim).astype(np.float64), (n, 1)), axis=1)
    else:
        rows = r.standard_normal((n, dim)) + r.random((n, 1)) * 3 * (-query if kind == "opposite" else query)
    rows[~rows.any(axis=1), 0] = 1.0
    return rows


def some_rows(r, kind, n, query, dtype, exponent, mixed):
    """Facts' vectors in their type, scaled by powers of two, none of them zero or infinite, some of them twice."""
    rows = some_vectors(r, kind, n, query)
    powers = r.integers(-2, 3, (n, 1)) if mixed else 0
    rows = np.ldexp(rows, powers + exponent).astype(dtype)
    twins = r.integers(0, n, n // 8) if n else []
    rows[twins] = rows[::-1][twins]
    rows[~rows.any(axis=1), 0] = 1.0
    return rows


def some_query_and_rows(r, world):
    """The query [D], now and then a fact itself, and the facts' vectors [N, D]."""
    query = some_vectors(r, world.questions, 1, np.ones(world.dim))[0]
    rows = some_rows(r, world.vectors, world.n, query, world.dtype, world.exponent, world.mixed)
    if world.n and r.random() < 0.15:
        query = np.ldexp(rows[0].astype(np.float64), -world.exponent)
    return query, rows


def many_depths(r, kind, n):
    """[n] depths of many entries: any, all alike, from 1 down to almost nothing, or the least numbers there are."""
    if kind == "equal":
        return np.full(n, float(r.choice(DEPTHS[1:])))
    if kind == "sizes":
        return r.permutation(np.geomspace(1.0, 1e-300, n))
    return np.full(n, 5e-324) if kind == "tiny" else r.choice(DEPTHS, n)


def many_of(r, n, distinct):
    """Which of a few vectors each of many entries is: one after the other, in turns, or anyhow."""
    which = r.integers(0, distinct, n)
    shape = r.integers(0, 3)
    return np.sort(which) if shape == 0 else np.arange(n) % distinct if shape == 1 else which


def with_opposites(r, vectors):
    """The same; in every second case half of them are the others' opposites, so that coverage cancels."""
    if len(vectors) > 1 and r.random() < 0.5:
        half = len(vectors) // 2
        vectors[half : 2 * half] = -vectors[:half]
    return vectors


def some_texts(r, n):
    """Texts of a few words, so that they share n-grams; every third one says the same n-grams again and again."""
    pool = [r.choice(WORDS, r.integers(0, 15)) for _ in range(12)]
    pool[::3] = [np.tile(words[:3], 4) for words in pool[::3]]
    return [" ".join(pool[i]) for i in r.integers(0, len(pool), n)]


def pick_gate(kind, value, row, rows, query):
    """The value itself, the cosine that occurs in a row, or the next float above that."""
    if kind == "value" or not len(rows):
        return value
    cosine = reference.cosine(rows[row % len(rows)].astype(np.float64).tolist(), query.tolist())
    return cosine if kind == "occurring" else min(1.0, float(np.nextafter(cosine, 2.0)))


@dataclass(frozen=True)
class World:
    seed: int
    n: int
    dim: int
    dtype: str
    vectors: str
    questions: str
    exponent: int
    mixed: bool
    gate_kind: str
    gate_value: float
    gate_row: int
    k: int
    keywords: dict
    many: int
    many_depths: str


@dataclass(frozen=True)
class ScoreWorld(World):
    covered: int
    residual: int


@dataclass(frozen=True)
class SessionWorld(World):
    sub_queries: int
    windows: int
    padded: bool
    mapped: bool
    where: str
    swaps: bool
    approximate: bool


@st.composite
def worlds(draw, kind):
    dtype = draw(st.sampled_from(DTYPES))
    many = draw(st.sampled_from([0] * 24 + [1])) and draw(st.sampled_from(MANY))
    values = {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "n": draw(st.integers(0, 20) if many else st.integers(0, 20) | st.integers(0, 120) | st.integers(100, 300)),
        "dim": draw(st.integers(1, 20) | st.integers(1, 64)),
        "dtype": dtype,
        "vectors": draw(st.sampled_from(VECTORS)),
        "questions": draw(st.sampled_from(VECTORS)),
        "exponent": draw(st.sampled_from(EXPONENTS[dtype])),
        "mixed": draw(st.booleans()),
        "gate_kind": draw(st.sampled_from(["value", "occurring", "above"])),
        "gate_value": draw(st.sampled_from([0.3, -1.0, 0.0, 0.55, 1.0]) | st.floats(-1.0, 1.0)),
        "gate_row": draw(st.integers(0, 299)),
        "k": draw(st.sampled_from([0, 1, 3, 10, 301]) | st.integers(0, 300)),
        "keywords": {
            "first_window_pull": draw(st.booleans()),
            "clamp_novelty": draw(st.booleans()),
        },
        "many": many,
        "many_depths": draw(st.sampled_from(MANY_DEPTHS)),
    }
    if kind is ScoreWorld:
        values |= {"covered": draw(st.integers(0, 12)), "residual": draw(st.integers(0, 9))}
    else:
        values |= {
            "sub_queries": draw(st.integers(1, 9)),
            "windows": draw(st.integers(1, 2 if many else 3)),
            "padded": draw(st.booleans()),
            "mapped": draw(st.sampled_from([False] * 9 + [True])),
            "where": draw(st.sampled_from(["none", "none", "mapping", "mask", "any"])),
            "swaps": draw(st.booleans()),
            "approximate": draw(st.sampled_from([False, False, True])),
        }
    return kind(**values)


def make_score_case(world):
    """The arrays of a world, and the reference's whole ranking of it."""
    r = np.random.default_rng(world.seed)
    query, rows = some_query_and_rows(r, world)
    entries = some_vectors(r, world.questions, world.covered, query)
    pulls = some_vectors(r, world.questions, world.residual, query)
    if world.n:  # some questions are facts themselves
        here = r.random(len(entries)) < 0.3
        entries[here] = np.ldexp(rows[r.integers(0, world.n, len(entries))[here]].astype(np.float64), -world.exponent)
    depths = r.choice(DEPTHS, world.covered) if r.random() < 0.9 else np.zeros(world.covered)
    if world.many and len(entries):
        entries = with_opposites(r, entries)[many_of(r, world.many, len(entries))]
        depths = many_depths(r, world.many_depths, world.many)
    factors = {
        "importance": r.choice(WEIGHTS, world.n),
        "multiplier": r.choice([0.0, 0.3, 0.77, 1.0], world.n),
    }
    texts = some_texts(r, world.n)
    output = " ".join(texts[: r.integers(0, 4)])
    gate = pick_gate(world.gate_kind, world.gate_value, world.gate_row, rows, query)
    guard = NGramGuard()
    guard.update(output)
    factors["ngram_overlap"] = guard.overlap(texts)
    columns = Columns.spec(
        query, coverage=entries, depth_weights=depths, residual=pulls, min_relevance=gate, **world.keywords
    )
    facts = [
        reference.Fact(tuple(row), text, importance, multiplier, id=i, sequence=i)
        for i, (row, text, importance, multiplier) in enumerate(
            zip(
                rows.astype(np.float64).tolist(),
                texts,
                factors["importance"].tolist(),
                factors["multiplier"].tolist(),
                strict=True,
            )
        )
    ]
    session = reference.ReferenceSession(
        coverage_set=[reference.Entry(tuple(e), d) for e, d in zip(entries.tolist(), depths.tolist(), strict=True)],
        residual_set=[reference.SubQuery(str(j), "", "", e) for j, e in enumerate(pulls.tolist())],
        ngram_blacklist=reference.ngrams(reference.tokenize(output)),
        min_relevance=gate,
        **world.keywords,
    )
    return rows, columns, factors, facts, query.tolist(), session


def check_scores(world):
    rows, columns, factors, facts, query, session = make_score_case(world)
    truth = reference.cdr_rank(facts, query, session)
    whole, front = set(), set()
    for impl, simd in product(available_impls(), _C.simd_levels()):
        with running(simd=simd, threads=1):
            by_row = cdr_score(rows, columns, **factors, impl=impl)
            ranked = cdr_score(rows, columns, **factors, k=len(rows), impl=impl)
            best = cdr_score(rows, columns, **factors, k=world.k, impl=impl)
        whole.add((bits(by_row), bits(ranked)))
        front.add(bits(best))
    assert len(whole) == len(front) == 1
    entries = len(session.coverage_set)
    compare(ranked.rows.tolist(), ranked, truth, entries=entries)
    compare(best.rows.tolist(), best, truth, world.k, entries)
    assert bits(best) == bits(ranked.take(np.arange(min(world.k, len(ranked)))))
    assert bits(by_row) == bits(ranked.take(np.argsort(ranked.rows)))
    if not world.n:
        return
    some = np.flatnonzero(np.random.default_rng(world.seed).random(world.n) < 0.5)
    of_some = {name: values[some] for name, values in factors.items()}
    for impl in available_impls():
        found = cdr_score(rows, columns, **of_some, rows=some, impl=impl)
        assert bits(found) == bits(by_row.take(np.flatnonzero(np.isin(by_row.rows, some))))
    copies = 2100 // world.n + 1  # work for several threads
    many = np.tile(rows, (copies, 1))
    repeated = {name: np.tile(values, copies) for name, values in factors.items()}
    expected = (np.add.outer(np.arange(copies) * world.n, by_row.rows).ravel(), np.tile(by_row.score, copies))
    for impl, simd, threads in product(available_impls(), _C.simd_levels()[-1:], (2, 7)):
        with running(simd=simd, threads=threads):
            found = cdr_score(many, columns, **repeated, impl=impl)
        assert found.rows.tobytes() == expected[0].tobytes()
        assert found.score.tobytes() == expected[1].tobytes()


WAYS = [
    ("scan", "cpp", 0, 1),
    ("scan", "cpp", -1, 7),
    ("scan", "torch", -1, 2),
    ("codes", "cpp", 0, 7),
    ("codes", "cpp", -1, 2),
    ("codes", "torch", -1, 1),
    ("device", "cpp", 0, 7),
    ("device", "cpp", -1, 2),
    ("device", "torch", -1, 1),
    ("flat", "cpp", -1, 1),
    ("flat", "cpp", 0, 2),
    ("flat", "torch", 0, 7),
]
"""Retriever, implementation, position in the SIMD levels, threads: every two of them meet."""


def test_the_ways_are_all_the_exact_ones():
    assert {way[0] for way in WAYS} == {*EXACT_KINDS, "codes"}
    assert {way[1] for way in WAYS} == set(available_impls())


class Model:
    """What a store must hold, kept beside it: facts by id in the order of their sequence numbers, and their columns."""

    def __init__(self, store, r):
        self.store = store
        self.facts = {}
        self.columns = {}
        self.next = 0
        self._r = r

    def put(self, ids, texts, rows, importance, *, upsert=False, shown=True):
        sources = [SOURCES[i] for i in self._r.integers(0, 3, len(ids))]
        numbers = [(0, 1, 2, None)[i] for i in self._r.integers(0, 4, len(ids))]
        (self.store.upsert if upsert else self.store.add)(
            ids, texts, rows, importance=importance, source=sources, attributes={"t": numbers}
        )
        cast = np.asarray(rows, self.store.dtype).astype(np.float64).tolist()
        for name, text, row, weight, source, number in zip(
            ids, texts, cast, importance.tolist(), sources, numbers, strict=True
        ):
            self.columns[name] = {"source": source, "t": number}
            self.facts.pop(name, None)
            if shown:
                self.facts[name] = reference.Fact(tuple(row), text, weight, id=name, sequence=self.next)
            self.next += 1

    def remove(self, ids):
        self.store.remove(ids)
        for name in ids:
            del self.facts[name]

    def limited(self, where):
        """The facts of which a filter holds."""
        if where is None:
            return list(self.facts.values())
        if isinstance(where, np.ndarray):
            inside = {name for name, chosen in zip(self.store.ids, where.tolist(), strict=True) if chosen}
            return [fact for name, fact in self.facts.items() if name in inside]
        allowed = {name: values if isinstance(values, list) else [values] for name, values in where.items()}
        return [
            fact
            for name, fact in self.facts.items()
            if all(self.columns[name][column] in values for column, values in allowed.items())
        ]


class Filters:
    """What each window of a world is limited to: the same filter again and again, or another each time."""

    def __init__(self, world, r):
        self._kind = world.where
        self._mapping = WHERES[r.integers(0, len(WHERES))]
        self._mask = r.random(4096) < r.choice([0.1, 0.5, 0.9])

    def next(self, model, r):
        kind = r.choice(["none", "mapping", "mask"]) if self._kind == "any" else self._kind
        if kind == "mask":
            return self._mask[: len(model.store)]
        if kind == "none" or "t" not in model.store.view().attribute_names:
            return None
        return self._mapping if self._kind == "mapping" else WHERES[r.integers(0, len(WHERES))]


def exact_retrievers(store):
    """One of each exact kind, and a scan with codes for the rows there are now."""
    retrievers = {kind: Retriever(store, kind) for kind in EXACT_KINDS}
    retrievers["codes"] = Retriever(store)
    retrievers["codes"].prepare()
    return retrievers


def all_retrievers(world, store):
    """The exact ones, and in some worlds the approximate ones, whose lists are visited one at a time."""
    kinds = APPROXIMATE_KINDS if world.approximate and not world.padded else ()
    return exact_retrievers(store) | {kind: Retriever(store, kind, nprobe=1) for kind in kinds}


def check_session(world):
    r = np.random.default_rng(world.seed)
    query, rows = some_query_and_rows(r, world)
    gate = pick_gate(world.gate_kind, world.gate_value, world.gate_row, rows, query)
    vectors = some_vectors(r, world.questions, world.sub_queries, query)
    if world.many:
        vectors = with_opposites(r, vectors)
    names = [f"s{j}" for j in range(world.sub_queries)]
    session = session_of_mode(
        [SubQuery(name, name, "", vector) for name, vector in zip(names, vectors, strict=True)],
        embedding_model="m1", min_relevance=gate, **world.keywords,
    )  # fmt: skip
    twin = reference.ReferenceSession(
        [reference.SubQuery(name, name, "", vector) for name, vector in zip(names, vectors.tolist(), strict=True)],
        min_relevance=gate,
        **world.keywords,
    )
    model, filters = Model(FactStore(world.dim, embedding_model="m1", dtype=world.dtype), r), Filters(world, r)

    def pad(name):  # opposites of the query: never candidates, but work for several threads
        if world.padded and gate > -0.9:
            ids = [f"{name}{i}" for i in range(1000)]
            model.put(ids, [""] * 1000, np.tile(-query, (1000, 1)), np.ones(1000), shown=False)

    pad("a")
    model.put([f"f{i}" for i in range(world.n)], some_texts(r, world.n), rows, r.choice(WEIGHTS, world.n))
    pad("b")
    if world.many:
        session = covered_by_many(world, session, twin, r)
    retrievers = all_retrievers(world, model.store)
    for window in range(world.windows):
        where = filters.next(model, r)
        ranking = check_window(world, model, session, twin, query, retrievers, r, where)
        output = " ".join(fact.text for fact in ranking.facts[: r.integers(0, 5)])
        addressed = r.permutation(names)[: r.integers(0, 4)].tolist()
        depths = {name: float(r.choice(DEPTHS)) for name in addressed if r.random() < 0.8}
        session.update(WindowReport(0.5, tuple(addressed), depths), output, embedding_model="m1")
        reference.update_session_after_window(twin, reference.Report(0.5, addressed, depths), output)
        assert [item.id for item in session.residual] == [item.id for item in twin.remaining]
        assert session.window_count == twin.window_count == window + 1
        change(world, model, query, r, window)
        if world.mapped and window == 0:
            with tempfile.TemporaryDirectory() as folder:
                model.store.save(folder)
                model.store = FactStore.load(folder)
            retrievers = all_retrievers(world, model.store)


def covered_by_many(world, session, twin, r):
    """The session as if it had covered its sub-queries many times over; its twin is put into the same state."""
    names = [item.id for item in session.sub_queries]
    which = many_of(r, world.many, len(names)).tolist()
    depths = many_depths(r, world.many_depths, world.many).tolist()
    vectors = [item.embedding for item in session.sub_queries]
    entries = tuple(CoverageEntry(names[j], vectors[j], depth, 1) for j, depth in zip(which, depths, strict=True))
    plain = [tuple(vector.tolist()) for vector in vectors]
    twin.coverage_set = [reference.Entry(plain[j], depth, 1, names[j]) for j, depth in zip(which, depths, strict=True)]
    remaining = tuple(item for j, item in enumerate(session.sub_queries) if j not in set(which))
    twin.residual_set = [item for item in twin.residual_set if item.id in {item.id for item in remaining}]
    return session.supposing(replace(session.state, coverage=entries, residual=remaining))


def check_window(world, model, session, twin, query, retrievers, r, where):
    facts = list(model.facts.values())
    shape = r.integers(0, 3)
    factors = r.choice([0.0, 0.3, 1.0, 1.0], len(facts)).tolist()
    for fact, factor in zip(facts, factors, strict=True):
        fact.multiplier = 1.0 if shape == 0 else factor
    multiplier = None if shape == 0 else {fact.id: fact.multiplier for fact in facts if fact.multiplier != 1.0}
    if shape == 2:
        by_id = {fact.id: fact.multiplier for fact in facts}
        multiplier = [by_id.get(name, 1.0) for name in model.store.ids]
    facts = model.limited(where)
    truth = reference.cdr_rank(facts, query.tolist(), twin)
    seen, front = set(), set()
    given = {"multiplier": multiplier, "where": where}
    for kind, impl, level, threads in WAYS:
        with running(impl, _C.simd_levels()[level], threads):
            ranking = cdr_rank(query, retrievers[kind], session, **given)
            best = cdr_rank(query, retrievers[kind], session, k=world.k, **given)
        seen.add(bits(ranking))
        front.add(bits(best))
    assert len(seen) == len(front) == 1
    entries = len(twin.coverage_set)
    compare(ranking.ids, ranking, truth, entries=entries)
    compare(best.ids, best, truth, world.k, entries)
    assert bits(best) == bits(ranking.take(np.arange(min(world.k, len(ranking)))))
    by_id = {s.fact.id: s for s in truth}
    assert [by_id[i].ngram_overlap for i in ranking.ids] == ranking.ngram_overlap.tolist()
    assert [fact.sequence for fact in ranking.facts] == [by_id[i].fact.sequence for i in ranking.ids]
    assert ranking.qualified == best.qualified == len(truth)
    assert ranking.guard_activations == reference.guard_activations(truth)
    assert ranking.coverage_depth == len(twin.coverage_set)
    for kind, retriever in retrievers.items():
        if kind in APPROXIMATE_KINDS:
            check_approximate(world, query, retriever, session, ranking, given)
        elif where is None:
            found = retriever.search(query, min_relevance=session.settings.min_relevance)
            assert [found.view.id_of(row) for row in found.rows] == sorted(by_id, key=lambda i: by_id[i].fact.sequence)
    return ranking


def check_approximate(world, query, retriever, session, exact, given):
    """Facts may be missing; those that are there have the exact numbers, in the exact order. None is missing where the
    gate excludes none."""
    found = cdr_rank(query, retriever, session, **given)
    place = {name: i for i, name in enumerate(exact.ids)}
    assert set(found.ids) <= set(place), "facts that do not pass the gate"
    positions = [place[name] for name in found.ids]
    assert positions == sorted(positions)
    for name in (*NUMBERS, "ngram_overlap", "importance", "multiplier"):
        assert getattr(found, name).tobytes() == getattr(exact, name)[positions].tobytes(), name
    assert found.qualified == len(found)
    best = cdr_rank(query, retriever, session, k=world.k, **given)
    assert bits(best) == bits(found.take(np.arange(min(world.k, len(found)))))
    assert session.settings.min_relevance > -1.0 or len(found) == len(exact)


def change(world, model, query, r, window):
    """Remove facts, put others in their place and in new places, give some of them the vector of another. Where facts
    are swapped, as many come as go."""
    ids = list(model.facts)
    gone = r.permutation(ids)[: r.integers(0, len(ids) // 3 + 1)].tolist()
    model.remove(gone)
    ids = list(model.facts)
    come = len(gone) if world.swaps else r.integers(0, 6)
    changed = r.permutation(ids)[: r.integers(0, 4)].tolist() + [f"n{window}.{i}" for i in range(come)]
    rows = some_rows(r, world.vectors, len(changed), query, world.dtype, world.exponent, world.mixed)
    if ids and len(changed):
        rows[0] = np.asarray(model.facts[ids[0]].embedding).astype(world.dtype)
    model.put(changed, some_texts(r, len(changed)), rows, r.choice(WEIGHTS, len(changed)), upsert=True)
    if r.random() < 0.25:
        model.store.compact()


@settings(ALIKE, max_examples=500)
@given(worlds(ScoreWorld))
def test_scores_are_the_references(world):
    check_scores(world)


@settings(ALIKE, max_examples=500)
@given(worlds(SessionWorld))
def test_sessions_are_the_references(world):
    check_session(world)


@pytest.mark.slow
@settings(ALIKE, max_examples=EXAMPLES)
@given(worlds(ScoreWorld))
def test_scores_are_the_references_20_000_times(world):
    check_scores(world)


@pytest.mark.slow
@settings(ALIKE, max_examples=EXAMPLES)
@given(worlds(SessionWorld))
def test_sessions_are_the_references_20_000_times(world):
    check_session(world)


# Columns beyond the specification's, which the reference does not know: the implementations against each other


@settings(ALIKE, max_examples=300)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 200),
    dim=st.integers(1, 40),
    residual=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    length=st.sampled_from([0.0, 0.5, 3.0, 1e4, 1e150]),
    size=st.sampled_from([1.0, 1.0, 1e150, 1e305]),
    k=st.none() | st.integers(0, 30),
    clamp_novelty=st.booleans(),
)
@example(955, 11, 3, 4, "float64", 1e150, 1e305, 11, False)  # the k-th best score is no number
def test_any_columns_rank_alike(seed, n, dim, residual, dtype, length, size, k, clamp_novelty):
    r = np.random.default_rng(seed)
    vectors = r.standard_normal((2 + residual, dim))
    columns = Columns(
        query=vectors[0],
        coverage=length * vectors[1] if length else None,
        residual=vectors[2:],
        scale=r.uniform(-2, 3, 2 + residual) * size,
        shift=r.uniform(-0.5, 0.5, 2 + residual) * size,
        weight=r.uniform(-1, 2, 2 + residual),
        gate=r.choice([-np.inf, -size, 0.2, 0.9 * size, np.inf], 2 + residual),
        clamp_novelty=clamp_novelty,
    )
    rows = r.standard_normal((n, dim)).astype(dtype)
    rows[rows == 0.0] = 1.0
    weights = r.choice(WEIGHTS, n)
    found = set()
    for impl, simd in product(available_impls(), _C.simd_levels()):
        with running(simd=simd):
            found.add(bits(cdr_score(rows, columns, importance=weights, k=k, impl=impl)))
    assert len(found) == 1


def test_a_long_coverage_functional_prunes_nothing_that_counts():
    r = np.random.default_rng(0)
    for _ in range(4):  # novelty is the small difference of large products, and all that tells the facts apart
        along, query = np.linalg.qr(r.standard_normal((64, 2)))[0].T
        rows = r.standard_normal((20_000, 64))
        rows -= np.outer(rows @ along, along) + np.outer(rows @ query, query)
        rows = rows / np.linalg.norm(rows, axis=1)[:, None] + np.outer(r.uniform(-3e-6, 3e-6, 20_000), along)
        columns = Columns(
            query=query, coverage=1e4 * along, residual=[], scale=[1, 1], shift=[0, 0], weight=[1, 1], gate=[-1, np.inf]
        )
        rows = (4.0 * rows + query).astype(np.float32)
        assert len({bits(cdr_score(rows, columns, k=500, impl=impl)) for impl in available_impls()}) == 1


# A comparison that accepts a wrong formula or a wrong order proves nothing, so here they are


def sample_worlds():
    for seed in range(40):
        yield ScoreWorld(
            seed=seed, n=30, dim=5, dtype=DTYPES[seed % 3], vectors=VECTORS[seed % 5], questions=VECTORS[seed % 4],
            exponent=0, mixed=False, gate_kind=("occurring", "value")[seed % 2], gate_value=(0.0, -1.0)[seed // 2 % 2],
            gate_row=seed, k=5, keywords={"first_window_pull": False, "clamp_novelty": False},
            covered=seed % 4, residual=seed // 4 % 3, many=0, many_depths="equal",
        )  # fmt: skip


def rejected(spoil=lambda ranked: ranked):
    """Whether the comparison turns down an answer that spoil may have changed, in any of the sample worlds."""
    for world in sample_worlds():
        rows, columns, factors, facts, query, session = make_score_case(world)
        ranked = spoil(cdr_score(rows, columns, **factors, k=len(rows)))
        try:
            compare(ranked.rows.tolist(), ranked, reference.cdr_rank(facts, query, session))
        except AssertionError:
            return True
    return False


def plain_pull(fact, residual, entries, **_):
    return max((reference.cosine(fact.embedding, s.embedding) for s in residual), default=0.0)


def with_pull(change_pull):
    right = reference.residual_pull
    return lambda fact, residual, entries, **k: change_pull(right(fact, residual, entries, **k))


def with_entries(change_entries):
    right = reference.coverage_score
    return lambda fact, entries: right(fact, change_entries(entries))


def largest_coverage(fact, entries):
    return max((reference.cosine(fact.embedding, e.embedding) for e in entries if e.depth_weight), default=0.0)


def strict_gate(facts, query, session, k=None):
    return [s for s in right_rank(facts, query, session) if s.relevance > session.min_relevance]


def rescuing_gate(facts, query, session, k=None):
    everything = [reference.score_fact(fact, query, session) for fact in facts]
    return [s for s in everything if max(s.relevance, s.residual_pull) >= session.min_relevance]


def repeats_counted(content, blacklist, n=6):
    tokens = reference.tokenize(content)
    return sum(tuple(tokens[i : i + n]) in blacklist for i in range(len(tokens) - n + 1))


right_rank = reference.cdr_rank
right_score = reference.cdr_score
MISTAKES = {
    "no cap and no floor": ("novelty", lambda coverage, **_: 1.0 - coverage),
    "another cap": ("COVERAGE_PENALTY_CAP", 0.7),
    "another floor": ("MIN_NOVELTY_FLOOR", 0.21),
    "novelty held at 1": ("novelty", lambda coverage, **_: min(1.0, max(1.0 - coverage, 0.2))),
    "no novelty": ("cdr_score", lambda rel, pull, new, **k: right_score(rel, pull, 1.0, **k)),
    "no importance": ("cdr_score", lambda *a, **k: right_score(*a, **{**k, "importance_weight": 1.0})),
    "no multiplier": ("cdr_score", lambda *a, **k: right_score(*a, **{**k, "multiplier": 1.0})),
    "no pull": ("cdr_score", lambda rel, pull, new, **k: right_score(rel, rel, new, **k)),
    "pull added": ("cdr_score", lambda rel, pull, new, **k: right_score(rel + max(0.0, pull), 0.0, new, **k)),
    "no guard": ("ngram_penalty", lambda overlap: 0.0),
    "guard without its cap": ("ngram_penalty", lambda overlap: min(1.0, 0.15 * overlap)),
    "another step of the guard": ("NGRAM_PENALTY_STEP", 0.16),
    "repeated n-grams counted": ("count_matching_ngrams", repeats_counted),
    "pull before anything is covered": ("residual_pull", plain_pull),
    "a pull of 0 at least": ("residual_pull", with_pull(lambda pull: max(pull, 0.0))),
    "half the pull": ("residual_pull", with_pull(lambda pull: pull / 2)),
    "one residual item": ("residual_pull", lambda f, r, e, **k: plain_pull(f, r[:1], e) if e else 0.0),
    "coverage without weights": (
        "coverage_score",
        with_entries(lambda entries: [reference.Entry(e.embedding, 1.0) for e in entries]),
    ),
    "coverage by the largest": ("coverage_score", largest_coverage),
    "the first entry forgotten": ("coverage_score", with_entries(lambda entries: entries[1:])),
    "a gate that leaves out its own value": ("cdr_rank", strict_gate),
    "a gate that pull opens": ("cdr_rank", rescuing_gate),
    "cosines off by 1e-11": ("cosine", lambda a, b: min(1.0, _cosine(tuple(a), tuple(b)) * (1 + 1e-11))),
}


def test_the_right_formula_is_accepted():
    assert not rejected()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_formula_is_rejected(mistake, monkeypatch):
    monkeypatch.setattr(reference, *MISTAKES[mistake])
    assert rejected()


def ties_reversed(ranked):
    order = np.lexsort((-ranked.rows, -ranked.score))
    return ranked.take(order)


def neighbours_swapped(ranked):
    order = np.arange(len(ranked))
    order[:2] = order[:2][::-1]
    return ranked.take(order)


@pytest.mark.parametrize("spoil", [ties_reversed, neighbours_swapped, lambda s: s.take(np.arange(len(s) - 1))])
def test_a_wrong_order_is_rejected(spoil):
    assert rejected(spoil)
