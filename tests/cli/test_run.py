"""`cdr demo` and `cdr run` as a user calls them; `cdr report` is tested in test_report.py."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from commands import GATE, QUERIES, TASK, fails, index_demo, invoke, json_of, start, writer

from cdr_kernel import demo


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return index_demo(tmp_path_factory.mktemp("cli") / "store")


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
    tight = fails(*arguments, "--token-budget", "1")
    assert "token_budget: no fact fits into 1 token, 213 facts passed" in tight  # R39: not "ingest more documents"


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_a_filter_that_leaves_nothing_or_little_is_named(store, mode):
    gate = ["--gate", "99"] if mode == "calibrated" else ["--min-relevance", "0.99"]
    run = ["run", store, TASK, "--vectors", QUERIES, "--writer", "extract", "--mode", mode, *gate]
    none = invoke(*run, "--where", "source=zzz").stderr
    assert "warning: the filter leaves none of the 478 facts of this store" in none
    assert "largest" not in none
    told = json_of(invoke(*run, "--json", "--where", "source=zzz"))
    assert told["exit"]["detail"] == "no fact matches the filter (source = 'zzz')"
    assert told["windows"][0]["headers"]["CRP-Context-Mode"] == "ckf-exhausted"
    facts = demo.load().store
    source = facts.get(facts.ids[:1])[0].source
    some = invoke(*run, "--where", f"source={source}").stderr
    assert re.search(r"largest .*among the facts that the filter leaves is -?[\d.]+", some)
    assert re.search(r"largest .*in this store is", invoke(*run).stderr)


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
        ("calibrated", ["--first-window-pull"]),
        ("calibrated", ["--clamp-novelty"]),
        ("calibrated", ["--exhaustion", "novelty"]),
        ("spec", ["--gate", "2"]),
        ("spec", ["--gate-on", "query"]),
        ("spec", ["--source", "0.4"]),
        ("spec", ["--pack", "need"]),
    ],
)
def test_run_refuses_parts_of_the_other_mode(store, mode, options):
    """In the library's words, before anything is read."""
    other = "spec" if mode == "calibrated" else "calibrated"
    said = fails("run", store, TASK, "--vectors", QUERIES, "--writer", "extract", "--mode", mode, *options, code=2)
    assert f"for {options[0]}: " in said
    assert f'belongs to mode "{other}", the mode is "{mode}"' in said


def test_run_takes_the_settings_of_a_session(store, tmp_path):
    path = tmp_path / "run.json"
    arguments = ["run", store, TASK, "--vectors", QUERIES, "--writer", "extract", "-o", path, *GATE]

    def run_with(*options):
        invoke(*arguments, *options)
        return json.loads(path.read_text())

    plain = run_with()
    names = ("completion_threshold", "safety_budget", "exhaustion", "first_window_pull", "clamp_novelty")
    assert [plain["settings"][name] for name in names] == [0.92, 1.0, "score", False, False]
    assert {fact["residual_pull"] for fact in plain["windows"][0]["facts"]} == {0.0}
    pulled = run_with("--first-window-pull", "--clamp-novelty", "--exhaustion", "novelty")
    assert [pulled["settings"][name] for name in names] == [0.92, 1.0, "novelty", True, True]
    assert min(fact["residual_pull"] for fact in pulled["windows"][0]["facts"]) > 0.0
    assert max(fact["novelty"] for window in pulled["windows"] for fact in window["facts"]) == 1.0
    spent = run_with("--safety-budget", "0.05")
    assert [window["written"] for window in spent["windows"]] == [False]
    assert (spent["windows"][0]["exit"]["reason"], spent["settings"]["safety_budget"]) == (
        "safety-budget-depleted",
        0.05,
    )
    document = json.loads(Path(TASK).read_text())
    for item in document["tasks"][0]["sub_queries"]:
        item["marginal"] = True
    task = tmp_path / "marginal.json"
    task.write_text(json.dumps(document))
    arguments[2] = task
    early = run_with("--completion-threshold", "0.05")
    assert (len(early["windows"]), early["windows"][-1]["exit"]["reason"]) == (1, "task-complete")
    for option in ("--completion-threshold", "--safety-budget"):
        assert option in fails(*arguments, option, "1.5", code=2)
        assert option in fails(*arguments, option, "nan", code=2)


def test_run_takes_a_residual_depth(store, tmp_path):
    """R36: what is addressed less deeply than this still remains."""
    path = tmp_path / "run.json"
    arguments = ["run", store, TASK, "--vectors", QUERIES, "--writer", "extract", "-o", path, *GATE]
    invoke(*arguments)
    plain = json.loads(path.read_text())
    invoke(*arguments, "--residual-depth", "0.9")
    deep = json.loads(path.read_text())
    assert (plain["settings"]["residual_depth"], deep["settings"]["residual_depth"]) == (0.0, 0.9)
    assert len(deep["windows"][1]["anchor"]) > len(plain["windows"][1]["anchor"])


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


@pytest.mark.parametrize("columns", ["20", "30", "40", "60", "120"])
def test_a_narrow_table_keeps_why_a_run_ended(store, columns):
    arguments = ("run", store, TASK, "--vectors", QUERIES, "--writer", "extract", *GATE)
    rows = invoke(*arguments, env={"COLUMNS": columns}).stdout.splitlines()
    assert max(map(len, rows)) <= int(columns)
    assert [row for row in rows if re.match(r" *5 .*limit-reached$", row)]
    assert ("done" in " ".join(rows)) == (columns != "20")
