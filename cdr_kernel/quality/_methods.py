"""Who picks the facts of a window in the experiment: sessions as users run them, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from cdr_kernel.quality._corpus import Case, Corpus
from cdr_kernel.quality._run import Run
from cdr_kernel.rank import cdr_rank, pack_facts
from cdr_kernel.session import Session, WindowReport
from cdr_kernel.session._settings import MODES, settings_of
from cdr_kernel.text import NGramGuard
from cdr_kernel.validation._arrays import Int64


class Method:
    """Picks each window's facts. A baseline is a function of the run."""

    def __init__(self, name: str, pick: Callable[[Run], Sequence[int]]) -> None:
        self.name = name
        self._pick = pick

    def start(self, corpus: Corpus, case: Case) -> Method:
        """What picks for one run."""
        return self

    def pick(self, run: Run) -> list[int]:
        """Rows for the next window, best first, at most the task's k."""
        return [int(row) for row in self._pick(run)]

    def close(self, run: Run, report: WindowReport, output: str) -> None:
        """The window was written."""


class Ranked(Method):
    """The product: a session made with `settings`, `cdr_rank`, `pack_facts` and `Session.update`."""

    def __init__(self, name: str, settings: Mapping[str, Any], pack: str) -> None:
        super().__init__(name, lambda run: ())
        self.settings = settings
        self.pack = pack

    def start(self, corpus: Corpus, case: Case) -> Method:
        return _RankedRun(self.name, self.settings, self.pack, corpus, case)


class _RankedRun(Ranked):
    """Mode "spec" pulls from the second window on, also where the first one addressed nothing, as the recorded
    experiment does. That lies between the two readings of R1, so window 1 has a session of its own."""

    def __init__(self, name: str, settings: Mapping[str, Any], pack: str, corpus: Corpus, case: Case) -> None:
        super().__init__(name, settings, pack)
        self._corpus = corpus
        self._case = case
        self._session = self._first = self._made(settings)
        if settings["mode"] == "spec":
            self._session = self._made({**settings, "first_window_pull": True})

    def _made(self, settings: Mapping[str, Any]) -> Session:
        case, model = self._case, self._corpus.store.embedding_model
        own = dict(settings)
        guard = own.pop("guard")
        made = settings_of(own.pop("mode"), max_windows=case.task.windows, **own)
        return Session(case.sub_queries, embedding_model=model, settings=made, guard=guard)

    def pick(self, run: Run) -> list[int]:
        session = self._session if run.window else self._first
        k = run.k if self.pack == "greedy" else None
        ranking = cdr_rank(self._case.query, self._corpus.retriever, session, k=k)
        self._envelope = pack_facts(ranking, run.k, count_tokens=lambda text: 1, pack=self.pack)
        view = self._corpus.store.view()
        return [view.row_of(fact.id) for fact in self._envelope.facts]

    def close(self, run: Run, report: WindowReport, output: str) -> None:
        model = self._corpus.store.embedding_model
        self._session.update(report, output, envelope=self._envelope, embedding_model=model)


def ranked(
    corpus: Corpus, *, mode: str = "spec", guard: bool | None = None, pack: str | None = None, **settings: Any
) -> Ranked:
    """The method whose sessions have these settings. guard, pack: None is what the mode does by
    default."""
    on = MODES[mode].guarded if guard is None else guard
    made = NGramGuard(tokenizer=corpus.tokenizer) if on else False
    packing = MODES[mode].packing if pack is None else pack
    parts = [mode, *(["need"] if packing == "need" else []), *(["guard"] if on else [])]
    return Ranked(" + ".join(parts), {"mode": mode, "guard": made, **settings}, packing)


def _top(score: npt.NDArray[Any], k: int, allowed: npt.NDArray[np.bool_] | None = None) -> Int64:
    """Rows of the k largest scores, best first, equal ones by row."""
    rows = np.arange(len(score)) if allowed is None else np.flatnonzero(allowed)
    if k < len(rows):
        cut = np.partition(score[rows], len(rows) - k)[len(rows) - k]
        rows = rows[score[rows] >= cut]
    return np.asarray(rows[np.lexsort((rows, -score[rows]))][:k])


def _listed(rows: Int64) -> list[int]:
    listed: list[int] = rows.tolist()
    return listed


def pick_relevance(run: Run) -> Sequence[int]:
    """The nearest to the query."""
    return _listed(_top(run.relevance, run.k))


def pick_relevance_excluded(run: Run) -> Sequence[int]:
    """The nearest to the query among what was never packed."""
    return _listed(_top(run.relevance, run.k, run.fresh))


def pick_round_robin(run: Run) -> Sequence[int]:
    """The nearest to each sub-query not addressed yet, in turn, without what was packed: the practitioner's way."""
    lists = [_top(run.similarity[:, j], 4 * run.k, run.fresh).tolist() for j in run.remaining]
    taken: dict[int, None] = {}
    while len(taken) < run.k and any(lists):
        for rows in lists:
            while rows and rows[0] in taken:
                rows.pop(0)
            if rows and len(taken) < run.k:
                taken[rows.pop(0)] = None
    return list(taken)


