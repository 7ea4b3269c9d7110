"""A drop-in for crprotocol 6.2's CDR: the same names, signatures and result objects, on this kernel.

    from cdr_kernel.adapters.crprotocol import CoverageSet, cdr_rank        # in place of crp.envelope.cdr, crp.state
    undo = install()                                                        # or: in a running process that uses crp

Each takes ``semantics``: "spec" is CRP-SPEC-024, checked at the door; "crprotocol-6" is what crprotocol 6 computes (see
``crprotocol_6``). docs/adapters.md lists where they differ. crprotocol itself is needed for ``install`` alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from cdr_kernel.adapters import _crprotocol_6, _crprotocol_spec
from cdr_kernel.adapters._facts import FactArray
from cdr_kernel.exceptions import EmbeddingModelMismatch
from cdr_kernel.score import Scores
from cdr_kernel.spec.constants import CDR_MIN_RELEVANCE, DEFAULT_DEPTH, EXHAUSTION_RATIO
from cdr_kernel.validation._scalars import check_number

__all__ = [
    "SEMANTICS",
    "CDRRankResult",
    "CDRScoredFact",
    "CoverageEntry",
    "CoverageSet",
    "FactArray",
    "Installed",
    "ResidualItem",
    "cdr_rank",
    "cdr_score",
    "install",
    "update_coverage_after_window",
]

SEMANTICS = ("spec", "crprotocol-6")
SPEC, CRPROTOCOL_6 = SEMANTICS
BEST = _crprotocol_6.BEST
_SCORING = ("coverage_score", "residual_pull", "novelty", "entries", "residuals")
"""Methods that decide a score: a subclass that has its own is asked fact by fact."""
_ORIGINAL = ("crp.state.coverage_set", "CoverageSet")


@dataclass
class CoverageEntry:
    """A sub-query that a window addressed: its embedding, how thoroughly in [0, 1], which window, its text."""

    embedding: list[float]
    depth_weight: float
    window_number: int
    text: str = ""


@dataclass
class ResidualItem:
    """A sub-query that remains."""

    text: str
    embedding: list[float]
    sub_query_id: str = ""


@dataclass
class CDRScoredFact:
    """A fact and what its score is made of. An excluded one keeps novelty 1, pull 0 and score 0."""

    fact: Any
    relevance: float = 0.0
    novelty: float = 1.0
    residual_pull: float = 0.0
    importance: float = 1.0
    cdr_score: float = 0.0
    excluded: bool = False

    @property
    def components(self) -> dict[str, float]:
        """The numbers by name, with the effective relevance."""
        return {
            "relevance": self.relevance,
            "novelty": self.novelty,
            "residual_pull": self.residual_pull,
            "importance": self.importance,
            "effective_relevance": max(self.relevance, self.residual_pull),
            "cdr_score": self.cdr_score,
        }


@dataclass
class CDRRankResult:
    """The facts that passed the gate, best first, and counts over all that were given."""

    ranked: list[CDRScoredFact] = field(default_factory=list)
    ckf_exhausted: bool = False
    mean_novelty_top10: float = 1.0
    candidate_count: int = 0
    excluded_count: int = 0


class CoverageSet:
    """What a session has covered and what remains of it.

    embedding_model_id: of all embeddings; empty where unknown. semantics: "spec" (default) or "crprotocol-6"; the
    functions of this module follow the set they are given.

    Under "spec" every method checks and raises ValueError, the set unchanged: vectors that are zero, not finite or of
    another dimension, depths outside [0, 1], and another embedding model (EmbeddingModelMismatch, §2.5).
    """

    semantics: str = SPEC
    _entry_type: ClassVar[Any] = CoverageEntry
    _item_type: ClassVar[Any] = ResidualItem
    _addressed: frozenset[Any] = frozenset()

    def __init__(self, embedding_model_id: str = "", *, semantics: str | None = None) -> None:
        if semantics is not None:
            self.semantics = _check_semantics(semantics)
        self.embedding_model_id = embedding_model_id
        self._entries: list[Any] = []
        self._residual: list[Any] = []

    def coverage_score(self, fact_embedding: list[float]) -> float:
        """§2.2's weighted mean of the cosines to the entries; 0 without entries."""
        if self.semantics == CRPROTOCOL_6:
            score: float = _crprotocol_6.coverage_score(fact_embedding, self._entries)
            return score
        return float(self._scores(fact_embedding).coverage[0])

    def residual_pull(self, fact_embedding: list[float]) -> float:
        """The largest cosine to what remains; 0 without any. "spec": 0 also while nothing is covered (reading R1)."""
        if self.semantics == CRPROTOCOL_6:
            pull: float = _crprotocol_6.residual_pull(fact_embedding, self._residual)
            return pull
        return float(self._scores(fact_embedding).residual_pull[0])

    def novelty(self, fact_embedding: list[float]) -> float:
        """§2.4: from .20 to 2 under "spec" (reading R3); "crprotocol-6" adds the pull's share and ends at 1."""
        if self.semantics == CRPROTOCOL_6:
            fresh: float = _crprotocol_6.novelty(
                self.coverage_score(fact_embedding), self.residual_pull(fact_embedding)
            )
            return fresh
        return float(self._scores(fact_embedding).novelty[0])

    def mean_novelty(self, sample_embeddings: list[list[float]]) -> float:
        """The mean of ``novelty`` over these; 1 for none."""
        if not len(sample_embeddings):
            return 1.0
        return sum(self.novelty(vector) for vector in sample_embeddings) / len(sample_embeddings)

    def update(
        self,
        addressed_sub_queries: list[dict[str, Any]],
        all_sub_queries: list[dict[str, Any]] | None = None,
        window_number: int = 0,
        embedding_model_id: str = "",
    ) -> None:
        """After a window: cover what it addressed, and keep as residual what it did not.

        Each is a dict with text, embedding, id (default: its text) and, where addressed, depth_weight (default .5). One
        without an embedding covers nothing and cannot remain. all_sub_queries: the whole task; what remains of it
        replaces the residual. "spec": what an earlier window addressed does not come back (reading R8), and without
        all_sub_queries the residual loses what was addressed; "crprotocol-6" leaves it as it is then.
        """
        if self.embedding_model_id and embedding_model_id and embedding_model_id != self.embedding_model_id:
            own = self.embedding_model_id
            advice = f"what is covered so far is of {own!r}: cover with that model, or in a set of its own"
            raise EmbeddingModelMismatch("embedding_model_id", own, embedding_model_id, advice)
        if self.semantics == CRPROTOCOL_6:
            for item in addressed_sub_queries:
                if _has(vector := item.get("embedding")):
                    depth = float(item.get("depth_weight", DEFAULT_DEPTH))
                    self._entries.append(self._entry_type(vector, depth, window_number, item.get("text", "")))
            if all_sub_queries is not None:
                done = frozenset(_key(item) for item in addressed_sub_queries)
                self._residual = self._remaining(all_sub_queries, done)
            return
        addressed = list(addressed_sub_queries)
        for item in [*addressed, *(all_sub_queries or [])]:
            if not hasattr(item, "get"):
                raise TypeError(f"sub-queries must be dicts, got {type(item).__name__}")
        done = self._addressed | {_key(item) for item in addressed}
        entries = list(self._entries)
        for item in addressed:
            if _has(vector := item.get("embedding")):
                depth = check_number(
                    item.get("depth_weight", DEFAULT_DEPTH), f"depth_weight of {_key(item)!r}", 0.0, 1.0
                )
                entries.append(self._entry_type(vector, depth, window_number, item.get("text", "")))
        if all_sub_queries is None:
            residual = [item for item in self._residual if (item.sub_query_id or item.text) not in done]
        else:
            residual = self._remaining(all_sub_queries, done)
        _crprotocol_spec.check_vectors(entries, residual)
        self._entries, self._residual, self._addressed = entries, residual, done
        self.embedding_model_id = self.embedding_model_id or embedding_model_id

    def set_residual(self, residual_items: list[Any]) -> None:
        """Replace what remains, by ResidualItem objects."""
        residual = list(residual_items)
        if self.semantics == SPEC:
            _crprotocol_spec.check_vectors(self._entries, residual)
        self._residual = residual

    def entry_count(self) -> int:
        """How many entries there are."""
        return len(self._entries)

    def residual_count(self) -> int:
        """How many sub-queries remain."""
        return len(self._residual)

    def entries(self) -> list[Any]:
        """The CoverageEntry objects, in a list of their own."""
        return list(self._entries)

    def residuals(self) -> list[Any]:
        """The ResidualItem objects, in a list of their own."""
        return list(self._residual)

    def reset(self) -> None:
        """Forget what was covered and what remains; the model stays."""
        self._entries, self._residual, self._addressed = [], [], frozenset()

    def __repr__(self) -> str:
        counts = f"entries={len(self._entries)}, residual={len(self._residual)}"
        return f"CoverageSet({counts}, model={self.embedding_model_id!r})"

    def _remaining(self, all_sub_queries: Iterable[dict[str, Any]], done: frozenset[Any]) -> list[Any]:
        return [
            self._item_type(item.get("text", ""), item.get("embedding"), _key(item))
            for item in all_sub_queries
            if _key(item) not in done and _has(item.get("embedding"))
        ]

    def _scores(self, vector: Any) -> Scores:
        return _crprotocol_spec.scores_of(vector, self._entries, self._residual)


