"""The HTTP service on Ray Serve: replicas that come and go with the load.

    ray.init()
    serve.run(deployment(Settings(store="facts", redis="redis://...", token_key=key), max_replicas=4))

Every replica opens the store for itself. Sessions are in memory unless the settings name a Redis, and what is added to
a folder lasts as long as the replica: more than one replica takes a Redis and a token key, and facts that change
elsewhere. Needs the extras: pip install ".[ray-serve,serve]" in a checkout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdr_kernel.serve import Settings, create_app
from cdr_kernel.shard._on_ray import ray_module

if TYPE_CHECKING:
    from starlette.applications import Starlette


def deployment(
    settings: Settings,
    *,
    min_replicas: int = 1,
    max_replicas: int = 1,
    target_requests: float = 8.0,
    num_cpus: float = 1.0,
    name: str = "cdr",
) -> Any:
    """A Ray Serve application for ``serve.run``, of the service with these settings.

    min_replicas, max_replicas: 1 <= min <= max. target_requests: requests at a time and replica that Ray aims at: above
    it replicas are added, below it taken away. num_cpus: what a replica reserves. Host and port are Ray Serve's own
    (``serve.start``), not the settings'.

    Raises ImportError without Ray Serve, ValueError for numbers out of range, and for more than one replica without
    ``settings.redis`` and ``settings.token_key``: replicas would not know each other's sessions.
    """
    if isinstance(min_replicas, bool) or not 1 <= min_replicas <= max_replicas:
        raise ValueError(f"min_replicas: expected 1 to max_replicas, got {min_replicas!r} and {max_replicas!r}")
    if not target_requests > 0.0:
        raise ValueError(f"target_requests: expected a number above 0, got {target_requests!r}")
    if max_replicas > 1 and (settings.redis is None or settings.token_key is None):
        raise ValueError("max_replicas: more than one replica needs settings with redis and token_key")
    ray_module()
    try:
        from ray import serve
    except ImportError as error:
        raise ImportError('Ray Serve needs the extras: pip install ".[ray-serve,serve]" in a checkout') from error

    def build() -> Starlette:
        return create_app(settings)

    @serve.ingress(build)
    class Service:
        """The service, in one replica."""

    made: Any = serve.deployment(
        Service,
        name=name,
        ray_actor_options={"num_cpus": num_cpus},
        max_ongoing_requests=settings.max_queue,
        graceful_shutdown_timeout_s=settings.stop_s,
        autoscaling_config={
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "target_ongoing_requests": target_requests,
        },
    )
    return made.bind()
