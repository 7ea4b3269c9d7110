"""The settings of a session: what both modes have, and what each mode has of its own.

Everything that differs between the modes is asked here. Nobody else needs to know which mode a session has.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypedDict

from cdr_kernel.score import Columns
from cdr_kernel.spec.constants import (
    CALIBRATED_GATE,
    CDR_MIN_RELEVANCE,
    COMPLETION_THRESHOLD,
    EXHAUSTION_RATIO,
    EXIT_SLACK,
    FEEDBACK_WEIGHT,
    LEXICAL_FEEDBACK_WEIGHT,
    LEXICAL_WEIGHT,
    MAX_WINDOWS,
    MAX_WINDOWS_LIMIT,
    MIN_NEW_SHARE,
    MIN_QUALIFIED,
    NEED_FLOOR,
)
from cdr_kernel.text._repr import one_line
from cdr_kernel.validation._arrays import Float64
from cdr_kernel.validation._scalars import check_bool, check_choice, check_integer, check_number

if TYPE_CHECKING:
    from cdr_kernel.session._envelope import PackedContext

GATES_ON = ("best", "query")
EXHAUSTIONS = ("score", "novelty")


class CommonKeywords(TypedDict, total=False):
    """The keywords of `CommonSettings`."""

    max_windows: int
    completion_threshold: float
    residual_depth: float
    keep_outputs: bool


class SpecKeywords(CommonKeywords, total=False):
    """The keywords of `SpecSettings`."""

    min_relevance: float
    first_window_pull: bool
    clamp_novelty: bool
    exhaustion: str
    exclude_packed: bool


class CalibratedKeywords(CommonKeywords, total=False):
    """The keywords of `CalibratedSettings`. None stands for the default."""

    gate: float | None
    min_qualified: int | None
    gate_on: str | None
    lexical_weight: float | None
    feedback_weight: float | None
    lexical_feedback_weight: float | None
    source_weight: float | None
    need_floor: float | None
    packed_penalty: float | None
    centred_coverage: bool | None
    min_new_share: float | None


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What both modes have.

    Args:
        max_windows: The limit of windows, 1 to 20 (R16).
        completion_threshold: The completeness from which a task is complete, in [0, 1] (§6, exit 1).
        residual_depth: In [0, 1]. A sub-query leaves the residual when the sum of the depths reported for it reaches
            this (R36). 0: when a window addressed it at all.
        keep_outputs: Whether the session holds the text of every window, `MOST_OUTPUT_CHARACTERS` at most (R40).
    """

    max_windows: int = MAX_WINDOWS
    completion_threshold: float = COMPLETION_THRESHOLD
    residual_depth: float = 0.0
    keep_outputs: bool = False

    mode: ClassVar[str]
    """The name of the mode."""
    unit: ClassVar[str]
    """The unit of the gate, as a warning shows it after the number."""
    packing: ClassVar[str]
    """How `run_windows` packs unless it is told: "greedy" or "need"."""
    guarded: ClassVar[bool]
    """Whether a session has an n-gram guard unless it is told."""
    fixes_direction: ClassVar[bool]
    """Whether the first envelope fixes the direction of the task."""
    in_cosines: ClassVar[bool]
    """Whether relevance is a cosine."""
    _elsewhere: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        self._set(
            max_windows=check_integer(self.max_windows, "max_windows", 1, MAX_WINDOWS_LIMIT),
            completion_threshold=check_number(self.completion_threshold, "completion_threshold", 0.0, 1.0),
            residual_depth=check_number(self.residual_depth, "residual_depth", 0.0, 1.0),
        )
        check_bool(self.keep_outputs, "keep_outputs")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def names(cls) -> frozenset[str]:
        """The names of the settings."""
        return frozenset(item.name for item in fields(cls))

    @classmethod
    def of(cls, **keywords: Any) -> Self:
        """The settings of these keywords.

        Raises:
            ValueError: For a keyword of another mode, and for a value out of range.
            TypeError: For a keyword of no mode, and for a value of a wrong type.
        """
        own = cls.names()
        for name, value in keywords.items():
            if name in own or value is None:
                continue
            for other in MODES.values():
                if name in other.names():
                    instead = f": use {cls._elsewhere[name]}" if name in cls._elsewhere else ""
                    raise ValueError(f'{name} belongs to mode "{other.mode}", the mode is "{cls.mode}"{instead}')
            hint = ": use Session.calibrated(...), or settings=" if name == "mode" else ""
            raise TypeError(f"{name} is no setting of a session, expected some of {', '.join(sorted(own))}{hint}")
        return cls(**{name: value for name, value in keywords.items() if name in own})

    def own(self) -> dict[str, Any]:
        """The settings that this mode alone has, by name."""
        return {name: value for name, value in asdict(self).items() if name not in _COMMON}


_COMMON = frozenset(item.name for item in fields(CommonSettings))


