"""Facts: add, replace, remove, look at."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from cdr_kernel.serve import _schema
from cdr_kernel.serve._errors import not_found, quarantined
from cdr_kernel.serve._idempotency import LARGEST_BODY, Done, replayed
from cdr_kernel.serve._limits import check_attributes
from cdr_kernel.serve._service import Answer, Call
from cdr_kernel.serve._stores import Facts


async def add_facts(call: Call) -> Answer:
    """Add facts that are not there yet."""
    return await _put(call, call.tenant.facts.add)


async def upsert_facts(call: Call) -> Answer:
    """Add facts; one that is there is replaced whole and becomes the newest."""
    return await _put(call, call.tenant.facts.upsert)


async def _put(call: Call, put: Callable[..., Any]) -> Answer:
    tenant, body = call.tenant, call.body
    tenant.check_model(body.embedding_model)
    check_attributes(body.facts, tenant.facts.facts.view().attribute_names, call.service.settings)
    bare = [i for i, fact in enumerate(body.facts) if fact.embedding is None]
    made: Any = await call.embed([body.facts[i].text for i in bare], f"facts[{bare[0]}].embedding") if bare else []
    given = dict(zip(bare, (row.astype("<f4").tobytes() for row in made), strict=True))

    def write() -> _schema.FactsAdded:
        vectors = [given[i] if fact.embedding is None else fact.embedding for i, fact in enumerate(body.facts)]
        added = put(
            [fact.id for fact in body.facts],
            [fact.text for fact in body.facts],
            _schema.matrix(vectors, tenant.dim, "facts[{}].embedding"),
            importance=[fact.importance for fact in body.facts],
            source=[fact.source for fact in body.facts],
            position=[fact.position for fact in body.facts],
            attributes={
                name: [fact.attributes.get(name) for fact in body.facts]
                for name in dict.fromkeys(name for fact in body.facts for name in fact.attributes)
            },
            expires_at=[fact.expires_at for fact in body.facts],
            on_invalid=body.on_invalid,
        )
        return _schema.FactsAdded(added.added, list(added.skipped), tenant.facts.facts.version)

    return await once(call, lambda: _written(call, write))


async def remove_facts(call: Call) -> Answer:
    """Remove facts: they are gone for the next rank."""
    body = call.body

    def write() -> _schema.FactsRemoved:
        removed = call.tenant.facts.remove(body.ids, missing=body.missing)
        return _schema.FactsRemoved(removed, call.tenant.facts.facts.version)

    return await once(call, lambda: _written(call, write))


async def quarantine_facts(call: Call) -> Answer:
    """Take facts out of every ranking until they are released."""
    facts, body = call.tenant.facts, call.body
    return await once(call, lambda: _written(call, lambda: _changed(facts, facts.quarantine(body.ids, body.reason))))


async def release_facts(call: Call) -> Answer:
    """Let quarantined facts into rankings again."""
    facts, body = call.tenant.facts, call.body
    return await once(call, lambda: _written(call, lambda: _changed(facts, facts.release(body.ids))))


def _changed(facts: Facts, count: int) -> _schema.FactsChanged:
    return _schema.FactsChanged(count, facts.facts.version)


async def get_fact(call: Call) -> Answer:
    """A fact as it is stored."""
    facts, id = call.tenant.facts, call.params["fact_id"]

    def read() -> Answer:
        try:
            fact = facts.facts.get([id])[0]
        except KeyError:
            if id in facts.quarantined:
                raise quarantined(id, facts.quarantined[id]) from None
            raise not_found("fact") from None
        return call.answer(
            _schema.FactBody(
                fact.id, fact.text, fact.source, fact.position, fact.importance, fact.sequence, dict(fact.attributes)
            )
        )

    return await call.thread(read)


async def delete_fact(call: Call) -> Answer:
    """Remove one fact."""
    facts, id = call.tenant.facts, call.params["fact_id"]

    def write() -> _schema.FactsRemoved:
        try:
            return _schema.FactsRemoved(facts.remove([id]), facts.facts.version)
        except KeyError:
            raise not_found("fact") from None

    return await once(call, lambda: _written(call, write))


async def stats(call: Call) -> Answer:
    """The tenant's store and sessions in this process."""
    tenant, store = call.tenant, call.tenant.facts.facts
    defaults = dict(call.service.settings.new_sessions)
    guard = defaults.pop("guard", None)
    return Answer(
        _schema.Stats(
            facts=len(store),
            quarantined=len(tenant.facts.quarantined),
            dim=store.dim,
            dtype=store.dtype.name,
            embedding_model=store.embedding_model,
            store_version=store.version,
            durable=tenant.facts.durable,
            can_embed=call.service.embedder_for(tenant) is not None,
            sessions=len(tenant.local),
            session_bytes=tenant.local.nbytes,
            row_cache_bytes=tenant.retriever.cache.nbytes,
            new_sessions=_schema.SessionDefaults(_schema.SessionSettings(**defaults), guard),
        )
    )


async def _written(call: Call, write: Callable[[], Any]) -> Answer:
    with call.service.stage("write"):
        return Answer(await call.write(write))


async def once(call: Call, work: Callable[[], Awaitable[Answer]]) -> Answer:
    """Do the work of a request that changes facts, one at a time, and once per Idempotency-Key.

    Until it begins the deadline counts; then it is finished and answered, so that 504 means nothing was changed.
    """
    await call.locked(call.tenant.writes)
    try:
        return await keyed(call, work)
    finally:
        call.tenant.writes.release()


async def keyed(call: Call, work: Callable[[], Awaitable[Answer]]) -> Answer:
    """Do the work, unless its Idempotency-Key has an answer; for a caller that has the lock."""
    answers = call.tenant.sessions.answers
    if call.key is not None:
        done = replayed(await answers.get(call.key), call.digest)
        if done is not None:
            return replay(done)
    call.check_deadline()
    answer = await work()
    if call.key is not None:
        await answers.put(call.key, done_of(call, answer))
    return answer


def done_of(call: Call, answer: Answer) -> Done:
    """An answer as it is kept for its key: one that is large as a note that the request was done."""
    about = getattr(answer.value, "session", answer.value)
    session = about.id if isinstance(about, _schema.SessionBody) else None
    size = 0 if answer.encoded is None else len(answer.encoded)
    if size > 4 * LARGEST_BODY:  # larger in msgpack too
        return Done(call.digest, 200, {}, b"", size, session)
    done = Done(call.digest, 200, answer.headers, _schema.encode(answer.value, True)[0], session=session)
    return done if len(done.body) <= LARGEST_BODY else done.without_body()


def replay(done: Done) -> Answer:
    """A kept answer, as it was given, with a header that says so."""
    return Answer(msgspec.msgpack.decode(done.body), {**done.headers, "Idempotency-Replayed": "true"})
