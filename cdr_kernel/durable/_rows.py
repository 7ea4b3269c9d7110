"""Facts as rows of the record, and back.

A row has what the store keeps of a fact, its sequence number, when it was added and expires, and whether it is
quarantined. What the record cannot hold is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cdr_kernel.durable._dataset import COLUMNS, LIVE, QUARANTINED, Record
from cdr_kernel.store import FactStore, _expiry
from cdr_kernel.store._fact_store import Checked
from cdr_kernel.validation._arrays import Int64


def to_rows(
    schema: Any,
    found: Checked,
    sequence: Int64,
    held: Sequence[str | None],
    added_at: Sequence[int] | None = None,
) -> Any:
    """A table of rows for a record of this Arrow schema.

    held: of each fact the reason it is quarantined for, None where it is not. added_at: [M] microseconds since 1970,
    the present for None.
    """
    import pyarrow as pa

    m = len(found.ids)
    stamp = schema.field("added_at").type
    embedding = schema.field("embedding").type
    values = pa.array(np.ascontiguousarray(found.embeddings).reshape(-1), embedding.value_type)
    nothing: list[Any] = [None] * m
    columns: dict[str, Any] = {
        "id": found.ids,
        "sequence": sequence,
        "first_sequence": sequence if found.first_sequence is None else found.first_sequence,
        "text": found.texts,
        "source": found.sources,
        "position": [None if position < 0 else position for position in found.positions.tolist()],
        "importance": found.importance,
        "added_at": pa.array([_expiry.now()] * m if added_at is None else added_at, pa.int64()).cast(stamp),
        "expires_at": pa.array(found.attributes.get(_expiry.EXPIRES, (int, nothing))[1], pa.int64()).cast(stamp),
        "status": [LIVE if reason is None else QUARANTINED for reason in held],
        "reason": [reason or None for reason in held],
        "embedding": pa.FixedSizeListArray.from_arrays(values, embedding.list_size),
    }
    arrays = []
    for field in schema:
        given = columns.get(field.name)
        if given is None:
            given = found.attributes.get(field.name, (None, nothing))[1]
        arrays.append(given if isinstance(given, pa.Array) else pa.array(given, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def from_rows(table: Any, facts: FactStore, record: Record) -> tuple[Checked, Int64]:
    """Rows of the record, a table or a batch, as the store takes them, in the order of their sequence numbers."""
    import pyarrow as pa

    table = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
    table = table.sort_by("sequence").combine_chunks()
    vectors = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["embedding"].chunks]
    names = [name for name in record.attributes if name in table.schema.names]
    found = facts.check(
        table["id"].to_pylist(),
        table["text"].to_pylist(),
        np.concatenate([np.empty(0, facts.dtype), *vectors]).reshape(-1, facts.dim),
        table["importance"].to_numpy(),
        table["source"].to_pylist(),
        table["position"].to_pylist(),
        {name: table[name].to_pylist() for name in names},
    )
    found = _expiry.expiring(found, table["expires_at"].cast("int64").to_pylist())
    return found._replace(first_sequence=table["first_sequence"].to_numpy()), table["sequence"].to_numpy()


def restated(record: Record, sequence: Int64, status: str, reason: str | None, renumbered: Int64 | None = None) -> Any:
    """The rows of these sequence numbers under a status, with other numbers where they are given."""
    import pyarrow as pa

    wanted = ",".join(map(str, sequence.tolist()))
    table = record.read(None, f"sequence IN ({wanted})").sort_by("sequence")
    m = table.num_rows
    columns: dict[str, Any] = {"status": [status] * m, "reason": [reason] * m}
    if renumbered is not None:
        columns["sequence"] = renumbered[np.argsort(sequence)]
    for name, values in columns.items():
        field = record.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
    return table.sort_by("sequence")


def quarantined(record: Record) -> dict[str, tuple[int, str | None, int]]:
    """The quarantined facts of a version: sequence, reason, and the number that each was added with."""
    names = ["id", "sequence", "reason", "first_sequence"]
    table = record.read(names, f"status != '{LIVE}'")
    columns = (table[name].to_pylist() for name in names)
    return {i: (sequence, reason, first) for i, sequence, reason, first in zip(*columns, strict=True)}


def check_names(attributes: Iterable[str]) -> None:
    """Raises ValueError for names that the record has for itself or cannot have."""
    for name in attributes:
        if name in COLUMNS or "`" in str(name):
            raise ValueError(
                f"attributes: expected a name that is none of {', '.join(COLUMNS)} and has no backtick, got {name!r}"
            )


def check_text(found: Checked) -> None:
    """Raises ValueError for strings that no UTF-8 can hold."""
    columns = {"ids": found.ids, "texts": found.texts, "source": [s for s in found.sources if s is not None]}
    for name, (kind, values) in found.attributes.items():
        if kind is str:
            columns[f"attributes[{name!r}]"] = [str(value) for value in values if value is not None]
    for name, strings in columns.items():
        for value in strings:
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{name}: expected text without lone surrogates, got {value[:80]!r}") from None
