"""The two writers: packed facts as they are, and commands."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time

import numpy as np
import pytest

from cdr_kernel import FactStore, Retriever, Session, SubQuery, WindowPrompt, WindowReport, cdr_rank, pack_facts
from cdr_kernel.exceptions import WriterError
from cdr_kernel.loop import CommandWriter, ExtractWriter
from cdr_kernel.loop import _writers as writer_module

MODEL = "m"
ECHO = """
import json, sys
print(sys.stdin.read(), end="")
"""


@pytest.fixture
def world():
    """A store of eight facts, two about each of four axes, and a session of two sub-queries on the first two."""
    store = FactStore(4, embedding_model=MODEL)
    texts = [f"First sentence of {i}. And a second one of fact {i}!" for i in range(8)]
    store.add([f"f{i}" for i in range(8)], texts, np.repeat(np.eye(4), 2, axis=0), source=["s", None] * 4)
    items = [SubQuery(f"q{i}", f"Topic {i}", f"about {i}", np.eye(4)[i], expected_words=22) for i in range(2)]
    return store, Session(items, embedding_model=MODEL, min_relevance=-1.0)


def prompt_of(store, session, query, k=3, summary=None):
    ranking = cdr_rank(query, Retriever(store), session, k=k)
    return WindowPrompt(session.window_count + 1, session.anchor(), pack_facts(ranking, 10_000), summary)


def program(tmp_path, source):
    path = tmp_path / "program.py"
    path.write_text(source)
    return f"{sys.executable} {path}"


def test_extract_is_assessed_by_the_stored_vectors(world):
    store, session = world
    writer = ExtractWriter(store, session)
    prompt = prompt_of(store, session, [1.0, 0.0, 0.5, 0.0])
    assert [fact.id for fact in prompt.envelope.facts] == ["f0", "f1", "f4"]
    output = writer(prompt)
    assert output == prompt.envelope.text
    report = writer.assess(output)
    # Two facts of eleven words on the first axis; the third lies on no sub-query.
    assert report.words_by_sub_query == {"q0": 22}
    assert report.addressed == ("q0",)
    assert report.completeness_score == 0.5
    session.update(report, output, envelope=prompt.envelope)

    again = writer.assess(writer(prompt_of(store, session, [1.0, 0.9, 0.0, 0.0], k=8)))
    assert again.words_by_sub_query == {"q1": 22}, "what was written before counts for nothing"
    with pytest.raises(ValueError, match="the text that this writer wrote last"):
        writer.assess("something else")


def test_a_command_gets_one_json_and_prints_the_text(world, tmp_path):
    store, session = world
    writer = CommandWriter(program(tmp_path, ECHO), store, session, query="All topics", token_budget=10_000)
    prompt = prompt_of(store, session, [1.0, 0.0, 0.5, 0.0], summary="so far \ud800 ü")
    request = json.loads(writer(prompt))
    items = [
        {"id": f"q{i}", "label": f"Topic {i}", "text": f"about {i}", "expected_words": 22, "remaining": True}
        for i in range(2)
    ]
    assert request == {
        "task": {"query": "All topics", "sub_queries": items},
        "window": 1,
        "max_windows": 5,
        "token_budget": 10_000,
        "anchor": "Remaining sections to complete: Topic 0, Topic 1",
        "facts": [
            {"id": fact.id, "text": fact.text, "source": fact.source, "score": score}
            for fact, score in zip(prompt.envelope.facts, prompt.envelope.ranking.score.tolist(), strict=True)
        ],
        "backward_summary": "so far \ud800 ü",
        "remaining": ["Topic 0", "Topic 1"],
    }
    session.update(WindowReport(0.5, ("q0",)), "text", embedding_model=MODEL)
    bare = CommandWriter(program(tmp_path, ECHO), store, session)
    request = json.loads(bare(prompt_of(store, session, [1.0, 0.0, 0.5, 0.0])))
    assert [item["remaining"] for item in request["task"]["sub_queries"]] == [False, True]
    assert (request["window"], request["remaining"], request["token_budget"]) == (2, ["Topic 1"], None)
    assert (request["task"]["query"], request["backward_summary"]) == (None, None)


def test_a_command_is_assessed_by_words_or_by_a_model(world):
    store, session = world
    assert CommandWriter("true", store, session).assess("This is Topic 0.").addressed == ("q0",)
    embedded = CommandWriter("true", store, session, embed=lambda texts: [[0.0, 1.0, 0.0, 0.0]] * len(texts))
    assert embedded.assess("This is Topic 0.").addressed == ("q1",)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("import sys; sys.exit(3)", "ended with exit status 3, expected 0"),
        ("print(' ')", "printed nothing"),
        ("import sys; sys.stdout.buffer.write(b'caf\\xe9')", "printed byte 0xe9 at 3, expected UTF-8"),
        ("import os; os.abort()", "ended with exit status -6"),
    ],
)
def test_a_command_that_fails(world, tmp_path, source, part):
    store, session = world
    writer = CommandWriter(program(tmp_path, source), store, session)
    with pytest.raises(WriterError, match="window 1: the writer .*" + part):
        writer(prompt_of(store, session, [1.0, 0.0, 0.0, 0.0]))


def test_a_command_that_takes_too_long_ends_with_its_children(world, tmp_path):
    store, session = world
    late = tmp_path / "late"
    child = f"import time; time.sleep(1); open({str(late)!r}, 'w')"
    source = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    writer = CommandWriter(program(tmp_path, source), store, session, timeout=0.5)
    with pytest.raises(WriterError, match=r"took longer than 0\.5 s"):
        writer(prompt_of(store, session, [1.0, 0.0, 0.0, 0.0]))
    time.sleep(1.2)
    assert not late.exists()


@pytest.mark.parametrize("command", ["", "  ", "no-such-command -x", "echo 'x"])
def test_what_is_no_command(world, command):
    with pytest.raises(ValueError, match="expected a command"):
        CommandWriter(command, *world)


@pytest.mark.parametrize(
    ("command", "operator"),
    [
        ("python w.py | cat", "|"),
        ("python w.py|cat", "|"),
        ("python w.py > out", ">"),
        ("python w.py 2>&1", ">&"),
        ("python w.py < in", "<"),
        ("true && true", "&&"),
        ("true || true", "||"),
        ("true; true", ";"),
        ("true &", "&"),
        ("echo $HOME", "$H"),
        ("echo `pwd`", "`"),
        ("echo 'a' $(pwd)", "$("),
    ],
)
def test_shell_syntax_is_refused(world, command, operator):
    with pytest.raises(ValueError, match=re.escape(f"got {operator!r} in it: use sh -c '...'")):
        CommandWriter(command, *world)


@pytest.mark.parametrize(
    "command",
    ["sh -c 'true | true > $HOME; `true`'", 'sh -c "true && $X"', "echo a\\|b costs 5$", """true "it's" ';'"""],
)
def test_quoted_syntax_is_no_syntax(world, command):
    CommandWriter(command, *world)


@pytest.mark.parametrize("timeout", [0.0 - 1.0, math.inf, math.nan, 1e300])
def test_a_timeout_has_an_end(world, timeout):
    with pytest.raises(ValueError, match="timeout must be"):
        CommandWriter("true", *world, timeout=timeout)


def test_output_has_a_limit(world, tmp_path, monkeypatch):
    store, session = world
    prompt = prompt_of(store, session, [1.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(writer_module, "MAX_OUTPUT_BYTES", 2**20)
    exact = CommandWriter(program(tmp_path, "print('x' * (2**20 - 1))"), store, session)
    assert len(exact(prompt)) == 2**20
    endless = CommandWriter(program(tmp_path, "while True: print('x' * 65535)"), store, session, timeout=60)
    before = threading.active_count()
    with pytest.raises(WriterError, match=r"window 1: the writer .* printed more than 1 MiB"):
        endless(prompt)
    assert threading.active_count() == before


def test_a_command_need_not_read(world):
    store, session = world
    prompt = prompt_of(store, session, [1.0, 0.0, 0.0, 0.0], summary="x" * 2**20)
    assert CommandWriter("echo text", store, session)(prompt) == "text\n"


def test_what_a_command_leaves_behind_keeps_nobody_waiting(world, tmp_path):
    store, session = world
    go, late = tmp_path / "go", tmp_path / "late"
    child = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\nopen({str(late)!r}, 'w')"
    source = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); print('the text')"
    writer = CommandWriter(program(tmp_path, source), store, session, timeout=60)
    with pytest.warns(UserWarning, match="window 1: .* something it started still holds its output"):
        assert writer(prompt_of(store, session, [1.0, 0.0, 0.0, 0.0])) == "the text\n"
    go.touch()
    deadline = time.monotonic() + 60
    while not late.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert late.exists(), "what it started is let be"


def test_text_that_comes_just_after_the_end_counts(world, tmp_path):
    store, session = world
    child = "import time; time.sleep(0.2); print('late text')"
    source = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    writer = CommandWriter(program(tmp_path, source), store, session, timeout=60)
    assert writer(prompt_of(store, session, [1.0, 0.0, 0.0, 0.0])) == "late text\n"


def test_a_command_that_fails_takes_along_what_it_started(world, tmp_path):
    store, session = world
    late = tmp_path / "late"
    child = f"import time; time.sleep(1); open({str(late)!r}, 'w')"
    source = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); sys.exit(3)"
    with pytest.raises(WriterError, match="exit status 3"):
        CommandWriter(program(tmp_path, source), store, session)(prompt_of(store, session, [1.0, 0.0, 0.0, 0.0]))
    time.sleep(1.2)
    assert not late.exists()
