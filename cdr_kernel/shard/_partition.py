"""Assign facts to shards, and write a store as shards to disk.

    partition(store, "facts.shards", shards=4)               # or the path of a saved store
    open_shard("facts.shards", "shard-2")                    # (FactStore, version of the shard)

A key goes to the shard with the highest hash (rendezvous hashing). If a shard is added, only the facts that go to it
move. Facts keep the sequence numbers of the whole store, so that ties have the same order with any number of shards.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.retrieve import Retriever
from cdr_kernel.retrieve._retriever import WORTH_CODES
from cdr_kernel.store import FactStore
from cdr_kernel.store._atomic_folder import LOCK, Kind
from cdr_kernel.store._attributes import KINDS
from cdr_kernel.store._expiry import EXPIRES, expiries_of, expiring
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.store._format import KIND as STORE
from cdr_kernel.store._numbering import Numbering
from cdr_kernel.text._ngram_guard import HashKey, Tokenizer
from cdr_kernel.validation._arrays import Int64

BY = ("source", "id")
KIND = Kind(
    "partition",
    file="partition.json",
    data="shards-",
    format="cdr-partition",
    version=2,
    fields={
        "by": str,
        "dim": int,
        "dtype": str,
        "embedding_model": str,
        "facts": int,
        "next_sequence": int,
        "numbering": list,
        "store_version": int,
        "shards": dict,
        "attributes": dict,
    },
)
CHUNK = 65536
"""The number of facts that move at a time."""


class ShardDamaged(DamagedFileError):
    """The files of a shard differ from those that were written."""


def shard_names(count: int, start: int = 0) -> list[str]:
    """Return the names of `count` shards, from number `start` on."""
    return [f"shard-{i}" for i in range(start, start + count)]


def owners(keys: Sequence[str], names: Sequence[str]) -> Int64:
    """Return the position of each key's shard in `names`, int64 [len(keys)]."""
    hashes = np.array([_hash(key) for key in keys], np.uint64)
    owner = np.zeros(len(keys), np.int64)
    most = np.zeros(len(keys), np.uint64)
    for i, name in enumerate(names):
        mixed = _mixed(hashes ^ np.uint64(_hash(name)))
        better = mixed > most if i else np.ones(len(keys), np.bool_)
        owner[better], most[better] = i, mixed[better]
    return owner


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _mixed(values: Any) -> Any:
    """The finaliser of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keys_of(ids: Sequence[str], sources: Sequence[str | None], by: str) -> list[str]:
    """Return the key that decides each fact's shard: with by="source" its source if it has one, else its id."""
    if by == "id":
        return ["id:" + id for id in ids]
    return ["id:" + id if s is None else "source:" + s for id, s in zip(ids, sources, strict=True)]


def facts_in(view: StoreView, rows: Int64) -> dict[str, Any]:
    """Return the facts in these rows in the form that `put` takes.

    The form is the keywords of ``FactStore.add`` with three columns more: the sequence numbers, the sequence numbers
    at the first addition, and the expiry times.
    """
    facts = view.facts(rows.tolist())
    names = sorted({name for fact in facts for name in fact.attributes})
    return {
        "ids": [fact.id for fact in facts],
        "texts": [fact.text for fact in facts],
        "embeddings": view.take(rows),
        "importance": view.importance[rows],
        "source": [fact.source for fact in facts],
        "position": [fact.position for fact in facts],
        "attributes": {name: [fact.attributes.get(name) for fact in facts] for name in names},
        "sequence": view.sequence[rows],
        "first_sequence": view.first_sequence[rows],
        "expires_at": expiries_of(view, rows),
    }


def put(store: FactStore, facts: Mapping[str, Any]) -> None:
    """Add facts in the form of `facts_in`. It raises the exceptions of ``FactStore.add``."""
    keywords = {name: value for name, value in facts.items() if name not in ("first_sequence", "expires_at")}
    found = expiring(store.check(**keywords), facts.get("expires_at", ()))
    store._put(found._replace(first_sequence=facts.get("first_sequence")), replace=False)


