"""Words of the facts: BM25 over a store's texts, kept with it as it grows.

    index = LexicalIndex()
    index.bm25(store.view(), ["cluster DNS"])                # [(rows, scores)], facts without a common word left out

Postings are added in segments, as facts are, and segments of like size are merged, so that taking in n facts one by
one costs O(n log n). Removed facts are masked; the numbers are those of an index made anew of the facts that are left.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.spec.constants import BM25_B, BM25_K1, NO_DEVIATION, STOP_WORDS
from cdr_kernel.store._fact_store import StoreView
from cdr_kernel.text._tokenize import spans
from cdr_kernel.validation._arrays import Float64, Int64

_UNIT = 1074  # the least float64 is 2^-1074
_TAKEN = 21  # digits of a number summed at a time
_PAIRS = 1 << 22  # of a count and a length, as many as are told apart
_CHUNK = 65536  # texts taken in at a time
_camel = re.compile(r"([a-z])([A-Z])")
_between_words = re.compile("(?<=[^0-9A-Za-z\u212a])|(?<=[a-z])(?=[A-Z])").search  # lower() makes a k of U+212A
_suffix = re.compile(r"(ies|es|s|ing|ed)\b")
_word = re.compile(r"[A-Za-z][A-Za-z0-9]+")


def words(text: str) -> list[str]:
    """The words of a text that tell it from others, in order, repeats kept.

    camelCase is split, letters are lowered, a final ies, es, s, ing or ed is dropped, then runs of ASCII letters and
    digits that begin with a letter and have at least two characters are words unless they are in STOP_WORDS. Made for
    English; a text without such runs has none and gets no lexical evidence.
    """
    found = []
    for start, stop in spans(text, _between_words):
        plain = _suffix.sub("", _camel.sub(r"\1 \2", text[start:stop]).lower())
        found += [word for word in _word.findall(plain) if word not in STOP_WORDS]
    return found


@dataclass(frozen=True, eq=False)
class Postings:
    """Facts and their counts by term. terms: int64 [T] ascending; the postings of terms[i] stand at
    starts[i]:starts[i + 1] of rows (ascending) and counts."""

    terms: Int64
    starts: Int64
    rows: Int64
    counts: Int64

    @classmethod
    def of(cls, terms: Int64, rows: Int64, counts: Int64) -> Postings:
        """From one entry per (term, row), in any order."""
        order = np.lexsort((rows, terms))
        return cls._sorted(terms[order], rows[order], counts[order])

    @classmethod
    def _sorted(cls, terms: Int64, rows: Int64, counts: Int64) -> Postings:
        firsts = np.flatnonzero(np.diff(terms, prepend=-1))
        return cls(terms[firsts], np.append(firsts, len(terms)), rows, counts)

    def merged(self, later: Postings) -> Postings:
        """Both together; all rows of `later` come after these."""
        terms = np.concatenate([np.repeat(p.terms, np.diff(p.starts)) for p in (self, later)])
        order = np.argsort(terms, kind="stable")  # linear, of two runs
        rows, counts = (
            np.concatenate([self.rows, later.rows])[order],
            np.concatenate([self.counts, later.counts])[order],
        )
        return Postings._sorted(terms[order], rows, counts)

    def find(self, term: int) -> tuple[Int64, Int64]:
        """(rows, counts) of a term."""
        at = int(np.searchsorted(self.terms, term))
        if at == len(self.terms) or self.terms[at] != term:
            return self.rows[:0], self.counts[:0]
        here = slice(int(self.starts[at]), int(self.starts[at + 1]))
        return self.rows[here], self.counts[here]


class WordCounts(NamedTuple):
    """How many facts there are, how many words in them, and in how many of them each word is (missing: in none)."""

    facts: int
    length: int
    frequency: dict[str, int]

    def plus(self, other: WordCounts) -> WordCounts:
        """Of both sets of facts."""
        frequency = Counter(self.frequency)
        frequency.update(other.frequency)
        return WordCounts(self.facts + other.facts, self.length + other.length, dict(frequency))


@dataclass(frozen=True, eq=False)
class _Indexed:
    """What an index holds of one layout of a store: rows 0 to len(lengths). terms only ever grows."""

    layout: int
    terms: dict[str, int]
    segments: tuple[Postings, ...]
    lengths: Int64  # words in each text


class LexicalIndex:
    """BM25 postings of one store's texts, brought up to date by every question. Safe to share among threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._indexed = _Indexed(-1, {}, (), np.zeros(0, np.int64))

    def _upto(self, view: StoreView) -> _Indexed:
        with self._lock:
            held = self._indexed
            if held.layout != view.layout:
                held = _Indexed(view.layout, {}, (), np.zeros(0, np.int64))
            for start in range(len(held.lengths), view.rows, _CHUNK):
                texts = view.texts(range(start, min(start + _CHUNK, view.rows)))
                added, lengths = _postings(held.terms, texts, start)
                segments = [*held.segments, added]
                while len(segments) > 1 and 2 * len(segments[-1].rows) >= len(segments[-2].rows):
                    last = segments.pop()
                    segments[-1] = segments[-1].merged(last)
                held = _Indexed(held.layout, held.terms, tuple(segments), np.concatenate([held.lengths, lengths]))
            self._indexed = held
            return held

    def counts(self, view: StoreView, queries: Sequence[str]) -> WordCounts:
        """What BM25 of these queries needs to know of all facts of the view that are not removed."""
        held = self._upto(view)
        return _counts(held, view, dict.fromkeys(word for query in queries for word in words(query)))

    def bm25(
        self,
        view: StoreView,
        queries: Sequence[str],
        *,
        counts: WordCounts | None = None,
        k1: float = BM25_K1,
        b: float = BM25_B,
    ) -> list[tuple[Int64, Float64]]:
        """For each query the facts that share a word with it: (rows ascending, scores > 0).

        Equivalent to, for a fact of length |f| words and the view's facts that are not removed (N of them):
        ``sum(idf(w) * tf(w, f) * (k1 + 1) / (tf(w, f) + k1 * (1 - b + b * |f| / mean length)))`` over the query's
        distinct words w, with ``idf(w) = ln(1 + (N - df(w) + 0.5) / (df(w) + 0.5))``. counts: where the view is a part
        of more facts, the counts of them all.
        """
        held = self._upto(view)
        if counts is None:
            counts = self.counts(view, queries)
        facts = counts.facts
        results = []
        for query in queries:
            score = np.zeros(view.rows)
            for word in dict.fromkeys(words(query)):
                rows, times = _found(held, word, view)
                if not len(rows):
                    continue
                frequency = counts.frequency[word]
                idf = np.log1p((facts - frequency + 0.5) / (frequency + 0.5))
                relative = held.lengths[rows] * (facts / max(counts.length, 1))
                score[rows] += idf * times * (k1 + 1.0) / (times + k1 * (1.0 - b + b * relative))
            results.append(_sparse(score))
        return results

    def term_counts(self, view: StoreView, terms: Sequence[str]) -> WordCounts:
        """``counts`` of words as `words` leaves them."""
        held = self._upto(view)
        return _counts(held, view, terms)

    def weighted(
        self, view: StoreView, terms: Sequence[tuple[str, float]], counts: WordCounts
    ) -> tuple[Int64, Float64]:
        """``bm25`` for words as `words` leaves them, each with a weight >= 0: (rows ascending, scores > 0)."""
        held = self._upto(view)
        score = np.zeros(view.rows)
        for term, weight in terms:
            rows, times = _found(held, term, view)
            if len(rows):
                score[rows] += weight * _impact(times, held.lengths[rows], _idf([term], counts), counts)
        return _sparse(score)

    def sums(self, view: StoreView, term: str, counts: WordCounts) -> SparseSums:
        """The sums of what ``weighted`` gives the facts for this one word, with weight 1.

        It depends on how often the word is in a fact and how long that is, so it is computed once for each such pair.
        """
        held = self._upto(view)
        rows, times = _found(held, term, view)
        if not len(rows):
            return SparseSums(0, 0)
        lengths, often = held.lengths[rows], times.astype(np.int64)
        longest = int(lengths.max()) + 1
        if longest * (int(often.max()) + 1) > _PAIRS:
            return SparseSums.of(_impact(times, lengths, _idf([term], counts), counts))
        repeats = np.bincount(often * longest + lengths)
        pairs = np.flatnonzero(repeats)
        impact = _impact((pairs // longest).astype(np.float64), pairs % longest, _idf([term], counts), counts)
        return SparseSums.of(impact, repeats[pairs].astype(np.float64))


def _sparse(score: Float64) -> tuple[Int64, Float64]:
    """Where it is above 0, and there."""
    rows = np.flatnonzero(score > 0.0)
    return rows, score[rows]


def above_mean(
    texts: Sequence[Sequence[str]], terms: Sequence[str], counts: WordCounts, sums: Sequence[SparseSums]
) -> tuple[tuple[str, float], ...]:
    """Of these terms, by how much the mean of what BM25 gives these texts, split into words, exceeds that of all facts.

    sums: of what it gives all facts, by term. Those that do not exceed it are left out.
    """
    impacts: dict[str, list[float]] = {term: [] for term in terms}
    for text in texts:
        times = {term: n for term, n in Counter(text).items() if term in impacts}
        impact = _impact(np.fromiter(times.values(), np.float64), len(text), _idf(times, counts), counts)
        for term, value in zip(times, impact.tolist(), strict=True):
            impacts[term].append(value)
    found = []
    for term, total in zip(terms, sums, strict=True):
        more = math.fsum(impacts[term]) / len(texts) - total.mean(counts.facts)
        if more > NO_DEVIATION:
            found.append((term, more))
    return tuple(found)


def _idf(terms: Iterable[str], counts: WordCounts) -> Float64:
    """BM25's weight of each of these words."""
    frequencies = (counts.frequency[term] for term in terms)
    return np.array([np.log1p((counts.facts - n + 0.5) / (n + 0.5)) for n in frequencies], np.float64)


def _impact(times: Float64, lengths: Int64 | int, idf: Float64 | float, counts: WordCounts) -> Float64:
    """What BM25 gives facts of so many words for one of this weight that is so many times in them."""
    relative = lengths * (counts.facts / max(counts.length, 1))
    impact: Float64 = idf * times * (BM25_K1 + 1.0) / (times + BM25_K1 * (1.0 - BM25_B + BM25_B * relative))
    return impact


def _found(held: _Indexed, word: str, view: StoreView) -> tuple[Int64, Float64]:
    """The view's facts with a word, removed ones left out, and how often it is in each."""
    found = _postings_of(held, word)
    rows = np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in found)])
    times = np.concatenate([np.zeros(0), *(times for _, times in found)])
    if len(rows) and (rows[-1] >= view.rows or len(view) < view.rows):
        keep = rows < view.rows
        keep[keep] = view.alive[rows[keep]]
        rows, times = rows[keep], times[keep]
    return rows, times


