"""A snapshot: the facts of one version of a record in the folder format of ``FactStore``, mapped and disposable.

It says which version of which record it is of, and which facts were quarantined then. Its blocks have checksums as
those of any store. Whatever does not fit is no snapshot: the facts are read from the record again.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cdr_kernel.durable._dataset import Record
from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.store import FactStore
from cdr_kernel.store._atomic_folder import LOCK, turn
from cdr_kernel.store._fact_store import StoreView, check_store_folder
from cdr_kernel.text import Tokenizer
from cdr_kernel.text._token_hashes import HashKey

Held: TypeAlias = "dict[str, tuple[int, str | None, int]]"
"""Sequence numbers, reasons and first sequence numbers of quarantined facts, by id."""


class Found(NamedTuple):
    """A snapshot that was opened: its facts, the version that they are of, and of that version the next sequence number
    and the quarantined facts."""

    facts: FactStore
    version: int
    next_sequence: int
    held: Held


def write(folder: Path, facts: FactStore, view: StoreView, record: Record, next_sequence: int, held: Held) -> None:
    """Save a view as the snapshot of this version of the record, replacing the one that is there."""
    _clear_what_is_damaged(folder)
    key = {
        "version": record.version,
        "fingerprint": record.fingerprint(),
        "next_sequence": next_sequence,
        "quarantined": [[id, *entry] for id, entry in held.items()],
    }
    facts.save(folder, view=view, about=lambda data: {"record": key})


def load(
    folder: Path, record: Record, *, tokenizer: Tokenizer | None = None, hash_key: HashKey | None = None
) -> Found | str:
    """The snapshot of this version of the record or an earlier one; why not, where there is none that can be used.

    Raises DamagedFileError where it is not as it was written, as far as a load looks.
    """
    try:
        facts = FactStore.load(folder, tokenizer=tokenizer, hash_key=hash_key, snapshot=True)
    except DamagedFileError:
        raise
    except (OSError, ValueError) as error:
        return f"{error}"
    key = facts.about.get("record")
    if not isinstance(key, dict):
        return f"{folder}: expected the version of a record, found none"
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
    return Found(
        facts, version, following, {id: (sequence, reason, first) for id, sequence, reason, first in key["quarantined"]}
    )


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
