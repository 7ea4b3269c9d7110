"""When facts expire."""

from __future__ import annotations

from datetime import datetime

import pytest
from durables import add, made


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
