"""A window's question asked again with one thing changed: what `explain` is made of.

A `Question` is one fact in one ranking of a session; a `WhatIf` changes a number of the fact, the envelope or the
state, and says whether the fact is packed then. Scores come from the exact routine, envelopes from `pack_facts`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdr_kernel import _C
from cdr_kernel.rank._cdr_rank import Multiplier, cdr_rank, multipliers
from cdr_kernel.rank._pack import pack_facts, turns
from cdr_kernel.rank._ranking import Ranking
from cdr_kernel.rank._window_query import WindowQuery, window_query
from cdr_kernel.score import Columns, Scores
from cdr_kernel.score._cdr_score import Factors, best_first, check_product, ngram_penalty, passing_scores
from cdr_kernel.score._columns import COVERAGE
from cdr_kernel.session import Session
from cdr_kernel.session._task import SessionState
from cdr_kernel.spec.constants import NGRAM_PENALTY_CAP, NGRAM_PENALTY_STEP
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.store._stored_facts import sequences_of, text_of

UNLIMITED = 2**62
"""Tokens; no ranking comes near."""
_MOST_PENALISED = math.ceil(NGRAM_PENALTY_CAP / NGRAM_PENALTY_STEP)
_LARGEST = 2.0**100


@dataclass(frozen=True)
class Gate:
    """What a candidate must reach: one of these values its gate. name: "query", or a sub-query's id."""

    name: str
    value: float
    gate: float

    @property
    def passed(self) -> bool:
        """As far as float64 shows it; at the very edge the ranking decides exactly."""
        return self.value >= self.gate


@dataclass(frozen=True)
class Pull:
    """What a sub-query does for the fact. value: its cosine (mode "calibrated": deviations, with words and
    direction). weight: 1, 0 for one that does not pull (calibrated: its need). pulled: its weight x value is the
    residual pull, and that is above the relevance (calibrated: nothing else makes the score)."""

    sub_query_id: str
    label: str
    value: float
    weight: float
    pulled: bool


@dataclass(frozen=True)
class Push:
    """What one coverage entry does against the fact. share: depth_weight x cosine / the sum of depths; the shares add
    up to the coverage (calibrated: to half of it, less the mean cosine to all sub-queries)."""

    sub_query_id: str
    label: str
    window_number: int
    depth_weight: float
    cosine: float
    share: float


@dataclass(frozen=True)
class Change:
    """One change after which the fact is in the envelope, everything else as it is.

    bound: "at least" or "at most" `needed`, or "" for exactly that. name, with what `now` and `needed` are:
    importance, multiplier, max_facts, token_budget (enough; less may be) and tokens of the text: numbers.
    ngram_overlap: blacklisted n-grams in the text. novelty, relevance (the larger of relevance and pull): numbers that
    the fact's vector makes; as far as float64 shows it. packed: whether it was packed before. guard: whether there is
    one. covered: the label of a sub-query, as if no window had addressed it, so that it remains and pulls.
    """

    name: str
    bound: str
    now: Any
    needed: Any

    @property
    def text(self) -> str:
        """In words. Numbers are rounded to the side on which they still do."""
        if self.name == "covered":
            return f"“{self.needed}” not covered"
        if self.name == "packed":
            return "the fact not packed before"
        if self.name == "guard":
            return "no n-gram guard"
        now = f"{self.now:.4g}" if isinstance(self.now, float) else str(self.now)
        needed = str(self.needed)
        if isinstance(self.needed, float):
            step = 10.0 ** (math.floor(math.log10(abs(self.needed))) - 4) if self.needed else 1.0
            rounded = (math.ceil if self.bound == "at least" else math.floor)(self.needed / step) * step
            needed = f"{rounded:.5g}"
        return f"{self.name.replace('_', ' ')} {self.bound} {needed} (now {now})"


class StoreChanged(Exception):
    """Between two rankings of one explanation."""


@dataclass(frozen=True)
class Room:
    """What `pack_facts` packs into."""

    tokens: int
    max_facts: int | None
    count_tokens: Callable[[str], int]
    pack: str | None

    def packed(self, ranking: Ranking) -> Ranking:
        """Who is packed, in the order of packing."""
        return pack_facts(
            ranking, self.tokens, count_tokens=self.count_tokens, max_facts=self.max_facts, pack=self.pack
        ).ranking

    def turns(self, ranking: Ranking) -> Iterator[tuple[int, int, int]]:
        """Whose turn it is, as a position, and the tokens and facts packed before; what `pack_facts` goes through."""
        order = turns(ranking, self.pack)
        used = packed = 0
        for _ in range(len(ranking)):
            if packed == self.max_facts:
                return
            position = order.next()
            yield position, used, packed
            tokens = int(self.count_tokens(text_of(ranking.facts, position)))
            if used + tokens <= self.tokens:
                used, packed = used + tokens, packed + 1
                order.got()


