"""What a command works on, from its options: the store, a filter, the vectors, the model that makes them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

import cdr_kernel
from cdr_kernel.cli._terminal import Progress
from cdr_kernel.exceptions import FileError
from cdr_kernel.files._files import Task, names_array, read_one_or_more, read_task_vectors, read_vector
from cdr_kernel.store._format import KIND

_MISTYPED = re.compile(r"\S+\.np[a-z]?:?\S*")  # a query that is meant to be a file


def opened_store(path: Path) -> cdr_kernel.FactStore:
    """The facts in a folder, durable or not."""
    if (path / "facts.lance").is_dir():
        from cdr_kernel.durable import DurableStore

        return DurableStore.open(path, progress=Progress).facts
    try:
        return cdr_kernel.FactStore.load(path)
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # a damaged store: the parsers of JSON and of NumPy's headers raise many more kinds
        what = f"{type(error).__name__}: {error}"
        raise FileError(f"{path}: expected a store, found one that cannot be read ({what})") from error


def check_one_save(store: cdr_kernel.FactStore, *files: Path) -> None:
    """Raises ValueError where files of the store's folder may belong to another save than the store that was opened."""
    folder = store.path
    if folder is not None and any(file.parent.resolve() == folder.resolve() for file in files):
        KIND.check_same(folder, store.about["data"])


def where_filter(
    pairs: Sequence[str] | None, missing: Sequence[str] | None, view: cdr_kernel.StoreView
) -> dict[str, list[Any]] | None:
    """NAME=VALUE pairs as a filter, values as what the attribute holds, and names that may lack a value."""
    types = {"source": str, **view.attribute_types}
    wanted: dict[str, list[Any]] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or name not in types:
            what = f"expected NAME=VALUE with NAME one of {', '.join(sorted(types))}, got {pair!r}"
            raise typer.BadParameter(what, param_hint="--where")
        kind = types[name]
        try:
            typed = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError):
            raise typer.BadParameter(f"expected {kind.__name__}, got {pair!r}", param_hint="--where") from None
        wanted.setdefault(name, []).append(typed)
    for name in missing or ():
        if name not in types:
            what = f"expected one of {', '.join(sorted(types))}, got {name!r}"
            raise typer.BadParameter(what, param_hint="--where-missing")
        wanted.setdefault(name, []).append(None)
    return wanted or None


def check_source(embeddings: str | None, embed: str | None, model: str | None) -> None:
    """Raises BadParameter unless the options say where vectors come from, and of which model."""
    if (embeddings is None) == (embed is None):
        raise typer.BadParameter("expected either --embeddings E.npy with --model, or --embed MODEL")
    if model is not None and not model.strip():
        raise typer.BadParameter("expected a name, got a blank one", param_hint="--model")
    if embeddings is not None and model is None:
        raise typer.BadParameter("expected --model with --embeddings: the name of the model that made them")
    if embed is not None and model not in (None, embed):
        raise typer.BadParameter("--embed names the model: leave out --model")


def make_source(embeddings: str | None, embed: str | None, model: str | None) -> str | Callable[[list[str]], Any]:
    """Where the vectors of a file of facts come from: a file, or a model."""
    check_source(embeddings, embed, model)
    source = embeddings if embed is None else embedder(embed)
    assert source is not None
    return source


def embedder(model: str, store: cdr_kernel.FactStore | None = None) -> Callable[[list[str]], Any]:
    """The model of this name, which must be the store's where one is given."""
    from cdr_kernel.files._embedders import load_embedder

    if store is not None:
        check_model(model, store, "--embed")
    return load_embedder(model)


def check_model(named: str | None, store: cdr_kernel.FactStore, option: str) -> None:
    """Raises EmbeddingModelMismatch where an option names another model than the store's."""
    own = store.embedding_model
    if named is not None and named != own:
        advice = f"the store is of {own!r}: name that model, or take a store of {named!r}"
        raise cdr_kernel.EmbeddingModelMismatch(option, own, named, advice)


def own_embedder(store: cdr_kernel.FactStore, otherwise: str) -> Callable[[list[str]], Any]:
    """The store's model, where it is one that can be had here."""
    from cdr_kernel.files._embedders import CARRIED

    if store.embedding_model not in CARRIED:
        raise typer.BadParameter(otherwise)
    return embedder(store.embedding_model)


def query_vector(query: str, store: cdr_kernel.FactStore, embed: str | None) -> Any:
    """The query [D]: an array in a file, or a text and a model."""
    if _is_array(query, "--query", embed):
        vector = read_vector(query, store.dim)
        check_one_save(store, Path(query))
        return vector
    return _embedded(query, "--query", store, embed)


def query_vectors(queries: str, store: cdr_kernel.FactStore, embed: str | None) -> Any:
    """The queries [Q, D]: an array in a file, where [D] is one query, or a text, which is one too, and a model."""
    if _is_array(queries, "--queries", embed):
        vectors = read_one_or_more(queries, store.dim)
        check_one_save(store, Path(queries))
        return vectors
    return _embedded(queries, "--queries", store, embed)[None]


def _is_array(query: str, option: str, embed: str | None) -> bool:
    found = names_array(query) or os.path.isfile(query)
    if found and embed is not None:
        raise typer.BadParameter(f"--embed is for a text, but {option} {query!r} names an array")
    return found


def _embedded(query: str, option: str, store: cdr_kernel.FactStore, embed: str | None) -> Any:
    if not query.strip():
        raise typer.BadParameter("expected Q.npy, FILE.npz:KEY or a text", param_hint=option)
    if _MISTYPED.fullmatch(query):
        raise FileError(f"{query}: no such file, expected Q.npy, FILE.npz:KEY or a text")
    if embed is not None:
        return embedder(embed, store)([query])[0]
    what = f"{option} {query!r} is no file, so it is a text: expected --embed MODEL, Q.npy or FILE.npz:KEY"
    return own_embedder(store, what)([query])[0]


def task_vectors(
    path: Path | None, task: Task, store: cdr_kernel.FactStore, encode: Callable[[list[str]], Any] | None
) -> tuple[Any, Any]:
    """The query [D] and the sub-queries [S, D] of a task."""
    if path is not None:
        return read_task_vectors(path, task, store.dim)
    encode = encode or own_embedder(store, "expected --vectors Q.npz, or --embed MODEL")
    query, *subs = encode([task.query, *(item.text for item in task.items)])
    return query, subs
