"""What stands in a report, from the outcome to the texts of every envelope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdr_kernel.report._charts import anchor, has_map, legend_mark, lines, store_map, window_colour
from cdr_kernel.report._page import h, isolated, number
from cdr_kernel.report._runs import METRICS, Run, Window
from cdr_kernel.validation._scalars import counted

_LONG = 420  # characters of a text that are shown before the rest is folded away


def title(runs: Sequence[Run]) -> str:
    """The title of the document."""
    return f"{' / '.join(_queries(runs))} \u2013 CDR report"


def _queries(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.document["task"]["query"] for run in runs))


def body(runs: Sequence[Run]) -> str:
    """The page between its head and its data."""
    sections = [
        ("outcome", "Outcome", _outcome(runs)),
        ("windows", "Over the windows", _windows(runs)),
        ("topics", "Sub-topics", _topics(runs)),
    ]
    if any(has_map(run) for run in runs):
        sections.append(("map", "Map of the store", _maps(runs)))
    sections.append(("envelopes", "Envelopes", _envelopes(runs)))
    sections.append(("reading", "How to read this", _reading(runs)))
    links = "".join(f'<li><a href="#{id}">{name}</a></li>' for id, name, _ in sections)
    parts = "".join(
        f'<section id="{id}" aria-labelledby="{id}-title"><h2 id="{id}-title">{name}</h2>{content}</section>'
        for id, name, content in sections
    )
    return f"""{_header(runs)}
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main id="main">{parts}</main>
<footer><p>Written by <code>cdr</code>. This file is whole in itself: it loads nothing, and has its data inside.
<button type="button" id="save" hidden>Save the data as JSON</button></p></footer>
<div id="tip" role="status" aria-live="polite" hidden></div>"""


def _header(runs: Sequence[Run]) -> str:
    names, abouts = "", [_about(run) for run in runs]
    alike = len(set(abouts)) == 1
    if len(runs) > 1:
        names = (
            '<p class="versus">'
            + "".join(
                f'<span><span class="name run{i}">{legend_mark(i)}{isolated(run.name)}</span>'
                + ("" if alike else f' <span class="meta">{about}</span>')
                + "</span>"
                for i, (run, about) in enumerate(zip(runs, abouts, strict=True))
            )
            + "</p>"
        )
    meta = f'\n<p class="meta">{abouts[0]}</p>' if alike else ""
    trouble = "".join(_trouble(run, len(runs) > 1) for run in runs) + _unlike(runs)
    return f"""<header><div class="top"><p class="kind">CDR report</p>
