"""Coverage-Differential Retrieval: fresh, relevant facts for every window of a long generation.

    candidates -> scores -> ranking -> envelope -> output -> session.update(...)
    retrieve      score     rank       pack                  session

``run_windows`` is the whole loop; ``reference`` is the specification (CRP-SPEC-024) in plain Python, and what
everything else is tested against.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

if _find_spec("cdr_kernel._C") is None:  # as in a checkout that hides an installed package
    raise ImportError(
        f"{__path__[0]}: the extension is not built here for this Python: pip install -c constraints.txt -e . in this "
        "checkout, or run from another folder to use the package that is installed"
    )

from cdr_kernel.exceptions import DamagedFileError, EmbeddingModelMismatch
from cdr_kernel.loop import Window, WindowPrompt, assemble, assess, band, crp_headers, guarantee_holds, run_windows
from cdr_kernel.rank import Envelope, Explanation, Ranking, cdr_rank, explain, pack_facts, rank_many
from cdr_kernel.retrieve import Candidates, GateReport, Retriever, gate_report, suggest_min_relevance
from cdr_kernel.score import Columns, Scores, available_impls, cdr_score
from cdr_kernel.session import (
    CalibratedSettings,
    CoverageEntry,
    Exit,
    Session,
    SessionEnded,
    SpecSettings,
    SubQuery,
    WindowReport,
    depth_from_words,
)
from cdr_kernel.spec import constants, reference
from cdr_kernel.spec.constants import Depth
from cdr_kernel.store import FactStore
from cdr_kernel.store._fact_store import Fact, StoreView
from cdr_kernel.text import NGramGuard, repetition, tokenize

if TYPE_CHECKING:
    from cdr_kernel.durable import DurableStore
    from cdr_kernel.report import write_report
    from cdr_kernel.score._device_rows import DeviceRows
    from cdr_kernel.shard import ShardedRetriever, ShardedStore, open_store, partition

try:
    __version__ = version("cdr-kernel")
except PackageNotFoundError:  # a source tree on the path, never installed
    __version__ = "0+unknown"

__all__ = [
    "CalibratedSettings",
    "Candidates",
    "Columns",
    "CoverageEntry",
    "DamagedFileError",
    "Depth",
    "DeviceRows",
    "DurableStore",
    "EmbeddingModelMismatch",
    "Envelope",
    "Exit",
    "Explanation",
    "Fact",
    "FactStore",
    "GateReport",
    "NGramGuard",
    "Ranking",
    "Retriever",
    "Scores",
    "Session",
    "SessionEnded",
    "ShardedRetriever",
    "ShardedStore",
    "SpecSettings",
    "StoreView",
    "SubQuery",
    "Window",
    "WindowPrompt",
    "WindowReport",
    "__version__",
    "assemble",
    "assess",
    "available_impls",
    "band",
    "cdr_rank",
    "cdr_score",
    "constants",
    "crp_headers",
    "depth_from_words",
    "explain",
    "gate_report",
    "guarantee_holds",
    "open_store",
    "pack_facts",
    "partition",
    "rank_many",
    "reference",
    "repetition",
    "run_windows",
    "suggest_min_relevance",
    "tokenize",
    "write_report",
]

_LAZY = {
    "DeviceRows": "cdr_kernel.score._device_rows",
    "DurableStore": "cdr_kernel.durable",
    "ShardedRetriever": "cdr_kernel.shard",
    "ShardedStore": "cdr_kernel.shard",
    "open_store": "cdr_kernel.shard",
    "partition": "cdr_kernel.shard",
    "write_report": "cdr_kernel.report",
}
"""Names whose modules import torch, Lance or other heavy packages. They load when they are first used (PEP 562)."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
