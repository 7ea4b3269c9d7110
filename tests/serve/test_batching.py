"""Batches of ranks: the same rankings, fair turns, bounded queues, and nobody pays for another's mistake."""

from __future__ import annotations

import asyncio
import threading
from time import monotonic

import msgspec
import numpy as np
import pytest
from serving import DIM, make_store, query, same_session

from cdr_kernel import Retriever, cdr_rank
from cdr_kernel.serve import _batching
from cdr_kernel.serve._batching import Ask, Batcher, Lane
from cdr_kernel.serve._errors import Refusal


@pytest.fixture
def held(monkeypatch):
    """An event that every rank waits for; `held.entered` is set once the first one does."""
    go = threading.Event()
    go.entered = threading.Event()
    real = _batching.rank_many

    def rank_many(*args, **kwargs):
        go.entered.set()
        assert go.wait(20)
        return real(*args, **kwargs)

    monkeypatch.setattr(_batching, "rank_many", rank_many)
    return go


def ask(seed=1, k=5, seconds=20.0, **more):
    return Ask(query(seed), same_session(), k, monotonic() + seconds, **more)


async def all_of(batcher, lanes, asks, held, after=0.0):
    """What comes of these asks, of which the thread takes the first alone and then the rest."""
    tasks = []
    for lane, each in zip(lanes, asks, strict=True):
        tasks.append(asyncio.create_task(batcher.rank(lane, each)))
        await asyncio.sleep(0)
        await asyncio.to_thread(held.entered.wait, 20)
    await asyncio.sleep(after)
    held.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_batches_answer_as_single_ranks_do(held):
    sizes = []
    batcher = Batcher(most=8, depth=100, report=lambda size, waited, seconds: sizes.append(size))
    lane = Lane(Retriever(make_store()))
    ks = [5, 3, 0, 12, 1000, 5, 7, None, None, 4, 5]
    weights = {"f1": 3.0, "f2": 0.0}
    asks = [ask(i, k) for i, k in enumerate(ks)] + [ask(20, 5, multiplier=weights), ask(21, 5, multiplier=weights)]
    found = asyncio.run(all_of(batcher, [lane] * len(asks), asks, held))
    batcher.close()
    for each, ranking in zip(asks, found, strict=True):
        alone = cdr_rank(each.query, Retriever(make_store()), each.session, k=each.k, multiplier=each.multiplier)
        assert ranking.ids == alone.ids
        assert ranking.score.tobytes() == alone.score.tobytes()
        assert ranking.qualified == alone.qualified
    assert sizes == [1, 8, 2, 1, 1]  # the first, those with a k, those for all facts, each multiplier


def test_one_at_a_time_where_asked(held):
    sizes = []
    batcher = Batcher(most=1, depth=100, report=lambda size, waited, seconds: sizes.append(size))
    lane = Lane(Retriever(make_store()))
    asyncio.run(all_of(batcher, [lane] * 4, [ask(i) for i in range(4)], held))
    batcher.close()
    assert sizes == [1, 1, 1, 1]


def test_a_full_lane_refuses_and_another_does_not(held):
    batcher = Batcher(most=8, depth=2)
    full, free = Lane(Retriever(make_store())), Lane(Retriever(make_store(seed=3)))
    lanes = [full, full, full, full, free]

    found = asyncio.run(all_of(batcher, lanes, [ask(i) for i in range(5)], held))
    batcher.close()
    refused = [each for each in found if isinstance(each, Refusal)]
    assert [each.status for each in refused] == [429]
    assert refused[0].headers == {"Retry-After": "1"}
    assert found[3] is refused[0]
    assert len(found[4]) == 5


def test_tenants_take_turns(held):
    order = []
    batcher = Batcher(most=1, depth=100)
    real = batcher._rank

    def noted(lane, batch):
        order.append(lane)
        real(lane, batch)

    batcher._rank = noted
    busy, quiet = Lane(Retriever(make_store())), Lane(Retriever(make_store()))
    asyncio.run(all_of(batcher, [busy] * 6 + [quiet], [ask(i) for i in range(7)], held))
    batcher.close()
    assert order.index(quiet) == 2


