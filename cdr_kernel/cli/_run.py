"""The commands about runs of several windows: `cdr demo`, `cdr run` and `cdr report`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

import cdr_kernel
from cdr_kernel.cli._inputs import check_model, check_one_save, embedder, opened_store, task_vectors, where_filter
from cdr_kernel.cli._options import (
    AsJson,
    ClampNoveltyOption,
    CompletionThresholdOption,
    EmbedOption,
    ExcludePackedOption,
    ExhaustionOption,
    FirstWindowPullOption,
    GateOnOption,
    GateOption,
    GuardOption,
    Kind,
    KindOption,
    MinRelevanceOption,
    Mode,
    ModeOption,
    PerEnvelope,
    ReportOption,
    ResidualDepthOption,
    SafetyBudgetOption,
    SourceOption,
    StoreArgument,
    WhereMissingOption,
    WhereOption,
    Windows,
    no_nan,
    session_settings,
)
from cdr_kernel.cli._rank import asked_facts, largest_cosine, say_largest_cosine
from cdr_kernel.cli._terminal import fits, new_table, print_json, say, show
from cdr_kernel.files._files import Task, check_output, goes_out_at_once, is_stdout, pick_task, read_tasks, write_json
from cdr_kernel.loop import CommandWriter, ExtractWriter
from cdr_kernel.loop._writers import MAX_TIMEOUT
from cdr_kernel.report._run_record import RunRecord, summary
from cdr_kernel.report._store_map import StoreMap
from cdr_kernel.session import CalibratedSettings
from cdr_kernel.session._settings import MODES, settings_of
from cdr_kernel.spec.constants import CDR_MIN_RELEVANCE
from cdr_kernel.store._attributes import Where
from cdr_kernel.validation._scalars import counted

if TYPE_CHECKING:
    from rich.table import Table

FIRST_TO_GO = ("least", "words", "new", "facts", "novelty", "topics", "seen", "done", "fresh")
"""Columns of a run's table in the order in which a narrow terminal loses them; the number and the status stay."""
LEGEND = (
    "Of each window: facts packed, how many are fresh and how many were seen before, their mean and least novelty, "
    "sub-topics reached so far, words, words of fresh facts, how much of the task is done."
)
NO_BUDGET = 2**31 - 1  # tokens; no number of facts comes near


class Pack(StrEnum):
    """How an envelope is filled."""

    greedy = "greedy"
    need = "need"


def demo(
    min_relevance: Annotated[
        float | None,
        typer.Option(min=-1.0, max=1.0, callback=no_nan, help="Cosine to the query that a fact must reach (0.30)."),
    ] = None,
    windows: Windows = None,
    k: PerEnvelope = None,
    report: ReportOption = None,
    as_json: AsJson = False,
) -> None:
    """Five windows on a packaged corpus, by relevance alone and by CDR. Needs no model and no network."""
    from cdr_kernel import demo as packaged

    if report is not None:
        _check_report(report)
    corpus = packaged.load()
    gate = packaged.MIN_RELEVANCE if min_relevance is None else min_relevance
    runs = packaged.run_demo(corpus, min_relevance=gate, windows=windows, k=k)
    closing = packaged.conclusion(runs)
    if report is not None:
        _report(report, packaged.documents(corpus, runs, min_relevance=gate, windows=windows, k=k))
    if as_json:
        print_json(
            {
                "task": corpus.task.id,
                "facts": len(corpus.store),
                "model": packaged.EMBEDDING_MODEL,
                "min_relevance": gate,
                "runs": {name: summary(record.windows) for name, record in runs.items()},
                "conclusion": closing,
            }
        )
        return
    show(
        f"{corpus.task.query}: {counted(len(corpus.store), 'fact')}, "
        f"{counted(len(corpus.task.items), 'sub-topic')}, "
        f"{packaged.EMBEDDING_MODEL}."
    )
    passing = {value: packaged.passing(corpus, value) for value in (CDR_MIN_RELEVANCE, gate)}
    show(
        f"Facts need a cosine of {gate:.12g} to the query: {passing[gate]} have it. The specification's "
        f"{CDR_MIN_RELEVANCE:g}, which {passing[CDR_MIN_RELEVANCE]} have, is for models with higher cosines than this "
        "one's. --min-relevance changes it."
    )
    for name, title in packaged.TITLES.items():
        show("")
        show(title)
        show(_window_table(runs[name].windows))
    show("")
    show(LEGEND)
    for window in runs["cdr"].windows:
        show("")
        show(f"CDR, window {window['number']}. {packaged.remaining(runs['cdr'], window['number'])}")
        for header, value in window["headers"].items():
            show(f"{header}: {value}", indent=4)
    show("")
    show(_ending(runs["cdr"].windows))
    show(closing)


