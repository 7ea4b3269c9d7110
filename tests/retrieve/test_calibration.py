"""The mean and covariance of a store's unit rows, and the z-scores they give."""

from __future__ import annotations

from fractions import Fraction
from operator import mul

import numpy as np
import pytest

from cdr_kernel import FactStore
from cdr_kernel.retrieve._calibration import Moments, Sums

D = 12


def rows(n, seed=0):
    r = np.random.default_rng(seed)
    return ((r.standard_normal((n, D)) + 2.0) * r.random((n, 1)) * 9).astype(np.float32)


def store_of(vectors, dim=D):
    store = FactStore(dim, embedding_model="toy")
    add(store, vectors)
    return store


def add(store, vectors):
    sequence = store.view().sequence
    start = int(sequence[-1]) + 1 if len(sequence) else 0
    store.add([f"f{start + i}" for i in range(len(vectors))], ["x"] * len(vectors), vectors)


def plain(view):
    x = view.embeddings[view.alive].astype(np.float64)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return unit.mean(0), np.cov(unit.T, bias=True), unit


def check(calibration, view):
    mean, covariance, _ = plain(view)
    np.testing.assert_allclose(calibration.mean, mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(calibration.covariance, covariance, rtol=0, atol=1e-12)
    assert calibration.count == len(view)


def test_z_is_the_z_score_of_a_full_scan():
    store = store_of(rows(5000))
    view = store.view()
    vectors = np.random.default_rng(1).standard_normal((4, D)) * [[1], [1e-3], [1e30], [7]]
    scale, shift = Moments().of(view).scale_shift(vectors)
    cosines = plain(view)[2] @ (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).T
    z = (cosines - cosines.mean(0)) / cosines.std(0)
    np.testing.assert_allclose(cosines * scale + shift, z, rtol=0, atol=1e-9)


def test_it_follows_the_store_as_it_grows_shrinks_and_is_compacted():
    r = np.random.default_rng(2)
    store, moments = store_of(rows(100)), Moments()
    check(moments.of(store.view()), store.view())
    for step in range(40):
        add(store, rows(int(r.integers(1, 60)), seed=step + 9))
        alive = np.flatnonzero(store.view().alive)
        store.remove([store.view().id_of(row) for row in r.choice(alive, int(r.integers(0, 20)), replace=False)])
        if step == 30:
            store.compact()
        check(moments.of(store.view()), store.view())


def same(a, b):
    return (a.count, a.mean.tobytes(), a.covariance.tobytes()) == (b.count, b.mean.tobytes(), b.covariance.tobytes())


@pytest.mark.parametrize("spread", [1.0, 1e-6])
def test_neither_history_nor_order_nor_parts_change_a_bit(spread):
    r = np.random.default_rng(5)
    vectors = np.ones((900, D)) * 0.3 + spread * r.standard_normal((900, D))
    store = FactStore(D, embedding_model="toy", dtype="float64")
    add(store, vectors)
    moments = Moments()
    moments.of(store.view())
    store.remove([f"f{i}" for i in range(0, 300, 7)])
    moments.of(store.view())
    view = store.view()
    anew = Moments().of(view)
    assert same(moments.of(view), anew)
    rows = r.permutation(np.flatnonzero(view.alive))
    parts = Sums.zero(D)
    for some in np.array_split(rows, 5):
        part = Sums.zero(D)
        part.add(view, some)
        parts += part
    assert same(parts.calibration(), anew)
    again = FactStore(D, embedding_model="toy", dtype="float64")
    add(again, vectors[rows])
    assert same(Moments().of(again.view()), anew)


def test_the_callers_sums_are_its_own():
    store, moments = store_of(rows(50)), Moments()
    before = moments.of(store.view())
    moments.sums(store.view()).add(store.view(), np.arange(50))
    add(store, rows(1))
    store.remove(["f50"])
    assert same(moments.of(store.view()), before)


def test_an_older_view_has_its_own_calibration():
    store, moments = store_of(rows(50)), Moments()
    before = store.view()
    add(store, rows(50, seed=4))
    moments.of(store.view())
    check(moments.of(before), before)
    check(moments.of(store.view()), store.view())


def test_the_same_version_is_computed_once():
    store, moments = store_of(rows(50)), Moments()
    assert moments.of(store.view()) is moments.of(store.view())


def test_no_spread_gives_zero():
    same = np.tile(rows(1), (20, 1))
    for vectors in (same, same[:1]):
        scale, shift = Moments().of(store_of(vectors).view()).scale_shift(rows(3, seed=1))
        assert scale.tolist() == shift.tolist() == [0.0] * 3
    flat = store_of(np.array([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]]), dim=2)
    scale, shift = Moments().of(flat.view()).scale_shift([[1.0, 1.0], [1.0, 0.0]])
    assert (scale[0], shift[0]) == (0.0, 0.0)
    assert scale[1] > 0.0


