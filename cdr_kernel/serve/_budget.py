"""Bytes that the requests of a tenant hold at once: bodies that came and answers that wait for their readers."""

from __future__ import annotations

from dataclasses import dataclass, field

from cdr_kernel.serve._errors import Refusal, invalid, overloaded


class Budget:
    """At most so many bytes at once. what: names them in refusals, with the option that sets the limit."""

    def __init__(self, most: int, what: str) -> None:
        self.used = 0
        self._most = most
        self._what = what

    def check(self) -> None:
        """Raises `Refusal` 429 where nothing is left."""
        if self.used >= self._most:
            raise self._full()

    def take(self, size: int) -> None:
        """Count these bytes. Raises `Refusal` 413 for more than there are at all, 429 for more than are left."""
        if size > self._most:
            raise invalid("body", f"at most {self._most} bytes ({self._what})", str(size), status=413, code="too_large")
        if self.used + size > self._most:
            raise self._full()
        self.used += size

    def _full(self) -> Refusal:
        return overloaded(f"{self._what}: {self.used} of at most {self._most} bytes are taken, try again")


@dataclass(eq=False)
class Held:
    """What one request holds of its tenant's budgets, until `release`."""

    requests: Budget
    answers: Budget
    request_bytes: int = field(default=0, init=False)
    answer_bytes: int = field(default=0, init=False)

    def take_request(self, size: int) -> None:
        """Count bytes of the request's body; raises as `Budget.take` does."""
        self.requests.take(size)
        self.request_bytes += size

    def take_answer(self, size: int, *, applied: bool = False) -> None:
        """Count the bytes of the answer, once; raises as `Budget.take` does.

        applied: the request has changed something already, so that it is answered whatever that takes.
        """
        if self.answer_bytes:
            return
        if applied:
            self.answers.used += size
        else:
            self.answers.take(size)
        self.answer_bytes = size

    def release(self) -> None:
        """Hold nothing any more."""
        self.requests.used -= self.request_bytes
        self.answers.used -= self.answer_bytes
        self.request_bytes = self.answer_bytes = 0
