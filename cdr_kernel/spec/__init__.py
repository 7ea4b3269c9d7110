"""The specification: its constants and its formulas in plain Python. Imports nothing of the package."""

from __future__ import annotations
