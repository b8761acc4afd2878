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
    flash_attention::attention_packed_cached      -> (out, lse)
    flash_attention::attention_packed_cached_out  -> lse; writes out

The first of each two is differentiated by an operator of ``backward_ops``. Where neither the caller nor the
backward pass wants an LSE (``keep_lse``), it has shape (0,). A configuration travels as its name, what
``score_mod`` and ``mask_mod`` do as a text with the tensors and numbers that they captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flash_attention import dlpack
from flash_attention.checks import calls as checks
from flash_attention.checks.options import (
    checked_flag,
    checked_number,
    checked_numerics,
    checked_out_dtype,
    checked_scale,
    checked_sms,
    checked_softcap,
    checked_window,
)
from flash_attention.checks.tensors import (
    check_output_kind,
    check_output_strides,
    check_tensors,
    has_own_dispatch,
    records_gradients,
)
from flash_attention.devices import DEVICE_TYPES
from flash_attention.errors import ModError
from flash_attention.layouts import NAMES, Layout
from flash_attention.mods.recording import ELEMENTS
from flash_attention.mods.tracing import Traced, trace
from flash_attention.options import Options
from flash_attention.run import backward_ops, eager, gradients
from flash_attention.run.functions import mask_function
from flash_attention.run.gradients import Result
from flash_attention.run.operator_schema import LIBRARY, TAGS, SentMod, received, schema, sent
from flash_attention.run.passes import forward_pass
from flash_attention.run.tracing import stands_for_another, traced, wants_autocast
from flash_attention.torch_private import (
    functionalizes,
    is_transformed,
    without_autocast,
    without_functionalize,
)


# ---------------------------------------------------------------------- from Python to the operators
def call(q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: Options) -> Result:
    """A call of attention as a call of the operator for its layout.

    Args:
        q, k, v, layout: the tensors; arrays of other libraries make the result one of q's library.
        options: the rest. A tracer's numbers are looked at when the call runs.

    Raises:
        TypeError, ValueError: an option of another type than is promised, which the operator would convert.
    """
    if dlpack.is_foreign(q) or dlpack.is_foreign(k) or dlpack.is_foreign(v):
        return _call_on_arrays(q, k, v, layout, options)
    # Below autograd, where the operators' bodies run, nobody sees who wants a tangent.
    inputs = {"q": q, "k": k, "v": v, "sinks": options.sinks}
    check_tensors({name: x for name, x in inputs.items() if isinstance(x, Tensor)})
    if options.dropout_p and not traced() and wants_autocast(q, k, v):  # an operator knows no dropout
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (_cast(x, dtype) for x in (q, k, v))
        checks.check_kinds({"q": q, "k": k, "v": v})
        result = eager.attend(q, k, v, layout, options)
        if result is not None:
            return result
    if options.dropout_p:
        raise NotImplementedError(
            f"dropout_p is {options.dropout_p}; weights are dropped at once, on plain tensors: call "
            "attention outside of torch.compile, export and torch.func, with real tensors"
        )
    causal, softmax_scale, window, softcap, sinks, return_lse, out, config, backend = options[:9]
    mod = _sent_mod(q, k, layout, options) if options.has_mods else SentMod.of(None)
    keep_lse = records_gradients(q, k, v, sinks, *mod.captured)
    if keep_lse:
        gradients.check_differentiable(layout, options)
        if _is_transformed(q, k, v, sinks, *mod.captured):
            options = options.checked(q)
            passes = backward_ops.OPERATORS
            return gradients.record_transformed(q, k, v, layout, options, passes, mod.traced())
    left, right = checked_window(window)
    if not (backend is config is options.backward_config is None):
        checks.check_choice(backend, config, q, options.backward_config)
    layout.check_numbers()
    causal = checked_flag("causal", causal)
    return_lse = checked_flag("return_lse", return_lse)
    rest = sent(
        {
            "causal": causal,
            "softmax_scale": None
            if softmax_scale is None
            else checked_number("softmax_scale", softmax_scale),
            "window": (left, right),
            "softcap": checked_number("softcap", softcap),
            "sinks": sinks,
            "return_lse": return_lse,
            "config": config,
            "out_dtype": _sent_dtype(options.out_dtype),
            "n_sms": checked_sms(options.n_sms),
            "deterministic": checked_flag("deterministic", options.deterministic),
            "backward_config": options.backward_config,
            "numerics": checked_numerics(options.numerics),
        },
        mod,
    )
    operators, name = torch.ops.flash_attention, NAMES[type(layout)]
    if out is None:
        out, lse = getattr(operators, name)(q, k, v, *layout, *rest, keep_lse)
    elif not is_dynamo_compiling() and stands_for_another(out) and not has_own_dispatch(out):
        # functorch takes no operator that writes one of its tensors; it follows copy_.
        made, lse = getattr(operators, name)(q, k, v, *layout, *rest, keep_lse)
        check_output_kind("out", out, tuple(made.shape), made.dtype, made.device)
        out.copy_(made)
    else:
        lse = getattr(operators, f"{name}_out")(q, k, v, *layout, *rest, out)
    return (out, lse) if return_lse else out


def _sent_mod(q: Tensor, k: Tensor, layout: Layout, options: Options) -> SentMod:
    """What the user's functions do; they are called here, once each."""
    mask_mod = mask_function(options.mask_mod, q, k, layout, is_read=False)
    if not is_dynamo_compiling():
        return SentMod.of(trace(options.score_mod, mask_mod, q.device))
    from flash_attention.mods.in_graphs import recorded_in_graph

    found = recorded_in_graph(options.score_mod, mask_mod, q.device)
    return SentMod(found.text, found.tensors, found.numbers, [])


