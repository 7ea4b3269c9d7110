"""The quality experiment: does retrieval hold its quality over windows?"""

from __future__ import annotations
