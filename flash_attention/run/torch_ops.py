"""``attention`` and ``attention_varlen`` as operators of ``torch.library``, for everything that traces.

``torch.compile``, ``torch.export``, fake and meta tensors, dispatch modes and autocast see one operator with
a fake implementation. Eager calls never come here: the dispatcher takes longer than the library's own host
work.

    flash_attention::attention             -> (out, lse)
    flash_attention::attention_out         -> lse; writes out
    flash_attention::attention_varlen      -> (out, lse)
    flash_attention::attention_varlen_out  -> lse; writes out
    flash_attention::attention_cached      -> (out, lse)
    flash_attention::attention_cached_out  -> lse; writes out

Where no LSE is wanted, lse has shape (0,). A configuration travels as its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flash_attention.backends import DEVICE_TYPES
from flash_attention.checks import calls as checks
from flash_attention.checks.options import (
    checked_flag,
    checked_number,
    checked_scale,
    checked_softcap,
    checked_window,
)
from flash_attention.checks.tensors import (
    check_output_kind,
    check_output_strides,
    check_tensors,
    has_own_dispatch,
)
from flash_attention.options import Options
from flash_attention.run import dlpack, eager
from flash_attention.run.eager import Result
from flash_attention.run.tracing import stands_for_another, wants_autocast
from flash_attention.torch_private import dispatch_modes, is_tracing, without_autocast, without_functionalize
from flash_helpers.kernel_configs import parse_kernel_name_into_config
from flash_helpers.kernels.kernel import ForwardConfig

_PACKING = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool validate, "
)
_CACHE = "Tensor seqused_k, Tensor? block_table, bool validate, "
_OPTIONS = (
    "Tensor? sinks, bool causal, float? softmax_scale, SymInt? window_left, SymInt? window_right, "
    "float softcap, bool return_lse, str? config"
)

# Inductor hands the inputs over with the strides they have in eager mode.
_TAGS = (torch.Tag.needs_fixed_stride_order,)

_library = torch.library.Library("flash_attention", "DEF")


# ---------------------------------------------------------------------- from Python to the operators
def call(name: str, leading: tuple[Any, ...], options: Options) -> Result:
    """``attention`` and its like as a call of an operator.

    Args:
        name: of the operator that returns a new output.
        leading: q, k, v and what packs them. Arrays of other libraries make the result one of q's library.
        options: the rest. A tracer's numbers are looked at when the call runs.

    Raises:
        TypeError, ValueError: an option of another type than is promised, which the operator would convert.
    """
    q = leading[0]
    if any(dlpack.is_foreign(x) for x in leading[:3]):
        dlpack.check_writable("out", options.out)
        arrays, options = tuple(map(dlpack.imported, leading)), Options(*map(dlpack.imported, options))
        result = None if _is_traced() else getattr(eager, name)(*arrays, options)
        return dlpack.exported(call(name, arrays, options) if result is None else result, q)
    # Below autograd, where the operators' bodies run, nobody sees who wants a gradient or a tangent.
    inputs = {"q": q, "k": leading[1], "v": leading[2], "sinks": options.sinks}
    check_tensors({name: x for name, x in inputs.items() if isinstance(x, Tensor)})
    causal, softmax_scale, window, softcap, sinks, return_lse, out, config, backend = options
    left, right = checked_window(window)
    if backend is not None or config is not None:
        checks.check_choice(backend, config, q)
    _check_leading(name, leading)
    causal = checked_flag("causal", causal)
    return_lse = checked_flag("return_lse", return_lse)
    scale = None if softmax_scale is None else checked_number("softmax_scale", softmax_scale)
    softcap = checked_number("softcap", softcap)
    config_name = None if config is None else config.short_form()
    rest = (sinks, causal, scale, left, right, softcap, return_lse, config_name)
    operators = torch.ops.flash_attention
    if out is None:
        out, lse = getattr(operators, name)(*leading, *rest)
    elif not is_dynamo_compiling() and stands_for_another(out) and not has_own_dispatch(out):
        # functorch takes no operator that writes one of its tensors; it follows copy_.
        made, lse = getattr(operators, name)(*leading, *rest)
        check_output_kind("out", out, tuple(made.shape), made.dtype, made.device)
        out.copy_(made)
    else:
        lse = getattr(operators, f"{name}_out")(*leading, *rest, out)
    return (out, lse) if return_lse else out


def _check_leading(name: str, leading: tuple[Any, ...]) -> None:
    """What is no tensor among the arguments between v and the options."""
    if name == "attention_varlen":
        checks.check_max_seqlen("max_seqlen_q", leading[5])
        checks.check_max_seqlen("max_seqlen_k", leading[6])
    if len(leading) > 3:
        checked_flag("validate", leading[-1])


def _is_traced() -> bool:
    """Whether somebody records operators: then even what could run at once has to be one."""
    return is_dynamo_compiling() or dispatch_modes() > 0 or is_tracing()


# ---------------------------------------------------------------------- the operators
def _define(
    name: str,
    eager: Callable[..., Any],
    layout: str,
    packing: str = "",
    check_packing: Callable[..., None] | None = None,
) -> None:
    """Defines operators ``name`` and ``name``_out, which call ``eager``.

    Args:
        layout: of q, for messages.
        packing: schema of the arguments between v and the options.
        check_packing: refuses what is wrong with q, k, v and those arguments, as far as it is known without
            reading a tensor.
    """
    n_leading = 3 + packing.count(",")
    schema = f"Tensor q, Tensor k, Tensor v, {packing}{_OPTIONS}"

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        return _run(eager, args[:n_leading], args[n_leading:], None)

    def run_out(*args: Any) -> Tensor:
        return _run(eager, args[:n_leading], args[n_leading:-1], args[-1])[1]

    def fake(*args: Any) -> tuple[Tensor, Tensor]:
        check_call(args[:n_leading], args[n_leading])
        return _fake(args[:3], args[n_leading:])

    def fake_out(*args: Any) -> Tensor:
        check_call(args[:n_leading], args[n_leading])
        return _fake(args[:3], args[n_leading:-1], args[-1])[1]

    def check_call(leading: tuple[Any, ...], sinks: Tensor | None) -> None:
        q, k, v = leading[:3]
        paged = packing == _CACHE and leading[4] is not None
        checks.check_inputs(q, k, v, sinks, layout, paged)
        if check_packing is not None:
            check_packing(*leading)

    _library.define(f"{name}({schema}) -> (Tensor, Tensor)", tags=_TAGS)
    _library.define(f"{name}_out({schema}, Tensor(a!) out) -> Tensor", tags=_TAGS)
    for operator, implementation, shapes in ((name, run, fake), (f"{name}_out", run_out, fake_out)):
        for device_type in DEVICE_TYPES:
            _library.impl(operator, implementation, device_type.upper())
            _library.impl(operator, _autocast(operator, device_type), f"Autocast{device_type.upper()}")
        torch.library.register_fake(f"flash_attention::{operator}", shapes, lib=_library)


def _run(
    eager: Callable[..., Any], leading: tuple[Any, ...], options: tuple[Any, ...], out: Tensor | None
) -> tuple[Tensor, Tensor]:
    sinks, causal, softmax_scale, left, right, softcap, return_lse, name = options
    config = None if name is None else _parsed(name)
    given = Options(causal, softmax_scale, (left, right), softcap, sinks, return_lse, out, config)
    with without_functionalize():
        result = eager(*leading, given)
    return result if return_lse else (result, _no_lse(leading[0]))


def _fake(
    tensors: tuple[Tensor, ...], options: tuple[Any, ...], out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q, _, v = tensors
    _, _, softmax_scale, left, right, softcap, return_lse, _ = options
    checked_window((left, right))
    checked_scale(softmax_scale, q.shape[-1])
    checked_softcap(softcap)
    shape = (*q.shape[:-1], v.shape[-1])
    if out is None:
        out = q.new_empty(shape)
    else:
        check_output_kind("out", out, shape, q.dtype, q.device)
        if all(type(n) is int for n in (*out.shape, *out.stride())):  # a tracer's sizes get no guards here
            check_output_strides("out", out, has_address=False)
    if not return_lse:
        return out, _no_lse(q)
    *batch, seq_len, n_heads, _ = q.shape
    return out, q.new_empty((*batch, n_heads, seq_len), dtype=torch.float32)


def _check_packed(q: Tensor, k: Tensor, _v: Tensor, *packing: Any) -> None:
    checks.check_packing(q, k, *packing[:-1])  # without `validate`: a tensor's numbers are not known yet


def _check_cache(
    q: Tensor, _k: Tensor, _v: Tensor, seqused_k: Tensor, block_table: Tensor | None, _validate: bool
) -> None:
    checks.check_seqused("seqused_k", seqused_k, q)
    if block_table is not None:
        checks.check_block_table(block_table, q)


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.float32)


@functools.cache
def _parsed(name: str) -> ForwardConfig:
    return parse_kernel_name_into_config(name)


# ---------------------------------------------------------------------- autocast
def _autocast(operator: str, device_type: str) -> Callable[..., Any]:
    unseen = without_autocast(device_type)

    def cast_and_call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        if wants_autocast(q, k, v):
            dtype = torch.get_autocast_dtype(device_type)
            q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
        with unseen():
            return getattr(torch.ops.flash_attention, operator)(q, k, v, *rest)

    return cast_and_call


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does it for PyTorch's own attention: float64 and integers stay, and are refused then."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


_define("attention", eager.attention, "(batch, seq, heads, d)")
_define("attention_varlen", eager.attention_varlen, "(total, heads, d)", _PACKING, _check_packed)
_define("attention_cached", eager.attention_cached, "(batch, seq, heads, d)", _CACHE, _check_cache)
