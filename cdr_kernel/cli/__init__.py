"""The command `cdr`."""

from __future__ import annotations
