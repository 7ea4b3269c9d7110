"""Open a store of any kind by its path."""

from __future__ import annotations

import os
from pathlib import Path

from cdr_kernel.durable import DurableStore
from cdr_kernel.durable._layout import RECORD
from cdr_kernel.shard._partition import KIND
from cdr_kernel.shard._sharded_store import ShardedStore
from cdr_kernel.store import FactStore
from cdr_kernel.text import Tokenizer
from cdr_kernel.text._token_hashes import HashKey


def open_store(
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    hash_key: HashKey | None = None,
) -> FactStore | DurableStore | ShardedStore:
    """Open the store in a folder, whatever its kind.

    Args:
        path: The folder.
        tokenizer: The tokenizer that the store was made with. None is the default one.
        hash_key: The hash key that the store was made with. None is the default one.

    Returns:
        A `DurableStore` for what `DurableStore.create` or `cdr index --durable` made, a `ShardedStore` for what
        `partition` made, a `FactStore` for what `FactStore.save` or `cdr index` made.

    Raises:
        FileNotFoundError: If there is no store in the folder.
        ValueError: If the store is damaged, or was made with another tokenizer or hash key.
        ImportError: For a durable store without the extra `store`.
    """
    folder = Path(path)
    if (folder / RECORD).is_dir():
        return DurableStore.open(folder, tokenizer=tokenizer, hash_key=hash_key)
    if (folder / KIND.file).is_file():
        return ShardedStore.open(folder, tokenizer=tokenizer, hash_key=hash_key)
    return FactStore.load(folder, tokenizer=tokenizer, hash_key=hash_key)
