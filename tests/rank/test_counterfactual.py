"""The parts of `explain` that stand alone; that its changes are right is tested in test_explain.py."""

from __future__ import annotations

import math

import pytest

from cdr_kernel.rank import Change
from cdr_kernel.rank._counterfactual import _least


@pytest.mark.parametrize("now", [0.0, 5e-324, 0.3, 1.0, 1e30])
@pytest.mark.parametrize("threshold", [5e-324, 0.1, 1.0000000000000002, 3.7, 2.0**99])
def test_the_least_float_is_found(now, threshold):
    tried = []

    def enters(value):
        tried.append(value)
        return value >= threshold

    found = _least(enters, now)
    if now < threshold:
        assert found == threshold
    assert len(tried) < 90


def test_what_no_number_does_is_none():
    assert _least(lambda value: False, 1.0) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Change("importance", "at least", 1.0, 1.23456789), "importance at least 1.2346 (now 1)"),
        (Change("importance", "at least", 1.0, 1.20001), "importance at least 1.2001 (now 1)"),
        (Change("multiplier", "at least", 0.0, 0.0), "multiplier at least 0 (now 0)"),
        (Change("ngram_overlap", "at most", 4, 1), "ngram overlap at most 1 (now 4)"),
        (Change("max_facts", "at least", 10, 13), "max facts at least 13 (now 10)"),
        (Change("covered", "", True, "DNS"), "“DNS” not covered"),
        (Change("packed", "", True, False), "the fact not packed before"),
        (Change("guard", "", True, False), "no n-gram guard"),
    ],
)
def test_changes_in_words_round_to_the_side_that_does(change, text):
    assert change.text == text
    if isinstance(change.needed, float) and change.needed:
        shown = float(text.split()[3])
        assert shown >= change.needed
        assert math.isclose(shown, change.needed, rel_tol=1e-3)
