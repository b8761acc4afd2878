"""Calls that record gradients: autograd's functions around the two passes.

Eager calls and those of ``torch.func`` come here. Whoever traces meets the operators of ``torch_ops``, which
run the same passes and have derivatives of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flash_attention.checks.tensors import no_derivative, records_gradients
from flash_attention.devices import backend
from flash_attention.layouts import Layout, PackedCached
from flash_attention.mods.tracing import Traced
from flash_attention.options import Options
from flash_attention.run import launch_cache
from flash_attention.run.asked_for import asked_for
from flash_attention.run.documents import contents_of
from flash_attention.run.launch_cache import Key, Mods
from flash_attention.run.passes import (
    Gradients,
    Saved,
    Wanted,
    backward_pass,
    forward_pass,
    is_deterministic,
)
from flash_attention.torch_private import is_batched, is_transforming, plain_apply

Result = Tensor | tuple[Tensor, Tensor]


class Passes(NamedTuple):
    """What computes a call and its gradients.

    Attributes:
        forward: (q, k, v, sinks, layout, options) to (out, lse).
        backward: (saved, layout, options, wanted, dout, dlse, key) to the gradients; the key is that of the
            call, by which it is remembered, or None.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]


def check_differentiable(layout: Layout, options: Options) -> None:
    """Refuses what has no gradient of a call whose gradients somebody wants.

    Raises:
        NotImplementedError: keys in pages, an output that is given, a limit of SMs.
    """
    if isinstance(layout, PackedCached):
        counts = ("seqused_q", "seqused_k", "block_table")
        given = [name for name in counts if layout.tensors()[name] is not None] or ["n_splits"]
        raise NotImplementedError(
            f"a gradient is wanted, and packed queries with {' and '.join(given)} have none: call under "
            "torch.no_grad(), or pack the queries and keys that count, with cu_seqlens_q and cu_seqlens_k "
            "alone"
        )
    if layout.paged:
        raise NotImplementedError(
            "a gradient is wanted, and keys in pages (block_table) have none: call under torch.no_grad(), "
            "or pass the keys in one piece, without block_table"
        )
    if options.n_sms is not None:
        raise NotImplementedError(
            "a gradient is wanted, and kernels of gradients keep to no limit of SMs (n_sms): pass "
            "n_sms=None, or call under torch.no_grad()"
        )
    if options.out is not None:
        raise NotImplementedError(
            "a gradient is wanted, and an output that is given (out=) has none, for it is written in place: "
            "pass out=None and take the result, or call under torch.no_grad()"
        )


def _forward_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layout: Layout,
    options: Options,
    key: Key | None = None,
    traced: Traced | None = None,
    compared: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor]:
    if key is not None:
        key = launch_cache.with_lse(key)
        behind = launch_cache.behind(layout.slots(), compared)
        result = launch_cache.repeat(key, q, k, v, None, sinks, *behind)
        if result is not None:
            return result
    out, lse = forward_pass(q, k, v, layout, options, key, keep_lse=True, traced=traced)
    assert lse is not None  # it is kept
    return out, lse


def _backward_at_once(
    saved: Saved,
    layout: Layout,
    options: Options,
    wanted: Wanted,
    dout: Tensor | None,
    dlse: Tensor | None,
    key: Key | None = None,
) -> Gradients:
    if key is None or wanted.captured:
        return backward_pass(saved, layout, options, wanted, dout, dlse)
    q, k, v, sinks, out, lse, traced = saved
    key = launch_cache.of_gradients(key, *wanted[:3], is_deterministic(options))
    captured = () if traced is None else traced.tensors
    behind = launch_cache.behind(layout.slots(), (*contents_of(traced), *captured))
    found = launch_cache.repeat_gradients(key, q, k, v, out, lse, dout, dlse, *behind)
    if found is None:
        return backward_pass(saved, layout, options, wanted, dout, dlse, key)
    dq, dk, dv, workspace = found
    dsinks = None
    if wanted.sinks and sinks is not None:
        dsinks = backend("cuda_backward").gradient_of_sinks(sinks, lse, workspace).to(sinks.dtype)
    return dq, dk, dv, dsinks, *(None,) * len(captured)


