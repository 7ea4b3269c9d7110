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
    """What both carry: the sessions, and the way an output reaches them."""

    session: Any
    session_id: str | None = None
    assess: Any = None
    model_config = ConfigDict(arbitrary_types_allowed=True)
    _sessions: Sessions = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Make the sessions."""
        super().model_post_init(context)
        self._sessions = Sessions(self.session, assess=self.assess)

    def for_session(self, session_id: str) -> Self:
        """The same adapter with that session_id."""
        return self.model_copy(update={"session_id": session_id})

    def update(self, output: str, report: WindowReport | None = None, *, session_id: str | None = None) -> Exit:
        """See ``Sessions.update``."""
        return self._sessions.update(output, report, session_id=session_id or self.session_id)

    def exit(self, *, session_id: str | None = None) -> Exit:
        """See ``Sessions.exit``."""
        return self._sessions.exit(session_id or self.session_id)


class CDRRetriever(_Carrying, BaseRetriever):
    """The k best facts of a store for the session's next window, as documents.

    session: a Session, or many by id (see ``Sessions``). retriever: a cdr_kernel Retriever. embeddings: of the model of
    the store and the sessions. session_id: used where a call names none. assess: see ``Sessions``.

    Documents have the fact's id and text; metadata has ``source`` and ``position`` where the fact has them,
    ``relevance_score`` (the CDR score) and ``cdr``, its breakdown.
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
    """Documents that another retriever found, ranked for the session's next window; those below its gate are left out.

    session, embeddings, k, session_id, assess: as in ``CDRRetriever``. A vector in ``metadata[embedding_key]`` and an
    importance in ``metadata["importance"]`` are taken where a document has them; other documents are embedded in every
    call (wrap embeddings in CacheBackedEmbeddings to keep them). A document without an id is known by its text.
    """

    embeddings: Embeddings
    k: int | None = None
    embedding_key: str = "embedding"

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """The documents that pass the gate, best first, k of them; copies, with the scores in their metadata."""
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
