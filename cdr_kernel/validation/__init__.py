"""Checks of what callers hand in: arrays and scalars."""

from __future__ import annotations
