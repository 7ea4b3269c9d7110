"""Shards in Lance datasets: the same answer as from the durable store that they were made of."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lance", reason="needs the extra store")

from cdr_kernel import FactStore, Retriever, cdr_rank
from cdr_kernel.durable import DurableStore
from cdr_kernel.shard import LanceHome, ShardedRetriever, partition
from cdr_kernel.shard._partition import ShardDamaged, manifest_of, open_shard
from cdr_kernel.shard._sharded_retriever import ShardedStore
from cdr_kernel.store import _expiry
from tests.shard.test_sharded import DIM, MODEL, calibrated, facts, flip, items_of, same, spec, written


@pytest.fixture(scope="module")
def durable(tmp_path_factory):
    r = np.random.default_rng(11)
    folder = tmp_path_factory.mktemp("durable") / "facts"
    with DurableStore.create(folder, DIM, embedding_model=MODEL) as store:
        store.add(**facts(r, 90))
        store.remove(["f4", "f40"])
        store.quarantine(["f7"], "wrong")
    with DurableStore.open(folder) as store:
        yield store


@pytest.fixture(params=["path", "file"])
def home(request, tmp_path):
    address = str(tmp_path / "lance" / "p")
    return LanceHome(address if request.param == "path" else f"file://{address}/", cache=str(tmp_path / "cache"))


def plain(home):
    """The same without the scheme."""
    return home.address.removeprefix("file://")


def test_windows_are_those_of_the_durable_store(durable, home):
    r = np.random.default_rng(3)
    partition(durable.facts, home, shards=3)
    items, query = items_of(r), r.standard_normal(DIM) + 0.5
    whole = FactStore(DIM, embedding_model=MODEL)
    whole.adopt(durable.facts)
    with ShardedStore.open(home) as sharded:
        assert sharded.ids == durable.facts.ids
        assert "f7" not in sharded
        assert sharded.attribute_types == durable.facts.view().attribute_types
        retriever, sessions = ShardedRetriever(sharded), [spec(items), calibrated(items, source_weight=0.4)]
        for i in range(3):
            for session in sessions:
                for where in (None, {"language": ["en", None], "year": None}):
                    truth = cdr_rank(query, Retriever(whole), session, k=9, where=where)
                    ranking = cdr_rank(query, retriever, session, k=9, where=where)
                    same(ranking, replace(truth, store_version=sharded.version))
                written(session, truth)
            more = facts(np.random.default_rng(i), 4, 500 + 4 * i)
            for each in (whole, sharded):
                each.add(**more)
                each.remove([f"f{i}"])
        sharded.save()
        assert sharded.groups[0].base == sharded.groups[0].version
        sharded.add_shards(1)
        for session in sessions:
            truth = cdr_rank(query, Retriever(whole), session)
            same(cdr_rank(query, retriever, session), replace(truth, store_version=sharded.version))
    with ShardedStore.open(home) as again:
        assert again.ids == whole.ids
        assert len(again.shards) == 4
        assert again.get(again.ids) == whole.get(whole.ids)
        again.add(["new"], ["x"], [query])
        assert again.get(["new"])[0].sequence == whole.next_sequence


def test_a_shard_is_read_once_and_mapped_from_the_cache(durable, home, tmp_path):
    partition(durable.facts, home, shards=2)
    first, _ = open_shard(home, "shard-1")
    assert first.path is not None
    assert first.path.is_relative_to(tmp_path / "cache")
    shutil.move(f"{plain(home)}/shard-1.lance", tmp_path / "away")
    assert open_shard(home, "shard-1")[0].ids == first.ids
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match="shard-1"):
        open_shard(home, "shard-1")
    shutil.move(tmp_path / "away", f"{plain(home)}/shard-1.lance")
    assert open_shard(home, "shard-1")[0].ids == first.ids
    partition(durable.facts, home, shards=2, by="id")  # in place of it
    assert open_shard(home, "shard-1")[0].ids != first.ids
    kept = [path for path in (tmp_path / "cache").glob("shard-1-*/*") if path.is_dir()]
    assert len(kept) == 1


def test_a_flipped_bit_in_the_cache_is_put_right(durable, home, tmp_path):
    partition(durable.facts, home, shards=2)
    first, _ = open_shard(home, "shard-0")
    rows = first.view().embeddings.tobytes()
    for name in ("data-*/embeddings.npy", "manifest.json", "data-*/ids.utf8"):
        (path,) = first.path.glob(name)
        flip(path)
        with pytest.warns(UserWarning, match="the shard is read from its dataset again"):
            again, _ = open_shard(home, "shard-0")
        assert again.view().embeddings.tobytes() == rows
        assert again.get(again.ids) == first.get(first.ids)
        assert open_shard(home, "shard-0")[0].ids == first.ids


def test_a_flipped_bit_in_a_dataset_gives_no_other_facts(durable, home):
    partition(durable.facts, home, shards=2)
    first, _ = open_shard(home, "shard-0")
    truth = (first.get(first.ids), first.view().embeddings.tobytes())
    (file,) = Path(f"{plain(home)}/shard-0.lance/data").iterdir()
    named = 0
    for at in np.random.default_rng(0).integers(0, file.stat().st_size, 25).tolist():
        shutil.rmtree(home.cache)
        flip(file, at)
        said = None
        try:
            found, _ = open_shard(home, "shard-0")
        except (ValueError, OSError) as error:
            said = str(error)
        if said is None:
            assert (found.get(found.ids), found.view().embeddings.tobytes()) == truth
        else:
            assert "shard-0" in said
            named += 1
        flip(file, at)
    assert named >= 15
    index = Path(f"{plain(home)}/shards.lance/data")
    (file,) = index.iterdir()
    said = manifest_of(home)
    for at in range(0, file.stat().st_size, 5):
        flip(file, at)
        with contextlib.suppress(ValueError, OSError):
            assert manifest_of(home) == said
        flip(file, at)


def test_a_save_that_does_not_end_leaves_the_partition_as_it_was(durable, home):
    partition(durable.facts, home, shards=2)

    class Full(Exception):
        pass

    def write(to):
        part, _ = open_shard(home, "shard-0")
        to["shard-0"](part.empty())
        raise Full

    before = manifest_of(home)
    with pytest.raises(Full):
        home.save(
            {n: before[n] for n in before if n not in ("datasets", "format", "format_version", "identity")}, write
        )
    assert manifest_of(home) == before
    with ShardedStore.open(home) as sharded:
        assert sharded.ids == durable.facts.ids


def test_what_is_no_partition_is_refused(durable, home, tmp_path):
    import lance
    import pyarrow as pa

    with pytest.raises(FileNotFoundError, match="no partition here"):
        ShardedStore.open(home)
    index = f"{home.address}/shards.lance"
    for rows in ({"a": [1]}, {"manifest": ["{}"]}, {"manifest": ['{"format": "cdr-lance-partition"}']}):
        lance.write_dataset(pa.table(rows), index, mode="overwrite")
        with pytest.raises(ValueError, match="expected the manifest of a partition"):
            ShardedStore.open(home)
        with pytest.raises(ValueError, match="expected the manifest of a partition"):
            partition(durable.facts, home, shards=2)
    lance.write_dataset(
        pa.table({"manifest": ['{"format": "cdr-lance-partition", "format_version": 9}']}), index, mode="overwrite"
    )
    with pytest.raises(ValueError, match="format version 9, this version reads 1"):
        ShardedStore.open(home)
    lance.write_dataset(pa.table({"manifest": ['{"format": "cdr-lance-partition"']}), index, mode="overwrite")
    with pytest.raises(ValueError, match=r"shards\.lance: not readable JSON"):
        ShardedStore.open(home)
    for path in Path(plain(home), "shards.lance", "data").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises((ValueError, OSError), match=r"shards\.lance: "):
        ShardedStore.open(home)
    shutil.rmtree(f"{plain(home)}/shards.lance")
    partition(durable.facts, home, shards=2)
    with pytest.raises(ValueError, match="pass hash_key="):
        ShardedStore.open(home, hash_key=b"other")
    other = replace(home, address=str(tmp_path / "other"))
    partition(durable.facts, other, shards=2)
    shutil.rmtree(f"{plain(home)}/shard-1.lance")
    shutil.move(tmp_path / "other" / "shard-1.lance", f"{plain(home)}/shard-1.lance")
    with pytest.raises(ShardDamaged, match=r"shard-1: version 1 of .* is not what the partition was made of"):
        ShardedStore.open(home)


def test_addresses_are_checked():
    with pytest.raises(TypeError, match="address"):
        LanceHome(3, cache="x")
    with pytest.raises(TypeError, match="cache"):
        LanceHome("s3://bucket/facts", cache=None)
    assert LanceHome("s3://bucket/facts/", cache="/c").address == "s3://bucket/facts"


def test_what_expires_does_so_in_shards(tmp_path, home, monkeypatch):
    r, start = np.random.default_rng(5), _expiry.now()
    with DurableStore.create(tmp_path / "facts", DIM, embedding_model=MODEL) as store:
        store.add(**facts(r, 40), expires_at=[None, start / 1e6 + 3600] * 20)
        partition(store.facts, home, shards=2)
        ids = store.facts.ids
        with DurableStore.from_facts(store.facts, tmp_path / "copy") as copy:
            assert copy.expire(start / 1e6 + 3601, grace=0) == 20
    with ShardedStore.open(home) as sharded:
        assert sharded.ids == ids
        sharded.save()
    shutil.rmtree(home.cache)
    monkeypatch.setattr(_expiry, "now", lambda: start + 3601 * 10**6)
    with ShardedStore.open(home) as sharded:
        assert sharded.ids == ids[::2]
        sharded.save()  # under a clock that is ahead
    monkeypatch.setattr(_expiry, "now", lambda: start)
    with ShardedStore.open(home) as sharded:
        assert sharded.ids == ids
    with DurableStore.open(tmp_path / "facts") as store:
        store.facts.look(start + 3601 * 10**6)
        assert store.facts.ids == ids[::2]
        partition(store.facts, home, shards=2)
    with ShardedStore.open(home) as sharded:
        assert sharded.ids == ids
