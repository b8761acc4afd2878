"""The autograd function of context-parallel attention."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention.backends.cpu_backward import delta_of
from flash_attention.backends.sink_gradient import sink_gradient
from flash_attention.distributed import engine, over_heads
from flash_attention.distributed.engine import Plan
from flash_attention.run.gradients import second_derivative


class ContextParallel(torch.autograd.Function):
    """``apply(plan, q, k, v, sinks)`` returns the output and the LSE of this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.plan = plan
        q, k, v = (x.detach().resolve_neg() for x in (q, k, v))  # what travels is memory
        ctx.set_materialize_grads(False)
        if plan.schedule.method == "ulysses":
            out, lse, kept = over_heads.forward(plan, q, k, v, sinks)
            ctx.save_for_backward(sinks, lse, *kept)
        else:
            out, lse = engine.forward(plan, q, k, v, sinks)
            ctx.save_for_backward(sinks, lse, q, k, v, out, lse)
        ctx.heads = (q.shape[2], k.shape[2])
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: somebody may differentiate the gradients
            # The LSE is a result of the call, so that all its inputs are behind the new node.
            made: tuple[Tensor | None, ...] = _Gradients.apply(ctx, ctx.saved_tensors[1], *grads)  # type: ignore[no-untyped-call]
            return made
        return _backward(ctx, *grads)


class _Gradients(torch.autograd.Function):
    """The gradients as a node of autograd's graph, which nobody can differentiate."""

    @staticmethod
    def forward(
        _: Any, ctx: Any, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return _backward(ctx, dout, dlse)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise second_derivative()


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    plan: Plan = ctx.plan
    sinks, _, q, k, v, out, lse = ctx.saved_tensors
    if dout is not None:
        dout = dout.resolve_neg().to(out.dtype)
    if not plan.with_lse:
        dlse = None
    elif dlse is None:  # others may have one, and all ranks send alike
        rows = plan.schedule.layout.lengths[plan.rank]
        dlse = lse.new_zeros((lse.shape[0], ctx.heads[0], rows))
    else:
        dlse = dlse.resolve_neg().float()
    if plan.schedule.method == "ulysses":
        return _over_heads(ctx, plan, dout, dlse, sinks, (q, k, v, out, lse))
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv = engine.backward(plan, dout, dlse, q, k, v, out, lse)
    dsinks = None
    if sinks is not None and ctx.needs_input_grad[4]:
        dsinks = sink_gradient(sinks, lse, delta_of(dout, out, lse, dlse)).to(sinks.dtype)
    return (None, *_in_types(ctx, (dq, dk, dv), q.dtype), dsinks)


def _over_heads(
    ctx: Any,
    plan: Plan,
    dout: Tensor | None,
    dlse: Tensor | None,
    sinks: Tensor | None,
    saved: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    kept = over_heads.Gathered(*saved)
    if dout is None:
        rows = plan.schedule.layout.lengths[plan.rank]
        dout = kept.out.new_zeros((kept.out.shape[0], rows, ctx.heads[0], kept.out.shape[3]))
    dq, dk, dv, dout_heads, dlse_heads = over_heads.backward(plan, dout, dlse, kept, ctx.heads)
    dsinks = None
    if sinks is not None and ctx.needs_input_grad[4]:
        heads = slice(*plan.schedule.heads_of(plan.rank))
        delta = delta_of(dout_heads, kept.out, kept.lse, dlse_heads)
        dsinks = torch.zeros_like(sinks)
        dsinks[heads] = sink_gradient(sinks[heads], kept.lse, delta).to(sinks.dtype)
    return (None, *_in_types(ctx, (dq, dk, dv), kept.q.dtype), dsinks)


def _in_types(ctx: Any, grads: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor | None]:
    """The one rounding of each gradient."""
    wanted = ctx.needs_input_grad[1:4]
    return [grad.to(dtype) if want else None for grad, want in zip(grads, wanted, strict=True)]
