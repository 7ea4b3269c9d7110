"""A snapshot: the facts of one version of a record in the folder format of ``FactStore``, mapped and disposable.

It says which version of which record it is of, and has a checksum of every block of its files. Whatever does not fit
is no snapshot: the facts are read from the record again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from cdr_kernel import checksums
from cdr_kernel.folder import LOCK, turn
from cdr_kernel.lance_record import Record
from cdr_kernel.store import FactStore, StoreView, check_store_folder
from cdr_kernel.token_hashes import HashKey
from cdr_kernel.tokens import Tokenizer


class Found(NamedTuple):
    """A snapshot that was opened: its facts, the version they are of, the next sequence number then, its files, open
    to be checked, and what their checksums must be."""

    facts: FactStore
    version: int
    next_sequence: int
    files: dict[str, Any]
    checksums: dict[str, list[int]]

    def close(self) -> None:
        """Close the files; the facts stay mapped."""
        for file in self.files.values():
            file.close()


def write(folder: Path, facts: FactStore, view: StoreView, record: Record, next_sequence: int) -> None:
    """Save a view as the snapshot of this version of the record, replacing the one that is there."""
    _clear_what_is_damaged(folder)
    key = {"version": record.version, "fingerprint": record.fingerprint(), "next_sequence": next_sequence}
    facts.save(folder, view=view, about=lambda data: {"record": key, "checksums": checksums.of_folder(data)})


def load(
    folder: Path, record: Record, *, tokenizer: Tokenizer | None = None, hash_key: HashKey | None = None
) -> Found | str:
    """The snapshot of this version of the record or an earlier one; why not, where there is none that can be used."""
    try:
        facts = FactStore.load(folder, tokenizer=tokenizer, hash_key=hash_key, snapshot=True)
    except (OSError, ValueError) as error:
        return f"{error}"
    except Exception as error:  # a damaged header makes numpy's parser raise almost anything
        return f"{type(error).__name__}: {error}"
    key = facts.about.get("record")
    sums = facts.about.get("checksums")
    if not isinstance(key, dict) or not isinstance(sums, dict) or not all(isinstance(s, list) for s in sums.values()):
        return f"{folder}: expected the version of a record and checksums, found none"
    version, following = key.get("version"), key.get("next_sequence")
    if type(version) is not int or type(following) is not int or version > record.version:
        return f"{folder}: expected a version up to {record.version}, found {version!r}"
    if key.get("fingerprint") is None or key["fingerprint"] != record.fingerprint_of(version):
        return f"{folder}: version {version} of the record is not the one it was made of"
    about = record.about
    if (str(facts.dim), facts.dtype.name, facts.embedding_model) != tuple(
        about[name] for name in ("dim", "dtype", "embedding_model")
    ):
        return f"{folder}: expected the record's dimension, dtype and model"
    data = folder / facts.about["data"]
    try:
        if set(os.listdir(data)) != sums.keys():
            return f"{data}: expected a checksum for every file"
        return Found(facts, version, following, checksums.opened(data, sums), sums)
    except OSError as error:
        return f"{data}: {error.strerror}"


def _clear_what_is_damaged(folder: Path) -> None:
    """Empty a folder whose manifest says nothing, which would not be saved over."""
    try:
        check_store_folder(folder)
    except FileExistsError:
        with turn(folder):
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != LOCK:
                    path.unlink(missing_ok=True)
