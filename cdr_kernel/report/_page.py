"""The shell of every report: one HTML file of ASCII, with its style, script and data inside, that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_UNSHOWABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def h(value: object) -> str:
    """A text or number as HTML text or in a quoted attribute; what no document may hold is replaced."""
    return html.escape(_UNSHOWABLE.sub("\ufffd", str(value)))


def isolated(value: object) -> str:
    """As `h`, for texts of people: a direction of writing in it does not reach out of it."""
    return f"<bdi>{h(value)}</bdi>"


def number(value: float | None, digits: int = 2) -> str:
    """A number as it is read; the whole of it goes along as data-value. A dash for None."""
    if value is None:
        return '<span class="none" aria-label="none">\u2013</span>'
    shown = f"{value:.{digits}f}".replace("-", "\u2212")
    return f'<data value="{value!r}">{shown}</data>'


def page(title: str, body: str, data: Mapping[str, Any]) -> str:
    """The file. data: what it was made of, kept in it as JSON in the element #cdr-data."""
    here = files("cdr_kernel.report")
    style = here.joinpath("style.css").read_text("ascii")
    script = "\n" + here.joinpath("script.js").read_text("ascii")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # no text in it can end the element, or begin a comment
        text = text.replace(character, f"\\u{ord(character):04x}")
    document = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{allowed}'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<title>{h(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
{body}
<script type="application/json" id="cdr-data">{text}</script>
<script>{script}</script>
</body>
</html>
"""
    return document.encode("ascii", "xmlcharrefreplace").decode("ascii")
