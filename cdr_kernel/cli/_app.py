"""The command `cdr`: demo, index, ingest, rank, run, report, serve, gate, store, doctor.

Exit status: 0 fine, 1 an error, 2 wrong usage, 130 interrupted, 143 terminated. With --json standard output gets one
line, last. CDR_KERNEL_DEBUG=1 shows where an error comes from.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import cdr_kernel
from cdr_kernel.cli import _store
from cdr_kernel.cli._command import command, end_in_order, interrupted
from cdr_kernel.cli._index import index, ingest
from cdr_kernel.cli._options import AsJson
from cdr_kernel.cli._rank import gate, rank
from cdr_kernel.cli._run import demo, report, run
from cdr_kernel.cli._serve import serve
from cdr_kernel.cli._terminal import cell, drop_output, new_table, prepare_streams, print_json, say, show

app = typer.Typer(
    name="cdr",
    help="Coverage-Differential Retrieval: fresh, relevant facts for every window of a long generation.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the command `cdr`."""
    prepare_streams()
    end_in_order()
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
        sys.exit(interrupted(error))


def _tell_usage(ended: SystemExit) -> None:
    """With --json, say in JSON too what is wrong with the command line; typer has said it in words."""
    message = getattr(ended.__context__, "format_message", None)
    if message is not None and "--json" in sys.argv:
        print_json({"error": " ".join(message().split())})


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


def doctor(as_json: AsJson = False) -> None:
    """Versions, SIMD, threads, GPU and which implementation is chosen."""
    from cdr_kernel.cli._doctor import diagnose, reason

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


for body in (demo, index, ingest, rank, run, report, serve, gate, doctor):
    command(app, body)
app.add_typer(_store.group, name="store")

if __name__ == "__main__":
    main()
