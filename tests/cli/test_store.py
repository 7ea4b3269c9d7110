"""The commands `cdr store ...` as a user calls them, and how other commands take durable stores and filters."""

from __future__ import annotations

import json

import numpy as np
import pytest
from commands import invoke

from cdr_kernel import FactStore

DIM = 6


def answer(*arguments):
    return json.loads(invoke(*arguments, "--json").stdout.splitlines()[-1])


def error(*arguments, code=1):
    return " ".join(invoke(*arguments, code=code).stderr.split())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Facts with attributes, their vectors, more of both, and a query."""
    home = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(3)
    for name, first, count in (("facts", 0, 30), ("more", 28, 5)):
        lines = [
            {
                "id": f"f{i}",
                "text": f"fact {i}",
                "source": f"doc{i % 3}",
                "attributes": {"tenant": ["x", "y"][i % 2], "year": 2000 + i % 5, "draft": i % 4 == 0},
            }
            for i in range(first, first + count)
        ]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        np.save(home / f"{name}.npy", rng.normal(size=(count, DIM)).astype(np.float32))
    np.save(home / "q.npy", rng.normal(size=DIM))
    return home


def made(files, folder, *options):
    vectors = ("--embeddings", files / "facts.npy", "--model", "toy")
    return answer("index", files / "facts.jsonl", *vectors, "-o", folder, *options)


def ranked(files, folder, *options):
    return answer("rank", folder, "--query", files / "q.npy", "--min-relevance", "-1", "--k", "100", *options)


def test_filters_limit_a_ranking(files, tmp_path):
    made(files, tmp_path / "plain")
    every = ranked(files, tmp_path / "plain")["results"]
    for pairs, holds in {
        ("tenant=x",): lambda r: r["attributes"]["tenant"] == "x",
        ("tenant=x", "year=2001", "year=2003"): lambda r: (
            r["attributes"]["tenant"] == "x" and r["attributes"]["year"] in (2001, 2003)
        ),
        ("source=doc2", "draft=false"): lambda r: r["source"] == "doc2" and not r["attributes"]["draft"],
        ("tenant=nobody",): lambda r: False,
    }.items():
        options = [part for pair in pairs for part in ("--where", pair)]
        found = ranked(files, tmp_path / "plain", *options)["results"]
        assert [r["id"] for r in found] == [r["id"] for r in every if holds(r)]
    shown = invoke("rank", tmp_path / "plain", "--query", files / "q.npy", "--where", "tenant=x").stdout
    assert "30 in the store, 15 of them asked" in " ".join(shown.split())
    for pair in ("tenant", "language=en", "year=soon", "draft=1"):
        assert "--where" in error("rank", tmp_path / "plain", "--query", files / "q.npy", "--where", pair, code=2)


def test_filters_may_ask_for_what_is_missing(tmp_path):
    lines = [
        {"id": "a", "text": "a", "source": "s", "attributes": {"tenant": "x"}},
        {"id": "b", "text": "b", "source": "s", "attributes": {"tenant": ""}},
        {"id": "c", "text": "c", "source": "s"},
        {"id": "d", "text": "d", "attributes": {"tenant": "y"}},
    ]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    np.save(tmp_path / "v.npy", np.eye(4))
    np.save(tmp_path / "q.npy", np.ones(4))
    invoke("index", tmp_path / "f.jsonl", "--embeddings", tmp_path / "v.npy", "--model", "toy", "-o", tmp_path / "s")
    rank = ("rank", tmp_path / "s", "--query", tmp_path / "q.npy", "--min-relevance", "-1")
    for options, expected in (
        (["--where-missing", "tenant"], "c"),
        (["--where-missing", "tenant", "--where", "tenant=x"], "ac"),
        (["--where-missing", "tenant", "--where", "source=s"], "c"),
        (["--where-missing", "source"], "d"),
        (["--where-missing", "source", "--where-missing", "tenant"], ""),
        (["--where", "tenant="], "b"),
    ):
        assert "".join(result["id"] for result in answer(*rank, *options)["results"]) == expected
    assert "--where-missing: expected one of source, tenant, got 'year'" in error(
        *rank, "--where-missing", "year", code=2
    )
    assert "leave out --where" in error(*rank, "--where-missing", "tenant", "--explain", "a", code=2)
    task = {"id": "t", "query": "q", "sub_queries": [{"id": "s", "label": "s", "text": "s"}]}
    (tmp_path / "t.json").write_text(json.dumps(task))
    np.savez(tmp_path / "q.npz", **{"0:query": np.ones(4), "0:subs": np.ones((1, 4))})
    run = ("run", tmp_path / "s", tmp_path / "t.json", "--vectors", tmp_path / "q.npz", "--writer", "extract")
    invoke(*run, "--min-relevance", "-1", "--where-missing", "tenant", "-o", tmp_path / "run.json")
    done = json.loads((tmp_path / "run.json").read_text())
    assert done["settings"]["where"] == {"tenant": [None]}
    assert {fact["id"] for window in done["windows"] for fact in window["facts"]} == {"c"}


def test_attributes_of_bad_kinds_are_named(files, tmp_path):
    np.save(tmp_path / "v.npy", np.eye(2))
    vectors = ("--embeddings", tmp_path / "v.npy", "--model", "toy", "-o", tmp_path / "s")
    for first, second, what in (
        ('{"text": "a", "attributes": [1]}', '{"text": "b"}', "line 1: attributes: expected an object"),
        ('{"text": "a"}', '{"text": "b", "attributes": {"t": [1]}}', "line 2: attributes.t: expected a string"),
        ('{"text": "a", "attributes": {"t": 1}}', '{"text": "b", "attributes": {"t": "x"}}', "values of one type"),
        ('{"text": "a", "attributes": {"id": 1}}', '{"text": "b"}', "no column of every fact"),
    ):
        (tmp_path / "f.jsonl").write_text(f"{first}\n{second}\n")
        assert what in error("index", tmp_path / "f.jsonl", *vectors)


@pytest.fixture
def durable(files, tmp_path):
    pytest.importorskip("lance", reason="needs the extra store")
    folder = tmp_path / "durable"
    assert made(files, folder, "--durable")["facts"] == 30
    return folder


def test_a_durable_store_ranks_like_any_other(files, durable, tmp_path):
    made(files, tmp_path / "plain")
    for options in ((), ("--where", "tenant=y")):
        a, b = (ranked(files, folder, *options) for folder in (tmp_path / "plain", durable))
        assert a["results"] == b["results"]
    assert "found a durable store" in error(
        "index",
        files / "facts.jsonl",
        "--embeddings",
        files / "facts.npy",
        "--model",
        "toy",
        "-o",
        durable,
        "--durable",
    )


def test_facts_go_in_and_out(files, durable):
    vectors = ("--embeddings", files / "more.npy", "--model", "toy")
    assert "already" in error("store", "add", durable, files / "more.jsonl", *vectors)
    assert answer("store", "add", durable, files / "more.jsonl", *vectors, "--upsert")["added"] == 5
    assert "expected embedding model" in error(
        "store", "add", durable, files / "more.jsonl", "--embeddings", files / "more.npy", "--model", "other"
    )
    assert answer("store", "remove", durable, "f0", "f1")["removed"] == 2
    assert answer("store", "quarantine", durable, "f2", "f3", "--reason", "wrong")["quarantined"] == 2
    assert answer("store", "release", durable, "f3")["released"] == 1
    assert (found := answer("store", "expire", durable))["deleted"] == found["withheld"] == 0
    assert "'f0' not in the store" in error("store", "remove", durable, "f0")
    found = answer("store", "stats", durable)
    assert (found["facts"], found["quarantined"], found["quarantined_ids"]) == (30, 1, {"f2": "wrong"})
    assert found["attributes"] == {"draft": "bool", "tenant": "str", "year": "int"}
    assert "quarantined: f2 (wrong)" in invoke("store", "stats", durable).stdout
    ids = {r["id"] for r in ranked(files, durable)["results"]}
    assert ids == {f"f{i}" for i in range(3, 33)}


def test_a_wrong_clock_loses_nothing(files, durable, monkeypatch):
    from cdr_kernel.durable import DurableStore
    from cdr_kernel.store import _expiry

    now, day, days = _expiry.now(), 86400 * 10**6, [0]
    monkeypatch.setattr(_expiry, "now", lambda: now + days[0] * day)
    with DurableStore.open(durable) as store:
        rows = np.random.default_rng(1).standard_normal((3, store.dim))
        store.add(["new0", "new1", "new2"], ["one", "two", "three"], rows, expires_at=[now / 1e6 + 86400, None, 4e9])
    before = ranked(files, durable)["results"]
    assert len(before) == 33
    days[0] = 365  # of one machine
    for command in ("expire", "compact", "snapshot", "expire", "compact"):
        done = invoke("store", command, durable)
        assert done.exit_code == 0
        assert {r["id"] for r in ranked(files, durable)["results"]} == {r["id"] for r in before} - {"new0"}
    found = answer("store", "expire", durable)
    assert (found["deleted"], found["withheld"]) == (0, 1)
    assert answer("store", "stats", durable)["withheld"] == 1
    days[0] = 0
    assert ranked(files, durable)["results"] == before
    assert answer("store", "stats", durable)["withheld"] == 0
    for days[0], deleted in ((0, 0), (2, 0), (8, 0), (9, 1), (10, 0)):  # day 9 agrees with day 2
        found = answer("store", "expire", durable)
        assert (found["deleted"], found["withheld"]) == (deleted, int(days[0] in (2, 8)))
    days[0] = 0
    assert {r["id"] for r in ranked(files, durable)["results"]} == {r["id"] for r in before} - {"new0"}


def test_the_folder_is_kept(durable):
    before = answer("store", "stats", durable)
    answer("store", "remove", durable, "f5")
    assert answer("store", "compact", durable)["fragments"] == 1
    invoke("store", "snapshot", durable)
    after = answer("store", "stats", durable)
    assert (after["facts"], after["snapshot"], after["snapshot_version"]) == (29, "checked", after["version"])
    assert after["version"] > before["version"]


def test_a_store_is_carried_over(files, durable, tmp_path):
    answer("store", "quarantine", durable, "f7")
    assert answer("store", "export", durable, "-o", tmp_path / "x.safetensors")["facts"] == 30
    assert answer("store", "import", tmp_path / "x.safetensors", "-o", tmp_path / "again")["facts"] == 29
    assert ranked(files, durable)["results"] == ranked(files, tmp_path / "again")["results"]
    assert answer("store", "stats", tmp_path / "again")["quarantined_ids"] == {"f7": None}
    made(files, tmp_path / "plain")
    assert answer("store", "create", tmp_path / "plain", "-o", tmp_path / "third")["facts"] == 30
    assert len(FactStore.load(tmp_path / "plain")) == 30
    assert ranked(files, tmp_path / "plain")["results"] == ranked(files, tmp_path / "third")["results"]


def test_what_is_no_durable_store_is_said(files, tmp_path):
    made(files, tmp_path / "plain")
    for command in ("stats", "snapshot", "compact", "expire"):
        line = error("store", command, tmp_path / "plain")
        assert line.startswith("error: ")
        assert "cdr store create" in line
    assert "no durable store here" in error("store", "stats", tmp_path / "nothing")


def test_a_quarantined_fact_is_explained_as_one(files, tmp_path):
    pytest.importorskip("lance", reason="needs the extra store")
    made(files, tmp_path / "d", "--durable")
    answer("store", "quarantine", tmp_path / "d", "f3", "--reason", "wrong")
    answer("store", "quarantine", tmp_path / "d", "f4")
    question = ("rank", tmp_path / "d", "--query", files / "q.npy", "--min-relevance", "-1", "--explain")
    told = "'f3' is quarantined (wrong), in no ranking until it is released (`cdr store release`)"
    assert told in error(*question, "f3")
    assert "'f4' is quarantined, in no" in error(*question, "f4")
    assert "'nobody' is not in the store" in error(*question, "nobody")
    answer("store", "release", tmp_path / "d", "f3")
    assert answer(*question, "f3")["explanation"]["id"] == "f3"


def test_a_snapshot_is_no_store(files, tmp_path):
    pytest.importorskip("lance", reason="needs the extra store")
    made(files, tmp_path / "d", "--durable")
    answer("store", "snapshot", tmp_path / "d")
    said = invoke("rank", tmp_path / "d" / "snapshot", "--query", files / "q.npy", "--min-relevance", "-1").stderr
    assert f"found the snapshot of the durable store {tmp_path / 'd'} as it once was" in " ".join(said.split())
    assert "snapshot" not in invoke("rank", tmp_path / "d", "--query", files / "q.npy", "--min-relevance", "-1").stderr
    with pytest.warns(UserWarning, match="DurableStore.open"):
        loaded = FactStore.load(tmp_path / "d" / "snapshot")
    assert len(loaded) == 30
    assert len(FactStore.load(tmp_path / "d" / "snapshot", snapshot=True)) == 30  # without a warning