def _postings_of(held: _Indexed, word: str) -> list[tuple[Int64, Int64]]:
    """(rows, counts) of a word in each segment."""
    term = held.terms.get(word)
    return [] if term is None else [segment.find(term) for segment in held.segments]


def _counts(held: _Indexed, view: StoreView, terms: Iterable[str]) -> WordCounts:
    """What is known of these words, in the view's facts that are not removed."""
    whole = len(view) == view.rows == len(held.lengths)
    frequency = {}
    for term in terms:
        n = sum(len(rows) for rows, _ in _postings_of(held, term)) if whole else len(_found(held, term, view)[0])
        if n:
            frequency[term] = n
    return WordCounts(len(view), int(held.lengths[: view.rows].sum(where=view.alive)), frequency)


def _postings(known: dict[str, int], texts: Sequence[str], start: int) -> tuple[Postings, Int64]:
    terms: list[int] = []
    counts: list[int] = []
    sizes = np.zeros(len(texts), np.int64)
    lengths = np.zeros(len(texts), np.int64)
    for i, text in enumerate(texts):
        found = Counter(words(text))
        terms += [known.setdefault(word, len(known)) for word in found]
        counts += found.values()
        sizes[i], lengths[i] = len(found), found.total()
    rows = np.repeat(np.arange(start, start + len(texts)), sizes)
    return Postings.of(np.array(terms, np.int64), rows, np.array(counts, np.int64)), lengths


