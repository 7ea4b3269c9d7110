"""The scan index finds what the exact routine finds, whatever the rows, the columns and the rotation are."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from fact_stores import flip, reseal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdr_kernel import _C, Columns, DamagedFileError, FactStore
from cdr_kernel.retrieve import _scan_index as scan_module
from cdr_kernel.retrieve._scan_index import ScanIndex
from cdr_kernel.score._columns import coverage_centroid
from cdr_kernel.spec.constants import COVERAGE_PENALTY_CAP, MIN_NOVELTY_FLOOR, NGRAM_PENALTY_CAP, NGRAM_PENALTY_STEP

FUZZ = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example]
)
EXAMPLES = int(os.environ.get("CDR_LAW_EXAMPLES", "20000"))
ROWS = ("spread", "clustered", "last", "huge", "duplicates", "sparse", "near", "tiny")
ROTATIONS = ("pca", "random", "gaussian", "zero", "large", "identity")


@pytest.fixture(autouse=True)
def _as_before():
    level = _C.simd()
    yield
    _C.set_simd(level)
    _C.set_threads(0)


def make_rows(kind, n, dim, r, query):
    x = r.standard_normal((n, dim))
    if kind == "clustered":
        centers = r.standard_normal((5, dim)) * 2
        x = x * np.linspace(1, 0.05, dim) + centers[r.integers(0, 5, n)]
    elif kind == "last":  # all energy where the sample of the rotation says there is none
        x[:, : dim * 9 // 10] *= 1e-4
        x[: n // 2] = r.standard_normal((n // 2, dim)) * np.geomspace(1, 1e-6, dim)
    elif kind == "huge":
        x[np.arange(n), r.integers(0, dim, n)] = r.choice([-1.0, 1.0], n) * 1e4
    elif kind == "duplicates":
        x = x[r.integers(0, min(n, 7), n)] if n else x
    elif kind == "sparse":
        x *= r.random((n, dim)) < 2.0 / dim
        x[np.arange(n), r.integers(0, dim, n)] += 1.0
    elif kind == "near":
        x = query + x * r.choice([1e-6, 1e-3, 0.1], (n, 1))
    elif kind == "tiny":
        x *= 2.0 ** r.integers(-10, 3, (n, 1))
    x[~x.any(axis=1), 0] = 1.0
    if n > 3:
        x[r.integers(0, n)] = query
        x[r.integers(0, n)] = -query
    return x


def make_store(x, dtype="float32", removed=()):
    store = FactStore(x.shape[1], embedding_model="m1", dtype=dtype)
    store.add([f"f{i}" for i in range(len(x))], [""] * len(x), x)
    store.remove([f"f{i}" for i in removed])
    return store


def make_rotation(kind, dim, r):
    if kind == "pca":
        return None
    if kind == "identity":
        return np.eye(dim)
    g = r.standard_normal((dim, dim))
    if kind == "random":
        return np.linalg.qr(g)[0]
    return g * {"gaussian": 1.0, "zero": 0.0, "large": 1e15}[kind]


def make_columns(r, dim, gates, *, residuals=0, coverage=False, settings_off=False, like=None):
    """Columns whose first `gates` of query and residuals are gates at random values or at values that occur."""
    count = 2 + residuals
    vectors = r.standard_normal((count, dim))
    if like is not None and len(like):
        vectors[2:] = like[r.integers(0, len(like), residuals)] + 0.3 * vectors[2:]
    scale, shift, weight = np.ones(count), np.zeros(count), np.ones(count)
    if settings_off:
        scale = r.choice([1.0, -1.0, 2.5, 1e-3, 0.0, -7.0], count)
        shift = r.choice([0.0, 0.3, -1.0, 5.0], count)
        weight = r.choice([1.0, 0.5, -1.0, 0.0, 3.0], count)
    gate = np.full(count, np.inf)
    for j in [0, *range(2, count)][:gates]:
        gate[j] = shift[j] + scale[j] * r.choice([-1.0, -0.3, 0.0, 0.2, 0.55, 0.9, 1.0])
    return Columns(
        query=vectors[0], coverage=vectors[1] / np.linalg.norm(vectors[1]) if coverage else None,
        residual=vectors[2:], scale=scale, shift=shift, weight=weight, gate=gate,
    )  # fmt: skip


def covered(r, dim, count):
    """The coverage of so many entries of six vectors, half of them the opposites of the others: little is left of it.
    None where the depths cover nothing."""
    vectors = r.standard_normal((6, dim))
    vectors[3:] = -vectors[:3]
    which = np.arange(count) % 6 if r.random() < 0.5 else np.sort(r.integers(0, 6, count))
    depths = np.geomspace(1.0, 1e-300, count) if r.random() < 0.5 else np.full(count, r.choice([0.15, 0.9, 5e-324]))
    return coverage_centroid(vectors[which], depths)


def exact(view, columns, rows=None):
    return _C.gate_rows(view.blocks, view.squared_norms, columns.compiled, rows, view.alive)


def exact_scores(view, columns, rows, importance=None, multiplier=None, overlap=None):
    return _C.score_rows(
        view.blocks, view.squared_norms, columns.compiled, rows, importance, multiplier, overlap,
        COVERAGE_PENALTY_CAP, MIN_NOVELTY_FLOOR, NGRAM_PENALTY_STEP, NGRAM_PENALTY_CAP,
    )[0]  # fmt: skip


def at_an_occurring_value(r, view, columns):
    """The same columns with the query's gate at a value that a row has, or its neighbours."""
    row = r.integers(0, view.rows, 1)
    values = _C.score_rows(
        view.blocks, view.squared_norms, columns.compiled, row, None, None, None, 0.8, 0.2, 0.15, 0.8
    )
    gate = np.array(columns.gate)
    gate[0] = np.nextafter(values[2][0], r.choice([-np.inf, values[2][0], np.inf]))
    c = columns
    return Columns(c.query, c.coverage, c.residual, c.scale, c.shift, c.weight, gate)


