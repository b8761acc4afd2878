"""Clean environments: a wheel with a compiled kernel, which needs no compiler, and an install of the sources.

One wheel serves every torch that is asked for (``--torch-versions``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from flash_helpers.build import CompilerNotFoundError
from flash_helpers.build.nvcc import find_nvcc
from flash_helpers.packaging.wheel import copy_checkout

PROGRAM = """
import torch, flash_attention, flash_helpers.build as build
from flash_helpers.kernel_selection import select_kernels
assert "site-packages" in flash_attention.__file__, flash_attention.__file__
x = torch.ones(1, 64, 2, 64, dtype=torch.float16)
(kernel,) = select_kernels({kernel!r})
assert (flash_attention.forward(kernel.config, x, x, x) == 1).all()
assert (flash_attention.attention(x, x, x, causal=True) == 1).all()
assert torch.compile(flash_attention.attention, fullgraph=True, backend="aot_eager")(x, x, x).shape == x.shape
print(torch.__version__)
"""
FIND = "print(build.find_library(build.KernelCache(), kernel, 80))"
WITHOUT_BINDING = """
try:
    import flash_attention_kernels
except ImportError:
    pass
else:
    raise AssertionError("the binding was built without a compiler")
"""
COMPILE = "print(build.build_kernels([kernel], [80])[0].path)"
DEPENDENCIES = ("numpy", "filelock", "typer", "rich", "setuptools")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "torch_version" in metafunc.fixturenames:
        versions = metafunc.config.getoption("--torch-versions").split()
        metafunc.parametrize("torch_version", versions or ["as it is"], scope="module")


def test_types_and_kernels_are_in_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"flash_attention/py.typed", "flash_helpers/py.typed"} <= set(names)
    prebuilt = [name for name in names if name.startswith("flash_helpers/prebuilt/")]
    assert sum(name.endswith(".so") for name in prebuilt) == 1
    assert not any(name.endswith((".o", ".lock")) for name in prebuilt)


@dataclass(frozen=True)
class Environment:
    """A virtual environment with a torch and without this library.

    Attributes:
        python: its interpreter.
        torch_version: as asked for.
        pip: ``pip install`` and the options that this environment needs, for packages of the project alone.
        variables: for programs: a search path without CUDA, a kernel cache of its own.
    """

    python: Path
    torch_version: str
    pip: list[str | Path]
    variables: dict[str, str]

    def run(self, program: str, folder: Path, **more: str) -> str:
        """What a program prints. It runs outside of the checkout."""
        result = subprocess.run(
            [self.python, "-c", program],
            cwd=folder, env=self.variables | more, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    def install(self, what: Path, **variables: str) -> None:
        """Puts a wheel or a folder of sources in the place of what was installed before."""
        for old in self.python.parents[1].glob("lib/python*/site-packages/flash_*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        subprocess.run([*self.pip, what], check=True, env=self.variables | variables)


@pytest.fixture(scope="module")
def environment(torch_version: str, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("clean")
    python = folder / "venv" / "bin" / "python"
    # Without a pip of its own, whose setuptools may be too old to build with.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    own = [*pip, "--no-deps", "--ignore-installed"]
    if torch_version == "as it is":  # the packages that are here, but not this one
        site = "import site; print(site.getsitepackages()[0])"
        place = subprocess.check_output([python, "-c", site], text=True)
        here = [sysconfig.get_paths()["purelib"], *(p for p in sys.path if p.endswith("site-packages"))]
        (Path(place.strip()) / "here.pth").write_text("\n".join(dict.fromkeys(here)))
        own += ["--no-index", "--no-build-isolation"]
    else:
        dependencies = [f"torch=={torch_version}", *DEPENDENCIES]
        subprocess.run([*pip, *dependencies], check=True)
    variables = {n: value for n, value in os.environ.items() if n not in ("PYTHONPATH", "CUDA_HOME")}
    variables |= {"PATH": "/usr/bin:/bin", "FLASH_ATTENTION_CACHE_DIR": str(folder / "cache")}
    return Environment(python, torch_version, own, variables)


def test_wheel(wheel: Path, kernel: str, environment: Environment, tmp_path: Path) -> None:
    environment.install(wheel)
    printed = environment.run(PROGRAM.format(kernel=kernel) + FIND, tmp_path)
    assert "flash_helpers/prebuilt/libraries" in printed
    if environment.torch_version != "as it is":
        assert printed.startswith(environment.torch_version)


def test_sources_without_any_compiler(kernel: str, environment: Environment, tmp_path: Path) -> None:
    """``pip install .`` where no C++ compiler is; a kernel is compiled once there is an nvcc."""
    try:
        nvcc = find_nvcc()
    except CompilerNotFoundError as error:
        pytest.skip(str(error))
    copy_checkout(tmp_path / "source")
    environment.install(tmp_path / "source", CC="/nowhere/cc", CXX="/nowhere/c++")
    environment.run(PROGRAM.format(kernel=kernel) + WITHOUT_BINDING, tmp_path)
    with_nvcc = f"{Path(nvcc.path).parent}:{environment.variables['PATH']}"
    printed = environment.run(PROGRAM.format(kernel=kernel) + COMPILE, tmp_path, PATH=with_nvcc)
    assert (
        f"{environment.variables['FLASH_ATTENTION_CACHE_DIR']}/flash_attention_store-2/libraries" in printed
    )
