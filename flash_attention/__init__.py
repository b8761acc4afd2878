"""FlashAttention in which every kernel is data.

``attention``, ``attention_varlen`` and ``sdpa`` choose a kernel; ``explain_choice``, ``last_kernel`` and
``prepare`` are about that choice. ``forward`` and ``forward_timed`` run exactly the kernel that a configuration
describes (``flash_helpers.kernel_configs``). All run on the GPU or the CPU that holds the tensors.
"""

from flash_attention.api import forward, forward_timed
from flash_attention.attention import attention, attention_varlen, last_kernel
from flash_attention.choosing import explain_choice, prepare
from flash_attention.problem import AttentionProblem
from flash_attention.scaled_dot_product import sdpa

__all__ = [
    "AttentionProblem",
    "attention",
    "attention_varlen",
    "explain_choice",
    "forward",
    "forward_timed",
    "last_kernel",
    "prepare",
    "sdpa",
]
