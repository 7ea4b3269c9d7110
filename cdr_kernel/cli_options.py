"""Options and arguments that several commands share."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cdr_kernel.constants import MAX_WINDOWS_LIMIT


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
PerEnvelope = Annotated[int | None, typer.Option("--k", min=1, help="Facts per envelope (the task's).")]
