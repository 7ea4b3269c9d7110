"""Sessions that replicas share, in Redis: whoever changes one first is first, and the other starts again from that.

A session is a hash: v, its version; data, everything of it; window, its last ranking. Scripts compare the version and
write in one step, so no change is lost. Every replica keeps what it read, and asks only for the version while it is the
same. The keys begin with the tenant's name.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from cdr_kernel.serve._errors import Refusal, not_found, unavailable
from cdr_kernel.serve._idempotency import MOST_ANSWERS, MOST_BYTES, Answers, Done
from cdr_kernel.serve._sessions import Entry, LocalSessions, Version
from cdr_kernel.serve._settings import Settings
from cdr_kernel.serve._turns import Turns
from cdr_kernel.serve._window_memory import KeptWindow
from cdr_kernel.session import Session
from cdr_kernel.text._ngram_guard import HashKey

T = TypeVar("T")

NEEDS = 'shared sessions need the redis extra: pip install ".[redis]" in a checkout'
TIMEOUT_S = 2.0
_ID = re.compile(r"[0-9a-f]{32}")

_TENANT = """
local entry, index, sizes = KEYS[1], KEYS[2], KEYS[3]
local prefix, id = ARGV[1], ARGV[2]
local ttl, most, max_bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function resize(each, size)
  local before = tonumber(redis.call('HGET', sizes, each) or 0)
  if size == 0 then redis.call('HDEL', sizes, each) else redis.call('HSET', sizes, each, size) end
  redis.call('HINCRBY', sizes, '', size - before)
end

local function forget(each)
  redis.call('DEL', prefix .. each)
  redis.call('ZREM', index, each)
  resize(each, 0)
end

local function use()
  redis.call('PEXPIRE', entry, ttl)
  redis.call('PEXPIRE', index, ttl)
  redis.call('PEXPIRE', sizes, ttl)
  redis.call('ZADD', index, string.format('%.0f', now), id)
end

local function hold(size)
  use()
  resize(id, size)
  local last = string.format('%.0f', now - ttl)
  for _, each in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', last, 'LIMIT', 0, 100)) do forget(each) end
  while redis.call('ZCARD', index) > 1 and (
    redis.call('ZCARD', index) > most or tonumber(redis.call('HGET', sizes, '')) > max_bytes
  ) do
    local oldest = redis.call('ZRANGE', index, 0, 1)
    forget(oldest[1] == id and oldest[2] or oldest[1])
  end