def run(
    store: StoreArgument,
    task: Annotated[Path, typer.Argument(metavar="TASK.json", help="A task, or a file of tasks.")],
    writer: Annotated[
        str,
        typer.Option(
            metavar='extract|"COMMAND"',
            help="Copy the facts, or run a command: JSON in, text out. No shell: sh -c '...' for pipes.",
        ),
    ],
    task_id: Annotated[str | None, typer.Option(metavar="ID", help="Which task of the file (the first).")] = None,
    vectors: Annotated[
        Path | None, typer.Option(metavar="Q.npz", help='Arrays "INDEX:query" [D] and "INDEX:subs" [S, D].')
    ] = None,
    embed: EmbedOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="RUN.json", help="Write the whole run here (to /dev/stdout: not the table)."
        ),
    ] = None,
    mode: ModeOption = Mode.spec,
    min_relevance: MinRelevanceOption = None,
    gate_at: GateOption = None,
    gate_on: GateOnOption = None,
    source: SourceOption = None,
    pack: Annotated[
        Pack | None, typer.Option(help="Best facts first, or sub-queries in turn (spec: greedy; calibrated: need).")
    ] = None,
    windows: Windows = None,
    k: PerEnvelope = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="Tokens per envelope (no limit).")] = None,
    kind: KindOption = Kind.scan,
    guard: GuardOption = None,
    exclude_packed: ExcludePackedOption = False,
    completion_threshold: CompletionThresholdOption = None,
    safety_budget: SafetyBudgetOption = None,
    exhaustion: ExhaustionOption = None,
    first_window_pull: FirstWindowPullOption = False,
    clamp_novelty: ClampNoveltyOption = False,
    residual_depth: ResidualDepthOption = None,
    where: WhereOption = None,
    where_missing: WhereMissingOption = None,
    backward_summary: Annotated[
        bool, typer.Option("--backward-summary", help="Give a command the text of the earlier windows as well (§4.3).")
    ] = False,
    writer_timeout: Annotated[
        float, typer.Option(min=0.001, max=MAX_TIMEOUT, callback=no_nan, help="Seconds a command may take per window.")
    ] = 300.0,
    report: ReportOption = None,
    as_json: AsJson = False,
) -> None:
    """Run a task window by window: rank, pack, write, assess, until one of the exits of §6."""
    if backward_summary and writer == "extract":
        raise typer.BadParameter("--backward-summary is for a command, not for extract")
    if pack is Pack.need and MODES[mode.value].packing != "need":
        raise typer.BadParameter('"need" belongs to mode "calibrated", the mode is "spec"', param_hint="--pack")
    chosen_settings = session_settings(
        mode,
        min_relevance=min_relevance,
        gate=gate_at,
        gate_on=gate_on,
        source_weight=source,
        exclude_packed=exclude_packed,
        completion_threshold=completion_threshold,
        safety_budget=safety_budget,
        exhaustion=exhaustion,
        first_window_pull=first_window_pull,
        clamp_novelty=clamp_novelty,
        residual_depth=residual_depth,
    )
    if output is not None:
        check_output(output, task, store, *([] if vectors is None else [vectors]))
    if report is not None:
        check_output(report, task, store, *(path for path in (vectors, output) if path is not None))
        _check_report(report)
    opened = opened_store(store)
    chosen = pick_task(read_tasks(task), task_id, task)
    check_model(embed, opened, "--embed")
    # To copy facts needs no model: their vectors are in the store.
    encode = embedder(embed) if embed is not None and (vectors is None or writer != "extract") else None
    query, subs = task_vectors(vectors, chosen, opened, encode)
    check_one_save(opened, task, *([] if vectors is None else [vectors]))
    guarded = MODES[mode.value].guarded if guard is None else guard
    budget = chosen_settings.pop("safety_budget", 1.0)
    session = cdr_kernel.Session(
        chosen.sub_queries(subs),
        embedding_model=opened.embedding_model,
        settings=settings_of(**chosen_settings, max_windows=windows or chosen.windows),
        safety_budget=budget,
        guard=cdr_kernel.NGramGuard() if guarded else False,
    )
    write = _writer(writer, opened, session, chosen, token_budget, writer_timeout, encode)
    retriever = cdr_kernel.Retriever(opened, kind.value)
    per_envelope = k or chosen.k
    packing = session.settings.packing if pack is None else pack.value
    wanted = where_filter(where, where_missing, opened.view())
    settings = {
        **_settings_of(session),
        "pack": packing,
        "windows": session.max_windows,
        "k": per_envelope,
        "token_budget": token_budget,
        "kind": kind.value,
        "guard": guarded,
        "where": wanted,
        "backward_summary": backward_summary,
        "writer": writer,
        "embed": embed,
    }
    record = RunRecord(chosen, StoreMap(opened.view(), query, subs))

    # What cannot be written again gets the run once, when it is over.
    once = output is not None and goes_out_at_once(output)

    def document(complete: bool, error: str | None) -> dict[str, Any]:
        about = {"path": str(store), "facts": len(opened), "dim": opened.dim, "dtype": opened.dtype.name}
        return record.document(
            settings=settings, model=opened.embedding_model, store=about, complete=complete, error=error
        )

    def save(complete: bool, error: str | None = None) -> None:
        if output is not None and (not once or complete or error is not None):
            write_json(output, document(complete, error))

    try:
        for window in cdr_kernel.run_windows(
            write,
            query,
            retriever,
            session,
            token_budget=NO_BUDGET if token_budget is None else token_budget,
            assess=write.assess,
            where=wanted,
            k=per_envelope if token_budget is None else None,  # where everything fits, the rest need not be ranked
            max_facts=per_envelope,
            pack=packing,
            backward_summary="\n\n".join if backward_summary else None,
        ):
            record.add(window)
            save(complete=False)
            if writer != "extract" and window.output is not None:
                say(f"window {window.number} of at most {session.max_windows}: {record.windows[-1]['words']} words")
    except BaseException as error:
        save(complete=False, error="interrupted" if isinstance(error, KeyboardInterrupt) else str(error))
        raise
    save(complete=True)
    if report is not None:
        _report(report, {chosen.id: document(True, None)})
    last = record.windows[-1]
    if not last["envelope"]["qualified"]:
        if isinstance(session.settings, cdr_kernel.SpecSettings):
            say_largest_cosine(retriever, query, session.settings.min_relevance, wanted)
        elif not last["envelope"]["new_share"]:
            _say_largest_deviations(retriever, np.vstack([query, *subs]), session.settings, wanted)
    if as_json:
        print_json(
            {
                "task": chosen.id,
                "model": opened.embedding_model,
                "store": str(store),
                "output": None if output is None else str(output),
                "complete": True,
                "completeness": session.completeness,
                "exit": last["exit"],
                "windows": summary(record.windows),
            }
        )
        return
    if output is not None and is_stdout(output):
        return
    sizes = f"{counted(len(chosen.items), 'sub-topic')}, {counted(len(opened), 'fact')}"
    show(f"{chosen.query}: {sizes}, {opened.embedding_model}")
    show(_window_table(record.windows))
    show(_ending(record.windows))


