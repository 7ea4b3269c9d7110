"""What crprotocol 6 computes, found by running it: one fact in plain Python to the last bit, many facts fast.

It is not CRP-SPEC-024: novelty has 0.20 times the residual pull added and is at most 1, the residual pulls in the first
window too, nothing is checked, and a vector of another dimension has cosine 0 to everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cdr_kernel.adapters._facts import SOUND, FactArray, as_floats, pack_rows
from cdr_kernel.score import Columns, cdr_score
from cdr_kernel.score._columns import QUERY, RESIDUAL
from cdr_kernel.spec.constants import COVERAGE_PENALTY_CAP, MIN_NOVELTY_FLOOR
from cdr_kernel.validation._arrays import Float64, Int64, check_rows

PULL_SHARE = 0.20
"""What crprotocol adds of the residual pull to novelty."""
TINY = 1e-12
"""What it divides by in place of a zero."""
BEST = 10
"""How many of the best facts its mean novelty is about."""


def cosine(a: Any, b: Any) -> Any:
    """Python floats and its sum(); 0 for None, an empty vector or two dimensions."""
    if not a or not b or len(a) != len(b):
        return 0.0
    norms = (math.sqrt(sum(x * x for x in a)) or TINY) * (math.sqrt(sum(y * y for y in b)) or TINY)
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms


def coverage_score(vector: Any, entries: Sequence[Any]) -> Any:
    """The mean of the cosines to the entries, weighted by depth; 0 without entries."""
    if not entries:
        return 0.0
    vector = as_floats(vector)
    total = sum(entry.depth_weight for entry in entries) or TINY
    weighted = 0.0
    for (
        entry
    ) in entries:  # not sum(), which rounds otherwise from Python 3.12 on; crprotocol uses it elsewhere, not here
        weighted += entry.depth_weight * cosine(vector, as_floats(entry.embedding))
    return weighted / total


def residual_pull(vector: Any, residual: Sequence[Any]) -> Any:
    """The largest cosine to what remains, negative ones too; 0 without any."""
    vector = as_floats(vector)
    return max((cosine(vector, as_floats(item.embedding)) for item in residual), default=0.0)


def novelty(coverage: Any, pull: Any) -> Any:
    """Of a coverage score and a residual pull: at most 1, and below the floor where the residual pushes."""
    return min(1.0, max(1.0 - min(coverage, COVERAGE_PENALTY_CAP), MIN_NOVELTY_FLOOR) + PULL_SHARE * pull)


class Numbers(NamedTuple):
    """One fact's result: the fields of ``CDRScoredFact`` after ``fact``. The defaults are those of an excluded one."""

    relevance: Any
    novelty: Any = 1.0
    residual_pull: Any = 0.0
    importance: Any = 1.0
    cdr_score: Any = 0.0
    excluded: bool = False


def score(
    vector: Any,
    query: Any,
    novelty: Callable[[Any], Any],
    residual_pull: Callable[[Any], Any],
    importance: Any,
    min_relevance: Any,
) -> Numbers:
    """One fact; vector is None where it has none. novelty and residual_pull are asked only where it passes the gate."""
    if vector is None:
        return Numbers(0.0, excluded=True)
    relevance = cosine(as_floats(vector), as_floats(query))
    if relevance < min_relevance:
        return Numbers(relevance, excluded=True)
    fresh, pull = novelty(vector), residual_pull(vector)
    return Numbers(relevance, fresh, pull, importance, importance * max(relevance, pull) * fresh)


class Ranked(NamedTuple):
    """The facts that pass, best first: their positions in the list, and the fields of their results."""

    positions: list[int]
    relevance: list[Any]
    novelty: list[Any]
    residual_pull: list[Any]
    importance: list[Any]
    cdr_score: list[Any]

    def best_first(self) -> Ranked:
        """Sorted as Python sorts floats: equal scores stay in order, and a NaN leaves its neighbours unsorted."""
        order = sorted(range(len(self.positions)), key=self.cdr_score.__getitem__, reverse=True)
        return Ranked(*([values[i] for i in order] for values in self))


def weights_at(importance: Sequence[Any] | None, positions: Sequence[int]) -> list[Any]:
    """The weights of the facts at these positions, of one per fact; 1 each for None."""
    return [1.0] * len(positions) if importance is None else [importance[i] for i in positions]


def mean_novelty(novelties: Sequence[Any]) -> Any:
    """Over the ten best; 1 for none."""
    best = novelties[:BEST]
    return sum(best) / len(best) if best else 1.0


