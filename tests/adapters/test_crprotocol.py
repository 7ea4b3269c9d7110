"""The drop-in for crprotocol: against the installed package, and by itself under the specification's semantics."""

from __future__ import annotations

import importlib.util
import inspect
import math
import pickle
import random
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdr_kernel import EmbeddingModelMismatch, constants, reference
from cdr_kernel.adapters import _crprotocol_6
from cdr_kernel.adapters import crprotocol as ours
from cdr_kernel.adapters._facts import embedding_of, pack_rows
from cdr_kernel.adapters.crprotocol import FactArray, install

E1, E2, E3 = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]
QUERY = [0.8, 0.6, 0.0]
SIX = "crprotocol-6"
NUMBERS = ("relevance", "novelty", "residual_pull", "importance", "cdr_score")


def fact(embedding, **more):
    return SimpleNamespace(embedding=embedding, **more)


def covered(covers=(), remains=(), semantics="spec", model=""):
    made = ours.CoverageSet(model, semantics=semantics)
    made.update([{"text": f"c{i}", "embedding": v, "depth_weight": w} for i, (v, w) in enumerate(covers)])
    made.set_residual([ours.ResidualItem(f"r{i}", v) for i, v in enumerate(remains)])
    return made


# Against the installed package


class Surface(SimpleNamespace):
    """The names of the drop-in, from somewhere."""


FUNCTIONS = ("cdr_rank", "cdr_score", "update_coverage_after_window")
RESULTS = ("CDRRankResult", "CDRScoredFact")
SETS = ("CoverageSet", "CoverageEntry", "ResidualItem")


def surface_of(cdr, state):
    return Surface(**{n: getattr(cdr, n) for n in FUNCTIONS + RESULTS}, **{n: getattr(state, n) for n in SETS})


@pytest.fixture(scope="module")
def package():
    """crprotocol's modules as they are."""
    reason = "needs crprotocol: pip install crprotocol"
    cdr = pytest.importorskip("crp.envelope.cdr", reason=reason)
    return surface_of(cdr, import_module("crp.state.coverage_set"))


@pytest.fixture(scope="module")
def theirs(package):
    """The same from copies of its modules under other names, which ``install`` does not reach."""
    copies = []
    for name in ("crp.envelope.cdr", "crp.state.coverage_set"):
        spec = importlib.util.spec_from_file_location("copy_of_" + name.replace(".", "_"), sys.modules[name].__file__)
        copy = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = copy  # dataclasses look their module up
        spec.loader.exec_module(copy)
        copies.append(copy)
    yield surface_of(*copies)
    for copy in copies:
        del sys.modules[copy.__name__]


def imported():
    """Our names as a program that imports them has them."""
    made = surface_of(ours, ours)
    made.CoverageSet = lambda model="": ours.CoverageSet(model, semantics=SIX)
    return made


@pytest.fixture(params=["imported", "installed", "installed, old sets", "imported, their sets"])
def surface(request, package):
    """The drop-in under "crprotocol-6", each way it can be reached."""
    if request.param == "imported":
        yield imported()
    elif request.param == "imported, their sets":
        made = imported()
        made.CoverageSet = package.CoverageSet
        made.cdr_rank = lambda *a, **k: ours.cdr_rank(*a, **k, semantics=SIX)
        made.cdr_score = lambda *a, **k: ours.cdr_score(*a, **k, semantics=SIX)
        yield made
    else:
        with install(SIX):
            made = surface_of(sys.modules["crp.envelope.cdr"], sys.modules["crp.state.coverage_set"])
            assert made.cdr_rank is not package.cdr_rank
            if request.param == "installed, old sets":
                made.CoverageSet = package.CoverageSet
            yield made


def close(a, b, scale=1.0):
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b) or abs(a - b) <= 1e-9 * max(1.0, abs(scale))
    return type(a) is type(b) and a == b


def assert_same_fact(a, b):
    assert a.fact is b.fact
    assert a.excluded is b.excluded
    for name in NUMBERS:
        assert close(getattr(a, name), getattr(b, name), a.importance), name
    assert a.components.keys() == b.components.keys()
    for name, value in a.components.items():
        assert close(value, b.components[name], a.importance), name


def assert_same_ranking(a, b):
    assert [id(x.fact) for x in a.ranked] == [id(x.fact) for x in b.ranked]
    for x, y in zip(a.ranked, b.ranked, strict=True):
        assert_same_fact(x, y)
    assert type(a.ranked) is type(b.ranked) is list
    assert a.ckf_exhausted is b.ckf_exhausted
    assert close(a.mean_novelty_top10, b.mean_novelty_top10)
    assert (a.candidate_count, a.excluded_count) == (b.candidate_count, b.excluded_count)
    assert list(vars(a)) == list(vars(b))


