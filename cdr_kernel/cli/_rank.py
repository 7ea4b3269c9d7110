"""The commands that ask a store once: `cdr rank` and `cdr gate`."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

import cdr_kernel
from cdr_kernel.cli._inputs import check_model, opened_store, query_vector, query_vectors, where_filter
from cdr_kernel.cli._options import (
    AsJson,
    EmbedOption,
    Gate,
    Kind,
    KindOption,
    StoreArgument,
    WhereMissingOption,
    WhereOption,
)
from cdr_kernel.cli._terminal import cell, new_table, print_json, say, show, width
from cdr_kernel.files._files import read_vectors
from cdr_kernel.rank._explain import explain_vectors
from cdr_kernel.retrieve import Candidates
from cdr_kernel.spec.constants import CDR_MIN_RELEVANCE, DEFAULT_DEPTH, MAX_WINDOWS, MAX_WINDOWS_LIMIT
from cdr_kernel.store._attributes import Where
from cdr_kernel.validation._scalars import counted

FULL_WIDTH = 80  # characters that the table of `rank` needs with all its columns


def rank(
    store: StoreArgument,
    query: Annotated[str, typer.Option(metavar="Q", help="Q.npy, FILE.npz:KEY, or a text (needs a model, --embed).")],
    min_relevance: Gate = CDR_MIN_RELEVANCE,
    k: Annotated[int, typer.Option("--k", min=0, help="Facts to show.")] = 10,
    model: Annotated[str | None, typer.Option(help="Model that made the vectors; refused unless the store's.")] = None,
    embed: EmbedOption = None,
    kind: KindOption = Kind.scan,
    coverage: Annotated[
        str | None, typer.Option(metavar="C.npy", help="Vectors [C, D] of what has been addressed.")
    ] = None,
    depths: Annotated[
        str | None, typer.Option(metavar="D,D,...", help="Depth in 0..1 of each --coverage row, or one for all (0.5).")
    ] = None,
    residual: Annotated[str | None, typer.Option(metavar="R.npy", help="Vectors [R, D] of what remains.")] = None,
    first_window_pull: Annotated[
        bool, typer.Option("--first-window-pull", help="Let --residual pull without --coverage (reading R1).")
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Explain this fact, and what would put it among the --k best."),
    ] = None,
    where: WhereOption = None,
    where_missing: WhereMissingOption = None,
    as_json: AsJson = False,
) -> None:
    """Rank a store's facts for one query, with the numbers behind every score."""
    if depths is not None and coverage is None:
        raise typer.BadParameter("--depths goes with --coverage")
    opened = opened_store(store)
    check_model(model, opened, "--model")
    vector = query_vector(query, opened, embed)
    covered = None if coverage is None else read_vectors(coverage, opened.dim)
    remaining = None if residual is None else read_vectors(residual, opened.dim)
    if residual is not None and coverage is None and not first_window_pull:
        say("warning: --residual pulls only beside --coverage (§2.7), or with --first-window-pull")
    question: dict[str, Any] = {
        "coverage": covered,
        "depth_weights": None if covered is None else _depths(depths, len(covered)),
        "residual": remaining,
        "min_relevance": min_relevance,
        "first_window_pull": first_window_pull,
    }
    columns = cdr_kernel.Columns.spec(vector, **question)
    wanted = where_filter(where, where_missing, opened.view())
    if explain is not None and wanted:
        raise typer.BadParameter("--explain looks at all facts: leave out --where and --where-missing")
    retriever, view = cdr_kernel.Retriever(opened, kind.value), opened.view().select(wanted)
    why = None
    if explain is not None:
        why = explain_vectors(vector, retriever, explain, max_facts=k, **question)
    rows = retriever.candidates(columns, view)
    scores = cdr_kernel.cdr_score(
        view.blocks,
        columns,
        rows=rows,
        squared_norms=view.squared_norms,
        importance=view.importance[rows],
        k=k,
    )
    found = view.facts(scores.rows)
    numbers = ("score", "relevance", "coverage", "residual_pull", "novelty")
    if not len(rows):
        say_largest_cosine(retriever, vector, min_relevance, wanted)
    elif len(rows) < k <= len(view):
        say(
            f"warning: --min-relevance {min_relevance:.12g} leaves {counted(len(rows), 'fact')}, fewer than --k {k}: "
            "see `cdr gate`"
        )
    if as_json:
        results = [
            {
                "rank": i + 1,
                "id": fact.id,
                **{name: getattr(scores, name)[i].item() for name in numbers},
                "importance": fact.importance,
                "source": fact.source,
                "attributes": dict(fact.attributes),
                "text": fact.text,
            }
            for i, fact in enumerate(found)
        ]
        print_json(
            {
                "store": str(store),
                "model": opened.embedding_model,
                "min_relevance": min_relevance,
                "kind": kind.value,
                "facts": len(opened),
                "qualified": len(rows),
                "results": results,
                **({} if why is None else {"explanation": why.as_dict()}),
            }
        )
        return
    if why is not None:
        show(why)
        return
    columns_shown = numbers[:2] if width() < FULL_WIDTH else numbers
    names = [name.replace("_", " ") for name in columns_shown]
    table = new_table([("rank", True), ("id", False), *((name, True) for name in names), ("text", False)])
    for i, fact in enumerate(found):
        values = [f"{getattr(scores, name)[i]:.3f}" for name in columns_shown]
        table.add_row(str(i + 1), cell(fact.id), *values, cell(fact.text))
    show(table)
    some = f", {len(view)} of them asked" if wanted else ""
    gate_said = f"at or above the gate of {min_relevance:.12g}"
    show(f"{counted(len(rows), 'fact')} {gate_said}, the best {len(found)} shown ({len(opened)} in the store{some})")


