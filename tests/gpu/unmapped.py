"""Tensors that begin or end where mapped memory does: reading one byte beyond is an illegal access.

PyTorch's allocations lie within segments of megabytes, behind which other memory is mapped most of the time,
so that a kernel that reads too far seldom fails. Here addresses are reserved around each tensor and left
unmapped, by the virtual memory management of CUDA's driver.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3  # of CUmemAllocationType, CUmemLocationType, CUmemAccess_flags


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("allocation_flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Bytes:
    """Device memory as torch takes it over."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _driver(name: str, *arguments: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise RuntimeError(f"{name}: CUresult {code}")


def at_an_edge(x: Tensor, edge: str) -> Tensor:
    """A copy of x, contiguous, behind ("end") or before ("begin") which nothing is mapped; never freed."""
    torch.cuda.init()
    location = _Location(_ON_DEVICE, torch.cuda.current_device())
    properties = _AllocationProperties(type=_PINNED, location=location)
    granularity = ctypes.c_size_t()
    _driver("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0)
    unit, n_bytes = granularity.value, x.numel() * x.element_size()
    mapped = -(-n_bytes // unit) * unit
    reserved, handle = ctypes.c_uint64(), ctypes.c_uint64()
    whole = ctypes.c_size_t(mapped + 2 * unit)
    _driver(
        "cuMemAddressReserve", ctypes.byref(reserved), whole, ctypes.c_size_t(unit), ctypes.c_uint64(0),
        ctypes.c_uint64(0),
    )  # fmt: skip
    begin, size = ctypes.c_uint64(reserved.value + unit), ctypes.c_size_t(mapped)
    _driver("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_uint64(0))
    _driver("cuMemMap", begin, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
    access = _Access(location, _READ_AND_WRITE)
    _driver("cuMemSetAccess", begin, size, ctypes.byref(access), ctypes.c_size_t(1))
    first = begin.value + (mapped - n_bytes if edge == "end" else 0)
    memory = torch.as_tensor(_Bytes(first, n_bytes), device="cuda")
    return memory.view(x.dtype).view(x.shape).copy_(x)
