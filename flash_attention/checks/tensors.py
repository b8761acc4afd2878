"""Checks of the tensors of a call, shared by all backends and made before anything is launched.

A message names the argument, what was given, what is allowed and what to do. A call on CUDA tensors is
checked when it is new; ``launch_cache`` launches it again without these checks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attention.checks.configs import ForwardPlan, check_fits_device
from flash_attention.checks.memory import (
    ALIGNMENT,
    lost_storage,
    misaligned_stride,
    misalignment,
    missing_memory,
    overlap,
    overlaps_itself,
)
from flash_attention.devices import DEVICE_TYPES
from flash_attention.torch_private import forward_levels, is_batched
from flash_helpers.messages import named_type

ORDINARY_DISPATCH = Tensor.__torch_dispatch__

MAX_BLOCKS = 2**31 - 1  # of a one-dimensional grid

# What to do about an output that lies where it must not, with its name.
OTHER_OUTPUT = "pass an {name} of its own, or {name}=None"
OUTPUT_ALONE = "pass {name}=None to get a new tensor"


def check_forward(plan: ForwardPlan, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None) -> None:
    """All of ``forward``'s contract. Each violation has one exception type.

    Raises:
        TypeError: not a dense tensor; dtype not the configuration's.
        NotImplementedError: an input requires grad in grad mode.
        ValueError: devices, shapes, strides, alignment, lengths, grid, or an o that does not fit.
        DeviceNotSupportedError: the GPU is older than compute capability 8.0.
        InfeasibleConfigError: the configuration does not fit the device.
    """
    config = plan.kernel.config
    tensors = {"q": q, "k": k, "v": v}
    given = tensors if o is None else {**tensors, "o": o}
    check_tensors(given)
    check_no_gradient(given, "forward has no backward pass", "call attention(…, config=kernel_cfg)")
    for name, x in tensors.items():
        if has_own_dispatch(x):
            raise TypeError(
                f"{name} is {named_type(x)}; forward runs at once, on plain tensors: call attention(…, "
                "config=kernel_cfg), which is an operator to those who trace"
            )
    check_dtypes(tensors, plan.dtype, f"kernel_cfg computes in {plan.dtype}")
    check_devices(tensors)
    check_memory({**tensors, "o": o})
    if config.d_head_v != config.d_head:
        raise ValueError(
            f"kernel_cfg has d_head={config.d_head} and d_head_v={config.d_head_v}; forward() takes one head "
            "size for q, k and v: call attention(q, k, v, config=kernel_cfg)"
        )
    if not q.shape == k.shape == v.shape or q.ndim != 4:
        raise ValueError(
            "q, k and v must have one shape (batch, seq, heads, d_head); given "
            f"{shapes_of(tensors)}. attention() takes other lengths and head counts for k and v"
        )
    batch, seq_len, n_heads, d_head = q.shape
    if d_head != config.d_head:
        raise ValueError(
            f"the head size of q, k and v is {d_head}; kernel_cfg has d_head={config.d_head}: take a "
            "configuration for this head size, or call attention(), which picks one"
        )
    for name, x in tensors.items():
        check_rows(name, x)
    if seq_len % plan.seq_multiple:
        below = seq_len // plan.seq_multiple * plan.seq_multiple
        raise ValueError(
            f"seq_len is {seq_len}; kernel_cfg needs a multiple of B_r={config.B_r} and of B_c={config.B_c}: "
            f"the nearest lengths are {below} and {below + plan.seq_multiple}. attention() takes any length"
        )
    check_grid(batch, n_heads, seq_len, config.B_r)
    if o is not None:
        check_output("o", o, tuple(q.shape), plan.dtype, tensors)
    if q.device not in plan.devices:
        check_fits_device(config, q.device)
        plan.devices.add(q.device)


def has_own_dispatch(x: Tensor) -> bool:
    """Whether x is of a class that answers operators itself, as fake tensors do, which have no memory."""
    return type(x).__torch_dispatch__ is not ORDINARY_DISPATCH


def check_tensors(tensors: dict[str, Tensor]) -> None:
    """Dense tensors, whose memory holds their values, that need no tangent."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {named_type(x)}; it must be a torch.Tensor")
        if x.layout is not torch.strided or x.is_nested:
            kind = "nested" if x.is_nested else str(x.layout)
            remedy = ": flash_attention.attention_varlen takes sequences of several lengths" * x.is_nested
            raise TypeError(f"{name} is a {kind} tensor; it must be dense (torch.strided){remedy}")
        if torch.compiler.is_compiling():
            continue  # operators get tensors whose memory holds their values
        if is_batched(x):
            raise no_derivative(
                f"{name} is one of the tensors of torch.vmap, which the kernels cannot read",
                "call with all of them in the batch dimension instead",
            )
        if x.is_neg():
            raise ValueError(
                f"{name} is negated lazily (is_neg), as x.conj().imag is: its memory holds the negative of "
                f"its values. Pass a tensor like {name}.resolve_neg()"
            )
        # Before anybody makes a view or a copy of it, of which PyTorch's own end the process.
        if not (x.is_meta or has_own_dispatch(x)) and (why := lost_storage(x)):
            raise unreadable(name, why)
    check_tangents(tensors)


