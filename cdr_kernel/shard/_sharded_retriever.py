"""Facts in several places, ranked as if they were in one.

    store = ShardedStore.split(store, shards=4)              # in this process, by threads
    store = ShardedStore.open("facts.shards")                # a partition on disk, mapped (see `partition`)
    retriever = ShardedRetriever(store)
    cdr_rank(query, retriever, session)                      # also rank_many, run_windows

Ids, order and scores are those of one store with all the facts, to the last bit. Every shard scores rows with the same
routine. Ties are ordered by sequence numbers of the whole store. What the calibrated mode knows of all facts is summed
exactly (`_calibration.Sums`, `_bm25.SparseSums`). If a shard cannot be reached in time, the ranking has
``complete=False`` and names the shard. `shard._on_ray` puts the shards into Ray actors.
"""

from __future__ import annotations

import contextlib
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cdr_kernel.concurrency._forks import Lock, cached_property
from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.rank import Ranking, cdr_rank
from cdr_kernel.rank._calibrated import CalibratedWindow, calibrated_window, lower_gate
from cdr_kernel.rank._cdr_rank import Multiplier, check_named
from cdr_kernel.rank._counterfactual import Question, StoreChanged
from cdr_kernel.rank._evidence import Evidence, GivenAddend, Terms, gathered, task_of
from cdr_kernel.rank._window_query import WindowQuery
from cdr_kernel.retrieve._bm25 import SparseSums, WordCounts
from cdr_kernel.retrieve._calibration import Calibration, Sums
from cdr_kernel.score._cdr_score import best_first
from cdr_kernel.session import Session, SpecSettings
from cdr_kernel.session._task import SessionState
from cdr_kernel.shard._messages import Call, Group, Slot, Superseded, ask_all
from cdr_kernel.shard._partition import put
from cdr_kernel.shard._sharded_store import ShardedStore, ShardsMissing, Snapshot
from cdr_kernel.shard._worker import (
    ARRAYS,
    Answer,
    Ask,
    Blacklist,
    columns_fields,
    digest_of,
    digest_of_hashes,
    needs_packed,
)
from cdr_kernel.spec.constants import FEEDBACK_FACTS
from cdr_kernel.store._attributes import Where, check_mask, mapping_key, rows_key, where_text
from cdr_kernel.store._fact_store import Fact
from cdr_kernel.text import NGramGuard
from cdr_kernel.text._ngram_guard import TokenRows
from cdr_kernel.validation._arrays import Float64, Int64, as_array, factor

__all__ = ["ShardedRetriever", "ShardedStore", "ShardsMissing"]

_Of: TypeAlias = "tuple[WindowQuery, tuple[Any, ...] | None, Evidence | None]"
"""What a session asks, and for the calibrated mode its task and the evidence."""

_TASKS_KEPT = 128  # each under two names
_WHOLE = 512  # facts that may come along with the keys; more are asked for when it is known which
_SHARE = 0.75  # of the time that is left, for one round of questions
_CALIBRATIONS_KEPT = 5  # of a version: of all facts and of the last filters
_BLACKLISTS_KEPT = 4  # of a session, so that replicas that lag a little are sent little


