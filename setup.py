"""The parts of the build that pyproject.toml cannot say: the binding, a C++ extension.

It is optional: without a C++ compiler the package installs and runs on the CPU backend, and the CUDA
backend says how to get the binding.
"""

from pathlib import Path

import pybind11
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "flash_attention_kernels",
            sources=["src/flash_attention.cpp"],
            include_dirs=["src", "src/include", pybind11.get_include()],
            depends=["src/include/flash_attention.cuh", *sorted(map(str, Path("src/binding").glob("*.hpp")))],
            extra_compile_args=["-std=c++20", "-O2", "-fvisibility=hidden"],
            language="c++",
            optional=True,
        )
    ],
    zip_safe=False,  # nvcc reads the headers from disk
)
