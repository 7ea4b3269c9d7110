"""The LangChain adapter in LangChain."""

from __future__ import annotations

import asyncio

import pytest

core = pytest.importorskip("langchain_core", reason='needs langchain-core: pip install ".[langchain]"')

import langchain_windows  # noqa: E402  # both need the framework
from demo_data import demo, embed, facts, new_session, query, retriever  # noqa: E402
from langchain_core.documents import Document  # noqa: E402
from langchain_core.runnables import RunnableLambda  # noqa: E402

from cdr_kernel import WindowReport, cdr_rank  # noqa: E402
from cdr_kernel.adapters._session_book import Sessions, text_id  # noqa: E402
from cdr_kernel.adapters.langchain import CDRCompressor, CDRRetriever  # noqa: E402

EMBEDDINGS = langchain_windows.Known()
REPORT = WindowReport(0.3, addressed=(demo.sub_queries[0].id,))
DOCUMENTS = [Document(id=f.id, page_content=f.text, metadata={"page": i}) for i, f in enumerate(facts[::5])]


def test_the_example_runs(capsys):
    langchain_windows.main()
    assert capsys.readouterr().out.count("limit-reached") == 2


def test_the_retriever_ranks_as_cdr_rank_over_windows():
    twin = new_session()
    cdr = CDRRetriever(session=new_session(), retriever=retriever, embeddings=EMBEDDINGS, k=6)
    for _ in range(2):
        expected = cdr_rank(embed(query), retriever, twin, k=6)
        found = cdr.invoke(query)
        assert [d.id for d in found] == expected.ids
        assert [d.metadata["relevance_score"] for d in found] == expected.score.tolist()
        assert [d.metadata["cdr"]["novelty"] for d in found] == expected.novelty.tolist()
        assert [(d.page_content, d.metadata["source"]) for d in found] == [(f.text, f.source) for f in expected.facts]
        twin.update(REPORT, "some words", embedding_model=twin.embedding_model)
        assert not cdr.update("some words", REPORT).stop
    assert expected.coverage_depth == 1


def test_the_retriever_is_a_runnable_with_async_and_sessions():
    sessions = {"a": new_session(), "b": new_session()}
    cdr = CDRRetriever(session=sessions, retriever=retriever, embeddings=EMBEDDINGS, k=4)
    chain = cdr.for_session("a") | RunnableLambda(lambda documents: [d.id for d in documents])
    first = chain.invoke(query)
    assert first == [d.id for d in cdr.invoke(query, session_id="b")]
    assert first == [d.id for d in asyncio.run(cdr.ainvoke(query, session_id="b"))]
    cdr.update("some words", REPORT, session_id="a")
    assert (sessions["a"].window_count, sessions["b"].window_count) == (1, 0)
    assert chain.invoke(query) != first
    assert [d.id for d in cdr.invoke(query, session_id="b")] == first
    with pytest.raises(ValueError, match="name one"):
        cdr.invoke(query)


def test_the_compressor_ranks_the_documents_it_is_given():
    compressor = CDRCompressor(session=new_session(), embeddings=EMBEDDINGS, k=5)
    twin = Sessions(new_session())
    for _ in range(2):
        found = compressor.compress_documents(DOCUMENTS, query)
        ids, texts = [d.id for d in DOCUMENTS], [d.page_content for d in DOCUMENTS]
        places, ranking = twin.rerank(embed(query), ids, texts, [embed(t) for t in texts], k=5)
        assert [d.id for d in found] == [ids[i] for i in places]
        assert [d.metadata["relevance_score"] for d in found] == ranking.score.tolist()
        assert [d.metadata["page"] for d in found] == places
        assert all(d.metadata.keys() == {"page"} for d in DOCUMENTS), "the given documents stay as they were"
        twin.update("some words", REPORT)
        compressor.update("some words", REPORT)
    found = asyncio.run(compressor.acompress_documents(DOCUMENTS, query))
    assert [d.id for d in found] == [
        ids[i] for i in twin.rerank(embed(query), ids, texts, [embed(t) for t in texts], k=5)[0]
    ]


def test_the_compressor_takes_vectors_importance_and_missing_ids_from_documents():
    class Counting(langchain_windows.Known):
        def embed_documents(self, texts):
            asked.extend(texts)
            return super().embed_documents(texts)

    asked = []
    documents = [
        Document(page_content="not in the demo", metadata={"embedding": embed(facts[0].text), "importance": 9.0}),
        Document(page_content=facts[1].text),
    ]
    compressor = CDRCompressor(session=new_session(), embeddings=Counting())
    found = compressor.compress_documents(documents, query)
    assert asked == [facts[1].text]
    assert found[0].page_content == "not in the demo"
    assert found[0].metadata["cdr"]["importance"] == 9.0
    compressor.update("some words", REPORT)
    assert set(compressor.session.packed) == {text_id(d.page_content) for d in documents}
    assert compressor.compress_documents([], query) == []