@dataclass(eq=False)
class _Window:
    """What is being asked of one version for some sessions, until when, and which shards are given up.

    selection: names the filter, b"" for none; filter: says it in words; where: what each shard is given of it.
    """

    store: ShardedStore
    snapshot: Snapshot
    deadline: float
    missing: set[str] = field(default_factory=set)
    selection: bytes = b""
    filter: str = ""
    where: Callable[[Group], Any] = lambda group: None

    @property
    def facts(self) -> tuple[Any, ...]:
        """What tells the facts that are asked from others."""
        return self.snapshot.version, self.selection

    def limit(self, where: Where | None) -> None:
        """Ask only the facts of which this holds, as ``ShardedStore.checked_where`` left it."""
        self.filter = where_text(where)
        if isinstance(where, Mapping):
            self.selection = mapping_key(where, b"")
            self.where = lambda group: where
        elif where is not None:
            mask = check_mask(where, self.snapshot.facts)
            self.selection = rows_key(mask, self.snapshot.version)
            self.where = self.spread(mask)

    def sequences(self) -> dict[str, Int64]:
        """Sequence numbers of all facts by shard."""
        cache = self.snapshot.cache
        numbers: dict[str, Int64] | None = cache.get("sequences")
        if numbers is None:
            numbers = self.ask("sequences", lambda group: lambda slot, full: ())
            if not self.missing:
                cache["sequences"] = numbers
        return numbers

    def spread(self, values: NDArray[Any]) -> Callable[[Group], Any]:
        """What belongs to each shard of values [facts] in the order of ids; with a shard missing nobody knows that,
        and all are given up."""
        numbers = self.sequences()
        if self.missing:
            self.missing.update(group.name for group in self.snapshot.groups)
            return lambda group: None
        every = np.sort(np.concatenate(list(numbers.values())))
        return lambda group: values[np.searchsorted(every, numbers[group.name])]

    def ask(
        self,
        method: str,
        arguments: Callable[[Group], Callable[[Slot, bool], tuple[Any, ...]]],
        check: Callable[[Any], bool] = lambda value: True,
        groups: Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """Values by shard, in the order of the shards; those that do not answer are given up."""
        calls = [
            Call(group, method, version, arguments(group), check)
            for group, version in zip(self.snapshot.groups, self.snapshot.versions, strict=True)
            if group.name not in self.missing and (groups is None or group.name in groups)
        ]
        now = time.monotonic()
        deadline = now + _SHARE * (self.deadline - now)  # whoever is late now must leave time for what is asked after
        late = ask_all(calls, deadline, self.store.limits, self.store.counts)
        self.missing.update(call.group.name for call in late)
        return {call.group.name: call.value for call in calls if call.answered}

    def same(self, method: str, *args: Any, check: Callable[[Any], bool] = lambda value: True) -> dict[str, Any]:
        """``ask`` the facts of which the filter holds, with the same arguments for all shards."""

        def arguments(group: Group) -> Callable[[Slot, bool], tuple[Any, ...]]:
            given = (*args, self.where(group))
            return lambda slot, full: given

        return self.ask(method, arguments, check)

    # the facts of all shards, as `rank._evidence.Facts`

    def calibration(self) -> Calibration:
        """Of all facts."""
        kept: dict[bytes, Calibration] = self.snapshot.cache.setdefault("calibrations", {})
        found = kept.get(self.selection)
        if found is None:
            total = Sums.zero(self.store.dim)
            for part in self.same("moments").values():
                total += part
            found = total.calibration()
            if not self.missing:
                kept[self.selection] = found
                for old in list(kept)[:-_CALIBRATIONS_KEPT]:
                    kept.pop(old, None)
        return found

    def word_counts(self, texts: tuple[str, ...]) -> WordCounts:
        """Of all facts."""
        total = WordCounts(0, 0, {})
        for part in self.same("word_counts", texts).values():
            total = total.plus(part)
        return total

    def word_sums(self, texts: tuple[str, ...], counts: WordCounts) -> list[SparseSums]:
        """Of the BM25 of each text over all facts."""
        total = [SparseSums(0, 0)] * len(texts)
        for part in self.same("word_sums", texts, counts).values():
            total = [a.plus(b) for a, b in zip(total, part, strict=True)]
        return total

    def best(self, evidence: Evidence) -> tuple[tuple[str, ...], Float64]:
        """Ids and unit vectors of the best facts of each sub-query, each once, by sequence."""
        parts = self.same("best", evidence, check=_finite_best).values()
        chosen: dict[int, tuple[str, Float64]] = {}
        for j in range(len(evidence.units)):
            values = np.concatenate([np.zeros(0), *(part[j][0] for part in parts)])
            numbers = np.concatenate([np.zeros(0, np.int64), *(part[j][1] for part in parts)])
            ids = [id for part in parts for id in part[j][2]]
            vectors = [vector for part in parts for vector in part[j][3]]
            for i in best_first(values, numbers, FEEDBACK_FACTS).tolist():
                chosen[int(numbers[i])] = (ids[i], vectors[i])
        ordered = [chosen[number] for number in sorted(chosen)]
        return tuple(id for id, _ in ordered), _stacked([vector for _, vector in ordered], self.store.dim)

    def vectors(self, ids: tuple[str, ...]) -> Float64:
        """Unit vectors of those of these facts that are there, by sequence."""
        parts = self.same("vectors", ids).values()
        numbers = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in parts)])
        vectors = [vector for part in parts for vector in part[1]]
        return _stacked([vectors[i] for i in np.argsort(numbers).tolist()], self.store.dim)

    def texts(self, ids: tuple[str, ...]) -> list[str]:
        """Texts of those of these facts that are there, by sequence."""
        pairs = [pair for part in self.same("numbered_texts", ids).values() for pair in part]
        return [text for _, text in sorted(pairs)]

    def term_counts(self, terms: tuple[str, ...]) -> WordCounts:
        """``word_counts`` of single words."""
        total = WordCounts(0, 0, {})
        for part in self.same("term_counts", terms).values():
            total = total.plus(part)
        return total

    def term_sums(self, asked: tuple[Terms, ...], counts: WordCounts) -> list[SparseSums]:
        """Of the weighted BM25 of each over all facts."""
        total = [SparseSums(0, 0)] * len(asked)
        for part in self.same("term_sums", asked, counts).values():
            total = [a.plus(b) for a, b in zip(total, part, strict=True)]
        return total


