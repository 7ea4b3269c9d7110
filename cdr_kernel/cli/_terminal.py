"""What the commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

PIPED_WIDTH = 120


def prepare_streams() -> None:
    """Make standard output and error ready for any text, and for not being there at all."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def drop_output() -> None:
    """After whoever read standard output has gone: let what is still buffered go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(message: str) -> None:
    """One line on standard error, without control characters."""
    print(printable(message), file=sys.stderr, flush=True)


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        say(f"{level}{record.getMessage()}")


@contextlib.contextmanager
def log_on_stderr() -> Iterator[None]:
    """Say what the package logs, from level INFO on, while the block runs."""
    logger, handler = logging.getLogger("cdr_kernel"), _Said()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def printable(text: str) -> str:
    """A text on one line, with what would steer a terminal replaced."""
    clean = "".join(c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return " ".join(clean.split())


def print_json(value: Mapping[str, Any]) -> None:
    """One line of JSON on standard output."""
    with _standard_output():
        print(json.dumps(value, allow_nan=False), flush=True)


def flush() -> None:
    """Let standard output have what is buffered. An OSError names it."""
    with _standard_output():
        sys.stdout.flush()


@contextlib.contextmanager
def _standard_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def show(what: RenderableType, indent: int = 0) -> None:
    """A text or table on standard output, as wide as the terminal (COLUMNS; 120 where there is none).

    A text is shown on one line, wrapped, without control characters.
    """
    from rich.padding import Padding

    if isinstance(what, str):
        what = printable(what)

    console = _console(sys.stdout)
    with _standard_output():
        with console.capture() as captured:
            console.print(Padding(what, (0, 0, 0, indent)) if indent else what)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def width() -> int:
    """Characters in a line of standard output."""
    return _console(sys.stdout).width


def fits(table: Table) -> bool:
    """Whether a table can be shown without cutting or wrapping a cell."""
    console = _console(sys.stdout)
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum <= console.width


def new_table(columns: Sequence[tuple[str, bool]]) -> Table:
    """A table of these columns: (name, whether it holds numbers). Columns of text give way where it is narrow."""
    from rich import box
    from rich.table import Table

    named = any(name for name, _ in columns)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, show_header=named)
    for name, numeric in columns:
        made.add_column(name, justify="right" if numeric else "left", no_wrap=numeric)
    return made


def cell(text: str, wrap: bool = False) -> Text:
    """A text as it stands, markup and all, on one line that is cut where it must be; no control characters."""
    from rich.text import Text

    line = printable(text)
    return Text(line) if wrap else Text(line, no_wrap=True, overflow="ellipsis")


class Progress:
    """A bar on standard error while the block runs, where that is a terminal; gives a function to advance it."""

    def __init__(self, what: str, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = _console(sys.stderr)
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=console, transient=True) if console.is_terminal else None
        self._total = total

    def __enter__(self) -> Callable[[int], None]:
        bar = self._bar
        if bar is None:
            return lambda count: None
        task = bar.add_task("", total=self._total)
        bar.start()
        return lambda count: bar.advance(task, count)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _console(stream: Any) -> Console:
    from rich.console import Console

    class Here(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # not the end of the process: the commands know what to do

    fixed = None if stream.isatty() or os.environ.get("COLUMNS") else PIPED_WIDTH
    return Here(file=stream, width=fixed, highlight=False, markup=False, emoji=False)
