"""The files a user brings and the one a run leaves: facts, vectors and tasks in, RUN.json out.

Whatever is wrong in a file is a `FileError` that says which file, where in it, what was expected and what was there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cdr_kernel.exceptions import FileError
from cdr_kernel.session import SubQuery
from cdr_kernel.spec.constants import MAX_WINDOWS, MAX_WINDOWS_LIMIT
from cdr_kernel.store._atomic_folder import draft
from cdr_kernel.store._format import KIND
from cdr_kernel.validation._arrays import Float64, as_vectors

BATCH_ROWS = 4096
DEFAULT_K = 10
TASK_SCHEMA = 1

_FACT_FIELDS = ("id", "text", "source", "path", "importance", "position", "pos", "attributes")
_IN_NPZ = re.compile(r"(.+?\.npz):(.+)", re.DOTALL)
_SHOWN = 60
_JSONL = "; JSONL is one object a line"
_BOM = b"\xef\xbb\xbf"


def shown(value: object) -> str:
    """value as a short piece of a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


@dataclass(slots=True)
class FactBatch:
    """Facts as they follow each other in a file: row `first` and on (0-based, blank lines not counted).

    Every list has one entry per fact. places: where each stands, "line 7" (1-based) or "row 6" (0-based).
    """

    first: int
    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    source: list[str | None] = field(default_factory=list)
    importance: list[float] = field(default_factory=list)
    position: list[int | None] = field(default_factory=list)
    attributes: list[Mapping[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def columns(self) -> dict[str, list[Any]]:
        """The attributes by name, None for facts without one."""
        names = dict.fromkeys(name for each in self.attributes for name in each)
        return {name: [each.get(name) for each in self.attributes] for name in names}

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, record: Mapping[str, Any], where: str, place: str) -> None:
        """Check one fact and take it in. where: file and place, for the message of a `FileError`."""
        row = self.first + len(self)
        id = _identifier(record.get("id"), f"{where}: id")
        text = record.get("text")
        if not isinstance(text, str) or not text.strip():
            raise FileError(f"{where}: text: expected a string that is not blank, got {shown(text)}")
        source = _first_given(record, "source", "path")
        if source is not None and not isinstance(source, str):
            raise FileError(f"{where}: source: expected a string, got {shown(source)}")
        importance = record.get("importance")
        self.ids.append(str(row) if id is None else id)
        self.texts.append(text)
        self.source.append(source)
        self.importance.append(1.0 if importance is None else _weight(importance, f"{where}: importance"))
        self.position.append(_count(_first_given(record, "position", "pos"), f"{where}: position"))
        self.attributes.append(_attributes(record.get("attributes"), f"{where}: attributes"))
        self.places.append(place)


def check_regular(path: Path, what: str, name: str = "") -> None:
    """Raises FileError unless a path is a regular file, which can be read more than once and ends.

    what: which kind of file it should be. name: what messages call it, else path. OSError where nothing is there.
    """
    if str(path) == "-" and not path.exists():
        raise FileError(f"-: expected a regular file of {what}; only facts can come from standard input")
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        found = kinds.get(stat.S_IFMT(mode), "a device")
        raise FileError(f"{name or path}: expected a regular file of {what}, found {found}")


@contextlib.contextmanager
def facts_on_disk(path: Path) -> Iterator[tuple[Path, str]]:
    """A file that can be read more than once, and what messages call it.

    What "-" (standard input) or a pipe gives is copied to a temporary file, which goes when the block ends; any other
    path is left as it is.
    """
    standard = str(path) == "-"
    if not standard and not path.is_fifo():
        yield path, str(path)
        return
    name = "standard input" if standard else str(path)
    if standard and sys.stdin is None:
        raise FileError(f"{name}: expected facts, found it closed")
    with draft(Path(tempfile.gettempdir()) / "facts", 0o600) as copy:
        try:
            with (
                contextlib.nullcontext(sys.stdin.buffer) if standard else open(path, "rb") as source,
                open(copy, "wb") as target,
            ):
                shutil.copyfileobj(source, target)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"{reason} (on the way to a file in {tempfile.gettempdir()})", name) from None
        yield copy, name