def cdr_score(
    fact: Any,
    query_embedding: list[float],
    coverage_set: CoverageSet,
    *,
    importance_weight: float = 1.0,
    min_relevance: float = CDR_MIN_RELEVANCE,
    semantics: str | None = None,
) -> CDRScoredFact:
    """One fact's score, as ``cdr_rank`` gives it; excluded below the gate or without an embedding."""
    scored: CDRScoredFact = _score(
        CDRScoredFact, fact, query_embedding, coverage_set, importance_weight, min_relevance, semantics
    )
    return scored


def cdr_rank(
    facts: list[Any],
    query_embedding: list[float],
    coverage_set: CoverageSet,
    *,
    importance_fn: Any = None,
    min_relevance: float = CDR_MIN_RELEVANCE,
    exhaustion_threshold: float = EXHAUSTION_RATIO,
    semantics: str | None = None,
) -> CDRRankResult:
    """The facts that reach the gate, best first; ties in their order.

    facts: objects that carry ``_embedding`` or ``embedding`` (lists, tuples, arrays), themselves or in their ``.fact``;
    hold a ``FactArray`` of them to convert them once. One without is excluded. importance_fn: called with every
    fact, its weight. semantics: default that of coverage_set, "spec" where it has none.

    ckf_exhausted: under "spec" exit 3 of §6 over the ten best facts (mean of score over relevance below the
    threshold; also where none passed); under "crprotocol-6" whether mean_novelty_top10 is below the threshold.

    "spec" raises ValueError for vectors that are zero, not finite or of another dimension than the query's, and for an
    importance that is negative or not finite. A coverage set with scoring methods of its own is asked fact by fact.
    """
    result: CDRRankResult = _rank(
        (CDRRankResult, CDRScoredFact),
        facts,
        query_embedding,
        coverage_set,
        importance_fn,
        min_relevance,
        exhaustion_threshold,
        semantics,
    )
    return result