def placed(view: StoreView, names: Sequence[str], by: str) -> Iterator[tuple[Int64, Int64]]:
    """Yield all facts in chunks: (rows, positions of their shards in `names`)."""
    alive = np.flatnonzero(view.alive)
    for start in range(0, len(alive), CHUNK):
        rows = alive[start : start + CHUNK]
        ids = [view.id_of(row) for row in rows.tolist()]
        sources = view.sources(rows.tolist()) if by == "source" else [None] * len(ids)
        yield rows, owners(keys_of(ids, sources, by), names)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge facts of several stores, each in the form of `facts_in`, in the order of their sequence numbers."""
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([part["sequence"] for part in parts]))

    def column(each: Sequence[Sequence[Any]]) -> list[Any]:
        values = [value for some in each for value in some]
        return [values[i] for i in order.tolist()]

    out: dict[str, Any] = {}
    for name, first in parts[0].items():
        if isinstance(first, np.ndarray):
            out[name] = np.concatenate([part[name] for part in parts])[order]
        elif name != "attributes":
            out[name] = column([part[name] for part in parts])
    further = sorted({name for part in parts for name in part["attributes"]})
    out["attributes"] = {
        name: column([part["attributes"].get(name, [None] * len(part["ids"])) for part in parts]) for name in further
    }
    return out


def parts_of(
    views: Sequence[StoreView], like: FactStore, names: Sequence[str], by: str
) -> Iterator[tuple[str, FactStore]]:
    """Yield (shard name, store of its facts) one by one. `like` is the store whose kind the new stores have."""
    owner = [np.full(view.rows, -1, np.int16) for view in views]
    for view, each in zip(views, owner, strict=True):
        for rows, positions in placed(view, names, by):
            each[rows] = positions
    for i, name in enumerate(names):
        part, found = like.empty(), [np.flatnonzero(each == i) for each in owner]
        numbers = np.concatenate([view.sequence[rows] for view, rows in zip(views, found, strict=True)])
        home = np.repeat(np.arange(len(views)), [len(rows) for rows in found])
        order, every = np.argsort(numbers), np.concatenate(found)
        for start in range(0, len(order), CHUNK):
            some = order[start : start + CHUNK]
            here = [(j, every[some[home[some] == j]]) for j in np.unique(home[some]).tolist()]
            put(part, joined([facts_in(views[j], rows) for j, rows in here]))
        yield name, part


def check_by(by: str) -> str:
    """Return `by` if it is one of BY, or raise ValueError."""
    if by not in BY:
        raise ValueError(f"by: expected one of {', '.join(BY)}, got {by!r}")
    return by


def check_shards(shards: int) -> int:
    """Return the number of shards as an int if it is 1 to 4,096, or raise."""
    if isinstance(shards, bool) or not isinstance(shards, int | np.integer):
        raise TypeError(f"shards: expected an integer, got {type(shards).__name__}")
    if not 1 <= shards <= 4096:
        raise ValueError(f"shards: expected 1 to 4096, got {shards}")
    return int(shards)


def partition(
    store: FactStore | str | os.PathLike[str] | Home,
    home: str | os.PathLike[str] | Home,
    *,
    shards: int,
    by: str = "source",
    tokenizer: Tokenizer | None = None,
    hash_key: HashKey | None = None,
) -> None:
    """Write a store as shards into a folder, or into a `LanceHome`.

    What is in `home` is replaced as `FactStore.save` does it: a reader finds the old shards or the new ones. One new
    shard at a time is in memory. Expired facts are withheld in shards too; call `ShardedStore.expire` to delete them.

    Args:
        store: A store, the folder of a saved one, ``facts`` of a durable one, or another partition (for fewer shards,
            or another `by`).
        home: Where the shards go.
        shards: How many.
        by: "source" keeps all facts of one source in one shard, which `source_weight` of the calibrated mode needs.
            "id" spreads facts evenly.
        tokenizer: The tokenizer of a saved store, as in `FactStore.load`.
        hash_key: The hash key of a saved store, as in `FactStore.load`.

    Raises:
        ValueError: For a bad argument, and what `FactStore.load` raises.
        TypeError: For an argument of a wrong type.
    """
    names, by = shard_names(check_shards(shards)), check_by(by)
    hasher: dict[str, Any] = {"tokenizer": tokenizer, "hash_key": hash_key}
    if isinstance(store, str | os.PathLike) and not (Path(store) / KIND.file).exists():
        store = FactStore.load(store, **hasher)
    if isinstance(store, FactStore):
        like, views = store, [store.whole()]
        kinds, version, following = views[0].attribute_types, 0, store.next_sequence
        numbering = store.numbering
    elif not isinstance(store, str | os.PathLike | Home):
        raise TypeError(f"store: expected a FactStore, the path of a saved one or a Home, got {type(store).__name__}")
    else:
        source = home_of(store)
        manifest = source.manifest()
        like, version, following = empty_store(manifest, **hasher), manifest["store_version"], manifest["next_sequence"]
        numbering = numbering_in(manifest)
        views = [source.open(name, **hasher)[0].view() for name in manifest["shards"]]
        kinds = kinds_in(manifest)
    fields = manifest_fields(
        like,
        dict.fromkeys(names, 0),
        by,
        facts=sum(map(len, views)),
        version=version,
        kinds=kinds,
        next_sequence=following,
        numbering=numbering,
        expires=any(EXPIRES in view._storage.attributes for view in views),
    )
    home_of(home).save(fields, lambda to: {name: to[name](part) for name, part in parts_of(views, like, names, by)})


def save_part(part: FactStore, path: Path) -> None:
    """Write a shard to a folder, with quantised codes if it has enough facts to be worth them."""
    part.save(path)
    if len(part) >= WORTH_CODES:
        Retriever(FactStore.load(path, tokenizer=part.tokenizer, hash_key=part.hash_key)).save()


def manifest_fields(
    like: FactStore,
    versions: Mapping[str, int],
    by: str,
    *,
    facts: int,
    version: int,
    kinds: Mapping[str, type],
    next_sequence: int,
    numbering: Numbering,
    expires: bool,
) -> dict[str, Any]:
    """Return the fields of a partition's manifest.

    Args:
        like: A store of the partition's kind.
        versions: The version of each shard, by name.
        by: "source" or "id", as in `partition`.
        facts: The number of facts.
        version: The version of the whole.
        kinds: The types of the attributes.
        next_sequence: The sequence number of the next fact.
        numbering: The store that the sequence numbers belong to.
        expires: Whether any fact may expire.
    """
    return {
        "by": by,
        "dim": like.dim,
        "dtype": like.dtype.name,
        "embedding_model": like.embedding_model,
        "facts": facts,
        "next_sequence": next_sequence,
        "numbering": numbering.listed(),
        "store_version": version,
        "shards": dict(versions),
        "attributes": {name: kind.__name__ for name, kind in kinds.items()},
        "expires": expires,
    }


def check_manifest(found: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a manifest if it is valid, or raise. `where` names the file in the message."""
    check_by(found["by"])
    names = found["shards"]
    if not names or not all(type(version) is int and version >= 0 for version in names.values()):
        raise DamagedFileError(f"{where}: expected a version for every shard, found {names!r}", where)
    return found