end
"""
"""What scripts share. The entries of a tenant have an index by their last use and a table of their sizes, whose field
"" is the sum. `use` notes a use. `hold` counts an entry, and forgets the least recently used ones where there are too
many."""
_CREATE = """
if redis.call('EXISTS', entry) == 1 then return 0 end
redis.call('HSET', entry, 'v', ARGV[6], 'data', ARGV[7])
hold(#ARGV[7])
return 1
"""
_COMMIT = """
if redis.call('HGET', entry, 'v') ~= ARGV[6] then return 0 end
redis.call('HSET', entry, 'v', ARGV[7], 'data', ARGV[8])
redis.call('HDEL', entry, 'window')
hold(#ARGV[8])
return 1
"""
_WINDOW = """
if redis.call('HGET', entry, 'v') ~= ARGV[6] then return 0 end
redis.call('HSET', entry, 'window', ARGV[7])
hold(redis.call('HSTRLEN', entry, 'data') + #ARGV[7])
return 1
"""
_USE = """
local version = redis.call('HGET', entry, 'v')
if version then use() end
return version
"""
_DELETE = """
local there = redis.call('EXISTS', entry)
forget(id)
return there
"""
_ANSWER = """
redis.call('SET', entry, ARGV[6])
hold(#ARGV[6])
return 1
"""


class Stored(msgspec.Struct, frozen=True):
    """A session as it lies in Redis. session: `Session.to_json`."""

    session: str
    answers: dict[str, Done]


@dataclass(frozen=True)
class Entries:
    """Where entries of a tenant lie, and how many there may be: `most`, of `max_bytes` together, for `ttl_ms` since
    their last use."""

    prefix: str
    ttl_ms: int
    most: int
    max_bytes: int

    @property
    def tables(self) -> tuple[str, str]:
        """The keys of the index and of the sizes."""
        return f"{self.prefix}:index", f"{self.prefix}:sizes"

    def key(self, id: str) -> str:
        """The key of an entry."""
        return self.prefix + id


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

    def sessions(self, tenant: str, local: LocalSessions, settings: Settings, pool: Turns) -> RedisSessions:
        """The sessions of one tenant. pool: reads and writes them."""
        return RedisSessions(
            self,
            tenant,
            local,
            pool,
            ttl_s=settings.session_ttl_s,
            most=settings.redis_sessions,
            max_bytes=settings.redis_bytes,
            hash_key=settings.hash_key,
        )

    async def ask(self, command: Awaitable[T]) -> T:
        """The answer to a command; `Refusal` 503 where there is none."""
        try:
            return await command
        except self._errors:
            message = "the store of sessions cannot be reached; whether a change was made is not known"
            raise unavailable("sessions_unavailable", message) from None

    async def script(self, script: str, entries: Entries, id: str, *arguments: bytes | int) -> Any:
        """What a script answers about an entry of a tenant: 0 or None where it did nothing."""
        keys = (entries.key(id), *entries.tables)
        limits = (entries.prefix, id, entries.ttl_ms, entries.most, entries.max_bytes)
        return await self.ask(self._client.eval(_TENANT + script, len(keys), *keys, *limits, *arguments))

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
        self._entries = Entries(f"cdr:{tenant}:answer:", _ms(ttl_s), MOST_ANSWERS, MOST_BYTES)

    async def get(self, key: str) -> Done | None:
        """See `Answers`."""
        raw = await self._redis.ask(self._redis.client.get(self._entries.key(_digest(key))))
        return None if raw is None else msgspec.msgpack.decode(raw, type=Done)

    async def put(self, key: str, done: Done) -> None:
        """See `Answers`; the oldest ones go where there are too many bytes."""
        await self._redis.script(_ANSWER, self._entries, _digest(key), msgspec.msgpack.encode(done))


class RedisSessions:
    """See `_sessions.Sessions`. local: what this replica has read, as far as there is room. pool: reads and writes
    them. most, max_bytes: what the sessions of the tenant may take in Redis, those of all replicas together."""

    def __init__(
        self,
        redis: Redis,
        tenant: str,
        local: LocalSessions,
        pool: Turns,
        *,
        ttl_s: float,
        most: int,
        max_bytes: int,
        hash_key: HashKey | None,
    ) -> None:
        self.answers: Answers = RedisAnswers(redis, tenant, ttl_s)
        self._redis = redis
        self._tenant = tenant
        self._local = local
        self._pool = pool
        self._entries = Entries(f"cdr:{tenant}:session:", _ms(ttl_s), most, max_bytes)
        self._hash_key = hash_key

    def _key(self, id: str) -> str:
        if not _ID.fullmatch(id):
            raise not_found("session")
        return self._entries.key(id)

    async def get(self, id: str) -> Entry:
        """See `Sessions`."""
        key, client = self._key(id), self._redis.client
        number = await self._redis.script(_USE, self._entries, id)
        entry = self._local.peek(id)
        if number is not None and entry is not None and entry.now.number == int(number):
            return entry
        number, data = await self._redis.ask(client.hmget(key, "v", "data"))
        if number is None or data is None:
            self._local.drop(id)
            raise not_found("session")
        version = await self._pool.run(self._tenant, "read a session", lambda: self._read(int(number), data))
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
        data = await self._pool.run(self._tenant, "write a session", lambda: self._written(session, version.answers))
        if not await self._redis.script(_CREATE, self._entries, entry.id, version.number, data):
            raise KeyError(entry.id)
        self._local.put(entry)
        return entry

    async def commit(
        self, entry: Entry, before: Version, session: Session, answers: dict[str, Done], *, nbytes: int = 0
    ) -> bool:
        """See `Sessions`."""
        version = Version(session, _number(), answers, nbytes)
        data = await self._pool.run(self._tenant, "write a session", lambda: self._written(session, answers))
        if not await self._redis.script(_COMMIT, self._entries, entry.id, before.number, version.number, data):
            return False
        if entry.now is before:  # else it was read again meanwhile
            self._local.replace(entry, version)
        return True

    async def keep_window(self, entry: Entry, window: KeptWindow) -> None:
        """See `Sessions`."""
        await self._redis.script(_WINDOW, self._entries, entry.id, window.version, msgspec.msgpack.encode(window))

    async def window_of(self, entry: Entry) -> KeptWindow | None:
        """See `Sessions`."""
        raw = await self._redis.ask(self._redis.client.hget(self._key(entry.id), "window"))
        return None if raw is None else msgspec.msgpack.decode(raw, type=KeptWindow)

    async def delete(self, id: str) -> bool:
        """See `Sessions`."""
        self._key(id)
        gone = await self._redis.script(_DELETE, self._entries, id)
        self._local.drop(id)
        return bool(gone)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1e3))


def _digest(key: str) -> str:
    """Of an Idempotency-Key."""
    return hashlib.sha256(key.encode()).hexdigest()


def _number() -> int:
    """A version number that no other version has, not even of a session that was deleted and resumed."""
    return secrets.randbits(63)
