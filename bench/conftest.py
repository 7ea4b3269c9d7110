"""Rates beside times: benchmarks of unlike numbers of facts can be compared by facts per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

_RATES = pytest.StashKey[dict[str, float]]()


@pytest.fixture
def facts_per_second(benchmark: Any, request: pytest.FixtureRequest) -> Iterator[Callable[[int], None]]:
    """Call it with how many facts one round handles: the rate goes into the benchmark's extra_info, so into JSON too,
    and into the summary."""
    counts: list[int] = []
    yield counts.append
    if counts and benchmark.stats is not None:  # None with --benchmark-disable
        rate = benchmark.extra_info["facts_per_second"] = counts[-1] / benchmark.stats.stats.mean
        request.config.stash.setdefault(_RATES, {})[request.node.name] = rate


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The rates, best first, each with how far it is behind the best."""
    rates = sorted(config.stash.get(_RATES, {}).items(), key=lambda item: -item[1])
    if rates:
        terminalreporter.section("facts per second, by the mean", sep="-")
        width = max(len(name) for name, _ in rates)
        for name, rate in rates:
            terminalreporter.line(f"{name:{width}}  {rate:>14,.0f}  {rates[0][1] / rate:>10,.1f} x")
