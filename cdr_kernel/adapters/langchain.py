"""LangChain: a retriever over a store of facts, and a compressor over the documents of any other retriever.

    retriever = CDRRetriever(session=session, retriever=Retriever(store), embeddings=embeddings, k=8)
    documents = retriever.invoke("the task")            # or: invoke("the task", session_id="a") with many sessions
    exit = retriever.update(output)                     # after each window

Needs langchain-core (extra ``langchain``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from cdr_kernel.adapters._session_book import Sessions, breakdown, text_id
from cdr_kernel.rank import Ranking
from cdr_kernel.session import Exit, WindowReport

try:
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables.config import run_in_executor
    from pydantic import BaseModel, ConfigDict, PrivateAttr
except ImportError as error:
    raise ImportError('the LangChain adapter needs langchain-core: pip install ".[langchain]" in a checkout') from error


class _Carrying(BaseModel):
    """Fields and methods that the retriever and the compressor share."""

    session: Any
    session_id: str | None = None
    assess: Any = None
    model_config = ConfigDict(arbitrary_types_allowed=True)
    _sessions: Sessions = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Create the sessions after pydantic has set the fields."""
        super().model_post_init(context)
        self._sessions = Sessions(self.session, assess=self.assess)

    def for_session(self, session_id: str) -> Self:
        """Return a copy of the adapter for one session.

        Args:
            session_id: The session that the copy uses.

        Returns:
            The copy. It shares the sessions.
        """
        return self.model_copy(update={"session_id": session_id})

    def update(self, output: str, report: WindowReport | None = None, *, session_id: str | None = None) -> Exit:
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
        return self._sessions.update(output, report, session_id=session_id or self.session_id)

    def exit(self, *, session_id: str | None = None) -> Exit:
        """Test all four exits before the next output is written (``Sessions.exit``).

        Args:
            session_id: The session, where there are many. None is the adapter's own.

        Returns:
            Whether to stop, and why.
        """
        return self._sessions.exit(session_id or self.session_id)


class CDRRetriever(_Carrying, BaseRetriever):
    """The k best facts of a store for the session's next window, as documents.

    A document has the fact's id and text. Its metadata has ``relevance_score`` (the CDR score), ``cdr`` (the terms of
    the score), and ``source`` and ``position`` where the fact has them.

    Args:
        session: A Session, or many by id (see ``Sessions``).
        retriever: A cdr_kernel Retriever.
        embeddings: LangChain embeddings of the model of the store and the sessions.
        k: The largest number of documents. None is all.
        session_id: The session for calls that name none.
        assess: A function from an output to its WindowReport (see ``Sessions``).
    """

    retriever: Any
    embeddings: Embeddings
    k: int | None = 10

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any = None, session_id: str | None = None
    ) -> list[Document]:
        return self._ranked(self.embeddings.embed_query(query), session_id)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any = None, session_id: str | None = None
    ) -> list[Document]:
        vector = await self.embeddings.aembed_query(query)
        documents: list[Document] = await run_in_executor(None, self._ranked, vector, session_id)
        return documents

    def _ranked(self, vector: list[float], session_id: str | None) -> list[Document]:
        ranking = self._sessions.rank(vector, self.retriever, k=self.k, session_id=session_id or self.session_id)
        documents = []
        for place, fact in enumerate(ranking.facts):
            places = {"source": fact.source, "position": fact.position}
            metadata = {name: value for name, value in places.items() if value is not None} | _scores(ranking, place)
            documents.append(Document(id=fact.id, page_content=fact.text, metadata=metadata))
        return documents


class CDRCompressor(_Carrying, BaseDocumentCompressor):
    """Rank documents of another retriever for the session's next window.

    The result omits documents below the session's gate. A document without an id gets one from its text. An importance
    in ``metadata["importance"]`` counts; the default is 1. Each call embeds the documents that have no vector; wrap
    `embeddings` in CacheBackedEmbeddings to avoid that.

    Args:
        session: A Session, or many by id (see ``Sessions``).
        embeddings: LangChain embeddings of the sessions' model.
        k: The largest number of documents. None is all.
        embedding_key: The metadata key of a document's vector.
        session_id: The session, where there are many.
        assess: A function from an output to its WindowReport (see ``Sessions``).
    """

    embeddings: Embeddings
    k: int | None = None
    embedding_key: str = "embedding"

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """Rank the documents.

        Args:
            documents: The documents of another retriever.
            query: The query's text.
            callbacks: Unused.

        Returns:
            Copies of the at most k best documents that pass the gate, best first, with the scores in their metadata.

        Raises:
            ValueError: As in ``Sessions.rerank``.
            SessionEnded: If the session has ended.
        """
        vectors = [document.metadata.get(self.embedding_key) for document in documents]
        missing = [i for i, vector in enumerate(vectors) if vector is None]
        if missing:
            made = self.embeddings.embed_documents([documents[i].page_content for i in missing])
            for i, vector in zip(missing, made, strict=True):
                vectors[i] = vector
        places, ranking = self._sessions.rerank(
            self.embeddings.embed_query(query),
            [document.id or text_id(document.page_content) for document in documents],
            [document.page_content for document in documents],
            vectors,
            importance=[document.metadata.get("importance", 1.0) for document in documents],
            k=self.k,
            session_id=self.session_id,
        )
        return [
            documents[i].model_copy(update={"metadata": documents[i].metadata | _scores(ranking, place)})
            for place, i in enumerate(places)
        ]


def _scores(ranking: Ranking, place: int) -> dict[str, Any]:
    return {"relevance_score": float(ranking.score[place]), "cdr": breakdown(ranking, place)}
