"""Fixtures of the tests that build: a small kernel in place of the real ones, and a cache of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_nvcc import FakeNvcc
from small_root import make_small_root

from flash_helpers.build import KernelCache
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, ForwardKernel


@pytest.fixture
def config() -> FlashForwardKernelConfig:
    return FlashForwardKernelConfig(DType.FP16, 128, 64, 64, 4, True, True, True, 0, 2, 2, True, True)


@pytest.fixture
def kernel(config: FlashForwardKernelConfig) -> ForwardKernel:
    return ForwardKernel(config)


@pytest.fixture
def small_root(tmp_path: Path) -> Path:
    """An include root whose kernel is small."""
    return make_small_root(tmp_path / "include")


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


@pytest.fixture
def fake_nvcc(tmp_path: Path) -> FakeNvcc:
    return FakeNvcc(tmp_path / "toolkit")
