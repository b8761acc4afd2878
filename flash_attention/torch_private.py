"""Every name that torch does not document and this library uses, each with what stands in for it.

Torch may move such a name in any release. Then the stand-in runs: slower, or with a plainer message, but
right. No other module of this package names a private part of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

NAMES: list[str] = []  # dotted, behind ``torch.``; the tests take each away


def private(path: str, stand_in: Any) -> Any:
    """What torch has at a dotted path; the stand-in where it has nothing there."""
    NAMES.append(path)
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            return stand_in
    return found


# ---------------------------------------------------------------------- who is watching
# How many dispatch modes are active: fake tensors, tracers, counters of operations. Where nobody can say,
# every call takes the operator, which all of them see.
dispatch_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack", lambda: 1)

# How many modes hear of every function of torch that is called, torch.set_default_device's among them, and a
# maker of contexts in which none does. Where torch does not say, they hear of all.
function_modes: Callable[[], int] = private("_C._len_torch_function_stack", lambda: 0)
unheard: Callable[[], AbstractContextManager[Any]] = private(
    "_C.DisableTorchFunction", contextlib.nullcontext
)

# Whether torch.jit.trace runs, which sees operators only.
is_tracing: Callable[[], bool] = private("_C._is_tracing", torch.jit.is_tracing)

# ``forward_levels._current_level`` is negative while nobody differentiates forward. Where torch does not say,
# each tensor is asked for a tangent.
forward_levels: Any = (
    forward_ad
    if private("autograd.forward_ad._current_level", None) is not None
    else SimpleNamespace(_current_level=0)
)


# ---------------------------------------------------------------------- tensors that wrap others
def _no_wrapper(x: Tensor) -> bool:
    """Not known: such a tensor has no address, by which the checks refuse it."""
    return False


_is_batched: Callable[[Tensor], bool] = private("_C._functorch.is_batchedtensor", _no_wrapper)
_is_batched_by_autograd: Callable[[Tensor], bool] = private(
    "_C._functorch.is_legacy_batchedtensor", _no_wrapper
)
is_transformed: Callable[[Tensor], bool] = private("_C._functorch.is_functorch_wrapped_tensor", _no_wrapper)
is_functional: Callable[[Tensor], bool] = private("_is_functional_tensor", _no_wrapper)


def is_batched(x: Tensor) -> bool:
    """Whether x is one of many: of torch.vmap, or of what autograd does by itself (is_grads_batched)."""
    return _is_batched(x) or _is_batched_by_autograd(x)


# Whether a transform of torch.func runs. Where torch does not say, one may.
is_transforming: Callable[[], bool] = private("_C._are_functorch_transforms_active", lambda: True)


# ---------------------------------------------------------------------- autograd
_FunctionBase = private("_C._FunctionBase", None)


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """A function's ``apply`` where no transform of torch.func runs, without what it does for these."""
    if _FunctionBase is None or not hasattr(_FunctionBase, "apply"):
        return function.apply
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


_will_execute = private("_C._will_engine_execute_node", None)


def is_asked_for(node: Any) -> bool:
    """Whether the backward pass that runs goes on to a node of autograd's graph.

    ``torch.autograd.grad`` and ``backward(inputs=…)`` leave out what leads to none of their inputs. Where
    torch does not say, it goes on to every node.
    """
    if _will_execute is None:
        return True
    try:
        return _will_execute(node)
    except RuntimeError:  # the node of an input of theirs, or nobody differentiates by the engine
        return True


# ---------------------------------------------------------------------- dispatch
_DispatchKey = private("_C.DispatchKey", None)
_DispatchKeySet = private("_C.DispatchKeySet", None)
_ExcludeKeys = private("_C._ExcludeDispatchKeyGuard", None)


_includes = private("_C._dispatch_tls_is_dispatch_key_included", None)
_excludes = private("_C._dispatch_tls_is_dispatch_key_excluded", None)
_FUNCTIONALIZE = getattr(_DispatchKey, "Functionalize", None)


def functionalizes() -> bool:
    """Whether torch.func.functionalize runs, which makes wrappers of all that is made."""
    if _includes is None or _excludes is None or _FUNCTIONALIZE is None:
        return False
    return _includes(_FUNCTIONALIZE) and not _excludes(_FUNCTIONALIZE)


def _without(key_name: str) -> Callable[[], AbstractContextManager[Any]] | None:
    """A maker of contexts in which a dispatch key is not asked; None: not with this torch."""
    key = getattr(_DispatchKey, key_name, None)
    if key is None or _DispatchKeySet is None or _ExcludeKeys is None:
        return None
    keys = _DispatchKeySet(key)
    return lambda: _ExcludeKeys(keys)


def without_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A maker of contexts in which autocast does not see the operators of a device type."""
    unseen = _without(f"Autocast{device_type.upper()}")
    return unseen or (lambda: torch.autocast(device_type, enabled=False))


# A maker of contexts in which nothing that is made becomes a wrapper.
without_functionalize: Callable[[], AbstractContextManager[Any]] = (
    _without("Functionalize") or contextlib.nullcontext
)


# Operators as functions: torch.ops.aten.add, and one of its overloads.
OPERATOR: type = private("_ops.OpOverloadPacket", type(torch.ops.aten.add))
OVERLOAD: type = private("_ops.OpOverload", type(torch.ops.aten.add.Tensor))


# ---------------------------------------------------------------------- what tensors say
def _assert(condition: Tensor, message: str) -> None:
    """Waits for the device, which the private one does not."""
    if not condition:
        raise RuntimeError(message)


assert_async: Callable[[Tensor, str], None] = private("_assert_async", _assert)


# ---------------------------------------------------------------------- CUDA
def _exchange_device(index: int) -> int:
    before = torch.cuda.current_device()
    if index >= 0:
        torch.cuda.set_device(index)
    return before


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _no_sleep(cycles: int) -> None:
    """The stream stays idle, so that a time that is taken contains some of the host's."""


# The public ways first make sure that CUDA is started, which a CUDA tensor proves, or make a Stream object.
current_device: Callable[[], int] = private("_C._cuda_getDevice", torch.cuda.current_device)
exchange_device: Callable[[int], int] = private("_C._cuda_exchangeDevice", _exchange_device)
current_stream: Callable[[int], int] = private("_C._cuda_getCurrentRawStream", _current_stream)
is_capturing: Callable[[], bool] = private(
    "_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
sleep: Callable[[int], None] = private("cuda._sleep", _no_sleep)

# What compiled graphs allocate by, a third of the time of torch.empty_like: (shape, strides, dtype), on the
# current device.
empty_strided_cuda: Callable[..., Tensor] = private(
    "_C._dynamo.guards._empty_strided_cuda",
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"),
)