def update_coverage_after_window(
    coverage_set: CoverageSet,
    dpe_report: Any,
    window_number: int,
    all_sub_queries: list[dict[str, Any]] | None = None,
) -> None:
    """``coverage_set.update`` with the report's ``addressed_sub_queries``.

    dpe_report: an object whose list holds dicts or objects with text, embedding and, if they have them, id and
    depth_weight; or a dict whose list holds dicts. Anything but a list counts as nothing addressed, and so
    do items that are no dicts and have no attributes of their own. None: nothing.
    """
    addressed: Any = []
    if hasattr(dpe_report, "addressed_sub_queries"):
        found = dpe_report.addressed_sub_queries
        names = ("text", "embedding", "depth_weight", "id")
        for item in found if isinstance(found, list) else []:
            if isinstance(item, dict):
                addressed.append(item)
            elif hasattr(item, "__dict__"):  # the package passes over None, numbers and strings
                addressed.append({n: getattr(item, n) for n in names if hasattr(item, n)})
    elif isinstance(dpe_report, dict):
        addressed = dpe_report.get("addressed_sub_queries", [])
    coverage_set.update(addressed_sub_queries=addressed, all_sub_queries=all_sub_queries, window_number=window_number)


@dataclass
class Installed:
    """What ``install`` did; ``undo()`` takes it back, as does the end of a ``with`` block."""

    pairs: list[tuple[Any, Any]]
    """crprotocol's own object, and what stands in its place."""

    def undo(self) -> None:
        """Put crprotocol's own names back, also in modules of it that were imported since. Twice is once."""
        pairs, self.pairs = self.pairs, []
        _swap({id(new): old for old, new in pairs})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def install(semantics: str = SPEC) -> Installed:
    """Swap crprotocol's CDR for this one in the running process, in every module of it that has the names.

    cdr_rank, cdr_score, update_coverage_after_window and CoverageSet are replaced in ``crp.envelope.cdr``,
    ``crp.envelope``, ``crp.state.coverage_set``, ``crp.state`` and wherever else in ``crp`` they were imported. They
    return crprotocol's own CDRRankResult, CDRScoredFact, CoverageEntry and ResidualItem, and take coverage sets made
    before. The new CoverageSet is a subclass of the old one. Names your own modules imported before stay as they are.

    Raises ImportError where crprotocol is missing or not version 6, RuntimeError where it is installed already.
    """
    _check_semantics(semantics)
    try:
        modules = [import_module(name) for name in ("crp.envelope.cdr", "crp.state.coverage_set")]
        version = import_module("crp").__version__
        for name in ("crp.envelope", "crp.state"):
            import_module(name)
    except ImportError as error:
        raise ImportError('install() needs crprotocol: pip install "crprotocol>=6.2,<7"') from error
    if not version.startswith("6."):
        raise ImportError(f"install() knows crprotocol 6, got {version}")
    cdr, state = modules
    if issubclass(state.CoverageSet, CoverageSet):
        raise RuntimeError("install() was called before: call undo() first")
    results = (cdr.CDRRankResult, cdr.CDRScoredFact)

    @functools.wraps(cdr.cdr_rank)
    def rank(
        facts: Any,
        query_embedding: Any,
        coverage_set: Any,
        *,
        importance_fn: Any = None,
        min_relevance: Any = CDR_MIN_RELEVANCE,
        exhaustion_threshold: Any = EXHAUSTION_RATIO,
    ) -> Any:
        return _rank(
            results, facts, query_embedding, coverage_set, importance_fn, min_relevance, exhaustion_threshold, semantics
        )

    @functools.wraps(cdr.cdr_score)
    def score(
        fact: Any,
        query_embedding: Any,
        coverage_set: Any,
        *,
        importance_weight: Any = 1.0,
        min_relevance: Any = CDR_MIN_RELEVANCE,
    ) -> Any:
        return _score(results[1], fact, query_embedding, coverage_set, importance_weight, min_relevance, semantics)

    @functools.wraps(cdr.update_coverage_after_window)
    def update(coverage_set: Any, dpe_report: Any, window_number: Any, all_sub_queries: Any = None) -> None:
        update_coverage_after_window(coverage_set, dpe_report, window_number, all_sub_queries)

    coverage_set = type(
        "CoverageSet",
        (CoverageSet, state.CoverageSet),
        {
            "__module__": state.__name__,
            "__doc__": CoverageSet.__doc__,
            "semantics": semantics,
            "_entry_type": state.CoverageEntry,
            "_item_type": state.ResidualItem,
        },
    )
    pairs = [
        (cdr.cdr_rank, rank),
        (cdr.cdr_score, score),
        (cdr.update_coverage_after_window, update),
        (state.CoverageSet, coverage_set),
    ]
    _swap({id(old): new for old, new in pairs})
    return Installed(pairs)


