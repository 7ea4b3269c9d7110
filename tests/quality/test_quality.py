"""The experiment: writers, measures and summaries on a toy corpus, and the recorded results where the data is."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from cdr_kernel import FactStore
from cdr_kernel.quality._experiment import (
    WRITERS,
    Method,
    Outcome,
    Run,
    alpha_ndcg,
    baselines,
    difference,
    evaluate,
    golden,
    interval,
    load_corpus,
    pick_round_robin,
    ranked,
    summarise,
)

DATA = Path(os.environ.get("CDR_DATA_DIR", ""))
TOPICS = ("network", "storage", "security")


def toy(folder, labels=True, windows=3, k=2):
    """A store of 12 facts, 4 on each of three topics, and one task."""
    r = np.random.default_rng(5)
    axes = np.eye(6)
    store = FactStore(6, embedding_model="toy")
    for j, topic in enumerate(TOPICS):
        vectors = axes[j] + 0.6 * axes[5] + 0.1 * r.random((4, 6))
        texts = [f"Guide: {topic} fact number{i} " + f"{topic} words stand here " * (i + 1) for i in range(4)]
        store.add([f"{topic}{i}" for i in range(4)], texts, vectors, source=[topic] * 4, position=range(4))
    store.save(folder)
    items = [
        {"id": j, "label": topic, "text": f"about {topic}"}
        | ({"fact_ids": [f"{topic}{i}" for i in range(4)], "expected_words": 20} if labels else {})
        for j, topic in enumerate(TOPICS)
    ]
    task = {"id": "t", "query": "all", "windows": windows, "k": k, "sub_queries": items}
    (folder / "tasks.json").write_text(json.dumps({"schema": 1, "tasks": [task]}))
    np.savez(folder / "queries.npz", **{"0:query": axes[5] + 0.3 * axes[:3].sum(0), "0:subs": axes[:3] + 0.6 * axes[5]})
    return load_corpus(folder)


@pytest.fixture
def corpus(tmp_path):
    return toy(tmp_path / "store")


def test_golden_tokens():
    assert golden("Node.js v1.2, kube-proxy_x --flag é") == ("node.js", "v1.2", "kube-proxy_x", "flag")


def test_writers(corpus):
    run = Run(corpus, corpus.cases[0], 0)
    words = corpus.words
    assert WRITERS["plan"](run, []) == [(0, 0.9)]
    rows = [0, 4, 5]
    assert WRITERS["greedy"](run, rows) == [(1, min(0.9, (words[4] + words[5]) / 20))]
    assert WRITERS["lexical"](run, rows) == WRITERS["greedy"](run, rows)
    run.close([4, 5], [(1, 0.9)])
    assert WRITERS["greedy"](run, rows) == [(0, words[0] / 20)]  # what was written before counts nothing
    assert WRITERS["greedy"](run, [4, 5]) == []
    assert WRITERS["plan"](run, []) == [(1, 0.9)]
    assert run.depth.tolist() == [0.0, 0.9, 0.0]
    assert run.remaining == [0, 2]


def test_outputs_are_the_prototypes_draws(corpus):
    import zlib

    run = Run(corpus, corpus.cases[0], 3)
    random = np.random.default_rng([3, zlib.crc32(b"t")])
    expected = []
    for row in (7, 2):
        tokens = golden(corpus.texts[row])
        expected += [t for t, x in zip(tokens, random.random(len(tokens)), strict=True) if x >= 0.25]
    assert run.output([7, 2]).split() == expected
    assert 0 < len(expected) < sum(len(golden(corpus.texts[row])) for row in (7, 2))


def test_rows_of_a_method_that_repeats_itself(corpus):
    outcome = evaluate(corpus, Method("same", lambda run: [0, 8]), writers=["greedy"])
    (task,) = outcome.by_writer["greedy"]
    assert [w.new for w in task.windows] == [1.0, 0.0, 0.0]
    assert [w.yield_ for w in task.windows] == [1.0, 0.0, 0.0]
    assert [w.relevant for w in task.windows] == [1.0, 1.0, 1.0]
    assert [w.repeated for w in task.windows] == [0.0, 1.0, 1.0]
    assert [w.near for w in task.windows][1:] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert [w.reach for w in task.windows] == pytest.approx([2 / 3] * 3)
    assert task.subtopic_recall == pytest.approx(2 / 3)
    done = np.minimum(1, [corpus.words[0] / 20, 0, corpus.words[8] / 20]).mean()
    assert task.completeness == pytest.approx(done)


def test_alpha_ndcg():
    labels = {0: frozenset([0]), 1: frozenset([0]), 2: frozenset([1]), 3: frozenset([0, 1])}
    assert alpha_ndcg([0, 2], labels, 2) == pytest.approx(1.0)
    ideal = 1 + 1 / math.log2(3)
    assert alpha_ndcg([0, 1], labels, 2) == pytest.approx((1 + 0.5 / math.log2(3)) / ideal)
    assert alpha_ndcg([0, 0], labels, 2) == pytest.approx(1 / ideal)
    assert alpha_ndcg([9], labels, 2) == 0.0
    assert alpha_ndcg([], labels, 2) == 0.0


def test_the_product_beats_relevance_on_the_toy(corpus):
    own = evaluate(corpus, ranked(corpus, min_relevance=-1.0, exclude_packed=True))
    plain = evaluate(corpus, baselines(["relevance"])[0])
    found = summarise(own)
    assert found["method"] == "spec + guard"
    assert found["new_by_window"] == [1.0, 1.0, 1.0]
    assert found["completeness"] > summarise(plain)["completeness"]
    assert found["completeness"] == pytest.approx(np.mean([w["completeness"] for w in found["per_writer"].values()]))
    gain = difference(own, plain)
    assert gain["better"] == 1
    assert gain["mean"] == pytest.approx(found["completeness"] - summarise(plain)["completeness"])
    json.dumps(found, allow_nan=False)


def test_without_labels_there_is_no_completeness(tmp_path):
    corpus = toy(tmp_path / "store", labels=False)
    with pytest.raises(ValueError, match="'greedy' needs labels"):
        evaluate(corpus, ranked(corpus))
    outcome = evaluate(corpus, ranked(corpus, min_relevance=-1.0), writers=["lexical", "plan"])
    found = summarise(outcome)
    assert found["completeness"] is found["ci"] is found["srecall"] is None
    assert found["yield_by_window"] == [None] * 3
    assert found["reach_by_window"] == sorted(found["reach_by_window"])
    assert found["reach_by_window"][-1] > 0.5
    assert difference(outcome, outcome) is None


def test_round_robin_takes_turns_and_never_repeats(corpus):
    run = Run(corpus, corpus.cases[0], 0)
    first = pick_round_robin(run)
    assert [row // 4 for row in first] == [0, 1]
    run.close(first, [])
    assert not set(first) & set(pick_round_robin(run))


@pytest.mark.parametrize(
    "name", ["relevance", "relevance_excluded", "mmr", "round_robin", "xquad", "pyversity_dpp", "pyversity_cover"]
)
def test_baselines_fill_the_envelope(corpus, name):
    if name.startswith("pyversity"):
        pytest.importorskip("pyversity", reason="pyversity is not installed (extra bench)")
    (method,) = baselines([name])
    (task,) = evaluate(corpus, method, writers=["plan"]).by_writer["plan"]
    assert [w.filled for w in task.windows] == [1.0] * 3
    assert task.windows[-1].new == (0.0 if name == "relevance" else 1.0)


def test_crprotocol_ranks_what_passes_its_gate(corpus):
    pytest.importorskip("crp", reason="crprotocol is not installed (pip install crprotocol)")
    (method,) = baselines(["crprotocol"])
    for task in evaluate(corpus, method, writers=["plan"]).by_writer["plan"]:
        assert 0.0 < task.windows[0].filled <= 1.0
        assert task.windows[0].new == task.windows[0].filled


@pytest.mark.parametrize(("name", "package"), [("pyversity_dpp", "pyversity"), ("crprotocol", "crp.envelope.cdr")])
def test_a_baseline_that_is_not_installed_says_how_to_install_it(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"baseline {name!r}: .*; pip install {name.partition('_')[0]}"):
        baselines([name])
    assert name not in [method.name for method in baselines()]


def test_an_unknown_baseline_or_writer_is_refused(corpus):
    with pytest.raises(ValueError, match="expected some of relevance"):
        baselines(["best"])
    with pytest.raises(ValueError, match="expected some of greedy"):
        evaluate(corpus, ranked(corpus), writers=["novelist"])


def test_interval_of_the_mean():
    assert interval([0.5] * 9) == (0.5, 0.5)
    values = np.random.default_rng(1).random(50)
    low, high = interval(values)
    assert low < values.mean() < high
    assert (low, high) == interval(values)


def test_a_difference_is_taken_task_by_task(corpus):
    outcome = evaluate(corpus, ranked(corpus), writers=["plan"])
    assert difference(outcome, outcome) == {
        "to": "spec + guard", "mean": 0.0, "ci": [0.0, 0.0], "better": 0, "worse": 0, "tasks": 1,
    }  # fmt: skip
    assert Outcome("x").by_writer == {}


def test_an_unknown_fact_in_the_labels_is_named(tmp_path):
    toy(tmp_path / "store")
    path = tmp_path / "store" / "tasks.json"
    path.write_text(path.read_text().replace("network0", "nowhere"))
    with pytest.raises(ValueError, match=r"fact_ids of '0': no fact 'nowhere'"):
        load_corpus(tmp_path / "store")


@pytest.mark.skipif(
    "CDR_DATA_DIR" not in os.environ or not (DATA / "expected_dev.json").is_file(),
    reason="CDR_DATA_DIR does not name a folder with expected_dev.json",
)
@pytest.mark.parametrize(("method", "guard"), [("spec", False), ("spec_guard", True)])
def test_the_specification_gives_the_recorded_results(method, guard):
    expected = json.loads((DATA / "expected_dev.json").read_text())["title"][method]
    corpus = load_corpus(DATA)
    found = summarise(evaluate(corpus, ranked(corpus, guard=guard)))
    assert found["completeness"] == pytest.approx({"spec": 0.1733, "spec_guard": 0.2303}[method], abs=0.002)
    for writer, tasks in expected.items():
        own = found["per_writer"][writer]["per_task"]
        near = [abs(own[task]["completeness"] - row["completeness"]) <= 0.02 for task, row in tasks.items()]
        assert np.mean(near) >= 0.95


@pytest.mark.skipif(
    "CDR_DATA_DIR" not in os.environ or not (DATA / "facts_text_minilm_f16.npy").is_file(),
    reason="CDR_DATA_DIR does not name a folder with the facts and their vectors",
)
@pytest.mark.parametrize(
    ("embedding", "source", "least"),
    [
        ("title", 0.0, 0.70),
        pytest.param("text", 0.0, 0.48, marks=pytest.mark.slow),
        pytest.param("title", 0.4, 0.78, marks=pytest.mark.slow),
        pytest.param("text", 0.4, 0.60, marks=pytest.mark.slow),
    ],
)
def test_the_calibrated_mode_holds_what_is_claimed(embedding, source, least):
    corpus = load_corpus(DATA, embedding=embedding)
    found = summarise(evaluate(corpus, ranked(corpus, mode="calibrated", source_weight=source)))
    assert found["completeness"] >= least
    assert found["new_by_window"][-1] >= 0.99
