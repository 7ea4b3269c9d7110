"""Signed sessions: any byte that differs is refused, and so are another tenant's and those whose time is over."""

from __future__ import annotations

import base64
import time

import pytest
from serving import MODEL, b64, created, error_of, make_store, new_session, query, rank, serving, update

from cdr_kernel import FactStore
from cdr_kernel.serve._errors import Refusal
from cdr_kernel.serve._idempotency import Done
from cdr_kernel.serve._signed_tokens import Payload, Signer, carried

KEY = bytes(range(32))


def payload(expires=None, **changes):
    made = {
        "id": "s",
        "session": b'{"v":1}',
        "blacklist": None,
        "answers": {"k": Done("d", 200, {}, b"x")},
        "expires": int(time.time() + 60) if expires is None else expires,
    }
    return Payload(**{**made, **changes})


def test_what_was_signed_is_read():
    signer = Signer(KEY, "acme")
    assert signer.read(signer.sign(payload(expires=2**40))) == payload(expires=2**40)


def test_a_token_carries_the_last_answers_that_leave_it_small():
    small, large = (Done("d", 200, {}, bytes(n)) for n in (30_000, 500_000))
    answers = {str(i): small for i in range(6)}
    assert list(carried(answers)) == ["2", "3", "4", "5"]
    assert list(carried({**answers, "text": large})) == ["3", "4", "5"]
    token = Signer(KEY, "acme").sign(payload(answers=carried({"text": large, **answers})))
    assert len(token) < 262_144


def test_every_byte_counts():
    """Any byte replaced by any of its neighbours in the alphabet, dropped, doubled or swapped with the next."""
    signer = Signer(KEY, "acme")
    token = signer.sign(payload())
    changed = set()
    for i, char in enumerate(token):
        others = {chr(ord(char) ^ 1), chr(ord(char) ^ 2), chr(ord(char) ^ 32), "A", ".", "=", " ", "\n", "é"} - {char}
        changed |= {token[:i] + other + token[i + 1 :] for other in others}
        changed |= {token[:i] + token[i + 1 :], token[:i] + char + token[i:], token[:i]}
        changed.add(token[:i] + token[i + 1 : i + 2] + char + token[i + 2 :])
    changed.discard(token)
    assert len(changed) > 8 * len(token)
    for other in changed | {"", ".", "..", token + "\n", " " + token, token + ".", token + "A", token + "="}:
        with pytest.raises(Refusal) as caught:
            signer.read(other)
        assert caught.value.detail.code == "invalid_token"


def test_bits_that_base64_does_not_need_are_signed_too():
    """The last character of unpadded base64 has spare bits, which decoding drops; here they count."""
    signer = Signer(KEY, "acme")
    for length in range(4):
        token = signer.sign(payload(session=b"x" * length))
        text, _, mac = token.partition(".")
        for part in (text, mac):
            spare = [c for c in map(chr, range(33, 127)) if c != part[-1] and _same_bytes(part, part[:-1] + c)]
            for char in spare:
                changed = part[:-1] + char
                with pytest.raises(Refusal):
                    signer.read(f"{changed}.{mac}" if part is text else f"{text}.{changed}")


def _same_bytes(a, b):
    try:
        return base64.urlsafe_b64decode(a + "=" * (-len(a) % 4)) == base64.urlsafe_b64decode(b + "=" * (-len(b) % 4))
    except ValueError:
        return False


def test_other_tenants_other_keys_and_old_tokens_are_refused():
    token = Signer(KEY, "acme").sign(payload())
    for signer in (Signer(KEY, "zenith"), Signer(bytes(32), "acme")):
        with pytest.raises(Refusal):
            signer.read(token)
    old = Signer(KEY, "acme").sign(payload(expires=int(time.time()) - 1))
    with pytest.raises(Refusal):
        Signer(KEY, "acme").read(old)


