"""Sessions that replicas share, in Redis: whoever changes one first is first, and the other starts again from that.

A session is a hash: v, its version; data, everything of it; window, its last ranking. Scripts compare the version and
write in one step, so no change is lost. Every replica keeps what it read, and asks only for the version while it is the
same. The keys begin with the tenant's name.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec

from cdr_kernel.ngram import HashKey
from cdr_kernel.serve.errors import Refusal, not_found, unavailable
from cdr_kernel.serve.idempotency import Answers, Done
from cdr_kernel.serve.kept_window import KeptWindow
from cdr_kernel.serve.sessions import Entry, LocalSessions, Version
from cdr_kernel.serve.settings import Settings
from cdr_kernel.session import Session

T = TypeVar("T")

NEEDS = 'shared sessions need the redis extra: pip install ".[redis]" in a checkout'
TIMEOUT_S = 2.0
_ID = re.compile(r"[0-9a-f]{32}")

_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'v', ARGV[1], 'data', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
_COMMIT = """
if redis.call('HGET', KEYS[1], 'v') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'v', ARGV[2], 'data', ARGV[3])
redis.call('HDEL', KEYS[1], 'window')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
"""
_WINDOW = """
if redis.call('HGET', KEYS[1], 'v') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'window', ARGV[2])
return 1
"""


class Stored(msgspec.Struct, frozen=True):
    """A session as it lies in Redis. session: `Session.to_json`."""

    session: str
    answers: dict[str, Done]


class Redis:
    """The connection of one application. url: as redis-py takes it, redis:// or rediss://."""

    def __init__(self, url: str) -> None:
        try:
            from redis.asyncio import Redis as Client
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
        except ImportError as error:
            raise ImportError(f"{NEEDS} ({error})") from error
        self._errors = (RedisError, OSError)
        # No retries: a script whose answer was lost may have run.
        self._client: Any = Client.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )

    def sessions(self, tenant: str, local: LocalSessions, settings: Settings) -> RedisSessions:
        """The sessions of one tenant."""
        return RedisSessions(self, tenant, local, ttl_s=settings.session_ttl_s, hash_key=settings.hash_key)

    async def ask(self, command: Awaitable[T]) -> T:
        """The answer to a command; `Refusal` 503 where there is none."""
        try:
            return await command
        except self._errors:
            message = "the store of sessions cannot be reached; whether a change was made is not known"
            raise unavailable("sessions_unavailable", message) from None

    async def script(self, script: str, key: str, *arguments: bytes | int) -> bool:
        """Whether a script did something."""
        return bool(await self.ask(self._client.eval(script, 1, key, *arguments)))

    @property
    def client(self) -> Any:
        """redis-py's own."""
        return self._client

    async def alive(self) -> bool:
        """Whether it answers."""
        try:
            return bool(await self.ask(self._client.ping()))
        except Refusal:
            return False

    async def close(self) -> None:
        """End the connections."""
        await self._client.aclose()


class RedisAnswers(Answers):
    """Kept answers that belong to no session."""

    def __init__(self, redis: Redis, tenant: str, ttl_s: float) -> None:
        super().__init__(ttl_s)
        self._redis = redis
        self._tenant = tenant
        self._ttl_ms = max(1, round(ttl_s * 1e3))

    def _key(self, key: str) -> str:
        return f"cdr:{self._tenant}:answer:{hashlib.sha256(key.encode()).hexdigest()}"

    async def get(self, key: str) -> Done | None:
        """See `Answers`."""
        raw = await self._redis.ask(self._redis.client.get(self._key(key)))
        return None if raw is None else msgspec.msgpack.decode(raw, type=Done)

    async def put(self, key: str, done: Done) -> None:
        """See `Answers`."""
        raw = msgspec.msgpack.encode(done)
        await self._redis.ask(self._redis.client.set(self._key(key), raw, px=self._ttl_ms))


class RedisSessions:
    """See `sessions.Sessions`. local: what this replica has read, as far as there is room."""

    def __init__(
        self, redis: Redis, tenant: str, local: LocalSessions, *, ttl_s: float, hash_key: HashKey | None
    ) -> None:
        self.answers: Answers = RedisAnswers(redis, tenant, ttl_s)
        self._redis = redis
        self._tenant = tenant
        self._local = local
        self._ttl_ms = max(1, round(ttl_s * 1e3))
        self._hash_key = hash_key

    def _key(self, id: str) -> str:
        if not _ID.fullmatch(id):
            raise not_found("session")
        return f"cdr:{self._tenant}:session:{id}"

    async def get(self, id: str) -> Entry:
        """See `Sessions`."""
        key, client = self._key(id), self._redis.client
        async with client.pipeline(transaction=False) as asked:
            asked.hget(key, "v")
            asked.pexpire(key, self._ttl_ms)
            number = (await self._redis.ask(asked.execute()))[0]
        entry = self._local.peek(id)
        if number is not None and entry is not None and entry.now.number == int(number):
            return entry
        number, data = await self._redis.ask(client.hmget(key, "v", "data"))
        if number is None or data is None:
            self._local.drop(id)
            raise not_found("session")
        version = await asyncio.to_thread(self._read, int(number), data)
        entry = self._local.peek(id)  # others may have read it meanwhile
        if entry is None:
            entry = Entry(id, version)
            self._local.put(entry)
        elif entry.now.number != version.number:
            self._local.replace(entry, version)
        return entry

    def _read(self, number: int, data: bytes) -> Version:
        stored = msgspec.msgpack.decode(data, type=Stored)
        return Version(Session.from_json(stored.session, hash_key=self._hash_key), number, stored.answers)

    def _written(self, session: Session, answers: dict[str, Done]) -> bytes:
        return msgspec.msgpack.encode(Stored(session.to_json(), answers))

    async def create(self, session: Session, *, id: str | None = None, answers: dict[str, Done] | None = None) -> Entry:
        """See `Sessions`."""
        version = Version(session, _number(), answers or {})
        entry = Entry(id or session.id, version)
        data = await asyncio.to_thread(self._written, session, version.answers)
        if not await self._redis.script(_CREATE, self._key(entry.id), version.number, data, self._ttl_ms):
            raise KeyError(entry.id)
        self._local.put(entry)
        return entry

    async def commit(self, entry: Entry, before: Version, session: Session, answers: dict[str, Done]) -> bool:
        """See `Sessions`."""
        version = Version(session, _number(), answers)
        data = await asyncio.to_thread(self._written, session, answers)
        key = self._key(entry.id)
        if not await self._redis.script(_COMMIT, key, before.number, version.number, data, self._ttl_ms):
            return False
        if entry.now is before:  # else it was read again meanwhile
            self._local.replace(entry, version)
        return True

    async def keep_window(self, entry: Entry, window: KeptWindow) -> None:
        """See `Sessions`."""
        await self._redis.script(_WINDOW, self._key(entry.id), window.version, msgspec.msgpack.encode(window))

    async def window_of(self, entry: Entry) -> KeptWindow | None:
        """See `Sessions`."""
        raw = await self._redis.ask(self._redis.client.hget(self._key(entry.id), "window"))
        return None if raw is None else msgspec.msgpack.decode(raw, type=KeptWindow)

    async def delete(self, id: str) -> bool:
        """See `Sessions`."""
        gone = await self._redis.ask(self._redis.client.delete(self._key(id)))
        self._local.drop(id)
        return bool(gone)


def _number() -> int:
    """A version number that no other version has, not even of a session that was deleted and resumed."""
    return secrets.randbits(63)
