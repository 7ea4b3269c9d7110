"""150 windows of the specification's formula on real documentation, computed by an independent program.

The folder is found through CDR_DATA_DIR. Its overlap counts come from another tokenizer and are taken as given. Inputs
are float16 and the golden numbers have five decimals, so they agree to 1e-3.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from cdr_kernel import Columns, available_impls, cdr_score

DATA = os.environ.get("CDR_DATA_DIR")
pytestmark = pytest.mark.skipif(not DATA, reason="CDR_DATA_DIR names no folder with the Kubernetes documentation")
DOCS_AND_GLOSSARY = 7975


@pytest.fixture(scope="module")
def windows():
    folder = Path(DATA)
    tasks = json.loads((folder / "tasks_dev.json").read_text())["tasks"]
    index = {task["id"]: i for i, task in enumerate(tasks)}
    vectors = np.load(folder / "queries_dev_minilm_f16.npz")
    rows = {
        kind: np.load(folder / f"facts_{kind}_minilm_f16.npy")[:DOCS_AND_GLOSSARY].astype(np.float32)
        for kind in ("title", "text")
    }
    with gzip.open(folder / "golden_seed_cdr_dev.json.gz") as file:
        golden = json.load(file)
    return golden, index, vectors, rows


@pytest.mark.parametrize("impl", available_impls())
def test_the_golden_windows(windows, impl):
    golden, index, vectors, rows = windows
    assert len(golden) == 150
    for window in golden:
        i = index[window["task"]]
        subs = vectors[f"{i}:subs"]
        entries = window["coverage"]
        columns = Columns.spec(
            vectors[f"{i}:query"],
            coverage=subs[[e["sub_query"] for e in entries]] if entries else None,
            depth_weights=[e["depth"] for e in entries],
            residual=subs[window["residual"]] if window["residual"] else None,
            min_relevance=window["gate"],
            first_window_pull=window["window"] > 1,  # that program goes by the window's number (reading R1)
        )
        embeddings = rows[window["embedding"]]
        top = window["top"]
        overlap = np.zeros(DOCS_AND_GLOSSARY, np.int32)
        overlap[[t["fact"] for t in top]] = [t["ngram_overlap"] for t in top]
        scores = cdr_score(embeddings, columns, ngram_overlap=overlap, impl=impl)
        assert abs(len(scores) - window["candidates"]) <= 3  # facts within float16's rounding of the gate
        at = {row: position for position, row in enumerate(scores.rows.tolist())}
        ours = np.array(
            [
                [
                    scores.relevance[p], scores.coverage[p], scores.residual_pull[p], scores.novelty[p],
                    scores.score[p],
                ]
                for p in (at[t["fact"]] for t in top)
            ]
        )  # fmt: skip
        theirs = np.array([[t["relevance"], t["coverage"], t["pull"], t["novelty"], t["score"]] for t in top])
        assert np.abs(ours - theirs).max() < 1e-3
        # Facts outside their list can only outscore its last one through an n-gram penalty that is not given.
        assert (np.diff(ours[:, 4]) < 1e-3).all()