def outcome(call):
    """What a call gives: its value, or the type of what it raises."""
    try:
        return call(), None
    except Exception as error:  # whatever the other side raises is to be raised here too
        return None, type(error)


ORDINARY = st.floats(-2, 2).map(lambda x: round(x, 2))
ELEMENT = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 2.0, 3.0, 5, -2]),
    ORDINARY,
    ORDINARY,
    st.floats(allow_nan=False, allow_infinity=False, width=64),
)
ODD = st.sampled_from([math.nan, math.inf, -math.inf, 1e-200, 1e200, -0.0])


@st.composite
def vectors(draw, dim, odd=0.05):
    if draw(st.floats(0, 1)) < odd:
        dim = draw(st.integers(0, 6))
        values = draw(st.lists(st.one_of(ELEMENT, ODD), min_size=dim, max_size=dim))
    else:
        element = draw(st.sampled_from([ORDINARY, st.integers(-3, 3).map(float), ELEMENT]))
        values = draw(st.lists(element, min_size=dim, max_size=dim))
    return tuple(values) if draw(st.integers(0, 5)) == 0 else values


@st.composite
def tasks(draw):
    """Facts, query, coverage entries, residual, weights and the gate."""
    dim = draw(st.sampled_from([2, 3, 3, 8]))
    query = draw(vectors(dim, odd=0.03))
    pool = [draw(vectors(dim)) for _ in range(draw(st.integers(0, 6)))] + [list(query)]
    facts = []
    for _ in range(draw(st.integers(0, 14))):
        vector = draw(st.sampled_from(pool))
        scale = draw(st.sampled_from([1.0, 1.0, 1.0, 3.0, 0.1]))
        vector = type(vector)(x * scale for x in vector)
        holder = draw(st.sampled_from(["embedding", "embedding", "_embedding", "both", "inner", "none", "empty"]))
        facts.append({
            "embedding": lambda v: SimpleNamespace(embedding=v),
            "_embedding": lambda v: SimpleNamespace(_embedding=v),
            "both": lambda v: SimpleNamespace(_embedding=v, embedding=[9.0]),
            "inner": lambda v: SimpleNamespace(embedding=None, fact=SimpleNamespace(_embedding=v)),
            "none": lambda v: SimpleNamespace(),
            "empty": lambda v: SimpleNamespace(_embedding=[], embedding=v),
        }[holder](vector))  # fmt: skip
    depth = st.sampled_from([0.0, 0.15, 0.4, 0.5, 0.9, 1.0, 1.0, 0.7, 5.0, -0.3, 1e-13, math.nan])
    entries = [(draw(vectors(dim)), draw(depth)) for _ in range(draw(st.integers(0, 4)))]
    residual = [draw(vectors(dim)) for _ in range(draw(st.integers(0, 4)))]
    weights = draw(
        st.one_of(
            st.none(),
            st.lists(
                st.sampled_from([1.0, 1.0, 0.5, 2, 0.0, -1.0, 100.0, math.nan]),
                min_size=len(facts), max_size=len(facts),
            ),
        )
    )  # fmt: skip
    gate = draw(st.sampled_from([0.55, 0.55, 0.3, 0.0, 0, -1.0, -2, 1.0, 0.8, math.nan]))
    threshold = draw(st.sampled_from([0.15, 0.2, 0.5, 1.0, 2, 0]))
    return facts, query, entries, residual, weights, gate, threshold


def fill(surface, item_type, entries, residual):
    made = surface.CoverageSet("m")
    made.update([{"text": str(i), "embedding": v, "depth_weight": w} for i, (v, w) in enumerate(entries)], None, 1)
    made.set_residual([item_type(str(i), v) for i, v in enumerate(residual)])
    return made


def weigher(facts, weights):
    by_fact = {id(f): w for f, w in zip(facts, weights or [], strict=False)}
    return None if weights is None else lambda f: by_fact[id(f)]


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(task=tasks(), held=st.booleans())
def test_ranks_and_scores_as_the_package(surface, theirs, task, held):
    facts, query, entries, residual, weights, gate, threshold = task
    a = fill(theirs, theirs.ResidualItem, entries, residual)
    b = fill(surface, theirs.ResidualItem, entries, residual)
    options = {"importance_fn": weigher(facts, weights), "min_relevance": gate, "exhaustion_threshold": threshold}
    expected = theirs.cdr_rank(facts, query, a, **options)
    assert_same_ranking(expected, surface.cdr_rank(FactArray(facts) if held else facts, query, b, **options))
    for i, f in enumerate(facts):
        weight = 1.0 if weights is None else weights[i]
        x = theirs.cdr_score(f, query, a, importance_weight=weight, min_relevance=gate)
        y = surface.cdr_score(f, query, b, importance_weight=weight, min_relevance=gate)
        assert_same_fact(x, y)
        assert repr(x) == repr(y)  # to the last bit
        vector = embedding_of(f)
        for name in ("coverage_score", "residual_pull", "novelty"):
            assert repr(getattr(a, name)(vector)) == repr(getattr(b, name)(vector)), name
    sample = [v for f in facts if (v := embedding_of(f))]
    assert repr(a.mean_novelty(sample)) == repr(b.mean_novelty(sample))