@dataclass(frozen=True, kw_only=True)
class SpecSettings(CommonSettings):
    """The mode of the specification: the formula of §2.2.

    Args:
        min_relevance: The gate on query relevance, in [-1, 1] (§2.6).
        first_window_pull: Whether the residual pulls while nothing is covered (R1).
        clamp_novelty: Whether novelty is at most 1 in scores (R3).
        exhaustion: "score" is exit 3 literally. "novelty" keeps importance out of it (R11).
        exclude_packed: Whether a packed fact is never packed again (R20).

    Raises:
        TypeError: For a value of a wrong type.
        ValueError: For a value out of range.
    """

    min_relevance: float = CDR_MIN_RELEVANCE
    first_window_pull: bool = False
    clamp_novelty: bool = False
    exhaustion: str = "score"
    exclude_packed: bool = False

    mode: ClassVar[str] = "spec"
    unit: ClassVar[str] = ""
    packing: ClassVar[str] = "greedy"
    guarded: ClassVar[bool] = True
    fixes_direction: ClassVar[bool] = False
    in_cosines: ClassVar[bool] = True
    packed_factor: ClassVar[float] = 1.0
    need_floor: ClassVar[float] = NEED_FLOOR

    __repr__ = one_line

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(min_relevance=check_number(self.min_relevance, "min_relevance", -1.0, 1.0))
        check_choice(self.exhaustion, "exhaustion", EXHAUSTIONS)
        for name in ("first_window_pull", "clamp_novelty", "exclude_packed"):
            check_bool(getattr(self, name), name)

    @property
    def gate(self) -> float:
        """What a fact must reach."""
        return self.min_relevance

    @property
    def drops_packed(self) -> bool:
        """Whether no packed fact is ranked again."""
        return self.exclude_packed

    @property
    def reads_packed(self) -> bool:
        """Whether a ranking reads which facts were packed."""
        return self.exclude_packed

    @property
    def keeps_packed(self) -> bool:
        """Whether a token needs the packed facts."""
        return self.exclude_packed

    @property
    def scores_exhaust(self) -> bool:
        """Whether importance alone may exhaust a store (R11)."""
        return self.exhaustion == "score"

    def with_gate(self, gate: float) -> SpecSettings:
        """The same with another gate."""
        return replace(self, min_relevance=gate)

    def columns(
        self,
        query: Float64,
        coverage: Float64 | None,
        depth_weights: Float64 | None,
        residual: Float64 | None,
    ) -> Columns:
        """The columns of a window (§2.2)."""
        return Columns.spec(
            query,
            coverage=coverage,
            depth_weights=depth_weights,
            residual=residual,
            min_relevance=self.min_relevance,
            first_window_pull=self.first_window_pull,
            clamp_novelty=self.clamp_novelty,
        )

    def exhaustion_of(self, envelope: PackedContext) -> tuple[float, bool]:
        """The ratio of exit 3, and whether it says that the store is exhausted."""
        ratio = envelope.novelty_ratio(self.exhaustion)
        return ratio, ratio < EXHAUSTION_RATIO - EXIT_SLACK

    def why_exhausted(self, envelope: PackedContext, ratio: float, packed: bool) -> str:
        """Why exit 3 is true (R12, R27). packed: whether a window packed a fact before."""
        if not len(envelope.ranking):
            return envelope.why_empty(self.exclude_packed and packed)
        if not (envelope.ranking.relevance > 0.0).any():
            return "no packed fact has a relevance above zero"
        return f"the mean novelty ratio {ratio:.3f} is below {EXHAUSTION_RATIO}"

    def best_value(self, shown: str) -> str:
        """How a warning names the largest value that was compared with the gate."""
        return f"the best cosine is {shown}"


