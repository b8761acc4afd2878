"""Builds kernels of any families ahead of time: one library a direction and target."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flash_helpers.build.cache import KernelCache
from flash_helpers.build.compile import BuildResult, Progress, build_library
from flash_helpers.build.index import remember
from flash_helpers.kernels.families import DIRECTIONS, direction_of
from flash_helpers.kernels.kernel import Kernel


def build_kernels(
    kernels: Iterable[Kernel],
    targets: Iterable[int],
    jobs: int | None = None,
    progress: Progress | None = None,
    *,
    cache: KernelCache | None = None,
    include_root: Path | None = None,
) -> list[BuildResult]:
    """Builds kernels ahead of time: one library a family and target, found again by the CUDA backend.

    Args:
        kernels: the kernels, of any families.
        targets: GPU generations, 80 for sm_80. A family is built for those that it runs on.
        jobs: compilations at the same time; ``None``: as many as cores and memory allow.
        progress: told of every kernel.
        cache, include_root: in place of the user's cache and the package's headers.

    Returns:
        One result a library.

    Raises:
        ValueError: a kernel's family runs on none of ``targets``, or lacks a feature of its traits.
        CompilerNotFoundError: no usable compiler.
        KernelCompileError: the compiler refused a kernel.
    """
    kernels, targets = list(kernels), sorted(set(targets))
    cache = cache or KernelCache()
    results = []
    for direction in DIRECTIONS:
        members = [kernel for kernel in kernels if direction_of(kernel) is direction]
        if not members:
            continue
        for kernel in members:
            if missing := direction.missing_traits(kernel.traits):
                raise ValueError(
                    f"{kernel.short_form()}: kernels of the {direction.label} family cannot be compiled for "
                    f"{', '.join(missing)}, only for {', '.join(direction.traits)}"
                )
        family = direction.family
        fitting = [target for target in targets if family.runs_on(target)]
        if not fitting:
            raise ValueError(
                f"targets {targets}: kernels of the {family.name} family run on {family.allowed_targets}"
            )
        for target in fitting:
            result = build_library(members, target, jobs, progress, cache=cache, include_root=include_root)
            remember(cache, result, include_root)
            results.append(result)
    return results


def build_command(kernel: Kernel, target: int) -> str:
    """The shell command that builds one kernel into the cache; of one with a mod, what a program calls."""
    if kernel.mod is not None:
        return "the call of attention itself, where compiling is possible, with the same cache folder"
    return f'python -m flash_attention build "{kernel.short_form()}" --target {target}'