def random_task(seed, n, dim, covers, remains):
    r = random.Random(seed)
    centre = [r.gauss(0, 1) for _ in range(dim)]

    def near(spread):
        return [c + r.gauss(0, spread) for c in centre]

    return [fact(near(1.2)) for _ in range(n)], centre, [(near(1), r.random()) for _ in range(covers)], [
        near(1) for _ in range(remains)
    ]  # fmt: skip


@pytest.mark.parametrize(("covers", "remains"), [(0, 0), (0, 3), (5, 0), (20, 8)])
def test_ranks_many_facts_as_the_package(surface, theirs, covers, remains):
    facts, query, entries, residual = random_task(3, 150, 64, covers, remains)
    facts += facts[:20] + [fact([2.0 * x for x in f.embedding]) for f in facts[:20]]  # ties
    facts[7] = fact([math.nan] * 64)
    expected = theirs.cdr_rank(facts, query, fill(theirs, theirs.ResidualItem, entries, residual))
    assert 0 < expected.excluded_count < len(facts)
    assert_same_ranking(expected, surface.cdr_rank(facts, query, fill(surface, theirs.ResidualItem, entries, residual)))


def test_rounding_decides_as_in_the_package(surface, theirs):
    """Gates that are a fact's own relevance, thresholds that are the mean itself, scores an ulp apart."""
    facts, query, entries, residual = random_task(7, 60, 7, 3, 2)
    facts += [fact([3.0 * x for x in f.embedding]) for f in facts] + [
        fact([x / 7.0 for x in f.embedding]) for f in facts
    ]
    a = fill(theirs, theirs.ResidualItem, entries, residual)
    b = fill(surface, theirs.ResidualItem, entries, residual)
    whole = theirs.cdr_rank(facts, query, a, min_relevance=-1.0)
    for gate in [x.relevance for x in whole.ranked]:
        assert_same_ranking(
            theirs.cdr_rank(facts, query, a, min_relevance=gate), surface.cdr_rank(facts, query, b, min_relevance=gate)
        )
    for x in whole.ranked[::5]:  # alone, so that no neighbour's score gives it away
        gate = math.nextafter(x.relevance, 2.0)
        assert surface.cdr_rank([x.fact], query, b, min_relevance=gate).excluded_count == 1
    for start in range(0, 60, 3):
        part = facts[start : start + 11]
        mean = theirs.cdr_rank(part, query, a).mean_novelty_top10
        for threshold in (mean, math.nextafter(mean, 2.0)):
            options = {"exhaustion_threshold": threshold}
            assert_same_ranking(theirs.cdr_rank(part, query, a, **options), surface.cdr_rank(part, query, b, **options))


def test_a_residual_of_another_dimension_pulls_with_cosine_zero(surface, theirs):
    facts = [fact(E1), fact(QUERY)]
    for residual in ([[1.0]], [[1.0], [-1.0, 0.0, 0.0]], [[-1.0, 0.0, 0.0]], [[1.0], E1]):
        a, b = (fill(each, theirs.ResidualItem, [(E1, 0.5), ([1.0], 0.4)], residual) for each in (theirs, surface))
        assert_same_ranking(theirs.cdr_rank(facts, QUERY, a), surface.cdr_rank(facts, QUERY, b))


def test_takes_arrays_where_the_package_raises(surface, package, theirs):
    facts, query, entries, residual = random_task(4, 30, 16, 2, 2)
    arrays = [fact(np.array(f.embedding)) for f in facts]
    with pytest.raises(ValueError, match="truth value"):
        theirs.cdr_rank(arrays, query, theirs.CoverageSet())
    expected = theirs.cdr_rank(facts, query, fill(theirs, theirs.ResidualItem, entries, residual))
    if surface.CoverageSet is not package.CoverageSet:  # its own update takes no arrays
        entries, residual = [(np.array(v), w) for v, w in entries], [np.array(v) for v in residual]
    found = surface.cdr_rank(arrays, np.array(query), fill(surface, theirs.ResidualItem, entries, residual))
    place = {id(f): i for i, f in enumerate(facts)} | {id(f): i for i, f in enumerate(arrays)}
    assert [place[id(x.fact)] for x in found.ranked] == [place[id(x.fact)] for x in expected.ranked]
    assert [x.cdr_score for x in found.ranked] == pytest.approx([x.cdr_score for x in expected.ranked], abs=1e-9)


