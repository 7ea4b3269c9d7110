"""The table of operations: where each is, what it takes and answers. Routes and the OpenAPI document come of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from cdr_kernel.serve import _fact_operations as facts
from cdr_kernel.serve import _rank_operations as ranks
from cdr_kernel.serve import _schema
from cdr_kernel.serve import _session_operations as sessions
from cdr_kernel.serve._service import Answer, Call

CRP_HEADERS = (
    "CRP-Context-Coverage-Depth",
    "CRP-Context-NGram-Guard-Activations",
    "CRP-Context-Continuation-Status",
    "CRP-Context-Coverage-Score",
    "CRP-Quality-Completeness",
    "CRP-Context-Mode",
    "CRP-Onboarding-Hint",
)


@dataclass(frozen=True)
class Operation:
    """One operation under /v1.

    run: its first docstring line is its summary. body: the struct it takes, None for none. answer: the struct it
    answers with 200. keyed: whether an Idempotency-Key means something to it. crp: whether it answers with the headers
    of §6 and §8.
    """

    method: str
    path: str
    run: Callable[[Call], Awaitable[Answer]]
    answer: type[Any]
    body: type[Any] | None = None
    keyed: bool = False
    crp: bool = False

    @property
    def name(self) -> str:
        """What metrics and logs call it."""
        return self.run.__name__


SESSION = "/v1/sessions/{session_id}"

OPERATIONS = (
    Operation("POST", "/v1/facts", facts.add_facts, _schema.FactsAdded, _schema.AddFacts, keyed=True),
    Operation("PUT", "/v1/facts", facts.upsert_facts, _schema.FactsAdded, _schema.AddFacts, keyed=True),
    Operation("POST", "/v1/facts/delete", facts.remove_facts, _schema.FactsRemoved, _schema.FactIds, keyed=True),
    Operation(
        "POST", "/v1/facts/quarantine", facts.quarantine_facts, _schema.FactsChanged, _schema.Quarantine, keyed=True
    ),
    Operation("POST", "/v1/facts/release", facts.release_facts, _schema.FactsChanged, _schema.Release, keyed=True),
    Operation("GET", "/v1/facts/{fact_id}", facts.get_fact, _schema.FactBody),
    Operation("DELETE", "/v1/facts/{fact_id}", facts.delete_fact, _schema.FactsRemoved, keyed=True),
    Operation("GET", "/v1/stats", facts.stats, _schema.Stats),
    Operation("POST", "/v1/sessions", sessions.create_session, _schema.SessionBody, _schema.NewSession, keyed=True),
    Operation(
        "POST", "/v1/sessions/resume", sessions.resume_session, _schema.SessionBody, _schema.ResumeSession, keyed=True
    ),
    Operation("GET", SESSION, sessions.get_session, _schema.SessionBody),
    Operation("DELETE", SESSION, sessions.delete_session, _schema.SessionBody),
    Operation("POST", f"{SESSION}/rank", ranks.rank_facts, _schema.Ranked, _schema.RankFacts, crp=True),
    Operation(
        "POST",
        f"{SESSION}/update",
        sessions.update_session,
        _schema.Updated,
        _schema.UpdateSession,
        keyed=True,
        crp=True,
    ),
    Operation(
        "POST", f"{SESSION}/extend", sessions.extend_session, _schema.SessionBody, _schema.ExtendSession, keyed=True
    ),
    Operation("POST", f"{SESSION}/assess", sessions.assess_output, _schema.Report, _schema.AssessOutput),
    Operation("POST", f"{SESSION}/reset", sessions.reset_session, _schema.SessionBody, keyed=True),
    Operation("POST", f"{SESSION}/snapshot", sessions.snapshot_session, _schema.SessionBody, keyed=True),
    Operation(
        "POST", f"{SESSION}/merge", sessions.merge_sessions, _schema.SessionBody, _schema.MergeSessions, keyed=True
    ),
    Operation("POST", f"{SESSION}/token", sessions.export_session, _schema.TokenBody),
    Operation("POST", "/v1/rerank", ranks.rerank, _schema.Reranked, _schema.Rerank),
)
