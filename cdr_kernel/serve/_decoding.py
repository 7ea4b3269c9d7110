"""Large bodies in steps: a decoder holds the interpreter until it is done, and everybody else waits for that long.

First the outline of a body is read, in which lists and objects stay the bytes they are; that takes a millisecond a
megabyte. Then each of these is read on its own, and a list of objects item by item. What would take long all the same,
because it has too many values, is refused before it is read.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from types import GenericAlias
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from cdr_kernel.serve import _schema
from cdr_kernel.serve._errors import Refusal, invalid
from cdr_kernel.serve._schema_errors import of_schema

WHOLE = 1 << 16
"""Bytes up to which something is decoded in one go."""
MOST_COMMAS = 5_000_000
"""Commas of a body of JSON."""
MOST_VALUES = 500_000
"""Values of one list or object, commas in its strings included."""
MOST_OBJECTS = 100_000
"""Objects of one list."""
MOST_BRACES = 150_000
"""Opening braces in one list of objects, those in its strings included: what is counted before the list is read."""
MOST_NESTED = 1 << 21
"""Bytes of an object of msgpack whose values are lists."""
STEP = 64
"""Objects of one step."""

Steps: TypeAlias = Generator[None, None, Any]


def decode_steps(body: bytes, content_type: str | None, kind: type[Any]) -> Steps:
    """`_schema.decode` in steps. Raises `Refusal`: 415, 400, 422, 413 for too many values."""
    media = _schema.checked_media(content_type)
    if media == _schema.JSON and len(body) > MOST_COMMAS and body.count(b",") > MOST_COMMAS:
        raise _too_many("the body", MOST_COMMAS, "more")
    value = yield from _struct_steps(_Reader(media == _schema.MSGPACK), Raw(body), kind, "")
    return value


class _Reader:
    """Decodes parts of a body, and words what is wrong with them. msgpack: the format, else JSON."""

    def __init__(self, msgpack: bool) -> None:
        self._msgpack = msgpack
        self._decoders: dict[Any, Any] = {}

    def read(self, raw: Raw, kind: Any, field: str) -> Any:
        """A part as what it should be. field: where it is in the body, "" for the body."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            made = msgspec.msgpack.Decoder if self._msgpack else msgspec.json.Decoder
            decoder = self._decoders[kind] = made(kind)
        try:
            return decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise _within(field, of_schema(error, kind, lambda: self._anything(raw))) from None
        except UnicodeDecodeError as error:
            raise Refusal(400, "malformed", f"the body could not be read: {error.reason}") from None

    def _anything(self, raw: Raw) -> Any:
        """A small part, whatever it is: what came where something else was expected."""
        if len(memoryview(raw)) > WHOLE:
            raise LookupError("too large to be read for that")
        return (msgspec.msgpack.decode if self._msgpack else msgspec.json.decode)(raw)

    def check_values(self, raw: Raw, field: str, most: int, separator: bytes = b",") -> None:
        """Raises `Refusal` 413 where a list or an object has too many values; separator: what is counted in JSON."""
        count = _msgpack_length(memoryview(raw)) if self._msgpack else bytes(raw).count(separator)
        if count > most:
            raise _too_many(field, most, "more")

    def check_nested(self, raw: Raw, field: str) -> None:
        """Raises `Refusal` 413 for a large object of msgpack whose values may be lists: their lengths are not known."""
        if self._msgpack and len(memoryview(raw)) > MOST_NESTED:
            raise invalid(field, f"at most {MOST_NESTED} bytes", "more", status=413, code="too_large")


def _too_many(field: str, most: int, got: str) -> Refusal:
    return invalid(field, f"at most {most} values: send less at a time", got, status=413, code="too_large")


def _struct_steps(reader: _Reader, raw: Raw, kind: Any, field: str) -> Steps:
    """A struct, large or small."""
    if len(memoryview(raw)) <= WHOLE:
        return reader.read(raw, kind, field)
    outline = reader.read(raw, _outline(kind), field)
    yield
    values = {}
    for each in msgspec.structs.fields(kind):
        value = getattr(outline, each.name)
        name = f"{field}.{each.encode_name}" if field else each.encode_name
        values[each.name] = (yield from _part_steps(reader, value, each.type, name)) if type(value) is Raw else value
    return kind(**values)


