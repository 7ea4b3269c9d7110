"""Scalars and strings that callers hand in, checked at the door: TypeError for the wrong kind, ValueError for the wrong
value."""

from __future__ import annotations

import math
from collections.abc import Reversible, Sequence, Set
from numbers import Integral, Real
from typing import Any

import numpy as np


def check_number(value: object, name: str, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a float in [low, high]. TypeError for what is no number (bool included), ValueError for NaN,
    an infinity, or a number outside the range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {number}")
    if not low <= number <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {number!r}")
    return number


def check_integer(value: object, name: str, low: int, high: int | None = None) -> int:
    """`value` as an int in low..high. TypeError for what is no integer (bool included), ValueError
    outside."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {f'at least {low}' if high is None else f'{low} to {high}'}, got {number}")
    return number


def check_bool(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_text(value: object, name: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {value!r}")
    if not empty and not value.strip():
        raise ValueError(f"{name} must not be empty")
    return value


def check_choice(value: object, name: str, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    return value


def check_order(values: object, name: str) -> None:
    """TypeError for a set, whose order is random: it would decide which values belong together, or how equal scores
    are ordered. What keeps an order is taken: lists, arrays, generators, the keys of a dict."""
    if isinstance(values, Set) and not isinstance(values, Reversible):
        raise TypeError(
            f"{name}: expected a list or another sequence, got a {type(values).__name__}, whose order is random: pass "
            "a list in the order that is meant"
        )


def check_strings(values: Any, name: str, optional: bool = False, ordered: bool = True) -> list[Any]:
    """Strings that were given one by one or as an array, listed. TypeError for one string, and for what is none.

    optional: whether None may stand for a string that is missing. ordered: whether their order matters, so that a set
    is a TypeError too.
    """
    if isinstance(values, str | bytes):
        raise TypeError(f"{name}: expected a sequence of str, got one {type(values).__name__}")
    if ordered:
        check_order(values, name)
    out = values.tolist() if isinstance(values, np.ndarray) else list(values)
    for i, v in enumerate(out):
        if not (isinstance(v, str) or (optional and v is None)):
            raise TypeError(f"{name}: expected str{' or None' if optional else ''}, got {type(v).__name__} at {i}")
    return out


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things as it is read: "1 fact", "2 facts"; many: where it is not `one` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def few(ids: Sequence[str]) -> str:
    """Ids for an error: the first five of them, and how many more there are."""
    return ", ".join(repr(i) for i in ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