def check_top(index, view, columns, rows, k, factors):
    found = index.top(columns, view, rows, k, *factors)
    assert np.all(np.diff(found) > 0)
    among = np.flatnonzero(view.alive) if rows is None else np.arange(len(rows))
    assert np.isin(found, among).all()
    row_numbers = np.arange(view.rows) if rows is None else rows
    scores = exact_scores(view, columns, row_numbers, *factors)[among]
    if k and len(among):
        needed = among[scores >= np.sort(scores)[::-1][min(k, len(among)) - 1]]
        assert np.isin(needed, found).all()
    return found


def decoded(index, run):
    """The rows that codes stand for, float64."""
    first, second = min(64, index.dim), min(128, index.dim)
    a, b, c, _ = run.arrays
    codes = np.hstack([a[:, :first], b[:, : second - first], c[:, : index.dim - second]])
    values = codes * run.numbers[:, 3:4].astype(np.float64)
    return index._mean + (values * index._weight) @ index._matrix.T.astype(np.float64)


def aimed(r, view, index):
    """Columns that point from what a code stands for to what its row is, with the gate just under its value."""
    (run,) = index._state.runs
    row = int(r.choice(np.flatnonzero(view.alive[: len(run)])))
    unit = view.embeddings[row].astype(np.float64) / np.sqrt(view.squared_norms[row])
    error = unit - decoded(index, run)[row]
    if not error.any():
        error[0] = 1.0
    compiled = Columns.spec(error).compiled
    value = _C.score_rows(
        view.blocks, view.squared_norms, compiled, np.array([row]), None, None, None, 0.8, 0.2, 0.15, 0.8
    )[2][0]
    return Columns.spec(error, min_relevance=value - 1e-12)


