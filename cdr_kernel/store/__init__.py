"""Facts and their embeddings, in memory or mapped from a folder."""

from __future__ import annotations

from cdr_kernel.store._fact_store import FactStore
from cdr_kernel.store._view import Fact, StoreView

__all__ = ["Fact", "FactStore", "StoreView"]
