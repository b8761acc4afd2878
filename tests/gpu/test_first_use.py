"""Kernels that are not built when they are first called: within a capture, and by many processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flash_helpers.build.store import STORE
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig

TIME_LIMIT_S = 110
# Of no set, so that it is built nowhere.
RARE = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4, True, False, False, 0, 0, 0, False, True)

SETUP = f"""
import os, torch
from flash_attention import attention
from flash_attention.errors import KernelNotBuiltError
from flash_helpers.kernel_configs import parse_kernel_name_into_config

config = parse_kernel_name_into_config({RARE.short_form()!r})
q, v = (torch.full((1, 64, 2, 64), x, dtype=torch.float16, device="cuda") for x in (0.0, 3.0))
"""
CALL = """
assert (attention(q, q, v, config=config) == 3).all()
print("right")
"""
CAPTURE = """
def captured():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, q, v, config=config)
    graph.replay()
    torch.cuda.synchronize()
    return out

os.environ["FLASH_ATTENTION_JIT"] = "0"
try:
    captured()
except KernelNotBuiltError:
    print("refused")
os.environ["FLASH_ATTENTION_JIT"] = "1"
assert (captured() == 3).all()
print("captured")
"""


def start(program: str, cache: Path) -> subprocess.Popen[str]:
    """A process with a kernel cache of its own, empty at first."""
    return subprocess.Popen(
        [sys.executable, "-c", SETUP + program],
        env={**os.environ, "FLASH_ATTENTION_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> list[str]:
    """What it prints. A process that takes too long is ended."""
    try:
        out, err = process.communicate(timeout=TIME_LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.split()


def test_the_first_call_is_captured(tmp_path: Path) -> None:
    """Where nothing may be compiled it is refused; after that a capture works, in which it is compiled."""
    assert said(start(CAPTURE, tmp_path)) == ["refused", "captured"]


def test_eight_processes_call_at_once(tmp_path: Path) -> None:
    processes = [start(CALL, tmp_path) for _ in range(8)]
    assert [said(process) for process in processes] == [["right"]] * 8
    for kind in ("objects/*/*.o", "libraries/*/*.so"):
        assert len(list(tmp_path.glob(f"{STORE}/{kind}"))) == 1
