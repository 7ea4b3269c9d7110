"""When facts expire."""

from __future__ import annotations

from datetime import datetime

import pytest
from durables import add, made
from fact_stores import flip

from cdr_kernel.store._expiry import confirmed


@pytest.fixture
def store(tmp_path):
    with made(tmp_path / "store") as store:
        yield store


@pytest.mark.parametrize(
    "moments", [["never"], [True], [float("nan")], [-1], [datetime(2030, 1, 1)], [1, 2]]
)  # naive on purpose
def test_bad_expiries_are_refused(store, moments):
    with pytest.raises((TypeError, ValueError), match="expires_at"):
        add(store, ["a"], expires_at=moments)
    assert len(store) == 0


def test_a_damaged_file_of_looks_confirms_nothing(tmp_path):
    """No flipped bit makes another look of one."""
    looks, day = tmp_path / "looks", 86400 * 10**6
    assert confirmed(looks, 100 * day, 7 * 86400) is None
    whole = looks.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            looks.write_bytes(whole)
            flip(looks, at, 1 << bit)
            assert confirmed(looks, 110 * day, 7 * 86400) in (None, 100 * day)
    looks.write_bytes(whole)
    assert confirmed(looks, 110 * day, 7 * 86400) == 100 * day
