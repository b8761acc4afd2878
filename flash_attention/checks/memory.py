"""Which bytes a strided tensor uses: alignment and overlap, from addresses and strides alone."""

from __future__ import annotations

import numpy as np
from torch import Tensor

ALIGNMENT = 16  # bytes; kernels copy chunks of this size
OVERLAP_SEARCH_LIMIT = (
    100_000  # steps of numpy's exact overlap search; beyond it two tensors count as overlapping
)


def misalignment(x: Tensor) -> str | None:
    """Why some row of x does not start at a multiple of 16 bytes, or None."""
    if offset := x.data_ptr() % ALIGNMENT:
        return f"its first element is {offset} bytes past a multiple of {ALIGNMENT} bytes"
    return misaligned_stride(x)


def misaligned_stride(x: Tensor) -> str | None:
    """As ``misalignment``, of the strides alone."""
    for dim in range(x.ndim - 1):
        stride = x.stride(dim)
        if x.shape[dim] > 1 and stride * x.element_size() % ALIGNMENT:
            return (
                f"its stride of dimension {dim} is {stride} elements, which is {stride * x.element_size()} "
                f"bytes and no multiple of {ALIGNMENT}"
            )
    return None


def missing_memory(x: Tensor) -> str | None:
    """Why the elements of x do not lie in memory, or None."""
    if not x.numel():
        return None
    if why := lost_storage(x):
        return why
    try:
        address = x.data_ptr()
    except RuntimeError:
        address = 0
    return None if address else "it stands for another tensor and has no memory of its own"


def lost_storage(x: Tensor) -> str | None:
    """Why the storage of x is too small for its elements, or None; of a wrapper, nothing is known."""
    if not x.numel():
        return None
    try:
        size = x.untyped_storage().nbytes()
    except RuntimeError:
        return None
    needed = x.storage_offset() * x.element_size() + span_bytes(x)
    return f"its storage holds {size} bytes, and its elements need {needed}" if size < needed else None


def span_bytes(x: Tensor) -> int:
    """Bytes from the first element of x to the end of its last one."""
    if not x.numel():
        return 0
    if x.is_contiguous():
        return x.numel() * x.element_size()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one device have a byte in common; exact for interleaved views."""
    x_begin, y_begin = x.data_ptr(), y.data_ptr()
    if x_begin + span_bytes(x) <= y_begin or y_begin + span_bytes(y) <= x_begin:
        return False
    try:
        # numpy takes any limit; its stub knows only the two special values.
        return np.shares_memory(_addresses(x), _addresses(y), OVERLAP_SEARCH_LIMIT)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(x: Tensor) -> bool:
    """Whether elements of x may share memory: a stride is smaller than the extent of those below it."""
    if x.is_contiguous():
        return False
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent = stride * (size - 1) + extent
    return False


class _Addresses:
    """A tensor's addresses as numpy's array interface. Nothing is read, so that they may be a GPU's."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "typestr": f"<i{size}",
            "data": (x.data_ptr(), True),
            "version": 3,
        }


def _addresses(x: Tensor) -> np.ndarray:
    return np.asarray(_Addresses(x))
