"""The same numbers as figures for a paper, through matplotlib: lines over windows, and the sub-topics of each run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cdr_kernel.files._files import check_output
from cdr_kernel.report._runs import METRICS, Run
from cdr_kernel.store._atomic_folder import draft

_COLOURS = ("#1d5fa8", "#a83c0c", "#1b7350", "#7b3fa0")
_MARKS = ("o", "s", "^", "D")
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "svg.hashsalt": "cdr",  # the same run gives the same file
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,
}


def write_figures(path: Path, runs: Sequence[Run]) -> None:
    """Write one figure of these runs, whole or not at all; its suffix says as what.

    ImportError where matplotlib (extra `report`) is not installed, OSError where the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install ".[report]" in a checkout') from error
    check_output(path)
    subs = max(len(run.sub_queries) for run in runs)
    with matplotlib.rc_context(_STYLE):
        figure: Any = Figure(figsize=(10, 3.0 + 0.9 + 0.26 * subs), layout="constrained")
        FigureCanvasAgg(figure)
        upper, lower = figure.subfigures(2, 1, height_ratios=(3.0, 0.9 + 0.26 * subs))
        _lines(upper.subplots(1, len(METRICS)), runs)
        before: list[str] = []
        for axes, run in zip(lower.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
            labels = [str(sub["label"]) for sub in run.sub_queries]
            _heat(axes, run, labels if labels != before else [])
            axes.set_title("Sub-topics, % written" if len(runs) == 1 else run.name)
            before = labels
        kind = path.suffix.lower()[1:]
        about: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
        with draft(path) as made:
            figure.savefig(made, format=kind, dpi=200, metadata=about)
            os.replace(made, path)


def _lines(every: Sequence[Any], runs: Sequence[Run]) -> None:
    for axes, metric in zip(every, METRICS, strict=True):
        mixed = metric.name == "relevance" and len({run.calibrated for run in runs}) > 1
        values = [0.0, 1.0]
        for i, run in enumerate(runs):
            if mixed and run.calibrated:  # deviations beside cosines would compare what does not compare
                continue
            points = [(window["number"], metric.of(window)) for window in run.windows]
            x = [number for number, value in points if value is not None]
            y = [value for _, value in points if value is not None]
            values += y
            axes.plot(x, y, _DASHES[i], marker=_MARKS[i], color=_COLOURS[i], markersize=4.5, linewidth=1.6)
        axes.set_title(metric.title)
        axes.set_xlabel("window")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(min(values), 1.05 * max(values))
    if len(runs) > 1:
        from matplotlib.lines import Line2D

        marks = [
            Line2D([], [], color=_COLOURS[i], marker=_MARKS[i], linestyle=_DASHES[i], label=run.name)
            for i, run in enumerate(runs)
        ]
        every[0].figure.legend(handles=marks, loc="outside upper left", ncols=len(runs), frameon=False)


def _heat(axes: Any, run: Run, labels: list[str]) -> None:
    """labels: none where the figure to the left has the same ones."""
    if not run.windows or not run.sub_queries:
        axes.set_axis_off()
        return
    shares = [[float("nan") if share is None else share for share in run.covered[sub["id"]]] for sub in run.sub_queries]
    axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set_xticks(range(len(run.windows)), [str(window["number"]) for window in run.windows])
    axes.set_yticks(range(len(labels)), [label if len(label) <= 32 else label[:31] + "\u2026" for label in labels])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("window")
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            if share == share:
                ink = "white" if share > 0.6 else "black"
                axes.text(j, i, f"{100 * share:.0f}", ha="center", va="center", color=ink, fontsize=8)
