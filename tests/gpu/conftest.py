"""GPU tests: kernels are built once, in parallel, before the first test."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from gpu_cases import CONFIG
from test_shapes import AMPERE, HOPPER
from test_traits import KERNELS as WITH_TRAITS

from flash_helpers import build
from flash_helpers.kernel_configs import ForwardKernel, get_kernels_to_build


@pytest.fixture(scope="session", autouse=True)
def _built_kernels() -> None:
    if not torch.cuda.is_available():
        return
    begin = time.perf_counter()
    major, minor = torch.cuda.get_device_capability()
    target = 10 * major + minor
    kernels = (
        [ForwardKernel(config) for config in sorted({*get_kernels_to_build(), CONFIG})] + AMPERE + WITH_TRAITS
    )
    build.build_kernels(kernels, [target])
    if target == 90:
        kernels += HOPPER
        build.build_kernels(HOPPER, [target])
    print(f"\n{len(kernels)} kernels ready in {time.perf_counter() - begin:.1f} s", file=sys.stderr)
