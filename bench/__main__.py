"""python -m bench NAME [options]: the large cases. The small ones: pytest bench --benchmark-only."""

from __future__ import annotations

import sys
from importlib import import_module

BENCHES = {
    "crprotocol": "the drop-in for crprotocol against the package itself",
    "ngram": "the n-gram guard at corpus scale",
    "quality": "does retrieval hold quality over windows, on labelled tasks",
    "roofline": "what a GPU can do at best with the scores, by its data sheet",
    "scan": "one window over many facts",
    "sharded": "what shards cost, constants for sizing, and a simulation of a billion facts",
    "score": "one pass of scores, on the CPU or a GPU",
}


def main() -> None:
    """Run the bench that is named."""
    names = "\n".join(f"  {name:10} {what}" for name, what in BENCHES.items())
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print(f"usage: python -m bench NAME [options]\n{names}", file=sys.stderr)
        raise SystemExit(2)
    sys.exit(import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:]))


if __name__ == "__main__":
    main()
