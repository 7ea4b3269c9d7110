"""The large benchmarks on small cases: they run, check themselves and print one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_an_unknown_name_lists_the_known_ones():
    run = bench("nothing")
    assert run.returncode == 2
    assert "ngram" in run.stderr