@pytest.mark.parametrize(
    "facts", [[], (), {}, None, [None], [5], ["x"], [E1], [{"embedding": E1}], [fact("abc")], [fact(["a", "b", "c"])],
              [fact([1.0, None, 0.0])], [fact([E1])], [fact(5)], [fact(5.0)], [fact([True, False, False])],
              [fact(None, fact=fact(None, fact=fact(E1)))], [fact([10**400, 0, 0])], [fact(E1), fact(E2, fact=None)]],
    ids=lambda value: None,
)  # fmt: skip
def test_strange_facts_end_as_in_the_package(surface, theirs, facts):
    expected, error = outcome(lambda: theirs.cdr_rank(facts, QUERY, theirs.CoverageSet()))
    found, error_here = outcome(lambda: surface.cdr_rank(facts, QUERY, surface.CoverageSet()))
    assert error is error_here
    if expected is not None:
        assert_same_ranking(expected, found)


@pytest.mark.parametrize(
    ("query", "options"),
    [
        (tuple(QUERY), {}), (None, {}), ([], {}), ([0.0, 0.0, 0.0], {}), ([1.0, 0.0], {}), ([math.nan, 0, 0], {}),
        (QUERY, {"min_relevance": None}), (QUERY, {"exhaustion_threshold": None}), (QUERY, {"k": 1}),
        (QUERY, {"importance_fn": lambda f: None}), (QUERY, {"importance_fn": lambda f: "2"}),
        (QUERY, {"importance_fn": lambda f: 1 / 0}), (QUERY, {"importance_fn": lambda f: np.float32(0.3)}),
        (QUERY, {"importance_fn": lambda f: np.float64(0.3)}), (QUERY, {"importance_fn": lambda f: True}),
        (QUERY, {"importance_fn": lambda f: 10**400}), (QUERY, {"min_relevance": np.float64(0.8)}),
    ],
    ids=lambda value: None,
)  # fmt: skip
def test_strange_arguments_end_as_in_the_package(surface, theirs, query, options):
    facts = [fact(E1), fact(E3), fact([0.7, 0.7, 0.0]), fact(QUERY)]
    a = fill(theirs, theirs.ResidualItem, [(E1, 0.5)], [E2])
    b = fill(surface, theirs.ResidualItem, [(E1, 0.5)], [E2])
    expected, error = outcome(lambda: theirs.cdr_rank(facts, query, a, **options))
    found, error_here = outcome(lambda: surface.cdr_rank(facts, query, b, **options))
    assert error is error_here
    if expected is not None:
        assert_same_ranking(expected, found)


@pytest.mark.parametrize(
    "weights",
    [
        [1.0, True, np.float32(1.0), 1],  # equal to one another, and each handed back as it was given
        [math.inf, math.inf, 1.0, math.inf], [-math.inf, math.inf, math.nan, -math.inf], [1e308, 1.7e308, 1e308, 0.5],
        [0.5, "x", 10**400, 1.0], [0.5, 10**400, None, 1.0],  # the first error is the one that is raised
    ],
    ids=lambda value: None,
)  # fmt: skip
def test_strange_weights_of_equal_facts_end_as_in_the_package(surface, theirs, weights):
    facts = [fact([0.7, 0.7, 0.0], at=at) for at in range(len(weights))]
    options = {"importance_fn": lambda f: weights[f.at]}
    a = fill(theirs, theirs.ResidualItem, [(E1, 0.5)], [E2])
    b = fill(surface, theirs.ResidualItem, [(E1, 0.5)], [E2])
    expected, error = outcome(lambda: theirs.cdr_rank(facts, QUERY, a, **options))
    found, error_here = outcome(lambda: surface.cdr_rank(facts, QUERY, b, **options))
    assert error is error_here
    if expected is not None:
        assert [x.fact.at for x in found.ranked] == [x.fact.at for x in expected.ranked]
        for x, y in zip(expected.ranked, found.ranked, strict=True):
            assert (type(y.importance), repr(y.importance)) == (type(x.importance), repr(x.importance))
            assert y.cdr_score == pytest.approx(x.cdr_score, nan_ok=True)


def test_weights_are_asked_of_every_fact_in_order(surface, theirs):
    facts = [fact(E1), fact(E3), fact(None), fact(QUERY)]
    for each in (theirs, surface):
        asked = []
        each.cdr_rank(
            iter(facts), QUERY, each.CoverageSet(), importance_fn=lambda f, asked=asked: asked.append(f) or 1.0
        )
        assert [id(f) for f in asked] == [id(f) for f in facts]


def state(coverage_set):
    return (
        [(e.embedding, e.depth_weight, e.window_number, e.text) for e in coverage_set.entries()],
        [(r.text, r.embedding, r.sub_query_id) for r in coverage_set.residuals()],
        coverage_set.entry_count(), coverage_set.residual_count(), coverage_set.embedding_model_id, repr(coverage_set),
    )  # fmt: skip


