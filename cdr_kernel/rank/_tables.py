"""Rankings as tables: Arrow, pandas, the terminal, a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdr_kernel.text._repr import escape
from cdr_kernel.validation._scalars import counted, few

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from rich.console import Group

    from cdr_kernel.rank._ranking import Ranking

MOST_ROWS = 50
"""Facts that a ranking shows of itself; `Ranking.to_arrow` has them all."""

_TEXT = 80  # characters of a text in a plain table
BREAKDOWN = (
    "score",
    "score_without_guard",
    "relevance",
    "coverage",
    "residual_pull",
    "novelty",
    "ngram_overlap",
    "importance",
    "multiplier",
)
"""The fields of a `Ranking` that have a number per fact in every mode, in their order there."""
_NUMBERS = (*BREAKDOWN[:-2], "ngram_penalty", *BREAKDOWN[-2:])
_SHOWN = ("score", "relevance", "coverage", "residual_pull", "novelty", "ngram_penalty", "importance")


@dataclass(frozen=True)
class Table:
    """Rows of cells (str, int, float or None) under the names of their columns. note: a line below, "" for none."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]
    note: str = ""

    def numeric(self, column: int) -> bool:
        """Whether a column holds numbers."""
        return any(isinstance(row[column], int | float) for row in self.rows)


def arrow(ranking: Ranking) -> pyarrow.Table:
    """A ranking as a `pyarrow.Table`, see `Ranking.to_arrow`."""
    import pyarrow as pa

    facts = tuple(ranking.facts)
    columns: dict[str, Any] = {
        "rank": pa.array(range(1, len(facts) + 1), pa.int64()),
        "id": pa.array([_utf8(fact.id) for fact in facts], pa.large_string()),
        **{name: pa.array(getattr(ranking, name)) for name in _NUMBERS},
        "source": pa.array([_utf8(fact.source) for fact in facts], pa.large_string()),
        "position": pa.array([fact.position for fact in facts], pa.int64()),
        "sequence": pa.array([fact.sequence for fact in facts], pa.int64()),
        "text": pa.array([_utf8(fact.text) for fact in facts], pa.large_string()),
    }
    if ranking.by_sub_query is not None:
        columns["by_sub_query"] = pa.array(list(ranking.by_sub_query), pa.list_(pa.float64()))
    return pa.table(columns)


def _utf8(text: str | None) -> str | None:
    """A text as Arrow takes it: a lone surrogate, which UTF-8 has no bytes for, becomes a question mark."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def pandas_frame(ranking: Ranking) -> pandas.DataFrame:
    """A ranking as a `pandas.DataFrame`, see `Ranking.to_pandas`."""
    try:
        import pandas  # noqa: F401  # Arrow imports it itself, and says less about what is missing
    except ImportError as error:
        raise ImportError('to_pandas() needs pandas: pip install ".[pandas]" in a checkout') from error
    return arrow(ranking).to_pandas()


def shown(ranking: Ranking) -> Table:
    """What a ranking shows of itself: the first `MOST_ROWS` facts."""
    rows = [
        (i + 1, fact.id, *(getattr(ranking, name)[i].item() for name in _SHOWN), fact.text)
        for i, fact in enumerate(ranking.facts[:MOST_ROWS])
    ]
    left = len(ranking) - len(rows)
    note = f"and {left} more" if left else ""
    names = tuple(name.replace("_", " ") for name in _SHOWN)
    title = f"{counted(len(ranking), 'fact')} of {ranking.qualified} that qualified{missing(ranking)}"
    return Table(title, ("rank", "id", *names, "text"), rows, note)


def missing(ranking: Ranking) -> str:
    """What is to be said of an incomplete ranking, "" of a complete one."""
    if ranking.complete:
        return ""
    return ", INCOMPLETE" + (f": no answer from {few(ranking.missing_shards)}" if ranking.missing_shards else "")


def one_line(text: str) -> str:
    """A text on one line, with what would steer a terminal replaced."""
    clean = "".join(c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return " ".join(clean.split())


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else one_line(str(value))


def _html_cell(value: Any) -> str:
    return _cell(value) if isinstance(value, float) else escape("" if value is None else str(value))


def plain(table: Table) -> str:
    """Text in columns as wide as their cells, long texts cut."""
    cut = [[_short(_cell(value)) for value in row] for row in table.rows]
    widths = [max([len(name), *(len(row[j]) for row in cut)]) for j, name in enumerate(table.columns)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if table.numeric(j) else cell.ljust(width)
            for j, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    head = [table.title, line(table.columns), "  ".join("-" * width for width in widths)]
    return "\n".join([*head, *map(line, cut), *([table.note] if table.note else [])])


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"


def rich_table(table: Table) -> Group:
    """For `rich`: the table under its title."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as Made
    from rich.text import Text

    made = Made(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for j, name in enumerate(table.columns):
        number = table.numeric(j)
        made.add_column(name, justify="right" if number else "left", no_wrap=number)
    for row in table.rows:
        made.add_row(*(Text(_cell(value), no_wrap=True, overflow="ellipsis") for value in row))
    return Group(Text(f"\n{table.title}", style="bold"), made, *([Text(table.note)] if table.note else []))


def html(table: Table) -> str:
    """A table for a notebook: every cell escaped, texts whole."""
    numeric = [table.numeric(j) for j in range(len(table.columns))]

    def cells(tag: str, values: Sequence[str]) -> str:
        aligned = ("right" if number else "left" for number in numeric)
        return "".join(
            f'<{tag} style="text-align:{side}">{value}</{tag}>' for side, value in zip(aligned, values, strict=True)
        )

    head = f"<tr>{cells('th', [escape(name) for name in table.columns])}</tr>"
    body = "".join(f"<tr>{cells('td', [_html_cell(value) for value in row])}</tr>" for row in table.rows)
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return f"<table><caption>{escape(table.title)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>{note}"