def rank_plain(count: int, score_of: Callable[[int], Numbers]) -> Ranked:
    """Facts 0 to count - 1, each by itself."""
    each = [(i, *numbers) for i in range(count) if not (numbers := score_of(i)).excluded]
    return Ranked(*([row[field] for row in each] for field in range(len(Ranked._fields)))).best_first()


class Task:
    """One question of many facts: the query, what is covered and what remains, the weights and the gate.

    entries have depth_weight and embedding, residual items an embedding. importance: see ``weights_at``.
    """

    def __init__(
        self,
        facts: FactArray,
        query: Any,
        entries: Sequence[Any],
        residual: Sequence[Any],
        importance: Sequence[Any] | None,
        min_relevance: Any,
    ) -> None:
        self.facts = facts
        self.query = as_floats(query)
        self.entries = entries
        self.residual = residual
        self.importance = importance
        self.min_relevance = min_relevance
        self._seen: dict[tuple[Any, ...], Numbers] = {}

    def plain(self, position: int) -> Numbers:
        """One fact's numbers by ``score``; equal vectors with equal weights are computed once."""
        vector, (weight,) = self.facts.vector(position), weights_at(self.importance, [position])
        try:
            key = (type(weight), weight, tuple(vector))  # True is 1, but not what was given
            hash(key)
        except TypeError:  # nothing to iterate, or something in it that has no hash: computed every time
            return self._plain(vector, weight)
        if key not in self._seen:
            self._seen[key] = self._plain(vector, weight)
        return self._seen[key]

    def _plain(self, vector: Any, weight: Any) -> Numbers:
        return score(
            vector,
            self.query,
            lambda v: novelty(coverage_score(v, self.entries), residual_pull(v, self.residual)),
            lambda v: residual_pull(v, self.residual),
            weight,
            self.min_relevance,
        )

    def rank(self) -> Ranked:
        """The same facts in the same order as by ``plain``, their numbers to about 1e-13.

        The kernel's numbers differ from plain ones by rounding. Wherever that could decide (at the gate, between two
        scores), and wherever a vector or a weight is out of the ordinary, a fact is computed plainly.
        """
        columns, slack = self._columns()
        if columns is None:
            return rank_plain(len(self.facts), self.plain)
        facts = self.facts
        sound = np.flatnonzero(facts.flags == SOUND)
        found = cdr_score(
            (facts.matrix,),
            columns,
            rows=None if len(sound) == len(facts.rows) else sound,
            squared_norms=facts.squared_norms,
            impl="cpp",
        )
        at = facts.rows[found.rows]
        weights, factor = self._weights(at)
        pull = self._pull(found.residual_pull, len(columns.residual))
        fresh = np.minimum(1.0, found.novelty + PULL_SHARE * pull)
        with np.errstate(all="ignore"):  # infinite and NaN weights go through, as they do there
            scores = factor * np.maximum(found.relevance, pull) * fresh
        order = np.argsort(-scores, kind="stable")  # equal scores stay in order
        unsure = self._unsure(found.relevance, factor, scores, order, slack)
        again = facts.rows[facts.flags != SOUND].tolist() + list(facts.odd)
        if unsure.any() or again:
            lists = at.tolist(), found.relevance.tolist(), fresh.tolist(), pull.tolist(), weights, scores.tolist()
            return self._with_plain(Ranked(*lists), unsure, again).best_first()
        if self.importance is not None:
            weights = [weights[i] for i in order.tolist()]
        relevance, fresh, pull = found.relevance[order], fresh[order], pull[order]
        lists = at[order].tolist(), relevance.tolist(), fresh.tolist(), pull.tolist(), weights, scores[order].tolist()
        return Ranked(*lists)

    def mean_novelty(self, ranked: Ranked, threshold: Any) -> Any:
        """``mean_novelty`` of ranked; plain where rounding could put it on the other side of threshold."""
        mean = mean_novelty(ranked.novelty)
        if abs(mean - threshold) < 1e-9:
            mean = mean_novelty([self.plain(i).novelty for i in ranked.positions[:BEST]])
        return mean

    def _columns(self) -> tuple[Columns | None, float]:
        """What the kernel is asked, and by how much its cosines, pulls and novelties may differ from plain ones.

        None where the query, a weight or the gate is out of the ordinary.
        """
        dim, gate = self.facts.dim, self.min_relevance
        if not isinstance(gate, float | int) or not abs(gate) < 1e6 or not self.query or len(self.query) != dim:
            return None, 0.0
        entries = [e for e in self.entries if _length(e.embedding) == dim]
        residual = [r for r in self.residual if _length(r.embedding) == dim]
        vectors = [self.query, *(e.embedding for e in entries), *(r.embedding for r in residual)]
        rows, numeric = pack_rows(vectors, dim)
        squared_norms, flags = check_rows((rows,))
        depths = [e.depth_weight for e in self.entries]
        if not numeric.all() or flags.any() or not all(isinstance(d, float | int) and math.isfinite(d) for d in depths):
            return None, 0.0
        total, spread = sum(depths), sum(abs(d) for d in depths)
        if spread > 1e3 * abs(total):  # also where the total is 0
            return None, 0.0
        # A cosine is off by (D + 64) ulp, plainly or here. The coverage sums E of them in another order than the
        # kernel, which takes one product with their sum: E ulp more of Σ |depth| / |Σ depth|, on either side.
        slack = 8.0 * (dim + len(self.entries) + 64) * 2.0**-52 * (1.0 + spread / (abs(total) or 1.0))
        pulls = rows[1 + len(entries) :]
        shares: Float64 = np.array([e.depth_weight for e in entries]) / (total or 1.0)
        unit = rows[1 : 1 + len(entries)] / np.sqrt(squared_norms[1 : 1 + len(entries), None])
        settings = np.ones(RESIDUAL + len(pulls))
        gates = np.full(len(settings), np.inf)
        gates[QUERY] = gate - slack
        columns = Columns(
            query=rows[0],
            coverage=shares @ unit if entries else None,
            residual=pulls,
            scale=settings,
            shift=np.zeros(len(settings)),
            weight=settings,
            gate=gates,
        )
        return columns, slack

    def _pull(self, largest: Float64, counted: int) -> Float64:
        """The residual pull, from the largest cosine to those of the facts' dimension: the others have cosine 0."""
        if counted == 0:
            return np.zeros(len(largest))
        return largest if counted == len(self.residual) else np.maximum(largest, 0.0)

    def _weights(self, positions: Int64) -> tuple[list[Any], Float64]:
        """The facts' weights as they came, and as float64: NaN where one is out of the ordinary."""
        weights = weights_at(self.importance, positions.tolist())
        if self.importance is None:
            return weights, np.ones(len(weights))
        return weights, np.array([_float(w) for w in weights])

    def _unsure(
        self, relevance: Float64, factor: Float64, scores: Float64, order: Int64, slack: float
    ) -> npt.NDArray[np.bool_]:
        """Which facts are to be computed plainly: near the gate, near another score, not finite. order: by score,
        descending."""
        finite = np.isfinite(scores)
        unsure: npt.NDArray[np.bool_] = ~finite | (np.abs(relevance - self.min_relevance) <= slack)
        with np.errstate(invalid="ignore"):  # of two infinite ones, which are unsure already
            gaps = -np.diff(scores[order])
        close = gaps <= 2.0 * slack * max(1.0, float(np.abs(factor[finite]).max(initial=0.0)))
        near = np.zeros(len(scores), np.bool_)
        near[order[1:]] = close
        near[order[:-1]] |= close
        exact = factor == 0.0
        if not self.residual:
            exact |= relevance < -slack  # the effective relevance is 0 there
        unsure |= near & ~exact
        return unsure

    def _with_plain(self, ranked: Ranked, unsure: npt.NDArray[np.bool_], more: list[int]) -> Ranked:
        """ranked with the unsure ones and more computed plainly, in the order of their positions."""
        sure = np.flatnonzero(~unsure).tolist()
        rows = [tuple(values[i] for values in ranked) for i in sure]
        for position in sorted([ranked.positions[i] for i in np.flatnonzero(unsure).tolist()] + more):
            numbers = self.plain(position)
            if not numbers.excluded:
                rows.append((position, *numbers[:-1]))
        rows.sort(key=lambda row: row[0])
        return Ranked(*([row[field] for row in rows] for field in range(len(Ranked._fields))))


def _float(weight: Any) -> float:
    """NaN for what is no number, or none that a float can hold."""
    try:
        return float(weight) if isinstance(weight, float | int) else math.nan
    except OverflowError:
        return math.nan


def _length(vector: Any) -> int:
    return 0 if vector is None else len(vector)
