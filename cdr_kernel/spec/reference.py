"""Coverage-Differential Retrieval in plain Python: §2 to §8 of CRP-SPEC-024, literally.

Normative: where another module disagrees with this one, the other one is wrong. Every function names the
section it comes from and, where the specification contradicts itself, the reading (R1, R2, ...) that decides.
Standard library only, one fact at a time, never tuned.

    ranking = cdr_rank(facts, query_embedding, session)      # gate, score, sort
    envelope = ranking[:8]                                   # whatever packing picks
    update_session_after_window(session, report, output, envelope)   # coverage, residual, blacklist, count
    should_stop(session)                                     # the four exits

A vector is any sequence of finite floats that are not all zero. Everything is computed in float64.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cdr_kernel.spec.constants import (
    BM25_B,
    BM25_K1,
    CALIBRATED_GATE,
    CDR_MIN_RELEVANCE,
    CKF_EXHAUSTED,
    COMPLETION_THRESHOLD,
    COVERAGE_PENALTY_CAP,
    DEFAULT_DEPTH,
    EXHAUSTION_RATIO,
    EXIT_REASONS,
    EXIT_SLACK,
    FEEDBACK_FACTS,
    FEEDBACK_WEIGHT,
    GUARANTEE_COVERAGE_SCORE,
    GUARD_ALERT_SHARE,
    IN_PROGRESS,
    LEXICAL_FEEDBACK_WEIGHT,
    LEXICAL_WEIGHT,
    LIMIT_REACHED,
    MAX_DEPTH_FROM_WORDS,
    MAX_WINDOWS,
    MAX_WINDOWS_LIMIT,
    MIN_NOVELTY_FLOOR,
    MIN_QUALIFIED,
    NEED_FLOOR,
    NGRAM_PENALTY_CAP,
    NGRAM_PENALTY_STEP,
    NGRAM_SIZE,
    NO_DEVIATION,
    SAFE_EXPONENT,
    SAFETY_BUDGET_DEPLETED,
    SAFETY_BUDGET_FLOOR,
    SOURCE_REACH,
    SOURCE_SHRINKAGE,
    STOP_WORDS,
    TASK_COMPLETE,
)

Vector = Sequence[float]
NGram = tuple[str, ...]


@dataclass
class Fact:
    """One fact of the store (CKF).

    `importance_weight` (§2.2) and `multiplier` (a further factor per fact, such as recency) are finite and >=
    0. `sequence` decides ties (R26); None stands for the position in the list that is ranked. `source` and
    `position` in it are used by the calibrated mode alone.
    """

    embedding: Vector
    content: str = ""
    importance_weight: float = 1.0
    multiplier: float = 1.0
    id: str | None = None
    sequence: int | None = None
    source: str | None = None
    position: int | None = None


@dataclass
class Entry:
    """§2.1, CoverageEntry: an addressed sub-query, its depth in [0, 1], the 1-based window that did it."""

    embedding: Vector
    depth_weight: float
    window_number: int = 1
    sub_query_id: str = ""


@dataclass
class SubQuery:
    """One item of the task's decomposition. `marginal`: may be left undone by a complete task (R9)."""

    id: str
    label: str
    text: str
    embedding: Vector
    marginal: bool = False


@dataclass
class Report:
    """What §3.1 calls the DPE report: what one window's output addressed, by sub-query id."""

    completeness_score: float
    addressed: Sequence[str] = ()
    depth_by_sub_query: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Scored:
    """A fact that passed the gate, with everything that went into its score."""

    fact: Fact
    relevance: float
    coverage: float
    residual_pull: float
    novelty: float
    ngram_overlap: int
    ngram_penalty: float
    score_without_guard: float
    score: float

    @property
    def spec_novelty(self) -> float:
        """What §8.1's header is the least of (R38)."""
        return self.novelty


@dataclass
class EnvelopeTest:
    """What exit 3 says of one envelope: its ratio, and why the store counts as exhausted ("" where it does not).

    `newest`: the sequence number of the newest fact in the store that was ranked, -1 where there was none (R37).
    """

    ratio: float
    detail: str
    newest: int


@dataclass
class Exit:
    """What `should_stop` says.

    `reason` is one of EXIT_REASONS or None; `also` lists the other exits that are true; `detail` says why
    exhaustion is true and is empty otherwise; `novelty_ratio` is None as long as no envelope is known.
    """

    stop: bool
    reason: str | None
    also: tuple[str, ...]
    escalate: bool
    detail: str
    novelty_ratio: float | None


@dataclass
class ReferenceSession:
    """The state of one task. The sets are those of §2.1 and §5.1.

    `window_count` counts completed windows and starts at 0 (R15). `max_windows` is 1 to 20 (R16).
    `completeness` is the last one reported. `first_window_pull`: R1. `clamp_novelty`: R3.
    `exhaustion`: "score" or "novelty" (R11). `residual_depth`: R36. `last_envelope`: what exit 3 said of the
    last envelope, None before the first (R37). `outputs`: those of the windows, in order (§6, exits 1 and 2).
    """

    task_sub_queries: Sequence[SubQuery] = ()
    coverage_set: list[Entry] = field(default_factory=list)
    residual_set: list[SubQuery] | None = None
    ngram_blacklist: set[NGram] = field(default_factory=set)
    window_count: int = 0
    completeness: float = 0.0
    max_windows: int = MAX_WINDOWS
    min_relevance: float = CDR_MIN_RELEVANCE
    completion_threshold: float = COMPLETION_THRESHOLD
    safety_budget: float = 1.0
    first_window_pull: bool = False
    clamp_novelty: bool = False
    exhaustion: str = "score"
    residual_depth: float = 0.0
    last_envelope: EnvelopeTest | None = None
    outputs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 1 <= self.max_windows <= MAX_WINDOWS_LIMIT:
            raise ValueError(f"max_windows must be 1 to {MAX_WINDOWS_LIMIT}, got {self.max_windows}")
        if not 0.0 <= self.residual_depth <= 1.0:
            raise ValueError(f"residual_depth must be in [0, 1], got {self.residual_depth}")
        if self.residual_set is None:
            self.residual_set = list(self.task_sub_queries)

    @property
    def remaining(self) -> list[SubQuery]:
        """§2.1: the residual set."""
        return self.residual_set or []

    def reset(self) -> None:
        """§2.7, R17: back to the state before the first window."""
        self.coverage_set = []
        self.residual_set = list(self.task_sub_queries)
        self.ngram_blacklist = set()
        self.window_count = 0
        self.completeness = 0.0
        self.last_envelope = None
        self.outputs = []


