"""The n-gram guard of §5: how many n-grams of a text were already written.

It counts over the `TokenRows` of `text._token_hashes`. An n-gram's hash is a 64-bit polynomial over its tokens' hashes,
rolled over the row for any n when it is counted. Two 6-grams in a session that differ share a hash with a chance below
1e-7 per window at a million facts; `exact=True` compares the tokens themselves.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cdr_kernel import _C
from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.concurrency._steps import finish
from cdr_kernel.spec.constants import NGRAM_SIZE
from cdr_kernel.text._token_hashes import (
    PROJECT_KEY,
    TOKEN_BYTES,
    HashKey,
    TokenBlock,
    TokenHasher,
    TokenRows,
    checked_texts,
    take_tokens,
)
from cdr_kernel.text._tokenize import DEFAULT_TOKENIZER, Tokenizer, checked_tokens, tokenize

__all__ = [
    "DEFAULT_TOKENIZER",
    "MAX_N",
    "PROJECT_KEY",
    "TOKEN_BYTES",
    "Generation",
    "HashKey",
    "NGram",
    "NGramGuard",
    "TokenBlock",
    "TokenHasher",
    "TokenRows",
    "Tokenizer",
    "repetition",
    "take_tokens",
    "tokenize",
]

NGram: TypeAlias = tuple[str, ...]
MAX_N: Final = 32
_MAX_LAYERS: Final = 64


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


@dataclass(frozen=True, eq=False)
class _Window:
    """What one update wrote: its distinct n-grams, ascending, and its tokens where they are kept."""

    hashes: NDArray[np.uint64]
    tokens: tuple[str, ...] | None
    grams: frozenset[NGram] | None


@dataclass(frozen=True, eq=False)
class _Layer:
    """What one update added. Layers share no n-gram, so counts over them add up."""

    hashes: _C.HashSet
    grams: frozenset[NGram] | None


@dataclass(frozen=True, eq=False)
class _Blacklist:
    """One state of a guard, never changed. windows only where an exact or a bounded guard needs them."""

    hashes: _C.HashSet
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

    Unless `exact`, the guard keeps hashes only, each once. Any number of threads may read while others update: an
    update makes a new blacklist and swaps it in, so each call sees one state from start to end.

    Args:
        n: Tokens in an n-gram, 1 to 32. The specification's is 6.
        tokenizer: That of the store, see `TokenHasher`. A tokenizer with settings needs a `name` that tells the
            settings apart.
        hash_key: That of the store, see `TokenHasher`.
        exact: Whether to compare the tokens themselves if hashes match. The guard then keeps the tokens of all outputs,
            and tokenises facts with a match again.
        max_ngrams: The most distinct n-grams to keep, at least 1. The oldest windows are forgotten first, as a whole.
            Of a single output that has more, the last n-grams stay. An n-gram counts as written by every window that
            wrote it. None forgets nothing: a window of 2,000 words adds some 2,000 n-grams, each 36 to 72 bytes here
            (see `nbytes`).

    Raises:
        ValueError: For n outside 1 to 32, and for a tokenizer without a name.
        TypeError: For an argument of a wrong type.

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
    ) -> None:
        self._n = _checked_n(n)
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
        self._frozen = False
        self._lock = Lock()
        self._state = self._empty()

    def _empty(self) -> _Blacklist:
        return _Blacklist(_C.HashSet(), frozenset() if self._exact else None)

    @classmethod
    def from_hashes(
        cls,
        hashes: NDArray[np.uint64] | Iterable[int],
        *,
        n: int = NGRAM_SIZE,
        tokenizer: Tokenizer | None = None,
        hash_key: HashKey | None = None,
    ) -> NGramGuard:
        """A guard that holds these n-grams, as `hashes` gave them: [H] uint64 or ints, in any order.

        n, tokenizer and hash_key must be those of the guard that made them. Raises TypeError for another dtype,
        ValueError for another rank or ints outside [0, 2**64), and what the constructor raises.
        """
        guard = cls(n, tokenizer=tokenizer, hash_key=hash_key)
        guard.add(guard._window(_checked_hashes(hashes)))
        return guard

    def state(self) -> dict[str, Any]:
        """All of the guard but its tokenizer and its key, for `from_state`.

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
    ) -> NGramGuard:
        """The guard that gave this state, with the tokenizer and the key it had.

        Raises ValueError where these are others, and ValueError or TypeError for what `state` does not give.
        """
        fields = {"n", "tokenizer", "key", "exact", "max_ngrams", "hashes", "tokens"}
        if set(state) != fields:
            raise ValueError(f"the guard must have the fields {sorted(fields)}, got {sorted(state)}")
        guard = cls(
            state["n"], tokenizer=tokenizer, hash_key=hash_key, exact=state["exact"], max_ngrams=state["max_ngrams"]
        )
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
            guard.add(guard._window(_checked_hashes(hashes)))
        for tokens in state["tokens"] or ():
            guard.add(guard._window_of(checked_tokens(tokens)))
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
        """Bytes of memory that the blacklist takes (estimated for the tokens of exact ones)."""
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
        return _restored, (self.state(), tokenizer, self._hasher.hash_key)

    def add(self, window: _Window) -> None:
        """Blacklists what `window_steps` has read, of this guard or of one with the same settings."""
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
            added = _Layer(_C.HashSet().union(fresh), grams)
            after = _Blacklist(state.hashes.union(fresh), state.grams | grams, (*state.layers, added), kept)
        else:
            fresh = window.hashes[~state.hashes.contains(window.hashes)]
            if not len(fresh):
                return _Blacklist(state.hashes, None, state.layers, kept)
            total = state.hashes.union(fresh)
            added = _Layer(_C.HashSet().union(fresh) if state.layers else total, None)
            after = _Blacklist(total, None, (*state.layers, added), kept)
        if self._max is not None and len(after) > self._max:
            return self._newest(kept)
        if len(after.layers) > _MAX_LAYERS:
            half = _MAX_LAYERS // 2
            merged = _merged(after.layers[:half], _C.HashSet())
            after = _Blacklist(after.hashes, after.grams, (merged, *after.layers[half:]), after.windows)
        return after

    def _newest(self, windows: tuple[_Window, ...]) -> _Blacklist:
        """A state of as many of the last windows as max_ngrams lets in."""
        hashes = np.zeros(0, np.uint64)
        grams: frozenset[NGram] = frozenset()
        first = len(windows)
        for window in reversed(windows):
            more, more_grams = _distinct(np.concatenate([hashes, window.hashes])), grams | (window.grams or frozenset())
            if (len(more_grams) if self._exact else len(more)) > (self._max or 0):
                break
            hashes, grams, first = more, more_grams, first - 1
        total = _C.HashSet().union(hashes)
        own = grams if self._exact else None
        return _Blacklist(total, own, (_Layer(total, own),), windows[first:])

    def _hashes_of(self, grams: Iterable[NGram]) -> NDArray[np.uint64]:
        tokens = [token for gram in grams for token in gram]
        _, packed = self._hasher.hashed_tokens(tokens)
        offsets = np.arange(0, len(tokens) + 1, self._n, dtype=np.int64)
        return self._ngrams(((offsets, packed),))[1]

    def _window(self, hashes: NDArray[np.uint64]) -> _Window:
        """hashes: in the order they were written, repeats and all."""
        if self._max is not None and len(hashes) > self._max:
            newest, first = np.unique(hashes[::-1], return_index=True)
            return _Window(np.sort(newest[np.argsort(first)[: self._max]]), None, None)
        return _Window(_distinct(hashes), None, None)

    def _window_of(self, tokens: Sequence[str]) -> _Window:
        written = tuple(tokens)
        grams = _grams(written, self._n)
        last = list(dict.fromkeys(reversed(grams)))[: self._max]
        hashes = self._hashes_of(last) if last else np.zeros(0, np.uint64)
        return _Window(_distinct(hashes), written, frozenset(last))

    def _ngrams(self, blocks: tuple[TokenBlock, ...]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        return _C.token_ngrams(blocks, self._n)

    def freeze(self) -> None:
        """Refuses every change from now on, as the guard of a session does. `copy` gives a guard that can change."""
        self._frozen = True

    def _check_not_frozen(self) -> None:
        if self._frozen:
            raise TypeError("the guard of a session cannot be changed: change guard.copy(), or call session.update")

    def update(self, text: str) -> None:
        """Blacklists every n-gram of a window's output (§5.1). Raises TypeError if text is not a str, and for the guard
        of a session, which only the session changes."""
        self._check_not_frozen()
        self.add(finish(self.window_steps(text)))

    def window_steps(self, text: str) -> Generator[None, None, _Window]:
        """The n-grams of a window's output for `add`, in steps (see `concurrency._steps`). Blacklists nothing yet.

        Raises TypeError if text is not a str.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected str, got {type(text).__name__}")
        if self._exact:
            return self._window_of(self._hasher.tokens(text))
        block = yield from self._hasher.hashed_steps(text)
        yield
        hashes = self._ngrams((block,))[1]
        yield
        return self._window(hashes)

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
        hashes = self._ngrams((self._hasher.hashed_tokens(tokens),))[1]
        known = state.hashes.contains(hashes) if len(grams) else hashes
        found: dict[int, tuple[int, NGram]] = {}
        for i in np.flatnonzero(known).tolist():
            if state.grams is None or grams[i] in state.grams:
                found.setdefault(int(hashes[i]), (i, grams[i]))
        return list(found.values())

    def token_rows(self, texts: Sequence[str]) -> TokenRows:
        """The texts as `overlap_rows` takes them. They depend on the tokenizer and the key, not on n and not on what
        is blacklisted, so each text needs this once. Raises TypeError as `overlap` does."""
        return self._hasher.rows(texts)

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
        layer = _merged(added, _C.HashSet())
        return self._counts(layer.hashes, layer.grams, tokens, rows)

    def _check_tokens(self, tokens: TokenRows) -> None:
        if not isinstance(tokens, TokenRows):
            raise TypeError(f"tokens: expected TokenRows, got {type(tokens).__name__}")
        self._hasher.check(tokens, "the tokens of the facts")

    def _counts(
        self, hashes: _C.HashSet, grams: frozenset[NGram] | None, tokens: TokenRows, rows: NDArray[np.int64] | None
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
        guard.__dict__.update(self.__dict__, _lock=Lock(), _frozen=False)
        return guard

    def merge(self, other: NGramGuard) -> None:
        """Adds every n-gram of another guard; its windows count as the newer ones.

        Raises TypeError for anything else and as `update` does, ValueError for a guard of another n, tokenizer, key or
        setting.
        """
        self._check_not_frozen()
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
        """Forgets every n-gram (§2.7, reset). Raises TypeError as `update` does."""
        self._check_not_frozen()
        with self._lock:
            self._state = self._empty()


def _generation(state: _Blacklist) -> Generation:
    return Generation(state.layers[-1] if state.layers else None)


def _distinct(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each hash once, ascending. By sorting, since the hash table of `np.unique` has a public hash function."""
    ascending = np.sort(hashes)
    new = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    return ascending[new]


def _merged(layers: Sequence[_Layer], empty: _C.HashSet) -> _Layer:
    if len(layers) == 1:
        return layers[0]
    hashes = empty.union(np.concatenate([layer.hashes.values() for layer in layers]))
    if layers[0].grams is None:
        return _Layer(hashes, None)
    return _Layer(hashes, frozenset().union(*(layer.grams or () for layer in layers)))


def _grams(tokens: Sequence[str], n: int) -> list[NGram]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def _restored(state: dict[str, Any], tokenizer: Tokenizer | None, hash_key: HashKey | None) -> NGramGuard:
    return NGramGuard.from_state(state, tokenizer=tokenizer, hash_key=hash_key)


def repetition(text: str, history: Sequence[str], n: int = NGRAM_SIZE, *, tokenizer: Tokenizer | None = None) -> float:
    """How much of a text repeats earlier texts, in [0, 1] (the table of §1.1).

    This is the share of the text's n-grams that occur in a text of the history. Each position counts, repeats included.
    What a text repeats of itself does not count. N-grams never reach from one text into the next. A text of fewer than
    n tokens has 0.0.

    Args:
        text: The text.
        history: The outputs of the windows before.
        n: 1 to 32. 4 sees shorter borrowings than the guard's 6.
        tokenizer: See `Tokenizer`. None is `tokenize`.

    Raises:
        TypeError: For a text that is no str, or a history that is no sequence of str.
        ValueError: For n and tokenizer as in `NGramGuard`.

        >>> repetition("every pod gets its own address", ["Every pod gets an address. Its own address."], n=2)
        0.8
    """
    if not isinstance(text, str):
        raise TypeError(f"text: expected str, got {type(text).__name__}")
    guard = NGramGuard(n, tokenizer=tokenizer)
    _, written = guard.ngram_hashes(checked_texts(history))
    _, hashes = guard.ngram_hashes([text])
    if not len(hashes):
        return 0.0
    return int(np.count_nonzero(_C.HashSet().union(written).contains(hashes))) / len(hashes)
