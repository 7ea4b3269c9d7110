"""The README's Python blocks run as they stand, one after the other, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_python_blocks_run(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)


def test_the_quickstart_has_at_most_fifteen_lines():
    first = re.search(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    assert first
    assert len(first[1].strip().splitlines()) <= 15


@pytest.mark.parametrize("command", ["pytest", "cdr demo"])
def test_the_two_commands_stand_once_each(command):
    assert len(re.findall(rf"^pip install .*&& {command}$", README.read_text(), re.M)) == 1


def test_the_file_map_names_every_module():
    text = README.read_text()
    package = README.parent / "cdr_kernel"
    for path in package.glob("*.py"):
        if path.stem != "__init__":
            assert f"`{path.name}`" in text, path.name
