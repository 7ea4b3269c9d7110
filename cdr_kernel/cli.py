"""The command `cdr`: demo, index, ingest, rank, run, report, serve, gate, store, doctor.

Exit status: 0 fine, 1 an error, 2 wrong usage, 130 interrupted, 143 terminated. With --json standard output gets one
line, last. CDR_KERNEL_DEBUG=1 shows where an error comes from.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import numpy as np
import typer

import cdr_kernel
import cdr_kernel.retrieve
import cdr_kernel.store
from cdr_kernel import cli_store
from cdr_kernel.constants import CALIBRATED_GATE, CDR_MIN_RELEVANCE, DEFAULT_DEPTH, MAX_WINDOWS, MAX_WINDOWS_LIMIT
from cdr_kernel.explain import explain_vectors
from cdr_kernel.files import (
    FileError,
    Task,
    check_output,
    facts_on_disk,
    goes_out_at_once,
    is_stdout,
    names_array,
    pick_task,
    read_task_vectors,
    read_tasks,
    read_vector,
    read_vectors,
    write_json,
    write_lines,
)
from cdr_kernel.index import FactFile
from cdr_kernel.record import RunRecord, summary
from cdr_kernel.storemap import StoreMap
from cdr_kernel.task import Calibrated
from cdr_kernel.terminal import (
    Progress,
    cell,
    drop_output,
    fits,
    flush,
    new_table,
    prepare_streams,
    print_json,
    say,
    show,
    width,
)
from cdr_kernel.writer import MAX_TIMEOUT, CommandWriter, ExtractWriter, WriterError

if TYPE_CHECKING:
    from rich.table import Table

Body = TypeVar("Body", bound=Callable[..., None])

FULL_WIDTH = 80  # characters that the table of `rank` needs with all its columns
FIRST_TO_GO = ("least", "words", "new", "facts", "novelty", "topics", "seen", "done", "fresh")
"""Columns of a run's table in the order in which a narrow terminal loses them; the number and the status stay."""
LEGEND = (
    "Of each window: facts packed, how many are fresh and how many were seen before, their mean and least novelty, "
    "sub-topics reached so far, words, words of fresh facts, how much of the task is done."
)
_MISTYPED = re.compile(r"\S+\.np[a-z]?:?\S*")  # a --query that is meant to be a file
NO_BUDGET = 2**31 - 1  # tokens; no number of facts comes near

app = typer.Typer(
    name="cdr",
    help="Coverage-Differential Retrieval: fresh, relevant facts for every window of a long generation.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Dtype(StrEnum):
    """What a store keeps its vectors as."""

    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


class Kind(StrEnum):
    """How candidates are found."""

    scan = "scan"
    device = "device"
    flat = "flat"
    hnsw = "hnsw"
    ivf = "ivf"


class Mode(StrEnum):
    """What a session ranks by."""

    spec = "spec"
    calibrated = "calibrated"


class GateOn(StrEnum):
    """Which z-score the gate of mode calibrated is on."""

    best = "best"
    query = "query"


class Pack(StrEnum):
    """How an envelope is filled."""

    greedy = "greedy"
    need = "need"


class OnInvalid(StrEnum):
    """What to do with a fact whose vector is not finite or all zeros."""

    refuse = "raise"
    skip = "skip"


def _no_nan(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise typer.BadParameter("expected a number, got nan")
    return value


AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON, last on standard output.")]
Gate = Annotated[
    float,
    typer.Option(min=-1.0, max=1.0, callback=_no_nan, help="Cosine to the query that a fact must reach (§2.6)."),
]
KindOption = Annotated[Kind, typer.Option(help="How candidates are found; hnsw and ivf may miss some.")]
EmbedOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Embed texts with this model: all-MiniLM-L6-v2, or a folder.")
]
StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="Folder that `cdr index` wrote.")]
WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="Only facts of this source or attribute; several of one name: any of them, else all."
    ),
]
Windows = Annotated[int | None, typer.Option(min=1, max=MAX_WINDOWS_LIMIT, help="Windows at most (the task's).")]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write a report: HTML, or figures (.png, .svg, .pdf)."),
]
PerEnvelope = Annotated[int | None, typer.Option("--k", min=1, help="Facts per envelope (the task's).")]


class Terminated(KeyboardInterrupt):
    """Told to end by a signal other than Ctrl-C's, and just as orderly."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def main() -> None:
    """Entry point of the command `cdr`."""
    prepare_streams()
    _end_in_order()
    try:
        try:
            app(prog_name="cdr")
        except SystemExit as ended:
            _tell_usage(ended)
            raise
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        sys.exit(0)
    except OSError as error:
        drop_output()
        if not getattr(error.__context__, "code", 0):  # else it was said before
            say(f"error: standard output: {error.strerror}")
        sys.exit(1)
    except KeyboardInterrupt as error:
        sys.exit(_interrupted(error))


def _end_in_order() -> None:
    """Have the signals that end a process raise `Terminated`, so that writers end and a RUN.json is written."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough
        raise Terminated(number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, end)


