"""What a RUN.json says, as a report reads it: windows and their numbers, facts with the windows that packed them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cdr_kernel.exceptions import FileError
from cdr_kernel.files._files import check_regular, shown
from cdr_kernel.loop._assess import DEFAULT_EXPECTED_WORDS
from cdr_kernel.report._run_record import RUN_SCHEMA

Window = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """One run under a name that tells it from the others of a report. document: that of its RUN.json."""

    name: str
    document: Mapping[str, Any]

    @property
    def windows(self) -> Sequence[Window]:
        """The records of its windows."""
        windows: Sequence[Window] = self.document["windows"]
        return windows

    @property
    def written(self) -> list[Window]:
        """The windows that a writer wrote."""
        return [window for window in self.windows if window["written"]]

    @property
    def sub_queries(self) -> Sequence[Mapping[str, Any]]:
        """The task's sub-queries."""
        subs: Sequence[Mapping[str, Any]] = self.document["task"]["sub_queries"]
        return subs

    @property
    def calibrated(self) -> bool:
        """Whether relevance and pull are in deviations above the store's mean."""
        return bool(self.document["settings"].get("mode") == "calibrated")

    @cached_property
    def packed(self) -> dict[str, list[tuple[Window, int]]]:
        """Of every fact the windows that packed it, with its place in the envelope (from 0)."""
        found: dict[str, list[tuple[Window, int]]] = {}
        for window in self.windows:
            for i, fact in enumerate(window["facts"]):
                found.setdefault(fact["id"], []).append((window, i))
        return found

    @cached_property
    def covered(self) -> dict[str, list[float | None]]:
        """By sub-query, after each window: words so far / words expected, at most 1; None after a window without a
        report."""
        out: dict[str, list[float | None]] = {}
        for sub in self.sub_queries:
            expected = DEFAULT_EXPECTED_WORDS if sub["expected_words"] is None else sub["expected_words"]
            words, shares = 0, []
            for window in self.windows:
                report = window["report"]
                words += 0 if report is None else report["words_by_sub_query"].get(sub["id"], 0)
                share = 1.0 if expected == 0 else min(1.0, words / expected)
                shares.append(None if report is None else share)
            out[sub["id"]] = shares
        return out

    @property
    def completeness(self) -> float | None:
        """As last reported."""
        reports = [window["report"] for window in self.windows if window["report"] is not None]
        return reports[-1]["completeness_score"] if reports else None

    @property
    def ending(self) -> str:
        """Why the last window was the last."""
        if not self.windows:
            return "No window was finished."
        last = self.windows[-1]
        reason = last["exit"]["reason"]
        if reason is None:
            return f"Still in progress after window {last['number']}."
        when = f"after window {last['number']}" if last["written"] else f"before window {last['number']} was written"
        also = f", also {', '.join(last['exit']['also'])}" if last["exit"]["also"] else ""
        detail = last["exit"]["detail"]
        detail = f" (\u2068{detail}\u2069)" if detail else ""  # whatever direction it is written in
        return f"Ended {when}: {reason}{also}{detail}."


@dataclass(frozen=True)
class Metric:
    """A number per window. of: None where a window has none. most: the top of its axis, None to fit."""

    name: str
    title: str
    about: str
    of: Callable[[Window], float | None]
    most: float | None = 1.0


def mean_relevance(window: Window) -> float | None:
    """The mean relevance of the packed facts."""
    values = [fact["relevance"] for fact in window["facts"]]
    return math.fsum(values) / len(values) if values else None


def fresh_share(window: Window) -> float | None:
    """The share of the packed facts that no earlier window packed."""
    facts = len(window["facts"])
    return window["fresh"] / facts if facts else None


def _completeness(window: Window) -> float | None:
    return None if window["report"] is None else window["report"]["completeness_score"]


METRICS = (
    Metric("relevance", "Relevance", "mean cosine of the packed facts to the query", mean_relevance),
    Metric(
        "novelty", "Novelty", "mean over the packed facts; 0.20 is the floor", lambda window: window["novelty_mean"]
    ),
    Metric("freshness", "Freshness", "share of the facts that no earlier window packed", fresh_share),
    Metric("completeness", "Completeness", "of the whole task, as assessed after the window", _completeness),
)


def read_run(path: Path) -> dict[str, Any]:
    """The document of a RUN.json. FileError for a file that `cdr run -o` does not write, OSError for one that is not
    there."""
    check_regular(path, "a run")
    try:
        document = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: expected JSON ({error})") from None
    check_run(document, f"{path}: ")
    checked: dict[str, Any] = document
    return checked


_WINDOW = {
    "number": int,
    "written": bool,
    "anchor": str,
    "envelope": dict,
    "facts": list,
    "fresh": int,
    "headers": dict,
    "exit": dict,
}
_FACT = {"id": str, "score": float, "relevance": float, "residual_pull": float, "novelty": float}
# What may be missing, as in runs of earlier versions; of windows and envelopes also null.
_WINDOW_OPTIONAL = {"words": int, "novelty_mean": float, "novelty_min": float}
_ENVELOPE_OPTIONAL = {
    "qualified": int,
    "guard_activations": int,
    "new_share": float,
    "tokens": int,
    "token_budget": int,
}
_FACT_OPTIONAL = {
    "score_without_guard": float,
    "coverage": float,
    "importance": float,
    "multiplier": float,
    "spec_novelty": float,
    "ngram_overlap": int,
}
_LARGEST = 2**53


