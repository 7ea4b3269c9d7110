"""The folder that a store is saved to: files of numbers and of UTF-8, and the manifest that names and sizes them."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np

from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.store._atomic_folder import BESIDE, LOCK, Kind, synced
from cdr_kernel.store._attributes import KINDS, Attribute
from cdr_kernel.store._checksums import Files
from cdr_kernel.store._columns import CHUNK, MAX_POSITION, NO_POSITION, Pieces, Storage, Strings, Tokens
from cdr_kernel.store._mapped_files import MappedFiles
from cdr_kernel.store._numbering import Numbering
from cdr_kernel.store._view import StoreView
from cdr_kernel.text._token_hashes import TOKEN_BYTES, TokenRows, take_tokens
from cdr_kernel.validation._arrays import Growing, Int64, New

FORMAT = "cdr-fact-store"
FORMAT_VERSION = 2
_ARRAYS = (
    "embeddings",
    "squared_norms",
    "importance",
    "sequence",
    "first_sequence",
    "positions",
    "tokens",
    "token_offsets",
)
_TEXTS = ("ids", "texts", "sources")
_FILES = {*(f"{name}.npy" for name in _ARRAYS), *(f"{n}{end}" for n in _TEXTS for end in (".utf8", "_offsets.npy"))}
_MAPPED = (
    *(f"{name}.npy" for name in ("embeddings", "tokens", "token_offsets")),
    *(f"{name}{end}" for name in _TEXTS for end in (".utf8", "_offsets.npy")),
)
KIND = Kind(
    "store",
    file="manifest.json",
    data="data-",
    format=FORMAT,
    version=FORMAT_VERSION,
    fields={
        "dim": int,
        "dtype": str,
        "embedding_model": str,
        "tokenizer": str,
        "hash_key": str,
        "unicode": str,
        "facts": int,
        "next_sequence": int,
        "numbering": list,
        "attributes": dict,
        "about": dict,
    },
    derived=r"scan\.json|(scan\.json\.)?scan-[0-9a-f]{16}",  # the codes of a scan
)
_UNFINISHED = re.compile(  # names that saves give, of stores and of the scan indexes beside them
    rf"{re.escape(LOCK)}|scan\.json|(manifest\.json\.)?data-[0-9a-f]{{16}}|(scan\.json\.)?scan-[0-9a-f]{{16}}|"
    rf"data-[0-9a-f]{{16}}{re.escape(BESIDE)}"
)
_FLOAT64 = np.finfo(np.float64)


def write(
    data: Path,
    view: StoreView,
    next_sequence: int,
    numbering: Numbering,
    about: Callable[[Path], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Put the facts of a view into an empty folder; returns the fields of the manifest.

    next_sequence: the number that the next fact gets. numbering: whose the numbers are. about: called with the folder
    when the data is in it; what it returns goes into the manifest.
    """
    keep = np.flatnonzero(view.alive)
    _save_rows(data / "embeddings.npy", view, keep)
    arrays = {
        "squared_norms": view.squared_norms[keep],
        "importance": view.importance[keep],
        "sequence": view.sequence[keep],
        "first_sequence": view.first_sequence[keep],
        "positions": view._storage.positions.buffer[keep],
    }
    for name, array in arrays.items():
        with synced(data / f"{name}.npy") as file:
            np.save(file, array, allow_pickle=False)
    _save_tokens(data, view.tokens, keep)
    alive = view.alive.tolist()
    for name in _TEXTS:
        _save_strings(data, name, compress(getattr(view._storage, name), alive))
    attributes = {}
    for i, (name, column) in enumerate(sorted(view._storage.attributes.items())):
        attributes[name] = {"type": column.kind.__name__, "file": f"attribute-{i}"}
        column.save(data / f"attribute-{i}", keep)
    return {
        "dim": view.dim,
        "dtype": view.blocks[0].dtype.name,
        "embedding_model": view.embedding_model,
        "tokenizer": view.tokens.tokenizer_name,
        "hash_key": view.tokens.key_fingerprint,
        "unicode": unicodedata.unidata_version,
        "facts": len(keep),
        "next_sequence": next_sequence,
        "numbering": numbering.listed(),
        "attributes": attributes,
        "about": {} if about is None else dict(about(data)),
    }


