"""All facts of a record as one safetensors file, and back: for other machines, other programs and for keeping.

Numbers are tensors [N]; strings are their UTF-8 bytes one after the other (NAME.utf8) and where each begins and the
last ends (NAME.offsets, int64 [N + 1]); a column that may lack values has NAME.missing, uint8 [N], 1 where it does.
Rows come in the order of their sequence numbers. The metadata has the CRC-32C of every tensor and a digest of itself; a
file of another program may have neither.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cdr_kernel import _C
from cdr_kernel.durable._dataset import COLUMNS
from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.store._atomic_folder import draft_folder, identity_of, sync_folder
from cdr_kernel.store._attributes import KINDS, checked_attributes
from cdr_kernel.store._fact_store import DTYPES
from cdr_kernel.store._numbering import Numbering

FORMAT = "cdr-facts"
FORMAT_VERSION = 1
ABOUT = ("dim", "dtype", "embedding_model", "tokenizer", "hash_key", "unicode", "numbering")
_STRINGS = ("id", "text", "source", "status", "reason")
_NULLABLE = frozenset({"source", "reason", "position", "expires_at"})
_NUMBERS: dict[str, Any] = {
    "sequence": np.int64,
    "first_sequence": np.int64,
    "importance": np.float64,
    "position": np.int64,
    "added_at": np.int64,
    "expires_at": np.int64,
}
_DTYPES: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.uint8}
_CODES = {"uint8": "U8", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64"}
"""What safetensors calls the types."""
_BATCH = 65536


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            f'to exchange facts needs the extra "store": pip install ".[store]" in a checkout ({error})'
        ) from None
    return safetensors


def check_target(path: Path) -> None:
    """Raises OSError saying what is wrong where ``write`` could not put a file."""
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file to write to, found a folder")
    if not path.parent.is_dir():
        kind = NotADirectoryError if path.parent.exists() else FileNotFoundError
        raise kind(f"{path}: expected {path.parent} to be a folder that is there")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path}: expected a folder that can be written to")


def write(path: Path, table: Any, about: Mapping[str, str], attributes: Mapping[str, type], next_sequence: int) -> None:
    """Write the rows of a record, whole or not at all: a draft beside the file is synced, then renamed over it.

    table: all columns, in the order of sequence. Raises what ``check_target`` raises, OSError where the disk has no
    room.
    """
    check_target(path)
    safetensors = _safetensors()
    tensors: dict[str, Any] = {}
    table = table.combine_chunks()
    flat = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["embedding"].chunks]
    dtype = np.dtype(about["dtype"])
    tensors["embedding"] = np.concatenate([np.empty(0, dtype), *flat]).reshape(table.num_rows, int(about["dim"]))
    for name in _STRINGS:
        _put_strings(tensors, name, table[name], name in _NULLABLE)
    for name, kind in _NUMBERS.items():
        _put_numbers(tensors, name, table[name], kind, name in _NULLABLE)
    for name, its in attributes.items():
        if its is str:
            _put_strings(tensors, f"attributes.{name}", table[name], True)
        else:
            _put_numbers(tensors, f"attributes.{name}", table[name], _DTYPES[its], True)
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        **{name: about[name] for name in ABOUT},
        "next_sequence": str(next_sequence),
        "attributes": json.dumps({name: its.__name__ for name, its in sorted(attributes.items())}),
        "checksums": json.dumps({name: _C.crc32c(np.ascontiguousarray(each)) for name, each in tensors.items()}),
    }
    metadata["identity"] = identity_of(metadata)
    with draft_folder(path) as home:  # the library puts a file of its own in the place of one that is there
        made = home / "facts"
        try:
            safetensors.numpy.save_file(tensors, str(made), metadata=metadata)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path}: could not be written ({error})") from None
        with open(made, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(made, path)
        sync_folder(path.parent)


class Exchanged:
    """A file that ``write`` wrote, opened and checked: its settings, and its rows batch by batch.

    about, numbering: as the record's; attributes: types of the further columns; facts: N.

    Raises FileNotFoundError where there is no file, IsADirectoryError where there is a folder, another OSError where it
    cannot be read, ValueError saying what is wrong with one that is damaged or of another kind.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise IsADirectoryError(f"{path}: expected a file of exported facts, found a folder")
        if not path.exists():
            raise FileNotFoundError(f"{path}: expected a file of exported facts, found none")
        path.open("rb").close()  # raises what keeps it from being read
        safetensors = _safetensors()
        self.path = path
        try:
            self._file = safetensors.safe_open(str(path), framework="numpy")
        except Exception as error:  # its errors have no common base
            raise DamagedFileError(f"{path}: expected a safetensors file ({error})", path) from None
        metadata = self._file.metadata() or {}
        if metadata.get("format") != FORMAT or metadata.get("format_version") != str(FORMAT_VERSION):
            found = f"{metadata.get('format')!r} version {metadata.get('format_version')!r}"
            raise ValueError(f"{path}: expected format {FORMAT!r} version {FORMAT_VERSION}, found {found}")
        if "identity" in metadata and metadata["identity"] != identity_of(metadata):
            raise DamagedFileError(f"{path}: its metadata is not as it was written", path)
        try:
            self.about = {name: metadata[name] for name in ABOUT}
            self.dim = int(metadata["dim"])
            self._dtype = np.dtype(metadata["dtype"]).name
            if self._dtype not in DTYPES:
                raise ValueError(f"dtype {self._dtype}")
            self.next_sequence = int(metadata["next_sequence"])
            self.numbering = Numbering.read(json.loads(metadata["numbering"]), "numbering")
            self.attributes = {name: KINDS[kind] for name, kind in json.loads(metadata["attributes"]).items()}
            self._sums: dict[str, int] = json.loads(metadata.get("checksums", "{}"))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: expected the settings of a store in the metadata ({error})") from None
        checked_attributes({name: [] for name in self.attributes}, 0)
        if clash := self.attributes.keys() & set(COLUMNS):
            raise ValueError(f"{path}: attributes: expected names that are none of {', '.join(COLUMNS)}, found {clash}")
        names = set(self._file.keys())
        for name, (kind, shape) in self._expected().items():
            if name not in names:
                raise ValueError(f"{path}: expected a tensor {name!r}, found none")
            tensor = self._file.get_slice(name)
            if tensor.get_dtype() != _CODES[kind]:
                raise ValueError(f"{path}: {name}: expected {kind}, found {tensor.get_dtype()}")
            found_shape = tensor.get_shape()
            if len(found_shape) != len(shape) or any(
                n not in (None, m) for n, m in zip(shape, found_shape, strict=True)
            ):
                raise ValueError(f"{path}: {name}: expected shape {list(shape)}, found {found_shape}")

    def _expected(self) -> dict[str, tuple[str, tuple[int | None, ...]]]:
        """Type and shape of every tensor."""
        shape = self._file.get_slice("sequence").get_shape() if "sequence" in set(self._file.keys()) else [0]
        self.facts = int(shape[0]) if shape else 0
        expected: dict[str, tuple[str, tuple[int | None, ...]]] = {"embedding": (self._dtype, (self.facts, self.dim))}
        kinds = {f"attributes.{name}": kind for name, kind in self.attributes.items()}
        for name in (*_STRINGS, *(name for name, kind in kinds.items() if kind is str)):
            expected |= {f"{name}.utf8": ("uint8", (None,)), f"{name}.offsets": ("int64", (self.facts + 1,))}
        numbers = {**_NUMBERS, **{name: _DTYPES[kind] for name, kind in kinds.items() if kind is not str}}
        for name, kind in numbers.items():
            expected[name] = (np.dtype(kind).name, (self.facts,))
        for name in (*_NULLABLE, *kinds):
            expected[f"{name}.missing"] = ("uint8", (self.facts,))
        return expected

    def batches(self) -> Iterator[dict[str, Any]]:
        """Up to 65,536 facts at a time: lists and arrays by column, attributes under "attributes".

        Raises DamagedFileError before the first where a tensor is not as it was written.
        """
        self._check()
        for start in range(0, self.facts, _BATCH):
            stop = min(start + _BATCH, self.facts)
            batch: dict[str, Any] = {"embedding": self._part("embedding", start, stop)}
            for name in _STRINGS:
                batch[name] = self._strings(name, start, stop, name in _NULLABLE)
            for name in _NUMBERS:
                batch[name] = self._numbers(name, start, stop, name in _NULLABLE)
            batch["attributes"] = {
                name: self._strings(f"attributes.{name}", start, stop, True)
                if kind is str
                else [None if v is None else kind(v) for v in self._numbers(f"attributes.{name}", start, stop, True)]
                for name, kind in self.attributes.items()
            }
            yield batch

    def _check(self) -> None:
        for name, expected in self._sums.items():
            tensor, crc = self._file.get_slice(name), 0
            rows = tensor.get_shape()[0]
            for start in range(0, rows, _BATCH):
                crc = _C.crc32c(np.ascontiguousarray(tensor[start : min(start + _BATCH, rows)]), crc)
            if crc != expected:
                raise DamagedFileError(f"{self.path}: {name} is not as it was written", self.path)

    def _part(self, name: str, start: int, stop: int) -> Any:
        return self._file.get_slice(name)[start:stop] if start < stop else np.zeros(0, np.uint8)

    def _missing(self, name: str, start: int, stop: int, nullable: bool) -> list[bool]:
        if not nullable:
            return [False] * (stop - start)
        missing: list[bool] = (self._part(f"{name}.missing", start, stop) != 0).tolist()
        return missing

    def _numbers(self, name: str, start: int, stop: int, nullable: bool) -> list[Any]:
        values = self._part(name, start, stop).tolist()
        pairs = zip(values, self._missing(name, start, stop, nullable), strict=True)
        return [None if lacks else value for value, lacks in pairs]

    def _strings(self, name: str, start: int, stop: int, nullable: bool) -> list[Any]:
        ends = self._part(f"{name}.offsets", start, stop + 1)
        size = self._file.get_slice(f"{name}.utf8").get_shape()[0]
        if ends[0] < 0 or ends[-1] > size or (np.diff(ends) < 0).any():
            raise ValueError(f"{self.path}: {name}.offsets: expected 0 to {size}, never falling")
        utf8 = self._part(f"{name}.utf8", int(ends[0]), int(ends[-1])).tobytes()
        at = (ends - ends[0]).tolist()
        try:
            values = [utf8[a:b].decode() for a, b in pairwise(at)]
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {name}: expected UTF-8 ({error})") from None
        pairs = zip(values, self._missing(name, start, stop, nullable), strict=True)
        return [None if lacks else value for value, lacks in pairs]


def _put_strings(tensors: dict[str, Any], name: str, column: Any, nullable: bool) -> None:
    encoded = [b"" if value is None else value.encode() for value in column.to_pylist()]
    tensors[f"{name}.offsets"] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    tensors[f"{name}.utf8"] = np.frombuffer(b"".join(encoded), np.uint8)
    if nullable:
        tensors[f"{name}.missing"] = column.is_null().to_numpy().astype(np.uint8)


def _put_numbers(tensors: dict[str, Any], name: str, column: Any, kind: Any, nullable: bool) -> None:
    if str(column.type).startswith("timestamp"):
        column = column.cast("int64")
    if str(column.type) == "bool":
        column = column.cast("uint8")
    tensors[name] = column.fill_null(0).to_numpy().astype(kind, copy=False)
    if nullable:
        tensors[f"{name}.missing"] = column.is_null().to_numpy().astype(np.uint8)
