"""What the examples share: the packaged facts, a session over their task, and vectors looked up by text.

In your program ``embed`` is your model and the texts come from it; here every text that is embedded is known, so that
nothing is downloaded.
"""

from __future__ import annotations

from cdr_kernel import Retriever, Session
from cdr_kernel.demo import EMBEDDING_MODEL, MIN_RELEVANCE, load

demo = load()
view = demo.store.view()
facts = view.facts(range(view.rows))
query: str = demo.task.query
retriever = Retriever(demo.store)
_vectors = {fact.text: row for fact, row in zip(facts, view.embeddings.astype(float).tolist(), strict=True)}
_vectors |= {item.text: item.embedding.tolist() for item in demo.sub_queries} | {query: demo.query.tolist()}


def embed(text: str) -> list[float]:
    """The vector of a text that the demo has."""
    return _vectors[text]


def new_session() -> Session:
    """A session of three windows over the demo's task."""
    return Session(demo.sub_queries, embedding_model=EMBEDDING_MODEL, min_relevance=MIN_RELEVANCE, max_windows=3)


def write(texts: list[str]) -> str:
    """In place of a language model: what it was given, word for word."""
    return "\n".join(texts)
