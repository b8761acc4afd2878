"""Fixtures of the tests that build and of the binding: small kernels, a cache of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_nvcc import FakeNvcc
from small_root import make_small_root

from flash_helpers.build import KernelCache, private_folder
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, ForwardKernel


@pytest.fixture(autouse=True)
def no_private_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that an earlier process left in its private folder would be found, and not compiled."""
    folder = tmp_path_factory.mktemp("private")
    monkeypatch.setattr(private_folder, "_default_folder", lambda: folder / f"kernels_{os.getuid()}")
    monkeypatch.setattr(private_folder, "_folders", [])


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


# ---------------------------------------------------------------- the binding
@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """A kernel that runs on the host and writes what it was given to the output."""
    from echo_kernel import find_echo

    return find_echo(tmp_path_factory.mktemp("echo"))


@pytest.fixture(params=["exchange_api", "attributes"])
def devices(request):
    """Both ways to read tensors; a process knows one, the next user of the backend sets it again."""
    import torch
    from told_calls import Devices

    from flash_attention.backends import cuda

    devices = Devices()
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if request.param == "attributes":
        api = None
    elif api is None:
        pytest.skip("this torch has no DLPack exchange API")
    devices.read_tensors(api)
    yield devices
    cuda._call_table_types.cache_clear()
