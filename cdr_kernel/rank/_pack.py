"""Fill of a token budget: a ranking in, the envelope of one window out.

    envelope = pack_facts(ranking, 4000)                     # or count_tokens=length_by_my_tokenizer
    envelope.text, envelope.tokens, envelope.skipped

Greedy, the best facts come first; by need, sub-queries take turns. A shorter fact may still fit where a longer one did
not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from cdr_kernel.concurrency._steps import finish
from cdr_kernel.score._cdr_score import best_first
from cdr_kernel.session._envelope import PackedContext
from cdr_kernel.session._settings import EXHAUSTIONS
from cdr_kernel.spec.constants import MIN_NOVELTY_FLOOR
from cdr_kernel.store._stored_facts import sequences_of, text_of
from cdr_kernel.text._repr import html_table
from cdr_kernel.validation._scalars import check_integer, counted, few

if TYPE_CHECKING:
    from cdr_kernel.rank._ranking import Ranking
    from cdr_kernel.store._fact_store import Fact

_ROOM = 64
"""Binary places that ratios are moved down by where their sum is beyond float64."""
_FIRST = 64
"""Facts of a sub-query that are put in order at first."""
_STEP = 64
"""Facts of a step of `pack_steps`; one counts for another with each of these tokens."""
_STEP_TOKENS = 4096


def count_tokens_default(text: str) -> int:
    """Tokens of a text without a tokenizer: its UTF-8 bytes / 4, rounded up, at least 1."""
    return max(1, math.ceil(len(text.encode("utf-8", "surrogatepass")) / 4))


@dataclass(frozen=True, eq=False)
class Envelope(PackedContext):
    """The packed facts of one window (the context that the writer gets), best first.

    Attributes:
        ranking: The packed facts. Its counters (`qualified`, `guard_activations`, `coverage_depth`) are those of the
            whole ranking.
        tokens: The sum of the tokens of the packed facts, at most token_budget.
        token_budget: The budget.
        skipped: How many facts were skipped because they did not fit.
        max_facts: The limit of facts, None for no limit.
        shortest: The tokens of the shortest fact that was tried. None if none was.
    """

    ranking: Ranking
    tokens: int
    token_budget: int
    skipped: int
    max_facts: int | None = None
    shortest: int | None = None

    def __repr__(self) -> str:
        budget = f"{self.tokens} of {self.token_budget} tokens"
        return f"<Envelope of {counted(len(self.facts), 'fact')}, {budget}, {self.skipped} skipped>"

    def _repr_html_(self) -> str:
        rows = {"facts": len(self.facts), "tokens": f"{self.tokens} of {self.token_budget}", "skipped": self.skipped}
        return html_table("Envelope", rows) + self.ranking._repr_html_()

    @property
    def facts(self) -> tuple[Fact, ...]:
        """The packed facts, best first."""
        return tuple(self.ranking.facts)

    @property
    def text(self) -> str:
        """The texts of the facts, one a line."""
        return "\n".join(fact.text for fact in self.facts)

    @property
    def min_novelty(self) -> float | None:
        """§8.1: the least novelty of the facts, clamped to [0.20, 1] (R3, R13); None when there is none.

        It is the specification's novelty in the calibrated mode too (R38): `Ranking.spec_novelty`.
        """
        if not len(self.ranking):
            return None
        return max(MIN_NOVELTY_FLOOR, min(1.0, float(self.ranking.spec_novelty.min())))

    @property
    def coverage_score(self) -> float:
        """What `CRP-Context-Coverage-Score` says: `min_novelty`, 0.0 for an empty envelope (R39)."""
        return 0.0 if self.min_novelty is None else self.min_novelty

    def check_fits(self) -> None:
        """Refuse an envelope that is empty for another reason than the store (R39).

        `Session.exit` calls it for every envelope that it tests, so that such a one is never exit 3. `Session.update`
        remembers nothing of such a one for exit 3.

        Raises:
            ValueError: facts passed the gate, and `token_budget`, `max_facts` or k leaves no room for any of them.
            TimeoutError: no fact is known, and shards that may have some did not answer in time.
        """
        error = self.misfit
        if error is not None:
            raise error

    @property
    def misfit(self) -> ValueError | TimeoutError | None:
        """What `check_fits` raises, None where it raises nothing."""
        ranking = self.ranking
        if len(ranking):
            return None
        passed = f"{counted(ranking.qualified, 'fact')} passed the relevance gate"
        if ranking.qualified and self.skipped:
            tokens = counted(self.token_budget, "token")
            shortest = "" if self.shortest is None else f" and the shortest has {self.shortest}"
            return ValueError(f"token_budget: no fact fits into {tokens}, {passed}{shortest}: raise the budget")
        if ranking.qualified:
            name = "k" if self.max_facts is None else "max_facts"
            return ValueError(f"{name}: no fact fits into an envelope of 0 facts, {passed}: ask for at least 1")
        if not ranking.complete:
            return TimeoutError(
                f"the ranking has no fact, and no answer came in time from {few(ranking.missing_shards)}: ask again"
            )
        return None

    def why_empty(self, packed_before: bool = False) -> str:
        """Why no fact could be packed, for `Exit.detail` (R12, R39): a filter is named.

        packed_before: whether facts that were packed before are no candidates, and there are some.
        """
        ranking = self.ranking
        if ranking.considered == 0:
            return f"no fact matches the filter {ranking.filter}" if ranking.filter else "the store has no facts"
        which = "fact that was not packed before" if packed_before else "fact"
        if ranking.filter:
            which += f" that matches the filter {ranking.filter}"
        return f"no {which} passed the relevance gate"

    @property
    def new_share(self) -> float:
        """Of the facts that passed the calibrated mode's gate, the share that was never packed before; 0.0 for an
        empty envelope and for a ranking of mode "spec"."""
        share = self.ranking.new_share
        return share if share is not None and len(self.ranking) else 0.0

    def novelty_ratio(self, exhaustion: str = "score") -> float:
        """§6, exit 3: the mean over the packed facts of final score / query relevance (R11).

        exhaustion="novelty" takes the mean of novelty x (1 - n-gram penalty) instead, which no importance
        moves. Facts with relevance <= 0 are left out (R27); 0.0 when no fact is left (R12); inf only where a ratio is,
        not where their sum would be. ValueError for another word.
        """
        if exhaustion not in EXHAUSTIONS:
            raise ValueError(f"exhaustion must be one of {', '.join(map(repr, EXHAUSTIONS))}, got {exhaustion!r}")
        ranking = self.ranking
        above = ranking.relevance > 0.0
        if not above.any():
            return 0.0
        if exhaustion == "score":
            with np.errstate(over="ignore"):
                ratios = ranking.score[above] / ranking.relevance[above]
        else:
            ratios = ranking.novelty[above] * (1.0 - ranking.ngram_penalty[above])
        try:
            return math.fsum(ratios) / len(ratios)
        except OverflowError:
            mean = math.fsum(np.ldexp(ratios, -_ROOM)) / len(ratios)
            return math.ldexp(min(mean, math.ldexp(float(ratios.max()), -_ROOM)), _ROOM)  # rounding may lift it above


class InOrder:
    """Positions in the ranking's order."""

    def __init__(self) -> None:
        self._seen = 0

    def next(self) -> int:
        """The next position that was not given yet; there is one."""
        self._seen += 1
        return self._seen - 1

    def got(self) -> None:
        """The last position was packed."""