class ShardedRetriever:
    """Ranks the facts of a `ShardedStore`. `cdr_rank`, `rank_many` and `run_windows` take it in place of a `Retriever`.

    Args:
        store: The facts.
        partial: Whether a ranking may lack shards that did not answer within the store's timeout. It then says so
            (``Ranking.complete``, ``missing_shards``). False raises ShardsMissing instead.
    """

    def __init__(self, store: ShardedStore, *, partial: bool = True) -> None:
        if not isinstance(store, ShardedStore):
            raise TypeError(f"store: expected a ShardedStore, got {type(store).__name__}")
        self.store = store
        self.partial = partial
        self._lock = Lock()
        self._tokens: weakref.WeakKeyDictionary[Session, tuple[str, Session]] = weakref.WeakKeyDictionary()
        self._blacklists: weakref.WeakKeyDictionary[Session, OrderedDict[str, _Written]] = weakref.WeakKeyDictionary()
        self._evidence: OrderedDict[Any, Evidence] = OrderedDict()
        self._gates: OrderedDict[Any, float] = OrderedDict()

    @property
    def exact(self) -> bool:
        """Whether nothing that passes the gate can be missing from a complete ranking."""
        return True

    def rank_many(
        self,
        queries: Sequence[Any],
        sessions: Sequence[Session],
        *,
        k: int | None,
        multiplier: Multiplier | None,
        where: Where | None = None,
    ) -> list[Ranking]:
        """What `rank_many` does, over all shards."""
        checked = None if where is None else self.store.checked_where(where)
        deadline = time.monotonic() + self.store.limits.timeout
        while True:
            window = _Window(self.store, self.store.snapshot(), deadline)
            try:
                window.limit(checked)
                return self._ranked(window, queries, sessions, k, multiplier)
            except Superseded:  # more changes than shards keep versions came meanwhile
                if time.monotonic() >= deadline:
                    raise ShardsMissing(self.store.shards) from None

    def _ranked(
        self,
        window: _Window,
        queries: Sequence[Any],
        sessions: Sequence[Session],
        k: int | None,
        multiplier: Multiplier | None,
    ) -> list[Ranking]:
        store = self.store
        states = []
        for session in sessions:
            if store.embedding_model != session.embedding_model:
                raise EmbeddingModelMismatch("store", session.embedding_model, store.embedding_model)
            states.append(session.state)
        for state in states:
            if state.guard is not None:
                state.guard.overlap_rows(self._no_tokens)  # raises where its tokenizer or key is another
        each, answers = self._answers(window, queries, sessions, states, k, multiplier)
        while True:
            chosen = [merged([answer[i] for answer in answers.values()], k) for i in range(len(sessions))]
            facts = self._facts(window, answers, chosen)
            if facts is not None:
                break
            answers = {name: answer for name, answer in answers.items() if name not in window.missing}
        if window.missing and not self.partial:
            raise ShardsMissing(window.missing)
        return [
            _ranking(window, session, state, of[0], merge, facts, k)
            for session, state, of, merge in zip(sessions, states, each, chosen, strict=True)
        ]

    def _answers(
        self,
        window: _Window,
        queries: Sequence[Any],
        sessions: Sequence[Session],
        states: Sequence[SessionState],
        k: int | None,
        multiplier: Multiplier | None,
    ) -> tuple[list[_Of], dict[str, list[Answer]]]:
        """What each session asks, with a gate that enough facts pass, and what each shard answers."""
        each = [self._asked(*of, window) for of in zip(queries, sessions, states, strict=True)]
        factors = self._multipliers(multiplier, window)
        whole = k is not None and k * len(window.snapshot.groups) * len(sessions) <= _WHOLE
        written = [self._written(session, state) for session, state in zip(sessions, states, strict=True)]

        def arguments(group: Group) -> Callable[[Slot, bool], tuple[Any, ...]]:
            def of(slot: Slot, full: bool) -> tuple[Any, ...]:
                asks = tuple(self._ask(slot, full, *some) for some in zip(sessions, states, each, written, strict=True))
                return asks, k, factors(group), whole, window.where(group)

            return of

        digests = [None if w is None else w.digest for w in written]
        answers = window.ask("rank", arguments, lambda value: _valid(value, k, digests))
        lowered = [
            self._lowered(window, session, of, sum(answer[i].passed for answer in answers.values()))
            for i, (session, of) in enumerate(zip(sessions, each, strict=True))
        ]
        if any(new is not old for new, old in zip(lowered, each, strict=True)):
            each[:] = lowered
            answers = window.ask("rank", arguments, lambda value: _valid(value, k, digests))
        return each, answers

    def question(
        self, query: Any, session: Session, state: SessionState, fact_id: str, multiplier: Multiplier | None
    ) -> Question:
        """What `explain` asks of one fact: see `_counterfactual.Question`. Raises ShardsMissing."""
        snapshot = self.store.snapshot()
        window = self._window(snapshot)
        with _changed():
            parts = window.ask("copied", lambda group: lambda slot, full: ((fact_id,),))
        _all_there(window)
        fact, there = self.store.empty(), ""
        for name, part in parts.items():
            if part["ids"]:
                put(fact, part)
                there = name
        return _Elsewhere(query, self, session, state, fact.view(), fact_id, multiplier, snapshot, there)

    def asked(self, question: _Elsewhere) -> WindowQuery:
        """What is asked, with what is added to the row of the fact."""
        window, session, state = self._window(question.snapshot), question.session, question.state
        with _changed():
            (of,), _ = self._answers(window, [question.query], [session], [state], 0, None)
            _all_there(window)
            if of[1] is None:
                return of[0]

            def arguments(group: Group) -> Callable[[Slot, bool], tuple[Any, ...]]:
                return lambda slot, full: (self._ask(slot, full, session, state, of, None), (question.fact_id,))

            added = window.ask("added", arguments, groups=[question.shard])
        _all_there(window)
        assert isinstance(of[0], CalibratedWindow)
        return replace(of[0], added=GivenAddend(added[question.shard]))

    def factor(self, question: _Elsewhere) -> float:
        """The fact's multiplier."""
        values = question.multiplier
        if values is None:
            return 1.0
        if isinstance(values, Mapping):
            return float(values.get(question.fact_id, 1.0))
        given = factor(as_array(values, 1, "multiplier"), question.snapshot.facts, "multiplier")
        assert given is not None
        window = self._window(question.snapshot)
        with _changed():
            numbers = window.sequences()
        _all_there(window)
        every = np.sort(np.concatenate(list(numbers.values())))
        return float(given[np.searchsorted(every, question.view.sequence[question.row()])])

    def _window(self, snapshot: Snapshot) -> _Window:
        return _Window(self.store, snapshot, time.monotonic() + self.store.limits.timeout)

    @cached_property
    def _no_tokens(self) -> TokenRows:
        block = (np.zeros(1, np.int64), np.zeros(0, np.uint8))
        return TokenRows((block,), (), self.store.tokenizer_name, self.store.key_fingerprint)

    def _asked(self, query: Any, session: Session, state: SessionState, window: _Window) -> _Of:
        """What a session asks, and for the calibrated mode its task and the evidence."""
        settings = session.settings
        if isinstance(settings, SpecSettings):
            columns = session.columns(query, state=state)
            if columns.dim != self.store.dim:
                raise ValueError(f"query: expected dimension {self.store.dim} (that of the store), got {columns.dim}")
            return WindowQuery(columns, columns), None, None
        if settings.source_weight and self.store.by != "source":
            raise ValueError("source_weight: needs all facts of a source in one shard: partition by='source'")
        facts = window.facts
        with self._lock:
            evidence = (
                None if window.missing else self._evidence.get((*task_of(session, settings, state.feedback), *facts))
            )
        if evidence is None:
            if session.dim != self.store.dim:
                raise ValueError(f"query: expected dimension {self.store.dim} (that of the store), got {session.dim}")
            evidence = gathered(session, settings, window, state.feedback)
        task = (*task_of(session, settings, evidence.feedback), *facts)
        if window.missing:  # of what could be reached, this once
            task = (*task, uuid.uuid4().hex)
        else:
            with self._lock:
                for each in (state.feedback, evidence.feedback):  # a later window holds what this one found
                    self._evidence[(*task_of(session, settings, each), *facts)] = evidence
                while len(self._evidence) > _TASKS_KEPT:
                    self._evidence.popitem(last=False)
        made = calibrated_window(query, session, settings, state, window, self.store.dim, evidence)
        with self._lock:
            lower = None if window.missing else self._gates.get(made.gate_key(session, facts))
        return made if lower is None else made.at(lower), task, evidence

    def _lowered(self, window: _Window, session: Session, of: _Of, passed: int) -> _Of:
        """What a session asks, with the gate that enough facts pass (`CalibratedWindow.with_enough`)."""
        made, task, evidence = of
        gate = float(made.gates.gate[0])
        if not isinstance(made, CalibratedWindow) or passed >= made.settings.min_qualified or gate == -np.inf:
            return of
        least = made.settings.min_qualified
        found = window.same("best_gated", columns_fields(made.gates), least, check=lambda z: bool(np.isfinite(z).all()))
        best = np.sort(np.concatenate([np.zeros(0), *found.values()]))[::-1]
        lower = min(gate, lower_gate(best, least))
        if lower == gate:
            return of
        if not window.missing:
            with self._lock:
                self._gates[made.gate_key(session, window.facts)] = lower
                while len(self._gates) > _TASKS_KEPT:
                    self._gates.popitem(last=False)
        return made.at(lower), task, evidence

    def _multipliers(self, values: Multiplier | None, window: _Window) -> Callable[[Group], Any]:
        """What each shard is given of the multiplier."""
        if values is None:
            return lambda group: values
        if isinstance(values, Mapping):
            ids = tuple(values)
            found = window.ask("find", lambda group: lambda slot, full: (ids,)) if ids else {}
            if not window.missing:
                here = {id for ids in found.values() for id in ids}
                check_named([id for id in values if id not in here])
            return lambda group: {id: values[id] for id in found.get(group.name, ())}
        given = factor(as_array(values, 1, "multiplier"), window.snapshot.facts, "multiplier")
        assert given is not None
        return window.spread(given)

    def _token(self, session: Session) -> tuple[str, Session]:
        """The session's name here, and itself without its state."""
        with self._lock:
            found = self._tokens.get(session)
            if found is None or found[1].task_key != session.task_key:  # its sub-queries were extended
                found = self._tokens[session] = (uuid.uuid4().hex, session.task())
            return found

    def _written(self, session: Session, state: SessionState) -> _Written | None:
        """The session's blacklist, named."""
        guard = state.guard
        if guard is None:
            return None
        with self._lock:
            last = self._blacklists.setdefault(session, OrderedDict())
            found = next(reversed(last.values()), None)
        if found is None or found.guard is not guard or found.generation != guard.generation:
            found = _Written.of(guard)
            with self._lock:
                last[found.digest] = found
                last.move_to_end(found.digest)
                while len(last) > _BLACKLISTS_KEPT:
                    last.popitem(last=False)
        return found

    def _ask(
        self,
        slot: Slot,
        full: bool,
        session: Session,
        state: SessionState,
        of: _Of,
        written: _Written | None,
    ) -> Ask:
        """What a session asks of a replica, with what the replica lacks as far as is known."""
        what, task, evidence = of
        token, bare = self._token(session)
        index = {item.id: i for i, item in enumerate(session.sub_queries)}
        held = None if full else slot.known.get(token)
        blacklist = None
        if written is not None:
            with self._lock:
                before = None if held is None else self._blacklists[session].get(held)
            blacklist = written.since(before)
        slot.remember(token, "" if written is None else written.digest)
        send = evidence if full or task not in slot.known else None
        if task is not None:
            slot.remember(task, True)
        columns = columns_fields(what.columns)
        if task is None and len(what.columns.residual):
            columns["residual"] = None  # those of the sub-queries that remain, which the shard knows
        return Ask(
            token=token,
            session=bare if held is None else None,
            columns=columns,
            gates=None if what.gates is what.columns else columns_fields(what.gates),
            scored=(what.scored.start, what.scored.stop),
            covered=tuple((index[entry.sub_query_id], entry.depth_weight) for entry in state.coverage),
            remaining=tuple(index[item.id] for item in state.residual),
            packed=tuple(state.packed) if needs_packed(session) else (),
            blacklist=blacklist,
            task=task,
            evidence=send,
        )

    def _facts(
        self, window: _Window, answers: Mapping[str, list[Answer]], chosen: Sequence[Merged]
    ) -> dict[int, Fact] | None:
        """The facts of all that was chosen, by sequence; None where another shard had to be given up."""
        given = [answer.facts for some in answers.values() for answer in some]
        if all(facts is not None for facts in given):
            return {fact.sequence: fact for facts in given for fact in facts or ()}
        wanted: dict[str, set[int]] = {}
        names = list(answers)
        for merge in chosen:
            for shard, number in zip(merge.shard.tolist(), merge.sequence.tolist(), strict=True):
                wanted.setdefault(names[shard], set()).add(number)
        numbers = {name: np.array(sorted(some), np.int64) for name, some in wanted.items()}
        parts = window.ask("numbered", lambda group: lambda slot, full: (numbers[group.name],), groups=list(numbers))
        if len(parts) < len(numbers):
            return None
        return {fact.sequence: fact for part in parts.values() for fact in part}


