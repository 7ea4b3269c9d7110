"""Threads that work for many tenants by turns: nobody's long work holds another's, and none that nobody waits for."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from time import monotonic, sleep

import pytest

from cdr_kernel.serve import _turns as module
from cdr_kernel.serve._turns import LONG, Turns

pytest.importorskip("msgspec", reason="needs the serve extra")

from cdr_kernel.serve._errors import Refusal


@pytest.fixture
def turns():
    made = []

    def make(*args, **options):
        made.append(Turns("cdr-test", *args, **options))
        return made[-1]

    yield make
    assert all(each.close(soon()) for each in made)


def soon(seconds=60.0):
    return monotonic() + seconds


def work(log, name, steps, then=None):
    """Work in so many steps, each noted."""
    for _ in range(steps):
        log.append(name)
        yield
    return then


async def started(event):
    await asyncio.to_thread(event.wait, 60)
    assert event.is_set()


def test_tenants_take_turns_however_many_jobs_one_has(turns):
    pool, log, go, began = turns(turn_s=0.0), [], threading.Event(), threading.Event()

    def hold():
        began.set()
        return go.wait(60)

    async def run():
        first = asyncio.create_task(pool.run("a", "hold", hold))
        await started(began)
        jobs = [asyncio.create_task(pool.run("a", "long", work(log, "a", 20))) for _ in range(12)]
        jobs += [asyncio.create_task(pool.run(name, "short", work(log, name, 3))) for name in "bc"]
        await asyncio.sleep(0)
        assert pool.waiting("a") == 12
        go.set()
        await asyncio.gather(first, *jobs)

    asyncio.run(run())
    assert log[:9] == ["a", "b", "c"] * 3
    assert log.count("a") == 240


def test_jobs_of_one_tenant_take_turns_too(turns):
    pool, log = turns(turn_s=0.0), []

    async def run():
        began, go = threading.Event(), threading.Event()
        first = asyncio.create_task(pool.run("a", "hold", lambda: began.set() or go.wait(60)))
        await started(began)
        jobs = [asyncio.create_task(pool.run("a", name, work(log, name, 3))) for name in "xy"]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, *jobs)

    asyncio.run(run())
    assert log == ["x", "y"] * 3


def test_a_step_that_takes_long_does_not_hold_another_tenant(turns):
    """The tenant has two threads, and is stuck in both: the spare one is for the others."""
    pool, go = turns(2, spare=1), threading.Event()

    async def run():
        stuck = [asyncio.create_task(pool.run("a", "stuck", lambda: go.wait(60))) for _ in range(5)]
        while len(pool.running()) < 2:
            await asyncio.sleep(0.001)
        assert await pool.run("b", "quick", lambda: 7, soon()) == 7
        assert [each["tenant"] for each in pool.running()] == ["a", "a"]
        go.set()
        return await asyncio.gather(*stuck)

    assert asyncio.run(run()) == [True] * 5


def test_in_company_a_tenant_has_one_thread(turns, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    company = module.Company(3)
    company.note("a")
    assert company.share == 3
    company.note("b")
    assert company.share == 1
    now[0] += module.COMPANY_S / 2
    company.note("a")
    assert company.share == 1
    now[0] += module.COMPANY_S * 0.6  # b has asked for nothing meanwhile
    assert company.share == 3


def test_what_is_long_has_one_thread(turns):
    pool, lock, now, most = turns(2, spare=1, turn_s=0.0), threading.Lock(), [0], [0]

    def long():
        for step in range(4 * LONG):
            with lock:
                now[0] += step > LONG
                most[0] = max(most[0], now[0])
            sleep(0.0005)
            with lock:
                now[0] -= step > LONG
            yield

    async def run():
        await asyncio.gather(*(pool.run("a", "long", long()) for _ in range(4)))

    asyncio.run(run())
    assert most[0] == 1


def test_work_ends_soon_after_its_deadline(turns):
    pool, ended, steps = turns(), threading.Event(), [0]

    def endless():
        try:
            while True:
                steps[0] += 1
                sleep(0.001)
                yield
        finally:
            ended.set()

    async def run():
        with pytest.raises(Refusal) as caught:
            await pool.run("a", "endless", endless(), soon(0.05))
        assert (caught.value.status, caught.value.detail.code) == (504, "deadline")
        await started(ended)
        before = steps[0]
        await asyncio.sleep(0.05)
        assert steps[0] == before
        assert await pool.run("a", "next", lambda: "fine") == "fine"

    asyncio.run(run())


def test_work_that_nobody_waits_for_is_dropped(turns):
    pool, ended, log, go = turns(), threading.Event(), [], threading.Event()

    def endless():
        try:
            while True:
                yield
        finally:
            ended.set()

    async def run():
        going = asyncio.create_task(pool.run("a", "endless", endless()))
        await asyncio.sleep(0.01)
        going.cancel()
        await started(ended)
        began = threading.Event()
        holding = asyncio.create_task(pool.run("a", "hold", lambda: began.set() or go.wait(60)))
        await started(began)
        waiting = asyncio.create_task(pool.run("a", "never", lambda: log.append("never")))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(going, waiting, return_exceptions=True)
        go.set()
        assert await holding

    asyncio.run(run())
    assert log == []


def test_a_function_that_has_begun_is_finished_whoever_waits(turns):
    pool, began, go, done = turns(), threading.Event(), threading.Event(), threading.Event()

    def write():
        began.set()
        go.wait(60)
        done.set()

    async def run():
        writing = asyncio.create_task(pool.run("a", "write", write))
        await started(began)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        go.set()
        await started(done)

    asyncio.run(run())


def test_more_jobs_of_a_tenant_than_the_queue_takes_are_429(turns):
    pool, go = turns(depth=3), threading.Event()

    async def run():
        held = [asyncio.create_task(pool.run("a", "hold", lambda: go.wait(60))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Refusal) as caught:
            await pool.run("a", "more", lambda: None)
        assert (caught.value.status, caught.value.detail.code) == (429, "overloaded")
        other = asyncio.create_task(pool.run("b", "other", lambda: "b"))
        go.set()
        assert await asyncio.gather(*held) == [True] * 3
        assert await other == "b"
        assert await pool.run("a", "again", lambda: "a") == "a"

    asyncio.run(run())


class Large:
    """Something that a step holds."""


@pytest.mark.parametrize("error", [ValueError("of the work"), Refusal(413, "too_large", "so large"), TimeoutError()])
def test_an_error_goes_to_the_one_who_asked_and_holds_nothing(turns, error):
    """A traceback has the frames of the work. Where anything in them holds the error again, all of it stays until the
    garbage collector comes by, and hundreds of requests of megabytes may be refused before that."""
    pool, held = turns(), []

    def failing():
        large = Large()
        held.append(weakref.ref(large))
        yield
        raise type(error)(*error.args) if not isinstance(error, Refusal) else Refusal(413, "too_large", "so large")

    async def ask():
        try:
            await pool.run("a", "failing", failing(), soon())
        except Exception as caught:
            return str(caught)

    async def run():
        said = await ask()
        assert await pool.run("a", "next", lambda: 1) == 1  # the thread goes on
        return said

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(run()) == str(error)
        assert held[0]() is None
    finally:
        gc.enable()


def test_closing_does_not_wait_for_ever_and_names_what_runs(turns):
    pool, began, go = Turns("cdr-test"), threading.Event(), threading.Event()

    def stuck_here():
        began.set()
        return go.wait(60)

    async def run():
        held = asyncio.create_task(pool.run("a", "write_facts 77", stuck_here))
        waits = asyncio.create_task(pool.run("a", "waits", lambda: 1, soon(0.2)))
        await started(began)
        assert not pool.close(soon(0.01))
        (running,) = pool.running()
        assert (running["thread"], running["tenant"], running["job"]) == ("cdr-test", "a", "write_facts 77")
        assert any("stuck_here" in frame for frame in running["where"])
        with pytest.raises(Refusal) as caught:
            await pool.run("a", "more", lambda: 1)
        assert caught.value.status == 503
        go.set()
        return await asyncio.gather(held, waits, return_exceptions=True)

    done, waited = asyncio.run(run())
    assert done is True
    assert isinstance(waited, Refusal)
    assert pool.close(soon())
    assert pool.running() == []


def test_a_job_that_is_answered_has_left_the_queue(turns):
    """A client that sends its next request at once is not refused because of the one before."""
    pool = turns(depth=1)

    async def run():
        for _ in range(300):
            assert await pool.run("a", "job", lambda: 7) == 7
            assert pool.running() == []

    asyncio.run(run())
