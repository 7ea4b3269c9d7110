"""Rows on a device: exact in every dtype, grown, masked, narrowed, streamed, released. Here the device is the CPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from cdr_kernel import Columns, FactStore, cdr_score
from cdr_kernel.score import _device_rows
from cdr_kernel.score._device_rows import DeviceRows

DIM = 21


def filled(n, seed=0, dtype="float32", importance=True):
    r = np.random.default_rng(seed)
    store = FactStore(DIM, embedding_model="toy", dtype=dtype)
    add(store, r, n, importance)
    return store, r


def add(store, r, n, importance=True):
    start = store.view().rows
    store.add(
        [f"f{start + i}" for i in range(n)], [""] * n, r.standard_normal((n, DIM)),
        importance=r.random(n) if importance else None,
    )  # fmt: skip


def columns(r, gate=0.05):
    return Columns.spec(
        r.standard_normal(DIM), coverage=r.standard_normal((3, DIM)), depth_weights=[0.9, 0.2, 0.4],
        residual=r.standard_normal((6, DIM)), min_relevance=gate,
    )  # fmt: skip


def bits(scores):
    return tuple(getattr(scores, name).tobytes() for name in scores.__dataclass_fields__)


def check(view, on_device, sessions, **keywords):
    """The answer from the device is that of the exact routine over the living rows of the view."""
    living = np.flatnonzero(view.alive)
    for k in (None, 7):
        found = cdr_score(on_device, sessions, k=k, impl="torch", **keywords)
        best = cdr_score(
            view.blocks, sessions, rows=living, squared_norms=view.squared_norms, importance=view.importance[living],
            k=k, impl="cpp", **keywords,
        )  # fmt: skip
        assert [bits(s) for s in found] == [bits(s) for s in best]
        assert [bits(s) for s in cdr_score(on_device, sessions, k=k, **keywords)] == [bits(s) for s in best]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(_device_rows, "BLOCK_ROWS", 64)
    monkeypatch.setattr(_device_rows, "_CHUNK", 50)


@pytest.mark.parametrize("stored", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("memory", [None, 0, 64 * 32 * 4])
def test_answers_are_exact_whatever_the_dtype_and_the_place(small_blocks, stored, dtype, memory):
    store, r = filled(300, dtype=stored)
    rows = DeviceRows("cpu", dtype=dtype, memory=memory)
    check(store.view(), rows.at(store.view()), [columns(r), columns(r, 0.3), columns(r, -1.0)])
    assert (rows.pinned_nbytes > 0) == (memory is not None)
    if memory == 0:
        assert rows.nbytes <= 300 * 12


def test_rows_that_are_added_and_removed(small_blocks):
    store, r = filled(100)
    rows, c = DeviceRows("cpu", dtype="int8"), [columns(r), columns(r)]
    first = store.view()
    before = rows.at(first)
    check(first, before, c)
    bytes_before = rows.nbytes
    add(store, r, 77)
    store.remove(["f3", "f99", "f100", "f176"])
    check(store.view(), rows.at(store.view()), c)
    assert rows.nbytes > bytes_before
    check(first, before, c)  # a view stays as it was
    check(first, rows.at(first), c)
    store.compact()
    check(store.view(), rows.at(store.view()), c)
    assert rows.at(store.view()).rows == 173
    other, _ = filled(30, seed=5)
    check(other.view(), rows.at(other.view()), c)
    empty = FactStore(DIM, embedding_model="toy")
    assert len(cdr_score(rows.at(empty.view()), c[0], impl="torch")) == 0


@pytest.mark.parametrize("memory", [None, 0])
def test_later_windows_look_at_the_rows_of_the_first(small_blocks, memory):
    store, r = filled(400)
    store.remove(["f7", "f200"])
    view = store.view()
    on_device = DeviceRows("cpu", dtype="float16", memory=memory).at(view)
    first, later = columns(r, 0.1), columns(r, 0.1)
    passing = cdr_score(on_device, first, impl="torch").rows
    narrow = on_device.narrow(passing)
    for k in (None, 5):
        best = cdr_score(
            view.blocks, later, rows=passing, squared_norms=view.squared_norms, importance=view.importance[passing], k=k
        )
        for impl in ("torch", "cpp"):
            assert bits(cdr_score(narrow, later, k=k, impl=impl)) == bits(best)
        shuffled = r.permutation(passing)
        again = cdr_score(on_device, later, rows=shuffled, k=k, impl="torch")
        assert sorted(zip(again.rows, again.score, strict=True)) == sorted(zip(best.rows, best.score, strict=True))
    few = narrow.narrow(passing[:3])
    assert cdr_score(few, later, impl="torch").rows.tolist() == [
        row for row in cdr_score(narrow, later, impl="torch").rows if row in passing[:3]
    ]


def test_factors_of_the_call_stand_beside_the_stores(small_blocks):
    store, r = filled(150)
    view = store.view()
    on_device = DeviceRows("cpu").at(view)
    c, multiplier = columns(r), r.random(150)
    overlap = r.integers(0, 5, 150).astype(np.int32)
    check(view, on_device, [c], multiplier=multiplier, ngram_overlap=overlap)
    own = r.random(150) * 1e6
    found = cdr_score(on_device, c, importance=own, k=9, impl="torch")
    assert bits(found) == bits(cdr_score(view.blocks, c, importance=own, k=9))
    for seed in range(3):  # passes over few rows are recorded; nothing of one call is kept for the next
        c, own = columns(np.random.default_rng(seed)), r.random(150)
        found = cdr_score(on_device, c, importance=own, k=9, impl="torch")
        assert bits(found) == bits(cdr_score(view.blocks, c, importance=own, k=9))
        check(view, on_device, [c])


def test_rows_of_any_size_are_held(small_blocks):
    store = FactStore(3, embedding_model="toy", dtype="float64")
    store.add(["a", "b", "c"], [""] * 3, [[1e-150, 0, 0], [1e150, 1e150, 0], [0.0, 5.0, 5.0]])
    for dtype in ("float16", "bfloat16", "float32", "int8"):
        scores = cdr_score(DeviceRows("cpu", dtype=dtype).at(store.view()), Columns.spec([1.0, 0, 0]), impl="torch")
        assert scores.rows.tolist() == [0, 1]


def test_release_gives_the_memory_back_and_copies_again():
    store, r = filled(50)
    rows = DeviceRows("cpu", dtype="float16")
    view = rows.at(store.view())
    assert rows.nbytes == 50 * (32 * 2 + 4 + 4 + 4)  # values padded to 32, scale, error, importance
    rows.release()
    assert rows.nbytes == rows.pinned_nbytes == 0
    check(store.view(), view, [columns(r)])
    check(store.view(), rows.at(store.view()), [columns(r)])


def test_bad_arguments_say_what_was_expected():
    with pytest.raises(ValueError, match="dtype: expected one of float16"):
        DeviceRows("cpu", dtype="float8")
    with pytest.raises(ValueError, match="memory: expected"):
        DeviceRows("cpu", memory=-1)
    for kind in ("meta", "hip"):
        with pytest.raises(ValueError, match=f"device: torch .* cannot use '{kind}' here \\(.*Error: .+"):
            DeviceRows(kind)
    with pytest.raises(ValueError, match=r"device: .*nowhere"):
        DeviceRows("nowhere")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match="finds no CUDA device here, got 'cuda:1'"):
        DeviceRows("cuda:1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_of_too_high_a_number_is_not_there():
    with pytest.raises(ValueError, match=r"expected one of cuda:0 to cuda:.*, got 'cuda:99'"):
        DeviceRows("cuda:99")


def test_threads_share_one():
    store, r = filled(2000)
    rows, view = DeviceRows("cpu"), store.view()
    sessions = [columns(r) for _ in range(8)]
    best = [bits(cdr_score(view.blocks, c, importance=view.importance, k=20)) for c in sessions]
    found = [None] * 8

    def work(i):
        found[i] = bits(cdr_score(rows.at(view), sessions[i], k=20, impl="torch"))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == best


class FakeCuda:
    """Streams and events that only write down what they are asked."""

    def __init__(self):
        self.log = []
        log = self.log

        class Stream:
            def __init__(self, _=None):
                self.name = f"copies{sum(x[0] == 'stream' for x in log)}"
                log.append(("stream", self.name))

            def wait_event(self, event):
                log.append(("wait", self.name, event.number, event.recorded))

        class Event:
            made = 0

            def __init__(self):
                self.number, self.recorded = Event.made, 0
                Event.made += 1

            def record(self, stream):
                self.recorded += 1
                log.append(("record", stream.name, self.number, self.recorded))

        self.Stream, self.Event = Stream, Event
        self._now = Stream()
        self._now.name = "work"

    def current_stream(self, _):
        return self._now

    def stream(self, _):
        return nullcontext()


def test_a_buffer_is_filled_after_its_last_use_and_used_after_it_is_filled(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(_device_rows, "_cuda", lambda _: fake)
    parts = [(slice(i, i + 1), None, _device_rows.Rows(torch.full((1, 4), float(i)))) for i in range(5)]
    seen = []
    for _, rows in _device_rows._streamed(parts, torch.device("cpu")):
        seen.append(float(rows.values[0, 0]))
        fake.log.append(("use", len(seen) - 1))
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0]
    log = fake.log
    filled, free = (0, 1), (2, 3)
    for i in range(5):
        use = log.index(("use", i))
        turn = i // 2 + 1
        fill = log.index(("record", "copies1", filled[i % 2], turn))
        waited = log.index(("wait", "work", filled[i % 2], turn))
        assert fill < waited < use
        before = log.index(("wait", "copies1", free[i % 2], turn))  # after i // 2 uses, and once for the fresh buffer
        assert before < fill
        assert log.index(("record", "work", free[i % 2], turn + 1)) > use
        if i + 1 < 5:  # the next copy is on its way before this block is used
            assert log.index(("record", "copies1", filled[(i + 1) % 2], (i + 1) // 2 + 1)) < use


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("memory", [None, 0])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_on_a_gpu(small_blocks, dtype, memory, impl):
    store, r = filled(1000)
    store.remove(["f7"])
    view = store.view()
    for number in range(torch.cuda.device_count()):
        on_device = DeviceRows(f"cuda:{number}", dtype=dtype, memory=memory).at(view)
        living = np.flatnonzero(view.alive)
        for _ in range(3):
            sessions = [columns(r), columns(r, 0.3)]
            best = cdr_score(
                view.blocks, sessions, rows=living, squared_norms=view.squared_norms,
                importance=view.importance[living], k=20,
            )  # fmt: skip
            found = cdr_score(on_device, sessions, k=20, impl=impl)
            assert [bits(s) for s in found] == [bits(s) for s in best]


def test_what_is_no_view_is_refused():
    store, r = filled(3)
    rows = DeviceRows("cpu")
    with pytest.raises(TypeError, match=r"view: expected a StoreView, such as store\.view\(\), got FactStore"):
        rows.at(store)
    assert rows.nbytes == 0
    check(store.view(), rows.at(store.view()), [columns(r)])
