"""Attributes of facts, and rankings limited by them: as if the store had no other facts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fact_stores import reseal
from sessions import session_of_mode

from cdr_kernel import (
    DamagedFileError,
    FactStore,
    Retriever,
    Session,
    SubQuery,
    WindowReport,
    cdr_rank,
    pack_facts,
    rank_many,
)
from cdr_kernel.shard import ShardedRetriever
from cdr_kernel.shard._sharded_retriever import ShardedStore
from cdr_kernel.store._attributes import Attribute, checked_attributes, where_text

MODEL, DIM, N = "toy", 16, 400


def facts(rng, n, first=0):
    base = rng.normal(size=(6, DIM))
    vectors = base[rng.integers(0, 6, n)] + 0.7 * rng.normal(size=(n, DIM))
    words = ["alpha", "beta", "gamma", "delta", "kappa", "omega", "sigma", "zeta"]
    return {
        "ids": [f"f{first + i}" for i in range(n)],
        "texts": [" ".join(rng.choice(words, 7)) for _ in range(n)],
        "embeddings": vectors,
        "importance": rng.random(n) + 0.5,
        "source": [None if i % 7 == 0 else f"doc{i % 5}" for i in range(n)],
        "position": list(range(n)),
        "attributes": {
            "tenant": [["x", "y", None][i % 3] for i in range(n)],
            "year": [2000 + i % 4 if i % 11 else None for i in range(n)],
            "score": [i / 8 if i % 2 else None for i in range(n)],
            "draft": [[True, False, None][i // 2 % 3] for i in range(n)],
        },
    }


def only(given, keep):
    """The facts of these positions."""
    picked = {name: [values[i] for i in keep] for name, values in given.items() if name != "attributes"}
    picked["embeddings"] = np.asarray(given["embeddings"])[keep]
    picked["attributes"] = {name: [values[i] for i in keep] for name, values in given["attributes"].items()}
    return picked


def store_of(given):
    store = FactStore(DIM, embedding_model=MODEL)
    store.add(**given)
    return store


def session_of(rng, mode="spec"):
    vectors = rng.normal(size=(3, DIM))
    subs = [SubQuery(f"s{i}", f"Sub {i}", ["alpha beta", "gamma", "kappa zeta"][i], v) for i, v in enumerate(vectors)]
    keywords = {"min_relevance": 0.1} if mode == "spec" else {}
    return session_of_mode(subs, embedding_model=MODEL, mode=mode, **keywords)


def same(a, b):
    assert a.ids == b.ids
    names = ("score", "relevance", "coverage", "residual_pull", "novelty", "ngram_overlap", "importance", "multiplier")
    for name in names:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert (a.qualified, a.guard_activations) == (b.qualified, b.guard_activations)


WHERES = {
    "one value": ({"tenant": "x"}, lambda g, i: g["attributes"]["tenant"][i] == "x"),
    "two columns": (
        {"tenant": ["x", "y"], "source": ["doc1", "doc2"]},
        lambda g, i: g["attributes"]["tenant"][i] in ("x", "y") and g["source"][i] in ("doc1", "doc2"),
    ),
    "no value": ({"tenant": None}, lambda g, i: g["attributes"]["tenant"][i] is None),
    "a number or none": ({"year": (2001, None)}, lambda g, i: g["attributes"]["year"][i] in (2001, None)),
    "a bool": ({"draft": True}, lambda g, i: g["attributes"]["draft"][i] is True),
    "no source": ({"source": None}, lambda g, i: g["source"][i] is None),
}


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
@pytest.mark.parametrize("kind", ["scan", "flat", "hnsw", "ivf"])
@pytest.mark.parametrize("name", WHERES)
def test_a_ranking_is_that_of_a_store_with_only_those_facts(name, kind, mode):
    rng = np.random.default_rng(5)
    given = facts(rng, N)
    where, holds = WHERES[name]
    keep = [i for i in range(N) if holds(given, i)]
    assert 10 < len(keep) < N - 10
    whole, part = store_of(given), store_of(only(given, keep))
    query = rng.normal(size=DIM)
    limited, alone = Retriever(whole, kind, nprobe=1000), Retriever(part, "scan")
    seed = rng.integers(1 << 30)
    first, second = (session_of(np.random.default_rng(seed), mode) for _ in range(2))
    for window in range(3):
        a = cdr_rank(query, limited, first, k=12, where=where)
        b = cdr_rank(query, alone, second, k=12)
        same(a, b)
        assert len(a) == 12 or len(a) == a.qualified  # never starved
        for session, ranking in ((first, a), (second, b)):
            report = WindowReport(0.2 * (window + 1), addressed=(f"s{window}",))
            envelope = pack_facts(ranking, token_budget=60)
            session.update(report, envelope.text, envelope=envelope, embedding_model=MODEL)
        more = facts(rng, 30, first=N + 30 * window)
        kept = [i for i in range(30) if holds(more, i)]
        whole.add(**more)
        part.add(**only(more, kept))
        for store in (whole, part):
            store.remove([i for i in a.ids[:2] if i in store])


def test_a_filter_in_words_is_short():
    assert where_text(None) == ""
    assert where_text(np.ones(3, bool)) == "(a mask)"
    assert where_text({"lang": "de", "year": [2020, None]}) == "(lang = 'de' and year in [2020, None])"
    many = where_text({f"n{i}" * 100: [str(j) * 1000 for j in range(50)] for i in range(10)})
    assert many.endswith(", 45 more] and 5 more)")
    assert len(many) < 3000
    assert where_text({"lang": []}) == "(lang in [])"


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_a_scan_with_codes_is_limited_too(mode):
    rng = np.random.default_rng(8)
    given = facts(rng, 20000)
    keep = [i for i in range(20000) if given["attributes"]["tenant"][i] == "y"]
    limited, alone = Retriever(store_of(given)), Retriever(store_of(only(given, keep)))
    limited.prepare()
    query, first, second = rng.normal(size=DIM), session_of(np.random.default_rng(1), mode), None
    second = session_of(np.random.default_rng(1), mode)
    for addressed in ("s0", "s1"):
        a, b = cdr_rank(query, limited, first, k=50, where={"tenant": "y"}), cdr_rank(query, alone, second, k=50)
        same(a, b)
        for session in (first, second):
            session.update(WindowReport(0.5, addressed=(addressed,)), a.facts[0].text, embedding_model=MODEL)


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
def test_a_session_may_change_its_filter_between_windows(mode):
    rng = np.random.default_rng(2)
    given = facts(rng, N)
    store = store_of(given)
    retriever, session, query = Retriever(store), session_of(rng, mode), rng.normal(size=DIM)
    for where in ({"tenant": "x"}, {"tenant": "y"}, None, {"tenant": "x"}, store.view().where(tenant="y")):
        same(cdr_rank(query, retriever, session, where=where), cdr_rank(query, Retriever(store), session, where=where))
    if mode == "calibrated":
        return  # a filter has statistics of its own, and may let in what the whole store's leave out
    every = {*cdr_rank(query, retriever, session).ids}
    assert every > {*cdr_rank(query, retriever, session, where={"tenant": "x"}).ids}


def test_a_mask_says_the_same_as_a_mapping_and_masks_can_be_joined():
    rng = np.random.default_rng(3)
    store = store_of(facts(rng, N))
    store.remove([f"f{i}" for i in range(0, 100, 3)])
    view = store.view()
    mask = view.where(tenant="y", draft=[True, None])
    assert mask.shape == (len(store),)
    assert mask.dtype == np.bool_
    tenants, drafts = view.attribute("tenant"), view.attribute("draft")
    assert mask.tolist() == [t == "y" and d in (True, None) for t, d in zip(tenants, drafts, strict=True)]
    retriever, query = Retriever(store), rng.normal(size=DIM)
    sessions = [session_of(rng), session_of(rng)]
    queries = [query, rng.normal(size=DIM)]
    by_mapping = rank_many(queries, retriever, sessions, where={"tenant": "y", "draft": [True, None]})
    by_mask = rank_many(queries, retriever, sessions, where=view.where(tenant="y") & view.where(draft=[True, None]))
    for a, b in zip(by_mapping, by_mask, strict=True):
        same(a, b)


def kinds_of(store):
    """Retrievers of every exact kind, and shards of the same facts with their store."""
    prepared = Retriever(store)
    prepared.prepare()
    return {"scan": Retriever(store), "codes": prepared, "flat": Retriever(store, "flat"),
            "device": Retriever(store, "device")}  # fmt: skip


def test_a_mask_is_of_the_facts_that_there_are():
    rng = np.random.default_rng(11)
    store = FactStore(DIM, embedding_model=MODEL)
    store.add([f"f{i}" for i in range(100)], [""] * 100, rng.normal(size=(100, DIM)))
    session = Session([SubQuery("s", "S", "", rng.normal(size=DIM))], embedding_model=MODEL, min_relevance=-1.0)
    sharded = ShardedStore.split(store, shards=3)
    retrievers, mask = kinds_of(store) | {"shards": ShardedRetriever(sharded)}, np.arange(100) < 90
    query = rng.normal(size=DIM)
    for kind, retriever in retrievers.items():
        assert cdr_rank(query, retriever, session, where=mask).qualified == 90, kind
    more = rng.normal(size=(10, DIM))
    for each in (store, sharded):
        each.remove([f"f{i}" for i in range(10)])
        each.add([f"new{i}" for i in range(10)], [""] * 10, more)
    expected = {f"f{i}" for i in range(10, 100)}  # all but the newest 10, once more
    for kind, retriever in retrievers.items():
        ranking = cdr_rank(query, retriever, session, where=mask)
        assert (ranking.qualified, set(ranking.ids)) == (90, expected), kind


@pytest.mark.parametrize("mode", ["spec", "calibrated"])
@pytest.mark.parametrize("seed", range(2))
def test_a_selection_is_of_the_facts_that_there_are_whatever_changed(mode, seed):
    """The same masks and mappings again and again, while facts come, go, change and are renumbered."""
    rng = np.random.default_rng(seed)
    store = store_of(facts(rng, 60))
    sharded = ShardedStore.split(store, shards=2)
    retrievers = kinds_of(store) | {"shards": ShardedRetriever(sharded)}
    wheres = [{"tenant": ["x", None], "draft": [True, None]}, {"source": ["doc1", None]}, None]
    wheres += [np.arange(60) % 3 > 0, np.arange(60) < 40]
    sessions = [session_of(np.random.default_rng(seed), mode) for _ in wheres]  # each keeps what its filter left
    query = rng.normal(size=DIM)
    for step in range(4):
        for where, session in zip(wheres, sessions, strict=True):
            truth = cdr_rank(query, Retriever(store), session, k=7, where=where)
            for kind, retriever in retrievers.items():
                ranking = cdr_rank(query, retriever, session, k=7, where=where)
                assert (ranking.ids, ranking.qualified) == (truth.ids, truth.qualified), (kind, step, where)
                assert ranking.score.tobytes() == truth.score.tobytes()
        gone = [str(id) for id in rng.choice(store.ids, 6, replace=False)]
        changed = [str(id) for id in rng.choice([id for id in store.ids if id not in gone], 5, replace=False)]
        other, come = facts(rng, 5) | {"ids": changed}, facts(rng, 6, first=100 * (step + 1))
        for each in (store, sharded):
            each.remove(gone)
            each.upsert(**other)
            each.add(**come)
            if step == 1:
                each.compact()


def test_a_filter_of_many_names_costs_no_more_than_to_read_it():
    store = store_of(facts(np.random.default_rng(1), N))
    view = store.view()
    names = {f"no{i}": ["x"] * 20 for i in range(100_000)}
    with pytest.raises(KeyError, match="expected source or one of"):
        view.select(names)
    values = [f"v{i}" for i in range(100_000)] + ["x"]
    assert view.select({"tenant": values}).ids == view.select({"tenant": "x"}).ids
    assert view.select({"tenant": values[::-1]}) is view.select({"tenant": values})
    numbers = list(range(100_000))
    assert view.select({"year": numbers}).ids == view.select({"year": [2000, 2001, 2002, 2003]}).ids
    assert view.select({"score": [n / 8 for n in numbers]}).ids == [f"f{i}" for i in range(1, N, 2)]


def test_a_multiplier_array_still_has_an_entry_for_every_fact():
    rng = np.random.default_rng(4)
    store = store_of(facts(rng, N))
    factors = rng.random(N)
    session, query = session_of(rng), rng.normal(size=DIM)
    ranking = cdr_rank(query, Retriever(store), session, multiplier=factors, where={"tenant": "x"})
    assert len(ranking)
    assert ranking.multiplier.tolist() == [factors[int(i[1:])] for i in ranking.ids]


def test_values_come_back_and_survive_upsert_compact_save_and_load(tmp_path):
    rng = np.random.default_rng(6)
    given = facts(rng, 60)
    store = store_of(given)
    store.upsert(["f4"], ["new"], rng.normal(size=(1, DIM)), attributes={"tenant": ["z"], "language": ["en"]})
    store.add(["plain"], ["no attributes"], rng.normal(size=(1, DIM)))
    store.remove(["f1", "f2"])
    expected = {fact.id: (fact.source, dict(fact.attributes)) for fact in store.get(store.ids)}
    assert expected["f4"] == (None, {"tenant": "z", "language": "en"})
    assert expected["plain"] == (None, {})
    assert expected["f3"] == ("doc3", {"tenant": "x", "year": 2003, "score": 0.375, "draft": False})
    store.save(tmp_path / "saved")
    loaded = FactStore.load(tmp_path / "saved")
    store.compact()
    for each in (store, loaded):
        assert {fact.id: (fact.source, dict(fact.attributes)) for fact in each.get(each.ids)} == expected
        assert each.view().attribute_names == ["draft", "language", "score", "tenant", "year"]
        assert each.view().where(source="doc3").sum() == sum(source == "doc3" for source, _ in expected.values())
    loaded.add(["more"], ["more"], rng.normal(size=(1, DIM)), attributes={"year": [1999], "tenant": ["new"]})
    assert loaded.get(["more"])[0].attributes == {"year": 1999, "tenant": "new"}


def test_a_saved_store_has_no_values_of_removed_facts(tmp_path):
    store = FactStore(2, embedding_model=MODEL)
    store.add(["a", "b"], ["a", "b"], [[1, 0], [0, 1]], attributes={"owner": ["secret", "open"]})
    store.remove(["a"])
    store.save(tmp_path / "s")
    assert not any(b"secret" in path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found, data: found.update(attributes=[]), "expected attributes to be dict"),
        (lambda found, data: found["attributes"]["t"].update(type="object"), "a type and a file"),
        (lambda found, data: found["attributes"]["t"].update(file="../x"), "a type and a file"),
        (lambda found, data: found["attributes"]["t"].update(file="attribute-7"), "checksums of attribute-7"),
        (lambda found, data: (data / "attribute-0.json").write_text('["x",1 ]'), "list of strings"),
        (lambda found, data: (data / "attribute-0.json").write_text('["x", "]'), "not readable JSON"),
        (lambda found, data: (data / "attribute-0.json").write_text('["xx"]  '), "expected -1 to 0"),
    ],
)
def test_damage_to_attributes_is_found(tmp_path, change, message):
    store = FactStore(2, embedding_model=MODEL)
    store.add(["a", "b"], ["a", "b"], [[1, 0], [0, 1]], attributes={"t": ["x", "y"]})
    store.save(tmp_path / "s")
    manifest = tmp_path / "s" / "manifest.json"
    found = json.loads(manifest.read_bytes())
    data = tmp_path / "s" / found["data"]
    change(found, data)
    reseal(manifest, attributes=found["attributes"])
    with pytest.raises(DamagedFileError, match=message):
        FactStore.load(tmp_path / "s")


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ([1], TypeError, "expected a mapping"),
        ({3: ["a", "b"]}, TypeError, "expected names that are str"),
        ({"": ["a", "b"]}, ValueError, "expected a name"),
        ({"source": ["a", "b"]}, ValueError, "no column of every fact"),
        ({"_x": ["a", "b"]}, ValueError, "does not begin with _"),
        ({"a.b": ["a", "b"]}, ValueError, "has no dot"),
        ({"t": "ab"}, TypeError, "one value per id"),
        ({"t": ["a"]}, ValueError, "expected 2 entries"),
        ({"t": ["a", 1]}, TypeError, "of one type, got int, str"),
        ({"t": [True, 1]}, TypeError, "of one type, got bool, int"),
        ({"t": [b"a", b"b"]}, TypeError, "got bytes at 0"),
        ({"t": [1.0, np.nan]}, ValueError, "finite"),
        ({"t": [1, 2**63]}, ValueError, "64 bits"),
        ({"year": ["1999", None]}, TypeError, "expected int as in the store, got str"),
        ({"year": [1.5, None]}, TypeError, "expected int as in the store, got float"),
    ],
)
def test_bad_attributes_are_refused_at_the_door(attributes, error, message):
    store = FactStore(2, embedding_model=MODEL)
    store.add(["z"], ["z"], [[1, 1]], attributes={"year": [1]})
    before = store.version
    with pytest.raises(error, match=message):
        store.add(["a", "b"], ["a", "b"], [[1, 0], [0, 1]], attributes=attributes)
    assert store.version == before
    assert store.view().attribute_names == ["year"]


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ({"language": "en"}, KeyError, "expected source or one of"),
        ({"_x": 1}, KeyError, "expected source or one of"),
        ({"year": "1999"}, TypeError, "expected int as in the store"),
        ({"tenant": 3}, TypeError, "expected str as in the store"),
        ({"tenant": {"x": 1}}, TypeError, "a value or several"),
        ({"tenant": b"x"}, TypeError, "a value or several"),
        ({3: "x"}, TypeError, "names that are str"),
        ([True] * 399, ValueError, "expected 400 entries"),
        ([1] * 400, TypeError, "a bool array"),
        ("tenant", TypeError, "a mapping or a bool array"),
    ],
)
def test_bad_filters_are_refused(where, error, message):
    rng = np.random.default_rng(1)
    store = store_of(facts(rng, N))
    with pytest.raises(error, match=message):
        cdr_rank(rng.normal(size=DIM), Retriever(store), session_of(rng), where=where)


def test_facts_elsewhere_are_filtered_there():
    class Elsewhere:
        store = None

        def rank_many(self, queries, sessions, *, k, multiplier, where):
            return [where]

    session = session_of(np.random.default_rng(1))
    assert cdr_rank([1.0], Elsewhere(), session) is None
    assert cdr_rank([1.0], Elsewhere(), session, where={"tenant": "x"}) == {"tenant": "x"}


def test_values_that_can_be_read_only_once():
    view = store_of(facts(np.random.default_rng(1), N)).view()
    assert view.select({"tenant": iter(["x", "y"])}).ids == view.select({"tenant": ["x", "y"]}).ids


def test_a_filter_that_nothing_meets_ranks_nothing():
    rng = np.random.default_rng(1)
    store = store_of(facts(rng, N))
    for mode in ("spec", "calibrated"):
        for where in ({"tenant": "nobody"}, {"tenant": []}, np.zeros(N, np.bool_)):
            assert cdr_rank(rng.normal(size=DIM), Retriever(store), session_of(rng, mode), where=where).ids == []


def test_numbers_are_compared_as_numbers():
    column = Attribute(float)
    column.write(0, [1.0, 2.5, None])
    assert column.equal([1], 3, "w").tolist() == [True, False, False]
    assert column.equal([2.5, None], 3, "w").tolist() == [False, True, True]
    assert checked_attributes({"t": [np.int64(1), np.float32(0.5)]}, 2) == {"t": (float, [1.0, 0.5])}
    assert checked_attributes({"t": np.array([True, False])}, 2) == {"t": (bool, [True, False])}
    assert checked_attributes({"t": [None, None]}, 2) == {}
