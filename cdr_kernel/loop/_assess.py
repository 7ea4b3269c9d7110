"""What a finished window achieved: its output and the sub-queries in, a `WindowReport` out.

A stand-in for the specification's DPE Stage 8: it counts words per sub-query and says nothing about their
quality.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdr_kernel.concurrency._steps import finish
from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.session import SubQuery, WindowReport, depth_from_words
from cdr_kernel.store import FactStore
from cdr_kernel.store._fact_store import StoreView, view_of
from cdr_kernel.text import tokenize
from cdr_kernel.text._tokenize import PIECE, pieces
from cdr_kernel.validation._arrays import as_array, scale_rows
from cdr_kernel.validation._scalars import check_integer, check_number, check_order

DEFAULT_EXPECTED_WORDS = 200
THRESHOLD_PERCENTILE = 95.0
SAMPLE_ROWS = 20_000
CHUNK_ROWS = 4_096
_STEP_WORK = 1_024  # sentences and the like between two steps
_GROUP = 64  # sub-queries whose cosines are held at once

_LINE_END = re.compile(r"[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")  # of str.splitlines
_LIST_MARK = re.compile(r"(?:[-*+•>]|#{1,6}|\d{1,3}[.)])\s+")
_SENTENCE_END = re.compile(r"[.!?…。！？](?:(?<=[。！？])|[\"'”’)\]]?\s+)")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text: split at line breaks, after . ! ? … and a space, and after 。！？.

    List and heading marks at the start of a line are dropped, and so is what has no token in it.
    """
    return [part for part in sentence_candidates(text) if has_token(part)]


def has_token(text: str) -> bool:
    """Whether there is a token in a text: what has none is no sentence."""
    return any(tokenize(piece) for piece in pieces(text))


def sentence_candidates(text: str) -> Iterator[str]:
    """What is a sentence of a text if it has a token, one after the other; "" where there is none."""
    for block in _blocks(text, _LINE_END):
        for line in block.splitlines():
            line = line.lstrip()
            mark = _LIST_MARK.match(line)
            for piece in _blocks(line if mark is None else line[mark.end() :], _SENTENCE_END):
                start = 0
                for end in _SENTENCE_END.finditer(piece):
                    yield piece[start : end.end()].strip()
                    start = end.end()
                yield piece[start:].strip()


def _blocks(text: str, ends: re.Pattern[str]) -> Iterator[str]:
    """The text in parts of `PIECE` characters or more, each up to where the pattern matches next."""
    start, at = 0, PIECE
    while at < len(text):
        end = ends.search(text, at, at + PIECE)
        if end is None:
            at += PIECE
            continue
        yield text[start : end.end()]
        start, at = end.end(), end.end() + PIECE
    yield text[start:]


def similarity_thresholds(store: FactStore | StoreView, sub_queries: Sequence[SubQuery]) -> dict[str, float]:
    """Per sub-query id, the 95th percentile of the store's cosines to it: what counts as being about it.

    Taken over all facts, or 20,000 of them evenly spaced. Compute it once and pass it to `assess` as
    `min_similarity`. ValueError for an empty store or another dimension, TypeError for what is no store.
    """
    return finish(threshold_steps(store, sub_queries))


