"""Finds the CUDA toolkit's programs, above all the compiler, and says why one cannot be used.

Looked for in ``CUDA_HOME``, on ``PATH``, in the usual folders, and in NVIDIA's pip packages. The
first that is usable wins; the others only show in the error message.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flash_helpers import environment
from flash_helpers.build.errors import CompilerNotFoundError
from flash_helpers.build.workplace import not_quotable

MIN_VERSION = (12, 8)
"""The oldest nvcc accepted. Kernels are C++20 with a struct as template argument, for targets from
sm_80 to sm_120; 12.8 is the first release that knows all of these targets."""

PIP_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
"""What compiles and links a kernel library without a CUDA toolkit. pip's nvcc 13.0 alone pulls in the
newest of the others, and lacks ``nv/target``, which ``cuda_fp16.h`` includes: hence all five, pinned."""

DISASSEMBLER_PACKAGES = ("nvidia-cuda-cuobjdump==13.2.86", "nvidia-cuda-nvdisasm==13.2.86")
"""What reads machine code without a CUDA toolkit. There is no 13.0 of them; 13.2 reads 13.0's code."""

_USUAL_FOLDERS = ("/usr/local", "/opt")
_VERSION = re.compile(r"release (\d+)\.(\d+), V([\d.]+)")


@dataclass(frozen=True)
class Nvcc:
    """A usable CUDA compiler.

    Attributes:
        path: the program.
        version: (major, minor).
        build: the whole version, ``13.0.88``.
        libraries: folder of the CUDA runtime where the compiler does not look for it; None: it does.
    """

    path: Path
    version: tuple[int, int]
    build: str
    libraries: Path | None = None


def find_nvcc() -> Nvcc:
    """The first usable nvcc.

    Raises:
        CompilerNotFoundError: none; the message lists every path tried with the reason, the version
            needed, and what to install.
    """
    refused = []
    for path in candidates("nvcc"):
        if not path.is_file():
            refused.append(f"{path}: no such file")
            continue
        found = _inspect(path, path.stat().st_mtime_ns)
        if isinstance(found, Nvcc):
            return found
        refused.append(f"{path}: {found}")
    needed = ".".join(map(str, MIN_VERSION))
    tried = "\n".join(f"  {line}" for line in dict.fromkeys(refused))
    raise CompilerNotFoundError(
        f"no usable nvcc; version {needed} or newer is needed to compile a kernel. Tried:\n{tried}\n"
        f"Install the CUDA toolkit and set CUDA_HOME to its folder, or: pip install {' '.join(PIP_PACKAGES)}"
    )


def candidates(program: str) -> Iterator[Path]:
    """Paths at which a program of the CUDA toolkit may be, best first; they need not exist."""
    for home in environment.cuda_homes():
        yield home / "bin" / program
    for folder in environment.search_path():
        # Every folder of PATH would make a long list of "no such file".
        if (folder / program).is_file():
            yield folder / program
    for usual in map(Path, _USUAL_FOLDERS):
        yield usual / "cuda" / "bin" / program
        for folder in sorted(usual.glob("cuda-*"), key=_natural_order, reverse=True):
            yield folder / "bin" / program
    for site in dict.fromkeys(map(Path, sys.path)):
        for toolkit in sorted(site.glob("nvidia/cu[0-9]*"), key=_natural_order, reverse=True):
            yield toolkit / "bin" / program


def _natural_order(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


@functools.lru_cache(maxsize=64)
def _inspect(path: Path, mtime_ns: int) -> Nvcc | str:
    """The compiler at ``path``, or why it cannot be used; ``mtime_ns``: a replaced program is asked again."""
    if character := not_quotable(path):
        return f"its path has a {character!r}, which nvcc can't take: install it where the path has none"
    if missing := _missing_from_pip(path):
        return f"incomplete, {missing}"
    try:
        shown = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run: {error}"
    match = _VERSION.search(shown.stdout)
    if match is None:
        text = " ".join((shown.stdout + shown.stderr).split())[:200]
        return f"printed no version that can be read (exit {shown.returncode}): {text!r}"
    version = (int(match[1]), int(match[2]))
    if version < MIN_VERSION:
        return f"version {match[3]} is too old"
    return Nvcc(path, version, match[3], _libraries(path))


def _libraries(path: Path) -> Path | None:
    # pip's toolkit keeps its libraries in lib/, where its own nvcc.profile does not look (lib64/).
    lib = path.parent.parent / "lib"
    return lib if (lib / "libcudart_static.a").is_file() else None


def _missing_from_pip(path: Path) -> str | None:
    """Which of pip's packages is missing, for a compiler that comes from them."""
    toolkit = path.parent.parent
    if toolkit.parent.name != "nvidia" or not re.fullmatch(r"cu\d+", toolkit.name):
        return None
    parts = {
        "include/crt/host_config.h": "nvidia-cuda-crt",
        "nvvm/bin/cicc": "nvidia-nvvm",
        "include/cuda_runtime.h": "nvidia-cuda-runtime",
        "lib/libcudart_static.a": "nvidia-cuda-runtime",
        "include/nv/target": "nvidia-cuda-cccl",
    }
    missing = [f"{package} ({file})" for file, package in parts.items() if not (toolkit / file).is_file()]
    return f"missing: {', '.join(missing)}" if missing else None
