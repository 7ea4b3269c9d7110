"""Relevance alone, the specification's formula and the calibrated mode over the same task, side by side.

python examples/compare_modes.py -o modes.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cdr_kernel import demo
from cdr_kernel.report import write_report


def main() -> None:
    """Run all three, print what came of them, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("modes.html"))
    parser.add_argument("--windows", type=int, default=5)
    options = parser.parse_args()

    corpus = demo.load()
    runs = demo.run_demo(corpus, windows=options.windows)
    documents = demo.documents(corpus, runs, min_relevance=demo.MIN_RELEVANCE, windows=options.windows)
    print(f"{'':16} {'facts':>6} {'fresh':>6} {'topics':>7} {'done':>6}   ended by")
    for name, document in documents.items():
        windows = [window for window in document["windows"] if window["written"]]
        different = len({fact["id"] for window in windows for fact in window["facts"]})
        fresh = windows[-1]["fresh"] / len(windows[-1]["facts"])
        done = windows[-1]["report"]["completeness_score"]
        topics, reason = windows[-1]["topics_reached"], document["windows"][-1]["exit"]["reason"]
        print(f"{name:16} {different:6} {fresh:6.2f} {topics:7} {done:6.2f}   {reason}")
    write_report(options.output, documents)
    print(options.output)


if __name__ == "__main__":
    main()