def _swap(replacement: dict[int, Any]) -> None:
    """In every loaded module of crprotocol, the names whose objects have these ids."""
    for module_name, module in list(sys.modules.items()):
        if module_name == "crp" or module_name.startswith("crp."):
            for name, value in list(vars(module).items()):
                if id(value) in replacement:
                    setattr(module, name, replacement[id(value)])


def _check_semantics(semantics: str) -> str:
    if semantics not in SEMANTICS:
        raise ValueError(f"semantics must be one of {', '.join(map(repr, SEMANTICS))}, got {semantics!r}")
    return semantics


def _key(item: dict[str, Any]) -> Any:
    """What names a sub-query: its id, else its text."""
    return item.get("id", item.get("text", ""))


def _has(vector: Any) -> bool:
    return len(vector) > 0 if isinstance(vector, np.ndarray) else bool(vector)


def _semantics(coverage_set: Any, asked: str | None) -> str:
    return getattr(coverage_set, "semantics", SPEC) if asked is None else _check_semantics(asked)


def _parts(coverage_set: Any) -> tuple[list[Any], list[Any]] | None:
    """Entries and residual, where nothing but them decides a score: a CoverageSet of ours or crprotocol's.

    None for anything else, and for a subclass with scoring methods of its own.
    """
    kind = type(coverage_set)
    for known in kind.__mro__:
        if known is CoverageSet or (known.__module__, known.__qualname__) == _ORIGINAL:
            if all(getattr(kind, name) is getattr(known, name) for name in _SCORING):
                return coverage_set.entries(), coverage_set.residuals()
            return None
    return None


