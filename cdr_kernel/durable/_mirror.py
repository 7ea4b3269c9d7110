"""The facts in memory that are equal to one version of a record, and the turn in which a writer takes both further."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, TypeVar

import numpy as np

from cdr_kernel.durable._dataset import LIVE, Record
from cdr_kernel.durable._rows import from_rows, quarantined
from cdr_kernel.store import FactStore, _expiry
from cdr_kernel.store._atomic_folder import turn
from cdr_kernel.store._fact_store import Checked
from cdr_kernel.text import Tokenizer
from cdr_kernel.text._token_hashes import HashKey
from cdr_kernel.validation._arrays import Int64

T = TypeVar("T")

_ATTEMPTS = 50
_LONG_WORK = 100_000  # facts from which reading them is logged
_log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Shows how far long work is: called with what is counted and how many there are; gives a function to advance."""


def no_progress(what: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    """A `Progress` that shows nothing."""
    return nullcontext(lambda count: None)


class Replica:
    """The facts of one version of a record, and what goes with them. Threads of one process take turns outside.

    record: the version that was last looked at. facts: the live ones of ``version``, which is the record's but while it
    catches up; those that are past their time are withheld in it. held: the quarantined ones, with sequence, reason and
    first sequence. next_sequence: what the next fact gets.
    """

    def __init__(
        self,
        record: Record,
        tokenizer: Tokenizer | None,
        hash_key: HashKey | None,
        progress: Progress = no_progress,
    ) -> None:
        about = record.about
        self.folder = record.path.parent
        self.record = record
        self._held: dict[str, tuple[int, str | None, int]] = {}
        self._next_sequence = 0
        self.facts = FactStore(
            record.dim,
            embedding_model=about["embedding_model"],
            dtype=about["dtype"],
            tokenizer=tokenizer,
            hash_key=hash_key,
        )
        self._progress = progress
        self.version = record.version
        self.alone = False  # whether the turn that is taken keeps other processes out

    @property
    def facts(self) -> FactStore:
        return self._facts

    @facts.setter
    def facts(self, facts: FactStore) -> None:
        self._facts = facts
        facts.held, facts.numbering = self._held, self.record.numbering
        facts._is_copy = True  # of the record: who takes the facts elsewhere gives numbers of its own
        facts.count_from(self._next_sequence)

    @property
    def held(self) -> dict[str, tuple[int, str | None, int]]:
        return self._held

    @held.setter
    def held(self, held: dict[str, tuple[int, str | None, int]]) -> None:
        self._held = self._facts.held = held  # whoever has the facts alone can say why one is not among them

    @property
    def next_sequence(self) -> int:
        return self._next_sequence

    @next_sequence.setter
    def next_sequence(self, following: int) -> None:
        self._next_sequence = following
        self._facts.count_from(following)

    def change(self, make: Callable[[], T]) -> T:
        """What `make` commits on top of the newest version, in a turn of its own; again where others were quicker."""
        from lance.commit import CommitConflictError

        for attempt in range(_ATTEMPTS):
            with contextlib.suppress(CommitConflictError), turn(self.folder) as self.alone:
                self.with_newest(self.record.newest(), self.catch_up)
                return make()
            time.sleep(random.uniform(0.0, 0.01 * 2 ** min(attempt, 6)))
        raise OSError(f"{self.folder}: expected a turn to write, others were quicker {_ATTEMPTS} times")

    def follow(
        self,
        record: Record,
        found: Checked | None = None,
        sequence: Int64 | None = None,
        removed: Iterable[int] = (),
        *,
        held: dict[str, tuple[int, str | None, int]] | None = None,
        next_sequence: int | None = None,
    ) -> None:
        """Be equal to a later version of the record, which differs by these facts.

        found, sequence, removed: as for `FactStore.apply`. held, next_sequence: as they are now, None where they stay.
        """
        if held is not None:
            self.held = self.held | held  # before its facts go, so that none is nowhere for a moment
        self.facts.apply(found, sequence, removed)
        self.held = self.held if held is None else held
        self.next_sequence = self.next_sequence if next_sequence is None else next_sequence
        self.record, self.version = record, record.version

    def catch_up(self, record: Record) -> None:
        """Take over what was committed after the version that the facts are equal to.

        No number that was taken out ever comes back, and what is put in has a higher one than all before.
        """
        if record.version == self.version:
            self.record = record
            return
        view = self.facts.view()
        following = record.next_sequence()
        first = max(self.next_sequence, int(view.sequence[-1]) + 1 if view.rows else 0)
        live = record.read(["sequence"], f"status = '{LIVE}'")["sequence"].to_numpy()
        there = view.alive.copy()
        there[list(self.facts.withheld.values())] = True
        gone = np.flatnonzero(there & ~np.isin(view.sequence, live))
        found = sequence = None
        if len(live) and live.max() >= first:
            table = record.read(None, f"status = '{LIVE}' AND sequence >= {first}")
            found, sequence = from_rows(table, self.facts, record)
        self.follow(record, found, sequence, gone, held=quarantined(record), next_sequence=following)

    def reread(self, record: Record, *, in_place: bool, why: str | None = None) -> None:
        """Read all facts of a version, or of a newer one.

        in_place: whether those who hold `facts` see them. why: logged where it takes long.
        """
        facts, held, following, record = self.with_newest(record, lambda record: self._read(record, why))
        if in_place:
            self.facts.adopt(facts)
        else:
            self.facts = facts
        self.held, self.next_sequence = held, following
        self.record, self.version = record, record.version

    def _read(
        self, record: Record, why: str | None
    ) -> tuple[FactStore, dict[str, tuple[int, str | None, int]], int, Record]:
        facts, total = self.facts.empty(), record.count(LIVE)
        facts.numbering, facts._is_copy = record.numbering, True
        record.check_unique()
        if why is not None and total >= _LONG_WORK:
            _log.info("%s: reading %s facts from the record, %s", self.folder, f"{total:,}", why)
        with self._progress("facts", total) as advance:
            for batch in record.batches(f"status = '{LIVE}'"):
                facts.apply(*from_rows(batch, facts, record))
                advance(batch.num_rows)
        facts.look(_expiry.now())  # before anyone has them, so that no ranking has what is past its time
        return facts, quarantined(record), record.next_sequence(), record

    def with_newest(self, record: Record, use: Callable[[Record], T]) -> T:
        """Use a version; where another process has compacted it away meanwhile, the newer one."""
        for _ in range(_ATTEMPTS):
            try:
                return use(record)
            except (OSError, ValueError):
                newer = Record.open(record.path)  # what is known of the files may be of others of the same names
                if newer.version == record.version:
                    raise
                record = newer
        return use(record)