def fuzz(seed, n, dim, kind, dtype, rotation, gates, residuals, settings_off, coded, entries=0, share_of_rho=1.0):
    r = np.random.default_rng(seed)
    query = r.standard_normal(dim)
    x = make_rows(kind, n, dim, r, query)
    store = FactStore(dim, embedding_model="m1", dtype=dtype)
    first = int(n * coded)
    ids = [f"f{i}" for i in range(n)]
    store.add(ids[:first], [""] * first, x[:first])
    index = ScanIndex.build(store.view(), sample=500, seed=seed, rotation=make_rotation(rotation, dim, r))
    store.add(ids[first:], [""] * (n - first), x[first:])
    store.remove([ids[i] for i in np.flatnonzero(r.random(n) < 0.05)])
    view = store.view()
    columns = make_columns(r, dim, gates, residuals=residuals, coverage=True, settings_off=settings_off, like=x)
    if entries:
        columns = replace(columns, coverage=covered(r, dim, entries))
    several = [columns, make_columns(r, dim, 1), make_columns(r, dim, 1, residuals=1)]
    if n:
        several.append(at_an_occurring_value(r, view, columns))
        several.append(at_an_occurring_value(r, view, make_columns(r, dim, 1)))
    if view.alive[: index.rows].any():
        several.append(aimed(r, view, index))
        index._state.runs[0].numbers[:, 0] *= share_of_rho
    expected = [exact(view, c) for c in several]
    overlap = r.integers(0, 8, n).astype(np.int32)
    factors = (r.choice([0.0, 0.3, 1.0, 2.0], n), r.random(n), overlap)
    rows = expected[0]
    given = tuple(np.ascontiguousarray(f[rows]) for f in factors)
    k = int(r.integers(0, 40))
    some = view.select(r.random(len(view)) < r.choice([0.02, 0.5]))
    expected_of_some = [exact(some, c) for c in several]
    for level in _C.simd_levels():
        _C.set_simd(level)
        for threads in (1, 2, 7):
            _C.set_threads(threads)
            for c, want in zip(several, expected, strict=True):
                assert np.array_equal(index.candidates(c, view), want)
            for found, want in zip(index.candidates_each(several, view), expected, strict=True):
                assert np.array_equal(found, want)
            check_top(index, view, columns, rows, k, given)
            check_top(index, view, columns, None, k, factors)
            for found, want in zip(index.candidates_each(several, some), expected_of_some, strict=True):
                assert np.array_equal(found, want)
            check_top(index, some, columns, None, k, factors)
    old = view
    index.extend(view)
    assert index.rows == view.rows
    store.add(["new"], [""], query[None])
    index.extend(store.view())
    assert np.array_equal(index.candidates(columns, old), expected[0])  # a view from before the last codes
    check_top(index, old, columns, None, k, factors)
    assert np.array_equal(index.candidates(columns, store.view()), exact(store.view(), columns))


CASES = {
    "seed": st.integers(0, 2**32 - 1),
    "n": st.one_of(st.integers(0, 40), st.integers(0, 5000)),
    "dim": st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 160, 257, 384])),
    "kind": st.sampled_from(ROWS),
    "dtype": st.sampled_from(["float16", "float32", "float64"]),
    "rotation": st.sampled_from(ROTATIONS),
    "gates": st.integers(1, 4),
    "residuals": st.integers(0, 14),
    "settings_off": st.booleans(),
    "coded": st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.0]),
    "entries": st.sampled_from([0, 0, 0, 0, 0, 0, 20, 1000, 10_000]),
}


@settings(FUZZ, max_examples=100)
@given(**CASES)
def test_it_finds_what_the_exact_routine_finds(**case):
    fuzz(**case)


@pytest.mark.slow
@settings(FUZZ, max_examples=EXAMPLES)
@given(**CASES)
def test_it_finds_what_the_exact_routine_finds_20_000_times(**case):
    fuzz(**case)


@pytest.mark.parametrize("dim", [1, 2, 31, 128, 1000, 4096])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_dimension(dim, dtype):
    r = np.random.default_rng(dim)
    query = r.standard_normal(dim)
    near = r.random((120, 1)) * query + r.standard_normal((120, dim))
    view = make_store(near, dtype, removed=[3]).view()
    index = ScanIndex.build(view, rotation=np.eye(dim) if dim > 1000 else None)
    several = [Columns.spec(query, min_relevance=gate) for gate in (-1.0, 0.0, 0.1, 0.5, 0.9)]
    for columns in several:
        assert np.array_equal(index.candidates(columns, view), exact(view, columns))
        check_top(index, view, columns, None, 5, ())
    for level in _C.simd_levels():
        _C.set_simd(level)
        for columns, (rows, low, high) in zip(several, index.bounded_each(several, view), strict=True):
            assert np.array_equal(rows, exact(view, columns))
            values = _C.column_values(view.blocks, view.squared_norms, columns.compiled, rows)[:, 0]
            assert (low <= values).all()
            assert (values <= high).all()


