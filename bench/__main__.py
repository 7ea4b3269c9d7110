"""``python -m bench NAME [options]`` runs the benchmark bench/NAME.py; ``python -m bench`` lists them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

names = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith(("_", "test_", "conftest")))
if len(sys.argv) < 2 or sys.argv[1] not in names:
    print(f"usage: python -m bench {{{','.join(names)}}} [options]", file=sys.stderr)
    sys.exit(2)
sys.exit(import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:]))
