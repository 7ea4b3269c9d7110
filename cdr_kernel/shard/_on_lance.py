"""A partition in Lance datasets, under a folder or in an object store, which every shard opens for itself.

    home = LanceHome("s3://bucket/facts", cache="/var/cache/cdr", storage_options={"region": "eu-west-1"})
    with DurableStore.open("facts") as durable:
        partition(durable.facts, home, shards=8)
    store = open_on_ray(home)                                # or ShardedStore.open(home)

ADDRESS/shard-N.lance has a shard's facts, with the columns of a durable store's record. ADDRESS/shards.lance has one
row, the manifest as JSON: it names the version of every shard's dataset, so a save is seen whole or not at all. Whoever
opens a shard reads that version once into its cache, in the folder format of ``FactStore``, and maps it from then on.
Needs the extra: pip install ".[store]" in a checkout.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdr_kernel.durable._copies import of_view
from cdr_kernel.durable._dataset import Record, lance_module, said_plainly, schema_of
from cdr_kernel.durable._rows import check_text, from_rows, to_rows
from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.shard._partition import CHUNK, KIND, ShardDamaged, Write, check_manifest, empty_store, save_part
from cdr_kernel.store import FactStore
from cdr_kernel.store._atomic_folder import identity_of, turn
from cdr_kernel.store._format import digest_of
from cdr_kernel.text._ngram_guard import HashKey, Tokenizer
from cdr_kernel.validation._warn import warn

FORMAT = "cdr-lance-partition"
FORMAT_VERSION = 1
INDEX = "shards"
_WRITTEN = "cdr:written"


@dataclass(frozen=True)
class LanceHome:
    """Where a partition's datasets are, and how they are reached.

    address: a folder, or what Lance takes as one: file://, s3://, gs://, az:// ... cache: a folder of the machine that
    opens a shard, on every node; it may be emptied at any time. storage_options: for Lance, keys and region for
    instance; they travel to the actors as they are.
    """

    address: str
    cache: str
    storage_options: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("address", "cache"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike):
                raise TypeError(f"{name}: expected a path or an address, got {type(value).__name__}")
            text = os.fspath(value)
            remote = name == "address" and "://" in text
            object.__setattr__(self, name, text.rstrip("/") if remote else os.path.abspath(text))

    def manifest(self) -> dict[str, Any]:
        """What the partition says of itself. Raises FileNotFoundError where there is none, ValueError where it is no
        partition or one of a later version."""
        where = self._of(INDEX)
        dataset = self._opened(INDEX)
        with said_plainly(where):
            table = dataset.to_table()
        try:
            written = table["manifest"][0].as_py()
            try:
                found = json.loads(written)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not readable JSON ({error})") from None
            if found["format"] != FORMAT:
                raise KeyError("format")
            if found["format_version"] != FORMAT_VERSION:
                raise ValueError(f"{where}: format version {found['format_version']!r}, this version reads 1")
            if found["identity"] != identity_of(found):
                raise DamagedFileError(f"{where}: not as it was written (its identity is {found['identity']!r})", where)
            for name, kind in {**KIND.fields, "datasets": dict, "attributes": dict}.items():
                if type(found[name]) is not kind:
                    raise KeyError(name)
            for name in found["shards"]:
                version, *digests = found["datasets"][name]
                if type(version) is not int or [type(each) for each in digests] != [str, str]:
                    raise KeyError(f"datasets[{name!r}]")
        except (LookupError, TypeError) as error:
            raise ValueError(f"{where}: expected the manifest of a partition, found none of {error}") from None
        return check_manifest(found, where)

    def save(self, fields: Mapping[str, Any], write: Callable[[Mapping[str, Write]], Mapping[str, Any]]) -> None:
        """Replace the partition: new versions of the shards' datasets, then the manifest that names them.

        Raises ValueError where there is something else at the address.
        """
        import pyarrow as pa

        lance = lance_module()
        with contextlib.suppress(FileNotFoundError):
            self.manifest()
        written = write({name: _Dataset(self._of(name), self.storage_options) for name in fields["shards"]})
        manifest = {**fields, "datasets": dict(written), "format": FORMAT, "format_version": FORMAT_VERSION}
        manifest["identity"] = identity_of(manifest)
        row = pa.table({"manifest": [json.dumps(manifest, sort_keys=True)]})
        with said_plainly(self._of(INDEX)):
            lance.write_dataset(row, self._of(INDEX), mode="overwrite", storage_options=self.storage_options)

    def open(
        self,
        name: str,
        *,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        verify: bool = True,
    ) -> tuple[FactStore, int]:
        """(the facts of a shard, its version), mapped from the cache, which is filled where it lacks them or where,
        with verify, a block of it is not as it was written.

        Raises ValueError for another tokenizer or key than the facts were written with, ShardDamaged where the dataset
        is not the one that the partition names, FileNotFoundError where it is gone.
        """
        manifest = self.manifest()
        hasher: dict[str, Any] = {"tokenizer": tokenizer, "hash_key": hash_key}
        if name not in manifest["shards"]:
            return empty_store(manifest, **hasher), 0
        version, written, digest = manifest["datasets"][name]
        address = hashlib.blake2b(self._of(name).encode(), digest_size=8).hexdigest()
        place = Path(self.cache) / f"{name}-{address}"
        folder = place / f"{version}-{written}"
        facts = _cached(folder, verify, hasher)
        if facts is None:
            with turn(place):  # replicas on one node read it once
                facts = _cached(folder, verify, hasher)
                if facts is None:
                    _clear(place)
                    read = self._read(name, version, written, empty_store(manifest, **hasher))
                    if digest_of(read.view()) != digest:
                        what = f"version {version} of {self._of(name)} is not as it was written"
                        raise ShardDamaged(f"{name} is damaged: {what}", self._of(name))
                    save_part(read, folder)
                    facts = FactStore.load(folder, verify=verify, **hasher)
        return facts, manifest["shards"][name]

    def _read(self, name: str, version: int, written: str, facts: FactStore) -> FactStore:
        """The facts of a version of a shard's dataset, put into an empty store."""
        record = Record(Path(self._of(name)), self._opened(name, version))
        if (record.schema.metadata or {}).get(_WRITTEN.encode()) != written.encode():
            raise ShardDamaged(f"{name}: version {version} of {self._of(name)} is not what the partition was made of")
        for what, own in (("tokenizer", facts.tokenizer_name), ("hash_key", facts.key_fingerprint)):
            if record.about[what] != own:
                raise ValueError(
                    f"{self._of(name)}: the texts were hashed with {what} {record.about[what]!r}, got {own!r}: "
                    f"pass {what}="
                )
        for batch in record.batches():
            facts.apply(*from_rows(batch, facts, record))
        return facts

    def _of(self, name: str) -> str:
        return f"{self.address}/{name}.lance"

    def _opened(self, name: str, version: int | None = None) -> Any:
        lance = lance_module()
        where = self._of(name)
        try:
            with said_plainly(where):
                return lance.dataset(where, version=version, storage_options=self.storage_options)
        except (OSError, ValueError) as error:
            if "not found" in str(error).lower() or isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f"{where}: no partition here ({error})") from None
            raise


