"""``flash-attention build``: compiles kernels ahead of time, under a progress bar."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flash_helpers.build import BuildResult, CompiledKernel, KernelCache, Progress, build_kernels
from flash_helpers.commands.targets import select_targets
from flash_helpers.console.output import console_for, error_console, shown_bytes, write_json
from flash_helpers.console.progress import Show, shown_progress
from flash_helpers.console.writable import check_file
from flash_helpers.kernel_selection import select_kernels
from flash_helpers.kernels.families import FAMILIES, family_of


@dataclass(frozen=True)
class BuiltLibrary:
    """One kernel library and how it came to be.

    Attributes:
        result: what the build says of it.
        bytes: size of the file.
    """

    result: BuildResult
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        kernels = [
            {
                "kernel": k.kernel.short_form(),
                "seconds": k.seconds,
                "registers": k.registers,
                "spill_bytes": k.spill_bytes,
                "cached": k.cached,
            }
            for k in self.result.kernels
        ]
        path = str(self.result.path)
        return {"target": self.result.target, "path": path, "bytes": self.bytes, "kernels": kernels}


def build(
    kernels: str = "all",
    causal: str = "no",
    target: str = "",
    jobs: int | None = None,
    console: Console | None = None,
    cache: KernelCache | None = None,
) -> list[BuiltLibrary]:
    """Builds a set of kernels. What is compiled before an interruption is kept.

    Args:
        kernels, causal: as in ``select_kernels``.
        target: as in ``select_targets``. A family is built for those that it runs on.
        jobs: compilations at the same time; None: as cores and memory allow.
        console: where the progress bar goes; None: no bar.
        cache: in place of the user's.

    Raises:
        ValueError: an argument that names nothing, or kernels that run on none of the targets.
        flash_helpers.build.BuildError: no compiler, or it refuses a kernel.
    """
    selected, targets = select_kernels(kernels, causal), select_targets(target)
    if not selected:
        raise ValueError(f"kernels is {kernels!r}, which names none to build; name a set or short forms")
    libraries = []
    with compile_progress(console) as on_kernel:
        for number in targets:
            fitting = [kernel for kernel in selected if family_of(kernel).runs_on(number)]
            if not fitting:
                allowed = "; ".join(f"{family.name}: {family.allowed_targets}" for family in FAMILIES)
                raise ValueError(
                    f"target {number}: none of the {len(selected)} kernels runs there. {allowed}"
                )
            results = build_kernels(fitting, [number], jobs, on_kernel, cache=cache)
            libraries += [BuiltLibrary(result, result.path.stat().st_size) for result in results]
    return libraries


def build_command(
    kernels: str = "all",
    causal: str = "no",
    target: str = "",
    jobs: int | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> list[BuiltLibrary]:
    """Builds and prints a line for each library, and the kernels that deserve a look."""
    check_file(json_path)
    console = console or console_for(json_path)
    start = time.perf_counter()
    try:
        libraries = build(kernels, causal, target, jobs, error_console())
    except KeyboardInterrupt:
        console.print(
            "interrupted: what is compiled is kept; the same command goes on from there", style="yellow"
        )
        raise
    table = Table("library", "target")
    for title in ("kernels", "compiled now", "slowest", "size"):
        table.add_column(title, justify="right")
    for library in libraries:
        members = library.result.kernels
        fresh = [k for k in members if not k.cached]
        slowest = f"{max(k.seconds for k in fresh):.1f} s" if fresh else ""
        cells = (str(len(members)), str(len(fresh)), slowest, shown_bytes(library.bytes))
        table.add_row(Text(str(library.result.path), overflow="fold"), f"sm_{library.result.target}", *cells)
    console.print(table)
    for library in libraries:
        for k in library.result.kernels:
            if k.spill_bytes:
                name = k.kernel.short_form()
                console.print(f"spills {k.spill_bytes} bytes a thread: {name}", style="yellow", markup=False)
            for warning in k.warnings:
                console.print(f"{k.kernel.short_form()}: {warning}", style="yellow", markup=False)
    if not any(not k.cached for library in libraries for k in library.result.kernels):
        console.print("nothing was compiled: every kernel was built before")
    console.print(f"{time.perf_counter() - start:.1f} s")
    write_json(json_path, [library.to_json() for library in libraries])
    return libraries


@contextmanager
def compile_progress(console: Console | None, title: str = "compiling") -> Iterator[Any]:
    """Progress of ``build_kernels``; gives its ``progress`` argument, None without a console.

    Kernels that were compiled before are not counted: where there is nothing to compile, nothing is shown.
    """
    if console is None:
        yield None
        return
    with shown_progress(console) as show:
        yield compiled_only(show, title)


def compiled_only(show: Show, title: str = "compiling") -> Progress:
    """Shows the progress of ``build_kernels`` on ``show``; kernels that were compiled before do not count."""
    before, known = 0, 0  # kernels of the libraries before this one; those of all that were there

    def on_kernel(compiled: CompiledKernel, done: int, total: int) -> None:
        nonlocal before, known
        if compiled.cached:
            known += 1
        else:
            show(title, before + done - known, before + total - known, compiled.kernel.short_form())
        if done == total:
            before += total

    return on_kernel
