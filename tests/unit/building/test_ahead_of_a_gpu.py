"""A small selection of tests, run where no GPU is: its kernels are named, compiled and found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_helpers import build
from flash_helpers.build.cache import KernelCache
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.problem import BACKWARD, FORWARD
from tests.ahead import recorded

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA has a guard of its own"),
]

ROOT = Path(__file__).parents[3]
PATHS = (ROOT, ROOT / "py", ROOT / "tests")
TARGET = 90

CASES = '''
import subprocess, sys, threading

import pytest, torch
import flash_attention

PROGRAM = """
import torch, flash_attention
q = torch.randn(1, 32, 2, 128, device="cuda", dtype=torch.float16)
flash_attention.attention(q, q, q)
"""

def inputs(d=64, device="cuda"):
    generator = torch.Generator(device).manual_seed(1)
    make = lambda: torch.randn(2, 40, 2, d, generator=generator, device=device, dtype=torch.bfloat16)
    return [make().requires_grad_() for _ in range(3)]

@pytest.mark.gpu
def test_both_passes_have_the_values_of_the_cpu():
    grads = []
    for device in ("cuda", "cpu"):
        own = [x.detach().to(device).requires_grad_() for x in inputs()]
        out = flash_attention.attention(*own, causal=True)
        grads.append([out, *torch.autograd.grad(out.float().square().sum(), own)])
        assert out.device.type == device and out.is_cuda == (device == "cuda")
    for x, y in zip(*grads):
        torch.testing.assert_close(x.cpu(), y, rtol=2e-2, atol=2e-2)

@pytest.mark.gpu
def test_another_thread_and_another_process():
    bias = torch.linspace(0, 1, 2, device="cuda")
    q, k, v = (x.detach() for x in inputs())
    call = lambda: flash_attention.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h])
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)

@pytest.mark.gpu
def test_tensors_are_those_of_a_gpu():
    x = torch.arange(6.0, device="cuda").reshape(2, 3)
    x[1].mul_(2)
    total = (x.t() @ x).sum()
    assert total.is_cuda and total.get_device() == 0 and total.item() == 9 + 24 ** 2
    copied = x.cpu().zero_()
    assert not copied.is_cuda and x.tolist() == [[0, 1, 2], [6, 8, 10]]
    assert torch.tensor([1, 2], device="cuda").device == torch.device("cuda", 0)
    with pytest.raises(TypeError):
        x.numpy()

@pytest.mark.gpu
def test_ends_early():
    assert torch.ones(1, device="cuda").item() == 2
'''


def ahead(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    return subprocess.run(
        [sys.executable, "-m", "tests.ahead", *map(str, arguments)],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=1200,
    )


def test_kernels_of_a_selection_are_named_and_built(tmp_path: Path) -> None:
    case, folder, cache = tmp_path / "test_case.py", tmp_path / "asked", tmp_path / "cache"
    case.write_text(CASES)
    options = ("-q", "-p", "no:cacheprovider", "-p", "conftest", f"--rootdir={tmp_path}", "-c", "/dev/null")
    asked = ahead("ask", folder, "--device", "H200", "--limit", "300", "--", "-m", "pytest", *options, case)
    told = asked.stdout + asked.stderr
    assert "4 kernels; 3 tests ran to their end, 0 were skipped, 1 ended early" in told, told
    assert "test_ends_early: " in told
    kernels = list(recorded.read(folder))
    assert sorted((direction_of(k).name, k.config.d_head, k.mod is not None) for k in kernels) == [
        (BACKWARD, 64, False),
        (FORWARD, 64, False),
        (FORWARD, 64, True),
        (FORWARD, 128, False),
    ]

    told = ahead("build", folder, "--into", cache, "--seconds", "600").stdout
    assert "0 missing" in told, told
    libraries = {build.find_library(KernelCache(cache), kernel, TARGET) for kernel in kernels}
    assert None not in libraries
    assert len(libraries) == len({direction_of(kernel).label for kernel in kernels})
    again = ahead("build", folder, "--into", cache).stdout
    assert "0 compiled now" in again, again
