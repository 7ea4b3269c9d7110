"""Ranking: for a session's next window, and of documents that a request brings along."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np

from cdr_kernel.arrays import Float64
from cdr_kernel.columns import Columns
from cdr_kernel.constants import DEFAULT_DEPTH, IN_PROGRESS
from cdr_kernel.headers import band, crp_headers, guarantee_holds
from cdr_kernel.pack import Envelope, count_tokens_default, pack_facts
from cdr_kernel.rank import Ranking
from cdr_kernel.score import cdr_score
from cdr_kernel.serve import schema
from cdr_kernel.serve.batching import Ask
from cdr_kernel.serve.errors import Refusal, invalid, of_library, refuse
from cdr_kernel.serve.kept_window import KeptWindow
from cdr_kernel.serve.service import Answer, Call
from cdr_kernel.serve.session_operations import exit_body
from cdr_kernel.serve.sessions import new_id
from cdr_kernel.serve.stores import Facts
from cdr_kernel.session import Session
from cdr_kernel.store import StoreView
from cdr_kernel.task import Exit

NO_BUDGET = 2**31 - 1


async def rank_facts(call: Call) -> Answer:
    """The facts for the session's next window, packed, with every number behind them."""
    body, tenant, service = call.body, call.tenant, call.service
    tenant.check_model(body.embedding_model)
    if body.k > service.settings.max_k:
        raise invalid("k", f"at most {service.settings.max_k}", str(body.k))
    query = await _query(call, body.query, body.text, "query")
    entry = await tenant.sessions.get(call.params["session_id"])
    session, version = entry.now.session, entry.now.number
    by_need = session.calibrated is not None and body.pack != "greedy"
    if body.pack == "need" and not by_need:
        raise invalid("pack", '"greedy" for a session of mode "spec"', '"need"')
    ask = Ask(
        query=query,
        session=session,
        k=None if by_need else body.k,
        deadline=call.deadline,
        multiplier=body.multiplier,
        where=body.where,
    )
    try:
        with contextlib.nullcontext() if service.tracing is None else service.tracing.part("rank"):
            ranking = await service.batcher.rank(tenant.lane, ask)
    except KeyError as error:  # of a column that no fact has, or of facts that are not there
        raise of_names(str(error.args[0])) from None
    except Exception as error:  # `refuse` raises it again where it is not the request's fault
        refuse(error)
    considered = len(tenant.facts.facts)

    def pack() -> tuple[Answer, KeptWindow]:
        most = body.k if by_need and body.max_facts is None else body.max_facts
        budget = NO_BUDGET if body.token_budget is None else body.token_budget
        with service.stage("pack"):
            envelope = pack_facts(ranking, budget, max_facts=most, pack=body.pack)
            envelope = replace(envelope, max_facts=body.max_facts)  # so that an error about k names k
            exit = session.exit(envelope=envelope)
            answer = Answer(ranked(envelope, session, exit), crp_headers(envelope, session, exit))
        return answer, KeptWindow.of(envelope, version)

    answer, window = await call.thread(pack)
    call.check_deadline()
    await tenant.sessions.keep_window(entry, window)
    _count(call, ranking, considered, answer.value.exit)
    return answer


def of_names(message: str) -> Refusal:
    """A name in a rank that the store does not know."""
    field, _, what = message.partition(": ")
    if field == "multiplier":
        return invalid(field, "ids of facts that are in the store", what.removesuffix(" not in the store"))
    return of_library(ValueError(message)) or Refusal(422, "invalid", message, field="where")


async def rerank(call: Call) -> Answer:
    """Rank the request's own documents: without a session, in one call."""
    body, tenant = call.body, call.tenant
    tenant.check_model(body.model, "model")
    most = call.service.settings.max_documents
    if len(body.documents) > most:
        raise invalid("documents", f"at most {most}", str(len(body.documents)))
    if body.depths is not None and len(body.depths) != len(body.covered):
        raise invalid("depths", f"{len(body.covered)} (one per covered vector)", str(len(body.depths)))
    query = await _query(call, body.query_embedding, body.query or None, "query_embedding")
    documents = [schema.Document(text=item) if isinstance(item, str) else item for item in body.documents]
    bare = [i for i, item in enumerate(documents) if item.embedding is None and item.id is None]
    for i in bare:
        if documents[i].text is None:
            raise invalid(f"documents[{i}]", "a text, an embedding or the id of a fact", "none of them")
    where = f"documents[{bare[0]}].embedding" if bare else ""
    embedded: Any = await call.embed([documents[i].text or "" for i in bare], where) if bare else []
    made = dict(zip(bare, embedded, strict=True))

    def work() -> schema.Reranked:
        view = tenant.facts.facts.view()
        vectors, texts = [], []
        for i, item in enumerate(documents):
            text = item.text
            if i in made:
                vectors.append(made[i])
            elif item.embedding is not None:
                vectors.append(schema.vector(item.embedding, tenant.dim, f"documents[{i}].embedding"))
            else:
                row = _row(tenant.facts, view, item.id or "", i)
                text = view.texts([row])[0] if text is None else text
                vectors.append(view.take(np.array([row], np.int64))[0])
            texts.append(text or "")
        return _reranked(body, query, np.array(vectors, np.float64), documents, texts, tenant.dim)

    return Answer(await call.thread(work))