class SparseSums(NamedTuple):
    """The exact sum and sum of squares of some numbers, in units of 2^-1074: those of two sets of numbers add up."""

    total: int
    squares: int

    @classmethod
    def of(cls, values: Float64, repeats: Float64 | None = None) -> SparseSums:
        """values: float64 [n], magnitudes 0 or in 2^±200; repeats: how often each is there, integers, default once."""
        if not np.isfinite(values).all():
            raise ValueError("values: expected finite numbers")
        halves = values * (2.0**27 + 1.0)  # the upper and lower halves of the digits, whose products are exact
        upper = halves - (halves - values)
        lower = values - upper
        square = values * values
        lost = ((upper * upper - square) + 2.0 * upper * lower) + lower * lower
        return cls(_exact_sum(values, repeats), _exact_sum(square, repeats) + _exact_sum(lost, repeats))

    def plus(self, other: SparseSums) -> SparseSums:
        """Of both sets."""
        return SparseSums(self.total + other.total, self.squares + other.squares)

    def mean(self, count: int) -> float:
        """The mean of `count` numbers of which the others are 0."""
        return self.total / (count << _UNIT)

    def z(self, count: int) -> tuple[float, float]:
        """(scale, shift) of the z-score over `count` numbers of which the others are 0; (0, 0) for no spread.

        The deviation is that of the population.
        """
        if not self.total and not self.squares:
            return 0.0, 0.0
        unit = 1 << _UNIT
        mean = self.total / (count * unit)
        variance = (count * self.squares * unit - self.total**2) / (count * unit) ** 2
        deviation = math.sqrt(variance)
        if deviation <= NO_DEVIATION:
            return 0.0, 0.0
        return 1.0 / deviation, -mean / deviation


