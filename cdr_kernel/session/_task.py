"""What a session is made of: sub-queries, coverage, what a window reports, how it ends. Plain, immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdr_kernel.spec.constants import (
    CKF_EXHAUSTED,
    DEFAULT_DEPTH,
    EXIT_REASONS,
    LIMIT_REACHED,
    MAX_DEPTH_FROM_WORDS,
    SAFETY_BUDGET_DEPLETED,
    TASK_COMPLETE,
)
from cdr_kernel.text import NGramGuard
from cdr_kernel.text._repr import one_line
from cdr_kernel.validation._arrays import as_vector
from cdr_kernel.validation._scalars import check_bool, check_integer, check_number, check_text

MOST_WORDS = 2**53
"""Up to here a float64 holds every count."""
MOST_OUTPUT_CHARACTERS = 2**24
"""What a session with `keep_outputs` holds of text: more than ten books."""


@dataclass(frozen=True, eq=False)
class SubQuery:
    """One section of the task (the specification says *sub-query*, §2.1).

    Args:
        id: Unique in its session.
        label: The name that the anchor uses (§4.2).
        text: The text that was embedded.
        embedding: [D], any float dtype, list or tensor. It must come from the model of the store's facts (§2.5). A
            read-only float64 copy is kept.
        expected_words: Words that the finished task should have on it, 0 to 2^53. None if that is not known.
        marginal: Whether a complete task may leave it out (R9).

    Raises:
        TypeError: For a value of a wrong type.
        ValueError: For an empty id or label, and for a vector that is zero, not finite or not one-dimensional.
    """

    id: str
    label: str
    text: str
    embedding: NDArray[np.float64]
    expected_words: int | None = None
    marginal: bool = False

    __repr__ = one_line

    def __post_init__(self) -> None:
        check_text(self.id, "the id of a sub-query")
        where = f"sub-query {self.id!r}"
        check_text(self.label, f"the label of {where}")
        check_text(self.text, f"the text of {where}", empty=True)
        check_bool(self.marginal, f"marginal of {where}")
        if self.expected_words is not None:
            words = check_integer(self.expected_words, f"expected_words of {where}", 0, MOST_WORDS)
            object.__setattr__(self, "expected_words", words)
        vector = np.array(as_vector(self.embedding, None, f"the embedding of {where}"))
        vector.setflags(write=False)
        object.__setattr__(self, "embedding", vector)


@dataclass(frozen=True, eq=False)
class CoverageEntry:
    """A sub-query that a window addressed (§2.1).

    Attributes:
        sub_query_id: The id of the sub-query.
        embedding: Its embedding, [D] float64, read-only.
        depth_weight: How thoroughly it was addressed, in [0, 1].
        window_number: The window, from 1 (R15).
    """

    sub_query_id: str
    embedding: NDArray[np.float64]
    depth_weight: float
    window_number: int

    __repr__ = one_line


@dataclass(frozen=True)
class WindowReport:
    """What one window's output achieved: the specification's DPE Stage 8 report (§3.1). `Session.update` checks it.

    Args:
        completeness_score: Completeness of the whole task so far, in [0, 1].
        addressed: Ids of the sub-queries that this window's output covered, each once.
        depth_by_sub_query: Depth in [0, 1] by addressed id. 0.5 for ids that it lacks (R33).
        words_by_sub_query: Words of this window's output by sub-query id, addressed or not, 0 to 2^53.
        embedding_model: The model of the embeddings (R18). It may be given to `Session.update` instead.
    """

    completeness_score: float
    addressed: tuple[str, ...] = ()
    depth_by_sub_query: Mapping[str, float] = field(default_factory=dict)
    words_by_sub_query: Mapping[str, int] = field(default_factory=dict)
    embedding_model: str | None = None

    __repr__ = one_line


@dataclass(frozen=True)
class Exit:
    """Whether the window loop ends, and why (§6).

    Attributes:
        stop: Whether an exit is true.
        reason: The first true exit in the order of §6, one of `constants.EXIT_REASONS`, or None.
        also: The other true exits, in that order.
        escalate: Whether the safety budget is used up, whatever the reason (R10).
        detail: Why the store counts as exhausted. Empty if it does not.
        novelty_ratio: The ratio that exit 3 tests. In the calibrated mode: the share of qualified facts that were never
            packed. None as long as there was no envelope.
    """

    stop: bool
    reason: str | None
    also: tuple[str, ...]
    escalate: bool
    detail: str
    novelty_ratio: float | None


class SessionEnded(RuntimeError):
    """A session has ended by an exit of §6, so that no other window begins (R37). `exit` says which."""

    def __init__(self, session_id: str, exit: Exit) -> None:
        super().__init__(session_id, exit)
        self.session_id = session_id
        self.exit = exit

    def __str__(self) -> str:
        return (
            f"the session {self.session_id!r} has ended: {', also '.join(self.reasons)}. What opens it again: "
            f"{' and '.join(_OPENS[reason] for reason in self.reasons)}; or session.reset(), which begins anew"
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every exit that is true, in the order of §6."""
        return tuple(reason for reason in EXIT_REASONS if reason == self.exit.reason or reason in self.exit.also)


