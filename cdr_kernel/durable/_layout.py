"""The folder of a durable store: what is in it, whether one may be made there, and the way to its newest version."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from cdr_kernel.durable import _dataset
from cdr_kernel.durable._dataset import Record
from cdr_kernel.store._atomic_folder import LOCK, draft_folder, sync_folder, turn

_log = logging.getLogger(__name__)

RECORD = "facts.lance"
SNAPSHOT = "snapshot"


def is_durable(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a durable store."""
    return _dataset.exists(Path(path) / RECORD)


def check_new_folder(folder: Path) -> None:
    """Raises FileExistsError unless a durable store may be made there: nothing yet, or an empty folder.

    What a ``create`` that was killed has left counts as nothing.
    """
    if folder.is_dir() and is_durable(folder):
        found = "a durable store"
    elif any((folder / RECORD / "_versions").glob("*.torn")):
        found = "a durable store that is damaged"
    elif folder.is_dir() and {entry.name for entry in folder.iterdir()} - {LOCK, RECORD}:
        found = "other files"
    elif folder.exists() and not folder.is_dir():
        found = "a file"
    else:
        return
    raise FileExistsError(f"{folder}: expected a new or empty folder, found {found}")


@contextlib.contextmanager
def building(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder beside the one that is wanted, which takes its name when the block ends well and else goes."""
    folder = Path(path)
    check_new_folder(folder)
    with draft_folder(folder) as draft:
        yield draft
        check_new_folder(folder)
        shutil.rmtree(folder, ignore_errors=True)  # what a `create` that was killed has left
        draft.rename(folder)
        sync_folder(folder.parent)


def newest_record(folder: Path) -> Record:
    """The newest version of the record, past one that a power cut has torn before it was acknowledged."""
    try:
        return Record.open(folder / RECORD)
    except (ValueError, OSError) as damage:
        try:
            with turn(folder):
                aside = _dataset.set_torn_aside(folder / RECORD)
        except OSError as refused:  # a folder that is read only, of which the damage says more
            raise damage from refused
        if aside is None:
            raise
        _log.warning(
            "%s: set aside %s, whose end is missing, for the version before it: torn before anybody was told of the "
            "commit",
            folder / RECORD,
            aside,
        )
        return Record.open(folder / RECORD)
