"""Files of facts, vectors and tasks; documents and embedders."""

from __future__ import annotations