@dataclass(frozen=True, kw_only=True)
class CalibratedSettings(CommonSettings):
    """The calibrated mode, an extension beside the specification's formula.

    Every cosine is taken in deviations above the store's mean (z). A sub-query's score of a fact is z plus evidence.

    Args:
        gate: z that a candidate must reach, on `gate_on`.
        min_qualified: At least 0. Where fewer facts reach the gate, so many with the best z qualify, and what is at
            most 1e-9 below them. In a small store two deviations are a lot. `Session.calibrated` takes 0 for it where
            a gate is given and this is not.
        gate_on: "best" of query and sub-queries, or "query".
        lexical_weight: Share of the z-score of BM25 of the sub-query's text, at least 0.
        feedback_weight: Share of the z-score along the task's own direction, at least 0. The direction goes from the
            store's mean to the mean of the 5 best facts of each sub-query. The first window fixes it.
        lexical_feedback_weight: Share of the z-score of BM25 for the words that these same facts have above the
            store's mean, each weighted by how far above, at least 0. The first window fixes them too.
        source_weight: Share of the evidence of a fact's document, at least 0: its neighbours in it and how well it
            serves the task. Above 0 it replaces both feedbacks. It needs facts with a source and a position.
        need_floor: What a sub-query keeps of its need, however deep it was written about, in [0, 1].
        packed_penalty: What a packed fact loses, in [0, 1]. 1 takes it out.
        centred_coverage: Whether coverage takes part, as 2 * (mean cosine to what is covered - to all sub-queries).
        min_new_share: In [0, 1]. The store is exhausted when a smaller share of the qualified facts was never packed.

    Raises:
        TypeError: For a value of a wrong type.
        ValueError: For a value out of range.
    """

    gate: float = CALIBRATED_GATE
    min_qualified: int = MIN_QUALIFIED
    gate_on: str = "best"
    lexical_weight: float = LEXICAL_WEIGHT
    feedback_weight: float = FEEDBACK_WEIGHT
    lexical_feedback_weight: float = LEXICAL_FEEDBACK_WEIGHT
    source_weight: float = 0.0
    need_floor: float = NEED_FLOOR
    packed_penalty: float = 1.0
    centred_coverage: bool = False
    min_new_share: float = MIN_NEW_SHARE

    mode: ClassVar[str] = "calibrated"
    unit: ClassVar[str] = " deviations"
    packing: ClassVar[str] = "need"
    guarded: ClassVar[bool] = False
    fixes_direction: ClassVar[bool] = True
    in_cosines: ClassVar[bool] = False
    reads_packed: ClassVar[bool] = True
    scores_exhaust: ClassVar[bool] = False
    _elsewhere: ClassVar[dict[str, str]] = {
        "min_relevance": "gate",
        "exhaustion": "min_new_share",
        "exclude_packed": "packed_penalty",
    }

    __repr__ = one_line

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            gate=check_number(self.gate, "gate"),
            min_qualified=check_integer(self.min_qualified, "min_qualified", 0),
        )
        check_choice(self.gate_on, "gate_on", GATES_ON)
        check_bool(self.centred_coverage, "centred_coverage")
        for name in ("lexical_weight", "feedback_weight", "lexical_feedback_weight", "source_weight"):
            self._set(**{name: check_number(getattr(self, name), name, 0.0)})
        for name in ("need_floor", "packed_penalty", "min_new_share"):
            self._set(**{name: check_number(getattr(self, name), name, 0.0, 1.0)})

    @classmethod
    def of(cls, **keywords: Any) -> Self:
        """See `CommonSettings.of`."""
        given = {name: value for name, value in keywords.items() if value is not None}
        if "gate" in given:
            given.setdefault("min_qualified", 0)
        for name in ("feedback_weight", "lexical_feedback_weight"):
            if given.get("source_weight") and given.get(name):
                raise ValueError(f"source_weight replaces {name}: expected one of them, got both")
        return super().of(**given)

    @property
    def drops_packed(self) -> bool:
        """Whether no packed fact is ranked again."""
        return self.packed_penalty == 1.0

    @property
    def keeps_packed(self) -> bool:
        """Whether a token needs the packed facts."""
        return self.packed_penalty > 0.0

    @property
    def packed_factor(self) -> float:
        """What the score of a packed fact is multiplied with."""
        return 1.0 - self.packed_penalty

    def with_gate(self, gate: float) -> CalibratedSettings:
        """The same with another gate, which nothing lowers."""
        return replace(self, gate=gate, min_qualified=0)

    def columns(
        self,
        query: Float64,
        coverage: Float64 | None,
        depth_weights: Float64 | None,
        residual: Float64 | None,
    ) -> Columns:
        """A ValueError: these columns need a store."""
        raise ValueError('session.columns is of mode "spec": the calibrated mode needs a store, use cdr_rank')

    def exhaustion_of(self, envelope: PackedContext) -> tuple[float, bool]:
        """The share of facts never packed, and whether it says that the store is exhausted."""
        ratio = envelope.new_share
        return ratio, not len(envelope.ranking) or ratio < self.min_new_share - EXIT_SLACK

    def why_exhausted(self, envelope: PackedContext, ratio: float, packed: bool) -> str:
        """Why exit 3 is true. packed: whether a window packed a fact before."""
        if not len(envelope.ranking):
            return envelope.why_empty(envelope.ranking.new_share is not None and packed)
        return f"the share of facts never packed {ratio:.3f} is below {self.min_new_share:g}"

    def best_value(self, shown: str) -> str:
        """How a warning names the largest value that was compared with the gate."""
        return f"the best fact has {shown}"


Settings: TypeAlias = SpecSettings | CalibratedSettings

MODES: dict[str, type[SpecSettings] | type[CalibratedSettings]] = {
    kind.mode: kind for kind in (SpecSettings, CalibratedSettings)
}
"""The settings of each mode, by its name."""


def settings_of(mode: str, **keywords: Any) -> Settings:
    """The settings of a mode that is named. See `CommonSettings.of`."""
    return MODES[check_choice(mode, "mode", tuple(MODES))].of(**keywords)


def check_settings(value: object) -> Settings:
    """`value`, or a TypeError where it is no settings object."""
    if not isinstance(value, SpecSettings | CalibratedSettings):
        raise TypeError(f"settings must be SpecSettings or CalibratedSettings, got {value!r:.200}")
    return value
