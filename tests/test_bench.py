"""The large benchmarks on small cases: they run, check themselves and print one line."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cdr_kernel import Retriever

ROOT = Path(__file__).parent.parent


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_ngram():
    run = bench("ngram", "--facts", "60", "--window-facts", "25", "--json")
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    result = json.loads(line)
    assert result["identical"] is True
    assert result["facts_with_hits"] > 0
    assert result["reference_all_extrapolated"] is True
    assert 7 < result["bytes_per_token"] < 8
    for name in (
        "ingest_facts_per_s",
        "window_ms",
        "window_all_qualified_ms",
        "reference_window_ms",
        "reference_all_ms",
    ):
        assert result[name] > 0
    names = [row["name"].split(",")[0] for row in result["peers"]]
    assert names == ["Python", "Python", "numpy", "pyahocorasick", "datasketch"]
    for row in result["peers"]:
        assert row.get("identical", True)
        assert "window_ms" in row or row["note"] == "not installed"


def test_crprotocol():
    pytest.importorskip("crp", reason="needs crprotocol: pip install crprotocol")
    run = bench("crprotocol", "--facts", "30", "--dim", "16", "--gate", "0.8", "--repeat", "3", "--json")
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    result = json.loads(line)
    assert 0 < result["passed"] < 30
    assert result["largest_difference"] < 1e-9
    assert result["cold_ratio"] == result["rows"]["cold"]["ratio"] > 0
    assert result["held_ratio"] == result["rows"]["held"]["ratio"] > 0
    assert result["rows"]["crprotocol"].keys() == {"p20_ms", "p50_ms", "p80_ms", "ratio"}


@pytest.mark.parametrize("more", [(), ("--source", "0.4")])
def test_calibrated(more):
    run = bench("calibrated", "--facts", "1500", "--json", *more)
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    result = json.loads(line)
    assert "the reference agrees" in run.stderr
    assert (result["facts"], result["tasks"], result["base"]) == (1500, 1, "demo-sized")
    assert 50 < result["qualified"] < 1500
    assert result["first_ms"]["p50"] > 0
    assert result["later_ms"]["p50"] > 0
    assert 0 < result["kept_bytes"] <= result["kept_limit"]
    assert result["peak_rss_mb"] > 50


def test_calibrated_times_nothing_where_codes_change_the_windows():
    from bench import calibrated

    units, texts, (task,), _ = calibrated.base_of(None)
    retriever = Retriever(calibrated.grown(calibrated.Clusters.of(units), texts, 300))
    _, packed = calibrated.windows(task, retriever, {})
    calibrated.check_codes(packed, task, retriever, {})
    with pytest.raises(SystemExit, match="the codes change what is packed"):
        calibrated.check_codes(packed[::-1], task, retriever, {})
    shifted = [replace(ranking, score=ranking.score + 1e-9) for ranking in packed]
    with pytest.raises(SystemExit, match="the codes change scores"):
        calibrated.check_codes(shifted, task, retriever, {})


def test_calibrated_times_nothing_that_the_reference_does_not_say(monkeypatch):
    from bench import calibrated

    units, texts, tasks, _ = calibrated.base_of(None)
    store = calibrated.grown(calibrated.Clusters.of(units), texts, 60)
    ranked = calibrated.cdr_rank
    wrong = {
        "other facts qualify": lambda ranking: replace(ranking, facts=ranking.facts[1:]),
        "no numbers by sub-query": lambda ranking: replace(ranking, by_sub_query=None),
        "not those of the reference": lambda ranking: replace(ranking, score=ranking.score + 1e-6),
        "the share of new facts is 0.5": lambda ranking: replace(ranking, new_share=0.5),
    }
    for message, change in wrong.items():
        monkeypatch.setattr(calibrated, "cdr_rank", lambda *given, change=change: change(ranked(*given)))
        with pytest.raises(SystemExit, match=message):
            calibrated.check_against_reference(store, tasks, {"source_weight": 0.0})


def test_results_are_checked_under_python_o_too():
    """An `assert` is not run there; one that only says that something is there, for the types, may stay."""
    for path in sorted((ROOT / "bench").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assert):
                assert ast.unparse(node.test).endswith(" is not None"), f"{path.name}:{node.lineno}"


def test_calibrated_refuses_no_facts():
    run = bench("calibrated", "--facts", "0")
    assert run.returncode == 2
    assert "--facts and --tasks: expected at least 1" in run.stderr


SCAN = ("scan", "--facts", "1500", "--gate", "0.3", "--k", "20", "--first", "2", "--json")


def test_scan():
    run = bench(*SCAN, "--dim", "48")
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    result = json.loads(line)
    assert result["identical"] is True
    assert result["base"] == "demo-sized"
    for name in ("scan_ms_p50", "rank_ms_p80", "faiss_flat_range_ms_p50", "torch_skinny_ms_p50", "torch_impl_ms_p50"):
        assert result[name] > 0
    for name in ("window2_ms_p50", "per_session_ms_batch64", "per_session_ms_one_by_one", "read_pass_ms"):
        assert result[name] > 0
    for peer, module in (("usearch_exact", "usearch"), ("crprotocol", "crp"), ("reference", "cdr_kernel")):
        if importlib.util.find_spec(module):
            assert result[f"{peer}_ms_p50"] > 0
            assert "extrapolated" in result["notes"][peer] or peer == "usearch_exact"
        else:
            assert result[f"{peer}_ms_p50"] is None
            assert result["notes"][peer].startswith("not installed")


def test_a_scan_keeps_every_measurement(monkeypatch, capsys):
    from bench import scan

    kept = []
    monkeypatch.setattr(scan, "keep", lambda name, rows: kept.append((name, list(rows))))
    scan.main([*SCAN[1:], "--dim", "8", "--no-peers", "--keep"])
    result = json.loads(capsys.readouterr().out)
    ((name, rows),) = kept
    assert name == "scan"
    p50 = {row["what"]: row["p50_ms"] for row in rows}
    for what in ("read_pass", "scan", "rank", "window2", "per_session_batch64", "per_session_one_by_one"):
        key = next(
            key for key in (f"{what}_ms_p50", f"{what}_ms", what.replace("session", "session_ms")) if key in result
        )
        assert p50[what] == pytest.approx(result[key], abs=1e-3)


def test_scan_of_a_mapped_store(tmp_path):
    run = bench(*SCAN, "--dtype", "float16", "--words", "9", "--mapped", "--folder", str(tmp_path))
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    result = json.loads(line)
    assert (result["identical"], result["dtype"], result["mapped"]) == (True, "float16", True)
    for name in ("grow_and_add_s", "build_s", "save_s", "save_codes_s", "load_s"):
        assert result[name] >= 0
    assert result["disk_bytes_per_fact"] > 384 * 2 + 384 + 9 * (7 + 2)  # half floats, codes, token hashes, words
    assert result["rank_ms_p50"] > 0
    assert "faiss_flat_range_ms_p50" not in result
    assert "build: " in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_only_a_mapped_scan_takes_a_folder(tmp_path):
    run = bench(*SCAN, "--folder", str(tmp_path))
    assert run.returncode == 2
    assert "--folder: only --mapped" in run.stderr
    run = bench(*SCAN, "--mapped", "--folder", str(tmp_path / "none"))
    assert run.returncode == 2
    assert f"--folder: expected a folder that exists, got {tmp_path / 'none'}" in run.stderr


def test_store():
    pytest.importorskip("lance", reason="needs the extra store")
    run = bench("store", "--facts", "300", "--dim", "8", "--opens", "2", "--json")
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    result = json.loads(line)
    for name in ("warm_open_ms", "open_with_a_tail_ms", "add_100_ms", "upsert_100_ms", "remove_100_ms"):
        assert result[name]["p50"] > 0
    for name in ("ingest_s", "snapshot_s", "rebuild_s", "record_mb", "snapshot_mb"):
        assert result[name] > 0


def test_sharded(tmp_path):
    run = bench("sharded", "--facts", "900", "--queries-timed", "2", "--ray", "off", "--simulated", "200", "--json")
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    result = json.loads(line)
    assert result["in_process_identical"] is True
    constants = result["constants"]
    assert 1000 < constants["bytes_per_fact"] < 5000
    assert constants["later_request_bytes"] < constants["first_request_bytes"] < 200_000
    rows = result["simulation"]["rows"]
    assert [row["shards"] for row in rows] == [8, 16, 32, 64, 128, 256]
    assert all(row["hedged"]["p50"] > 0 for row in rows)
    (tmp_path / "constants.json").write_text(line)
    again = bench("sharded", "--constants", str(tmp_path / "constants.json"), "--simulated", "200", "--json")
    assert json.loads(again.stdout)["simulation"] == result["simulation"]
    other = bench(
        "sharded", "--constants", str(tmp_path / "constants.json"), "--simulated", "200", "--seed", "1", "--json"
    )
    assert json.loads(other.stdout)["simulation"]["rows"] != rows


def test_an_unknown_name_lists_the_known_ones():
    run = bench("nothing")
    assert run.returncode == 2
    assert "ngram" in run.stderr


def test_a_bench_writes_its_report(tmp_path, capsys, monkeypatch):
    from bench.__main__ import main

    page = tmp_path / "bench.html"
    monkeypatch.setattr("sys.argv", ["bench", "roofline", "--report", str(page)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    text = page.read_text("ascii")
    kept = json.loads(re.search(r'id="cdr-data">(.*?)</script>', text)[1])
    assert kept["result"] == result
    assert kept["command"] == "python -m bench roofline"
    assert "python -m bench roofline" in text
    monkeypatch.setattr("sys.argv", ["bench", "roofline", "--report"])
    with pytest.raises(SystemExit):
        main()


def test_a_report_of_a_bench_has_its_numbers_and_escapes_its_names(tmp_path):
    from bench.report import write

    result = {
        "scan_ms_p20": 1.25, "scan_ms_p50": 2.5, "scan_ms_p80": 5.0, "rank_ms": 1234.5, "identical": True, "gate": None,
        "peers": [{"name": "<b>", "window_ms": 3.25}, {"name": "other", "note": "</script>"}],
    }  # fmt: skip
    write(tmp_path / "b.html", "scan", ["--facts", "10 <"], result)
    text = (tmp_path / "b.html").read_text("ascii")
    for shown in ("1.250", "2.500", "5.000", "1234.500", "3.2500", "&lt;b&gt;", "&lt;/script&gt;"):
        assert shown in text
    assert "<b>" not in text.split("<main")[1]


def test_benchmarks_of_unlike_sizes_show_facts_per_second(tmp_path):
    (tmp_path / "test_tiny.py").write_text(
        "import time\n"
        "def test_many(benchmark, facts_per_second):\n"
        "    facts_per_second(20_000)\n"
        "    benchmark.pedantic(time.sleep, (0.02,), rounds=1)\n"
        "def test_few(benchmark, facts_per_second):\n"
        "    facts_per_second(20)\n"
        "    benchmark.pedantic(time.sleep, (0.02,), rounds=1)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "bench.conftest", "-p", "no:xdist", "-o", "addopts=", "-q"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, "--benchmark-json", tmp_path / "out.json", tmp_path],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")},
    )  # fmt: skip
    found = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    for each, facts in zip(found, (20_000, 20), strict=True):
        assert each["extra_info"]["facts_per_second"] == pytest.approx(facts / each["stats"]["mean"])
    assert re.search(r"facts per second.*\ntest_many +[\d,]+ +1\.0 x\ntest_few +[\d,]+ +[\d,.]+ x\n", done.stdout)
