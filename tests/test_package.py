"""The public surface, the rooms and what an import costs."""

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
ROOMS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
IMPORT_TORCH = {f"score/{name}.py" for name in ("_bound_search", "_device_rows", "_triton", "torch_ops")}
OWN_VERSION = {"serve/_app.py"}
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
EAGER = [name for name in cdr_kernel.__all__ if name not in cdr_kernel._LAZY]
FRAMEWORKS = {"crp", "langchain_core", "llama_index", "haystack", "lancedb", "pydantic"}


def modules():
    """Every module of the package, by its path from there."""
    return {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def top_level(path):
    """The imports of a module that run when it is imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


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


def test_only_rooms_lie_in_the_package():
    names = {path.name for path in PACKAGE.iterdir() if path.is_file() and not path.name.startswith("_C.")}
    assert names == {"__init__.py", "__main__.py", "exceptions.py", "py.typed"}


def test_rooms_import_only_the_extension_from_the_top():
    """`lint-imports` does not see the extension: it takes its import for one of the package, and leaves that out."""
    for name, path in modules().items():
        room = name.split("/")[0]
        if room.endswith(".py") or room == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "cdr_kernel":
                assert {alias.name for alias in node.names} <= {"_C"} | ROOMS, f"{name}:{node.lineno}"
            if isinstance(node, ast.Import):
                assert "cdr_kernel" not in {alias.name for alias in node.names} or name in OWN_VERSION, name


def test_heavy_packages_are_imported_where_they_are_used():
    for name, path in modules().items():
        allowed = {"typer"} if name.startswith("cli/") else {"torch"} if name in IMPORT_TORCH else set()
        allowed |= {"triton"} if name == "score/_triton.py" else set()
        assert not {module.split(".")[0] for module, _ in top_level(path)} & HEAVY - allowed, name


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
    public = {n for n in vars(cdr_kernel) if not n.startswith("_")} - ROOMS - {"annotations", "exceptions"}
    assert public - {"Any", "PackageNotFoundError", "TYPE_CHECKING", "version"} <= set(names)
    for name in names:
        try:
            value = getattr(cdr_kernel, name)
        except ImportError:
            assert name in cdr_kernel._LAZY  # and its extra is not installed
            continue
        if callable(value):
            assert value.__doc__, name
            assert not value.__doc__.startswith(f"{name}("), f"{name} has only a generated docstring"


def test_heavy_names_load_when_they_are_used():
    assert set(cdr_kernel._LAZY) <= set(cdr_kernel.__all__) & set(dir(cdr_kernel))
    assert cdr_kernel.ShardedStore is cdr_kernel.shard.ShardedStore
    with pytest.raises(AttributeError, match="module 'cdr_kernel' has no attribute 'DurableStores'"):
        cdr_kernel.DurableStores  # noqa: B018


@pytest.mark.parametrize("name", [n for n in EAGER if isinstance(getattr(cdr_kernel, n), type)])
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
