"""How many names one request may list, in whatever field: each is looked up, compared and remembered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cdr_kernel.serve import _schema
from cdr_kernel.serve._errors import Refusal, invalid
from cdr_kernel.serve._settings import Settings


def check_lists(body: Any, settings: Settings) -> None:
    """Check the lists of a request against `max_names`, `max_names_bytes` and `max_facts`.

    Raises:
        Refusal: 413 where a list has too many items, or where its texts have too many bytes.
    """
    if isinstance(body, _schema.AddFacts) and len(body.facts) > settings.max_facts:
        raise _too_many("facts", f"at most {settings.max_facts} facts (--max-facts)", f"{len(body.facts)}")
    count = size = 0
    for field, names in _lists(body):
        count += len(names)
        if count > settings.max_names:
            raise _too_many(field, f"at most {settings.max_names} names in a request (--max-names)", "more")
        size += sum(len(name.encode("utf-8", "surrogatepass")) for name in names if isinstance(name, str))
        if size > settings.max_names_bytes:
            most = f"names of at most {settings.max_names_bytes} bytes in a request (--max-names-mb)"
            raise _too_many(field, most, "more")


def check_attributes(facts: Iterable[_schema.NewFact], known: Iterable[str], settings: Settings) -> None:
    """Check how many attributes a store has with these facts, against `max_attributes`.

    Args:
        facts: to be added.
        known: names of the store's attributes.
        settings: the server's.

    Raises:
        Refusal: 413 where there would be too many.
    """
    names = set(known)
    before = len(names)
    for fact in facts:
        names.update(fact.attributes)
        if len(names) > max(settings.max_attributes, before):
            most = f"at most {settings.max_attributes} names of attributes in a store (--max-attributes)"
            raise _too_many("facts.attributes", most, "more")


def _lists(body: Any) -> Iterator[tuple[str, list[Any]]]:
    """The lists of names of a body, each with its field. A value of an object counts with its name."""
    if isinstance(body, _schema.FactIds | _schema.Quarantine | _schema.Release):
        yield "ids", body.ids
    elif isinstance(body, _schema.UpdateSession):
        yield "packed", body.packed or []
        if body.report is not None:
            yield "report.addressed", body.report.addressed
            yield "report.depth_by_sub_query", list(body.report.depth_by_sub_query)
            yield "report.words_by_sub_query", list(body.report.words_by_sub_query)
    elif isinstance(body, _schema.RankFacts):
        yield "multiplier", list(body.multiplier or ())
        where = body.where or {}
        yield "where", list(where)
        for name, values in where.items():
            yield f"where[{name[:40]!r}]", values if isinstance(values, list) else [values]
    elif isinstance(body, _schema.Rerank):
        yield "documents", [each.id for each in body.documents if not isinstance(each, str) and each.id is not None]


def _too_many(field: str, most: str, got: str) -> Refusal:
    return invalid(field, f"{most}: send less at a time", got, status=413, code="too_large")
