"""The model classes of examples/ for NVIDIA Triton and BentoML, against STAND-INS for what the servers bring.

No server runs here: the stand-ins have the few names the examples use, with the meaning the servers' manuals give them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from demo_data import demo, embed, new_session, query, retriever

from cdr_kernel import Session, SessionEnded, SubQuery, WindowReport, cdr_rank

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.stand_in


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "store"
    demo.store.save(folder)
    return str(folder)


def load(path, monkeypatch, **stand_ins):
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("served", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def started():
    """A session after one window."""
    session = new_session()
    report = WindowReport(0.3, addressed=(demo.sub_queries[0].id,))
    session.update(report, "some words", embedding_model=session.embedding_model)
    return session


def ended():
    """A session whose task is complete."""
    session = new_session()
    ids = tuple(item.id for item in demo.sub_queries)
    session.update(WindowReport(1.0, addressed=ids), "some words", embedding_model=session.embedding_model)
    return session


class Tensor:
    def __init__(self, name, array):
        self.name, self.array = name, array

    def as_numpy(self):
        return self.array


def backend_utils():
    """Stand-in for triton_python_backend_utils."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor = Tensor
    module.TritonError = lambda message: message
    module.InferenceResponse = lambda output_tensors=(), error=None: SimpleNamespace(
        tensors={t.name: t.as_numpy() for t in output_tensors}, error=error
    )
    module.get_input_tensor_by_name = lambda request, name: next((t for t in request if t.name == name), None)
    return module


def request(vector, session, k=None):
    tensors = [Tensor("QUERY", np.array(vector, np.float32)), Tensor("SESSION", np.array([session.encode()], object))]
    return tensors if k is None else [*tensors, Tensor("K", np.array([k], np.int32))]


@pytest.fixture
def model(store, monkeypatch):
    folder = EXAMPLES / "triton_server" / "cdr_rank"
    module = load(folder / "1" / "model.py", monkeypatch, triton_python_backend_utils=backend_utils())
    made = module.TritonPythonModel()
    made.initialize({"model_config": json.dumps({"parameters": {"store": {"string_value": store}}})})
    return made


def test_triton_ranks_requests_together_as_cdr_rank_does_each(model):
    sessions, ks = [new_session(), started(), started()], [5, None, 3]
    vector = np.array(embed(query), np.float32)
    responses = model.execute([request(vector, s.to_json(), k) for s, k in zip(sessions, ks, strict=True)])
    for session, k, response in zip(sessions, ks, responses, strict=True):
        expected = cdr_rank(vector, retriever, session, k=10 if k is None else k)
        assert response.error is None
        assert [i.decode() for i in response.tensors["IDS"]] == expected.ids
        assert [t.decode() for t in response.tensors["TEXTS"]] == [fact.text for fact in expected.facts]
        assert response.tensors["SCORE"].tobytes() == expected.score.tobytes()
        assert response.tensors["NOVELTY"].tobytes() == expected.novelty.tobytes()
    assert model.execute([]) == []


def test_triton_answers_fewer_facts_than_k(model):
    session = Session(demo.sub_queries, embedding_model=demo.store.embedding_model, min_relevance=0.75)
    first, second = model.execute(
        [request(embed(query), session.to_json(), 400), request(embed(query), started().to_json(), 400)]
    )
    assert 0 < len(first.tensors["IDS"]) < 10 < len(second.tensors["IDS"])


def test_triton_says_what_is_wrong_with_one_request_and_answers_the_others(model):
    other = Session([SubQuery("a", "a", "a", [1.0] * 384)], embedding_model="other").to_json()
    good = started().to_json()
    bad = [request([1.0, 0.0], good), request(embed(query), "{}"), request(embed(query), other),
           request(embed(query), good, -1), request(embed(query), good)[:1],
           request(embed(query), ended().to_json())]  # fmt: skip
    responses = model.execute([request(embed(query), good, 4), *bad])
    assert len(responses[0].tensors["IDS"]) == 4
    assert all(response.error for response in responses[1:])
    assert "EmbeddingModelMismatch" in responses[3].error
    assert "at least 0" in responses[4].error
    assert "has ended: task-complete" in responses[6].error


def test_tritons_config_names_what_the_model_reads_and_writes():
    folder = EXAMPLES / "triton_server" / "cdr_rank"
    config, code = (folder / "config.pbtxt").read_text(), (folder / "1" / "model.py").read_text()
    named = re.findall(r'name: "([A-Z]+)"', config)
    assert named == ["QUERY", "SESSION", "K", "IDS", "TEXTS", "SCORE", "NOVELTY"]
    assert all(f'"{name}"' in code for name in named)
    assert f'name: "{folder.name}"' in config


OWN = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""BentoML's imports warn of what BentoML itself uses."""


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=OWN)], ids=["stand-in", "bentoml"])
def test_bentoml_ranks_as_cdr_rank(store, monkeypatch, real):
    monkeypatch.setenv("CDR_STORE", store)
    if real:
        pytest.importorskip("bentoml", reason="needs bentoml")
        service = load(EXAMPLES / "bentoml_service.py", monkeypatch).CDRRank.inner()
    else:
        bentoml = ModuleType("bentoml")  # decorators that leave what they decorate as it is
        bentoml.service = lambda **options: lambda cls: cls
        bentoml.api = lambda method: method
        service = load(EXAMPLES / "bentoml_service.py", monkeypatch, bentoml=bentoml).CDRRank()
    for session in (new_session(), started()):
        expected = cdr_rank(embed(query), retriever, session, k=6)
        found = json.loads(json.dumps(service.rank(embed(query), session.to_json(), k=6)))
        assert [row["id"] for row in found] == expected.ids
        assert [row["score"] for row in found] == expected.score.tolist()
        assert [row["novelty"] for row in found] == expected.novelty.tolist()
    with pytest.raises(SessionEnded, match="task-complete"):
        service.rank(embed(query), ended().to_json())
    with pytest.raises(ValueError, match="dimension"):
        service.rank([1.0], new_session().to_json())