def _sent_dtype(out_dtype: torch.dtype | None) -> torch.dtype | None:
    """A type that the operator can be given; whether it fits q is asked there."""
    if out_dtype is None or isinstance(out_dtype, torch.dtype):
        return out_dtype
    return checked_out_dtype(out_dtype, torch.float32)


def _is_transformed(*inputs: Tensor | None) -> bool:
    """Whether torch.func differentiates a call. It takes functions of autograd, no operators' derivatives."""
    if is_dynamo_compiling() or functionalizes():
        return False
    return any(isinstance(x, Tensor) and is_transformed(x) for x in inputs)


def _call_on_arrays(q: Any, k: Any, v: Any, layout: Layout, options: Options) -> Any:
    """``call`` where some of q, k and v are arrays of other libraries."""
    dlpack.check_writable("out", options.out)
    own_q, own_k, own_v = (dlpack.imported(x) for x in (q, k, v))
    layout = type(layout)(*map(dlpack.imported, layout))
    options = Options(*map(dlpack.imported, options))
    result = None if traced() else eager.attend(own_q, own_k, own_v, layout, options)
    return dlpack.exported(call(own_q, own_k, own_v, layout, options) if result is None else result, q)


# ---------------------------------------------------------------------- the operators
def _define(layout: type[Layout]) -> None:
    """Defines the two operators for calls of a layout, which run ``passes.forward_pass``."""
    end = 3 + len(layout._fields)  # of what comes before the options

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        return _run(layout, args[:end], args[end:-1], None, args[-1])

    def run_out(*args: Any) -> Tensor:
        return _run(layout, args[:end], args[end:-1], args[-1])[1]

    def fake(*args: Any) -> tuple[Tensor, Tensor]:
        return _fake(layout, args[:end], args[end:-1], None, args[-1])

    def fake_out(*args: Any) -> Tensor:
        return _fake(layout, args[:end], args[end:-1], args[-1])[1]

    name, arguments = NAMES[layout], schema(layout)
    LIBRARY.define(f"{name}({arguments}, bool keep_lse) -> (Tensor, Tensor)", tags=TAGS)
    LIBRARY.define(f"{name}_out({arguments}, Tensor(a!) out) -> Tensor", tags=TAGS)
    for operator, implementation, shapes in ((name, run, fake), (f"{name}_out", run_out, fake_out)):
        for device_type in DEVICE_TYPES:
            LIBRARY.impl(operator, implementation, device_type.upper())
            LIBRARY.impl(operator, _autocast(operator, device_type), f"Autocast{device_type.upper()}")
        torch.library.register_fake(f"flash_attention::{operator}", shapes, lib=LIBRARY)
    backward_ops.define(layout)


def _run(
    kind: type[Layout],
    leading: tuple[Any, ...],
    options: tuple[Any, ...],
    out: Tensor | None,
    keep_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    q, k, v, *own = leading
    given, traced = received(options, out)
    check_captured(traced, q)
    with without_functionalize():
        out, lse = forward_pass(q, k, v, kind(*own), given, keep_lse=keep_lse, traced=traced)
    return out, (_no_lse(q) if lse is None else lse.contiguous())  # as the fake one


def _fake(
    kind: type[Layout],
    leading: tuple[Any, ...],
    options: tuple[Any, ...],
    out: Tensor | None,
    keep_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    q, k, v, *own = leading
    layout = kind(*own)
    given, traced = received(options, out)
    check_captured(traced, q)
    checks.check_inputs(q, k, v, given.sinks, layout.axes, layout.paged, layout_kv=layout.axes_kv)
    layout.check(q, k)
    checked_window(given.window)
    checked_scale(given.softmax_scale, q.shape[-1])
    checked_softcap(given.softcap)
    checked_sms(given.n_sms)
    checked_numerics(given.numerics)
    dtype = checked_out_dtype(given.out_dtype, q.dtype)
    shape = (*q.shape[:-1], v.shape[-1])
    if out is None:
        out = q.new_empty(shape, dtype=dtype)
    else:
        check_output_kind("out", out, shape, dtype, q.device)
        if all(type(n) is int for n in (*out.shape, *out.stride())):  # a tracer's sizes get no guards here
            check_output_strides("out", out, has_address=False)
    if not (given.return_lse or keep_lse):
        return out, _no_lse(q)
    *batch, seq_len, n_heads, _ = q.shape
    return out, q.new_empty((*batch, n_heads, seq_len), dtype=torch.float32)


def check_captured(traced: Traced | None, q: Tensor) -> None:
    """Captured tensors of a graph, which may be others than those that the mod was recorded with.

    Raises:
        ModError: one is of another type, number of dimensions or device than the mod says.
    """
    if traced is None:
        return
    for i, (x, kind) in enumerate(zip(traced.tensors, traced.mod.tensors, strict=True)):
        what = f"the captured tensor number {i}"
        if ELEMENTS.get(x.dtype) is not kind.element or x.ndim != kind.n_dims:
            raise ModError(
                f"{what} is {x.dtype} of {x.ndim} dimensions; the mod was recorded with {kind.element.label} "
                f"of {kind.n_dims}: record the graph again"
            )
        if x.device != q.device:
            raise ModError(
                f"{what}, of shape {tuple(x.shape)}, is on {x.device}, and the queries are on {q.device}. "
                f"Move it there before the call: .to({str(q.device)!r})"
            )


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.float32)


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


for _layout in NAMES:
    _define(_layout)
