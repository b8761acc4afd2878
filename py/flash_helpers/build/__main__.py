"""Builds kernels into the cache: ``python -m flash_helpers.build --target 90 "<kernel id>" …``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flash_helpers.build import BuildError, CompiledKernel, build_kernels
from flash_helpers.kernel_configs import (
    ForwardKernel,
    ForwardTraits,
    get_kernel_configs,
    parse_kernel_name_into_config,
)


def parse_kernel(name: str) -> ForwardKernel:
    """Reads ``ForwardKernel.short_form()`` back.

    Raises:
        ValueError: no configuration, or no such trait.
    """
    config, _, traits = name.partition(" | ")
    on = [word.strip() for word in traits.split("+") if word.strip()]
    known = [field.name for field in fields(ForwardTraits)]
    if unknown := sorted(set(on) - set(known)):
        raise ValueError(f"unknown trait {', '.join(unknown)} in {name!r}; known: {', '.join(known)}")
    return ForwardKernel(parse_kernel_name_into_config(config), ForwardTraits(**dict.fromkeys(on, True)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_helpers.build", description="Build kernels into the cache."
    )
    parser.add_argument("kernels", nargs="*", metavar="ID", help="kernel ids; none: the set that --set names")
    parser.add_argument(
        "--target", type=int, action="append", required=True, help="GPU generation, 90 for sm_90"
    )
    parser.add_argument(
        "--set", default="", metavar="KEY", help="prog, prog_all, tune, all, or 'B_r,B_c' (default: all)"
    )
    parser.add_argument(
        "--jobs", type=int, help="compilations at the same time (default: as cores and memory allow)"
    )
    options = parser.parse_args(arguments)
    try:
        kernels = [parse_kernel(name) for name in options.kernels]
        kernels = kernels or [ForwardKernel(config) for config in get_kernel_configs(options.set)]
        build_with_progress(kernels, options.target, options.jobs)
    except (ValueError, BuildError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def build_with_progress(kernels: list[ForwardKernel], targets: list[int], jobs: int | None = None) -> None:
    """Builds kernels under a progress bar on stderr, then prints each library and what to look at.

    Raises:
        See ``build_kernels``.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("kernels", total=None)
        done_before = 0

        def show(compiled: CompiledKernel, done: int, total: int) -> None:
            bar.update(task, completed=done_before + done, total=done_before + total)

        results = []
        for target in sorted(set(targets)):
            results += build_kernels(kernels, [target], jobs, show)
            done_before = sum(len(result.kernels) for result in results)
    for result in results:
        fresh = sum(not compiled.cached for compiled in result.kernels)
        print(f"sm_{result.target}: {len(result.kernels)} kernels, {fresh} compiled now: {result.path}")
        for compiled in result.kernels:
            if compiled.spill_bytes:
                print(f"  spills {compiled.spill_bytes} bytes a thread: {compiled.kernel.short_form()}")


if __name__ == "__main__":
    sys.exit(main())
