"""Connections of the process: uvicorn's own, which tell the application how its client reads, and can be cut off."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cdr_kernel.serve.writer import CONNECTION

BUFFER = 1 << 14
"""Bytes that may wait in this process for a client to read; more, and nothing is written until all are taken."""


class Connection(HttpToolsProtocol):
    """A connection, which an application finds in `scope["extensions"]`."""

    gone = False
    """Whether the client went away."""
    cut = False
    """Whether something had not been taken then."""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=BUFFER, low=0)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.gone, self.cut = True, self.flow is not None and self.flow.write_paused
        super().connection_lost(error)

    def on_message_begin(self) -> None:
        """See `httptools.HttpRequestParser`."""
        super().on_message_begin()
        extensions: dict[str, Any] = {CONNECTION: self}
        self.scope["extensions"] = extensions
