"""The backward pass on a GPU: tensors in the form that a kernel takes, workspaces, the launch, what is left.

Workspaces come from PyTorch's allocator and are given back with the call: their memory is handed out again
only to what the stream runs afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attention.backends.cuda_backward_form import Form, empty_gradients, prepared
from flash_attention.backends.cuda_kernels import extension, get_kernel, launch_error
from flash_attention.backends.sink_gradient import sink_gradient
from flash_attention.backward_call import BackwardCall
from flash_attention.torch_private import current_device, current_stream
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.select.chosen import Choice

ALIGNMENT = 256  # bytes, of each workspace


class Functions(NamedTuple):
    """Of a loaded kernel: its launch, and the bytes of its workspaces."""

    launch: Callable[..., None]
    workspaces: Callable[..., tuple[int, int, int]]


_functions: dict[int, dict[Kernel, Functions]] = {}  # by device index


class Launched(NamedTuple):
    """A kernel's launch that wrote all gradients but those of sinks; as ``cuda.Launched``.

    Attributes:
        launch: the kernel's function.
        arguments: what it was given.
        workspace: its memory, which begins with delta.
    """

    launch: Callable[..., None]
    arguments: tuple[Any, ...]
    workspace: Tensor


def run_backward(call: BackwardCall, choice: Choice) -> Launched | None:
    """Writes the gradients that a call wants, by the chosen kernel, on the current stream of its device.

    Returns:
        the launch, to be made again; None: there was none.

    Raises:
        as ``flash_attention.backends.cuda.forward``.
    """
    index = call.q.get_device()
    if index != current_device():
        with torch.cuda.device(index):
            return run_backward(call, choice)
    if not (call.q.numel() and call.k.numel() and call.v.numel()):
        empty_gradients(call)
        return None
    form = prepared(call, choice.kernel)
    launched = _launch(choice.kernel, index, form)
    for gradient, written in form.copied:
        gradient.copy_(written[..., : gradient.shape[-1]])
    _write_captured(call, form)
    if call.dsinks is not None and call.scores.sinks is not None:
        call.dsinks.copy_(gradient_of_sinks(call.scores.sinks, form.lse, launched.workspace))
    return launched


def gradient_of_sinks(sinks: Tensor, lse: Tensor, workspace: Tensor) -> Tensor:
    """The gradient of sinks, float32, from what a launch left in its workspace; lse is contiguous."""
    delta = workspace[: lse.numel() * 4].view(torch.float32).view(lse.shape)
    return sink_gradient(sinks, lse, delta)


def _write_captured(call: BackwardCall, form: Form) -> None:
    """The gradients of captured tensors; of one that no score loads it is 0."""
    gathered = {} if form.sums is None else form.sums.sums
    for place, gradient in call.dcaptured.items():
        if place not in gathered:
            gradient.zero_()
    if form.sums is not None:
        form.sums.write(call.dcaptured)


def _launch(kernel: Kernel, index: int, form: Form) -> Launched:
    """Launches a kernel with workspaces of its own."""
    try:
        functions = _functions[index][kernel]
    except KeyError:
        functions = functions_of(kernel, index)
    try:
        tile_bytes = 0 if form.tiles is None else form.tiles.n_bytes
        sizes = (form.lse.numel() * 4, *functions.workspaces(form.arguments), tile_bytes)
        places, total = _places(sizes)
        workspace = torch.empty(total, dtype=torch.uint8, device=form.lse.device)
        begin = workspace.data_ptr()
        *addresses, words = (begin + place if size else 0 for place, size in zip(places, sizes, strict=True))
        mod = form.mod
        if mod is not None and form.tiles is not None:
            mod = mod._replace(tiles=(words, *form.tiles.strides))
        arguments = (form.arguments, current_stream(index), *addresses, *(() if mod is None else (mod,)))
        functions.launch(*arguments)
    except extension().CudaError as error:
        raise launch_error(kernel, index, error) from None
    return Launched(functions.launch, arguments, workspace)


def functions_of(kernel: Kernel, index: int) -> Functions:
    """The functions of a kernel on a device; it is compiled and loaded first where it is not yet.

    Raises:
        as ``flash_attention.backends.cuda.forward``.
    """
    found: Any = get_kernel(kernel, torch.device("cuda", index))
    functions = Functions(found.launch_backward, found.workspaces)
    _functions.setdefault(index, {})[kernel] = functions
    return functions


def _places(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    """Where workspaces of these sizes begin in one piece of memory, and its size."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end