def read(folder: Path, manifest: Mapping[str, Any], dtype: np.dtype[Any], *, mmap: bool, new: New) -> Storage:
    """The columns that a manifest names, checked as `FactStore.load` says.

    dtype: of the embeddings. mmap: whether embeddings, texts and tokens are mapped, and checked when they are read; all
    else is checked here. new: makes the arrays of what will be added.
    """
    data = folder / manifest["data"]
    files = Files(data, manifest["files"], folder / KIND.file)
    further = _attribute_files(folder, manifest)
    for name in sorted(_FILES | {n for each in further.values() for n in each[2:]}):
        files.file(name)
    n, dim = manifest["facts"], manifest["dim"]

    def numbers(name: str, kind: Any, least: float, most: float) -> Growing:
        a = files.array(f"{name}.npy", kind, (n,), mapped=False)
        if n and not (least <= a.min() and a.max() <= most):
            bad = int(np.flatnonzero(~((a >= least) & (a <= most)))[0])
            raise _wrong(data / f"{name}.npy", f"expected {least:g} to {most:g}, found {a[bad]} in row {bad}")
        return Growing(a)

    def offsets(name: str) -> Int64:
        a = files.array(f"{name}.npy", np.int64, (n + 1,), mapped=mmap)
        files.file(f"{name}.npy").check()
        if a[0] != 0 or (a[1:] < a[:-1]).any():
            raise _wrong(data / f"{name}.npy", "expected offsets from 0 on that never fall")
        return a

    def strings(name: str) -> Strings:
        ends, file = offsets(f"{name}_offsets"), files.file(f"{name}.utf8")
        if ends[-1] != len(file):
            raise _wrong(data / f"{name}_offsets.npy", f"expected {len(file)} (the bytes of {name}.utf8) at the end")
        utf8 = files.mapped(f"{name}.utf8")
        if mmap:
            return Strings(ends, utf8, file)
        file.check()
        return Strings(ends, utf8.copy())

    embeddings = files.array("embeddings.npy", dtype, (n, dim), mapped=mmap)
    ends = offsets("token_offsets")
    tokens = files.array("tokens.npy", np.uint8, (TOKEN_BYTES * int(ends[-1]),), mapped=mmap)
    sequence = numbers("sequence", np.int64, 0, manifest["next_sequence"] - 1)
    if (sequence.buffer[1:] <= sequence.buffer[:-1]).any():
        raise _wrong(data / "sequence.npy", "expected ascending numbers")
    first_sequence = numbers("first_sequence", np.int64, 0, manifest["next_sequence"] - 1)
    if not _are_first(first_sequence.buffer, sequence.buffer):
        raise _wrong(data / "first_sequence.npy", "expected each number once, at most that in sequence.npy")
    return Storage(
        mapped=embeddings if n else None,
        tail=Pieces(dim, dtype, new),
        squared_norms=numbers("squared_norms", np.float64, _FLOAT64.smallest_subnormal, _FLOAT64.max),
        importance=numbers("importance", np.float64, 0.0, _FLOAT64.max),
        sequence=sequence,
        first_sequence=first_sequence,
        positions=numbers("positions", np.int64, NO_POSITION, MAX_POSITION),
        ids=strings("ids"),
        texts=strings("texts"),
        tokens=Tokens(mapped=(ends, tokens) if n else None),
        sources=strings("sources"),
        attributes={name: Attribute.load(kind, files, stem, n) for name, (kind, stem, *_) in further.items()},
        mapped_files=MappedFiles([data / name for name in _MAPPED] if mmap else []),
        files=files,
        identity=manifest["identity"],
    )


