"""Texts to tokens, as the n-gram guard and the stores read them (R23).

NFKC, casefold, runs of letters, numbers and marks; in scripts that write no spaces every grapheme is a token. Another
tokenizer may stand in everywhere: see `Tokenizer`, and `tokenizers` for two.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final, Protocol

DEFAULT_TOKENIZER: Final = "nfkc-casefold-1"
"""Name of `tokenize`; it changes when the tokens of any text do."""

_LONG_RUN: Final = 256
_PROBE: Final = 32
_PIECE: Final = 2048
"""Characters of a text that are worked on at a time. Python's string functions and `re` keep all other threads waiting
until they return, so no call may get a long text whole."""

PIECE: Final = 1 << 16
"""Characters that `pieces` puts into one piece where it can."""
_cut_after = re.compile(r"""[\s.,;:!?()\[\]{}'"/\\|_…、。，！？-]""").search  # no mark joins these, as it joins = and >
_cut_before = re.compile("[\u0e01-\u0e2e\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff]").search  # each starts a token

_SPACELESS: Final = (
    (0x0E00, 0x0E7F),  # Thai
    (0x0E80, 0x0EFF),  # Lao
    (0x0F00, 0x0FFF),  # Tibetan
    (0x1000, 0x109F), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F), (0x116D0, 0x116FF),  # Myanmar
    (0x1780, 0x17FF), (0x19E0, 0x19FF),  # Khmer
    (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3021, 0x3029), (0x3038, 0x303C), (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x16FE2, 0x16FE3), (0x16FF0, 0x16FF6), (0x20000, 0x3FFFD),
    (0x3031, 0x3035), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F), (0x1AFF0, 0x1B16F),  # kana
)  # fmt: skip  # fmt: skip

_ascii_tokens = re.compile("[0-9a-z]+").findall
_no_ascii_token = re.compile("[^0-9a-z]").search
_beyond_bmp = re.compile("[\U00010000-\U0010ffff]").search


class Tokenizer(Protocol):
    """What cuts a text into tokens: any callable that takes a str and returns a sequence of str.

    It must have a name, its attribute `name` or else its `__qualname__`, which is kept wherever its tokens are:
    give another name to whatever can give other tokens (other settings, other versions). Equal texts must give
    equal tokens. Tokens may hold any characters.
    """

    def __call__(self, text: str, /) -> Sequence[str]: ...


class Search(Protocol):
    """The `search` of a compiled pattern."""

    def __call__(self, text: str, start: int, /) -> re.Match[str] | None: ...


def spans(text: str, cut: Search) -> Iterator[tuple[int, int]]:
    """Where pieces of a text start and stop, some thousand characters each; none for an empty text.

    cut: finds the next place where the text may be cut: at the start of the match. Without one the rest is one piece.
    """
    start, size = 0, len(text)
    while start < size:
        found = cut(text, start + _PIECE) if size - start > _PIECE else None
        stop = size if found is None else found.start()
        yield start, stop
        start = stop


def _unicode_tokens(text: str) -> list[str]:
    find = _token_patterns()[_beyond_bmp(text) is not None]
    if len(text) <= _PIECE:
        return find(text)
    return [token for start, stop in spans(text, _between_tokens()) for token in find(text, start, stop)]


def folded(text: str) -> str:
    """NFKC, then casefold."""
    if len(text) <= _PIECE:
        return unicodedata.normalize("NFKC", _tamed(text)).casefold()
    parts = (text[start:stop] for start, stop in spans(text, _starters()))
    return "".join(unicodedata.normalize("NFKC", _tamed(part)).casefold() for part in parts)


@cache
def _starters() -> Search:
    """Finds a character that no character before it takes part in the normal form of: what is before it and what
    begins with it can be normalised apart."""
    pairs = (unicodedata.decomposition(chr(code)).split() for code in range(0x10000))
    joined = {int(pair[1], 16) for pair in pairs if len(pair) == 2 and not pair[0].startswith("<")}
    joined |= set(range(0x1160, 0x1200))  # vowels and finals of Hangul, composed by rule
    firsts = ((code, unicodedata.normalize("NFKD", chr(code))[0]) for code in range(0x10000))
    return re.compile(
        _character_class([c for c, first in firsts if not unicodedata.combining(first) and ord(first) not in joined])
    ).search


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
    long_run = f"(?<!{mark}){mark}{{{_LONG_RUN},}}+"  # looked for where a run begins, not at each of its marks
    return re.compile(f"{mark}{{{_LONG_RUN // _PROBE}}}").search, re.compile(long_run).sub


@cache
def _token_patterns() -> tuple[Callable[..., list[str]], Callable[..., list[str]]]:
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


@cache
def _between_tokens() -> Search:
    """Finds a character that no token before it holds."""
    low = _character_classes(range(0x10000))[2].removeprefix("[")
    high = _character_classes(range(0x10000, 0x40000))[0]
    return re.compile(f"[^\U00010000-\U0010ffff{low}|(?=[\U00010000-\U0010ffff]){high}").search


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
    plain = ascii_form(text)
    if not plain.isascii():
        return _unicode_tokens(folded(text))
    if len(plain) <= _PIECE:
        return _ascii_tokens(plain.lower())
    plain = plain.lower()
    return [token for start, stop in spans(plain, _no_ascii_token) for token in _ascii_tokens(plain, start, stop)]


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """The text in pieces of about `size` characters: the tokens of the pieces, one after the other, are the text's.

    A piece ends after a space or a punctuation mark, or before a letter of a script without spaces. A run without any
    of these stays whole.
    """
    start = 0
    while len(text) - start > size:
        end = start + size
        cut = max(text.rfind(" ", start, end), text.rfind("\n", start, end)) + 1 or _next_cut(text, end, size)
        if cut == len(text):
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _next_cut(text: str, place: int, size: int) -> int:
    """The first place from this one on where a text may be cut; its length where there is none."""
    for at in range(place, len(text), size):
        after, before = _cut_after(text, at - 1, at + size), _cut_before(text, at, at + size)
        if after or before:
            return min(after.end() if after else len(text), before.start() if before else len(text))
    return len(text)


def ascii_form(text: str) -> str:
    """The text, where possible as ASCII text of the same tokens: most others hold but dashes and curly quotes."""
    if text.isascii():
        return text
    parts = []
    for start in range(0, len(text), _PIECE):
        plain = _parting()(" ", text[start : start + _PIECE])
        if not plain.isascii():
            return text
        parts.append(plain)
    return "".join(parts)


@cache
def _parting() -> Callable[[str, str], str]:
    """Puts a string in place of every character beyond ASCII that parts tokens and leaves none itself."""
    folded = ((code, unicodedata.normalize("NFKC", chr(code)).casefold()) for code in range(0x80, 0x10000))
    parting = [code for code, text in folded if not any(unicodedata.category(c)[0] in "LNM" for c in text)]
    return re.compile(_character_class(parting)).sub


def tokenizer_name_of(tokenizer: Tokenizer | None) -> str:
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
        raise ValueError(f"tokenizer: the name {name!r} belongs to cdr_kernel.tokenize")
    return name


def checked_tokens(tokens: Any) -> Sequence[str]:
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise TypeError(f"tokenizer: expected it to return a list of str, got {type(tokens).__name__}")
    for position, token in enumerate(tokens):
        if not isinstance(token, str):
            raise TypeError(f"tokenizer: expected a list of str, got {type(token).__name__} at position {position}")
    checked: Sequence[str] = tokens
    return checked
