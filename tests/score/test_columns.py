"""Columns in general: any scale, shift, weight, gate and addend, every implementation against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_kernel import _C, Columns, FactStore, Retriever, available_impls, cdr_score, reference
from cdr_kernel.retrieve._scan_index import ScanIndex
from cdr_kernel.score._bound_search import bounded_search
from cdr_kernel.score._cdr_score import Factors
from cdr_kernel.score._columns import COVERAGE, Addend
from cdr_kernel.validation._arrays import check_rows

NUMBERS = ("score", "score_without_guard", "relevance", "coverage", "residual_pull", "novelty")


def some_world(r, n, dim, residuals, dtype):
    """Facts, columns and factors: cosines that stand on gates, equal rows, scales of either sign, zero among them."""
    rows = r.integers(-2, 3, (n, dim)).astype(np.float64) if r.random() < 0.4 else r.standard_normal((n, dim))
    rows[~rows.any(axis=1), 0] = 1.0
    if n > 3:
        rows[n // 2] = rows[0]
    rows = rows.astype(dtype)
    count = 2 + residuals
    vectors = r.integers(-2, 3, (count, dim)).astype(np.float64) + np.eye(count, dim) * 0.5
    vectors[~vectors.any(axis=1), 0] = 1.0
    scale = r.choice([1.0, 0.3, 7.5, -2.0, 0.0, 1e3], count)
    shift = r.choice([0.0, -1.5, 0.25, 3.0], count)
    weight = r.choice([1.0, 0.35, 0.0, 2.0], count)
    pairs = [None] * count
    for j in range(count):
        if j != COVERAGE and n and r.random() < 0.6:
            at = np.flatnonzero(r.random(n) < 0.3)
            pairs[j] = (at, r.choice([0.25, 1.0, -2.0, 4.0], len(at)) * r.random(len(at)).round(1))
    gate = np.where(r.random(count) < 0.4, np.inf, r.choice([-1.0, 0.0, 0.5, 2.0], count))
    if r.random() < 0.1:
        gate[0] = -np.inf
    addend = Addend.of(pairs)
    if n:  # gates that are reached exactly
        for j in range(count):
            if j != COVERAGE and r.random() < 0.4:
                column = reference.Column(vectors[j].tolist(), scale[j], shift[j], addend=as_dict(addend, j))
                row = int(r.integers(n))
                gate[j] = reference.column_value(reference.Fact(rows[row].tolist()), row, column)
    columns = Columns(
        query=vectors[0],
        coverage=vectors[1] / 4 if r.random() < 0.7 else None,
        residual=vectors[2:],
        scale=scale,
        shift=shift,
        weight=weight,
        gate=gate,
        clamp_novelty=bool(r.random() < 0.5),
        gate_only=r.random(count) < 0.3,
        addend=addend if r.random() < 0.8 else None,
        factors_above_zero=bool(r.random() < 0.5),
    )
    importance, multiplier = r.choice([0.0, 0.5, 1.0, 3.0], n), r.choice([0.5, 1.0, 2.0], n)
    return rows, columns, importance, multiplier, r.integers(0, 8, n).astype(np.int32)


def as_dict(addend, j):
    rows, values = addend.column(j)
    return dict(zip(rows.tolist(), values.tolist(), strict=True))


def truth(rows, columns, importance, multiplier, overlap):
    c = columns
    listed = [
        reference.Column(
            (c.query if j == 0 else c.residual[j - 2]).tolist(),
            float(c.scale[j]),
            float(c.shift[j]),
            float(c.weight[j]),
            float(c.gate[j]),
            bool(c.gate_only[j]),
            {} if c.addend is None else as_dict(c.addend, j),
        )
        for j in range(len(c.scale))
        if j != COVERAGE
    ]
    facts = [
        reference.Fact(row.astype(np.float64).tolist(), "", float(i), float(m), id=str(n))
        for n, (row, i, m) in enumerate(zip(rows, importance, multiplier, strict=True))
    ]
    return reference.column_rank(
        facts,
        listed[0],
        listed[1:],
        coverage=None if c.coverage is None else c.coverage.tolist(),
        coverage_scale=float(c.scale[COVERAGE]),
        coverage_shift=float(c.shift[COVERAGE]),
        clamp_novelty=c.clamp_novelty,
        factors_above_zero=c.factors_above_zero,
        overlap=dict(enumerate(overlap.tolist())),
    )


WORLDS = {
    "seed": st.integers(0, 2**32 - 1),
    "n": st.sampled_from([0, 1, 7, 40]),
    "dim": st.sampled_from([1, 3, 8, 17]),
    "residuals": st.integers(0, 4),
    "dtype": st.sampled_from(["float16", "float32", "float64"]),
}


@settings(derandomize=True, deadline=None, max_examples=250)
@given(**WORLDS, k=st.sampled_from([None, 0, 1, 5, 100]))
def test_every_implementation_is_the_reference(seed, n, dim, residuals, dtype, k):
    rows, columns, importance, multiplier, overlap = some_world(np.random.default_rng(seed), n, dim, residuals, dtype)
    expected = truth(rows, columns, importance, multiplier, overlap)
    factors = {"importance": importance, "multiplier": multiplier, "ngram_overlap": overlap}
    first = None
    for impl in available_impls():
        found = cdr_score(rows, columns, k=k, impl=impl, **factors)
        if first is None:
            first = found
        for name in (*NUMBERS, "rows"):
            assert getattr(found, name).tobytes() == getattr(first, name).tobytes(), name
    if n:
        norms, _ = check_rows((rows,))
        (bounded,) = bounded_search("torch", (rows,), norms, [columns], None, [Factors(*factors.values())], k)
        assert set(first.rows.tolist()) <= set(bounded.tolist())
    by_row = {int(s.fact.id): s for s in expected}
    ids = first.rows.tolist()
    assert set(ids) <= set(by_row)
    assert len(ids) == (len(expected) if k is None else min(k, len(expected)))
    size = 1e-12 * (1.0 + np.abs(columns.scale).max() + np.abs(columns.shift).max()) * 8
    for i, row in enumerate(ids):
        strength = 1.0 + importance[row] * multiplier[row]
        for name in NUMBERS:
            assert abs(getattr(first, name)[i] - getattr(by_row[row], name)) <= size * strength, name
    if k is None:
        assert ids == sorted(ids)
        return
    margin = size * 7
    order = [s.score for s in expected]
    for place, row in enumerate(ids):
        assert abs(by_row[row].score - order[place]) <= margin
    left = [s.score for s in expected if int(s.fact.id) not in set(ids)]
    if ids and left:
        assert max(left) <= min(by_row[row].score for row in ids) + margin


@settings(derandomize=True, deadline=None, max_examples=60)
@given(**WORLDS)
def test_values_and_candidates_are_those_of_the_scores(seed, n, dim, residuals, dtype):
    rows, columns, *_ = some_world(np.random.default_rng(seed), n, dim, residuals, dtype)
    norms, _ = check_rows((rows,))
    values = _C.column_values((rows,), norms, columns.compiled)
    assert values.shape == (n, 1 + residuals)
    passing = np.flatnonzero((values >= np.delete(columns.gate, COVERAGE)).any(axis=1))
    scores = cdr_score(rows, columns)
    assert scores.rows.tolist() == passing.tolist()
    assert scores.relevance.tobytes() == values[passing, 0].tobytes()
    store = FactStore(dim, embedding_model="toy", dtype=dtype)
    store.add([str(i) for i in range(n)], ["x"] * n, rows if n else np.zeros((0, dim)))
    for kind in ("scan", "flat"):
        assert Retriever(store, kind).candidates(columns, store.view()).tolist() == passing.tolist()
    if n:
        codes = ScanIndex.build(store.view())
        if columns.gated_addend:
            with pytest.raises(ValueError, match="no addend in a gated column"):
                codes.candidates(columns, store.view())
        else:
            assert codes.candidates(columns, store.view()).tolist() == passing.tolist()
        if not columns.plain and not columns.gated_addend:
            with pytest.raises(ValueError, match="expected all of them to score"):
                codes.top(columns, store.view(), None, 1)


def test_addends_belong_to_rows_and_not_to_places_in_a_selection():
    rows = np.eye(4, dtype=np.float32)
    addend = Addend.of([(np.array([2]), np.array([5.0])), None])
    columns = Columns([1.0, 1, 1, 1], None, [], *([1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, np.inf]), addend=addend)
    for impl in available_impls():
        assert cdr_score(rows, columns, rows=[3, 2, 1], impl=impl).rows.tolist() == [2]
        assert cdr_score(rows, columns, rows=[2, 0], k=1, impl=impl).score.tolist() == [5.5]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"gate_only": [True]}, "gate_only: expected 2 bools"),
        ({"gate_only": [0.0, 1.0]}, "gate_only: expected 2 bools"),
        ({"addend": Addend.of([(np.array([0]), np.array([np.nan])), None])}, "addend: expected finite"),
        ({"addend": Addend.of([None, (np.array([0]), np.array([1.0]))])}, "none for coverage"),
        ({"addend": Addend.of([(np.array([1, 1]), np.array([1.0, 2.0])), None])}, "expected to ascend"),
        ({"addend": Addend.of([None])}, "addend_starts"),
    ],
)
def test_bad_settings_are_refused(keywords, message):
    ones = [1.0, 1.0]
    with pytest.raises(ValueError, match=message):
        Columns([1.0, 0.0], None, [], ones, ones, ones, ones, **keywords)


def test_bounds_below_zero_are_those_of_scores_that_no_factor_moves():
    r = np.random.default_rng(2)
    rows = r.standard_normal((500, 6))
    importance = np.ones(500)
    columns = Columns(
        rows[7], None, [], [1.0, 1.0], [-3.0, 0.0], [1.0, 1.0], [-np.inf, np.inf],
        gate_only=[True, False], factors_above_zero=True,
    )  # fmt: skip
    scoring = Columns(
        rows[7], None, rows[7:8], *([1.0] * 3, [-3.0, 0.0, -3.0], [1.0] * 3, [-np.inf, np.inf, np.inf]),
        gate_only=[True, False, False], factors_above_zero=True,
    )  # fmt: skip
    importance[7] = 5.0
    norms, _ = check_rows((rows,))
    assert cdr_score(rows, scoring, importance=importance, k=1).rows.tolist() == [7]
    (found,) = bounded_search("torch", (rows,), norms, [scoring], None, [Factors(importance, None, None)], 1)
    assert 7 in found.tolist()
    for impl in available_impls():
        assert cdr_score(rows, scoring, importance=importance, k=1, impl=impl).rows.tolist() == [7]
        assert cdr_score(rows, columns, k=1, impl=impl).score.tolist() == [0.0]  # no column scores
