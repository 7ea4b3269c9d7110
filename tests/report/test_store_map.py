"""The flat map: the same for the same store, whatever comes and goes in it, and small."""

from __future__ import annotations

import numpy as np
import pytest

from cdr_kernel import FactStore
from cdr_kernel.report._store_map import MOST_POINTS, StoreMap


def store(n, dim=8, seed=0):
    r = np.random.default_rng(seed)
    made = FactStore(dim, embedding_model="m1")
    made.add([f"f{i}" for i in range(n)], [f"text {i}" for i in range(n)], r.standard_normal((n, dim)) + 1.0)
    return made, r.standard_normal(dim), r.standard_normal((5, dim))


def test_the_same_store_gives_the_same_map():
    made, query, subs = store(40)
    one, two = (StoreMap(made.view(), query, subs) for _ in range(2))
    assert one.as_dict() == two.as_dict()
    assert one.places(["f3", "none", "f0"]) == [one.as_dict()["points"][3], None, one.as_dict()["points"][0]]
    assert 0.0 < sum(one.share) <= 1.0
    assert one.share[0] >= one.share[1]


def test_the_axes_are_the_principal_directions_of_the_task():
    made, query, subs = store(40)
    task = np.vstack([query[None], subs])
    task /= np.linalg.norm(task, axis=1, keepdims=True)
    found = StoreMap(made.view(), query, subs).as_dict()
    flat = np.array([found["query"], *found["sub_queries"]])
    assert np.allclose(flat.mean(0), 0.0, atol=1e-3)
    spread = np.linalg.svd(task - task.mean(0), compute_uv=False)[:2]
    assert np.allclose(np.linalg.norm(flat, axis=0), spread, atol=1e-3)


def test_a_big_store_is_shown_in_part_and_removed_facts_are_not():
    made, query, subs = store(MOST_POINTS + 500)
    made.remove(["f0"])
    found = StoreMap(made.view(), query, subs)
    assert len(found.as_dict()["points"]) == MOST_POINTS
    assert found.places(["f0", "f1"])[0] is None


@pytest.mark.parametrize("n", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("topics", [1, 2, 3])
@pytest.mark.parametrize("dim", [1, 2, 8])
def test_few_of_anything(n, topics, dim):
    made, query, subs = store(n, dim)
    found = StoreMap(made.view(), query, subs[:topics]).as_dict()
    assert len(found["points"]) == n
    assert len(found["sub_queries"]) == topics
    assert np.isfinite(np.array([*found["points"], found["query"], *found["share"][:0]])).all()


def test_alike_and_extreme_facts():
    made = FactStore(3, embedding_model="m1", dtype="float64")
    made.add(["a", "b", "c", "d"], list("abcd"), [[1e-300, 0, 0], [1e300, 0, 0], [1, 0, 0], [1, 0, 0]])
    found = StoreMap(made.view(), [1.0, 0.0, 0.0], [[1.0, 0.0, 0.0]]).as_dict()
    assert found["points"] == [[0.0, 0.0]] * 4
    assert found["share"] == [0.0, 0.0]
