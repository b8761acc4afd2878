"""Compiles kernels and records what came out, for ``recorded.json``.

``python -m flash_helpers.build.record --target 80 --target 90`` compiles the ladder, the tuning space and the
choices of each family, and replaces the file. With ``--only-cached`` it compiles nothing and records what the
kernel cache holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from flash_helpers.build import KernelCache, build_kernels, find_library
from flash_helpers.build.gates import kernels_of
from flash_helpers.build.loop_facts import library_facts
from flash_helpers.build.nvcc import find_nvcc
from flash_helpers.console.errors import shown_errors
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.model.recorded import RECORD, CompiledFacts, write_record


def record(
    targets: Iterable[int],
    jobs: int | None = None,
    only_cached: bool = False,
    cache: KernelCache | None = None,
) -> dict[tuple[str, int], CompiledFacts]:
    """(short form, target) to the facts of every kernel that is built or chosen for a GPU generation.

    Args:
        targets: GPU generations.
        jobs: compilations at the same time.
        only_cached: leave out kernels that are not compiled yet.
        cache: in place of the user's.
    """
    cache = cache or KernelCache()
    entries: dict[tuple[str, int], CompiledFacts] = {}
    for target in targets:
        kernels = kernels_of(target)
        if not only_cached:
            build_kernels(kernels, [target], jobs, cache=cache)
        libraries: dict[Path, list[Kernel]] = {}
        for kernel in kernels:
            if (library := find_library(cache, kernel, target)) is not None:
                libraries.setdefault(library, []).append(kernel)
        for library, members in libraries.items():
            for kernel, facts in library_facts(library, members).items():
                entries[kernel.short_form(), target] = facts
    return entries


@shown_errors()
def main(
    target: Annotated[list[int] | None, typer.Option(help="80, 86, 89, 90; default: 80 and 90")] = None,
    jobs: Annotated[int | None, typer.Option(help="compilations at the same time")] = None,
    only_cached: Annotated[bool, typer.Option("--only-cached", help="compile nothing")] = False,
    out: Annotated[Path, typer.Option(help="the file to write")] = RECORD,
) -> None:
    """Records registers, spills and main loops of compiled kernels."""
    entries = record(target or (80, 90), jobs, only_cached)
    write_record(out, f"nvcc {find_nvcc().build}", entries)
    typer.echo(f"{out}: {len(entries)} kernels")


if __name__ == "__main__":
    typer.run(main)
