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
    """The band of a Coverage-Score (§8.1): "healthy" above .70, "moderate" from .40 to .70, else "low"."""
    if coverage_score > HEALTHY_ABOVE:
        return "healthy"
    return "moderate" if coverage_score >= MODERATE_FROM else "low"


def guarantee_holds(envelope: Envelope) -> bool:
    """Whether a fact passed the gate and the Coverage-Score is above .40 (§9, R35). False for an empty envelope."""
    return envelope.ranking.qualified > 0 and envelope.coverage_score > GUARANTEE_COVERAGE_SCORE


def crp_headers(envelope: Envelope, session: Session, exit: Exit | None = None) -> dict[str, str]:
    """The headers of one window (§6, §8).

    Coverage-Depth (R14), NGram-Guard-Activations (R25), Coverage-Score (R3, R13, R38) and Continuation-Status are
    always there. The Coverage-Score of an empty envelope is 0.00 (R39). Quality-Completeness is there if the reason is
    limit-reached. Mode and Onboarding-Hint are there if ckf-exhausted is a true exit (R39). Scores have two decimals
    (R30).

    Args:
        envelope: The packed facts of the window.
        session: The session.
        exit: What `session.exit` returned. None, or an exit that does not stop, is in-progress.

    Returns:
        The headers by name.
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