SUB_QUERY = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "text": st.sampled_from(["a", "b", "c", "", None]),
            "embedding": st.sampled_from([E1, E2, tuple(E3), [], None, [1.0], "abc"]),
            "id": st.sampled_from(["1", "2", "a", "", None, 7]),
            "depth_weight": st.sampled_from([0.5, 0, 1, 5, -1, "0.3", None, math.inf]),
            "sub_query_id": st.just("x"),
        },
    ),
    st.sampled_from([None, 5, "a", [1]]),
)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["update", "model", "report", "dict report", "objects", "no list", "none", "reset"]),
            st.lists(SUB_QUERY, max_size=4),
            st.one_of(st.none(), st.lists(SUB_QUERY, max_size=4)),
            st.sampled_from([0, 1, 2, "w", None]),
            st.sampled_from(["", "m", "other"]),
        ),
        max_size=4,
    ),
    model=st.sampled_from(["", "m"]),
)
def test_updates_as_the_package(surface, theirs, steps, model):
    a, b = theirs.CoverageSet(model), surface.CoverageSet(model)
    for kind, addressed, whole, window, named in steps:
        expected, error = outcome(lambda: step(theirs, a, kind, addressed, whole, window, named))  # noqa: B023  # at once
        found, error_here = outcome(lambda: step(surface, b, kind, addressed, whole, window, named))  # noqa: B023
        if (error, error_here) != (ValueError, EmbeddingModelMismatch):  # ours says which models, and is a ValueError
            assert error is error_here
        assert expected is found is None
        assert state(a) == state(b)


@pytest.mark.parametrize("item", [None, "text", 3, (1, 2)])
def test_an_item_of_a_report_without_attributes_addresses_nothing(surface, theirs, item):
    for module in (theirs, surface):
        made = module.CoverageSet("m")
        step(module, made, "report", [item], None, 1, "m")
        assert state(made)[:2] == ([], [])


def step(surface, made, kind, addressed, whole, window, named):
    """One call that changes a coverage set."""
    if kind == "reset":
        return made.reset()
    if kind == "update":
        return made.update(addressed, whole, window)
    if kind == "model":
        return made.update(addressed, whole, window_number=window, embedding_model_id=named)
    report = {
        "report": SimpleNamespace(addressed_sub_queries=addressed),
        "dict report": {"addressed_sub_queries": addressed},
        "objects": SimpleNamespace(
            addressed_sub_queries=[SimpleNamespace(**x) if isinstance(x, dict) else x for x in addressed]
        ),
        "no list": SimpleNamespace(addressed_sub_queries=tuple(addressed)),
        "none": None,
    }[kind]
    return surface.update_coverage_after_window(made, report, window, all_sub_queries=whole)


class Halved:
    """Not a CoverageSet, but it answers."""

    def novelty(self, vector):
        return 0.5

    def residual_pull(self, vector):
        return 0.9


def test_coverage_sets_with_methods_of_their_own_are_asked(surface, theirs):
    facts = [fact(E1), fact(E3), fact(QUERY), fact([0.7, 0.7, 0.0])]
    kinds = [lambda each: Halved()]
    for name, value in (
        ("novelty", 0.33),
        ("residual_pull", 0.44),
        ("coverage_score", 0.7),
        ("entries", []),
        ("residuals", []),
    ):
        kinds.append(
            lambda each, name=name, value=value: type(
                "Mine", (type(each.CoverageSet()),), {name: lambda self, *vector: value, "semantics": SIX}
            )()
        )
    for kind in kinds:
        sets = [kind(each) for each in (theirs, surface)]
        for made in sets:
            if hasattr(made, "update"):
                made.update([{"text": "a", "embedding": E1}], [{"text": "b", "embedding": E2}], 1)
        options = {"semantics": SIX} if getattr(surface.cdr_rank, "__module__", "") == ours.__name__ else {}
        if surface.cdr_rank.__name__ == "<lambda>":
            options = {}
        a, b = theirs.cdr_rank(facts, QUERY, sets[0]), surface.cdr_rank(facts, QUERY, sets[1], **options)
        assert_same_ranking(a, b)
        assert_same_fact(
            theirs.cdr_score(facts[0], QUERY, sets[0]), surface.cdr_score(facts[0], QUERY, sets[1], **options)
        )


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_signatures_and_result_fields_are_the_packages(package):
    for name in ("cdr_rank", "cdr_score", "update_coverage_after_window"):
        found = [p for p in parameters(getattr(ours, name)) if p[0] != "semantics"]
        assert found == parameters(getattr(package, name))
    for name in ("CDRRankResult", "CDRScoredFact", "CoverageEntry", "ResidualItem"):
        a, b = getattr(package, name), getattr(ours, name)
        assert parameters(a) == parameters(b)
        assert list(a.__dataclass_fields__) == list(b.__dataclass_fields__)
    for name, value in vars(package.CoverageSet).items():
        if inspect.isfunction(value):
            found = [p for p in parameters(getattr(ours.CoverageSet, name)) if p[0] != "semantics"]
            assert found == parameters(value), name


