"""torch.ops.cdr_kernel: opcheck, torch.compile and parity over dtypes on CPU tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cdr_kernel.score.torch_ops  # noqa: F401  # registers the operator
from cdr_kernel import Columns, cdr_score
from tests.score.test_bound_search import some_columns

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def arguments(dtype, n=60, dim=12, residual=3, mode="random"):
    """Arguments of the exact op, and what cdr_score says."""
    r = np.random.default_rng(residual)
    c = some_columns(r, dim, 1, residual, mode)
    embeddings = torch.from_numpy(r.standard_normal((n, dim))).to(dtype)
    coverage = np.zeros(dim) if c.coverage is None else c.coverage
    vectors = torch.from_numpy(np.vstack([c.query[None], coverage[None], c.residual]))
    settings = [torch.from_numpy(a.copy()) for a in (c.scale, c.shift, c.weight, c.gate)]
    importance, overlap = torch.from_numpy(r.random(n)), torch.from_numpy(r.integers(0, 5, n))
    scores = cdr_score(embeddings, c, importance=importance, ngram_overlap=overlap, impl="cpp")
    expected = np.full(n, -np.inf)
    expected[scores.rows] = scores.score
    return (
        embeddings,
        vectors,
        *settings,
        c.coverage is not None,
        c.clamp_novelty,
        importance,
        None,
        overlap,
    ), expected


@pytest.mark.parametrize("impl", ["cpp", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["spec", "random"])
def test_score_is_cdr_score(dtype, impl, mode):
    given, expected = arguments(dtype, mode=mode)
    assert torch.ops.cdr_kernel.score(*given, impl).numpy().tobytes() == expected.tobytes()


def at_the_gate():
    """A fact whose cosine to the query is the double 0.55 itself, and the op's arguments for it."""
    settings = [torch.tensor(values, dtype=torch.float64) for values in ([1, 1], [0, 0], [1, 1], [0.55, np.inf])]
    embeddings = torch.tensor([[11.0, 15.0, 7.0, 2.0, 1.0]])
    return embeddings, torch.eye(5, dtype=torch.float64)[:2], settings


def test_the_gate_is_the_one_of_cdr_score():
    embeddings, vectors, settings = at_the_gate()
    expected = cdr_score(embeddings, Columns.spec(vectors[0], min_relevance=0.55)).score.tolist()
    assert expected == torch.ops.cdr_kernel.score(embeddings, vectors, *settings, False).tolist() == [0.55]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_settings_that_are_not_float64_are_refused(place, dtype):
    embeddings, vectors, settings = at_the_gate()
    settings[place] = torch.ones(2).to(dtype)
    name = ("scale", "shift", "weight", "gate")[place]
    with pytest.raises(TypeError, match=rf"{name}: expected torch\.float64, got {dtype}"):
        torch.ops.cdr_kernel.score(embeddings, vectors, *settings, False)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (embeddings, vectors, *settings)]
        with pytest.raises(TypeError, match=rf"{name}: expected"):
            torch.ops.cdr_kernel.score(*fakes, False)


@pytest.mark.parametrize("impl", ["cpp", "torch"])
def test_score_passes_opcheck(impl):
    given, _ = arguments(torch.float32)
    torch.library.opcheck(torch.ops.cdr_kernel.score, (*given, impl))


@pytest.mark.parametrize("impl", ["cpp", "torch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_score_compiles_into_one_graph(dtype, impl):
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def best(embeddings, *rest):
        return torch.topk(torch.ops.cdr_kernel.score(embeddings * 2, *rest, impl), 3).values

    for n in (60, 50):
        given, expected = arguments(dtype, n)
        assert best(*given).tolist() == np.sort(expected)[::-1][:3].tolist()


@pytest.mark.slow
def test_score_compiles_with_inductor():
    def best(*given):
        return torch.topk(torch.ops.cdr_kernel.score(*given, None), 3).values

    given, expected = arguments(torch.float32)
    found = torch.compile(best, fullgraph=True)(*given)
    assert found.tolist() == np.sort(expected)[::-1][:3].tolist()
