"""The Haystack adapter in Haystack."""

from __future__ import annotations

import asyncio

import pytest

core = pytest.importorskip("haystack", reason='needs haystack-ai: pip install ".[haystack]"')

import haystack_windows  # noqa: E402  # both need the framework
from demo_data import demo, embed, facts, new_session, query  # noqa: E402
from haystack import Document, Pipeline  # noqa: E402

from cdr_kernel import WindowReport  # noqa: E402
from cdr_kernel.adapters._session_book import Sessions  # noqa: E402
from cdr_kernel.adapters.haystack import CDRRanker  # noqa: E402

REPORT = WindowReport(0.3, addressed=(demo.sub_queries[0].id,))
DOCUMENTS = [
    Document(id=f.id, content=f.text, embedding=embed(f.text), meta={"page": i}) for i, f in enumerate(facts[::5])
]
QUERY = embed(query)
TRUSTED = ["cdr_kernel.adapters.haystack"]


def ids(found):
    return [document.id for document in found["documents"]]


def test_the_example_runs(capsys):
    haystack_windows.main()
    assert capsys.readouterr().out.count("limit-reached") == 1


def test_it_ranks_the_documents_it_is_given():
    ranker, twin = CDRRanker(new_session(), top_k=5), Sessions(new_session())
    texts = [d.content for d in DOCUMENTS]
    for _ in range(2):
        places, ranking = twin.rerank(QUERY, [d.id for d in DOCUMENTS], texts, [d.embedding for d in DOCUMENTS], k=5)
        found = ranker.run(QUERY, DOCUMENTS)
        assert ids(found) == ranking.ids
        assert [d.score for d in found["documents"]] == ranking.score.tolist()
        assert [d.meta["cdr"]["novelty"] for d in found["documents"]] == ranking.novelty.tolist()
        assert [d.meta["page"] for d in found["documents"]] == places
        assert all(d.score is None and d.meta.keys() == {"page"} for d in DOCUMENTS), "the given ones stay as they were"
        assert ids(ranker.run(QUERY, DOCUMENTS, top_k=2)) == ranking.ids[:2]
        assert not ranker.exit().stop
        twin.update("some words", REPORT)
        ranker.update("some words", REPORT)
    assert ids(ranker.run(QUERY, [])) == []


def test_documents_need_vectors():
    with pytest.raises(ValueError, match="'a' and 1 more have no embedding"):
        CDRRanker(new_session()).run(QUERY, [Document(id="a", content="t"), Document(id="b", content="t")])


def test_importance_counts():
    documents = [
        *DOCUMENTS,
        Document(id="heavy", content="t", embedding=DOCUMENTS[0].embedding, meta={"importance": 50.0}),
    ]
    assert ids(CDRRanker(new_session(), top_k=1).run(QUERY, documents)) == ["heavy"]


def pipeline_of(session, **options):
    pipeline = Pipeline()
    pipeline.add_component("ranker", CDRRanker(session, **options))
    return pipeline


def test_a_pipeline_is_written_and_read_with_the_sessions_state():
    pipeline = pipeline_of(new_session(), top_k=4)
    inputs = {"ranker": {"query_embedding": QUERY, "documents": DOCUMENTS}}
    first = ids(pipeline.run(inputs)["ranker"])
    pipeline.get_component("ranker").update("some words", REPORT)
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=TRUSTED)
    second = ids(pipeline.run(inputs)["ranker"])
    assert second != first
    assert ids(again.run(inputs)["ranker"]) == second
    sessions = [p.get_component("ranker").sessions.get() for p in (pipeline, again)]
    assert sessions[0].to_json() == sessions[1].to_json()
    assert again.dumps() == pipeline.dumps()


def test_many_sessions_are_written_too_and_a_function_is_not():
    sessions = {"a": new_session(), "b": new_session()}
    pipeline = pipeline_of(sessions, session_id="a")
    ranker = pipeline.get_component("ranker")
    ranker.update("some words", REPORT)
    other = WindowReport(0.3, addressed=(demo.sub_queries[5].id,))
    ranker.update("some words", other, session_id="b")
    ranker.update("some words", other, session_id="b")
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=TRUSTED).get_component("ranker")
    assert [again.sessions.get(name).window_count for name in ("a", "b")] == [1, 2]
    assert again.session_id == "a"
    inputs = {"query_embedding": QUERY, "documents": DOCUMENTS}
    assert ids(again.run(**inputs)) == ids(ranker.run(**inputs)) == ids(again.run(**inputs, session_id="a"))
    assert ids(again.run(**inputs, session_id="b")) != ids(again.run(**inputs))
    with pytest.raises(ValueError, match="function"):
        CDRRanker(lambda name: sessions[name]).to_dict()


def test_in_a_pipeline_run_async():
    pipeline = Pipeline()
    pipeline.add_component("ranker", CDRRanker(new_session(), top_k=3))
    found = asyncio.run(pipeline.run_async({"ranker": {"query_embedding": QUERY, "documents": DOCUMENTS}}))
    assert len(found["ranker"]["documents"]) == 3
