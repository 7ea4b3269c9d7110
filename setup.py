"""Builds the one extension module; everything else about the package stands in pyproject.toml."""

import sys
from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

# -ffp-contract=off: a fused multiply-add would give other bits than the reference's rounded products.
FLAGS = ["/O2", "/fp:precise"] if sys.platform == "win32" else ["-O3", "-ffp-contract=off", "-fvisibility=hidden"]

extension = Pybind11Extension(
    "cdr_kernel._C",
    sorted(glob("csrc/*.cpp")),
    include_dirs=["csrc"],
    depends=sorted(glob("csrc/*.h")),
    cxx_std=17,
    extra_compile_args=FLAGS,
    extra_link_args=[] if sys.platform in ("win32", "darwin") else ["-pthread"],
)

setup(ext_modules=[extension], cmdclass={"build_ext": build_ext})