# Exact arithmetic


def scaled(vector: Vector) -> list[float]:
    """The vector, or an exact power of two times it: its direction in numbers whose squares are in range.

    "Exact arithmetic": only when the largest magnitude is above 2^200 or below 2^-200 is the vector
    multiplied by the power of two that brings that magnitude into [1, 2). What the multiplication rounds is
    more than 2^1022 times smaller than the largest magnitude. ValueError for a vector that is empty, zero or
    not finite (R6).
    """
    values = [float(x) for x in vector]
    if not all(math.isfinite(x) for x in values):
        raise ValueError(f"expected a vector of finite numbers, got {values}")
    largest = max((abs(x) for x in values), default=0.0)
    if largest == 0.0:
        raise ValueError(f"expected a vector that has a direction, got {values}")
    if 2.0**-SAFE_EXPONENT <= largest <= 2.0**SAFE_EXPONENT:
        return values
    _, exponent = math.frexp(largest)  # largest = m * 2^exponent with m in [0.5, 1)
    return [math.ldexp(x, 1 - exponent) for x in values]


def dot(a: Vector, b: Vector) -> float:
    """The dot product of "Exact arithmetic": products rounded to float64, their sum correctly rounded.

    ValueError when the dimensions differ.
    """
    if len(a) != len(b):
        raise ValueError(f"expected vectors of one dimension, got {len(a)} and {len(b)}")
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def cosine(a: Vector, b: Vector) -> float:
    """The cosine of "Exact arithmetic": dot(a, b) / sqrt(dot(a, a) * dot(b, b)), clamped to [-1, 1].

    One root of the product and not a product of two roots: a vector against itself is then exactly 1.
    """
    a, b = scaled(a), scaled(b)
    value = dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))
    return max(-1.0, min(1.0, value))


# §2: the formula


def coverage_score(fact: Fact, entries: Sequence[Entry]) -> float:
    """§2.2, §2.3: the mean of the cosines to the coverage entries, weighted by depth.

    The shares depth / total are made first, so that depths near the smallest float keep their meaning. No
    entries: 0 (§2.7). All depths 0: 0 (R5). Entries alone divide, so m orthogonal topics dilute each other
    (R22). ValueError for a depth outside [0, 1] (R6).
    """
    for entry in entries:
        check_depth(entry.depth_weight)
    total = math.fsum(entry.depth_weight for entry in entries)
    if total == 0.0:
        return 0.0
    return math.fsum(entry.depth_weight / total * cosine(fact.embedding, entry.embedding) for entry in entries)


def residual_pull(
    fact: Fact,
    residual: Sequence[SubQuery],
    entries: Sequence[Entry],
    *,
    first_window_pull: bool = False,
) -> float:
    """§2.2: the largest cosine to a sub-query that remains; 0 when none does.

    R1: 0 while the coverage set is empty (§2.7), whatever the window's number. `first_window_pull=True` is
    §7.1, which pulls from the start.
    """
    if not residual:
        return 0.0
    if not entries and not first_window_pull:
        return 0.0
    return max(cosine(fact.embedding, sub_query.embedding) for sub_query in residual)


def novelty(coverage: float, *, clamp_novelty: bool = False) -> float:
    """§2.2, §2.4: 1 less the capped coverage, and never under the floor.

    R3: a negative coverage gives more than 1, up to 2; `clamp_novelty=True` holds it at 1.
    """
    coverage_penalty = min(coverage, COVERAGE_PENALTY_CAP)
    value = max(1.0 - coverage_penalty, MIN_NOVELTY_FLOOR)
    return min(value, 1.0) if clamp_novelty else value


def ngram_penalty(ngram_overlap: int) -> float:
    """§5.2: what the n-gram guard takes away, for that many listed n-grams in the fact."""
    return min(NGRAM_PENALTY_CAP, ngram_overlap * NGRAM_PENALTY_STEP)


def cdr_score(
    relevance: float,
    pull: float,
    novelty: float,
    *,
    importance_weight: float = 1.0,
    multiplier: float = 1.0,
) -> float:
    """§2.2: CDR_score. The guard's factor is not in it: see `score_fact` (R2).

    ValueError for an importance or a multiplier that is negative or not finite (R28).
    """
    for name, value in (("importance_weight", importance_weight), ("multiplier", multiplier)):
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} must be finite and >= 0, got {value}")
    effective_relevance = max(relevance, pull)
    return importance_weight * multiplier * effective_relevance * novelty


