"""What a run did, as plain data: one record per window, and the document of a RUN.json (schema 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from cdr_kernel.files._files import Task
from cdr_kernel.loop import Window
from cdr_kernel.rank._pack import count_tokens_default
from cdr_kernel.rank._tables import BREAKDOWN
from cdr_kernel.report._store_map import StoreMap
from cdr_kernel.spec.constants import MIN_NOVELTY_FLOOR
from cdr_kernel.text import tokenize

RUN_SCHEMA = 1


class RunRecord:
    """Collects the windows of one run of a task.

    A fact is fresh in the first written window that packs it and repeated after. Sub-topics reached are the
    sub-queries with a labelled fact (`fact_ids`) in a window written so far; None where the task has no labels.
    Only the part of a topic that reached an envelope is known, not whether a writer made anything of it.

    map: where facts lie, for reports; without one no fact has a place. output: see `Window.document`, of the last one.
    """

    def __init__(self, task: Task, map: StoreMap | None = None) -> None:
        self.task = task
        self.map = map
        self.windows: list[dict[str, Any]] = []
        self.output: str | None = None
        self._packed: set[str] = set()

    @property
    def packed(self) -> int:
        """Different facts in the windows written so far."""
        return len(self._packed)

    def add(self, window: Window) -> dict[str, Any]:
        """Take in a window; returns its record."""
        ranking, envelope = window.envelope.ranking, window.envelope
        places = [None] * len(ranking) if self.map is None else self.map.places(ranking.ids)
        facts = [
            {
                "id": fact.id,
                "source": fact.source,
                "tokens": count_tokens_default(fact.text),
                "fresh": fact.id not in self._packed,
                **{name: getattr(ranking, name)[i].item() for name in BREAKDOWN},
                "spec_novelty": ranking.spec_novelty[i].item(),
                "place": places[i],
            }
            for i, fact in enumerate(envelope.facts)
        ]
        fresh = sum(fact["fresh"] for fact in facts)
        fresh_words = sum(len(tokenize(fact.text)) for fact in envelope.facts if fact.id not in self._packed)
        written = window.output is not None
        if written:
            self._packed.update(ranking.ids)
        report = window.report
        record = {
            "number": window.number,
            "written": written,
            "anchor": window.prompt.anchor,
            "envelope": {
                "ids": ranking.ids,
                "texts": [fact.text for fact in envelope.facts],
                "tokens": envelope.tokens,
                "token_budget": envelope.token_budget,
                "skipped": envelope.skipped,
                "qualified": ranking.qualified,
                "new_share": ranking.new_share,
                "guard_activations": ranking.guard_activations,
                "guard_alert": ranking.guard_alert,
                "coverage_depth": ranking.coverage_depth,
            },
            "facts": facts,
            "fresh": fresh,
            "repeated": len(facts) - fresh,
            **novelty_of(ranking.spec_novelty),
            "topics_reached": self._reached(),
            "headers": window.headers,
            "band": window.band,
            "guarantee_holds": window.guarantee_holds,
            "exit": asdict(window.exit),
            "report": None
            if report is None
            else {
                "completeness_score": report.completeness_score,
                "addressed": list(report.addressed),
                "depth_by_sub_query": dict(report.depth_by_sub_query),
                "words_by_sub_query": dict(report.words_by_sub_query),
                "embedding_model": report.embedding_model,
            },
            "fresh_words": fresh_words if written else 0,
            "words": 0 if window.output is None else len(tokenize(window.output)),
            "output": window.output,
        }
        self.windows.append(record)
        self.output = window.document
        return record

    def _reached(self) -> int | None:
        labelled = [item.fact_ids for item in self.task.items if item.fact_ids is not None]
        return sum(not ids.isdisjoint(self._packed) for ids in labelled) if labelled else None

    def document(
        self,
        *,
        settings: Mapping[str, Any],
        model: str,
        store: Mapping[str, Any],
        complete: bool,
        error: str | None = None,
    ) -> dict[str, Any]:
        """The run as it is now, for a RUN.json. complete: whether an exit of §6 ended it; error: what else did."""
        task = self.task
        return {
            "schema": RUN_SCHEMA,
            "complete": complete,
            "error": error,
            "task": {
                "id": task.id,
                "index": task.index,
                "query": task.query,
                "sub_queries": [
                    {
                        "id": item.id,
                        "label": item.label,
                        "text": item.text,
                        "expected_words": item.expected_words,
                        "marginal": item.marginal,
                    }
                    for item in task.items
                ],
            },
            "settings": dict(settings),
            "model": model,
            "store": dict(store),
            "map": None if self.map is None else self.map.as_dict(),
            "windows": self.windows,
            "document": self.output,
        }


def novelty_of(novelty: Any) -> dict[str, float | None]:
    """Mean and minimum of novelties, each clamped to [0.20, 1] as reports are (reading R3); None for no facts."""
    if not len(novelty):
        return {"novelty_mean": None, "novelty_min": None}
    clamped = np.clip(novelty, MIN_NOVELTY_FLOOR, 1.0)
    return {"novelty_mean": float(clamped.mean()), "novelty_min": float(clamped.min())}


def summary(windows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The windows without texts and breakdowns, one flat object each."""
    kept = (
        "number",
        "written",
        "fresh",
        "repeated",
        "novelty_mean",
        "novelty_min",
        "topics_reached",
        "words",
        "fresh_words",
    )
    return [
        {
            **{name: window[name] for name in kept},
            "facts": len(window["facts"]),
            "completeness": None if window["report"] is None else window["report"]["completeness_score"],
            "anchor": window["anchor"],
            "headers": window["headers"],
            "exit": window["exit"],
        }
        for window in windows
    ]
