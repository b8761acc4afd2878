"""Every kernel that is built ahead of time: right, repeatable, and the CPU backend's double."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_cases import cpu_result, fp32_reference, inputs

from flash_attention import forward
from flash_helpers.kernel_configs import (
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
    get_kernels_to_build,
)
from flash_helpers.test.utils import error_stats

ALL = get_kernels_to_build()
SEQ_LENS = (128, 512, 2048)
# Of the error against the reference: what remains is the order of float32 sums and the tensor cores' own,
# which move results across a rounding boundary now and then (fp16 at 2048 keys: 0.27 on an H100).
NEAR_CPU = 1 / 3


def ids(config: FlashForwardKernelConfig) -> str:
    return config.short_form()


@pytest.mark.parametrize("config", ALL, ids=ids)
def test_every_kernel(config):
    for seq_len in SEQ_LENS:
        case = (config.dtype, config.d_head, seq_len)
        q, k, v = inputs(*case)
        expected, pytorch = fp32_reference(*case)
        o = torch.full_like(q, math.nan)
        forward(config, q, k, v, o)
        again = torch.full_like(q, math.nan)
        forward(config, q, k, v, again)
        assert torch.equal(o, again), f"seq_len {seq_len}: two equal calls differ"
        error = error_stats(o, expected)
        assert error.max_abs <= 2 * pytorch.max_abs, f"seq_len {seq_len}: {error}, PyTorch's {pytorch}"
        assert error.rel_frobenius <= 2 * pytorch.rel_frobenius, f"seq_len {seq_len}: {error}"
        twin = cpu_result(*case, config.B_c, config.optimized_softmax)
        distance = error_stats(o, twin)
        assert distance.rel_frobenius <= NEAR_CPU * error.rel_frobenius, (
            f"seq_len {seq_len}: {distance} from the CPU backend, {error} from the reference"
        )


@pytest.mark.parametrize("config", sorted({*get_kernel_progression_configs(), ALL[0], ALL[-1]}), ids=ids)
def test_nan_around_the_tensors_never_leaks(config):
    seq_len, heads = 128, 3

    def guarded(seed: int) -> torch.Tensor:
        around = torch.full(
            (2, seq_len + 256, heads + 2, config.d_head),
            math.nan,
            dtype=config.dtype.to_torch_dtype(),
            device="cuda",
        )
        inner = around[:, 128 : 128 + seq_len, 1 : 1 + heads]
        return inner.copy_(torch.randn(inner.shape, generator=torch.Generator().manual_seed(seed)))

    q, k, v = (guarded(seed) for seed in range(3))
    around = torch.full(
        (2, seq_len + 256, heads + 2, config.d_head), 77.0, dtype=config.dtype.to_torch_dtype(), device="cuda"
    )
    o = around[:, 128 : 128 + seq_len, 1 : 1 + heads]
    forward(config, q, k, v, o)
    assert torch.equal(o, forward(config, *(x.contiguous() for x in (q, k, v))))
    assert o.isfinite().all()
    o.fill_(77.0)
    assert (around == 77).all()


@pytest.mark.parametrize("config", get_kernel_progression_configs(), ids=ids)
def test_nan_in_a_visible_place_is_shown(config):
    q, k, v = (x.clone() for x in inputs(config.dtype, config.d_head, 128))
    k[0, 100, 0, 3] = math.nan
    v[0, 5, 1, 7] = math.nan
    o = forward(config, q, k, v)
    assert o[:, :, 0].isnan().all()
    assert o[:, :, 1, 7].isnan().all()
    assert o.isnan().sum() == 128 * config.d_head + 128
