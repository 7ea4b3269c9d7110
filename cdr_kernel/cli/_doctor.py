"""What this machine offers and what the package makes of it: versions, SIMD, threads, GPU, implementations."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import import_module
from typing import Any

import cdr_kernel
from cdr_kernel import _C
from cdr_kernel.score import available_impls
from cdr_kernel.score._cdr_score import choose_impl, no_triton

PREFIX = "CDR_KERNEL_"
VARIABLES = ("CDR_DATA_DIR", "CDR_KERNEL_DEBUG", "CDR_KERNEL_IMPL", "CDR_KERNEL_SIMD", "CDR_KERNEL_THREADS")


def diagnose() -> dict[str, Any]:
    """Rows by name; a row that cannot be found out says why in its text. problems: what should be put right.

    Every package is imported: what is named here can be used, whether or not it is installed.
    """
    problems: list[str] = []

    def attempt(name: str, find: Callable[[], Any]) -> Any:
        try:
            return find()
        except Exception as error:  # a broken library must not keep the other rows away
            problems.append(f"{name}: {error}")
            return None

    versions = {
        "cdr_kernel": cdr_kernel.__version__,
        "python": platform.python_version(),
        "numpy": attempt("numpy", lambda: _version("numpy")),
        "torch": attempt("torch", lambda: _version("torch")),
        "faiss": attempt("faiss", lambda: _version("faiss")),
        "triton": attempt("triton", lambda: _version("triton", optional=True)),
        "pyarrow": attempt("pyarrow", lambda: _version("pyarrow")),
    }
    environment = {n: v for n, v in sorted(os.environ.items()) if n in VARIABLES or n.startswith(PREFIX)}
    unknown = sorted(set(environment) - set(VARIABLES))
    problems += [f"{name}: no such variable, expected one of {', '.join(VARIABLES)}" for name in unknown]
    threads = os.environ.get("CDR_KERNEL_THREADS")
    if threads is not None and not (threads.isascii() and threads.isdecimal() and int(threads) > 0):
        problems.append(f"CDR_KERNEL_THREADS: expected an integer of at least 1, got {threads!r} (ignored)")
    runs = {"cpp": True, "torch": bool(versions["torch"]), "triton": bool(versions["torch"] and versions["triton"])}

    def choice(device: str) -> str:
        impl = choose_impl(None, device)
        if not runs[impl]:
            raise ImportError(f"{impl} is chosen, and cannot be imported")
        return impl

    return {
        "versions": versions,
        "platform": f"{platform.system()} {platform.machine()} ({platform.platform(terse=True)})",
        "simd": attempt("simd", _C.simd),
        "simd_levels": attempt("simd_levels", _C.simd_levels),
        "threads": attempt("threads", _C.threads),
        "gpus": attempt("gpus", _gpus) if versions["torch"] else [],
        "impls": [i for i in dict.fromkeys([*available_impls("cpu"), *available_impls("cuda")]) if runs[i]],
        "impl_for_cpu": attempt("impl_for_cpu", lambda: choice("cpu")),
        "impl_for_cuda": attempt("impl_for_cuda", lambda: choice("cuda")) if versions["torch"] else None,
        "environment": environment,
        "problems": problems,
    }


def reason(on_cpu: bool) -> str:
    """Why that implementation is chosen, in words."""
    if os.environ.get("CDR_KERNEL_IMPL"):
        return "CDR_KERNEL_IMPL says so"
    if on_cpu:
        return "every row exactly, on all threads"
    if missing := no_triton("cuda"):
        return f"float32 where the rows are, then the exact routine; {missing}"
    return "one fused kernel in the rows' own dtype, then the exact routine"


def _version(module: str, *, optional: bool = False) -> str | None:
    """The version of a package that can be imported; None for an optional one that is not installed."""
    try:
        return str(import_module(module).__version__)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        if optional:
            return None
        raise ImportError(f"not installed: pip install {'faiss-cpu' if module == 'faiss' else module}") from None


def _gpus() -> list[str]:
    import torch

    return [
        f"{torch.cuda.get_device_name(i)}, {torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB"
        for i in range(torch.cuda.device_count())
    ]
