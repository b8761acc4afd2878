"""Tensors of a GPU that is not there: each says that it is on ``cuda:0``, and holds a CPU tensor.

Whatever PyTorch does with one it does with what it holds, so that all values are right. In every thread an
operator on such a tensor comes to its class, and one that makes a tensor on ``cuda`` of nothing comes to
``MAKERS``, which are registered for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


class HostTensor(Tensor):
    """A tensor on ``cuda:0`` whose numbers are in ``held``, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> HostTensor:
        made: HostTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=GPU,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _on_the_host(operator, args, kwargs or {})

    # What PyTorch asks of the wrapper's own memory, of which it has none.
    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{self.held!r} as {self.device}"


def _is_gpu(device: object) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _on_the_host(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on what the tensors hold; results are on the GPU unless a device is asked for."""
    wrappers = {id(x.held): x for x in tree_leaves((args, kwargs)) if isinstance(x, HostTensor)}
    args, kwargs = tree_map(lambda x: x.held if isinstance(x, HostTensor) else x, (args, kwargs))
    stays = bool(wrappers)
    if kwargs.get("device") is not None:
        stays = _is_gpu(kwargs["device"])
        kwargs["device"] = CPU
        if operator is torch.ops.aten._to_copy.default:  # which may give the tensor itself back on one device
            args = (args[0].clone(), *args[1:]) if _same(args[0], kwargs) else args
    result = operator(*args, **kwargs)
    if not stays:
        return result

    def wrapped(x: object) -> object:
        if not isinstance(x, Tensor) or isinstance(x, HostTensor):
            return x
        known = wrappers.get(id(x))
        return HostTensor(x) if known is None else known

    return tree_map(wrapped, result)


def _same(x: Tensor, kwargs: dict[str, Any]) -> bool:
    return kwargs.get("dtype") in (None, x.dtype) and kwargs.get("memory_format") is None


def held(value: Any) -> Any:
    """A value with its tensors on the CPU: a tensor, or a dataclass, tuple, list or dictionary of some.

    They share their memory with those of the value.
    """
    if isinstance(value, HostTensor):
        return value.held
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(held, value))
    if isinstance(value, tuple | list):
        return type(value)(map(held, value))
    if isinstance(value, dict):
        return {key: held(x) for key, x in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: held(getattr(value, f.name)) for f in fields(value) if f.init}
        changed = {name: x for name, x in given.items() if x is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value


# ---------------------------------------------------------------------- tensors that are made on the device
# Of these PyTorch makes all others; the last ones would resize what they have made first.
MAKERS = (
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "logspace",
    "eye",
    "eye.m",
    "randperm",
    "tril_indices",
    "triu_indices",
)

_registered: list[torch.library.Library] = []


def install() -> None:
    """Makes ``cuda`` a device on which tensors can be made. It stays one until the process ends."""
    if _registered:
        return
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # torch.tensor(data, device="cuda") makes one, and then moves it
    library = torch.library.Library("aten", "IMPL")
    for name in MAKERS:
        library.impl(name, functools.partial(_made, _overload(name)), "CUDA")
    _registered.append(library)
    Tensor.to = _with_an_index(Tensor.to)
    Tensor.cuda = _cuda
    Tensor.pin_memory = lambda self, *_: self
    torch.__future__.set_overwrite_module_params_on_conversion(True)


def _overload(name: str) -> Any:
    operator, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, operator), overload or "default")


def _made(operator: Any, *args: Any, **kwargs: Any) -> Tensor:
    kwargs |= {"device": CPU, "pin_memory": False}
    return HostTensor(operator(*args, **kwargs))


def _with_an_index(to: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``Tensor.to`` that asks no driver which GPU ``cuda`` is."""

    def indexed(x: object) -> object:
        bare = isinstance(x, str | torch.device) and torch.device(x) == torch.device("cuda")
        return GPU if bare else x

    @functools.wraps(to)
    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(map(indexed, args))
        return to(self, *args, **{name: indexed(x) for name, x in kwargs.items()})

    return moved


def _cuda(
    self: Tensor,
    device: object = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    return self.to(GPU, non_blocking=non_blocking, memory_format=memory_format)