@dataclass(frozen=True)
class _Elsewhere(Question):
    """A question of a fact in one of the shards, of which the view has a copy."""

    snapshot: Snapshot
    shard: str

    def ranking(self) -> Ranking:
        self.row()
        made = cdr_rank(self.query, self.retriever, self.session, multiplier=self.multiplier)
        if made.store_version != self.snapshot.version:
            raise StoreChanged
        if not made.complete:
            raise ShardsMissing(made.missing_shards)
        return made

    def asked(self) -> WindowQuery:
        asked: WindowQuery = self.retriever.asked(self)
        return asked

    def factor(self) -> float:
        return float(self.retriever.factor(self))


@contextlib.contextmanager
def _changed() -> Iterator[None]:
    """StoreChanged in place of Superseded."""
    try:
        yield
    except Superseded:
        raise StoreChanged from None


def _all_there(window: _Window) -> None:
    if window.missing:
        raise ShardsMissing(window.missing)


@dataclass(frozen=True, eq=False)
class _Written:
    """A blacklist, named by its digest; hashes: of a guard that only keeps hashes."""

    guard: NGramGuard
    generation: Any
    digest: str
    hashes: NDArray[np.uint64] | None

    @classmethod
    def of(cls, guard: NGramGuard) -> _Written:
        generation = guard.generation
        if guard.exact or guard.max_ngrams is not None:
            return cls(guard, generation, digest_of(guard), None)
        hashes = guard.hashes
        return cls(guard, generation, digest_of_hashes(hashes), hashes)

    def since(self, held: _Written | None) -> Blacklist:
        """What a replica that holds another state is to be sent."""
        if held is not None and held.digest == self.digest:
            return Blacklist(self.digest)
        if held is not None and held.hashes is not None and self.hashes is not None:
            new = np.setdiff1d(self.hashes, held.hashes, assume_unique=True)
            if len(held.hashes) + len(new) == len(self.hashes):
                return Blacklist(self.digest, held.digest, new)
        return Blacklist(self.digest, state=self.guard.state())