def threshold_steps(
    store: FactStore | StoreView, sub_queries: Sequence[SubQuery]
) -> Generator[None, None, dict[str, float]]:
    """`similarity_thresholds` in steps (see `concurrency._steps`)."""
    targets = _unit_targets(sub_queries)
    view = view_of(store)
    if view.dim != targets.shape[1]:
        raise ValueError(f"the store has dimension {view.dim}, the sub-queries have {targets.shape[1]}")
    rows = np.flatnonzero(view.alive)
    if not len(rows):
        raise ValueError("an empty store gives no threshold: pass min_similarity")
    if len(rows) > SAMPLE_ROWS:
        rows = rows[np.arange(SAMPLE_ROWS) * len(rows) // SAMPLE_ROWS]
    thresholds: dict[str, float] = {}
    for first in range(0, len(sub_queries), _GROUP):
        group = sub_queries[first : first + _GROUP]
        cosines = np.empty((len(rows), len(group)))
        for start in range(0, len(rows), CHUNK_ROWS):
            some = view.take(rows[start : start + CHUNK_ROWS]).astype(np.float64)
            cosines[start : start + CHUNK_ROWS] = _unit_rows(some) @ targets[first : first + _GROUP].T
            yield
        percentiles = np.percentile(cosines, THRESHOLD_PERCENTILE, axis=0)
        thresholds |= {item.id: float(value) for item, value in zip(group, percentiles, strict=True)}
    return thresholds


def assess(
    output: str,
    sub_queries: Sequence[SubQuery],
    embed: Callable[[list[str]], Any] | None = None,
    *,
    store: FactStore | StoreView | None = None,
    min_similarity: float | Mapping[str, float] | None = None,
    written: Mapping[str, int] | None = None,
    min_depth: float = 0.15,
    expected_words: int = DEFAULT_EXPECTED_WORDS,
    embedding_model: str | None = None,
) -> WindowReport:
    """Count the words on each sub-query in a window's output, and derive depth and completeness from them.

    With `embed`, each sentence counts for the sub-query with the largest cosine among those whose own threshold it
    reaches, and for none if it reaches none. Without `embed`, a sentence counts for the sub-query whose label and text
    share the most words with it: the sum of log(S / number of sub-queries with the word). That knows no synonyms and no
    stop words; it is enough for a first try.

    Depth is `depth_from_words` of this window's words. Completeness is the mean over the sub-queries of min(1, words so
    far / expected words). A sub-query that expects 0 words is complete.

    Args:
        output: The window's text.
        sub_queries: All sub-queries of the task, at least one, ids unique.
        embed: Takes sentences [n], returns vectors [n, D] from the model of the sub-queries.
        store: The facts. `similarity_thresholds` derives the thresholds from them.
        min_similarity: The threshold, in [-1, 1]: one number, or one for each sub-query id. None derives it from the
            store.
        written: Words of earlier windows by sub-query id (`session.words`). Unknown ids are ignored.
        min_depth: In [0, 1]. A sub-query counts as addressed if this window has at least this share of its expected
            words.
        expected_words: The expected words of a sub-query that names none.
        embedding_model: The model that the report names.

    Returns:
        The report for `Session.update`.

    Raises:
        ValueError: For a bad argument, for `embed` without store and min_similarity, and if `embed` does not return one
            finite vector for each sentence.
        TypeError: For an argument of a wrong type.
        EmbeddingModelMismatch: If the store has another model than `embedding_model`.
    """
    if not isinstance(output, str):
        raise TypeError(f"output must be a str, got {type(output).__name__}")
    count = WordCount(sub_queries, min_depth=min_depth, expected_words=expected_words)
    count.check_written(written)
    if embed is None:
        finish(count.by_words_steps(output))
    else:
        thresholds = _thresholds(min_similarity, store, count.sub_queries, embedding_model)
        sentences = split_sentences(output)
        count.add(sentences, _owners_by_cosine(sentences, count.sub_queries, embed, thresholds))
    return count.report(written, embedding_model)


class WordCount:
    """The words of a window's output per sub-query, and the report that they make: `assess`, for an output that comes
    sentence by sentence or is read in steps (see `concurrency._steps`).

    sub_queries, min_depth, expected_words: as in `assess`, which says what is raised.
    """

    def __init__(
        self,
        sub_queries: Sequence[SubQuery],
        *,
        min_depth: float = 0.15,
        expected_words: int = DEFAULT_EXPECTED_WORDS,
    ) -> None:
        self.sub_queries = _check_sub_queries(sub_queries)
        self._min_depth = check_number(min_depth, "min_depth", 0.0, 1.0)
        default = check_integer(expected_words, "expected_words", 0)
        self._expected = [default if item.expected_words is None else item.expected_words for item in self.sub_queries]
        self._words = [0] * len(self.sub_queries)

    def add(self, sentences: Sequence[str], owners: Sequence[int | None]) -> None:
        """Count the words of sentences. owners: the sub-query of each by its place, None for no sub-query."""
        for sentence, owner in zip(sentences, owners, strict=True):
            if owner is not None:
                self._words[owner] += sum(len(tokenize(piece)) for piece in pieces(sentence))

    def add_vectors(self, sentences: Sequence[str], vectors: Any, thresholds: Mapping[str, float]) -> None:
        """Count the words of sentences by their vectors, [n, D]. thresholds: the least cosine per sub-query id."""
        least = [thresholds[item.id] for item in self.sub_queries]
        self.add(sentences, _owners_by_cosine(list(sentences), self.sub_queries, lambda _: vectors, least))

    def by_words_steps(self, output: str) -> Generator[None, None, None]:
        """Count the words of an output whose sentences go to the sub-query that shares the most with them."""
        holders: dict[str, list[int]] = {}  # of a token
        for place, item in enumerate(self.sub_queries):
            for piece in pieces(f"{item.label} {item.text}"):
                for token in set(tokenize(piece)):
                    if not (places := holders.setdefault(token, [])) or places[-1] != place:
                        places.append(place)
                yield
        total, work = len(self.sub_queries), 0
        weight = {token: math.log(total / len(places)) if total > 1 else 1.0 for token, places in holders.items()}
        for sentence in sentence_candidates(output):
            length, shared = 0, set[str]()
            for piece in pieces(sentence):
                tokens = tokenize(piece)
                length += len(tokens)
                shared |= holders.keys() & tokens
                if len(sentence) > PIECE:
                    yield
            weights: dict[int, list[float]] = {}  # by sub-query
            for token in shared:
                for place in holders[token]:
                    weights.setdefault(place, []).append(weight[token])
            sums = {place: math.fsum(each) for place, each in weights.items()}
            best = max(sums, key=lambda place: (sums[place], -place), default=None)
            if best is not None and sums[best] > 0.0:
                self._words[best] += length
            work += 1 + length // 8 + sum(map(len, weights.values()))
            if work >= _STEP_WORK:
                work = 0
                yield

    def check_written(self, written: Mapping[str, int] | None) -> list[int]:
        """The words that earlier windows wrote, by sub-query; raises as `assess` does."""
        earlier = {} if written is None else written
        ids = [item.id for item in self.sub_queries]
        return [check_integer(earlier.get(id, 0), f"the words written on {id!r}", 0) for id in ids]

    def report(self, written: Mapping[str, int] | None = None, embedding_model: str | None = None) -> WindowReport:
        """The report. written: words of earlier windows by sub-query id. embedding_model: passed on."""
        ids = [item.id for item in self.sub_queries]
        before = self.check_written(written)
        depths = {
            id: depth_from_words(now, wanted)
            for id, now, wanted in zip(ids, self._words, self._expected, strict=True)
            if now > 0 and (wanted == 0 or now / wanted >= self._min_depth)
        }
        done = [
            1.0 if wanted == 0 else min(1.0, (past + now) / wanted)
            for past, now, wanted in zip(before, self._words, self._expected, strict=True)
        ]
        return WindowReport(
            completeness_score=math.fsum(done) / len(done),
            addressed=tuple(depths),
            depth_by_sub_query=depths,
            words_by_sub_query={id: now for id, now in zip(ids, self._words, strict=True) if now},
            embedding_model=embedding_model,
        )


def _check_sub_queries(sub_queries: Sequence[SubQuery]) -> tuple[SubQuery, ...]:
    check_order(sub_queries, "sub_queries")
    items = tuple(sub_queries)
    for item in items:
        if not isinstance(item, SubQuery):
            raise TypeError(f"sub_queries must hold SubQuery objects, got {type(item).__name__}")
    ids = [item.id for item in items]
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(f"expected at least one sub-query and unique ids, got {ids}")
    if len({len(item.embedding) for item in items}) > 1:
        dims = {item.id: len(item.embedding) for item in items}
        raise ValueError(f"all sub-queries must have one dimension, got {dims}")
    return items


def _thresholds(
    min_similarity: float | Mapping[str, float] | None,
    store: FactStore | StoreView | None,
    sub_queries: Sequence[SubQuery],
    embedding_model: str | None,
) -> list[float]:
    view = None if store is None else view_of(store)
    if view is not None and embedding_model not in (None, view.embedding_model):
        own = view.embedding_model
        advice = f"the store is of {own!r}: assess with vectors of that, or against a store of {embedding_model!r}"
        raise EmbeddingModelMismatch("embedding_model", own, embedding_model, advice)
    if min_similarity is None:
        if view is None:
            raise ValueError("with embed, pass min_similarity=, or store= to take the 95th percentile of its cosines")
        min_similarity = similarity_thresholds(view, sub_queries)
    if isinstance(min_similarity, Mapping):
        missing = [item.id for item in sub_queries if item.id not in min_similarity]
        if missing:
            raise ValueError(f"min_similarity has no value for sub-queries {missing}")
        return [
            check_number(min_similarity[item.id], f"min_similarity of {item.id!r}", -1.0, 1.0) for item in sub_queries
        ]
    return [check_number(min_similarity, "min_similarity", -1.0, 1.0)] * len(sub_queries)


def _owners_by_cosine(
    sentences: list[str],
    sub_queries: Sequence[SubQuery],
    embed: Callable[[list[str]], Any],
    thresholds: list[float],
) -> list[int | None]:
    if not sentences:
        return []
    targets = _unit_targets(sub_queries)
    vectors = as_array(embed(list(sentences)), 2, "the result of embed").astype(np.float64)
    if vectors.shape != (len(sentences), targets.shape[1]):
        raise ValueError(f"embed must return shape [{len(sentences)}, {targets.shape[1]}], got {list(vectors.shape)}")
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise ValueError(f"embed returned a vector that is not finite for {sentences[int(np.argmin(finite))]!r}")
    similar = vectors.any(axis=1)  # a zero vector is similar to nothing
    cosines = np.full((len(sentences), len(sub_queries)), -np.inf)
    if similar.any():
        cosines[similar] = _unit_rows(vectors[similar]) @ targets.T
    reached = np.where(cosines >= np.array(thresholds), cosines, -np.inf)
    best = reached.argmax(axis=1)
    return [int(j) if reached[i, j] > -np.inf else None for i, j in enumerate(best)]


def _unit_targets(sub_queries: Sequence[SubQuery]) -> NDArray[np.float64]:
    return _unit_rows(np.stack([item.embedding for item in sub_queries]))


def _unit_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    rows = scale_rows(rows)  # so that no square leaves the range of float64
    norms: NDArray[np.float64] = np.sqrt(np.einsum("nd,nd->n", rows, rows))
    return rows / norms[:, None]
