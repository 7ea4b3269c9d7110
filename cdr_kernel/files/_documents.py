"""A folder of documents to facts with heading trails, and to tasks: page or section is the query, headings are the
sub-queries.

    documents = read_documents(Path("docs"))
    facts = [fact for document in documents for fact in document.facts]
    tasks = propose_tasks(documents)

Markdown and plain text, UTF-8. Markup, blocks of code, comments, front matter, tables' rules and shortcodes go; code
within a line stays to the letter. What is left is cut into facts of about 15 to 120 words that never cross a heading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import normalizeReference

from cdr_kernel.exceptions import FileError
from cdr_kernel.files._files import TASK_SCHEMA
from cdr_kernel.spec.constants import MAX_WINDOWS

SUFFIXES = (".md", ".markdown", ".txt")
LEAST_WORDS, MOST_WORDS = 15, 120
LEAST_TOPICS, MOST_TOPICS = 4, 13
LEAST_PER_WINDOW, MOST_PER_WINDOW = 5, 16

# None of these may take more than time in proportion to a text, whatever is in it.
_front_matter_start = re.compile(r"---[^\S\n]*\n")
_front_matter_end = re.compile(r"^---[^\S\n]*$\n?", re.MULTILINE)
_title = re.compile(r"^title:\s*(\S.*)$", re.MULTILINE)
_heading = re.compile(r"^ {0,3}(#{1,6})[ \t]+(.*)$")
_underline = re.compile(r"^ {0,3}(=+|-+)[ \t]*$")
_fence = re.compile(r"^[ \t>]*(`{3,}(?=[^`]*$)|~{3,})")  # text after backticks that has another one is inline code
_fence_end = re.compile(r"^[ \t>]*(`{3,}|~{3,})[ \t]*$")
_quote = re.compile(r"(?:[ \t]*>)*")
_item = re.compile(r"^[ \t>]*(?:[-*+]|\d{1,9}[.)])[ \t]+")
_rule = re.compile(r"^[ \t|:*_=-]{3,}$")
_definition = re.compile(r"^ {0,3}\[([^\]]{1,999})\]:\s+\S+.*$", re.MULTILINE)  # CommonMark has no longer label
_shortcode_text = re.compile(r"\btext=\"([^\"]*)\"")
_shortcode_heading = re.compile(r"\{\{%\s*heading\s+\"([^\"]*)\"\s*%\}\}")
_shortcode_end = re.compile(r"[>%]\}\}")
_shortcode_or_code = re.compile(  # whichever comes first: what stands in code is neither comment nor shortcode
    r"\\[\\`<{]"
    # One in a block quote ends with it, closed or not.
    r"|^[ \t]*>[ \t>]*(?P<quoted>`{3,}(?=[^`\n]*$)|~{3,})[^\n]*"
    r"(?:\n(?![ \t>]*(?P=quoted)[`~]*[ \t]*$)[ \t]*>[^\n]*)*(?:\n[ \t]*>[ \t>]*(?P=quoted)[`~]*[ \t]*$)?"
    r"|^[ \t]*(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})[^\n]*(?:\n.*?^[ \t>]*(?P=fence)[`~]*[ \t]*$|.*\Z)"
    r"|(?<!`)(?P<ticks>`{1,32})(?!`)(?:(?!\n[ \t]*\n).)+?(?<!`)(?P=ticks)(?!`)"
    r"|(?P<comment><!--)"
    r"|(?P<shortcode>\{\{[<%])",
    re.DOTALL | re.MULTILINE,
)
_key = re.compile(r"[\"']?[\w$][\w$ ./-]*+[\"']?[ \t]*:(?:[ \t]|$)")
_no_key = re.compile(r"[ \t#\]}-]|$")  # what else a line of front matter begins with
_tag = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]*)(.*)>", re.DOTALL)
_inline_tag = re.compile(
    r"a|abbr|acronym|audio|b|bdi|bdo|big|button|canvas|cite|code|data|datalist|del|dfn|em|embed|font|i|iframe"
    r"|img|input|ins|kbd|label|map|mark|meter|nobr|noscript|object|output|picture|progress|q|rp|rt|ruby|s|samp"
    r"|script|select|slot|small|source|span|strike|strong|style|sub|sup|svg|template|textarea|time|track|tt|u"
    r"|var|video|wbr",
    re.IGNORECASE,
)
_block_tag = re.compile(
    r"address|area|article|aside|base|blockquote|body|br|caption|center|col|colgroup|dd|details|dialog|div|dl"
    r"|dt|fieldset|figcaption|figure|footer|form|frame|frameset|h1|h2|h3|h4|h5|h6|head|header|hgroup|hr|html"
    r"|legend|li|link|main|menu|meta|nav|ol|optgroup|option|p|param|pre|search|section|summary|table|tbody|td"
    r"|tfoot|th|thead|title|tr|ul",
    re.IGNORECASE,
)
# Without text_join escaped characters are tokens of their own.
_inline = MarkdownIt("commonmark").enable("strikethrough").disable("text_join")
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
        start = _front_matter_start.match(text)
        end = _front_matter_end.search(text, start.end()) if start else None
        if start and end and _keys_and_values(text[start.end() : end.start()]):
            given = _title.search(text, start.end(), end.start())
            text = text[end.end() :]
            if given:
                title, named = given[1].rstrip().strip("\"'"), True
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


def _keys_and_values(text: str) -> bool:
    """Whether what stands between two rules is front matter: a YAML mapping by its looks."""
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("#")]
    return bool(lines and _key.match(lines[0])) and all(_key.match(line) or _no_key.match(line) for line in lines)


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """(0, a paragraph or list item) and (level, a heading), in order, without markup."""
    text = _without_shortcodes(text)
    targets = {normalizeReference(label): {"href": "", "title": ""} for label in _definition.findall(text)}
    fence, depth = "", 0  # of the fence that is open: its marks, and how many quotes it is in
    block: list[str] = []

    def done() -> Iterator[tuple[int, str]]:
        plain = _plain("\n".join(block), targets)
        block.clear()
        if plain:
            yield 0, plain

    for line in text.splitlines():
        if fence and _quotes(line) < depth:
            fence = ""  # with the quote, though nothing closes it
        if fence:
            closed = _fence_end.match(line)
            if closed and closed[1].startswith(fence):
                fence = ""
            continue
        opened = _fence.match(line)
        if opened:
            yield from done()
            fence, depth = opened[1], _quotes(line)
            continue
        heading = _heading.match(line)
        underline = _underline.match(line)
        if heading:
            yield from done()
            name = _plain(_heading_text(heading[2]), targets)
            if name:
                yield len(heading[1]), name
        elif underline and len(block) == 1 and not _item.match(block[0]):
            name = _plain(block[0], targets)
            block.clear()
            if name:
                yield (1 if underline[1][0] == "=" else 2), name
        elif not line.strip() or _rule.match(line):
            yield from done()
        elif not _definition.match(line):
            if _item.match(line):
                yield from done()
                line = _item.sub("", line)
            block.append(line.lstrip(" \t>"))
    yield from done()


def _quotes(line: str) -> int:
    """How many block quotes a line is in."""
    found = _quote.match(line)
    return found[0].count(">") if found else 0


def _heading_text(line: str) -> str:
    """A heading without the marks that close it: "## Pods ## {#pods}" is "Pods"."""
    line = line.rstrip(" \t")
    if line.endswith("}"):
        anchor = line.find("{#", line.rfind("}", 0, -1) + 1)
        line = line if anchor < 0 else line[:anchor].rstrip(" \t")
    return line.rstrip("#").rstrip(" \t")


def _without_shortcodes(text: str) -> str:
    """The text without comments, and with the text that a shortcode shows in its place; code stays to the letter."""
    parts: list[str] = []
    done = at = 0
    comments = shortcodes = True  # whether one that opens here can be closed
    while found := _shortcode_or_code.search(text, at):
        start, at, shown = found.start(), found.end(), ""
        if found["comment"]:
            end = text.find("-->", at) if comments else -1
            comments, end = end >= 0, end + 3
            closed = comments
        elif found["shortcode"]:
            closing = _shortcode_end.search(text, at) if shortcodes else None
            closed = shortcodes = closing is not None
            end = closing.end() if closing else at
            shown = _shown(text[start:end])
        else:
            continue
        if not closed:
            at = start + 1
            continue
        parts += [text[done:start], shown]
        done = at = end
    return "".join([*parts, text[done:]])


def _shown(shortcode: str) -> str:
    """The text that a shortcode shows."""
    heading = _shortcode_heading.fullmatch(shortcode)
    if heading:
        return heading[1].capitalize()
    inner = shortcode[3:-3]
    braces = [place for place in (inner.find("{"), inner.find("}"), inner.rfind("{"), inner.rfind("}")) if place >= 0]
    given = _shortcode_text.search(inner)
    while given and braces and not given.start() < min(braces) <= max(braces) < given.end():
        given = _shortcode_text.search(inner, given.start() + 1) if given.start() < min(braces) else None
    return given[1] if given else ""


def _plain(text: str, targets: Mapping[str, Mapping[str, str]]) -> str:
    """A piece of Markdown without its marks; code to the letter. targets: labels that the document defines, normal."""
    parts = []
    for token in _inline.parseInline(text, {"references": targets})[0].children or ():
        if token.type == "text":
            parts.append(token.content.replace("|", " "))  # between the cells of a table
        elif token.type in ("text_special", "code_inline"):
            parts.append(token.content)
        elif token.type in ("softbreak", "hardbreak"):
            parts.append(" ")
        elif token.type == "html_inline":
            parts.append(_html(token.content))
    return " ".join("".join(parts).split())


def _html(text: str) -> str:
    """What stays of a piece of HTML: all of what only looks like a tag, as a placeholder or the argument of a type."""
    tag = _tag.fullmatch(text)
    if not tag:
        return ""  # a comment, a declaration or an instruction
    slash, name, rest = tag.groups()
    if name not in (name.lower(), name.upper()) or (len(name) == 1 and name.isupper() and not slash and not rest):
        return text
    if _block_tag.fullmatch(name):
        return " "
    return "" if _inline_tag.fullmatch(name) else text


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
            listed = {fact for found in topics.values() for fact in found}
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
                    "other_on_page_ids": [fact.id for fact in document.facts if fact not in listed],
                }
            )
    return {"schema": TASK_SCHEMA, "tasks": tasks}


def _scopes(document: Document) -> Iterator[tuple[int, str, str, list[DocumentFact]]]:
    """(depth of its headings in the trail, query, kind, facts) of the page and of each of its sections."""
    yield 0, document.title, "page", list(document.facts)
    sections: dict[str, list[DocumentFact]] = {}
    for fact in document.facts:
        if fact.headings:
            sections.setdefault(fact.headings[0], []).append(fact)
    for heading, facts in sections.items():
        yield 1, f"{document.title}: {heading}", "section", facts