def score_fact(fact: Fact, query_embedding: Vector, session: ReferenceSession) -> Scored:
    """§7.1, the body of the loop without its gate: one fact, scored.

    R2: `score` has the guard's factor (§5.2's adjusted_score), `score_without_guard` is §2.2's CDR_score.
    """
    relevance = cosine(fact.embedding, query_embedding)
    coverage = coverage_score(fact, session.coverage_set)
    pull = residual_pull(fact, session.remaining, session.coverage_set, first_window_pull=session.first_window_pull)
    fresh = novelty(coverage, clamp_novelty=session.clamp_novelty)
    overlap = count_matching_ngrams(fact.content, session.ngram_blacklist)
    penalty = ngram_penalty(overlap)
    score_without_guard = cdr_score(
        relevance, pull, fresh, importance_weight=fact.importance_weight, multiplier=fact.multiplier
    )
    return Scored(
        fact=fact,
        relevance=relevance,
        coverage=coverage,
        residual_pull=pull,
        novelty=fresh,
        ngram_overlap=overlap,
        ngram_penalty=penalty,
        score_without_guard=score_without_guard,
        score=score_without_guard * (1.0 - penalty),
    )


def cdr_rank(
    facts: Sequence[Fact], query_embedding: Vector, session: ReferenceSession, *, k: int | None = None
) -> list[Scored]:
    """§7.1, Phase 2 ranking: the facts that pass the gate, best first, the first k of them (None: all).

    §2.6, R4, R21: a fact is kept if and only if its relevance is >= `session.min_relevance`; neither novelty
    nor pull rescues it. R26: equal scores stand in the order of their sequence numbers. ValueError for k < 0.
    """
    if k is not None and k < 0:
        raise ValueError(f"k must be None or >= 0, got {k}")
    candidates = []
    for position, fact in enumerate(facts):
        scored = score_fact(fact, query_embedding, session)
        if scored.relevance < session.min_relevance:
            continue
        sequence = position if fact.sequence is None else fact.sequence
        candidates.append((-scored.score, sequence, position, scored))
    candidates.sort(key=lambda candidate: candidate[:3])
    ranking = [scored for _, _, _, scored in candidates]
    return ranking if k is None else ranking[:k]


# §3: coverage and residual


def check_depth(depth: float) -> None:
    """R6: ValueError for a depth weight outside [0, 1] or not a number."""
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"a depth weight must be in [0, 1], got {depth}")


def depth_from_words(actual: float, expected: float) -> float:
    """§3.2, R7: words written over words expected, at most 0.90; 0.5 (§3.1) when none were expected.

    ValueError for counts that are not finite, or for actual < 0.
    """
    if not (math.isfinite(actual) and math.isfinite(expected) and actual >= 0):
        raise ValueError(f"expected finite word counts, actual >= 0, got {actual} of {expected}")
    if expected <= 0:
        return DEFAULT_DEPTH
    return min(MAX_DEPTH_FROM_WORDS, actual / expected)


def depth_of(sub_query_id: str, entries: Sequence[Entry]) -> float:
    """How thoroughly a sub-query was addressed so far: the sum of its entries' depths, at most 1."""
    return min(1.0, math.fsum(entry.depth_weight for entry in entries if entry.sub_query_id == sub_query_id))


def update_session_after_window(
    session: ReferenceSession,
    report: Report,
    window_output: str,
    envelope: Sequence[Scored] | None = None,
    newest: int = -1,
) -> None:
    """§7.2: coverage set, residual set, n-gram blacklist and window count after a completed window.

    R8: what is addressed leaves the residual set that is there; R36: with `residual_depth` only once its depth
    reaches that. R15: the entries carry the 1-based number of the window that just ended. R19: a sub-query
    addressed again is appended again. R33: a depth that is not reported is 0.5. R37: what exit 3 says of the
    envelope is remembered; newest: see `EnvelopeTest`. ValueError, and the session unchanged, for an unknown
    id, a depth or a completeness outside [0, 1].
    """
    by_id = {sub_query.id: sub_query for sub_query in session.task_sub_queries}
    for name in (*report.addressed, *report.depth_by_sub_query):
        if name not in by_id:
            raise ValueError(f"the report names sub-query {name!r}, the task has {sorted(by_id)}")
    for depth in report.depth_by_sub_query.values():
        check_depth(depth)
    if not 0.0 <= report.completeness_score <= 1.0:
        raise ValueError(f"completeness_score must be in [0, 1], got {report.completeness_score}")
    new_entries = [
        Entry(
            embedding=scaled(by_id[name].embedding),
            depth_weight=report.depth_by_sub_query.get(name, DEFAULT_DEPTH),
            window_number=session.window_count + 1,
            sub_query_id=name,
        )
        for name in report.addressed
    ]

    tested = known_test(session, envelope, newest)

    session.coverage_set = [*session.coverage_set, *new_entries]
    session.residual_set = [
        sub_query
        for sub_query in session.remaining
        if sub_query.id not in report.addressed
        or depth_of(sub_query.id, session.coverage_set) < session.residual_depth - EXIT_SLACK
    ]
    session.ngram_blacklist = session.ngram_blacklist | ngrams(tokenize(window_output))
    session.window_count += 1
    session.completeness = report.completeness_score
    session.last_envelope = tested
    session.outputs = [*session.outputs, window_output]


# §4: the Residual Task Anchor