class ByNeed:
    """Positions in the order in which sub-queries ask for them, each once.

    Each sub-query's list of all facts, best first, is made as far as it is read: its first n are sorted, four times as
    many when these are used up. ``best_first(values, sequence, n)`` is the first n of the whole list, ties included, so
    what stands beyond them cannot be next as long as one of them was not given yet: the turn goes by need and facts got
    alone, and it takes the first of its list that was not given. With v facts given, no list is read beyond v + 1.
    """

    def __init__(self, ranking: Ranking) -> None:
        assert ranking.by_sub_query is not None
        self._values = ranking.by_sub_query
        self._sequence = sequences_of(ranking.facts)
        self._lists: list[list[int]] = [[] for _ in ranking.need]
        self._places = [0] * len(self._lists)
        self._need = np.array(ranking.need)
        self._got = np.zeros(len(self._need))
        self._seen: set[int] = set()
        self._turn = 0

    def next(self) -> int:
        """The next position that was not given yet; there is one."""
        j = self._turn = int((self._need / (self._got + 1.0)).argmax())
        listed, place = self._lists[j], self._places[j]
        while place == len(listed) or listed[place] in self._seen:
            if place == len(listed):
                wanted = max(_FIRST, 4 * place)
                listed = self._lists[j] = best_first(self._values[:, j], self._sequence, wanted).tolist()
            else:
                place += 1
        self._places[j] = place
        position: int = listed[place]
        self._seen.add(position)
        return position

    def got(self) -> None:
        """The last position was packed."""
        self._got[self._turn] += 1.0