@pytest.mark.parametrize("rotation", [*ROTATIONS, "reversed"])
def test_a_rotation_changes_nothing_but_speed(rotation):
    r = np.random.default_rng(1)
    query = r.standard_normal(200)
    view = make_store(make_rows("clustered", 3000, 200, r, query)).view()
    index = ScanIndex.build(view, rotation=make_rotation("pca" if rotation == "reversed" else rotation, 200, r))
    if rotation == "reversed":
        index = ScanIndex.build(view, rotation=index._matrix[:, ::-1])
    for gate in np.linspace(-0.5, 0.9, 15):
        columns = Columns.spec(query, min_relevance=gate)
        assert np.array_equal(index.candidates(columns, view), exact(view, columns))
        check_top(index, view, columns, None, 20, ())


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind != "near"])  # rho is next to nothing there
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_smaller_rho_is_found_out(kind, share):
    case = {
        "seed": 1, "n": 200, "dim": 150, "kind": kind, "dtype": "float32", "rotation": "pca", "gates": 1,
        "residuals": 2, "settings_off": False, "coded": 1.0, "share_of_rho": share,
    }  # fmt: skip
    if share == 1.0:
        fuzz(**case)
    else:
        with pytest.raises(AssertionError):
            fuzz(**case)


def test_rho_is_hardly_larger_than_the_error():
    r = np.random.default_rng(2)
    view = make_store(make_rows("clustered", 300, 200, r, r.standard_normal(200))).view()
    index = ScanIndex.build(view)
    (run,) = index._state.runs
    error = view.embeddings / np.sqrt(view.squared_norms[:, None]) - decoded(index, run)
    share = np.linalg.norm(error, axis=1) / run.numbers[:, 0]
    assert (share <= 1.0).all()
    assert (share > 0.999).all()


def test_a_gate_among_equal_values():
    view = make_store(np.tile([1.0, 2.0, 3.0], (1000, 1)) * np.arange(1, 1001)[:, None]).view()
    index = ScanIndex.build(view)
    for gate in (1.0, np.nextafter(1.0, 0.0), np.nextafter(1.0, 2.0)):
        columns = Columns.spec([1.0, 2.0, 3.0], min_relevance=gate)
        assert np.array_equal(index.candidates(columns, view), exact(view, columns))
    view = make_store(np.tile([11.0, 15.0, 7.0, 2.0, 1.0], (50, 1))).view()  # cosine 11/20 to the first axis
    columns = Columns.spec(np.eye(5)[0], min_relevance=0.55)
    assert len(ScanIndex.build(view).candidates(columns, view)) == 50
    assert len(ScanIndex.build(view).top(columns, view, None, 3)) == 50  # all tie


def test_no_gate_every_gate_and_none():
    r = np.random.default_rng(3)
    view = make_store(r.standard_normal((500, 10)), removed=[0, 499]).view()
    index = ScanIndex.build(view)
    everything = Columns.spec(r.standard_normal(10), min_relevance=-np.inf)
    assert index.candidates(everything, view).tolist() == list(range(1, 499))
    assert len(index.candidates(Columns.spec(everything.query, min_relevance=np.inf), view)) == 0
    flat = Columns(everything.query, None, [], [0.0, 1.0], [0.3, 0.0], [1.0, 1.0], [0.3, np.inf])
    assert index.candidates(flat, view).tolist() == list(range(1, 499))
    above = Columns(everything.query, None, [], [0.0, 1.0], [0.3, 0.0], [1.0, 1.0], [0.31, np.inf])
    assert len(index.candidates(above, view)) == 0
    assert index.candidates_each([], view) == []


