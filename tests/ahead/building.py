"""Compiles what was asked for, in parallel, into a cache folder that can be carried."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from flash_attention.run.availability import RELIEFS, TOLERATED_SPILLS
from flash_helpers import build
from flash_helpers.build.cache import KernelCache
from flash_helpers.build.store import STORE, remove_part
from flash_helpers.kernels.device_facts import device_facts
from flash_helpers.kernels.families import direction_of, family_of
from flash_helpers.kernels.kernel import Kernel
from tests.ahead import recorded

AT_ONCE = 16  # kernels between two looks at the clock


def build_all(
    folders: Sequence[Path], into: Path, device: str, jobs: int | None = None, seconds: float = float("inf")
) -> int:
    """Compiles the kernels of some folders, in order; in the end one library a direction holds all.

    Args:
        seconds: after that no kernel is begun.

    Returns:
        0: all are built; 1: some are not.

    Raises:
        ValueError: nothing is written down there.
        OSError: other users can write there; or a compiler or room is missing.
    """
    begin = time.monotonic()
    target = device_facts(device).target
    asked: dict[Kernel, bool] = {}
    for folder in folders:
        for kernel, chosen in recorded.read(folder).items():
            asked[kernel] = chosen or asked.get(kernel, False)
    if not asked:
        raise ValueError(f"no kernel is written down in {', '.join(map(str, folders))}; run ask first")
    fitting = [kernel for kernel in asked if family_of(kernel).runs_on(target)]
    reliefs = {kernel: RELIEFS if asked[kernel] and kernel.mod else 0 for kernel in fitting}
    cache = KernelCache(into)
    built: dict[Kernel, int] = {}  # with bytes of spilled registers a thread
    refused: dict[Kernel, str] = {}
    now, new = fitting, 0
    while now and time.monotonic() - begin <= seconds:
        some, now = now[:AT_ONCE], now[AT_ONCE:]
        for result in _built(some, target, jobs, cache, refused):
            for compiled in result.kernels:
                built[compiled.kernel] = compiled.spill_bytes
                new += not compiled.cached
        now = [*_relieved(some, built, reliefs), *now]
        print(f"{len(built)} of {len(reliefs)} kernels, {time.monotonic() - begin:.0f} s", flush=True)
    for part in ("libraries", "index"):  # each kernel is in one library in the end
        remove_part(into / STORE, part)
    if built:
        build.build_kernels(list(built), [target], jobs, cache=cache)
    for kernel, why in refused.items():
        print(f"not compiled: {kernel.short_form()}: {why}")
    missing = len(reliefs) - len(built)
    print(
        f"{len(built)} kernels for {device} in {into}, {new} compiled now, {missing} missing, "
        f"{len(asked) - len(fitting)} run on no {device}; {time.monotonic() - begin:.0f} s"
    )
    return 1 if missing else 0


def _built(
    kernels: Sequence[Kernel], target: int, jobs: int | None, cache: KernelCache, refused: dict[Kernel, str]
) -> Iterable[build.BuildResult]:
    """Results of kernels, without those that the compiler refuses."""
    try:
        return build.build_kernels(kernels, [target], jobs, cache=cache)
    except (build.KernelCompileError, ValueError) as error:
        if len(kernels) == 1:
            refused[kernels[0]] = str(error).splitlines()[0]
            return []
    return [result for kernel in kernels for result in _built([kernel], target, jobs, cache, refused)]


def _relieved(some: Sequence[Kernel], built: dict[Kernel, int], reliefs: dict[Kernel, int]) -> list[Kernel]:
    """What the library compiles in the place of chosen kernels whose mod leaves them too few registers.

    Args:
        reliefs: of each kernel how many of these may follow it; those that are found are added.
    """
    found = []
    for kernel in some:
        if not reliefs[kernel] or built.get(kernel, 0) <= TOLERATED_SPILLS:
            continue
        config = direction_of(kernel).relieved(kernel.config)
        if config is not None and (other := replace(kernel, config=config)) not in reliefs:
            reliefs[other] = reliefs[kernel] - 1
            found.append(other)
    return found