def test_an_empty_store_gives_zero():
    store = store_of(rows(3))
    store.remove(["f0", "f1", "f2"])
    scale, shift = Moments().of(store.view()).scale_shift(rows(2))
    assert scale.tolist() == shift.tolist() == [0.0, 0.0]


def test_a_small_spread_is_not_lost():
    vectors = np.ones((200, D)) + 1e-6 * np.random.default_rng(0).standard_normal((200, D))
    store = FactStore(D, embedding_model="toy", dtype="float64")
    add(store, vectors)
    view = store.view()
    scale, shift = Moments().of(view).scale_shift(rows(2))
    unit = plain(view)[2]
    v = rows(2).astype(np.float64)
    cosines = unit @ (v / np.linalg.norm(v, axis=1, keepdims=True)).T
    z = (cosines - cosines.mean(0)) / cosines.std(0)
    np.testing.assert_allclose(cosines * scale + shift, z, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [[[0.0] * D], [[np.nan] * D], [[1.0] * (D - 1)]])
def test_bad_vectors_are_refused(bad):
    with pytest.raises(ValueError, match="vectors"):
        Moments().of(store_of(rows(3)).view()).scale_shift(bad)


def test_the_largest_products_are_summed_exactly():
    """Blocks of rows whose one coordinate is 1, and of rows whose low parts are as large as they get."""
    one = np.zeros((5000, 3))
    one[:, 1] = 1.0
    found = Moments().of(store_of(one, 3).view())
    assert found.mean.tolist() == [0.0, 1.0, 0.0]
    assert not found.covariance.any()
    x = np.sqrt(0.5) // 2.0**-20 * 2.0**-20 + 2.0**-21
    store = FactStore(3, embedding_model="toy", dtype="float64")
    add(store, np.tile([[x, np.sqrt(1.0 - x * x), 0.0], [x, -np.sqrt(1.0 - x * x), 0.0]], (2500, 1)))
    check(Moments().of(store.view()), store.view())


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-7])
def test_the_covariance_is_that_of_the_rounded_rows(spread):
    vectors = np.ones((40, 3)) * 0.5 + spread * np.random.default_rng(2).standard_normal((40, 3))
    store = FactStore(3, embedding_model="toy", dtype="float64")
    add(store, vectors)
    view = store.view()
    unit = view.embeddings / np.sqrt(view.squared_norms[:, None])
    high = np.rint(unit * 2.0**20)
    rounded = [[int(v) for v in row] for row in high * 2.0**21 + np.rint((unit * 2.0**20 - high) * 2.0**21)]
    columns = list(zip(*rounded, strict=True))
    expected = [
        [float(Fraction(40 * sum(map(mul, a, b)) - sum(a) * sum(b), 1600 * 2**82)) for b in columns] for a in columns
    ]
    found = Moments().of(view)
    np.testing.assert_allclose(found.covariance, expected, rtol=1e-9, atol=1e-15 * spread)
    assert (found.covariance == found.covariance.T).all()
    np.testing.assert_allclose(found.mean, [sum(a) / 40 / 2**41 for a in columns], rtol=1e-15, atol=0)
