"""The commands that make a store: `cdr index` and `cdr ingest`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import cdr_kernel
from cdr_kernel.cli._command import fail
from cdr_kernel.cli._inputs import check_source, embedder, make_source
from cdr_kernel.cli._options import AsJson, EmbedOption
from cdr_kernel.cli._terminal import Progress, print_json, say, show
from cdr_kernel.files._build_store import FactFile
from cdr_kernel.files._files import facts_on_disk, json_lines, json_text
from cdr_kernel.retrieve._retriever import WORTH_CODES
from cdr_kernel.store._format import check_store_folder
from cdr_kernel.validation._scalars import counted


class Dtype(StrEnum):
    """What a store keeps its vectors as."""

    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


class OnInvalid(StrEnum):
    """What to do with a fact whose vector is not finite or all zeros."""

    refuse = "raise"
    skip = "skip"


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
        from cdr_kernel.durable._durable_store import check_new_folder

        check_new_folder(output)
    else:
        check_store_folder(output)
    source = make_source(embeddings, embed, model)
    with facts_on_disk(facts) as (path, called):
        file = FactFile(path, source, start=start, stop=stop, name=embed or "", called=called)
        with Progress("facts", len(file)) as advance:
            store, skipped = file.build(
                embedding_model=embed or model or "", dtype=dtype.value, on_invalid=on_invalid.value, advance=advance
            )
    codes = not no_codes and len(store) >= WORTH_CODES
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
        say(
            f"warning: {counted(len(skipped), 'fact')} left out, their vectors are not finite or all zeros: "
            f"{_few(skipped)}"
        )
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
        show(f"{output}: {counted(len(store), 'fact')}, {store.dim} x {store.dtype.name}, {store.embedding_model}")


def ingest(
    documents: Annotated[Path, typer.Argument(metavar="DOCS_DIR", help="Folder of Markdown and plain text.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="STORE", help="Folder of the store to write.")],
    embed: Annotated[
        str, typer.Option(metavar="MODEL", help="Embed with this model: all-MiniLM-L6-v2, or a folder.")
    ] = "all-MiniLM-L6-v2",
    as_json: AsJson = False,
) -> None:
    """Cut documents into facts, embed them, propose tasks: what `python -m bench quality --data STORE` needs."""
    from cdr_kernel.files._documents import propose_tasks, read_documents

    check_store_folder(output)
    found = read_documents(documents)
    facts = [fact for document in found for fact in document.facts]
    if not facts:
        fail(f"{documents}: expected documents with words, found none", as_json)
    empty = [document.path for document in found if not document.facts]
    if empty:
        what = f"{len(empty)} of the documents gave no facts, nothing in them is outside of code and markup"
        say(f"warning: {what}: {_few(empty)}")
    tasks = propose_tasks(found)
    encode = embedder(embed)

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
    archive = io.BytesIO()
    np.savez(archive, **asked)
    beside = {
        "facts.jsonl": json_lines(fact.as_dict() for fact in facts).encode("ascii"),
        "tasks.json": json_text(tasks).encode("ascii"),
        "queries.npz": archive.getvalue(),
    }
    with _writing(output, *beside):
        store.save(output, beside=beside)
    numbers = {"documents": len(found), "facts": len(facts), "tasks": len(tasks["tasks"])}
    if as_json:
        print_json({"store": str(output), **numbers, "dim": store.dim, "model": embed})
        return
    show(f"{output}: {', '.join(counted(count, name[:-1]) for name, count in numbers.items())}, {store.dim} x {embed}")
    if not tasks["tasks"]:
        show("No page or section has 4 to 13 headings with enough under them to make a task of.")


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


def _make_durable(facts: cdr_kernel.FactStore, output: Path, codes: bool) -> None:
    from cdr_kernel.durable import DurableStore

    with Progress("record", len(facts)) as advance:
        made = DurableStore.from_facts(facts, output, advance=advance)
    with made:
        made.snapshot(codes=codes)


@contextlib.contextmanager
def _writing(path: Path, *beside: str) -> Iterator[None]:
    """Errors of writing name the folder that the user gave, not the files in it but those that are named here."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if error.filename in [str(path / name) for name in beside]:
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"the store could not be written ({reason})", str(path)) from error


def _few(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
