"""How every command ends: an error is one line, in JSON too, and an exit status; a signal is an orderly end."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from cdr_kernel.cli._terminal import drop_output, flush, log_on_stderr, print_json, say
from cdr_kernel.exceptions import WriterError


class Terminated(KeyboardInterrupt):
    """Told to end by a signal other than Ctrl-C's, and just as orderly."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def end_in_order() -> None:
    """Have the signals that end a process raise `Terminated`, so that writers end and a RUN.json is written."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough
        raise Terminated(number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, end)


def interrupted(error: KeyboardInterrupt) -> int:
    """The exit status after a signal."""
    return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)


def fail(message: str, as_json: bool) -> NoReturn:
    """Say what went wrong, in JSON too where that was asked for, and end with status 1."""
    if os.environ.get("CDR_KERNEL_DEBUG") == "1":
        traceback.print_exc()
    line = " ".join(message.split())
    say(f"error: {line}")
    if as_json:
        with contextlib.suppress(OSError):
            print_json({"error": line})
    raise typer.Exit(1)


def command(group: typer.Typer, body: Callable[..., None], name: str | None = None) -> None:
    """Add a command to a group, by its own name for None; its errors end in one line and an exit status."""

    @functools.wraps(body)
    def guarded(*args: Any, **kwargs: Any) -> None:
        as_json = bool(kwargs.get("as_json"))
        with warnings.catch_warnings(), log_on_stderr():
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
                raise typer.Exit(interrupted(error)) from None
            except BrokenPipeError:
                drop_output()
                raise typer.Exit(0) from None
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                fail(f"{where}{error.strerror}" if error.strerror else str(error), as_json)
            except KeyError as error:
                fail(str(error.args[0]) if error.args else str(error), as_json)
            except MemoryError as error:
                fail(f"not enough memory ({error})", as_json)
            except (ValueError, ImportError, WriterError) as error:
                fail(str(error), as_json)
            except Exception as error:  # a fault of this program, or a library's over a file that nobody foresaw
                fail(f"{type(error).__name__}: {error} (CDR_KERNEL_DEBUG=1 shows where)", as_json)

    group.command(name)(guarded)
