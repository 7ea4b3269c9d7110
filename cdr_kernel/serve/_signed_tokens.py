"""Signed sessions: what a client carries from one replica to another, and cannot change.

    BASE64URL(payload) "." BASE64URL(HMAC-SHA-256 of the text before the dot)

Each tenant signs with a key of its own, made from the server's, so that another tenant's token is no token. The text is
signed, not what it decodes to: no byte of it can differ.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time

import msgspec

from cdr_kernel.serve._errors import Refusal
from cdr_kernel.serve._idempotency import Done

_PURPOSE = b"cdr-kernel session token 1\0"
CARRIED_ANSWERS = 4
"""Answers of updates that a token carries, the last ones."""
CARRIED_BYTES = 128 << 10
"""What these may take together, so that the token is one that `resume` takes: one with a whole text is left out."""


class Payload(msgspec.Struct, frozen=True):
    """id: of the session at the server. session: the token of `Session.token_and_blob`, which has the SHA-256 of its
    blob. blacklist: SHA-256 of the guard's hashes, None where there are none. answers: of the last updates. expires:
    Unix seconds."""

    id: str
    session: bytes
    blacklist: str | None
    answers: dict[str, Done]
    expires: int


def carried(answers: dict[str, Done]) -> dict[str, Done]:
    """The last answers, as many as a token carries."""
    left, found = CARRIED_BYTES, {}
    for key, done in reversed(list(answers.items())[-CARRIED_ANSWERS:]):
        if done.nbytes <= left:
            left -= done.nbytes
            found[key] = done
    return dict(reversed(found.items()))


class Signer:
    """Signs and reads the tokens of one tenant. key: the server's, at least 32 bytes."""

    def __init__(self, key: bytes, tenant: str) -> None:
        self._key = hmac.new(key, _PURPOSE + tenant.encode(), hashlib.sha256).digest()

    def sign(self, payload: Payload) -> str:
        """The token."""
        text = _text(msgspec.msgpack.encode(payload))
        return f"{text}.{self._mac(text)}"

    def read(self, token: str) -> Payload:
        """What was signed. Raises `Refusal` for any other text, and for a token whose time is over."""
        text, _, mac = token.partition(".")
        if not token.isascii() or not hmac.compare_digest(mac, self._mac(text)):
            raise _refused()
        try:
            payload: Payload = msgspec.msgpack.decode(
                base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=Payload
            )
        except (ValueError, msgspec.DecodeError):  # signed by another version of this
            raise _refused() from None
        if payload.expires < time.time():
            raise _refused()
        return payload

    def _mac(self, text: str) -> str:
        return _text(hmac.new(self._key, text.encode(), hashlib.sha256).digest())


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _refused() -> Refusal:
    expected = "a token of this tenant, unchanged and in time"
    return Refusal(422, "invalid_token", f"token: expected {expected}", field="token", expected=expected)
