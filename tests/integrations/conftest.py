"""Every test here runs on the CPU, and once more with CUDA as torch's default device where there is a GPU.

``@pytest.mark.only_on("cpu")`` keeps a test to one device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DEVICES = {"cpu": pytest.param("cpu"), "cuda": pytest.param("cuda", marks=pytest.mark.gpu)}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only_on(device): runs on this device alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("only_on")
    names = mark.args if mark else DEVICES
    metafunc.parametrize("device", [DEVICES[name] for name in names], indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device that tensors are made on where a test names none."""
    if request.param == "cpu":
        yield request.param
        return
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)
