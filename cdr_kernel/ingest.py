"""A folder of documents to facts with heading trails, and to tasks: page or section is the query, headings are the
sub-queries.

    documents = read_documents(Path("docs"))
    facts = [fact for document in documents for fact in document.facts]
    tasks = propose_tasks(documents)

Markdown and plain text, UTF-8. Markup, code, comments, front matter, tables' rules and shortcodes go; what is left is
cut into facts of about 15 to 120 words that never cross a heading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdr_kernel.constants import MAX_WINDOWS
from cdr_kernel.files import TASK_SCHEMA, FileError

SUFFIXES = (".md", ".markdown", ".txt")
LEAST_WORDS, MOST_WORDS = 15, 120
LEAST_TOPICS, MOST_TOPICS = 4, 13
LEAST_PER_WINDOW, MOST_PER_WINDOW = 5, 16

_front_matter = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_title = re.compile(r"^title:\s*(.+?)\s*$", re.MULTILINE)
_heading = re.compile(r"^ {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*(?:\{#[^}]*\})?[ \t]*$")
_underline = re.compile(r"^ {0,3}(=+|-+)[ \t]*$")
_fence = re.compile(r"^[ \t>]*(`{3,}(?=[^`]*$)|~{3,})")  # text after backticks that has another one is inline code
_fence_end = re.compile(r"^[ \t>]*(`{3,}|~{3,})[ \t]*$")
_item = re.compile(r"^[ \t>]*(?:[-*+]|\d{1,9}[.)])[ \t]+")
_rule = re.compile(r"^[ \t|:*_=-]{3,}$")
_comment = re.compile(r"<!--.*?-->", re.DOTALL)
_shortcode_text = re.compile(r"\{\{[<%][^{}]*?\btext=\"([^\"]*)\"[^{}]*?[>%]\}\}")
_shortcode_heading = re.compile(r"\{\{%\s*heading\s+\"([^\"]*)\"\s*%\}\}")
_shortcode = re.compile(r"\{\{[<%].*?[>%]\}\}", re.DOTALL)
_image = re.compile(r"!\[[^\]]*\](?:\([^)]*\)|\[[^\]]*\])?")
_link = re.compile(r"\[([^\]]+)\](?:\([^)]*\)|\[[^\]]*\])")
_definition = re.compile(r"^ {0,3}\[[^\]]+\]:\s+\S+.*$")
_tag = re.compile(r"</?[A-Za-z][^<>]*>")
_mark = re.compile(r"(\*\*|__|\*|`+|~~)(?=\S)(.+?)(?<=\S)\1")
_escape = re.compile(r"\\([\\`*_{}\[\]()#+.!|<>~-])")
_PRIVATE = 0xE000  # escaped characters wait here while marks are taken away
_escaped = re.compile(f"[{chr(_PRIVATE)}-{chr(_PRIVATE + 127)}]")
_sentence = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")


@dataclass(frozen=True)
class DocumentFact:
    """A piece of a document. path: of the document in its folder, with "/"; position: from 0 in the document; headings:
    the trail under the title, outermost first."""

    path: str
    position: int
    title: str
    headings: tuple[str, ...]
    text: str

    @property
    def id(self) -> str:
        """Path and position."""
        return f"{self.path}#{self.position}"

    @property
    def embedded(self) -> str:
        """The string to embed and to index: the title, a colon, the text."""
        return f"{self.title}: {self.text}"

    @property
    def words(self) -> int:
        """Words of the text."""
        return len(self.text.split())

    def as_dict(self) -> dict[str, Any]:
        """A line of a fact file."""
        return {
            "id": self.id,
            "text": self.text,
            "title": self.title,
            "headings": list(self.headings),
            "path": self.path,
            "pos": self.position,
            "n_words": self.words,
        }


@dataclass(frozen=True)
class Document:
    """A page: its path, its title and its facts in order."""

    path: str
    title: str
    facts: tuple[DocumentFact, ...]


def read_documents(folder: Path) -> list[Document]:
    """The documents of a folder and its subfolders, by path; hidden files and folders are passed over.

    The title is the front matter's, else the first heading of level 1, else the file's name. Raises FileError where
    the folder has no document, or one that is not UTF-8; NotADirectoryError where it is no folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: expected a folder of documents")
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not paths:
        raise FileError(f"{folder}: expected documents ({', '.join(SUFFIXES)}), found none")
    documents = []
    for path in paths:
        try:
            text = path.read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            raise FileError(
                f"{path}: expected UTF-8, got byte 0x{error.object[error.start]:02x} at {error.start}"
            ) from None
        name = path.relative_to(folder).as_posix()
        documents.append(cut(name, text, markup=path.suffix.lower() != ".txt"))
    return documents


