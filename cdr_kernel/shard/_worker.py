"""One shard: a part of the facts, and the requests that it answers.

A coordinator (`ShardedRetriever`) sends requests. Each names the version of the shard that it is about. A shard keeps
its last versions, so a ranking reads one version everywhere while facts come and go. A shard that lacks a version, a
blacklist, a session or the evidence of a task says so, and the coordinator sends it.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.rank import Ranking
from cdr_kernel.rank._calibrated import CalibratedWindow
from cdr_kernel.rank._cdr_rank import multipliers
from cdr_kernel.rank._evidence import (
    Evidence,
    LexicalAddend,
    Terms,
    best_rows,
    rows_of,
    term_sums,
    unit_rows,
    word_sums,
)
from cdr_kernel.rank._tables import BREAKDOWN
from cdr_kernel.rank._window_query import WindowQuery, best_gated
from cdr_kernel.retrieve import retriever_on
from cdr_kernel.retrieve._bm25 import SparseSums, WordCounts
from cdr_kernel.retrieve._calibration import Sums
from cdr_kernel.retrieve._window_cache import CACHE_BYTES
from cdr_kernel.score import Columns
from cdr_kernel.session import CalibratedSettings, CoverageEntry, Session
from cdr_kernel.session._task import SessionState
from cdr_kernel.shard._partition import Write, facts_in, placed, put
from cdr_kernel.store import FactStore
from cdr_kernel.store._attributes import Where, chosen
from cdr_kernel.store._fact_store import Fact, StoreView
from cdr_kernel.store._stored_facts import sequences_of
from cdr_kernel.text import NGramGuard
from cdr_kernel.validation._arrays import Float64, Int64

VERSIONS_KEPT = 16
SESSIONS_KEPT = 1024


@dataclass(frozen=True, eq=False)
class Change:
    """One change of one shard: facts that go, facts that come (as `_partition.put` takes them), or a compaction.

    clock: a moment, microseconds since 1970, at which what is past its time is withheld (`FactStore.look`).
    """

    remove: tuple[str, ...] = ()
    facts: Mapping[str, Any] | None = None
    compact: bool = False
    clock: int | None = None


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked: a method of `Shard` with its arguments after the view, of one version.

    changes: what led from version `since` up to it, for a shard that missed it.
    """

    method: str
    version: int
    args: tuple[Any, ...] = ()
    since: int = 0
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, eq=False)
class Reply:
    """status: "ok" with the value, "stale" (the version is not there: `version` is the shard's), or "need" (the
    session, its blacklist or its evidence is not there)."""

    status: str
    version: int
    value: Any = None


@dataclass(frozen=True, eq=False)
class Blacklist:
    """A session's blacklist: the state of name `digest`, which is the state `base` and these hashes, or a whole
    ``NGramGuard.state``."""

    digest: str
    base: str | None = None
    hashes: NDArray[np.uint64] | None = None
    state: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Ask:
    """What one session asks of a shard for its next window.

    token: names the session; session: itself, without its state, for a shard that does not know it. columns, gates:
    fields of `Columns`, None for gates that are the columns, residual None for the vectors of the remaining
    sub-queries; scored: see `WindowQuery`. covered: (sub-query, depth) by coverage entry; remaining: sub-queries.
    packed: facts that were packed, where it matters. task: names the evidence; evidence: itself.
    """

    token: str
    session: Session | None
    columns: Mapping[str, Any]
    gates: Mapping[str, Any] | None
    scored: tuple[int, int]
    covered: tuple[tuple[int, float], ...]
    remaining: tuple[int, ...]
    packed: tuple[str, ...]
    blacklist: Blacklist | None
    task: tuple[Any, ...] | None = None
    evidence: Evidence | None = None