def check_tangents(tensors: dict[str, Tensor]) -> None:
    """Tensors of which nobody wants a forward-mode derivative."""
    if forward_levels._current_level >= 0:
        for name, x in tensors.items():
            if forward_ad.unpack_dual(x).tangent is not None:
                raise no_derivative(
                    f"{name} has a tangent of forward-mode differentiation", f"pass {name}.detach()"
                )


def check_no_gradient(tensors: Mapping[str, Tensor | None], why: str, remedy: str = "") -> None:
    """Tensors of which nobody wants a gradient.

    Args:
        why: what there is none of, for the message.
        remedy: what else may be done.
    """
    if torch.is_grad_enabled():
        asking = [name for name, x in tensors.items() if x is not None and x.requires_grad]
        if asking:
            raise NotImplementedError(
                f"{', '.join(asking)} require{'s' * (len(asking) == 1)} grad, and {why}: "
                f"call under torch.no_grad(), or pass {asking[0]}.detach()" + f", or {remedy}" * bool(remedy)
            )


def records_gradients(*inputs: object) -> bool:
    """Whether autograd records what is done with these, of which some may be tensors."""
    if not torch.is_grad_enabled():
        return False
    for x in inputs:  # noqa: SIM110  every recorded call comes here, and any() takes three times as long
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def no_derivative(what: str, instead: str = "") -> NotImplementedError:
    """The error for what attention has not: it is differentiated once, in reverse, and not under vmap.

    Args:
        what: was asked for.
        instead: what to do beside what can always be done.
    """
    return NotImplementedError(
        f"{what}, and attention has first derivatives in reverse mode alone: "
        + f"{instead}, or " * bool(instead)
        + "call torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which PyTorch differentiates in every way"
    )