def read_facts(path: Path, *, start: int = 0, stop: int | None = None, name: str = "") -> Iterator[FactBatch]:
    """The facts of a JSONL or Parquet file from row `start` up to `stop`, checked, in batches of up to 4,096.

    Each has `text` (a string that is not blank), and optionally `id` (string or integer, else the row number),
    `source` (else `path`), `importance` (finite, >= 0, else 1), `position` (else `pos`; integer >= 0), `attributes`
    (an object of strings, numbers, true, false and null). Other fields are ignored. name: what messages call the
    file, else path. Raises FileError naming line (or row) and field; OSError where the file cannot be opened.
    """
    name, path = name or str(path), KIND.beside(path)
    records = _parquet_records(path, start, name) if _is_parquet(path, name) else _jsonl_records(path, start, name)
    batch = FactBatch(start)
    for place, record in islice(records, None if stop is None else max(stop - start, 0)):
        batch.append(record, f"{name}, {place}", place)
        if len(batch) == BATCH_ROWS:
            yield batch
            batch = FactBatch(batch.first + BATCH_ROWS)
    if len(batch):
        yield batch


def count_facts(path: Path) -> int:
    """How many facts a file has; lines are counted, not parsed."""
    if _is_parquet(path, str(path)):
        return int(_parquet(path, str(path)).metadata.num_rows)
    with open(path, "rb") as file:
        return sum(1 for number, line in enumerate(file) if (line if number else line.removeprefix(_BOM)).strip())


