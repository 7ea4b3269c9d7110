"""What a session's last ranking put into the envelope, kept until the update that follows.

Without texts and vectors: what `Session.update` remembers of an envelope and what its exits test.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof
from typing import Any

import msgspec
import numpy as np

from cdr_kernel.frame import BREAKDOWN
from cdr_kernel.pack import Envelope
from cdr_kernel.rank import Ranking
from cdr_kernel.store import Fact
from cdr_kernel.task import Feedback

_FLOATS = tuple(name for name in BREAKDOWN if name != "ngram_overlap")


class KeptWindow(msgspec.Struct, frozen=True):
    """An envelope of n facts, without their texts. version: of the session that was ranked for.

    numbers: the float64 arrays of a `Ranking`, one after the other, [8, n]; overlap: int32 [n].
    """

    version: int
    ids: list[str]
    numbers: bytes
    overlap: bytes
    tokens: int
    token_budget: int
    skipped: int
    qualified: int
    guard_activations: int
    coverage_depth: int
    store_version: int
    new_share: float | None
    feedback_ids: list[str] | None
    direction: bytes | None
    words: list[tuple[str, float]] | None

    @classmethod
    def of(cls, envelope: Envelope, version: int) -> KeptWindow:
        """What is kept of an envelope."""
        ranking = envelope.ranking
        made = ranking.feedback
        return cls(
            version=version,
            ids=ranking.ids,
            numbers=np.stack([getattr(ranking, name) for name in _FLOATS]).astype("<f8").tobytes(),
            overlap=ranking.ngram_overlap.astype("<i4").tobytes(),
            tokens=envelope.tokens,
            token_budget=envelope.token_budget,
            skipped=envelope.skipped,
            qualified=ranking.qualified,
            guard_activations=ranking.guard_activations,
            coverage_depth=ranking.coverage_depth,
            store_version=ranking.store_version,
            new_share=ranking.new_share,
            feedback_ids=None if made is None else list(made.fact_ids),
            direction=None if made is None or made.direction is None else made.direction.astype("<f8").tobytes(),
            words=None if made is None or made.words is None else list(made.words),
        )

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        names = sum(8 + getsizeof(id) for id in (*self.ids, *(self.feedback_ids or ())))
        words = sum(90 + getsizeof(word) for word, _ in self.words or ())
        return len(self.numbers) + len(self.overlap) + len(self.direction or b"") + names + words + 400

    def envelope(self, ids: Sequence[str] | None = None) -> Envelope | None:
        """The envelope again; with ids, of these facts alone. None where one of them is not in it."""
        n = len(self.ids)
        numbers: dict[str, Any] = dict(
            zip(_FLOATS, np.frombuffer(self.numbers, "<f8").reshape(len(_FLOATS), n), strict=True)
        )
        feedback = None
        if self.feedback_ids is not None:
            direction = None if self.direction is None else np.frombuffer(self.direction, "<f8")
            words = None if self.words is None else tuple((word, weight) for word, weight in self.words)
            feedback = Feedback(tuple(self.feedback_ids), direction, words)
        ranking = Ranking(
            facts=facts_named(self.ids),
            **numbers,
            ngram_overlap=np.frombuffer(self.overlap, "<i4"),
            qualified=self.qualified,
            guard_activations=self.guard_activations,
            coverage_depth=self.coverage_depth,
            store_version=self.store_version,
            new_share=self.new_share,
            feedback=feedback,
        )
        if ids is not None:
            place = {id: i for i, id in enumerate(self.ids)}
            if any(id not in place for id in ids):
                return None
            ranking = ranking.take([place[id] for id in dict.fromkeys(ids)])
        return Envelope(ranking, self.tokens, self.token_budget, self.skipped)


def facts_named(ids: Sequence[str]) -> tuple[Fact, ...]:
    """Facts of which only the id is known."""
    return tuple(Fact(id, "", None, None, 1.0, i) for i, id in enumerate(ids))


def envelope_of(ids: Sequence[str], coverage_depth: int) -> Envelope:
    """An envelope of which only the ids are known: for what a session remembers as packed, not for its exits."""
    n = len(ids)
    zeros: dict[str, Any] = {name: np.zeros(n) for name in _FLOATS}
    ranking = Ranking(
        facts=facts_named(ids),
        **zeros,
        ngram_overlap=np.zeros(n, np.int32),
        qualified=0,
        guard_activations=0,
        coverage_depth=coverage_depth,
        store_version=0,
    )
    return Envelope(ranking, 0, 0, 0)