AT_ONCE = Passes(_forward_at_once, _backward_at_once)


def record(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: Options,
    key: Key | None,
    traced: Traced | None = None,
    compared: tuple[Any, ...] = (),
) -> Result:
    """A call whose gradients are wanted.

    Args:
        q, k, v, layout, options, key: as in ``eager.attend``.
        traced: as in ``passes``.
        compared: of the functions of the user's, where there is a key (``launch_cache.Mods``).
    """
    check_differentiable(layout, options)
    if traced is None:
        return _Attention.apply(q, k, v, options.sinks, layout, options, key)
    # What is captured is an input too, so that autograd sees it.
    return _Attention.apply(q, k, v, options.sinks, layout, options, key, compared, traced, *traced.tensors)


def repeat(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: Options, key: Key, mods: Mods
) -> Result | None:
    """The same for a call that was made before; None: it has to go the long way, which checks it first."""
    if layout.paged or options.out is not None or options.n_sms is not None:
        return None
    _, compared, traced = mods
    if traced is None:
        if is_transforming() or not records_gradients(q, k, v, options.sinks):
            return None
        return _apply_repeated(q, k, v, options.sinks, layout, options, key)
    captured = launch_cache.captured_of(compared)
    if is_transforming() or not records_gradients(q, k, v, options.sinks, *captured):
        return None
    return _apply_repeated(q, k, v, options.sinks, layout, options, key, compared, traced, *captured)


def record_transformed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: Options,
    passes: Passes,
    traced: Traced | None = None,
) -> Result:
    """A call on tensors of ``torch.func``.

    Args:
        passes: what computes it.
        traced: what the user's functions do.
    """
    check_differentiable(layout, options)
    captured = () if traced is None else traced.tensors
    out, lse = _Transformed.apply(q, k, v, options.sinks, layout, options, passes, traced, *captured)
    return (out, lse) if options.return_lse else out


class _Attention(torch.autograd.Function):
    """Attention as a node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: Layout,
        options: Options,
        key: Key | None,
        compared: tuple[Any, ...] = (),
        traced: Traced | None = None,
        *captured: Tensor,
    ) -> Result:
        out, lse = _forward_at_once(q, k, v, sinks, layout, options, key, traced, compared)
        bare = None if traced is None else traced.with_tensors(())
        _keep(ctx, q, k, v, sinks, out, lse, layout, options, AT_ONCE, key, bare, captured)
        return (out, lse) if options.return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        check_one_gradient(dout, dlse)
        needs = asked_for(ctx)
        n_others = len(needs) - 4  # layout, options, what computes it or the key, what is captured, …
        if dout is None and dlse is None:
            return (None,) * len(needs)
        layout, options, passes, key, traced = ctx.kept
        q, k, v, sinks, out, lse, *own = ctx.saved_tensors
        captured: tuple[Tensor, ...] = ()
        places: tuple[int, ...] = ()
        if traced is not None:
            n_captured = len(traced.mod.tensors)
            n_others -= n_captured
            captured = tuple(own[len(own) - n_captured :])
            del own[len(own) - n_captured :]
            traced = traced.with_tensors(captured)
            places = tuple(i for i, asked in enumerate(needs[4 + n_others :]) if asked)
        if own:
            layout = layout.with_tensors(own)
        wanted = Wanted(needs[0], needs[1], needs[2], needs[3], places)
        if torch.is_grad_enabled():  # create_graph=True: somebody may differentiate the gradients
            given = layout, options, wanted, passes, key
            made = _Gradients.apply(q, k, v, sinks, out, lse, traced, dout, dlse, *given, *captured)
        else:
            saved = Saved(q, k, v, sinks, out, lse, traced)
            made = passes.backward(saved, layout, options, wanted, dout, dlse, key)
        return (*made[:4], *(None,) * n_others, *made[4:])


def _keep(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    options: Options,
    passes: Passes,
    key: Key | None,
    traced: Traced | None = None,
    captured: tuple[Tensor, ...] = (),
) -> None:
    """Keeps what ``_Attention.backward`` takes. ``traced`` has no tensors: saved ones take their places."""
    ctx.set_materialize_grads(False)
    if options.dropout_seed is not None:  # the caller may count it up before the backward pass
        options = options._replace(dropout_seed=options.dropout_seed.clone())
    ctx.save_for_backward(q, k, v, sinks, out, lse, *layout.tensors().values(), *captured)
    ctx.kept = layout, options, passes, key, traced


class _Repeated(torch.autograd.Function):
    """The same for a call that was made before; it gives None where none was."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: Layout,
        options: Options,
        key: Key,
        compared: tuple[Any, ...] = (),
        traced: Traced | None = None,
        *captured: Tensor,
    ) -> Result | None:
        behind = launch_cache.behind(layout.slots(), compared)
        found = launch_cache.repeat(launch_cache.with_lse(key), q, k, v, None, sinks, *behind)
        if found is None:
            return None
        out, lse = found
        _keep(ctx, q, k, v, sinks, out, lse, layout, options, AT_ONCE, key, traced, captured)
        return (out, lse) if options.return_lse else out

    backward = _Attention.backward