def residual_task_anchor(remaining: Sequence[SubQuery], max_chars: int | None = None) -> str:
    """§4.2, R31: the sentence that names what remains; the empty string when nothing does.

    A sentence longer than `max_chars` characters keeps as many labels from the front as fit and counts the
    others: "Remaining sections to complete: A, B (+3 more)", down to "Remaining sections to complete: (+5
    more)". Only that last form is returned even if it is too long itself. ValueError for max_chars < 1.
    """
    if max_chars is not None and max_chars < 1:
        raise ValueError(f"max_chars must be None or >= 1, got {max_chars}")
    if not remaining:
        return ""
    labels = [sub_query.label for sub_query in remaining]
    opening = "Remaining sections to complete: "
    anchor = opening + ", ".join(labels)
    if max_chars is None or len(anchor) <= max_chars:
        return anchor
    for kept in range(len(labels) - 1, 0, -1):
        anchor = f"{opening}{', '.join(labels[:kept])} (+{len(labels) - kept} more)"
        if len(anchor) <= max_chars:
            return anchor
    return f"{opening}(+{len(labels)} more)"


# §5: the n-gram guard

SPACELESS: Mapping[str, Sequence[tuple[int, int]]] = {
    "Han": (
        (0x2E80, 0x2FDF),  # radicals
        (0x3005, 0x3007),  # iteration mark, closing mark, zero
        (0x3021, 0x3029),  # Hangzhou numerals
        (0x3038, 0x303C),
        (0x3400, 0x4DBF),
        (0x4E00, 0x9FFF),
        (0xF900, 0xFAFF),
        (0x16FE2, 0x16FE3),
        (0x16FF0, 0x16FF6),
        (0x20000, 0x3FFFD),  # the two ideographic planes
    ),
    "Hiragana and Katakana": (
        (0x3031, 0x3035),  # vertical repeat marks
        (0x3040, 0x30FF),
        (0x31F0, 0x31FF),
        (0xFF66, 0xFF9F),
        (0x1AFF0, 0x1B16F),
    ),
    "Thai": ((0x0E00, 0x0E7F),),
    "Lao": ((0x0E80, 0x0EFF),),
    "Tibetan": ((0x0F00, 0x0FFF),),
    "Myanmar": ((0x1000, 0x109F), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F), (0x116D0, 0x116FF)),
    "Khmer": ((0x1780, 0x17FF), (0x19E0, 0x19FF)),
}
"""R23: the scripts written without spaces between words, as ranges of code points, both ends included."""


def is_spaceless(character: str) -> bool:
    """R23: whether the character lies in a script that is written without spaces."""
    code = ord(character)
    return any(low <= code <= high for ranges in SPACELESS.values() for low, high in ranges)


def tokenize(text: str) -> list[str]:
    """§5.1, R23: NFKC, then casefold, then tokens.

    A token is a run of letters (L*), numbers (N*) and marks (M*). In the scripts of SPACELESS every letter or
    number is a token of its own, together with the marks right after it. Everything else separates. A mark
    with nothing before it begins a run.
    """
    tokens: list[str] = []
    joins = ""  # the kinds of character that would still belong to the last token
    for character in unicodedata.normalize("NFKC", text).casefold():
        kind = unicodedata.category(character)[0]
        if kind not in "LNM":
            joins = ""
        elif kind in "LN" and is_spaceless(character):
            tokens.append(character)
            joins = "M"
        elif kind in joins:
            tokens[-1] += character
        else:
            tokens.append(character)
            joins = "LNM"
    return tokens


def ngrams(tokens: Sequence[str], n: int = NGRAM_SIZE) -> set[NGram]:
    """§5.1: the distinct n-grams of consecutive tokens; none when there are fewer than n tokens."""
    return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}


def count_matching_ngrams(content: str, blacklist: set[NGram], n: int = NGRAM_SIZE) -> int:
    """§5.2, R24: how many distinct n-grams of the fact are in the blacklist."""
    return len(ngrams(tokenize(content), n) & blacklist)


def guard_activations(ranking: Sequence[Scored | CalibratedScored]) -> int:
    """§8.3, R25: how many facts that passed the gate got an n-gram penalty."""
    return sum(scored.ngram_penalty > 0.0 for scored in ranking)


def guard_alert(ranking: Sequence[Scored | CalibratedScored]) -> bool:
    """§5.3, R25: whether more than 20 % of the facts that passed the gate got a penalty."""
    return len(ranking) > 0 and guard_activations(ranking) / len(ranking) > GUARD_ALERT_SHARE


# §6: the exits


def novelty_ratio(envelope: Sequence[Scored], exhaustion: str = "score") -> float:
    """§6, exit 3: the mean over the packed facts of final score / query relevance (R11).

    `exhaustion="novelty"` takes the mean of novelty * (1 - ngram_penalty), which no importance moves. R27:
    facts of relevance <= 0 are left out. R12: 0 when no fact is left. Ratios whose sum is beyond float64 have a mean
    that is not: they are summed at 2^-64 of their size. Infinite only where a ratio is.
    """
    if exhaustion not in ("score", "novelty"):
        raise ValueError(f'exhaustion must be "score" or "novelty", got {exhaustion!r}')
    counted = [scored for scored in envelope if scored.relevance > 0.0]
    if not counted:
        return 0.0
    if exhaustion == "score":
        ratios = [scored.score / scored.relevance for scored in counted]
    else:
        ratios = [scored.novelty * (1.0 - scored.ngram_penalty) for scored in counted]
    try:
        return math.fsum(ratios) / len(ratios)
    except OverflowError:
        mean = math.fsum(math.ldexp(ratio, -64) for ratio in ratios) / len(ratios)
        return math.ldexp(min(mean, math.ldexp(max(ratios), -64)), 64)  # rounding may lift it above the largest


