"""Sessions: create, look at, update after a window, assess, snapshot, merge, reset, export, resume, delete."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cdr_kernel.loop import crp_headers
from cdr_kernel.loop._assess import WordCount, has_token, sentence_candidates, threshold_steps
from cdr_kernel.loop._headers import COVERAGE_SCORE, GUARD_ACTIVATIONS
from cdr_kernel.loop._run_windows import final_output
from cdr_kernel.rank import Envelope
from cdr_kernel.rank._ranking import StoredNovelty
from cdr_kernel.serve import _schema
from cdr_kernel.serve._errors import Refusal, invalid, not_found, too_large_answer, unavailable
from cdr_kernel.serve._fact_operations import done_of, keyed, replay
from cdr_kernel.serve._idempotency import Done, replayed
from cdr_kernel.serve._service import Answer, Call
from cdr_kernel.serve._sessions import Entry, Version, check_size, new_id, with_answer
from cdr_kernel.serve._settings import for_new_session
from cdr_kernel.serve._signed_tokens import Payload, carried
from cdr_kernel.serve._window_memory import KeptWindow, packed_envelope
from cdr_kernel.session import Exit, Session, SubQuery, WindowReport
from cdr_kernel.session._settings import settings_of
from cdr_kernel.session._token import StoreBehind, head_of
from cdr_kernel.store import FactStore
from cdr_kernel.text import NGramGuard

MOST_SUB_QUERIES = 1024
ATTEMPTS = 20
"""How often a change starts again because another replica was first."""
BATCH = 1024
"""Sentences of an output whose vectors are held at a time."""
STEP = 256
"""Places where a sentence may end that are looked at in one step."""


async def create_session(call: Call) -> Answer:
    """Start a task."""
    body, tenant = call.body, call.tenant
    tenant.check_model(body.embedding_model)
    made = await embedded_sub_queries(call, body.sub_queries)

    def make() -> tuple[Session, Answer]:
        items = sub_queries(body.sub_queries, made, tenant.dim)
        chosen = {name: getattr(body.settings, name) for name in body.settings.__struct_fields__}
        own = {name: value for name, value in {**chosen, "guard": body.guard}.items() if value is not None}
        settings = {"keep_outputs": True, **for_new_session(call.service.settings.new_sessions, own)}
        guarded, budget = settings.pop("guard", None), settings.pop("safety_budget", 1.0)
        chosen_settings = settings_of(settings.pop("mode", "spec"), **settings)
        if guarded is None:
            guarded = chosen_settings.guarded
        session = Session(
            items,
            embedding_model=tenant.model,
            settings=chosen_settings,
            safety_budget=budget,
            guard=NGramGuard(hash_key=call.service.settings.hash_key) if guarded else False,
            id=new_id(),
        )
        check_size(session, {}, call.service.settings.session_bytes)
        return session, session_answer(call, session.id, session)

    async def work() -> Answer:
        session, answer = await call.thread(make)
        call.hold(answer)
        await tenant.sessions.create(session)
        return answer

    return await started(call, work)


async def get_session(call: Call) -> Answer:
    """A session as it is."""
    entry = await call.tenant.sessions.get(call.params["session_id"])
    return await call.thread(lambda: session_answer(call, entry.id, entry.now.session))


async def delete_session(call: Call) -> Answer:
    """Forget a session."""
    entry = await call.tenant.sessions.get(call.params["session_id"])
    answer = await call.thread(lambda: session_answer(call, entry.id, entry.now.session))
    call.hold(answer)
    if not await call.tenant.sessions.delete(entry.id):
        raise not_found("session")
    return answer


async def update_session(call: Call) -> Answer:
    """After a window was written: coverage, residual, blacklist, count (§7.2), then the exits (§6)."""
    body = call.body
    call.tenant.check_model(body.embedding_model)
    writes_report = body.report is None
    entry = await call.tenant.sessions.get(call.params["session_id"])
    window = await call.tenant.sessions.window_of(entry)
    count = await _word_count(call, entry, body.output) if writes_report else None

    def work(entry: Entry, before: Version, twin: Session) -> Generator[None, None, Answer]:
        kept = window if window is not None and window.version == before.number else None
        if body.safety_budget is not None:
            twin.safety_budget = body.safety_budget
        twin.extend(max_windows=body.max_windows)
        if before.session.exit().stop:
            twin.check_open(-1 if kept is None else kept.newest)
        if count is not None:
            if len(count.sub_queries) != len(twin.sub_queries):  # it was extended while the output was read
                raise unavailable("contention", "the session was given other sub-queries meanwhile, try again")
            report = count.report(before.session.words)
        else:
            report = WindowReport(
                completeness_score=body.report.completeness_score,
                addressed=tuple(body.report.addressed),
                depth_by_sub_query=body.report.depth_by_sub_query,
                words_by_sub_query=body.report.words_by_sub_query,
            )
        got = _packed(body.packed, kept, before.session, call.tenant.facts.facts)
        ids = got.envelope.ranking.ids
        yield from twin.update_steps(
            report, body.output, envelope=got.tested, packed=ids, embedding_model=body.embedding_model
        )
        exit = twin.exit(report, got.tested)
        headers = crp_headers(got.envelope, twin, exit)
        headers = {name: value for name, value in headers.items() if name not in got.unknown}
        updated = _schema.Updated(
            session=session_body(entry.id, twin),
            exit=exit_body(exit),
            anchor=twin.anchor(),
            report=report_body(report),
            document=final_output(twin, exit, twin.outputs),
        )
        return call.answer(updated, headers)

    answer = await change(call, work)
    reason = answer.headers.get("CRP-Context-Continuation-Status", "")
    if "Idempotency-Replayed" not in answer.headers:
        call.service.metrics.exits.labels(reason).inc()
    return answer


async def end(call: Call, entry: Entry, version: int, envelope: Envelope) -> int:
    """Remember what an envelope said that ends a session before its next window, and the version that is then."""
    await call.locked(entry.lock)
    try:
        before = entry.now
        if before.number == version:  # else the session went on meanwhile
            twin = before.session.snapshot()
            twin.before_window(envelope)
            if await call.tenant.sessions.commit(entry, before, twin, before.answers):
                return entry.now.number
    finally:
        entry.lock.release()
    return version


async def extend_session(call: Call) -> Answer:
    """Raise the limit of windows or the safety budget, or give the task more sub-queries."""
    body = call.body
    call.tenant.check_model(body.embedding_model)
    made = await embedded_sub_queries(call, body.sub_queries)

    def work(entry: Entry, before: Version, twin: Session) -> Generator[None, None, Answer]:
        total = len(twin.sub_queries) + len(body.sub_queries)
        if total > MOST_SUB_QUERIES:
            raise invalid("sub_queries", f"at most {MOST_SUB_QUERIES} in all", str(total))
        more = sub_queries(body.sub_queries, made, call.tenant.dim)
        yield
        twin.extend(max_windows=body.max_windows, sub_queries=more)
        if body.safety_budget is not None:
            twin.safety_budget = body.safety_budget
        return session_answer(call, entry.id, twin)

    return await change(call, work)


async def assess_output(call: Call) -> Answer:
    """What an output achieved, as a report for an update; the session is not changed."""
    entry = await call.tenant.sessions.get(call.params["session_id"])
    body = call.body
    chosen = {"min_depth": body.min_depth, "expected_words": body.expected_words}
    options = {name: value for name, value in chosen.items() if value is not None}
    count = await _word_count(call, entry, body.output, **options)
    return Answer(report_body(count.report(entry.now.session.words)))


async def reset_session(call: Call) -> Answer:
    """Back to before the first window (§2.7)."""

    def work(entry: Entry, before: Version, twin: Session) -> Generator[None, None, Answer]:
        twin.reset()
        yield
        return session_answer(call, entry.id, twin)

    return await change(call, work)


async def snapshot_session(call: Call) -> Answer:
    """A copy of the session as it is, as a session of its own: a branch of a fan-out, to be merged later."""

    async def work() -> Answer:
        entry = await call.tenant.sessions.get(call.params["session_id"])
        branch, id = entry.now.session.snapshot(), new_id()
        answer = await call.thread(lambda: session_answer(call, id, branch))
        call.hold(answer)
        await call.tenant.sessions.create(branch, id=id)
        return answer

    return await started(call, work)


async def merge_sessions(call: Call) -> Answer:
    """Take over what branches, snapshots of this session, did since."""
    sessions = call.tenant.sessions
    branches = [await sessions.get(id) for id in call.body.branches]

    def work(entry: Entry, before: Version, twin: Session) -> Generator[None, None, Answer]:
        yield from twin.merge_steps([branch.now.session for branch in branches])
        return session_answer(call, entry.id, twin)

    return await change(call, work)


async def export_session(call: Call) -> Answer:
    """The session as a signed token, for `resume` on any replica with the same token key."""
    entry = await call.tenant.sessions.get(call.params["session_id"])
    ttl, store = call.service.settings.session_ttl_s, call.tenant.facts.facts

    def work() -> Answer:
        session = entry.now.session
        most = call.service.settings.max_answer
        if session.guard is not None and 8 * len(session.guard) > most:
            raise too_large_answer(most, 8 * len(session.guard), "blacklist")
        hashes = None if session.guard is None else session.guard.hashes.astype("<u8").tobytes()
        token, blob = session.token_and_blob(store)
        payload = Payload(
            id=entry.id,
            session=token,
            blacklist=None if not hashes else hashlib.sha256(hashes).hexdigest(),
            answers=carried(entry.now.answers),
            expires=int(time.time() + ttl),
        )
        return call.answer(
            _schema.TokenBody(
                token=call.tenant.signer.sign(payload),
                blacklist=hashes or None,
                blob=blob,
                expires_in_s=int(ttl),
                outputs=list(session.outputs) or None,
            )
        )

    return await call.thread(work)


async def resume_session(call: Call) -> Answer:
    """Go on with an exported session, under its id."""
    body, tenant = call.body, call.tenant
    tenant.check_model(body.embedding_model)
    payload = tenant.signer.read(body.token)
    head = head_of(payload.session)
    _check_blob(body.blob, head.get("blob"))
    made = await embedded_sub_queries(call, body.sub_queries)
    key = call.service.settings.hash_key

    def make() -> tuple[Session, Answer] | None:
        guard = None
        if body.blacklist is not None:
            if hashlib.sha256(body.blacklist).hexdigest() != payload.blacklist:
                raise invalid("blacklist", "the one that was exported with the token")
            guard = NGramGuard.from_hashes(np.frombuffer(body.blacklist, "<u8").astype(np.uint64), hash_key=key)
        items = sub_queries(body.sub_queries, made, tenant.dim)
        if guard is None and key is not None and head["guard"] is not None:
            guard = NGramGuard(hash_key=key)
        rest: dict[str, Any] = {
            "guard": guard,
            "store": tenant.facts.facts,
            "blob": body.blob,
            "outputs": body.outputs,
        }
        try:
            session = Session.from_token(payload.session, items, embedding_model=tenant.model, **rest)
        except StoreBehind:
            return None
        check_size(session, payload.answers, call.service.settings.session_bytes)
        return session, session_answer(call, payload.id, session)

    async def work() -> Answer:
        resumed = await call.thread(make)
        if resumed is None:  # another replica has added facts that this one has not read yet
            await _refreshed(call)
            resumed = await call.thread(make)
        if resumed is None:
            message = "the store has not seen all facts of the token yet, try again"
            raise unavailable("store_behind", message)
        session, answer = resumed
        call.hold(answer)
        try:
            await tenant.sessions.create(session, id=payload.id, answers=payload.answers)
        except KeyError:
            message = "the session is here already: delete it to go back to the token's state"
            raise Refusal(409, "session_exists", message, field="token") from None
        return answer

    return await started(call, work)


def _check_blob(blob: bytes | None, digest: str | None) -> None:
    """Raises `Refusal` for a blob that is not the one whose SHA-256 is in the token."""
    if (None if blob is None else hashlib.sha256(blob).hexdigest()) != digest:
        expected = "the one that was exported with the token"
        raise invalid("blob", expected if digest is not None else "null, as it was exported with the token")


async def _refreshed(call: Call) -> None:
    """See what other processes have changed in the store."""
    await call.locked(call.tenant.writes)
    try:
        await call.write(call.tenant.facts.refresh)
    finally:
        call.tenant.writes.release()


async def started(call: Call, work: Callable[[], Awaitable[Answer]]) -> Answer:
    """Do the work of a request that makes a session, once per Idempotency-Key."""
    if call.key is None:
        call.check_deadline()
        return await work()
    await call.locked(call.tenant.starts)
    try:
        return await keyed(call, work)
    finally:
        call.tenant.starts.release()


Change: TypeAlias = Callable[[Entry, Version, Session], Generator[None, None, Answer]]


async def change(call: Call, work: Change) -> Answer:
    """Change a session, one caller at a time: `work` changes a snapshot, which then takes the session's place.

    work: called with the entry, the version that the snapshot is of, and the snapshot. Once per Idempotency-Key. Where
    another replica was first, the change starts again from what it left. The deadline counts until the commit; 504
    means nothing was changed.
    """
    sessions, id = call.tenant.sessions, call.params["session_id"]
    for _ in range(ATTEMPTS):
        entry = await sessions.get(id)
        await call.locked(entry.lock)
        try:
            if await sessions.get(id) is entry:  # else it went, or was read anew, while we waited
                answer = await _changed(call, entry, work)
                if answer is not None:
                    return answer
        finally:
            entry.lock.release()
    raise unavailable("contention", "the session was changed by others all the time, try again")


async def _changed(call: Call, entry: Entry, work: Change) -> Answer | None:
    """The answer of a change that was committed or had been before; None where another replica was first."""
    before = entry.now
    if call.key is not None:
        done = replayed(before.answers.get(call.key), call.digest)
        if done is not None:
            return replay(done)
    call.check_deadline()
    twin = before.session.snapshot()

    def steps() -> Generator[None, None, tuple[Answer, dict[str, Done], int]]:
        answer = yield from work(entry, before, twin)
        answers = with_answer(before.answers, call.key, done_of(call, answer)) if call.key else before.answers
        return answer, answers, check_size(twin, answers, call.service.settings.session_bytes)

    answer, answers, nbytes = await call.thread(steps())
    call.hold(answer)
    call.check_deadline()
    with call.service.stage("commit"):
        committed = await call.tenant.sessions.commit(entry, before, twin, answers, nbytes=nbytes)
    return answer if committed else None


class _Packed(NamedTuple):
    """What a writer got. tested: what exit 3 is tested on, None where its numbers are not known; unknown: headers that
    cannot be told."""

    envelope: Envelope
    tested: Envelope | None
    unknown: frozenset[str]


def _packed(named: Sequence[str] | None, kept: KeptWindow | None, session: Session, facts: FactStore) -> _Packed:
    """What a writer got for the session as it is before its update.

    named: ids of facts, None for those of the last ranking. kept: that ranking. facts: where the novelty of other facts
    comes from.
    """
    depth = len(session.coverage)
    last = None if kept is None else kept.envelope()
    unknown = {GUARD_ACTIVATIONS, COVERAGE_SCORE} if last is None else set()
    if named is None:
        return _Packed(packed_envelope((), None, depth) if last is None else last, last, frozenset(unknown))
    ids = list(dict.fromkeys(named))
    ranked = set() if last is None else set(last.ranking.ids)
    others = [id for id in ids if id not in ranked]
    novelty = _novelty(others, session, facts)
    if len(others) < len(ids) or novelty:
        unknown -= {COVERAGE_SCORE}
    elif ids:
        unknown |= {COVERAGE_SCORE}
    envelope = packed_envelope(ids, last, depth, novelty)
    tested = last  # the calibrated mode asks how many of all ranked facts are new
    if session.settings.in_cosines:
        tested = None if last is None or others or (ranked and not ids) else envelope
    return _Packed(envelope, tested, frozenset(unknown))


def _novelty(ids: Sequence[str], session: Session, facts: FactStore) -> dict[str, float]:
    """§2.2's novelty of those of these facts that are in the store, by id."""
    view, rows = facts.view(), {}
    for id in ids:
        with contextlib.suppress(KeyError):
            (row,) = facts.rows_of([id]).tolist()
            if row < view.rows and view.alive[row] and view.id_of(row) == id:  # else it was changed just now
                rows[id] = row
    novelty = np.asarray(StoredNovelty(view, np.array([*rows.values()], np.int64), session.coverage))
    return dict(zip(rows, novelty.tolist(), strict=True))


