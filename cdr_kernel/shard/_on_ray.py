"""Shards in Ray actors, on one machine or many.

    ray.init()
    store = open_on_ray("facts.shards", replicas=2)          # a partition that every node can read
    cdr_rank(query, ShardedRetriever(store), session)

Every actor opens its own shard by path and maps it; nothing large travels to start one. Ray restarts actors whose
process or node died, elsewhere if need be; they come back with what is in the folder and are told what they missed.
Needs the extra: pip install ".[ray]" in a checkout.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cdr_kernel.concurrency._forks import Lock
from cdr_kernel.shard._messages import Limits, Replica
from cdr_kernel.shard._partition import Home, ShardDamaged, home_of, manifest_of, open_shard
from cdr_kernel.shard._sharded_store import ShardedStore, ShardsMissing, devices_of
from cdr_kernel.shard._worker import Reply, Request, Shard
from cdr_kernel.text._ngram_guard import HashKey, Tokenizer
from cdr_kernel.validation._warn import warn

if TYPE_CHECKING:
    from types import ModuleType

_THREADS = 4
_UNLIMITED = -1
_MOST_WAIT = 10.0  # seconds at opening, for actors that may not get what they reserve


def ray_module() -> ModuleType:
    """Ray, or an ImportError that says how to get it."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError('shards on Ray need the extra: pip install ".[ray]" in a checkout') from error


class ShardActor:
    """What runs in the actor: one shard. tokenizer, hash_key: as in ``FactStore.load``; verify: as in `open_shard`;
    device, device_dtype: as in `Shard`."""

    def __init__(
        self,
        home: Home,
        name: str,
        tokenizer: Tokenizer | None,
        hash_key: HashKey | None,
        verify: bool = True,
        device: str | None = None,
        device_dtype: str | None = None,
    ) -> None:
        self._ranks: dict[str, Any] = {"device": device, "device_dtype": device_dtype}
        self._where = home, name
        self._how: dict[str, Any] = {"tokenizer": tokenizer, "hash_key": hash_key, "verify": verify}
        self._lock = Lock()
        self._shard: Shard | None = None
        with contextlib.suppress(ShardDamaged):  # whoever asks is told
            self._shard = self._open()

    def _open(self) -> Shard:
        return Shard(*open_shard(*self._where, **self._how), **self._ranks)

    def answer(self, request: Request) -> Reply:
        """See `Shard.answer`. Raises ShardDamaged as long as what is on the disk is damaged."""
        with self._lock:
            if self._shard is None:
                self._shard = self._open()
        return self._shard.answer(request)

    def place(self) -> tuple[str, int]:
        """The node and the process it runs in."""
        return ray_module().get_runtime_context().get_node_id(), os.getpid()


class RayReplica:
    """An actor as a replica. make: starts one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        errors = ray_module().exceptions
        self._make = make
        self._lock = Lock()
        self.actor = make()
        self._lost = (errors.RayActorError, errors.RaySystemError, errors.ObjectLostError)
        self._died = errors.ActorDiedError

    def submit(self, request: Request) -> Future[Reply]:
        """Ask the actor."""
        future: Future[Reply] = self.actor.answer.remote(request).future()
        return future

    def lost(self, error: BaseException) -> bool:
        """Whether the actor died, is being restarted, or its answer was lost with a node."""
        if isinstance(error, self._died):  # for good: somebody ended it, or it could not be started
            with self._lock:
                if error.actor_id in (None, self.actor._actor_id.hex()):
                    self.actor = self._make()
        return isinstance(error, self._lost)

    def restart(self) -> None:
        """End the actor's process; Ray starts another."""
        ray_module().kill(self.actor, no_restart=False)

    def close(self) -> None:
        """End the actor."""
        ray_module().kill(self.actor)