def newest_of(facts: Sequence[Fact]) -> int:
    """The sequence number of the newest fact, -1 where there is none (R26, R37)."""
    numbers = (i if fact.sequence is None else fact.sequence for i, fact in enumerate(facts))
    return max(numbers, default=-1)


def known_test(session: ReferenceSession, envelope: Sequence[Scored] | None, newest: int) -> EnvelopeTest | None:
    """R37: what exit 3 says of this envelope, of the last one where none is given, None where there was none.

    A store that was exhausted stays so, whatever is asked of it, until facts come: an envelope counts then only
    if the newest fact of its store is newer than that of the last envelope's.
    """
    last = session.last_envelope
    if envelope is None:
        return last
    ratio, detail = novelty_ratio(envelope, session.exhaustion), ""
    if not envelope:
        detail = "no fact passed the relevance gate"
    elif all(scored.relevance <= 0.0 for scored in envelope):
        detail = "no packed fact has a relevance above zero"
    elif ratio < EXHAUSTION_RATIO - EXIT_SLACK:
        detail = f"the mean novelty ratio {ratio:.3f} is below {EXHAUSTION_RATIO}"
    if not detail and last is not None and last.detail and newest <= last.newest:
        return last
    return EnvelopeTest(ratio, detail, newest)


def should_stop(
    session: ReferenceSession,
    report: Report | None = None,
    envelope: Sequence[Scored] | None = None,
    newest: int = -1,
) -> Exit:
    """§6, §7.1: the four exits, tested on the session as it is now (R15: after the update).

    R10: `reason` is the first true exit in the order of §6, `also` the other true ones, and `escalate` is
    true whenever the safety budget is used up. R9: what remains may be marginal. R37: without a report
    the completeness last reported counts, without an envelope what is remembered of the last one. R32: before the
    first report exit 1 is not tested, and before the first envelope exit 3 is not. newest: see `EnvelopeTest`.

    R10's slack goes to what is mathematically equal to its limit: a completeness of .92 and a budget of .10
    count as reached, a ratio of .15 does not count as below.
    """
    completeness = session.completeness if report is None else report.completeness_score
    reported = report is not None or session.window_count > 0
    tested = known_test(session, envelope, newest)
    depleted = session.safety_budget <= SAFETY_BUDGET_FLOOR + EXIT_SLACK
    true = {
        TASK_COMPLETE: reported
        and completeness >= session.completion_threshold - EXIT_SLACK
        and all(sub_query.marginal for sub_query in session.remaining),
        LIMIT_REACHED: session.window_count >= session.max_windows,
        CKF_EXHAUSTED: tested is not None and tested.detail != "",
        SAFETY_BUDGET_DEPLETED: depleted,
    }
    reasons = [reason for reason in EXIT_REASONS if true[reason]]
    return Exit(
        stop=bool(reasons),
        reason=reasons[0] if reasons else None,
        also=tuple(reasons[1:]),
        escalate=depleted,
        detail="" if tested is None else tested.detail,
        novelty_ratio=None if tested is None else tested.ratio,
    )


def has_ended(session: ReferenceSession, newest: int = -1) -> bool:
    """§6, R37: whether another window is refused.

    A session ends by an exit that is true after a window or for an envelope that is remembered. One that ended by
    exhaustion alone may rank again once the store has newer facts. newest: of the store to be ranked next.
    """
    last = session.last_envelope
    if session.window_count == 0 and last is None:
        return False
    exit = should_stop(session)
    new_facts = exit.reason == CKF_EXHAUSTED and not exit.also and last is not None and newest > last.newest
    return exit.stop and not new_facts


def assemble(outputs: Sequence[str]) -> str:
    """§6, exits 1 and 2: the final output, which is those of the windows in order, a blank line between two.

    Line ends around an output go, and so does an output without text.
    """
    return "\n\n".join(output.strip("\r\n") for output in outputs if output.strip())


# §8 and §9: headers and the guarantee


def min_novelty(envelope: Sequence[Scored | CalibratedScored]) -> float | None:
    """§8.1, R3, R13: the least novelty in the envelope, clamped to [0.20, 1]; None for an empty envelope.

    R38: the novelty of §2.2, whatever the mode.
    """
    if not envelope:
        return None
    return max(MIN_NOVELTY_FLOOR, min(1.0, min(scored.spec_novelty for scored in envelope)))


def check_fits(ranking: Sequence[Scored | CalibratedScored], envelope: Sequence[Scored | CalibratedScored]) -> None:
    """R39: ValueError for an envelope that is empty although facts passed the gate.

    Its token budget, its number of facts or k is too small for any of them. That is not exhaustion (exit 3).
    """
    if ranking and not envelope:
        raise ValueError(f"no fact fits into the envelope, {len(ranking)} passed the gate")


def band(coverage_score: float) -> str:
    """§8.1: "healthy" above .70, "moderate" from .40 to .70, both included, "low" below .40."""
    if coverage_score > 0.70:
        return "healthy"
    if coverage_score >= 0.40:
        return "moderate"
    return "low"


def guarantee_holds(envelope: Sequence[Scored | CalibratedScored]) -> bool:
    """§9, R35: whether the Coverage-Score is above .40. An empty envelope has none: False."""
    score = min_novelty(envelope)
    return score is not None and score > GUARANTEE_COVERAGE_SCORE


