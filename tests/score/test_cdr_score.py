"""Every implementation of cdr_score against the reference: impl x dtype x odd shape x set size."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from cdr_kernel import _C, Columns, available_impls, cdr_score, reference
from cdr_kernel.score import _cdr_score as score
from cdr_kernel.score._cdr_score import choose_impl

IMPLS = available_impls()
TOLERANCE = 1e-12  # readings, "Exact arithmetic"


@pytest.fixture(autouse=True)
def _as_found():
    level = _C.simd()
    yield
    _C.set_simd(level)
    _C.set_threads(0)


def expected(
    embeddings, query, coverage, depths, residual, *, gate, importance=None, multiplier=None, overlap=None, **keywords
):
    """The reference's answer: {row: Scored} of what passes, and the rows in its order."""
    rows = np.asarray(embeddings, dtype=np.float64).tolist()
    facts = [
        reference.Fact(
            embedding=row,
            importance_weight=1.0 if importance is None else float(importance[i]),
            multiplier=1.0 if multiplier is None else float(multiplier[i]),
            sequence=i,
        )
        for i, row in enumerate(rows)
    ]
    session = reference.ReferenceSession(
        coverage_set=[reference.Entry(list(map(float, e)), float(d)) for e, d in zip(coverage, depths, strict=True)],
        residual_set=[reference.SubQuery(str(j), "", "", list(map(float, r))) for j, r in enumerate(residual)],
        min_relevance=gate,
        **keywords,
    )
    scored = reference.cdr_rank(facts, list(map(float, query)), session)
    found = {}
    for s in scored:
        row = s.fact.sequence
        penalty = 0.0 if overlap is None else reference.ngram_penalty(int(overlap[row]))
        found[row] = (s.score_without_guard * (1.0 - penalty), s)
    return found


def agree(scores, found, bound=None):
    assert scores.rows.tolist() == sorted(found)
    for at, row in enumerate(scores.rows.tolist()):
        score, s = found[row]
        scale = TOLERANCE * (1.0 if bound is None else max(bound[row], 1e-300))
        assert abs(scores.score[at] - score) <= scale
        assert abs(scores.score_without_guard[at] - s.score_without_guard) <= scale
        assert abs(scores.relevance[at] - s.relevance) <= TOLERANCE
        assert abs(scores.coverage[at] - s.coverage) <= TOLERANCE
        assert abs(scores.residual_pull[at] - s.residual_pull) <= TOLERANCE
        assert abs(scores.novelty[at] - s.novelty) <= TOLERANCE


def bits(scores):
    return tuple(getattr(scores, name).tobytes() for name in scores.__dataclass_fields__)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("n", "dim"), [(0, 3), (1, 1), (5, 7), (33, 8), (130, 17)])
@pytest.mark.parametrize(("covered", "residual"), [(0, 0), (1, 0), (0, 1), (1, 1), (9, 6)])
def test_parity(impl, dtype, n, dim, covered, residual):
    r = np.random.default_rng(n * 100 + dim + covered)
    embeddings = r.standard_normal((n, dim)).astype(dtype)
    query, coverage, pulls = (
        r.standard_normal(dim),
        r.standard_normal((covered, dim)),
        r.standard_normal((residual, dim)),
    )
    depths = r.random(covered)
    importance, multiplier = r.choice([0.0, 0.3, 1.0, 4.0], n), r.random(n)
    overlap = r.integers(0, 9, n).astype(np.int32)
    columns = Columns.spec(query, coverage=coverage, depth_weights=depths, residual=pulls, min_relevance=0.05)
    scores = cdr_score(
        embeddings, columns, importance=importance, multiplier=multiplier, ngram_overlap=overlap, impl=impl
    )
    found = expected(
        embeddings, query, coverage, depths, pulls,
        gate=0.05, importance=importance, multiplier=multiplier, overlap=overlap,
    )  # fmt: skip
    agree(scores, found, importance * multiplier)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("keyword", ["first_window_pull", "clamp_novelty"])
