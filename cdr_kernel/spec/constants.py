"""The specification's numbers under the specification's names, each with its section (CRP-SPEC-024)."""

from __future__ import annotations

from enum import Enum
from typing import Final

CDR_MIN_RELEVANCE: Final = 0.55
"""§2.6: facts whose cosine to the query is below this are not candidates at all."""

COVERAGE_PENALTY_CAP: Final = 0.80
"""§2.2: what coverage can take away from a fact at most."""

MIN_NOVELTY_FLOOR: Final = 0.20
"""§2.4: what is left of every fact, however well it is covered."""

NGRAM_SIZE: Final = 6
"""§5.1: tokens in one n-gram of the guard."""

NGRAM_PENALTY_STEP: Final = 0.15
"""§5.2: what one matching n-gram takes away."""

NGRAM_PENALTY_CAP: Final = 0.80
"""§5.2: what the guard can take away at most."""

GUARD_ALERT_SHARE: Final = 0.20
"""§5.3: above this share of penalised candidates the guard raises its alert."""

COMPLETION_THRESHOLD: Final = 0.92
"""§6, exit 1."""

MAX_WINDOWS: Final = 5
"""§6, exit 2: the default ceiling."""

MAX_WINDOWS_LIMIT: Final = 20
"""§6, exit 2: how far the ceiling can be raised."""

EXHAUSTION_RATIO: Final = 0.15
"""§6, exit 3: the mean novelty ratio below which the store has nothing new to give."""

SAFETY_BUDGET_FLOOR: Final = 0.10
"""§6, exit 4."""

EXIT_SLACK: Final = 1e-9
"""Reading R10: slack of every comparison that decides an exit."""

DEFAULT_DEPTH: Final = 0.5
"""§3.1: depth of a sub-query that is addressed but has no depth reported."""

MAX_DEPTH_FROM_WORDS: Final = 0.90
"""§3.2 (reading R7): the depth that a word count can reach."""

GUARANTEE_COVERAGE_SCORE: Final = 0.40
"""§9, condition 1: the guarantee holds while the Coverage-Score stays above this."""

TASK_COMPLETE: Final = "task-complete"
LIMIT_REACHED: Final = "limit-reached"
CKF_EXHAUSTED: Final = "ckf-exhausted"
SAFETY_BUDGET_DEPLETED: Final = "safety-budget-depleted"
IN_PROGRESS: Final = "in-progress"
EXIT_REASONS: Final = (TASK_COMPLETE, LIMIT_REACHED, CKF_EXHAUSTED, SAFETY_BUDGET_DEPLETED)
"""§6: the four exits in their order of priority."""


class Depth(float, Enum):
    """§3.2: names for coverage depths, for callers that have no word counts."""

    THOROUGH = 0.90
    ADEQUATE = 0.70
    PARTIAL = 0.40
    MARGINAL = 0.15


SAFE_EXPONENT: Final = 200
"""Readings, "Exact arithmetic": a vector whose largest magnitude lies outside 2^±this is scaled by an exact
power of two first. 200 and not more, since the product of two squared norms must stay a float64."""

# The calibrated mode, an extension: the numbers below are this project's, not the specification's.

CALIBRATED_GATE: Final = 2.0
"""Deviations above the store's mean that the best column of a candidate must reach."""

MIN_QUALIFIED: Final = 200
"""Facts that qualify at least: where fewer reach the gate, as in stores of some hundred facts, the best ones do."""

LEXICAL_WEIGHT: Final = 0.25
"""Share of the z-score of BM25 in a sub-query's score."""

BM25_K1: Final = 1.2
BM25_B: Final = 0.75

FEEDBACK_WEIGHT: Final = 0.4
"""Share of the z-score along the task's own direction."""

FEEDBACK_FACTS: Final = 5
"""Facts per sub-query that make that direction."""

LEXICAL_FEEDBACK_WEIGHT: Final = 0.5
"""Share of the z-score of the words that these facts have above the store's mean."""

NEED_FLOOR: Final = 0.35
"""What a sub-query keeps of its need, however well it is covered."""

MIN_NEW_SHARE: Final = 0.15
"""Share of never packed facts among the qualified below which the store is exhausted."""

SOURCE_REACH: Final = 3
"""Neighbours on either side of a fact in its source that count, each with weight 1 / distance."""

SOURCE_SHRINKAGE: Final = 5
"""Facts of score 0 that a source's mean is taken with."""

NO_DEVIATION: Final = 1e-9
"""Numbers that spread less than this over a store do not tell facts apart: their z-score is 0."""

_STOP_WORDS = """
a about above across after afterwards again against all almost alone along already also although always am among
amongst amoungst amount an and another any anyhow anyone anything anyway anywhere are around as at back be
became because become becomes becoming been before beforehand behind being below beside besides between beyond
bill both bottom but by call can cannot cant co con could couldnt cry de describe detail do done down due during
each eg eight either eleven else elsewhere empty enough etc even ever every everyone everything everywhere
except few fifteen fifty fill find fire first five for former formerly forty found four from front full further
get give go had has hasnt have he hence her here hereafter hereby herein hereupon hers herself him himself his
how however hundred i ie if in inc indeed interest into is it its itself keep last latter latterly least less
ltd made many may me meanwhile might mill mine more moreover most mostly move much must my myself name namely
neither never nevertheless next nine no nobody none noone nor not nothing now nowhere of off often on once one
only onto or other others otherwise our ours ourselves out over own part per perhaps please put rather re same
see seem seemed seeming seems serious several she should show side since sincere six sixty so some somehow
someone something sometime sometimes somewhere still such system take ten than that the their them themselves
then thence there thereafter thereby therefore therein thereupon these they thick thin third this those though
three through throughout thru thus to together too top toward towards twelve twenty two un under until up upon
us very via was we well were what whatever when whence whenever where whereafter whereas whereby wherein
whereupon wherever whether which while whither who whoever whole whom whose why will with within without would
yet you your yours yourself yourselves
"""

STOP_WORDS: Final = frozenset(_STOP_WORDS.split())
"""The English stop words of the Glasgow Information Retrieval Group."""