def headers(
    ranking: Sequence[Scored | CalibratedScored],
    envelope: Sequence[Scored | CalibratedScored],
    *,
    coverage_depth: int,
    completeness: float = 0.0,
    exit: Exit | None = None,
) -> dict[str, str]:
    """§6, §8: every header of one window.

    ranking: all facts that passed the gate; envelope: those that were packed; coverage_depth: the entries of
    the coverage set at packing time, before this window's update (R14); completeness: the last one reported.

    R39: an empty envelope has a Coverage-Score of 0.00. It and the completeness have two decimals (R30). The
    completeness is there when the reason is limit-reached. Mode and Onboarding-Hint are there when ckf-exhausted is
    the reason or another true exit (R39).
    """
    reason = None if exit is None else exit.reason
    score = min_novelty(envelope)
    result = {
        "CRP-Context-Coverage-Score": f"{0.0 if score is None else score:.2f}",
        "CRP-Context-Coverage-Depth": str(coverage_depth),
        "CRP-Context-NGram-Guard-Activations": str(guard_activations(ranking)),
        "CRP-Context-Continuation-Status": IN_PROGRESS if reason is None else reason,
    }
    if reason == LIMIT_REACHED:
        result["CRP-Quality-Completeness"] = f"{completeness:.2f}"
    if exit is not None and CKF_EXHAUSTED in (exit.reason, *exit.also):
        result["CRP-Context-Mode"] = CKF_EXHAUSTED
        result["CRP-Onboarding-Hint"] = "ingest-more-documents-for-continued-quality"
    return result


# Columns: what a window may ask in general. §2 is the setting scale 1, shift 0, weight 1, gate on the query alone.


@dataclass
class Column:
    """A vector and what its cosine becomes: scale * cosine + shift + addend.

    A fact passes if any column's value is at or above that column's gate (infinity: no gate). A column that is
    `gate_only` takes no part in the score; the others do with their weight. addend: by position of the fact.
    """

    embedding: Vector
    scale: float = 1.0
    shift: float = 0.0
    weight: float = 1.0
    gate: float = math.inf
    gate_only: bool = False
    addend: Mapping[int, float] = field(default_factory=dict)


def column_value(fact: Fact, position: int, column: Column) -> float:
    """The value of a column for the fact at this position."""
    value = column.scale * cosine(fact.embedding, column.embedding) + column.shift
    return value + column.addend.get(position, 0.0)


def column_rank(
    facts: Sequence[Fact],
    query: Column,
    residual: Sequence[Column] = (),
    *,
    coverage: Vector | None = None,
    coverage_scale: float = 1.0,
    coverage_shift: float = 0.0,
    clamp_novelty: bool = False,
    factors_above_zero: bool = False,
    overlap: Mapping[int, int] | None = None,
) -> list[Scored]:
    """The facts that pass a gate, best first, ties by sequence.

    The effective relevance is the largest weight * value of the columns that score; without such a residual column
    the pull is 0, as in §2.2. coverage: a vector whose dot product with the unit fact, scaled and shifted, is the
    coverage score; None for 0. factors_above_zero: importance, multiplier, novelty and penalty leave an effective
    relevance that is not above 0 as it is. overlap: n-grams already written, by position.
    """
    ranking = []
    for position, fact in enumerate(facts):
        values = [column_value(fact, position, column) for column in (query, *residual)]
        if not any(value >= column.gate for value, column in zip(values, (query, *residual), strict=True)):
            continue
        pulls = [c.weight * v for c, v in zip(residual, values[1:], strict=True) if not c.gate_only]
        pull = max(pulls, default=0.0)
        effective = pull if query.gate_only else max(query.weight * values[0], pull)
        covered = 0.0
        if coverage is not None:
            length = math.sqrt(dot(scaled(fact.embedding), scaled(fact.embedding)))
            covered = coverage_scale * (dot(scaled(fact.embedding), coverage) / length) + coverage_shift
        fresh = novelty(covered, clamp_novelty=clamp_novelty)
        penalty = ngram_penalty((overlap or {}).get(position, 0))
        without_guard = fact.importance_weight * fact.multiplier * effective * fresh
        score = without_guard * (1.0 - penalty)
        if factors_above_zero and effective <= 0.0:
            without_guard = score = effective
        scored = Scored(
            fact=fact,
            relevance=values[0],
            coverage=covered,
            residual_pull=pull,
            novelty=fresh,
            ngram_overlap=(overlap or {}).get(position, 0),
            ngram_penalty=penalty,
            score_without_guard=without_guard,
            score=score,
        )
        sequence = position if fact.sequence is None else fact.sequence
        ranking.append((-score, sequence, position, scored))
    ranking.sort(key=lambda entry: entry[:3])
    return [scored for *_, scored in ranking]


# The calibrated mode: an extension beside the specification's formula, never instead of it