@pytest.mark.parametrize("scale", [5e-324, -1e-323, 1e-300, 1e-20, 1e20, 1e300, -1e300])
def test_settings_far_out(scale):
    r = np.random.default_rng(4)
    view = make_store(r.standard_normal((400, 20))).view()
    index = ScanIndex.build(view)
    v = r.standard_normal((3, 20))
    for shift, cosine in ((0.0, 0.1), (1.0, 0.1), (1e300, 0.0)):
        for coverage in (v[1], v[1] * 1e-300, v[1] * 1e250, np.zeros(20)):
            columns = Columns(
                v[0], coverage, v[2:], [scale, 1.0, 1.0], [shift, 0.0, 0.0], [1.0, 1.0, 1.0],
                [shift + scale * cosine, np.inf, np.inf],
            )  # fmt: skip
            for found in index.candidates_each([columns], view) + index.candidates_each([columns] * 4, view):
                assert np.array_equal(found, exact(view, columns))
            check_top(index, view, columns, None, 7, ())


def test_top_keeps_little():
    r = np.random.default_rng(5)
    query = r.standard_normal(64)
    view = make_store(make_rows("clustered", 20000, 64, r, query)).view()
    index = ScanIndex.build(view)
    columns = Columns.spec(query, min_relevance=-np.inf, residual=r.standard_normal((3, 64)), first_window_pull=True)
    found = check_top(index, view, columns, None, 10, ())
    assert 10 <= len(found) < 200
    for threads in (1, 2, 7):
        _C.set_threads(threads)
        assert np.array_equal(index.top(columns, view, None, 10), found)
    assert len(index.top(columns, view, None, 0)) == 0
    assert len(index.top(columns, view, None, 10**9)) == 20000
    assert len(index.top(columns, view, np.zeros(0, np.int64), 5)) == 0
    assert index.top(columns, view, np.array([7, 7, 7]), 1).tolist() == [0, 1, 2]


def test_an_empty_store_grows():
    store = FactStore(5, embedding_model="m1")
    index = ScanIndex.build(store.view())
    columns = Columns.spec(np.ones(5), min_relevance=0.2)
    assert index.rows == 0
    assert len(index.candidates(columns, store.view())) == 0
    r = np.random.default_rng(6)
    for i in range(30):
        store.add([f"{i}-{j}" for j in range(i)], [""] * i, r.standard_normal((i, 5)))
        view = store.view()
        assert np.array_equal(index.candidates(columns, view), exact(view, columns))
        if i % 3:
            assert index.extend(view) == view.rows - index.rows or index.rows == view.rows
            assert np.array_equal(index.candidates(columns, view), exact(view, columns))
    assert len(index._state.runs) < 10
    assert index.extend(view) == 0


def test_searches_while_it_grows():
    r = np.random.default_rng(7)
    store = make_store(r.standard_normal((2000, 20)))
    index = ScanIndex.build(store.view())
    columns = Columns.spec(r.standard_normal(20), min_relevance=0.1)
    wrong, done = [], threading.Event()

    def search():
        while not done.is_set():
            view = store.view()
            if not np.array_equal(index.candidates(columns, view), exact(view, columns)):
                wrong.append(view.rows)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for t in threads:
        t.start()
    for i in range(30):
        store.add([f"n{i}-{j}" for j in range(50)], [""] * 50, r.standard_normal((50, 20)))
        index.extend(store.view())
    done.set()
    for t in threads:
        t.join()
    assert not wrong


def saved(store, folder):
    """The store as it is loaded from a folder again."""
    store.save(folder)
    return FactStore.load(folder)


@pytest.mark.parametrize("n", [0, 1, 700])
def test_save_and_load(n, tmp_path):
    r = np.random.default_rng(8)
    store = make_store(r.standard_normal((n, 150)), "float16")
    store.add(["more", "of it"], [""] * 2, r.standard_normal((2, 150)))
    store = saved(store, tmp_path)
    index = ScanIndex.build(store.view())
    index.save(tmp_path / "a", store.view())
    index.save(tmp_path / "a", store.view())
    assert len(list((tmp_path / "a").glob("scan-*"))) == 1
    store.add(["last"], [""], r.standard_normal((1, 150)))
    view = store.view()
    again = ScanIndex.load(tmp_path / "a", view)
    assert again.rows == n + 2
    assert again.nbytes == index.nbytes
    columns = Columns.spec(r.standard_normal(150), min_relevance=0.02)
    for _ in range(2):
        assert np.array_equal(again.candidates(columns, view), exact(view, columns))
        assert np.array_equal(again.top(columns, view, None, 4), index.top(columns, view, None, 4))
        again.extend(view)
        index.extend(view)
    with pytest.raises(ValueError, match=f"found {n + 3} rows of which {n + 2} were saved"):
        index.save(tmp_path / "a", view)


