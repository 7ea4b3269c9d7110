"""Integers in few bits: Golomb-Rice codes, whose parameter is the one that makes a list shortest.

Equal lists give equal bits. A reader never reads past the end. No code is shorter than one bit, so nobody can make a
reader return more values than there are bits.
"""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST_UNARY = 24
"""A quotient from here on is written as an Elias gamma code."""
_PARAMETER_BITS = 6
MOST_VALUES = 2**20
"""Integers of one list at most, so that a few bytes of a hostile author take little memory."""
_WIDEST = 128
"""Bits of an integer at most."""


class BitWriter:
    """Collects codes, the first one in the highest bit."""

    def __init__(self) -> None:
        self._codes: list[str] = []

    def bits(self, value: int, width: int) -> None:
        """An integer in `width` bits."""
        if width:
            self._codes.append(f"{value:0{width}b}")

    def number(self, value: int) -> None:
        """An integer >= 0 of any size, as the Elias gamma code of value + 1."""
        digits = f"{value + 1:b}"
        self._codes.append("0" * (len(digits) - 1) + digits)

    def numbers(self, values: Sequence[int]) -> None:
        """Integers >= 0, without their count. No values take no bits. ValueError for more than `MOST_VALUES`."""
        if not values:
            return
        if len(values) > MOST_VALUES:
            raise ValueError(f"expected at most {MOST_VALUES} integers in one list, got {len(values)}")
        widest = min(max(values).bit_length(), 2**_PARAMETER_BITS - 1)
        parameter = min(range(widest + 1), key=lambda k: sum(_length(value, k) for value in values))
        self.bits(parameter, _PARAMETER_BITS)
        limit = _LONGEST_UNARY << parameter
        for value in values:
            if value < limit:
                self._codes.append("1" * (value >> parameter) + "0")
                self.bits(value & ((1 << parameter) - 1), parameter)
            else:
                self._codes.append("1" * _LONGEST_UNARY)
                self.number(value - limit)

    def to_bytes(self) -> bytes:
        """All codes, with zeros up to a whole byte."""
        digits = "".join(self._codes)
        length = -(-len(digits) // 8)
        return int(digits.ljust(8 * length, "0") or "0", 2).to_bytes(length, "big")


class BitReader:
    """Reads what `BitWriter` wrote. ValueError where the bits end too early, or are not all read at the end.

    raw: the bytes of `BitWriter.to_bytes`.
    """

    def __init__(self, raw: bytes) -> None:
        self._digits = f"{int.from_bytes(raw, 'big'):0{8 * len(raw)}b}" if raw else ""
        self._at = 0

    def bits(self, width: int) -> int:
        """An integer of `width` bits."""
        start, self._at = self._at, self._at + width
        if self._at > len(self._digits):
            raise ValueError("the bits end too early")
        return int(self._digits[start : self._at] or "0", 2)

    def number(self) -> int:
        """See `BitWriter.number`."""
        one = self._digits.find("1", self._at)
        if one < 0:
            raise ValueError("the bits end too early")
        zeros, self._at = one - self._at, one
        if zeros > _WIDEST:
            raise ValueError(f"an integer of more than {_WIDEST} bits")
        return self.bits(zeros + 1) - 1

    def numbers(self, count: int) -> list[int]:
        """See `BitWriter.numbers`."""
        if not count:
            return []
        if count > MOST_VALUES:
            raise ValueError(f"expected at most {MOST_VALUES} integers in one list, got {count}")
        parameter = self.bits(_PARAMETER_BITS)
        values = []
        for _ in range(count):
            zero = self._digits.find("0", self._at, self._at + _LONGEST_UNARY)
            if zero >= 0:
                quotient, self._at = zero - self._at, zero + 1
                values.append(quotient << parameter | self.bits(parameter))
            else:
                self.bits(_LONGEST_UNARY)
                values.append((_LONGEST_UNARY << parameter) + self.number())
        return values

    def end(self) -> None:
        """Check that nothing is left but zeros up to a whole byte."""
        rest = self._digits[self._at :]
        if len(rest) > 7 or "1" in rest:
            raise ValueError("there are more bits than expected")


def _length(value: int, parameter: int) -> int:
    """Bits of one value in `BitWriter.numbers`."""
    quotient = value >> parameter
    if quotient < _LONGEST_UNARY:
        return quotient + 1 + parameter
    return _LONGEST_UNARY + 2 * (value - (_LONGEST_UNARY << parameter) + 1).bit_length() - 1
