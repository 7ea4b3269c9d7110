"""Three windows with Haystack: an embedding retriever, then the ranker that carries the session."""

from __future__ import annotations

from demo_data import embed, facts, new_session, query, write
from haystack import Document, Pipeline
from haystack.components.retrievers import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from cdr_kernel.adapters.haystack import CDRRanker


def main() -> None:
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    store.write_documents([Document(id=fact.id, content=fact.text, embedding=embed(fact.text)) for fact in facts])
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=100, return_embedding=True))
    pipeline.add_component("ranker", CDRRanker(new_session(), top_k=8))
    pipeline.connect("retriever.documents", "ranker.documents")
    ranker = pipeline.get_component("ranker")
    vector = embed(query)  # in your pipeline a text embedder, connected to both
    while not ranker.exit().stop:
        found = pipeline.run({"retriever": {"query_embedding": vector}, "ranker": {"query_embedding": vector}})
        documents = found["ranker"]["documents"]
        if ranker.exit().stop:  # nothing new was found: nothing is written
            break
        exit = ranker.update(write([document.content for document in documents]))
        print("ranker", documents[0].id, documents[0].score, exit.reason or "go on")


if __name__ == "__main__":
    main()
