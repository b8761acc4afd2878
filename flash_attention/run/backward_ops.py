"""Gradients of the operators of ``torch_ops``, as operators again, for ``torch.compile`` and AOT autograd.

    flash_attention::attention_backward         -> (dq, dk, dv, dsinks)
    flash_attention::attention_varlen_backward  -> likewise
    flash_attention::attention_cached_backward  -> likewise
    flash_attention::attention_packed_cached_backward  -> likewise; never called, for it has no gradient

Gradients that are not wanted have shape (0,).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attention.call import NAMES, Layout
from flash_attention.devices import DEVICE_TYPES
from flash_attention.options import Options
from flash_attention.run import passes
from flash_attention.run.gradients import Passes, second_derivative
from flash_attention.run.launch_cache import Key
from flash_attention.run.operator_schema import LIBRARY, TAGS, received, schema, sent
from flash_attention.run.operator_schema import NAMES as OPTIONS
from flash_attention.run.passes import Gradients, Saved, Wanted, room_for
from flash_attention.torch_private import without_functionalize

_GIVEN = "Tensor? dout, Tensor? dlse, Tensor out, Tensor lse"
_WANTED = "bool dq, bool dk, bool dv, bool dsinks"


def define(layout: type[Layout]) -> None:
    """Defines the backward operator for calls of a layout, and makes it the derivative of the forward one."""
    end = 3 + len(layout._fields)  # of what comes before the options
    name = NAMES[layout]
    backward = f"{name}_backward"
    LIBRARY.define(
        f"{backward}({_GIVEN}, {schema(layout)}, {_WANTED}) -> (Tensor, Tensor, Tensor, Tensor)", tags=TAGS
    )

    def run(
        dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
    ) -> tuple[Any, ...]:
        q, k, v, *own = args[:end]
        options = received(args[end:-4], None)
        with without_functionalize():
            saved = Saved(q, k, v, options.sinks, out, lse)
            made = passes.backward_pass(saved, layout(*own), options, Wanted(*args[-4:]), dout, dlse)
        return tuple(_nothing(q) if grad is None else grad for grad in made)

    def fake(
        dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
    ) -> tuple[Any, ...]:
        inputs = (*args[:3], received(args[end:-4], None).sinks)
        return tuple(
            room_for(x) if is_wanted and x is not None else _nothing(args[0])
            for x, is_wanted in zip(inputs, args[-4:], strict=True)
        )

    for device_type in DEVICE_TYPES:
        LIBRARY.impl(backward, run, device_type.upper())
    torch.library.register_fake(f"flash_attention::{backward}", fake, lib=LIBRARY)
    torch.library.register_autograd(f"flash_attention::{backward}", _refuse, lib=LIBRARY)
    torch.library.register_autograd(
        f"flash_attention::{name}", _differentiate(layout, end), setup_context=_keep, lib=LIBRARY
    )


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: Layout, options: Options
) -> tuple[Tensor, Tensor]:
    """``passes.forward_pass`` as a call of the operator."""
    rest = sent(options._replace(sinks=sinks)._asdict())
    return getattr(torch.ops.flash_attention, NAMES[type(layout)])(q, k, v, *layout, *rest, True)


def backward_pass(
    saved: Saved,
    layout: Layout,
    options: Options,
    wanted: Wanted,
    dout: Tensor | None,
    dlse: Tensor | None,
    key: Key | None = None,
) -> Gradients:
    """``passes.backward_pass`` as a call of the operator, which is not remembered."""
    q, k, v, sinks, out, lse, _ = saved
    rest = sent(options._replace(sinks=sinks)._asdict())
    operator = getattr(torch.ops.flash_attention, f"{NAMES[type(layout)]}_backward")
    made = operator(dout, dlse, out, lse, q, k, v, *layout, *rest, *wanted[:4])
    dq, dk, dv, dsinks = (grad if asked else None for grad, asked in zip(made, wanted, strict=False))
    return dq, dk, dv, dsinks


# ---------------------------------------------------------------------- the derivative of the operators
def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps the arguments of the forward operator and its results for its derivative."""
    ctx.set_materialize_grads(False)
    ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*output, *(x for x in inputs if isinstance(x, Tensor)))


def _differentiate(layout: type[Layout], end: int) -> Any:
    """The derivative of the forward operator for a layout."""
    name = NAMES[layout]
    places = (0, 1, 2, end + OPTIONS.index("sinks"))

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.others)
        if dout is None and dlse is None:
            return tuple(gradients)
        out, lse, *tensors = ctx.saved_tensors
        left = iter(tensors)
        inputs = [next(left) if kept else x for x, kept in zip(ctx.others, ctx.is_tensor, strict=True)]
        arguments = inputs[:-1]  # without keep_lse
        operators = torch.ops.flash_attention
        if lse.ndim == 1:  # of a graph that was recorded when nobody wanted gradients
            with torch.no_grad():
                lse = getattr(operators, name)(*arguments, True)[1]
        wanted = [ctx.needs_input_grad[place] for place in places]
        made = getattr(operators, f"{name}_backward")(dout, dlse, out, lse, *arguments, *wanted)
        for place, grad, asked in zip(places, made, wanted, strict=True):
            gradients[place] = grad if asked else None
        return tuple(gradients)

    return backward


def _refuse(ctx: Any, *_: Any) -> Any:
    raise second_derivative()


OPERATORS = Passes(forward_pass, backward_pass)


def _nothing(q: Tensor) -> Tensor:
    return q.new_empty(0)
