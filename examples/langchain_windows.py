"""Three windows with LangChain: a retriever over a store, then a compressor behind a vector store's own search."""

from __future__ import annotations

from demo_data import embed, facts, new_session, query, retriever, write
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from cdr_kernel.adapters.langchain import CDRCompressor, CDRRetriever


class Known(Embeddings):
    """Your embedding model."""

    def embed_query(self, text: str) -> list[float]:
        return embed(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [embed(text) for text in texts]


def main() -> None:
    cdr = CDRRetriever(session=new_session(), retriever=retriever, embeddings=Known(), k=8)
    while not cdr.exit().stop:
        documents = cdr.invoke(query)
        if cdr.exit().stop:  # nothing new was found: nothing is written
            break
        exit = cdr.update(write([document.page_content for document in documents]))
        print("retriever ", documents[0].id, documents[0].metadata["cdr"], exit.reason or "go on")

    store = InMemoryVectorStore(Known())
    store.add_documents([Document(id=fact.id, page_content=fact.text) for fact in facts])
    compressor = CDRCompressor(session=new_session(), embeddings=Known(), k=8)
    while not compressor.exit().stop:
        documents = compressor.compress_documents(store.similarity_search(query, k=100), query)
        if compressor.exit().stop:
            break
        exit = compressor.update(write([document.page_content for document in documents]))
        print("compressor", documents[0].id, documents[0].metadata["cdr"], exit.reason or "go on")


if __name__ == "__main__":
    main()
