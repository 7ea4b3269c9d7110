"""Further columns of facts, such as tenant or language: what a ranking may be limited by.

One column has one type, str, int, float or bool, and may lack a value for any fact. Strings are kept once each, with an
int32 per fact.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.store._atomic_folder import synced
from cdr_kernel.store._checksums import Files
from cdr_kernel.validation._arrays import Growing, Int64
from cdr_kernel.validation._scalars import check_order

Value: TypeAlias = str | int | float | bool
Attributes: TypeAlias = "dict[str, tuple[type, list[Value | None]]]"
"""By name: the type of a column and its values."""
Where: TypeAlias = "Mapping[str, Value | Iterable[Value | None] | None] | npt.ArrayLike"

RESERVED = frozenset({"id", "text", "embedding", "importance", "source", "position", "sequence"})
KINDS: dict[str, type] = {kind.__name__: kind for kind in (str, int, float, bool)}

_DTYPES: dict[type, Any] = {str: np.int32, int: np.int64, float: np.float64, bool: np.int8}
_MISSING: dict[type, Any] = {str: -1, int: -(2**63), float: math.nan, bool: -1}
_LARGEST = 2**63 - 1
_SHOWN = 5
_SHOWN_CHARACTERS = 80


class Attribute:
    """One column, append-only: its front never changes while more is written."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.rows = 0
        self._numbers = Growing(np.zeros(0, _DTYPES[kind]))
        self._names: list[str] = []
        self._codes: dict[str, int] = {}

    @classmethod
    def missing(cls, kind: type, rows: int) -> Attribute:
        """A column that has no value for the first rows."""
        made = cls(kind)
        made._numbers = Growing(np.full(rows, _MISSING[kind], _DTYPES[kind]))
        made.rows = rows
        return made

    def check_kind(self, kind: type, name: str) -> None:
        """Raises TypeError unless values of this type can go into the column."""
        if kind is not self.kind and (kind, self.kind) != (int, float):
            raise TypeError(f"{name}: expected {self.kind.__name__} as in the store, got {kind.__name__}")

    def write(self, at: int, values: Sequence[Value | None]) -> None:
        """Put values at row `at` and on; rows before that are not touched."""
        if self.kind is str:
            for value in values:
                if value is not None and value not in self._codes:
                    self._names.append(str(value))
                    self._codes[str(value)] = len(self._names) - 1
            numbers = [-1 if value is None else self._codes[str(value)] for value in values]
        else:
            numbers = [_MISSING[self.kind] if value is None else self.kind(value) for value in values]
        self._numbers.write(at, np.array(numbers, _DTYPES[self.kind]))
        self.rows = at + len(numbers)

    def numbers(self, n: int) -> npt.NDArray[Any]:
        """The first n rows as they are kept: codes of strings, else the numbers themselves."""
        return self._numbers.front(n)

    def values(self, rows: Int64) -> list[Any]:
        """Values of these rows, None where there is none."""
        numbers = self._numbers.buffer[rows]
        if self.kind is str:
            return [None if code < 0 else self._names[code] for code in numbers.tolist()]
        lacking = np.isnan(numbers) if self.kind is float else numbers == _MISSING[self.kind]
        pairs = zip(numbers.tolist(), lacking.tolist(), strict=True)
        return [None if lacks else self.kind(number) for number, lacks in pairs]

    def equal(self, wanted: Sequence[Any], n: int, name: str) -> npt.NDArray[np.bool_]:
        """Which of the first n rows have one of these values (None: no value). bool [n]."""
        numbers = self._numbers.front(n)
        mask = np.zeros(n, np.bool_)
        if None in wanted:
            mask |= np.isnan(numbers) if self.kind is float else numbers == _MISSING[self.kind]
        kind, values = one_kind(wanted, name)
        if kind is None:
            return mask
        self.check_kind(kind, name)
        present = [value for value in values if value is not None]
        if self.kind is str:
            present = [self._codes[value] for value in present if value in self._codes]
        mask |= numbers == present[0] if len(present) == 1 else np.isin(numbers, np.array(present, numbers.dtype))
        return mask

    def at_most(self, limit: int, n: int) -> npt.NDArray[np.bool_]:
        """Which of the first n rows have a number that is not above the limit. bool [n]."""
        numbers = self._numbers.front(n)
        return np.asarray((numbers != _MISSING[int]) & (numbers <= limit), np.bool_)

    def take(self, rows: Int64) -> Attribute:
        """A column of these rows alone."""
        made = Attribute(self.kind)
        made.write(0, self.values(rows))
        return made

    def save(self, stem: Path, rows: Int64) -> None:
        """Write these rows, and nothing of the others, to STEM.npy and, of strings, STEM.json."""
        kept = self.take(rows)
        with synced(stem.with_suffix(".npy")) as file:
            np.save(file, kept.numbers(len(rows)), allow_pickle=False)
        if self.kind is str:
            with synced(stem.with_suffix(".json")) as file:
                file.write(json.dumps(kept._names).encode())

    @classmethod
    def load(cls, kind: type, files: Files, stem: str, n: int) -> Attribute:
        """What ``save`` wrote. Raises DamagedFileError where it is damaged."""
        made = cls(kind)
        file = files.data / f"{stem}.npy"
        made._numbers = Growing(files.array(f"{stem}.npy", _DTYPES[kind], (n,), mapped=False))
        made.rows = n
        least, most = {str: (-1, None), bool: (-1, 1)}.get(kind, (None, None))
        if kind is str:
            source, content = files.data / f"{stem}.json", files.content(f"{stem}.json")
            try:
                names = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise DamagedFileError(f"{source}: not readable JSON ({error})", source) from None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise DamagedFileError(f"{source}: expected a list of strings", source)
            made._names, made._codes = names, {name: code for code, name in enumerate(names)}
            most = len(names) - 1
        numbers = made._numbers.buffer
        if n and least is not None and not (least <= numbers.min() and numbers.max() <= most):
            what = f"expected {least} to {most}, found {numbers.min()} to {numbers.max()}"
            raise DamagedFileError(f"{file}: {what}", file)
        if kind is float and np.isinf(numbers).any():
            raise DamagedFileError(f"{file}: expected finite numbers", file)
        return made


