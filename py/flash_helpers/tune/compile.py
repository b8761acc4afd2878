"""Compiling the candidates: in parallel, within a time, and past those that the compiler refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flash_helpers.build import CompiledKernel, KernelCompileError, build_kernels
from flash_helpers.kernels.kernel import Kernel

OnKernel = Callable[[CompiledKernel, int, int], None]


class _OutOfTimeError(Exception):
    """Ends a build between two kernels."""


def compile_candidates(
    kernels: Iterable[Kernel],
    target: int,
    jobs: int | None = None,
    on_kernel: OnKernel | None = None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> tuple[set[Kernel], dict[Kernel, str]]:
    """Builds kernels, so that they are found when called.

    Args:
        kernels: the most promising first.
        target: GPU generation, 80 for sm_80.
        jobs: compilations at the same time.
        on_kernel: told of each.
        out_of_time: asked after each; True leaves the others out.

    Returns:
        The kernels that are ready, and those refused with the compiler's first error line.
    """
    remaining = list(kernels)
    ready: set[Kernel] = set()
    refused: dict[Kernel, str] = {}
    limited = True

    def one_more(compiled: CompiledKernel, done: int, total: int) -> None:
        ready.add(compiled.kernel)
        if limited and on_kernel is not None:
            on_kernel(compiled, done, total)
        if limited and done < total and out_of_time():
            raise _OutOfTimeError

    while remaining:
        try:
            build_kernels(remaining, [target], jobs, one_more)
            break
        except KernelCompileError as error:
            culprit = next((k for k in remaining if str(error).startswith(f"{k.short_form()} (sm_")), None)
            if culprit is None:
                raise  # not a kernel: the link
            refused[culprit] = f"does not compile: {(error.errors or ('see ' + str(error.log),))[0]}"
            remaining.remove(culprit)
        except _OutOfTimeError:
            # What is compiled lies in the cache: the second pass only links it.
            remaining, limited = [kernel for kernel in remaining if kernel in ready], False
    return set(remaining), refused
