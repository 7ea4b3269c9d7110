"""Files of facts, vectors and tasks; documents and embedders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdr_kernel.files._documents import propose_tasks, read_documents

__all__ = ["propose_tasks", "read_documents"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # which load a parser of Markdown
        from cdr_kernel.files import _documents

        return getattr(_documents, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