def _settings_of(session: cdr_kernel.Session) -> dict[str, Any]:
    """The settings of a session for a RUN.json; null for those of the other mode."""
    settings = session.settings
    spec = isinstance(settings, cdr_kernel.SpecSettings)
    return {
        "mode": settings.mode,
        "calibrated": None if spec else settings.own(),
        **(settings.own() if spec else dict.fromkeys(cdr_kernel.SpecSettings().own())),
        "completion_threshold": settings.completion_threshold,
        "safety_budget": session.safety_budget,
        "residual_depth": settings.residual_depth,
    }


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN.json...", help="What `cdr run -o` wrote, up to four, side by side.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="HTML, or figures for .png, .svg and .pdf.")
    ],
    name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="What to call a run, once for each (the files' names).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show runs: quality over windows, sub-topics, a map of the store, every envelope. One file, no network."""
    from cdr_kernel.report import MOST_RUNS, named

    if len(runs) > MOST_RUNS:
        raise typer.BadParameter(f"expected {MOST_RUNS} runs at most, got {len(runs)}")
    if name and len(name) != len(runs):
        raise typer.BadParameter(f"expected {len(runs)} (one per run), got {len(name)}", param_hint="--name")
    check_output(output, *runs)
    _check_report(output)
    found = named(runs, name)
    _report(output, found)
    if as_json:
        windows = {called: len(document["windows"]) for called, document in found.items()}
        print_json({"output": str(output), "windows": windows})
    elif not is_stdout(output):
        show(f"{output}: {', '.join(found)}")


