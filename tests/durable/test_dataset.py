"""The record of truth: on the disk before anybody is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from durables import add, made, vectors


@pytest.fixture
def store(tmp_path):
    with made(tmp_path / "store") as store:
        yield store


def test_every_file_of_a_commit_is_synced_before_it_is_acknowledged(store, monkeypatch):
    add(store, ["a", "b", "c"])
    synced = set()
    sync = os.fsync

    def noted(handle):
        synced.add(Path(os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    home = store.path / "facts.lance"
    for change in (
        lambda: add(store, ["d"]),
        lambda: store.upsert(["a"], ["again"], vectors(1)),
        lambda: store.remove(["b"]),
        lambda: add(store, ["e"], attributes={"new": [1]}),
        lambda: store.quarantine(["c"]),
    ):
        before = {path for path in home.rglob("*") if path.is_file()}
        synced.clear()
        change()
        new = {path for path in home.rglob("*") if path.is_file()} - before
        files = {
            path for path in new if path.parent.name in ("data", "_deletions", "_versions") and path.suffix != ".json"
        }
        assert any(path.suffix == ".manifest" for path in files)
        assert files <= synced
        assert {path.parent for path in files} <= synced