@dataclass
class CalibratedSession(ReferenceSession):
    """A session of the calibrated mode. `packed` and `direction` change from window to window, the rest is fixed.

    gate, gate_on: a fact qualifies if its z-score to the query ("query"), or the best one to query and sub-queries
    ("best"), is at or above the gate; where fewer than min_qualified do, so many with the best z-scores qualify, and
    what is at most 1e-9 below them. packed: ids of facts packed so far. direction, words: of the task feedback, fixed
    at the first window. source_weight above 0 replaces the feedback.
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
    packed: set[str | None] = field(default_factory=set)
    direction: list[float] | None = None
    words: dict[str, float] | None = None


def unit(vector: Vector) -> list[float]:
    """The vector divided by its length."""
    values = scaled(vector)
    length = math.sqrt(dot(values, values))
    return [x / length for x in values]


def z_scores(values: Sequence[float]) -> list[float]:
    """(value - mean) / deviation, the deviation that of the population; 0 where there is none."""
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / deviation if deviation > NO_DEVIATION else 0.0 for value in values]


def lexical_words(text: str) -> list[str]:
    """camelCase split, lower case, a final ies, es, s, ing, ed dropped, ASCII words of two characters or more that
    begin with a letter and are no stop words."""
    plain = re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower()
    plain = re.sub(r"(ies|es|s|ing|ed)\b", "", plain)
    return [word for word in re.findall(r"[A-Za-z][A-Za-z0-9]+", plain) if word not in STOP_WORDS]


def impacts(split: Sequence[Sequence[str]], word: str) -> list[float]:
    """What BM25 gives every text, split into words, for one word: idf = ln(1 + (N - df + .5) / (df + .5))."""
    total = sum(map(len, split))
    df = sum(word in words for words in split)
    idf = math.log(1.0 + (len(split) - df + 0.5) / (df + 0.5))
    found = []
    for words in split:
        tf = words.count(word)
        length = BM25_K1 * (1.0 - BM25_B + BM25_B * len(words) * len(split) / total) if tf else 1.0
        found.append(idf * tf * (BM25_K1 + 1.0) / (tf + length))
    return found


def bm25(texts: Sequence[str], query: str) -> list[float]:
    """BM25 of every text for the query's distinct words."""
    return word_evidence(texts, dict.fromkeys(lexical_words(query), 1.0))


