"""The bounds: never below the exact score, close above it, and what follows from that for the search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cdr_kernel import Columns, cdr_score
from cdr_kernel.score import _bound_search
from cdr_kernel.score._bound_search import (
    Factors32,
    Rows,
    Source,
    bounded_candidates,
    bounded_search,
    bounds_torch,
    pack,
)
from cdr_kernel.score._cdr_score import Factors, exact_scores

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def some_columns(r, dim, covered, residual, mode, clamp=False):
    """Columns of the specification, or with random scales, shifts, weights and gates."""
    if mode == "spec":
        return Columns.spec(
            r.standard_normal(dim),
            coverage=r.standard_normal((covered, dim)),
            depth_weights=r.random(covered),
            residual=r.standard_normal((residual, dim)),
            min_relevance=0.1,
            clamp_novelty=clamp,
        )
    count = 2 + residual
    gate = np.where(r.random(count) < 0.5, r.standard_normal(count) * 0.3, np.inf)
    gate[0] = 0.4
    return Columns(
        query=r.standard_normal(dim),
        coverage=r.standard_normal(dim) * 0.3 if covered else None,
        residual=r.standard_normal((residual, dim)),
        scale=r.standard_normal(count) * 3,
        shift=r.standard_normal(count) * 0.4,
        weight=r.standard_normal(count),
        gate=gate,
        clamp_novelty=clamp,
    )


def held(r, n, dim, dtype):
    """Rows as held on a device, and the same as the exact routine reads them."""
    rows = torch.from_numpy(r.standard_normal((n, dim))).to(dtype)
    exact = rows.float().numpy() if dtype == torch.bfloat16 else rows.numpy()
    return rows, exact


def exact_everywhere(exact, columns, importance=None, overlap=None):
    """float64 [n]: the exact score where the gate is passed, -inf elsewhere."""
    scores = cdr_score(exact, columns, importance=importance, ngram_overlap=overlap, impl="cpp")
    out = np.full(len(exact), -np.inf)
    out[scores.rows] = scores.score
    return out


def bounds_of(run, rows, columns, factors=Factors32(), limits=(32, 128)):  # noqa: B008  # a frozen value, never changed
    """float64 [B, n] by one pass, in the units of the scores."""
    out = np.empty((len(columns), len(rows.values)))
    for packed in pack(
        columns, rows.values.dtype, rows.values.shape[1],
        norms=rows.scale is not None, device=torch.device("cpu"), limits=limits,
    ):  # fmt: skip
        part = torch.full((packed.count, len(rows.values)), torch.nan)
        run(packed, rows, factors.of(packed.order), part)
        assert not part.isnan().any()
        out[packed.order] = part.double().numpy() * packed.unit[:, None]
    return out


def check_bounds(run, r, dtype, dim, covered, residual, mode, sessions, factors, limits=(32, 128), n=70):
    """What every pass must satisfy: never below, never far above."""
    rows, exact = held(r, n, dim, dtype)
    columns = [some_columns(r, dim, covered, residual, mode, clamp=bool(b % 2)) for b in range(sessions)]
    importance = r.random(n) if factors else None
    overlap = r.integers(0, 7, (sessions, n)).astype(np.int32) if factors else None
    given = Factors32()
    if factors:
        given = Factors32(torch.from_numpy(importance.astype(np.float32)), None, torch.from_numpy(overlap))
    found = bounds_of(run, Rows(rows), columns, given, limits)
    tight = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 2e-2, torch.float64: 2e-2}[dtype]
    for b, c in enumerate(columns):
        truth = exact_everywhere(exact, c, importance, None if overlap is None else overlap[b])
        passed = truth > -np.inf
        reach = (np.abs(c.scale) + np.abs(c.shift)).max()
        size = max(1.0, reach) ** 2 * max(1.0, np.abs(c.weight).max())
        assert (found[b][passed] >= truth[passed]).all()
        assert (found[b][passed] <= truth[passed] + tight * size).all()
        slack = Columns(c.query, c.coverage, c.residual, c.scale, c.shift, c.weight, c.gate - tight * max(1.0, reach))
        assert (found[b][exact_everywhere(exact, slack) == -np.inf] == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["spec", "random"])
@pytest.mark.parametrize(("sessions", "covered", "residual"), [(1, 0, 0), (1, 2, 1), (1, 3, 9), (5, 1, 4), (40, 1, 3)])
def test_bounds_are_never_below_and_close_above(dtype, mode, sessions, covered, residual):
    r = np.random.default_rng(sessions * 100 + residual)
    check_bounds(bounds_torch, r, dtype, 37, covered, residual, mode, sessions, True)
    check_bounds(bounds_torch, r, dtype, 64, covered, residual, mode, sessions, False, limits=(4, 16))


def worst_tf32(x):
    """x as tensor cores may read it: 11 bits, cut off."""
    return torch.from_numpy((x.numpy().view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_margin_holds_for_what_the_hardware_may_do(dtype):
    """Adversarial rounding: factors cut to tf32, and sums pushed down by twice the roundoff at each step."""
    r = np.random.default_rng(3)
    dim = 512
    query = np.abs(r.standard_normal(dim)) + 0.5
    rows = torch.from_numpy(np.abs(r.standard_normal((200, dim))) + 0.5).to(dtype)
    columns = Columns.spec(query, residual=np.abs(r.standard_normal((7, dim))), first_window_pull=True)
    (packed,) = pack([columns], dtype, dim, norms=False, device=torch.device("cpu"))
    x, v = rows.float(), packed.vectors.float().reshape(-1, dim)
    if dtype == torch.float32:
        x, v = worst_tf32(x), worst_tf32(v)
    dots = (x.double() @ v.double().T).clamp(min=0)
    dots *= (1 - 2 * 2.0**-24) ** dim  # every one of D additions truncated
    values = dots / torch.linalg.vector_norm(rows.double(), dim=1, keepdim=True)
    gate, pull = packed.columns.double()[0, 0, 0, :, 0], packed.columns.double()[0, 0, 1, :, 0]
    upper = (values + pull).amax(1).numpy()
    scores = cdr_score(rows.float().numpy(), columns)
    assert len(scores) == 200
    assert (upper >= np.maximum(scores.relevance, scores.residual_pull)).all()
    assert ((values[:, 0] + gate[0]).numpy() >= scores.relevance - 0.55).all()


def test_the_distance_of_the_columns_is_in_the_margin():
    """A query that bfloat16 can only hold badly: without its measured distance the bound would be too low."""
    query = np.full(256, 1 + 2.0**-9)  # half-way between two numbers of bfloat16
    query[::2] += 1e-9
    rows = torch.from_numpy(np.repeat(np.eye(2, 256), 3, axis=0) + 0.01).to(torch.bfloat16)
    columns = [Columns.spec(query, min_relevance=-1.0)] * 9
    found = bounds_of(bounds_torch, Rows(rows), columns)
    truth = exact_everywhere(rows.float().numpy(), columns[0])
    assert (found >= truth).all()


def test_rows_that_float32_cannot_hold_are_bounded_by_infinity():
    rows = torch.full((4, 3), 1.0)
    rows[1], rows[2], rows[3] = 1e-30, 1e30, torch.nan
    found = bounds_of(bounds_torch, Rows(rows), [Columns.spec([1.0, 1.0, 1.0])])
    assert np.isinf(found[0]).tolist() == [False, True, True, True]
    found = bounds_of(bounds_torch, Rows(torch.ones(2, 3), scale=torch.tensor([0.0, 0.5])), [Columns.spec([1.0, 1, 1])])
    assert np.isinf(found[0]).tolist() == [True, False]


@pytest.mark.parametrize("value", [1e-300, 1e30, 1e300])
@pytest.mark.parametrize("name", ["scale", "shift", "weight"])
def test_settings_of_any_size_stay_bounded(name, value):
    r = np.random.default_rng(5)
    settings = {n: getattr(some_columns(r, 6, 0, 2, "random"), n) for n in ("scale", "shift", "weight")}
    for at in range(4):
        changed = {n: a.copy() for n, a in settings.items()}
        changed[name][at] = value
        c = Columns(
            query=r.standard_normal(6), coverage=r.standard_normal(6), residual=r.standard_normal((2, 6)),
            gate=[0.1, np.inf, 0.2, -0.1], **changed,
        )  # fmt: skip
        rows = torch.from_numpy(r.standard_normal((50, 6)).astype(np.float32))
        with np.errstate(over="ignore", invalid="ignore"):
            truth = exact_everywhere(rows.numpy(), c)
            found = bounds_of(bounds_torch, Rows(rows), [c])[0]
            assert (found[truth > -np.inf] >= truth[truth > -np.inf]).all()
            for k in (3, None):
                best = cdr_score(rows.numpy(), c, k=k, impl="cpp")
                candidates = search([rows.numpy()], [c], k)[0]
                again = exact_scores((rows.numpy(),), (rows.numpy().astype(float) ** 2).sum(1), candidates, c, NONE, k)
                assert best.rows.tolist() == again.rows.tolist()


@pytest.mark.parametrize("size", [5e-324, 1e-300, 1e-70, 1e70, 1e150, 1e300])
@pytest.mark.parametrize("share", [1e-3, 1.0, 30.0])
def test_a_coverage_functional_of_any_length_stays_bounded(size, share):
    """Its square is 0 or infinite as a float64; a scale brings the coverage back to a size that decides."""
    r = np.random.default_rng(6)
    rows = r.standard_normal((500, 6)).astype(np.float32)
    scale = min(share / size, 1e308)
    c = Columns(
        query=r.standard_normal(6), coverage=size * r.uniform(-1, 1, 6), residual=[], scale=[1.0, scale],
        shift=[0.0, 0.0], weight=[1.0, 1.0], gate=[-1.0, np.inf],
    )  # fmt: skip
    for k in (1, 7, None):
        best = cdr_score(rows, c, k=k, impl="cpp")
        candidates = search([rows], [c], k)[0]
        assert set(best.rows.tolist()) <= set(candidates.tolist())
        assert cdr_score(rows, c, k=k, impl="torch").rows.tolist() == best.rows.tolist()


NONE = Factors(None, None, None)


def search(blocks, sessions, k, index=None, factors=None):
    """bounded_search over host blocks with plain torch."""
    norms = np.concatenate([(b.astype(np.float64) ** 2).sum(1) for b in blocks])
    return bounded_search("torch", tuple(blocks), norms, sessions, index, factors or [NONE] * len(sessions), k)


@pytest.mark.parametrize("k", [0, 1, 7, 300, None])
@pytest.mark.parametrize("cut", [(400,), (100, 1, 299), (0, 400)])
def test_the_search_finds_what_belongs_to_the_answer(k, cut):
    r = np.random.default_rng(6)
    embeddings = r.standard_normal((400, 16)).astype(np.float16)
    embeddings[200] = embeddings[3]
    blocks = np.split(embeddings, np.cumsum(cut)[:-1])
    sessions = [some_columns(r, 16, 2, n, mode) for n, mode in ((0, "spec"), (5, "random"), (200, "spec"))]
    overlap = r.integers(0, 9, 400).astype(np.int32)
    factors = [Factors(r.random(400), r.random(400) * 1e-40, overlap), Factors(None, None, None), NONE]
    factors[1] = Factors(factors[0].importance, factors[0].multiplier, None)
    factors[2] = factors[1]
    found = search(blocks, sessions, k, factors=factors)
    for c, f, rows in zip(sessions, factors, found, strict=True):
        best = cdr_score(
            embeddings, c, importance=f.importance, multiplier=f.multiplier, ngram_overlap=f.ngram_overlap, k=k,
            impl="cpp",
        ).rows  # fmt: skip
        assert (np.diff(rows) > 0).all()
        assert set(best.tolist()) <= set(rows.tolist())


def test_the_search_looks_at_the_rows_of_its_index_only():
    r = np.random.default_rng(7)
    embeddings = r.standard_normal((300, 8)).astype(np.float32)
    index = r.permutation(300)[:90]
    c = some_columns(r, 8, 1, 3, "spec")
    (positions,) = search(np.split(embeddings, [50, 200]), [c], 10, index=index)
    best = cdr_score(embeddings, c, rows=index, k=10, impl="cpp").rows
    assert set(best.tolist()) <= set(index[positions].tolist())


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_reduced_precision_of_torchs_products_only_widens_the_margin(precision):
    r = np.random.default_rng(11)
    rows = r.standard_normal((2000, 64)).astype(np.float32)
    sessions = [some_columns(r, 64, 1, n, "spec") for n in (0, 4)]
    narrow = search([rows], sessions, 20)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        wide = search([rows], sessions, 20)
    finally:
        torch.set_float32_matmul_precision(before)
    for c, found, more in zip(sessions, narrow, wide, strict=True):
        assert set(cdr_score(rows, c, k=20, impl="cpp").rows.tolist()) <= set(more.tolist())
        assert len(more) >= len(found)


def counting(source, sessions, k, rows):
    """bounded_candidates with the numbers of rows that were scored exactly."""
    scored = []

    def kth_best(session, positions):
        scored.append(len(positions))
        norms = (rows.astype(np.float64) ** 2).sum(1)
        scores = exact_scores((rows,), norms, positions, sessions[session], NONE, k)
        return float(scores.score[-1]) if len(scores) == k else -np.inf

    return bounded_candidates(source, sessions, [NONE] * len(sessions), k, bounds_torch, kth_best), scored


def test_the_over_fetch_doubles_until_the_kth_is_clear():
    r = np.random.default_rng(8)
    rows = r.standard_normal((5000, 24)).astype(np.float32)
    rows[100:3000] = rows[100]  # a plateau at the top: equal scores are never clear of each other
    c = Columns.spec(rows[100], min_relevance=0.0)
    (found,), scored = counting(Source([(0, Rows(torch.from_numpy(rows)))]), [c], 5, rows)
    assert set(range(100, 3000)) <= set(found.tolist())
    assert scored[:3] == [74, 148, 296]
    assert len(scored) > 5
    apart = r.standard_normal((5000, 24)).astype(np.float32)
    (found,), scored = counting(Source([(0, Rows(torch.from_numpy(apart)))]), [c], 5, apart)
    assert scored == [74]
    assert 5 <= len(found) < 74


def test_many_sessions_are_taken_a_few_at_a_time(monkeypatch):
    r = np.random.default_rng(9)
    rows = r.standard_normal((200, 8)).astype(np.float32)
    sessions = [some_columns(r, 8, 1, int(n), "spec") for n in r.integers(0, 6, 20)]
    monkeypatch.setattr(_bound_search, "_OUT_BYTES", 4 * 200 * 3)
    monkeypatch.setattr(_bound_search, "_CHUNK_BYTES", 4096)
    for c, found in zip(sessions, search([rows], sessions, 5), strict=True):
        assert set(cdr_score(rows, c, k=5, impl="cpp").rows.tolist()) <= set(found.tolist())


def test_sessions_of_unlike_size_do_not_pad_each_other():
    r = np.random.default_rng(10)
    sessions = [some_columns(r, 8, 1, n, "spec") for n in [256] + [8] * 63]
    packed = pack(sessions, torch.float16, 8, norms=True, device=torch.device("cpu"))
    columns = sum(p.vectors[..., 0].numel() for p in packed)
    assert columns <= 258 * 1.5 + 64 * 10 * 1.3
    assert sorted(np.concatenate([p.order for p in packed]).tolist()) == list(range(64))
    assert all(p.parts * p.group <= 128 for p in packed)
