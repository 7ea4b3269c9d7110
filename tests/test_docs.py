"""Every block of docs/*.md runs, page by page, in an empty folder; the pages know each other; the examples run."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cdr_kernel

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ELSEWHERE = {
    "cli.md": "its samples are part of tests/test_readme.py",
    "serving.md": "its commands start a server that stays; tests/serve/test_process.py runs one",
    "quality.md": "its commands take minutes and data; tests/test_quality.py runs the experiment",
}
BLOCK = re.compile(r"^(?:<!-- needs: ([\w.]+) -->\n)?```(python|bash|sh)\n(.*?)^```", re.M | re.S)
NAV = re.compile(r"^\s+- (?:.*: )?([\w/-]+\.md)$", re.M)


def shell(folder, script):
    """Run a bash block with `cdr` and `python` of this environment."""
    names = f'cdr() {{ "{sys.executable}" -m cdr_kernel "$@"; }}; python() {{ "{sys.executable}" "$@"; }}; '
    binaries = folder / ".bin"  # for what is not called by the shell itself, such as a writer
    binaries.mkdir(exist_ok=True)
    if not (binaries / "python").exists():
        (binaries / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (binaries / "python").chmod(0o755)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", names + script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ELSEWHERE], ids=lambda p: p.name)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "docs"}
    missing = []
    for needs, language, text in BLOCK.findall(page.read_text()):
        if needs and importlib.util.find_spec(needs) is None:
            missing.append(needs)
            continue
        if language == "python":
            try:
                exec(compile(text, str(page), "exec"), scope)
            except ImportError as error:
                package = (error.name or "").split(".")[0]
                if package in ("cdr_kernel", "numpy") or not (package or "pip install" in str(error)):
                    raise
                missing.append(package or str(error))
        else:
            assert shutil.which("bash"), "the blocks need bash"
            shell(tmp_path, text)
    if missing:
        pytest.skip(f"some blocks need {', '.join(sorted(set(missing)))}; the others ran")


def test_every_page_is_in_the_navigation():
    named = NAV.findall((ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == [page.name for page in PAGES]


def test_links_between_pages_lead_somewhere():
    """Anchors of the API's page are made by mkdocstrings: one for every name there."""

    def anchors(page):
        text = page.read_text()
        headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
        slugs = {re.sub(r"[^\w\- ]", "", h.lower().replace("`", "")).strip().replace(" ", "-") for h in headings}
        return slugs | set(re.findall(r"^::: ([\w.]+)$", text, re.M))

    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            to = (page.parent / name).resolve() if name else page
            assert to.exists(), f"{page.name}: {target}"
            if anchor and to.suffix == ".md" and to.parent == DOCS:
                assert anchor in anchors(to), f"{page.name}: {target}"


def test_the_api_names_everything_public():
    named = {name.rsplit(".", 1)[-1] for name in re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), re.M)}
    assert set(cdr_kernel.__all__) - {"__version__"} <= named


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "examples").glob("*.py")))
def test_the_examples_run(name, tmp_path):
    arguments = {"own_documents.py": [str(DOCS), "--query", "explain a fact"]}.get(name, [])
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "error::UserWarning", str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    absent = re.search(r"^ModuleNotFoundError: No module named '(?!cdr_kernel)([\w.]+)'", done.stderr, re.M)
    if absent:
        pytest.skip(f"needs {absent[1]}")
    assert done.returncode == 0, done.stderr
    for written in tmp_path.glob("*.html"):
        assert written.read_text().startswith("<!doctype html>")


@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="needs the extra docs")
def test_the_documentation_builds_without_a_warning(tmp_path):
    for name in ("docs", "cdr_kernel"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "build" / "docs" / "api.html").read_text()
    for name in ("cdr_kernel.cdr_rank", "cdr_kernel.rank.explain", "cdr_kernel.Session.update"):
        assert f'id="{name}"' in page
