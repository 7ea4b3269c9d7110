"""Facts in shards, ranked as if in one place."""

from __future__ import annotations

from cdr_kernel.shard._on_lance import LanceHome
from cdr_kernel.shard._on_ray import open_on_ray
from cdr_kernel.shard._open_store import open_store
from cdr_kernel.shard._partition import partition
from cdr_kernel.shard._sharded_retriever import ShardedRetriever
from cdr_kernel.shard._sharded_store import ShardedStore, ShardsMissing

__all__ = ["LanceHome", "ShardedRetriever", "ShardedStore", "ShardsMissing", "open_on_ray", "open_store", "partition"]
