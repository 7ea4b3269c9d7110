"""Rankings, envelopes and their explanation."""

from __future__ import annotations

from cdr_kernel.rank._cdr_rank import cdr_rank, rank_many
from cdr_kernel.rank._counterfactual import Change
from cdr_kernel.rank._explain import Explanation, explain
from cdr_kernel.rank._pack import Envelope, pack_facts
from cdr_kernel.rank._ranking import Ranking

__all__ = ["Change", "Envelope", "Explanation", "Ranking", "cdr_rank", "explain", "pack_facts", "rank_many"]
