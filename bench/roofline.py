"""Bytes, operations and the least time of one fused pass, per shape and GPU. All of it predicted, none of it measured.

    python -m bench roofline [--json]

Each row is read once and each score written once; each column of each session is one product of D terms. The larger of
bytes over bandwidth and operations over rate is the floor. ``padded`` is the time of the columns padded to the tiles
that the kernel multiplies, and ``l2`` what the tiles' traffic between the L2 cache and the multiprocessors takes: a row
tile is read once per column tile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from cdr_kernel.score import Columns
from cdr_kernel.score._bound_search import pack


class Gpu(NamedTuple):
    """Datasheet rates, dense: bytes/s of memory, operations/s of 16-bit and tf32 products, of float32; L2 bytes/s."""

    capability: int
    memory: float
    half: float
    tf32: float
    single: float
    cache: float


GPUS = {
    "A100-80GB": Gpu(80, 2.04e12, 312e12, 156e12, 19.5e12, 4.0e12),
    "H100-SXM": Gpu(90, 3.35e12, 989e12, 494e12, 67e12, 5.5e12),
    "H200-SXM": Gpu(90, 4.8e12, 989e12, 494e12, 67e12, 5.5e12),
}
BLOCK_N = 128
BYTES = {torch.int8: 1, torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}


class Shape(NamedTuple):
    rows: int
    dim: int
    sessions: int
    residual: int
    dtype: torch.dtype


SHAPES = [
    *(Shape(n, 384, b, 8, torch.float16) for n in (10**6, 10**7, 5 * 10**7) for b in (1, 8, 64)),
    Shape(10**7, 384, 1, 0, torch.float16),
    Shape(10**7, 384, 1, 8, torch.float32),
    Shape(10**7, 384, 1, 8, torch.int8),
    Shape(10**7, 1024, 1, 8, torch.bfloat16),
    Shape(10**6, 4096, 1, 256, torch.float16),
]


def predict(shape: Shape, gpu: Gpu) -> dict[str, float]:
    """Seconds of the floor and what it is made of."""
    r = np.random.default_rng(0)
    count = 2 + shape.residual
    ones = np.ones(count)
    columns = Columns(
        r.standard_normal(4), r.standard_normal(4), r.standard_normal((shape.residual, 4)), ones, 0 * ones, ones, ones
    )
    limits = (32, 128) if gpu.capability == 90 else (16, 64)
    packed = pack([columns] * shape.sessions, shape.dtype, 4, norms=True, device=torch.device("cpu"), limits=limits)
    size = BYTES[shape.dtype]
    read = shape.rows * (shape.dim * size + 4)
    written = shape.rows * shape.sessions * 4
    operations = 2.0 * shape.rows * shape.dim * shape.sessions * count
    padded, cached = 0.0, 0.0
    for p in packed:
        tiles, width = p.groups * p.tiles, p.parts * p.group
        padded += 2.0 * shape.rows * shape.dim * tiles * width
        cached += shape.rows * shape.dim * tiles * (size + p.vectors.element_size() * width / BLOCK_N)
    dot = packed[0].dot
    rate = gpu.single if not dot else gpu.tf32 if shape.dtype == torch.float32 else gpu.half
    seconds = {"memory": (read + written) / gpu.memory, "arithmetic": operations / rate}
    return {
        "bytes": read + written,
        "operations": operations,
        "floor_s": max(seconds.values()),
        "memory_s": seconds["memory"],
        "arithmetic_s": seconds["arithmetic"],
        "padded_s": padded / rate,
        "l2_s": cached / gpu.cache,
    }


def rows() -> Iterator[dict[str, object]]:
    for shape in SHAPES:
        for name, gpu in GPUS.items():
            yield {"gpu": name, **shape._asdict(), "dtype": str(shape.dtype)[6:], **predict(shape, gpu)}


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line, last on standard output")
    table = list(rows())
    if parser.parse_args(arguments).json:
        print(json.dumps({"predicted": table}))
        return
    print("predicted, not measured: ms; floor = max(memory, arithmetic)")
    print(f"{'gpu':<10} {'rows':>9} {'D':>5} {'B':>3} {'R':>4} {'dtype':<9} {'GB':>7} {'TFLOP':>7}"
          f" {'floor':>8} {'memory':>8} {'arith':>8} {'padded':>8} {'L2':>8}")  # fmt: skip
    for r in table:
        times = " ".join(f"{1e3 * r[f'{n}_s']:8.3f}" for n in ("floor", "memory", "arithmetic", "padded", "l2"))
        print(f"{r['gpu']:<10} {r['rows']:>9} {r['dim']:>5} {r['sessions']:>3} {r['residual']:>4} {r['dtype']:<9}"
              f" {r['bytes'] / 1e9:7.2f} {r['operations'] / 1e12:7.3f} {times}")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
