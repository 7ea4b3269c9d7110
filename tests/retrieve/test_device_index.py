"""The retriever of kind "device", here on the CPU by torch: what a scan and the reference answer, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdr_kernel import Columns, FactStore, Retriever, Session, SubQuery, WindowReport, cdr_rank, pack_facts, rank_many
from cdr_kernel.score._device_rows import DeviceRows
from tests.sessions import session_of_mode

MODEL = "toy"


def filled(n: int, dim: int, seed: int, dtype: str = "float32") -> FactStore:
    """Facts round a centre, every third one twice, with importances of several sizes."""
    r = np.random.default_rng(seed)
    rows = (np.ones(dim) + 0.8 * r.standard_normal((n, dim))).astype(dtype)
    rows[2::3] = rows[1::3][: len(rows[2::3])]
    store = FactStore(dim, dtype=dtype, embedding_model=MODEL)
    store.add(
        [str(i) for i in range(n)],
        [f"fact {i} about {i % 7}" for i in range(n)],
        rows,
        importance=r.choice([0.5, 1.0, 1.0, 3.0], n),
        source=[f"s{i % 5}" for i in range(n)],
    )
    return store


def sessions_of(dim: int, seed: int, mode: str, count: int = 1, **settings) -> list[Session]:
    """Equal in their tasks each time they are made."""
    made = []
    for number in range(count):
        r = np.random.default_rng([seed, number])
        subs = [SubQuery(f"q{j}", f"Topic {j}", f"topic {j}", np.ones(dim) + r.standard_normal(dim)) for j in range(4)]
        made.append(session_of_mode(subs, embedding_model=MODEL, mode=mode, id=str(number), **settings))
    return made


def same(a, b) -> None:
    assert a.ids == b.ids
    for name in ("score", "relevance", "coverage", "residual_pull", "novelty", "ngram_overlap"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
    assert (a.qualified, a.guard_activations, a.new_share) == (b.qualified, b.guard_activations, b.new_share)


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("mode", ["spec", "calibrated"])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    n=st.integers(0, 400),
    dim=st.sampled_from([3, 16, 40]),
    seed=st.integers(0, 999),
    k=st.sampled_from([None, 1, 7, 50]),
    gate=st.sampled_from([-1.0, 0.3, 0.75]),
    stored=st.sampled_from(["float16", "float32", "float64"]),
)
def test_windows_are_those_of_a_scan(mode, dtype, n, dim, seed, k, gate, stored):
    store = filled(n, dim, seed, stored)
    options = {"min_relevance": gate} if mode == "spec" else {"min_qualified": 10}
    pairs = []
    for retriever in (
        Retriever(store),
        Retriever(store, "device", device_rows=DeviceRows("cpu", dtype=dtype)),
    ):
        pairs.append((retriever, sessions_of(dim, seed, mode, **options)[0]))
    pairs[0][0].prepare()
    query = np.ones(dim)
    for window in range(3):
        if window == 1:
            r = np.random.default_rng(seed + 1)
            store.add([f"new {i}" for i in range(5)], ["new"] * 5, np.ones(dim) + 0.5 * r.standard_normal((5, dim)))
            store.remove(store.ids[: n // 4])
        a, b = (cdr_rank(query, retriever, session, k=k, where={"source": ["s0", "s1"]} if window else None)
                for retriever, session in pairs)  # fmt: skip
        same(a, b)
        report = WindowReport(0.2, addressed=(f"q{window}",), depth_by_sub_query={f"q{window}": 0.6})
        for ranking, (_, session) in zip((a, b), pairs, strict=True):
            envelope = pack_facts(ranking, 12)
            session.update(report, envelope.text, envelope=envelope, embedding_model=MODEL)


def check_many(retriever: Retriever, mode: str) -> None:
    """Five sessions at once for two windows, beside a scan of the same store."""
    n, scan = len(retriever.store), Retriever(retriever.store)
    queries = list(np.random.default_rng(0).standard_normal((5, 24)) * 0.3 + 1.0)
    multiplier = np.random.default_rng(1).uniform(0.5, 2.0, n)
    each = [sessions_of(24, 1, mode, 5) for _ in range(2)]
    for window in range(2):
        found = [
            rank_many(queries, by, sessions, k=20, multiplier=multiplier)
            for by, sessions in zip((scan, retriever), each, strict=True)
        ]
        report = WindowReport(0.2, addressed=(f"q{window}",), depth_by_sub_query={f"q{window}": 0.6})
        for a, b, *pair in zip(*found, *each, strict=True):
            same(a, b)
            for session in pair:
                session.update(report, a.facts[0].text, embedding_model=MODEL)


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_many_sessions_at_once(mode):
    check_many(Retriever(filled(700, 24, 3), "device"), mode)


def test_columns_that_are_no_gate_are_left_out():
    r = np.random.default_rng(4)
    store = filled(600, 8, 2)
    gate = np.array([2.0, np.inf, 0.8, np.inf, np.inf, 0.9])
    columns = Columns(
        query=r.standard_normal(8),
        coverage=r.standard_normal(8),
        residual=np.ones(8) + r.standard_normal((4, 8)),
        scale=np.ones(6),
        shift=np.zeros(6),
        weight=np.ones(6),
        gate=gate,
    )
    view = store.view()
    found = Retriever(store, "device").candidates(columns, view)
    assert 0 < len(found) < 600
    assert found.tolist() == Retriever(store).candidates(columns, view).tolist()


def test_a_session_resumed_in_a_later_window_asks_with_its_gate_alone():
    store = filled(500, 16, 5)
    found = []
    for retriever in (Retriever(store), Retriever(store, "device")):
        (session,) = sessions_of(16, 2, "spec")
        session.update(
            WindowReport(0.3, addressed=("q1",), depth_by_sub_query={"q1": 0.7}), "words", embedding_model=MODEL
        )
        found.append(cdr_rank(np.ones(16), retriever, session, k=10))
    same(*found)


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_importances_at_the_end_of_float64(mode):
    store = filled(60, 8, 6)
    store.upsert(["3", "4"], ["a fact", "another"], np.eye(8)[:2] + 1.0, importance=[1.7e308, 1.2e308])
    for k in (None, 5):
        found = [
            cdr_rank(np.ones(8), retriever, sessions_of(8, 3, mode, min_qualified=60)[0] if mode == "calibrated"
                     else sessions_of(8, 3, mode)[0], k=k)
            for retriever in (Retriever(store), Retriever(store, "device"))
        ]  # fmt: skip
        same(*found)
        assert set(found[0].ids[:2]) == {"3", "4"}


def test_prepare_copies_the_rows_and_release_gives_them_back():
    rows = DeviceRows("cpu", dtype="float16")
    retriever = Retriever(filled(100, 16, 1), "device", device_rows=rows)
    assert rows.nbytes == 0
    retriever.prepare()
    assert rows.nbytes >= 100 * 16 * 2
    rows.release()
    assert len(retriever.search(np.ones(16), min_relevance=-1.0)) == 100


def test_what_is_refused():
    store = filled(10, 4, 0)
    with pytest.raises(ValueError, match="device_rows belongs to kind \"device\", the kind is 'scan'"):
        Retriever(store, device_rows=DeviceRows("cpu"))
    with pytest.raises(TypeError, match="device_rows: expected DeviceRows, got str"):
        Retriever(store, "device", device_rows="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="codes are of kind \"scan\", the kind is 'device'"):
        Retriever(store, "device").save()