_OPENS = {
    TASK_COMPLETE: "more sub-queries (session.extend(sub_queries=...))",
    LIMIT_REACHED: "a higher limit (session.extend(max_windows=...))",
    CKF_EXHAUSTED: "new facts in the store, and a ranking of them",
    SAFETY_BUDGET_DEPLETED: "a higher session.safety_budget",
}


def check_outputs(outputs: tuple[str, ...]) -> tuple[str, ...]:
    """These outputs, where they are no more than a session holds; else ValueError."""
    length = sum(map(len, outputs))
    if length > MOST_OUTPUT_CHARACTERS:
        raise ValueError(
            f"outputs: expected at most {MOST_OUTPUT_CHARACTERS:,} characters in all, got {length:,}: "
            "a session with keep_outputs=False has no limit"
        )
    return outputs


def depth_from_words(actual: float, expected: float) -> float:
    """The depth of a section from its words (§3.2, R7): min(0.90, actual / expected).

    Args:
        actual: Words that were written, >= 0.
        expected: Words that were expected. 0 or less gives depth 0.5 (§3.1).

    Raises:
        ValueError: For a negative or non-finite count.
        TypeError: For a value that is no number.
    """
    actual = check_number(actual, "actual", 0.0)
    expected = check_number(expected, "expected")
    if expected <= 0.0:
        return DEFAULT_DEPTH
    return min(MAX_DEPTH_FROM_WORDS, actual / expected)


@dataclass(frozen=True, eq=False)
class Feedback:
    """What fixes the direction of a task: the facts it was made of, the direction [D] float64, and in words.

    words: alphabetical, each with its weight > 0. direction and words are None where only the ids are known (after a
    token): the next ranking makes them from the facts that are still there.
    """

    fact_ids: tuple[str, ...]
    direction: NDArray[np.float64] | None = None
    words: tuple[tuple[str, float], ...] | None = None

    def __post_init__(self) -> None:
        if self.direction is not None:
            self.direction.setflags(write=False)


@dataclass(frozen=True)
class EnvelopeTest:
    """What exit 3 says of one envelope (§6, R37).

    ratio: as `Exit.novelty_ratio`. detail: why the store counts as exhausted, empty when it does not.
    newest: the sequence number of the newest fact in the store that was ranked, -1 where there was none.
    """

    ratio: float
    detail: str
    newest: int


@dataclass(frozen=True, eq=False)
class SessionState:
    """Everything of a session that a window changes, as one immutable value.

    A session replaces it as a whole, so whoever takes `session.state` once reads one consistent state, also
    while another thread updates. What is in it is never changed in place, and cannot be.

    last_envelope: what exit 3 said of the last envelope, None before the first. outputs: of all windows, where
    the session keeps them.
    """

    coverage: tuple[CoverageEntry, ...]
    residual: tuple[SubQuery, ...]
    window_count: int
    completeness: float
    words: Mapping[str, int]
    packed: Mapping[str, int]
    guard: NGramGuard | None
    safety_budget: float
    feedback: Feedback | None = None
    last_envelope: EnvelopeTest | None = None
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("words", "packed"):
            counts = getattr(self, name)
            if not isinstance(counts, MappingProxyType):
                object.__setattr__(self, name, MappingProxyType(dict(counts)))
        if self.guard is not None:
            self.guard.freeze()

    def __reduce__(self) -> tuple[Any, ...]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        plain = {name: dict(values[name]) for name in ("words", "packed")}  # which a mapping proxy is not
        return SessionState, tuple({**values, **plain}.values())
