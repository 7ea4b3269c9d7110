"""Integers in few bits: what is written is read, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_kernel.session import _bit_codes
from cdr_kernel.session._bit_codes import BitReader, BitWriter

HYPOTHESIS = settings(deadline=None, max_examples=200, derandomize=True)
VALUES = st.one_of(st.integers(0, 9), st.integers(0, 5000), st.integers(0, 2**64))


def written(lists):
    writer = BitWriter()
    for values in lists:
        writer.number(len(values))
        writer.numbers(values)
    writer.bits(5, 3)
    return writer.to_bytes()


def read(raw):
    reader, lists = BitReader(raw), []
    for _ in range(2):
        lists.append(reader.numbers(reader.number()))
    assert reader.bits(3) == 5
    reader.end()
    return lists


@HYPOTHESIS
@given(st.lists(VALUES, max_size=40), st.lists(VALUES, max_size=3))
def test_what_was_written_is_read(one, two):
    raw = written([one, two])
    assert read(raw) == [one, two]
    assert written([one, two]) == raw
    for other in (raw[:-1], raw + b"\0", raw + b"\1"):
        with pytest.raises((ValueError, AssertionError)):
            read(other)


@HYPOTHESIS
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(raw):
    reader = BitReader(raw)
    try:
        values = reader.numbers(reader.number())
        reader.end()
    except ValueError:
        return
    assert len(values) <= 8 * len(raw)


def test_gaps_of_a_million_take_eleven_bits_and_a_half():
    numbers = np.sort(np.random.default_rng(0).permutation(10**6)[:1000])
    writer = BitWriter()
    writer.numbers(np.diff(numbers, prepend=-1).tolist())
    assert len(writer.to_bytes()) <= 1000 * 11.6 / 8  # the set alone has 1000 * 11.4 bits


def test_a_list_is_bounded(monkeypatch):
    raw = written([[1] * 9, []])
    monkeypatch.setattr(_bit_codes, "MOST_VALUES", 8)
    with pytest.raises(ValueError, match="at most 8 integers in one list, got 9"):
        written([[1] * 9, []])
    with pytest.raises(ValueError, match="at most 8 integers in one list, got 9"):
        read(raw)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "end too early"),
        (b"\0" * 9, "end too early"),
        (b"\0" * 40 + b"\1", "more than 128 bits"),
        (b"\0" * 7 + b"\x01" + b"\xff" * 8, "at most 1048576 integers"),  # a count of 2^64 - 2 and no more bytes
        (b"\0" * 2 + b"\x10" + b"\0" * 3, "end too early"),  # a count of 2^20 - 1
    ],
)
def test_a_number_or_a_count_beyond_the_end_is_refused(raw, said):
    reader = BitReader(raw)
    with pytest.raises(ValueError, match=said):
        reader.numbers(reader.number())
