"""A folder of Markdown to a ranked envelope, a report, and the reasons for one fact.

    python examples/own_documents.py FOLDER --query "how do pods find each other"

The vectors here are hashed words, so that it runs anywhere; put your model in `embed`.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np

from cdr_kernel import FactStore, Retriever, Session, SubQuery, cdr_rank, explain, pack_facts, tokenize
from cdr_kernel.files import propose_tasks, read_documents

MODEL, DIM = "hashed-words", 512


def embed(texts: list[str]) -> np.ndarray:
    """[N, 512]: a slot for each word, by its hash. A stand-in for a model."""
    rows = np.full((len(texts), DIM), 1e-3)
    for row, text in zip(rows, texts, strict=True):
        for word in tokenize(text):
            row[int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little") % DIM] += 1.0
    return rows


def main() -> None:
    """Rank, pack, explain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Markdown and plain text")
    parser.add_argument("--query", help="what to write about (the first page that could be a task)")
    parser.add_argument("--tokens", type=int, default=300, help="budget of the envelope")
    options = parser.parse_args()

    documents = read_documents(options.folder)
    facts = [fact for document in documents for fact in document.facts]
    store = FactStore(DIM, embedding_model=MODEL)
    store.add(
        [fact.id for fact in facts],
        [fact.text for fact in facts],
        embed([fact.embedded for fact in facts]),
        source=[fact.path for fact in facts],
        position=[fact.position for fact in facts],
    )
    tasks = propose_tasks(documents)["tasks"]
    query = options.query or (tasks[0]["query"] if tasks else documents[0].title)
    topics = [item["text"] for item in tasks[0]["sub_queries"]] if tasks else [query]
    subs = [
        SubQuery(str(i), text, text, vector) for i, (text, vector) in enumerate(zip(topics, embed(topics), strict=True))
    ]

    session = Session(subs, embedding_model=MODEL, min_relevance=0.05)
    retriever, vector = Retriever(store), embed([query])[0]
    ranking = cdr_rank(vector, retriever, session)
    envelope = pack_facts(ranking, options.tokens)
    print(ranking.take(range(min(5, len(ranking)))))
    print(f"\n{len(envelope.facts)} facts, {envelope.tokens} tokens:\n{envelope.text}\n")
    last = ranking.ids[-1] if len(ranking) else facts[0].id
    print(explain(vector, retriever, session, last, token_budget=options.tokens))


if __name__ == "__main__":
    main()
