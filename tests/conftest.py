"""What all tests share: layers; GPU tests are deselected without a GPU, and run where one is required."""

from __future__ import annotations

import faulthandler
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from clean_tree import CleanTree
from hypothesis import HealthCheck, settings
from layers import LAYERS, compilers_started, layer_of, watch_compilers

GPU_TEST_TIMEOUT_S = 120  # a kernel that hangs must not hang the run: dump the stacks and end the process


# Every run draws the same cases; a long one draws more.
RANDOM_CASES = {"usual": 250, "long": 2500}
for _name, _examples in RANDOM_CASES.items():
    settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile("usual")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch-versions", default="", help="install beside each of these, e.g. '2.5.1 2.13.0'")
    parser.addoption(
        "--gpu-run", default="", help="fail where no GPU test runs; write the outcome to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    file = config.getoption("--gpu-run")
    if file and not hasattr(config, "workerinput"):  # with xdist, reports reach the controller
        from gpu_run import GpuRun

        config.pluginmanager.register(GpuRun(Path(file)))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CleanTree(config.rootpath))
    for layer, meaning in LAYERS.items():
        config.addinivalue_line("markers", f"{layer}: {meaning}")
    watch_compilers()


def _usable_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


@pytest.hookimpl(tryfirst=True)  # -m selects by the layers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its layer, and deselects those that need a GPU which is not there."""
    for item in items:
        item.add_marker(layer_of(item))
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing and not _usable_gpu():
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """A test that seeds nothing draws the same numbers alone, behind any other and on any worker."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_compiler_in_unit(request: pytest.FixtureRequest) -> Iterator[None]:
    compilers_started()
    yield
    if request.node.get_closest_marker("unit") and (started := compilers_started()):
        pytest.fail(f"a test of layer unit ran {started[0]}: mark it with pytest.mark.compile")


@pytest.fixture(autouse=True)
def _end_when_hanging(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    faulthandler.dump_traceback_later(GPU_TEST_TIMEOUT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
