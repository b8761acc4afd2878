"""Which tensors the Hopper family's bulk tensor copies (TMA) can reach, from addresses and strides alone.

The Ampere family takes the others: it copies row by row.
"""

from __future__ import annotations

from torch import Tensor

from flash_attention.checks.memory import ALIGNMENT

MAX_STRIDE_BYTES = 1 << 40  # strides are below (CUDA driver API, cuTensorMapEncodeTiled)
MAX_SIZE = 1 << 32


def _step_reason(x: Tensor) -> str | None:
    """The size or the stride, of all dimensions but the last, that a tensor map does not take."""
    for dim in range(x.ndim - 1):
        size, stride = x.shape[dim], x.stride(dim)
        if size > MAX_SIZE:
            return f"has {size} elements in dimension {dim}; at most 2^32 can be addressed"
        if size > 1 and stride <= 0:
            return f"has a stride of {stride} in dimension {dim}; strides must be positive"
        if size > 1 and stride * x.element_size() >= MAX_STRIDE_BYTES:
            return f"has a stride of {stride * x.element_size()} bytes in dimension {dim}; at most 2^40 - 16"
    return None


def stride_obstacle(**tensors: Tensor) -> str | None:
    """Why bulk copies cannot reach some of the tensors because of their strides, or None.

    Tensors whose rows are not at multiples of 16 bytes, or whose last stride is not 1, are copied before a
    launch whichever family runs, and do not count.

    Args:
        tensors: by the names that the reason is to call them.
    """
    for name, x in tensors.items():
        if x.is_contiguous() or x.stride(-1) != 1:
            continue
        for dim in range(x.ndim - 1):
            size, stride = x.shape[dim], x.stride(dim)
            if size > 1 and stride * x.element_size() % ALIGNMENT:
                break
        else:
            if reason := _step_reason(x):
                return f"{name} {reason}"
    return None
