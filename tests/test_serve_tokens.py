"""Signed sessions: any byte that differs is refused, and so are another tenant's and those whose time is over."""

from __future__ import annotations

import base64
import time

import pytest
from serving import MODEL, created, error_of, make_store, new_session, rank, serving, update

from cdr_kernel.serve.errors import Refusal
from cdr_kernel.serve.idempotency import Done
from cdr_kernel.serve.tokens import Payload, Signer

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
