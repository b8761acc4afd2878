"""Inputs and references on the GPU, made once and shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from flash_attention.backends import cpu
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig
from flash_helpers.test.utils import ErrorStats, QKVConfig, error_stats, generate_qkv, py_flash_attention

# Tests of everything but the kernels themselves run with this one.
CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, False, True)
HEADS = 2
MS = 1_800_000  # clock cycles of about a millisecond


def check_the_callers_stream(call: Callable[[], object], v: torch.Tensor, out: torch.Tensor) -> None:
    """``call`` writes to ``out`` what ``v`` holds everywhere; what its stream did before is waited for."""
    call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(20):
        v.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50 * MS)
            v.fill_(3)
            call()
            seen = out + 0
        stream.synchronize()
        assert (seen == 3).all()


@cache
def inputs(dtype: DType, d_head: int, seq_len: int) -> tuple[torch.Tensor, ...]:
    """q, k, v (1, seq_len, HEADS, d_head) on the GPU."""
    return generate_qkv(QKVConfig(1, seq_len, HEADS, d_head, dtype, device="cuda"))


@cache
def fp32_reference(dtype: DType, d_head: int, seq_len: int) -> tuple[torch.Tensor, ErrorStats]:
    """PyTorch's attention in float32 on the GPU, and the error that it makes in the inputs' own precision."""
    q, k, v = inputs(dtype, d_head, seq_len)
    expected = py_flash_attention(q, k, v, upcast=True)
    return expected, error_stats(py_flash_attention(q, k, v), expected)


@cache
def cpu_result(dtype: DType, d_head: int, seq_len: int, B_c: int, optimized_softmax: bool) -> torch.Tensor:
    """What the CPU backend gives; the other fields of a configuration do not change it."""
    q, k, v = (x.cpu() for x in inputs(dtype, d_head, seq_len))
    o = torch.empty_like(q)
    config = FlashForwardKernelConfig(
        dtype, d_head, 64, B_c, 4, True, False, True, 0, 0, 0, False, optimized_softmax
    )
    cpu.attention(config, q, k, v, o, None, d_head**-0.5)
    return o.cuda()
