"""LlamaIndex: a retriever over a store of facts, and a node postprocessor over any other retriever's nodes.

    retriever = CDRRetriever(session, Retriever(store), embed_model, k=8)
    nodes = retriever.retrieve("the task")
    exit = retriever.update(output)                     # after each window

Needs llama-index-core (extra ``llama-index``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cdr_kernel.adapters._session_book import Sessions, SessionSource
from cdr_kernel.retrieve import Retriever
from cdr_kernel.session import Exit, WindowReport

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
except ImportError as error:
    raise ImportError(
        'the LlamaIndex adapter needs llama-index-core: pip install ".[llama-index]" in a checkout'
    ) from error


class CDRRetriever(BaseRetriever):
    """The k best facts of a store for the session's next window, as text nodes with the CDR score.

    The retriever uses the embedding of a query bundle where there is one.

    Args:
        session: A Session, or many by id (see ``Sessions``).
        retriever: A cdr_kernel Retriever.
        embed_model: The LlamaIndex embedding model of the store and the sessions.
        k: The largest number of nodes. None is all.
        session_id: The session, where there are many. ``for_session`` makes a retriever for another one.
        assess: A function from an output to its WindowReport (see ``Sessions``).
        options: Keywords of LlamaIndex's BaseRetriever.
    """

    def __init__(
        self,
        session: SessionSource | Sessions,
        retriever: Retriever,
        embed_model: BaseEmbedding,
        *,
        k: int | None = 10,
        session_id: str | None = None,
        assess: Callable[[str], WindowReport] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.sessions = session if isinstance(session, Sessions) else Sessions(session, assess=assess)
        self.cdr_retriever = retriever
        self.embed_model = embed_model
        self.k = k
        self.session_id = session_id

    def for_session(self, session_id: str) -> CDRRetriever:
        """Return a retriever for one session.

        Args:
            session_id: The session that it uses.

        Returns:
            A retriever that shares the sessions and the other settings.
        """
        return CDRRetriever(self.sessions, self.cdr_retriever, self.embed_model, k=self.k, session_id=session_id)

    def update(self, output: str, report: WindowReport | None = None) -> Exit:
        """Update the session after a window, and test the exits (``Sessions.update``).

        Args:
            output: The text of the window.
            report: The sub-queries that the output addressed. None calls ``assess``.

        Returns:
            Whether to stop, and why.

        Raises:
            SessionEnded: If the session has ended before. Nothing changes then.
        """
        return self.sessions.update(output, report, session_id=self.session_id)

    def exit(self) -> Exit:
        """Test all four exits before the next output is written (``Sessions.exit``).

        Returns:
            Whether to stop, and why.
        """
        return self.sessions.exit(self.session_id)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._ranked(_vector(query_bundle, self.embed_model))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        vector = query_bundle.embedding
        if vector is None:
            vector = await self.embed_model.aget_agg_embedding_from_queries(query_bundle.embedding_strs)
        return self._ranked(vector)

    def _ranked(self, vector: list[float]) -> list[NodeWithScore]:
        ranking = self.sessions.rank(vector, self.cdr_retriever, k=self.k, session_id=self.session_id)
        nodes = []
        for fact, score in zip(ranking.facts, ranking.score.tolist(), strict=True):
            places = {"source": fact.source, "position": fact.position}
            metadata = {name: value for name, value in places.items() if value is not None}
            nodes.append(NodeWithScore(node=TextNode(id_=fact.id, text=fact.text, metadata=metadata), score=score))
        return nodes


class CDRPostprocessor(BaseNodePostprocessor):
    """Rank nodes of another retriever for the session's next window.

    The result omits nodes below the session's gate. Each call embeds the nodes that have no embedding. An
    ``importance`` in a node's metadata counts; the default is 1.

    Args:
        session: A Session, or many by id (see ``Sessions``).
        embed_model: The LlamaIndex embedding model of the sessions.
        k: The largest number of nodes. None is all.
        session_id: The session, where there are many.
        assess: A function from an output to its WindowReport (see ``Sessions``).
    """

    session: Any
    embed_model: Any
    k: int | None = None
    session_id: str | None = None
    assess: Any = None
    _sessions: Sessions = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._sessions = Sessions(self.session, assess=self.assess)

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class in LlamaIndex's serialised form."""
        return "CDRPostprocessor"

    def for_session(self, session_id: str) -> CDRPostprocessor:
        """Return a postprocessor for one session.

        Args:
            session_id: The session that it uses.

        Returns:
            A postprocessor that shares the sessions and the other settings.
        """
        copy: CDRPostprocessor = self.model_copy(update={"session_id": session_id})
        return copy

    def update(self, output: str, report: WindowReport | None = None) -> Exit:
        """Update the session after a window, and test the exits (``Sessions.update``).

        Args:
            output: The text of the window.
            report: The sub-queries that the output addressed. None calls ``assess``.

        Returns:
            Whether to stop, and why.

        Raises:
            SessionEnded: If the session has ended before. Nothing changes then.
        """
        return self._sessions.update(output, report, session_id=self.session_id)

    def exit(self) -> Exit:
        """Test all four exits before the next output is written (``Sessions.exit``).

        Returns:
            Whether to stop, and why.
        """
        return self._sessions.exit(self.session_id)

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ValueError("CDRPostprocessor ranks by a query: pass query_bundle or query_str")
        vector = _vector(query_bundle, self.embed_model)
        vectors = [node.node.embedding for node in nodes]
        missing = [i for i, held in enumerate(vectors) if held is None]
        if missing:
            texts = [nodes[i].node.get_content(MetadataMode.EMBED) for i in missing]
            for i, made in zip(missing, self.embed_model.get_text_embedding_batch(texts), strict=True):
                vectors[i] = made
        places, ranking = self._sessions.rerank(
            vector,
            [node.node.node_id for node in nodes],
            [node.node.get_content(MetadataMode.NONE) for node in nodes],
            vectors,
            importance=[node.node.metadata.get("importance", 1.0) for node in nodes],
            k=self.k,
            session_id=self.session_id,
        )
        scores = ranking.score.tolist()
        return [NodeWithScore(node=nodes[i].node, score=score) for i, score in zip(places, scores, strict=True)]


def _vector(query_bundle: QueryBundle, embed_model: BaseEmbedding) -> list[float]:
    """Return the bundle's embedding, or compute it with the model."""
    if query_bundle.embedding is not None:
        return query_bundle.embedding
    return embed_model.get_agg_embedding_from_queries(query_bundle.embedding_strs)
