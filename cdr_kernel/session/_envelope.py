"""What a session reads of the envelope of a window, so that sessions know nothing of how facts are ranked or packed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from cdr_kernel.session._task import Feedback
from cdr_kernel.validation._arrays import Float64


class PackedRanking(Protocol):
    """The ranking of the packed facts. See `Ranking`, which is one."""

    @property
    def relevance(self) -> Float64:
        """Cosine of each packed fact with the query."""

    @property
    def importance(self) -> Float64:
        """Importance of each packed fact."""

    @property
    def newest(self) -> int:
        """The largest sequence number of the facts that were there to be ranked, -1 for none."""

    @property
    def new_share(self) -> float | None:
        """In the calibrated mode, the share of the qualified facts that was never packed before."""

    @property
    def feedback(self) -> Feedback | None:
        """In the calibrated mode, what the next windows take from the packed facts."""

    def __len__(self) -> int:
        """How many facts were packed."""

    @property
    def ids(self) -> list[str]:
        """The ids of the packed facts, best first."""


class PackedContext(ABC):
    """The base class of `Envelope`."""

    ranking: PackedRanking

    @property
    @abstractmethod
    def misfit(self) -> ValueError | TimeoutError | None:
        """Why the envelope is empty for another reason than the store (R39); None where it is not."""

    @abstractmethod
    def check_fits(self) -> None:
        """Raise `misfit`, if there is one."""

    @property
    @abstractmethod
    def new_share(self) -> float:
        """Of the facts that passed the calibrated gate, the share that was never packed before."""

    @abstractmethod
    def novelty_ratio(self, exhaustion: str) -> float:
        """What exit 3 tests in mode "spec" (§6)."""

    @abstractmethod
    def why_empty(self, packed_before: bool = False) -> str:
        """Why no fact could be packed."""