@dataclass(frozen=True)
class Question:
    """One fact, and what a session asks of a version of the store.

    retriever: a `Retriever`, or a `ShardedRetriever`; the view then has the fact alone.
    """

    query: Any
    retriever: Any
    session: Session
    state: SessionState
    view: StoreView
    fact_id: str
    multiplier: Multiplier | None

    def _with(self, **parts: Any) -> Question:
        state = replace(self.state, **parts)
        return replace(self, session=self.session.supposing(state), state=state)

    def row(self) -> int:
        try:
            return self.view.row_of(self.fact_id)
        except KeyError:
            raise KeyError(f"fact_id: {self.fact_id!r} is not in the store") from None

    def ranking(self) -> Ranking:
        self.row()
        made = cdr_rank(self.query, self.retriever, self.session, multiplier=self.multiplier)
        if made.store_version != self.view.version:
            raise StoreChanged
        return made

    def factor(self) -> float:
        """The fact's multiplier."""
        factors = multipliers(self.multiplier, self.view)
        return 1.0 if factors is None else float(factors[self.row()])

    def asked(self) -> WindowQuery:
        made = window_query(self.session.settings, self.query, self.retriever, self.session, self.state, self.view)
        (kept,) = self.retriever.qualified([self.session], [made.gates], self.view)
        return made.with_enough(kept.rows, self.retriever, self.session, self.view)

    def unpacked(self) -> Question:
        return self._with(packed={id: n for id, n in self.state.packed.items() if id != self.fact_id})

    def unguarded(self) -> Question:
        return self._with(guard=None)

    def uncovered(self) -> Iterator[tuple[str, Question]]:
        """For each covered sub-query its label and the question if it had not been addressed."""
        for item in self.session.sub_queries:
            left = tuple(entry for entry in self.state.coverage if entry.sub_query_id != item.id)
            if len(left) < len(self.state.coverage):
                addressed = {entry.sub_query_id for entry in left}
                residual = tuple(s for s in self.session.sub_queries if s.id not in addressed)
                yield item.label, self._with(coverage=left, residual=residual)

    def lower_gate(self) -> float | None:
        """The largest gate that lets the fact pass, decided as the retriever decides; None where today's does."""
        asked, view = self.asked(), self.view
        row = np.array([self.row()], np.int64)

        def passes(gate: float) -> bool:
            tried = replace(asked.gates, gate=np.where(asked.gates.gate < np.inf, gate, np.inf))
            return bool(len(_C.gate_rows(view.blocks, view.squared_norms, tried.compiled, row)))

        if passes(float(asked.gates.gate.min())):
            return None
        best = max(gate.value for gate in self.gates(asked))
        while not passes(best):
            best = math.nextafter(best, -math.inf)
        while passes(math.nextafter(best, math.inf)):
            best = math.nextafter(best, math.inf)
        return best

    def values(self, columns: Columns) -> Any:
        """The row's column values without the coverage column: query, then residual."""
        row = np.array([self.row()], np.int64)
        return _C.column_values(self.view.blocks, self.view.squared_norms, columns.compiled, row)[0]

    def scoring(self, asked: WindowQuery) -> Columns:
        """The columns that score the row."""
        return asked.scoring(np.array([self.row()], np.int64))

    def gates(self, asked: WindowQuery) -> tuple[Gate, ...]:
        names = ["query", *(item.id for item in self.session.sub_queries)]
        gate = np.delete(asked.gates.gate, COVERAGE)
        values = self.values(asked.gates)
        at = np.flatnonzero(gate < np.inf).tolist()
        return tuple(Gate(names[i], float(values[i]), float(gate[i])) for i in at)

    def pulls(self, asked: WindowQuery) -> tuple[Pull, ...]:
        subs = self.session.sub_queries
        if asked.scored.stop:  # else no column is a sub-query's alone
            values = self.values(self.scoring(asked))[asked.scored.start - 1 : asked.scored.stop - 1]
            weights, relevance = asked.columns.weight[asked.scored], -math.inf
        else:
            every = Columns.spec(self.query, residual=self.session.embeddings, first_window_pull=True)
            relevance, *values = self.values(every)
            pulling = {item.id for item in self.state.residual} if len(asked.columns.residual) else set()
            weights = np.array([float(item.id in pulling) for item in subs])
        strength = [w * v if w else -math.inf for w, v in zip(weights, values, strict=True)]
        best = max(range(len(subs)), key=strength.__getitem__)
        order = sorted(range(len(subs)), key=lambda j: (-strength[j], -values[j], j))
        return tuple(
            Pull(
                subs[j].id,
                subs[j].label,
                float(values[j]),
                float(weights[j]),
                j == best and bool(strength[j] > relevance),
            )
            for j in order
        )

    def pushes(self) -> tuple[Push, ...]:
        entries = self.state.coverage
        if not entries:
            return ()
        every = Columns.spec(self.query, residual=[entry.embedding for entry in entries], first_window_pull=True)
        cosines = self.values(every)[1:]
        total = math.fsum(entry.depth_weight for entry in entries)
        labels = {item.id: item.label for item in self.session.sub_queries}
        made = [
            Push(
                entry.sub_query_id,
                labels[entry.sub_query_id],
                entry.window_number,
                entry.depth_weight,
                float(cosine),
                entry.depth_weight * float(cosine) / total if total else 0.0,
            )
            for entry, cosine in zip(entries, cosines, strict=True)
        ]
        return tuple(sorted(made, key=lambda push: -push.share))

    def passages(self, text: str) -> tuple[str, ...]:
        """The blacklisted n-grams, those that overlap or touch in one passage."""
        guard = self.state.guard
        passages: list[list[str]] = []
        end = -1
        for start, gram in [] if guard is None else guard.matches(text):
            if start <= end:
                passages[-1] += gram[len(gram) - (start + len(gram) - end) :]
            else:
                passages.append(list(gram))
            end = start + len(gram)
        return tuple(" ".join(tokens) for tokens in passages)


