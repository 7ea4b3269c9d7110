"""The drop-in by CRP-SPEC-024: the kernel's columns and scores from a coverage set's entries and residual.

entries have embedding, depth_weight and text, residual items embedding and text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdr_kernel.adapters._crprotocol_6 import Ranked, weights_at
from cdr_kernel.adapters._facts import FactArray, pack_rows
from cdr_kernel.score import Columns, Scores, cdr_score
from cdr_kernel.validation._arrays import Blocks, Float64, as_vector, factor, safe_blocks


def scores_of(embedding: Any, entries: Sequence[Any], residual: Sequence[Any]) -> Scores:
    """Of one vector [D], whatever the query: its coverage, residual pull and novelty."""
    query = as_vector(embedding, None, "fact_embedding")
    return cdr_score(query[None], columns_of(query, entries, residual, -np.inf), impl="cpp")


def rank(
    held: FactArray,
    query: Any,
    coverage_set: Any,
    parts: tuple[list[Any], list[Any]] | None,
    importance: list[Any] | None,
    min_relevance: Any,
) -> Ranked:
    """The facts by CRP-SPEC-024.

    importance: see ``weights_at``. parts None: novelty and residual pull are what coverage_set's methods say.
    """
    vector = as_vector(query, None, "query_embedding")
    columns = columns_of(vector, *(parts or ([], [])), min_relevance)
    weights = factor(importance, len(held), "importance")
    blocks, squared_norms = _rows(held, len(vector))
    if not len(blocks[0]):
        return Ranked([], [], [], [], [], [])
    found = cdr_score(
        blocks,
        columns,
        squared_norms=squared_norms,
        importance=None if weights is None else weights[held.rows],
        impl="cpp",
    )
    if parts is not None:
        found = found.take(np.argsort(-found.score, kind="stable"))  # rows ascend: ties stay in order
    positions = held.rows[found.rows].tolist()
    relevance, given = found.relevance.tolist(), weights_at(importance, positions)
    if parts is not None:
        return Ranked(
            positions, relevance, found.novelty.tolist(), found.residual_pull.tolist(), given, found.score.tolist()
        )
    vectors = [held.vector(i) for i in positions]
    fresh = [coverage_set.novelty(v) for v in vectors]
    pull = [coverage_set.residual_pull(v) for v in vectors]
    scores = [w * max(r, p) * n for w, r, p, n in zip(given, relevance, pull, fresh, strict=True)]
    return Ranked(positions, relevance, fresh, pull, given, scores).best_first()


def _rows(held: FactArray, dim: int) -> tuple[Blocks, Float64]:
    """The facts' rows and squared norms, all of dimension dim, finite and not zero; ValueError names the first that is
    not."""
    for position, vector in held.odd.items():
        if vector is not None and len(vector) != dim:
            raise ValueError(f"facts[{position}]: expected dimension {dim} (that of the query), got {len(vector)}")
        if vector is not None:
            raise ValueError(f"facts[{position}]: expected an embedding of numbers, got {vector!r:.60}")
    if len(held.rows) and held.dim != dim:
        raise ValueError(f"facts[{held.rows[0]}]: expected dimension {dim} (that of the query), got {held.dim}")
    bad = np.flatnonzero((held.flags == 1) | (held.flags == 2))
    if len(bad):
        what = "not finite" if held.flags[bad[0]] == 1 else "all zeros"
        raise ValueError(f"facts[{held.rows[bad[0]]}]: the embedding is {what}")
    if held.flags.any():
        return safe_blocks((held.matrix,))
    return (held.matrix,), held.squared_norms


def columns_of(query: Float64, entries: Sequence[Any], residual: Sequence[Any], min_relevance: Any) -> Columns:
    """What a coverage set asks of a fact; query: [D]. ValueError names the first vector or depth that is wrong."""
    return Columns.spec(
        query,
        coverage=_vectors(entries, len(query), "coverage entry"),
        depth_weights=[entry.depth_weight for entry in entries],
        residual=_vectors(residual, len(query), "residual item"),
        min_relevance=min_relevance,
    )


def _vectors(items: Sequence[Any], dim: int, name: str) -> Float64:
    """The embeddings of entries or residual items, float64 [n, dim]; ValueError names the first of another dimension
    or of something else than numbers."""
    for i, item in enumerate(items):
        if len(item.embedding) != dim:
            raise ValueError(f"{name} {i} ({item.text!r}): expected dimension {dim}, got {len(item.embedding)}")
    rows, numeric = pack_rows([item.embedding for item in items], dim)
    if not numeric.all():
        i = int(np.argmin(numeric))
        raise ValueError(f"{name} {i} ({items[i].text!r}): expected {dim} numbers")
    return rows


def check_vectors(entries: Sequence[Any], residual: Sequence[Any]) -> None:
    """ValueError unless all embeddings have one dimension, are finite and not zero."""
    first = next(iter([*entries, *residual]), None)
    if first is not None:
        columns_of(np.ones(len(first.embedding)), entries, residual, 0.0)