def test_a_deadline_that_passes_in_the_queue_is_504_and_costs_no_rank(held):
    sizes = []
    batcher = Batcher(most=8, depth=100, report=lambda size, waited, seconds: sizes.append(size))
    lane = Lane(Retriever(make_store()))
    asks = [ask(0), ask(1, seconds=0.02), ask(2)]
    found = asyncio.run(all_of(batcher, [lane] * 3, asks, held, after=0.2))
    batcher.close()
    assert isinstance(found[1], Refusal)
    assert found[1].status == 504
    assert len(found[0]) == len(found[2]) == 5
    assert sizes == [1, 1]


def test_nobody_pays_for_anothers_mistake(held):
    batcher = Batcher(most=8, depth=100)
    lane = Lane(Retriever(make_store()))
    bad = Ask(np.zeros(DIM), same_session(), 5, monotonic() + 20)
    found = asyncio.run(all_of(batcher, [lane] * 4, [ask(0), ask(1), bad, ask(2)], held))
    batcher.close()
    assert isinstance(found[2], ValueError)
    assert [len(found[i]) for i in (0, 1, 3)] == [5, 5, 5]


def test_closing_ranks_whoever_waits_and_takes_no_more(held):
    batcher = Batcher(most=2, depth=100)
    lane = Lane(Retriever(make_store()))

    async def run():
        tasks = [asyncio.create_task(batcher.rank(lane, ask(i))) for i in range(5)]
        await asyncio.to_thread(held.entered.wait, 20)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        while not batcher._closed:
            await asyncio.sleep(0.001)
        with pytest.raises(Refusal) as caught:
            await batcher.rank(lane, ask(9))
        held.set()
        await closing
        return caught.value.status, await asyncio.gather(*tasks)

    status, found = asyncio.run(run())
    assert status == 503
    assert [len(each) for each in found] == [5] * 5


def test_two_threads_rank_two_batches_at_a_time(held):
    sizes = []
    batcher = Batcher(most=2, depth=100, threads=2, report=lambda size, waited, seconds: sizes.append(size))
    lane = Lane(Retriever(make_store()))
    asks = [ask(i) for i in range(9)]
    found = asyncio.run(all_of(batcher, [lane] * 9, asks, held))
    batcher.close()
    assert sum(sizes) == 9
    for each, ranking in zip(asks, found, strict=True):
        alone = cdr_rank(each.query, Retriever(make_store()), each.session, k=each.k)
        assert (ranking.ids, ranking.score.tobytes()) == (alone.ids, alone.score.tobytes())


def test_filters_are_compared_by_a_few_bytes_made_once_outside_the_lock(held, monkeypatch):
    batcher = Batcher(most=8, depth=100)
    encode, under_lock = msgspec.json.encode, []

    def watched(*args, **kwargs):
        under_lock.append(batcher._turn._is_owned())
        return encode(*args, **kwargs)

    monkeypatch.setattr("msgspec.json.encode", watched)
    lane, sizes = Lane(Retriever(make_store())), []
    batcher._report = lambda size, waited, seconds: sizes.append(size)
    long, other = {"source": ["a", *map(str, range(20_000))]}, {"source": ["b"]}
    asks = [ask(i, where=long if i % 2 else other) for i in range(12)]
    found = asyncio.run(all_of(batcher, [lane] * len(asks), asks, held))
    batcher.close()
    assert not any(isinstance(each, BaseException) for each in found)
    assert under_lock == [False] * len(asks)
    assert sorted(sizes) == [1, 5, 6]  # the first alone, then each filter's
    assert all(len(repr(each.alike)) < 100 for each in asks)
    assert len({each.alike for each in asks}) == 2
    assert ask(0).alike == ask(1).alike != ask(0, None).alike
    assert ask(0, multiplier={"f1": 1.0}).alike is None
