"""The wheel, with one compiled kernel, in a clean environment: it runs, and the kernel needs no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from flash_helpers.build import CompilerNotFoundError
from flash_helpers.build.nvcc import find_nvcc
from flash_helpers.build.wheel import build_wheel
from flash_helpers.kernel_selection import select_kernels

KERNEL = "(FP16, 64, 64, 64, 4): async+eager+swizzled+load_0_0_0_tiles+opt_softmax"
PROGRAM = f"""
import torch, flash_attention, flash_helpers.build as build
from flash_helpers.kernel_selection import select_kernels
assert "site-packages" in flash_attention.__file__, flash_attention.__file__
x = torch.ones(1, 64, 2, 64, dtype=torch.float16)
(kernel,) = select_kernels("{KERNEL}")
assert (flash_attention.forward(kernel.config, x, x, x) == 1).all()
assert (flash_attention.attention(x, x, x, causal=True) == 1).all()
assert torch.compile(flash_attention.attention, fullgraph=True, backend="aot_eager")(x, x, x).shape == x.shape
print(build.find_library(build.KernelCache(), kernel, 80))
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "torch_version" in metafunc.fixturenames:
        versions = metafunc.config.getoption("--torch-versions").split()
        metafunc.parametrize("torch_version", versions or ["as it is"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        find_nvcc()
    except CompilerNotFoundError as error:
        pytest.skip(str(error))
    return build_wheel(tmp_path_factory.mktemp("dist"), {80: select_kernels(KERNEL)})


def test_types_and_kernels_are_in_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"flash_attention/py.typed", "flash_helpers/py.typed"} <= set(names)
    prebuilt = [name for name in names if name.startswith("flash_helpers/prebuilt/")]
    assert sum(name.endswith(".so") for name in prebuilt) == 1
    assert not any(name.endswith((".o", ".lock")) for name in prebuilt)


def test_clean_environment(wheel: Path, torch_version: str, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [python, "-m", "pip", "install", "--quiet"]
    if torch_version == "as it is":  # the packages that are here, but not this one
        place = subprocess.check_output(
            [python, "-c", "import site; print(site.getsitepackages()[0])"], text=True
        )
        here = [sysconfig.get_paths()["purelib"], *(p for p in sys.path if p.endswith("site-packages"))]
        (Path(place.strip()) / "here.pth").write_text("\n".join(dict.fromkeys(here)))
        subprocess.run([*pip, "--no-deps", "--no-index", "--ignore-installed", wheel], check=True)
    else:
        index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        subprocess.run([*pip, *index, f"torch=={torch_version}", wheel], check=True)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CUDA_HOME")
    }
    environment |= {"PATH": "/usr/bin:/bin", "FLASH_ATTENTION_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        [python, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "flash_helpers/prebuilt/libraries" in result.stdout
