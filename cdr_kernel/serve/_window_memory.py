"""What a session's last ranking put into the envelope, kept until the update that follows.

Without texts and vectors: what `Session.update` remembers of an envelope and what its exits test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from sys import getsizeof
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from cdr_kernel.rank import Envelope, Ranking
from cdr_kernel.rank._tables import BREAKDOWN
from cdr_kernel.session._task import Feedback
from cdr_kernel.store._fact_store import Fact

_FLOATS = (*(name for name in BREAKDOWN if name != "ngram_overlap"), "novelty_source")


class KeptWindow(msgspec.Struct, frozen=True):
    """An envelope of n facts, without their texts. version: of the session that was ranked for.

    numbers: the float64 arrays of a `Ranking`, one after the other, and its spec_novelty, [9, n]; overlap: int32 [n].
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
    newest: int
    new_share: float | None
    considered: int | None
    filter: str
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
            numbers=np.stack([*(getattr(ranking, name) for name in _FLOATS[:-1]), ranking.spec_novelty])
            .astype("<f8")
            .tobytes(),
            overlap=ranking.ngram_overlap.astype("<i4").tobytes(),
            tokens=envelope.tokens,
            token_budget=envelope.token_budget,
            skipped=envelope.skipped,
            qualified=ranking.qualified,
            guard_activations=ranking.guard_activations,
            coverage_depth=ranking.coverage_depth,
            store_version=ranking.store_version,
            newest=ranking.newest,
            new_share=ranking.new_share,
            considered=ranking.considered,
            filter=ranking.filter,
            feedback_ids=None if made is None else list(made.fact_ids),
            direction=None if made is None or made.direction is None else made.direction.astype("<f8").tobytes(),
            words=None if made is None or made.words is None else list(made.words),
        )

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        names = sum(8 + getsizeof(id) for id in (*self.ids, *(self.feedback_ids or ())))
        words = sum(90 + getsizeof(word) for word, _ in self.words or ())
        return (
            len(self.numbers) + len(self.overlap) + len(self.direction or b"") + len(self.filter) + names + words + 400
        )

    def envelope(self) -> Envelope:
        """The envelope again."""
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
            newest=self.newest,
            new_share=self.new_share,
            considered=self.considered,
            filter=self.filter,
            feedback=feedback,
        )
        return Envelope(ranking, self.tokens, self.token_budget, self.skipped)


def facts_named(ids: Sequence[str]) -> tuple[Fact, ...]:
    """Facts of which only the id is known."""
    return tuple(Fact(id, "", None, None, 1.0, i) for i, id in enumerate(ids))


def packed_envelope(
    ids: Sequence[str], last: Envelope | None, coverage_depth: int, novelty: Mapping[str, float] = MappingProxyType({})
) -> Envelope:
    """The envelope of the facts that a writer got.

    It has the counters of the session's last ranking, and the direction that the ranking gives the task, whatever was
    packed. A fact in neither `last` nor `novelty` is remembered as packed and changes no number: its relevance is 0,
    which the exit's mean leaves out (reading R27), and its novelty is 1.

    Args:
        ids: the facts, each once.
        last: the envelope of that ranking, which has the numbers of its facts; None where there is none.
        coverage_depth: coverage entries, where there is no ranking that counted them.
        novelty: §2.2's novelty of other facts, by id.
    """
    if last is None:
        last = Envelope(_no_ranking(coverage_depth), 0, 0, 0)
    ranking = last.ranking
    place = {id: i for i, id in enumerate(ranking.ids)}
    others = [id for id in ids if id not in place]
    place |= {id: len(ranking) + i for i, id in enumerate(others)}
    unknown = np.zeros(len(others))
    arrays: dict[str, Any] = {name: np.concatenate([getattr(ranking, name), unknown]) for name in _FLOATS[:-1]}
    added = np.array([novelty.get(id, 1.0) for id in others], np.float64)
    arrays["novelty_source"] = np.concatenate([ranking.spec_novelty, added])
    arrays["ngram_overlap"] = np.concatenate([ranking.ngram_overlap, unknown.astype(np.int32)])
    ranking = replace(ranking, facts=(*ranking.facts, *facts_named(others)), **arrays)
    return replace(last, ranking=ranking.take([place[id] for id in ids]))


def _no_ranking(coverage_depth: int) -> Ranking:
    none: dict[str, Any] = {name: np.zeros(0) for name in _FLOATS}
    return Ranking(
        facts=(),
        **none,
        ngram_overlap=np.zeros(0, np.int32),
        qualified=0,
        guard_activations=0,
        coverage_depth=coverage_depth,
        store_version=0,
    )
