"""Documents to facts and tasks, and the experiment on them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import zlib

import numpy as np
import pytest
from timing import seconds
from typer.testing import CliRunner

from cdr_kernel import FactStore
from cdr_kernel.cli import _run
from cdr_kernel.cli._app import app
from cdr_kernel.exceptions import FileError
from cdr_kernel.files import _embedders
from cdr_kernel.files._documents import DocumentFact, cut, propose_tasks, read_documents
from cdr_kernel.files._files import read_tasks
from cdr_kernel.quality._experiment import evaluate, load_corpus, ranked, summarise
from cdr_kernel.store._format import KIND

PAGE = """---
title: "Nodes"
weight: 10
---
<!-- a
comment -->
A [node](/docs/node) is a **worker** machine with `kubelet`, {{< glossary_tooltip text="pods" term_id="pod" >}} and more
words so that the paragraph is long enough to stand.

## Management {#management}

* first item
* second item is short

```shell
kubectl get nodes   # code goes
```

### Self-registration

| a | b |
|---|---|
| cell one | cell two |

![image](x.png) Text under the deeper heading, with \\*stars\\* and <br/> tags in it, long enough for one fact here.

## {{% heading "whatsnext" %}}

[ref]: http://example.com
The end of the page is here and it has a few words more than fifteen, all told, to be a fact.
"""


def sentences(n, word="word"):
    return " ".join(f"{word.capitalize()} number {i} says that every {word} is one of many." for i in range(n))


def test_markdown_becomes_facts_with_heading_trails():
    document = cut("concepts/nodes.md", PAGE)
    assert document.title == "Nodes"
    assert [(fact.headings, fact.text) for fact in document.facts] == [
        (
            (),
            "A node is a worker machine with kubelet, pods and more words so that the paragraph is long enough to "
            "stand.",
        ),
        (("Management",), "first item second item is short"),
        (
            ("Management", "Self-registration"),
            "a b cell one cell two Text under the deeper heading, with *stars* and tags in it, long enough for one "
            "fact here.",
        ),
        (
            ("Whatsnext",),
            "The end of the page is here and it has a few words more than fifteen, all told, to be a fact.",
        ),
    ]
    fact = document.facts[2]
    assert (fact.id, fact.position, fact.path) == ("concepts/nodes.md#2", 2, "concepts/nodes.md")
    assert fact.embedded == f"Nodes: {fact.text}"


@pytest.mark.parametrize(
    ("text", "title", "trail"),
    [
        ("# Top\n\nwords here", "Top", ()),
        ("Top\n===\n\nBelow\n-----\n\nwords here", "Top", ("Below",)),
        ("words\n\n# Later\n\nmore", "page", ("Later",)),
        ("## A\n\n#### B\n\n### C\n\nwords", "page", ("A", "C")),
        ("", "page", None),
        ("---\ntitle: T\n---\n# H1\n\nwords", "T", ("H1",)),
    ],
)
def test_titles_and_trails(text, title, trail):
    document = cut("page.md", text)
    assert document.title == title
    assert (document.facts[-1].headings if document.facts else None) == trail


def test_long_paragraphs_are_cut_between_sentences_and_short_ones_joined():
    document = cut("p.md", f"{sentences(40)}\n\nshort one\n\nanother short one\n\n{' '.join(['x'] * 300)}")
    sizes = [fact.words for fact in document.facts]
    assert max(sizes) <= 120
    assert min(sizes[:-1]) >= 15
    assert " ".join(fact.text for fact in document.facts).split() == (
        f"{sentences(40)} short one another short one {' '.join(['x'] * 300)}".split()
    )
    assert all(fact.text.endswith("many.") for fact in document.facts[:2])


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            "```pip install foo``` installs the tool.\n\nThe rest stays.",
            "pip install foo installs the tool. The rest stays.",
        ),
        ("one\n\n```text\ncode\n```python\nstill code\n````\n\ntwo", "one two"),
        ("one\n\n~~~ a ` b\ncode\n~~~\n\ntwo", "one two"),
        ("one\n\n````\n```\ncode\n````\n\ntwo", "one two"),
        ("one\n\n```\ncode to the end\n\nof the file", "one"),
        ("one\n\n> quoted\n> ```\n> code\n>\n> > code\n\ntwo\n\nthree", "one quoted two three"),
        ("one\n\n> ~~~ yaml\n> code\ntwo <!-- no -->\n\n> three", "one two three"),
        ("one\n\n> ```\n> <!-- code\n\ntwo --> three", "one two --> three"),
        ("one\n\n> > ```\n> > code\n> two\n\nthree", "one two three"),
        ("one\n\n> ```\n> code\n> ```\n> two {{< note >}}\n\nthree", "one two three"),
        ("one\n\n> ```\n> code\n\n```\ncode\n```\n\ntwo", "one two"),
    ],
)
def test_fences_are_those_of_commonmark(text, facts):
    assert " ".join(fact.text for fact in cut("p.md", text).facts) == facts


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Run `kubectl get <pod-name>` now", "Run kubectl get <pod-name> now"),
        (
            "A `Map<String, Integer>`, a `<div>`, `__init__` and `**kw`",
            "A Map<String, Integer>, a <div>, __init__ and **kw",
        ),
        (
            "``a `b` <i>`` and `x | y` and `{{< note >}}` and `<!-- c -->`",
            "a `b` <i> and x | y and {{< note >}} and <!-- c -->",
        ),
        ("A std::vector<int> or List<Item> or Vec<S>", "A std::vector<int> or List<Item> or Vec<S>"),
        ("ssh <user>@<host> to <pod-name>, where a < b > c", "ssh <user>@<host> to <pod-name>, where a < b > c"),
        ("<b>bold</b> <a href='x'>link</a>, H<sub>2</sub>O<br>one<br/>two", "bold link, H2O one two"),
        ("<TABLE><TR><TD>one</TD><TD>two</TD></TABLE><!DOCTYPE x><?php y ?>", "one two"),
        ("See <https://example.com/a?b=c> and <me@example.com>", "See https://example.com/a?b=c and me@example.com"),
        ("[a](http://x/a_(b)) [c](<x y> 'title') [d][] [e][d] [f][g] ![h](i_(j))\n\n[d]: /x", "a c d e [f][g]"),
        ("*a* _b_ **c** __d__ ~~e~~ ***f*** snake_case_name", "a b c d e f snake_case_name"),
        ("\\*a\\* \\`b\\` c \\| d &lt;e&gt; &amp; f", "*a* `b` c | d <e> & f"),
        ("before <!-- one\n\ntwo --> after", "before after"),
        ("before `<!--` between `-->` after", "before <!-- between --> after"),
        ("before\n\n```\n<!-- in code\n```\n\nbetween -->\n\nafter", "before between --> after"),
    ],
)
def test_code_stays_to_the_letter_and_only_markup_goes(text, plain):
    assert " ".join(fact.text for fact in cut("p.md", text).facts) == plain


@pytest.mark.parametrize(
    ("text", "title", "facts"),
    [
        ("---\nAn intro\nof two lines.\n\n---\n\nThe rest.", "p", "An intro of two lines. The rest."),
        ("---\n\nNote: an intro,\nof two lines\n\n---\n\nThe rest.", "p", "Note: an intro, of two lines The rest."),
        ("---\n---\n\nThe rest.", "p", "The rest."),
        ("---\n\n- one\n- two\n\n---\n\nThe rest.", "p", "one two The rest."),
        (
            "---\n# a comment\ntitle: T\n\nlist:\n- a\n  b: c\n'quoted key': >\n  folded\nflow: [\n]\n---\nThe rest.",
            "T",
            "The rest.",
        ),
    ],
)
def test_front_matter_is_keys_and_values(text, title, facts):
    document = cut("p.md", text)
    assert (document.title, " ".join(fact.text for fact in document.facts)) == (title, facts)


def test_plain_text_has_paragraphs_and_no_markup():
    document = cut("notes.txt", "# not a heading *x*\n\nsecond paragraph " + "of words " * 10, markup=False)
    assert document.facts[0].text.startswith("# not a heading *x* second paragraph")
    assert document.facts[0].headings == ()


def a_page(title, topics, n=7):
    return f"# {title}\n\n{sentences(2, title)}\n\n" + "\n\n".join(
        f"## {topic}\n\n" + "\n\n".join(f"{sentences(2, topic)} {i}" for i in range(n)) for topic in topics
    )


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    (folder / "sub" / ".hidden").mkdir(parents=True)
    (folder / "network.md").write_text(a_page("Network", ["routing", "dns", "policy", "ingress", "proxy"]))
    (folder / "sub" / "storage.md").write_text(a_page("Storage", ["volumes", "claims", "classes", "snapshots"]))
    (folder / "few.md").write_text(a_page("Few", ["one", "two"]))
    (folder / "sub" / ".hidden" / "x.md").write_text("no")
    (folder / "image.png").write_bytes(b"\x89PNG")
    return folder


def test_documents_of_a_folder(docs):
    documents = read_documents(docs)
    assert [document.path for document in documents] == ["few.md", "network.md", "sub/storage.md"]
    ids = [fact.id for document in documents for fact in document.facts]
    assert len(ids) == len(set(ids))


def test_what_is_wrong_with_a_folder(tmp_path):
    with pytest.raises(NotADirectoryError, match="expected a folder"):
        read_documents(tmp_path / "nowhere")
    with pytest.raises(FileError, match="expected documents"):
        read_documents(tmp_path)
    (tmp_path / "bad.md").write_bytes(b"caf\xe9")
    with pytest.raises(FileError, match="expected UTF-8, got byte 0xe9 at 3"):
        read_documents(tmp_path)


def test_tasks_are_pages_and_sections_with_enough_headings(docs, tmp_path):
    proposed = propose_tasks(read_documents(docs))
    assert [task["id"] for task in proposed["tasks"]] == ["page:network.md", "page:sub/storage.md"]
    task = proposed["tasks"][0]
    assert (task["query"], task["windows"], task["k"]) == ("Network", 5, 5)
    assert [s["text"] for s in task["sub_queries"]][:2] == ["Network: routing", "Network: dns"]
    facts = {fact.id: fact for document in read_documents(docs) for fact in document.facts}
    for sub in task["sub_queries"]:
        assert {facts[i].headings[0] for i in sub["fact_ids"]} == {sub["label"]}
        assert sub["expected_words"] == sum(facts[i].words for i in sub["fact_ids"])
    assert task["other_on_page_ids"] == ["network.md#0"]
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(proposed))
    assert [t.id for t in read_tasks(path)] == [t["id"] for t in proposed["tasks"]]
    section = cut("s.md", a_page("Guide", ["part"], 1) + "".join(
        f"\n\n### {name}\n\n" + "\n\n".join(f"{sentences(2, name)} {i}" for i in range(8)) for name in "abcd"
    ))  # fmt: skip
    (task,) = propose_tasks([section])["tasks"]
    assert (task["kind"], task["query"]) == ("section", "Guide: part")
    assert [s["label"] for s in task["sub_queries"]] == list("abcd")


def test_tasks_look_at_each_fact_a_few_times(monkeypatch):
    looked = []
    hashed = DocumentFact.__hash__
    document = cut("p.md", a_page("Page", ["a", "b", "c", "d"], 50))
    monkeypatch.setattr(DocumentFact, "__hash__", lambda fact: looked.append(fact) or hashed(fact))
    (task,) = propose_tasks([document])["tasks"]
    assert task["other_on_page_ids"] == ["p.md#0"]
    assert 0 < len(looked) < 5 * len(document.facts)


def fake_embedder(model):
    """Sums of a random vector per word: texts with common words are near each other."""

    def embed(texts):
        rows = np.zeros((len(texts), 32), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().split():
                row += np.random.default_rng(zlib.crc32(word.encode())).standard_normal(32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    return embed


def test_two_commands_from_documents_to_the_experiment(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(_embedders, "load_embedder", fake_embedder)
    out = tmp_path / "store"
    result = CliRunner().invoke(app, ["ingest", str(docs), "-o", str(out), "--embed", "toy", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["documents"], found["tasks"], found["model"]) == (3, 2, "toy")
    store = FactStore.load(out)
    assert len(store) == found["facts"] > 60
    first = store.get(["network.md#1"])[0]
    assert (first.source, first.position) == ("network.md", 1)
    assert first.text.startswith("Network: Routing number 0")
    corpus = load_corpus(out)
    assert not corpus.texts[corpus.store.view().row_of("network.md#1")].startswith("Network: ")
    with pytest.raises(ValueError, match="expected 'title'"):
        load_corpus(out, embedding="text")
    for mode in ("spec", "calibrated"):
        row = summarise(evaluate(corpus, ranked(corpus, mode=mode), writers=["plan"]))
        assert 0.0 <= row["completeness"] <= 1.0
    assert row["new_by_window"][0] == 1.0
    again = CliRunner().invoke(app, ["ingest", str(docs), "-o", str(out), "--embed", "toy"])
    assert again.exit_code == 0, again.output
    assert f"{len(store)} facts" in again.stdout


@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, before):
    monkeypatch.setattr(_embedders, "load_embedder", fake_embedder)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("A first text.")
    out, sync, named = tmp_path / "store", os.fsync, set()

    def ingested():
        return CliRunner().invoke(app, ["ingest", str(tmp_path / "docs"), "-o", str(out), "--embed", "toy"])

    def files():
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} if out.exists() else None

    if before:
        assert ingested().exit_code == 0
        (tmp_path / "docs" / "a.md").write_text("Another text.")
    held = files()
    for room in range(50):
        left = iter(range(room))

        def full(handle, left=left):
            if stat.S_ISREG(os.fstat(handle).st_mode) and next(left, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(handle)

        monkeypatch.setattr(os, "fsync", full)
        result = ingested()
        if result.exit_code == 0:
            break
        assert result.exit_code == 1
        assert files() == held
        assert "No space left on device" in result.stderr
        named |= {name for name in ("facts.jsonl", "tasks.json", "queries.npz") if f"{out / name}: " in result.stderr}
        assert f"{out}" in result.stderr
    assert room > 10
    assert named == {"facts.jsonl", "tasks.json", "queries.npz"}
    assert {path.name for path in out.iterdir() if not path.name.startswith("data-")} == {
        "facts.jsonl", "manifest.json", "queries.npz", "save.lock", "tasks.json"
    }  # fmt: skip
    assert len(FactStore.load(out)) == 1
    with np.load(out / "queries.npz", allow_pickle=False) as asked:
        assert asked.files == []


def test_a_reader_at_any_moment_finds_all_files_of_one_store(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(_embedders, "load_embedder", fake_embedder)
    out, replace, seen, placed = tmp_path / "store", os.replace, [], []
    names = ("facts.jsonl", "queries.npz", "tasks.json")

    def ingested():
        return CliRunner().invoke(app, ["ingest", str(docs), "-o", str(out), "--embed", "toy"]).exit_code

    def files():
        """What readers find: the ids of the store, and the files beside it."""
        return FactStore.load(out).ids, {name: KIND.beside(out / name).read_bytes() for name in names}

    def looked(source, target):
        replace(source, target)
        seen.append(files())
        placed.append(sum((out / name).exists() for name in names))

    assert ingested() == 0
    old = files()
    (docs / "more.md").write_text(a_page("More", ["g", "h", "i", "j"]))
    monkeypatch.setattr(os, "replace", looked)
    assert ingested() == 0
    new = files()
    assert new[0] != old[0]
    assert all(new[1][name] != old[1][name] for name in old[1])
    assert seen == [old] * 3 + [new] * 4
    assert placed == [2, 1, 0, 0, 1, 2, 3]  # those of the other store are out of the way before it is


def test_the_next_ingest_ends_what_a_killed_one_had_begun(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(_embedders, "load_embedder", fake_embedder)
    out, replace, killed = tmp_path / "store", os.replace, []

    def ingested(folder):
        return CliRunner().invoke(app, ["ingest", str(docs), "-o", str(folder), "--embed", "toy"]).exit_code

    def copied(source, target):
        killed.append(shutil.copytree(out, tmp_path / f"killed-{len(killed)}"))  # what a kill here leaves
        replace(source, target)

    assert ingested(out) == 0
    (docs / "more.md").write_text(a_page("More", ["g", "h", "i", "j"]))
    monkeypatch.setattr(os, "replace", copied)
    assert ingested(out) == 0
    monkeypatch.setattr(os, "replace", replace)
    assert len(killed) == 7
    for i, folder in enumerate(killed):
        tasks = 2 if i < 4 else 3
        assert len(read_tasks(folder / "tasks.json")) == len(load_corpus(folder).cases) == tasks
        with monkeypatch.context() as broken:
            broken.setattr("cdr_kernel.store._format.write", lambda *_: 1 / 0)
            assert ingested(folder) == 1  # it fails, and yet has put right what it found
        *data, first, second, third, fourth, fifth = sorted(path.name for path in folder.iterdir())
        assert [first, second, third, fourth, fifth] == [
            "facts.jsonl", "manifest.json", "queries.npz", "save.lock", "tasks.json"
        ]  # fmt: skip
        assert len(data) == 1
        assert len(read_tasks(folder / "tasks.json")) == tasks
        assert ingested(folder) == 0
        assert len(load_corpus(folder).cases) == 3


def test_a_file_beside_a_store_that_is_gone_is_named_with_what_to_do(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(_embedders, "load_embedder", fake_embedder)
    out = tmp_path / "store"
    assert CliRunner().invoke(app, ["ingest", str(docs), "-o", str(out), "--embed", "toy"]).exit_code == 0
    (out / "tasks.json").unlink()
    (out / "queries.npz").unlink()
    what = "not there, although the store was made with it: make the store again"
    with pytest.raises(FileNotFoundError, match=rf"{what}: '.*/tasks\.json'"):
        load_corpus(out)
    told = CliRunner().invoke(app, ["gate", str(out), "--queries", f"{out / 'queries.npz'}:0:query"])
    assert told.exit_code == 1
    assert f"{out / 'queries.npz'}: {what}" in told.stderr


def test_other_facts_in_the_folder_take_the_files_of_the_ingest_along(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(_embedders, "load_embedder", fake_embedder)
    out = tmp_path / "store"
    assert CliRunner().invoke(app, ["ingest", str(docs), "-o", str(out), "--embed", "toy"]).exit_code == 0
    store = FactStore.load(out)
    store.remove(store.ids[:1])
    store.save(out)  # the same store, later
    assert len(read_tasks(out / "tasks.json")) == 2
    assert len(FactStore.load(out)) == len(store)
    other = FactStore(32, embedding_model="toy")
    other.save(out)
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith("data-")) == [
        "manifest.json",
        "save.lock",
    ]


def test_a_run_refuses_tasks_of_another_store_than_it_opened(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(_embedders, "load_embedder", fake_embedder)
    out, opened = tmp_path / "store", _run.opened_store

    def ingest():
        return CliRunner().invoke(app, ["ingest", str(docs), "-o", str(out), "--embed", "toy"])

    def replaced_meanwhile(path):
        store = opened(path)
        assert ingest().exit_code == 0
        return store

    assert ingest().exit_code == 0
    run = ["run", str(out), str(out / "tasks.json"), "--vectors", str(out / "queries.npz"), "--writer", "extract"]
    assert CliRunner().invoke(app, run).exit_code == 0
    monkeypatch.setattr(_run, "opened_store", replaced_meanwhile)
    told = CliRunner().invoke(app, run)
    assert told.exit_code == 1
    assert f"{out}: the store was replaced while it was read: read it again" in told.stderr


def test_ingest_names_documents_without_facts(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(_embedders, "load_embedder", fake_embedder)
    (docs / "open.md").write_text("```\nnever closed\n\n" + a_page("Lost", ["a", "b"]))
    result = CliRunner().invoke(app, ["ingest", str(docs), "-o", str(tmp_path / "store"), "--embed", "toy"])
    assert result.exit_code == 0, result.output
    assert "warning: 1 of the documents gave no facts" in result.stderr
    assert result.stderr.rstrip().endswith(": open.md")


def test_ingest_refuses_a_folder_of_other_files(docs):
    result = CliRunner().invoke(app, ["ingest", str(docs), "-o", str(docs), "--embed", "toy"])
    assert result.exit_code == 1
    assert "expected a store or an empty folder" in result.stderr


HOSTILE = {
    "spaces in a heading": lambda n: "# a" + " " * n + "b",
    "marks in a heading": lambda n: "# a" + " #" * n + " b",
    "braces in a heading": lambda n: "# a" + "{#" * n + " b",
    "blank lines of front matter": lambda n: "---\n" + "\n" * n + "x",
    "spaces in a title": lambda n: "---\ntitle: a" + " " * n + "b\n---\nc",
    "spaces in a key": lambda n: "---\na" + " " * n + "b\n---\nc",
    "open comments": lambda n: "<!--" * n,
    "open shortcodes": lambda n: "{{<" * n,
    "texts of a shortcode": lambda n: "{{<" + ' text="a"' * n + "{>}}",
    "runs of ticks": lambda n: "".join("`" * i + "a" for i in range(1, int(n**0.5) * 2)),
    "labels": lambda n: "[a\n" * n,
}


@pytest.mark.parametrize("document", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_document_takes_time_in_proportion(document):
    def take(n):
        cut("a.md", document(n))

    assert seconds(take, 8_000) < 10 * max(0.01, seconds(take, 2_000))


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ('a {{< x text="in {braces}" >}} b', "a in {braces} b"),
        ('a {{< x {y} text="t" >}} b', "a b"),
        ('a {{< x text="t" {y} >}} b', "a b"),
        ('a {{< text="t>}} b', "a b"),
        ("a <!-- b <!-- c --> d <!-- e", "a d <!-- e"),
        ("a {{<!-- b --> c", "a {{ c"),
        ("a {{{< b >}} c", "a { c"),
    ],
)
def test_comments_and_shortcodes_that_are_hard_to_read(markdown, text):
    (fact,) = cut("a.md", markdown).facts
    assert fact.text == text
