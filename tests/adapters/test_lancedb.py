"""The LanceDB adapter in LanceDB."""

from __future__ import annotations

import numpy as np
import pytest

lancedb = pytest.importorskip("lancedb", reason='needs lancedb: pip install ".[lancedb]"')

import lancedb_windows  # noqa: E402  # both need the framework
from demo_data import demo, embed, facts, new_session, query  # noqa: E402
from lancedb.index import FTS  # noqa: E402

from cdr_kernel import WindowReport  # noqa: E402
from cdr_kernel.adapters._session_book import Sessions  # noqa: E402
from cdr_kernel.adapters.lancedb import CDRReranker  # noqa: E402

REPORT = WindowReport(0.3, addressed=(demo.sub_queries[0].id,))
FACTS = facts[::5]
ROWS = [
    {"id": f.id, "text": f.text, "vector": embed(f.text), "weight": 50.0 if i == 7 else 1.0}
    for i, f in enumerate(FACTS)
]
WORDS = "pod network policy service dns node"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    made = lancedb.connect(tmp_path_factory.mktemp("lance")).create_table("facts", ROWS)
    made.create_index("text", config=FTS())
    return made


def known(text):
    return embed(query) if text in (query, WORDS) else embed(text)


def reranker(session=None, **options):
    return CDRReranker(session or new_session(), known, id_column="id", **options)


def test_the_example_runs(capsys):
    lancedb_windows.main()
    assert capsys.readouterr().out.count("limit-reached") == 1


def test_it_ranks_the_rows_of_a_vector_search(table):
    cdr, twin = reranker(k=5), Sessions(new_session())
    for _ in range(2):
        search = table.search(embed(query)).limit(60)
        rows = search.to_list()
        vectors = [np.array(row["vector"], np.float32).astype(float) for row in rows]
        _, ranking = twin.rerank(embed(query), [r["id"] for r in rows], [r["text"] for r in rows], vectors, k=5)
        found = search.rerank(cdr, query_string=query).to_list()
        assert [row["id"] for row in found] == ranking.ids
        assert [row["_relevance_score"] for row in found] == pytest.approx(ranking.score.tolist(), abs=1e-6)
        assert "_distance" not in found[0]
        twin.update("some words", REPORT)
        assert not cdr.update("some words", REPORT).stop
    assert not cdr.exit().stop


def test_full_text_and_hybrid_searches(table):
    found = table.search(WORDS, query_type="fts").limit(30).rerank(reranker(k=4)).to_list()
    assert len(found) == 4
    scores = [row["_relevance_score"] for row in found]
    assert scores == sorted(scores, reverse=True)
    search = table.search(query_type="hybrid").vector(embed(query)).text(WORDS).limit(30)
    found = search.rerank(reranker()).to_list()
    assert len({row["id"] for row in found}) == len(found) > 4
    assert found[0].keys() >= {"id", "text", "_relevance_score"}
    every = search.rerank(reranker(return_score="all")).to_list()
    assert [row["id"] for row in every] == [row["id"] for row in found]
    assert every[0].keys() >= {"_distance", "_score", "_relevance_score"}


def test_nothing_that_passes_is_an_empty_table(table):
    session = new_session()
    gone = table.search((-np.array(embed(query))).tolist()).limit(5)
    strict = CDRReranker(session, lambda text: (-np.array(embed(query))).tolist())
    assert gone.rerank(strict, query_string=query).to_list() == []
    assert strict.exit().reason == "ckf-exhausted"
    assert table.search(embed(query)).where("id = 'none'").rerank(reranker(), query_string=query).to_list() == []


def test_importance_ids_and_sessions(table):
    search = table.search(embed(query)).limit(90)
    heavy = search.rerank(reranker(importance_column="weight", k=1), query_string=query).to_list()
    assert heavy[0]["id"] == FACTS[7].id
    sessions = {"a": new_session(), "b": new_session()}
    cdr = reranker(sessions, k=4)
    a, b = cdr.for_session("a"), cdr.for_session("b")
    first = [r["id"] for r in search.rerank(a, query_string=query).to_list()]
    a.update("some words", REPORT)
    assert set(sessions["a"].packed) == set(first)
    assert [r["id"] for r in search.rerank(b, query_string=query).to_list()] == first
    assert [r["id"] for r in search.rerank(a, query_string=query).to_list()] != first
    with pytest.raises(ValueError, match="name one"):
        search.rerank(cdr, query_string=query).to_list()
    with pytest.raises(ValueError, match="no column 'body'"):
        search.rerank(CDRReranker(new_session(), known, column="body"), query_string=query).to_list()
