"""python -m bench NAME [options] [--report FILE]: the large cases. The small ones: pytest bench --benchmark-only."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib import import_module
from pathlib import Path

from bench.report import write
from cdr_kernel.files._files import check_output

BENCHES = {
    "calibrated": "the calibrated mode at scale: first and later windows",
    "crprotocol": "the drop-in for crprotocol against the package itself",
    "ngram": "the n-gram guard at corpus scale",
    "quality": "does retrieval hold quality over windows, on labelled tasks",
    "roofline": "what a GPU can do at best with the scores, by its data sheet",
    "scan": "one window over many facts",
    "serve": "the server under load, at capacity and beyond",
    "sharded": "what shards cost, constants for sizing, and a simulation of a billion facts",
    "score": "one pass of scores, on the CPU or a GPU",
    "store": "the durable store: in, open, catch up, read again",
}


def main() -> None:
    """Run the bench that is named."""
    names = "\n".join(f"  {name:10} {what}" for name, what in BENCHES.items())
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print(f"usage: python -m bench NAME [options] [--report FILE]\n{names}", file=sys.stderr)
        raise SystemExit(2)
    name, arguments = sys.argv[1], sys.argv[2:]
    if "--report" not in arguments:
        sys.exit(import_module(f"bench.{name}").main(arguments))
    at = arguments.index("--report")
    if at + 1 == len(arguments):
        print("--report: expected a file", file=sys.stderr)
        raise SystemExit(2)
    report, arguments = Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]
    sys.exit(_reported(name, arguments, report))


def _reported(name: str, arguments: list[str], path: Path) -> int:
    """Run the bench with --json, keep what it prints, and write the report of its line."""
    check_output(path)
    wanted = [argument for argument in arguments if argument != "--json"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = import_module(f"bench.{name}").main([*wanted, "--json"])
    sys.stdout.write(printed.getvalue())
    lines = printed.getvalue().splitlines()
    if status or not lines:
        return int(status or 1)
    write(path, name, wanted, json.loads(lines[-1]))
    print(f"report: {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    main()
