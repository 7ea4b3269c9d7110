"""What is wrong with a body, in the words of the other refusals: which field, what was expected there, what came.

msgspec says it in its own ("Expected `int` >= 0 - at `$.k`"), and leaves out what came where the type is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from cdr_kernel.serve._errors import Refusal

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<field>.*)`)?$", re.S)
_FIELD = re.compile(r"^Object (?P<how>missing required|contains unknown) field `(?P<name>.*)`$", re.S)
_TYPE = re.compile(r"^Expected `(?P<types>[^`]*)`(?P<more>.*?)(?:, got (?P<got>.*))?$", re.S)
_BOUND = re.compile(r"^ (?P<sign>[<>]=?) (?P<bound>\S+)$")
_LENGTH = re.compile(r"^ of length (?P<sign>[<>]=) (?P<bound>\d+)$")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+|\.\.\.)\]")

_TYPES = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bytes": "bytes (base64 in JSON)",
    "array": "a list",
    "object": "an object",
    "null": "null",
    "None": "null",
    "ext": "an extension of msgpack",
}
_SIGNS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_SHOWN = 40
_NAME = 100


def of_schema(error: msgspec.DecodeError, kind: type[Any], body: Callable[[], Any]) -> Refusal:
    """A body that is no JSON or msgpack (400), or not of the operation's schema (422).

    kind: what it was to be. body: decodes it as whatever it is.
    """
    if not isinstance(error, msgspec.ValidationError):
        return Refusal(400, "malformed", f"the body could not be read: {error}")
    found = _PLACE.match(str(error))
    assert found is not None  # the pattern matches every text
    what, field = found["what"], found["field"] or None
    named = _FIELD.match(what)
    if named is not None:
        name = named["name"] if len(named["name"]) <= _NAME else named["name"][:_NAME] + "..."
        field = f"{field}.{name}" if field else name
        missing = named["how"].startswith("missing")
        told, expected, got = (
            ("is missing", "this field", "nothing") if missing else ("is not a field here", "no such field", "it")
        )
        return Refusal(422, "invalid", f"{field}: {told}", field=field, expected=expected, got=got)
    expected, came = _expected(what, kind, field)
    if found["key"] is not None:
        expected = f"keys that are each {expected}"
    elif came is None:
        came = _came(field, body)
    text = f"{field or 'the body'}: expected {expected}{'' if came is None else f', got {came}'}"
    return Refusal(422, "invalid", text, field=field, expected=expected, got=came)


def _expected(what: str, kind: type[Any], field: str | None) -> tuple[str, str | None]:
    """What was expected, and what came where msgspec says so."""
    typed = _TYPE.match(what)
    if typed is None:
        if what.startswith("Invalid enum value "):
            return _either(_choices(kind, field)) or "another value", None
        if what == "Invalid base64 encoded string":
            return "base64", None
        if "out of range" in what:
            return "a number that 64 bits hold", "a larger one"
        return what.replace("`", ""), None
    names = [name.strip() for name in typed["types"].split("|")]
    expected = _either([_TYPES.get(name, name) for name in names])
    got = typed["got"]
    bound, length = _BOUND.match(typed["more"]), _LENGTH.match(typed["more"])
    if bound is not None:
        expected += f", {_SIGNS[bound['sign']]} {bound['bound'].removesuffix('.0')}"
    elif length is not None:
        thing = {"str": "character", "array": "item"}.get(names[0], "byte")
        many = "" if length["bound"] == "1" else "s"
        expected += f" of {_SIGNS[length['sign']]} {length['bound']} {thing}{many}"
    elif typed["more"]:
        expected += typed["more"].replace("`", "")
    return expected, None if got is None else _TYPES.get(got.strip("`"), got.strip("`"))


def _either(words: list[str]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def _steps(field: str | None) -> Iterator[str | int | None]:
    """The way to a field: names, places in lists, None for some key of an object."""
    for name, place in _STEP.findall(field or ""):
        yield name or (None if place == "..." else int(place))


def _choices(kind: type[Any], field: str | None) -> list[str]:
    """The strings that a field may be."""
    types: list[Any] = [msgspec.inspect.type_info(kind)]
    for step in _steps(field):
        types = [inner for each in types for inner in _inner(each, step)]
    values = [value for each in _flat(types) for value in getattr(each, "values", ())]
    return [f'"{value}"' for value in values]


def _flat(types: list[Any]) -> Iterator[Any]:
    for each in types:
        if isinstance(each, msgspec.inspect.UnionType):
            yield from _flat(list(each.types))
        elif isinstance(each, msgspec.inspect.Metadata):
            yield from _flat([each.type])
        else:
            yield each


def _inner(outer: Any, step: str | int | None) -> Iterator[Any]:
    """The types of a part."""
    for each in _flat([outer]):
        if isinstance(each, msgspec.inspect.StructType):
            yield from (field.type for field in each.fields if field.encode_name == step)
        elif isinstance(each, msgspec.inspect.DictType):
            yield each.value_type
        elif isinstance(each, msgspec.inspect.ListType):
            yield each.item_type


def _came(field: str | None, body: Callable[[], Any]) -> str | None:
    """What came in a field, in short; None where msgspec does not say which one it is."""
    steps = list(_steps(field))
    if None in steps:
        return None
    try:
        value = body()
        for step in steps:
            value = value[step]
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        LookupError,
        TypeError,
        RecursionError,
    ):  # what follows it is no better
        return None
    if isinstance(value, str):
        return f"{len(value)} characters" if len(value) > _SHOWN else repr(value)
    if isinstance(value, list):
        return f"{len(value)} items"
    return str(value)[:_SHOWN] if isinstance(value, int | float) else None
