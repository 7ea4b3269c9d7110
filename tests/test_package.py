"""The public surface, the ladder of imports and what an import costs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import cdr_kernel
from cdr_kernel import _C

PACKAGE = Path(cdr_kernel.__file__).parent
EDGES = {
    "adapters",
    "files",
    "lance_record",
    "lance_sums",
    "snapshot",
    "exchange",
    "durable",
    "durable_folder",
    "record_rows",
    "replica",
    "commits",
    "copies",
    "index",
    "terminal",
    "embedder",
    "record",
    "report",
    "report.charts",
    "report.figures",
    "report.page",
    "report.runs",
    "report.sections",
    "writer",
    "demo",
    "doctor",
    "quality",
    "quality_data",
    "quality_methods",
    "quality_run",
    "ingest",
    "sharded",
    "sharded_store",
    "ray_shards",
    "lance_shards",
    "ray_serve",
    "serve",
    "cli",
    "cli_command",
    "cli_index",
    "cli_inputs",
    "cli_options",
    "cli_rank",
    "cli_run",
    "cli_serve",
    "cli_store",
    "__main__",
}
LADDER = [
    {"_C", "constants", "damage", "forks", "steps", "warn"},
    {"reference", "arrays", "checks", "mapped"},
    {"bit_codes", "checksums", "numbering", "tokens"},
    {"token_hashes", "folder"},
    {"attributes"},
    {"ngram"},
    {"store_columns"},
    {"store_view"},
    {"store_folder"},
    {"columns", "store", "tokenizers", "frame"},
    {"storemap", "stored", "moments"},
    {"bounds", "score_torch"},
    {"score", "score_triton", "scan", "kept"},
    {"device", "device_index", "torch_ops"},
    {"lexical", "calibrate", "gate"},
    {"task"},
    {"session_json", "packed"},
    {"session_token", "pack"},
    {"retrieve", "session", "assess"},
    {"evidence", "partition"},
    {"rank"},
    {"shard"},
    {"whatif", "calls"},
    {"explain"},
    {"headers"},
    {"window"},
    EDGES,
]
HEAVY = {
    "torch",
    "lance",
    "safetensors",
    "faiss",
    "pyarrow",
    "typer",
    "rich",
    "sentence_transformers",
    "transformers",
    "pandas",
    "triton",
    "matplotlib",
    "ray",
}
FRAMEWORKS = {"crp", "langchain_core", "llama_index", "haystack", "lancedb", "pydantic"}


def imported(path):
    """(modules of the package imported at the top level or under TYPE_CHECKING, others at the top level)."""
    own, other = set(), set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cdr_kernel":
            parts = node.module.split(".")
            own |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            other.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            other |= {alias.name.split(".")[0] for alias in node.names}
    return own, other


def modules():
    found = {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    found |= {f"adapters.{path.stem}": path for path in (PACKAGE / "adapters").glob("*.py")}
    found |= {f"report.{path.stem}": path for path in (PACKAGE / "report").glob("*.py") if path.stem != "__init__"}
    return {**found, **{name: PACKAGE / name / "__init__.py" for name in ("demo", "report", "serve")}}


def test_a_checkout_without_its_extension_says_what_to_do(tmp_path):
    (tmp_path / "cdr_kernel").mkdir()
    shutil.copy(PACKAGE / "__init__.py", tmp_path / "cdr_kernel")
    # Without the finder of an editable install, which would find the rest elsewhere.
    others = "[finder for finder in sys.meta_path if 'editable' not in finder.__module__]"
    script = f"import sys; sys.meta_path = {others}; import cdr_kernel"
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    last = run.stderr.splitlines()[-1]
    assert f"ImportError: {tmp_path / 'cdr_kernel'}: the extension is not built here" in last
    assert "pip install -c constraints.txt -e . in this checkout, or run from another folder" in last


def test_imports_go_down_only():
    level = {name: i for i, names in enumerate(LADDER) for name in names}
    assert {name.split(".")[0] for name in modules()} <= set(level), "a new module needs its rung"
    for module, path in modules().items():
        name = module.split(".")[0]
        own, _ = imported(path)
        for target in own & set(level):
            same_rung = {name, target} <= EDGES
            assert level[target] < level[name] or same_rung, f"{name} imports {target}"
        if name == "reference":
            assert own == {"constants"}


def test_heavy_packages_are_imported_where_they_are_used():
    for name, path in modules().items():
        allowed = {"score_triton": {"torch", "triton"}}.get(name, {"typer"} if name.split("_")[0] == "cli" else set())
        if name in ("score_torch", "bounds", "device", "torch_ops"):
            allowed = {"torch"}
        assert not (imported(path)[1] & HEAVY) - allowed, name


def test_an_import_is_quick_and_loads_nothing_heavy():
    script = "import sys, cdr_kernel; print(*sorted(sys.modules))"
    fastest = 9.0
    for _ in range(3):
        start = time.perf_counter()
        out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        fastest = min(fastest, time.perf_counter() - start)
        assert not (HEAVY | FRAMEWORKS) & set(out.stdout.split())
    assert fastest < 3.0  # 0.2 s here; a loose bound that only torch or faiss would break


def test_the_public_surface_is_sorted_complete_and_documented():
    names = cdr_kernel.__all__
    assert names == sorted(names)
    public = (
        {n for n in vars(cdr_kernel) if not n.startswith("_")} - {n.split(".")[0] for n in modules()} - {"annotations"}
    )
    assert public - {"PackageNotFoundError", "version"} <= set(names)
    for name in names:
        value = getattr(cdr_kernel, name)
        if callable(value):
            assert value.__doc__, name
            assert not value.__doc__.startswith(f"{name}("), f"{name} has only a generated docstring"


@pytest.mark.parametrize("name", [n for n in cdr_kernel.__all__ if isinstance(getattr(cdr_kernel, n), type)])
def test_public_methods_are_documented(name):
    for method, value in vars(getattr(cdr_kernel, name)).items():
        if not method.startswith("_") and callable(getattr(value, "fget", value)):
            assert value.__doc__, f"{name}.{method}"


def test_the_stub_names_what_the_module_has():
    stub = (PACKAGE / "_C.pyi").read_text()
    named = set(re.findall(r"^(?:def|class) (\w+)", stub, re.M))
    assert named == {n for n in vars(_C) if not n.startswith("_")}


def test_wheels_are_built_for_every_python_that_is_named():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    named = [line.split()[-1] for line in project["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert project["tool"]["cibuildwheel"]["build"] == [f"cp{version.replace('.', '')}-*" for version in named]
