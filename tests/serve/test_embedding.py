"""Embedding for many requests: in batches, by turns, up to the deadline, and only for those who wait."""

from __future__ import annotations

import asyncio
import gc
import threading
from time import monotonic

import numpy as np
import pytest
from commands import invoke
from serving import DIM, MODEL, bearer, created, error_of, make_store, serving, update, write_keys

from cdr_kernel.serve import Settings
from cdr_kernel.serve._embedding import BATCH, Embedding
from cdr_kernel.serve._errors import Refusal
from cdr_kernel.serve._process import threads_run
from cdr_kernel.serve._service import Service


def vector(text):
    """Its own for each text."""
    return np.full(DIM, float(sum(text.encode()) % 97 + 1), np.float32)


class Model:
    """A model that tells what it was given, and is held until `open` is set."""

    def __init__(self):
        self.batches = []
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, texts):
        self.batches.append(texts)
        self.entered.set()
        assert self.open.wait(60)
        return np.stack([vector(text) for text in texts])


@pytest.fixture
def model():
    made = Model()
    yield made
    made.open.set()


@pytest.fixture
def embedding():
    made = Embedding()
    yield made
    assert made.close(soon())


def soon(seconds=60.0):
    return monotonic() + seconds


def test_rows_are_in_order_and_equal_texts_are_embedded_once(embedding, model):
    model.open.set()
    texts = [f"t{i % 40}" * (i % 3 + 1) for i in range(500)]
    rows = asyncio.run(embedding.rows(model, texts, soon()))
    assert rows.tolist() == [vector(text).tolist() for text in texts]
    seen = [text for batch in model.batches for text in batch]
    assert sorted(seen) == sorted(set(texts))
    assert max(map(len, model.batches)) == BATCH
    assert [len(text) for text in seen] == sorted(map(len, seen), reverse=True)


def test_batches_of_requests_take_turns(embedding, model):
    async def run():
        long = asyncio.create_task(embedding.rows(model, [f"long {i}" for i in range(5 * BATCH)], soon()))
        await asyncio.to_thread(model.entered.wait, 60)
        short = asyncio.create_task(embedding.rows(model, ["short"], soon()))
        await asyncio.sleep(0)
        model.open.set()
        await asyncio.gather(long, short)

    asyncio.run(run())
    assert [batch == ["short"] for batch in model.batches] == [False, True, False, False, False, False]


def test_what_nobody_waits_for_is_not_begun_or_gone_on_with(embedding, model):
    async def run():
        long = asyncio.create_task(embedding.rows(model, [f"long {i}" for i in range(5 * BATCH)], soon()))
        await asyncio.to_thread(model.entered.wait, 60)
        late = [embedding.rows(model, ["late"], soon(0.02)), embedding.rows(model, ["never"], soon(-1))]
        for refusal in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(refusal, Refusal)
            assert (refusal.status, refusal.detail.code) == (504, "deadline")
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        after = asyncio.create_task(embedding.rows(model, ["after"], soon()))
        await asyncio.sleep(0)
        model.open.set()
        assert (await after).tolist() == [vector("after").tolist()]

    asyncio.run(run())
    assert len(model.batches) == 2
    assert model.batches[1] == ["after"]


def test_what_a_model_raises_goes_to_the_one_who_asked(embedding, model):
    def failing(texts):
        raise TimeoutError("of the model")

    async def run():
        model.open.set()
        asked = [embedding.rows(failing, ["a"], soon()), embedding.rows(model, ["b"], soon())]
        return await asyncio.gather(*asked, return_exceptions=True)

    failed, fine = asyncio.run(run())
    assert (type(failed), str(failed)) == (TimeoutError, "of the model")
    assert fine.tolist() == [vector("b").tolist()]