def test_a_replica_with_the_same_key_goes_on_and_one_without_refuses(tmp_path):
    make_store().save(tmp_path / "s")
    with (
        serving(tmp_path / "s", token_key=KEY) as one,
        serving(tmp_path / "s", token_key=KEY) as two,
        serving(tmp_path / "s") as stranger,
    ):
        sid = created(one, exclude_packed=True)
        one.post(f"/v1/sessions/{sid}/rank", json=rank())
        first = one.post(f"/v1/sessions/{sid}/update", json=update(), headers={"Idempotency-Key": "u1"})
        told = one.post(f"/v1/sessions/{sid}/token").json()
        body = {
            "embedding_model": MODEL,
            "token": told["token"],
            "blacklist": told["blacklist"],
            "sub_queries": new_session()["sub_queries"],
        }
        assert stranger.post("/v1/sessions/resume", json=body).status_code == 422
        resumed = two.post("/v1/sessions/resume", json=body)
        assert resumed.status_code == 200, resumed.text
        assert resumed.json() == one.get(f"/v1/sessions/{sid}").json()
        again = two.post(f"/v1/sessions/{sid}/update", json=update(), headers={"Idempotency-Key": "u1"})
        assert again.headers["idempotency-replayed"] == "true"
        assert again.json() == first.json()
        ranks = [client.post(f"/v1/sessions/{sid}/rank", json=rank()).json() for client in (one, two)]
        assert ranks[0] == ranks[1]

        fresh = {**body, "blacklist": None}
        two.delete(f"/v1/sessions/{sid}")
        assert two.post("/v1/sessions/resume", json=fresh).json()["ngrams"] == 0
        two.delete(f"/v1/sessions/{sid}")
        other = {**body, "sub_queries": list(reversed(body["sub_queries"]))}
        assert two.post("/v1/sessions/resume", json=other).status_code == 422
        assert two.get(f"/v1/sessions/{sid}").status_code == 404