def kinds_in(manifest: Mapping[str, Any]) -> dict[str, type]:
    """Return the types of the attributes by name."""
    listed = manifest["attributes"]
    try:
        return {name: KINDS[kind] for name, kind in listed.items()}
    except (KeyError, TypeError):
        raise DamagedFileError(f"{KIND.file}: expected the types of attributes, found {listed!r}") from None


def numbering_in(manifest: Mapping[str, Any]) -> Numbering:
    """Return the numbering of a manifest, which tells the store that its sequence numbers belong to."""
    return Numbering.read(manifest["numbering"], KIND.file)


def empty_store(
    manifest: Mapping[str, Any], *, tokenizer: Tokenizer | None = None, hash_key: HashKey | None = None
) -> FactStore:
    """Return an empty store of the partition's kind."""
    return FactStore(
        manifest["dim"],
        embedding_model=manifest["embedding_model"],
        dtype=manifest["dtype"],
        tokenizer=tokenizer,
        hash_key=hash_key,
    )


Write: TypeAlias = "Callable[[FactStore], Any]"
"""A function that writes the facts of one shard, in any process. The home receives its return value."""


@runtime_checkable
class Home(Protocol):
    """The place of a partition: a `Folder` or a `LanceHome`. Ray actors receive a copy."""

    def manifest(self) -> dict[str, Any]:
        """Return the manifest. FileNotFoundError: there is none. ValueError: it is damaged."""

    def save(self, fields: Mapping[str, Any], write: Callable[[Mapping[str, Write]], Mapping[str, Any]]) -> None:
        """Replace the partition. `write` takes a function per shard name and returns their results by name."""

    def open(
        self,
        name: str,
        *,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        verify: bool = True,
    ) -> tuple[FactStore, int]:
        """See `open_shard`."""


