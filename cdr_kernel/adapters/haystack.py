"""Haystack 3: a ranker component that carries its session, serialised with it.

    pipeline.add_component("ranker", CDRRanker(session, top_k=8))
    pipeline.connect("embedder.embedding", "ranker.query_embedding")      # a text embedder of the documents' model
    pipeline.connect("retriever.documents", "ranker.documents")           # one that returns embeddings
    exit = pipeline.get_component("ranker").update(output)                # after each window

Needs haystack-ai 3 (extra ``haystack``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cdr_kernel.adapters._session_book import Sessions, SessionSource, breakdown
from cdr_kernel.session import Exit, Session, WindowReport

try:
    from haystack import Document, component, default_from_dict, default_to_dict
except ImportError as error:
    raise ImportError('the Haystack adapter needs haystack-ai: pip install ".[haystack]" in a checkout') from error


@component
class CDRRanker:
    """Rank documents for the session's next window.

    The result omits documents below the session's gate. ``to_dict`` writes the sessions with their whole state as text.
    It cannot write sessions that come from a function.

    Args:
        session: A Session, or many by id (see ``Sessions``).
        top_k: The largest number of documents. None is all.
        session_id: The session for runs that name none.
        assess: A function from an output to its WindowReport (see ``Sessions``). ``to_dict`` does not write it.
    """

    def __init__(
        self,
        session: SessionSource,
        top_k: int | None = None,
        session_id: str | None = None,
        assess: Callable[[str], WindowReport] | None = None,
    ) -> None:
        self.sessions = Sessions(session, assess=assess)
        self.top_k = top_k
        self.session_id = session_id

    @component.output_types(documents=list[Document])
    def run(
        self,
        query_embedding: list[float],
        documents: list[Document],
        top_k: int | None = None,
        session_id: str | None = None,
    ) -> dict[str, list[Document]]:
        """Rank the documents.

        Args:
            query_embedding: The query's embedding, [D].
            documents: Documents with embeddings (set return_embedding=True on the retriever). ``importance`` in a
                document's meta counts; the default is 1.
            top_k: The largest number of documents. None is the component's own.
            session_id: The session, where there are many. None is the component's own.

        Returns:
            ``documents``: copies of those that pass the gate, best first, with the score, and its terms in
            ``meta["cdr"]``.

        Raises:
            ValueError: If a document has no embedding, and as in ``Sessions.rerank``.
            SessionEnded: If the session has ended.
        """
        without = [document.id for document in documents if document.embedding is None]
        if without:
            raise ValueError(f"documents: {without[0]!r} and {len(without) - 1} more have no embedding")
        places, ranking = self.sessions.rerank(
            query_embedding,
            [document.id for document in documents],
            [document.content or "" for document in documents],
            [document.embedding for document in documents],
            importance=[document.meta.get("importance", 1.0) for document in documents],
            k=self.top_k if top_k is None else top_k,
            session_id=session_id or self.session_id,
        )
        ranked = [
            replace(
                documents[i], score=float(ranking.score[j]), meta=documents[i].meta | {"cdr": breakdown(ranking, j)}
            )
            for j, i in enumerate(places)
        ]
        return {"documents": ranked}

    def update(self, output: str, report: WindowReport | None = None, session_id: str | None = None) -> Exit:
        """Update the session after a window, and test the exits (``Sessions.update``).

        Args:
            output: The text of the window.
            report: The sub-queries that the output addressed. None calls ``assess``.
            session_id: The session, where there are many. None is the adapter's own.

        Returns:
            Whether to stop, and why.

        Raises:
            SessionEnded: If the session has ended before. Nothing changes then.
        """
        return self.sessions.update(output, report, session_id=session_id or self.session_id)

    def exit(self, session_id: str | None = None) -> Exit:
        """Test all four exits before the next output is written (``Sessions.exit``).

        Args:
            session_id: The session, where there are many. None is the adapter's own.

        Returns:
            Whether to stop, and why.
        """
        return self.sessions.exit(session_id or self.session_id)

    def to_dict(self) -> dict[str, Any]:
        """Serialise the component with its sessions as JSON texts.

        Returns:
            The dictionary that ``from_dict`` reads.

        Raises:
            ValueError: If the sessions come from a function.
        """
        source = self.sessions.source
        if isinstance(source, Session):
            session: Any = source.to_json()
        elif isinstance(source, Mapping):
            session = {name: each.to_json() for name, each in source.items()}
        else:
            raise ValueError("sessions that come from a function cannot be serialised: give a Session or a mapping")
        written: dict[str, Any] = default_to_dict(self, session=session, top_k=self.top_k, session_id=self.session_id)
        return written

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CDRRanker:
        """Restore a component from the dictionary of ``to_dict``.

        Args:
            data: The dictionary.

        Returns:
            The component. Its sessions have the state that they had in ``to_dict``.
        """
        parameters = dict(data["init_parameters"])
        session = parameters["session"]
        if isinstance(session, str):
            parameters["session"] = Session.from_json(session)
        else:
            parameters["session"] = {name: Session.from_json(text) for name, text in session.items()}
        made: CDRRanker = default_from_dict(cls, {**data, "init_parameters": parameters})
        return made