ARRAYS = (*BREAKDOWN, "by_sub_query", "novelty_source")
"""Fields of a ranking that come back, one entry per fact."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The k best facts of one shard for one session, best first: their sequence numbers and the ranking's arrays.

    qualified, activations: as in `Ranking`; passed, new: facts that passed the gate, and those of them never packed;
    asked: facts that could have. digest: of the blacklist that was counted. facts:
    themselves, where they were asked for.
    """

    sequence: Int64
    arrays: Mapping[str, NDArray[Any] | None]
    qualified: int
    activations: int
    passed: int
    new: int
    asked: int
    digest: str | None
    facts: tuple[Fact, ...] | None = None


def columns_fields(columns: Columns) -> dict[str, Any]:
    """Columns as they travel; what is added for single rows does not."""
    names = "query coverage residual scale shift weight gate clamp_novelty gate_only factors_above_zero"
    return {name: getattr(columns, name) for name in names.split()}


def digest_of(guard: NGramGuard) -> str:
    """What tells one blacklist from another."""
    if guard.exact or guard.max_ngrams is not None:
        state = guard.state()
        written = [[h.tobytes() for h in state["hashes"]], state["tokens"]]
        return hashlib.blake2b(repr(written).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return digest_of_hashes(guard.hashes)


def digest_of_hashes(hashes: NDArray[np.uint64]) -> str:
    """The digest of a guard that only keeps hashes, which ascend."""
    return hashlib.blake2b(hashes.tobytes(), digest_size=16).hexdigest()


class _Needed(Exception):
    """Something must be sent along."""


@dataclass(eq=False)
class _Known:
    """A session as the shard knows it."""

    session: Session
    guard: NGramGuard | None = None
    digest: str | None = None


@dataclass(eq=False)
class _Versions:
    now: int
    views: OrderedDict[int, StoreView] = field(default_factory=OrderedDict)


class Shard:
    """Some of the facts with their retriever. Threads may ask at once; changes take turns.

    store: the shard's own from now on. version: how many changes led to it. device, device_dtype: where it ranks, see
    `retriever_on`.
    """

    def __init__(
        self,
        store: FactStore,
        version: int = 0,
        *,
        cache_bytes: int = CACHE_BYTES,
        device: str | None = None,
        device_dtype: str | None = None,
    ) -> None:
        self.store = store
        self._retriever = retriever_on(device, store, dtype=device_dtype, cache_bytes=cache_bytes)
        self._lock = Lock()
        self._versions = _Versions(version, OrderedDict({version: store.view()}))
        self._sessions: OrderedDict[str, _Known] = OrderedDict()

    @property
    def version(self) -> int:
        """How many changes the shard has seen."""
        return self._versions.now

    def answer(self, request: Request) -> Reply:
        """What the method named by the request returns; what is missing instead of a wrong answer."""
        with self._lock:
            for number, change in enumerate(request.changes, request.since + 1):
                if number == self._versions.now + 1:
                    self._change(change)
            view = self._versions.views.get(request.version)
        if view is None:
            return Reply("stale", self._versions.now)
        try:
            value = getattr(self, request.method)(view, *request.args)
        except _Needed:
            return Reply("need", request.version)
        return Reply("ok", request.version, value)

    def _change(self, change: Change) -> None:
        if change.remove:
            self.store.remove(change.remove)
        if change.facts is not None:
            put(self.store, change.facts)
        if change.compact:
            self.store.compact()
        if change.clock is not None:
            self.store.look(change.clock)
        versions = self._versions
        versions.now += 1
        versions.views[versions.now] = self.store.view()
        while len(versions.views) > VERSIONS_KEPT:
            versions.views.popitem(last=False)

    # what may be asked, of a version

    def applied(self, view: StoreView) -> int:
        """How many facts there are."""
        return len(view)

    def removed(self, view: StoreView) -> int:
        """How many rows a compaction would give back."""
        return view.rows - len(view) - len(self.store.withheld)

    def ids(self, view: StoreView) -> tuple[Int64, list[str]]:
        """Sequence numbers and ids of all facts."""
        return view.sequence[view.alive], view.ids

    def due(self, view: StoreView, moment: int) -> tuple[int, int]:
        """How many facts a look at this clock would withhold, and how many it would let back in."""
        due, back = self.store.due(moment)
        return len(due), len(back)

    def withheld(self, view: StoreView, ids: tuple[str, ...] | None = None) -> dict[str, int]:
        """Those of these ids, of all for None, that are here and past their time, with the sequence numbers that
        their facts were added with."""
        there, first = self.store.withheld, self.store.view().first_sequence
        return {id: int(first[there[id]]) for id in (there if ids is None else ids) if id in there}

    def kinds(self, view: StoreView) -> dict[str, type]:
        """Types of the further columns by name."""
        return view.attribute_types

    def sequences(self, view: StoreView) -> Int64:
        """Sequence numbers of all facts."""
        return view.sequence[view.alive]

    def find(self, view: StoreView, ids: tuple[str, ...]) -> dict[str, int]:
        """Those of these ids that are here, with the sequence numbers that their facts were added with."""
        rows = rows_of(view, ids)
        return dict(zip(view.ids_at(rows), view.first_sequence[rows].tolist(), strict=True))

    def numbers_of(self, view: StoreView, ids: tuple[str, ...]) -> dict[str, int]:
        """As ``find``, of the facts that are here now, those past their time too: in one look, so that a fact that is
        withheld at this moment is not missed."""
        numbers = zip(ids, self.store.numbers_of(ids).tolist(), strict=True)
        return {id: number for id, number in numbers if number >= 0}

    def ids_of(self, view: StoreView, numbers: Int64) -> dict[int, str]:
        """The ids of those of the facts that were added with these sequence numbers that are here, by number."""
        view = self.store.whole()
        rows = view.rows_numbered(numbers)
        here = rows >= 0
        return dict(zip(numbers[here].tolist(), view.ids_at(rows[here]), strict=True))

    def get(self, view: StoreView, ids: tuple[str, ...]) -> list[Fact]:
        """Those of these facts that are here."""
        return view.facts(rows_of(view, ids).tolist())

    def numbered(self, view: StoreView, sequence: Int64) -> list[Fact]:
        """The facts with these sequence numbers."""
        return view.facts(np.searchsorted(view.sequence, sequence).tolist())

    def leaving(self, view: StoreView, name: str, names: tuple[str, ...], by: str) -> dict[str, Int64]:
        """Sequence numbers of the facts that belong to other shards than `name` among these, by shard; also of those
        that are withheld."""
        found: dict[str, list[Int64]] = {}
        view = self.store.whole()
        for rows, positions in placed(view, names, by):
            for i in np.unique(positions).tolist():
                if names[i] != name:
                    found.setdefault(names[i], []).append(view.sequence[rows[positions == i]])
        return {other: np.concatenate(parts) for other, parts in found.items()}

    def names(self, view: StoreView, sequence: Int64) -> list[str]:
        """Ids of the facts with these sequence numbers."""
        return [view.id_of(row) for row in np.searchsorted(view.sequence, sequence).tolist()]

    def take(self, view: StoreView, sequence: Int64) -> dict[str, Any]:
        """The facts with these sequence numbers, as another shard adds them."""
        return facts_in(view, np.searchsorted(view.sequence, sequence))

    def save(self, view: StoreView, write: Write) -> Any:
        """Write the facts, those that are withheld too; no change may come meanwhile."""
        return write(self.store)

    def prepare(self, view: StoreView) -> int:
        """Make the codes of a scan now, however few facts there are; returns the number of facts."""
        self._retriever.prepare()
        return len(view)

    def copied(self, view: StoreView, ids: tuple[str, ...]) -> dict[str, Any]:
        """Those of these facts that are here, as another store adds them."""
        return facts_in(view, rows_of(view, ids))

    def added(self, view: StoreView, ask: Ask, ids: tuple[str, ...]) -> Float64:
        """What words and documents add to the columns of these facts, [M, S], in the calibrated mode."""
        asked = self._asked(ask, self._known(ask).session, view)
        added = asked.added if isinstance(asked, CalibratedWindow) else None
        assert added is not None
        return added.of(rows_of(view, ids))

    # and of the facts of which a filter holds: where, the last argument, is of this shard's facts as `select` takes it

    def moments(self, view: StoreView, where: Where | None = None) -> Sums:
        """The sums that a calibration is made of."""
        return self._retriever.moments.sums(_some(view, where))

    def word_counts(self, view: StoreView, texts: tuple[str, ...], where: Where | None = None) -> WordCounts:
        """What BM25 needs to know of these facts."""
        return self._retriever.lexical.counts(_some(view, where), texts)

    def word_sums(
        self, view: StoreView, texts: tuple[str, ...], counts: WordCounts, where: Where | None = None
    ) -> list[SparseSums]:
        """Sums of the BM25 of each text."""
        return word_sums(self._retriever, _some(view, where), texts, counts)

    def best(
        self, view: StoreView, evidence: Evidence, where: Where | None = None
    ) -> list[tuple[Float64, Int64, list[str], Float64]]:
        """For each sub-query (values, sequence numbers, ids, unit vectors) of its best facts, best first."""
        view = _some(view, where)
        found = best_rows(evidence, self._retriever, view)
        return [
            (values, view.sequence[rows], [view.id_of(row) for row in rows.tolist()], unit_rows(view, rows))
            for values, rows in found
        ]

    def best_gated(self, view: StoreView, gates: Mapping[str, Any], most: int, where: Where | None = None) -> Float64:
        """The largest values in the best gated column, so many and one more, descending."""
        return best_gated(Columns(**gates), most, _some(view, where))

    def vectors(self, view: StoreView, ids: tuple[str, ...], where: Where | None = None) -> tuple[Int64, Float64]:
        """Sequence numbers and unit vectors of those of these facts that are here."""
        view = _some(view, where)
        rows = rows_of(view, ids)
        return view.sequence[rows], unit_rows(view, rows)

    def numbered_texts(
        self, view: StoreView, ids: tuple[str, ...], where: Where | None = None
    ) -> list[tuple[int, str]]:
        """Sequence numbers and texts of those of these facts that are here."""
        view = _some(view, where)
        rows = rows_of(view, ids)
        return list(zip(view.sequence[rows].tolist(), view.texts(rows.tolist()), strict=True))

    def term_counts(self, view: StoreView, terms: tuple[str, ...], where: Where | None = None) -> WordCounts:
        """What BM25 of single words needs to know of these facts."""
        return self._retriever.lexical.term_counts(_some(view, where), terms)

    def term_sums(
        self, view: StoreView, asked: tuple[Terms, ...], counts: WordCounts, where: Where | None = None
    ) -> list[SparseSums]:
        """Sums of the weighted BM25 of each."""
        return term_sums(self._retriever, _some(view, where), asked, counts)

    def rank(
        self,
        view: StoreView,
        asks: tuple[Ask, ...],
        k: int | None,
        multiplier: Any,
        whole: bool = False,
        where: Where | None = None,
    ) -> list[Answer]:
        """The k best facts for each of these sessions. multiplier: as in `cdr_rank`, of all of this shard's facts;
        whole: with the facts themselves."""
        factors = multipliers(multiplier, view)
        view = _some(view, where)
        known = [self._known(ask) for ask in asks]
        guards = [self._guard(ask, each) for ask, each in zip(asks, known, strict=True)]
        asked = [self._asked(ask, each.session, view) for ask, each in zip(asks, known, strict=True)]
        by_relevance = all(c.coverage is None and len(c.residual) == 0 for c in (each.columns for each in asked))
        gates = [each.gates for each in asked]
        sessions = [each.session for each in known]
        found = self._retriever.qualified(sessions, gates, view, bounds=k is not None and by_relevance)
        answers = []
        for ask, session, guard, each, kept in zip(asks, sessions, guards, asked, found, strict=True):
            question = each.session_query(session, _state(ask, session, guard), kept, self._retriever, view)
            ranking, passed, new = question.counted(k, factors)
            digest = None if ask.blacklist is None else ask.blacklist.digest
            answers.append(_answer(ranking, passed, new, len(view), digest, whole))
        return answers

    def _known(self, ask: Ask) -> _Known:
        with self._lock:
            known = self._sessions.get(ask.token)
            if known is None:
                if ask.session is None:
                    raise _Needed
                known = self._sessions[ask.token] = _Known(copy.copy(ask.session))
                while len(self._sessions) > SESSIONS_KEPT:
                    self._sessions.popitem(last=False)
            self._sessions.move_to_end(ask.token)
            return known

    def _guard(self, ask: Ask, known: _Known) -> NGramGuard | None:
        """The session's guard as it was when it asked."""
        wanted = ask.blacklist
        if wanted is None:
            return None
        with self._lock:
            if known.digest == wanted.digest:
                return known.guard
            tokenizer, key = self.store.tokenizer, self.store.hash_key
            if wanted.state is not None:
                guard = NGramGuard.from_state(wanted.state, tokenizer=tokenizer, hash_key=key)
            elif known.guard is not None and known.digest == wanted.base and wanted.hashes is not None:
                guard = known.guard.copy()
                guard.merge(NGramGuard.from_hashes(wanted.hashes, n=guard.n, tokenizer=tokenizer, hash_key=key))
            else:
                raise _Needed
            if digest_of(guard) != wanted.digest:
                raise _Needed
            known.guard, known.digest = guard, wanted.digest
            return guard

    def _asked(self, ask: Ask, session: Session, view: StoreView) -> WindowQuery:
        scored = slice(*ask.scored)
        fields = dict(ask.columns)
        if fields["residual"] is None:
            fields["residual"] = session.embeddings[list(ask.remaining)]
        columns = Columns(**fields)
        gates = columns if ask.gates is None else Columns(**ask.gates)
        if ask.task is None:
            return WindowQuery(gates, columns, scored)
        settings = session.settings
        assert isinstance(settings, CalibratedSettings)
        key = (*ask.task, view.version)
        found: Evidence | None = self._retriever.evidence.get(key)
        if found is None:
            if ask.evidence is None:
                raise _Needed
            found = ask.evidence
            self._retriever.evidence.put(key, found, found.nbytes)
        added = LexicalAddend(found, settings, self._retriever, view, key)
        return CalibratedWindow(gates, columns, scored, settings=settings, added=added)


def _some(view: StoreView, where: Where | None) -> StoreView:
    """The facts of a view of which a filter holds; those of a shard without a column have no value in it."""
    if not isinstance(where, Mapping):
        return view.select(where)
    columns = {"source", *view.attribute_names}
    if any(None not in chosen(values) for name, values in where.items() if name not in columns):
        return view.select(np.zeros(len(view), np.bool_))
    return view.select({name: values for name, values in where.items() if name in columns})


def _state(ask: Ask, session: Session, guard: NGramGuard | None) -> SessionState:
    """As much of the session's state as a ranking reads."""
    items = session.sub_queries
    return SessionState(
        coverage=tuple(CoverageEntry(items[i].id, items[i].embedding, depth, 1) for i, depth in ask.covered),
        residual=tuple(items[i] for i in ask.remaining),
        window_count=0,
        completeness=0.0,
        words={},
        packed=dict.fromkeys(ask.packed, 1),
        guard=guard,
        safety_budget=1.0,
    )


def _answer(ranking: Ranking, passed: int, new: int, asked: int, digest: str | None, whole: bool) -> Answer:
    return Answer(
        sequence=sequences_of(ranking.facts),
        arrays={name: None if (value := getattr(ranking, name)) is None else np.asarray(value) for name in ARRAYS},
        qualified=ranking.qualified,
        activations=ranking.guard_activations,
        passed=passed,
        new=new,
        asked=asked,
        digest=digest,
        facts=tuple(ranking.facts) if whole else None,
    )


def needs_packed(session: Session) -> bool:
    """Whether it matters to a ranking which facts were packed."""
    return session.settings.reads_packed
