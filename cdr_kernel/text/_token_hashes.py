"""Tokens to hashes: what a store keeps of a text, and whoever counts n-grams reads.

A text is tokenised once in its life and each token hashed with SipHash-1-3 to 56 bits, 7 bytes a token: these are its
`TokenRows`. They depend on the tokens and the key alone, so they can be kept with a store and shared between processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cdr_kernel import _C
from cdr_kernel.text._tokenize import PIECE, Tokenizer, ascii_form, checked_tokens, pieces, tokenize, tokenizer_name_of
from cdr_kernel.validation._scalars import check_order

HashKey: TypeAlias = "bytes | int"
TokenBlock: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.uint8]]"

PROJECT_KEY: Final = (0x6364722D6B65726E, 0x6E67656C2D6E6772)
"""The one key of all token hashes unless `hash_key` gives another, so that stores, sessions and replicas agree."""

TOKEN_BYTES: Final = 7
"""Bytes of one token's hash, little-endian: with the offsets a token takes less than 8."""

_TEXTS_AT_ONCE: Final = 4096
_hash_bits = 8 * TOKEN_BYTES  # lower in tests, to make collisions


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
        self.tokenizer_name = tokenizer_name_of(tokenizer)
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
        return checked_tokens(self.tokenizer(text))

    def rows(self, texts: Sequence[str]) -> TokenRows:
        """The token hashes of texts. Raises TypeError if texts is a str or one of them is none, with its position."""
        checked = checked_texts(texts)
        block = self.hashed(checked)
        return TokenRows((block,), checked, self.tokenizer_name, self.key_fingerprint)

    def hashed(self, texts: list[str]) -> TokenBlock:
        """(offsets int64 [M + 1], tokens uint8 [7 * T]) of a list of str."""
        if self.tokenizer is tokenize:
            return _C.hash_texts(list(map(_folded, texts)), key=self._key, bits=_hash_bits)
        lengths: list[int] = []
        hashes = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            rows = [self.tokens(text) for text in texts[start : start + _TEXTS_AT_ONCE]]
            lengths += map(len, rows)
            hashes.append(self._hash_tokens([token for row in rows for token in row]))
        return offsets_of(lengths), np.concatenate(hashes) if hashes else np.zeros(0, np.uint8)

    def hashed_steps(self, text: str) -> Generator[None, None, TokenBlock]:
        """`hashed` of one text, in steps of a piece of it; a tokenizer other than `tokenize` takes it in one."""
        if self.tokenizer is not tokenize or len(text) <= PIECE:
            return self.hashed([text])
        folded = []
        for piece in pieces(text):
            folded.append(_folded(piece))
            yield
        parts = [part.encode() if isinstance(part, str) else part for part in folded]
        return _C.hash_texts([b" ".join(parts)], key=self._key, bits=_hash_bits)

    def hashed_tokens(self, tokens: Sequence[str]) -> TokenBlock:
        """As `hashed`, for one text that is tokenised already."""
        return offsets_of([len(tokens)]), self._hash_tokens(tokens)

    def _hash_tokens(self, tokens: Sequence[str]) -> NDArray[np.uint8]:
        parts = [t if t.isascii() else t.encode("utf-8", "surrogatepass") for t in tokens]
        return _C.hash_tokens(parts, key=self._key, bits=_hash_bits)


def _folded(text: str) -> str | bytes:
    plain = ascii_form(text)
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


def checked_texts(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise TypeError(f"texts: expected a sequence of str, got {type(texts).__name__}")
    check_order(texts, "texts")
    checked = list(texts)
    for position, text in enumerate(checked):
        if not isinstance(text, str):
            raise TypeError(f"texts[{position}]: expected str, got {type(text).__name__}")
    return checked


def offsets_of(lengths: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(accumulate(lengths, initial=0), dtype=np.int64)
