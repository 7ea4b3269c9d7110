"""What a server is told: one frozen value, checked when it is made."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cdr_kernel.session._settings import MODES, settings_of
from cdr_kernel.text._ngram_guard import HashKey
from cdr_kernel.validation._scalars import check_bool, check_number

LOOPBACK_NAMES = ("localhost",)
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How to serve a store.

    store: the folder of a store; with keys of several tenants, a folder with one store per tenant, named like it (one
    tenant may have either).
    host, port: where to listen. Another address than loopback needs keys, or open_to_all.
    allowed_hosts: further names that a request may have in its Host header. Without keys a server on loopback is asked
    by its own names alone, so that no page in a browser can reach it under a name of its own (`hosts`).
    keys: file of bearer keys (see `serve._keys.Keys`); None serves everyone as the tenant "default".
    metrics_key: the key that /metrics asks for where there are keys. Without one, /metrics is then closed.
    token_key: signs session tokens, at least 32 bytes; replicas that resume each other's need the same. None makes one
    that lasts as long as the process.
    hash_key: of the stores and the guards of sessions, see `FactStore`.
    embed: a sentence-transformers model for texts that come without a vector: the store's own.
    redis: URL of a Redis for sessions that replicas share.

    max_connections: connections at once; None leaves room for other files in what the process may open (RLIMIT_NOFILE).
    header_timeout_s: seconds for the head of a request. max_head, max_headers: bytes and fields of one. keep_alive_s:
    seconds that a connection stays without a request.
    max_names, max_names_bytes: ids, names and values that one request may list (where, multiplier, packed, ids, report,
    documents), and their bytes. max_facts: facts that one request may add. max_attributes: names of attributes in one
    store.
    max_body: bytes of a request. max_answer: bytes of an answer. request_bytes: bodies of one tenant that are held at
    once; answer_bytes: answers of one tenant that their readers have not taken yet. send_timeout_s: seconds that a
    client has to take 64 KiB of an answer, and the whole with a second more for each 128 KiB.
    max_queue: requests of one tenant that may wait or run at once. max_batch: ranks that go into one `rank_many`, 1 for
    none. rank_threads: batches of one tenant at a time. max_k: facts of one ranking. max_documents: of one rerank.
    device: where rankings look at the rows: None for the scan on the processor, else a torch device such as "cuda",
    which holds them in device_dtype (see `DeviceRows`; None: the store's). The answers are the same.
    deadline_s: seconds a request may take unless its CDR-Deadline-Ms says less.
    session_ttl_s: seconds since a session was last used. max_sessions, session_bytes: what sessions of one tenant may
    take in this process; the least recently used ones go first. redis_sessions, redis_bytes: the same in Redis, of all
    replicas together. row_cache_bytes: what rankings keep between windows, of one tenant. threads: that read, pack and
    encode for one tenant at a time. refresh_s: seconds between looks at durable stores for what other processes have
    changed.
    drain_s: seconds between SIGTERM (not ready) and closing the port. stop_s: seconds that accepted requests then get.
    otel: whether to trace with OpenTelemetry (extra `otel`). access_log: a line of JSON per request.
    new_sessions: settings of `Session`, `guard` (a bool) included, for what a request for a new session leaves out. A
    session of another mode than theirs takes those that both modes have. Empty: `Session`'s own defaults.

    Raises TypeError or ValueError for what is out of range.
    """

    store: Path
    host: str = "127.0.0.1"
    port: int = 8080
    keys: Path | None = None
    open_to_all: bool = False
    allowed_hosts: tuple[str, ...] = ()
    metrics_key: str | None = field(default=None, repr=False)
    token_key: bytes | None = field(default=None, repr=False)
    hash_key: HashKey | None = field(default=None, repr=False)
    embed: str | None = None
    redis: str | None = field(default=None, repr=False)
    max_connections: int | None = None
    header_timeout_s: float = 10.0
    max_head: int = 32_768
    max_headers: int = 100
    keep_alive_s: float = 65.0
    max_names: int = 10_000
    max_names_bytes: int = MIB
    max_facts: int = 10_000
    max_attributes: int = 64
    max_body: int = 16 * MIB
    max_answer: int = 64 * MIB
    request_bytes: int = 256 * MIB
    answer_bytes: int = 256 * MIB
    send_timeout_s: float = 30.0
    max_queue: int = 128
    max_batch: int = 8
    rank_threads: int = 2
    max_k: int = 10_000
    max_documents: int = 1_000
    device: str | None = None
    device_dtype: str | None = None
    deadline_s: float = 30.0
    session_ttl_s: float = 3600.0
    max_sessions: int = 10_000
    session_bytes: int = 512 * MIB
    redis_sessions: int = 100_000
    redis_bytes: int = 2048 * MIB
    row_cache_bytes: int = 256 * MIB
    threads: int = 2
    refresh_s: float = 1.0
    drain_s: float = 1.0
    stop_s: float = 30.0
    otel: bool = False
    access_log: bool = True
    new_sessions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", Path(self.store))
        if self.keys is not None:
            object.__setattr__(self, "keys", Path(self.keys))
        object.__setattr__(self, "allowed_hosts", _host_names(self.allowed_hosts))
        least: dict[str, float] = {"port": 0, "drain_s": 0.0, "stop_s": 0.0, "row_cache_bytes": 0, "max_headers": 8}
        sizes = ("max_body", "max_answer", "request_bytes", "answer_bytes", "max_head", "max_names_bytes")
        least |= dict.fromkeys(sizes, 1024)
        for item in fields(self):
            value: Any = getattr(self, item.name)
            kind = item.type if value is None else str(item.type).removesuffix(" | None")
            if kind not in ("int", "float"):
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole and not (kind == "float" and isinstance(value, float)):
                raise TypeError(f"{item.name}: expected {kind}, got {value!r}")
            low = least.get(item.name, 1 if kind == "int" else 0.001)
            if not low <= value < float("inf"):
                raise ValueError(f"{item.name}: expected a finite number, at least {low:g}, got {value!r}")
        if self.request_bytes < self.max_body:
            raise ValueError(f"request_bytes: expected at least max_body, {self.max_body}, got {self.request_bytes}")
        if self.answer_bytes < self.max_answer:
            raise ValueError(f"answer_bytes: expected at least max_answer, {self.max_answer}, got {self.answer_bytes}")
        if self.port > 65535:
            raise ValueError(f"port: expected at most 65535, got {self.port}")
        if self.device_dtype is not None and self.device is None:
            raise ValueError(f"device_dtype: expected a device too, got {self.device_dtype!r} alone")
        if self.device is not None:
            from cdr_kernel.score._device_rows import check_dtype, torch_device

            torch_device(self.device)
            check_dtype(self.device_dtype)
        object.__setattr__(self, "new_sessions", dict(self.new_sessions))
        check_session_settings(self.new_sessions)
        if self.token_key is not None and len(self.token_key) < 32:
            raise ValueError(f"token_key: expected at least 32 bytes, got {len(self.token_key)}")
        if self.keys is None and not self.open_to_all and not is_loopback(self.host):
            raise ValueError(
                f"host: {self.host} can be reached from elsewhere: expected --keys, or --open-to-all where everyone "
                "who reaches it may read and change everything"
            )

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that a request may have in its Host header, in lower case; None for any."""
        open_on_loopback = self.keys is None and not self.open_to_all
        if not open_on_loopback and not self.allowed_hosts:
            return None
        own = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
        return frozenset((*LOOPBACK_HOSTS, own.lower(), *self.allowed_hosts))


def host_name(header: str) -> str:
    """The name of a Host header, without the port, in lower case."""
    text = header.strip().lower()
    name, bracket, _ = text.partition("]")
    return name + bracket if text.startswith("[") else text.partition(":")[0].removesuffix(".")


def _host_names(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"allowed_hosts: expected several names, got {given!r}")
    for name in given:
        if not name or host_name(name) != name.lower():
            raise ValueError(
                f"allowed_hosts: expected a name without a port, [::1] for an address of IPv6, got {name!r}"
            )
    return tuple(name.lower() for name in given)


_BESIDE = ("mode", "guard", "safety_budget")
"""What a client chooses for a session beside the settings of its mode."""


def check_session_settings(settings: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError for settings that `Session` refuses; guard: a bool."""
    given = dict(settings)
    check_bool(given.pop("guard", False), "guard")
    check_number(given.pop("safety_budget", 1.0), "safety_budget", 0.0, 1.0)
    for name in given:
        if name != "mode" and not any(name in kind.names() for kind in MODES.values()):
            raise ValueError(f"new_sessions: expected settings of Session, got {name!r}")
    settings_of(given.pop("mode", "spec"), **given)


def for_new_session(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a session: its own, and those defaults that its mode has."""
    mode = settings.get("mode", defaults.get("mode", "spec"))
    known = {*_BESIDE, *MODES[mode].names()} if mode in MODES else set(defaults)
    return {**{name: value for name, value in defaults.items() if name in known}, **settings}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches this address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in LOOPBACK_NAMES
