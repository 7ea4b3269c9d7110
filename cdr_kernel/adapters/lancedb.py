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
    """Rank rows of a search for the session's next window.

    The result omits rows below the session's gate. The score is in ``_relevance_score``. LanceDB applies the search's
    limit() before it calls the reranker.

    Args:
        session: A Session, or many by id (see ``Sessions``).
        embed: A function from the query's text to its embedding, [D], of the model of the rows' vectors.
        column: The column of a row's text.
        vector_column: The column of a row's vector.
        id_column: The column of a row's id. None makes the id from the text.
        importance_column: The column of a row's importance, >= 0. None is 1 for all rows.
        k: The largest number of rows. None is all.
        session_id: The session, where there are many. ``for_session`` makes a reranker for another one.
        assess: A function from an output to its WindowReport (see ``Sessions``).
        return_score: As in LanceDB.
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
        """Return a reranker for one session.

        Args:
            session_id: The session that it uses.

        Returns:
            A reranker that shares the sessions and the other settings.
        """
        names = ("column", "vector_column", "id_column", "importance_column")
        columns: Any = dict(zip(names, self.columns, strict=True))
        return CDRReranker(
            self.sessions, self.embed, **columns, k=self.k, session_id=session_id, return_score=self.score
        )

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

    def rerank_vector(self, query: str, vector_results: pa.Table) -> pa.Table:
        """Rank the rows of a vector search.

        Args:
            query: The query's text. Pass it as query_string to the search's ``rerank``.
            vector_results: The rows.

        Returns:
            The rows that pass the gate, best first.

        Raises:
            ValueError: If a column is missing, and as in ``Sessions.rerank``.
            SessionEnded: If the session has ended.
        """
        return self._ranked(query, vector_results)

    def rerank_fts(self, query: str, fts_results: pa.Table) -> pa.Table:
        """Rank the rows of a full-text search.

        Args:
            query: The query's text.
            fts_results: The rows.

        Returns:
            The rows that pass the gate, best first.

        Raises:
            ValueError: As in ``rerank_vector``.
            SessionEnded: If the session has ended.
        """
        return self._ranked(query, fts_results)

    def rerank_hybrid(self, query: str, vector_results: pa.Table, fts_results: pa.Table) -> pa.Table:
        """Rank the rows of a hybrid search, each row once.

        Args:
            query: The query's text.
            vector_results: The rows of the vector search.
            fts_results: The rows of the full-text search.

        Returns:
            The rows that pass the gate, best first.

        Raises:
            ValueError: As in ``rerank_vector``.
            SessionEnded: If the session has ended.
        """
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
