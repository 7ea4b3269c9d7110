"""Answers that are kept, so that a request which is repeated with the same Idempotency-Key is applied once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from time import monotonic

import msgspec

from cdr_kernel.serve.errors import invalid

HEADER = "Idempotency-Key"
LONGEST_KEY = 255


class Done(msgspec.Struct, frozen=True):
    """The answer to a request that was applied. digest: of the request; body: msgpack."""

    digest: str
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        return len(self.body) + 400


def check_key(key: str | None) -> str | None:
    """The key of a request. Raises `Refusal` for an empty or long one and for other characters than ASCII's."""
    if key is not None and not (0 < len(key) <= LONGEST_KEY and key.isascii() and key.isprintable()):
        raise invalid(HEADER, f"1 to {LONGEST_KEY} printable ASCII characters")
    return key


def digest_of(method: str, path: str, body: bytes) -> str:
    """What tells one request from another."""
    return hashlib.sha256(b"\0".join([method.encode(), path.encode("utf-8", "surrogatepass"), body])).hexdigest()


def replayed(done: Done | None, digest: str) -> Done | None:
    """The kept answer, if there is one. Raises `Refusal` where the key came with another request."""
    if done is not None and done.digest != digest:
        raise invalid(HEADER, "a new key for another request", code="idempotency_key_reused")
    return done


class Answers:
    """Kept answers of one tenant by key, in this process: the last `most` of them, for `ttl_s` seconds."""

    def __init__(self, ttl_s: float, most: int = 1024) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._kept: OrderedDict[str, tuple[float, Done]] = OrderedDict()

    async def get(self, key: str) -> Done | None:
        """The answer kept for this key."""
        since, done = self._kept.get(key, (0.0, None))
        return done if done is not None and monotonic() - since < self._ttl_s else None

    async def put(self, key: str, done: Done) -> None:
        """Keep an answer."""
        self._kept[key] = (monotonic(), done)
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
