"""What every benchmark needs: times with their quantiles, the machine and the commit, a CSV row a measurement."""

from __future__ import annotations

import csv
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Times:
    """Milliseconds of several runs."""

    ms: tuple[float, ...]

    def quantile(self, q: int) -> float:
        """The q-th percentile."""
        return float(np.percentile(self.ms, q))

    @property
    def quantiles(self) -> dict[str, float]:
        """p20, p50, p80."""
        return {f"p{q}": round(self.quantile(q), 4) for q in (20, 50, 80)}


def once(call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def each(calls: Iterable[Callable[[], Any]], repeats: int = 3) -> Times:
    """For every call the best of several runs."""
    return Times(tuple(min(once(call) for _ in range(repeats)) for call in calls))


def peak_rss_mb() -> float:
    """The most memory this process has had resident, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def resident_mb() -> dict[str, int]:
    """MiB that this process has resident now: its own, and what is mapped from files, which the system may take back;
    and the most there has been of both together. Empty where the system does not say (it is Linux that does).
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    names = {"own": "RssAnon", "mapped": "RssFile", "peak": "VmHWM"}
    return {what: int(sizes[name].split()[0]) // 1024 for what, name in names.items() if name in sizes}


def machine() -> dict[str, str]:
    """What ran this: processor, cores, system, Python and the commit."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    from cdr_kernel import _C

    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "machine": f"{model}, {_C.threads()} threads, {_C.simd()}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def keep(bench: str, rows: Iterable[dict[str, Any]], path: Path | None = None) -> Path:
    """Append one CSV row per measurement, with machine and commit, to bench/results/{bench}.csv; returns its path."""
    path = path or RESULTS / f"{bench}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = machine()
    new = not path.exists()
    names = ["what", "shape", "dtype", "p20_ms", "p50_ms", "p80_ms", "note", *facts]
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, names)
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({**dict.fromkeys(names, ""), **row, **facts})
    return path