def _is_parquet(path: Path, name: str) -> bool:
    check_regular(path, "facts", name)
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def _jsonl_records(path: Path, start: int, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    row = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(_BOM) if number == 1 else line
            if not content.strip():
                continue
            if row >= start:
                yield f"line {number}", _json_object(content, f"{name}, line {number}")
            row += 1


def _json_object(raw: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: expected UTF-8, got byte 0x{raw[error.start]:02x} at {error.start}") from None
    except json.JSONDecodeError as error:
        what = f"{error.msg} at column {error.colno}"
        raise FileError(
            f"{where}: expected one JSON object, got {shown(raw.decode().strip())} ({what}){_JSONL}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: expected one JSON object ({error})") from None
    if not isinstance(record, dict):
        raise FileError(f"{where}: expected one JSON object, got {shown(record)}{_JSONL}")
    return record


def _parquet(path: Path, name: str) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise ImportError("reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        return pq.ParquetFile(path)
    except MemoryError:
        raise
    except Exception as error:  # Arrow's own, OSError and whatever else a damaged file brings about
        raise FileError(f"{name}: not a readable Parquet file ({error})") from None


def _parquet_records(path: Path, start: int, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    file = _parquet(path, name)
    names = file.schema_arrow.names
    if "text" not in names:
        raise FileError(f'{name}: expected a column "text", found {", ".join(map(repr, names)) or "no columns"}')
    row = 0
    try:
        for part in file.iter_batches(BATCH_ROWS, columns=[column for column in _FACT_FIELDS if column in names]):
            skip = min(max(start - row, 0), part.num_rows)
            row += skip
            for record in part.slice(skip).to_pylist():
                yield f"row {row}", record
                row += 1
    except MemoryError:
        raise
    except Exception as error:  # as above; what a caller does with a record is not done in here
        raise FileError(f"{name}, row {row} or after: not readable ({error})") from None


def _first_given(record: Mapping[str, Any], *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _identifier(value: object, where: str) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise FileError(f"{where}: expected a string that is not empty or an integer, got {shown(value)}")


def _weight(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise FileError(f"{where}: expected a finite number >= 0, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise FileError(f"{where}: expected a finite number >= 0, got {shown(value)}") from None


def _attributes(value: object, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FileError(f"{where}: expected an object, got {shown(value)}")
    for name, each in value.items():
        if not (each is None or isinstance(each, str | int | float)):
            raise FileError(f"{where}.{name}: expected a string, a number, true, false or null, got {shown(each)}")
    return value


def _count(value: object, where: str, low: int = 0, high: int = 2**63 - 1) -> int | None:
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # a column of a table with gaps in it
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        expected = f">= {low}" if high == 2**63 - 1 else f"{low} to {high}"
        raise FileError(f"{where}: expected an integer {expected}, got {shown(value)}")
    return value


def names_array(argument: str) -> bool:
    """Whether an argument has the form of `read_array`'s: FILE.npy, FILE.npz or FILE.npz:KEY."""
    return argument.endswith((".npy", ".npz")) or _IN_NPZ.fullmatch(argument) is not None


def read_array(spec: str, ndim: int | None) -> npt.NDArray[Any]:
    """The array of floats at `spec`: FILE.npy (mapped into memory) or FILE.npz:KEY; [D] is read from [1, D] as well.

    ndim: 1 for [D], 2 for [N, D], None for [N, D] that is read from [D] as well.

    Raises FileError for another number of dimensions, other dtypes than float16, float32 and float64, a missing key
    (with those that are there) and an unreadable file; nothing is unpickled.
    """
    inside = _IN_NPZ.fullmatch(spec)
    path = inside[1] if inside else spec
    array: npt.NDArray[Any]
    try:
        there = KIND.beside(Path(path))
        check_regular(there, "vectors", path)
        with open(there, "rb") as file:
            if file.read(2) == b"PK":
                file.seek(0)
                with np.load(file, allow_pickle=False) as stored:
                    array = stored[_npz_key(stored.files, inside[2] if inside else None, path)]
            elif inside:
                raise FileError(f"{path}: expected an .npz file, got something else: leave out :{inside[2]}")
            else:
                array = np.asarray(np.load(there, mmap_mode="r", allow_pickle=False))
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None
    except MemoryError as error:
        raise MemoryError(f"{path}: {error}") from None
    except Exception as error:  # NumPy and zipfile raise a dozen kinds over damaged headers and locked or odd members
        # NumPy would advise to unpickle it.
        odd = "pickle" in str(error)
        what = (
            "something else or Python objects" if odd else f"one that cannot be read ({error or type(error).__name__})"
        )
        raise FileError(f"{path}: expected a NumPy array, got {what}") from None
    if not isinstance(array, np.ndarray):
        raise FileError(f"{spec}: expected a NumPy array, got a file of another kind")
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise FileError(f"{spec}: expected float16, float32 or float64, got {array.dtype}")
    if ndim == 1 and array.ndim == 2 and len(array) == 1:
        array = array[0]
    if ndim is None and array.ndim == 1:
        array = array[None]
    if array.ndim != (ndim or 2):
        expected = "[D]" if ndim == 1 else "[N, D]"
        raise FileError(f"{spec}: expected shape {expected}, got {list(array.shape)}")
    return array


def _npz_key(keys: Sequence[str], asked: str | None, path: str) -> str:
    found = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
    if asked is None and len(keys) != 1:
        raise FileError(f"{path}: expected FILE.npz:KEY to say which array, one of {found or '(none)'}")
    if asked is not None and asked not in keys:
        raise FileError(f"{path}: expected an array {asked!r}, found {found or 'none'}")
    return keys[0] if asked is None else asked


def read_vector(spec: str, dim: int) -> Float64:
    """The vector at `spec` as float64 [dim], finite and not zero, else FileError."""
    vector: Float64 = _checked(read_array(spec, 1)[None], dim, spec)[0]
    return vector


def read_vectors(spec: str, dim: int) -> Float64:
    """The vectors at `spec` as float64 [n, dim], each finite and not zero, else FileError."""
    return _checked(read_array(spec, 2), dim, spec)


def read_one_or_more(spec: str, dim: int) -> Float64:
    """As `read_vectors`; one vector [dim] is read as [1, dim]."""
    return _checked(read_array(spec, None), dim, spec)


def _checked(array: npt.NDArray[Any], dim: int, spec: str) -> Float64:
    try:
        return as_vectors(array, dim, spec)
    except ValueError as error:
        raise FileError(str(error)) from None


@dataclass(frozen=True, slots=True)
class TaskItem:
    """A sub-query of a task without its vector. fact_ids: the facts labelled as being about it, None if unlabelled."""

    id: str
    label: str
    text: str
    expected_words: int | None
    marginal: bool
    fact_ids: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Task:
    """A task over several windows. index: its place in its file. windows: 1 to 20. k: facts per envelope, >= 1."""

    index: int
    id: str
    query: str
    windows: int
    k: int
    items: tuple[TaskItem, ...]

    def sub_queries(self, vectors: Any) -> tuple[SubQuery, ...]:
        """The items with their vectors [S, D]."""
        return tuple(
            SubQuery(item.id, item.label, item.text, vector, item.expected_words, item.marginal)
            for item, vector in zip(self.items, vectors, strict=True)
        )


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file: {"schema": 1, "tasks": [...]}, or one task object.

    A task has `id`, `query` and `sub_queries`, optionally `windows` (1 to 20, else 5) and `k` (else 10). A sub-query
    has `id` (string or integer), `label` and `text`, optionally `expected_words`, `marginal` and `fact_ids`.
    Raises FileError naming what is wrong where; OSError where the file cannot be opened.
    """
    there = KIND.beside(path)
    check_regular(there, "tasks", str(path))
    raw = there.read_bytes()
    try:
        document = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: expected UTF-8, got byte 0x{raw[error.start]:02x} at {error.start}") from None
    except json.JSONDecodeError as error:
        raise FileError(f"{path}, line {error.lineno}, column {error.colno}: expected JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: expected JSON ({error})") from None
    if not isinstance(document, dict):
        raise FileError(f"{path}: expected an object, got {shown(document)}")
    if "tasks" not in document:
        return [_task(document, 0, f"{path}: ")]
    schema, tasks = document.get("schema"), document["tasks"]
    if schema != TASK_SCHEMA or isinstance(schema, bool):
        raise FileError(f"{path}: schema: expected {TASK_SCHEMA}, got {shown(schema)}")
    if not isinstance(tasks, list) or not tasks:
        raise FileError(f"{path}: tasks: expected a list of at least one task, got {shown(tasks)}")
    return [_task(task, i, f"{path}: tasks[{i}].") for i, task in enumerate(tasks)]


def pick_task(tasks: Sequence[Task], id: str | None, path: Path) -> Task:
    """The task of this id, the first for None. Raises FileError naming the ids that are there."""
    if id is None:
        return tasks[0]
    for task in tasks:
        if task.id == id:
            return task
    known = ", ".join(task.id for task in tasks[:5]) + (f" and {len(tasks) - 5} more" if len(tasks) > 5 else "")
    raise FileError(f"{path}: expected a task {id!r}, found {known}")


def _task(record: object, index: int, where: str) -> Task:
    if not isinstance(record, dict):
        raise FileError(f"{where.rstrip('.: ')}: expected an object, got {shown(record)}")
    items = record.get("sub_queries")
    if not isinstance(items, list) or not items:
        raise FileError(f"{where}sub_queries: expected a list of at least one, got {shown(items)}")
    checked = tuple(_item(item, f"{where}sub_queries[{i}]") for i, item in enumerate(items))
    seen: set[str] = set()
    for i, item in enumerate(checked):
        if item.id in seen:
            raise FileError(f"{where}sub_queries[{i}]: id: expected one that is new, got {item.id!r} again")
        seen.add(item.id)
    return Task(
        index=index,
        id=_given(_identifier(record.get("id"), f"{where}id"), f"{where}id"),
        query=_text(record, "query", where),
        windows=_count(record.get("windows"), f"{where}windows", 1, MAX_WINDOWS_LIMIT) or MAX_WINDOWS,
        k=_count(record.get("k"), f"{where}k", 1) or DEFAULT_K,
        items=checked,
    )


def _item(record: object, where: str) -> TaskItem:
    if not isinstance(record, dict):
        raise FileError(f"{where}: expected an object, got {shown(record)}")
    marginal = record.get("marginal", False)
    if not isinstance(marginal, bool):
        raise FileError(f"{where}.marginal: expected true or false, got {shown(marginal)}")
    fact_ids = record.get("fact_ids")
    if fact_ids is not None:
        if not isinstance(fact_ids, list):
            raise FileError(f"{where}.fact_ids: expected a list of ids, got {shown(fact_ids)}")
        places = (f"{where}.fact_ids[{i}]" for i in range(len(fact_ids)))
        fact_ids = [_given(_identifier(id, place), place) for id, place in zip(fact_ids, places, strict=True)]
    return TaskItem(
        id=_given(_identifier(record.get("id"), f"{where}.id"), f"{where}.id"),
        label=_text(record, "label", f"{where}."),
        text=_text(record, "text", f"{where}."),
        expected_words=_count(record.get("expected_words"), f"{where}.expected_words"),
        marginal=marginal,
        fact_ids=None if fact_ids is None else frozenset(fact_ids),
    )


def _given(value: str | None, where: str) -> str:
    if value is None or not value.strip():
        raise FileError(f"{where}: expected a string that is not blank or an integer, got {shown(value)}")
    return value


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise FileError(f"{where}{name}: expected a string that is not blank, got {shown(value)}")
    return value


def read_task_vectors(path: Path, task: Task, dim: int) -> tuple[Float64, Float64]:
    """The vectors of a task: arrays "INDEX:query" [dim] and "INDEX:subs" [S, dim] of an .npz file, as float64."""
    check_regular(KIND.beside(path), "vectors", str(path))
    if path.suffix != ".npz":
        raise FileError(f'{path}: expected an .npz file with "{task.index}:query" and "{task.index}:subs"')
    query = read_vector(f"{path}:{task.index}:query", dim)
    spec = f"{path}:{task.index}:subs"
    subs = read_vectors(spec, dim)
    if len(subs) != len(task.items):
        raise FileError(f"{spec}: expected {len(task.items)} vectors (one per sub-query), got {len(subs)}")
    return query, subs


def is_stdout(path: Path) -> bool:
    """Whether a path is standard output by another name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # nothing is there, or standard output is no file
        return False


def goes_out_at_once(path: Path) -> bool:
    """Whether `write_json` writes to what is there, a pipe, a device or standard output, and replaces no file."""
    return is_stdout(path) or (path.exists() and not path.is_file())


def check_output(path: Path, *inputs: Path) -> None:
    """Raises OSError unless `write_json` can write to this path, FileError where that would overwrite an input.

    inputs: files and folders that are read; what lies in such a folder is not overwritten either.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            what = f"a symbolic link to {os.readlink(path)!r}, which is not there"
            raise FileNotFoundError(f"{path}: expected a file to write to, found {what}") from None
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: expected its folder to be there") from None
        _check_writable(path.parent, path)
        return
    except OSError as error:
        found_instead = "symbolic links that go round in a circle" if error.errno == errno.ELOOP else error.strerror
        raise OSError(f"{path}: expected a file to write to, found {found_instead}") from None
    if stat.S_ISDIR(found.st_mode):
        raise FileExistsError(f"{path}: expected a file to write to, found a folder")
    _check_writable(path, path)
    if goes_out_at_once(path):
        return
    target = Path(os.path.realpath(path))
    _check_writable(target.parent, path)
    for other in inputs:
        if other.exists() and (other.samefile(target) or other.resolve() in target.parents):
            raise FileError(f"{path}: expected a file of its own to write to, found what is read: {other}")


def _check_writable(wanted: Path, path: Path) -> None:
    if not os.access(wanted, os.W_OK):
        what = "it" if wanted == path else "to its folder"
        raise PermissionError(errno.EACCES, f"no permission to write {what}", str(path))


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document whole or not at all: a draft beside the file is synced, then renamed over it.

    A file that is there keeps its mode. What is no regular file, and standard output, is written to as it stands.
    OSErrors name `path`, whatever the file at fault.
    """
    write_text(path, json_text(document))


def json_text(document: Mapping[str, Any]) -> str:
    """A document as `write_json` writes it, in ASCII characters."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Records as JSON, one a line, in ASCII characters."""
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)


def write_text(path: Path, text: str) -> None:
    """Write a text of ASCII characters as `write_json` writes."""
    check_output(path)
    try:
        if goes_out_at_once(path):
            _write_through(path, text)
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        # The draft's name would tell the user nothing.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _write_through(path: Path, text: str) -> None:
    if is_stdout(path):  # opened again it would have a place of its own, and overwrite what was printed
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _replace(target: Path, text: str) -> None:
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    # Never open to more readers than the file it replaces.
    with draft(target, 0o666 if mode is None else 0o600) as path:
        with open(path, "wb") as file:
            file.write(text.encode("ascii"))
            file.flush()
            if mode is not None:
                os.chmod(path, mode)
            os.fsync(file.fileno())
        os.replace(path, target)


def first_place(path: Path, id: str) -> str:
    """Where a file has the first fact of this id ("line 3"), for a message about the second."""
    for batch in read_facts(path):
        if id in batch.ids:
            return batch.places[batch.ids.index(id)]
    raise KeyError(id)
