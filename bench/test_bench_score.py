"""cdr_score on one hot shape per implementation, and the plain reference beside it. Results are checked first.

The reference ranks a slice of the facts, so compare facts per second, which are printed before the table.
"""

from __future__ import annotations

import numpy as np
import pytest

from cdr_kernel import Columns, available_impls, cdr_score, reference
from cdr_kernel.validation._arrays import check_rows

N, DIM, K = 20_000, 384, 100
SLICE = 200


@pytest.fixture(scope="module")
def work():
    r = np.random.default_rng(0)
    query = r.standard_normal(DIM)
    near = r.random((N, 1)) ** 2
    embeddings = (near * query + (1 - near) * r.standard_normal((N, DIM))).astype(np.float32)
    coverage, residual = r.standard_normal((20, DIM)), r.standard_normal((8, DIM))
    columns = Columns.spec(query, coverage=coverage, depth_weights=np.full(20, 0.5), residual=residual)
    norms, _ = check_rows((embeddings,))
    return embeddings, columns, norms, (query, coverage, residual)


@pytest.mark.parametrize("impl", available_impls())
def test_bench_score(benchmark, facts_per_second, work, impl):
    embeddings, columns, norms, _ = work
    expected = cdr_score(embeddings, columns, k=K)
    found = cdr_score(embeddings, columns, k=K, squared_norms=norms, impl=impl)
    if found.rows.tolist() != expected.rows.tolist():
        pytest.fail(f"{impl}: finds other facts than the default")
    facts_per_second(N)
    benchmark(cdr_score, embeddings, columns, k=K, squared_norms=norms, impl=impl)


def test_bench_reference_on_a_slice(benchmark, facts_per_second, work):
    embeddings, _, _, (query, coverage, residual) = work
    facts = [reference.Fact(row.tolist()) for row in embeddings[:SLICE]]
    session = reference.ReferenceSession(
        coverage_set=[reference.Entry(c.tolist(), 0.5) for c in coverage],
        residual_set=[reference.SubQuery(str(i), "", "", r.tolist()) for i, r in enumerate(residual)],
    )
    facts_per_second(SLICE)
    benchmark.pedantic(
        reference.cdr_rank,
        (
            facts,
            query.tolist(),
            session,
        ),
        iterations=1,
        rounds=1,
    )