def _writer(
    writer: str,
    store: cdr_kernel.FactStore,
    session: cdr_kernel.Session,
    task: Task,
    token_budget: int | None,
    timeout: float,
    encode: Callable[[list[str]], Any] | None,
) -> ExtractWriter | CommandWriter:
    if writer == "extract":
        return ExtractWriter(store, session)
    try:
        return CommandWriter(
            writer, store, session, query=task.query, token_budget=token_budget, timeout=timeout, embed=encode
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--writer") from None


def _say_largest_deviations(
    retriever: cdr_kernel.Retriever, vectors: Any, settings: CalibratedSettings, where: Where | None
) -> None:
    found = asked_facts(retriever, where)
    if found is None:
        return
    view, among = found
    asked = vectors if settings.gate_on == "best" else vectors[:1]
    scale, shift = retriever.moments.of(view).scale_shift(asked)
    cosines = [largest_cosine(retriever, vector, view) for vector in asked]
    say(
        f"warning: no fact reaches --gate {settings.gate:.12g}; the largest {among} is "
        f"{(scale * np.array(cosines) + shift).max():.2f} deviations"
    )


def _check_report(path: Path) -> None:
    from cdr_kernel.report import check_ending

    check_ending(path)


def _report(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    from cdr_kernel.report import write_report

    write_report(path, runs)


def _ending(windows: Sequence[Mapping[str, Any]]) -> str:
    """Why the last window was the last."""
    last = windows[-1]
    exit, report = last["exit"], last["report"] or next((w["report"] for w in reversed(windows) if w["report"]), None)
    text = f"Ended after window {last['number']}: {exit['reason']}"
    if not last["written"]:
        text = f"Ended before window {last['number']} was written: {exit['reason']}"
    if exit["also"]:
        text += f", also {', '.join(exit['also'])}"
    if exit["detail"]:
        text += f" ({exit['detail']})"
    return text + (f"; completeness {report['completeness_score']:.2f}." if report else ".")


def _window_table(windows: Iterable[Mapping[str, Any]]) -> Table:
    """The windows, and as many of their numbers as there is room for beside the status."""
    rows = [_window_row(window) for window in windows]
    names = list(rows[0])
    for unneeded in ("", *FIRST_TO_GO):
        names = [name for name in names if name != unneeded]
        table = new_table([(name, name != "status") for name in names])
        for row in rows:
            table.add_row(*(row[name] for name in names))
        if fits(table):
            break
    return table


def _window_row(window: Mapping[str, Any]) -> dict[str, str]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    report = window["report"]
    status = window["headers"]["CRP-Context-Continuation-Status"]
    return {
        "#": str(window["number"]),
        "facts": str(len(window["facts"])),
        "fresh": str(window["fresh"]),
        "seen": str(window["repeated"]),
        "novelty": number(window["novelty_mean"]),
        "least": number(window["novelty_min"]),
        "topics": "-" if window["topics_reached"] is None else str(window["topics_reached"]),
        "words": str(window["words"]),
        "new": str(window["fresh_words"]),
        "done": number(None if report is None else report["completeness_score"]),
        "status": status + ("" if window["written"] else ", not written"),
    }