def test_codes_are_of_one_saved_store_alone(tmp_path):
    """Other rows, in none of which a sample or the norms would show it: every number is 1 or -1."""
    rows = np.random.default_rng(3).choice([-1.0, 1.0], (700, 64))
    first = saved(make_store(rows), tmp_path)
    index = ScanIndex.build(first.view())
    index.save(tmp_path / "codes", first.view())
    assert ScanIndex.load(tmp_path / "codes", first.view()).rows == 700
    rows[301] *= -1
    second = saved(make_store(rows), tmp_path)
    for other in (second.view(), make_store(rows).view()):
        with pytest.raises(ValueError, match="the codes are of other facts than the store's"):
            ScanIndex.load(tmp_path / "codes", other)
    with pytest.raises(ValueError, match="expected codes of a store as it was loaded from a folder, found 0 rows"):
        ScanIndex(np.eye(64, dtype=np.float32), np.zeros(64, np.float32), np.ones(64, np.float32), first.view()).save(
            tmp_path / "codes", make_store(rows).view()
        )
    with pytest.raises(ValueError, match="the store was replaced since these codes were made: load it again"):
        index.save(tmp_path, first.view())
    assert not (tmp_path / "scan.json").exists()


def test_damaged_files(tmp_path):
    r = np.random.default_rng(9)
    view = saved(make_store(r.standard_normal((50, 130))), tmp_path / "store").view()
    ScanIndex.build(view).save(tmp_path, view)
    path = tmp_path / "scan.json"
    manifest = json.loads(path.read_text())
    with pytest.raises(FileNotFoundError, match="no scan index"):
        ScanIndex.load(tmp_path / "none", view)
    for change, message in (
        ({"format": "x"}, "format 'cdr-scan-index'"),
        ({"format_version": 99}, "format version 99"),
        ({"dim": 131}, r"found 50 of \[131\]"),
        ({"rows": 51}, "found 51"),
        ({"rows": 49}, r"expected int8 \[49, 64\], found int8 \[50, 64\]"),
        ({"rows": "50"}, "expected rows to be int"),
        ({"store": "0" * 32}, "other facts"),
        ({"data": "../x"}, "subfolder"),
        ({"alpha": "x"}, "alpha"),
    ):
        reseal(path, **change)
        with pytest.raises(ValueError, match=message):
            ScanIndex.load(tmp_path, view)
        path.write_text(json.dumps(manifest))
    third = tmp_path / manifest["data"] / "third.npy"
    flip(third)
    with pytest.raises(DamagedFileError, match=r"third\.npy: block 0 is not as it was written"):
        ScanIndex.load(tmp_path, view)
    np.save(third, np.zeros((50, 31), np.int8))
    reseal(path)
    with pytest.raises(DamagedFileError, match=r"third\.npy: expected int8"):
        ScanIndex.load(tmp_path, view)
    third.write_bytes(b"\x93NUMPY")
    reseal(path)
    with pytest.raises(DamagedFileError, match=r"third\.npy: not a readable array"):
        ScanIndex.load(tmp_path, view)


def test_a_load_while_another_saves(tmp_path, monkeypatch):
    view = saved(make_store(np.random.default_rng(10).standard_normal((20, 4))), tmp_path).view()
    index = ScanIndex.build(view)
    index.save(tmp_path, view)
    real = scan_module.Files

    def save_first(*arguments):
        monkeypatch.undo()
        index.save(tmp_path, view)
        return real(*arguments)

    monkeypatch.setattr(scan_module, "Files", save_first)
    assert ScanIndex.load(tmp_path, view).rows == 20