def word_evidence(texts: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """For every text the sum over these words of weight * what BM25 gives it for the word."""
    split = [lexical_words(text) for text in texts]
    scores = [0.0] * len(texts)
    for word, weight in weights.items():
        for i, impact in enumerate(impacts(split, word)):
            scores[i] += weight * impact
    return scores


def best_first(facts: Sequence[Fact], values: Sequence[float]) -> list[int]:
    """Positions by value, largest first, ties by sequence."""

    def key(i: int) -> tuple[float, int, int]:
        sequence = facts[i].sequence
        return -values[i], i if sequence is None else sequence, i

    return sorted(range(len(facts)), key=key)


def lexical_scores(facts: Sequence[Fact], session: CalibratedSession) -> list[list[float]]:
    """Items 1 and 2, by sub-query and fact: z(cosine) + lexical_weight * z(BM25)."""
    columns = []
    for item in session.task_sub_queries:
        dense = z_scores([cosine(fact.embedding, item.embedding) for fact in facts])
        words = z_scores(bm25([fact.content for fact in facts], item.text))
        columns.append([d + session.lexical_weight * w for d, w in zip(dense, words, strict=True)])
    return columns


def feedback_positions(facts: Sequence[Fact], columns: Sequence[Sequence[float]]) -> list[int]:
    """Item 3, P: the positions of the 5 best facts of each sub-query, together, ascending."""
    return sorted({i for values in columns for i in best_first(facts, values)[:FEEDBACK_FACTS]})


def feedback_direction(facts: Sequence[Fact], positions: Sequence[int]) -> list[float]:
    """Item 3, g: the mean of their unit vectors less the mean of all facts'."""
    units = [unit(fact.embedding) for fact in facts]
    chosen = [math.fsum(units[i][d] for i in positions) / len(positions) for d in range(len(units[0]))]
    return [c - math.fsum(u[d] for u in units) / len(units) for d, c in enumerate(chosen)]


def feedback_words(facts: Sequence[Fact], positions: Sequence[int]) -> dict[str, float]:
    """Item 3 in words: by how much the mean of what BM25 gives these facts for a word exceeds that of all facts.

    The words of these facts in alphabetical order, those that do not exceed it left out.
    """
    split = [lexical_words(fact.content) for fact in facts]
    found = {}
    for word in sorted({word for i in positions for word in split[i]}):
        impact = impacts(split, word)
        more = math.fsum(impact[i] for i in positions) / len(positions) - math.fsum(impact) / len(impact)
        if more > NO_DEVIATION:
            found[word] = more
    return found


def source_evidence(facts: Sequence[Fact], columns: Sequence[Sequence[float]]) -> list[list[float]]:
    """Item 7, by sub-query and fact: A + pmax + pmean; 0 for a fact without a source or a position in it.

    A: the mean of up to three neighbours on either side in the same source, with weight 1 / distance, over at least
    1. pmax, pmean: the source's sum of the largest (of the mean) over sub-queries, over its facts + 5.
    """
    by_source: dict[str, list[int]] = {}
    for i, fact in enumerate(facts):
        if fact.source is not None and fact.position is not None:
            by_source.setdefault(fact.source, []).append(i)
    result = [[0.0] * len(facts) for _ in columns]
    for members in by_source.values():
        members.sort(key=lambda i: (facts[i].position, i if facts[i].sequence is None else facts[i].sequence))
        shrunk = len(members) + SOURCE_SHRINKAGE
        largest = math.fsum(max(values[i] for values in columns) for i in members) / shrunk
        mean = math.fsum(math.fsum(values[i] for values in columns) / len(columns) for i in members) / shrunk
        for place, i in enumerate(members):
            near = [
                (1.0 / abs(step), members[place + step])
                for step in range(-SOURCE_REACH, SOURCE_REACH + 1)
                if step and 0 <= place + step < len(members)
            ]
            weight = max(1.0, math.fsum(w for w, _ in near))
            for j, values in enumerate(columns):
                result[j][i] = math.fsum(w * values[n] for w, n in near) / weight + largest + mean
    return result


def sub_query_scores(facts: Sequence[Fact], session: CalibratedSession) -> list[list[float]]:
    """X, by sub-query and fact: items 1, 2 and 3 (in vectors and in words), or with source_weight 1, 2 and 7."""
    columns = lexical_scores(facts, session)
    if session.source_weight:
        evidence = source_evidence(facts, columns)
        return [
            [x + session.source_weight * e for x, e in zip(values, more, strict=True)]
            for values, more in zip(columns, evidence, strict=True)
        ]
    positions = feedback_positions(facts, columns)
    more = [0.0] * len(facts)
    if session.feedback_weight:
        direction = feedback_direction(facts, positions) if session.direction is None else session.direction
        along = z_scores([dot(unit(fact.embedding), direction) for fact in facts])
        more = [m + session.feedback_weight * a for m, a in zip(more, along, strict=True)]
    if session.lexical_feedback_weight:
        weights = feedback_words(facts, positions) if session.words is None else session.words
        shared = z_scores(word_evidence([fact.content for fact in facts], weights))
        more = [m + session.lexical_feedback_weight * a for m, a in zip(more, shared, strict=True)]
    return [[x + m for x, m in zip(values, more, strict=True)] for values in columns]


def needs(session: CalibratedSession) -> list[float]:
    """Item 4, by sub-query: max(floor, 1 - min(1, depth / .9)), depth the sum of what was reported, at most 1.

    Where that leaves no need at all (a floor of 0), all are 1.
    """
    found = []
    for item in session.task_sub_queries:
        depth = depth_of(item.id, session.coverage_set)
        found.append(max(session.need_floor, 1.0 - min(1.0, depth / MAX_DEPTH_FROM_WORDS)))
    return found if any(found) else [1.0] * len(found)


@dataclass
class CalibratedScored:
    """A fact that qualified: its score, and by sub-query what packing goes by.

    spec_novelty: §2.2's novelty of the fact, which takes no part in the score (R38).
    """

    fact: Fact
    relevance: float
    score: float
    by_sub_query: list[float]
    ngram_penalty: float = 0.0
    spec_novelty: float = 1.0


def calibrated_rank(
    facts: Sequence[Fact], query_embedding: Vector, session: CalibratedSession
) -> tuple[list[CalibratedScored], float | None]:
    """The qualified facts, best first, and the share of them that was never packed (None when none qualified).

    Items 1 to 7 of the mode. The plain score is the need-weighted maximum over sub-queries. What multiplies a score
    (importance, multiplier, n-gram factor, centred coverage, 1 - packed_penalty for packed facts) does so where it is
    above 0; a packed_penalty of 1 takes packed facts out. Centred coverage: 2 * max(0, weighted mean of the cosines
    to what is covered - their mean over all sub-queries).
    """
    if not facts:
        return [], None
    to_query = z_scores([cosine(fact.embedding, query_embedding) for fact in facts])
    gates = [to_query]
    if session.gate_on == "best":
        for item in session.task_sub_queries:
            gates.append(z_scores([cosine(fact.embedding, item.embedding) for fact in facts]))
    columns = sub_query_scores(facts, session)
    need = needs(session)
    best = [max(values[i] for values in gates) for i in range(len(facts))]
    gate = session.gate
    if sum(z >= gate for z in best) < session.min_qualified:
        enough = len(best) > session.min_qualified
        gate = sorted(best, reverse=True)[session.min_qualified - 1] - NO_DEVIATION if enough else -math.inf
    qualified = new = 0
    ranking = []
    for i, fact in enumerate(facts):
        if best[i] < gate:
            continue
        qualified += 1
        was_packed = fact.id in session.packed
        new += not was_packed
        if was_packed and session.packed_penalty == 1.0:
            continue
        fresh = 1.0
        if session.centred_coverage:
            plain = [cosine(fact.embedding, item.embedding) for item in session.task_sub_queries]
            covered = coverage_score(fact, session.coverage_set)
            if any(entry.depth_weight for entry in session.coverage_set):
                fresh = novelty(max(0.0, 2.0 * (covered - math.fsum(plain) / len(plain))))
        penalty = ngram_penalty(count_matching_ngrams(fact.content, session.ngram_blacklist))
        factor = fact.importance_weight * fact.multiplier * fresh * (1.0 - penalty)
        if was_packed:
            factor *= 1.0 - session.packed_penalty
        x = [values[i] for values in columns]
        plain_score = max(n * value for n, value in zip(need, x, strict=True))
        scored = CalibratedScored(
            fact=fact,
            relevance=to_query[i],
            score=plain_score * factor if plain_score > 0.0 else plain_score,
            by_sub_query=[value * factor if value > 0.0 else value for value in x],
            ngram_penalty=penalty,
            spec_novelty=novelty(coverage_score(fact, session.coverage_set)),
        )
        ranking.append(scored)
    order = best_first([scored.fact for scored in ranking], [scored.score for scored in ranking])
    return [ranking[i] for i in order], new / qualified if qualified else None


def pack_by_need(ranking: Sequence[CalibratedScored], need: Sequence[float], k: int) -> list[CalibratedScored]:
    """Item 5: each slot goes to the sub-query with the largest need / (got + 1), the first of equals, and is filled
    with its best fact not yet packed."""
    facts = [scored.fact for scored in ranking]
    lists = [best_first(facts, [scored.by_sub_query[j] for scored in ranking]) for j in range(len(need))]
    got = [0] * len(need)
    taken: list[int] = []
    while len(taken) < k and len(taken) < len(ranking):
        j = max(range(len(need)), key=lambda j: need[j] / (got[j] + 1))
        taken.append(next(i for i in lists[j] if i not in taken))
        got[j] += 1
    return [ranking[i] for i in taken]
