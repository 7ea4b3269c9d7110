"""Facts that survive a crash, in a Lance dataset with a mapped snapshot."""

from __future__ import annotations

from cdr_kernel.durable._durable_store import DurableStore

__all__ = ["DurableStore"]
