"""The token of a session: what fits into 4,096 bytes, what goes into the blob, and what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import session_of_mode

from cdr_kernel import (
    EmbeddingModelMismatch,
    FactStore,
    NGramGuard,
    Retriever,
    Session,
    SubQuery,
    WindowReport,
    cdr_rank,
    depth_from_words,
    pack_facts,
)
from cdr_kernel.session import CoverageEntry, _serialize, _token
from cdr_kernel.session._task import Feedback
from cdr_kernel.session._token import BLOB_LIMIT, TOKEN_LIMIT, StoreBehind, head_of
from cdr_kernel.shard import ShardedStore
from tests.session.test_session import (
    HYPOTHESIS,
    MODEL,
    OUTPUT,
    change,
    make_envelope,
    make_session,
    play,
    report,
    reports,
    sub_query,
)

DIM = 16
FACTS = 2600
NUMBERS = 10**6


@pytest.fixture(scope="module")
def store():
    """Facts whose numbers are those of facts all over a store of a million."""
    r = np.random.default_rng(1)
    numbers = np.sort(r.permutation(NUMBERS)[:FACTS])
    made = FactStore(DIM, embedding_model=MODEL)
    rows = r.standard_normal((FACTS, DIM)) + 0.4
    ids = [f"https://docs.example.org/page-{n // 40}#{n % 40}" for n in numbers]
    made.add(ids, [f"text {n}" for n in numbers], rows, sequence=numbers)
    assert made.next_sequence > 0.99 * NUMBERS
    return made


def some_items(count, seed=2):
    r = np.random.default_rng(seed)
    return [
        SubQuery(f"section-{i}", f"Section {i}", f"text {i}", r.standard_normal(DIM) + 0.4, int(r.integers(150, 500)))
        for i in range(count)
    ]


def session_of(items, mode, **keywords):
    if mode == "spec":
        keywords = {"min_relevance": -1.0, "exclude_packed": True, **keywords}
    return session_of_mode(items, embedding_model=MODEL, mode=mode, max_windows=20, id="0" * 32, **keywords)


def window(session, store, facts, addressed=(), seed=0):
    """Rank, pack so many facts and write; the depth of what is addressed is words over expected words."""
    r = np.random.default_rng(seed)
    query = np.random.default_rng(3).standard_normal(DIM) + 0.4
    envelope = pack_facts(cdr_rank(query, Retriever(store), session), token_budget=10**6, max_facts=facts)
    assert 0.9 * facts <= len(envelope.ranking) <= facts
    items = [session.sub_queries[i] for i in addressed]
    words = {
        item.id: int(r.integers(int(0.15 * item.expected_words), int(1.3 * item.expected_words))) for item in items
    }
    depths = {item.id: depth_from_words(words[item.id], item.expected_words) for item in items}
    completeness = sum(words.values()) / 10**5
    session.update(
        WindowReport(completeness, tuple(depths), depths, words), OUTPUT, envelope=envelope, embedding_model=MODEL
    )
    return envelope


def resumed(session, made, store=None, guard=None):
    return Session.from_token(
        made.token, session.sub_queries, embedding_model=MODEL, guard=guard, store=store, blob=made.blob
    )


def everything(session):
    """All that a token should bring back."""
    data = json.loads(session.to_json())
    if data.get("feedback"):
        data["feedback"] = data["feedback"]["fact_ids"]
    return data


def same(one, two):
    assert everything(one) == everything(two)
    depths = [[entry.depth_weight.hex() for entry in session.coverage] for session in (one, two)]
    assert depths[0] == depths[1]


# What fits


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_64_sub_queries_20_windows_and_50_facts_a_window_fit(store, mode):
    """Without numbers the calibrated mode exceeded 4,096 bytes after one window of 20 sub-queries."""
    items = some_items(64)
    session = session_of(items, mode)
    sizes = []
    for i in range(20):
        first = 3 * i
        addressed = [j % 64 for j in range(first, first + 7)]  # 140 coverage entries
        window(session, store, 50, addressed, seed=i)
        made = session.token_and_blob(store)
        sizes.append(len(made.token))
        assert made.blob is None
        assert not session.token_needs_blob(store)
    assert len(session.packed) == 1000
    assert len(session.coverage) == 140
    assert session.token(store) == made.token
    assert sizes[-1] <= {"spec": 2900, "calibrated": 3400}[mode]  # docs/tokens.md has these
    again = resumed(session, made, store, session.guard)
    same(again, session)
    assert again.token_and_blob(store) == made


@pytest.mark.parametrize(("count", "windows"), [(8, 2), (20, 1), (8, 6)])
def test_the_calibrated_mode_fits_from_its_first_window_on(store, count, windows):
    """8 sub-queries exceeded it after two windows, 20 after one."""
    session = session_of(some_items(count), "calibrated")
    for i in range(windows):
        window(session, store, 50, [i % count], seed=i)
    same(resumed(session, session.token_and_blob(store), store), session)
    assert not session.token_needs_blob(store)


def state_of(session, packed, coverage=(), feedback=()):
    """The session after 20 windows with this state."""
    state = replace(
        session.state,
        coverage=coverage,
        residual=session._remaining(coverage),
        window_count=20,
        packed=packed,
        feedback=Feedback(feedback) if session.mode == "calibrated" else None,
    )
    return session.supposing(state)


def extreme(store, mode, depth, per_window=64):
    """20 windows, each of 50 facts and so many of 64 sub-queries. No fact of the direction is among those packed."""
    session, ids = session_of(some_items(64), mode), random.Random(4).sample(store.ids, 1320)
    packed = {id: 1 + i // 50 for i, id in enumerate(ids[:1000])}
    r = np.random.default_rng(5)
    coverage = tuple(
        CoverageEntry(item.id, item.embedding, depth(r, item.expected_words), number)
        for number in range(1, 21)
        for item in [session.sub_queries[i] for i in sorted(r.choice(64, per_window, replace=False).tolist())]
    )
    order = {id: i for i, id in enumerate(store.ids)}
    return state_of(session, packed, coverage, tuple(sorted(ids[1000:], key=order.get)))


def ratio(r, expected):
    """As `assess` reports it."""
    return depth_from_words(int(r.integers(int(0.15 * expected), int(1.2 * expected))), expected)


def any_double(r, expected):
    """Unrelated doubles: 8 bytes each, and nobody can do with less."""
    return float(r.random())


@pytest.mark.parametrize(
    ("scale", "depth", "per_window", "spec", "calibrated"),
    [
        (1, ratio, 7, "2.7 kB", "3.2 kB"),
        (1, ratio, 16, "3.1 kB", "3.5 kB"),
        (10, ratio, 7, "3.1 kB", "3.7 kB"),
        (1, ratio, 64, "blob of 3.9 kB", "blob of 4.4 kB"),
        (1, any_double, 7, "3.7 kB", "blob of 3.8 kB"),
    ],
)
def test_the_sizes_are_those_of_the_documentation(store, scale, depth, per_window, spec, calibrated):
    if scale > 1:
        view, larger = store.view(), FactStore(DIM, embedding_model=MODEL)
        larger.add(view.ids, [""] * FACTS, view.embeddings, sequence=scale * view.sequence)
        store = larger
    for mode, said in (("spec", spec), ("calibrated", calibrated)):
        token, blob = extreme(store, mode, depth, per_window).token_and_blob(store)
        assert (blob is not None) == said.startswith("blob of ")
        size = len(token if blob is None else blob) / 1000
        assert abs(size - float(said.removeprefix("blob of ").removesuffix(" kB"))) <= 0.15, (mode, size)
    page = (Path(__file__).parents[2] / "docs" / "tokens.md").read_text()
    assert f"| {spec} | {calibrated} |" in page


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
@pytest.mark.parametrize(("depth", "most"), [(ratio, 4700), (any_double, 14_000)])
def test_what_does_not_fit_says_so_in_advance_and_goes_into_the_blob(store, mode, depth, most):
    session = extreme(store, mode, depth)
    assert session.token_needs_blob(store)
    made = session.token_and_blob(store)
    assert len(made.token) < 700
    assert TOKEN_LIMIT - 700 < len(made.blob) < most
    assert head_of(made.token)["blob"] == hashlib.sha256(made.blob).hexdigest()
    with pytest.raises(
        ValueError, match=r"at most 4096 bytes, the rest of this session needs \d+ more: use `token_and"
    ):
        session.token(store)
    same(resumed(session, made, store, session.guard), session)


def test_facts_of_no_named_store_go_by_their_ids(store):
    session = session_of(some_items(8), "calibrated")
    window(session, store, 20)
    with_numbers, with_ids = session.token_and_blob(store), session.token_and_blob()
    assert len(with_ids.token) > 3 * len(with_numbers.token)
    same(resumed(session, with_ids), session)
    for i in range(5):
        window(session, store, 50, seed=i)
    assert session.token_needs_blob()
    assert not session.token_needs_blob(store)
    same(resumed(session, session.token_and_blob()), session)
    with pytest.raises(ValueError, match="name the store of its facts, or use `token_and_blob`"):
        session.token()


def test_facts_that_the_store_does_not_know_go_by_their_ids(store):
    """Some packed facts and some of the direction are of another origin."""
    session = session_of(some_items(3), "calibrated")
    ids = store.ids[:9]
    packed = {"from elsewhere": 3, **dict.fromkeys(ids[:4], 2), "\u6771\ud800": 20}
    session = state_of(session, packed, feedback=("x", ids[5], "y", "z", ids[7], ids[6], "w"))
    made = session.token_and_blob(store)
    same(resumed(session, made, store), session)
    assert b'{"feedback":[[0,"x"],[2,"y"],[3,"z"],[6,"w"]],"packed":{"from elsewhere":3,' in made.token
    nobody = state_of(session, {}, feedback=())
    assert nobody.state.feedback is not None
    same(resumed(nobody, nobody.token_and_blob(store)), nobody)
    unknown = state_of(session, {"x": 1}, feedback=("y",))
    assert "store" not in head_of(unknown.token(store))
    same(resumed(unknown, unknown.token_and_blob(store)), unknown)


def test_what_fits_no_token_and_no_blob_is_refused(monkeypatch):
    long = make_session(id="x" * 4000)
    for each in (long.token, long.token_and_blob, long.token_needs_blob):
        with pytest.raises(ValueError, match="id, settings and counters alone need 4"):
            each()
    monkeypatch.setattr(_token, "BLOB_LIMIT", 5000)
    packed = make_session(exclude_packed=True)
    packed.update(report(), OUTPUT, envelope=make_envelope(100, ids=[f"{i:060}" for i in range(100)]))
    with pytest.raises(ValueError, match="a blob holds at most 5000 bytes"):
        packed.token_and_blob()


# Whose facts they are


@pytest.mark.parametrize(
    ("mode", "keywords"),
    [("spec", {}), ("calibrated", {"packed_penalty": 1.0}), ("calibrated", {"min_qualified": 200})],
)
@pytest.mark.parametrize("kind", ["facts", "shards"])
def test_a_packed_fact_does_not_return_after_it_was_upserted(mode, keywords, kind):
    r = np.random.default_rng(6)
    facts = FactStore(DIM, embedding_model=MODEL)
    ids = [f"fact-{i}" for i in range(40)]
    facts.add(ids, [f"text {i}" for i in range(40)], r.standard_normal((40, DIM)) + 0.4)
    items, query = some_items(3), np.random.default_rng(3).standard_normal(DIM) + 0.4
    session = session_of(items, mode, guard=False, **keywords)
    packed = window(session, facts, 10).ranking.ids
    known = facts if kind == "facts" else ShardedStore.split(facts, shards=2, by="id")
    token = session.token(known)
    assert not any(id.encode() in token for id in packed)  # by number
    known.upsert(packed[:5], ["another text"] * 5, r.standard_normal((5, DIM)) + 0.4)
    known.remove([packed[9]])
    known.add([packed[9]], ["a new fact"], [query])
    again = Session.from_token(token, items, embedding_model=MODEL, store=known)
    assert set(again.packed) == set(packed[:9])
    if kind == "facts":
        ranking = cdr_rank(query, Retriever(known), again)
        assert not set(ranking.ids) & set(packed[:9])
        if mode == "spec":
            assert packed[9] in ranking.ids  # removed and added again: a new fact
    else:
        known.close()


def test_quarantine_does_not_make_a_fact_new(tmp_path):
    pytest.importorskip("lance", reason="needs the extra store")
    from cdr_kernel.durable import DurableStore

    r = np.random.default_rng(6)
    with DurableStore.create(tmp_path / "d", DIM, embedding_model=MODEL) as store:
        store.add([f"f{i}" for i in range(40)], ["text"] * 40, r.standard_normal((40, DIM)) + 0.4)
        session = session_of(some_items(3), "spec", guard=False)
        packed = window(session, store.facts, 10).ranking.ids
        tokens = [session.token(store.facts)]
        store.quarantine(packed[:3])
        tokens.append(session.token(store.facts))
        for token in tokens:
            assert Session.from_token(
                token, session.sub_queries, embedding_model=MODEL, store=store.facts
            ).packed == dict.fromkeys(packed, 1)
        store.release(packed[:2])
        store.compact()
    with DurableStore.open(tmp_path / "d") as store:
        for token in tokens:
            again = Session.from_token(token, session.sub_queries, embedding_model=MODEL, store=store.facts)
            assert again.packed == dict.fromkeys(packed, 1)
        with pytest.raises(
            TypeError, match=r"expected a FactStore or a ShardedStore, got DurableStore: pass its .facts"
        ):
            session.token(store)


def test_numbers_of_another_store_are_refused(store, tmp_path):
    session = session_of(some_items(3), "calibrated")
    window(session, store, 10)
    made = session.token_and_blob(store)
    with pytest.raises(
        ValueError, match=r"names facts by the numbers of the store [0-9a-f]{16}, got no store: pass sto"
    ):
        resumed(session, made)
    other = FactStore(DIM, embedding_model=MODEL)
    other.add(store.ids, ["x"] * FACTS, np.ones((FACTS, DIM)), sequence=store.view().sequence)
    with pytest.raises(
        ValueError, match=r"numbers of the store [0-9a-f]{16}, got the store [0-9a-f]{16}, which has not"
    ):
        resumed(session, made, other)
    store.save(tmp_path / "s")
    copy = FactStore.load(tmp_path / "s")
    same(resumed(session, made, copy), session)
    copy.add(["new"], ["new"], np.full((1, DIM), 0.4))
    newer = state_of(session, {"new": 1})
    assert resumed(newer, newer.token_and_blob(copy), copy).packed == {"new": 1}
    with pytest.raises(ValueError, match="which has not given them"):
        resumed(newer, newer.token_and_blob(copy), store)
    with pytest.raises(EmbeddingModelMismatch):
        session.token(FactStore(DIM, embedding_model="other"))
    with pytest.raises(
        TypeError, match=r"store: expected a FactStore or a ShardedStore, got Retriever: pass its .store"
    ):
        resumed(session, made, Retriever(store))


def test_a_store_that_lags_behind_says_so(tmp_path):
    pytest.importorskip("lance", reason="needs the extra store")
    from cdr_kernel.durable import DurableStore

    with DurableStore.create(tmp_path / "d", DIM, embedding_model=MODEL) as one:
        one.add(["a"], ["a"], np.ones((1, DIM)))
        with DurableStore.open(tmp_path / "d") as two:
            one.add(["b"], ["b"], np.ones((1, DIM)))
            session = state_of(session_of(some_items(1), "spec", guard=False), {"a": 1, "b": 2})
            made = session.token_and_blob(one.facts)
            with pytest.raises(StoreBehind, match="names fact number 1, the store has given numbers up to 0"):
                resumed(session, made, two.facts)
            two.refresh()
            same(resumed(session, made, two.facts), session)
            one.remove(["b"])
            two.refresh()
            assert resumed(session, made, two.facts).packed == {"a": 1}


def test_the_order_of_the_facts_of_a_direction_is_kept(store):
    ids = store.ids[:5]
    for order in (ids, ids[::-1], [ids[i] for i in (3, 0, 4, 1, 2)]):
        session = state_of(session_of(some_items(1), "calibrated"), {}, feedback=tuple(order))
        assert resumed(session, session.token_and_blob(store), store).state.feedback.fact_ids == tuple(order)


def test_the_direction_is_made_again_to_the_last_bit(store):
    items = some_items(5)
    query = np.random.default_rng(3).standard_normal(DIM) + 0.4
    session = session_of(items, "calibrated")
    window(session, store, 10, [0])
    again = resumed(session, session.token_and_blob(store), store)
    one, two = (cdr_rank(query, Retriever(store), each) for each in (session, again))
    assert one.ids == two.ids
    assert one.score.tobytes() == two.score.tobytes()


# What is exact


@HYPOTHESIS
@given(reports, st.booleans())
def test_a_token_brings_back_what_it_can_hold(windows, exclude_packed):
    session = make_session(exclude_packed=exclude_packed, safety_budget=0.7)
    play(session, windows)
    token = session.token()
    assert len(token) <= TOKEN_LIMIT
    head = token.partition(b"\n")[0]
    assert head == json.dumps(head_of(token), sort_keys=True, separators=(",", ":")).encode("ascii")
    twin = Session.from_token(token, session.sub_queries, embedding_model=MODEL, guard=session.guard)
    assert twin.token() == token
    expected, got = json.loads(session.to_json()), json.loads(twin.to_json())
    if not exclude_packed:
        assert got.pop("packed") == {}
        expected.pop("packed")
    assert got == expected
    unguarded = Session.from_token(token, session.sub_queries, embedding_model=MODEL)
    assert unguarded.guard is not None
    assert len(unguarded.guard) == 0


DEPTHS = st.one_of(
    st.sampled_from([0.0, -0.0, 0.9, 0.5, 1.0, 0.15, 1 / 3, 5e-324, 1.0 - 2**-53, 0.1 + 0.2]),
    st.floats(0.0, 1.0),
    st.builds(depth_from_words, st.integers(0, 700), st.sampled_from([7, 200, 333, 4096, 4097, 65537])),
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 2), DEPTHS, st.integers(1, 20)), max_size=30))
def test_every_depth_comes_back_to_the_last_bit(entries):
    session = make_session(max_windows=20)
    items = session.sub_queries
    coverage = tuple(CoverageEntry(items[i].id, items[i].embedding, depth, number) for i, depth, number in entries)
    session = state_of(session, {}, coverage)
    same(resumed(session, session.token_and_blob(), guard=session.guard), session)


def test_settings_come_back_and_defaults_are_left_out():
    for keywords in (
        {},
        {"mode": "calibrated"},
        {"mode": "calibrated", "gate": 1.5},
        {"mode": "calibrated", "gate": 1.5, "min_qualified": 7, "packed_penalty": 0.25},
        {"mode": "calibrated", "source_weight": 0.4},
        {"min_relevance": -0.5, "max_windows": 20, "first_window_pull": True, "exhaustion": "novelty"},
    ):
        session = make_session(**keywords)
        twin = Session.from_token(session.token(), session.sub_queries, embedding_model=MODEL)
        assert twin.settings == session.settings
    assert head_of(make_session().token())["settings"] == {"embedding_model": MODEL}
    assert head_of(make_session(mode="calibrated", need_floor=0.0).token())["settings"] == {
        "embedding_model": MODEL, "mode": "calibrated", "need_floor": 0.0,
    }  # fmt: skip


# What is refused


def test_a_token_belongs_to_one_model_and_one_set_of_sub_queries():
    session = make_session()
    play(session, [(["a"], {"a": 0.3}, 0.4, OUTPUT)])
    token = session.token()
    items = session.sub_queries
    with pytest.raises(EmbeddingModelMismatch):
        Session.from_token(token, items, embedding_model="m2")
    other = SubQuery("c", "C", "t", np.ones(4))
    renamed = SubQuery("d", "C", "t", items[2].embedding)
    for wrong in (items[:2], items[::-1], (*items[:2], other), (*items[:2], renamed), (*items, sub_query("e", 3)), ()):
        with pytest.raises(ValueError, match=r"SHA-256 of the token differs: the sub-queries are not those"):
            Session.from_token(token, wrong, embedding_model=MODEL)
    with pytest.raises(ValueError, match="guard"):
        Session.from_token(token, items, embedding_model=MODEL, guard=NGramGuard(4))
    with pytest.raises(ValueError, match="guard"):
        Session.from_token(make_session(guard=False).token(), items, embedding_model=MODEL, guard=NGramGuard())
    assert Session.from_token(make_session(guard=False).token(), items, embedding_model=MODEL).guard is None


def changed_bytes(raw, steps):
    """The bytes with one of them changed, left out or doubled, cut off, or with more behind."""
    for i in steps:
        for flip in (1, 0x80, 0x20):
            yield raw[:i] + bytes([raw[i] ^ flip]) + raw[i + 1 :]
        yield raw[:i] + raw[i + 1 :]
        yield raw[: i + 1] + raw[i:]
        yield raw[:i]
    yield raw + b"\0"
    yield raw + b"\n"


def test_every_byte_of_a_token_counts(store):
    session = session_of(some_items(4), "calibrated")
    for i in range(2):
        window(session, store, 12, [i], seed=i)
    made = session.token_and_blob(store)
    refused = 0
    for other in changed_bytes(made.token, range(len(made.token))):
        if other != made.token:
            with pytest.raises(ValueError, match=r"\w"):
                resumed(session, made._replace(token=other), store)
            refused += 1
    assert refused > 5 * len(made.token)


def test_every_byte_of_a_blob_counts(store):
    session = extreme(store, "calibrated", any_double)
    made = session.token_and_blob(store)
    for other in changed_bytes(made.blob, range(0, len(made.blob), 97)):
        if other != made.blob:
            with pytest.raises(ValueError, match="the blob is not the one that was made with the token"):
                resumed(session, made._replace(blob=other), store)
    for other in changed_bytes(made.token, range(len(made.token))):
        if other != made.token:
            with pytest.raises(ValueError, match=r"\w"):
                resumed(session, made._replace(token=other), store)
    swapped = extreme(store, "calibrated", lambda r, expected: 0.125 * float(r.random())).token_and_blob(store).blob
    small = session_of(some_items(64), "calibrated").token()
    for token, blob, error, said in (
        (made.token, swapped, ValueError, "not the one that was made with the token"),
        (made.token, None, ValueError, "needs the blob that was made with it, got none: pass blob="),
        (small, made.blob, ValueError, "holds all of its session, got a blob beside it"),
        (made.token, bytes(BLOB_LIMIT + 1), ValueError, "at most 4194304 bytes"),
        (made.token, "text", TypeError, "blob must be bytes or None"),
    ):
        with pytest.raises(error, match=said):
            resumed(session, _token.SessionToken(token, blob), store)


def forged(session, store, head=lambda data: None, body=lambda text: text):
    """A token that was changed by somebody who makes its SHA-256 right again."""
    made = session.token(store)
    text, _, raw = made.partition(b"\n")
    data = json.loads(text)
    del data["sha256"]
    head(data)
    raw = body(raw)
    try:
        data["sha256"] = _token._digest(data, session.sub_queries, raw)
    except (AttributeError, TypeError, ValueError):  # settings of which nobody makes a digest
        data["sha256"] = "0" * 64
    return _serialize._canonical(data).encode() + b"\n" + raw


def bits_of(coverage=(), packed=None, feedback=None, words=(0, 0, 0, 0)):
    """A body of these values, however wrong."""
    writer = _token.BitWriter()
    writer.numbers(list(words))
    _token._put_coverage(writer, [(i, CoverageEntry("", None, depth, n)) for i, depth, n in coverage])
    _token._put_packed(writer, packed or {})
    writer.bits(feedback is not None, 1)
    if feedback is not None:
        _token._put_ordered(writer, feedback)
    return b"{}\n" + writer.to_bytes()


@pytest.fixture
def small(store):
    session = session_of(some_items(4), "calibrated")
    window(session, store, 12, [1, 2])
    return session


def test_a_body_is_what_the_tests_say_it_is(small, store):
    numbers = {i: store.numbers_of(ids).tolist() for i, ids in enumerate([small.packed, small.state.feedback.fact_ids])}
    coverage = [(i + 1, entry.depth_weight, 1) for i, entry in enumerate(small.coverage)]
    made = bits_of(coverage, {1: numbers[0]}, numbers[1], small.words.values())
    assert forged(small, store, body=lambda raw: made) == small.token(store)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("v", 2), ("v", True), ("v", "1"), ("id", ""), ("id", None), ("id", 7), ("extra", 1), ("window_count", 0),
        ("window_count", KeyError), ("window_count", -1), ("window_count", "1"), ("completeness", 1.5),
        ("completeness", None), ("safety_budget", 2), ("safety_budget", True), ("settings", []), ("settings", None),
        ("settings.max_windows", 0), ("settings.mode", []), ("settings.mode", "other"), ("settings.extra", 1),
        ("settings.embedding_model", KeyError), ("settings.gate", "x"), ("settings.packed_penalty", 0.0),
        ("guard", "yes"), ("guard", [6, "x", "y", False, None]), ("store", KeyError), ("store", 7),
        ("store", "0" * 16), ("blob", "0" * 64),
    ],
)  # fmt: skip
def test_a_forged_head_is_refused(small, store, path, value):
    token = forged(small, store)
    assert Session.from_token(token, small.sub_queries, embedding_model=MODEL, store=store).window_count == 1
    token = forged(small, store, head=change(path, value))
    with pytest.raises(ValueError, match=r"\w"):
        Session.from_token(token, small.sub_queries, embedding_model=MODEL, store=store)


def test_forged_bodies_are_refused(small, store):
    known = store.numbers_of(store.ids[:3]).tolist()
    good = bits_of([(1, 0.25, 1)], {1: known}, known)
    for wrong in (
        b"", b"{}", b"{}\n", b"[]\n", b"{\n", b"\xff\n", b"[" * 3000 + b"\n", b'{"x":1}\n', good[:-1], good + b"\0",
        b'{"packed":[]}\n' + good[3:], b'{"packed":{"x":9}}\n' + good[3:], b'{"packed":{"x":"1"}}\n' + good[3:],
        b'{"feedback":7}\n' + good[3:], b'{"feedback":[7]}\n' + good[3:], b'{"feedback":[[0,1]]}\n' + good[3:],
        b'{"feedback":[[9,"x"]]}\n' + good[3:], b'{"feedback":[[0,"x","y"]]}\n' + good[3:],
        b'{"feedback":[[0,"x"]]}\n' + bits_of()[3:],
        bits_of([(4, 0.25, 1)]), bits_of([(1, 0.25, 2)]), bits_of([(1, 0.25, 0)]), bits_of([(1, 1.5, 1)]),
        bits_of([(1, -0.25, 1)]),
        bits_of(packed={2: known}), bits_of(packed={1: [NUMBERS]}), bits_of(packed={1: [2**62]}),
        bits_of(feedback=[known[0], known[0]]), bits_of(feedback=[NUMBERS + 7]), bits_of(words=(0, 0, 0)),
        b"{}\n" + bytes(3000), b"{}\n" + b"\xff" * 3000, b"{}\n" + bytes(7) + b"\x01" + b"\xff" * 3000,
    ):  # fmt: skip
        token = forged(small, store, body=lambda raw, wrong=wrong: wrong)
        with pytest.raises(ValueError, match=r"\w"):
            Session.from_token(token, small.sub_queries, embedding_model=MODEL, store=store)
    token = forged(small, store, body=lambda raw: good)
    assert (
        list(Session.from_token(token, small.sub_queries, embedding_model=MODEL, store=store).packed.values())
        == [1] * 3
    )


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.binary(max_size=200), st.booleans())
def test_any_body_is_a_session_or_refused(raw, json_first):
    session = make_session(mode="calibrated")
    raw = b"{}\n" + raw if json_first else raw
    data = {name: value for name, value in head_of(session.token()).items() if name != "sha256"}
    data["sha256"] = _token._digest(data, session.sub_queries, raw)
    token = _serialize._canonical(data).encode() + b"\n" + raw
    with contextlib.suppress(ValueError):
        Session.from_token(token, session.sub_queries, embedding_model=MODEL)


@pytest.mark.parametrize("token", [b"", b"{}", b"\xff", b"null", b" " * 5000, b"[" * 4000, b"\n", b"{}\n", b"7\n"])
def test_bytes_that_are_no_token_are_refused(token):
    with pytest.raises(ValueError, match=r"session|token"):
        Session.from_token(token, make_session().sub_queries, embedding_model=MODEL)
    with pytest.raises(TypeError, match="bytes"):
        Session.from_token("{}", make_session().sub_queries, embedding_model=MODEL)
