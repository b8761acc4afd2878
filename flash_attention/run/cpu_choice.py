"""What runs on the CPU, and why: PyTorch's own attention where it computes the same, else the CPU backend."""

from __future__ import annotations

from flash_attention.devices import backend
from flash_helpers.kernels.ampere.forward.config import D_HEADS, FlashForwardKernelConfig
from flash_helpers.select.candidates import kernel_for
from flash_helpers.select.problem import AttentionProblem
from flash_helpers.select.pytorch_attention import PyTorchAttention
from flash_helpers.select.select import Choice

# Keys per step on the CPU: of 64, 128, 256 and 512 the quickest with PyTorch's matrix products (2 cores with
# AVX-512, 512 to 4096 keys, head sizes 64 and 128).
CPU_B_C = 256


def cpu_choice(problem: AttentionProblem) -> Choice:
    """The choice for tensors on the CPU.

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
    against = backend("cpu_fused").reason_against(
        problem.d_head, problem.d_head_v, problem.softcap, problem.sinks, problem.lse, problem.out_float32
    )
    if against:
        own = f"the CPU backend computes every problem, here in blocks of {CPU_B_C} keys"
        return Choice(kernel, f"{own}; PyTorch's own attention is faster, but {against}")
    reason = (
        "PyTorch's own attention computes the same as the library's CPU backend, and is faster; batch items "
        "with a score that is not finite go to the CPU backend"
    )
    return Choice(PyTorchAttention(kernel.config, kernel.traits), reason)
