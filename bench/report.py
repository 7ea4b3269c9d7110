"""What a bench measured as one HTML file: the machine, the command to repeat it, and every number with bars."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdr_kernel.files._files import write_text
from cdr_kernel.report._page import h, isolated, number, page

_MACHINE = ("machine", "system", "commit", "date", "device", "torch", "triton", "cuda", "capability", "memory")
_TIMES = ("p20", "p50", "p80")


def write(path: Path, bench: str, arguments: Sequence[str], result: Mapping[str, Any]) -> None:
    """Write the report of one bench. result: its line of --json. OSError where it cannot be written."""
    from bench.measure import machine

    facts = {**machine(), "cores": str(os.cpu_count())}
    facts |= {name: result[name] for name in _MACHINE if name in result}
    command = shlex.join(["python", "-m", "bench", bench, *arguments])
    title = f"bench {bench}"
    sections = [("machine", "Machine and command", _machine(facts, command))]
    rows = list(_rows(result))
    if rows:
        sections.append(("times", "Times", _bars(rows)))
    for name, table in result.items():
        if isinstance(table, list) and table and all(isinstance(row, dict) for row in table):
            sections.append((f"t-{name}", name.replace("_", " ").capitalize(), _table(name, table)))
    sections.append(("numbers", "Every number", _numbers(result, facts)))
    links = "".join(f'<li><a href="#{h(id)}">{h(name)}</a></li>' for id, name, _ in sections)
    main = "".join(
        f'<section id="{h(id)}" aria-labelledby="{h(id)}-h"><h2 id="{h(id)}-h">{h(name)}</h2>{content}</section>'
        for id, name, content in sections
    )
    body = f"""<header><div class="top"><p class="kind">Benchmark</p>
<button type="button" id="theme" aria-label="Colours: as the system has them" hidden>\
<span aria-hidden="true">\u25d0</span> <span class="what">Auto</span></button></div>
<h1>{h(title)}</h1><p class="meta">{isolated(facts["machine"])}</p></header>
<nav aria-label="Sections"><ul>{links}</ul></nav><main id="main">{main}</main>
<footer><p>Results were checked before they were timed. Quote ratios, not milliseconds: machines differ.
<button type="button" id="save" hidden>Save the data as JSON</button></p></footer>
<div id="tip" hidden></div>"""
    write_text(path, page(title, body, {"bench": bench, "command": command, "result": dict(result)}))


def _machine(facts: Mapping[str, Any], command: str) -> str:
    rows = "".join(f"<div><dt>{h(name)}</dt><dd>{isolated(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="headers">{rows}</dl><p><code>{h(command)}</code></p>'


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """(what, its times in ms): name_ms_p50 with its neighbours, or name_ms alone."""
    for name, value in result.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if name.endswith("_ms_p50"):
            what = name.removesuffix("_ms_p50")
            times = {q: result.get(f"{what}_ms_{q}") for q in _TIMES}
            yield what, {q: float(t) for q, t in times.items() if t is not None}
        elif name.endswith("_ms"):
            yield name.removesuffix("_ms"), {"p50": float(value)}


def _bars(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    """Medians as bars on one logarithmic scale, since they lie decades apart."""
    medians = [max(times["p50"], 1e-6) for _, times in rows]
    low, high = math.log10(min(medians)) - 0.3, math.log10(max(medians)) + 1e-9
    out = []
    for what, times in rows:
        wide = 100 * (math.log10(max(times["p50"], 1e-6)) - low) / (high - low)
        bar = f'<div class="bar" aria-hidden="true"><i class="kept" style="width:{max(1.0, wide):.1f}%"></i></div>'
        cells = "".join(f"<td>{number(times.get(q), 3)}</td>" for q in _TIMES)
        out.append(f'<tr><th scope="row">{h(what)}</th>{cells}<td class="wide">{bar}</td></tr>')
    head = "".join(f'<th scope="col">{q} ms</th>' for q in _TIMES)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Times"><table class="bench"><thead><tr>'
        f'<th scope="col">What</th>{head}<th scope="col">median, logarithmic</th></tr></thead>'
        f"<tbody>{''.join(out)}</tbody></table></div>"
    )


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f'<th scope="col">{h(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(row.get(c))}</td>" for c in columns) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{h(name)}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return number(value, 4)
    return number(None) if value is None else isolated(value)


def _numbers(result: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<div><dt>{h(name)}</dt><dd>{_cell(value)}</dd></div>"
        for name, value in result.items()
        if name not in facts and not (isinstance(value, list) and value and isinstance(value[0], dict))
    )
    return f'<dl class="headers">{rows}</dl>'
