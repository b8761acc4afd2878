"""FlashAttention in which every kernel is data.

``attention``, ``attention_varlen`` and ``sdpa`` choose a kernel; ``explain_choice``, ``last_kernel`` and
``prepare`` are about that choice. ``forward``, ``backward``, ``forward_timed`` and ``backward_timed`` run
exactly the kernel that a configuration describes (``flash_helpers.kernel_configs``).
All run where the tensors are: GPU or CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_attention.api import forward, forward_timed
from flash_attention.attention import attention, attention_varlen, last_kernel
from flash_attention.backward import backward, backward_timed
from flash_attention.compat.sdpa import sdpa
from flash_attention.merge import merge
from flash_helpers import __version__
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.lazy import lazy_names
from flash_helpers.select.pytorch_attention import PyTorchAttention

if TYPE_CHECKING:
    from flash_attention.run.choices import explain_choice, prepare

__getattr__, __dir__ = lazy_names(__name__, {"flash_attention.run.choices": ("explain_choice", "prepare")})

__all__ = [
    "AttentionProblem",
    "PyTorchAttention",
    "__version__",
    "attention",
    "attention_varlen",
    "backward",
    "backward_timed",
    "explain_choice",
    "forward",
    "forward_timed",
    "last_kernel",
    "merge",
    "prepare",
    "sdpa",
]
