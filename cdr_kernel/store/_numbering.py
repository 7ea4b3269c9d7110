"""Which store gave which sequence numbers, so that the numbers of one store are never read as those of another.

A store has an id for the numbers that it gives. A copy of it, such as a folder that was loaded, has the same numbers up
to there. The numbers that the copy gives from then on are its own and have another id.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MOST_BRANCHES = 256
"""Ids that a store remembers, the newest ones."""

_ID = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class Numbering:
    """The ids of the numbers of one store.

    branches: (first number, id) of each id, ascending. An id is of the numbers from its first one up to the next id's.
    """

    branches: tuple[tuple[int, str], ...]

    @classmethod
    def new(cls) -> Numbering:
        """Of a store that has given no number yet."""
        return cls(((0, secrets.token_hex(8)),))

    def branched(self, first: int) -> Numbering:
        """Of a copy that gives the numbers from `first` on."""
        older = tuple(branch for branch in self.branches if branch[0] < first)
        return Numbering((*older, (first, secrets.token_hex(8)))[-MOST_BRANCHES:])

    def origin(self, number: int) -> str | None:
        """The id of a number; None for one whose id is not remembered any more."""
        place = bisect_right(self.branches, number, key=lambda branch: branch[0])
        return self.branches[place - 1][1] if place else None

    def listed(self) -> list[list[Any]]:
        """What a manifest says of it."""
        return [[first, id] for first, id in self.branches]

    @classmethod
    def read(cls, listed: object, where: str) -> Numbering:
        """What `listed` gave. ValueError naming `where` for anything else."""
        entries = listed if isinstance(listed, list) else []
        right = 1 <= len(entries) <= MOST_BRANCHES and all(
            isinstance(entry, list)
            and len(entry) == 2
            and type(entry[0]) is int
            and 0 <= entry[0] < 2**63
            and isinstance(entry[1], str)
            and _ID.fullmatch(entry[1])
            for entry in entries
        )
        if not right or any(one[0] >= two[0] for one, two in pairwise(entries)):
            what = "numbering to list [first number, id], ascending"
            raise ValueError(f"{where}: expected {what}, found {listed!r:.200}")
        return cls(tuple((first, id) for first, id in entries))