def test_the_readings_keywords(impl, keyword):
    r = np.random.default_rng(4)
    embeddings, query, pulls = r.standard_normal((40, 6)), r.standard_normal(6), r.standard_normal((3, 6))
    coverage = np.zeros((0, 6)) if keyword == "first_window_pull" else -query[None]
    depths = np.ones(len(coverage))
    columns = Columns.spec(
        query, coverage=coverage, depth_weights=depths, residual=pulls, min_relevance=-1.0, **{keyword: True}
    )
    found = expected(embeddings, query, coverage, depths, pulls, gate=-1.0, **{keyword: True})
    agree(cdr_score(embeddings, columns, impl=impl), found)
    plain = Columns.spec(query, coverage=coverage, depth_weights=depths, residual=pulls, min_relevance=-1.0)
    assert bits(cdr_score(embeddings, columns, impl=impl)) != bits(cdr_score(embeddings, plain, impl=impl))


def workload(n=3000, dim=37, seed=0, dtype=np.float32):
    r = np.random.default_rng(seed)
    columns = Columns.spec(
        r.standard_normal(dim),
        coverage=r.standard_normal((4, dim)),
        depth_weights=[0.9, 0.0, 0.15, 0.4],
        residual=r.standard_normal((9, dim)),
        min_relevance=0.02,
    )
    embeddings = r.standard_normal((n, dim)).astype(dtype)
    embeddings[n // 2] = embeddings[3]
    return embeddings, columns, r


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_bit_equal_across_impls_simd_levels_and_threads(dtype):
    embeddings, columns, r = workload(dtype=dtype)
    importance = r.random(len(embeddings))
    seen = set()
    for level in _C.simd_levels():
        for threads in (1, 2, 7):
            _C.set_simd(level)
            _C.set_threads(threads)
            seen |= {bits(cdr_score(embeddings, columns, importance=importance, impl=impl)) for impl in IMPLS}
    assert len(seen) == 1


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("k", [0, 1, 10, 999, 10**6])
def test_k_is_the_front_of_the_whole_ranking(impl, k):
    embeddings, columns, r = workload()
    overlap = r.integers(0, 3, len(embeddings))
    whole = cdr_score(embeddings, columns, ngram_overlap=overlap, k=len(embeddings), impl=impl)
    assert (np.diff(whole.score) <= 0).all()
    front = cdr_score(embeddings, columns, ngram_overlap=overlap, k=k, impl=impl)
    assert bits(front) == bits(whole.take(np.arange(min(k, len(whole)))))


@pytest.mark.parametrize("impl", IMPLS)
def test_ties_come_in_the_order_of_their_rows(impl):
    embeddings = np.tile(np.array([1.0, 2.0, 3.0], np.float32), (1000, 1))
    columns = Columns.spec([1.0, 2.0, 2.0])
    for threads in (1, 2, 7):
        _C.set_threads(threads)
        for k in (1, 3, 10):
            assert cdr_score(embeddings, columns, k=k, impl=impl).rows.tolist() == list(range(k))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_equals_one_by_one(impl):
    embeddings, first, r = workload()
    second = Columns.spec(r.standard_normal(37), min_relevance=-1.0)
    third = Columns.spec(r.standard_normal(37), residual=r.standard_normal((2, 37)), min_relevance=0.9)
    overlap = r.integers(0, 5, (3, len(embeddings)))
    for k in (None, 20):
        batch = cdr_score(embeddings, [first, second, third], ngram_overlap=overlap, k=k, impl=impl)
        single = [
            cdr_score(embeddings, c, ngram_overlap=o, k=k, impl=impl)
            for c, o in zip([first, second, third], overlap, strict=True)
        ]
        assert [bits(s) for s in batch] == [bits(s) for s in single]
    assert cdr_score(embeddings, [], impl=impl) == []


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_picks_candidates_and_their_factors(impl):
    embeddings, columns, r = workload(200)
    rows = r.permutation(200)[:77]
    importance = r.random(77)
    scores = cdr_score(embeddings, columns, rows=rows, importance=importance, impl=impl)
    everywhere = np.ones(200)
    everywhere[rows] = importance
    whole = cdr_score(embeddings, columns, importance=everywhere, impl=impl)
    by_row = dict(zip(whole.rows.tolist(), whole.score.tolist(), strict=True))
    assert scores.rows.tolist() == [row for row in rows.tolist() if row in by_row]
    assert scores.score.tolist() == [by_row[row] for row in scores.rows.tolist()]


def test_blocks_are_read_as_one_array():
    embeddings, columns, _ = workload(300)
    parts = (embeddings[:100], embeddings[100:101], embeddings[101:])
    for impl in IMPLS:
        assert bits(cdr_score(parts, columns, impl=impl)) == bits(cdr_score(embeddings, columns, impl=impl))
    with pytest.raises(ValueError, match="blocks of float32"):
        cdr_score((embeddings, embeddings.astype(np.float64)), columns)


def test_torch_chunks_do_not_change_the_answer(monkeypatch):
    embeddings, columns, _ = workload(500)
    whole = cdr_score(embeddings, columns, k=50, impl="torch")
    monkeypatch.setattr("cdr_kernel.score._bound_search._CHUNK_BYTES", 4 * 37 * 64)
    assert bits(cdr_score(embeddings, columns, k=50, impl="torch")) == bits(whole)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_matmul_precision_only_widens_the_margin(precision):
    embeddings, columns, _ = workload(2000)
    whole = cdr_score(embeddings, columns, k=50)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert bits(cdr_score(embeddings, columns, k=50, impl="torch")) == bits(whole)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("impl", IMPLS)
class TestTheGate:
    def test_exactly_at_the_gate_is_kept(self, impl):
        for dtype in (np.float16, np.float32, np.float64):
            fact = np.array([[11, 15, 7, 2, 1]], dtype)
            assert len(cdr_score(fact, Columns.spec([1, 0, 0, 0, 0], min_relevance=0.55), impl=impl)) == 1
            above = np.nextafter(0.55, 1.0)
            assert len(cdr_score(fact, Columns.spec([1, 0, 0, 0, 0], min_relevance=above), impl=impl)) == 0

    def test_identical_vectors_pass_a_gate_of_one(self, impl):
        r = np.random.default_rng(1)
        for dtype in (np.float32, np.float64):
            for vector in r.standard_normal((300, 48)).astype(dtype):
                scores = cdr_score(vector[None], Columns.spec(vector, min_relevance=1.0), impl=impl)
                assert scores.relevance.tolist() == [1.0]

    def test_the_set_is_the_references_at_every_value_it_takes(self, impl):
        r = np.random.default_rng(2)
        embeddings = r.integers(-3, 4, (60, 5)).astype(np.float32)
        embeddings = embeddings[np.abs(embeddings).sum(1) > 0]
        query = [1.0, -2.0, 1.0, 0.0, 3.0]
        cosines = [reference.cosine(row, query) for row in embeddings.tolist()]
        for gate in sorted(set(cosines)):
            scores = cdr_score(embeddings, Columns.spec(query, min_relevance=gate), impl=impl)
            assert scores.rows.tolist() == [i for i, c in enumerate(cosines) if c >= gate]

    def test_infinite_gates(self, impl):
        embeddings, _, _ = workload(50)
        query = embeddings[7]
        assert len(cdr_score(embeddings, Columns.spec(query, min_relevance=-np.inf), impl=impl)) == 50
        assert len(cdr_score(embeddings, Columns.spec(query, min_relevance=np.inf), impl=impl)) == 0

    def test_any_of_several_columns_with_scale_and_shift(self, impl):
        embeddings, _, r = workload(300)
        residual = r.standard_normal((3, 37))
        scale, shift = r.random(5) + 0.5, r.standard_normal(5) * 0.1
        weight = np.array([1.0, 1.0, 0.2, 0.7, 0.0])
        gate = np.array([0.4, np.inf, 0.35, np.inf, 0.5])
        columns = Columns(
            query=r.standard_normal(37), coverage=None, residual=residual, scale=scale, shift=shift, weight=weight,
            gate=gate,
        )  # fmt: skip
        unit = embeddings.astype(np.float64)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        vectors = np.vstack([columns.query, np.zeros(37), residual])
        norms = np.linalg.norm(vectors, axis=1)
        norms[1] = 1.0
        values = (unit @ (vectors / norms[:, None]).T) * scale + shift
        passing = np.flatnonzero((values >= gate).any(1))
        pull = (weight[2:] * values[:, 2:]).max(1)
        scores = cdr_score(embeddings, columns, impl=impl)
        assert 0 < len(passing) < 300
        assert scores.rows.tolist() == passing.tolist()
        np.testing.assert_allclose(scores.score, np.maximum(values[:, 0], pull)[passing], rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
class TestExtremes:
    @pytest.mark.parametrize(
        ("value", "dtype"),
        [(3e38, np.float32), (1e-38, np.float32), (1e-45, np.float32), (1e308, np.float64), (5e-324, np.float64),
         (6e4, np.float16), (6e-8, np.float16)],
    )  # fmt: skip
    def test_norms_neither_overflow_nor_vanish(self, impl, value, dtype):
        embeddings = np.full((3, 2), value, dtype)
        scores = cdr_score(embeddings, Columns.spec([1.0, 1.0], min_relevance=1.0), impl=impl)
        assert scores.relevance.tolist() == [1.0, 1.0, 1.0]

    def test_query_side_vectors_of_any_size(self, impl):
        embeddings, _, r = workload(20, 5, dtype=np.float64)
        query, coverage, pulls = r.standard_normal(5), r.standard_normal((2, 5)), r.standard_normal((2, 5))
        plain = Columns.spec(query, coverage=coverage, depth_weights=[0.5, 1], residual=pulls, min_relevance=-1)
        far = Columns.spec(
            np.ldexp(query, 900), coverage=np.ldexp(coverage, -700), depth_weights=[0.5, 1],
            residual=np.ldexp(pulls, 300), min_relevance=-1,
        )  # fmt: skip
        np.testing.assert_allclose(
            cdr_score(embeddings, far, impl=impl).score, cdr_score(embeddings, plain, impl=impl).score, rtol=1e-14
        )

    def test_cosines_stay_within_one_and_novelty_at_its_floor(self, impl):
        r = np.random.default_rng(3)
        for vector in r.standard_normal((200, 24)).astype(np.float32):
            columns = Columns.spec(vector, coverage=vector[None], depth_weights=[1.0], residual=vector[None])
            scores = cdr_score(vector[None], columns, impl=impl)
            assert 1.0 - 1e-15 < scores.relevance[0] <= 1.0
            assert 1.0 - 1e-15 < scores.residual_pull[0] <= 1.0
            assert scores.novelty[0] == 0.2

    def test_a_total_depth_of_zero_covers_nothing(self, impl):
        columns = Columns.spec([1.0, 0.0], coverage=[[1.0, 0.0]], depth_weights=[0.0], residual=[[0.0, 1.0]])
        scores = cdr_score([[1.0, 0.5]], columns, impl=impl)
        assert scores.novelty[0] == 1.0
        assert scores.residual_pull[0] > 0  # the coverage set is not empty, so the residual pulls (R1)


class TestArrays:
    def test_every_kind_of_array_ranks_alike(self):
        embeddings, columns, _ = workload(40)
        wide = np.zeros((40, 74), np.float32)
        wide[:, ::2] = embeddings
        frozen = embeddings.copy()
        frozen.flags.writeable = False
        kinds = [
            embeddings.tolist(), tuple(map(tuple, embeddings.tolist())), embeddings.astype(np.float64),
            np.asfortranarray(embeddings), wide[:, ::2], frozen, embeddings.astype(">f4"), torch.from_numpy(embeddings),
            torch.from_numpy(np.asfortranarray(embeddings)),
        ]  # fmt: skip
        for impl in IMPLS:
            assert {bits(cdr_score(kind, columns, k=10, impl=impl)) for kind in kinds} == {
                bits(cdr_score(embeddings, columns, k=10))
            }

    def test_bfloat16_is_read_exactly(self):
        embeddings, columns, _ = workload(40)
        tensor = torch.from_numpy(embeddings).bfloat16()
        for impl in IMPLS:
            assert bits(cdr_score(tensor, columns, impl=impl)) == bits(cdr_score(tensor.float().numpy(), columns))

    @pytest.mark.parametrize("impl", IMPLS)
    def test_bad_rows_are_named(self, impl):
        embeddings, columns, _ = workload(9)
        for value, what in ((np.nan, "not finite"), (np.inf, "not finite"), (0.0, "all zeros")):
            bad = embeddings.copy()
            bad[4] = value
            with pytest.raises(ValueError, match=f"embeddings: {what} in row 4"):
                cdr_score(bad, columns, impl=impl)

    @pytest.mark.parametrize(
        ("keywords", "error", "message"),
        [
            ({"importance": [1.0]}, ValueError, "importance: expected 9 entries"),
            ({"importance": [-1.0] * 9}, ValueError, "importance: expected finite and >= 0, got -1.0 at row 0"),
            ({"multiplier": [np.nan] * 9}, ValueError, "multiplier: expected finite"),
            ({"importance": [1e308] * 9, "multiplier": [10.0] * 9}, ValueError, "not finite"),
            ({"ngram_overlap": [0.5] * 9}, TypeError, "ngram_overlap: expected integers"),
            ({"ngram_overlap": [-1] * 9}, ValueError, "counts >= 0"),
            ({"ngram_overlap": [0] * 8}, ValueError, "ngram_overlap: expected"),
            ({"k": -1}, ValueError, "k: expected at least 0"),
            ({"k": True}, TypeError, "k: expected an integer"),
            ({"rows": [9]}, IndexError, "rows: expected 0 to 8"),
            ({"rows": [[0]]}, ValueError, "rows: expected integers"),
            ({"impl": "fortran"}, ValueError, "impl: expected one of cpp, torch"),
        ],
    )
    def test_bad_arguments_say_what_was_expected(self, keywords, error, message):
        embeddings, columns, _ = workload(9)
        with pytest.raises(error, match=message):
            cdr_score(embeddings, columns, **keywords)

    def test_shapes_and_types_of_embeddings(self):
        _, columns, _ = workload(9)
        for bad, error in (
            (np.zeros((3, 4), np.complex64), TypeError),
            (np.array([["a", "b"]]), TypeError),
            (np.zeros((3, 4), bool), TypeError),
            ([[1.0], [1.0, 2.0]], ValueError),
            (np.ones(37), ValueError),
            (np.ones((2, 36)), ValueError),
        ):
            with pytest.raises(error, match=r"expected"):
                cdr_score(bad, columns)

    def test_the_environment_chooses_and_is_checked(self, monkeypatch):
        embeddings, columns, _ = workload(9)
        monkeypatch.setenv("CDR_KERNEL_IMPL", "basic")
        with pytest.raises(ValueError, match="CDR_KERNEL_IMPL: expected one of"):
            cdr_score(embeddings, columns)
        assert len(cdr_score(embeddings, columns, impl="cpp")) >= 0


class TestColumns:
    @pytest.mark.parametrize(
        ("keywords", "message"),
        [
            ({"query": [0.0, 0.0]}, "query: all zeros"),
            ({"query": [np.nan, 0.0]}, "query: not finite"),
            ({"query": []}, "query: expected dimension"),
            ({"query": [[1.0, 0.0]]}, "query: expected 1 dimension"),
            ({"coverage": [[1.0, 0.0, 0.0]], "depth_weights": [1.0]}, "coverage: expected dimension 2, got 3"),
            ({"coverage": [[1.0, 0.0], [0.0, 0.0]], "depth_weights": [1, 1]}, "coverage: all zeros in row 1"),
            ({"coverage": [[1.0, 0.0]]}, "depth_weights: expected 1"),
            ({"coverage": [[1.0, 0.0]], "depth_weights": [-0.1]}, "expected 0 to 1, got -0.1"),
            ({"coverage": [[1.0, 0.0]], "depth_weights": [1.1]}, "expected 0 to 1, got 1.1"),
            ({"coverage": [[1.0, 0.0]], "depth_weights": [np.nan]}, "expected 0 to 1, got nan"),
            ({"residual": [[1.0, np.inf]]}, "residual: not finite in row 0"),
            ({"min_relevance": np.nan}, "gate: expected numbers"),
        ],
    )
    def test_bad_vectors_are_named(self, keywords, message):
        with pytest.raises(ValueError, match=message):
            Columns.spec(**{"query": [1.0, 0.0], **keywords})

    def test_settings_are_checked(self):
        two = [1.0, 1.0]
        good = {
            "query": [1.0],
            "coverage": None,
            "residual": [],
            "scale": two,
            "shift": two,
            "weight": two,
            "gate": two,
        }
        Columns(**good)
        for name, value in (("scale", [1.0]), ("shift", [np.nan, 0]), ("weight", [np.inf, 0]), ("gate", [np.nan, 0])):
            with pytest.raises(ValueError, match=f"{name}: expected"):
                Columns(**{**good, name: value})

    def test_tiny_depths_keep_their_shares(self):
        entries, query = [[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0]
        tiny = Columns.spec(query, coverage=entries, depth_weights=[5e-324, 5e-324])
        full = Columns.spec(query, coverage=entries, depth_weights=[1.0, 1.0])
        assert tiny.coverage.tolist() == full.coverage.tolist()


class TestTheChoice:
    @pytest.fixture(autouse=True)
    def _as_on_a_plain_machine(self, monkeypatch):
        for name in ("CDR_KERNEL_IMPL", "TRITON_INTERPRET"):
            monkeypatch.delenv(name, raising=False)
        self.installed = True
        monkeypatch.setattr(score, "triton_installed", lambda: self.installed)

    def test_by_the_device_and_by_what_is_installed(self):
        assert [choose_impl(None, d) for d in ("cpu", "cuda", "cuda:1", "mps")] == ["cpp", "triton", "triton", "torch"]
        assert available_impls() == ("cpp", "torch")
        assert available_impls("cuda") == ("triton", "cpp", "torch")
        self.installed = False
        assert [choose_impl(None, d) for d in ("cpu", "cuda")] == ["cpp", "torch"]
        assert available_impls("cuda") == ("torch", "cpp")

    def test_without_torch_only_the_cpu_is_left(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        assert available_impls() == available_impls("cuda") == ("cpp",)
        assert choose_impl(None, "cpu") == "cpp"
        for impl in ("torch", "triton"):
            with pytest.raises(ImportError, match="impl: torch is not installed: pip install torch"):
                choose_impl(impl, "cpu")

    def test_an_old_gpu_takes_torch(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert choose_impl(None, "cuda:0") == "torch"
        with pytest.raises(ValueError, match=r"impl: triton needs compute capability 8\.0, cuda:0 has 7\.5"):
            choose_impl("triton", "cuda:0")

    def test_what_is_forced_and_missing_is_loud(self, monkeypatch):
        with pytest.raises(ValueError, match="impl: triton runs on CUDA"):
            cdr_score(np.ones((2, 2)), Columns.spec([1.0, 1.0]), impl="triton")
        self.installed = False
        with pytest.raises(ImportError, match=r'impl: triton is not installed: pip install "\.\[gpu\]"'):
            cdr_score(np.ones((2, 2)), Columns.spec([1.0, 1.0]), impl="triton")
        monkeypatch.setenv("CDR_KERNEL_IMPL", "triton")
        with pytest.raises(ImportError, match="CDR_KERNEL_IMPL: triton is not installed"):
            choose_impl(None, "cuda")

    def test_the_interpreter_opens_the_cpu(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert choose_impl("triton", "cpu") == "triton"
        assert available_impls() == ("cpp", "torch", "triton")
        assert choose_impl(None, "cpu") == "cpp"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("impl", ["torch", "triton", None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_on_a_gpu(impl, dtype):
    embeddings, columns, r = workload(5000)
    importance = r.random(5000)
    for number in range(torch.cuda.device_count()):
        tensor = torch.from_numpy(embeddings).to(dtype).to(f"cuda:{number}")
        for k in (None, 20):
            with torch.cuda.stream(torch.cuda.Stream(number)):
                found = cdr_score(tensor, columns, importance=importance, k=k, impl=impl)
            assert bits(found) == bits(cdr_score(tensor.cpu(), columns, importance=importance, k=k, impl="cpp"))