def test_install_swaps_every_name_and_undo_puts_it_back(package):
    from crp import envelope, state
    from crp.envelope import cdr
    from crp.state import coverage_set

    places = [
        *((m, n) for m in (cdr, envelope) for n in ("cdr_rank", "cdr_score", "update_coverage_after_window")),
        *((m, "CoverageSet") for m in (cdr, coverage_set, state)),
    ]
    before = [getattr(m, n) for m, n in places]
    names = {m: set(vars(m)) for m, _ in places}
    for semantics in ours.SEMANTICS:
        undo = install(semantics)
        assert all(getattr(m, n) is not old for (m, n), old in zip(places, before, strict=True))
        with pytest.raises(RuntimeError, match="undo"):
            install()
        assert inspect.signature(cdr.cdr_rank) == inspect.signature(package.cdr_rank)
        made = state.CoverageSet("m")
        assert isinstance(made, package.CoverageSet)
        made.update([{"text": "a", "embedding": E1}], [{"text": "b", "embedding": E2}], 1)
        assert type(made.entries()[0]) is package.CoverageEntry
        assert type(made.residuals()[0]) is package.ResidualItem
        found = envelope.cdr_rank([fact(QUERY)], QUERY, made)
        assert type(found) is package.CDRRankResult
        assert type(found.ranked[0]) is package.CDRScoredFact
        assert type(envelope.cdr_score(fact(QUERY), QUERY, made)) is package.CDRScoredFact
        kept = pickle.dumps(made)
        assert type(pickle.loads(kept)) is state.CoverageSet
        envelope.imported_later = cdr.cdr_rank
        undo.undo()
        undo.undo()
        assert envelope.imported_later is package.cdr_rank
        del envelope.imported_later
        assert [getattr(m, n) for m, n in places] == before
        assert {m: set(vars(m)) for m, _ in places} == names
        assert type(pickle.loads(kept)) is package.CoverageSet
        assert pickle.loads(kept).entry_count() == 1
    with pytest.raises(KeyError), install():
        raise KeyError
    assert cdr.cdr_rank is package.cdr_rank


def test_install_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "crp", None)
    monkeypatch.setitem(sys.modules, "crp.envelope.cdr", None)
    with pytest.raises(ImportError, match="pip install"):
        install()
    with pytest.raises(ValueError, match="'spec', 'crprotocol-6'"):
        install("spec-7")


# The documented differences under "spec"


def test_spec_without_residual_and_with_positive_coverage_is_the_packages_formula(theirs):
    facts, query, entries, _ = random_task(5, 80, 32, 6, 0)
    a = theirs.cdr_rank(facts, query, fill(theirs, theirs.ResidualItem, entries, []))
    b = ours.cdr_rank(facts, query, covered(entries))
    assert len(a.ranked) > 30
    assert_same_ranking(a, b)


def test_spec_adds_no_pull_to_novelty_and_clamps_nothing():
    f = fact(E1)
    assert ours.cdr_score(f, QUERY, covered([(E1, 0.7)], [E1])).novelty == 0.2
    assert ours.cdr_score(f, QUERY, covered([(E1, 0.7)], [E1], SIX)).novelty == 0.4
    opposite = [-1.0, 0.0, 0.0]
    assert ours.cdr_score(f, QUERY, covered([(opposite, 0.7)], [])).novelty == 2.0
    assert ours.cdr_score(f, QUERY, covered([(opposite, 0.7)], [], SIX)).novelty == 1.0
    assert ours.cdr_score(f, QUERY, covered([(E1, 0.7)], [opposite])).novelty == 0.2
    assert ours.cdr_score(f, QUERY, covered([(E1, 0.7)], [opposite], SIX)).novelty == 0.0


def test_spec_does_not_pull_while_nothing_is_covered():
    assert ours.cdr_score(fact(E1), QUERY, covered(remains=[E1])).residual_pull == 0.0
    assert ours.cdr_score(fact(E1), QUERY, covered(remains=[E1], semantics=SIX)).residual_pull == 1.0


@pytest.mark.parametrize(
    ("vector", "message"),
    [([math.nan, 0, 0], r"facts\[1\].*not finite"), ([0.0, 0, 0], r"facts\[1\].*all zeros"),
     ([1.0, 0.0], r"facts\[1\].*expected"), (["a", "b", "c"], r"facts\[1\].*numbers")],
)  # fmt: skip
def test_spec_refuses_facts_that_have_no_cosine(vector, message):
    with pytest.raises(ValueError, match=message):
        ours.cdr_rank([fact(E1), fact(vector)], QUERY, covered())


