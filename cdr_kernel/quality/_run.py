"""One task of the experiment on its way through its windows, and the writers that say what a window addressed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cdr_kernel.quality._corpus import Case, Corpus
from cdr_kernel.validation._arrays import Float64

DROPPED = 0.25
"""Share of the packed facts' tokens that a simulated output leaves out."""
_LEAST_DEPTH = 0.15  # a writer does not claim less
LEAST_SIMILARITY = 0.04
"""The judge that knows words alone assigns nothing below."""


class Run:
    """One task on its way through its windows: what was packed, and what a writer made of it.

    used: by row, the last window (1-based) that packed it. depth: reported so far, [S], at most 1 each.
    """

    def __init__(self, corpus: Corpus, case: Case, seed: int) -> None:
        self.corpus = corpus
        self.case = case
        self.k = case.task.k
        self.windows = case.task.windows
        self.window = 0
        self.used: dict[int, int] = {}
        self.depth = np.zeros(len(case.subs))
        self.addressed: list[tuple[int, float, int]] = []
        self.random = np.random.default_rng([seed, zlib.crc32(case.id.encode())])

    @property
    def remaining(self) -> list[int]:
        """Sub-queries that no window addressed; all of them once there are none."""
        done = {j for j, _, _ in self.addressed}
        return [j for j in range(len(self.depth)) if j not in done] or list(range(len(self.depth)))

    @property
    def fresh(self) -> npt.NDArray[np.bool_]:
        """[N]: not packed yet."""
        fresh = np.ones(len(self.corpus), np.bool_)
        fresh[list(self.used)] = False
        return fresh

    @cached_property
    def relevance(self) -> npt.NDArray[np.float32]:
        """[N] cosines to the query."""
        return _cosines(self.corpus.units, self.case.query[None])[:, 0]

    @cached_property
    def similarity(self) -> npt.NDArray[np.float32]:
        """[N, S] cosines to the sub-queries."""
        return _cosines(self.corpus.units, self.case.subs)

    @cached_property
    def lexical(self) -> Float64:
        """[N, S] of the judge that knows words only."""
        return self.corpus.judge.similarity([item.text for item in self.case.task.items])

    def output(self, rows: Sequence[int]) -> str:
        """The packed facts with a quarter of their tokens dropped at random."""
        kept: list[str] = []
        for row in rows:
            tokens = self.corpus.tokenizer(self.corpus.texts[row])
            keep = self.random.random(len(tokens)) >= DROPPED
            kept += [token for token, stays in zip(tokens, keep, strict=True) if stays]
        return " ".join(kept)

    def close(self, rows: Sequence[int], addressed: Sequence[tuple[int, float]]) -> None:
        """The window is over."""
        self.window += 1
        self.used.update(dict.fromkeys(rows, self.window))
        for j, depth in addressed:
            self.addressed.append((j, depth, self.window))
            self.depth[j] = min(1.0, self.depth[j] + depth)


def _cosines(units: npt.NDArray[np.float32], vectors: Float64) -> npt.NDArray[np.float32]:
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return np.asarray(units @ unit.T)


Writer: TypeAlias = Callable[[Run, Sequence[int]], list[tuple[int, float]]]


def write_plan(run: Run, rows: Sequence[int]) -> list[tuple[int, float]]:
    """The next sub-queries in the task's order at depth .9, whatever the envelope holds."""
    pace = _pace(run)
    return [(j, 0.9) for j in range(len(run.depth))[run.window * pace : (run.window + 1) * pace]]


def write_greedy(run: Run, rows: Sequence[int]) -> list[tuple[int, float]]:
    """The sub-queries with most labelled words in the envelope; a fact written before counts no words."""
    written = np.zeros(len(run.depth))
    for row in rows:
        if row not in run.used:
            for j in run.case.labels.get(row, ()):
                written[j] += run.corpus.words[row] / len(run.case.labels[row])
    return _most_written(run, written)


def write_lexical(run: Run, rows: Sequence[int]) -> list[tuple[int, float]]:
    """As greedy, but a fact counts for the sub-query whose words it shares most: no labels, no embeddings."""
    written = np.zeros(len(run.depth))
    for row in rows:
        best = int(run.lexical[row].argmax())
        if run.lexical[row, best] > LEAST_SIMILARITY and row not in run.used:
            written[best] += run.corpus.words[row]
    return _most_written(run, written)


def _pace(run: Run) -> int:
    return max(1, math.ceil(len(run.depth) / run.windows))


def _most_written(run: Run, written: Float64) -> list[tuple[int, float]]:
    expected = run.case.expected
    share = np.divide(written, expected, out=np.where(written > 0, 1.0, 0.0), where=expected > 0)
    most = np.argsort(-written, kind="stable")[: _pace(run)].tolist()
    return [(j, float(min(0.9, share[j]))) for j in most if written[j] > 0 and share[j] >= _LEAST_DEPTH]


WRITERS: Mapping[str, Writer] = {"greedy": write_greedy, "lexical": write_lexical, "plan": write_plan}