def digest_of(view: StoreView) -> str:
    """A digest of all facts of a view, which any store of the same facts in the same order has: 32 hexadecimal digits.

    What is carried by a format without checksums is compared with it.
    """
    digest, rows, storage = hashlib.blake2b(digest_size=16), np.flatnonzero(view.alive), view._storage

    def add(*values: Any) -> None:
        digest.update(json.dumps(values).encode() + b"\n")

    add(view.dim, view.blocks[0].dtype.name, view.embedding_model)
    add(view.tokens.tokenizer_name, view.tokens.key_fingerprint, len(rows))
    for start in range(0, len(rows), CHUNK):
        some = rows[start : start + CHUNK]
        numbers = view.sequence[some], view.first_sequence[some], storage.positions.buffer[some]
        for array in (view.take(some), view.importance[some], *numbers):
            digest.update(array.tobytes())
        for name in _TEXTS:
            add(name, getattr(storage, name).at(some))
    for name, column in sorted(storage.attributes.items()):
        values = column.values(rows)
        if any(value is not None for value in values):  # else the same facts may come without the column
            add(name, column.kind.__name__)
            for start in range(0, len(rows), CHUNK):
                add(values[start : start + CHUNK])
    return digest.hexdigest()


def _wrong(file: Path, what: str) -> DamagedFileError:
    return DamagedFileError(f"{file}: {what}", file)


def check_store_folder(folder: Path) -> None:
    """Raises FileExistsError unless a store may be saved there: nothing yet, an empty folder, or a store to replace.

    What a save that runs or was killed has put into a new folder counts as nothing.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a store or a new folder, found a file")
    if not folder.exists() or all(_UNFINISHED.fullmatch(path.name) for path in folder.iterdir()):
        return
    try:
        found = json.loads((folder / KIND.file).read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FileExistsError(f"{folder}: expected a store or an empty folder, found other files")


def _save_rows(path: Path, view: StoreView, keep: Int64) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(view.blocks[0].dtype),
        "fortran_order": False,
        "shape": (len(keep), view.dim),
    }
    with synced(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(keep), CHUNK):
            file.write(view.take(keep[start : start + CHUNK]).tobytes())


def _save_tokens(data: Path, tokens: TokenRows, keep: Int64) -> None:
    lengths = np.concatenate([np.diff(offsets) for offsets, _ in tokens.blocks])[keep]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    with synced(data / "token_offsets.npy") as file:
        np.save(file, offsets, allow_pickle=False)
    header = {"descr": "|u1", "fortran_order": False, "shape": (TOKEN_BYTES * int(offsets[-1]),)}
    with synced(data / "tokens.npy") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(keep), CHUNK):
            file.write(take_tokens(tokens.blocks, keep[start : start + CHUNK])[1].tobytes())


def _save_strings(data: Path, name: str, strings: Iterator[str]) -> None:
    ends = [np.zeros(1, np.int64)]
    with synced(data / f"{name}.utf8") as file:
        while utf8 := [each.encode("utf-8", "surrogatepass") for each in islice(strings, CHUNK)]:
            file.write(b"".join(utf8))
            ends.append(ends[-1][-1] + np.cumsum([len(each) for each in utf8], dtype=np.int64))
    with synced(data / f"{name}_offsets.npy") as file:
        np.save(file, np.concatenate(ends), allow_pickle=False)


def _are_first(first: Int64, sequence: Int64) -> bool:
    """Whether facts of these sequence numbers, which ascend, can have been added with these numbers."""
    upserted = np.flatnonzero(first != sequence)
    numbers = first[upserted]
    others = np.minimum(np.searchsorted(sequence, numbers), max(len(sequence) - 1, 0))
    theirs = (sequence[others] == numbers) & (first[others] == numbers)
    return bool((numbers < sequence[upserted]).all() and not theirs.any() and len(np.unique(numbers)) == len(numbers))


def _attribute_files(folder: Path, manifest: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Of each attribute of a manifest: its type, the stem of its files and their names."""
    listed = manifest["attributes"]
    try:
        found = {}
        for name, entry in listed.items():
            kind, stem = KINDS[entry["type"]], entry["file"]
            if not re.fullmatch(r"attribute-[0-9]{1,9}", stem):
                raise ValueError
            found[name] = (kind, stem, f"{stem}.npy", *([f"{stem}.json"] if kind is str else []))
    except (AttributeError, KeyError, TypeError, ValueError):
        what = "a type and a file for each of the attributes"
        raise _wrong(folder / KIND.file, f"expected {what}, found {listed!r}") from None
    return found
