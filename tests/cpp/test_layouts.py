"""Compiles and runs the host tests of the layout headers; needs a C++20 compiler, no CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flash_helpers.build.sources import include_root

HERE = Path(__file__).parent
INCLUDE = include_root()
SOURCES = sorted(HERE.rglob("test_*.cpp"))


def host_compiler() -> list[str]:
    """The command of a C++20 compiler: ``$CXX``, g++, clang++, c++, or nvcc."""
    if os.environ.get("CXX"):
        return os.environ["CXX"].split()
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    if shutil.which("nvcc"):
        return ["nvcc", "-x", "cu"]
    pytest.fail("no C++ compiler found: install g++ or clang++, or set CXX")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(HERE).with_suffix("")))
def test_host(source: Path, tmp_path: Path) -> None:
    program = tmp_path / source.stem
    command = [
        *host_compiler(),
        "-std=c++20",
        "-O1",
        f"-I{HERE / 'fake_cuda'}",  # before the headers that it stands in for
        f"-I{INCLUDE}",
        f"-I{HERE}",
        "-o",
        str(program),
        str(source),
    ]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_every_layout_header_has_a_test() -> None:
    headers = {
        path.stem
        for folder in ("common", "tma")
        for path in (INCLUDE / folder).glob("*.cuh")
        if "FLASH_HOST_DEVICE constexpr" in path.read_text()
    }
    tested = {path.stem.removeprefix("test_") for path in SOURCES}
    assert headers - {"cuda_utils"} <= tested