def _rank(
    results: tuple[Any, Any],
    facts: Iterable[Any],
    query: Any,
    coverage_set: Any,
    importance_fn: Any,
    min_relevance: Any,
    threshold: Any,
    semantics: str | None,
) -> Any:
    """``cdr_rank`` with the classes of its results."""
    rank_result, scored_fact = results
    held = FactArray.of(facts)
    importance = None if importance_fn is None else [importance_fn(fact) for fact in held]
    parts = _parts(coverage_set)
    if _semantics(coverage_set, semantics) == SPEC:
        ranked = _crprotocol_spec.rank(held, query, coverage_set, parts, importance, min_relevance)
        mean = _crprotocol_6.mean_novelty(ranked.novelty)
        best = zip(ranked.cdr_score[:BEST], ranked.relevance[:BEST], strict=True)
        ratios = [score / relevance for score, relevance in best if relevance > 0.0]  # reading R27
        exhausted = (sum(ratios) / len(ratios) if ratios else 0.0) < threshold
    elif parts is None:
        weights = _crprotocol_6.weights_at(importance, range(len(held)))
        methods = coverage_set.novelty, coverage_set.residual_pull
        ranked = _crprotocol_6.rank_plain(
            len(held), lambda i: _crprotocol_6.score(held.vector(i), query, *methods, weights[i], min_relevance)
        )
        mean = _crprotocol_6.mean_novelty(ranked.novelty)
        exhausted = mean < threshold
    else:
        task = _crprotocol_6.Task(held, query, *parts, importance, min_relevance)
        ranked = task.rank()
        mean = task.mean_novelty(ranked, threshold)
        exhausted = mean < threshold
    scored = list(map(scored_fact, map(held.facts.__getitem__, ranked.positions), *ranked[1:]))
    return rank_result(scored, exhausted, mean, len(held), len(held) - len(scored))


def _score(
    scored_fact: Any,
    fact: Any,
    query: Any,
    coverage_set: Any,
    importance: Any,
    min_relevance: Any,
    semantics: str | None,
) -> Any:
    """``cdr_score`` with the class of its result."""
    held = FactArray([fact])
    parts = _parts(coverage_set)
    if _semantics(coverage_set, semantics) == SPEC:
        ranked = _crprotocol_spec.rank(held, query, coverage_set, parts, [importance], min_relevance)
        if ranked.positions:
            return scored_fact(fact, *(values[0] for values in ranked[1:]))
        relevance = 0.0
        if len(held.rows):
            below = _crprotocol_spec.rank(held, query, CoverageSet(), ([], []), [importance], -np.inf)
            relevance = below.relevance[0]
        return scored_fact(fact, relevance, excluded=True)
    if parts is None:
        methods = coverage_set.novelty, coverage_set.residual_pull
        return scored_fact(fact, *_crprotocol_6.score(held.vector(0), query, *methods, importance, min_relevance))
    return scored_fact(fact, *_crprotocol_6.Task(held, query, *parts, [importance], min_relevance).plain(0))
