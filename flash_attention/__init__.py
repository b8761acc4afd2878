"""FlashAttention in which every kernel is data.

``forward`` runs exactly the kernel that a configuration describes (``flash_helpers.kernel_configs``), on
the GPU or the CPU that holds the tensors.
"""

from flash_attention.api import forward, forward_timed

__all__ = ["forward", "forward_timed"]