def _part_steps(reader: _Reader, raw: Raw, annotation: Any, field: str) -> Steps:
    """A list, an object or a vector."""
    if len(memoryview(raw)) <= WHOLE:
        return reader.read(raw, annotation, field)
    yield
    info = _container(annotation)
    if isinstance(info, msgspec.inspect.StructType):
        value = yield from _struct_steps(reader, raw, info.cls, field)
        return value
    if isinstance(info, msgspec.inspect.ListType) and _struct_of(info.item_type) is not None:
        items = yield from _objects_steps(reader, raw, info, field)
        return items
    if isinstance(info, msgspec.inspect.ListType) and _container(info.item_type) is not None:
        reader.check_values(raw, field, MOST_VALUES)
        parts = reader.read(raw, list[Raw], field)
        values = []
        for i, part in enumerate(parts):
            values.append((yield from _part_steps(reader, part, _schema.Vector, f"{field}[{i}]")))
        return values
    if isinstance(info, msgspec.inspect.ListType | msgspec.inspect.DictType):
        if not _is_binary(memoryview(raw)[0]):
            reader.check_values(raw, field, MOST_VALUES)
        if isinstance(info, msgspec.inspect.DictType) and _container(info.value_type) is not None:
            reader.check_nested(raw, field)
    return reader.read(raw, annotation, field)


def _objects_steps(reader: _Reader, raw: Raw, info: msgspec.inspect.ListType, field: str) -> Steps:
    """A list of objects, some of which may be plain values."""
    reader.check_values(raw, field, MOST_BRACES, b"{")
    kind: Any = _struct_of(info.item_type)
    item: Any = _outline(kind) | str if _may_be_text(info.item_type) else _outline(kind)
    outlines = reader.read(raw, GenericAlias(list, item), field)
    if len(outlines) > MOST_OBJECTS:
        raise _too_many(field, MOST_OBJECTS, str(len(outlines)))
    if info.max_length is not None and len(outlines) > info.max_length:
        raise invalid(field, f"a list of at most {info.max_length} items", f"{len(outlines)} items")
    fields = msgspec.structs.fields(kind)
    items = []
    for i, outline in enumerate(outlines):
        if isinstance(outline, str):
            items.append(outline)
        else:
            values = {each.name: getattr(outline, each.name) for each in fields}
            for each in fields:
                if type(values[each.name]) is Raw:
                    place = f"{field}[{i}].{each.encode_name}"
                    values[each.name] = yield from _part_steps(reader, values[each.name], each.type, place)
            items.append(kind(**values))
        if i % STEP == STEP - 1:
            yield
    return items


@cache
def _outline(kind: Any) -> Any:
    """A struct like this one, whose lists and objects stay bytes."""
    fields: list[Any] = []
    for each in msgspec.structs.fields(kind):
        annotation = each.type if _container(each.type) is None else Raw
        if each.required:
            fields.append((each.encode_name, annotation))
        elif each.default_factory is not msgspec.NODEFAULT:
            fields.append((each.encode_name, annotation, msgspec.field(default_factory=each.default_factory)))
        else:
            fields.append((each.encode_name, annotation, each.default))
    return msgspec.defstruct(kind.__name__, fields, kw_only=True, forbid_unknown_fields=True, gc=False)


def _container(annotation: Any) -> Any:
    """The list, object or struct that a value may be; None for one that is always a plain value."""
    info = annotation if isinstance(annotation, msgspec.inspect.Type) else msgspec.inspect.type_info(annotation)
    if isinstance(info, msgspec.inspect.Metadata):
        return _container(info.type)
    if isinstance(info, msgspec.inspect.UnionType):
        return next((found for each in info.types if (found := _container(each)) is not None), None)
    kinds = msgspec.inspect.ListType | msgspec.inspect.DictType | msgspec.inspect.StructType
    return info if isinstance(info, kinds) else None


def _struct_of(info: Any) -> Any:
    """The struct that a value may be."""
    found = _container(info)
    return found.cls if isinstance(found, msgspec.inspect.StructType) else None


def _may_be_text(info: Any) -> bool:
    types = info.types if isinstance(info, msgspec.inspect.UnionType) else ()
    return any(isinstance(each, msgspec.inspect.StrType) for each in types)


def _within(field: str, refusal: Refusal) -> Refusal:
    """A refusal of a part, in the words of one of the body."""
    told = refusal.detail
    if not field or refusal.status != 422:
        return refusal
    inner = told.field or ""
    whole = f"{field}{inner if inner.startswith('[') or not inner else '.' + inner}"
    message = whole + told.message.removeprefix(inner or "the body")
    return Refusal(422, told.code, message, field=whole, expected=told.expected, got=told.got)


def _is_binary(first: int) -> bool:
    """Whether a value that begins with this byte is a string of JSON or bytes of msgpack."""
    return first == ord('"') or 0xC4 <= first <= 0xC6


def _msgpack_length(data: memoryview) -> int:
    """Items of a list or object of msgpack, 0 for anything else."""
    first = data[0]
    if first in (0xDC, 0xDE):
        return int.from_bytes(data[1:3], "big")
    if first in (0xDD, 0xDF):
        return int.from_bytes(data[1:5], "big")
    return first & 0x0F if 0x80 <= first <= 0x9F else 0
