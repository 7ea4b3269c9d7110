"""The error that names a damaged file."""

from __future__ import annotations

import pickle
from pathlib import Path

import cdr_kernel
from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.shard._partition import ShardDamaged


def test_it_names_the_file_and_the_block_in_another_process_too():
    for error in (
        DamagedFileError("/s/texts.utf8: block 3 is not as it was written", "/s/texts.utf8", 3),
        ShardDamaged("shard-1 is damaged: /s/texts.utf8: block 3 is not as it was written", "/s/texts.utf8", 3),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (str(again), again.file, again.block) == (str(error), Path("/s/texts.utf8"), 3)
    assert issubclass(ShardDamaged, DamagedFileError)
    assert issubclass(DamagedFileError, ValueError)
    assert cdr_kernel.DamagedFileError is DamagedFileError