@dataclass(frozen=True)
class _Dataset:
    """Writes a shard's facts as the newest version of its dataset; gives that version, what names this write, and the
    digest of the facts."""

    address: str
    storage_options: Mapping[str, str] | None

    def __call__(self, part: FactStore) -> list[Any]:
        import pyarrow as pa

        lance = lance_module()
        view, written = part.whole(), secrets.token_hex(16)
        about = {
            "dim": part.dim,
            "dtype": part.dtype.name,
            "embedding_model": part.embedding_model,
            "tokenizer": part.tokenizer_name,
            "hash_key": part.key_fingerprint,
            "unicode": unicodedata.unidata_version,
            "numbering": json.dumps(part.numbering.listed()),
        }
        plain = schema_of(about, view.attribute_types)
        schema = plain.with_metadata({**plain.metadata, _WRITTEN: written})
        rows = np.flatnonzero(view.alive)

        def batches() -> Iterator[Any]:
            for start in range(0, len(rows), CHUNK):
                some = rows[start : start + CHUNK]
                held = [None] * len(some)
                found = of_view(view, some, part)
                check_text(found)
                table = to_rows(schema, found, view.sequence[some], held)
                yield from table.to_batches()

        reader = pa.RecordBatchReader.from_batches(schema, batches())
        with said_plainly(self.address):
            dataset = lance.write_dataset(reader, self.address, mode="overwrite", storage_options=self.storage_options)
        return [int(dataset.version), written, digest_of(view)]


def _cached(folder: Path, verify: bool, hasher: dict[str, Any]) -> FactStore | None:
    """What is in the cache, if it can be used."""
    try:
        return FactStore.load(folder, verify=verify, **hasher)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn(f"{error}; the shard is read from its dataset again")
        return None


def _clear(place: Path) -> None:
    """Take away what else is in the cache of a shard: older versions, and what is damaged."""
    for path in place.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