async def _word_count(call: Call, entry: Entry, output: str, **options: Any) -> WordCount:
    """The words of an output per sub-query: by vectors where the server embeds, a batch of sentences at a time."""
    count = WordCount(entry.now.session.sub_queries, **options)
    if call.service.embedder_for(call.tenant) is None:
        await call.thread(count.by_words_steps(output))
        return count
    if entry.thresholds is None or len(entry.thresholds) < len(count.sub_queries):  # it was extended
        entry.thresholds = await call.thread(threshold_steps(call.tenant.facts.facts, count.sub_queries))
    thresholds, candidates = entry.thresholds, sentence_candidates(output)
    while sentences := await call.thread(_sentence_steps(candidates)):
        vectors = await call.embed(sentences, "output")
        await call.thread(functools.partial(count.add_vectors, sentences, vectors, thresholds))
    return count


def _sentence_steps(candidates: Iterator[str]) -> Generator[None, None, list[str]]:
    """The next sentences, `BATCH` of them; none at the end."""
    sentences = []
    for number, part in enumerate(candidates, start=1):
        if has_token(part):
            sentences.append(part)
            if len(sentences) == BATCH:
                break
        if number % STEP == 0:
            yield
    return sentences


async def embedded_sub_queries(call: Call, items: Sequence[_schema.NewSubQuery]) -> dict[int, Any]:
    """Vectors that the server makes, by the place of the sub-query: for those that came without."""
    bare = [i for i, item in enumerate(items) if item.embedding is None]
    made: Any = await call.embed([items[i].text for i in bare], f"sub_queries[{bare[0]}].embedding") if bare else []
    return dict(zip(bare, made, strict=True))


