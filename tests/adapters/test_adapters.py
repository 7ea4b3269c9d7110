"""docs/adapters.md runs as it stands; an adapter without its framework names the extra; the versions are those tested.

Every Python block has a scope of its own, and is skipped where what it imports is not installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from cdr_kernel import Session, WindowReport

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "adapters.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.M | re.S)
NEEDS = ("crp", "langchain_core", "llama_index", "haystack", "lancedb")
EXTRAS = {
    "langchain": ("langchain_core", "langchain", "langchain-core"),
    "llamaindex": ("llama_index", "llama-index", "llama-index-core"),
    "haystack": ("haystack", "haystack", "haystack-ai"),
    "lancedb": ("lancedb", "lancedb", "lancedb"),
}
"""By module: the package it imports, its extra, its distribution."""
ADAPTER = {package: module for module, (package, _, _) in EXTRAS.items()}


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_python_blocks_run(block, tmp_path, monkeypatch):
    for name in NEEDS:
        if (
            re.search(rf"^ *(?:import|from) (?:{name}|cdr_kernel\.adapters\.{ADAPTER.get(name, name)})\b", block, re.M)
            and find_spec(name) is None
        ):
            pytest.skip(f"needs {name}")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(DOCS), "exec"), {"__name__": "docs"})


LOOPS = [*(i for i, block in enumerate(BLOCKS) if "cdr.exit().stop" in block), *(f"{m}_windows" for m in EXTRAS)]
"""Blocks of the page and examples that go from window to window."""


@pytest.mark.parametrize("ending", ["task-complete", "ckf-exhausted"])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_loops_end_where_an_exit_is_true(loop, ending, tmp_path, monkeypatch, capsys):
    import demo_data

    needs = next(name for name in NEEDS[1:] if ADAPTER[name] in (loop if isinstance(loop, str) else BLOCKS[loop]))
    pytest.importorskip(needs)
    sessions, written = [], []

    def new_session():
        strict = {"min_relevance": 0.99} if ending == "ckf-exhausted" else {}
        sessions.append(Session(demo_data.demo.sub_queries, embedding_model=demo_data.EMBEDDING_MODEL, **strict))
        return sessions[-1]

    def complete(output, sub_queries, **options):
        written.append(output)
        return WindowReport(1.0, tuple(item.id for item in sub_queries))

    monkeypatch.setattr("cdr_kernel.adapters._session_book.count_words", complete)
    monkeypatch.chdir(tmp_path)
    if isinstance(loop, str):
        module = import_module(loop)
        monkeypatch.setattr(module, "new_session", new_session)
        module.main()
    else:
        monkeypatch.setattr(demo_data, "new_session", new_session)
        exec(compile(BLOCKS[loop], str(DOCS), "exec"), {"__name__": "docs"})
    shown = capsys.readouterr().out.count("task-complete")
    assert shown == len(written) == (len(sessions) if ending == "task-complete" else 0)
    for session in sessions:
        assert session.exit().reason == ending
        assert Session.from_json(session.to_json()).exit().reason == ending


@pytest.mark.parametrize("module", EXTRAS)
def test_without_its_framework_an_adapter_names_the_extra(module):
    package, extra, _ = EXTRAS[module]
    script = f"import sys; sys.modules[{package!r}] = None; import cdr_kernel.adapters.{module}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f'pip install ".[{extra}]" in a checkout' in run.stderr.splitlines()[-1]


def test_the_page_and_the_pins_name_the_same_versions():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    table = dict(re.findall(r"^\| .* \| `([a-z-]+)` ([0-9.]+) \|", (ROOT / "docs" / "adapters.md").read_text(), re.M))
    distributions = {"crprotocol", *(name for _, _, name in EXTRAS.values())}
    assert table.keys() == distributions
    assert table == {name: pins[name] for name in distributions}
    for name in distributions:
        try:
            assert version(name) == table[name]
        except PackageNotFoundError:
            continue
