"""Finding a compiler: missing, wrong, too old, oddly named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash_helpers.build import CompilerNotFoundError, nvcc
from flash_helpers.build.nvcc import find_nvcc
from flash_helpers.build.sass import find_tool


def make_program(path, output="Cuda compilation tools, release 13.0, V13.0.88", code=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch, tmp_path):
    """A machine without any CUDA: tests add what they need."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(nvcc, "_USUAL_FOLDERS", (str(tmp_path / "usual"),))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])


def test_none_at_all(tmp_path):
    with pytest.raises(CompilerNotFoundError) as caught:
        find_nvcc()
    message = str(caught.value)
    assert "version 12.8 or newer" in message
    assert f"{tmp_path}/usual/cuda/bin/nvcc: no such file" in message
    assert "CUDA_HOME" in message
    assert "pip install nvidia-cuda-nvcc==13.0.88 " in message


def test_cuda_home_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    with pytest.raises(CompilerNotFoundError, match="/nonexistent/bin/nvcc: no such file"):
        find_nvcc()


def test_cuda_home_that_does_not_exist_falls_back_to_path(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    program = make_program(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("PATH", f"/usr/bin:{tmp_path}/bin")
    assert find_nvcc().path == program


@pytest.mark.parametrize("spelling", ["{}", ":{}", "{}:", "::{}:", " {} "])
def test_cuda_home_with_stray_colons(monkeypatch, tmp_path, spelling):
    program = make_program(tmp_path / "toolkit" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", spelling.format(tmp_path / "toolkit"))
    found = find_nvcc()
    assert (found.path, found.version, found.build) == (program, (13, 0), "13.0.88")


def test_too_old(monkeypatch, tmp_path):
    make_program(tmp_path / "toolkit" / "bin" / "nvcc", "Cuda compilation tools, release 11.8, V11.8.89")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    with pytest.raises(CompilerNotFoundError, match=r"12\.8 or newer(.|\n)*version 11\.8\.89 is too old"):
        find_nvcc()


def test_too_old_is_passed_over_for_a_newer_one(monkeypatch, tmp_path):
    make_program(tmp_path / "toolkit" / "bin" / "nvcc", "Cuda compilation tools, release 11.8, V11.8.89")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    make_program(tmp_path / "usual" / "cuda-12.8" / "bin" / "nvcc", "release 12.8, V12.8.93")
    newest = make_program(tmp_path / "usual" / "cuda-12.10" / "bin" / "nvcc", "release 12.10, V12.10.1")
    assert find_nvcc().path == newest


@pytest.mark.parametrize(
    ("output", "code"), [("nvcc: cannot execute cicc", 1), ("", 0), ("release candidate", 0)]
)
def test_version_that_cannot_be_read(monkeypatch, tmp_path, output, code):
    make_program(tmp_path / "toolkit" / "bin" / "nvcc", output, code)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    with pytest.raises(
        CompilerNotFoundError, match=rf"no version that can be read \(exit {code}\): '{output}'"
    ):
        find_nvcc()


def test_program_that_cannot_be_run(monkeypatch, tmp_path):
    make_program(tmp_path / "toolkit" / "bin" / "nvcc").write_bytes(b"\x7fELF of another machine")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    with pytest.raises(CompilerNotFoundError, match="cannot be run: "):
        find_nvcc()


def test_replaced_compiler_is_looked_at_again(monkeypatch, tmp_path):
    program = make_program(tmp_path / "toolkit" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert find_nvcc().build == "13.0.88"
    make_program(program, "release 13.1, V13.1.5")
    assert find_nvcc().build == "13.1.5"


def make_pip_toolkit(folder, without=""):
    files = (
        "include/crt/host_config.h", "nvvm/bin/cicc", "include/cuda_runtime.h", "lib/libcudart_static.a",
        "include/nv/target",
    )  # fmt: skip
    for file in files:
        if file != without:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()
    return make_program(folder / "bin" / "nvcc")


def test_pip_package(tmp_path):
    program = make_pip_toolkit(tmp_path / "site-packages" / "nvidia" / "cu13")
    found = find_nvcc()
    assert found.path == program
    assert found.libraries == program.parent.parent / "lib"


def test_pip_package_that_is_incomplete(tmp_path):
    make_pip_toolkit(tmp_path / "site-packages" / "nvidia" / "cu13", without="include/nv/target")
    with pytest.raises(
        CompilerNotFoundError, match=r"incomplete, missing: nvidia-cuda-cccl \(include/nv/target\)"
    ):
        find_nvcc()


def test_requirements_file_pins_the_same_packages():
    lines = (
        (Path(__file__).resolve().parents[3] / "requirements" / "cuda-compiler.txt").read_text().splitlines()
    )
    assert tuple(line for line in lines if not line.startswith("#")) == (
        *nvcc.PIP_PACKAGES,
        *nvcc.DISASSEMBLER_PACKAGES,
    )


def test_disassembler_of_a_pip_package(tmp_path):
    assert find_tool("cuobjdump") is None
    program = make_program(tmp_path / "site-packages" / "nvidia" / "cu13" / "bin" / "cuobjdump")
    assert find_tool("cuobjdump") == program


def test_check_compiler_exits_with_the_answer(tmp_path):
    root = Path(__file__).resolve().parents[3]

    def run(cuda_home):
        environment = {**os.environ, "PYTHONPATH": str(root / "py"), "CUDA_HOME": str(cuda_home)}
        command = [sys.executable, "-m", "flash_helpers.build.check_compiler"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    program = make_program(tmp_path / "toolkit" / "bin" / "nvcc")
    disassembler = make_program(tmp_path / "toolkit" / "bin" / "cuobjdump")
    found = run(tmp_path / "toolkit")
    shown = f"{program}, version 13.0.88; {disassembler}\n"
    assert (found.returncode, found.stdout, found.stderr) == (0, shown, "")
