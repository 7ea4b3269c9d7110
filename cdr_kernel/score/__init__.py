"""Scores of facts: the batched op and its implementations."""

from __future__ import annotations

from cdr_kernel.score._cdr_score import Scores, available_impls, cdr_score
from cdr_kernel.score._columns import Columns

__all__ = ["Columns", "Scores", "available_impls", "cdr_score"]
