"""Options and arguments that several commands share."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cdr_kernel.session._settings import settings_of
from cdr_kernel.spec.constants import (
    CALIBRATED_GATE,
    CDR_MIN_RELEVANCE,
    COMPLETION_THRESHOLD,
    MAX_WINDOWS_LIMIT,
    SAFETY_BUDGET_FLOOR,
)
from cdr_kernel.validation._scalars import check_number


class Mode(StrEnum):
    """What a session ranks by."""

    spec = "spec"
    calibrated = "calibrated"


class GateOn(StrEnum):
    """Which z-score the gate of mode calibrated is on."""

    best = "best"
    query = "query"


class Exhaustion(StrEnum):
    """What exit 3 of mode spec is tested on."""

    score = "score"
    novelty = "novelty"


class Kind(StrEnum):
    """How candidates are found."""

    scan = "scan"
    device = "device"
    flat = "flat"
    hnsw = "hnsw"
    ivf = "ivf"


def no_nan(value: float | None) -> float | None:
    """A number as it was given; BadParameter for nan, which no range keeps out."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("expected a number, got nan")
    return value


_NAMED_OTHERWISE = {"source_weight": "--source", "max_windows": "--windows"}
"""Options that do not have the name of the setting."""


def session_settings(mode: Mode, **options: Any) -> dict[str, Any]:
    """The settings that these options set, by name, the mode included. None and False are options not given.

    BadParameter with the library's error for what a session of this mode refuses.
    """
    settings: dict[str, Any] = {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in options.items()
        if value is not None and value is not False
    }
    each: list[dict[str, Any]] = [{name: value} for name, value in settings.items()]
    for some in (*each, settings):
        try:
            budget = {name: some[name] for name in some if name == "safety_budget"}
            check_number(budget.get("safety_budget", 1.0), "safety_budget", 0.0, 1.0)
            settings_of(mode.value, **{name: some[name] for name in some if name not in budget})
        except (TypeError, ValueError) as error:
            hints = [_NAMED_OTHERWISE.get(name, f"--{name.replace('_', '-')}") for name in some]
            raise typer.BadParameter(str(error), param_hint=", ".join(hints)) from None
    return {"mode": mode.value, **settings}


AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON, last on standard output.")]
Gate = Annotated[
    float,
    typer.Option(min=-1.0, max=1.0, callback=no_nan, help="Cosine to the query that a fact must reach (§2.6)."),
]
KindOption = Annotated[Kind, typer.Option(help="How candidates are found; hnsw and ivf may miss some.")]
EmbedOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Embed texts with this model: all-MiniLM-L6-v2, or a folder.")
]
StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="Folder that `cdr index` wrote.")]
WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="Only facts of this source or attribute; several of one name: any of them, else all."
    ),
]
WhereMissingOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only facts without this; with --where of the same name: those too."),
]
Windows = Annotated[int | None, typer.Option(min=1, max=MAX_WINDOWS_LIMIT, help="Windows at most (the task's).")]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write a report: HTML, or figures (.png, .svg, .pdf)."),
]
ModeOption = Annotated[Mode, typer.Option(help="The specification's formula, or the calibrated mode.")]
MinRelevanceOption = Annotated[
    float | None,
    typer.Option(
        min=-1.0,
        max=1.0,
        callback=no_nan,
        help=f"Cosine to the query that a fact must reach (§2.6; {CDR_MIN_RELEVANCE}). Of mode spec.",
    ),
]
GateOption = Annotated[
    float | None,
    typer.Option(
        "--gate",
        callback=no_nan,
        help=f"Deviations above the store's mean that a fact must reach ({CALIBRATED_GATE:g}). Of mode calibrated.",
    ),
]
GateOnOption = Annotated[
    GateOn | None, typer.Option(help="--gate is on the best of query and sub-queries (best), or on the query.")
]
SourceOption = Annotated[
    float | None,
    typer.Option(min=0.0, callback=no_nan, help="Weight of a fact's document, in place of feedback (0, which is off)."),
]
GuardOption = Annotated[
    bool | None, typer.Option("--guard/--no-guard", help="The n-gram guard (§5; mode spec: on, else off).")
]
ExcludePackedOption = Annotated[
    bool, typer.Option("--exclude-packed", help="Never pack a fact twice, as mode calibrated never does.")
]
CompletionThresholdOption = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, callback=no_nan, help=f"Completeness that ends the task (§6, exit 1; {COMPLETION_THRESHOLD})."
    ),
]
SafetyBudgetOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        callback=no_nan,
        help=f"Safety budget at the start (§6, exit 4: at {SAFETY_BUDGET_FLOOR:g} or below it ends; 1).",
    ),
]
ExhaustionOption = Annotated[
    Exhaustion | None,
    typer.Option(help="Exit 3 by the mean score (score), or without importance (novelty). Of mode spec."),
]
FirstWindowPullOption = Annotated[
    bool,
    typer.Option("--first-window-pull", help="What remains pulls in the first window too (reading R1). Of mode spec."),
]
ClampNoveltyOption = Annotated[
    bool, typer.Option("--clamp-novelty", help="Novelty is at most 1 in scores (reading R3). Of mode spec.")
]
ResidualDepthOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        callback=no_nan,
        help="Depth from which a sub-query counts as done (reading R36; 0: any).",
    ),
]
PerEnvelope = Annotated[int | None, typer.Option("--k", min=1, help="Facts per envelope (the task's).")]
