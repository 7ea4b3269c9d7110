"""Three windows with LlamaIndex: a retriever over a store, then a postprocessor behind a vector index."""

from __future__ import annotations

from demo_data import embed, facts, new_session, query, retriever, write
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import TextNode

from cdr_kernel.adapters.llamaindex import CDRPostprocessor, CDRRetriever


class Known(BaseEmbedding):
    """Your embedding model."""

    def _get_query_embedding(self, query: str) -> list[float]:
        return embed(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return embed(text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return embed(query)


def main() -> None:
    cdr = CDRRetriever(new_session(), retriever, Known(), k=8)
    while not cdr.exit().stop:
        nodes = cdr.retrieve(query)
        if cdr.exit().stop:  # nothing new was found: nothing is written
            break
        exit = cdr.update(write([node.text for node in nodes]))
        print("retriever    ", nodes[0].node_id, nodes[0].score, exit.reason or "go on")

    index = VectorStoreIndex([TextNode(id_=fact.id, text=fact.text) for fact in facts], embed_model=Known())
    search, postprocessor = index.as_retriever(similarity_top_k=100), CDRPostprocessor(
        session=new_session(), embed_model=Known(), k=8
    )  # fmt: skip
    while not postprocessor.exit().stop:
        nodes = postprocessor.postprocess_nodes(search.retrieve(query), query_str=query)
        if postprocessor.exit().stop:
            break
        exit = postprocessor.update(write([node.text for node in nodes]))
        print("postprocessor", nodes[0].node_id, nodes[0].score, exit.reason or "go on")


if __name__ == "__main__":
    main()
