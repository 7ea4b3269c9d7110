"""Fact files, arrays, tasks and the file of a run: what is read, and what is said about what is wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdr_kernel.exceptions import FileError
from cdr_kernel.files import _files
from cdr_kernel.files._files import (
    count_facts,
    first_place,
    names_array,
    pick_task,
    read_array,
    read_facts,
    read_task_vectors,
    read_tasks,
    read_vector,
    read_vectors,
    write_json,
)

GOOD = b'{"id": "a", "text": "one"}'
SUB = {"id": 0, "label": "L", "text": "T", "fact_ids": [1, "b"], "expected_words": 9}
TASK = {"id": "t", "query": "q", "windows": 3, "k": 2, "sub_queries": [SUB]}


def lines(path, *content):
    path.write_bytes(b"\n".join(content))
    return path


def facts_of(path, **rows):
    return [
        (id, text, source, importance, position)
        for batch in read_facts(path, **rows)
        for id, text, source, importance, position in zip(
            batch.ids, batch.texts, batch.source, batch.importance, batch.position, strict=True
        )
    ]


def wrong(call, *parts):
    """The message of the FileError that call raises, which has every part in it."""
    with pytest.raises(FileError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


def test_jsonl_fields_and_their_fallbacks(tmp_path):
    path = lines(
        tmp_path / "f.jsonl",
        b'\xef\xbb\xbf{"id": 7, "text": "seven", "path": "p.md", "pos": 3, "importance": 0, "more": []}\r',
        b"",
        b'{"text": "no id", "source": "s", "path": "p", "position": 0, "pos": 9, "importance": null}',
        '{"id": "ü", "text": "\\ud800 \u2028 ü", "position": 2.0}'.encode(),
        b"   ",
    )
    assert facts_of(path) == [
        ("7", "seven", "p.md", 0.0, 3),
        ("1", "no id", "s", 1.0, 0),
        ("ü", "\ud800 \u2028 ü", None, 1.0, 2),
    ]
    assert count_facts(path) == 3
    assert [batch.places for batch in read_facts(path)] == [["line 1", "line 3", "line 4"]]
    assert first_place(path, "ü") == "line 4"


def test_rows_keep_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "BATCH_ROWS", 4)
    texts = [f"text {i}" for i in range(10)]
    jsonl = lines(tmp_path / "f.jsonl", *(json.dumps({"text": text}).encode() for text in texts))
    parquet = tmp_path / "f.parquet"
    pq.write_table(pa.table({"text": texts}), parquet, row_group_size=3)
    for path in (jsonl, parquet):
        assert [len(batch) for batch in read_facts(path)] == [4, 4, 2]
        assert [batch.first for batch in read_facts(path, start=3, stop=9)] == [3, 7]
        assert [id for id, *_ in facts_of(path, start=3, stop=9)] == [str(i) for i in range(3, 9)]
        assert facts_of(path, start=8) == [("8", "text 8", None, 1.0, None), ("9", "text 9", None, 1.0, None)]
        assert facts_of(path, start=20) == []
        assert facts_of(path, start=5, stop=5) == []
        assert count_facts(path) == 10


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b'{"id": "x", text}', ["expected one JSON object", "column 13"]),
        (b"[1, 2]", ["expected one JSON object, got [1, 2]; JSONL is one object a line"]),
        (b"[", ["expected one JSON object, got '['", "; JSONL is one object a line"]),
        (b"[" * 100_000, ["expected one JSON object"]),
        (b'{"text": "caf\xe9"}', ["expected UTF-8", "0xe9"]),
        (b'{"id": "x"}', ["text: expected", "got None"]),
        (b'{"text": " "}', ["text: expected a string that is not blank, got ' '"]),
        (b'{"text": 5}', ["text: expected", "got 5"]),
        (b'{"text": "t", "id": true}', ["id: expected", "got True"]),
        (b'{"text": "t", "id": ""}', ["id: expected", "got ''"]),
        (b'{"text": "t", "id": 1.0}', ["id: expected", "got 1.0"]),
        (b'{"text": "t", "source": 1}', ["source: expected a string, got 1"]),
        (b'{"text": "t", "importance": NaN}', ["importance: expected", "got nan"]),
        (b'{"text": "t", "importance": -0.5}', ["importance: expected", "got -0.5"]),
        (b'{"text": "t", "importance": "1"}', ["importance: expected", "got '1'"]),
        (b'{"text": "t", "importance": 1' + b"0" * 400 + b"}", ["importance: expected a finite number"]),
        (b'{"text": "t", "pos": 1.5}', ["position: expected an integer >= 0, got 1.5"]),
        (b'{"text": "t", "pos": 9223372036854775808}', ["position: expected"]),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, line, parts):
    path = lines(tmp_path / "f.jsonl", GOOD, b"", line)
    wrong(lambda: facts_of(path), f"{path}, line 3: ", *parts)
    assert facts_of(path, stop=1) == [("a", "one", None, 1.0, None)]


def test_parquet_errors_name_column_and_row(tmp_path):
    path = tmp_path / "f.parquet"

    def table(**columns):
        pq.write_table(pa.table({"text": ["a", "b", "c"], **columns}), path)
        return lambda: facts_of(path)

    wrong(table(text=["a", None, "c"]), f"{path}, row 1: text: expected")
    wrong(table(importance=[1.0, 2.0, -1.0]), f"{path}, row 2: importance: expected")
    wrong(table(pos=[0, -1, 2]), f"{path}, row 1: position: expected")
    wrong(table(id=[1.5, 2.0, 3.0]), f"{path}, row 0: id: expected")
    table(id=[4, None, 6], pos=[0.0, None, 2.0])
    assert [fact[0] for fact in facts_of(path)] == ["4", "1", "6"]
    pq.write_table(pa.table({"body": ["a"]}), path)
    wrong(lambda: facts_of(path), "expected a column \"text\", found 'body'")
    path.write_bytes(path.read_bytes()[:60])
    wrong(lambda: facts_of(path), "not a readable Parquet file")


def test_what_is_no_file(tmp_path):
    wrong(lambda: facts_of(tmp_path), "expected a regular file of facts, found a folder")
    with pytest.raises(FileNotFoundError):
        facts_of(tmp_path / "none")
    assert facts_of(lines(tmp_path / "empty")) == []
    assert count_facts(tmp_path / "empty") == 0


def test_arrays(tmp_path):
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "a.npy", rows)
    np.savez(tmp_path / "two.npz", **{"0:query": rows[1], "b": rows})
    np.savez(tmp_path / "one.npz", x=rows)
    np.save(tmp_path / "row.npy", rows[1:])
    np.save(tmp_path / "int.npy", rows.astype(int))
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "short.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-4])
    (tmp_path / "short.npz").write_bytes((tmp_path / "two.npz").read_bytes()[:200])
    (tmp_path / "text.npy").write_text("hello")

    def spec(name):
        return str(tmp_path / name)

    for name in ("a.npy", "two.npz:b", "one.npz", "one.npz:x"):
        np.testing.assert_array_equal(read_array(spec(name), 2), rows)
    for name in ("two.npz:0:query", "row.npy"):
        np.testing.assert_array_equal(read_vector(spec(name), 3), rows[1])
    assert read_vectors(spec("row.npy"), 3).dtype == np.float64
    wrong(lambda: read_array(spec("two.npz"), 2), "FILE.npz:KEY", "0:query, b")
    wrong(lambda: read_array(spec("two.npz:c"), 2), "expected an array 'c', found 0:query, b")
    wrong(lambda: read_array(spec("a.npy"), 1), "expected shape [D], got [2, 3]")
    wrong(lambda: read_array(spec("two.npz:0:query"), 2), "expected shape [N, D], got [3]")
    wrong(lambda: read_array(spec("int.npy"), 2), "expected float16, float32 or float64, got int64")
    wrong(lambda: read_array(spec("none.npy"), 2), "none.npy: No such file")
    for name in ("short.npy", "short.npz:b", "text.npy", "object.npy"):
        message = wrong(lambda name=name: read_array(spec(name), 2), name.partition(":")[0], "expected a NumPy array")
        assert "pickle" not in message
    wrong(lambda: read_vector(spec("row.npy"), 4), "row.npy: expected dimension 4, got 3")
    for bad in (0.0, np.nan, np.inf):
        np.save(tmp_path / "bad.npy", np.array([[1.0, 2.0], [bad, 0.0]]))
        wrong(lambda: read_vectors(spec("bad.npy"), 2), "bad.npy")


def test_names_of_arrays():
    assert [names_array(name) for name in ("q.npy", "q.npz", "q.npz:0:query", "a/b.npz:k")] == [True] * 4
    assert [names_array(text) for text in ("what is q.npy?", "pods", "npz:", "q.npz:")] == [False] * 4


def test_a_task_and_a_file_of_tasks(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(TASK))
    (task,) = read_tasks(path)
    assert (task.index, task.id, task.query, task.windows, task.k) == (0, "t", "q", 3, 2)
    (item,) = task.items
    assert (item.id, item.label, item.text, item.expected_words, item.marginal) == ("0", "L", "T", 9, False)
    assert item.fact_ids == {"1", "b"}

    bare = {"id": 5, "query": "q", "sub_queries": [{"id": "s", "label": "L", "text": "T", "marginal": True}]}
    path.write_text(json.dumps({"schema": 1, "tasks": [TASK, bare]}))
    tasks = read_tasks(path)
    assert (tasks[1].index, tasks[1].id, tasks[1].windows, tasks[1].k) == (1, "5", 5, 10)
    assert (tasks[1].items[0].expected_words, tasks[1].items[0].fact_ids) == (None, None)
    assert tasks[1].items[0].marginal
    assert pick_task(tasks, None, path).id == "t"
    assert pick_task(tasks, "5", path) is tasks[1]
    wrong(lambda: pick_task(tasks, "6", path), "expected a task '6', found t, 5")
    made = tasks[1].sub_queries(np.ones((1, 3)))
    assert (made[0].id, made[0].marginal, made[0].embedding.tolist()) == ("s", True, [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"id": None}, ": id: expected"),
        ({"query": ""}, ": query: expected a string that is not blank, got ''"),
        ({"windows": 21}, ": windows: expected an integer 1 to 20, got 21"),
        ({"windows": 0}, ": windows: expected an integer 1 to 20, got 0"),
        ({"windows": True}, ": windows: expected an integer 1 to 20, got True"),
        ({"k": 0}, ": k: expected an integer >= 1, got 0"),
        ({"sub_queries": []}, ": sub_queries: expected a list of at least one, got []"),
        ({"sub_queries": [SUB, SUB]}, ": sub_queries[1]: id: expected one that is new, got '0' again"),
        ({"sub_queries": [SUB, 4]}, ": sub_queries[1]: expected an object, got 4"),
        ({"sub_queries": [{**SUB, "label": None}]}, ": sub_queries[0].label: expected"),
        ({"sub_queries": [{**SUB, "text": 3}]}, ": sub_queries[0].text: expected"),
        ({"sub_queries": [{**SUB, "expected_words": -1}]}, ": sub_queries[0].expected_words: expected"),
        ({"sub_queries": [{**SUB, "marginal": 1}]}, ": sub_queries[0].marginal: expected true or false, got 1"),
        ({"sub_queries": [{**SUB, "fact_ids": "b"}]}, ": sub_queries[0].fact_ids: expected a list of ids, got 'b'"),
        ({"sub_queries": [{**SUB, "fact_ids": ["b", 0.5]}]}, ": sub_queries[0].fact_ids[1]: expected"),
    ],
)
def test_errors_of_tasks_name_the_place(tmp_path, change, part):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**TASK, **change}))
    wrong(lambda: read_tasks(path), f"{path}{part}")
    path.write_text(json.dumps({"schema": 1, "tasks": [TASK, {**TASK, **change}]}))
    wrong(lambda: read_tasks(path), f"{path}: tasks[1].{part[2:]}")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b'{"id": 1,\n "query": }', "line 2, column 11: expected JSON"),
        (b"\xff{}", "expected UTF-8, got byte 0xff at 0"),
        (b"[" * 100_000, "expected JSON"),
        (b"[]", "expected an object, got []"),
        (b'{"schema": 2, "tasks": []}', "schema: expected 1, got 2"),
        (b'{"schema": true, "tasks": []}', "schema: expected 1, got True"),
        (b'{"schema": 1, "tasks": []}', "tasks: expected a list of at least one task"),
        (b'{"schema": 1, "tasks": [3]}', "tasks[0]: expected an object, got 3"),
    ],
)
def test_what_is_no_task_file(tmp_path, content, part):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    wrong(lambda: read_tasks(path), str(path), part)


def test_vectors_of_a_task(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schema": 1, "tasks": [TASK, {**TASK, "sub_queries": [SUB, {**SUB, "id": 1}]}]}))
    task = read_tasks(path)[1]
    npz = tmp_path / "v.npz"
    np.savez(npz, **{"1:query": np.ones(3, np.float16), "1:subs": np.eye(2, 3)})
    query, subs = read_task_vectors(npz, task, 3)
    assert (query.tolist(), subs.tolist()) == ([1.0, 1.0, 1.0], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    wrong(lambda: read_task_vectors(npz, task, 4), "1:query: expected dimension 4, got 3")
    wrong(lambda: read_task_vectors(npz, read_tasks(path)[0], 3), "expected an array '0:query'")
    np.savez(npz, **{"1:query": np.ones(3), "1:subs": np.eye(3)})
    wrong(lambda: read_task_vectors(npz, task, 3), "1:subs: expected 2 vectors (one per sub-query), got 3")
    np.save(tmp_path / "v.npy", np.ones(3))
    wrong(lambda: read_task_vectors(tmp_path / "v.npy", task, 3), "expected an .npz file")
    with pytest.raises(FileNotFoundError):
        read_task_vectors(tmp_path / "w.npy", task, 3)


def test_write_json_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"text": "ü \ud800"})
    assert json.loads(path.read_text("ascii")) == {"text": "ü \ud800"}
    with pytest.raises(ValueError, match=re.escape("Out of range float")):
        write_json(path, {"first": 1, "bad": float("nan")})
    assert json.loads(path.read_text()) == {"text": "ü \ud800"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_json(link, {"n": 2})
    assert link.is_symlink()
    assert json.loads(path.read_text()) == {"n": 2}
    with pytest.raises(FileExistsError, match="expected a file to write to"):
        write_json(tmp_path, {})
    with pytest.raises(FileNotFoundError, match="expected its folder to be there"):
        write_json(tmp_path / "no" / "run.json", {})


@pytest.mark.skipif(os.name == "nt", reason="modes of another kind")
def test_write_json_keeps_the_mode_of_what_it_replaces(tmp_path, monkeypatch):
    path, modes = tmp_path / "run.json", []
    monkeypatch.setattr(_files.os, "fsync", lambda handle: modes.append(os.fstat(handle).st_mode & 0o777))
    umask = os.umask(0o022)
    try:
        write_json(path, {"n": 1})
        assert path.stat().st_mode & 0o777 == 0o644
        for mode in (0o600, 0o664, 0o640):
            path.chmod(mode)
            write_json(path, {"n": 2})
            assert path.stat().st_mode & 0o777 == mode
    finally:
        os.umask(umask)
    assert modes == [0o644, 0o600, 0o664, 0o640]


@pytest.mark.skipif(os.name == "nt", reason="no FIFO")
def test_write_json_writes_to_what_is_no_regular_file(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert _files.goes_out_at_once(fifo)
    assert not _files.goes_out_at_once(tmp_path / "none")
    got = []
    reader = threading.Thread(target=lambda: got.append(json.loads(fifo.read_text())))
    reader.start()
    write_json(fifo, {"n": 1})
    reader.join(10)
    assert got == [{"n": 1}]
    assert fifo.is_fifo()


def test_links_to_nowhere_are_no_place_to_write_to(tmp_path):
    (tmp_path / "round").symlink_to("back")
    (tmp_path / "back").symlink_to("round")
    (tmp_path / "dangling").symlink_to("gone")
    with pytest.raises(OSError, match="round: expected a file to write to, found symbolic links that go round"):
        write_json(tmp_path / "round", {})
    with pytest.raises(FileNotFoundError, match=r"dangling: expected .* a symbolic link to 'gone', which is not there"):
        write_json(tmp_path / "dangling", {})


def test_write_errors_name_the_file_that_was_asked_for(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "draft")

    monkeypatch.setattr(_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_json(tmp_path / "run.json", {})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "run.json"))
    monkeypatch.setattr(_files.os, "access", lambda path, how: False)
    with pytest.raises(PermissionError, match=r"no permission to write to its folder: .*run\.json"):
        write_json(tmp_path / "run.json", {})
    assert list(tmp_path.iterdir()) == []
    write_json_name = "x" * 250
    monkeypatch.undo()
    write_json(tmp_path / write_json_name, {})
    assert [entry.name for entry in tmp_path.iterdir()] == [write_json_name]


@pytest.mark.parametrize(
    "change",
    [
        (b"{'descr'", b"{'descr\n'"),
        (b"'<f4'", b"([[["),
        (b"'<f4'", b"{1:2}"),
        (b"'<f4'", b"'(,)'"),
        (b"(2, 3)", b"(2, 'a')"),
        (b"(2, 3)", b"(-2, 3)"),
        (b"(2, 3)", b"(1" + b"0" * 18 + b", 3)"),
        (b"'shape'", b"'shap\xff'"),
        (b"False", b"[" * 3000),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_an_array_of_any_damage_is_a_file_error(tmp_path, change, inside):
    np.save(tmp_path / "good.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    good = (tmp_path / "good.npy").read_bytes()
    assert change[0] in good
    # The header keeps its length where it can.
    header, body = good[10 : 10 + good[8]].rstrip(), good[10 + good[8] :]
    header = header.replace(*change).ljust(good[8] - 1) + b"\n"
    bad = good[:8] + len(header).to_bytes(2, "little") + header + body
    path = tmp_path / ("bad.npz" if inside else "bad.npy")
    if inside:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("k.npy", bad)
    else:
        path.write_bytes(bad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((FileError, MemoryError), match=path.name):
            read_array(f"{path}:k" if inside else str(path), 2)


def test_odd_members_of_an_archive(tmp_path):
    path = tmp_path / "odd.npz"
    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("text", "hello")
        archive.writestr("k.npy", (tmp_path / "a.npy").read_bytes())
    wrong(lambda: read_array(f"{path}:text", 2), "odd.npz:text: expected a NumPy array, got a file of another kind")
    plain = path.read_bytes()
    for at, value in ((6, 1), (8, 97)):  # of each member: a flag says it is encrypted, a number how it is compressed
        content = bytearray(plain)
        for signature, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
            start = content.find(signature)
            while start >= 0:
                content[start + at + shift] = value
                start = content.find(signature, start + 1)
        path.write_bytes(content)
        wrong(lambda: read_array(f"{path}:k", 2), "odd.npz: expected a NumPy array, got one that cannot be read")


def test_damaged_parquet_names_the_file(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(1000)]}), path)
    content = path.read_bytes()
    for damaged in (b"PAR1" + content[-50:], content[:4] + bytes(len(content) - 208) + content[-204:], b"PAR1"):
        path.write_bytes(damaged)
        wrong(lambda: facts_of(path), str(path))


@pytest.mark.skipif(os.name == "nt", reason="no FIFO")
def test_pipes_are_refused_and_not_waited_for(tmp_path):
    fifo = tmp_path / "fifo.npz"
    os.mkfifo(fifo)
    task = read_tasks(lines(tmp_path / "t.json", json.dumps(TASK).encode()))[0]
    wrong(lambda: read_array(str(fifo), 2), "fifo.npz: expected a regular file of vectors, found a pipe")
    wrong(lambda: read_tasks(fifo), "fifo.npz: expected a regular file of tasks, found a pipe")
    wrong(lambda: read_task_vectors(fifo, task, 3), "found a pipe")
    wrong(lambda: facts_of(fifo), "expected a regular file of facts, found a pipe")
    wrong(lambda: read_tasks(tmp_path), "expected a regular file of tasks, found a folder")
    wrong(lambda: read_array("/dev/null", 2), "found a device")
    wrong(lambda: read_tasks(Path("-")), "only facts can come from standard input")
    (tmp_path / "round").symlink_to("round")
    wrong(lambda: read_array(str(tmp_path / "round"), 2), "round: Too many levels of symbolic links")
