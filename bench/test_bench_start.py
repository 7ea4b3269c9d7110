"""How long a command takes to start, beside the imports it cannot do without.

python -m pytest bench/test_bench_start.py -s
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

IMPORTS = "import numpy, typer"
HELP = "import sys; sys.argv = ['cdr', '--help']; from cdr_kernel.cli._app import main; main()"
ROUNDS = 9
MOST = 3.0  # times the processor seconds of IMPORTS


def _processor_seconds(code: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_starts_in_a_few_times_what_its_imports_take() -> None:
    both = [(_processor_seconds(HELP), _processor_seconds(IMPORTS)) for _ in range(ROUNDS)]
    ratios = sorted(ours / imports for ours, imports in both)
    p20, p50, p80 = (ratios[int(ROUNDS * share)] for share in (0.2, 0.5, 0.8))
    print(f"\ncdr --help: p20/p50/p80 {p20:.2f}/{p50:.2f}/{p80:.2f} times `{IMPORTS}`, least {min(both)[0]:.3f} s")
    if p50 >= MOST:
        pytest.fail(f"expected less than {MOST} times, got {p50:.2f}")
