"""The CUDA backend: from a kernel and checked tensors to a launch on the caller's stream.

After its first call on a device a kernel is one dictionary look-up away. A call that repeats an earlier one
does not come here at all (``call_table``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flash_attention.backends.cuda_form import prepared, window_side
from flash_attention.backends.cuda_kernels import (
    build_at_once,
    build_obstacle,
    device_facts_of,
    extension,
    get_kernel,
    launch_error,
    load_kernel,
    registered_kernels,
    spill_bytes,
)
from flash_attention.backends.cuda_tiles import keep, tiles_of
from flash_attention.call import Call, Ran
from flash_attention.torch_private import (
    current_device,
    current_stream,
    empty_strided_cuda,
    exchange_device,
    function_modes,
    is_capturing,
    unheard,
)
from flash_helpers.kernels.arguments import ModArguments
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.launch_features import UNBOUNDED, Features
from flash_helpers.kernels.problem import FORWARD
from flash_helpers.select.chosen import Choice

__all__ = [
    "UNBOUNDED",
    "Features",
    "Launched",
    "build_at_once",
    "build_obstacle",
    "call_table",
    "device_facts_of",
    "forward",
    "get_kernel",
    "load_kernel",
    "maker_like",
    "registered_kernels",
    "run",
    "spill_bytes",
    "window_side",
]

Launch = Callable[..., None]


class Launched(NamedTuple):
    """A kernel's launch function, and what it was given."""

    launch: Launch
    arguments: tuple[Any, ...]


_launches: dict[int, dict[Kernel, Launch]] = {}  # by device index


def run(call: Call, choice: Choice) -> Ran:
    """Launches the chosen kernel on a call's tensors, brought into the form that it takes."""
    form = prepared(call, choice)
    mod, tiles = form.mod, None
    if mod is not None and get_kernel(choice.kernel, call.q.device).needs_tiles:
        tiles = tiles_of(call, choice.kernel, current_stream(call.q.get_device()))
        mod = mod if tiles is None else mod._replace(tiles=tiles.arguments)
    launched = forward(
        choice.kernel,
        form.q,
        form.k,
        form.v,
        form.target,
        form.lse,
        form.scale,
        form.features,
        mod,
        find_tiles=tiles is not None and not tiles.found,
    )
    if tiles is not None:
        keep(tiles)
    if form.o is not call.out:
        call.out.copy_(form.o[..., : call.out.shape[-1]])
    if tiles is None:
        return Ran(choice.kernel, launched, form.workspace)
    return Ran(choice.kernel, launched, form.workspace, tiles.words, tiles.key is not None)


def forward(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
    features: Features | None = None,
    mod: ModArguments | None = None,
    *,
    find_tiles: bool = False,
) -> Launched:
    """Launches ``kernel`` on the current stream of the tensors' device and returns at once.

    The arguments are those that ``flash_attention.checks.tensors`` has let pass: nothing is checked here.

    Args:
        kernel: the kernel, built or not.
        q: (batch, seq_len_q, n_heads, d_head), on a CUDA device; any strides whose last is 1.
        k, v: (batch, seq_len_k, n_heads_kv, d_head).
        o: like q; written.
        lse: (batch, n_heads, seq_len_q), float32, contiguous; written. ``None``: not wanted.
        softmax_scale: factor of the scores.
        features: what the kernel's traits need beside that; None for plain and for causal kernels whose
            head sizes are the tensors'.
        mod: what the kernel's mod captured, beside features; None for a kernel without one.
        find_tiles: write ``mod.tiles`` before.

    Returns:
        The launch, for a ``call_table`` to make it again.

    Raises:
        KernelNotBuiltError: not built, and it may not or cannot be compiled.
        KernelCompileError: the compiler refused it.
        BindingNotBuiltError: the C++ extension is missing.
        DeviceNotSupportedError: the kernel's family does not run on this device.
        KernelLaunchError: CUDA refused it; the message has CUDA's reason and what to do.
    """
    index = q.get_device()
    if index != current_device():
        with torch.cuda.device(index):
            return forward(kernel, q, k, v, o, lse, softmax_scale, features, mod, find_tiles=find_tiles)
    try:
        launch = _launches[index][kernel]
    except KeyError:
        launch = _first_launch(kernel, index)
    arguments = (
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        o.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        current_stream(index),
        q.shape,
        k.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        o.stride(),
        softmax_scale,
        *(() if features is None else (features,)),
        *(() if mod is None else (mod,)),
    )
    try:
        if find_tiles:
            get_kernel(kernel, index).find_tiles(*arguments)
        launch(*arguments)
    except extension().CudaError as error:
        raise launch_error(kernel, index, error) from None
    return Launched(launch, arguments)


def _first_launch(kernel: Kernel, index: int) -> Launch:
    launch = get_kernel(kernel, torch.device("cuda", index)).launch
    _launches.setdefault(index, {})[kernel] = launch
    return launch


# ---------------------------------------------------------------- calls made before
def call_table(direction: str = FORWARD) -> Any:
    """A new, empty ``flash_attention_kernels.CallTable``, or the ``BackwardCallTable`` of gradients."""
    forward_type, backward_type = _call_table_types()
    return forward_type() if direction == FORWARD else backward_type()


@functools.cache
def _call_table_types() -> tuple[Any, Any]:
    kernels = extension()
    kernels.read_tensors(
        type=torch.Tensor,
        parameter_type=torch.nn.Parameter,
        exchange_api=getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),  # from torch 2.10 on
        is_grad_enabled=torch.is_grad_enabled,
        exchange_device=exchange_device,
        current_stream=current_stream,
        is_capturing=is_capturing,
        function_modes=function_modes,
        unheard=unheard,
    )
    return kernels.CallTable, kernels.BackwardCallTable


def maker_like(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that makes a new tensor of the size, strides and type of x, on the current device."""
    return functools.partial(empty_strided_cuda, tuple(x.shape), x.stride(), x.dtype)