def open_on_ray(
    home: str | os.PathLike[str] | Home,
    *,
    replicas: int = 1,
    tokenizer: Tokenizer | None = None,
    hash_key: HashKey | None = None,
    verify: bool = True,
    timeout: float = 10.0,
    hedge_after: float | None = None,
    max_in_flight: int = 8,
    num_cpus: float = 0.0,
    num_gpus: float = 0.0,
    device: str | Mapping[str, str] | None = None,
    device_dtype: str | None = None,
    threads: int = _THREADS,
    options: dict[str, Any] | None = None,
) -> ShardedStore:
    """Open a partition with each shard in Ray actors, spread over the nodes of the cluster that Ray is connected to.

    If less is free than the actors reserve, the call waits for them, at most 10 s and `timeout`. A RuntimeWarning then
    says how many have not started, what they reserve and what the cluster has. Rankings without them are incomplete.

    Args:
        home: A path that every node can read (and write, for `save`), or a `LanceHome`.
        replicas: Actors for each shard.
        tokenizer: The tokenizer that the facts were added with.
        hash_key: The hash key that the facts were added with.
        verify: Whether an actor reads its shard first and compares it with its checksums.
        timeout: Seconds that a request may take.
        hedge_after: Seconds after which another replica is asked too. None never does.
        max_in_flight: The most requests that a replica works on at a time.
        num_cpus: CPUs that an actor reserves. A reservation limits no processor use. It only keeps an actor from
            starting if shards x replicas x num_cpus are not free.
        num_gpus: GPUs that an actor reserves. Shards without a device reserve none.
        device: As in `ShardedStore.open`. "cuda" is the GPU that Ray gives the actor.
        device_dtype: As in `ShardedStore.open`.
        threads: Requests that an actor works on at a time, at least 1.
        options: Further options for ``actor.options``.

    Raises:
        ImportError: Without Ray.
        RuntimeError: Before ``ray.init``.
        Exception: What `ShardedStore.open` raises.
    """
    ray = ray_module()
    if not ray.is_initialized():
        raise RuntimeError("Ray is not connected: call ray.init() first")
    for name, count in (("replicas", replicas), ("threads", threads)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}: expected an integer of at least 1, got {count!r}")
    limits = Limits(timeout, hedge_after, max_in_flight)
    place = home_of(home)
    manifest = manifest_of(place)
    settings: dict[str, Any] = {
        "num_cpus": num_cpus,
        "max_concurrency": threads,
        "max_restarts": _UNLIMITED,
        "max_task_retries": 0,  # requests are asked again by `shard._messages`, of whichever replica is there
        "scheduling_strategy": "SPREAD",
        **(options or {}),
    }
    device_of = devices_of(device, manifest["shards"])

    def start(name: str) -> Sequence[Replica]:
        own = device_of(name)
        gpus = 0.0 if own is None and device is not None else num_gpus
        actor = ray.remote(ShardActor).options(**{"num_gpus": gpus, **settings})
        what = place, name, tokenizer, hash_key, verify, own, device_dtype
        made = [RayReplica(lambda: actor.remote(*what)) for _ in range(replicas)]
        started.extend((each.actor, reserved(gpus)) for each in made)
        return made

    def reserved(gpus: float) -> dict[str, float]:
        amounts = {
            "CPU": settings["num_cpus"],
            "GPU": settings.get("num_gpus", gpus),
            **(settings.get("resources") or {}),
        }
        return {name: amount for name, amount in amounts.items() if amount}

    started: list[tuple[Any, dict[str, float]]] = []
    free = ray.available_resources()
    store = ShardedStore.of_manifest(place, manifest, start, tokenizer=tokenizer, hash_key=hash_key, limits=limits)
    _warn_of_waiting(started, free, min(timeout, _MOST_WAIT))
    with contextlib.suppress(ShardsMissing):  # whoever ranks is told
        store.expire()
    return store


def _warn_of_waiting(started: Sequence[tuple[Any, dict[str, float]]], free: Mapping[str, float], most: float) -> None:
    """Warn of actors that have not started after so many seconds, where less was free than all of them reserve."""
    ray = ray_module()
    wanted = _total(each for _, each in started)
    if all(amount <= free.get(name, 0.0) for name, amount in wanted.items()):
        return
    asked = {actor.place.remote(): each for actor, each in started}
    _, late = ray.wait(list(asked), num_returns=len(asked), timeout=most)
    if late:
        has, left = ray.cluster_resources(), ray.available_resources()
        of_cluster = ", ".join(f"{has.get(name, 0.0):g} {name} ({left.get(name, 0.0):g} free)" for name in wanted)
        lacking = ", ".join(f"{amount:g} {name}" for name, amount in _total(asked[ref] for ref in late).items())
        warn(
            f"{len(late)} of {len(asked)} actors have not started after {most:g} s: they reserve {lacking}, the "
            f"cluster has {of_cluster}. Until they start, rankings are slow and may be incomplete: reserve less "
            "(num_cpus=, num_gpus=, options=), have fewer replicas, or add nodes",
            RuntimeWarning,
        )


def _total(amounts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums by name."""
    out: dict[str, float] = {}
    for each in amounts:
        for name, amount in each.items():
            out[name] = out.get(name, 0.0) + amount
    return out
