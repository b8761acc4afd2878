"""The one way of every attention call on real tensors, at once: check, problem, choice, run, remember."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attention.backends.without_keys import fill_without_keys
from flash_attention.call import Call, Layout, Mask, Packed, Ran, Scores
from flash_attention.checks import calls as checks
from flash_attention.checks.options import checked_scale
from flash_attention.checks.tensors import check_memory
from flash_attention.devices import backend
from flash_attention.options import Options
from flash_attention.run import launch_cache
from flash_attention.run.choices import choose
from flash_attention.run.launch_cache import Key
from flash_attention.run.tracing import not_for_eager
from flash_helpers import generation

Result = Tensor | tuple[Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: Options, key: Key | None = None
) -> Result | None:
    """A call of ``flash_attention.attention``, or of another function for another layout.

    Args:
        key: by which the call is to be remembered (``launch_cache``); None: it is not.

    Returns:
        The result; None: these tensors are not for eager work (``not_for_eager``).
    """
    if not_for_eager(q, k, v, options.sinks, options.out, *layout):
        return None
    options = options.checked(q)
    call = _checked(q, k, v, layout, options)
    problem = call.problem
    if not (problem.batch and problem.seq_len_q and problem.n_heads):
        fill_without_keys(call.out, call.lse, None)  # there is no row, or none but behind the last offset
    elif not isinstance(layout, Packed) and (not problem.seq_len_k or problem.sees_nothing):
        if options.config is not None:
            choose(problem, q.device, options.config)  # which refuses one that cannot compute this
        fill_without_keys(call.out, call.lse, options.sinks)
    else:
        chosen_in = generation.number()
        choice = choose(problem, q.device, options.config)
        ran = backend("cuda" if q.is_cuda else "cpu").run(call, choice)
        _remember(call, ran, options, key, chosen_in)
    return call.out if call.lse is None else (call.out, call.lse)


def _checked(q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: Options) -> Call:
    """The call with its results. Whatever can be known is refused before one number of a tensor is read."""
    sinks, out = options.sinks, options.out
    checks.check_inputs(q, k, v, sinks, layout.axes, layout.paged)
    scale = checked_scale(options.softmax_scale, q.shape[-1])
    layout.check(q, k)
    inputs = {"q": q, "k": k, "v": v, "sinks": sinks, **layout.tensors()}
    check_memory(inputs if out is None else {**inputs, "out": out})
    layout.check_values(q, k)
    sizes = q.shape
    shape = (*sizes[:-1], v.shape[-1])
    if out is None:
        out = q.new_empty(shape, dtype=options.out_dtype)
    else:
        given = {name: x for name, x in inputs.items() if x is not None}
        checks.check_out(out, shape, given, options.out_dtype or q.dtype)
    lse = None
    if options.return_lse:
        lse = q.new_empty((*sizes[:-3], sizes[-2], sizes[-3]), dtype=torch.float32)
    mask = Mask.of(options.causal, options.window)
    return Call(q, k, v, out, lse, mask, Scores(scale, options.softcap, sinks), layout, options.n_sms)


def _remember(call: Call, ran: Ran, options: Options, key: Key | None, chosen_in: int) -> None:
    if ran.kernel is None:
        return
    launch_cache.set_last_kernel(ran.kernel)
    if key is not None and ran.launched is not None:
        given = (call.q, call.k, call.v, options.out, options.sinks, *call.layout.slots())
        made = (call.out if options.out is None else None, call.lse, ran.workspace)
        launch_cache.remember(key, given, options.config, ran.kernel, ran.launched, made, chosen_in)