@dataclass(frozen=True, eq=False)
class Merged:
    """The k best of several answers, best first; shard: the position of each one's answer."""

    shard: Int64
    sequence: Int64
    arrays: dict[str, NDArray[Any] | None]
    answers: list[Answer]


def merged(answers: list[Answer], k: int | None) -> Merged:
    """The k best of these answers of different shards: by score, then sequence."""
    sequence = np.concatenate([np.zeros(0, np.int64), *(answer.sequence for answer in answers)])
    shard = np.repeat(np.arange(len(answers)), [len(answer.sequence) for answer in answers])
    arrays: dict[str, NDArray[Any] | None] = {}
    for name in ARRAYS:
        parts = [answer.arrays[name] for answer in answers]
        arrays[name] = np.concatenate(parts) if parts and parts[0] is not None else None  # type: ignore[arg-type]  # all are there or none is
    score = arrays["score"]
    order = np.zeros(0, np.int64) if score is None else best_first(score, sequence, k)
    chosen = {name: None if values is None else values[order] for name, values in arrays.items()}
    return Merged(shard[order], sequence[order], chosen, answers)


def _ranking(
    window: _Window,
    session: Session,
    state: SessionState,
    what: WindowQuery,
    merge: Merged,
    facts: Mapping[int, Fact],
    k: int | None,
) -> Ranking:
    passed = sum(answer.passed for answer in merge.answers)
    considered = sum(answer.asked for answer in merge.answers)
    if passed < (1 if k is None else k) and not (passed == 0 and window.missing):
        session.warn_of_gate(passed, considered, k, lambda: _best_of_the_gate(window, what))
    arrays: dict[str, Any] = dict(merge.arrays)
    if not merge.answers:
        none = {name: np.zeros(0) for name in ARRAYS}
        arrays = {**none, "ngram_overlap": np.zeros(0, np.int32), "by_sub_query": None}
    extra: dict[str, Any] = {}
    if isinstance(what, CalibratedWindow):
        new = sum(answer.new for answer in merge.answers)
        need = what.columns.weight[what.scored]
        if arrays["by_sub_query"] is None:
            arrays["by_sub_query"] = np.zeros((0, len(need)))
        extra = {
            "new_share": new / passed if passed else None,
            "need": tuple(need.tolist()),
            "feedback": what.feedback,
        }
    return Ranking(
        facts=tuple(facts[number] for number in merge.sequence.tolist()),
        qualified=sum(answer.qualified for answer in merge.answers),
        guard_activations=sum(answer.activations for answer in merge.answers),
        coverage_depth=len(state.coverage),
        store_version=window.snapshot.version,
        newest=-1 if window.missing else window.snapshot.newest,
        complete=not window.missing,
        missing_shards=tuple(sorted(window.missing)),
        considered=None if window.missing else considered,
        filter=window.filter,
        **arrays,
        **extra,
    )


