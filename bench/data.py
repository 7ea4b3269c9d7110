"""Millions of realistic unit vectors, grown from a few thousand real ones.

A base vector is moved inside its own cluster: part of its offset from the cluster's mean is kept and the rest replaced
by a draw from the cluster's covariance, so that means and covariances, and with them the distribution of cosines to a
query, stay as they were while no two rows are alike. Growing from a few hundred base vectors makes a scan look two to
three times better than it is: use thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

CHUNK = 65536


def unit(rows: npt.NDArray[np.floating]) -> Float32:
    """Rows of length 1, float32."""
    rows = np.asarray(rows, np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


@dataclass(frozen=True)
class Clusters:
    """Spherical k-means over base vectors [n, D].

    label: [n]; mean: [c, D]; per cluster the leading principal directions [c, rank, D] and their deviations [c, rank].
    """

    base: Float32
    label: npt.NDArray[np.int64]
    mean: Float32
    directions: Float32
    deviations: Float32

    @classmethod
    def of(cls, base: Float32, count: int = 128, rank: int = 96, seed: int = 0, rounds: int = 12) -> Clusters:
        """Fit to unit rows."""
        r = np.random.default_rng(seed)
        count, dim = min(count, len(base)), base.shape[1]
        centres = base[r.choice(len(base), count, replace=False)]
        for _ in range(rounds):
            label = (base @ centres.T).argmax(1)
            sums = np.zeros((count, dim), np.float32)
            np.add.at(sums, label, base)
            empty = np.bincount(label, minlength=count) == 0
            sums[empty] = base[r.integers(0, len(base), int(empty.sum()))]
            centres = unit(sums)
        label = (base @ centres.T).argmax(1)
        mean = np.zeros((count, dim), np.float32)
        directions = np.zeros((count, rank, dim), np.float32)
        deviations = np.zeros((count, rank), np.float32)
        for c in range(count):
            members = base[label == c]
            if len(members) == 0:
                continue
            mean[c] = members.mean(0)
            if len(members) > 1:
                _, s, vt = np.linalg.svd(members - mean[c], full_matrices=False)
                kept = min(rank, int(np.count_nonzero(s > 1e-6)))
                directions[c, :kept] = vt[:kept]
                deviations[c, :kept] = s[:kept] / np.sqrt(len(members) - 1)
        return cls(base, label, mean, directions, deviations)


def grow(clusters: Clusters, n: int, *, spread: float = 0.8, seed: int = 1) -> Iterator[Float32]:
    """n unit rows in chunks of at most CHUNK, float32. spread in [0, 1]: how much of an offset is drawn anew."""
    for rows, _ in grow_with_base(clusters, n, spread=spread, seed=seed):
        yield rows


def grow_with_base(
    clusters: Clusters, n: int, *, spread: float = 0.8, seed: int = 1
) -> Iterator[tuple[Float32, npt.NDArray[np.int64]]]:
    """``grow``, each chunk with the number of the base vector that every row was grown from."""
    r = np.random.default_rng(seed)
    kept = 1.0 - np.sqrt(1.0 - spread * spread)
    offset = clusters.base - clusters.mean[clusters.label]
    inside = np.empty((len(clusters.base), clusters.directions.shape[1]), np.float32)
    for c in range(len(clusters.mean)):
        members = clusters.label == c
        inside[members] = offset[members] @ clusters.directions[c].T
    for start in range(0, n, CHUNK):
        size = min(CHUNK, n - start)
        chosen = r.integers(0, len(clusters.base), size)
        chosen = chosen[np.argsort(clusters.label[chosen], kind="stable")]
        rows = clusters.base[chosen].copy()
        edges = np.flatnonzero(np.diff(clusters.label[chosen])) + 1
        for part in np.split(np.arange(size), edges):
            c = clusters.label[chosen[part[0]]]
            draw = r.standard_normal((len(part), inside.shape[1]), dtype=np.float32) * clusters.deviations[c] * spread
            rows[part] += (draw - np.float32(kept) * inside[chosen[part]]) @ clusters.directions[c]
        order = r.permutation(size)
        yield unit(rows)[order], chosen[order]


def sentences(numbers: Iterable[int], words: int) -> list[str]:
    """A text of so many words for each number, no two alike; empty ones for 0 words."""
    if not words:
        return [""] * len(list(numbers))
    r = np.random.default_rng(9)
    beginnings = [" ".join(f"w{w}" for w in r.integers(0, 20_000, words - 1)) for _ in range(4096)]
    return [f"{beginnings[i % 4096]} {i}" for i in numbers]


def demo_base() -> Float32:
    """The demo's 478 embeddings: small, so what is grown from them is marked demo-sized."""
    import cdr_kernel.demo

    folder = Path(cdr_kernel.demo.__file__).parent
    return unit(np.load(folder / "facts_minilm_f16.npy", allow_pickle=False))


def load_base(path: str | None, dim: int) -> tuple[Float32, str]:
    """(base vectors [n, dim], where they come from). dim below that of the file takes its first dimensions."""
    base = demo_base() if path is None else unit(np.load(path, allow_pickle=False))
    if base.ndim != 2 or base.shape[1] < dim:
        raise SystemExit(f"--base: expected [n, D] with D of at least {dim}, got {list(base.shape)}")
    return unit(base[:, :dim]), "demo-sized" if path is None else Path(path).name


def load_queries(path: str | None, base: Float32) -> list[tuple[Float32, Float32]]:
    """Pairs (query [D], residual [R, D]) of an .npz: "i:query" with "i:subs", then "i:query_long" with the same.

    Without a file those of the demo, whose sub-queries serve as further queries.
    """
    import cdr_kernel.demo

    dim = base.shape[1]
    folder = Path(cdr_kernel.demo.__file__).parent
    with np.load(path or folder / "queries_minilm_f16.npz", allow_pickle=False) as file:
        arrays = {name: np.asarray(file[name], np.float32) for name in file.files}
    count = sum(name.endswith(":query") for name in arrays)
    pairs = [
        (unit(arrays[f"{i}:{kind}"][None, :dim])[0], unit(arrays[f"{i}:subs"][:, :dim]))
        for kind in ("query", "query_long")
        for i in range(count)
        if f"{i}:{kind}" in arrays
    ]
    if path is None:
        subs = pairs[0][1]
        pairs += [(sub, subs) for sub in subs]
    return pairs
