"""Ranking: for a session's next window, and of documents that a request brings along."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import replace
from sys import getsizeof
from typing import Any

import msgspec
import numpy as np

from cdr_kernel.loop import band, crp_headers, guarantee_holds
from cdr_kernel.rank import Envelope, Ranking
from cdr_kernel.rank._pack import count_tokens_default, pack_steps
from cdr_kernel.score import Columns, Scores, cdr_score
from cdr_kernel.serve import _schema
from cdr_kernel.serve._batching import Ask
from cdr_kernel.serve._errors import Refusal, invalid, of_library, refuse, too_large_answer
from cdr_kernel.serve._service import Answer, Call
from cdr_kernel.serve._session_operations import end, exit_body
from cdr_kernel.serve._sessions import new_id
from cdr_kernel.serve._stores import Facts
from cdr_kernel.serve._window_memory import KeptWindow
from cdr_kernel.session import Exit, Session, SessionEnded
from cdr_kernel.spec.constants import DEFAULT_DEPTH, IN_PROGRESS
from cdr_kernel.store._fact_store import Fact, StoreView
from cdr_kernel.validation._arrays import Float64

NO_BUDGET = 2**31 - 1
BYTES_A_TOKEN = 4
"""As `count_tokens_default` counts them."""
FACT_BYTES = 400
"""About what the numbers of a fact take in an answer."""
STEP = 64
"""Facts or documents of one step."""


async def rank_facts(call: Call) -> Answer:
    """The facts for the session's next window, packed, with every number behind them."""
    body, tenant, service = call.body, call.tenant, call.service
    tenant.check_model(body.embedding_model)
    if body.k > service.settings.max_k:
        raise invalid("k", f"at most {service.settings.max_k}", str(body.k))
    query = await _query(call, body.query, body.text, "query")
    entry = await tenant.sessions.get(call.params["session_id"])
    session, version = entry.now.session, entry.now.number
    try:
        session.check_open(tenant.facts.facts.newest)
    except SessionEnded as error:
        refuse(error)
    by_need = session.settings.packing == "need" and body.pack != "greedy"
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

    def pack() -> Generator[None, None, tuple[Answer, Envelope, KeptWindow]]:
        limit = service.settings.max_answer
        most = body.k if by_need and body.max_facts is None else body.max_facts
        wanted = NO_BUDGET if body.token_budget is None else body.token_budget
        budget = min(wanted, limit // BYTES_A_TOKEN)
        with service.stage("pack"):
            envelope = yield from _bounded(pack_steps(ranking, budget, max_facts=most, pack=body.pack), limit)
            if envelope.skipped and budget < wanted:
                raise too_large_answer(limit, field="token_budget")
            envelope = replace(envelope, max_facts=body.max_facts)  # so that an error about k names k
            exit = session.exit(envelope=envelope)
            packed = yield from ranked_steps(envelope, session, exit)
        answer = call.answer(packed, crp_headers(envelope, session, exit))
        return answer, envelope, KeptWindow.of(envelope, version)

    answer, envelope, window = await call.thread(pack())
    call.check_deadline()
    call.hold(answer)
    if answer.value.exit.stop:
        window = msgspec.structs.replace(window, version=await end(call, entry, version, envelope))
    await tenant.sessions.keep_window(entry, window)
    _count(call, ranking, considered, answer.value.exit)
    return answer


def _bounded(steps: Generator[Sequence[Fact], None, Envelope], most: int) -> Generator[None, None, Envelope]:
    """The steps of packing, as long as the facts of the envelope take at most so many bytes; else `Refusal` 413."""
    size = 0
    while True:
        try:
            facts = next(steps)
        except StopIteration as end:
            envelope: Envelope = end.value
            return envelope
        size += sum(map(_fact_bytes, facts))
        if size > most:
            raise too_large_answer(most, field="k")
        yield


def _fact_bytes(fact: Fact) -> int:
    """About what a fact takes, in memory and in an answer."""
    attributes = sum(getsizeof(name) + getsizeof(value) for name, value in fact.attributes.items())
    return FACT_BYTES + getsizeof(fact.id) + getsizeof(fact.text) + getsizeof(fact.source) + attributes


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
    documents = [_schema.Document(text=item) if isinstance(item, str) else item for item in body.documents]
    bare = [i for i, item in enumerate(documents) if item.embedding is None and item.id is None]
    for i in bare:
        if documents[i].text is None:
            raise invalid(f"documents[{i}]", "a text, an embedding or the id of a fact", "none of them")
    where = f"documents[{bare[0]}].embedding" if bare else ""
    embedded: Any = await call.embed([documents[i].text or "" for i in bare], where) if bare else []
    made = dict(zip(bare, embedded, strict=True))

    def work() -> Generator[None, None, Answer]:
        view = tenant.facts.facts.view()
        vectors: list[Any] = []
        rows: dict[str, int] = {}  # of the facts that are named, each once however often it is
        for i, item in enumerate(documents):
            if i in made:
                vectors.append(made[i])
            elif item.embedding is not None:
                vectors.append(_schema.vector(item.embedding, tenant.dim, f"documents[{i}].embedding"))
            else:
                id = item.id or ""
                if id not in rows:
                    rows[id] = _row(tenant.facts, view, id, i)
                vectors.append(view.take(np.array([rows[id]], np.int64))[0])
            if i % STEP == STEP - 1:
                yield
        scores = _scores(body, query, np.array(vectors, np.float64), documents, tenant.dim)
        yield
        texts = _Texts(view, rows, documents)
        results = yield from _results_steps(body, scores, texts, call.service.settings.max_answer)
        tokens = yield from texts.tokens_steps(body.query or "")
        return call.answer(
            _schema.Reranked(
                id=new_id(),
                model=body.model,
                results=results,
                usage=_schema.RerankUsage(tokens),
                meta={"api_version": {"version": "1"}, "documents": len(documents)},
            )
        )

    return await call.thread(work())


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


class _Texts:
    """The texts of a rerank's documents. That of a fact of the store is read where it is looked at, and is one string
    however often the fact is named."""

    def __init__(self, view: StoreView, rows: dict[str, int], documents: list[_schema.Document]) -> None:
        self._view = view
        self._rows = rows
        self._documents = documents
        self._read: dict[int, str] = {}  # texts of rows that results show

    def of(self, i: int) -> str:
        """The text of a document, "" where it has none."""
        item = self._documents[i]
        if item.text is not None or item.embedding is not None or item.id is None:
            return item.text or ""
        row = self._rows[item.id]
        if row not in self._read:
            self._read[row] = self._view.texts([row])[0]
        return self._read[row]

    def tokens_steps(self, query: str) -> Generator[None, None, int]:
        """The tokens of the query and of all documents."""
        tokens = count_tokens_default(query) if query else 0
        of_row: dict[int, int] = {}
        for item in self._documents:
            row = None if item.text is not None or item.embedding is not None else self._rows.get(item.id or "")
            if row is not None and row not in of_row:
                text = self._read.get(row) or self._view.texts([row])[0]
                of_row[row] = count_tokens_default(text) if text else 0
            if row is not None:
                tokens += of_row[row]
            elif item.text:
                tokens += count_tokens_default(item.text)
            yield
        return tokens


def _scores(body: _schema.Rerank, query: Any, rows: Float64, documents: list[_schema.Document], dim: int) -> Scores:
    covered = _schema.matrix(body.covered, dim, "covered[{}]") if body.covered else None
    depths = body.depths if body.depths is not None else [DEFAULT_DEPTH] * len(body.covered)
    columns = Columns.spec(
        query,
        coverage=covered,
        depth_weights=np.array(depths) if body.covered else None,
        residual=_schema.matrix(body.residual, dim, "residual[{}]") if body.residual else None,
        min_relevance=-1.0 if body.min_relevance is None else body.min_relevance,
        first_window_pull=body.first_window_pull,
    )
    return cdr_score(
        rows, columns, importance=np.array([item.importance for item in documents]), k=body.top_n or len(documents)
    )


def _results_steps(
    body: _schema.Rerank, scores: Scores, texts: _Texts, most: int
) -> Generator[None, None, list[_schema.RerankResult]]:
    """The results, whose texts take at most so many bytes; else `Refusal` 413."""
    results = []
    size = 0
    for i, at in enumerate(scores.rows.tolist()):
        document = None
        if body.return_documents:
            document = _schema.RerankDocument(texts.of(at))
            size += getsizeof(document.text)
            if size > most:
                raise too_large_answer(most, field="return_documents")
        results.append(
            _schema.RerankResult(
                index=at,
                relevance_score=float(scores.score[i]),
                relevance=float(scores.relevance[i]),
                coverage=float(scores.coverage[i]),
                residual_pull=float(scores.residual_pull[i]),
                novelty=float(scores.novelty[i]),
                document=document,
            )
        )
        yield
    return results


async def _query(call: Call, given: bytes | list[float] | None, text: str | None, field: str) -> Any:
    """The query's vector [D]: the one that came, or one made of its text."""
    if given is not None:
        return _schema.vector(given, call.tenant.dim, field)
    if text is None:
        raise invalid(field, "a vector, or a text for a server that embeds", "neither")
    return (await call.embed([text], field))[0]


def ranked_steps(envelope: Envelope, session: Session, exit: Exit) -> Generator[None, None, _schema.Ranked]:
    """An envelope as clients see it, in steps."""
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
    facts = []
    for fact, *values in numbers:
        facts.append(
            _schema.RankedFact(
                fact.id,
                fact.text,
                fact.source,
                fact.position,
                fact.sequence,
                dict(fact.attributes),
                *values,
            )
        )
        if len(facts) % STEP == 0:
            yield
    return _schema.Ranked(
        window=session.window_count + 1,
        facts=facts,
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


def _count(call: Call, ranking: Ranking, considered: int, exit: _schema.ExitBody) -> None:
    metrics = call.service.metrics
    metrics.qualified.observe(ranking.qualified)
    metrics.considered.inc(considered)
    metrics.passed.inc(ranking.qualified)
    metrics.guarded.inc(ranking.guard_activations)
    if ranking.guard_alert:
        metrics.alerts.inc()
    metrics.exits.labels(exit.reason or IN_PROGRESS).inc()