class WhatIf:
    """The ranking with one number of the fact changed, cut down to the facts that decide whether it is packed."""

    def __init__(self, question: Question, ranking: Ranking, room: Room) -> None:
        self.question, self.room, self.ranking = question, room, ranking
        self.asked = question.asked()
        self._columns = question.scoring(self.asked)
        view, id = question.view, question.fact_id
        self._row = np.array([question.row()], np.int64)
        (self.fact,) = view.facts(self._row)
        self.at = ranking.ids.index(id) if id in ranking.ids else None
        self.penalty = question.session.settings.packed_factor if id in question.state.packed else 1.0
        self.importance = self.fact.importance
        self.multiplier = question.factor()
        guard = question.state.guard
        self.overlap = 0 if guard is None else int(guard.overlap_rows(view.tokens, self._row)[0])
        self._tokens = int(room.count_tokens(self.fact.text))
        self._deciders = self._deciding()

    def _deciding(self) -> Ranking:
        """The other facts whose turn comes while this one could still be packed, in the ranking's order, then this one.

        Among them packing goes as among all, up to where this one cannot be packed any more.
        """
        others = self.ranking.take([i for i in range(len(self.ranking)) if i != self.at])
        tried = []
        for position, used, _ in self.room.turns(others):
            if used + self._tokens > self.room.tokens:
                break
            tried.append(position)
        others = others.take(sorted(tried))
        others = replace(others, novelty_source=None)  # packing does not read it
        padded: dict[str, Any] = {
            name: np.concatenate([value, np.zeros((1, *value.shape[1:]), value.dtype)])
            for name, value in vars(others).items()
            if isinstance(value, np.ndarray)
        }
        return replace(others, facts=(*others.facts, self.fact), **padded)

    def crowded_out(self) -> bool:
        """Whether it is tokens that keep the fact out, where it stands."""
        return self.question.fact_id in replace(self.room, tokens=UNLIMITED).packed(self.ranking).ids

    def scores(self, importance: float, multiplier: float, overlap: int) -> Scores:
        """What the exact routine makes of the fact, which passes the gate."""
        factors = Factors(np.array([importance]), np.array([self.penalty * multiplier]), np.array([overlap], np.int32))
        check_product(np.array([importance]), np.array([self.penalty * multiplier]))
        view = self.question.view
        return passing_scores(view.blocks, view.squared_norms, self._row, self._columns, factors)

    def now(self) -> Scores:
        """The fact's numbers as they are."""
        return self.scores(self.importance, self.multiplier, self.overlap)

    def enters(
        self, importance: float | None = None, multiplier: float | None = None, overlap: int | None = None
    ) -> bool:
        """Whether the fact is packed with these numbers in place of its own."""
        importance = self.importance if importance is None else importance
        multiplier = self.multiplier if multiplier is None else multiplier
        overlap = self.overlap if overlap is None else overlap
        made = self.scores(importance, multiplier, overlap)
        tried = self._deciders
        score, by_sub_query = tried.score.copy(), tried.by_sub_query
        score[-1] = made.score[0]
        if by_sub_query is not None:  # as `cdr_rank` makes them
            scored = self.asked.scored
            x = self.question.values(self._columns)[scored.start - 1 : scored.stop - 1]
            penalty = float(ngram_penalty(overlap))
            strength = importance * (self.penalty * multiplier) * made.novelty[0] * (1.0 - penalty)
            by_sub_query = by_sub_query.copy()
            by_sub_query[-1] = np.where(x > 0.0, x * strength, x)
        sequence = sequences_of(tried.facts)
        ranking = replace(tried, score=score, by_sub_query=by_sub_query).take(best_first(score, sequence))
        return self.question.fact_id in self.room.packed(ranking).ids

    def changes(self) -> Iterator[Change]:
        """Every single change that would put the fact into the envelope."""
        question, id = self.question, self.question.fact_id
        if self.at is not None:
            yield from self._of_the_fact()
            yield from self._of_the_envelope()
            if self.overlap and self._packed_in(question.unguarded()):
                yield Change("guard", "", True, False)
        if id in question.state.packed and self._packed_in(question.unpacked()):
            yield Change("packed", "", True, False)
        if self.at is not None:
            for label, other in question.uncovered():
                if self._packed_in(other):
                    yield Change("covered", "", True, label)

    def _packed_in(self, question: Question) -> bool:
        return question.fact_id in self.room.packed(question.ranking()).ids

    def _of_the_fact(self) -> Iterator[Change]:
        importance = _least(lambda value: self.enters(importance=value), self.importance)
        if importance is not None:
            yield Change("importance", "at least", self.importance, importance)
        multiplier = _least(lambda value: self.enters(multiplier=value), self.multiplier)
        if multiplier is not None:
            yield Change("multiplier", "at least", self.multiplier, multiplier)
        for overlap in range(min(self.overlap, _MOST_PENALISED) - 1, -1, -1):
            if self.enters(overlap=overlap):
                yield Change("ngram_overlap", "at most", self.overlap, overlap)
                break
        if multiplier is None or not self.multiplier:
            return
        now, more = self.now(), multiplier / self.multiplier
        novelty, relevance = float(now.novelty[0]), float(max(now.relevance[0], now.residual_pull[0]))
        if novelty * more <= 1.0:
            yield Change("novelty", "at least", novelty, novelty * more)
        if self.question.session.settings.in_cosines and relevance * more <= 1.0:
            yield Change("relevance", "at least", relevance, relevance * more)

    def _of_the_envelope(self) -> Iterator[Change]:
        room, id = self.room, self.question.fact_id
        if room.max_facts is not None:
            packed = replace(room, max_facts=None).packed(self.ranking).ids
            if id in packed:
                yield Change("max_facts", "at least", room.max_facts, packed.index(id) + 1)
        if room.tokens == UNLIMITED:
            return
        roomy = replace(room, tokens=UNLIMITED).packed(self.ranking)
        if id in roomy.ids:
            ahead = roomy.facts[: roomy.ids.index(id) + 1]
            enough = sum(int(room.count_tokens(fact.text)) for fact in ahead)
            yield Change("token_budget", "at least", room.tokens, enough)
        left = next((room.tokens - used for position, used, _ in room.turns(self.ranking) if position == self.at), 0)
        if 0 < left < self._tokens:
            yield Change("tokens", "at most", self._tokens, left)


def _least(enters: Callable[[float], bool], now: float) -> float | None:
    """The least float64 above `now` that lets the fact in, None where none up to 2^100 does."""
    high = max(1.0, 2.0 * now)
    while not enters(high):
        if high >= _LARGEST:
            return None
        high = min(1024.0 * high, _LARGEST)
    low, top = _bits(now), _bits(high)
    while low + 1 < top:
        middle = (low + top) // 2
        low, top = (low, middle) if enters(_float(middle)) else (middle, top)
    return _float(top)


def _bits(value: float) -> int:
    """Of floats >= 0: integers in the same order, one apart for neighbours."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _float(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
