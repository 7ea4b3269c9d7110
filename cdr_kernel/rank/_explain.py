"""Why a fact ranked where it did, and what would have to change for it to enter the envelope.

    why = explain(query, retriever, session, "fact-7", max_facts=10)
    print(why)                                               # also `why.as_dict()`, and a table in rich and notebooks

Nothing is estimated: every change that is named was tried, on the scores that a ranking after it would have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cdr_kernel.rank import _tables
from cdr_kernel.rank._cdr_rank import Multiplier, Ranks
from cdr_kernel.rank._counterfactual import UNLIMITED, Change, Gate, Pull, Push, Question, Room, StoreChanged, WhatIf
from cdr_kernel.rank._pack import count_tokens_default
from cdr_kernel.retrieve import Retriever
from cdr_kernel.score import Columns
from cdr_kernel.score._cdr_score import ngram_penalty
from cdr_kernel.session import CoverageEntry, Session, SubQuery
from cdr_kernel.spec.constants import CDR_MIN_RELEVANCE
from cdr_kernel.store import FactStore
from cdr_kernel.store._fact_store import Fact
from cdr_kernel.text._repr import escape
from cdr_kernel.validation._arrays import as_vector

if TYPE_CHECKING:
    from rich.console import Group

_ATTEMPTS = 16

STATUSES = {
    "packed": "in the envelope",
    "outranked": "ranked, but other facts take the places",
    "does not fit": "its turn comes, but its text does not fit into what is left of the token budget",
    "below the gate": "not a candidate: below the relevance gate (§2.6)",
    "packed before": "passes the gate, but an earlier window packed it and this session packs a fact once",
    "not found": "passes the gate, but the approximate index missed it",
}


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """One fact of one window's question.

    status: a key of `STATUSES`. rank: 1-based among the `ranked` facts that may be packed, None for one that is not
    among them. place: 1-based in the envelope, None outside. slots: facts in the envelope.
    gates: what decides who is a candidate. min_relevance: the largest gate (calibrated: in deviations) that the fact
    passes, None where it passes; all numbers below and `changes` are then those with that gate.
    score = importance x multiplier x max(relevance, residual_pull) x novelty x (1 - ngram_penalty), as in `Ranking`.
    pulls: every sub-query, the strongest first. pushes: every coverage entry, the strongest first. ngrams: the
    passages of the text that were written already, as tokens. changes: empty where the fact is in the envelope.
    last: the fact in the envelope's last place, and its score; None where sub-queries took turns.
    """

    fact: Fact
    mode: str
    status: str
    rank: int | None
    ranked: int
    place: int | None
    slots: int
    gates: tuple[Gate, ...]
    min_relevance: float | None
    score: float
    score_without_guard: float
    relevance: float
    coverage: float
    residual_pull: float
    novelty: float
    ngram_overlap: int
    ngram_penalty: float
    importance: float
    multiplier: float
    pulls: tuple[Pull, ...]
    pushes: tuple[Push, ...]
    ngrams: tuple[str, ...]
    changes: tuple[Change, ...]
    last: tuple[Fact, float] | None

    @property
    def summary(self) -> str:
        """Status, rank and what decides, in one or two sentences."""
        if self.min_relevance is not None:
            text = f"{STATUSES[self.status]}. With a gate of {self.min_relevance:.4f} it would be one"
            if self.rank is not None:
                inside = "in" if self.place is not None else "outside"
                text += f", at rank {self.rank} of {self.ranked}, {inside} the envelope"
            return f"{text[0].upper()}{text[1:]}."
        where = f"rank {self.rank} of {self.ranked}: " if self.rank is not None else ""
        text = f"{where}{STATUSES[self.status]}"
        if self.status == "packed":
            text += f", in place {self.place} of {self.slots}"
        text = f"{text[0].upper()}{text[1:]}."
        if self.status == "outranked" and self.last is not None:
            text += f" Its score is {self.score:.4f}; the last fact in the envelope has {self.last[1]:.4f}."
        return text

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = {name: value for name, value in vars(self).items() if name not in ("fact", "last")}
        for name in ("gates", "pulls", "pushes", "changes"):
            data[name] = [asdict(item) for item in data[name]]
        data["changes"] = [{**asdict(change), "text": change.text} for change in self.changes]
        data["ngrams"] = list(self.ngrams)
        last = None if self.last is None else {"id": self.last[0].id, "score": self.last[1]}
        return {**asdict(self.fact), **data, "last": last, "summary": self.summary}

    def tables(self) -> Iterator[_tables.Table]:
        """What is shown: factors, pulls, pushes, n-grams and changes, each where there are any."""
        penalty = 1.0 - self.ngram_penalty
        rows: list[tuple[Any, ...]] = [
            ("importance", self.importance, ""),
            ("multiplier", self.multiplier, ""),
            ("relevance", self.relevance, "cosine to the query" if self.mode == "spec" else "deviations, query"),
            ("residual pull", self.residual_pull, self._pulled()),
            ("novelty", self.novelty, f"1 - min(coverage {self.coverage:.4f}, 0.80), 0.20 at least"),
            ("1 - n-gram penalty", penalty, f"{self.ngram_overlap} blacklisted n-grams"),
            ("score", self.score, "the product; of relevance and pull the larger"),
        ]
        yield _tables.Table("Factors", ("factor", "value", ""), rows)
        if self.pulls:
            yield _tables.Table(
                "Pulls: sub-queries",
                ("sub-query", "value", "weight", ""),
                [(p.label, p.value, p.weight, "pulled" if p.pulled else "") for p in self.pulls],
            )
        if self.pushes:
            yield _tables.Table(
                "Pushes: what is covered" if self.coverage else "Covered so far: takes no part here",
                ("sub-query", "window", "depth", "cosine", "share"),
                [(p.label, p.window_number, p.depth_weight, p.cosine, p.share) for p in self.pushes],
            )
        if self.ngrams:
            yield _tables.Table("Written already", ("passage",), [(text,) for text in self.ngrams])
        if self.status != "packed":
            title = "Any one of these would put it into the envelope"
            if self.min_relevance is not None:
                title = f"With a gate of {self.min_relevance:.4f}, any one of these would put it into the envelope"
            changes: list[tuple[Any, ...]] = [(change.text,) for change in self.changes]
            if self.min_relevance is not None and self.place is not None:
                changes = [("nothing more",)]
            yield _tables.Table(title, ("change",), changes or [("no single change",)])

    def _pulled(self) -> str:
        best = next((pull.label for pull in self.pulls if pull.pulled), None)
        if best is not None:
            return f"by “{best}”"
        return "not above the relevance" if any(pull.weight for pull in self.pulls) else "nothing pulls (§2.7)"

    def __repr__(self) -> str:
        return f"<Explanation of {self.fact.id!r}: {self.summary}>"

    def __str__(self) -> str:
        parts = [f"{self.fact.id}: {_tables.one_line(self.fact.text)}", self.summary]
        return "\n\n".join(["\n".join(parts), *map(_tables.plain, self.tables())])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        head = Text(f"{self.fact.id}: {_tables.one_line(self.fact.text)}\n{self.summary}")
        return Group(head, *(_tables.rich_table(table) for table in self.tables()))

    def _repr_html_(self) -> str:
        id, text, summary = map(escape, (self.fact.id, self.fact.text, self.summary))
        head = f"<p><b>{id}</b>: {text}<br>{summary}"
        return head + "</p>" + "".join(map(_tables.html, self.tables()))


def explain(
    query: Any,
    retriever: Retriever | Ranks,
    session: Session,
    fact_id: str,
    *,
    max_facts: int | None = None,
    token_budget: int | None = None,
    count_tokens: Callable[[str], int] = count_tokens_default,
    multiplier: Multiplier | None = None,
    pack: str | None = None,
) -> Explanation:
    """Explain why one fact ranks where it does in the session's next window, and what would put it into the envelope.

    This ranks again: once, and once more for every covered sub-query. It changes nothing. Call it before the session is
    updated, or with a `session.snapshot()` of that moment. Over shards the explanation is that of one store with all
    facts.

    Args:
        query: As in `cdr_rank`.
        retriever: As in `cdr_rank`.
        session: As in `cdr_rank`.
        fact_id: The id of the fact.
        max_facts: As in `pack_facts`. None is no limit.
        token_budget: As in `pack_facts`. None is no limit.
        count_tokens: As in `pack_facts`.
        multiplier: As in `cdr_rank`.
        pack: As in `pack_facts`.

    Returns:
        The explanation.

    Raises:
        KeyError: If the fact is not in the store, or is quarantined in a durable store.
        ShardsMissing: If a shard does not answer.
        Exception: What `cdr_rank` and `pack_facts` raise.
    """
    if not isinstance(fact_id, str):
        raise TypeError(f"fact_id: expected a str, got {type(fact_id).__name__}")
    if not isinstance(retriever, Retriever) and not hasattr(retriever, "question"):
        raise TypeError(f"retriever: expected a Retriever, got {type(retriever).__name__}")
    if not isinstance(session, Session):
        raise TypeError(f"session: expected a Session, got {type(session).__name__}")
    room = Room(UNLIMITED if token_budget is None else token_budget, max_facts, count_tokens, pack)
    for _ in range(_ATTEMPTS):
        state = session.state
        asks = query, retriever, session.supposing(state), state
        with contextlib.suppress(StoreChanged):
            if isinstance(retriever, Retriever):
                _check_released(retriever.store, fact_id)
                question = Question(*asks, retriever.store.view(), fact_id, multiplier)
            else:
                question = retriever.question(query, *asks[2:], fact_id, multiplier)
            return _explained(question, room)
    raise RuntimeError("the store keeps changing: a ranking and its explanation need one version")


def explain_vectors(
    query: Any,
    retriever: Retriever | Ranks,
    fact_id: str,
    *,
    coverage: Any = None,
    depth_weights: Any = None,
    residual: Any = None,
    min_relevance: float = CDR_MIN_RELEVANCE,
    first_window_pull: bool = False,
    max_facts: int | None = None,
) -> Explanation:
    """`explain` for plain vectors in place of a session: what `Columns.spec` takes, without an n-gram guard.

    The rows of coverage and residual are the sub-queries, named "coverage 0", "residual 0" and so on. Raises as
    `Columns.spec` and `explain` do.
    """
    if not isinstance(retriever, Retriever) and not hasattr(retriever, "question"):
        raise TypeError(f"retriever: expected a Retriever, got {type(retriever).__name__}")
    vector = as_vector(query, None, "query")
    Columns.spec(vector, coverage=coverage, depth_weights=depth_weights, residual=residual, min_relevance=min_relevance)
    given = {"coverage": () if coverage is None else coverage, "residual": () if residual is None else residual}
    subs = {name: [_named(f"{name} {i}", row) for i, row in enumerate(rows)] for name, rows in given.items()}
    session = Session(
        [*subs["coverage"], *subs["residual"]] or [_named("nothing remains", vector)],
        embedding_model=retriever.store.embedding_model,
        min_relevance=min_relevance,
        first_window_pull=first_window_pull and bool(subs["residual"]),
        guard=False,
    )
    depths = () if depth_weights is None else depth_weights
    entries = [
        CoverageEntry(item.id, item.embedding, float(depth), 1)
        for item, depth in zip(subs["coverage"], depths, strict=True)
    ]
    residual_set = tuple(subs["residual"]) if entries else session.residual
    state = replace(session.state, coverage=tuple(entries), residual=residual_set)
    why = explain(query, retriever, session.supposing(state), fact_id, max_facts=max_facts)
    return why if subs["coverage"] or subs["residual"] else replace(why, pulls=())


def _check_released(store: FactStore, fact_id: str) -> None:
    held = store.held.get(fact_id)
    if held is not None and fact_id not in store:
        why = "" if held[1] is None else f" ({held[1]})"
        raise KeyError(
            f"fact_id: {fact_id!r} is quarantined{why}, in no ranking until it is released (`cdr store release`)"
        )


def _named(name: str, vector: Any) -> SubQuery:
    return SubQuery(name, name, name, vector)


def _explained(question: Question, room: Room) -> Explanation:
    fact_id, state, session = question.fact_id, question.state, question.session
    status, lowered = "", None
    ranking = question.ranking()
    if fact_id not in ranking.ids:
        lowered = question.lower_gate()
        status = "packed before" if session.settings.drops_packed and fact_id in state.packed else "not found"
        if lowered is not None:
            status = "below the gate"
            question = replace(question, session=session.supposing(state, lowered))
            ranking = question.ranking()
    what_if = WhatIf(question, ranking, room)
    envelope = room.packed(ranking)
    place = envelope.ids.index(fact_id) + 1 if fact_id in envelope.ids else None
    if not status:
        status = "packed" if place is not None else "does not fit" if what_if.crowded_out() else "outranked"
    now = what_if.now()
    in_order = ranking.by_sub_query is None or room.pack == "greedy"
    asked = what_if.asked
    return Explanation(
        fact=what_if.fact,
        mode=session.mode,
        status=status,
        rank=None if what_if.at is None else what_if.at + 1,
        ranked=len(ranking),
        place=place,
        slots=len(envelope),
        gates=question.gates(asked),
        min_relevance=lowered,
        score=float(now.score[0]),
        score_without_guard=float(now.score_without_guard[0]),
        relevance=float(now.relevance[0]),
        coverage=float(now.coverage[0]),
        residual_pull=float(now.residual_pull[0]),
        novelty=float(now.novelty[0]),
        ngram_overlap=what_if.overlap,
        ngram_penalty=float(ngram_penalty(what_if.overlap)),
        importance=what_if.importance,
        multiplier=what_if.multiplier * what_if.penalty,
        pulls=question.pulls(asked),
        pushes=question.pushes(),
        ngrams=question.passages(what_if.fact.text),
        changes=() if place is not None else tuple(what_if.changes()),
        last=(envelope.facts[-1], float(envelope.score[-1])) if len(envelope) and in_order else None,
    )
