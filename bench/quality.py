"""Quality over windows: completeness, fresh and relevant shares, against baselines, on a folder of facts and tasks."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from cdr_kernel.cli._terminal import print_json, say
from cdr_kernel.quality._experiment import (
    EMBEDDINGS,
    TOKENIZERS,
    WRITERS,
    baselines,
    difference,
    evaluate,
    load_corpus,
    ranked,
    summarise,
)
from cdr_kernel.session._session import MODES
from cdr_kernel.session._task import GATES_ON

COMPARED = "relevance,relevance_excluded,round_robin"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench quality", description=__doc__)
    p.add_argument("--data", type=Path, required=True, help="folder of facts, vectors, tasks; or what cdr ingest wrote")
    p.add_argument("--tasks", type=Path, help="another file of tasks")
    p.add_argument("--queries", type=Path, help="the vectors of their queries and sub-queries (.npz)")
    p.add_argument("--mode", choices=MODES, default="spec")
    p.add_argument("--pack", choices=["greedy", "need"], help="how an envelope is filled (spec: greedy, else need)")
    p.add_argument("--guard", choices=["on", "off"], help="n-gram guard (spec: on, else off)")
    p.add_argument("--min-relevance", type=float, help="the gate of mode spec (.55)")
    p.add_argument("--gate", type=float, help="that of mode calibrated, in deviations (2)")
    p.add_argument("--min-qualified", type=int, help="facts that qualify at least (200; with --gate 0)")
    p.add_argument("--gate-on", choices=GATES_ON, help="best column or query (best)")
    p.add_argument("--lexical", type=float, help="weight of the words (.25)")
    p.add_argument("--feedback", type=float, help="weight of the task's own direction (.4)")
    p.add_argument("--lexical-feedback", type=float, help="weight of that direction in words (.5)")
    p.add_argument("--source", type=float, help="weight of a fact's document, in place of both feedbacks (0)")
    p.add_argument("--need-floor", type=float, help="(.35)")
    p.add_argument("--packed-penalty", type=float, help="(1)")
    p.add_argument("--centred-coverage", action="store_true", default=None)
    p.add_argument("--writer", choices=["all", *WRITERS], default="all")
    p.add_argument("--embedding", choices=EMBEDDINGS, default="title", help="vectors and the string that is indexed")
    p.add_argument("--tokenizer", choices=list(TOKENIZERS), default="golden")
    p.add_argument("--seed", type=int, default=0, help="of the tokens a writer drops")
    p.add_argument("--baselines", default=COMPARED, help=f"names, all or none ({COMPARED})")
    p.add_argument("--json", action="store_true", help="one line of JSON, last on standard output")
    return p


def settings(a: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "mode": a.mode,
        "guard": None if a.guard is None else a.guard == "on",
        "pack": a.pack,
        "min_relevance": a.min_relevance,
        "gate": a.gate,
        "min_qualified": a.min_qualified,
        "gate_on": a.gate_on,
        "lexical_weight": a.lexical,
        "feedback_weight": a.feedback,
        "lexical_feedback_weight": a.lexical_feedback,
        "source_weight": a.source,
        "need_floor": a.need_floor,
        "packed_penalty": a.packed_penalty,
        "centred_coverage": a.centred_coverage,
    }
    return {name: value for name, value in found.items() if value is not None}


def main(arguments: list[str]) -> int:
    p = parser()
    a = p.parse_args(arguments)
    started = time.perf_counter()
    try:
        corpus = load_corpus(a.data, embedding=a.embedding, tasks=a.tasks, queries=a.queries, tokenizer=a.tokenizer)
        method = ranked(corpus, **settings(a))
        writers = list(WRITERS) if a.writer == "all" else [a.writer]
        if a.writer == "all" and not all(case.labelled for case in corpus.cases):
            say("note: no labels, so no greedy writer and none of the measures that need them")
            writers.remove("greedy")
        names = {"all": None, "none": []}.get(a.baselines, a.baselines.split(","))
        others = baselines(names)
        say(f"{len(corpus)} facts, {len(corpus.cases)} tasks, {corpus.store.embedding_model}, {a.embedding}")
        own = evaluate(corpus, method, writers=writers, seed=a.seed)
        seconds = time.perf_counter() - started
        compared = [evaluate(corpus, other, writers=writers, seed=a.seed) for other in others]
    except (OSError, ValueError, ImportError) as error:
        say(f"error: {error}")
        if a.json:
            print_json({"error": str(error)})
        return 1
    found = summarise(own)
    gains = [difference(own, other) for other in compared]
    if a.json:
        others_found = {o.method: {k: v for k, v in summarise(o).items() if k != "per_writer"} for o in compared}
        print_json(
            {**found, "seconds": seconds, "embedding": a.embedding, "baselines": others_found, "differences": gains}
        )
        return 0
    print(f"{'':28}  done  95 % interval   new W1 W5    yield W1 W5   near W5  6-grams W5  reach  S-rec  aNDCG")
    for row in [found, *map(summarise, compared)]:
        low, high = row["ci"] or (None, None)
        ends = [[row[f"{name}_by_window"][i] for i in (0, -1)] for name in ("new", "yield")]
        near, repeated, reach = (row[f"{name}_by_window"][-1] for name in ("near", "repeated", "reach"))
        print(
            f"{row['method']:28} {_n(row['completeness'])} [{_n(low)}, {_n(high)}]  "
            f"{_n(ends[0][0])} {_n(ends[0][1])}   {_n(ends[1][0])} {_n(ends[1][1])}   {_n(near)}   "
            f"{_n(repeated)}       {_n(reach)}  {_n(row['srecall'])}  {_n(row['andcg'])}"
        )
    for writer, row in found["per_writer"].items():
        print(f"{'  writer ' + writer:28} {_n(row['completeness'])}")
    for gain in filter(None, gains):
        print(
            f"{'  less ' + gain['to']:28} {gain['mean']:+.3f} [{gain['ci'][0]:+.3f}, {gain['ci'][1]:+.3f}], better in "
            f"{gain['better']} of {gain['tasks']}, worse in {gain['worse']}"
        )
    print(f"{seconds:.1f} s")
    return 0


def _n(value: float | None) -> str:
    return "  -  " if value is None else f"{value:5.3f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
