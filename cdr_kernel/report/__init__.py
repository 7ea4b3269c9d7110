"""A run, or several side by side, as one HTML file that needs nothing else; as figures for a paper.

write_report(path, {"CDR": document})                    # document: of a RUN.json, see `RunRecord.document`
write_report(Path("run.svg"), runs)                      # or .png, .pdf: figures, through matplotlib
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdr_kernel.exceptions import FileError
from cdr_kernel.files._files import write_text
from cdr_kernel.report._page import page
from cdr_kernel.report._run_record import RunRecord
from cdr_kernel.report._runs import Run, check_run, read_run
from cdr_kernel.report._sections import body, title
from cdr_kernel.report._store_map import StoreMap

__all__ = ["FIGURES", "MOST_RUNS", "RunRecord", "StoreMap", "named", "read_run", "report_html", "write_report"]

MOST_RUNS = 4
FIGURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm", "")


def report_html(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The report as one HTML document of ASCII characters.

    runs: 1 to 4 documents of a RUN.json under the names they are to have. ValueError (FileError) for another count and
    for what is no such document.
    """
    checked = _checked(runs)
    return page(title(checked), body(checked), {"runs": [{"name": r.name, **r.document} for r in checked]})


def write_report(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a report, whole or not at all: .png, .svg and .pdf as figures, .html, .htm and no ending as HTML.

    Raises what `report_html` and `check_ending` raise, OSError where it cannot be written, ImportError for figures
    without matplotlib.
    """
    check_ending(path)
    if path.suffix.lower() in FIGURES:
        from cdr_kernel.report._figures import write_figures

        write_figures(path, _checked(runs))
    else:
        write_text(path, report_html(runs))


def check_ending(path: Path) -> None:
    """Raises FileError for a name that ends in what no report is written as."""
    if path.suffix.lower() not in (*FIGURES, *PAGES):
        known = f"{', '.join(PAGES[:-1])} or no ending for a page, {', '.join(FIGURES)} for figures"
        raise FileError(f"{path}: expected a name that ends in {known}, got {path.suffix!r}")


def named(paths: list[Path], names: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """The documents of these RUN.json files, under names or those of the files."""
    found: dict[str, dict[str, Any]] = {}
    for i, path in enumerate(paths):
        name = names[i] if names else path.stem
        count = 2
        while name in found:
            name, count = f"{names[i] if names else path.stem} ({count})", count + 1
        found[name] = read_run(path)
    return found


def _checked(runs: Mapping[str, Mapping[str, Any]]) -> list[Run]:
    if not 1 <= len(runs) <= MOST_RUNS:
        raise FileError(f"a report takes 1 to {MOST_RUNS} runs, got {len(runs)}")
    checked = []
    for name, document in runs.items():
        own = json.loads(json.dumps(document, allow_nan=False))  # as a file would have it
        check_run(own, f"{name}: ")
        checked.append(Run(name, own))
    return checked
