"""The n-gram guard of §5: tokens (R23), n-grams as 64-bit hashes, and how many of them were already written.

A text is tokenised once and each token hashed with SipHash-1-3; an n-gram's hash is a polynomial over its
tokens' hashes, mixed. The hashes depend on the tokens, n and the key alone, so they can be kept with a store
and shared between processes. Two n-grams in a session that differ share a hash with a chance below 1e-7 per
window at a million facts.

`impl="cpp"` is the compiled matcher, `impl="python"` its twin: equal hashes, equal counts.
"""

from __future__ import annotations

import operator
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .constants import NGRAM_SIZE

try:
    from . import _C
except ImportError:
    _C = None  # type: ignore[assignment]

Tokenizer = Callable[[str], Sequence[str]]

DEFAULT_TOKENIZER: Final = "nfkc-casefold-1"
"""Name of `tokenize`; it changes when the tokens of any text do."""

PROJECT_KEY: Final = 0x6364722D6B65726E
"""The one key of all token hashes, so that stores, sessions and replicas agree."""

MAX_N: Final = 32

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
    if text.isascii():
        return _ascii_tokens(text.lower())
    return _unicode_tokens(unicodedata.normalize("NFKC", text).casefold())


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


def _checked_tokens(tokenizer: Tokenizer, text: str) -> Sequence[str]:
    tokens = tokenizer(text)
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise TypeError(f"tokenizer: expected it to return a list of str, got {type(tokens).__name__}")
    for position, token in enumerate(tokens):
        if not isinstance(token, str):
            raise TypeError(f"tokenizer: expected a list of str, got {type(token).__name__} at position {position}")
    return tokens


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


def _checked_offsets(offsets: Any, end: int) -> NDArray[np.int64]:
    array = np.asarray(offsets)
    if array.dtype.kind not in "iu":
        raise TypeError(f"offsets: expected dtype int64, got {array.dtype}")
    array = np.ascontiguousarray(array, dtype=np.int64)
    ascending = array.ndim == 1 and array.size > 0 and bool((array[1:] >= array[:-1]).all())
    if not ascending or array[0] != 0 or array[-1] != end:
        raise ValueError(f"offsets: expected [M + 1], ascending from 0 to the number of hashes, {end}")
    return array


