"""GPU tests: the kernels that the collected tests name are built in parallel before the first test."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from filelock import FileLock
from gpu_cases import CONFIG

from flash_helpers import build
from flash_helpers.kernels.families import DIRECTIONS, FAMILIES, family_of, kernel_of
from flash_helpers.kernels.kernel import Kernel

CONFIGS = tuple(direction.config for direction in DIRECTIONS)

_named: set[Kernel] = {kernel_of(CONFIG)}


@pytest.hookimpl(trylast=True)  # behind -k and -m: what is not run needs no kernel
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Notes every kernel and every configuration among the tests' parameters."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        for value in callspec.params.values() if callspec else ():
            if isinstance(value, Kernel):
                _named.add(value)
            elif isinstance(value, CONFIGS):
                _named.add(kernel_of(value))


@pytest.fixture(scope="session", autouse=True)
def _built_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not torch.cuda.is_available():
        return
    begin = time.perf_counter()
    major, minor = torch.cuda.get_device_capability()
    target = 10 * major + minor
    # Of several test processes one builds with all cores; the others wait, and find everything built.
    with FileLock(tmp_path_factory.getbasetemp().parent / "kernels.lock"):
        for family in FAMILIES:
            kernels = [kernel for kernel in _named if family_of(kernel) is family]
            if kernels and family.runs_on(target):
                build.build_kernels(kernels, [target])
    print(f"\n{len(_named)} kernels ready in {time.perf_counter() - begin:.1f} s", file=sys.stderr)
