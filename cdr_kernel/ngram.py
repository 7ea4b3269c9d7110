"""The n-gram guard of §5: tokens (R23), their hashes, and how many n-grams of a text were already written.

A text is tokenised once in its life and each token hashed with SipHash-1-3 to 56 bits, 7 bytes a token: these
`TokenRows` are what a store keeps. An n-gram's hash is a 64-bit polynomial over its tokens' hashes, rolled over the
row for any n when it is counted. The hashes depend on the tokens and the key alone, so they can be kept with a
store and shared between processes. Two 6-grams in a session that differ share a hash with a chance below 1e-7 per
window at a million facts; `exact=True` compares the tokens themselves.

`impl="cpp"` is the compiled matcher, `impl="python"` its twin: equal hashes, equal counts.
"""

from __future__ import annotations

import hashlib
import operator
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, reduce
from itertools import accumulate
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .constants import NGRAM_SIZE

try:
    from . import _C
except ImportError:  # the Python twin works without it
    _C = None  # type: ignore[assignment]  # a module has no optional type


class Tokenizer(Protocol):
    """What cuts a text into tokens: any callable that takes a str and returns a sequence of str.

    It must have a name, its attribute `name` or else its `__qualname__`, which is kept wherever its tokens are:
    give another name to whatever can give other tokens (other settings, other versions). Equal texts must give
    equal tokens. Tokens may hold any characters.
    """

    def __call__(self, text: str, /) -> Sequence[str]: ...


HashKey: TypeAlias = "bytes | int"
TokenBlock: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.uint8]]"
NGram: TypeAlias = tuple[str, ...]

DEFAULT_TOKENIZER: Final = "nfkc-casefold-1"
"""Name of `tokenize`; it changes when the tokens of any text do."""

PROJECT_KEY: Final = (0x6364722D6B65726E, 0x6E67656C2D6E6772)
"""The one key of all token hashes unless `hash_key` gives another, so that stores, sessions and replicas agree."""

MAX_N: Final = 32

TOKEN_BYTES: Final = 7
"""Bytes of one token's hash, little-endian: with the offsets a token takes less than 8."""

_MAX_LAYERS: Final = 64
_LONG_RUN: Final = 256
_PROBE: Final = 32
_TEXTS_AT_ONCE: Final = 4096
_hash_bits = 8 * TOKEN_BYTES  # lower in tests, to make collisions

_SPACELESS: Final = (
    (0x0E00, 0x0E7F),  # Thai
    (0x0E80, 0x0EFF),  # Lao
    (0x0F00, 0x0FFF),  # Tibetan
    (0x1000, 0x109F), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F), (0x116D0, 0x116FF),  # Myanmar
    (0x1780, 0x17FF), (0x19E0, 0x19FF),  # Khmer
    (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3021, 0x3029), (0x3038, 0x303C), (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x16FE2, 0x16FE3), (0x16FF0, 0x16FF6), (0x20000, 0x3FFFD),
    (0x3031, 0x3035), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F), (0x1AFF0, 0x1B16F),  # kana
)  # fmt: skip

_ascii_tokens = re.compile("[0-9a-z]+").findall
_beyond_bmp = re.compile("[\U00010000-\U0010ffff]").search


def _unicode_tokens(text: str) -> list[str]:
    return _token_patterns()[_beyond_bmp(text) is not None](text)


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", _tamed(text))


def _tamed(text: str) -> str:
    """The text with long runs of marks in canonical order: NFKC gives the same, but Python sorts such a run by
    insertion, in time quadratic in its length."""
    if len(text) < _LONG_RUN:
        return text
    probe, sort = _mark_runs()
    return sort(_sorted_marks, text) if probe(text[::_PROBE]) else text  # a long run is one in the sample too


def _sorted_marks(run: re.Match[str]) -> str:
    """The run decomposed and in canonical order, which is what NFKC makes of it first."""
    marks = "".join(unicodedata.normalize("NFKD", c) for c in run.group())
    return "".join(sorted(marks, key=unicodedata.combining))


@cache
def _mark_runs() -> tuple[Callable[[str], object], Callable[[Callable[[re.Match[str]], str], str], str]]:
    codes = (*range(0x300, 0x20000), *range(0xE0000, 0xE1000))
    marks = [c for c in codes if all(map(unicodedata.combining, unicodedata.normalize("NFKD", chr(c))))]
    mark = _character_class(marks)
    return re.compile(f"{mark}{{{_LONG_RUN // _PROBE}}}").search, re.compile(f"{mark}{{{_LONG_RUN},}}+").sub


@cache
def _token_patterns() -> tuple[Callable[[str], list[str]], Callable[[str], list[str]]]:
    # Two patterns, one for texts without characters beyond the BMP: there `re` looks a class up in a bitmap,
    # beyond it walks hundreds of ranges, which the lookahead keeps to the characters that need it. Made at
    # the first text that is not ASCII, since visiting every code point takes some 100 ms. The planes between
    # the ideographic ones and that of the variation selectors are empty.
    low = _character_classes(range(0x10000))
    high = _character_classes((*range(0x10000, 0x40000), *range(0xE0000, 0xE1000)))
    spaceless, mark, word = (f"(?:{a}|(?=[\U00010000-\U0010ffff]){b})" for a, b in zip(low, high, strict=True))
    return (
        re.compile(f"{low[2]}++|{low[0]}{low[1]}*+").findall,
        re.compile(f"{word}++|{spaceless}{mark}*+").findall,
    )


