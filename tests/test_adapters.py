"""docs/adapters.md runs as it stands: every Python block in a scope of its own, where what it imports is installed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs" / "adapters.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.M | re.S)
NEEDS = ("crp",)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_python_blocks_run(block, tmp_path, monkeypatch):
    for name in NEEDS:
        if re.search(rf"\b(?:import|from) {name}\b", block) and find_spec(name) is None:
            pytest.skip(f"needs {name}")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(DOCS), "exec"), {"__name__": "docs"})
