"""torch.ops.cdr_kernel: the exact scores and the fused pass as torch operators.

Importing this module registers them. They have fake implementations, so ``torch.compile(fullgraph=True)``,
``torch.export`` and ``opcheck`` take them; nothing is differentiable. They run on the device and the stream they are
called on.
"""

from __future__ import annotations

import numpy as np
import torch

from cdr_kernel.score._bound_search import Factors32, Packed, Rows, bounds_torch
from cdr_kernel.score._cdr_score import cdr_score, choose_impl
from cdr_kernel.score._columns import COVERAGE, QUERY, RESIDUAL, Columns


@torch.library.custom_op("cdr_kernel::score", mutates_args=())
def score(
    embeddings: torch.Tensor,
    vectors: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    has_coverage: bool,
    clamp_novelty: bool = False,
    importance: torch.Tensor | None = None,
    multiplier: torch.Tensor | None = None,
    ngram_overlap: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """The exact score of every fact, -inf where it does not pass a gate: float64 [N] on the device of embeddings.

    embeddings: [N, D] float16, bfloat16, float32 or float64. vectors: [2 + R, D], query, coverage functional, residual;
    scale, shift, weight, gate: [2 + R] float64 (see ``Columns``). importance, multiplier: [N]; ngram_overlap: integers
    [N]. impl: as for ``cdr_score``, which this is.

    Settings of another dtype are a TypeError: 0.55 as float32 is 0.550000011920929, another gate than `cdr_score`'s.
    """
    _check_settings(scale, shift, weight, gate)
    host = [t.detach().cpu().double().numpy() for t in (vectors, scale, shift, weight, gate)]
    columns = Columns(
        query=host[0][QUERY],
        coverage=host[0][COVERAGE] if has_coverage else None,
        residual=host[0][RESIDUAL:],
        scale=host[1],
        shift=host[2],
        weight=host[3],
        gate=host[4],
        clamp_novelty=clamp_novelty,
    )
    scores = cdr_score(
        embeddings, columns, importance=importance, multiplier=multiplier, ngram_overlap=ngram_overlap, impl=impl
    )
    out = np.full(len(embeddings), -np.inf)
    out[scores.rows] = scores.score
    return torch.from_numpy(out).to(embeddings.device)


@score.register_fake
def _(
    embeddings: torch.Tensor,
    vectors: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    *rest: object,
    **keywords: object,
) -> torch.Tensor:
    _check_settings(scale, shift, weight, gate)
    return embeddings.new_empty((embeddings.shape[0],), dtype=torch.float64)


@torch.library.custom_op("cdr_kernel::score_bounds", mutates_args=())
def score_bounds(
    rows: torch.Tensor,
    vectors: torch.Tensor,
    columns: torch.Tensor,
    sessions: torch.Tensor,
    count: int,
    dot: bool,
    weighted: bool,
    precision: str = "tf32",
    row_scale: torch.Tensor | None = None,
    row_error: torch.Tensor | None = None,
    alive: torch.Tensor | None = None,
    picked: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
    multiplier: torch.Tensor | None = None,
    ngram_overlap: torch.Tensor | None = None,
) -> torch.Tensor:
    """An upper bound of every score, -inf where the gate surely fails: float32 [count, n] on the device of rows.

    One pass over rows [R, D] (float16, bfloat16, float32, float64, or int8 codes with row_scale) and the columns that
    ``bounds.pack`` made. picked: int64 [n], which rows. See ``bounds.Rows`` and ``bounds.Factors32`` for the others.
    The Triton kernel where it runs, plain torch elsewhere.
    """
    groups, tiles = vectors.shape[:2]
    packed = Packed(
        vectors=vectors,
        columns=columns,
        sessions=sessions,
        order=np.arange(count),
        unit=np.ones(count),
        group=sessions.shape[2],
        parts=columns.shape[3],
        tiles=tiles,
        groups=groups,
        dot=dot,
        precision=precision,
        weighted=weighted,
    )
    n = len(rows) if picked is None else len(picked)
    out = torch.empty((count, n), dtype=torch.float32, device=rows.device)
    run = bounds_torch
    if _by_triton(rows.device):
        from cdr_kernel.score._triton import launch

        run = launch
    run(
        packed,
        Rows(rows, picked, row_scale, row_error, alive),
        Factors32(importance, multiplier, ngram_overlap),
        out,
    )
    return out


@score_bounds.register_fake
def _(
    rows: torch.Tensor,
    vectors: torch.Tensor,
    columns: torch.Tensor,
    sessions: torch.Tensor,
    count: int,
    dot: bool,
    weighted: bool,
    precision: str = "tf32",
    row_scale: torch.Tensor | None = None,
    row_error: torch.Tensor | None = None,
    alive: torch.Tensor | None = None,
    picked: torch.Tensor | None = None,
    *rest: object,
) -> torch.Tensor:
    n = (rows if picked is None else picked).shape[0]
    return rows.new_empty((count, n), dtype=torch.float32)


def _check_settings(scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> None:
    """TypeError for settings that are not float64."""
    for name, setting in (("scale", scale), ("shift", shift), ("weight", weight), ("gate", gate)):
        if setting.dtype != torch.float64:
            raise TypeError(
                f"{name}: expected torch.float64, got {setting.dtype}, which rounds a setting such as 0.55 to another: "
                "make it of float64 numbers, such as torch.tensor([0.55], dtype=torch.float64)"
            )


def _by_triton(device: torch.device) -> bool:
    try:
        return choose_impl("triton", device) == "triton"
    except (ImportError, ValueError):
        return False