def _interrupted(error: KeyboardInterrupt) -> int:
    return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)


def _tell_usage(ended: SystemExit) -> None:
    """With --json, say in JSON too what is wrong with the command line; typer has said it in words."""
    message = getattr(ended.__context__, "format_message", None)
    if message is not None and "--json" in sys.argv:
        print_json({"error": " ".join(message().split())})


def _fail(message: str, as_json: bool) -> NoReturn:
    if os.environ.get("CDR_KERNEL_DEBUG") == "1":
        traceback.print_exc()
    line = " ".join(message.split())
    say(f"error: {line}")
    if as_json:
        with contextlib.suppress(OSError):
            print_json({"error": line})
    raise typer.Exit(1)


def _command(body: Body, group: typer.Typer = app) -> Body:
    """Register a command whose errors end in one line and an exit status."""

    @functools.wraps(body)
    def guarded(*args: Any, **kwargs: Any) -> None:
        as_json = bool(kwargs.get("as_json"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
            try:
                body(*args, **kwargs)
                flush()
            except (typer.Exit, typer.Abort, typer.BadParameter):
                raise
            except KeyboardInterrupt as error:
                say("interrupted")
                raise typer.Exit(_interrupted(error)) from None
            except BrokenPipeError:
                drop_output()
                raise typer.Exit(0) from None
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                _fail(f"{where}{error.strerror}" if error.strerror else str(error), as_json)
            except KeyError as error:
                _fail(str(error.args[0]) if error.args else str(error), as_json)
            except MemoryError as error:
                _fail(f"not enough memory ({error})", as_json)
            except (ValueError, ImportError, WriterError) as error:
                _fail(str(error), as_json)
            except Exception as error:  # a fault of this program, or a library's over a file that nobody foresaw
                _fail(f"{type(error).__name__}: {error} (CDR_KERNEL_DEBUG=1 shows where)", as_json)

    group.command()(guarded)
    return body


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"cdr-kernel {cdr_kernel.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@_command
def demo(
    min_relevance: Annotated[
        float | None,
        typer.Option(min=-1.0, max=1.0, callback=_no_nan, help="Cosine to the query that a fact must reach (0.30)."),
    ] = None,
    windows: Windows = None,
    k: PerEnvelope = None,
    report: ReportOption = None,
    as_json: AsJson = False,
) -> None:
    """Five windows on a packaged corpus, by relevance alone and by CDR. Needs no model and no network."""
    from cdr_kernel import demo as packaged

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
        f"{corpus.task.query}: {len(corpus.store)} facts, {len(corpus.task.items)} sub-topics, "
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
        show(f"CDR, window {window['number']}. {window['anchor'] or 'Nothing remains.'}")
        for header, value in window["headers"].items():
            show(f"{header}: {value}", indent=4)
    show("")
    show(_ending(runs["cdr"].windows))
    show(closing)


@_command
def index(
    facts: Annotated[
        Path,
        typer.Argument(
            metavar="FACTS",
            help="JSONL or Parquet with text, and optionally id, source, importance, position; - is standard input.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="STORE", help="Folder of the store to write.")],
    embeddings: Annotated[
        str | None, typer.Option(metavar="E.npy", help="Vectors [N, D], one per fact (or FILE.npz:KEY).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model that made --embeddings.")] = None,
    embed: EmbedOption = None,
    dtype: Annotated[Dtype, typer.Option(help="What the store keeps vectors as.")] = Dtype.float32,
    rows: Annotated[str | None, typer.Option(metavar="A:B", help="Only the facts in these rows (0-based).")] = None,
    on_invalid: Annotated[
        OnInvalid, typer.Option(help="A vector that is not finite or all zeros: refuse the file, or skip the fact.")
    ] = OnInvalid.refuse,
    durable: Annotated[
        bool, typer.Option("--durable", help="Make a durable store (extra `store`), which `cdr store` works on.")
    ] = False,
    no_codes: Annotated[
        bool, typer.Option("--no-codes", help="Leave out the scan's codes; a retriever makes them when it needs them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a store from a file of facts and their embeddings."""
    check_source(embeddings, embed, model)
    start, stop = _row_range(rows)
    if durable:
        from cdr_kernel.durable import check_new_folder

        check_new_folder(output)
    else:
        cdr_kernel.store.check_store_folder(output)
    source = make_source(embeddings, embed, model)
    with facts_on_disk(facts) as (path, called):
        file = FactFile(path, source, start=start, stop=stop, name=embed or "", called=called)
        with Progress("facts", len(file)) as advance:
            store, skipped = file.build(
                embedding_model=embed or model or "", dtype=dtype.value, on_invalid=on_invalid.value, advance=advance
            )
    codes = not no_codes and len(store) >= cdr_kernel.retrieve.WORTH_CODES
    with _writing(output):
        if durable:
            _make_durable(store, output, codes)
        else:
            store.save(output)
    if codes and not durable:
        retriever = cdr_kernel.Retriever(cdr_kernel.FactStore.load(output))
        with Progress("codes", len(store)) as advance:
            retriever.prepare(advance)
        with _writing(output):
            retriever.save()
    if skipped:
        say(f"warning: {len(skipped)} facts left out, their vectors are not finite or all zeros: {_few(skipped)}")
    if as_json:
        print_json(
            {
                "store": str(output),
                "facts": len(store),
                "skipped": skipped,
                "codes": codes,
                "dim": store.dim,
                "dtype": store.dtype.name,
                "model": store.embedding_model,
            }
        )
    else:
        show(f"{output}: {len(store)} facts, {store.dim} x {store.dtype.name}, {store.embedding_model}")


@_command
def ingest(
    documents: Annotated[Path, typer.Argument(metavar="DOCS_DIR", help="Folder of Markdown and plain text.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="STORE", help="Folder of the store to write.")],
    embed: Annotated[
        str, typer.Option(metavar="MODEL", help="Embed with this model: all-MiniLM-L6-v2, or a folder.")
    ] = "all-MiniLM-L6-v2",
    as_json: AsJson = False,
) -> None:
    """Cut documents into facts, embed them, propose tasks: what `python -m bench quality --data STORE` needs."""
    from cdr_kernel.ingest import propose_tasks, read_documents

    cdr_kernel.store.check_store_folder(output)
    found = read_documents(documents)
    facts = [fact for document in found for fact in document.facts]
    if not facts:
        _fail(f"{documents}: expected documents with words, found none", as_json)
    tasks = propose_tasks(found)
    encode = _embedder(embed)

    def vectors(texts: list[str]) -> Any:
        with Progress("texts", len(texts)) as advance:
            parts = []
            for start in range(0, len(texts), 256):
                parts.append(encode(texts[start : start + 256]))
                advance(len(parts[-1]))
            return np.concatenate(parts)

    rows = vectors([fact.embedded for fact in facts])
    store = cdr_kernel.FactStore(rows.shape[1], embedding_model=embed)
    store.add(
        [fact.id for fact in facts],
        [fact.embedded for fact in facts],
        rows,
        source=[fact.path for fact in facts],
        position=[fact.position for fact in facts],
    )
    asked = {}
    for i, task in enumerate(tasks["tasks"]):
        made = encode([task["query"], *(item["text"] for item in task["sub_queries"])])
        asked[f"{i}:query"], asked[f"{i}:subs"] = made[0], made[1:]
    store.save(output)
    write_lines(output / "facts.jsonl", [fact.as_dict() for fact in facts])
    write_json(output / "tasks.json", tasks)
    np.savez(output / "queries.npz", **asked)
    numbers = {"documents": len(found), "facts": len(facts), "tasks": len(tasks["tasks"])}
    if as_json:
        print_json({"store": str(output), **numbers, "dim": store.dim, "model": embed})
        return
    show(f"{output}: {', '.join(f'{count} {name}' for name, count in numbers.items())}, {store.dim} x {embed}")
    if not tasks["tasks"]:
        show("No page or section has 4 to 13 headings with enough under them to make a task of.")


@_command
def rank(
    store: StoreArgument,
    query: Annotated[str, typer.Option(metavar="Q", help="Q.npy, FILE.npz:KEY, or a text (needs a model, --embed).")],
    min_relevance: Gate = CDR_MIN_RELEVANCE,
    k: Annotated[int, typer.Option("--k", min=0, help="Facts to show.")] = 10,
    model: Annotated[str | None, typer.Option(help="Model that made the vectors; refused unless the store's.")] = None,
    embed: EmbedOption = None,
    kind: KindOption = Kind.scan,
    coverage: Annotated[
        str | None, typer.Option(metavar="C.npy", help="Vectors [C, D] of what has been addressed.")
    ] = None,
    depths: Annotated[
        str | None, typer.Option(metavar="D,D,...", help="Depth in 0..1 of each --coverage row, or one for all (0.5).")
    ] = None,
    residual: Annotated[str | None, typer.Option(metavar="R.npy", help="Vectors [R, D] of what remains.")] = None,
    first_window_pull: Annotated[
        bool, typer.Option("--first-window-pull", help="Let --residual pull without --coverage (reading R1).")
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Explain this fact, and what would put it among the --k best."),
    ] = None,
    where: WhereOption = None,
    as_json: AsJson = False,
) -> None:
    """Rank a store's facts for one query, with the numbers behind every score."""
    if depths is not None and coverage is None:
        raise typer.BadParameter("--depths goes with --coverage")
    opened = _opened(store)
    if model not in (None, opened.embedding_model):
        raise cdr_kernel.EmbeddingModelMismatch("--model", opened.embedding_model, model)
    vector = _query_vector(query, opened, embed)
    covered = None if coverage is None else read_vectors(coverage, opened.dim)
    remaining = None if residual is None else read_vectors(residual, opened.dim)
    if residual is not None and coverage is None and not first_window_pull:
        say("warning: --residual pulls only beside --coverage (§2.7), or with --first-window-pull")
    question: dict[str, Any] = {
        "coverage": covered,
        "depth_weights": None if covered is None else _depths(depths, len(covered)),
        "residual": remaining,
        "min_relevance": min_relevance,
        "first_window_pull": first_window_pull,
    }
    columns = cdr_kernel.Columns.spec(vector, **question)
    if explain is not None and where:
        raise typer.BadParameter("--explain looks at all facts: leave out --where")
    retriever, view = cdr_kernel.Retriever(opened, kind.value), opened.view()
    view = view.select(_where(where, view))
    why = None
    if explain is not None:
        why = explain_vectors(vector, retriever, explain, max_facts=k, **question)
    rows = retriever.candidates(columns, view)
    scores = cdr_kernel.cdr_score(
        view.blocks,
        columns,
        rows=rows,
        squared_norms=view.squared_norms,
        importance=view.importance[rows],
        k=k,
    )
    found = view.facts(scores.rows)
    numbers = ("score", "relevance", "coverage", "residual_pull", "novelty")
    if not len(rows):
        _explain_gate(retriever, vector, min_relevance)
    elif len(rows) < k <= len(view):
        say(
            f"warning: {len(rows)} facts reach --min-relevance {min_relevance:.12g}, fewer than --k {k}: see `cdr gate`"
        )
    if as_json:
        results = [
            {
                "rank": i + 1,
                "id": fact.id,
                **{name: getattr(scores, name)[i].item() for name in numbers},
                "importance": fact.importance,
                "source": fact.source,
                "attributes": dict(fact.attributes),
                "text": fact.text,
            }
            for i, fact in enumerate(found)
        ]
        print_json(
            {
                "store": str(store),
                "model": opened.embedding_model,
                "min_relevance": min_relevance,
                "kind": kind.value,
                "facts": len(opened),
                "qualified": len(rows),
                "results": results,
                **({} if why is None else {"explanation": why.as_dict()}),
            }
        )
        return
    if why is not None:
        show(why)
        return
    columns_shown = numbers[:2] if width() < FULL_WIDTH else numbers
    names = [name.replace("_", " ") for name in columns_shown]
    table = new_table([("rank", True), ("id", False), *((name, True) for name in names), ("text", False)])
    for i, fact in enumerate(found):
        values = [f"{getattr(scores, name)[i]:.3f}" for name in columns_shown]
        table.add_row(str(i + 1), cell(fact.id), *values, cell(fact.text))
    show(table)
    some = f", {len(view)} of them asked" if where else ""
    gate_said = f"at or above the gate of {min_relevance:.12g}"
    show(f"{len(rows)} facts {gate_said}, the best {len(found)} shown ({len(opened)} in the store{some})")


@_command
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
    mode: Annotated[Mode, typer.Option(help="The specification's formula, or the calibrated mode.")] = Mode.spec,
    min_relevance: Annotated[
        float | None,
        typer.Option(
            min=-1.0,
            max=1.0,
            callback=_no_nan,
            help=f"Cosine to the query that a fact must reach (§2.6; {CDR_MIN_RELEVANCE}). Of mode spec.",
        ),
    ] = None,
    gate_at: Annotated[
        float | None,
        typer.Option(
            "--gate",
            callback=_no_nan,
            help=f"Deviations above the store's mean that a fact must reach ({CALIBRATED_GATE:g}). Of mode calibrated.",
        ),
    ] = None,
    gate_on: Annotated[
        GateOn | None, typer.Option(help="--gate is on the best of query and sub-queries (best), or on the query.")
    ] = None,
    source: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=_no_nan,
            help="Weight of a fact's document, in place of feedback (0, which is off).",
        ),
    ] = None,
    pack: Annotated[
        Pack | None, typer.Option(help="Best facts first, or sub-queries in turn (spec: greedy; calibrated: need).")
    ] = None,
    windows: Windows = None,
    k: PerEnvelope = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="Tokens per envelope (no limit).")] = None,
    kind: KindOption = Kind.scan,
    guard: Annotated[
        bool | None, typer.Option("--guard/--no-guard", help="The n-gram guard (§5; mode spec: on, else off).")
    ] = None,
    exclude_packed: Annotated[
        bool, typer.Option("--exclude-packed", help="Never pack a fact twice, as mode calibrated never does.")
    ] = False,
    where: WhereOption = None,
    backward_summary: Annotated[
        bool, typer.Option("--backward-summary", help="Give a command the text of the earlier windows as well (§4.3).")
    ] = False,
    writer_timeout: Annotated[
        float, typer.Option(min=0.001, max=MAX_TIMEOUT, callback=_no_nan, help="Seconds a command may take per window.")
    ] = 300.0,
    report: ReportOption = None,
    as_json: AsJson = False,
) -> None:
    """Run a task window by window: rank, pack, write, assess, until one of the exits of §6."""
    if backward_summary and writer == "extract":
        raise typer.BadParameter("--backward-summary is for a command, not for extract")
    calibrated = mode is Mode.calibrated
    foreign = {"--min-relevance": min_relevance is not None, "--exclude-packed": exclude_packed}
    if not calibrated:
        given = {"--gate": gate_at, "--gate-on": gate_on, "--source": source}
        foreign = {name: value is not None for name, value in given.items()} | {"--pack need": pack is Pack.need}
    for name, used in foreign.items():
        if used:
            raise typer.BadParameter(f"{name} is of mode {'spec' if calibrated else 'calibrated'}, not of {mode.value}")
    if output is not None:
        check_output(output, task, store, *([] if vectors is None else [vectors]))
    if report is not None:
        check_output(report, task, store, *(path for path in (vectors, output) if path is not None))
    opened = _opened(store)
    chosen = pick_task(read_tasks(task), task_id, task)
    if embed not in (None, opened.embedding_model):
        raise cdr_kernel.EmbeddingModelMismatch("--embed", opened.embedding_model, embed)
    # To copy facts needs no model: their vectors are in the store.
    encode = _embedder(embed) if embed is not None and (vectors is None or writer != "extract") else None
    query, subs = _task_vectors(vectors, chosen, opened, encode)
    guarded = not calibrated if guard is None else guard
    cosine = CDR_MIN_RELEVANCE if min_relevance is None else min_relevance
    parts = {"gate": gate_at, "gate_on": gate_on and gate_on.value, "source_weight": source}
    session = cdr_kernel.Session(
        chosen.sub_queries(subs),
        embedding_model=opened.embedding_model,
        mode=mode.value,
        max_windows=windows or chosen.windows,
        guard=cdr_kernel.NGramGuard() if guarded else False,
        **(parts if calibrated else {"min_relevance": cosine, "exclude_packed": exclude_packed}),
    )
    write = _writer(writer, opened, session, chosen, token_budget, writer_timeout, encode)
    retriever = cdr_kernel.Retriever(opened, kind.value)
    per_envelope = k or chosen.k
    packing = (pack or (Pack.need if calibrated else Pack.greedy)).value
    wanted = _where(where, opened.view())
    settings = {
        "mode": mode.value,
        "min_relevance": None if calibrated else cosine,
        "calibrated": None if session.calibrated is None else asdict(session.calibrated),
        "pack": packing,
        "windows": session.max_windows,
        "k": per_envelope,
        "token_budget": token_budget,
        "kind": kind.value,
        "guard": guarded,
        "exclude_packed": exclude_packed,
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
        if session.calibrated is None:
            _explain_gate(retriever, query, cosine)
        elif not last["envelope"]["new_share"]:
            _explain_deviations(retriever, np.vstack([query, *subs]), session.calibrated)
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
    show(f"{chosen.query}: {len(chosen.items)} sub-topics, {len(opened)} facts, {opened.embedding_model}")
    show(_window_table(record.windows))
    show(_ending(record.windows))


@_command
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
    found = named(runs, name)
    _report(output, found)
    if as_json:
        windows = {called: len(document["windows"]) for called, document in found.items()}
        print_json({"output": str(output), "windows": windows})
    elif not is_stdout(output):
        show(f"{output}: {', '.join(found)}")


@_command
def serve(
    store: Annotated[
        Path,
        typer.Argument(metavar="STORE", help="Folder of a store; with the keys of several tenants, STORE/TENANT each."),
    ],
    host: Annotated[str, typer.Option(help="Where to listen; other than loopback needs --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any; the log says which.")] = 8080,
    keys: Annotated[
        Path | None, typer.Option(metavar="KEYS.json", help="Bearer keys and their tenants, as SHA-256.")
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open-to-all", help="Listen beyond loopback without keys: anyone may change everything.")
    ] = False,
    embed: EmbedOption = None,
    redis: Annotated[
        str | None, typer.Option(metavar="URL", envvar="CDR_SERVE_REDIS", help="Redis for sessions of all replicas.")
    ] = None,
    token_key: Annotated[
        str | None,
        typer.Option(metavar="SECRET", envvar="CDR_SERVE_TOKEN_KEY", help="Signs session tokens, 32 bytes at least."),
    ] = None,
    metrics_key: Annotated[
        str | None,
        typer.Option(metavar="SECRET", envvar="CDR_SERVE_METRICS_KEY", help="Bearer key for /metrics, with --keys."),
    ] = None,
    hash_key: Annotated[
        str | None,
        typer.Option(metavar="SECRET", envvar="CDR_SERVE_HASH_KEY", help="The hash_key that the store was made with."),
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests of a tenant at once; more get 429.")] = 128,
    max_batch: Annotated[int, typer.Option(min=1, help="Ranks that are made together.")] = 8,
    rank_threads: Annotated[int, typer.Option(min=1, help="Batches that are made at a time.")] = 2,
    max_body_mb: Annotated[float, typer.Option(min=0.01, help="Largest request, MiB.")] = 16.0,
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 30.0,
    session_ttl: Annotated[float, typer.Option(min=1.0, help="Seconds that a session stays unused.")] = 3600.0,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions of a tenant in memory.")] = 10_000,
    session_mb: Annotated[int, typer.Option(min=1, help="Memory for a tenant's sessions, MiB.")] = 512,
    row_cache_mb: Annotated[int, typer.Option(min=0, help="Memory for what ranks keep, MiB a tenant.")] = 256,
    threads: Annotated[int, typer.Option(min=1, help="Threads that pack, encode and write facts.")] = 2,
    refresh: Annotated[float, typer.Option(min=0.01, help="Seconds between looks at a durable store.")] = 1.0,
    drain: Annotated[float, typer.Option(min=0.0, help="Seconds from SIGTERM to closing the port.")] = 1.0,
    stop: Annotated[float, typer.Option(min=0.0, help="Seconds that accepted requests then have.")] = 30.0,
    otel: Annotated[bool, typer.Option("--otel", help="Trace with OpenTelemetry (extra otel).")] = False,
    no_access_log: Annotated[bool, typer.Option("--no-access-log", help="Log no line per request.")] = False,
) -> None:
    """Serve a store over HTTP: facts, sessions, ranking, reranking. See docs/serving.md."""
    from cdr_kernel.serve import Settings
    from cdr_kernel.serve import serve as run_server

    settings = Settings(
        store=store,
        host=host,
        port=port,
        keys=keys,
        open_to_all=open_to_all,
        metrics_key=metrics_key,
        token_key=None if token_key is None else token_key.encode(),
        hash_key=None if hash_key is None else hash_key.encode(),
        embed=embed,
        redis=redis,
        max_body=round(max_body_mb * 2**20),
        max_queue=max_queue,
        max_batch=max_batch,
        rank_threads=rank_threads,
        deadline_s=deadline,
        session_ttl_s=session_ttl,
        max_sessions=max_sessions,
        session_bytes=session_mb << 20,
        row_cache_bytes=row_cache_mb << 20,
        threads=threads,
        refresh_s=refresh,
        drain_s=drain,
        stop_s=stop,
        otel=otel,
        access_log=not no_access_log,
    )
    warnings.simplefilter("ignore", UserWarning)  # of single sessions: their numbers are in every answer
    status = run_server(settings)
    if status:
        raise typer.Exit(status)


@_command
def gate(
    store: StoreArgument,
    queries: Annotated[str, typer.Option(metavar="Q.npy", help="Vectors [Q, D] of queries (or FILE.npz:KEY).")],
    k: Annotated[int, typer.Option("--k", min=1, help="Facts per envelope.")] = 10,
    windows: Annotated[int, typer.Option(min=1, max=MAX_WINDOWS_LIMIT, help="Windows per task.")] = MAX_WINDOWS,
    as_json: AsJson = False,
) -> None:
    """How many facts pass a relevance gate in this store, and a gate that fits its embedding model."""
    opened = _opened(store)
    report = cdr_kernel.gate_report(opened, read_vectors(queries, opened.dim), k=k, windows=windows)
    found = report.as_dict()
    if as_json:
        print_json({"store": str(store), **found})
        return
    show(f"{store}: {report.facts} facts, {report.queries} queries, {report.embedding_model}")
    table = new_table(
        [("gate", True), ("least", True), ("median", True), ("most", True), ("too few", True), ("deviations", True)]
    )
    for row in found["gates"]:
        counts = [f"{row['passing'][name]:.0f}" for name in ("min", "median", "max")]
        height = "-" if row["deviations"] is None else f"{row['deviations']:.1f}"
        table.add_row(f"{row['gate']:.2f}", *counts, str(row["queries_with_too_few"]), height)
    show(table)
    show(
        f"Facts that pass per query; queries with fewer than {report.wanted} ({k} in each of {windows} windows); how "
        "far the gate lies above the mean cosine, in standard deviations (median)."
    )
    table = new_table([("facts below", True), ("cosine", True)])
    for level, values in report.quantiles.items():
        table.add_row(f"{100 * level:g} %", f"{float(np.median(values)):.3f}")
    table.add_row("all", f"{float(np.median(report.largest)):.3f}")
    show(table)
    if report.suggested is None:
        show(f"The store has fewer than {report.wanted} facts.")
    else:
        show(f"--min-relevance {report.suggested:g} leaves {report.wanted} facts to nine queries in ten.")


@_command
def doctor(as_json: AsJson = False) -> None:
    """Versions, SIMD, threads, GPU and which implementation is chosen."""
    from cdr_kernel.doctor import diagnose, reason

    found = diagnose()
    if as_json:
        print_json(found)
        return
    table = new_table([("", False), ("", False)])
    for name, version in found["versions"].items():
        table.add_row(name, version or "missing")
    chosen = {
        name: f"{found[key]}: {reason(on_cpu)}" if found[key] else "none"
        for name, key, on_cpu in (
            ("facts on the CPU", "impl_for_cpu", True),
            ("facts on a GPU", "impl_for_cuda", False),
        )
    }
    rows = {
        "platform": found["platform"],
        "SIMD": f"{found['simd'] or 'unknown'} (of {', '.join(found['simd_levels'] or ['unknown'])})",
        "threads": str(found["threads"]),
        "GPU": ", ".join(found["gpus"] or ["none"]),
        "implementations": ", ".join(found["impls"]),
        **chosen,
        "environment": ", ".join(f"{name}={value}" for name, value in found["environment"].items()) or "nothing set",
    }
    for name, value in rows.items():
        table.add_row(name, cell(value, wrap=True))
    show(table)
    for problem in found["problems"]:
        say(f"warning: {problem}")


def check_source(embeddings: str | None, embed: str | None, model: str | None) -> None:
    """Raises BadParameter unless the options say where vectors come from, and of which model."""
    if (embeddings is None) == (embed is None):
        raise typer.BadParameter("expected either --embeddings E.npy with --model, or --embed MODEL")
    if model is not None and not model.strip():
        raise typer.BadParameter("expected a name, got a blank one", param_hint="--model")
    if embeddings is not None and model is None:
        raise typer.BadParameter("expected --model with --embeddings: the name of the model that made them")
    if embed is not None and model not in (None, embed):
        raise typer.BadParameter("--embed names the model: leave out --model")


def make_source(embeddings: str | None, embed: str | None, model: str | None) -> str | Callable[[list[str]], Any]:
    """Where the vectors of a file of facts come from: a file, or a model."""
    check_source(embeddings, embed, model)
    source = embeddings if embed is None else _embedder(embed)
    assert source is not None
    return source


def _make_durable(facts: cdr_kernel.FactStore, output: Path, codes: bool) -> None:
    from cdr_kernel.durable import DurableStore

    with Progress("record", len(facts)) as advance:
        made = DurableStore.from_facts(facts, output, advance=advance)
    with made:
        made.snapshot(codes=codes)


def _where(pairs: Sequence[str] | None, view: cdr_kernel.StoreView) -> dict[str, list[Any]] | None:
    """NAME=VALUE pairs as a filter, values as what the attribute holds."""
    if not pairs:
        return None
    types = {"source": str, **view.attribute_types}
    wanted: dict[str, list[Any]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in types:
            what = f"expected NAME=VALUE with NAME one of {', '.join(sorted(types))}, got {pair!r}"
            raise typer.BadParameter(what, param_hint="--where")
        kind = types[name]
        try:
            typed = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError):
            raise typer.BadParameter(f"expected {kind.__name__}, got {pair!r}", param_hint="--where") from None
        wanted.setdefault(name, []).append(typed)
    return wanted


def _opened(path: Path) -> cdr_kernel.FactStore:
    if (path / "facts.lance").is_dir():
        from cdr_kernel.durable import DurableStore

        return DurableStore.open(path).facts
    try:
        return cdr_kernel.FactStore.load(path)
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # a damaged store: the parsers of JSON and of NumPy's headers raise many more kinds
        what = f"{type(error).__name__}: {error}"
        raise FileError(f"{path}: expected a store, found one that cannot be read ({what})") from error


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Errors of writing name the folder that the user gave, not the files in it."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"the store could not be written ({reason})", str(path)) from error


def _row_range(rows: str | None) -> tuple[int, int | None]:
    """A:B as (A, B); either may be left out."""
    if rows is None:
        return 0, None
    start, colon, stop = rows.partition(":")
    if not colon or not all(part == "" or (part.isascii() and part.isdecimal()) for part in (start, stop)):
        raise typer.BadParameter(f"expected A:B, got {rows!r}", param_hint="--rows")
    first, end = int(start or 0), int(stop) if stop else None
    if end is not None and first >= end:
        raise typer.BadParameter(f"expected A:B with A below B, got {rows!r}", param_hint="--rows")
    return first, end


def _embedder(model: str, store: cdr_kernel.FactStore | None = None) -> Callable[[list[str]], Any]:
    from cdr_kernel.embedder import load_embedder

    if store is not None and model != store.embedding_model:
        raise cdr_kernel.EmbeddingModelMismatch("--embed", store.embedding_model, model)
    return load_embedder(model)


def _own_embedder(store: cdr_kernel.FactStore, otherwise: str) -> Callable[[list[str]], Any]:
    """The store's model, where it is one that can be had here."""
    from cdr_kernel.embedder import CARRIED

    if store.embedding_model not in CARRIED:
        raise typer.BadParameter(otherwise)
    return _embedder(store.embedding_model)


def _query_vector(query: str, store: cdr_kernel.FactStore, embed: str | None) -> Any:
    if names_array(query) or os.path.isfile(query):
        if embed is not None:
            raise typer.BadParameter(f"--embed is for a text, but --query {query!r} names an array")
        return read_vector(query, store.dim)
    if not query.strip():
        raise typer.BadParameter("expected Q.npy, FILE.npz:KEY or a text", param_hint="--query")
    if _MISTYPED.fullmatch(query):
        raise FileError(f"{query}: no such file, expected Q.npy, FILE.npz:KEY or a text")
    if embed is not None:
        return _embedder(embed, store)([query])[0]
    what = f"--query {query!r} is no file, so it is a text: expected --embed MODEL, Q.npy or FILE.npz:KEY"
    return _own_embedder(store, what)([query])[0]


def _task_vectors(
    path: Path | None, task: Task, store: cdr_kernel.FactStore, encode: Callable[[list[str]], Any] | None
) -> tuple[Any, Any]:
    """The query [D] and the sub-queries [S, D] of a task."""
    if path is not None:
        return read_task_vectors(path, task, store.dim)
    encode = encode or _own_embedder(store, "expected --vectors Q.npz, or --embed MODEL")
    query, *subs = encode([task.query, *(item.text for item in task.items)])
    return query, subs


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


def _depths(depths: str | None, entries: int) -> list[float]:
    if depths is None:
        return [DEFAULT_DEPTH] * entries
    try:
        values = [float(part) for part in depths.split(",")]
    except ValueError:
        values = []
    if not values or not all(0.0 <= value <= 1.0 for value in values) or len(values) not in (1, entries):
        raise typer.BadParameter(
            f"expected {entries} numbers in 0..1 with commas between (or one for all), got {depths!r}",
            param_hint="--depths",
        )
    return values * entries if len(values) == 1 else values


def _explain_gate(retriever: cdr_kernel.Retriever, query: Any, gate: float) -> None:
    best = retriever.search(query, min_relevance=-1.0, k=1)
    if len(best):
        say(
            f"warning: no fact reaches --min-relevance {gate:.12g}; the largest cosine to the query in this store is "
            f"{best.relevance[0]:.3f}"
        )


def _explain_deviations(retriever: cdr_kernel.Retriever, vectors: Any, parts: Calibrated) -> None:
    if not len(retriever.store):
        return
    asked = vectors if parts.gate_on == "best" else vectors[:1]
    scale, shift = retriever.moments.of(retriever.store.view()).scale_shift(asked)
    cosines = [retriever.search(vector, min_relevance=-1.0, k=1).relevance[0] for vector in asked]
    say(
        f"warning: no fact reaches --gate {parts.gate:.12g}; the largest in this store is "
        f"{(scale * np.array(cosines) + shift).max():.2f} deviations"
    )


def _report(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    from cdr_kernel.report import write_report

    write_report(path, runs)


def _few(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")


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


cli_store.register(app, _command, make_source)

if __name__ == "__main__":
    main()
