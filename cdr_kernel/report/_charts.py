"""The drawings of a report, as SVG that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from cdr_kernel.report._page import h
from cdr_kernel.report._runs import Metric, Run

WIDTH, HEIGHT = 320, 196
_LEFT, _RIGHT, _TOP, _BOTTOM = 30, 12, 14, 28
MAP_WIDTH, MAP_HEIGHT = 560, 430
_MARGIN = 30
_Box: TypeAlias = tuple[float, float, float, float]
_LABEL = 30  # characters of a label on the map


def marker(shape: int, x: float, y: float, r: float = 4.0) -> str:
    """Run number `shape` as a circle, square, triangle or diamond."""
    kind = shape % 4
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    if kind == 1:
        return f'<rect x="{x - r * 0.9:.1f}" y="{y - r * 0.9:.1f}" width="{r * 1.8:.1f}" height="{r * 1.8:.1f}"/>'
    points = [(0, -1.2), (1.1, 0.8), (-1.1, 0.8)] if kind == 2 else [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)]
    return '<polygon points="' + " ".join(f"{x + a * r:.1f},{y + b * r:.1f}" for a, b in points) + '"/>'


def legend_mark(shape: int) -> str:
    """The sign of run number `shape` for a legend."""
    return (
        f'<svg class="mark run{shape}" viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">'
        f'<path class="line" d="M1 6H27"/>{marker(shape, 14, 6)}</svg>'
    )


def _ticks(low: float, high: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10((high - low) / 2))
    for times in (1, 2, 2.5, 5, 10):
        if (high - low) / (step * times) <= 5:
            step *= times
            break
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def lines(metric: Metric, runs: Sequence[Run]) -> str:
    """A metric over windows, one line per run; the values stand in the table beside it."""
    mixed = metric.name == "relevance" and len({run.calibrated for run in runs}) > 1
    series = [[None if mixed and run.calibrated else metric.of(window) for window in run.windows] for run in runs]
    values = [value for found in series for value in found if value is not None]
    count = max([len(found) for found in series] + [1])
    low, high = 0.0, metric.most or 1.0
    if values and (max(values) > high or min(values) < low):
        low, high = min(0.0, min(values)), max(values) * 1.05 or 1.0
    ticks = _ticks(low, high)

    def x(i: int) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (i + 0.5) / count

    def y(value: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - (value - low) / (high - low))

    parts = [f'<path class="grid" d="M{_LEFT} {y(t):.1f}H{WIDTH - _RIGHT}"/>' for t in ticks]
    parts += [f'<text class="tick" x="{_LEFT - 6}" y="{y(t) + 3.5:.1f}" text-anchor="end">{t:g}</text>' for t in ticks]
    step = max(1, math.ceil(count / 10))
    parts += [
        f'<text class="tick" x="{x(i):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{i + 1}</text>'
        for i in range(0, count, step)
    ]
    if metric.name == "novelty":
        parts.append(f'<path class="floor" d="M{_LEFT} {y(0.2):.1f}H{WIDTH - _RIGHT}"/>')
    for j, found in enumerate(series):
        points = [(x(i), y(value)) for i, value in enumerate(found) if value is not None]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points) if len(points) > 1 else ""
        marks = "".join(marker(j, a, b) for a, b in points)
        parts.append(f'<g class="run{j}"><path class="line" d="{path}"/>{marks}</g>')
    if len(runs) == 1:
        for i, value in enumerate(series[0]):
            if value is not None:
                above = y(value) - 9 if y(value) > _TOP + 12 else y(value) + 18
                parts.append(
                    f'<text class="value" x="{x(i):.1f}" y="{above:.1f}" text-anchor="middle">{value:.2f}</text>'
                )
    name = f"{metric.title} by window, {metric.about}"
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{h(name)}">{"".join(parts)}</svg>'


def window_colour(number: int, count: int) -> tuple[str, str]:
    """(fill, colour of the number in it) of a window, from violet to yellow in equal steps of lightness."""
    stops = ((72, 36, 117), (52, 94, 141), (33, 145, 140), (90, 190, 98), (240, 204, 60))
    at = 0.0 if count < 2 else (number - 1) / (count - 1) * (len(stops) - 1)
    i = min(int(at), len(stops) - 2)
    red, green, blue = (round(a + (b - a) * (at - i)) for a, b in zip(stops[i], stops[i + 1], strict=True))
    light = luminance(red, green, blue)
    return f"#{red:02x}{green:02x}{blue:02x}", "#fff" if 1.05 / (light + 0.05) >= (light + 0.05) / 0.05 else "#000"


def luminance(red: int, green: int, blue: int) -> float:
    """The relative luminance of a colour as WCAG 2 has it."""

    def linear(value: int) -> float:
        v = value / 255
        return v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4

    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)


def store_map(run: Run, index: int) -> str:
    """The store's facts as dots, the packed ones as discs with the numbers of their windows, linked to their texts."""
    places = run.document["map"]
    placed = {id: seen[0][0]["facts"][seen[0][1]].get("place") for id, seen in run.packed.items()}
    known = {id: place for id, place in placed.items() if place is not None}
    every = [*places["points"], *places["sub_queries"], places["query"], *known.values()]
    x0, x1 = min(p[0] for p in every), max(p[0] for p in every)
    y0, y1 = min(p[1] for p in every), max(p[1] for p in every)
    wide, high = MAP_WIDTH - 2 * _MARGIN, MAP_HEIGHT - 2 * _MARGIN
    scale = min(wide / ((x1 - x0) or 1.0), high / ((y1 - y0) or 1.0))

    def at(place: Sequence[float]) -> tuple[float, float]:
        return (
            MAP_WIDTH / 2 + (place[0] - (x0 + x1) / 2) * scale,
            MAP_HEIGHT / 2 - (place[1] - (y0 + y1) / 2) * scale,
        )

    dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in map(at, places["points"]))
    parts = [f'<path class="dots" d="{dots}"/>']
    taken: list[_Box] = []
    discs = []
    for id, place in known.items():
        x, y = at(place)
        taken.append((x - 8, y - 8, x + 8, y + 8))
        discs.append(_disc(run, index, id, x, y))
    labels = []
    for sub, place in zip(run.sub_queries, places["sub_queries"], strict=False):
        x, y = at(place)
        labels.append(f'<g class="topic">{marker(3, x, y, 5.5)}{_placed_label(str(sub["label"]), x, y, taken)}</g>')
    x, y = at(places["query"])
    labels.append(
        f'<g class="asked"><path d="M{x - 6:.1f} {y:.1f}H{x + 6:.1f}M{x:.1f} {y - 6:.1f}V{y + 6:.1f}"/>'
        f"{_placed_label('query', x, y, taken)}</g>"
    )
    name = f"Map of the store, {run.name}: packed facts with the numbers of their windows"
    body = "".join([*parts, *discs, *labels])
    return f'<svg class="map" viewBox="0 0 {MAP_WIDTH} {MAP_HEIGHT}" role="group" aria-label="{h(name)}">{body}</svg>'