_apply_repeated = plain_apply(_Repeated)


class _Transformed(torch.autograd.Function):
    """The same as ``torch.func`` takes it, which costs an eager call more than the library's host work.

    The LSE is a result, whether it is used or not.
    """

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: Layout,
        options: Options,
        passes: Passes,
        traced: Traced | None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if traced is None:
            return passes.forward(q, k, v, sinks, layout, options)
        return passes.forward(q, k, v, sinks, layout, options, traced=traced.with_tensors(captured))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, sinks, layout, options, passes, traced, *captured = inputs
        bare = None if traced is None else traced.with_tensors(())
        _keep(ctx, q, k, v, sinks, *output, layout, options, passes, None, bare, tuple(captured))

    backward = _Attention.backward

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        raise under_vmap()

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        raise forward_mode()


class _Gradients(torch.autograd.Function):
    """The gradients of attention as a node of autograd's graph, which nobody can differentiate."""

    @staticmethod
    def forward(*given: Any) -> Gradients:
        saved, (dout, dlse, layout, options, wanted, passes, key) = given[:7], given[7:14]
        return passes.backward(Saved(*saved), layout, options, wanted, dout, dlse, key)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise second_derivative()

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        raise under_vmap()

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        raise forward_mode()


# ---------------------------------------------------------------------- what there is not
def second_derivative() -> NotImplementedError:
    """The error for a gradient of a gradient."""
    return no_derivative("a gradient of attention's gradients is wanted")


def check_one_gradient(dout: Tensor | None, dlse: Tensor | None) -> None:
    """Refuses gradients of the results that stand for many at once.

    Raises:
        NotImplementedError: one is a tensor of ``torch.vmap``, or of ``is_grads_batched=True``.
    """
    if torch.compiler.is_compiling():
        return  # operators get tensors whose memory holds their values
    if (dout is not None and is_batched(dout)) or (dlse is not None and is_batched(dlse)):
        raise under_vmap()


def under_vmap() -> NotImplementedError:
    """The error for tensors of ``torch.vmap`` below others of ``torch.func``, or of autograd's own vmap."""
    return no_derivative(
        "a gradient of attention is wanted under torch.vmap (torch.func.jacrev, is_grads_batched=True and "
        "vectorize=True run it, too)",
        "call with all of its tensors in the batch dimension instead",
    )


def forward_mode() -> NotImplementedError:
    """The error for tangents of ``torch.func.jvp``."""
    return no_derivative("a tangent of forward-mode differentiation is wanted")
