"""What each process does first that is run ahead: it gets a GPU, and its kernels are written down."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import uuid
from pathlib import Path

# The environment of such processes: where they write, which GPU it is, seconds of a test.
FOLDER, DEVICE, LIMIT = "KERNELS_AHEAD_FOLDER", "KERNELS_AHEAD_DEVICE", "KERNELS_AHEAD_LIMIT"
GUARD = "guard.so"  # in the folder
GUARD_SOURCE = Path(__file__).with_name("guard.cpp")


def begin(folder: Path, device: str) -> None:
    """Gives this process a GPU that is not there. Torch must not be imported yet.

    Args:
        folder: where ``ask`` has compiled ``guard.cpp``, and where kernels are written down.
        device: the GPU, a name of ``KNOWN_DEVICES``.
    """
    _load_guard(folder / GUARD)
    from flash_helpers.kernels.device_facts import device_facts
    from tests.ahead import cuda_api, host_tensor, recorded

    cuda_api.install(device_facts(device))
    host_tensor.install()
    recorded.install(recorded.Journal(folder / f"{os.getpid()}-{uuid.uuid4().hex}.asked"))
    recorded.believe_in_host_tensors()


def begin_as_told() -> None:
    """``begin`` in a process whose environment asks for it."""
    if FOLDER in os.environ:
        begin(Path(os.environ[FOLDER]), os.environ[DEVICE])


def _load_guard(guard: Path) -> None:
    """Loads ``guard.cpp``, before torch, which looks for CUDA once, when it is imported."""
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before: the GPU has to be pretended first")
    ctypes.CDLL(str(guard), mode=ctypes.RTLD_GLOBAL)


def compile_guard(guard: Path) -> None:
    """Compiles ``guard.cpp``, where it has not been. ``torch`` is found, not imported.

    Raises:
        OSError: it cannot be compiled here; the message says what is missing.
    """
    if guard.exists():
        return
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise OSError("torch is not installed; install its build for the CPU")
    torch = Path(found.origin).parent
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise OSError(
            f"{torch} is built with CUDA, which has a guard of its own; use torch's build for the CPU"
        )
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-I{torch}/include", str(GUARD_SOURCE)]
    command += ["-o", str(guard), f"-Wl,-rpath,{torch}/lib", f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise OSError(f"g++ does not compile {GUARD_SOURCE}: {run.stderr[-2000:]}")
