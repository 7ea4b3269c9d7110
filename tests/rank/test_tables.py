"""Rankings as tables: the same numbers in Arrow, pandas, plain text, rich and HTML."""

from __future__ import annotations

import html
import io
from dataclasses import fields, replace

import numpy as np
import pytest
from rich.console import Console
from sessions import session_of_mode

from cdr_kernel import FactStore, Ranking, Retriever, SubQuery, cdr_rank
from cdr_kernel.rank._tables import BREAKDOWN, MOST_ROWS, Table, plain


def ranking(n=4, mode="spec", texts=None):
    store = FactStore(2, embedding_model="m1")
    vectors = np.stack([np.ones(n), np.linspace(0.0, 0.9, n)], 1) if n else np.zeros((0, 2))
    ids = [f"f{i}" for i in range(n)]
    sources = [None if i % 2 else "a.md" for i in range(n)]
    store.add(
        ids, texts or [f"text {i}" for i in range(n)], vectors, source=sources, position=[i or None for i in range(n)]
    )
    settings = {"gate": -9.0} if mode == "calibrated" else {}
    session = session_of_mode([SubQuery("s", "S", "s", [0.0, 1.0])], embedding_model="m1", mode=mode, **settings)
    return cdr_rank([1.0, 0.0], Retriever(store), session)


def test_arrow_and_pandas_have_the_numbers_of_the_ranking():
    made = ranking()
    table = made.to_arrow()
    assert table["rank"].to_pylist() == [1, 2, 3, 4]
    assert table["id"].to_pylist() == made.ids
    assert table["text"].to_pylist() == [f.text for f in made.facts]
    assert table["source"].to_pylist() == [f.source for f in made.facts]
    assert table["position"].to_pylist() == [f.position for f in made.facts]
    for name in ("score", "relevance", "novelty", "ngram_overlap", "ngram_penalty", "importance"):
        assert table[name].to_numpy().tobytes() == getattr(made, name).tobytes()
    pandas = pytest.importorskip("pandas", reason="needs the extra pandas")
    frame = made.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["score"].to_numpy().tobytes() == made.score.tobytes()
    assert list(frame["id"]) == made.ids


def test_the_breakdown_is_every_array_that_a_ranking_always_has():
    arrays = [field.name for field in fields(Ranking) if field.type in ("Float64", "npt.NDArray[np.int32]")]
    assert list(BREAKDOWN) == arrays


def test_the_calibrated_mode_adds_a_column_of_lists():
    made = ranking(mode="calibrated")
    assert np.array(made.to_arrow()["by_sub_query"].to_pylist()).tobytes() == made.by_sub_query.tobytes()


def test_an_empty_ranking_is_an_empty_table():
    made = ranking(0)
    assert made.to_arrow().num_rows == 0
    assert made.to_arrow().schema.field("position").type == "int64"
    assert repr(made) == "<Ranking of 0 facts, 0 qualified>"
    assert "0 facts" in str(made)
    assert "<table>" in made._repr_html_()


def test_one_fact_is_one_fact():
    made = ranking(1)
    assert repr(made).startswith("<Ranking of 1 fact, 1 qualified, ")
    assert str(made).startswith("1 fact of 1 that qualified")


def test_an_incomplete_ranking_says_so_wherever_it_is_shown():
    whole = ranking()
    part = replace(whole, complete=False, missing_shards=("shard-0", "shard-2"))
    out = io.StringIO()
    Console(file=out, width=300).print(part)
    for shown in (repr(part), str(part), out.getvalue(), html.unescape(part._repr_html_())):
        assert "INCOMPLETE: no answer from 'shard-0', 'shard-2'" in shown
    assert "INCOMPLETE" in repr(replace(whole, complete=False))
    for shown in (repr(whole), str(whole), whole._repr_html_()):
        assert "INCOMPLETE" not in shown


def test_a_lone_surrogate_does_not_break_arrow():
    made = ranking(1, texts=["bad \ud800 text"])
    assert made.to_arrow()["text"].to_pylist() == ["bad ? text"]
    str(made).encode()
    made._repr_html_().encode()


def test_a_long_ranking_shows_its_head_and_says_so():
    made = ranking(MOST_ROWS + 7)
    for shown in (str(made), made._repr_html_()):
        assert "and 7 more" in shown
        assert f"f{MOST_ROWS - 1}" in shown
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(made)
    assert "and 7 more" in console.export_text()


def test_texts_are_cut_in_the_terminal_and_whole_in_a_notebook():
    made = ranking(1, texts=["x" * 100_000])
    assert len(str(made)) < 1000
    assert "x" * 100_000 in made._repr_html_()


def test_numbers_stand_right_and_words_left():
    table = Table("T", ("name", "n"), [("a", 1.5), ("bbbbbb", 12), ("c", None)])
    assert plain(table).splitlines()[3:] == ["a       1.5000", "bbbbbb      12", "c"]
