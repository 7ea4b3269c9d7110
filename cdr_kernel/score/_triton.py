"""The fused Triton kernel and its launcher: fact tiles and columns in, an upper bound of each score out.

The margin of the arithmetic is part of the numbers that come with each column (see `_bound_search.pack`), so one pass
over the facts gives a score that is never below the exact one, or minus infinity where the fact surely fails the gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from cdr_kernel.score._columns import COVERAGE
from cdr_kernel.spec.constants import COVERAGE_PENALTY_CAP, MIN_NOVELTY_FLOOR, NGRAM_PENALTY_CAP, NGRAM_PENALTY_STEP

if TYPE_CHECKING:
    from cdr_kernel.score._bound_search import Factors32, Packed, Rows

COVERAGE_ROLE = tl.constexpr(COVERAGE)
SMALLEST_SQUARE = tl.constexpr(2.0**-80)  # squared norms that float32 sums can hold; other rows are bounded by infinity
LARGEST_SQUARE = tl.constexpr(2.0**80)


# The compiler reads this function, not Python: Triton's decorator is untyped and its arguments have no types of Python.
@triton.jit(do_not_specialize=["overlap_stride", "out_stride", "n", "count", "groups", "tiles"])  # type: ignore[untyped-decorator]
def score_bounds_kernel(  # type: ignore[no-untyped-def]
    rows,  # [R, D] float16, bfloat16, float32, float64 or int8
    row_stride,
    index,  # [n] int64: the rows to look at; None: all R
    row_scale,  # [R] float32: 1 / |row| (int8: and the scale of its codes), 0: unknown; None: norms are computed here
    row_error,  # [R] float32: distance of the row as held here from the true unit row; None: 0
    alive,  # [R] uint8; None: all
    importance,  # [n] float32; None: 1
    multiplier,  # [n] float32; None: 1
    overlap,  # [B, n] int32; None: 0
    overlap_stride,
    vectors,  # [groups, tiles, PARTS, GROUP, D] in the dtype of the product: columns times their scales
    columns,  # [groups, tiles, 3, PARTS, GROUP] float32: what to add for the gate, what to add for the pull, weight
    sessions,  # [groups, 8, GROUP] float32
    out,  # [B, n] float32
    out_stride,
    n,
    count,  # B
    groups,
    tiles,
    TILES: tl.constexpr,  # tiles where the compiler is to know it, 0 where not
    D: tl.constexpr,
    GROUP: tl.constexpr,  # sessions side by side in a tile
    PARTS: tl.constexpr,  # columns of each of them in a tile
    DOT: tl.constexpr,  # tl.dot, or products and sums of float32
    PRODUCT: tl.constexpr,  # dtype of the factors
    PRECISION: tl.constexpr,  # of float32 factors in tl.dot
    WEIGHTED: tl.constexpr,  # False: all weights are 1
    PENALTY_CAP: tl.constexpr,
    NOVELTY_FLOOR: tl.constexpr,
    NGRAM_STEP: tl.constexpr,
    NGRAM_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    WIDTH: tl.constexpr = PARTS * GROUP
    group = (tl.program_id(0) % groups).to(tl.int64)  # groups of one row tile run side by side and share the L2 cache
    first = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_N
    inside = first + tl.arange(0, BLOCK_N) < n  # [BLOCK_N]
    at = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1)
    row = at if index is None else tl.load(index + at)
    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, GROUP)
    row_at = rows + row[:, None] * row_stride + d[None, :]  # [BLOCK_N, BLOCK_D]
    column_at = vectors + group * tiles * WIDTH * D + tl.arange(0, WIDTH)[:, None] * D + d[None, :]  # [WIDTH, BLOCK_D]
    number_at = columns + group * tiles * 3 * WIDTH + tl.arange(0, PARTS)[:, None] * GROUP + g[None, :]

    nearest_gate = tl.full([BLOCK_N, GROUP], float("-inf"), tl.float32)
    effective = tl.full([BLOCK_N, GROUP], float("-inf"), tl.float32)
    coverage = tl.zeros([BLOCK_N, GROUP], tl.float32)
    scale = tl.zeros([BLOCK_N], tl.float32)
    known = inside
    if row_scale is not None:
        scale = tl.load(row_scale + row)
        known = scale > 0.0
    for tile in range(tiles if TILES == 0 else TILES):
        square = tl.zeros([BLOCK_N], tl.float32)
        if DOT:
            dots = tl.zeros([BLOCK_N, WIDTH], tl.float32)
        else:
            products = tl.zeros([BLOCK_N, WIDTH, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            if D % BLOCK_D == 0:
                x = tl.load(row_at + start).to(PRODUCT)
                v = tl.load(column_at + start).to(PRODUCT)
            else:
                x = tl.load(row_at + start, mask=d[None, :] < D - start, other=0.0).to(PRODUCT)
                v = tl.load(column_at + start, mask=d[None, :] < D - start, other=0.0).to(PRODUCT)
            if DOT:
                dots = tl.dot(x, tl.trans(v), dots, input_precision=PRECISION)
            else:
                products += x[:, None, :] * v[None, :, :]
            if row_scale is None:
                square += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        if not DOT:
            dots = tl.sum(products, axis=2)
        if row_scale is None:
            known = (square > SMALLEST_SQUARE) & (square < LARGEST_SQUARE)
            scale = 1.0 / tl.sqrt(square)
        values = tl.reshape(dots * scale[:, None], [BLOCK_N, PARTS, GROUP])
        covers = (tile * PARTS + tl.arange(0, PARTS) == COVERAGE_ROLE)[None, :, None]
        coverage += tl.sum(tl.where(covers, values, 0.0), axis=1)
        nearest_gate = tl.maximum(nearest_gate, tl.max(values + tl.load(number_at)[None, :, :], axis=1))
        pull = values
        if WEIGHTED:
            pull = values * tl.load(number_at + 2 * WIDTH)[None, :, :]
        pull += tl.load(number_at + WIDTH)[None, :, :]
        effective = tl.maximum(effective, tl.max(pull, axis=1))
        column_at += WIDTH * D
        number_at += 3 * WIDTH

    session_at = sessions + group * 8 * GROUP + g
    least = coverage * tl.load(session_at)[None, :] + tl.load(session_at + GROUP)[None, :]  # [BLOCK_N, GROUP]
    most = least + tl.load(session_at + 2 * GROUP)[None, :]
    novelty_cap = tl.load(session_at + 3 * GROUP)[None, :]
    if row_error is not None:
        error = tl.load(row_error + row)[:, None]
        nearest_gate += error * tl.load(session_at + 4 * GROUP)[None, :]
        effective += error * tl.load(session_at + 5 * GROUP)[None, :]
        off = error * tl.load(session_at + 6 * GROUP)[None, :]
        least -= off
        most += off
    effective = tl.maximum(effective, tl.load(session_at + 7 * GROUP)[None, :])
    newest = tl.maximum(1.0 - tl.minimum(least, PENALTY_CAP), NOVELTY_FLOOR)
    oldest = tl.maximum(1.0 - tl.minimum(most, PENALTY_CAP), NOVELTY_FLOOR)
    score = effective * tl.minimum(tl.where(effective >= 0.0, newest, oldest), novelty_cap)
    if importance is not None:
        score *= tl.load(importance + at)[:, None]
    if multiplier is not None:
        score *= tl.load(multiplier + at)[:, None]
    session = group * GROUP + g
    written = inside[:, None] & (session < count)[None, :]
    place = tl.arange(0, BLOCK_N)[:, None]
    if overlap is not None:
        repeated = tl.load((overlap + first + session * overlap_stride)[None, :] + place, mask=written, other=0)
        score *= 1.0 - tl.minimum(repeated.to(tl.float32) * NGRAM_STEP, NGRAM_CAP)
    score += tl.abs(score) * 2.0**-19 + 2.0**-100  # what the products above may have lost
    score = tl.where(known[:, None] & (score == score), score, float("inf"))
    candidate = (nearest_gate >= 0.0) | ~known[:, None]
    if alive is not None:
        candidate = candidate & (tl.load(alive + row) != 0)[:, None]
    score = tl.where(candidate, score, float("-inf"))
    tl.store((out + first + session * out_stride)[None, :] + place, score, mask=written)


def interpreted() -> bool:
    """Whether the kernel was decorated under TRITON_INTERPRET=1 and so runs on CPU tensors."""
    return not isinstance(score_bounds_kernel, triton.runtime.JITFunction)


def capability(device: torch.device) -> int:
    """80 for compute capability 8.0, and so on; 90 for the CPU."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


