"""LanceDB: a reranker that carries its session, for vector, full-text and hybrid searches.

    reranker = CDRReranker(session, embed)
    table.search(vector).rerank(reranker, query_string="the task").limit(50).to_list()
    exit = reranker.update(output)                      # after each window

Needs lancedb (extra ``lancedb``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cdr_kernel.adapters._session_book import Sessions, SessionSource, text_id
from cdr_kernel.session import Exit, WindowReport

try:
    import pyarrow as pa
    from lancedb.rerankers import Reranker
except ImportError as error:
    raise ImportError('the LanceDB adapter needs lancedb: pip install ".[lancedb]" in a checkout') from error


class CDRReranker(Reranker):
    """Rows ranked for the session's next window, the score in ``_relevance_score``; those below its gate are left out.

    session: a Session, or many by id (see ``Sessions``). embed: the query's text -> [D], of the model of the rows'
    vectors. column, vector_column: where a row's text and vector are; id_column: where its id is, by default its
    text decides. importance_column: >= 0, by default 1. k: how many rows, all for None; limit() of a search is applied
    before the reranker sees them. session_id: which session, where there are many; ``for_session`` gives a reranker
    with another one. assess: see ``Sessions``. return_score: as in LanceDB.
    """

    def __init__(
        self,
        session: SessionSource | Sessions,
        embed: Callable[[str], Any],
        *,
        column: str = "text",
        vector_column: str = "vector",
        id_column: str | None = None,
        importance_column: str | None = None,
        k: int | None = None,
        session_id: str | None = None,
        assess: Callable[[str], WindowReport] | None = None,
        return_score: str = "relevance",
    ) -> None:
        super().__init__(return_score)
        self.sessions = session if isinstance(session, Sessions) else Sessions(session, assess=assess)
        self.embed = embed
        self.columns = (column, vector_column, id_column, importance_column)
        self.k = k
        self.session_id = session_id

    def for_session(self, session_id: str) -> CDRReranker:
        """The same reranker with that session_id."""
        names = ("column", "vector_column", "id_column", "importance_column")
        columns: Any = dict(zip(names, self.columns, strict=True))
        return CDRReranker(
            self.sessions, self.embed, **columns, k=self.k, session_id=session_id, return_score=self.score
        )

    def update(self, output: str, report: WindowReport | None = None) -> Exit:
        """See ``Sessions.update``."""
        return self.sessions.update(output, report, session_id=self.session_id)

    def exit(self) -> Exit:
        """See ``Sessions.exit``."""
        return self.sessions.exit(self.session_id)

    def rerank_vector(self, query: str, vector_results: pa.Table) -> pa.Table:
        """Rows of a vector search; give the search's ``rerank`` a query_string."""
        return self._ranked(query, vector_results)

    def rerank_fts(self, query: str, fts_results: pa.Table) -> pa.Table:
        """Rows of a full-text search."""
        return self._ranked(query, fts_results)

    def rerank_hybrid(self, query: str, vector_results: pa.Table, fts_results: pa.Table) -> pa.Table:
        """Rows of both, each once."""
        if self.score == "all":
            return self._ranked(query, self._merge_and_keep_scores(vector_results, fts_results))
        return self._ranked(query, self.merge_results(vector_results, fts_results))

    def _ranked(self, query: str, rows: pa.Table) -> pa.Table:
        column, vector_column, id_column, importance_column = self.columns
        missing = [name for name in self.columns if name is not None and name not in rows.column_names]
        if missing:
            raise ValueError(f"the results have no column {missing[0]!r}, only {', '.join(rows.column_names)}")
        texts = [text or "" for text in rows[column].to_pylist()]
        ids = [text_id(text) for text in texts] if id_column is None else [str(i) for i in rows[id_column].to_pylist()]
        places, ranking = self.sessions.rerank(
            self.embed(query),
            ids,
            texts,
            rows[vector_column].to_pylist(),
            importance=None if importance_column is None else rows[importance_column].to_pylist(),
            k=self.k,
            session_id=self.session_id,
        )
        ranked = rows.take(pa.array(places, pa.int64()))
        ranked = ranked.append_column("_relevance_score", pa.array(ranking.score, pa.float32()))
        return self._keep_relevance_score(ranked) if self.score == "relevance" else ranked
