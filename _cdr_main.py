"""Where the command `cdr` starts: outside the package, whose import already takes its time, so that Ctrl-C is quiet."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Import the command and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # No exception, which an import might swallow or dress up; there is nothing yet to put in order.
        signal.signal(signal.SIGINT, _leave)
    from cdr_kernel.cli._app import main as run

    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(number: int, frame: object) -> None:
    if sys.stderr is not None:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(128 + number)
