"""The commands on real documentation: 15,561 facts, a task of five windows. Needs CDR_DATA_DIR."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cdr_kernel import FactStore
from cdr_kernel.cli._app import app
from cdr_kernel.files._files import read_tasks

DATA = Path(os.environ.get("CDR_DATA_DIR", ""))
FILES = ("facts.parquet", "facts_title_minilm_f16.npy", "tasks_dev.json", "queries_dev_minilm_f16.npz")
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
GATE = ["--min-relevance", "0.3"]

pytestmark = pytest.mark.skipif(
    "CDR_DATA_DIR" not in os.environ or not all((DATA / name).is_file() for name in FILES),
    reason=f"CDR_DATA_DIR does not name a folder with {', '.join(FILES)}",
)


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k8s") / "store"
    facts, vectors = DATA / "facts.parquet", DATA / "facts_title_minilm_f16.npy"
    made = invoke("index", facts, "--embeddings", vectors, "--model", MODEL, "-o", folder, "--json")
    assert (made["facts"], made["dim"], made["skipped"]) == (15_561, 384, [])
    return folder


def test_the_store_has_facts_and_vectors_side_by_side(store):
    import pyarrow.parquet as pq

    loaded = FactStore.load(store)
    vectors = np.load(DATA / "facts_title_minilm_f16.npy")
    np.testing.assert_array_equal(loaded.view().embeddings, vectors.astype(np.float32))
    rows = [0, 4_095, 4_096, 15_560]
    table = pq.read_table(DATA / "facts.parquet", columns=["id", "text", "path", "pos"]).take(rows).to_pylist()
    for row, fact in zip(table, loaded.get([str(row) for row in rows]), strict=True):
        assert (fact.id, fact.text, fact.source, fact.position) == (
            str(row["id"]),
            row["text"],
            row["path"],
            row["pos"],
        )


def test_rank_is_a_plain_matrix_product_while_nothing_is_covered(store):
    query = np.load(DATA / "queries_dev_minilm_f16.npz")["3:query"].astype(np.float64)
    found = invoke("rank", store, "--query", f"{DATA / FILES[3]}:3:query", "--k", "25", "--json", *GATE)
    rows = np.load(DATA / "facts_title_minilm_f16.npy").astype(np.float64)
    cosines = rows @ query / np.linalg.norm(rows, axis=1) / np.linalg.norm(query)
    assert found["qualified"] == np.count_nonzero(cosines >= 0.3)
    best = np.argsort(-cosines, kind="stable")[:25]
    assert [result["id"] for result in found["results"]] == [str(row) for row in best]
    np.testing.assert_allclose([result["score"] for result in found["results"]], cosines[best], rtol=0, atol=1e-12)


def test_run_of_one_task_through_five_windows(store, tmp_path):
    task = read_tasks(DATA / "tasks_dev.json")[7]
    path = tmp_path / "run.json"
    arguments = ["run", store, DATA / "tasks_dev.json", "--task-id", task.id, "--vectors", DATA / FILES[3]]
    brief = invoke(*arguments, "--writer", "extract", "-o", path, "--json", *GATE)
    run = json.loads(path.read_text())
    assert (run["complete"], run["task"]["id"], run["task"]["index"]) == (True, task.id, 7)
    windows = run["windows"]
    assert [window["number"] for window in windows] == [1, 2, 3, 4, 5]
    assert brief["exit"]["reason"] == "limit-reached"
    assert {len(window["facts"]) for window in windows} == {task.k}
    done = [window["report"]["completeness_score"] for window in windows]
    assert done == sorted(done)
    assert done[-1] > done[0] > 0.0
    reached = [window["topics_reached"] for window in windows]
    assert reached == sorted(reached)
    assert 0 < reached[-1] <= len(task.items)
    assert windows[0]["novelty_min"] == 1.0 > windows[1]["novelty_min"]
    for window in windows:
        assert all(fact["relevance"] >= 0.3 for fact in window["facts"])
        scores = [fact["score"] for fact in window["facts"]]
        assert scores == sorted(scores, reverse=True)
    # The store's own words stand in the output, so the guard sees them in later windows.
    assert windows[1]["envelope"]["guard_activations"] >= task.k
