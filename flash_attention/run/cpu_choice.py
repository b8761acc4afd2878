"""What runs on the CPU, and why: PyTorch's own attention where it computes the same, else the CPU backend."""

from __future__ import annotations

from typing import Any

import torch

from flash_attention.devices import backend
from flash_attention.run.cpu_backward_choice import cpu_backward_choice
from flash_attention.run.insisted import insisted
from flash_helpers.kernels.ampere.forward.config import D_HEADS, FlashForwardKernelConfig
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.numeric_class import NumericClass
from flash_helpers.kernels.problem import FORWARD, AttentionProblem
from flash_helpers.select.candidates import class_reason, kernel_for, size_reason
from flash_helpers.select.chosen import Choice
from flash_helpers.select.pytorch_attention import PyTorchAttention

# Keys per step on the CPU: of 64, 128, 256 and 512 the quickest with PyTorch's matrix products (2 cores with
# AVX-512, 512 to 4096 keys, head sizes 64 and 128).
CPU_B_C = 256


def choice_on(
    problem: AttentionProblem, device: torch.device, config: KernelConfig | None, explained: bool
) -> Choice:
    """What runs a problem on the CPU. There is one choice, and nothing to build.

    Args:
        problem: the problem.
        device: the CPU.
        config: the configuration that the caller insists on; None: choose. The CPU backend has every feature,
            whatever the kernels of the family have.
        explained: of no influence here.

    Raises:
        InfeasibleConfigError: ``config`` does not hold the problem's heads.
    """
    if config is None:
        return cpu_choice(problem) if problem.direction == FORWARD else cpu_backward_choice(problem)
    obstacle = size_reason(config, problem, [config])
    if problem.invariant and obstacle is None:
        obstacle = class_reason(numeric_class(config), numeric_class(cpu_choice(problem).kernel.config))
    return insisted(problem, config, obstacle)


def numeric_class(config: Any) -> NumericClass:
    """What the bits of a row depend on where the CPU backend takes the steps of a configuration."""
    return NumericClass(
        products="float32 products of 64 rows by PyTorch",
        dtype=config.dtype,
        key_tile=config.B_c,
        reference="exact",
        exponent="fused" if config.optimized_softmax else "scaled",
        row_sums="torch",
    )


def cpu_choice(problem: AttentionProblem) -> Choice:
    """The choice of the library for tensors on the CPU.

    Of the configuration only B_c and the softmax variant influence what the CPU backend computes. Its head
    size is the smallest that holds the tensors', so that ``config=`` takes it.
    """
    d_head = next(d for d in D_HEADS if d >= max(problem.d_head, problem.d_head_v))
    kernel = kernel_for(
        FlashForwardKernelConfig(
            problem.dtype, d_head, 64, CPU_B_C, 4, False, False, False, 0, 0, 0, False, True
        ),
        problem,
    )
    if problem.invariant:
        reason = f"numerics='invariant': the CPU backend takes 64 rows and {CPU_B_C} keys at a time, always"
        return Choice(kernel, reason, numeric_class=numeric_class(kernel.config))
    against = backend("cpu_fused").reason_against(
        problem.d_head,
        problem.d_head_v,
        problem.softcap,
        problem.sinks,
        problem.lse,
        problem.out_float32,
        problem.mod is not None,
        problem.dropout,
    )
    if against:
        own = f"the CPU backend computes every problem, here in blocks of {CPU_B_C} keys"
        return Choice(kernel, f"{own}; PyTorch's own attention is faster, but {against}")
    reason = (
        "PyTorch's own attention computes the same as the library's CPU backend, and is faster; batch items "
        "with a score that is not finite go to the CPU backend"
    )
    return Choice(PyTorchAttention(kernel.config, kernel.traits), reason)