def turns(ranking: Ranking, pack: str | None) -> InOrder | ByNeed:
    """Whose turn it is while packing; pack: as in `pack_facts`, ValueError for what it does not take."""
    if pack not in (None, "greedy", "need"):
        raise ValueError(f'pack must be "greedy", "need" or None, got {pack!r}')
    if pack == "need" and ranking.by_sub_query is None:
        raise ValueError('pack="need" takes a ranking of mode "calibrated"')
    return ByNeed(ranking) if pack != "greedy" and ranking.by_sub_query is not None else InOrder()


def pack_facts(
    ranking: Ranking,
    token_budget: int,
    *,
    count_tokens: Callable[[str], int] = count_tokens_default,
    max_facts: int | None = None,
    pack: str | None = None,
) -> Envelope:
    """Pack facts into a context (the specification says *envelope*), as long as they fit.

    A fact that does not fit is skipped, and the next one is tried. If no fact fits, the envelope is empty; a window of
    it is refused (see `Envelope.check_fits`).

    Args:
        ranking: The ranking.
        token_budget: The most tokens to pack, >= 0. The newlines of `Envelope.text` do not count.
        count_tokens: Returns the tokens of a text, >= 1.
        max_facts: The most facts to pack, >= 0. None is no limit.
        pack: "greedy" packs in the ranking's order. "need" gives each place to the sub-query with the largest need /
            (facts it got + 1), the first of equals, and fills it with that sub-query's best fact that is not packed
            yet; it takes a ranking of the calibrated mode. None is "need" for such a ranking, else "greedy".

    Returns:
        The envelope.

    Raises:
        ValueError: For a negative budget or limit, for a token count below 1, and for another `pack`.
        TypeError: For a budget, limit or token count that is no integer.
    """
    return finish(pack_steps(ranking, token_budget, count_tokens=count_tokens, max_facts=max_facts, pack=pack))


def pack_steps(
    ranking: Ranking,
    token_budget: int,
    *,
    count_tokens: Callable[[str], int] = count_tokens_default,
    max_facts: int | None = None,
    pack: str | None = None,
) -> Generator[Sequence[Fact], None, Envelope]:
    """`pack_facts` in steps. Each yields the facts of the envelope that it has made, none at first."""
    order = turns(ranking, pack)
    token_budget = check_integer(token_budget, "token_budget", 0)
    if max_facts is not None:
        max_facts = check_integer(max_facts, "max_facts", 0)
    packed: list[int] = []
    tokens = skipped = work = 0
    shortest: int | None = None
    facts = ranking.facts
    for seen in range(len(facts)):
        if len(packed) == max_facts:
            break
        if tokens == token_budget:  # nothing is shorter than one token
            skipped += len(facts) - seen
            break
        position = order.next()
        count = count_tokens(text_of(facts, position))
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
            raise ValueError(f"count_tokens must return an int >= 1, got {count!r} for fact {facts[position].id!r}")
        shortest = int(count) if shortest is None else min(shortest, int(count))
        work += 1 + int(count) // _STEP_TOKENS
        if work >= _STEP:
            work = 0
            yield ()
        if tokens + int(count) <= token_budget:
            packed.append(position)
            tokens += int(count)
            order.got()
        else:
            skipped += 1
    chosen = ranking.take(packed)
    source = None if chosen.novelty_source is None else chosen.spec_novelty
    made: list[Fact] = []
    for start in range(0, len(packed), _STEP):
        made += (latest := chosen.facts[start : start + _STEP])
        yield latest
    chosen = replace(chosen, facts=tuple(made), novelty_source=source)
    return Envelope(chosen, tokens, token_budget, skipped, max_facts, shortest)