def test_spec_refuses_what_would_silently_disable_the_formula():
    made = covered([(E1, 0.5)], model="m")
    before = state(made)
    for bad in (
        lambda: made.update([{"text": "b", "embedding": [1.0, 0.0]}]),
        lambda: made.update([{"text": "b", "embedding": [math.nan, 0.0, 0.0]}]),
        lambda: made.update([{"text": "b", "embedding": E2}, {"text": "c", "embedding": E2, "depth_weight": 1.5}]),
        lambda: made.update([{"text": "b", "embedding": E2, "depth_weight": math.nan}]),
        lambda: made.update([], [{"text": "b", "embedding": [1.0]}]),
        lambda: made.update([{"text": "b", "embedding": E2}], embedding_model_id="other"),
        lambda: made.set_residual([ours.ResidualItem("r", [0.0, 0.0, 0.0])]),
        lambda: made.novelty([1.0, 0.0]),
        lambda: ours.cdr_rank([fact(E1)], [1.0, 0.0], made),
        lambda: ours.cdr_rank([fact(E1)], [0.0, 0.0, 0.0], made),
        lambda: ours.cdr_rank([fact(E1)], QUERY, made, importance_fn=lambda f: -1.0),
        lambda: ours.cdr_rank([fact(E1)], QUERY, made, min_relevance=math.nan),
        lambda: ours.cdr_score(fact(E1), QUERY, made, importance_weight=math.inf),
    ):
        with pytest.raises(ValueError):  # noqa: PT011  # many messages; what counts is that nothing changed
            bad()
        assert state(made) == before
    with pytest.raises(EmbeddingModelMismatch, match="what is covered so far is of"):
        made.update([], embedding_model_id="other")
    with pytest.raises(ValueError, match="semantics"):
        ours.CoverageSet(semantics="none")


def test_spec_checks_the_packages_own_sets_too(package):
    made = package.CoverageSet()
    made.update([{"text": "short", "embedding": [1.0, 0.0]}], None, 1)
    with pytest.raises(ValueError, match=r"coverage entry 0 \('short'\): expected dimension 3, got 2"):
        ours.cdr_rank([fact(E1)], QUERY, made)


def test_spec_keeps_what_was_addressed_out_of_the_residual():
    whole = [
        {"id": str(i), "text": t, "embedding": v} for i, (t, v) in enumerate(zip("abc", (E1, E2, E3), strict=True))
    ]
    for semantics, expected in (("spec", ["2"]), (SIX, ["0", "2"])):
        made = ours.CoverageSet(semantics=semantics)
        made.update([whole[0]], whole, 1)
        made.update([whole[1]], whole, 2)
        assert [r.sub_query_id for r in made.residuals()] == expected, semantics
        made.update([whole[2]], None, 3)
        assert [r.sub_query_id for r in made.residuals()] == (expected if semantics == SIX else [])
        made.reset()
        made.update([], whole, 1)
        assert made.residual_count() == 3


def test_spec_is_exhausted_where_nothing_passes_or_scores_are_far_below_relevance():
    assert ours.cdr_rank([fact(E3)], QUERY, covered()).ckf_exhausted
    assert ours.cdr_rank([fact(QUERY)], QUERY, covered(), importance_fn=lambda f: 0.1).ckf_exhausted
    assert not ours.cdr_rank([fact(QUERY)], QUERY, covered([(QUERY, 1.0)])).ckf_exhausted
    assert not ours.cdr_rank([fact(E3)], QUERY, covered(semantics=SIX)).ckf_exhausted


@pytest.mark.parametrize("covers", [0, 1, 5])
def test_spec_is_the_reference(covers):
    facts, query, entries, residual = random_task(6, 60, 24, covers, 3)
    r = random.Random(1)
    weights = {id(f): r.choice([0.0, 0.5, 1.0, 2.0]) for f in facts}
    made = covered(entries, residual)
    session = reference.ReferenceSession(
        coverage_set=[reference.Entry(v, w) for v, w in entries],
        residual_set=[reference.SubQuery(str(i), "", "", v) for i, v in enumerate(residual)],
    )
    expected = reference.cdr_rank(
        [reference.Fact(f.embedding, importance_weight=weights[id(f)]) for f in facts], query, session
    )
    found = ours.cdr_rank(facts, query, made, importance_fn=lambda f: weights[id(f)])
    assert 20 < len(expected) < 60
    assert [x.fact.embedding for x in found.ranked] == [x.fact.embedding for x in expected]
    for a, b in zip(found.ranked, expected, strict=True):
        assert a.cdr_score == pytest.approx(b.score, abs=1e-12)
        assert a.novelty == pytest.approx(b.novelty, abs=1e-12)
        assert made.novelty(a.fact.embedding) == pytest.approx(b.novelty, abs=1e-12)
        alone = ours.cdr_score(a.fact, query, made, importance_weight=weights[id(a.fact)])
        assert alone == a  # one path, so to the last bit
    assert found.candidate_count == 60
    assert found.excluded_count == 60 - len(expected)