def _row(facts: Facts, view: StoreView, id: str, i: int) -> int:
    """The row of a fact in a view; by its sequence number, since a view would index all its ids for one."""
    try:
        sequence = facts.facts.get([id])[0].sequence
    except KeyError:
        sequence = -1
    row = int(np.searchsorted(view.sequence, sequence))
    if row >= view.rows or view.sequence[row] != sequence or not view.alive[row]:
        got = f"{id!r}, which is quarantined" if id in facts.quarantined else repr(id)
        raise invalid(f"documents[{i}].id", "the id of a fact of the store, or an embedding", got)
    return row


def _reranked(
    body: schema.Rerank,
    query: Any,
    rows: Float64,
    documents: list[schema.Document],
    texts: list[str],
    dim: int,
) -> schema.Reranked:
    covered = schema.matrix(body.covered, dim, "covered[{}]") if body.covered else None
    depths = body.depths if body.depths is not None else [DEFAULT_DEPTH] * len(body.covered)
    columns = Columns.spec(
        query,
        coverage=covered,
        depth_weights=np.array(depths) if body.covered else None,
        residual=schema.matrix(body.residual, dim, "residual[{}]") if body.residual else None,
        min_relevance=-1.0 if body.min_relevance is None else body.min_relevance,
        first_window_pull=body.first_window_pull,
    )
    scores = cdr_score(
        rows, columns, importance=np.array([item.importance for item in documents]), k=body.top_n or len(documents)
    )
    results = [
        schema.RerankResult(
            index=int(scores.rows[i]),
            relevance_score=float(scores.score[i]),
            relevance=float(scores.relevance[i]),
            coverage=float(scores.coverage[i]),
            residual_pull=float(scores.residual_pull[i]),
            novelty=float(scores.novelty[i]),
            document=schema.RerankDocument(texts[int(scores.rows[i])]) if body.return_documents else None,
        )
        for i in range(len(scores.rows))
    ]
    tokens = sum(count_tokens_default(text) for text in [body.query or "", *texts] if text)
    return schema.Reranked(
        id=new_id(),
        model=body.model,
        results=results,
        usage=schema.RerankUsage(tokens),
        meta={"api_version": {"version": "1"}, "documents": len(documents)},
    )


async def _query(call: Call, given: bytes | list[float] | None, text: str | None, field: str) -> Any:
    """The query's vector [D]: the one that came, or one made of its text."""
    if given is not None:
        return schema.vector(given, call.tenant.dim, field)
    if text is None:
        raise invalid(field, "a vector, or a text for a server that embeds", "neither")
    return (await call.embed([text], field))[0]


def ranked(envelope: Envelope, session: Session, exit: Exit) -> schema.Ranked:
    """An envelope as clients see it."""
    ranking = envelope.ranking
    numbers = zip(
        ranking.facts,
        ranking.score.tolist(),
        ranking.score_without_guard.tolist(),
        ranking.relevance.tolist(),
        ranking.coverage.tolist(),
        ranking.residual_pull.tolist(),
        ranking.novelty.tolist(),
        ranking.ngram_overlap.tolist(),
        ranking.ngram_penalty.tolist(),
        ranking.importance.tolist(),
        ranking.multiplier.tolist(),
        ranking.spec_novelty.tolist(),
        strict=True,
    )
    return schema.Ranked(
        window=session.window_count + 1,
        facts=[
            schema.RankedFact(
                fact.id,
                fact.text,
                fact.source,
                fact.position,
                fact.sequence,
                dict(fact.attributes),
                *values,
            )
            for fact, *values in numbers
        ],
        tokens=envelope.tokens,
        skipped=envelope.skipped,
        qualified=ranking.qualified,
        guard_activations=ranking.guard_activations,
        guard_alert=ranking.guard_alert,
        coverage_depth=ranking.coverage_depth,
        coverage_score=envelope.coverage_score,
        band=None if envelope.min_novelty is None else band(envelope.min_novelty),
        guarantee_holds=guarantee_holds(envelope),
        store_version=ranking.store_version,
        exit=exit_body(exit),
        anchor=session.anchor(),
    )


def _count(call: Call, ranking: Ranking, considered: int, exit: schema.ExitBody) -> None:
    metrics = call.service.metrics
    metrics.qualified.observe(ranking.qualified)
    metrics.considered.inc(considered)
    metrics.passed.inc(ranking.qualified)
    metrics.guarded.inc(ranking.guard_activations)
    if ranking.guard_alert:
        metrics.alerts.inc()
    metrics.exits.labels(exit.reason or IN_PROGRESS).inc()