def _offsets(lengths: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(accumulate(lengths, initial=0), dtype=np.int64)


def _token_hashes_cpp(texts: list[str], tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    if tokenizer is tokenize:
        parts = [t.encode() if t.isascii() else " ".join(tokenize(t)).encode() for t in texts]
        return _C.hash_texts(b"".join(parts), _offsets(map(len, parts)), key=PROJECT_KEY)
    rows = [_checked_tokens(tokenizer, text) for text in texts]
    tokens = [token.encode("utf-8", "surrogatepass") for row in rows for token in row]
    hashes = _C.hash_tokens(b"".join(tokens), _offsets(map(len, tokens)), key=PROJECT_KEY)
    return _offsets(map(len, rows)), hashes


def _token_hashes_python(texts: list[str], tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    rows = [_checked_tokens(tokenizer, text) for text in texts]
    hashes = [_hash_bytes(t.encode("utf-8", "surrogatepass"), PROJECT_KEY) for row in rows for t in row]
    return _offsets(map(len, rows)), np.array(hashes, dtype=np.uint64)


_BITS: Final = 2**64 - 1
_BASE: Final = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _BITS
    return x ^ x >> 31


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
def _hash_bytes(data: bytes, key: int) -> int:
    """SipHash-1-3 with the 128-bit key (key, mix(key))."""
    second = _mix(key)
    v0, v1 = key ^ 0x736F6D6570736575, second ^ 0x646F72616E646F6D
    v2, v3 = key ^ 0x6C7967656E657261, second ^ 0x7465646279746573
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


def _token_ngrams_python(
    offsets: NDArray[np.int64], tokens: NDArray[np.uint64], n: int
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    powers = [pow(_BASE, n - 1 - i, 2**64) for i in range(n)]
    rows = [
        [_mix(sum(map(operator.mul, row[i : i + n], powers)) + n & _BITS) for i in range(len(row) - n + 1)]
        for row in _rows(offsets, tokens)
    ]
    return _offsets(map(len, rows)), np.array([h for row in rows for h in row], dtype=np.uint64)


def _rows(offsets: NDArray[np.int64], values: NDArray[np.uint64]) -> Iterator[list[int]]:
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield values[start:end].tolist()


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

    def overlap(self, offsets: NDArray[np.int64], hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        return np.fromiter((len(self._values.intersection(row)) for row in _rows(offsets, hashes)), np.int32)

    def overlap_tokens(self, offsets: NDArray[np.int64], tokens: NDArray[np.uint64], n: int) -> NDArray[np.int32]:
        return self.overlap(*_token_ngrams_python(offsets, tokens, n))


class NGramGuard:
    """The session's n-gram blacklist (§5): what was written, and how much of it a fact repeats.

    n: tokens in an n-gram, 1 to 32; the specification's is 6.
    tokenizer: a callable str -> list[str] with a name (its attribute `name`, else its `__qualname__`); None
        is `tokenize`. Give a tokenizer with settings a `name` that tells the settings apart.
    impl: "cpp", "python" or None, which takes "cpp" where the extension is built. Results are the same.

    Only hashes are kept, and only distinct ones. Any number of threads may read while others update: an
    update makes a new blacklist and swaps it in, so each call sees one state from start to end.

    Raises ValueError for n outside 1 to 32, an unknown impl and a tokenizer without a name, TypeError for
    other types, ImportError for impl="cpp" without the extension.

        >>> guard = NGramGuard()
        >>> guard.update("Every pod gets its own IP address.")
        >>> guard.overlap(["In Kubernetes every pod gets its own IP.", "Services are stable."]).tolist()
        [1, 0]
    """

    def __init__(self, n: int = NGRAM_SIZE, *, tokenizer: Tokenizer | None = None, impl: str | None = None) -> None:
        if isinstance(n, bool) or not hasattr(n, "__index__"):
            raise TypeError(f"n: expected int, got {type(n).__name__}")
        if not 1 <= n <= MAX_N:
            raise ValueError(f"n: expected 1 to {MAX_N}, got {n}")
        if impl not in (None, "cpp", "python"):
            raise ValueError(f'impl: expected "cpp" or "python", got {impl!r}')
        if impl == "cpp" and _C is None:
            raise ImportError('impl="cpp" needs the extension cdr_kernel._C: pip install cdr-kernel')
        self._name = _tokenizer_name(tokenizer)
        self._tokenizer: Tokenizer = tokenizer or tokenize
        self._n = operator.index(n)
        self._impl = impl or ("python" if _C is None else "cpp")
        self._lock = threading.Lock()
        self._set = self._empty()

    def _empty(self) -> _C.HashSet | _HashSetPython:
        return _C.HashSet() if self._impl == "cpp" else _HashSetPython()

    @classmethod
    def from_hashes(
        cls,
        hashes: NDArray[np.uint64] | Iterable[int],
        *,
        n: int = NGRAM_SIZE,
        tokenizer: Tokenizer | None = None,
        impl: str | None = None,
    ) -> NGramGuard:
        """A guard that holds these n-grams, as `hashes` gave them: [H] uint64 or ints, in any order.

        n and tokenizer must be those of the guard that made them. Raises TypeError for another dtype,
        ValueError for another rank or ints outside [0, 2**64), and what the constructor raises.
        """
        guard = cls(n, tokenizer=tokenizer, impl=impl)
        guard._add(_checked_hashes(hashes))
        return guard

    @property
    def n(self) -> int:
        """Tokens in an n-gram."""
        return self._n

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, "nfkc-casefold-1" for the default. N-grams of two tokenizers never mix."""
        return self._name

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """All distinct n-grams, ascending: [len(guard)] uint64, a copy."""
        return self._set.values()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the blacklist takes (estimated for impl="python")."""
        return self._set.nbytes

    def __len__(self) -> int:
        return len(self._set)

    def __repr__(self) -> str:
        return f"<NGramGuard n={self.n} tokenizer={self.tokenizer_name} of {len(self)} n-grams>"

    def __reduce__(self) -> tuple[Any, ...]:
        tokenizer = None if self._tokenizer is tokenize else self._tokenizer
        return _restored, (self.hashes, self.n, tokenizer, self._impl)

    def _add(self, hashes: NDArray[np.uint64]) -> None:
        with self._lock:
            self._set = self._set.union(hashes)

    def _tokens(self, texts: list[str]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        hashed = _token_hashes_cpp if self._impl == "cpp" else _token_hashes_python
        return hashed(texts, self._tokenizer)

    def _ngrams(self, texts: list[str]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        offsets, tokens = self._tokens(texts)
        if self._impl == "cpp":
            return _C.token_ngrams(offsets, tokens, self._n)
        return _token_ngrams_python(offsets, tokens, self._n)

    def update(self, text: str) -> None:
        """Blacklists every n-gram of a window's output (§5.1). Raises TypeError if text is not a str."""
        if not isinstance(text, str):
            raise TypeError(f"text: expected str, got {type(text).__name__}")
        self._add(self._ngrams([text])[1])

    def overlap(self, texts: Sequence[str]) -> NDArray[np.int32]:
        """How many distinct n-grams of each text are blacklisted (§5.2, R24): [M] int32.

        Equivalent to `[len(set(ngrams(text)) & blacklist) for text in texts]`. Raises TypeError if texts is a
        str or one of them is not, with its position.
        """
        current = self._set
        offsets, tokens = self._tokens(_checked_texts(texts))
        return current.overlap_tokens(offsets, tokens, self._n)

    def ngram_hashes(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """The n-grams of texts as `overlap_hashed` takes them: (offsets [M + 1] int64, hashes [H] uint64).

        Text i has hashes[offsets[i]:offsets[i + 1]], one for each position, in order, repeats kept. They
        depend on n and the tokenizer and not on what is blacklisted, so each text needs this once. Raises
        TypeError as `overlap` does.
        """
        return self._ngrams(_checked_texts(texts))

    def overlap_hashed(self, offsets: NDArray[np.int64], hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """`overlap` for texts whose `ngram_hashes` are at hand: [M] int32.

        Raises TypeError for another dtype, ValueError for offsets that do not ascend from 0 to len(hashes).
        """
        hashes = _checked_hashes(hashes)
        return self._set.overlap(_checked_offsets(offsets, len(hashes)), hashes)

    def copy(self) -> NGramGuard:
        """An independent guard with the same n-grams. Takes no time: blacklists are shared until updated."""
        guard = NGramGuard(self._n, tokenizer=self._tokenizer, impl=self._impl)
        guard._set = self._set
        return guard

    def merge(self, other: NGramGuard) -> None:
        """Adds every n-gram of another guard.

        Raises TypeError for anything else, ValueError for a guard of another n or tokenizer.
        """
        if not isinstance(other, NGramGuard):
            raise TypeError(f"other: expected NGramGuard, got {type(other).__name__}")
        if other.n != self.n:
            raise ValueError(f"other: expected a guard of n={self.n}, got n={other.n}")
        if other.tokenizer_name != self.tokenizer_name:
            raise ValueError(
                f"other: expected a guard of tokenizer {self.tokenizer_name!r}, got {other.tokenizer_name!r}"
            )
        self._add(other.hashes)

    def clear(self) -> None:
        """Forgets every n-gram (§2.7, reset)."""
        with self._lock:
            self._set = self._empty()


def _restored(hashes: NDArray[np.uint64], n: int, tokenizer: Tokenizer | None, impl: str) -> NGramGuard:
    return NGramGuard.from_hashes(hashes, n=n, tokenizer=tokenizer, impl=impl if _C is not None else "python")
