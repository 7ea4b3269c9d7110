"""Candidates: which facts pass the relevance gate."""

from __future__ import annotations

from cdr_kernel.retrieve._gate_report import GateReport, gate_report, suggest_min_relevance
from cdr_kernel.retrieve._retriever import Candidates, Retriever, retriever_on

__all__ = ["Candidates", "GateReport", "Retriever", "gate_report", "retriever_on", "suggest_min_relevance"]