def gate(
    store: StoreArgument,
    queries: Annotated[
        str, typer.Option(metavar="Q", help="Vectors [Q, D] or one [D]: Q.npy, FILE.npz:KEY; or one text (--embed).")
    ],
    k: Annotated[int, typer.Option("--k", min=1, help="Facts per envelope.")] = 10,
    windows: Annotated[int, typer.Option(min=1, max=MAX_WINDOWS_LIMIT, help="Windows per task.")] = MAX_WINDOWS,
    embed: EmbedOption = None,
    as_json: AsJson = False,
) -> None:
    """How many facts pass a relevance gate in this store, and a gate that fits its embedding model."""
    opened = opened_store(store)
    report = cdr_kernel.gate_report(opened, query_vectors(queries, opened, embed), k=k, windows=windows)
    found = report.as_dict()
    if as_json:
        print_json({"store": str(store), **found})
        return
    sizes = f"{counted(report.facts, 'fact')}, {counted(report.queries, 'query', 'queries')}"
    show(f"{store}: {sizes}, {report.embedding_model}")
    table = new_table(
        [("gate", True), ("least", True), ("median", True), ("most", True), ("too few", True), ("deviations", True)]
    )
    for row in found["gates"]:
        counts = [f"{row['passing'][name]:.0f}" for name in ("min", "median", "max")]
        height = "-" if row["deviations"] is None else f"{row['deviations']:.1f}"
        table.add_row(f"{row['gate']:.2f}", *counts, str(row["queries_with_too_few"]), height)
    show(table)
    show(
        f"Facts that pass per query; queries with fewer than {report.wanted} "
        f"({k} in each of {counted(windows, 'window')}); "
        "how far the gate lies above the mean cosine, in standard deviations (median)."
    )
    table = new_table([("facts below", True), ("cosine", True)])
    for level, values in report.quantiles.items():
        table.add_row(f"{100 * level:g} %", f"{float(np.median(values)):.3f}")
    table.add_row("all", f"{float(np.median(report.largest)):.3f}")
    show(table)
    if report.suggested is None:
        show(f"The store has fewer than {counted(report.wanted, 'fact')}.")
    else:
        show(f"--min-relevance {report.suggested:g} leaves {counted(report.wanted, 'fact')} to nine queries in ten.")


def _depths(depths: str | None, entries: int) -> list[float]:
    if depths is None:
        return [DEFAULT_DEPTH] * entries
    try:
        values = [float(part) for part in depths.split(",")]
    except ValueError:
        values = []
    if not values or not all(0.0 <= value <= 1.0 for value in values) or len(values) not in (1, entries):
        raise typer.BadParameter(
            f"expected {entries} numbers in 0..1 with commas between (or one for all), got {depths!r}",
            param_hint="--depths",
        )
    return values * entries if len(values) == 1 else values


def asked_facts(retriever: cdr_kernel.Retriever, where: Where | None) -> tuple[cdr_kernel.StoreView, str] | None:
    """The facts of which the filter holds, with what to call them; None, and a warning, where it leaves none."""
    view = retriever.store.view().select(where)
    if len(view):
        return view, "in this store" if where is None else "among the facts that the filter leaves"
    if where is not None and len(retriever.store):
        say(f"warning: the filter leaves none of the {counted(len(retriever.store), 'fact')} of this store")
    return None


def largest_cosine(retriever: cdr_kernel.Retriever, query: Any, view: cdr_kernel.StoreView) -> float:
    """The largest cosine of a fact of the view to the query."""
    columns = cdr_kernel.Columns.spec(query, min_relevance=-1.0)
    return float(Candidates(retriever.candidates(columns, view), view, columns).relevance.max())


def say_largest_cosine(retriever: cdr_kernel.Retriever, query: Any, gate: float, where: Where | None) -> None:
    """Warn that no fact reaches the gate, and say how far it is away; or that the filter leaves no fact."""
    found = asked_facts(retriever, where)
    if found is not None:
        view, among = found
        say(
            f"warning: no fact reaches --min-relevance {gate:.12g}; the largest cosine to the query {among} is "
            f"{largest_cosine(retriever, query, view):.3f}"
        )
