"""torch.ops.cdr_kernel.score: the exact scores as a torch operator.

Importing this module registers it. It has a fake implementation, so ``torch.compile(fullgraph=True)``,
``torch.export`` and ``opcheck`` take it; it is not differentiable. It runs on the device and the stream that it
is called on.
"""

from __future__ import annotations

import numpy as np
import torch

from cdr_kernel.score._cdr_score import cdr_score
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


def _check_settings(scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> None:
    """TypeError for settings that are not float64."""
    for name, setting in (("scale", scale), ("shift", shift), ("weight", weight), ("gate", gate)):
        if setting.dtype != torch.float64:
            raise TypeError(
                f"{name}: expected torch.float64, got {setting.dtype}, which rounds a setting such as 0.55 to another: "
                "make it of float64 numbers, such as torch.tensor([0.55], dtype=torch.float64)"
            )
