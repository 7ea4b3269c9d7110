"""The Triton kernel without a GPU: interpreted over the parity cases, and compiled for GPUs that are not here.

Triton reads TRITON_INTERPRET when the kernel is decorated, so each half runs in a process of its own
(``python tests/test_score_triton.py interpret|compile``), once, and the tests look at what it found.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import cdr_kernel

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason='needs Triton: pip install ".[gpu]" in a checkout')

# name: (dtype, D, mode, sessions, covered, residual, flags)
PARITY = {
    f"{dtype}-{mode}-{'x'.join(map(str, shape))}-{flags or 'plain'}": (dtype, mode, shape, flags)
    for dtype in ("float16", "bfloat16", "float32", "float64", "int8")
    for mode in ("spec", "random")
    for shape, flags in (  # D, sessions, coverage entries, residuals
        ((5, 1, 0, 0), ""),
        ((130, 1, 1, 0), "importance multiplier overlap alive"),
        ((64, 1, 2, 9), "alive norms"),
        ((33, 5, 3, 4), "importance overlap rows norms"),
        ((48, 20, 1, 3), "multiplier overlap rows alive"),
    )
}
PARITY |= {
    f"{dtype}-{mode}-wide": (dtype, mode, (24, 2, 1, 256), "importance overlap")
    for dtype in ("float16", "float32")
    for mode in ("spec", "random")
}
PARITY["float32-spec-long"] = ("float32", "spec", (4096, 1, 2, 8), "importance")
PARITY["float16-spec-one-row"] = ("float16", "spec", (32, 3, 2, 2), "one")

SPARSE = ("float16", "bfloat16", "float32", "float64", "int8")
"""Dtypes of rows under columns that add to single rows and columns that are gates alone."""

# name: (dtype, D, sessions, residuals, flags)
SHAPES = {
    "first-window-float32": ("float32", 384, 1, 0, "scale"),
    "one-session-float16": ("float16", 384, 1, 8, "scale importance overlap alive"),
    "batched-float16": ("float16", 384, 64, 8, "scale importance multiplier overlap alive"),
    "batched-bfloat16": ("bfloat16", 768, 64, 8, "scale importance overlap"),
    "batched-int8": ("int8", 384, 64, 8, "scale error importance overlap alive"),
    "wide-float32": ("float32", 4096, 1, 256, "scale importance overlap"),
    "gathered-bfloat16": ("bfloat16", 1024, 8, 8, "rows weights importance overlap"),
}
TARGETS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # compute capability: shared memory of a block
MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


def run_half(half):
    """{case: "" or what went wrong} from a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if half == "interpret" else "0"}
    here = Path(cdr_kernel.__file__).parent.parent  # where this process found the package
    environment["PYTHONPATH"] = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as cache:
        environment |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, __file__, half], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted():
    return run_half("interpret")


@pytest.fixture(scope="module")
def compiled():
    return run_half("compile")


@pytest.mark.parametrize("case", PARITY)
def test_parity(interpreted, case):
    assert interpreted[case] == "", interpreted[case]


@pytest.mark.parametrize("dtype", SPARSE)
def test_addends_and_gates_alone(interpreted, dtype):
    assert interpreted[f"sparse {dtype}"] == "", interpreted[f"sparse {dtype}"]


@pytest.mark.parametrize(
    "case", ["nothing below and nothing kept", "cdr_score under triton", "the op", "a retriever on a device"]
)
def test_interpreted(interpreted, case):
    assert interpreted[case] == "", interpreted[case]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", TARGETS)
def test_compile(compiled, target, shape):
    found = compiled[f"{shape}-{target}"]
    assert "error" not in found, found["error"]
    assert found["stack"] == 0
    assert found["local_stores"] == 0
    assert found["registers"] <= 255
    assert found["shared"] <= TARGETS[target]
    assert found["wide_loads"] > 0
    if shape != "first-window-float32":
        assert found["matrix"] > 0


def test_compile_uses_wgmma_for_the_batched_shape(compiled):
    for shape in ("batched-float16", "batched-bfloat16", "batched-int8"):
        assert compiled[f"{shape}-90"]["wgmma"] > 0


