"""Texts to vectors for many requests by one thread: in batches, by turns, and only while somebody waits for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import numpy as np

from cdr_kernel.serve._keys import DEFAULT_TENANT
from cdr_kernel.serve._turns import Turns

Embed: TypeAlias = Callable[[list[str]], Any]

BATCH = 32
"""Texts that are embedded in one turn: as many as a sentence-transformers model takes at once by itself."""


class Embedding(Turns):
    """The thread that embeds. A request's batches take turns with those of other tenants and other requests."""

    def __init__(self) -> None:
        super().__init__("cdr-embed", turn_s=0.0)

    async def rows(
        self,
        embed: Embed,
        texts: Sequence[str],
        deadline: float,
        *,
        tenant: str = DEFAULT_TENANT,
        label: str = "embed",
    ) -> np.ndarray[Any, Any]:
        """Vectors [n, D] of n >= 1 texts, in their order; equal texts are embedded once.

        deadline, tenant, label: as in `Turns.run`, which says what is raised, beside what `embed` raises. A batch that
        has begun is finished, whoever waits for it, and no other one is begun.
        """
        return await self.run(tenant, label, _rows_steps(embed, texts), deadline)


def _rows_steps(embed: Embed, texts: Sequence[str]) -> Generator[None, None, np.ndarray[Any, Any]]:
    """The vectors of texts; each step embeds a batch."""
    # The longest first, as such models go about it themselves: a batch takes as long as its longest text.
    different = sorted(dict.fromkeys(texts), key=len, reverse=True)
    batches = []
    for start in range(0, len(different), BATCH):
        batches.append(np.asarray(embed(different[start : start + BATCH])))
        yield
    row_of = {text: row for row, text in enumerate(different)}
    return np.concatenate(batches)[[row_of[text] for text in texts]]