def _disc(run: Run, index: int, id: str, x: float, y: float) -> str:
    seen = run.packed[id]
    numbers = [window["number"] for window, _ in seen]
    window, place = seen[0]
    text = window["envelope"]["texts"][place]
    fill, ink = window_colour(numbers[0], len(run.windows))
    shown = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}+"
    said = ", ".join(map(str, numbers))
    short = text if len(text) <= 400 else text[:400] + "\u2026"
    return (
        f'<a class="disc" href="#{anchor(index, window["number"], place)}" '
        f'data-windows="{" ".join(map(str, numbers))}" '
        f'data-said="{h(said)}" data-id="{h(id)}" data-text="{h(short)}" '
        f'aria-label="Window {h(said)}: {h(short[:160])}">'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7.5" fill="{fill}"/>'
        f'<text x="{x:.1f}" y="{y + 3.2:.1f}" text-anchor="middle" fill="{ink}">{shown}</text></a>'
    )


def anchor(run: int, window: int, place: int) -> str:
    """The id of a fact's row in the report."""
    return f"r{run}w{window}f{place + 1}"


def _placed_label(text: str, x: float, y: float, taken: list[_Box]) -> str:
    """A label beside a point, on the side where it covers least of what is there, and inside the map."""
    text = text if len(text) <= _LABEL else text[: _LABEL - 1] + "\u2026"
    width = 9.2 * len(text)  # as wide as it gets where the window is narrow and the type large
    boxes: list[tuple[float, int, _Box, float, float, str]] = []
    for dx, dy, side in (
        (10, 4, "start"),
        (-10, 4, "end"),
        (0, -12, "middle"),
        (0, 20, "middle"),
        (10, -8, "start"),
        (-10, 16, "end"),
    ):
        left = x + dx - {"start": 0.0, "end": width, "middle": width / 2}[side]
        box = (left, y + dy - 10, left + width, y + dy + 3)
        outside = (
            max(0.0, 4 - box[0])
            + max(0.0, box[2] - MAP_WIDTH + 4)
            + max(0.0, 4 - box[1])
            + max(0.0, box[3] - MAP_HEIGHT + 4)
        )
        boxes.append((_covered(box, taken) + 50 * outside, len(boxes), box, x + dx, y + dy, side))
    _, _, box, lx, ly, side = min(boxes)
    taken.append(box)
    return f'<text x="{lx:.1f}" y="{ly:.1f}" text-anchor="{side}">{h(text)}</text>'


def _covered(box: _Box, taken: Iterable[_Box]) -> float:
    total = 0.0
    for other in taken:
        width = min(box[2], other[2]) - max(box[0], other[0])
        height = min(box[3], other[3]) - max(box[1], other[1])
        total += max(0.0, width) * max(0.0, height)
    return total


def has_map(run: Run) -> bool:
    """Whether the run says where its facts lie."""
    found: Any = run.document.get("map")
    return isinstance(found, dict) and bool(found.get("points")) and all(k in found for k in ("query", "sub_queries"))