def _exact_sum(values: Float64, repeats: Float64 | None = None) -> int:
    """The sum in units of 2^-1074, not rounded, of up to 2^32 numbers (repeats counted) whose magnitudes are 0 or
    within 2^900 of each other.

    The digits are taken off from the top, 21 at a time: integers of at most 2^21, whose sum float64 holds exactly in
    any order. What is left is a multiple of the last digit and smaller than before, so it is exact too.
    """
    total, largest = 0, float(np.abs(values).max(initial=0.0))
    exponent = math.frexp(largest)[1]
    left = np.ldexp(values, -exponent)  # magnitudes below 1
    while left.any():
        left = left * 2.0**_TAKEN
        top = np.rint(left)
        left -= top
        exponent -= _TAKEN
        taken = int(top.sum() if repeats is None else top @ repeats)
        shift = exponent + _UNIT
        total += taken << shift if shift >= 0 else taken >> -shift  # below 2^-1074 there are zeros alone
    return total


def z_of_sparse(values: Float64, count: int) -> tuple[float, float]:
    """(scale, shift) of the z-score over `count` numbers of which all but `values` are 0; see `SparseSums.z`."""
    return SparseSums.of(values).z(count)


class TfIdf:
    """Cosines of texts by their words: the judge that uses neither labels nor embeddings.

    Term weights are (1 + ln count) * (1 + ln((1 + N) / (1 + df))), each text a unit vector of them.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = len(texts)
        self._terms: dict[str, int] = {}
        entries = [Counter(words(text)) for text in texts]
        terms = [self._terms.setdefault(word, len(self._terms)) for found in entries for word in found]
        counts = [count for found in entries for count in found.values()]
        rows = np.repeat(np.arange(len(texts)), [len(found) for found in entries])
        self._postings = Postings.of(np.array(terms, np.int64), rows, np.array(counts, np.int64))
        p = self._postings
        df = np.diff(p.starts)
        self._idf = 1.0 + np.log((1.0 + self._texts) / (1.0 + df))  # terms are 0, 1, 2, ...: each is in some text
        weights = (1.0 + np.log(p.counts)) * np.repeat(self._idf, df)
        norms = np.sqrt(np.bincount(p.rows, weights**2, minlength=self._texts))
        self._weights: npt.NDArray[Any] = weights / norms[p.rows]

    def similarity(self, queries: Sequence[str]) -> Float64:
        """[texts, queries] float64 in [0, 1]; 0 without a common word."""
        out = np.zeros((self._texts, len(queries)))
        p = self._postings
        for j, query in enumerate(queries):
            found = {self._terms[w]: 1.0 + np.log(n) for w, n in Counter(words(query)).items() if w in self._terms}
            norm = np.sqrt(sum((tf * self._idf[term]) ** 2 for term, tf in found.items()))
            for term, tf in found.items():
                here = slice(p.starts[term], p.starts[term + 1])
                out[p.rows[here], j] += self._weights[here] * (tf * self._idf[term] / norm)
        return out
