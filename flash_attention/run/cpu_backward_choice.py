"""What computes gradients on the CPU: PyTorch's own backward pass, or the steps of the CPU backend."""

from __future__ import annotations

from dataclasses import replace

from flash_attention.devices import backend
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.problem import BACKWARD, AttentionProblem
from flash_helpers.select.candidates import head_sizes, holds, kernel_for
from flash_helpers.select.chosen import Choice
from flash_helpers.select.pytorch_attention import PyTorchAttentionBackward

CPU_BACKWARD_B_C = 64  # keys per step on the CPU: of 64, 256 and 512 the quickest


def cpu_backward_choice(problem: AttentionProblem) -> Choice:
    """The choice for tensors on the CPU. Of the configuration only ``B_c`` influences what is computed."""
    wanted = (problem.d_head, problem.d_head_v)
    family = directions(BACKWARD)[0]
    configs = (kernel.config for kernel in family.built() if kernel.config.dtype is problem.dtype)
    config = min((config for config in configs if holds(config, wanted)), key=head_sizes)
    kernel = kernel_for(replace(config, B_c=CPU_BACKWARD_B_C), problem)
    against = backend("cpu_fused_backward").reason_against(
        problem.softcap, problem.mod is not None, problem.dropout
    )
    if against:
        own = f"the CPU backend computes every gradient, here in blocks of {CPU_BACKWARD_B_C} keys"
        return Choice(kernel, f"{own}; PyTorch's own backward pass is faster, but {against}")
    reason = (
        "PyTorch's own backward pass in float32 is as exact as the library's CPU backend, and faster; heads "
        "with an LSE that is not finite go to the CPU backend"
    )
    return Choice(PyTorchAttentionBackward(kernel.config, kernel.traits), reason)
