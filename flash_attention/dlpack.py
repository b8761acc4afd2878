"""Arrays of other libraries (NumPy, CuPy, JAX, …) as tensors and back, without copies, by DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_foreign(x: object) -> bool:
    """Whether x is an array of another library that speaks DLPack."""
    return not isinstance(x, Tensor) and hasattr(x, "__dlpack__")


def imported(x: Any) -> Any:
    """A tensor on the memory of x if x is a foreign array, else x itself.

    The producer makes the current stream wait for what it still has to do to x.

    Raises:
        ValueError: torch cannot take it: another device type, an element type that torch lacks, a dimension
            that runs backwards, a mask.
    """
    if not is_foreign(x):
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError(
            f"torch cannot take this {_name(type(x))} by DLPack: its mask would be lost. Pass x.data, or "
            "x.filled(…)"
        )
    # torch ends the process at negative strides, so that they have to be seen before it does.
    strides = tuple(getattr(x, "strides", None) or ())
    if strides and min(strides) < 0:
        raise ValueError(
            f"torch cannot take this {_name(type(x))} by DLPack: its strides are {strides} bytes, and "
            "a negative one is none of a tensor's. Pass a copy, e.g. numpy.ascontiguousarray(x)"
        )
    try:
        return torch.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"torch cannot take this {_name(type(x))} by DLPack: {error}. Pass a float16 or "
            "bfloat16 array on the CPU or on a CUDA device, or a torch.Tensor"
        ) from error


def check_writable(name: str, x: object) -> None:
    """Refuses an output that its own library calls read-only: torch would write it all the same.

    Raises:
        ValueError: a foreign array that nobody may write.
    """
    if not is_foreign(x):
        return
    writable = getattr(getattr(x, "flags", None), "writeable", True)
    if not writable or _package(type(x)) == "jax":
        raise ValueError(
            f"{name} is a {_name(type(x))} that may not be written: pass {name}=None and take the result"
        )


def exported(x: Tensor | tuple[Tensor, ...], like: object) -> Any:
    """Results as arrays of the library that ``like`` comes from, on the same memory; tensors, if it is torch.

    Raises:
        TypeError: that library has no ``from_dlpack``, or not the results' element type.
    """
    if not is_foreign(like):
        return x
    importer = _importer(type(like))
    tensors = x if isinstance(x, tuple) else (x,)
    try:
        arrays = tuple(map(importer, tensors))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"the result is {tensors[0].dtype}, which {_package(type(like))} does not take: {error}. Pass "
            "arrays of a type that both have, such as float16, or torch tensors"
        ) from error
    return arrays if isinstance(x, tuple) else arrays[0]


def _importer(kind: type) -> Callable[[Tensor], Any]:
    package = _package(kind)
    for name in (package, f"{package}.dlpack"):
        importer = getattr(sys.modules.get(name), "from_dlpack", None)
        if importer is not None:
            return importer
    raise TypeError(
        f"{package} has no from_dlpack, so that the result cannot become a {_name(kind)}: pass torch tensors"
    )


def _package(kind: type) -> str:
    # Where an array's class is defined differs between libraries and their versions; its package does not.
    package = kind.__module__.partition(".")[0]
    return {"jaxlib": "jax", "cupy_backends": "cupy"}.get(package, package)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
