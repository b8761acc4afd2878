"""One wheel with a compiled kernel, for all tests of installing."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_helpers.build import CompilerNotFoundError
from flash_helpers.build.nvcc import find_nvcc
from flash_helpers.kernel_selection import select_kernels
from flash_helpers.packaging.wheel import build_wheel

KERNEL = "(FP16, 64, 64, 64, 4): async+eager+swizzled+load_0_0_0_tiles+opt_softmax"


@pytest.fixture(scope="session")
def kernel() -> str:
    """The name of the kernel that the wheel brings, for sm_80."""
    return KERNEL


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        find_nvcc()
    except CompilerNotFoundError as error:
        pytest.skip(str(error))
    return build_wheel(tmp_path_factory.mktemp("dist"), {80: select_kernels(KERNEL)})
