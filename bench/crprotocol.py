"""The drop-in for crprotocol against the package itself: one window's ranking.

    python -m bench crprotocol [--facts 1000] [--dim 384] [--entries 20] [--residual 8] [--gate 0.55] [--json]

Both rank the same facts, lists of floats as crprotocol takes them. "cold" converts them in every call; "held" passes a
``FactArray`` of them. Under "crprotocol-6" set, order and every number are compared before anything is timed; under
"spec", which has another formula, with ``cdr_kernel.spec.reference``. Needs crprotocol (the crprotocol extra).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.measure import Times, machine, once
from cdr_kernel import reference
from cdr_kernel.adapters import crprotocol as ours

FIELDS = ("relevance", "novelty", "residual_pull", "importance", "cdr_score")


def made(options: argparse.Namespace) -> tuple[list[Any], list[float], list[dict[str, Any]], list[list[float]]]:
    """Facts round a centre (so near that all pass the default gate), a query, entries, residual vectors."""
    r = np.random.default_rng(options.seed)
    centre = r.standard_normal(options.dim)

    def near(n: int) -> list[list[float]]:
        rows: list[list[float]] = (centre + 0.8 * r.standard_normal((n, options.dim))).tolist()
        return rows

    facts = [SimpleNamespace(embedding=row) for row in near(options.facts)]
    depths = r.uniform(0.1, 0.9, options.entries).tolist()
    entries = [
        {"text": f"c{i}", "embedding": row, "depth_weight": depth}
        for i, (row, depth) in enumerate(zip(near(options.entries), depths, strict=True))
    ]
    return facts, centre.tolist(), entries, near(options.residual)


def filled(coverage_set: Any, item: Any, entries: list[dict[str, Any]], residual: list[list[float]]) -> Any:
    coverage_set.update(entries, None, 1)
    coverage_set.set_residual([item(f"r{i}", row) for i, row in enumerate(residual)])
    return coverage_set


def check_same(expected: Any, found: Any) -> float:
    """The largest difference of a number; exits where set or order differ, or a number by more than 1e-9."""
    if [id(x.fact) for x in expected.ranked] != [id(x.fact) for x in found.ranked]:
        sys.exit("crprotocol-6: another set or order than crprotocol")
    largest = max(
        (
            abs(getattr(a, name) - getattr(b, name))
            for a, b in zip(expected.ranked, found.ranked, strict=True)
            for name in FIELDS
        ),
        default=0.0,
    )
    if largest > 1e-9 or expected.excluded_count != found.excluded_count:
        sys.exit(f"crprotocol-6: differs from crprotocol by {largest}")
    return largest


def check_reference(
    facts: list[Any],
    query: list[float],
    entries: list[dict[str, Any]],
    residual: list[list[float]],
    gate: float,
    found: Any,
) -> None:
    session = reference.ReferenceSession(
        coverage_set=[reference.Entry(e["embedding"], e["depth_weight"]) for e in entries],
        residual_set=[reference.SubQuery(str(i), "", "", row) for i, row in enumerate(residual)],
        min_relevance=gate,
    )
    expected = reference.cdr_rank([reference.Fact(f.embedding) for f in facts], query, session)
    same = [e.fact.embedding for e in expected] == [x.fact.embedding for x in found.ranked]
    if not same or any(abs(e.score - x.cdr_score) > 1e-12 for e, x in zip(expected, found.ranked, strict=True)):
        sys.exit("spec: differs from the reference")


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench crprotocol", description=__doc__.splitlines()[0])
    parser.add_argument("--facts", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--entries", type=int, default=20)
    parser.add_argument("--residual", type=int, default=8)
    parser.add_argument("--gate", type=float, default=0.55, help="min_relevance; at the default all facts pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=15, help="timed calls of the drop-in; of crprotocol a fifth")
    parser.add_argument("--json", action="store_true", help="one line, last on standard output")
    options = parser.parse_args(arguments)
    try:
        from crp.envelope.cdr import cdr_rank
        from crp.state.coverage_set import CoverageSet, ResidualItem
    except ImportError:
        sys.exit('python -m bench crprotocol needs the package it compares with: pip install ".[crprotocol]"')

    facts, query, entries, residual = made(options)
    held = ours.FactArray(facts)
    theirs = filled(CoverageSet(), ResidualItem, entries, residual)
    six, spec = (
        filled(ours.CoverageSet(semantics=semantics), ours.ResidualItem, entries, residual)
        for semantics in ("crprotocol-6", "spec")
    )
    expected = cdr_rank(facts, query, theirs, min_relevance=options.gate)
    difference = max(
        check_same(expected, ours.cdr_rank(given, query, six, min_relevance=options.gate)) for given in (facts, held)
    )
    check_reference(
        facts, query, entries, residual, options.gate, ours.cdr_rank(held, query, spec, min_relevance=options.gate)
    )

    def timed(call: Callable[[], Any], repeat: int) -> Times:
        once(call)
        return Times(tuple(once(call) for _ in range(repeat)))

    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "crprotocol": (lambda: cdr_rank(facts, query, theirs, min_relevance=options.gate), max(3, options.repeat // 5)),
        "cold": (lambda: ours.cdr_rank(facts, query, six, min_relevance=options.gate), options.repeat),
        "held": (lambda: ours.cdr_rank(held, query, six, min_relevance=options.gate), options.repeat),
        "cold, spec": (lambda: ours.cdr_rank(facts, query, spec, min_relevance=options.gate), options.repeat),
        "held, spec": (lambda: ours.cdr_rank(held, query, spec, min_relevance=options.gate), options.repeat),
    }
    out = sys.stderr if options.json else sys.stdout
    shape = f"{options.facts} x {options.dim} facts, {options.entries} entries, {options.residual} residuals"
    print(f"{shape}, {len(expected.ranked)} pass the gate; numbers within {difference:.1e}", file=out)
    rows: dict[str, Any] = {}
    baseline = None
    for name, (call, repeat) in ways.items():
        times = timed(call, repeat)
        baseline = baseline or times
        ratio = baseline.quantile(50) / times.quantile(50)
        rows[name] = {f"{q}_ms": ms for q, ms in times.quantiles.items()} | {"ratio": round(ratio, 1)}
        p20, p50, p80 = times.quantiles.values()
        print(f"{name:12} p20 {p20:10.3f}  p50 {p50:10.3f}  p80 {p80:10.3f} ms  {ratio:8.1f}x", file=out, flush=True)
    if options.json:
        result = {
            "bench": "crprotocol",
            "crprotocol": version("crprotocol"),
            "shape": shape,
            "gate": options.gate,
            "passed": len(expected.ranked),
            "largest_difference": difference,
            "cold_ratio": rows["cold"]["ratio"],
            "held_ratio": rows["held"]["ratio"],
            "rows": rows,
            **machine(),
        }
        print(json.dumps(result))
