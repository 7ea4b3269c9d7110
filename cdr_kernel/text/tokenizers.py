"""Tokenizers in place of `tokenize`: ICU's words, and the token ids of a language model's encoder.

Hand one to the store and to the guard of its sessions alike; its name is kept with both:

    words = IcuTokenizer("th")
    store = FactStore(384, embedding_model="...", tokenizer=words)
    session = Session(..., guard=NGramGuard(tokenizer=words))
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from cdr_kernel.text._tokenize import folded


class IcuTokenizer:
    """Words as ICU segments them, after NFKC and casefold: dictionary words in Thai, Lao, Khmer, Burmese, Chinese
    and Japanese, where `tokenize` takes each letter, and "can't" in one piece.

    locale: an ICU locale such as "en" or "th"; "und" is none in particular. Segments without a letter or number are
    left out; lone surrogates part tokens. The name tells ICU's version and the locale, since both decide the tokens.

    Raises ImportError without icu4py (the extra `icu`).

        >>> IcuTokenizer("th")("ภาษาไทยง่าย")  # doctest: +SKIP
        ['ภาษา', 'ไทย', 'ง่าย']
    """

    def __init__(self, locale: str = "und") -> None:
        if not isinstance(locale, str):
            raise TypeError(f"locale: expected str, got {type(locale).__name__}")
        self.locale = locale
        self.name = f"icu-{_icu('icu4py').icu_version}-{locale}"

    def __call__(self, text: str, /) -> list[str]:
        parted = text if text.isascii() else _without_surrogates(text, " ")
        segments = _icu("icu4py.breakers").WordBreaker(folded(parted), self.locale)
        return [segment for segment in segments if any(map(str.isalnum, segment))]

    def __repr__(self) -> str:
        return f"IcuTokenizer({self.locale!r})"


class EncoderTokenizer:
    """The token ids of a language model's encoder as tokens: n-grams as the model would see them.

    encode: a callable str -> sequence of ints, such as `tiktoken.get_encoding("o200k_base").encode_ordinary` or
    `lambda text: tokenizer.encode(text, add_special_tokens=False).ids`; leave special tokens out.
    name: names the encoder and its version, since its ids are kept under it.

    Such encoders tell letter case, and a word at the start of a text from one after a space: n-grams across the
    first word of a text match less often than `tokenize`'s. Lone surrogates reach the encoder as U+FFFD.

    Raises TypeError for an encode that cannot be called and for ids that are no integers, ValueError for no name.

        >>> EncoderTokenizer(lambda text: [len(word) for word in text.split()], name="lengths")("to be or not")
        ['2', '2', '2', '3']
    """

    def __init__(self, encode: Callable[[str], Iterable[int]], *, name: str) -> None:
        if not callable(encode):
            raise TypeError(f"encode: expected a callable str -> sequence of int, got {type(encode).__name__}")
        if not isinstance(name, str):
            raise TypeError(f"name: expected str, got {type(name).__name__}")
        if not name:
            raise ValueError("name: expected the name of an encoder, got an empty string")
        self.encode = encode
        self.name = name

    def __call__(self, text: str, /) -> Sequence[str]:
        ids = self.encode(text if text.isascii() else _without_surrogates(text, "\ufffd"))
        try:
            return [str(operator.index(i)) for i in ids]
        except TypeError:
            raise TypeError(f"encode of {self.name!r}: expected a sequence of int, got {ids!r:.80}") from None

    def __repr__(self) -> str:
        return f"EncoderTokenizer({self.encode!r}, name={self.name!r})"


def _without_surrogates(text: str, instead: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join(instead if "\ud800" <= c <= "\udfff" else c for c in text)
    return text


def _icu(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError('IcuTokenizer needs icu4py: pip install ".[icu]" in a checkout') from error