def test_closing_does_not_wait_for_a_model_and_takes_no_more(model):
    embedding = Embedding()

    async def run():
        held = asyncio.create_task(embedding.rows(model, ["held"], soon(0.5)))
        waits = asyncio.create_task(embedding.rows(model, ["waits"], soon(0.5)))
        await asyncio.to_thread(model.entered.wait, 60)
        assert not embedding.close(soon(0.01))
        assert threads_run()
        (running,) = embedding.running()
        assert (running["tenant"], running["job"]) == ("default", "embed")
        assert any("__call__" in frame for frame in running["where"])  # of the model, which waits
        with pytest.raises(Refusal) as caught:
            await embedding.rows(model, ["more"], soon())
        assert caught.value.status == 503
        await asyncio.gather(held, waits, return_exceptions=True)

    asyncio.run(run())
    model.open.set()
    assert embedding.close(soon())
    assert embedding.running() == []
    assert model.batches == [["held"]]


def test_a_request_that_embeds_for_too_long_is_504_and_changes_nothing(tmp_path, model):
    make_store().save(tmp_path / "s")
    late = {"CDR-Deadline-Ms": "200"}
    with serving(tmp_path / "s") as client:
        service = client.app.state.service
        service._embedder = model
        object.__setattr__(service.settings, "embed", MODEL)
        sid = created(client)
        before = client.get(f"/v1/sessions/{sid}").json(), client.get("/v1/stats").json()
        output = " ".join(f"Sentence {i} of many." for i in range(3000))
        change = {name: part for name, part in update(output=output).items() if name != "report"}
        for method, path, body in (
            ("POST", f"/v1/sessions/{sid}/update", change),
            ("POST", f"/v1/sessions/{sid}/assess", {"output": output}),
            ("POST", f"/v1/sessions/{sid}/rank", {"embedding_model": MODEL, "text": "what", "k": 5}),
            ("PUT", "/v1/facts", {"embedding_model": MODEL, "facts": [{"id": "n", "text": "t"}]}),
            ("POST", "/v1/rerank", {"model": MODEL, "query": "what", "documents": ["a"]}),
        ):
            answer = client.request(method, path, json=body, headers=late)
            assert answer.status_code == 504, answer.text
            assert error_of(answer)["code"] == "deadline"
        assert (client.get(f"/v1/sessions/{sid}").json(), client.get("/v1/stats").json()) == before
        model.open.set()
        text = {"embedding_model": MODEL, "text": "what", "k": 5}
        assert client.post(f"/v1/sessions/{sid}/rank", json=text).status_code == 200
        assert len(model.batches) == 2  # the one that had begun, and this


def test_a_model_that_no_store_has_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("cdr_kernel.files._embedders.load_embedder", lambda model: None)
    make_store().save(tmp_path / "a")
    make_store(model="m2").save(tmp_path / "b")
    keys = write_keys(tmp_path / "keys.json", a="key-a", b="key-b")
    for settings, models in (
        (Settings(store=tmp_path / "a", embed="other"), "'m1'"),
        (Settings(store=tmp_path, keys=keys, embed="other"), "'m1' or 'm2'"),
    ):
        service = Service(settings)
        with pytest.raises(ValueError, match=rf"^embed: expected {models}, .*, got 'other'$"):
            service.load()
        service.close()


def test_a_text_for_a_model_that_the_server_has_not_says_both(tmp_path, monkeypatch):
    monkeypatch.setattr("cdr_kernel.files._embedders.load_embedder", lambda model: None)
    make_store().save(tmp_path / "a")
    make_store(model="m2").save(tmp_path / "b")
    keys = write_keys(tmp_path / "keys.json", a="key-a", b="key-b")
    facts = [{"id": "n", "text": "t"}]
    with serving(tmp_path, keys=keys, embed="m2") as client:
        answer = client.put("/v1/facts", json={"embedding_model": MODEL, "facts": facts}, headers=bearer("key-a"))
    assert answer.status_code == 422
    told = error_of(answer)
    assert (told["code"], told["field"]) == ("no_embedder", "facts[0].embedding")
    assert told["expected"] == "a vector of 'm1', the store's model (this server embeds texts with 'm2')"


def test_the_command_ends_without_a_look_at_what_the_model_has_made(tmp_path, monkeypatch):
    monkeypatch.setattr("cdr_kernel.serve.serve", lambda settings: 0)
    before = gc.get_freeze_count()
    try:
        invoke("serve", tmp_path)
        assert gc.get_freeze_count() == before
        invoke("serve", tmp_path, "--embed", MODEL)
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
