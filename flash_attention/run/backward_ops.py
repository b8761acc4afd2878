"""Gradients of the operators of ``torch_ops``, as operators again, for ``torch.compile`` and AOT autograd.

    flash_attention::attention_backward         -> (dq, dk, dv, dsinks, gradients of captured tensors)
    flash_attention::attention_varlen_backward  -> likewise
    flash_attention::attention_cached_backward  -> likewise
    flash_attention::attention_packed_cached_backward  -> likewise; never called, for it has no gradient

Gradients that are not wanted have shape (0,).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from flash_attention.devices import DEVICE_TYPES
from flash_attention.layouts import NAMES, Layout
from flash_attention.mods.tracing import Traced
from flash_attention.options import Options
from flash_attention.run import passes
from flash_attention.run.asked_for import asked_for
from flash_attention.run.gradients import Passes, check_one_gradient, second_derivative
from flash_attention.run.launch_cache import Key
from flash_attention.run.operator_schema import LIBRARY, TAGS, SentMod, received, schema, sent
from flash_attention.run.operator_schema import NAMES as OPTIONS
from flash_attention.run.passes import Gradients, Saved, Wanted, room_for
from flash_attention.torch_private import without_functionalize

_GIVEN = "Tensor? dout, Tensor? dlse, Tensor out, Tensor lse"
_WANTED = "bool dq, bool dk, bool dv, bool dsinks, SymInt[] dcaptured"
_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor[])"


def define(layout: type[Layout]) -> None:
    """Defines the backward operator for calls of a layout, and makes it the derivative of the forward one."""
    end = 3 + len(layout._fields)  # of what comes before the options
    name = NAMES[layout]
    backward = f"{name}_backward"
    LIBRARY.define(f"{backward}({_GIVEN}, {schema(layout)}, {_WANTED}) -> {_RESULTS}", tags=TAGS)

    def run(
        dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
    ) -> tuple[Any, ...]:
        q, k, v, *own = args[:end]
        options, traced = received(args[end:-5], None)
        wanted = Wanted(*args[-5:-1])._replace(captured=tuple(args[-1]))
        with without_functionalize():
            saved = Saved(q, k, v, options.sinks, out, lse, traced)
            made = passes.backward_pass(saved, layout(*own), options, wanted, dout, dlse)
        made = tuple(_nothing(q) if grad is None else grad for grad in made)
        return (*made[:4], list(made[4:]))

    def fake(
        dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
    ) -> tuple[Any, ...]:
        options, traced = received(args[end:-5], None)
        inputs = (*args[:3], options.sinks)
        made = [
            room_for(x) if is_wanted and x is not None else _nothing(args[0])
            for x, is_wanted in zip(inputs, args[-5:-1], strict=True)
        ]
        captured = () if traced is None else traced.tensors
        learnt = [
            x.new_empty(x.shape) if place in args[-1] else _nothing(args[0])
            for place, x in enumerate(captured)
        ]
        return (*made, learnt)

    for device_type in DEVICE_TYPES:
        LIBRARY.impl(backward, run, device_type.upper())
    torch.library.register_fake(f"flash_attention::{backward}", fake, lib=LIBRARY)
    torch.library.register_autograd(f"flash_attention::{backward}", _refuse, lib=LIBRARY)
    torch.library.register_autograd(
        f"flash_attention::{name}", _differentiate(layout, end), setup_context=_keep, lib=LIBRARY
    )


def forward_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layout: Layout,
    options: Options,
    traced: Traced | None = None,
) -> tuple[Tensor, Tensor]:
    """``passes.forward_pass`` as a call of the operator."""
    rest = sent(options._replace(sinks=sinks)._asdict(), SentMod.of(traced))
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
    q, k, v, sinks, out, lse, traced = saved
    rest = sent(options._replace(sinks=sinks)._asdict(), SentMod.of(traced))
    operator = getattr(torch.ops.flash_attention, f"{NAMES[type(layout)]}_backward")
    *made, learnt = operator(
        dout, dlse, out, lse, q, k, v, *layout, *rest, *wanted[:4], list(wanted.captured)
    )
    of_inputs = (grad if asked else None for grad, asked in zip(made, wanted, strict=False))
    return *of_inputs, *(grad if place in wanted.captured else None for place, grad in enumerate(learnt))


# ---------------------------------------------------------------------- the derivative of the operators
def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps the arguments of the forward operator and its results for its derivative."""
    ctx.set_materialize_grads(False)
    given = [list(x) if _is_tensors(x) else x for x in inputs]  # autograd's list may be another later
    ctx.others = [None if isinstance(x, Tensor) or _is_tensors(x) else x for x in given]
    ctx.kinds = [len(x) if _is_tensors(x) else isinstance(x, Tensor) for x in given]
    flat = [y for x in given for y in (x if _is_tensors(x) else (x,)) if isinstance(y, Tensor)]
    ctx.save_for_backward(*output, *flat)


def _is_tensors(x: Any) -> bool:
    """Whether an argument is a list of tensors."""
    return isinstance(x, list | tuple) and len(x) > 0 and all(isinstance(y, Tensor) for y in x)


def _kept(ctx: Any) -> tuple[Tensor, Tensor, list[Any]]:
    """Results and arguments of the forward operator."""
    out, lse, *tensors = ctx.saved_tensors
    left = iter(tensors)
    inputs = [
        x if kind is False else next(left) if kind is True else list(itertools.islice(left, kind))
        for x, kind in zip(ctx.others, ctx.kinds, strict=True)
    ]
    return out, lse, inputs


def _differentiate(layout: type[Layout], end: int) -> Any:
    """The derivative of the forward operator for a layout."""
    name = NAMES[layout]
    places = (0, 1, 2, end + OPTIONS.index("sinks"))
    of_captured = end + len(OPTIONS) + SentMod._fields.index("captured")

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        check_one_gradient(dout, dlse)
        out, lse, inputs = _kept(ctx)
        # A list of tensors has a list of gradients, and to PyTorch an empty list is one, too.
        gradients: list[Any] = [[None] * len(x) if _is_tensors(x) or x == [] else None for x in inputs]
        if dout is None and dlse is None:
            return tuple(gradients)
        arguments = inputs[:-1]  # without keep_lse
        operators = torch.ops.flash_attention
        if lse.ndim == 1:  # of a graph that was recorded when nobody wanted gradients
            with torch.no_grad():
                lse = getattr(operators, name)(*arguments, True)[1]
        needs = asked_for(ctx)
        wanted = [needs[place] for place in places]
        learnt = [i for i, asked in enumerate(needs[of_captured]) if asked]
        operator = getattr(operators, f"{name}_backward")
        *made, of_tensors = operator(dout, dlse, out, lse, *arguments, *wanted, learnt)
        for place, grad, asked in zip(places, made, wanted, strict=True):
            gradients[place] = grad if asked else None
        for i in learnt:
            gradients[of_captured][i] = of_tensors[i]
        return tuple(gradients)

    return backward


def _refuse(ctx: Any, *_: Any) -> Any:
    raise second_derivative()


OPERATORS = Passes(forward_pass, backward_pass)


def _nothing(q: Tensor) -> Tensor:
    return q.new_empty(0)