def check_memory(tensors: Mapping[str, Tensor | None]) -> None:
    """Tensors whose elements lie in memory, which a kernel is given the address of."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and not x.is_meta and (why := missing_memory(x)):
            raise unreadable(name, why)


def unreadable(name: str, why: str) -> ValueError:
    """The error for a tensor whose values lie nowhere."""
    return ValueError(f"{name} cannot be read: {why}. Pass a tensor that holds its values")


def check_dtypes(tensors: dict[str, Tensor], dtype: torch.dtype, reason: str) -> None:
    """One element type for all, the given one."""
    if any(x.dtype is not dtype for x in tensors.values()):
        given = ", ".join(f"{name} {x.dtype}" for name, x in tensors.items())
        wrong = next(name for name, x in tensors.items() if x.dtype is not dtype)
        raise TypeError(
            f"the element types are {given}; {reason} (supported: torch.float16, torch.bfloat16), and all "
            f"tensors must have it: convert, e.g. {wrong}.to({dtype})"
        )


def check_devices(tensors: dict[str, Tensor], device_types: tuple[str, ...] = DEVICE_TYPES) -> None:
    """One device for all, of one of these types."""
    devices = {name: x.device for name, x in tensors.items()}
    if len(set(devices.values())) > 1:
        given = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on one device; given {given}: move them with .to(device)")
    name, device = next(iter(devices.items()))
    if device.type not in device_types:
        raise ValueError(
            f"{name} is on device {device}; attention runs on {' and '.join(DEVICE_TYPES)}: move the tensors "
            f"with .to('{DEVICE_TYPES[0]}')"
        )


def check_rows(name: str, x: Tensor, is_output: bool = False, has_address: bool = True) -> None:
    """Rows along the head size: contiguous, and each at a multiple of 16 bytes."""
    if not x.numel():
        return
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        remedy = f"pass {name}.contiguous()"
        reason = f"{name}'s last stride is {x.stride(-1)} (strides {tuple(x.stride())}); it must be 1"
    elif why := misalignment(x) if has_address else misaligned_stride(x):
        remedy = f"pass {name}.clone(memory_format=torch.contiguous_format)"
        reason = f"every row of {name} must start at a multiple of {ALIGNMENT} bytes, but {why}"
    else:
        return
    if is_output:  # a copy of it would be written in its place
        remedy = f"pass {name}=None and copy the result to where it belongs"
    raise ValueError(f"{reason}: {remedy}")


def check_grid(
    batch: int, n_heads: int, seq_len: int, rows: int, of: str = "query", field: str = "B_r"
) -> None:
    """Blocks of the launch: one a query block, head and batch item.

    Args:
        rows: of a block.
        of: what its rows are.
        field: of the configuration that says how many, for the message.
    """
    blocks = batch * n_heads * -(-seq_len // rows)
    if blocks > MAX_BLOCKS or seq_len > MAX_BLOCKS:
        raise ValueError(
            f"batch {batch} x heads {n_heads} x {of} blocks {-(-seq_len // rows)} (seq_len {seq_len} in "
            f"blocks of {field}={rows}) are {blocks} thread blocks; one launch holds {MAX_BLOCKS}: "
            "split the batch"
        )


def check_output(
    name: str, o: Tensor, shape: tuple[int, ...], dtype: torch.dtype, inputs: dict[str, Tensor]
) -> None:
    """An output tensor given by the caller: written in place, so it must be apart from the inputs."""
    check_output_kind(name, o, shape, dtype, next(iter(inputs.values())).device)
    check_output_strides(name, o)
    check_output_apart(name, o, inputs)


def check_output_apart(
    name: str,
    o: Tensor,
    inputs: dict[str, Tensor],
    instead: str = OTHER_OUTPUT,
) -> None:
    """An output in whose memory no input lies.

    Args:
        instead: what to do, for the message.
    """
    for other, x in inputs.items():
        if overlap(o, x):
            raise ValueError(
                f"{name} overlaps {other} in memory, which is still read while {name} is written: "
                + instead.format(name=name)
            )


def check_output_kind(
    name: str, o: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """What is known of an output tensor without its memory."""
    if tuple(o.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(o.shape)}; the result has {shape}: pass {name}=None to get one"
        )
    if o.dtype is not dtype:
        raise TypeError(f"{name} is {o.dtype}; the result is {dtype}: pass an {name} of this type, or None")
    if o.device != device:
        raise ValueError(
            f"{name} is on {o.device}; the inputs are on {device}: pass an {name} there, or None"
        )


def check_output_strides(name: str, o: Tensor, has_address: bool = True) -> None:
    """Rows that a kernel can write, and no element in another's place."""
    check_rows(name, o, is_output=True, has_address=has_address)
    check_output_places(name, o)


def check_output_places(name: str, o: Tensor, instead: str = OUTPUT_ALONE) -> None:
    """No element in another's place."""
    if overlaps_itself(o):
        raise ValueError(
            f"elements of {name} share memory (shape {tuple(o.shape)}, strides {tuple(o.stride())}); each "
            f"needs its own: {instead.format(name=name)}"
        )


def shapes_of(tensors: dict[str, Tensor]) -> str:
    """For messages, e.g. ``q (1, 2, 3, 64), k (1, 2, 3, 64)``."""
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
