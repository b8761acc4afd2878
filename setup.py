"""The parts of the build that pyproject.toml cannot say: packages of several folders, and the binding.

The binding, a C++ extension, is optional: without a C++ compiler the package installs and runs on
the CPU backend, and the CUDA backend says how to get the binding.
"""

from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup

setup(
    license="Apache-2.0",  # here, since old and new setuptools want it differently in pyproject.toml
    packages=[*find_packages(include=["flash_attention*"]), *find_packages("py"), "flash_helpers.csrc"],
    ext_modules=[
        Extension(
            "flash_attention_kernels",
            sources=["src/flash_attention.cpp"],
            include_dirs=["src", "src/include", pybind11.get_include()],
            depends=["src/include/flash_attention.cuh", *sorted(map(str, Path("src/binding").glob("*.hpp")))],
            extra_compile_args=["-std=c++20", "-fvisibility=hidden"],
            language="c++",
            optional=True,
        )
    ],
    zip_safe=False,  # nvcc reads the headers from disk
)
