"""The commands `cdr store ...`: what can be done with a durable store from the command line."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdr_kernel.cli._command import command
from cdr_kernel.cli._inputs import make_source
from cdr_kernel.cli._options import AsJson
from cdr_kernel.cli._terminal import Progress, cell, new_table, print_json, show
from cdr_kernel.files._build_store import FactFile
from cdr_kernel.files._files import check_output, facts_on_disk
from cdr_kernel.store._expiry import GRACE
from cdr_kernel.validation._scalars import counted

if TYPE_CHECKING:
    from cdr_kernel.durable import DurableStore

Durable = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a durable store.")]
New = Annotated[Path, typer.Option("--output", "-o", metavar="STORE", help="Folder of the durable store to make.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of facts.")]

group = typer.Typer(
    no_args_is_help=True, help="Durable stores (extra `store`): facts in, out, quarantined, compacted, exchanged."
)


def add(
    store: Durable,
    facts: Annotated[Path, typer.Argument(metavar="FACTS", help="JSONL or Parquet, as for `cdr index`.")],
    embeddings: Annotated[
        str | None, typer.Option(metavar="E.npy", help="Vectors [N, D], one per fact (or FILE.npz:KEY).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model that made --embeddings.")] = None,
    embed: Annotated[str | None, typer.Option(metavar="MODEL", help="Embed texts with this model.")] = None,
    upsert: Annotated[bool, typer.Option("--upsert", help="Replace facts that are there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Add the facts of a file, all in one commit."""
    source = make_source(embeddings, embed, model)
    with _opened(store, embedding_model=embed or model) as opened:
        with facts_on_disk(facts) as (path, called):
            file = FactFile(path, source, name=embed or "", called=called)
            with Progress("facts", len(file)) as advance:
                read, _ = file.build(
                    embedding_model=opened.embedding_model, dtype=opened.facts.dtype.name, advance=advance
                )
        view = read.view()
        found = view.facts(range(view.rows))
        put = opened.upsert if upsert else opened.add
        count = put(
            [fact.id for fact in found],
            [fact.text for fact in found],
            view.embeddings,
            importance=view.importance,
            source=[fact.source for fact in found],
            position=[fact.position for fact in found],
            attributes={name: view.attribute(name) for name in view.attribute_names},
        ).added
        _told(opened, as_json, f"{counted(count, 'fact')} {'put' if upsert else 'added'}", added=count)


def create(
    facts: Annotated[Path, typer.Argument(metavar="FACTSTORE", help="Folder that `cdr index` wrote.")],
    output: New,
    as_json: AsJson = False,
) -> None:
    """Make a durable store of one that `cdr index` wrote."""
    from cdr_kernel.durable import DurableStore
    from cdr_kernel.store import FactStore

    read = FactStore.load(facts)
    with Progress("record", len(read)) as advance:
        made = DurableStore.from_facts(read, output, advance=advance)
    with made:
        made.snapshot()
        _told(made, as_json, counted(len(made), "fact"), facts=len(made))


def export(
    store: Durable,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="safetensors file to write.")],
    as_json: AsJson = False,
) -> None:
    """Write all facts, quarantined ones included, to one safetensors file."""
    check_output(output, store)
    with _opened(store) as opened:
        count = opened.export(output)
        _told(opened, as_json, f"{counted(count, 'fact')} written to {output}", facts=count, output=str(output))


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `cdr store export` wrote.")],
    output: New,
    as_json: AsJson = False,
) -> None:
    """Make a durable store of an exported file."""
    from cdr_kernel.durable import DurableStore

    with DurableStore.from_export(file, output) as made:
        made.snapshot()
        _told(made, as_json, counted(len(made), "fact"), facts=len(made))


def stats(store: Durable, as_json: AsJson = False) -> None:
    """Counts, versions and sizes; checks every block of the snapshot."""
    with _opened(store) as opened:
        opened.verify()
        found = {**opened.stats(), "quarantined_ids": opened.quarantined()}
    if as_json:
        print_json(found)
        return
    held = found.pop("quarantined_ids")
    table = new_table([("", False), ("", False)])
    for name, value in found.items():
        said = ", ".join(f"{k}: {v}" for k, v in value.items()) or "none" if isinstance(value, dict) else str(value)
        table.add_row(name.replace("_", " "), cell(said, wrap=True))
    show(table)
    for fact_id, reason in held.items():
        show(f"quarantined: {fact_id}{f' ({reason})' if reason else ''}")


def snapshot(store: Durable, as_json: AsJson = False) -> None:
    """Write the snapshot that the next open maps."""
    with _opened(store) as opened:
        opened.snapshot()
        _told(opened, as_json, "snapshot written")


def compact(
    store: Durable,
    keep: Annotated[float, typer.Option(min=0.0, help="Seconds for which old versions stay.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Take what was deleted off the disk, and old versions; writers wait meanwhile."""
    with _opened(store) as opened:
        opened.compact(keep=keep)
        _told(opened, as_json, "compacted", **opened.stats())


def remove(store: Durable, ids: Ids, as_json: AsJson = False) -> None:
    """Delete facts."""
    with _opened(store) as opened:
        count = opened.remove(ids)
        _told(opened, as_json, f"{counted(count, 'fact')} removed", removed=count)


def quarantine(
    store: Durable,
    ids: Ids,
    reason: Annotated[str | None, typer.Option(help="Kept beside the facts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Take facts out of every ranking until they are released."""
    with _opened(store) as opened:
        count = opened.quarantine(ids, reason)
        _told(opened, as_json, f"{counted(count, 'fact')} quarantined", quarantined=count)


def release(store: Durable, ids: Ids, as_json: AsJson = False) -> None:
    """Let quarantined facts into rankings again, as the newest ones."""
    with _opened(store) as opened:
        count = opened.release(ids)
        _told(opened, as_json, f"{counted(count, 'fact')} released", released=count)


def expire(
    store: Durable,
    at: Annotated[
        datetime | None, typer.Option("--at", help="Local time to take for the present (the present).")
    ] = None,
    grace: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds between two calls that both must find a fact past its time; 0: this one."),
    ] = GRACE,
    as_json: AsJson = False,
) -> None:
    """Withhold the facts whose time is past, and delete those of which an earlier call found that too."""
    with _opened(store) as opened:
        deleted = opened.expire(None if at is None else at.astimezone(), grace=grace)
        withheld = len(opened.facts.withheld)
        what = f"{counted(deleted, 'fact')} deleted, {counted(withheld, 'fact')} withheld"
        _told(opened, as_json, what, deleted=deleted, withheld=withheld)


def _opened(path: Path, embedding_model: str | None = None) -> DurableStore:
    from cdr_kernel.durable import DurableStore

    return DurableStore.open(path, embedding_model=embedding_model, progress=Progress)


def _told(store: DurableStore, as_json: bool, what: str, **numbers: Any) -> None:
    if as_json:
        print_json({"store": str(store.path), "version": store.version, **numbers})
    else:
        show(f"{store.path}: {what}, version {store.version}")


COMMANDS: dict[str, Callable[..., None]] = {
    "add": add,
    "create": create,
    "export": export,
    "import": import_,
    "stats": stats,
    "snapshot": snapshot,
    "compact": compact,
    "remove": remove,
    "quarantine": quarantine,
    "release": release,
    "expire": expire,
}
for name, body in COMMANDS.items():
    command(group, body, name)