@dataclass(frozen=True)
class Folder:
    """A partition in a folder. Every process must see the folder under the same path."""

    path: str

    def manifest(self) -> dict[str, Any]:
        """See `Home`."""
        where = str(Path(self.path) / KIND.file)
        found = check_manifest(KIND.manifest(Path(self.path)), where)
        stores = found.get("stores")
        if not isinstance(stores, dict) or stores.keys() != found["shards"].keys():
            raise DamagedFileError(f"{where}: expected the store of every shard, found {stores!r:.80}", where)
        return found

    def save(self, fields: Mapping[str, Any], write: Callable[[Mapping[str, Write]], Mapping[str, Any]]) -> None:
        """Replace the partition. FileExistsError: the path is a file, or a folder with other files."""
        folder = Path(self.path)
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(f"{folder}: expected a folder, found a file")
        if folder.exists() and not (folder / KIND.file).exists():
            ours = (LOCK, KIND.data, KIND.file)  # a killed save may leave these
            if any(not path.name.startswith(ours) for path in folder.iterdir()):
                raise FileExistsError(f"{folder}: expected a partition or an empty folder, found other files")

        def written(data: Path) -> dict[str, Any]:
            write({name: partial(save_part, path=data / name) for name in fields["shards"]})
            return {**fields, "stores": {name: STORE.manifest(data / name)["identity"] for name in fields["shards"]}}

        KIND.save(folder, written)

    def open(
        self,
        name: str,
        *,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        verify: bool = True,
    ) -> tuple[FactStore, int]:
        """See `open_shard`."""
        self.manifest()

        def read(manifest: dict[str, Any]) -> tuple[FactStore, int]:
            if name not in manifest["shards"]:
                return empty_store(manifest, tokenizer=tokenizer, hash_key=hash_key), 0
            folder = Path(self.path) / manifest["data"] / name
            try:
                facts = FactStore.load(folder, tokenizer=tokenizer, hash_key=hash_key, verify=verify)
            except DamagedFileError as error:
                raise ShardDamaged(f"{name} is damaged: {error}", error.file, error.block) from error
            except FileNotFoundError as error:
                raise ShardDamaged(f"{name} is damaged: {error}", folder) from error
            if facts.view().identity != manifest["stores"][name]:
                raise ShardDamaged(f"{name} is damaged: {folder}: not the store that the partition was made of", folder)
            return facts, manifest["shards"][name]

        return KIND.load(Path(self.path), read)


def home_of(home: str | os.PathLike[str] | Home) -> Home:
    """Return a Home unchanged and a path as a `Folder`. Anything else raises TypeError."""
    if isinstance(home, str | os.PathLike):
        return Folder(os.path.abspath(home))
    if not isinstance(home, Home):
        raise TypeError(f"home: expected the path of a folder or a Home, got {type(home).__name__}")
    return home


def manifest_of(home: str | os.PathLike[str] | Home) -> dict[str, Any]:
    """Return the manifest. FileNotFoundError: there is none. ValueError: it is damaged."""
    return home_of(home).manifest()


def open_shard(
    home: str | os.PathLike[str] | Home,
    name: str,
    *,
    tokenizer: Tokenizer | None = None,
    hash_key: HashKey | None = None,
    verify: bool = True,
) -> tuple[FactStore, int]:
    """Open one shard of a partition.

    Args:
        home: The partition.
        name: The name of the shard.
        tokenizer: The tokenizer of the store, as in ``FactStore.load``.
        hash_key: The hash key of the store, as in ``FactStore.load``.
        verify: Whether to check all files first. Otherwise mapped data is checked before it is read.

    Returns:
        The facts of the shard and its version. An unknown name has no facts and version 0.

    Raises:
        ShardDamaged: If the files differ from those that were written. ``FactStore.load`` may raise others.
    """
    return home_of(home).open(name, tokenizer=tokenizer, hash_key=hash_key, verify=verify)
