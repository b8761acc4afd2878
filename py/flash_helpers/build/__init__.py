"""From kernels to loadable libraries: text, compiler, cache.

``build_kernels`` builds ahead of time; a kernel's first use calls it too. Either way a kernel is
generated, compiled and linked through the cache, and found again by ``find_library``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_helpers.lazy import lazy_names

if TYPE_CHECKING:
    from flash_helpers.build.ahead import build_command, build_kernels
    from flash_helpers.build.cache import KernelCache
    from flash_helpers.build.compile import BuildResult, CompiledKernel, Progress, build_library
    from flash_helpers.build.errors import (
        BuildError,
        CompilerNotFoundError,
        KernelCompileError,
        SourcesNotFoundError,
    )
    from flash_helpers.build.index import built_kernels, find_library

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "flash_helpers.build.ahead": ("build_command", "build_kernels"),
        "flash_helpers.build.cache": ("KernelCache",),
        "flash_helpers.build.compile": ("BuildResult", "CompiledKernel", "Progress", "build_library"),
        "flash_helpers.build.errors": (
            "BuildError",
            "CompilerNotFoundError",
            "KernelCompileError",
            "SourcesNotFoundError",
        ),
        "flash_helpers.build.index": ("built_kernels", "find_library"),
    },
)

__all__ = [
    "BuildError",
    "BuildResult",
    "CompiledKernel",
    "CompilerNotFoundError",
    "KernelCache",
    "KernelCompileError",
    "Progress",
    "SourcesNotFoundError",
    "build_command",
    "build_kernels",
    "build_library",
    "built_kernels",
    "find_library",
]
