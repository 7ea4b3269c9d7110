"""Damage and I/O errors of stores: what they are on the wire, in the log, in /readyz and in /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.serve import _logs

DAMAGED = "damaged"
NO_SPACE = "no_space"
IO_ERROR = "io_error"
KINDS = (DAMAGED, NO_SPACE, IO_ERROR)
CHECK_S = 5.0
"""Seconds between two checks of a store that was found damaged."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # how Lance names the system's error


@dataclass(frozen=True)
class StorageFault:
    """Why a store could not be read or written. It is no fault of the request.

    Attributes:
        kind: one of `KINDS`.
        file: the file, "" where the error does not name one.
        cause: the system's name of the error, such as "EIO"; "" for damage, and where there is none.
        message: all that the error says.
    """

    kind: str
    file: str
    cause: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> StorageFault | None:
        """What an error says of a store; None for an error of another kind."""
        message = " ".join(str(error).split())[:1000]
        if isinstance(error, DamagedFileError):
            return cls(DAMAGED, "" if error.file is None else str(error.file), "", message)
        if isinstance(error, UnicodeDecodeError | json.JSONDecodeError):  # of what is stored: bodies are read elsewhere
            return cls(DAMAGED, "", "", message)
        foreign = type(error).__module__.split(".")[0] in ("lance", "pyarrow", "safetensors", "safetensors_rust")
        system = isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError)
        if not foreign and not system:
            return None
        number = getattr(error, "errno", None)
        if number is None:
            named = _SYSTEM_ERROR.search(message)
            number = None if named is None else int(named[1])
        file = getattr(error, "filename", None)
        cause = "" if number is None else errno.errorcode.get(number, str(number))
        return cls(NO_SPACE if number in _FULL else IO_ERROR, "" if file is None else str(file), cause, message)


class Faults:
    """The faults of a service's stores: counted and logged, and which tenants' stores are damaged.

    count: called with the kind of each fault.
    """

    def __init__(self, seldom: _logs.Seldom, count: Callable[[str], object]) -> None:
        self.damaged: dict[str, str] = {}
        """By tenant, what was damaged."""
        self._seldom = seldom
        self._count = count
        self._checks: set[asyncio.Task[None]] = set()

    def note(
        self,
        fault: StorageFault,
        check: Callable[[], Awaitable[object]],
        *,
        tenant: str,
        operation: str,
        request_id: str,
    ) -> None:
        """Count and log a fault. After damage, call `check` until it passes: then the store counts as sound."""
        self._count(fault.kind)
        self._seldom.event(
            "fault",
            f"{fault.kind} {fault.cause}: {fault.file or fault.message}",
            logging.ERROR,
            kind=fault.kind,
            file=fault.file,
            error=fault.cause,
            message=fault.message,
            tenant=tenant,
            operation=operation,
            request_id=request_id,
        )
        if fault.kind == DAMAGED and tenant not in self.damaged:
            self.damaged[tenant] = fault.message
            task = asyncio.get_running_loop().create_task(self._check(tenant, check))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    async def _check(self, tenant: str, check: Callable[[], Awaitable[object]]) -> None:
        while tenant in self.damaged:
            await asyncio.sleep(CHECK_S)
            with contextlib.suppress(Exception):  # still damaged; a request that meets it logs it again
                await check()
                del self.damaged[tenant]
                _logs.event("sound", tenant=tenant)

    def close(self) -> None:
        """Check no more."""
        for task in self._checks:
            task.cancel()
