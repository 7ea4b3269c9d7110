"""Answers on their way to clients: in pieces, no faster than they are read, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

PIECE = 1 << 16
"""Bytes that are handed on at a time."""
LEAST_RATE = 1 << 17
"""Bytes a second that a client must read of an answer, beside `Settings.send_timeout_s`."""
CONNECTION = "cdr.connection"
"""The extension of an ASGI scope that has a `connections.Connection`."""


class Writer:
    """Writes one answer. taken: whether the client, or the system on its behalf, has taken all of it."""

    def __init__(self, send: Send, scope: MutableMapping[str, Any], send_timeout_s: float) -> None:
        self._send = send
        self._send_timeout_s = send_timeout_s
        self._connection: Any = scope.get("extensions", {}).get(CONNECTION)
        self._ended = False
        self.taken = False

    async def send(self, message: Message) -> None:
        """What an ASGI application calls `send`. Cuts the connection where the client does not read in time: nothing
        more is written then."""
        if self._ended:
            return
        body, loop = message.get("body", b""), asyncio.get_running_loop()
        end = loop.time() + self._send_timeout_s + len(body) / LEAST_RATE
        limit = asyncio.timeout_at(end)
        try:
            async with limit:
                for start in range(0, max(1, len(body)), PIECE):
                    limit.reschedule(min(end, loop.time() + self._send_timeout_s))
                    piece = {**message, "body": body[start : start + PIECE], "more_body": True}
                    await self._pass(message if len(body) <= PIECE else piece)
                if len(body) > PIECE:
                    await self._pass({**message, "body": b""})  # it waits for the pieces to be taken
        except TimeoutError:
            if not limit.expired():
                raise
            self._ended = True
            if self._connection is not None:
                self._connection.transport.abort()
                await asyncio.sleep(0)  # for uvicorn to see that the client is gone
            return
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.taken = not self._ended and (self._connection is None or not self._connection.cut)
            self._ended = True

    async def _pass(self, message: Message) -> None:
        connection = self._connection
        if connection is not None and (connection.gone or connection.transport.is_closing()):
            self._ended = True  # what is written now goes nowhere
        else:
            await self._send(message)
