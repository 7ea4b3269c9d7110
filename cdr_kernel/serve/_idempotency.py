"""Answers that are kept, so that a request which is repeated with the same Idempotency-Key is applied once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from time import monotonic

import msgspec

from cdr_kernel.serve._errors import Refusal, invalid

HEADER = "Idempotency-Key"
LONGEST_KEY = 255
LARGEST_BODY = 1 << 18
"""Bytes of the largest answer that is kept; of a larger one it is kept that the request was done."""
MOST_ANSWERS = 1024
MOST_BYTES = 1 << 24
"""Kept answers of one tenant that belong to no session, and their bytes; beyond these the oldest become notes that say
"done"."""


class Done(msgspec.Struct, frozen=True):
    """The answer to a request that was applied.

    digest: of the request. body: msgpack, empty where it is not kept. size: the bytes of a body that is not kept, 0
    for one that is. session: of a body that is not kept, the session that it was about.
    """

    digest: str
    status: int
    headers: dict[str, str]
    body: bytes
    size: int = 0
    session: str | None = None

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        return len(self.body) + sum(len(name) + len(value) + 120 for name, value in self.headers.items()) + 400

    def without_body(self) -> Done:
        """A note that the request was done, in place of its answer."""
        return self if self.size else Done(self.digest, self.status, {}, b"", len(self.body), self.session)


def check_key(key: str | None) -> str | None:
    """The key of a request. Raises `Refusal` for an empty or long one and for other characters than ASCII's."""
    if key is not None and not (0 < len(key) <= LONGEST_KEY and key.isascii() and key.isprintable()):
        raise invalid(HEADER, f"1 to {LONGEST_KEY} printable ASCII characters")
    return key


def digest_of(method: str, path: str, body: bytes) -> str:
    """What tells one request from another."""
    return hashlib.sha256(b"\0".join([method.encode(), path.encode("utf-8", "surrogatepass"), body])).hexdigest()


def replayed(done: Done | None, digest: str) -> Done | None:
    """The kept answer, if there is one. Raises `Refusal` where the key came with another request, and where the request
    was done but its answer is not kept."""
    if done is not None and done.digest != digest:
        raise invalid(HEADER, "a new key for another request", code="idempotency_key_reused")
    if done is not None and done.size:
        see = "" if done.session is None else f"; GET /v1/sessions/{done.session} shows the session"
        raise Refusal(
            409,
            "answer_not_kept",
            f"the request was done before and is not done again, but its answer of {done.size} bytes is not kept{see}",
            field=HEADER,
            headers={"Idempotency-Replayed": "true"},
        )
    return done


class Answers:
    """Kept answers of one tenant by key, in this process: the last `most` of them, for `ttl_s` seconds. Where their
    bodies take more than `max_bytes`, the oldest ones are no longer kept, and what stays is that they were done."""

    def __init__(self, ttl_s: float, most: int = MOST_ANSWERS, max_bytes: int = MOST_BYTES) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[float, Done]] = OrderedDict()  # the oldest first
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: str) -> Done | None:
        """The answer kept for this key."""
        self._sweep()
        return self._kept.get(key, (0.0, None))[1]

    async def put(self, key: str, done: Done) -> None:
        """Keep an answer."""
        self._sweep()
        self._drop(key)
        self._kept[key] = (monotonic(), done)
        self.nbytes += done.nbytes
        while len(self._kept) > self._most:
            self._drop(next(iter(self._kept)))
        for each, (since, old) in self._kept.items():
            if self.nbytes <= self._max_bytes:
                break
            note = old.without_body()
            self.nbytes += note.nbytes - old.nbytes
            self._kept[each] = (since, note)

    def _drop(self, key: str) -> None:
        _, done = self._kept.pop(key, (0.0, None))
        self.nbytes -= 0 if done is None else done.nbytes

    def _sweep(self) -> None:
        """Forget what is past its time."""
        before = monotonic() - self._ttl_s
        while self._kept and next(iter(self._kept.values()))[0] <= before:
            self._drop(next(iter(self._kept)))
