"""The compiler's flags for every kernel, which are part of what a library and a measured time belong to."""

from __future__ import annotations

from flash_helpers.kernels.family import Family

# No fast-math: what a kernel approximates it says in its own code.
COMPILE_FLAGS = ("-std=c++20", "-O3", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden")


def compile_flags(family: Family, target: int) -> tuple[str, ...]:
    """What nvcc is told for a target, beside what the user's variables add."""
    arch = family.arch(target)
    return (*COMPILE_FLAGS, "-gencode", f"arch=compute_{arch},code=sm_{arch}")
