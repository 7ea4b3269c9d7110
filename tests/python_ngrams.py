"""Token hashes and n-grams in plain Python: what the C++ core is compared with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from cdr_kernel.spec.reference import tokenize
from cdr_kernel.text._token_hashes import PROJECT_KEY, TOKEN_BYTES, HashKey, TokenHasher

MULTIPLIER = 0x9E3779B97F4A7C15
"""The base of the polynomial of an n-gram's hash."""
_BITS = 2**64 - 1


def sip_hash(data: bytes, key: tuple[int, int] = PROJECT_KEY) -> int:
    """SipHash-1-3 of bytes, 64 bits."""
    return _sip_hash(data, key)


def token_hashes(tokens: Iterable[str], hash_key: HashKey | None = None) -> list[int]:
    """The 56-bit hashes of tokens."""
    key = TokenHasher(hash_key=hash_key)._key
    return [_sip_hash(t.encode("utf-8", "surrogatepass"), key) % 2 ** (8 * TOKEN_BYTES) for t in tokens]


def ngram_hashes(
    text: str, n: int, tokens: Callable[[str], Sequence[str]] | None = None, hash_key: HashKey | None = None
) -> list[int]:
    """The hashes of the n-grams of a text, one at each position."""
    row = token_hashes((tokens or tokenize)(text), hash_key)
    powers = [pow(MULTIPLIER, n - i, 2**64) for i in range(n)]
    return [sum(map(operator.mul, row[i : i + n], powers)) % 2**64 for i in range(len(row) - n + 1)]


@lru_cache
def crafted_text(tokens: int, words: int = 4096) -> str:
    """An output whose n-grams have nearly one home under a public multiplier: each token is the best of a pool."""
    pool = np.array(token_hashes(f"w{i}" for i in range(words)), np.uint64)
    base, leaves = np.uint64(MULTIPLIER), np.uint64(pow(MULTIPLIER, 6, 2**64))
    chosen: list[int] = [0] * 6
    state = np.uint64(int(pool[0]) * sum(pow(MULTIPLIER, i, 2**64) for i in range(1, 7)) % 2**64)
    with np.errstate(over="ignore"):
        for _ in range(tokens):
            states = (state + (pool - pool[chosen[-6]] * leaves)) * base
            chosen.append(int(np.argmin(states * base)))
            state = states[chosen[-1]]
    return " ".join(f"w{i}" for i in chosen)


def _sip_round(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0 = v0 + v1 & _BITS
    v1 = (v1 << 13 & _BITS | v1 >> 51) ^ v0
    v0 = v0 << 32 & _BITS | v0 >> 32
    v2 = v2 + v3 & _BITS
    v3 = (v3 << 16 & _BITS | v3 >> 48) ^ v2
    v0 = v0 + v3 & _BITS
    v3 = (v3 << 21 & _BITS | v3 >> 43) ^ v0
    v2 = v2 + v1 & _BITS
    v1 = (v1 << 17 & _BITS | v1 >> 47) ^ v2
    v2 = v2 << 32 & _BITS | v2 >> 32
    return v0, v1, v2, v3


@lru_cache(maxsize=65536)
def _sip_hash(data: bytes, key: tuple[int, int]) -> int:
    v0, v1 = key[0] ^ 0x736F6D6570736575, key[1] ^ 0x646F72616E646F6D
    v2, v3 = key[0] ^ 0x6C7967656E657261, key[1] ^ 0x7465646279746573
    whole = len(data) // 8 * 8
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, whole, 8)]
    words.append(int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56)
    for word in words:
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3 ^ word)
        v0 ^= word
    v2 ^= 0xFF
    for _ in range(3):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3
