"""Locks that do not stay taken in a forked child.

`fork` copies one thread. A lock that another thread holds at that moment is copied as taken, and nobody in the child
will ever release it. Every lock of this package that a child may meet is a `Lock`: it is free in the child, unless the
thread that forked holds it.

A free lock is not enough where another thread was in the middle of a change. Most of this package replaces its state
as a whole, so the child has the state before or after. What is changed in place gives its lock a `mend`.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar, overload

T = TypeVar("T")


class Lock:
    """A lock for `with` that is free in a forked child. The thread that has it may take it again.

    mend: a bound method, held weakly. It is called in a child that was forked while another thread had the lock, and
        puts right what that thread may have left half changed.
    """

    def __init__(self, mend: Callable[[], object] | None = None) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0
        self._mend = None if mend is None else weakref.WeakMethod(mend)
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()

    def _in_child(self) -> None:
        ours = self._depth if self._owner == threading.get_ident() else 0
        torn = self._depth > ours
        self._lock = threading.RLock()
        for _ in range(ours):
            self._lock.acquire()
        self._owner, self._depth = threading.get_ident() if ours else 0, ours
        mend = None if self._mend is None else self._mend()
        if torn and mend is not None:
            mend()


class Threads:
    """A pool of threads that has new ones in a forked child, where those of the parent are not.

    most: threads. name: what their names begin with.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._pool = ThreadPoolExecutor(most, name)
        in_child(self._again)

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread make the call."""
        return self._pool.submit(call, *arguments)

    def shutdown(self, *, wait: bool = True) -> None:
        """End the threads after what they have begun. wait: whether to return only then."""
        self._pool.shutdown(wait=wait)

    def _again(self) -> None:
        self._pool = ThreadPoolExecutor(self._most, self._name)


class cached_property(functools.cached_property[T]):
    """`functools.cached_property` without the lock that Python 3.11 holds while the value is made.

    That lock is one for all objects of a class, and stays taken in a forked child. Two threads may make a value each.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        assert self.attrname is not None, "__set_name__ says it"
        values = instance.__dict__
        if self.attrname not in values:
            values[self.attrname] = self.func(instance)
        return values[self.attrname]


def in_child(call: Callable[[], object]) -> None:
    """Have a bound method called in every forked child, as long as its object lives. All locks are free by then."""
    _calls.append(weakref.WeakMethod(call, _calls.remove))


def _in_child() -> None:
    for lock in list(_locks):
        lock._in_child()
    for call in [found for reference in list(_calls) if (found := reference()) is not None]:
        call()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_calls: list[weakref.WeakMethod[Any]] = []
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)