def one_kind(values: Sequence[Any], name: str) -> tuple[type | None, list[Value | None]]:
    """The one type of the values that are not None, and all of them as Python's own; ints beside floats are floats.

    Raises TypeError for another type and for several, ValueError for a number that is not finite or too large.
    """
    types = set(map(type, values)) - {type(None)}
    if len(types) <= 1 and _in_range(next(iter(types), str), values):  # as most are, and the long ones
        return next(iter(types), None), list(values)
    kinds: set[type] = set()
    out: list[Value | None] = []
    for i, value in enumerate(values):
        plain = value.item() if isinstance(value, np.generic) else value
        if plain is None:
            out.append(None)
            continue
        kind = next((k for k in (bool, str, int, float) if isinstance(plain, k)), None)
        if kind is None:
            raise TypeError(f"{name}: expected str, int, float, bool or None, got {type(value).__name__} at {i}")
        if (kind is float and not math.isfinite(plain)) or (kind is int and not -_LARGEST <= plain <= _LARGEST):
            raise ValueError(f"{name}: expected a finite number of at most 64 bits, got {plain!r} at {i}")
        kinds.add(kind)
        out.append(plain)
    if kinds == {int, float}:
        return float, [None if value is None else float(value) for value in out]
    if len(kinds) > 1:
        raise TypeError(f"{name}: expected values of one type, got {', '.join(sorted(k.__name__ for k in kinds))}")
    return next(iter(kinds), None), out


def _in_range(kind: type, values: Sequence[Any]) -> bool:
    """Whether all values, of this very type or None, can go into a column."""
    if kind in (str, bool):
        return True
    present = [value for value in values if value is not None]
    if kind is int:
        return bool(max(map(abs, present)) <= _LARGEST)
    return kind is float and all(map(math.isfinite, present))


