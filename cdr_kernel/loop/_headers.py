"""Envelope and session in, every header of §6 and §8 out."""

from __future__ import annotations

from cdr_kernel.rank import Envelope
from cdr_kernel.session import Exit, Session
from cdr_kernel.spec.constants import CKF_EXHAUSTED, GUARANTEE_COVERAGE_SCORE, IN_PROGRESS, LIMIT_REACHED

COVERAGE_SCORE = "CRP-Context-Coverage-Score"
GUARD_ACTIVATIONS = "CRP-Context-NGram-Guard-Activations"
ONBOARDING_HINT = "ingest-more-documents-for-continued-quality"
HEALTHY_ABOVE = 0.70
MODERATE_FROM = 0.40


def band(coverage_score: float) -> str:
    """§8.1: "healthy" for a Coverage-Score above .70, "moderate" from .40 to .70, else "low"."""
    if coverage_score > HEALTHY_ABOVE:
        return "healthy"
    return "moderate" if coverage_score >= MODERATE_FROM else "low"


def guarantee_holds(envelope: Envelope) -> bool:
    """§9, R35: whether a fact passed the gate and the Coverage-Score is above .40. Empty envelope: False."""
    return envelope.ranking.qualified > 0 and envelope.coverage_score > GUARANTEE_COVERAGE_SCORE


def crp_headers(envelope: Envelope, session: Session, exit: Exit | None = None) -> dict[str, str]:
    """§6, §8: the headers of one window.

    Always: Coverage-Depth (entries at packing time, R14), NGram-Guard-Activations (over all facts that passed
    the gate, R25), Continuation-Status (in-progress without an exit or when it does not stop) and Coverage-Score
    (R3, R13, R38; 0.00 for an empty envelope, R39). Quality-Completeness when the reason is limit-reached; both numbers
    have two decimals (R30). Mode and Onboarding-Hint when ckf-exhausted is the reason or among `also` (R39).
    """
    reason = None if exit is None else exit.reason
    headers = {
        COVERAGE_SCORE: f"{envelope.coverage_score:.2f}",
        "CRP-Context-Coverage-Depth": str(envelope.ranking.coverage_depth),
        GUARD_ACTIVATIONS: str(envelope.ranking.guard_activations),
        "CRP-Context-Continuation-Status": IN_PROGRESS if reason is None else reason,
    }
    if reason == LIMIT_REACHED:
        headers["CRP-Quality-Completeness"] = f"{session.completeness:.2f}"
    if exit is not None and CKF_EXHAUSTED in (exit.reason, *exit.also):
        headers["CRP-Context-Mode"] = CKF_EXHAUSTED
        headers["CRP-Onboarding-Hint"] = ONBOARDING_HINT
    return headers