def sub_queries(items: Sequence[_schema.NewSubQuery], made: Mapping[int, Any], dim: int) -> list[SubQuery]:
    """The task's decomposition. made: see `embedded_sub_queries`."""
    return [
        SubQuery(
            item.id,
            item.label,
            item.text,
            made[i] if item.embedding is None else _schema.vector(item.embedding, dim, f"sub_queries[{i}].embedding"),
            expected_words=item.expected_words,
            marginal=item.marginal,
        )
        for i, item in enumerate(items)
    ]


def session_answer(call: Call, id: str, session: Session) -> Answer:
    """A session as clients see it, encoded."""
    return call.answer(session_body(id, session))


def session_body(id: str, session: Session) -> _schema.SessionBody:
    """A session as clients see it."""
    state = session.state
    return _schema.SessionBody(
        id=id,
        embedding_model=session.embedding_model,
        mode=session.mode,
        settings=session_settings(session),
        sub_queries=[
            _schema.SubQueryBody(item.id, item.label, item.text, item.expected_words, item.marginal)
            for item in session.sub_queries
        ],
        coverage=[
            _schema.CoverageBody(entry.sub_query_id, entry.depth_weight, entry.window_number)
            for entry in state.coverage
        ],
        residual=[item.id for item in state.residual],
        window_count=state.window_count,
        max_windows=session.max_windows,
        completeness=state.completeness,
        safety_budget=state.safety_budget,
        words=dict(state.words),
        packed=len(state.packed),
        ngrams=None if state.guard is None else len(state.guard),
        anchor=session.anchor(),
        exit=exit_body(session.exit()),
    )


def session_settings(session: Session) -> _schema.SessionSettings:
    """What a session was made with; null for what its mode does not have."""
    return _schema.SessionSettings(**{"mode": session.mode, **asdict(session.settings)})


def exit_body(exit: Exit) -> _schema.ExitBody:
    """An exit as clients see it."""
    return _schema.ExitBody(exit.stop, exit.reason, list(exit.also), exit.escalate, exit.detail, exit.novelty_ratio)


def report_body(report: WindowReport) -> _schema.Report:
    """A report as clients see it and send it."""
    return _schema.Report(
        completeness_score=report.completeness_score,
        addressed=list(report.addressed),
        depth_by_sub_query=dict(report.depth_by_sub_query),
        words_by_sub_query=dict(report.words_by_sub_query),
    )
