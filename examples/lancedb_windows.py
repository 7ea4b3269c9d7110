"""Three windows with LanceDB: a vector search, reranked for the session."""

from __future__ import annotations

import tempfile

import lancedb
from demo_data import embed, facts, new_session, query, write

from cdr_kernel.adapters.lancedb import CDRReranker


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"id": fact.id, "text": fact.text, "vector": embed(fact.text)} for fact in facts]
        table = lancedb.connect(folder).create_table("facts", rows)
        reranker = CDRReranker(new_session(), embed, id_column="id", k=8)
        while not reranker.exit().stop:
            found = table.search(embed(query)).limit(100).rerank(reranker, query_string=query).to_list()
            if reranker.exit().stop:  # nothing new was found: nothing is written
                break
            exit = reranker.update(write([row["text"] for row in found]))
            print("reranker", found[0]["id"], found[0]["_relevance_score"], exit.reason or "go on")


if __name__ == "__main__":
    main()
