"""Attention with a configuration named by the caller: that kernel runs, or an error says why not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_attention import dlpack
from flash_attention.checks import tensors as checks
from flash_attention.checks.configs import ForwardPlan, forward_plan
from flash_attention.checks.keywords import named_keywords, parameters, unknown_keyword
from flash_attention.devices import backend
from flash_attention.layouts import DENSE
from flash_attention.options import Options
from flash_attention.run import launch_cache, torch_ops
from flash_attention.torch_private import is_tracing, sleep
from flash_helpers.kernels.kernel import ForwardConfig

if TYPE_CHECKING:
    from typing_extensions import Never

HIDE_HOST_CYCLES = 200_000  # GPU clock cycles, about 0.1 ms: longer than the host takes to queue a launch


def forward(
    kernel_cfg: ForwardConfig, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None = None, **unknown: Never
) -> Tensor:
    """Scaled dot-product attention, ``softmax(q kᵀ / sqrt(d_head)) v``, by one kernel.

    Runs on the device of the tensors: a CUDA GPU, on its current stream, or the CPU.

    Args:
        kernel_cfg: the kernel. It is compiled first if it is not built yet.
        q: (batch, seq, heads, d_head), float16 or bfloat16 as the configuration says. Any strides whose
            last is 1; every row at a multiple of 16 bytes. seq a multiple of B_r and of B_c.
        k: like q.
        v: like q.
        o: like q; written and returned. It must not overlap an input. None: a new tensor.

    Returns:
        o (batch, seq, heads, d_head); contiguous if it is new.

    Raises:
        TypeError, ValueError, NotImplementedError, DeviceNotSupportedError, InfeasibleConfigError:
            see ``flash_attention.checks.tensors``.

    Arrays of other libraries that have ``__dlpack__`` are taken for tensors; o is then of q's library.
    """
    if unknown:
        raise unknown_keyword("forward", unknown, parameters(forward))
    if is_tracing():
        checks.check_forward(forward_plan(kernel_cfg), q, k, v, o)
        result = torch_ops.call(q, k, v, DENSE, Options(out=o, config=kernel_cfg))
        assert isinstance(result, Tensor)  # there is no LSE beside it
        return result
    if (result := launch_cache.repeat_forward(kernel_cfg, q, k, v, o)) is not None:
        return result
    if any(map(dlpack.is_foreign, (q, k, v, o))):
        dlpack.check_writable("o", o)
        tensors = map(dlpack.imported, (q, k, v, o))
        return dlpack.exported(forward(kernel_cfg, *tensors), q)
    plan = forward_plan(kernel_cfg)
    given = (q, k, v, o)
    o = _checked_output(plan, *given)
    if o.numel():
        launched = backend("cuda" if q.is_cuda else "cpu").forward(
            plan.kernel, q, k, v, o, None, plan.softmax_scale
        )
        if q.is_cuda:
            made = (o if given[3] is None else None, None, None)
            launch_cache.remember((id(kernel_cfg),), given, (kernel_cfg,), plan.kernel, launched, made)
    return o


@named_keywords
def forward_timed(
    kernel_cfg: ForwardConfig, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None = None
) -> tuple[Tensor, float]:
    """``forward`` with the time of the kernel alone.

    On a GPU: CUDA events on the current stream right before and after the kernel, waited for. The stream
    is kept busy while the host queues the three, so that the host's own time does not count. On the CPU:
    the clock.

    Returns:
        o as ``forward`` gives it, and the time in milliseconds; 0 when there was nothing to compute.

    Raises:
        what ``forward`` raises.
    """
    plan = forward_plan(kernel_cfg)
    o = _checked_output(plan, q, k, v, o)
    if not o.numel():
        return o, 0.0
    if q.is_cuda:
        cuda = backend("cuda")
        cuda.get_kernel(plan.kernel, q.device)  # compiled and loaded before the clock runs
        with torch.cuda.device(q.device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            sleep(HIDE_HOST_CYCLES)
            start.record()
            cuda.forward(plan.kernel, q, k, v, o, None, plan.softmax_scale)
            end.record()
            end.synchronize()
        return o, start.elapsed_time(end)
    begin = time.perf_counter()
    backend("cpu").forward(plan.kernel, q, k, v, o, None, plan.softmax_scale)
    return o, 1e3 * (time.perf_counter() - begin)


def _checked_output(plan: ForwardPlan, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None) -> Tensor:
    checks.check_forward(plan, q, k, v, o)
    return torch.empty_like(q, memory_format=torch.contiguous_format) if o is None else o