def test_excluded_facts_keep_novelty_one_and_pull_zero():
    for semantics in ours.SEMANTICS:
        made = covered([(E1, 0.7)], [E3], semantics)
        found = ours.cdr_score(fact([0.1, 0.0, 1.0]), QUERY, made, importance_weight=3.0)
        assert (found.excluded, found.novelty, found.residual_pull, found.cdr_score) == (True, 1.0, 0.0, 0.0)
        assert found.importance == 1.0
        assert found.relevance == pytest.approx(0.08 / math.sqrt(1.01))
        assert (
            ours.cdr_score(fact(None), QUERY, made) == ours.CDRScoredFact(ours_none := fact(None), excluded=True)
            or ours_none
        )
        assert ours.cdr_rank([fact([0.1, 0.0, 1.0]), fact(None)], QUERY, made).excluded_count == 2


def test_the_sets_semantics_hold_unless_the_call_names_others():
    made = covered([(E1, 0.7)], [E1], SIX)
    assert ours.cdr_rank([fact(E1)], QUERY, made).ranked[0].novelty == 0.4
    assert ours.cdr_rank([fact(E1)], QUERY, made, semantics="spec").ranked[0].novelty == 0.2
    with pytest.raises(ValueError, match="semantics"):
        ours.cdr_rank([], QUERY, made, semantics="none")


def test_spec_asks_coverage_sets_with_methods_of_their_own():
    found = ours.cdr_rank([fact(E3), fact(QUERY), fact(E1)], QUERY, Halved())
    assert [x.cdr_score for x in found.ranked] == [0.5, 0.45]


def test_unusual_magnitudes_have_their_cosine_under_spec():
    facts = [fact([x * 1e-250 for x in QUERY]), fact([x * 1e250 for x in E1])]
    assert [x.relevance for x in ours.cdr_rank(facts, QUERY, covered()).ranked] == pytest.approx([1.0, 0.8], abs=1e-15)


# Facts as one array


def test_a_fact_array_is_a_sequence_that_holds_its_embeddings():
    facts = [fact(list(E1)), fact(None), fact((0.8, 0.6, 0.0)), fact(np.array(E2, "f4")), fact([1.0]), fact("abc")]
    held = FactArray(facts)
    assert len(held) == 6
    assert held[2] is facts[2]
    assert list(held) == facts
    assert held[:2] == tuple(facts[:2])
    assert held.dim == 3
    assert held.rows.tolist() == [0, 2, 3]
    assert held.odd == {1: None, 4: [1.0], 5: "abc"}
    assert held.vector(3) == E2
    assert not held.matrix.flags.writeable
    facts[0].embedding[0] = -1.0
    assert held.vector(0) == E1, "a copy, taken once"
    assert ours.cdr_score(facts[0], QUERY, covered()).excluded, "a list is read again"
    assert FactArray.of(held) is held
    assert len(FactArray([])) == 0


def test_embeddings_are_found_where_the_package_finds_them():
    assert embedding_of(fact(E1)) is E1
    assert embedding_of(SimpleNamespace(_embedding=E2, embedding=E1)) is E2
    assert embedding_of(SimpleNamespace(_embedding=[], embedding=E1)) is E1
    assert embedding_of(SimpleNamespace(fact=fact(E1))) is E1
    assert embedding_of({"embedding": E1}) is None
    assert embedding_of(None) is None


def test_rows_are_packed_whatever_holds_them():
    torch = pytest.importorskip("torch")
    rows, good = pack_rows([E1, tuple(E2), np.array(E3, "f4"), torch.tensor(E1), [1, 2, True], ["a", 0, 0], "abc"], 3)
    assert good.tolist() == [True] * 5 + [False] * 2
    assert rows[:5].tolist() == [E1, E2, E3, E1, [1.0, 2.0, 1.0]]
    assert np.isnan(rows[5:]).all()


def test_the_constants_are_the_packages(theirs):
    cdr = import_module("crp.envelope.cdr")
    assert constants.CDR_MIN_RELEVANCE == cdr.CDR_MIN_RELEVANCE
    assert constants.EXHAUSTION_RATIO == cdr.CDR_EXHAUSTION_THRESHOLD
    assert _crprotocol_6.MIN_NOVELTY_FLOOR == cdr.MIN_NOVELTY_FLOOR
    assert _crprotocol_6.COVERAGE_PENALTY_CAP == cdr.COVERAGE_PENALTY_CAP