def tile_limits(capability: int, norms: bool) -> tuple[int, int]:
    """(sessions side by side, columns) of a tile: what the registers of this compute capability hold without spills.

    norms: whether the rows' scales are given, or computed by the kernel.
    """
    return (32, 128) if capability == 90 and norms else (16, 64)


def settings(packed: Packed) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constexprs and the compiler's options for these columns."""
    wide = packed.vectors.element_size() == 4
    if packed.dot:
        block = {"BLOCK_N": 128, "BLOCK_D": 32 if wide else 64}
        options = {"num_warps": 8 if packed.parts * packed.group > 16 else 4, "num_stages": 3}
    else:
        block = {"BLOCK_N": 32, "BLOCK_D": 128}
        options = {"num_warps": 4, "num_stages": 2}
    product = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[packed.vectors.dtype]
    constants = {
        "TILES": 1 if packed.tiles == 1 else 0,
        "D": packed.vectors.shape[-1],
        "GROUP": packed.group,
        "PARTS": packed.parts,
        "DOT": packed.dot,
        "PRODUCT": product,
        "PRECISION": packed.precision,
        "WEIGHTED": packed.weighted,
        "PENALTY_CAP": COVERAGE_PENALTY_CAP,
        "NOVELTY_FLOOR": MIN_NOVELTY_FLOOR,
        "NGRAM_STEP": NGRAM_PENALTY_STEP,
        "NGRAM_CAP": NGRAM_PENALTY_CAP,
    }
    return {**constants, **block}, {**options, "enable_fp_fusion": True}


