"""BentoML: facts of a store ranked for the session that a request brings.

    CDR_STORE=STORE bentoml serve bentoml_service:CDRRank

The session travels as its JSON (``Session.to_json``), so that any worker answers any request; the caller updates it
(``Session.update``) after each window.
"""

from __future__ import annotations

import os

import bentoml

from cdr_kernel import FactStore, Retriever, Session, cdr_rank


@bentoml.service(traffic={"timeout": 30})
class CDRRank:
    """One store, opened once a worker."""

    def __init__(self) -> None:
        self.retriever = Retriever(FactStore.load(os.environ["CDR_STORE"]))

    @bentoml.api
    def rank(self, query: list[float], session: str, k: int = 10) -> list[dict[str, str | float]]:
        """The k best facts, best first. query: [D] of the store's model; session: JSON of ``Session.to_json``."""
        own = Session.from_json(session)
        own.check_open(self.retriever.store.newest)  # a session that has ended gets no other window
        ranking = cdr_rank(query, self.retriever, own, k=k)
        return [
            {"id": fact.id, "text": fact.text, "score": float(score), "novelty": float(novelty)}
            for fact, score, novelty in zip(ranking.facts, ranking.score, ranking.novelty, strict=True)
        ]
