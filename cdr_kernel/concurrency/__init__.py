"""Locks that survive a fork, and long work in steps."""

from __future__ import annotations
