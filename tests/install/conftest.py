"""``--torch-versions "2.5.1 2.13.0"``: the matrix on demand; without it, the torch that is there."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch-versions", default="", help="install beside each of these versions of torch")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "torch_version" in metafunc.fixturenames:
        versions = metafunc.config.getoption("--torch-versions", default="") or ""
        metafunc.parametrize("torch_version", versions.split() or ["as it is"], scope="module")
