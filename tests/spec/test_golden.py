"""Golden rankings: what the reference said, kept in golden/*.json, against everything that ranks.

    python tests/test_golden.py --write        makes the files again

Each file holds its recipe (an entry of CASES) and the ranking of every window. The inputs come from integers: stream
NAME is the sequence of SHA-256("NAME:0"), SHA-256("NAME:1"), ..., each digest read as sixteen big-endian 16-bit
numbers, and an integer in [low, high] is low + number % (high - low + 1). `script` says in which order they are drawn.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from sessions import session_of_mode

from cdr_kernel import (
    _C,
    FactStore,
    Retriever,
    SubQuery,
    WindowReport,
    available_impls,
    cdr_rank,
    reference,
)
from cdr_kernel.retrieve._retriever import EXACT_KINDS

FOLDER = Path(__file__).parents[1] / "golden"
NUMBERS = ("score", "score_without_guard", "relevance", "coverage", "residual_pull", "novelty")
WORDS = ("pod", "service", "Ingress", "café", "東京", "node-7", "etcd", "routes")

COMMON = {
    "facts": 16, "dim": 8, "dtype": "float32", "divisor": 7, "vectors": "near", "windows": 2, "gate": 0.55,
    "importance": [1], "multiplier": [1], "depths": [0.9, 0.7, 0.4, 0.15], "exponent": 0, "sub_queries": 4, "k": None,
    "settings": {}, "changes": False,
}  # fmt: skip
CASES = {
    "first_window": {"windows": 1, "facts": 30},
    "float16": {"dtype": "float16", "divisor": 4, "gate": 0.3},
    "float64": {"dtype": "float64", "gate": 0.3, "windows": 3},
    "five_windows": {"windows": 5, "changes": True, "facts": 12, "gate": 0.2},
    "ties": {"vectors": "three", "divisor": 1, "k": 9, "gate": -1.0},
    "permuted": {"vectors": "permuted", "divisor": 1, "gate": 0.0},
    "at_the_gate": {"vectors": "small", "divisor": 1, "dim": 3, "gate": "of fact 5", "facts": 24},
    "below_zero": {"vectors": "opposite", "gate": -1.0},
    "pull_from_the_start": {"settings": {"first_window_pull": True}, "gate": -1.0, "windows": 1},
    "novelty_above_one": {"vectors": "opposite", "gate": -1.0, "dim": 2, "divisor": 1},
    "novelty_held_at_one": {"vectors": "opposite", "gate": -1.0, "dim": 2, "settings": {"clamp_novelty": True}},
    "no_depth": {"depths": [0.0], "gate": 0.2},
    "importance_and_multiplier": {"importance": [0, 1, 2, 0.25], "multiplier": [1, 0.3, 0, 0.7], "gate": 0.2},
    "one_dimension": {"dim": 1, "divisor": 1, "gate": 0.0},
    "wide": {"dim": 67, "gate": 0.3, "facts": 12},
    "far_scales": {"dtype": "float64", "exponent": 500, "gate": 0.2},
}
CASES = {name: {**COMMON, **case} for name, case in CASES.items()}


class Stream:
    def __init__(self, name):
        self.name, self.block, self.left = name, 0, []

    def integer(self, low, high):
        if not self.left:
            digest = hashlib.sha256(f"{self.name}:{self.block}".encode()).digest()
            self.left = [int.from_bytes(digest[i : i + 2], "big") for i in range(0, 32, 2)]
            self.block += 1
        return low + self.left.pop(0) % (high - low + 1)

    def pick(self, values):
        return values[self.integer(0, len(values) - 1)]

    def vector(self, dim, low=-8, high=8):
        values = [self.integer(low, high) for _ in range(dim)]
        return values if any(values) else [1, *values[1:]]


def fact_vector(case, stream, query, base):
    if case["vectors"] == "three":
        return base[stream.integer(0, 2)]
    if case["vectors"] == "small":
        return stream.vector(case["dim"], -2, 2)
    if case["vectors"] == "permuted":
        left, values = list(base[0]), []
        while left:
            values.append(left.pop(stream.integer(0, len(left) - 1)))
        return values
    share = stream.integer(0, 3) * (stream.pick([1, -1]) if case["vectors"] == "opposite" else 1)
    values = [share * q + x for q, x in zip(query, stream.vector(case["dim"]), strict=True)]
    return values if any(values) else query


def text(stream):
    return " ".join(stream.pick(WORDS) for _ in range(stream.integer(0, 11))) + stream.pick(["", " The pod routes."])


def script(name):
    """The case as a list of steps that the reference and the kernel both can follow."""
    case, stream = CASES[name], Stream(name)
    query = stream.vector(case["dim"])
    base = [stream.vector(case["dim"], -2, 2) for _ in range(3)]
    subs = [
        [q * stream.integer(-1, 1) + x for q, x in zip(query, stream.vector(case["dim"]), strict=True)]
        for _ in range(case["sub_queries"])
    ]
    subs = [s if any(s) else query for s in subs]

    def facts(ids):
        made = []
        for i in ids:
            vector = [x / case["divisor"] for x in fact_vector(case, stream, query, base)]
            exponent = case["exponent"] * stream.integer(-1, 1) if case["exponent"] else 0
            vector = np.ldexp(vector, exponent).astype(case["dtype"]).astype(np.float64).tolist()
            made.append((i, text(stream), vector, float(stream.pick(case["importance"]))))
        return made

    there = [f"f{i}" for i in range(case["facts"])]
    steps = [("put", facts(there))]
    for window in range(case["windows"]):
        steps.append(("rank", {i: float(stream.pick(case["multiplier"])) for i in there}))
        addressed = sorted({stream.integer(0, len(subs) - 1) for _ in range(2)})
        depths = {f"s{j}": float(stream.pick(case["depths"])) for j in addressed}
        said = [content for step in steps if step[0] == "put" for _, content, _, _ in step[1]]
        steps.append(("update", depths, " ".join(stream.pick(said) for _ in range(3))))
        if case["changes"]:
            gone = stream.pick(there)
            steps.append(("remove", gone))
            there.remove(gone)
            fresh = [stream.pick(there), f"n{window}"]
            steps.append(("put", facts(fresh)))
            there = [i for i in there if i != fresh[0]] + fresh
    gate = case["gate"]
    if gate == "of fact 5":
        gate = reference.cosine(steps[0][1][5][2], query)
    return case, query, subs, gate, steps


def by_reference(name):
    """The ranking of each window: [id, *NUMBERS, ngram_overlap] of each fact."""
    case, query, subs, gate, steps = script(name)
    session = reference.ReferenceSession(
        [reference.SubQuery(f"s{j}", f"s{j}", "", vector) for j, vector in enumerate(subs)],
        min_relevance=gate,
        **case["settings"],
    )
    facts, sequence, windows = {}, 0, []
    for step, *what in steps:
        if step == "put":
            for i, content, vector, importance in what[0]:
                facts.pop(i, None)
                facts[i] = reference.Fact(vector, content, importance, id=i, sequence=sequence)
                sequence += 1
        elif step == "remove":
            del facts[what[0]]
        elif step == "rank":
            for i, fact in facts.items():
                fact.multiplier = what[0][i]
            ranked = reference.cdr_rank(list(facts.values()), query, session, k=case["k"])
            windows.append([[s.fact.id, *(getattr(s, n) for n in NUMBERS), s.ngram_overlap] for s in ranked])
        else:
            report = reference.Report(0.5, list(what[0]), what[0])
            reference.update_session_after_window(session, report, what[1])
    return windows


def by_kernel(name, kind):
    """The Ranking of each window."""
    case, query, subs, gate, steps = script(name)
    store = FactStore(case["dim"], embedding_model="m1", dtype=case["dtype"])
    retriever = Retriever(store, kind)
    session = session_of_mode(
        [SubQuery(f"s{j}", f"s{j}", "", vector) for j, vector in enumerate(subs)],
        embedding_model="m1", min_relevance=gate, **case["settings"],
    )  # fmt: skip
    windows = []
    for step, *what in steps:
        if step == "put":
            ids, texts, vectors, importance = zip(*what[0], strict=True)
            store.upsert(ids, texts, vectors, importance=importance)
        elif step == "remove":
            store.remove(what)
        elif step == "rank":
            windows.append(cdr_rank(query, retriever, session, k=case["k"], multiplier=what[0]))
        else:
            session.update(WindowReport(0.5, tuple(what[0]), what[0]), what[1], embedding_model="m1")
    return windows


def written(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("simd", _C.simd_levels())
@pytest.mark.parametrize(("impl", "kind"), list(product(available_impls(), EXACT_KINDS)))
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_ranks_as_written(name, impl, kind, simd, monkeypatch):
    monkeypatch.setenv("CDR_KERNEL_IMPL", impl)
    level = _C.simd()
    _C.set_simd(simd)
    try:
        rankings = by_kernel(name, kind)
    finally:
        _C.set_simd(level)
    golden = written(name)["windows"]
    assert len(rankings) == len(golden)
    for ranking, window in zip(rankings, golden, strict=True):
        assert ranking.ids == [row[0] for row in window]
        for at, number in enumerate(NUMBERS, 1):
            off = np.abs(getattr(ranking, number) - [row[at] for row in window])
            scale = ranking.importance * ranking.multiplier if number.startswith("score") else 1.0
            assert (off <= 1e-12 * scale).all(), number
        assert ranking.ngram_overlap.tolist() == [row[-1] for row in window]


@pytest.mark.parametrize("name", CASES)
def test_the_reference_says_so_still(name):
    assert written(name) == {"recipe": CASES[name], "windows": by_reference(name)}


def test_there_is_a_file_for_every_case_and_each_shows_its_point():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)
    assert len(CASES) >= 12
    windows = {name: written(name)["windows"] for name in CASES}
    assert all(any(len(window) >= 4 for window in each) for each in windows.values())
    column = {
        name: np.array([row[1:] for window in each for row in window], dtype=float) for name, each in windows.items()
    }
    assert (np.diff(column["ties"][:9, 0]) == 0).any()
    assert column["at_the_gate"][:, 2].min() == script("at_the_gate")[3]
    assert column["below_zero"][:, 2].min() < 0
    assert column["novelty_above_one"][:, 5].max() > 1.0
    assert column["novelty_held_at_one"][:, 5].max() == 1.0
    assert (column["pull_from_the_start"][:, 4] > column["pull_from_the_start"][:, 2]).any()
    assert (column["no_depth"][:, 5] == 1.0).all()
    assert (column["importance_and_multiplier"][:, 0] == 0.0).any()
    assert max(values[:, 6].max() for values in column.values()) > 5  # the guard's cap


def write():
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        windows = by_reference(name)
        rows = ",\n".join(
            "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in window) + "\n]" for window in windows
        )
        recipe = json.dumps(case, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(
            f'{{"recipe": {recipe},\n"windows": [\n{rows}\n]}}\n', encoding="utf-8", newline="\n"
        )


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_golden.py --write")
    write()
