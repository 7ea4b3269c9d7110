"""The window loop, its headers, the judge of outputs and writers."""

from __future__ import annotations

from cdr_kernel.loop._assess import assess
from cdr_kernel.loop._headers import band, crp_headers, guarantee_holds
from cdr_kernel.loop._run_windows import Window, WindowPrompt, assemble, run_windows
from cdr_kernel.loop._writers import CommandWriter, ExtractWriter

__all__ = [
    "CommandWriter",
    "ExtractWriter",
    "Window",
    "WindowPrompt",
    "assemble",
    "assess",
    "band",
    "crp_headers",
    "guarantee_holds",
    "run_windows",
]