def test_a_changed_token_over_http_is_refused_and_nothing_is_there(tmp_path):
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s", token_key=KEY) as client:
        sid = created(client)
        token = client.post(f"/v1/sessions/{sid}/token").json()["token"]
        client.delete(f"/v1/sessions/{sid}")
        body = {"embedding_model": MODEL, "sub_queries": new_session()["sub_queries"]}
        for i in range(0, len(token), max(1, len(token) // 40)):
            changed = token[:i] + ("A" if token[i] != "A" else "B") + token[i + 1 :]
            answer = client.post("/v1/sessions/resume", json={**body, "token": changed})
            assert answer.status_code == 422
            assert error_of(answer)["code"] == "invalid_token"
        assert client.get(f"/v1/sessions/{sid}").status_code == 404
        assert client.get("/v1/stats").json()["sessions"] == 0


def exported(client, sid):
    """What a client keeps of a session, as the body of a resume."""
    told = client.post(f"/v1/sessions/{sid}/token").json()
    return {
        "embedding_model": MODEL,
        "token": told["token"],
        "blacklist": told["blacklist"],
        "blob": told["blob"],
        "sub_queries": new_session()["sub_queries"],
    }


@pytest.mark.parametrize("settings", [{"exclude_packed": True}, {"mode": "calibrated", "min_relevance": None}])
def test_a_packed_fact_does_not_return_after_it_was_upserted(tmp_path, settings):
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s", token_key=KEY) as client:
        sid = created(client, **settings)
        packed = [fact["id"] for fact in client.post(f"/v1/sessions/{sid}/rank", json=rank()).json()["facts"]]
        client.post(f"/v1/sessions/{sid}/update", json=update(packed=packed))
        body = exported(client, sid)
        assert body["blob"] is None
        before = client.delete(f"/v1/sessions/{sid}").json()
        new = {"id": packed[0], "text": "another text", "embedding": b64(query())}
        assert client.put("/v1/facts", json={"embedding_model": MODEL, "facts": [new]}).status_code == 200
        assert client.post("/v1/sessions/resume", json=body).json() == before
        again = client.post(f"/v1/sessions/{sid}/rank", json=rank(k=60)).json()["facts"]
        assert again
        assert not {fact["id"] for fact in again} & set(packed)


def test_what_exceeds_a_token_travels_as_a_blob(tmp_path):
    """Facts of other origin have no number, and 100 of their ids do not fit into 4,096 bytes."""
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s", token_key=KEY) as client:
        bodies = []
        for part in ("one", "two"):
            sid = created(client, exclude_packed=True)
            packed = [f"{part}: {i:060}" for i in range(100)]
            client.post(f"/v1/sessions/{sid}/update", json=update(packed=packed))
            bodies.append(exported(client, sid))
            before = client.delete(f"/v1/sessions/{sid}").json()
            assert before["packed"] == 100
        body, swapped = bodies[1], bodies[0]["blob"]
        raw = base64.b64decode(body["blob"])
        cut, flipped = raw[:-1], raw[:-1] + bytes([raw[-1] ^ 1])
        for other in (None, swapped, *(base64.b64encode(each).decode() for each in (cut, flipped, b""))):
            refused = client.post("/v1/sessions/resume", json={**body, "blob": other})
            assert refused.status_code == 422
            told = error_of(refused)
            assert (told["field"], told["expected"]) == ("blob", "the one that was exported with the token")
        assert client.post("/v1/sessions/resume", json=body).json() == before
        client.delete(f"/v1/sessions/{sid}")
        small = exported(client, created(client))
        assert error_of(client.post("/v1/sessions/resume", json={**small, "blob": body["blob"]}))["field"] == "blob"


def test_a_replica_that_lags_behind_reads_the_store_first(tmp_path):
    pytest.importorskip("lance", reason="needs the store extra")
    from cdr_kernel.durable import DurableStore

    DurableStore.from_facts(make_store(), tmp_path / "d").close()
    settings = {"token_key": KEY, "refresh_s": 3600.0}
    with serving(tmp_path / "d", **settings) as one, serving(tmp_path / "d", **settings) as two:
        new = {"id": "new", "text": "another text", "embedding": b64(query())}
        assert one.post("/v1/facts", json={"embedding_model": MODEL, "facts": [new]}).status_code == 200
        sid = created(one, exclude_packed=True)
        one.post(f"/v1/sessions/{sid}/update", json=update(packed=["f1", "new"]))
        assert two.get("/v1/facts/new").status_code == 404
        assert two.post("/v1/sessions/resume", json=exported(one, sid)).json()["packed"] == 2
        assert two.get("/v1/facts/new").status_code == 200


def test_numbers_of_another_replicas_own_facts_are_refused(tmp_path):
    """What is added to a folder that is read is known to that process alone: its number is none of another's."""
    make_store().save(tmp_path / "s")
    with serving(tmp_path / "s", token_key=KEY) as one, serving(tmp_path / "s", token_key=KEY) as two:
        for client, id in ((one, "x"), (two, "y")):
            fact = {"id": id, "text": "another text", "embedding": b64(query())}
            assert client.post("/v1/facts", json={"embedding_model": MODEL, "facts": [fact]}).status_code == 200
        sid = created(one, exclude_packed=True)
        one.post(f"/v1/sessions/{sid}/update", json=update(packed=["f1"]))
        assert two.post("/v1/sessions/resume", json=exported(one, sid)).json()["packed"] == 1
        two.delete(f"/v1/sessions/{sid}")
        one.post(f"/v1/sessions/{sid}/update", json=update(packed=["x"]))
        refused = two.post("/v1/sessions/resume", json=exported(one, sid))
        assert refused.status_code == 422
        assert "numbers of the store" in error_of(refused)["message"]


def test_a_server_with_a_hash_key_resumes_without_the_blacklist(tmp_path):
    source = make_store()
    store = FactStore(source.dim, embedding_model=MODEL, hash_key=b"secret")
    view = source.view()
    store.add(view.ids, view.texts(range(view.rows)), view.embeddings)
    store.save(tmp_path / "s")
    with serving(tmp_path / "s", token_key=KEY, hash_key=b"secret") as client:
        sid = created(client)
        client.post(f"/v1/sessions/{sid}/update", json=update())
        body = exported(client, sid)
        client.delete(f"/v1/sessions/{sid}")
        assert client.post("/v1/sessions/resume", json={**body, "blacklist": None}).json()["ngrams"] == 0
        assert client.post(f"/v1/sessions/{sid}/rank", json=rank()).status_code == 200
