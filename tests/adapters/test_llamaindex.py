"""The LlamaIndex adapter in LlamaIndex."""

from __future__ import annotations

import asyncio

import pytest

core = pytest.importorskip("llama_index.core", reason='needs llama-index-core: pip install ".[llama-index]"')

import llamaindex_windows  # noqa: E402  # both need the framework
from demo_data import demo, embed, facts, new_session, query, retriever  # noqa: E402
from llama_index.core import VectorStoreIndex, get_response_synthesizer  # noqa: E402
from llama_index.core.llms import MockLLM  # noqa: E402
from llama_index.core.query_engine import RetrieverQueryEngine  # noqa: E402
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode  # noqa: E402

from cdr_kernel import WindowReport, cdr_rank  # noqa: E402
from cdr_kernel.adapters._session_book import Sessions  # noqa: E402
from cdr_kernel.adapters.llamaindex import CDRPostprocessor, CDRRetriever  # noqa: E402

MODEL = llamaindex_windows.Known()
REPORT = WindowReport(0.3, addressed=(demo.sub_queries[0].id,))
NODES = [
    NodeWithScore(node=TextNode(id_=f.id, text=f.text, metadata={"page": i}), score=0.5)
    for i, f in enumerate(facts[::5])
]
for each in NODES:
    each.node.excluded_embed_metadata_keys = ["page"]


def test_the_example_runs(capsys):
    llamaindex_windows.main()
    assert capsys.readouterr().out.count("limit-reached") == 2


def test_the_retriever_ranks_as_cdr_rank_over_windows():
    twin = new_session()
    cdr = CDRRetriever(new_session(), retriever, MODEL, k=6)
    for _ in range(2):
        expected = cdr_rank(embed(query), retriever, twin, k=6)
        found = cdr.retrieve(query)
        assert [n.node_id for n in found] == expected.ids
        assert [n.score for n in found] == pytest.approx(expected.score.tolist(), abs=1e-9)
        assert [(n.text, n.metadata) for n in found] == [(f.text, {"source": f.source}) for f in expected.facts]
        assert [n.node_id for n in asyncio.run(cdr.aretrieve(query))] == expected.ids
        twin.update(REPORT, "some words", embedding_model=twin.embedding_model)
        assert not cdr.update("some words", REPORT).stop
    assert expected.coverage_depth == 1


def test_many_sessions():
    sessions = {"a": new_session(), "b": new_session()}
    cdr = CDRRetriever(sessions, retriever, MODEL, k=4)
    a, b = cdr.for_session("a"), cdr.for_session("b")
    first = [n.node_id for n in a.retrieve(query)]
    assert first == [n.node_id for n in b.retrieve(QueryBundle(query, embedding=embed(query)))]
    a.update("some words", REPORT)
    assert [n.node_id for n in a.retrieve(query)] != first
    assert [n.node_id for n in b.retrieve(query)] == first
    with pytest.raises(ValueError, match="name one"):
        cdr.retrieve(query)
    postprocessor = CDRPostprocessor(session=sessions, embed_model=MODEL, k=3)
    b, a = (postprocessor.for_session(name).postprocess_nodes(NODES, query_str=query) for name in ("b", "a"))
    assert [n.node_id for n in a] != [n.node_id for n in b]


def test_the_postprocessor_ranks_the_nodes_it_is_given():
    postprocessor = CDRPostprocessor(session=new_session(), embed_model=MODEL, k=5)
    twin = Sessions(new_session())
    ids, texts = [n.node_id for n in NODES], [n.text for n in NODES]
    for _ in range(2):
        places, ranking = twin.rerank(embed(query), ids, texts, [embed(t) for t in texts], k=5)
        for found in (
            postprocessor.postprocess_nodes(NODES, query_str=query),
            asyncio.run(postprocessor.apostprocess_nodes(NODES, query_str=query)),
        ):
            assert [n.node_id for n in found] == [ids[i] for i in places]
            assert [n.score for n in found] == pytest.approx(ranking.score.tolist(), abs=1e-9)
        assert all(n.score == 0.5 for n in NODES), "the given nodes stay as they were"
        twin.update("some words", REPORT)
        postprocessor.update("some words", REPORT)
    assert not postprocessor.exit().stop
    with pytest.raises(ValueError, match="query"):
        postprocessor.postprocess_nodes(NODES)
    assert postprocessor.postprocess_nodes([], query_str=query) == []


def test_nodes_may_bring_vectors_and_importance():
    nodes = [
        NodeWithScore(
            node=TextNode(text="not in the demo", embedding=embed(facts[0].text), metadata={"importance": 9.0})
        ),
        NodeWithScore(node=TextNode(text=facts[1].text)),
    ]
    found = CDRPostprocessor(session=new_session(), embed_model=MODEL).postprocess_nodes(nodes, query_str=query)
    assert [n.text for n in found] == ["not in the demo", facts[1].text]


def test_in_a_query_engine():
    index = VectorStoreIndex([n.node for n in NODES], embed_model=MODEL)
    postprocessor = CDRPostprocessor(session=new_session(), embed_model=MODEL, k=3)
    engine = RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=50), get_response_synthesizer(llm=MockLLM()), [postprocessor]
    )
    answer = engine.query(query)
    assert len(answer.source_nodes) == 3
    postprocessor.update(str(answer))
    assert postprocessor.session.window_count == 1
    assert set(postprocessor.session.packed) == {n.node_id for n in answer.source_nodes}