def cut(path: str, text: str, *, markup: bool = True) -> Document:
    """One document to facts. markup: whether it is Markdown; plain text has no headings."""
    title = path.rsplit("/", 1)[-1].rsplit(".", 1)[0]
    trail: list[tuple[int, str]] = []
    named = False
    if markup:
        found = _front_matter.match(text)
        if found:
            text = text[found.end() :]
            given = _title.search(found[1])
            if given:
                title, named = given[1].strip("\"'"), True
    pieces: list[tuple[tuple[str, ...], list[str]]] = []
    for level, block in _blocks(text) if markup else ((0, " ".join(p.split())) for p in re.split(r"\n\s*\n", text)):
        if not level:
            headings = tuple(name for _, name in trail)
            if not pieces or pieces[-1][0] != headings:
                pieces.append((headings, []))
            pieces[-1][1].append(block)
        elif level == 1 and not named and not pieces:
            title, named = block, True
        else:
            trail = [(depth, name) for depth, name in trail if depth < level] + [(level, block)]
    facts: list[DocumentFact] = []
    for headings, blocks in pieces:
        for piece in _sized(blocks):
            facts.append(DocumentFact(path, len(facts), title, headings, piece))
    return Document(path, title, tuple(facts))


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """(0, a paragraph or list item) and (level, a heading), in order, without markup."""
    text = _shortcode_text.sub(r"\1", _comment.sub("", text))
    text = _shortcode.sub("", _shortcode_heading.sub(lambda m: m[1].capitalize(), text))
    fence = ""
    block: list[str] = []

    def done() -> Iterator[tuple[int, str]]:
        plain = _plain(" ".join(block))
        block.clear()
        if plain:
            yield 0, plain

    for line in text.splitlines():
        if fence:
            closed = _fence_end.match(line)
            if closed and closed[1].startswith(fence):
                fence = ""
            continue
        opened = _fence.match(line)
        if opened:
            yield from done()
            fence = opened[1]
            continue
        heading = _heading.match(line)
        underline = _underline.match(line)
        if heading:
            yield from done()
            name = _plain(heading[2])
            if name:
                yield len(heading[1]), name
        elif underline and len(block) == 1 and not _item.match(block[0]):
            name = _plain(block[0])
            block.clear()
            yield (1 if underline[1][0] == "=" else 2), name
        elif not line.strip() or _rule.match(line):
            yield from done()
        elif not _definition.match(line):
            if _item.match(line):
                yield from done()
                line = _item.sub("", line)
            block.append(line.lstrip(" \t>"))
    yield from done()


def _plain(text: str) -> str:
    """A piece of Markdown without its marks."""
    text = _escape.sub(lambda m: chr(_PRIVATE + ord(m[1])), text)
    text = _tag.sub("", _link.sub(r"\1", _image.sub("", text)))
    for _ in range(3):  # marks inside marks
        text = _mark.sub(r"\2", text)
    text = _escaped.sub(lambda m: chr(ord(m[0]) - _PRIVATE), text.replace("|", " "))
    return " ".join(text.split())


def _sized(blocks: Iterable[str]) -> Iterator[str]:
    """Pieces of 15 to 120 words: short blocks joined to the next ones, or else to the one before, long ones cut between
    sentences. What fits neither stands alone."""
    pieces: list[list[str]] = []
    for block in blocks:
        for part in _parts(block):
            words = part.split()
            if pieces and len(pieces[-1]) < LEAST_WORDS and len(pieces[-1]) + len(words) <= MOST_WORDS:
                pieces[-1] += words
            else:
                pieces.append(words)
    joined: list[list[str]] = []
    for piece in pieces:
        if joined and len(piece) < LEAST_WORDS and len(joined[-1]) + len(piece) <= MOST_WORDS:
            joined[-1] += piece
        else:
            joined.append(piece)
    for piece in joined:
        yield " ".join(piece)


def _parts(block: str) -> Iterator[str]:
    """The block, or where it is too long runs of its sentences; a sentence that is too long itself is cut by words."""
    held: list[str] = []
    for sentence in _sentence.split(block) if len(block.split()) > MOST_WORDS else [block]:
        words = sentence.split()
        for start in range(0, len(words), MOST_WORDS):
            part = words[start : start + MOST_WORDS]
            if len(held) + len(part) > MOST_WORDS:
                yield " ".join(held)
                held = []
            held += part
    if held:
        yield " ".join(held)


def propose_tasks(documents: Iterable[Document]) -> dict[str, Any]:
    """Tasks for the facts, as `read_tasks` takes them: each page, and each of its sections, with enough headings.

    A page asks its title, a section "title: heading"; the sub-queries are the headings right below, 4 to 13 of them,
    each with the facts under it. k: a sixth of those facts, 5 to 16; there must be five windows' worth. Headings of one
    name count as one.
    """
    tasks = []
    for document in documents:
        for depth, query, kind, facts in _scopes(document):
            topics: dict[str, list[DocumentFact]] = {}
            for fact in facts:
                if len(fact.headings) > depth:
                    topics.setdefault(fact.headings[depth], []).append(fact)
            relevant = sum(map(len, topics.values()))
            k = max(LEAST_PER_WINDOW, min(MOST_PER_WINDOW, relevant // (MAX_WINDOWS + 1)))
            if not LEAST_TOPICS <= len(topics) <= MOST_TOPICS or relevant < MAX_WINDOWS * k:
                continue
            tasks.append(
                {
                    "id": f"{kind}:{document.path}" + (f"#{query}" if kind == "section" else ""),
                    "kind": kind,
                    "query": query,
                    "windows": MAX_WINDOWS,
                    "k": k,
                    "sub_queries": [
                        {
                            "id": j,
                            "label": heading,
                            "text": f"{query}: {heading}",
                            "fact_ids": [fact.id for fact in found],
                            "expected_words": sum(fact.words for fact in found),
                        }
                        for j, (heading, found) in enumerate(topics.items())
                    ],
                    "other_on_page_ids": [fact.id for fact in document.facts if fact not in _listed(topics)],
                }
            )
    return {"schema": TASK_SCHEMA, "tasks": tasks}


def _listed(topics: dict[str, list[DocumentFact]]) -> set[DocumentFact]:
    return {fact for found in topics.values() for fact in found}


def _scopes(document: Document) -> Iterator[tuple[int, str, str, list[DocumentFact]]]:
    """(depth of its headings in the trail, query, kind, facts) of the page and of each of its sections."""
    yield 0, document.title, "page", list(document.facts)
    sections: dict[str, list[DocumentFact]] = {}
    for fact in document.facts:
        if fact.headings:
            sections.setdefault(fact.headings[0], []).append(fact)
    for heading, facts in sections.items():
        yield 1, f"{document.title}: {heading}", "section", facts
