"""The commands as a user calls them: what they print, where, and how they end."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import cdr_kernel
from cdr_kernel import FactStore, Session, demo
from cdr_kernel.cli import app

PACKAGE = Path(cdr_kernel.__file__).parent
FACTS = str(PACKAGE / "demo" / "facts.jsonl")
VECTORS = str(PACKAGE / "demo" / "facts_minilm_f16.npy")
QUERIES = str(PACKAGE / "demo" / "queries_minilm_f16.npz")
TASK = str(PACKAGE / "demo" / "task.json")
GATE = ["--min-relevance", "0.3"]
WRITER = """
import json, sys, time
asked = json.load(sys.stdin)
if asked["window"] == {window}:
    {action}
print("Flat network model.", *(fact["text"] for fact in asked["facts"]))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The demo corpus as `cdr index` stores it."""
    folder = tmp_path_factory.mktemp("cli") / "store"
    invoke("index", FACTS, "--embeddings", VECTORS, "--model", "demo-model", "-o", folder)
    return folder


def invoke(*arguments, code=0, env=None):
    result = CliRunner(env={"COLUMNS": "120", **(env or {})}).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    if code != 0 and result.exception is not None:
        assert isinstance(result.exception, SystemExit)
    return result


def json_of(result):
    """The one line of JSON, last on standard output."""
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def fails(*arguments, code=1):
    """The line on standard error of a command that ends with this status."""
    result = invoke(*arguments, code=code)
    assert "Traceback" not in result.stderr
    if code == 1:
        (line,) = [line for line in result.stderr.splitlines() if not line.startswith(("warning: ", "window "))]
        assert line.startswith("error: ")
        return line
    return " ".join(result.stderr.split())


def environment(**more):
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**inherited, "PYTHONPATH": path, **more}


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "cdr_kernel.cli", *(str(a) for a in arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), **options},
    )


def writer(tmp_path, window=0, action="pass"):
    path = tmp_path / "writer.py"
    path.write_text(WRITER.format(window=window, action=action))
    return f"{sys.executable} {path}"


def test_version_and_help():
    assert invoke("--version").stdout == f"cdr-kernel {cdr_kernel.__version__}\n"
    for command in ("demo", "index", "ingest", "rank", "run", "gate", "doctor"):
        assert command in invoke("--help").stdout
        assert "--json" in invoke(command, "--help").stdout


def test_help_is_quick_and_loads_nothing_heavy():
    heavy = ("torch", "faiss", "pyarrow", "transformers", "sentence_transformers")
    code = (
        "import sys, time; started = time.process_time(); sys.argv = ['cdr', '--help']\n"
        "from cdr_kernel.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print(time.process_time() - started, [m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    best = min(_seconds_and_modules(code) for _ in range(3))
    assert best < 0.3


def _seconds_and_modules(code):
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    seconds, _, modules = done.stderr.strip().partition(" ")
    assert modules == "[]"
    return float(seconds)


def test_demo_shows_both_runs():
    text = invoke("demo").stdout
    assert text.count("limit-reached") >= 3
    for part in (
        "By relevance alone",
        "By CDR",
        "CRP-Context-Coverage-Score: 1.00",
        "Remaining sections to complete: ",
    ):
        assert part in text
    assert text.count("CDR, window ") == 5
    assert re.search(r"cosine of 0\.3 to the query: \d+ have it\. The\s+specification's 0\.55", text)
    tables = re.findall(r"^ *(\d) +(\d+) +(\d+) +(\d+) +\d\.\d\d", text, re.MULTILINE)
    assert [row[0] for row in tables] == list("1234512345")
    assert all(int(packed) == int(fresh) + int(seen) for _, packed, fresh, seen in tables)


def test_demo_as_json():
    found = json_of(invoke("demo", "--json", "--windows", "2", "--k", "4", "--min-relevance", "0.4"))
    assert (found["min_relevance"], found["model"], found["facts"]) == (0.4, demo.EMBEDDING_MODEL, 478)
    assert set(found["runs"]) == {"relevance", "cdr", "cdr_without_guard"}
    for windows in found["runs"].values():
        assert [(window["number"], window["facts"]) for window in windows] == [(1, 4), (2, 4)]
    last = found["runs"]["cdr"][-1]
    assert last["exit"]["reason"] == last["headers"]["CRP-Context-Continuation-Status"] == "limit-reached"
    assert found["conclusion"]


@pytest.mark.parametrize("columns", ["30", "60", "80", "200"])
def test_tables_fit_the_terminal(store, columns):
    width = int(columns)
    rows = invoke("rank", store, "--query", f"{QUERIES}:0:query", env={"COLUMNS": columns}).stdout.splitlines()
    assert len(rows) >= 12
    assert max(map(len, rows)) <= width
    text = invoke("demo", env={"COLUMNS": columns}).stdout
    assert max(map(len, text.splitlines())) <= width
    if width >= 80:
        assert "novelty  least  topics  words" in text


@pytest.mark.parametrize("columns", ["20", "30", "40", "60", "120"])
def test_a_narrow_table_keeps_why_a_run_ended(store, columns):
    arguments = ("run", store, TASK, "--vectors", QUERIES, "--writer", "extract", *GATE)
    rows = invoke(*arguments, env={"COLUMNS": columns}).stdout.splitlines()
    assert max(map(len, rows)) <= int(columns)
    assert [row for row in rows if re.match(r" *5 .*limit-reached$", row)]
    assert ("done" in " ".join(rows)) == (columns != "20")


def test_no_file_steers_the_terminal(tmp_path):
    escape = "\x1b]0;owned\x07"
    facts, vectors, task = tmp_path / "f.jsonl", tmp_path / "e.npy", tmp_path / "t.json"
    facts.write_text("".join(json.dumps({"id": f"{escape}{i}", "text": f"{escape} text"}) + "\n" for i in range(2)))
    np.save(vectors, np.array([[1.0, 2.0], [0.0, 0.0]]))
    model = ("--model", escape)
    index = ("index", facts, "--embeddings", vectors, *model, "-o", tmp_path / "s", "--on-invalid", "skip")
    item = {"id": escape, "label": escape, "text": escape}
    task.write_text(json.dumps({"id": "t", "query": escape, "sub_queries": [item]}))
    np.savez(tmp_path / "q.npz", **{"0:query": np.ones(2), "0:subs": np.ones((1, 2))})
    run = ("run", tmp_path / "s", task, "--vectors", tmp_path / "q.npz", "--writer", "extract", "--k", "1")
    results = [invoke(*index), invoke(*run), invoke(*run, "--task-id", escape, code=1)]
    results.append(invoke("rank", tmp_path / "s", "--query", vectors, "--model", "m", code=1))
    for result in results:
        assert "owned" in result.output
        assert not {"\x1b", "\x07"} & set(result.output)


def test_output_for_terminals_that_know_no_unicode(store, tmp_path):
    facts, vectors, odd = tmp_path / "f.jsonl", tmp_path / "e.npy", tmp_path / "odd"
    facts.write_text(json.dumps({"id": "\x1b[31mü", "text": "[bold]é\x1b[0m \ud800 two\nlines"}))
    np.save(vectors, np.ones((1, 3), np.float32))
    invoke("index", facts, "--embeddings", vectors, "--model", "m", "-o", odd)
    plain = environment(PYTHONIOENCODING="ascii", NO_COLOR="1", TERM="dumb", COLUMNS="120")
    shown = subprocess.run(
        [sys.executable, "-m", "cdr_kernel.cli", "rank", odd, "--query", vectors],
        env=plain,
        capture_output=True,
        check=True,
    )
    assert b"\x1b" not in shown.stdout
    assert b"[bold]??[0m ? two lines" in shown.stdout
    found = json_of(invoke("rank", odd, "--query", vectors, "--json"))["results"][0]
    assert (found["id"], found["text"]) == ("\x1b[31mü", "[bold]é\x1b[0m \ud800 two\nlines")


def test_index_says_what_it_made(store, tmp_path):
    loaded = FactStore.load(store)
    assert (len(loaded), loaded.dim, loaded.dtype.name, loaded.embedding_model) == (478, 384, "float32", "demo-model")
    assert loaded.get(["flat-model-01"])[0].source == "flat-model"
    arguments = ("index", FACTS, "--embeddings", VECTORS, "--model", "m", "-o", tmp_path / "s", "--json")
    part = json_of(invoke(*arguments, "--rows", "10:30", "--dtype", "float16"))
    expected = {"store": str(tmp_path / "s"), "facts": 20, "skipped": [], "dim": 384, "dtype": "float16", "model": "m"}
    expected["codes"] = False
    assert part == expected
    assert json_of(invoke(*arguments, "--rows", ":5"))["facts"] == 5
    assert json_of(invoke(*arguments, "--rows", "470:"))["facts"] == 8


def test_index_skips_what_is_asked_to_be_skipped(tmp_path):
    facts, vectors = tmp_path / "f.jsonl", tmp_path / "e.npy"
    facts.write_text('{"id": "a", "text": "x"}\n{"id": "b", "text": "y"}\n')
    np.save(vectors, np.array([[1.0, 2.0], [0.0, 0.0]]))
    arguments = ("index", facts, "--embeddings", vectors, "--model", "m", "-o", tmp_path / "s")
    assert "e.npy, row 1 (fact 'b', line 2 of" in fails(*arguments)
    assert not (tmp_path / "s").exists()
    result = invoke(*arguments, "--on-invalid", "skip", "--json")
    assert "1 facts left out" in result.stderr
    assert json_of(result)["skipped"] == ["b"]


@pytest.mark.skipif(os.name == "nt", reason="no FIFO")
@pytest.mark.parametrize("name", ["-", "/dev/stdin", "fifo"])
def test_index_reads_facts_from_a_pipe(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    content = Path(FACTS).read_bytes()
    path = tmp_path / "fifo" if name == "fifo" else name
    if name == "fifo":
        os.mkfifo(path)

    def index(content):
        process = start(
            "index",
            path,
            "--embeddings",
            VECTORS,
            "--model",
            "m",
            "-o",
            tmp_path / "s",
            "--json",
            stdin=subprocess.PIPE,
        )
        if name == "fifo":
            path.write_bytes(content)
        out, err = process.communicate(b"" if name == "fifo" else content, timeout=60)
        return process.returncode, out, err.decode()

    code, out, err = index(content)
    assert (code, err, json.loads(out)["facts"]) == (0, "", 478)
    code, _, err = index(b"\n[")
    shown = "standard input" if name == "-" else path
    assert code == 1
    assert err.startswith(f"error: {shown}, line 2: expected one JSON object, got '['")
    assert not list(tmp_path.glob("cdr-facts-*"))


def test_index_refuses(tmp_path):
    out = ["-o", tmp_path / "s"]
    vectors = ["--embeddings", VECTORS, "--model", "m"]
    assert "either --embeddings E.npy with --model, or --embed" in fails("index", FACTS, *out, code=2)
    assert "either --embeddings" in fails("index", FACTS, *out, *vectors, "--embed", "x", code=2)
    assert "--model: expected a name" in fails("index", FACTS, *out, *vectors[:2], "--model", " ", code=2)
    assert "expected --model with" in fails("index", FACTS, *out, *vectors[:2], code=2)
    for rows in ("x", "3", "5:5", "-1:4", "1:2:3"):
        assert "--rows: expected A:B" in fails("index", FACTS, *out, *vectors, "--rows", rows, code=2)
    assert "found 478 facts" in fails("index", FACTS, *out, *vectors, "--rows", "0:479")
    assert "float16" in fails("index", FACTS, *out, *vectors, "--dtype", "int8", code=2)
    assert "none.jsonl: No such file" in fails("index", tmp_path / "none.jsonl", *out, *vectors)
    assert "expected all-MiniLM-L6-v2 or the folder of a model, got 'x'" in fails("index", FACTS, *out, "--embed", "x")
    (tmp_path / "s").write_text("mine")
    assert "expected a store or a new folder, found a file" in fails("index", FACTS, *out, *vectors)
    assert (tmp_path / "s").read_text() == "mine"


def test_embedding_without_the_extra_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    line = fails("index", FACTS, "-o", tmp_path / "s", "--embed", "all-MiniLM-L6-v2")
    assert 'pip install ".[embed]"' in line


def test_embedding_with_a_model(tmp_path, monkeypatch, store):
    def load(model):
        assert model == "toy"
        return lambda texts: np.array([[len(text), 1.0 + text.count("e"), 1.0] for text in texts])

    monkeypatch.setattr("cdr_kernel.embedder.load_embedder", load)
    made = json_of(invoke("index", FACTS, "--embed", "toy", "-o", tmp_path / "s", "--json"))
    assert (made["model"], made["dim"], made["facts"]) == ("toy", 3, 478)
    found = json_of(invoke("rank", tmp_path / "s", "--query", "what now", "--embed", "toy", "--json"))
    assert len(found["results"]) == 10
    done = json_of(invoke("run", tmp_path / "s", TASK, "--embed", "toy", "--writer", "extract", "--json"))
    assert done["complete"]
    assert "--embed: expected embedding model 'demo-model', got 'toy'" in fails(
        "rank", store, "--query", "what", "--embed", "toy"
    )


def test_rank_agrees_with_the_library(store):
    found = json_of(invoke("rank", store, "--query", f"{QUERIES}:0:query", "--k", "7", "--json", *GATE))
    corpus = demo.load()
    session = Session(corpus.sub_queries, embedding_model=demo.EMBEDDING_MODEL, min_relevance=0.3)
    ranking = cdr_kernel.cdr_rank(corpus.query, cdr_kernel.Retriever(corpus.store), session, k=7)
    assert [result["id"] for result in found["results"]] == ranking.ids
    assert [result["score"] for result in found["results"]] == ranking.score.tolist()
    assert (found["qualified"], found["facts"], found["model"]) == (ranking.qualified, 478, "demo-model")
    for kind in ("flat", "hnsw", "ivf"):
        other = json_of(invoke("rank", store, "--query", f"{QUERIES}:0:query", "--kind", kind, "--json", *GATE))
        assert other["results"][0] == found["results"][0]


def test_rank_with_coverage_and_residual(store, tmp_path):
    corpus = demo.load()
    vectors = np.stack([item.embedding for item in corpus.sub_queries])
    np.save(tmp_path / "c.npy", vectors[:2])
    np.save(tmp_path / "r.npy", vectors[2:])
    arguments = ["rank", store, "--query", f"{QUERIES}:0:query", "--json", *GATE]
    sets = ["--coverage", tmp_path / "c.npy", "--residual", tmp_path / "r.npy"]
    session = Session(corpus.sub_queries, embedding_model=demo.EMBEDDING_MODEL, min_relevance=0.3, guard=False)
    depths = {"0": 0.9, "1": 0.2}
    session.update(cdr_kernel.WindowReport(0.2, tuple(depths), depths), "", embedding_model=demo.EMBEDDING_MODEL)
    ranking = cdr_kernel.cdr_rank(corpus.query, cdr_kernel.Retriever(corpus.store), session, k=10)
    results = json_of(invoke(*arguments, *sets, "--depths", ".9,.2"))["results"]
    assert [result["id"] for result in results] == ranking.ids
    for name in ("score", "coverage", "residual_pull", "novelty"):
        assert [result[name] for result in results] == getattr(ranking, name).tolist()

    same = json_of(invoke(*arguments, *sets, "--depths", ".5"))["results"]
    assert json_of(invoke(*arguments, *sets))["results"] == same != results
    alone = invoke(*arguments, *sets[2:])
    assert "warning: --residual pulls only beside --coverage" in alone.stderr
    assert {result["residual_pull"] for result in json_of(alone)["results"]} == {0.0}
    pulled = json_of(invoke(*arguments, *sets[2:], "--first-window-pull"))["results"]
    assert all(result["residual_pull"] > 0.0 for result in pulled)
    for depths in ("2", ".1,.2,.3", "x", ""):
        assert "--depths: expected 2 numbers" in fails(*arguments, *sets, "--depths", depths, code=2)
    assert "--depths goes with --coverage" in fails(*arguments, "--depths", ".5", code=2)


def test_a_store_that_cannot_be_written_is_named_as_it_was_given(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "data-1f/embeddings.npy")

    monkeypatch.setattr("cdr_kernel.store.FactStore.save", full)
    line = fails("index", FACTS, "--embeddings", VECTORS, "--model", "m", "-o", tmp_path / "s")
    assert line == f"error: {tmp_path / 's'}: the store could not be written (No space left on device)"


def test_rank_refuses(store, tmp_path):
    query = ["--query", f"{QUERIES}:0:query"]
    np.save(tmp_path / "short.npy", np.ones(3))
    assert "short.npy: expected dimension 384, got 3" in fails("rank", store, "--query", tmp_path / "short.npy")
    assert "expected an array '9:query'" in fails("rank", store, "--query", f"{QUERIES}:9:query")
    assert "no store here" in fails("rank", tmp_path, *query)
    assert "--model: expected embedding model 'demo-model', got 'm'" in fails("rank", store, *query, "--model", "m")
    assert "is a text: expected --embed MODEL" in fails("rank", store, "--query", "pods", code=2)
    for name in ("queries.np", "q.npx", "none/q.npz:"):
        assert f"{name}: no such file, expected Q.npy" in fails("rank", store, "--query", name)
    assert "q.npy: No such file" in fails("rank", store, "--query", "q.npy")
    assert "q.npz: No such file" in fails("rank", store, "--query", "q.npz:0")
    assert "expected a NumPy array" in fails("rank", store, "--query", TASK)
    assert "expected Q.npy" in fails("rank", store, "--query", " ", code=2)
    assert "--embed is for a text" in fails("rank", store, *query, "--embed", "m", code=2)
    for wrong in (["--k", "-1"], ["--min-relevance", "1.5"], ["--min-relevance", "nan"], ["--kind", "x"]):
        fails("rank", store, *query, *wrong, code=2)
    assert json_of(invoke("rank", store, *query, "--k", "0", "--json"))["results"] == []
    nothing = invoke("rank", store, *query, "--min-relevance", "0.99", "--json")
    assert json_of(nothing)["results"] == []
    assert re.search(r"no fact reaches --min-relevance 0\.99; the largest cosine .* is 0\.\d\d\d", nothing.stderr)


def test_an_error_is_one_line_of_json_too(tmp_path):
    result = invoke("rank", tmp_path, "--query", f"{QUERIES}:0:query", "--json", code=1)
    assert result.stderr == f"error: {json_of(result)['error']}\n"


def test_run_writes_the_whole_run(store, tmp_path):
    path = tmp_path / "run.json"
    arguments = ("run", store, TASK, "--vectors", QUERIES, "--writer", "extract", *GATE)
    brief = json_of(invoke(*arguments, "-o", path, "--json"))
    run = json.loads(path.read_text())
    assert (run["schema"], run["complete"], run["error"], run["model"]) == (1, True, None, "demo-model")
    assert run["task"]["id"] == brief["task"] == "kubernetes-networking"
    assert run["store"] == {"path": str(store), "facts": 478, "dim": 384, "dtype": "float32"}
    assert (run["settings"]["windows"], run["settings"]["k"], run["settings"]["guard"]) == (5, 10, True)
    same = demo.run_demo(demo.load())["cdr"].windows
    for got, expected in zip(run["windows"], json.loads(json.dumps(same)), strict=True):
        model = {"embedding_model": "demo-model"}
        assert {**got, "report": {**got["report"], **model}} == {**expected, "report": {**expected["report"], **model}}
    fact = run["windows"][2]["facts"][0]
    product = fact["importance"] * max(fact["relevance"], fact["residual_pull"]) * fact["novelty"]
    assert fact["score_without_guard"] == pytest.approx(product, abs=1e-12)
    penalty = min(0.8, 0.15 * fact["ngram_overlap"])
    assert fact["score"] == pytest.approx(fact["score_without_guard"] * (1.0 - penalty), abs=1e-12)
    assert brief["exit"] == run["windows"][-1]["exit"]
    assert brief["completeness"] == run["windows"][-1]["report"]["completeness_score"]
    table = invoke(*arguments).stdout
    assert "Ended after window 5: limit-reached; completeness 0." in table


def test_run_takes_its_settings(store, tmp_path):
    arguments = ["run", store, TASK, "--vectors", QUERIES, "--writer", "extract", "--json", *GATE]
    path = tmp_path / "run.json"

    def run_with(*options):
        invoke(*arguments, "-o", path, *options)
        return json.loads(path.read_text())["windows"]

    assert [len(window["facts"]) for window in run_with("--windows", "2", "--k", "3")] == [3, 3]
    small = run_with("--token-budget", "100", "--windows", "1")[0]["envelope"]
    assert small["tokens"] <= small["token_budget"] == 100
    assert small["skipped"] > 0
    assert all(window["repeated"] == 0 for window in run_with("--exclude-packed", "--no-guard"))
    unguarded = run_with("--no-guard")
    assert sum(window["repeated"] for window in unguarded) > 0
    assert {window["envelope"]["guard_activations"] for window in unguarded} == {0}
    assert run_with("--kind", "flat") == run_with()
    none = invoke(*arguments, "--min-relevance", "0.99")
    assert json_of(none)["exit"]["reason"] == "ckf-exhausted"
    assert "the largest cosine to the query" in none.stderr
    tight = json_of(invoke(*arguments, "--token-budget", "1"))
    assert tight["exit"]["detail"].endswith("fits into 1 tokens")


def test_run_in_the_calibrated_mode(store, tmp_path):
    path = tmp_path / "run.json"
    arguments = ["run", store, TASK, "--vectors", QUERIES, "--writer", "extract", "--mode", "calibrated", "-o", path]

    def run_with(*options):
        brief = json_of(invoke(*arguments, "--json", *options))
        found = json.loads(path.read_text())
        assert brief["windows"][-1]["fresh"] == found["windows"][-1]["fresh"]
        return found

    run = run_with("--gate", "1")
    settings = run["settings"]
    assert (settings["mode"], settings["pack"], settings["guard"]) == ("calibrated", "need", False)
    assert settings["min_relevance"] is None
    own = settings["calibrated"]
    assert (own["gate"], own["gate_on"], own["source_weight"]) == (1.0, "best", 0.0)
    assert own["feedback_weight"] > 0.0
    assert len(run["windows"]) == 5
    assert all((window["fresh"], window["repeated"]) == (10, 0) for window in run["windows"])
    shares = [window["envelope"]["new_share"] for window in run["windows"]]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    picked = [window["envelope"]["ids"] for window in run["windows"]]
    for options, part in (
        (("--gate-on", "query"), {"gate_on": "query"}),
        (("--source", "0.4"), {"source_weight": 0.4}),
    ):
        other = run_with("--gate", "1", *options)
        assert {name: other["settings"]["calibrated"][name] for name in part} == part
        assert [window["envelope"]["ids"] for window in other["windows"]] != picked
    greedy = run_with("--gate", "1", "--pack", "greedy", "--guard")
    assert (greedy["settings"]["pack"], greedy["settings"]["guard"]) == ("greedy", True)
    scores = [fact["score"] for fact in greedy["windows"][0]["facts"]]
    assert scores == sorted(scores, reverse=True)
    assert greedy["windows"][0]["envelope"]["ids"] != picked[0]
    largest = []
    for options in ((), ("--gate-on", "query")):
        none = invoke(*arguments, "--json", "--gate", "99", *options)
        assert json_of(none)["exit"]["detail"] == "no fact passed the relevance gate"
        (number,) = re.findall(r"no fact reaches --gate 99; the largest in this store is ([\d.]+) deviat", none.stderr)
        largest.append(float(number))
    assert 2.0 < largest[1] < largest[0]
    spec = json_of(invoke(*arguments[:-4], "-o", path, "--json", *GATE))
    assert spec["complete"]
    settings = json.loads(path.read_text())["settings"]
    assert (settings["mode"], settings["pack"], settings["guard"], settings["calibrated"]) == (
        "spec",
        "greedy",
        True,
        None,
    )


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("calibrated", ["--min-relevance", "0.3"]),
        ("calibrated", ["--exclude-packed"]),
        ("spec", ["--gate", "2"]),
        ("spec", ["--gate-on", "query"]),
        ("spec", ["--source", "0.4"]),
        ("spec", ["--pack", "need"]),
    ],
)
def test_run_refuses_parts_of_the_other_mode(store, mode, options):
    other = "spec" if mode == "calibrated" else "calibrated"
    said = fails("run", store, TASK, "--vectors", QUERIES, "--writer", "extract", "--mode", mode, *options, code=2)
    assert f"{options[0]}" in said
    assert f"is of mode {other}, not of {mode}" in said


def test_run_picks_its_task(store, tmp_path):
    document = json.loads(Path(TASK).read_text())
    single = document["tasks"][0]
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"schema": 1, "tasks": [single, {**single, "id": 17, "windows": 1}]}))
    with np.load(QUERIES) as stored:
        arrays = {key.replace("0:", f"{i}:", 1): stored[key] for i in range(2) for key in stored.files}
    np.savez(tmp_path / "q.npz", **arrays)
    arguments = ("run", store, path, "--vectors", tmp_path / "q.npz", "--writer", "extract", "--json", *GATE)
    assert json_of(invoke(*arguments))["task"] == single["id"]
    other = json_of(invoke(*arguments, "--task-id", "17"))
    assert (other["task"], len(other["windows"])) == ("17", 1)
    assert "expected a task '18', found kubernetes-networking, 17" in fails(*arguments, "--task-id", "18")
    path.write_text(json.dumps(single))
    assert json_of(invoke(*arguments))["task"] == single["id"]


def test_run_refuses(store, tmp_path):
    arguments = ["run", store, TASK, "--vectors", QUERIES, "--writer"]
    assert "expected --vectors Q.npz, or --embed MODEL" in fails("run", store, TASK, "--writer", "extract", code=2)
    assert "--writer" in fails("run", store, TASK, "--vectors", QUERIES, code=2)
    assert "--writer: expected a command" in fails(*arguments, "no-such-command", code=2)
    assert "got 'x'" in fails(*arguments, "extract", "--embed", "x")
    for wrong in (["--windows", "21"], ["--k", "0"], ["--token-budget", "0"]):
        fails(*arguments, "extract", *wrong, code=2)
    for seconds in ("0", "inf", "1e300", "nan"):
        assert "--writer-timeout" in fails(*arguments, "true", "--writer-timeout", seconds, code=2)
        fails(*arguments, "extract", *wrong, code=2)
    assert "expected a file to write to" in fails(*arguments, "extract", "-o", tmp_path)
    assert "expected its folder" in fails(*arguments, "extract", "-o", tmp_path / "no" / "run.json")
    (tmp_path / "bad.json").write_text("{")
    assert "bad.json, line 1, column 2: expected JSON" in fails(
        "run", store, tmp_path / "bad.json", *arguments[3:], "x"
    )


def test_run_never_writes_over_what_it_reads(store, tmp_path):
    task, vectors = tmp_path / "task.json", tmp_path / "q.npz"
    task.write_bytes(Path(TASK).read_bytes())
    vectors.write_bytes(Path(QUERIES).read_bytes())
    (tmp_path / "link.json").symlink_to(task)
    os.link(task, tmp_path / "hard.json")
    before = {path: path.read_bytes() for path in (task, vectors, store / "manifest.json")}
    arguments = ("run", store, task, "--vectors", vectors, "--writer", "extract", *GATE, "-o")
    for output in (task, tmp_path / "link.json", tmp_path / "hard.json", vectors, store / "manifest.json"):
        assert "expected a file of its own to write to, found what is read" in fails(*arguments, output)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="no /dev/stdout")
@pytest.mark.parametrize("to_file", [False, True])
def test_run_to_standard_output(store, tmp_path, to_file):
    arguments = ["run", store, TASK, "--vectors", QUERIES, "--writer", "extract", *GATE, "-o", "/dev/stdout"]
    path = tmp_path / "out"

    def output(*more):
        with open(path, "wb") as file:
            process = start(*arguments, *more, **({"stdout": file} if to_file else {}))
            out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, b"")
        return path.read_text() if to_file else out.decode()

    run = json.loads(output())
    assert (run["complete"], len(run["windows"])) == (True, 5)
    *document, line = output("--json").splitlines()
    assert json.loads("\n".join(document))["windows"] == run["windows"]
    assert json.loads(line)["complete"]


def test_run_with_a_command(store, tmp_path):
    path = tmp_path / "run.json"
    command = writer(tmp_path)
    result = invoke(
        "run", store, TASK, "--vectors", QUERIES, "--writer", command, "--windows", "2", "-o", path, "--json", *GATE
    )
    windows = json.loads(path.read_text())["windows"]
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == [
        "window 1 of at most 2",
        "window 2 of at most 2",
    ]
    for window in windows:
        assert window["output"] == "Flat network model. " + " ".join(window["envelope"]["texts"]) + "\n"
    assert "0" in windows[0]["report"]["addressed"]
    assert json_of(result)["complete"]


def test_run_tells_a_command_what_the_task_is(store, tmp_path):
    path, asked = tmp_path / "run.json", tmp_path / "asked"
    command = writer(tmp_path, window=3, action=f"json.dump(asked, open({str(asked)!r}, 'w'))")
    arguments = ["run", store, TASK, "--vectors", QUERIES, "--writer", command, "--windows", "3", "-o", path, *GATE]
    invoke(*arguments)
    told = json.loads(asked.read_text())
    task = json.loads(Path(TASK).read_text())["tasks"][0]
    assert told["task"]["query"] == task["query"]
    assert [item["text"] for item in told["task"]["sub_queries"]] == [item["text"] for item in task["sub_queries"]]
    assert (told["window"], told["max_windows"], told["token_budget"]) == (3, 3, None)
    assert told["backward_summary"] is None
    invoke(*arguments, "--backward-summary", "--token-budget", "900")
    told, run = json.loads(asked.read_text()), json.loads(path.read_text())
    assert told["token_budget"] == 900
    assert told["backward_summary"] == "\n\n".join(window["output"] for window in run["windows"][:2])
    assert run["settings"]["backward_summary"] is True
    refused = fails("run", store, TASK, "--vectors", QUERIES, "--writer", "extract", "--backward-summary", code=2)
    assert "--backward-summary is for a command" in refused


@pytest.mark.parametrize(
    ("action", "options", "part"),
    [
        ("sys.exit(7)", [], "ended with exit status 7, expected 0"),
        ("sys.stdout.buffer.write(b'\\xff'); sys.exit()", [], "expected UTF-8"),
        ("sys.exit()", [], "printed nothing"),
        ("time.sleep(60)", ["--writer-timeout", "1"], "took longer than 1 s"),
    ],
)
def test_run_keeps_what_a_failing_command_wrote(store, tmp_path, action, options, part):
    path = tmp_path / "run.json"
    command = writer(tmp_path, window=2, action=action)
    line = fails("run", store, TASK, "--vectors", QUERIES, "--writer", command, "-o", path, *GATE, *options)
    assert "window 2: the writer" in line
    assert part in line
    run = json.loads(path.read_text())
    assert (run["complete"], len(run["windows"])) == (False, 1)
    assert f"error: {run['error']}" == line
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.json", "writer.py"]


def test_warnings_go_to_standard_error(tmp_path):
    facts = tmp_path / "f.jsonl"
    lines = [{**json.loads(line), "importance": 0.1} for line in Path(FACTS).read_text().splitlines()]
    facts.write_text("\n".join(map(json.dumps, lines)))
    invoke("index", facts, "--embeddings", VECTORS, "--model", "m", "-o", tmp_path / "s")
    result = invoke("run", tmp_path / "s", TASK, "--vectors", QUERIES, "--writer", "extract", "--json", *GATE)
    found = json_of(result)
    assert found["exit"]["reason"] == "ckf-exhausted"
    (window,) = found["windows"]
    assert (window["facts"], window["written"], window["topics_reached"], window["words"]) == (10, False, 0, 0)
    assert result.stderr.startswith("warning: the facts of window 1 have a mean importance of 0.1")


@pytest.mark.skipif(os.name == "nt", reason="no such signals for another process")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_the_finished_windows_and_ends_the_writer(store, tmp_path, number):
    path, started, late = tmp_path / "run.json", tmp_path / "started", tmp_path / "late"
    action = f"open({str(started)!r}, 'w').close(); time.sleep(2); open({str(late)!r}, 'w').close()"
    command = writer(tmp_path, window=2, action=action)
    process = start("run", store, TASK, "--vectors", QUERIES, "--writer", command, "-o", path, "--json", *GATE)
    wait_for(started)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (128 + number, b"")
    assert err.decode().splitlines()[-1] == "interrupted"
    run = json.loads(path.read_text())
    assert (run["complete"], run["error"], len(run["windows"])) == (False, "interrupted", 1)
    time.sleep(2.2)
    assert not late.exists()


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.skipif(os.name == "nt", reason="no such signals for another process")
def test_ctrl_c_while_importing_shows_no_traceback(tmp_path):
    slow, started = tmp_path / "cdr_kernel", tmp_path / "started"
    slow.mkdir()
    (slow / "__init__.py").write_text(f"import time; open({str(started)!r}, 'w').close(); time.sleep(60)")
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PACKAGE.parent)!r}]; import _cdr_main; _cdr_main.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    wait_for(started)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"interrupted\n")


@pytest.mark.parametrize("entry", [["-m", "cdr_kernel"], ["-c", "import _cdr_main; _cdr_main.main()"]])
def test_the_ways_in(entry):
    command = [sys.executable, *entry, "--version"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == f"cdr-kernel {cdr_kernel.__version__}\n"
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"cdr": "_cdr_main:main"}


@pytest.mark.parametrize("error", [RuntimeError("odd\nthing"), RecursionError("deep"), TypeError("x"), IndexError("y")])
def test_any_error_is_one_line(store, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("cdr_kernel.cli.cdr_kernel.cdr_score", fail)
    arguments = ("rank", store, "--query", f"{QUERIES}:0:query", "--json")
    result = invoke(*arguments, code=1)
    line = f"{type(error).__name__}: {' '.join(str(error).split())} (CDR_KERNEL_DEBUG=1 shows where)"
    assert (result.stderr, json_of(result)) == (f"error: {line}\n", {"error": line})
    debugged = invoke(*arguments, code=1, env={"CDR_KERNEL_DEBUG": "1"}).stderr
    assert debugged.startswith("Traceback")
    assert debugged.endswith(f"error: {line}\n")


def test_a_store_of_any_damage_is_one_line(store, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(store, bad)
    manifest = bad / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_text("[" * 100_000)
    assert str(bad) in fails("rank", bad, "--query", f"{QUERIES}:0:query")
    manifest.write_bytes(good)
    array = next(bad.glob("data-*/importance.npy"))
    content = array.read_bytes()
    for old, new in ((b"'descr'", b"'descr\n"), (b"(478,)", b"([[[[["), (b"'<f8'", b"{1:2}"), (b"'<f8'", b"'(,)'")):
        assert old in content
        array.write_bytes(content.replace(old, new))
        assert str(bad) in fails("rank", bad, "--query", f"{QUERIES}:0:query")


@pytest.mark.parametrize("arguments", [["rank"], ["rank", "x", "--nope"], ["nope"], ["demo", "--k", "0"]])
def test_wrong_usage_is_one_line_of_json_too(arguments):
    process = start(*arguments, "--json")
    out, err = process.communicate(timeout=60)
    (line,) = out.decode().splitlines()
    assert process.returncode == 2
    assert json.loads(line)["error"] in " ".join(err.decode().split())
    process = start(*arguments)
    assert process.communicate(timeout=60) == (b"", err)


@pytest.mark.skipif(os.name == "nt", reason="pipes of another kind")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["demo"],
        ["rank", "STORE", "--query", f"{QUERIES}:0:query", "--k", "478", "--min-relevance", "-1", "--json"],
    ],
)
def test_a_closed_pipe_is_no_error(store, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "cdr_kernel.cli", *(str(store) if a == "STORE" else a for a in arguments)],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=environment(),
        check=False,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["demo"], ["demo", "--json"]])
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "cdr_kernel.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    (line,) = process.stderr.decode().splitlines()
    assert process.returncode == 1
    assert line == "error: standard output: No space left on device"


def test_doctor_knows_the_machine():
    found = json_of(invoke("doctor", "--json"))
    assert found["versions"]["cdr_kernel"] == cdr_kernel.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["simd"] in found["simd_levels"]
    assert found["threads"] >= 1
    assert found["impl_for_cpu"] in found["impls"]
    assert found["problems"] == []
    text = invoke("doctor").stdout
    for part in ("torch", "SIMD", "threads", "GPU", "facts on the CPU"):
        assert part in text


def test_doctor_survives_what_is_missing(monkeypatch):
    for name in ("torch", "faiss"):
        monkeypatch.setitem(sys.modules, name, None)
    wrong = {"CDR_KERNEL_IMPL": "warp", "CDR_KERNEL_THREADS": "many", "CDR_KERNEL_SPEED": "9"}
    result = invoke("doctor", "--json", env=wrong)
    found = json_of(result)
    assert (found["versions"]["torch"], found["versions"]["faiss"], found["gpus"]) == (None, None, [])
    assert found["environment"].items() >= wrong.items()
    for name in ("torch", "faiss", "impl_for_cpu", "CDR_KERNEL_THREADS", "CDR_KERNEL_SPEED"):
        assert any(problem.startswith(f"{name}: ") for problem in found["problems"])
    shown = invoke("doctor", env=wrong)
    assert re.search(r"torch +missing", shown.stdout)
    assert "warning: faiss: not installed: pip install faiss-cpu" in shown.stderr


def test_gate(store):
    found = json_of(invoke("gate", store, "--queries", f"{QUERIES}:0:subs", "--json", "--k", "5"))
    assert (found["facts"], found["wanted"], found["model"]) == (478, 25, "demo-model")
    assert [row["gate"] for row in found["gates"]] == [0.5, 0.55, 0.65]
    counts = [row["passing"]["median"] for row in found["gates"]]
    assert counts == sorted(counts, reverse=True)
    assert 0 < found["suggested_min_relevance"] < 1
    text = invoke("gate", store, "--queries", f"{QUERIES}:0:subs", "--k", "5").stdout
    assert f"--min-relevance {found['suggested_min_relevance']:g} leaves 25 facts to nine queries in ten." in text
    assert "expected a NumPy array" in fails("gate", store, "--queries", TASK)


def test_rank_says_when_the_gate_leaves_fewer_than_k(store):
    result = invoke("rank", store, "--query", f"{QUERIES}:0:query", "--min-relevance", "0.7", "--k", "50")
    assert "fewer than --k 50: see `cdr gate`" in result.stderr