def _character_classes(codes: Iterable[int]) -> tuple[str, str, str]:
    """Patterns of a letter or number of the spaceless scripts, a mark, another character of L, N, M."""
    without_spaces = {code for low, high in _SPACELESS for code in range(low, high + 1)}
    spaceless: list[int] = []
    mark: list[int] = []
    word: list[int] = []
    for code in codes:
        category = unicodedata.category(chr(code))[0]
        if category == "M":
            mark.append(code)
            word.append(code)
        elif category in "LN":
            (spaceless if code in without_spaces else word).append(code)
    return _character_class(spaceless), _character_class(mark), _character_class(word)


def _character_class(codes: list[int]) -> str:
    runs: list[list[int]] = []
    for code in codes:
        if runs and code == runs[-1][1] + 1:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in runs) + "]"


def tokenize(text: str) -> list[str]:
    """The tokens of a text (§5.1, R23), `tokenizer_name` "nfkc-casefold-1".

    NFKC, then casefold; then runs of letters, numbers and marks (Unicode categories L, N, M) are tokens, and
    everything else parts them. In Han, Hiragana, Katakana, Thai, Lao, Khmer, Myanmar and Tibetan each letter
    or number with the marks that follow it is a token of its own. Characters are those that this Python's
    `unicodedata` knows. Any str is accepted, lone surrogates (which part tokens) included.

    Raises TypeError if text is not a str.

        >>> tokenize("Kube-proxy routes Ｃａｆé 東京")
        ['kube', 'proxy', 'routes', 'café', '東', '京']
    """
    if not isinstance(text, str):
        raise TypeError(f"text: expected str, got {type(text).__name__}")
    plain = _ascii(text)
    return _ascii_tokens(plain.lower()) if plain.isascii() else _unicode_tokens(_nfkc(text).casefold())


def _ascii(text: str) -> str:
    """The text, where possible as ASCII text of the same tokens: most others hold but dashes and curly quotes."""
    if text.isascii():
        return text
    plain = _parting()(" ", text)
    return plain if plain.isascii() else text


@cache
def _parting() -> Callable[[str, str], str]:
    """Puts a string in place of every character beyond ASCII that parts tokens and leaves none itself."""
    folded = ((code, unicodedata.normalize("NFKC", chr(code)).casefold()) for code in range(0x80, 0x10000))
    parting = [code for code, text in folded if not any(unicodedata.category(c)[0] in "LNM" for c in text)]
    return re.compile(_character_class(parting)).sub


