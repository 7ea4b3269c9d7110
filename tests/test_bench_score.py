"""The benchmark of cdr_score and the roofline beside it run, check themselves and print one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "bench").is_dir(), reason="benchmarks are not part of the package")


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def test_the_table_on_the_cpu():
    done = run("-m", "bench", "score", "--rows", "3000", "--sessions", "1", "3", "--dim", "24", "--residual", "2",
               "-k", "10", "--repeat", "1", "--no-compile", "--json")  # fmt: skip
    assert len(done.stdout.splitlines()) == 1
    found = json.loads(done.stdout)
    assert found["copy_GB/s"] > 0
    assert found["matmul_TFLOP/s"] > 0
    by_name = {(row["name"], row["sessions"]): row for row in found["table"]}
    for sessions in (1, 3):
        for name in ("cdr_score cpp", "cdr_score torch", "cdr_score torch, rows resident"):
            assert by_name[name, sessions]["exact"]
            assert by_name[name, sessions]["p50_ms"] > 0
    assert "note" in by_name["torch.compile", 1]


def test_an_unknown_benchmark_is_named():
    done = subprocess.run([sys.executable, "-m", "bench", "nothing"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "score" in done.stderr


def test_the_roofline_counts_bytes_and_operations():
    table = json.loads(run("-m", "bench", "roofline", "--json").stdout)["predicted"]
    one = next(r for r in table if (r["gpu"], r["rows"], r["sessions"]) == ("H200-SXM", 10**7, 1))
    assert one["bytes"] == 10**7 * (384 * 2 + 4 + 4)
    assert one["operations"] == 2 * 10**7 * 384 * 10
    assert one["floor_s"] == one["memory_s"] == pytest.approx(one["bytes"] / 4.8e12)
    for r in table:
        assert r["floor_s"] == max(r["memory_s"], r["arithmetic_s"]) <= max(r["memory_s"], r["padded_s"])