def checked_attributes(given: Mapping[str, Sequence[Value | None]] | None, m: int) -> Attributes:
    """Columns as a caller gave them, checked: m values each. Columns without any value are left out."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"attributes: expected a mapping of names to values, got {type(given).__name__}")
    checked: Attributes = {}
    for name, values in given.items():
        if not isinstance(name, str):
            raise TypeError(f"attributes: expected names that are str, got {type(name).__name__}")
        if not name or name in RESERVED or name.startswith("_") or set(name) & set(".`") or not name.isprintable():
            raise ValueError(
                f"attributes: expected a name that is no column of every fact ({', '.join(sorted(RESERVED))}), does "
                f"not begin with _ and has no dot or backtick, got {name!r}"
            )
        where = f"attributes[{name!r}]"
        if isinstance(values, str | bytes):
            raise TypeError(f"{where}: expected one value per id, got one {type(values).__name__}")
        check_order(values, where)
        listed = values.tolist() if isinstance(values, np.ndarray) else list(values)
        if len(listed) != m:
            raise ValueError(f"{where}: expected {m} entries (one per id), got {len(listed)}")
        kind, plain = one_kind(listed, where)
        if kind is not None:
            checked[name] = (kind, plain)
    return checked


def chosen(values: Any) -> list[Any]:
    """The values that a filter allows, from one or several."""
    if values is None or isinstance(values, str | int | float | np.generic):
        return [values]
    if isinstance(values, bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"where: expected a value or several, got {type(values).__name__}")
    return list(values)


def where_text(where: Where | None) -> str:
    """A filter in words, for messages: at most five of its names and of the values of each; "" for None."""
    if where is None:
        return ""
    if not isinstance(where, Mapping):
        return "(a mask)"
    parts = []
    for name, wanted in islice(where.items(), _SHOWN):
        values = chosen(wanted)
        shown = [_short(repr(value)) for value in values[:_SHOWN]]
        shown += [f"{len(values) - _SHOWN} more"] if len(values) > _SHOWN else []
        name = _short(name)
        parts.append(f"{name} = {shown[0]}" if len(values) == 1 else f"{name} in [{', '.join(shown)}]")
    parts += [f"{len(where) - _SHOWN} more"] if len(where) > _SHOWN else []
    return f"({' and '.join(parts)})"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def check_mask(mask: Any, n: int) -> npt.NDArray[np.bool_]:
    """A filter that is no mapping, as bool [n]: TypeError for another type, ValueError for another length."""
    found = np.asarray(mask)
    if found.dtype != np.bool_:
        raise TypeError(f"where: expected a mapping or a bool array, got {type(mask).__name__} of {found.dtype}")
    if found.shape != (n,):
        raise ValueError(f"where: expected {n} entries (one per fact, in the order of ids), got {list(found.shape)}")
    return found


def mapping_key(where: Mapping[str, Any], within: bytes) -> bytes:
    """What tells one mapping of names to several values from another, for caches. within: the key of what it limits.

    It holds for every version of a store: which facts have the values is asked of each version anew.
    """
    digest = hashlib.blake2b(within, digest_size=16)
    for name in sorted(where, key=str):
        if not isinstance(name, str):
            raise TypeError(f"where: expected names that are str, got {type(name).__name__}")
        values = where[name]
        types = set(map(type, values))
        if len(types) == 1 and types < {str, int, float, bool}:
            written: list[Any] = [name, types.pop().__name__, sorted(values)]
        else:
            written = [name, sorted(f"{type(value).__name__} {value!r}" for value in values)]
        digest.update(json.dumps(written).encode())
    return digest.digest()


def rows_key(selected: npt.NDArray[np.bool_], layout: int) -> bytes:
    """What tells the rows that a mask stands for, bool by row, from others, for caches.

    A mask says nothing by itself: its places are those of one version's facts. So its name is made of the rows, which
    keep their numbers within a layout, and rows that come later change nothing of it.
    """
    digest = hashlib.blake2b(b"rows %d " % layout, digest_size=16)
    digest.update(np.packbits(selected).tobytes().rstrip(b"\0"))
    return digest.digest()
