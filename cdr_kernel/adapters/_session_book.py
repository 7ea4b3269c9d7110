"""Sessions for frameworks whose calls carry no state.

An adapter ranks for one session, remembers the last ranking, and passes the writer's output to the session.
"""

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
    """Return an id for a document that has none. Equal texts have equal ids."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Sessions:
    """The sessions of one adapter and the last ranking of each.

    The last ranking of a session is the context (the specification says *envelope*) of its current window. A ranking
    that is empty because k is 0 raises ValueError (reading R39). The windows of one session must follow one another.
    Many threads may use many sessions.

    A session that has ended accepts no further window: ``rank``, ``rerank`` and ``update`` raise SessionEnded, and the
    message says what reopens the session. After exhaustion, new facts reopen it. For ``rank`` these are new facts in
    the store. For ``rerank`` this is a document that the previous call did not have.

    Args:
        source: A Session, or many by id: a mapping, or a function that returns the same Session for the same id. With
            many sessions every call names a `session_id`.
        assess: A function from an output to its WindowReport, for calls of ``update`` without a report. None is
            `cdr_kernel.loop.assess` without an embedder, which counts words.
        tokenizer: The tokenizer of the sessions' n-gram guards. None is the default one.
        hash_key: The hash key of the sessions' n-gram guards. None is the default one.

    Raises:
        TypeError: If `source` is neither a Session, a mapping nor a function.
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
        """Return the session of an id.

        Args:
            session_id: The id. None is allowed only with a single session.

        Returns:
            The session.

        Raises:
            ValueError: If the id is not that of the single session, or if there are many sessions and no id.
            KeyError: If the mapping has no such session.
            TypeError: If the source returns something other than a Session.
        """
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
        """Rank a whole store with ``cdr_rank`` and remember the ranking.

        Args:
            query: The query's embedding, [D].
            retriever: The retriever over the store.
            k: The largest number of facts. None is all.
            session_id: The session, where there are many.

        Returns:
            The ranking.

        Raises:
            SessionEnded: If the session has ended.
            ValueError: If the ranking is empty because k is 0 (reading R39).
        """
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
        """Rank documents that another retriever returned, and remember the ranking.

        The result omits documents below the session's gate. It also omits a document that repeats an earlier id.

        Args:
            query: The query's embedding, [D].
            ids: The ids of the M documents.
            texts: Their texts.
            embeddings: Their embeddings, [M, D], of the session's model.
            importance: Their importance, [M], >= 0. None is 1 for all.
            k: The largest number of documents. None is all.
            session_id: The session, where there are many.

        Returns:
            The positions of the ranked documents in `ids`, best first, and the ranking.

        Raises:
            ValueError: For vectors that are zero, not finite or of another dimension, for a session of mode
                "calibrated", which needs the whole store, and for an empty ranking with k = 0 (reading R39).
            SessionEnded: If the session has ended.
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
        """Return a stand-in for the documents' newest sequence number. It grows by one when there are new documents."""
        last = session.state.last_envelope
        known = -1 if last is None else last.newest
        with self._lock:
            offered, number = self._offered.get(session, (None, known))
        return number if offered is None or offered.issuperset(ids) else max(number, known) + 1

    def handed_out(self, session_id: str | None = None) -> Envelope | None:
        """Return the context of the current window.

        Args:
            session_id: The session, where there are many.

        Returns:
            The last ranking since the last update, as an Envelope. None if there is no such ranking.
        """
        with self._lock:
            ranking = self._rankings.get(self.get(session_id))
        if ranking is None:
            return None
        tokens = sum(count_tokens_default(fact.text) for fact in ranking.facts)
        return Envelope(ranking, tokens=tokens, token_budget=tokens, skipped=0)

    def exit(self, session_id: str | None = None) -> Exit:
        """Test all four exits before the next output is written (readings R32 and R37).

        Call it after each ``rank`` or ``rerank`` too. If the ranking has nothing new, the writer need not write.

        Args:
            session_id: The session, where there are many.

        Returns:
            Whether to stop, and why.
        """
        session, envelope = self.get(session_id), self.handed_out(session_id)
        return session.exit() if envelope is None else session.before_window(envelope)

    def update(self, output: str, report: WindowReport | None = None, *, session_id: str | None = None) -> Exit:
        """Update the session after a window, and test the exits.

        The session covers the sub-queries that the output addressed and takes the last ranking as its envelope.

        Args:
            output: The text of the window.
            report: The sub-queries that the output addressed. None calls ``assess``.
            session_id: The session, where there are many.

        Returns:
            Whether to stop, and why.

        Raises:
            SessionEnded: If the session has ended before. Nothing changes then.
            ValueError: As in ``Session.update``, which may raise other exceptions too.
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
    """Return the score of one ranked fact and the terms behind it, as plain floats."""
    return {
        "score": float(ranking.score[place]),
        "relevance": float(ranking.relevance[place]),
        "residual_pull": float(ranking.residual_pull[place]),
        "novelty": float(ranking.novelty[place]),
        "ngram_penalty": float(ranking.ngram_penalty[place]),
        "importance": float(ranking.importance[place]),
    }