def _best_of_the_gate(window: _Window, what: WindowQuery) -> float:
    """The largest value of any fact in a gated column, of the shards that say it; nan where none does."""
    fields = columns_fields(what.gates.gates_alone())
    found = window.same("best_gated", fields, 0, check=lambda z: bool(np.isfinite(z).all())).values()
    return float(max((values[0] for values in found if len(values)), default=np.nan))


def _valid(answers: list[Answer], k: int | None, digests: Sequence[str | None]) -> bool:
    """Whether these can be a shard's answers: finite numbers in order, of the blacklists that were meant."""
    for answer, digest in zip(answers, digests, strict=True):
        sequence, count = answer.sequence, len(answer.sequence)
        if answer.facts is not None and [fact.sequence for fact in answer.facts] != sequence.tolist():
            return False
        if answer.digest != digest or (k is not None and count > k) or not count <= answer.qualified <= answer.passed:
            return False
        for name in ARRAYS:
            values = answer.arrays[name]
            if values is not None and (len(values) != count or not np.isfinite(values).all()):
                return False
        score = answer.arrays["score"]
        assert score is not None
        if (np.diff(score) > 0.0).any() or (np.diff(sequence)[np.diff(score) == 0.0] <= 0).any():
            return False
    return True


def _finite_best(found: list[tuple[Float64, Int64, list[str], Float64]]) -> bool:
    return all(bool(np.isfinite(values).all() and np.isfinite(vectors).all()) for values, _, _, vectors in found)


def _stacked(vectors: Sequence[Float64], dim: int) -> Float64:
    return np.stack(vectors) if vectors else np.zeros((0, dim))