# What follows runs in the other processes.


def parity_case(dtype, mode, shape, flags):
    """Bounds of the kernel against plain torch and the exact scores, then the answers of cdr_score."""
    import torch

    from cdr_kernel.score import _triton
    from cdr_kernel.score._bound_search import Factors32, Rows, bounds_torch, pack
    from cdr_kernel.score._device_rows import _converted
    from tests.score.test_bound_search import check_bounds, some_columns

    dim, sessions, covered, residual = shape
    n = 1 if "one" in flags else 150
    r = np.random.default_rng(dim + sessions)
    columns = [some_columns(r, dim, covered, residual, mode, clamp=bool(b % 2)) for b in range(sessions)]
    stored = r.standard_normal((n, dim))
    stored[::2] += r.random((len(stored[::2]), 1)) * columns[0].query
    stored = stored.astype({"float16": "float16", "float64": "float64"}.get(dtype, "float32"))
    importance, multiplier = (r.random(n) if name in flags else None for name in ("importance", "multiplier"))
    overlap = r.integers(0, 7, (sessions, n)).astype(np.int32) if "overlap" in flags else None

    norms = (stored.astype(np.float64) ** 2).sum(1)
    if dtype == "int8" or (dtype != "float64" and "norms" not in flags):
        values, scale, error = _converted(stored, norms, dtype)
    else:
        values, scale, error = torch.from_numpy(stored).to(getattr(torch, dtype)), None, None
    alive = torch.from_numpy((r.random(n) < 0.8).astype(np.uint8)) if "alive" in flags else None
    picked = torch.from_numpy(r.permutation(n)[: n // 2]) if "rows" in flags else None
    rows = Rows(values, picked, scale, error, alive)
    count = n if picked is None else len(picked)
    given = Factors32(
        *(None if f is None else torch.from_numpy(f[:count].astype(np.float32)) for f in (importance, multiplier)),
        None if overlap is None else torch.from_numpy(overlap[:, :count]),
    )
    for limits in ((32, 128), (4, 8)):
        for packed in pack(
            columns, values.dtype, values.shape[1], norms=scale is not None, device=values.device, limits=limits
        ):
            ours = torch.full((packed.count, count), torch.nan)
            plain = ours.clone()
            _triton.launch(packed, rows, given.of(packed.order), ours)
            bounds_torch(packed, rows, given.of(packed.order), plain)
            assert not ours.isnan().any()
            assert (ours.isinf() == plain.isinf()).all()
            both = ~ours.isinf()
            torch.testing.assert_close(ours[both], plain[both], rtol=2e-5, atol=2e-5)
            assert both.any() or n == 1 or count == 0
    if dtype != "int8":
        real = {
            "float16": torch.float16,
            "bfloat16": torch.bfloat16,
            "float32": torch.float32,
            "float64": torch.float64,
        }
        check_bounds(_triton.launch, r, real[dtype], dim, covered, residual, mode, min(sessions, 3), True, n=40)
    scored(dtype, stored, columns, importance, multiplier, overlap, picked)


def sparse_case(dtype):
    """What the calibrated mode asks: addends of single rows, gates that do not score, factors above zero alone."""
    import torch

    from tests.score.test_columns import some_world

    kind = {"float16": "float16", "float64": "float64"}.get(dtype, "float32")
    seen = {"addend": 0, "gated addend": 0, "gate only": 0, "above zero": 0}
    for seed in range(10):
        n, sessions = (70, 1 + 2 * (seed % 2))
        each = [some_world(np.random.default_rng(3 * seed + b), n, 13, 3, kind) for b in range(sessions)]
        stored, _, importance, multiplier, _ = each[0]
        columns, overlap = [world[1] for world in each], np.stack([world[4] for world in each])
        for c in columns:
            seen["addend"] += c.addend is not None
            seen["gated addend"] += c.gated_addend
            seen["gate only"] += bool(c.gate_only.any())
            seen["above zero"] += c.factors_above_zero
        picked = torch.from_numpy(np.random.default_rng(seed).permutation(n)[:50]) if seed % 3 == 0 else None
        scored(dtype, stored, columns, importance, multiplier, overlap, picked, (None, 5, 25, 45))
    assert min(seen.values()) >= 3, seen


def scored(dtype, stored, columns, importance, multiplier, overlap, picked, limits=(None, 10)):
    """cdr_score: triton, triton over a copy in another dtype, and torch give cpp's bits."""
    import torch

    from cdr_kernel import FactStore, cdr_score
    from cdr_kernel.score._device_rows import DeviceRows

    store = FactStore(stored.shape[1], embedding_model="toy", dtype=stored.dtype.name)
    store.add([str(i) for i in range(len(stored))], [""] * len(stored), stored)
    on_device = DeviceRows("cpu", dtype=None if dtype == "float64" else dtype).at(store.view())
    rows = None if picked is None else picked.numpy()
    take = slice(None) if rows is None else rows
    keywords = {
        "importance": None if importance is None else importance[take],
        "multiplier": None if multiplier is None else multiplier[take],
        "ngram_overlap": None if overlap is None else overlap[:, take],
        "rows": rows,
    }

    def bits(scores):
        return [tuple(getattr(s, name).tobytes() for name in s.__dataclass_fields__) for s in scores]

    for k in limits:
        best = bits(cdr_score(stored, columns, k=k, impl="cpp", **keywords))
        for impl in ("triton", "torch"):
            assert bits(cdr_score(on_device, columns, k=k, impl=impl, **keywords)) == best
        if dtype != "int8":
            tensor = torch.from_numpy(stored).to(getattr(torch, dtype))
            same = bits(cdr_score(tensor, columns, k=k, impl="cpp", **keywords))
            for impl in ("triton", "torch"):
                assert bits(cdr_score(tensor, columns, k=k, impl=impl, **keywords)) == same


def nothing_below_and_nothing_kept():
    """Empty inputs, a poisoned output, rows that float32 cannot hold."""
    import torch

    from cdr_kernel import Columns, cdr_score
    from cdr_kernel.score import _triton
    from cdr_kernel.score._bound_search import Factors32, Rows, pack

    c = Columns.spec([1.0, 1.0, 1.0])
    assert cdr_score(np.zeros((0, 3), np.float32), c, impl="triton").rows.tolist() == []
    assert cdr_score(np.ones((4, 3), np.float32), [], impl="triton") == []
    (packed,) = pack([c, c], torch.float32, 3, norms=False, device=torch.device("cpu"))
    rows = torch.ones(200, 3)
    rows[5], rows[6] = torch.nan, 1e30
    wide = torch.full((2, 300), 7.0)
    _triton.launch(packed, Rows(rows), Factors32(), wide[:, 50:250])
    assert (wide[:, :50] == 7.0).all()
    assert (wide[:, 250:] == 7.0).all()
    assert wide[0, 55].isinf()
    assert wide[0, 56].isinf()
    assert ((wide[:, 57:250] >= 1.0) & (wide[:, 57:250] < 1.001)).all()


def cdr_score_under_triton():
    """The parity tests of test_score.py with impl="triton"."""
    code = pytest.main(
        [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-k",
            "triton",
            str(Path(__file__).parents[1] / "score" / "test_cdr_score.py"),
        ]
    )
    assert code == 0


def the_op():
    """torch.ops.cdr_kernel on CPU tensors goes through the kernel here."""
    from tests.score.test_torch_ops import DTYPES, test_score_is_cdr_score

    for dtype in DTYPES:
        test_score_is_cdr_score(dtype, "triton", "random")


def a_retriever_on_a_device():
    """Two windows of several sessions through the kernel, as a scan answers them."""
    import torch

    from cdr_kernel import Retriever
    from cdr_kernel.score._device_rows import DeviceRows
    from tests.retrieve import test_device_index as device

    os.environ["CDR_KERNEL_IMPL"] = "triton"
    try:
        for dtype in ("float16", "int8"):
            rows = DeviceRows(torch.device("cpu"), dtype=dtype)
            device.check_many(Retriever(device.filled(200, 24, 3), "device", device_rows=rows), "spec")
            device.check_many(Retriever(device.filled(200, 24, 3), "device", device_rows=rows), "calibrated")
    finally:
        del os.environ["CDR_KERNEL_IMPL"]


def compile_case(dtype, dim, sessions, residual, flags, target):
    """Resources and instructions of the kernel as it is launched for this shape on this target."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cdr_kernel import Columns
    from cdr_kernel.score import _triton
    from cdr_kernel.score._bound_search import pack

    r = np.random.default_rng(0)
    count = 2 + residual
    weight = r.random(count) if "weights" in flags else np.ones(count)
    columns = [
        Columns(
            r.standard_normal(dim), r.standard_normal(dim), r.standard_normal((residual, dim)),
            np.ones(count), np.zeros(count), weight, np.full(count, 0.5),
        )
    ] * sessions  # fmt: skip
    (packed,) = pack(
        columns, getattr(torch, dtype), dim, norms="scale" in flags, device=torch.device("cpu"),
        limits=_triton.tile_limits(target, "scale" in flags),
    )  # fmt: skip
    constants, options = _triton.settings(packed)
    kinds = {
        "rows": {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "int8": "*i8"}[dtype],
        "vectors": {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}[packed.vectors.dtype],
        "columns": "*fp32", "sessions": "*fp32", "out": "*fp32", "n": "i64", "count": "i32", "groups": "i32",
        "tiles": "i32", "row_stride": "i64", "overlap_stride": "i64", "out_stride": "i64",
    }  # fmt: skip
    optional = {
        "index": ("rows", "*i64"), "row_scale": ("scale", "*fp32"), "row_error": ("error", "*fp32"),
        "alive": ("alive", "*u8"), "importance": ("importance", "*fp32"), "multiplier": ("multiplier", "*fp32"),
        "overlap": ("overlap", "*i32"),
    }  # fmt: skip
    for name, (flag, kind) in optional.items():
        if flag in flags.split():
            kinds[name] = kind
        else:
            constants[name] = None
    names = _triton.score_bounds_kernel.arg_names
    signature = {name: kinds.get(name, "constexpr") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name == "row_stride"]
    source = ASTSource(
        _triton.score_bounds_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])

        def dump(what):
            return subprocess.run([tools / "cuobjdump", what, cubin], capture_output=True, text=True, check=True).stdout

        usage, sass = dump("-res-usage"), dump("-sass")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()

    def instructions(pattern):
        return len(re.findall(pattern, sass))

    return {
        "registers": int(registers),
        "stack": int(stack),
        "local_stores": instructions(r"\bSTL\b"),
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "wide_loads": instructions(r"\bLDG(STS)?\.E\S*\.128\b"),
        "loads": instructions(r"\bLDG(STS)?\.E"),
        "matrix": instructions(rf"\b{MATRIX[target]}\b"),
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "tile": f"{packed.tiles} x {packed.parts} x {packed.group}, {packed.groups} groups",
    }


def main(half):
    if half == "interpret":
        cases = {name: lambda case=case: parity_case(*case) for name, case in PARITY.items()}
        cases |= {
            "nothing below and nothing kept": nothing_below_and_nothing_kept,
            "cdr_score under triton": cdr_score_under_triton,
            "the op": the_op,
            "a retriever on a device": a_retriever_on_a_device,
        }
        # last: what they import pytest would have to rewrite first
        cases |= {f"sparse {dtype}": lambda dtype=dtype: sparse_case(dtype) for dtype in SPARSE}
    else:
        cases = {
            f"{name}-{target}": lambda shape=shape, target=target: compile_case(*shape, target)
            for name, shape in SHAPES.items()
            for target in TARGETS
        }
    found = {}
    for name, case in cases.items():
        try:
            found[name] = case() or ""
        except BaseException:
            error = traceback.format_exc()
            found[name] = error if half == "interpret" else {"error": error}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