<button type="button" id="theme" aria-label="Colours: as the system has them" hidden>\
<span aria-hidden="true">\u25d0</span> <span class="what">Auto</span></button></div>
<h1>{" / ".join(map(isolated, _queries(runs)))}</h1>{meta}{names}{trouble}</header>"""


def _about(run: Run) -> str:
    facts = run.document["store"].get("facts")
    about = [f"{facts:,} fact{'' if facts == 1 else 's'}" if isinstance(facts, int) else "", str(run.document["model"])]
    about.append(counted(len(run.sub_queries), "sub-topic"))
    return ' <span aria-hidden="true">\u00b7</span> '.join(isolated(text) for text in about if text)


def _unlike(runs: Sequence[Run]) -> str:
    """A warning where the runs are of different tasks, models or stores."""

    def task(run: Run) -> str:
        subs = [(sub["id"], sub["label"], sub["expected_words"]) for sub in run.sub_queries]
        return repr((run.document["task"]["query"], subs))

    def store(run: Run) -> str:
        return repr([run.document["store"].get(name) for name in ("path", "facts", "dim")])

    parts = {"tasks": task, "embedding models": lambda run: str(run.document["model"]), "stores": store}
    unlike = [name for name, of in parts.items() if len({of(run) for run in runs}) > 1]
    if not unlike:
        return ""
    what = ", ".join(unlike[:-1]) + (" and " if len(unlike) > 1 else "") + unlike[-1]
    return (
        f'<p class="trouble"><strong>Not the same question.</strong> These runs are of different {what}: '
        "their numbers do not compare.</p>"
    )


def _trouble(run: Run, named: bool) -> str:
    error = run.document.get("error")
    if run.document.get("complete", True) and error is None:
        return ""
    who = f"{isolated(run.name)}: " if named else ""
    why = f" ({isolated(error)})" if error is not None else ""
    return f'<p class="trouble"><strong>Not complete.</strong> {who}the run ended before an exit of \u00a76{why}.</p>'


def _outcome(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        (run,) = runs
        tiles = "".join(
            f'<div class="tile"><dt>{name}</dt><dd>{value}</dd><dd class="note">{note}</dd></div>'
            for name, value, note in _figures(run)
        )
        return f'<p class="lead">{isolated(run.ending)}</p><dl class="tiles">{tiles}</dl>'
    rows = [_figures(run) for run in runs]
    shared = [len({found[j][2] for found in rows}) == 1 for j in range(len(rows[0]))]
    head = "".join(
        f'<th scope="col">{name}{_note(note) if same else ""}</th>'
        for (name, _, note), same in zip(rows[0], shared, strict=True)
    )
    body_rows = "".join(
        f'<tr><th scope="row"><span class="name">{legend_mark(i)}{isolated(run.name)}</span>'
        f'<span class="note">{isolated(run.ending)}</span></th>'
        + "".join(
            f'<td data-name="{name}">{value}{"" if same else _note(note)}</td>'
            for (name, value, note), same in zip(found, shared, strict=True)
        )
        + "</tr>"
        for i, (run, found) in enumerate(zip(runs, rows, strict=True))
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Outcome of each run"><table class="outcome">'
        f'<thead><tr><th scope="col">Run</th>{head}</tr></thead><tbody>{body_rows}</tbody></table></div>'
    )


def _note(text: str) -> str:
    return f'<span class="note">{text}</span>'


def _figures(run: Run) -> list[tuple[str, str, str]]:
    written = run.written
    places = sum(len(window["facts"]) for window in written)
    different = len({fact["id"] for window in written for fact in window["facts"]})
    reached = written[-1].get("topics_reached") if written else None
    how = "addressed" if reached is None else "with a labelled fact packed"
    last = next((window for window in reversed(written) if window["facts"]), None)
    fresh = None if last is None else last["fresh"] / len(last["facts"])
    return [
        ("Completeness", number(run.completeness), "of the task, as assessed"),
        ("Different facts", number(different, 0), f"in {number(places, 0)} place{'' if places == 1 else 's'}"),
        ("Fresh at the end", number(fresh), "share of the last envelope"),
        (
            "Sub-topics",
            number(reached if reached is not None else _addressed(run), 0),
            f"of {number(len(run.sub_queries), 0)}, {how}",
        ),
        ("Windows", number(len(written), 0), "written"),
    ]


def _addressed(run: Run) -> int:
    return len({id for window in run.windows if window["report"] for id in window["report"]["addressed"]})


def _windows(runs: Sequence[Run]) -> str:
    legend = ""
    if len(runs) > 1:
        names = "".join(f"<li>{legend_mark(i)}{isolated(run.name)}</li>" for i, run in enumerate(runs))
        legend = f'<ul class="legend">{names}</ul>'
    scale = ""
    if any(run.calibrated for run in runs):
        apart = " It stands in the numbers only." if not all(run.calibrated for run in runs) else ""
        scale = (
            '<p class="note">In the calibrated mode relevance is in deviations above the store\u2019s mean, not a '
            f"cosine.{apart} Novelty is the specification\u2019s in both modes. The calibrated mode does not score by "
            "it: what is written about is less needed.</p>"
        )
    charts = "".join(
        f"<figure><figcaption><b>{metric.title}</b> {metric.about}</figcaption>{lines(metric, runs)}</figure>"
        for metric in METRICS
    )
    return f'{legend}<div class="charts">{charts}</div>{scale}{_numbers(runs)}'


def _numbers(runs: Sequence[Run]) -> str:
    """The numbers of the charts and some more, by window."""
    head = "".join(f'<th scope="col">{metric.title}</th>' for metric in METRICS)
    more = ("Least novelty", "Facts", "Fresh", "Qualified", "N-gram hits", "Words")
    head += "".join(f'<th scope="col">{name}</th>' for name in more)
    bodies = []
    for i, run in enumerate(runs):
        rows = []
        for window in run.windows:
            envelope = window["envelope"]
            counts = (
                len(window["facts"]), window["fresh"], envelope.get("qualified"), envelope.get("guard_activations"),
                window.get("words"),
            )  # fmt: skip
            cells = [number(metric.of(window)) for metric in METRICS]
            cells += [number(window.get("novelty_min")), *(number(count, 0) for count in counts)]
            label = f"{window['number']}{'' if window['written'] else ' (not written)'}"
            rows.append(f'<tr><th scope="row">{label}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
        name = ""
        if len(runs) > 1:
            span = len(METRICS) + len(more) + 1
            name = f'<th scope="rowgroup" colspan="{span}">{legend_mark(i)}{isolated(run.name)}</th>'
            name = f'<tr class="group">{name}</tr>'
        bodies.append(f'<tbody data-run="{i}">{name}{"".join(rows)}</tbody>')
    return (
        '<details class="numbers"><summary>The numbers</summary>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Numbers by window"><table>'
        f'<thead><tr><th scope="col">Window</th>{head}</tr></thead>{"".join(bodies)}</table></div></details>'
    )


def _topics(runs: Sequence[Run]) -> str:
    about = (
        '<p class="note">How much of a sub-topic was written by the end of each window: words so far of the words '
        "expected, 100 % at most. A dot marks the windows whose report calls it addressed.</p>"
    )
    tables = "".join(_heat(run, i, len(runs) > 1) for i, run in enumerate(runs))
    scale = "".join(f'<span class="h{step}">{step * 10}</span>' for step in range(0, 11, 2))
    key = f'<p class="scale" aria-hidden="true">{scale}<span class="end">%</span></p>'
    return f'{about}{key}<div class="heats">{tables}</div>'


def _heat(run: Run, index: int, named: bool) -> str:
    head = "".join(f'<th scope="col">{window["number"]}</th>' for window in run.windows)
    rows = []
    for sub in run.sub_queries:
        cells = []
        for window, share in zip(run.windows, run.covered[sub["id"]], strict=True):
            if share is None:
                cells.append('<td class="none"><span aria-label="not written">\u2013</span></td>')
                continue
            report = window["report"]
            depth = report["depth_by_sub_query"].get(sub["id"])
            dot, said = "", ""
            if sub["id"] in report["addressed"]:
                said = "" if depth is None else f' title="addressed, depth {depth:.2f}"'
                dot = '<span class="dot" role="img" aria-label="addressed">\u2022</span>'
            cells.append(
                f'<td class="h{round(share * 10)}"{said}><data value="{share!r}">{round(share * 100)}</data>{dot}</td>'
            )
        marginal = ' <span class="note">marginal</span>' if sub.get("marginal") else ""
        rows.append(f'<tr><th scope="row">{isolated(sub["label"])}{marginal}</th>{"".join(cells)}</tr>')
    total = "".join(
        f"<td>{number(None if window['report'] is None else window['report']['completeness_score'])}</td>"
        for window in run.windows
    )
    caption = f'<caption class="name run{index}">{legend_mark(index)}{isolated(run.name)}</caption>' if named else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Sub-topics, {h(run.name)}"><table class="heat" '
        f'data-run="{index}">{caption}<thead><tr><th scope="col">Sub-topic, % by window</th>{head}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody><tfoot><tr><th scope="row">Completeness</th>{total}</tr></tfoot></table></div>'
    )


def _maps(runs: Sequence[Run]) -> str:
    about = (
        '<p class="note">The grey dots are facts of the store, the numbered discs the packed ones, each with the first '
        "window that packed it (<b>+</b>: and later ones). Point at a disc, or walk to it with Tab, to read it; "
        "follow it to its numbers. Two directions of many are shown: what is close here need not be alike.</p>"
    )
    maps = "".join(_one_map(run, i, len(runs) > 1) for i, run in enumerate(runs))
    if len(runs) == 1:
        return f'<div class="maps c1">{maps}{about}</div>'
    return f'{about}<div class="maps">{maps}</div>'


def _one_map(run: Run, index: int, named: bool) -> str:
    caption = (
        f'<figcaption class="name run{index}">{legend_mark(index)}{isolated(run.name)}</figcaption>' if named else ""
    )
    if not has_map(run):
        return (
            f'<figure>{caption}<p class="note">This run has no map: it was written before runs had them.</p></figure>'
        )
    choices = []
    for value, label in (("", "All"), *((str(window["number"]), str(window["number"])) for window in run.windows)):
        checked = " checked" if value == "" else ""
        style = ""
        if value:
            fill, ink = window_colour(int(value), len(run.windows))
            style = f' style="--fill:{fill};--ink-of:{ink}"'
        choices.append(
            f'<label{style}><input type="radio" name="map{index}" value="{value}"{checked}><span>{label}</span></label>'
        )
    choose = f'<fieldset class="choose" data-map="{index}" hidden><legend>Window</legend>{"".join(choices)}</fieldset>'
    share = run.document["map"].get("share") or []
    axes = ""
    if len(share) == 2:
        axes = f"Across: {number(share[0])} of what tells the sub-topics apart; up: {number(share[1])}."
        axes = f'<p class="note">{axes}</p>'
    return f'<figure data-map="{index}">{caption}{choose}{store_map(run, index)}{axes}</figure>'


def _envelopes(runs: Sequence[Run]) -> str:
    about = (
        '<p class="note"><span class="key kept"></span>score <span class="key covered"></span>lost to coverage '
        '<span class="key repeated"></span>lost to the n-gram guard. A bar\u2019s whole length is importance times the '
        "larger of relevance and residual pull; a tick marks the relevance where the pull is larger.</p>"
    )
    columns = "".join(
        f'<div class="run">{_run_name(run, i) if len(runs) > 1 else ""}'
        + "".join(_envelope(run, i, window, j == 0 and len(runs) == 1) for j, window in enumerate(run.windows))
        + "</div>"
        for i, run in enumerate(runs)
    )
    return f'{about}<div class="columns c{len(runs)}">{columns}</div>'


def _run_name(run: Run, index: int) -> str:
    return f'<h3 class="name run{index}">{legend_mark(index)}{isolated(run.name)}</h3>'


def _envelope(run: Run, index: int, window: Window, opened: bool) -> str:
    facts = len(window["facts"])
    status = window["headers"].get("CRP-Context-Continuation-Status", "")
    fill, ink = window_colour(window["number"], len(run.windows))
    summary = (
        f'<span class="window" style="--fill:{fill};--ink-of:{ink}">{window["number"]}</span>'
        f"<span>{number(facts, 0)} fact{'' if facts == 1 else 's'}, {number(window['fresh'], 0)} fresh, "
        f"novelty {number(window.get('novelty_mean'))}"
        f'{"" if window["written"] else ", not written"}</span> <span class="status">{h(status)}</span>'
    )
    headers = "".join(f"<div><dt>{h(name)}</dt><dd>{h(value)}</dd></div>" for name, value in window["headers"].items())
    anchor_text = window["anchor"]
    told = (
        f'<p class="anchor"><b>Told:</b> {isolated(anchor_text)}</p>'
        if anchor_text
        else '<p class="anchor">Every sub-topic was addressed before this window.</p>'
    )
    found = window["exit"]
    leave = "No exit was true" if found.get("reason") is None else f"Exit: {h(found['reason'])}"
    if found.get("also"):
        leave += f", also {h(', '.join(map(str, found['also'])))}"
    if found["detail"]:
        leave += f" ({isolated(found['detail'])})"
    if found.get("novelty_ratio") is not None:
        leave += f". Novelty ratio {number(found['novelty_ratio'])}"
    if window.get("band"):
        leave += f". Band: {h(window['band'])}"
    leave += "."
    top = max([_base(fact) for w in run.windows for fact in w["facts"]] + [1e-12])
    rows = (
        "".join(_fact(run, index, window, i, top) for i in range(facts)) or '<li class="note">No fact was packed.</li>'
    )
    output = window.get("output")
    text = (
        f'<details class="output"><summary>The text of the window</summary><p>{isolated(output)}</p></details>'
        if output
        else ""
    )
    return (
        f'<details class="envelope" id="r{index}w{window["number"]}"{" open" if opened else ""}>'
        f'<summary>{summary}</summary>{told}<ol class="facts">{rows}</ol>{text}'
        f'<dl class="headers">{headers}</dl><p class="note exit">{leave}</p></details>'
    )


def _base(fact: dict[str, Any]) -> float:
    base: float = (
        fact.get("importance", 1.0) * fact.get("multiplier", 1.0) * max(fact["relevance"], fact["residual_pull"])
    )
    return base


def _fact(run: Run, index: int, window: Window, place: int, top: float) -> str:
    fact = window["facts"][place]
    base = max(0.0, _base(fact))
    score = max(0.0, fact["score"])
    unguarded = max(score, fact.get("score_without_guard", score))
    covered = max(0.0, base - unguarded)
    tick = ""
    if fact["residual_pull"] > fact["relevance"] > 0 and base > 0:
        at = fact.get("importance", 1.0) * fact.get("multiplier", 1.0) * fact["relevance"]
        tick = f'<i class="tick" style="left:{_percent(at, top)}"></i>'
    bar = (
        f'<div class="bar" aria-hidden="true"><i class="kept" style="width:{_percent(score, top)}"></i>'
        f'<i class="covered" style="width:{_percent(covered, top)}"></i>'
        f'<i class="repeated" style="width:{_percent(unguarded - score, top)}"></i>{tick}</div>'
    )
    named = [("score", "score"), ("relevance", "relevance"), ("pull", "residual_pull")]
    values = {name: fact[key] for name, key in named} | {"novelty": fact.get("spec_novelty", fact["novelty"])}
    numbers = [f"<span>{name} {number(value, 3)}</span>" for name, value in values.items()]
    if fact.get("ngram_overlap"):
        numbers.append(f"<span>6-grams {number(fact['ngram_overlap'], 0)}</span>")
    if fact.get("importance", 1.0) != 1.0:
        numbers.append(f"<span>importance {number(fact['importance'], 3)}</span>")
    seen = "" if fact.get("fresh", True) else '<span class="seen">packed before</span>'
    source = f'<span class="source">{isolated(fact["source"])}</span>' if fact.get("source") else ""
    return (
        f'<li id="{anchor(index, window["number"], place)}" tabindex="-1">{_text(window["envelope"]["texts"][place])}'
        f'<div class="measure">{bar}<p class="parts"><code>{isolated(fact["id"])}</code>{seen}'
        f"{''.join(numbers)}{source}</p></div></li>"
    )


def _percent(value: float, top: float) -> str:
    return f"{100 * min(1.0, value / top):.2f}%"


def _text(text: object) -> str:
    whole = str(text)
    if len(whole) <= _LONG:
        return f'<p class="text">{isolated(whole)}</p>'
    return (
        f'<p class="text">{isolated(whole[:_LONG])}\u2026</p>'
        f'<details class="rest"><summary>All {len(whole):,} characters</summary>'
        f'<p class="text">{isolated(whole)}</p></details>'
    )


_TERMS = (
    ("Relevance", "the cosine of a fact to the task\u2019s query. Below the gate (\u00a72.6) a fact is no candidate."),
    (
        "Residual pull",
        "the largest cosine to a sub-topic that no window has addressed. It counts where it is above the relevance, "
        "from the second window on.",
    ),
    (
        "Novelty",
        "1 less the coverage, which is the depth-weighted mean cosine to what was covered. Never under 0.20; above 1 "
        "where coverage is negative.",
    ),
    ("N-gram guard", "takes 15 % of the score for every 6-gram of the fact that was written already, 80 % at most."),
    ("Fresh", "packed for the first time. A fact that comes again is pushed back, not barred."),
    (
        "Completeness",
        "as the writer\u2019s assessment has it. It counts what was written about what, and does not judge how well.",
    ),
)


def _reading(runs: Sequence[Run]) -> str:
    terms = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in _TERMS)
    formula = "score = importance \u00d7 max(relevance, residual pull) \u00d7 novelty \u00d7 (1 \u2212 n-gram penalty)"
    settings = "".join(_settings(run, i, len(runs) > 1) for i, run in enumerate(runs))
    return f'<p class="formula">{formula}</p><dl class="terms">{terms}</dl>{settings}'


def _settings(run: Run, index: int, named: bool) -> str:
    values = {**run.document["settings"], "store": run.document["store"].get("path")}
    rows = "".join(
        f"<div><dt>{h(name)}</dt><dd>{isolated('none' if value is None else value)}</dd></div>"
        for name, value in values.items()
    )
    name = f", {isolated(run.name)}" if named else ""
    return f'<details class="settings"><summary>Settings{name}</summary><dl class="headers">{rows}</dl></details>'
