"""Bearer keys and whose they are.

A file of keys is JSON:

    {"keys": [{"tenant": "acme", "sha256": "9f86d081..."}, {"tenant": "zenith", "sha256": "..."}]}

sha256: of the key, in hexadecimal, so that the file gives no key away; `printf %s KEY | sha256sum` makes it. A tenant
may have several keys, which is how they are replaced.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from pathlib import Path

DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Keys:
    """Which tenant a bearer key belongs to.

    entries: (tenant, SHA-256 of the key in hexadecimal). Raises ValueError for a name that is no folder's, a digest
    that is none, and a digest that is there twice.
    """

    def __init__(self, entries: list[tuple[str, str]]) -> None:
        if not entries:
            raise ValueError("keys: expected at least one, got none")
        for tenant, digest in entries:
            if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
                raise ValueError(f"tenant: expected a-z, 0-9, _ and -, 63 at most, got {tenant!r}")
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise ValueError(f"sha256 of a key of {tenant!r}: expected 64 hexadecimal digits")
        if len({digest for _, digest in entries}) < len(entries):
            raise ValueError("keys: expected each key once, got one twice")
        self._entries = [(tenant, bytes.fromhex(digest)) for tenant, digest in entries]
        self.tenants = list(dict.fromkeys(tenant for tenant, _ in entries))

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Those of a file. Raises OSError, or ValueError saying what is wrong with it; never with a key in it."""
        try:
            found = json.loads(path.read_bytes())
            entries = [(item["tenant"], item["sha256"]) for item in found["keys"]]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f'{path}: expected {{"keys": [{{"tenant": ..., "sha256": ...}}, ...]}}') from None
        try:
            return cls(entries)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def tenant(self, key: str) -> str | None:
        """Whose key this is. Takes as long for a wrong key as for any right one."""
        given = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        found = None
        for tenant, digest in self._entries:
            if hmac.compare_digest(given, digest):
                found = tenant
        return found


def same(given: str | None, key: str | None) -> bool:
    """Whether a key was given and is this one, in constant time."""
    if given is None or key is None:
        return False
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), key.encode("utf-8", "surrogatepass"))


def bearer(authorization: str | None) -> str | None:
    """The key of an Authorization header, None where there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    return key if scheme.lower() == "bearer" and key else None