def check_run(document: object, where: str = "") -> None:
    """Raise FileError, naming the place, unless this is the document of a run as far as a report reads it."""
    top = _fields(document, {"task": dict, "settings": dict, "model": str, "store": dict, "windows": list}, where)
    if top.get("schema") != RUN_SCHEMA or isinstance(top.get("schema"), bool):
        raise FileError(f"{where}schema: expected {RUN_SCHEMA}, got {shown(top.get('schema'))}")
    task = _fields(top["task"], {"query": str, "sub_queries": list}, f"{where}task.")
    for i, sub in enumerate(task["sub_queries"]):
        _fields(sub, {"id": str, "label": str}, f"{where}task.sub_queries[{i}].")
        if sub.get("expected_words") is not None:
            _fields(sub, {"expected_words": int}, f"{where}task.sub_queries[{i}].")
        sub.setdefault("expected_words", None)
    if top.get("map") is not None:
        _check_map(top["map"], f"{where}map.")
    for i, window in enumerate(top["windows"]):
        here = f"{where}windows[{i}]."
        _fields(window, _WINDOW, here)
        _optional(window, _WINDOW_OPTIONAL, here)
        window.setdefault("novelty_mean", None)
        if window["number"] != i + 1:
            raise FileError(f"{here}number: expected {i + 1}, got {shown(window['number'])}")
        envelope = _fields(window["envelope"], {"texts": list, "ids": list}, f"{here}envelope.")
        _optional(envelope, _ENVELOPE_OPTIONAL, f"{here}envelope.")
        _fields(window["exit"], {"also": list, "detail": str}, f"{here}exit.")
        _optional(window["exit"], {"novelty_ratio": float}, f"{here}exit.")
        if window.get("report") is not None:
            _fields(
                window["report"],
                {
                    "completeness_score": float,
                    "addressed": list,
                    "words_by_sub_query": dict,
                    "depth_by_sub_query": dict,
                },
                f"{here}report.",
            )
            report = window["report"]
            _all(report["addressed"], str, f"{here}report.addressed")
            for name, kind in (("words_by_sub_query", int), ("depth_by_sub_query", float)):
                _fields(report[name], dict.fromkeys(report[name], kind), f"{here}report.{name}.")
        window.setdefault("report", None)
        for name in ("texts", "ids"):
            if len(envelope[name]) != len(window["facts"]):
                raise FileError(
                    f"{here}envelope.{name}: expected {len(window['facts'])} (one per fact), got {len(envelope[name])}"
                )
            _all(envelope[name], str, f"{here}envelope.{name}")
        for j, fact in enumerate(window["facts"]):
            _fields(fact, _FACT, f"{here}facts[{j}].")
            _fields(fact, {name: kind for name, kind in _FACT_OPTIONAL.items() if name in fact}, f"{here}facts[{j}].")
            if fact.get("place") is not None:
                _point(fact["place"], f"{here}facts[{j}].place")


def _check_map(value: object, where: str) -> None:
    found = _fields(value, {"points": list, "sub_queries": list, "query": list}, where)
    for name in ("points", "sub_queries"):
        for i, point in enumerate(found[name]):
            _point(point, f"{where}{name}[{i}]")
    _point(found["query"], f"{where}query")
    if found.get("share") is not None:
        _point(found["share"], f"{where}share")


def _point(value: object, where: str) -> None:
    if not isinstance(value, list) or len(value) != 2:
        raise FileError(f"{where}: expected [x, y], got {shown(value)}")
    _fields(dict(zip("xy", value, strict=True)), {"x": float, "y": float}, f"{where}.")


def _all(values: list[Any], kind: type, where: str) -> None:
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise FileError(f"{where}[{i}]: expected {_KINDS[kind]}, got {shown(value)}")


def _optional(value: Mapping[str, Any], kinds: Mapping[str, type], where: str) -> None:
    given = {name: kind for name, kind in kinds.items() if value.get(name) is not None}
    _fields(dict(value), given, where)


def _fields(value: object, kinds: Mapping[str, type], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f"{where.rstrip('. :') or 'a run'}: expected an object, got {shown(value)}")
    for name, kind in kinds.items():
        found = value.get(name)
        fits = isinstance(found, int | float) if kind is float else isinstance(found, kind)
        if not fits or (kind is not bool and isinstance(found, bool)):
            raise FileError(f"{where}{name}: expected {_KINDS[kind]}, got {shown(found)}")
        if isinstance(found, float) and not math.isfinite(found):
            raise FileError(f"{where}{name}: expected a finite number, got {found}")
        if isinstance(found, int) and abs(found) > _LARGEST:
            raise FileError(f"{where}{name}: expected a number up to 2^53, got {shown(found)}")
    return value


_KINDS: dict[type, str] = {
    int: "an integer",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
    float: "a number",
}
