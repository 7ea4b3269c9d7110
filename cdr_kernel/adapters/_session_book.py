"""The sessions behind a framework's stateless calls: rank for one, remember what was handed out, take the output."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.loop import assess as count_words
from cdr_kernel.rank import Envelope, Ranking, cdr_rank
from cdr_kernel.rank._cdr_rank import newest_in
from cdr_kernel.rank._pack import count_tokens_default
from cdr_kernel.retrieve import Retriever
from cdr_kernel.session import Exit, Session, WindowReport
from cdr_kernel.store import FactStore
from cdr_kernel.text import Tokenizer
from cdr_kernel.text._token_hashes import HashKey

SessionSource: TypeAlias = "Session | Mapping[str, Session] | Callable[[str], Session]"
"""One session, or many by id: a mapping or a function."""


def text_id(text: str) -> str:
    """An id for a document that has none: the same for the same text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Sessions:
    """What every adapter carries.

    source: a Session, or many by id (a mapping, or a function that returns the same Session for the same id); then
    every call names a session_id. assess: an output to its WindowReport, where ``update`` is given none; by default
    `assess` without an embedder, which counts words. tokenizer, hash_key: those of the sessions' n-gram
    guards, where they are not the default.

    What ``rank`` and ``rerank`` hand out last, per session, counts as the window's envelope. One that is empty because
    k is 0 is a ValueError (reading R39). Windows of one session come one after the other; many sessions may be used
    from many threads.

    A session that has ended gets no other window: ``rank``, ``rerank`` and ``update`` raise SessionEnded, and its
    message says what opens it again. After exhaustion those are new facts: in the store of a ``rank``, among the
    documents of a ``rerank`` one that the one before was not given.
    """

    def __init__(
        self,
        source: SessionSource,
        *,
        assess: Callable[[str], WindowReport] | None = None,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
    ) -> None:
        if not isinstance(source, Session | Mapping) and not callable(source):
            raise TypeError(f"session: expected a Session, a mapping or a function, got {type(source).__name__}")
        self.source = source
        self._assess = assess
        self._hashing: dict[str, Any] = {"tokenizer": tokenizer, "hash_key": hash_key}
        self._rankings: WeakKeyDictionary[Session, Ranking] = WeakKeyDictionary()
        self._offered: WeakKeyDictionary[Session, tuple[frozenset[str], int]] = WeakKeyDictionary()
        self._lock = Lock()

    def get(self, session_id: str | None = None) -> Session:
        """The session of that id. ValueError for an id where there is one session, or none where there are many."""
        if isinstance(self.source, Session):
            if session_id not in (None, self.source.id):
                raise ValueError(f"session_id: this adapter has the one session {self.source.id!r}, got {session_id!r}")
            return self.source
        if session_id is None:
            raise ValueError("session_id: this adapter has many sessions, name one")
        if not isinstance(self.source, Mapping):
            session = self.source(session_id)
        elif session_id in self.source:
            session = self.source[session_id]
        else:
            raise KeyError(f"session_id: no session {session_id!r}")
        if not isinstance(session, Session):
            raise TypeError(f"session_id {session_id!r}: expected a Session, got {type(session).__name__}")
        return session

    def rank(self, query: Any, retriever: Retriever, *, k: int | None, session_id: str | None = None) -> Ranking:
        """``cdr_rank`` over a whole store, remembered."""
        session = self.get(session_id)
        session.check_open(newest_in(retriever))
        return self._remember(session, cdr_rank(query, retriever, session, k=k))

    def rerank(
        self,
        query: Any,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Any,
        *,
        importance: Sequence[float] | None = None,
        k: int | None = None,
        session_id: str | None = None,
    ) -> tuple[list[int], Ranking]:
        """``cdr_rank`` over documents that something else retrieved, remembered: their places, best first, and the
        ranking.

        query: [D]; embeddings: [M, D], of the session's model; importance: [M], >= 0. A document below the session's
        gate is left out, and so is one whose id came before. Raises ValueError for vectors that are zero, not finite
        or of another dimension, and for a session of mode "calibrated", which needs the whole store.
        """
        session = self.get(session_id)
        if not session.settings.in_cosines:
            raise ValueError("mode 'calibrated' measures against the whole store: use the retriever of this adapter")
        newest = self._newest(session, ids)
        session.check_open(newest)
        first = {id: place for place, id in reversed(list(enumerate(ids)))}
        places = sorted(first.values())
        store = FactStore(session.dim, embedding_model=session.embedding_model, dtype="float64", **self._hashing)
        store.add(
            [ids[i] for i in places],
            [texts[i] for i in places],
            [embeddings[i] for i in places],
            importance=None if importance is None else [importance[i] for i in places],
        )
        ranking = replace(cdr_rank(query, Retriever(store), session, k=k), newest=newest)
        with self._lock:
            self._offered[session] = frozenset(ids), newest
        return [first[fact.id] for fact in ranking.facts], self._remember(session, ranking)

    def _newest(self, session: Session, ids: Sequence[str]) -> int:
        """What stands for the newest sequence number of documents: one more where there are new ones among them."""
        last = session.state.last_envelope
        known = -1 if last is None else last.newest
        with self._lock:
            offered, number = self._offered.get(session, (None, known))
        return number if offered is None or offered.issuperset(ids) else max(number, known) + 1

    def handed_out(self, session_id: str | None = None) -> Envelope | None:
        """What the session was given since its last update; None for nothing."""
        with self._lock:
            ranking = self._rankings.get(self.get(session_id))
        if ranking is None:
            return None
        tokens = sum(count_tokens_default(fact.text) for fact in ranking.facts)
        return Envelope(ranking, tokens=tokens, token_budget=tokens, skipped=0)

    def exit(self, session_id: str | None = None) -> Exit:
        """Whether to stop before the next output is written: all four exits (readings R32 and R37).

        Ask after each ``rank`` or ``rerank`` too: where what it handed out has nothing new, no output is written.
        """
        session, envelope = self.get(session_id), self.handed_out(session_id)
        return session.exit() if envelope is None else session.before_window(envelope)

    def update(self, output: str, report: WindowReport | None = None, *, session_id: str | None = None) -> Exit:
        """After a window: cover what output addressed, remember what was handed out; says whether to stop.

        report: what output achieved; None asks ``assess``. Raises what ``Session.update`` raises, and SessionEnded
        where the session had ended before; then nothing changed.
        """
        session, envelope = self.get(session_id), self.handed_out(session_id)
        session.check_open(-1 if envelope is None else envelope.ranking.newest)
        if report is None and self._assess is not None:
            report = self._assess(output)
        elif report is None:
            report = count_words(output, session.sub_queries, written=session.words)
        session.update(
            report, output, envelope=envelope, embedding_model=report.embedding_model or session.embedding_model
        )
        with self._lock:
            self._rankings.pop(session, None)
        return session.exit(report, envelope)

    def _remember(self, session: Session, ranking: Ranking) -> Ranking:
        Envelope(ranking, tokens=0, token_budget=0, skipped=0).check_fits()
        with self._lock:
            self._rankings[session] = ranking
        return ranking


def breakdown(ranking: Ranking, place: int) -> dict[str, float]:
    """The numbers of one ranked fact, as plain floats."""
    return {
        "score": float(ranking.score[place]),
        "relevance": float(ranking.relevance[place]),
        "residual_pull": float(ranking.residual_pull[place]),
        "novelty": float(ranking.novelty[place]),
        "ngram_penalty": float(ranking.ngram_penalty[place]),
        "importance": float(ranking.importance[place]),
    }