def pick_mmr(run: Run, weight: float = 0.5, pool: int = 200) -> Sequence[int]:
    """Maximal marginal relevance over the nearest 200 that were never packed."""
    found = _top(run.relevance, pool, run.fresh)
    units, relevance = run.corpus.units[found], run.relevance[found]
    nearest = np.zeros(len(found), np.float32)
    chosen: list[int] = []
    left = np.ones(len(found), np.bool_)
    for _ in range(min(run.k, len(found))):
        best = int(np.where(left, weight * relevance - (1 - weight) * nearest, -np.inf).argmax())
        left[best] = False
        chosen.append(int(found[best]))
        nearest = np.maximum(nearest, units @ units[best])
    return chosen


def pick_xquad(run: Run, weight: float = 0.5, low: float = 0.2, high: float = 0.7, pool: int = 500) -> Sequence[int]:
    """xQuAD: relevance mixed with how much of each sub-query's remaining share a fact serves; packed facts count."""

    def probability(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.clip((x - low) / (high - low), 0, 1)

    found = _top(np.maximum(run.relevance, run.similarity.max(1)), pool, run.fresh)
    serves, relevance = probability(run.similarity[found]), probability(run.relevance[found])
    open_share = np.ones(len(run.depth))
    for row in run.used:
        open_share *= 1 - probability(run.similarity[row])
    chosen: list[int] = []
    left = np.ones(len(found), np.bool_)
    for _ in range(min(run.k, len(found))):
        share = open_share / max(float(open_share.max()), 1e-12)
        value = (1 - weight) * relevance + weight * (serves @ share) / max(float(share.sum()), 1e-12)
        best = int(np.where(left, value, -np.inf).argmax())
        left[best] = False
        chosen.append(int(found[best]))
        open_share = open_share * (1 - serves[best])
    return chosen


def _pick_pyversity(strategy: str) -> Callable[[Run], Sequence[int]]:
    diversify = import_module("pyversity").diversify

    def pick(run: Run, pool: int = 200) -> Sequence[int]:
        found = _top(run.relevance, pool, run.fresh)
        result = diversify(run.corpus.units[found], run.relevance[found], run.k, strategy=strategy, diversity=0.5)
        return _listed(found[np.asarray(result.indices)])

    return pick


@dataclass(slots=True)
class _ForeignFact:
    id: int
    embedding: list[float]


def _pick_crprotocol() -> Callable[[Run], Sequence[int]]:
    rank = import_module("crp.envelope.cdr").cdr_rank
    sets = import_module("crp.state.coverage_set")

    def pick(run: Run, gate: float = 0.55, pool: int = 400) -> Sequence[int]:
        found = _top(run.relevance, pool, run.relevance >= gate)
        covered = sets.CoverageSet("m")
        for window in range(1, run.window + 1):
            entries = [
                {"id": str(j), "text": "", "embedding": run.case.subs[j].tolist(), "depth_weight": depth}
                for j, depth, when in run.addressed
                if when == window
            ]
            if entries:
                covered.update(entries, window_number=window)
        if run.window:
            done = {j for j, _, _ in run.addressed}
            left = [j for j in range(len(run.depth)) if j not in done]
            covered.set_residual([sets.ResidualItem("", run.case.subs[j].tolist(), str(j)) for j in left])
        facts = [_ForeignFact(int(i), run.corpus.units[i].tolist()) for i in found]
        result = rank(facts, run.case.query.tolist(), covered, min_relevance=gate)
        return [scored.fact.id for scored in result.ranked[: run.k]]

    return pick


_BASELINES: Mapping[str, Callable[[], Callable[[Run], Sequence[int]]]] = {
    "relevance": lambda: pick_relevance,
    "relevance_excluded": lambda: pick_relevance_excluded,
    "mmr": lambda: pick_mmr,
    "round_robin": lambda: pick_round_robin,
    "xquad": lambda: pick_xquad,
    "pyversity_dpp": lambda: _pick_pyversity("dpp"),
    "pyversity_cover": lambda: _pick_pyversity("cover"),
    "crprotocol": _pick_crprotocol,
}


def baselines(names: Iterable[str] | None = None) -> list[Method]:
    """The baselines of these names; None: all that can be had here (pyversity and crprotocol where installed)."""
    made = []
    for name in _BASELINES if names is None else names:
        if name not in _BASELINES:
            raise ValueError(f"baselines: expected some of {', '.join(_BASELINES)}, got {name!r}")
        try:
            made.append(Method(name, _BASELINES[name]()))
        except ImportError as error:
            if names is not None:
                package = name.partition("_")[0]
                raise ImportError(f"baseline {name!r}: {error}; pip install {package}") from None
    return made
