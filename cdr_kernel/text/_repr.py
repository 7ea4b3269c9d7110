"""How objects show themselves: one line in a console, a small table in a notebook."""

from __future__ import annotations

import html as _html
from collections.abc import Mapping
from dataclasses import MISSING, fields
from reprlib import Repr
from typing import Any

_LONGEST = 200
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 40
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 3


def one_line(value: Any) -> str:
    """The `repr` of a dataclass: its name and the fields that are not the default, arrays by dtype and shape."""
    parts = [
        f"{item.name}={_brief(getattr(value, item.name))}"
        for item in fields(value)
        if item.repr and (item.default is MISSING or getattr(value, item.name) is not item.default)
    ]
    return cut(f"{type(value).__name__}({', '.join(parts)})")


def cut(line: str) -> str:
    """A line of at most 200 characters."""
    return line if len(line) <= _LONGEST else line[: _LONGEST - 4] + "...)"


def _brief(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"<{value.dtype} {list(value.shape)}>"
    return " ".join(_SHORT.repr(value).split())


def escape(text: str) -> str:
    """A text for HTML; what no document may hold is replaced."""
    return _html.escape("".join(c if c in "\t\n" or c.isprintable() or c.isspace() else "\ufffd" for c in text))


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Names and values as a table for a notebook. Every text is escaped."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<table><caption>{escape(title)}</caption><tbody>{cells}</tbody></table>"