def _tokenizer_name(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None or tokenizer is tokenize:
        return DEFAULT_TOKENIZER
    if not callable(tokenizer):
        raise TypeError(f"tokenizer: expected a callable str -> list[str], got {type(tokenizer).__name__}")
    name = getattr(tokenizer, "name", None) or getattr(tokenizer, "__qualname__", None)
    if not isinstance(name, str) or "<lambda>" in name:
        raise ValueError(
            "tokenizer: expected one with a name, which is kept beside its n-grams; "
            f"got {tokenizer!r}: use a def, or a callable object with an attribute `name`"
        )
    if name == DEFAULT_TOKENIZER:
        raise ValueError(f"tokenizer: the name {name!r} belongs to cdr_kernel.ngram.tokenize")
    return name


def _checked_tokens(tokens: Any) -> Sequence[str]:
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise TypeError(f"tokenizer: expected it to return a list of str, got {type(tokens).__name__}")
    for position, token in enumerate(tokens):
        if not isinstance(token, str):
            raise TypeError(f"tokenizer: expected a list of str, got {type(token).__name__} at position {position}")
    checked: Sequence[str] = tokens
    return checked


def _checked_texts(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise TypeError(f"texts: expected a sequence of str, got {type(texts).__name__}")
    checked = list(texts)
    for position, text in enumerate(checked):
        if not isinstance(text, str):
            raise TypeError(f"texts[{position}]: expected str, got {type(text).__name__}")
    return checked


def _checked_hashes(hashes: Any) -> NDArray[np.uint64]:
    if not isinstance(hashes, np.ndarray):
        try:
            return np.array([operator.index(h) for h in hashes], dtype=np.uint64)
        except OverflowError:
            raise ValueError("hashes: expected integers in [0, 2**64)") from None
        except TypeError:
            raise TypeError("hashes: expected a uint64 array or a sequence of int") from None
    if hashes.dtype.kind != "u" or hashes.dtype.itemsize != 8:
        raise TypeError(f"hashes: expected dtype uint64, got {hashes.dtype}")
    if hashes.ndim != 1:
        raise ValueError(f"hashes: expected shape [H], got {list(hashes.shape)}")
    return np.ascontiguousarray(hashes, dtype=np.uint64)


def _checked_n(n: int) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"n: expected int, got {type(n).__name__}")
    if not 1 <= n <= MAX_N:
        raise ValueError(f"n: expected 1 to {MAX_N}, got {n}")
    return operator.index(n)


def _checked_impl(impl: str | None) -> str:
    if impl not in (None, "cpp", "python"):
        raise ValueError(f'impl: expected "cpp" or "python", got {impl!r}')
    if impl == "cpp" and _C is None:
        raise ImportError('impl="cpp" needs the extension cdr_kernel._C: pip install cdr-kernel')
    return impl or ("python" if _C is None else "cpp")


def _offsets(lengths: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(accumulate(lengths, initial=0), dtype=np.int64)


_BITS: Final = 2**64 - 1
_BASE: Final = 0x9E3779B97F4A7C15


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
    """SipHash-1-3."""
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


def _hash_tokens_python(tokens: Iterable[str], key: tuple[int, int], bits: int) -> NDArray[np.uint8]:
    kept = (1 << bits) - 1
    hashes = (_sip_hash(token.encode("utf-8", "surrogatepass"), key) & kept for token in tokens)
    return np.frombuffer(b"".join(h.to_bytes(TOKEN_BYTES, "little") for h in hashes), np.uint8)


def _token_values(tokens: NDArray[np.uint8]) -> list[int]:
    wide = np.zeros((len(tokens) // TOKEN_BYTES, 8), np.uint8)
    wide[:, :TOKEN_BYTES] = tokens.reshape(-1, TOKEN_BYTES)
    values: list[int] = wide.view("<u8").reshape(-1).tolist()
    return values


def _token_rows_python(blocks: Sequence[TokenBlock], index: NDArray[np.int64] | None) -> Iterator[list[int]]:
    ends = list(accumulate(len(offsets) - 1 for offsets, _ in blocks))
    for row in range(ends[-1]) if index is None else index.tolist():
        if not 0 <= row < ends[-1]:
            raise IndexError(f"index: row {row} of {ends[-1]}")
        block = next(b for b, end in enumerate(ends) if row < end)
        offsets, tokens = blocks[block]
        local = row - (ends[block - 1] if block else 0)
        start, end = int(offsets[local]), int(offsets[local + 1])
        if not 0 <= start <= end <= len(tokens) // TOKEN_BYTES:
            raise ValueError(f"tokens: row {row} is damaged, it spans {start} to {end}")
        yield _token_values(tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])


def _ngram_rows_python(blocks: Sequence[TokenBlock], index: NDArray[np.int64] | None, n: int) -> Iterator[list[int]]:
    powers = [pow(_BASE, n - i, 2**64) for i in range(n)]
    for row in _token_rows_python(blocks, index):
        yield [sum(map(operator.mul, row[i : i + n], powers)) & _BITS for i in range(len(row) - n + 1)]


def _token_ngrams_python(blocks: Sequence[TokenBlock], n: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    rows = list(_ngram_rows_python(blocks, None, n))
    return _offsets(map(len, rows)), np.array([h for row in rows for h in row], dtype=np.uint64)


class _HashSetPython:
    """Twin of `_C.HashSet`."""

    def __init__(self) -> None:
        self._values: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self._values) + 32 * len(self._values)

    def union(self, hashes: NDArray[np.uint64]) -> _HashSetPython:
        result = _HashSetPython()
        result._values = self._values.union(hashes.tolist())
        return result

    def values(self) -> NDArray[np.uint64]:
        return np.array(sorted(self._values), dtype=np.uint64)

    def contains(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        return np.fromiter(map(self._values.__contains__, hashes.tolist()), np.bool_, len(hashes))

    def overlap(self, blocks: Sequence[TokenBlock], index: NDArray[np.int64] | None, n: int) -> NDArray[np.int32]:
        rows = _ngram_rows_python(blocks, index, n)
        return np.fromiter((len(self._values.intersection(row)) for row in rows), np.int32)


_Set: TypeAlias = "_C.HashSet | _HashSetPython"


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Token hashes of texts, one row each: what a guard counts over, for any n. Made by `TokenHasher.rows`.

    blocks: one or two (offsets int64 [R_i + 1], tokens uint8 [7 * T_i]), read one after the other: row r of a block
    is tokens[7 * offsets[r] : 7 * offsets[r + 1]], each token a little-endian integer of 56 bits. They may be mapped
    from a file. texts: what the rows were made of, by row (`exact=True` reads those with hits).
    tokenizer_name, key_fingerprint: what made the hashes; guards of others refuse them.
    """

    blocks: tuple[TokenBlock, ...]
    texts: Sequence[str]
    tokenizer_name: str
    key_fingerprint: str

    def __len__(self) -> int:
        return sum(len(offsets) - 1 for offsets, _ in self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the hashes and their offsets, in memory or mapped."""
        return sum(offsets.nbytes + tokens.nbytes for offsets, tokens in self.blocks)

    @property
    def tokens(self) -> int:
        """How many tokens there are in all rows."""
        return sum(len(tokens) // TOKEN_BYTES for _, tokens in self.blocks)


class TokenHasher:
    """A tokenizer and a key: texts in, token hashes out. A store and the guards over it have equal ones.

    tokenizer: see `Tokenizer`; None is `tokenize`.
    hash_key: bytes (at least one) or an int in [0, 2**128) that counts as its 16 little-endian bytes; None is
    `PROJECT_KEY`. Who knows the key can write texts whose hashes collide, and the key of the project is known:
    where authors are hostile, use `secrets.token_bytes(16)` and keep it. Only the fingerprint is ever written down
    beside hashes (a short or guessed key can be found from it); pickles of guards hold the key itself.

    Raises TypeError and ValueError for what is neither, and for a tokenizer without a name.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, hash_key: HashKey | None = None) -> None:
        self.tokenizer_name = _tokenizer_name(tokenizer)
        self.tokenizer: Tokenizer = tokenize if tokenizer is None else tokenizer
        self.hash_key = hash_key
        self._key = _key_words(hash_key)
        print_of = b"".join(word.to_bytes(8, "little") for word in self._key)
        self.key_fingerprint = hashlib.blake2b(print_of, digest_size=8, person=b"cdr fingerprint").hexdigest()

    def __repr__(self) -> str:
        return f"<TokenHasher tokenizer={self.tokenizer_name} key_fingerprint={self.key_fingerprint}>"

    def check(self, other: TokenHasher | TokenRows, what: str) -> None:
        """Raises ValueError unless the other one's hashes can be compared with these; what: names the other."""
        if other.tokenizer_name != self.tokenizer_name:
            raise ValueError(f"{what}: expected tokenizer {self.tokenizer_name!r}, got {other.tokenizer_name!r}")
        if other.key_fingerprint != self.key_fingerprint:
            raise ValueError(
                f"{what}: expected hashes with the key of fingerprint {self.key_fingerprint}, "
                f"got {other.key_fingerprint}: give both the same hash_key"
            )

    def tokens(self, text: str) -> Sequence[str]:
        """The tokens of a text. Raises TypeError if the tokenizer returns something else than strings."""
        return _checked_tokens(self.tokenizer(text))

    def rows(self, texts: Sequence[str], *, impl: str | None = None) -> TokenRows:
        """The token hashes of texts. Raises TypeError if texts is a str or one of them is none, with its position."""
        checked = _checked_texts(texts)
        block = self.hashed(checked, impl=impl)
        return TokenRows((block,), checked, self.tokenizer_name, self.key_fingerprint)

    def hashed(self, texts: list[str], *, impl: str | None = None) -> TokenBlock:
        """(offsets int64 [M + 1], tokens uint8 [7 * T]) of a list of str."""
        compiled = _checked_impl(impl) == "cpp"
        if compiled and self.tokenizer is tokenize:
            return _C.hash_texts(list(map(_folded, texts)), key=self._key, bits=_hash_bits)
        lengths: list[int] = []
        hashes = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            rows = [self.tokens(text) for text in texts[start : start + _TEXTS_AT_ONCE]]
            lengths += map(len, rows)
            hashes.append(self._hash_tokens([token for row in rows for token in row], compiled))
        return _offsets(lengths), np.concatenate(hashes) if hashes else np.zeros(0, np.uint8)

    def hashed_tokens(self, tokens: Sequence[str], *, impl: str | None = None) -> TokenBlock:
        """As `hashed`, for one text that is tokenised already."""
        return _offsets([len(tokens)]), self._hash_tokens(tokens, _checked_impl(impl) == "cpp")

    def _hash_tokens(self, tokens: Sequence[str], compiled: bool) -> NDArray[np.uint8]:
        if not compiled:
            return _hash_tokens_python(tokens, self._key, _hash_bits)
        parts = [t if t.isascii() else t.encode("utf-8", "surrogatepass") for t in tokens]
        return _C.hash_tokens(parts, key=self._key, bits=_hash_bits)


def _folded(text: str) -> str | bytes:
    plain = _ascii(text)
    return plain if plain.isascii() else " ".join(tokenize(text)).encode()


def _key_words(hash_key: HashKey | None) -> tuple[int, int]:
    if hash_key is None:
        return PROJECT_KEY
    if isinstance(hash_key, bool) or not isinstance(hash_key, bytes | int):
        raise TypeError(f"hash_key: expected bytes, an int or None, got {type(hash_key).__name__}")
    if isinstance(hash_key, int):
        if not 0 <= hash_key < 2**128:
            raise ValueError("hash_key: expected an int in [0, 2**128)")
        hash_key = hash_key.to_bytes(16, "little")
    if not hash_key:
        raise ValueError("hash_key: expected at least one byte, got none")
    digest = hashlib.blake2b(hash_key, digest_size=16, person=b"cdr token hash").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def take_tokens(blocks: tuple[TokenBlock, ...], rows: NDArray[np.int64] | None) -> TokenBlock:
    """These rows of token hashes (None: all) as one block of their own."""
    return _C.take_tokens(blocks, rows)


@dataclass(frozen=True, eq=False)
class _Window:
    """What one update wrote: its distinct n-grams, ascending, and its tokens where they are kept."""

    hashes: NDArray[np.uint64]
    tokens: tuple[str, ...] | None
    grams: frozenset[NGram] | None


@dataclass(frozen=True, eq=False)
class _Layer:
    """What one update added. Layers share no n-gram, so counts over them add up."""

    hashes: _Set
    grams: frozenset[NGram] | None


@dataclass(frozen=True, eq=False)
class _Blacklist:
    """One state of a guard, never changed. windows only where an exact or a bounded guard needs them."""

    hashes: _Set
    grams: frozenset[NGram] | None
    layers: tuple[_Layer, ...] = ()
    windows: tuple[_Window, ...] = ()

    def __len__(self) -> int:
        return len(self.hashes) if self.grams is None else len(self.grams)


@dataclass(frozen=True)
class Generation:
    """A state of a blacklist, to count later only what came after it. Equal ones hold the same n-grams."""

    _layer: _Layer | None = field(repr=False)


class NGramGuard:
    """The session's n-gram blacklist (§5): what was written, and how much of it a fact repeats.

    n: tokens in an n-gram, 1 to 32; the specification's is 6.
    tokenizer, hash_key: those of the store, see `TokenHasher`. Give a tokenizer with settings a `name` that tells
        the settings apart.
    exact: compare the tokens themselves wherever hashes match. Then the guard keeps the tokens of all outputs, and
        facts with a match are tokenised again.
    max_ngrams: keep at most so many distinct n-grams, 1 or more; the oldest windows are forgotten first, whole,
        where one more would be too many, and of a single output that has more the last ones stay. An n-gram counts
        as written by every window that wrote it. None, the default, forgets nothing: a window of 2,000 words adds
        some 2,000 n-grams, each 36 to 72 bytes here (see `nbytes`) and 11 in a stored session.
    impl: "cpp", "python" or None, which takes "cpp" where the extension is built. Results are the same.

    Unless exact, only hashes are kept, and only distinct ones. Any number of threads may read while others update:
    an update makes a new blacklist and swaps it in, so each call sees one state from start to end.

    Raises ValueError for n outside 1 to 32, an unknown impl and a tokenizer without a name, TypeError for
    other types, ImportError for impl="cpp" without the extension.

        >>> guard = NGramGuard()
        >>> guard.update("Every pod gets its own IP address.")
        >>> guard.overlap(["In Kubernetes every pod gets its own IP.", "Services are stable."]).tolist()
        [1, 0]
    """

    def __init__(
        self,
        n: int = NGRAM_SIZE,
        *,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        exact: bool = False,
        max_ngrams: int | None = None,
        impl: str | None = None,
    ) -> None:
        self._n = _checked_n(n)
        self._impl = _checked_impl(impl)
        self._hasher = TokenHasher(tokenizer, hash_key)
        if not isinstance(exact, bool):
            raise TypeError(f"exact: expected True or False, got {exact!r}")
        if max_ngrams is not None:
            if isinstance(max_ngrams, bool) or not hasattr(max_ngrams, "__index__"):
                raise TypeError(f"max_ngrams: expected int or None, got {type(max_ngrams).__name__}")
            if max_ngrams < 1:
                raise ValueError(f"max_ngrams: expected at least 1, got {max_ngrams}")
            max_ngrams = operator.index(max_ngrams)
        self._exact = exact
        self._max = max_ngrams
        self._lock = threading.Lock()
        self._state = self._empty()

    def _empty(self) -> _Blacklist:
        return _Blacklist(self._no_hashes(), frozenset() if self._exact else None)

    def _no_hashes(self) -> _Set:
        return _C.HashSet() if self._impl == "cpp" else _HashSetPython()

    @classmethod
    def from_hashes(
        cls,
        hashes: NDArray[np.uint64] | Iterable[int],
        *,
        n: int = NGRAM_SIZE,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        impl: str | None = None,
    ) -> NGramGuard:
        """A guard that holds these n-grams, as `hashes` gave them: [H] uint64 or ints, in any order.

        n, tokenizer and hash_key must be those of the guard that made them. Raises TypeError for another dtype,
        ValueError for another rank or ints outside [0, 2**64), and what the constructor raises.
        """
        guard = cls(n, tokenizer=tokenizer, hash_key=hash_key, impl=impl)
        guard._add(guard._window(_checked_hashes(hashes)))
        return guard

    def state(self) -> dict[str, Any]:
        """All of the guard but its tokenizer, its key and its impl, for `from_state`.

        {"n": int, "tokenizer": name, "key": fingerprint, "exact": bool, "max_ngrams": int | None, "hashes": list of
        uint64 arrays [H_i], "tokens": None, or for an exact guard a list of lists of str}: one entry for each window
        that must be told from others, in order.
        """
        state = self._state
        if self._exact:
            hashes, tokens = [], [list(window.tokens or ()) for window in state.windows]
        else:
            hashes, tokens = [w.hashes for w in state.windows] if self._max else [state.hashes.values()], None
        return {
            "n": self._n,
            "tokenizer": self.tokenizer_name,
            "key": self.key_fingerprint,
            "exact": self._exact,
            "max_ngrams": self._max,
            "hashes": hashes,
            "tokens": tokens,
        }

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        *,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
        impl: str | None = None,
    ) -> NGramGuard:
        """The guard that gave this state, with the tokenizer and the key it had.

        Raises ValueError where these are others, and ValueError or TypeError for what `state` does not give.
        """
        fields = {"n", "tokenizer", "key", "exact", "max_ngrams", "hashes", "tokens"}
        if set(state) != fields:
            raise ValueError(f"the guard must have the fields {sorted(fields)}, got {sorted(state)}")
        guard = cls(
            state["n"], tokenizer=tokenizer, hash_key=hash_key, exact=state["exact"], max_ngrams=state["max_ngrams"],
            impl=impl,
        )  # fmt: skip
        if guard.tokenizer_name != state["tokenizer"]:
            raise ValueError(
                f"the guard was made with tokenizer {state['tokenizer']!r}, got {guard.tokenizer_name!r}: "
                "pass tokenizer="
            )
        if guard.key_fingerprint != state["key"]:
            raise ValueError(
                f"the guard was made with the key of fingerprint {state['key']!r}, got {guard.key_fingerprint!r}: "
                "pass hash_key="
            )
        if (state["tokens"] is not None) != guard._exact or (guard._exact and state["hashes"]):
            raise ValueError("the guard must have tokens if it is exact, else hashes")
        for hashes in state["hashes"]:
            guard._add(guard._window(_checked_hashes(hashes)))
        for tokens in state["tokens"] or ():
            guard._add(guard._window_of(_checked_tokens(tokens)))
        return guard

    @property
    def n(self) -> int:
        """Tokens in an n-gram."""
        return self._n

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, "nfkc-casefold-1" for the default. N-grams of two tokenizers never mix."""
        return self._hasher.tokenizer_name

    @property
    def key_fingerprint(self) -> str:
        """16 hexadecimal digits that tell one `hash_key` from another."""
        return self._hasher.key_fingerprint

    @property
    def exact(self) -> bool:
        """Whether matches are verified on the tokens."""
        return self._exact

    @property
    def max_ngrams(self) -> int | None:
        """How many distinct n-grams are kept at most, None where nothing is forgotten."""
        return self._max

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """All distinct n-grams, ascending: [len(guard)] uint64, a copy."""
        return self._state.hashes.values()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the blacklist takes (estimated for impl="python" and for the tokens of exact ones)."""
        state = self._state
        sets = {id(s): s.nbytes for s in (state.hashes, *(layer.hashes for layer in state.layers))}
        windows = sum(w.hashes.nbytes + sum(map(sys.getsizeof, w.tokens or ())) for w in state.windows)
        grams = 0 if state.grams is None else 3 * sys.getsizeof(state.grams) + (40 + 8 * self._n) * len(state.grams)
        return sum(sets.values()) + windows + grams

    @property
    def generation(self) -> Generation:
        """The state of the blacklist as `overlap_since` takes it."""
        return _generation(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return f"<NGramGuard n={self.n} tokenizer={self.tokenizer_name} of {len(self)} n-grams>"

    def __reduce__(self) -> tuple[Any, ...]:
        tokenizer = None if self._hasher.tokenizer is tokenize else self._hasher.tokenizer
        return _restored, (self.state(), tokenizer, self._hasher.hash_key, self._impl)

    def _add(self, window: _Window) -> None:
        with self._lock:
            self._state = self._with(self._state, window)

    def _with(self, state: _Blacklist, window: _Window) -> _Blacklist:
        """The state after this window."""
        kept = (*state.windows, window) if self._exact or self._max else ()
        if self._exact:
            assert state.grams is not None
            assert window.grams is not None
            grams = window.grams - state.grams
            fresh = self._hashes_of(grams) if grams else window.hashes[:0]
            if not grams:
                return _Blacklist(state.hashes, state.grams, state.layers, kept)
            added = _Layer(self._no_hashes().union(fresh), grams)
            after = _Blacklist(state.hashes.union(fresh), state.grams | grams, (*state.layers, added), kept)
        else:
            fresh = window.hashes[~state.hashes.contains(window.hashes)]
            if not len(fresh):
                return _Blacklist(state.hashes, None, state.layers, kept)
            total = state.hashes.union(fresh)
            added = _Layer(self._no_hashes().union(fresh) if state.layers else total, None)
            after = _Blacklist(total, None, (*state.layers, added), kept)
        if self._max is not None and len(after) > self._max:
            return self._newest(kept)
        if len(after.layers) > _MAX_LAYERS:
            half = _MAX_LAYERS // 2
            merged = _merged(after.layers[:half], self._no_hashes())
            after = _Blacklist(after.hashes, after.grams, (merged, *after.layers[half:]), after.windows)
        return after

    def _newest(self, windows: tuple[_Window, ...]) -> _Blacklist:
        """A state of as many of the last windows as max_ngrams lets in."""
        hashes = np.zeros(0, np.uint64)
        grams: frozenset[NGram] = frozenset()
        first = len(windows)
        for window in reversed(windows):
            more, more_grams = np.union1d(hashes, window.hashes), grams | (window.grams or frozenset())
            if (len(more_grams) if self._exact else len(more)) > (self._max or 0):
                break
            hashes, grams, first = more, more_grams, first - 1
        total = self._no_hashes().union(hashes)
        own = grams if self._exact else None
        return _Blacklist(total, own, (_Layer(total, own),), windows[first:])

    def _hashes_of(self, grams: Iterable[NGram]) -> NDArray[np.uint64]:
        tokens = [token for gram in grams for token in gram]
        _, packed = self._hasher.hashed_tokens(tokens, impl=self._impl)
        offsets = np.arange(0, len(tokens) + 1, self._n, dtype=np.int64)
        return self._ngrams(((offsets, packed),))[1]

    def _window(self, hashes: NDArray[np.uint64]) -> _Window:
        """hashes: in the order they were written, repeats and all."""
        if self._max is not None and len(hashes) > self._max:
            newest, first = np.unique(hashes[::-1], return_index=True)
            return _Window(np.sort(newest[np.argsort(first)[: self._max]]), None, None)
        return _Window(np.unique(hashes), None, None)

    def _window_of(self, tokens: Sequence[str]) -> _Window:
        written = tuple(tokens)
        grams = _grams(written, self._n)
        last = list(dict.fromkeys(reversed(grams)))[: self._max]
        hashes = self._hashes_of(last) if last else np.zeros(0, np.uint64)
        return _Window(np.unique(hashes), written, frozenset(last))

    def _ngrams(self, blocks: tuple[TokenBlock, ...]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        compiled = self._impl == "cpp"
        return _C.token_ngrams(blocks, self._n) if compiled else _token_ngrams_python(blocks, self._n)

    def update(self, text: str) -> None:
        """Blacklists every n-gram of a window's output (§5.1). Raises TypeError if text is not a str."""
        if not isinstance(text, str):
            raise TypeError(f"text: expected str, got {type(text).__name__}")
        if self._exact:
            self._add(self._window_of(self._hasher.tokens(text)))
        else:
            self._add(self._window(self._ngrams((self._hasher.hashed([text], impl=self._impl),))[1]))

    def overlap(self, texts: Sequence[str]) -> NDArray[np.int32]:
        """How many distinct n-grams of each text are blacklisted (§5.2, R24): [M] int32.

        Equivalent to `[len(set(ngrams(text)) & blacklist) for text in texts]`. Raises TypeError if texts is a
        str or one of them is not, with its position.
        """
        state = self._state
        return self._counts(state.hashes, state.grams, self.token_rows(texts), None)

    def matches(self, text: str) -> list[tuple[int, NGram]]:
        """The distinct n-grams of a text that are blacklisted, each with the position of its first token where it
        first stands, in that order; as many as `overlap` counts. Raises TypeError if text is not a str."""
        if not isinstance(text, str):
            raise TypeError(f"text: expected str, got {type(text).__name__}")
        state, tokens = self._state, self._hasher.tokens(text)
        grams = _grams(tokens, self._n)
        hashes = self._ngrams((self._hasher.hashed_tokens(tokens, impl=self._impl),))[1]
        known = state.hashes.contains(hashes) if len(grams) else hashes
        found: dict[int, tuple[int, NGram]] = {}
        for i in np.flatnonzero(known).tolist():
            if state.grams is None or grams[i] in state.grams:
                found.setdefault(int(hashes[i]), (i, grams[i]))
        return list(found.values())

    def token_rows(self, texts: Sequence[str]) -> TokenRows:
        """The texts as `overlap_rows` takes them. They depend on the tokenizer and the key, not on n and not on what
        is blacklisted, so each text needs this once. Raises TypeError as `overlap` does."""
        return self._hasher.rows(texts, impl=self._impl)

    def overlap_rows(self, tokens: TokenRows, rows: NDArray[np.int64] | None = None) -> NDArray[np.int32]:
        """`overlap` of texts that were tokenised and hashed before, such as a store's (`StoreView.tokens`): [M] int32.

        rows: int64 [M], which rows to count, None for all. Only these are read.

        Raises ValueError for tokens of another tokenizer or key, IndexError for rows that are not there.
        """
        self._check_tokens(tokens)
        state = self._state
        return self._counts(state.hashes, state.grams, tokens, rows)

    def overlap_since(
        self, generation: Generation, tokens: TokenRows, rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.int32] | None:
        """What `overlap_rows` has more than it had at a `generation` of this guard, or of the guard that this one was
        copied from: [M] int32. Costs the rows and what was written since. None where the n-grams of that generation
        are not all among this guard's (after `clear`, a forgotten window, in another branch, or some 30 updates
        later): count all then.

        Raises as `overlap_rows` does.
        """
        self._check_tokens(tokens)
        layers = self._state.layers
        since = len(layers)
        while since and layers[since - 1] is not generation._layer:
            since -= 1
        if since == 0 and generation._layer is not None:
            return None
        added = layers[since:]
        if not added:
            return np.zeros(len(tokens) if rows is None else len(rows), np.int32)
        layer = _merged(added, self._no_hashes())
        return self._counts(layer.hashes, layer.grams, tokens, rows)

    def _check_tokens(self, tokens: TokenRows) -> None:
        if not isinstance(tokens, TokenRows):
            raise TypeError(f"tokens: expected TokenRows, got {type(tokens).__name__}")
        self._hasher.check(tokens, "the tokens of the facts")

    def _counts(
        self, hashes: _Set, grams: frozenset[NGram] | None, tokens: TokenRows, rows: NDArray[np.int64] | None
    ) -> NDArray[np.int32]:
        counts = hashes.overlap(tokens.blocks, rows, self._n)
        if grams is not None:
            for at in np.flatnonzero(counts).tolist():
                text = tokens.texts[at if rows is None else int(rows[at])]
                counts[at] = len(grams.intersection(_grams(self._hasher.tokens(text), self._n)))
        return counts

    def ngram_hashes(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """The n-grams of texts as the blacklist keeps them: (offsets [M + 1] int64, hashes [H] uint64).

        Text i has hashes[offsets[i]:offsets[i + 1]], one for each position, in order, repeats kept. Raises TypeError
        as `overlap` does.
        """
        return self._ngrams(self.token_rows(texts).blocks)

    def copy(self) -> NGramGuard:
        """An independent guard with the same n-grams. Takes no time: blacklists are shared until updated."""
        guard = object.__new__(type(self))
        guard.__dict__.update(self.__dict__, _lock=threading.Lock())
        return guard

    def merge(self, other: NGramGuard) -> None:
        """Adds every n-gram of another guard; its windows count as the newer ones.

        Raises TypeError for anything else, ValueError for a guard of another n, tokenizer, key or setting.
        """
        if not isinstance(other, NGramGuard):
            raise TypeError(f"other: expected NGramGuard, got {type(other).__name__}")
        for name in ("n", "exact", "max_ngrams"):
            if getattr(other, name) != getattr(self, name):
                raise ValueError(
                    f"other: expected a guard of {name}={getattr(self, name)}, got {name}={getattr(other, name)}"
                )
        self._hasher.check(other._hasher, "other")
        theirs = other._state
        windows = theirs.windows if self._exact or self._max else (self._window(theirs.hashes.values()),)
        with self._lock:
            mine = self._state
            known = {(w.tokens, w.hashes.tobytes()) for w in mine.windows}
            new = [w for w in windows if (w.tokens, w.hashes.tobytes()) not in known]
            self._state = reduce(self._with, new, mine)

    def clear(self) -> None:
        """Forgets every n-gram (§2.7, reset)."""
        with self._lock:
            self._state = self._empty()


def _generation(state: _Blacklist) -> Generation:
    return Generation(state.layers[-1] if state.layers else None)


def _merged(layers: Sequence[_Layer], empty: _Set) -> _Layer:
    if len(layers) == 1:
        return layers[0]
    hashes = reduce(lambda all_, layer: all_.union(layer.hashes.values()), layers, empty)
    if layers[0].grams is None:
        return _Layer(hashes, None)
    return _Layer(hashes, frozenset().union(*(layer.grams or () for layer in layers)))


def _grams(tokens: Sequence[str], n: int) -> list[NGram]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def _restored(state: dict[str, Any], tokenizer: Tokenizer | None, hash_key: HashKey | None, impl: str) -> NGramGuard:
    impl = impl if _C is not None else "python"
    return NGramGuard.from_state(state, tokenizer=tokenizer, hash_key=hash_key, impl=impl)


def repetition(text: str, history: Sequence[str], n: int = NGRAM_SIZE, *, tokenizer: Tokenizer | None = None) -> float:
    """How much of a text repeats earlier texts, in [0, 1]: what the table of §1.1 shows, window by window.

    The share of the text's n-grams (one at each of its tokens but the last n - 1, repeats counted each time) that
    occur in a text of history. What a text repeats of itself does not count, n-grams never reach from one text
    into the next, and a text of fewer than n tokens has none: 0.0.

    history: the outputs of the windows before. n: 1 to 32; 4 sees shorter borrowings than the guard's 6.
    tokenizer: see `Tokenizer`; None is `tokenize`.

    Raises TypeError for what is no str or no sequence of them, ValueError for n and tokenizer as `NGramGuard`.

        >>> repetition("every pod gets its own address", ["Every pod gets an address. Its own address."], n=2)
        0.8
    """
    if not isinstance(text, str):
        raise TypeError(f"text: expected str, got {type(text).__name__}")
    guard = NGramGuard(n, tokenizer=tokenizer)
    _, written = guard.ngram_hashes(_checked_texts(history))
    _, hashes = guard.ngram_hashes([text])
    if not len(hashes):
        return 0.0
    return int(np.count_nonzero(guard._no_hashes().union(written).contains(hashes))) / len(hashes)
