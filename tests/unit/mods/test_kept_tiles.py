"""Bits of tiles are kept from the moment on at which the launch that writes them has been queued."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attention.backends import cuda, cuda_tiles
from flash_attention.call import DENSE
from flash_attention.errors import KernelLaunchError
from flash_attention.mods.tracing import trace
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, ForwardKernel
from flash_helpers.kernels.arguments import ModArguments

KERNEL = ForwardKernel(
    FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4, True, True, True, 0, 2, 2, False, True)
)
SEQ = 4096
DOCUMENT = torch.arange(SEQ) // 300


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    cuda_tiles.forget()
    yield
    cuda_tiles.forget()


class Device:
    """Stands for the launches of a kernel whose mask needs bits of tiles.

    Attributes:
        found: of each launch, whether it was to find bits.
        fails: the next launch is refused.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[bool] = []
        self.fails = False
        traced = trace(None, lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k])
        q = torch.zeros(1, SEQ, 1, 8)
        problem = SimpleNamespace(seq_len_q=SEQ, seq_len_k=SEQ, n_heads=1, batch=1)
        scores = SimpleNamespace(traced=traced)
        self.call: Any = SimpleNamespace(q=q, out=q, layout=DENSE, problem=problem, scores=scores)
        self.choice: Any = SimpleNamespace(kernel=KERNEL)
        form = SimpleNamespace(q=q, k=q, v=q, o=q, target=q, lse=None, scale=1.0, features=None)
        form.mod, form.workspace = ModArguments((), ()), None
        monkeypatch.setattr(cuda, "prepared", lambda call, choice: form)
        monkeypatch.setattr(cuda, "get_kernel", lambda *given: SimpleNamespace(needs_tiles=True))
        monkeypatch.setattr(cuda, "current_stream", lambda index: 0)
        monkeypatch.setattr(cuda, "forward", self.forward)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def forward(self, *given: Any, find_tiles: bool) -> Any:
        if self.fails:
            raise KernelLaunchError("out of memory", 2)
        self.found.append(find_tiles)
        return SimpleNamespace()

    def run(self) -> Any:
        return cuda.run(self.call, self.choice)


def test_bits_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    first, second = device.run(), device.run()
    assert device.found == [True, False]
    assert first.kept is second.kept
    assert first.repeatable


def test_a_launch_that_was_refused_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.fails = True
    with pytest.raises(KernelLaunchError):
        device.run()
    device.fails = False
    device.run()
    assert device.found == [True]


def test_a_call_beside_the_first_finds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's may come before the bits of the first have been asked for."""
    device = Device(monkeypatch)
    plain = device.forward

    def forward(*given: Any, find_tiles: bool) -> Any:
        monkeypatch.setattr(cuda, "forward", plain)
        device.run()
        return plain(*given, find_tiles=find_tiles)

    monkeypatch.setattr(cuda, "forward", forward)
    device.run()
    assert device.found == [True, True]