def test_a_save_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    view = saved(make_store(np.random.default_rng(10).standard_normal((20, 4))), tmp_path).view()
    index = ScanIndex.build(view)
    index.save(tmp_path, view)
    monkeypatch.setattr(scan_module, "_save_parts", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        index.save(tmp_path, view)
    assert ScanIndex.load(tmp_path, view).rows == 20
    assert len(list(tmp_path.glob("scan-*"))) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="expected a folder"):
        index.save(tmp_path / "file", view)


def test_bad_calls():
    r = np.random.default_rng(11)
    store = make_store(r.standard_normal((20, 4)))
    view = store.view()
    index = ScanIndex.build(view)
    for bad, message in (
        ({"sample": 0}, "sample: expected"),
        ({"rotation": np.eye(3)}, r"rotation: expected finite \[4, 4\]"),
        ({"rotation": np.full((4, 4), np.nan)}, "rotation: expected finite"),
    ):
        with pytest.raises(ValueError, match=message):
            ScanIndex.build(view, **bad)
    other = make_store(r.standard_normal((20, 5))).view()
    with pytest.raises(ValueError, match="view: expected dimension 4"):
        index.candidates(Columns.spec(np.ones(4)), other)
    with pytest.raises(ValueError, match="columns: expected dimension 4"):
        index.candidates(Columns.spec(np.ones(5)), view)
    store.remove(["f0"])
    store.compact()
    with pytest.raises(ValueError, match="view: expected layout 0"):
        index.extend(store.view())
    with pytest.raises(IndexError):
        index.top(Columns.spec(np.ones(4)), view, np.array([20]), 1)


def test_read_pass_reads_every_word():
    a = np.arange(1000 * 6, dtype=np.float64).reshape(1000, 6)
    words = int(a.view(np.uint64).sum(dtype=np.uint64))
    for level in _C.simd_levels():
        _C.set_simd(level)
        assert _C.read_pass((a[:400], a[400:])) == words


@pytest.mark.parametrize("dim", [3, 40, 70, 200])
@pytest.mark.parametrize("kind", ["clustered", "last", "huge", "tiny"])
@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_a_batch_finds_what_each_finds(batch, kind, dim):
    r = np.random.default_rng(batch)
    x = make_rows(kind, 1500, dim, r, r.standard_normal(dim))
    store = FactStore(dim, embedding_model="m1")
    store.add([f"f{i}" for i in range(1300)], [""] * 1300, x[:1300])
    index = ScanIndex.build(store.view())
    store.add([f"f{i}" for i in range(1300, 1500)], [""] * 200, x[1300:])
    store.remove([f"f{i}" for i in np.flatnonzero(r.random(1500) < 0.1)])
    view = store.view()
    several = [make_columns(r, dim, 1 + i % 3, residuals=i % 4, settings_off=i % 2 == 1, like=x) for i in range(batch)]
    several[0] = Columns.spec(x[7] + 0.1 * r.standard_normal(dim), min_relevance=float(r.choice([-np.inf, 0.0, 0.4])))
    several[-1] = at_an_occurring_value(r, view, Columns.spec(x[9], min_relevance=0.3))
    expected = [exact(view, c) for c in several]
    relevance = [_C.column_values(view.blocks, view.squared_norms, c.compiled, e)[:, 0]
                 for c, e in zip(several, expected, strict=True)]  # fmt: skip
    for level in _C.simd_levels():
        _C.set_simd(level)
        for threads in (1, 2, 7):
            _C.set_threads(threads)
            for found, want in zip(index.candidates_each(several, view), expected, strict=True):
                assert np.array_equal(found, want)
            bounded = index.bounded_each(several, view)
            for (found, low, high), want, value, c in zip(bounded, expected, relevance, several, strict=True):
                assert np.array_equal(found, want)
                if c.scale[0] == 1.0 and c.shift[0] == 0.0:
                    assert (low <= value).all()
                    assert (value <= high).all()


def test_bounds_are_narrow():
    r = np.random.default_rng(12)
    query = r.standard_normal(64)
    view = make_store(make_rows("clustered", 3000, 64, r, query)).view()
    index = ScanIndex.build(view)
    for batch in (1, 8):
        for rows, low, high in index.bounded_each([Columns.spec(query, min_relevance=0.1)] * batch, view):
            assert len(rows)
            assert np.quantile(high - low, 0.9) < 0.05
