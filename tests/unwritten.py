"""NaN in all memory that nobody owns: in free blocks of PyTorch's allocator, shared memory and registers.

A kernel that reads what was not written mostly finds zeros in a fresh process, or what a call like its own
has left, and is right by chance.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

from flash_helpers.build.nvcc import find_nvcc

SOURCE = Path(__file__).with_name("unwritten.cu")
# PyTorch's allocator has pieces of up to 1 MiB in segments of 2 MiB, up to 10 MiB in such of 20 MiB, and
# larger ones alone: of each so much as a test takes.
PIECES = {1 << 20: 24, 10 << 20: 6, 64 << 20: 1}


def fill_with_nan() -> None:
    """Fills the memory of the current device, on the current stream, that no tensor owns."""
    pieces = [
        torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        for size, count in PIECES.items()
        for _ in range(count)
    ]
    del pieces  # the blocks are handed out again as they are
    _run("fill_shared_memory_with_nan")


def words_of_shared_memory_that_are_not_nan() -> int:
    """How many there are, of all SMs; a few, for the system keeps some bytes of each block."""
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    _run("count_other_shared_memory", ctypes.c_void_p(count.data_ptr()))
    return int(count)


def _run(name: str, *arguments: ctypes.c_void_p) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if code := getattr(_library(), name)(*arguments, stream):
        raise RuntimeError(f"{name}: cudaError_t {code}")


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled ``unwritten.cu``; of several test processes one compiles it."""
    major, minor = torch.cuda.get_device_capability()
    folder = Path(tempfile.gettempdir()) / f"flash-attention-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"unwritten-{SOURCE.stat().st_mtime_ns}-{major}{minor}.so"
    with FileLock(folder / "unwritten.lock"):
        if not library.exists():
            part = library.with_suffix(".part")
            command = (find_nvcc().path, f"-arch=sm_{major}{minor}", "-O2", "-shared", "-Xcompiler", "-fPIC")
            subprocess.run((*map(str, command), "-o", str(part), str(SOURCE)), check=True)
            part.rename(library)
    return ctypes.CDLL(str(library))
