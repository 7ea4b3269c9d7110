"""`cdr serve`: facts, sessions and ranking over HTTP, for a gateway that is not written in Python or has replicas.

    schema     what goes over the wire: one set of structs for JSON and msgpack
    door       who may come in: request ids, keys, bounded queues, draining
    app        the operations under /v1, each a function from a call to an answer
    turns      threads that work for many tenants, which take turns
    decoding   large bodies, in steps
    budget     how many bytes the requests and the answers of a tenant may hold
    writer     answers on their way, no faster than they are read and not for ever
    batching   concurrent ranks into one `rank_many`
    embedding  texts to vectors, in batches that take turns
    sessions   sessions in memory, and shared through Redis
    run        the process: loading, serving, draining

Everything is made by `create_app`; nothing lives at module level. Needs the `serve` extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdr_kernel.serve._settings import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["Settings", "create_app", "serve"]

NEEDS = 'serving needs the serve extra: pip install ".[serve]" in a checkout'


def create_app(settings: Settings, **parts: Any) -> Starlette:
    """The ASGI application over the store of these settings; see `app.build`.

    Raises ImportError with the pip line where the `serve` extra is missing, ValueError for settings that do not go
    together. The store is opened when the application starts.
    """
    try:
        from cdr_kernel.serve._app import build
    except ImportError as error:
        raise ImportError(f"{NEEDS} ({error})") from error
    return build(settings, **parts)


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, then finish what was accepted; the exit status, 0 where nothing was lost."""
    try:
        from cdr_kernel.serve._process import run
    except ImportError as error:
        raise ImportError(f"{NEEDS} ({error})") from error
    return run(settings)