def launch(packed: Packed, rows: Rows, factors: Factors32, out: torch.Tensor) -> None:
    """Write the bounds of these rows to out, [B, n] float32 whose rows are contiguous, on the current stream."""
    n = out.shape[1]
    if n == 0 or packed.count == 0:
        return
    device = rows.values.device
    if device.type != "cuda" and not interpreted():
        raise RuntimeError("triton: the kernel was loaded for a GPU; set TRITON_INTERPRET=1 before its first use")
    constants, options = settings(packed)
    arguments = (
        rows.values, rows.values.stride(0), rows.picked, rows.scale, rows.error, rows.alive,
        factors.importance, factors.multiplier, factors.overlap,
        0 if factors.overlap is None else factors.overlap.stride(0),
        packed.vectors, packed.columns, packed.sessions, out, out.stride(0),
        n, packed.count, packed.groups, packed.tiles,
    )  # fmt: skip
    grid = (triton.cdiv(n, constants["BLOCK_N"]) * packed.groups,)
    if interpreted():
        constants["TILES"] = packed.tiles  # Triton 3.6 cannot interpret a range over an argument under numpy 2.4
        if constants["PRODUCT"] == tl.bfloat16:
            constants["PRODUCT"] = tl.float32  # the same numbers: the interpreter would multiply the bits of bfloat16
        with np.errstate(all="ignore"):  # rows that float32 cannot hold overflow in silence on a GPU
            score_bounds_kernel[grid](*arguments, **constants)
        return
    with torch.cuda.device(device):
        score_bounds_kernel[grid](*arguments, **constants, **options)
