"""The one way of every attention call on real tensors, at once."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attention.checks.tensors import records_gradients
from flash_attention.layouts import Layout
from flash_attention.options import Options
from flash_attention.run import gradients
from flash_attention.run.functions import traced_functions
from flash_attention.run.gradients import Result
from flash_attention.run.launch_cache import NO_MODS, Key, Mods
from flash_attention.run.passes import forward_pass
from flash_attention.run.tracing import not_for_eager, stands_for_another


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: Options,
    key: Key | None = None,
    mods: Mods | None = NO_MODS,
) -> Result | None:
    """A call of ``flash_attention.attention``, or of another function for another layout.

    Args:
        key: by which the call is to be remembered (``launch_cache``); None: it is not.
        mods: the functions among the options, as it is remembered with them; with a key not None.

    Returns:
        The result; None: these tensors are not for eager work (``not_for_eager``).
    """
    if key is not None and mods is not None:
        again = gradients.repeat(q, k, v, layout, options, key, mods)
        if again is not None:
            return again
    if not_for_eager(q, k, v, options.sinks, options.out, *layout):
        return None
    if options.dropout_p and options.dropout_seed is None:  # the backward pass has to know it, too
        options = options._replace(dropout_seed=drawn_seed(q.device))
    if options.has_mods:
        return _with_mods(q, k, v, layout, options, key, mods)
    if records_gradients(q, k, v, options.sinks):
        return gradients.record(q, k, v, layout, options, key)
    out, lse = forward_pass(q, k, v, layout, options, key)
    return out if lse is None else (out, lse)


def drawn_seed(device: torch.device) -> Tensor:
    """A seed of PyTorch's generator of a device, () int64. On a GPU nobody waits for it, and a captured graph
    draws another one in each replay."""
    return torch.empty((), dtype=torch.int64, device=device).random_()


def _with_mods(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: Options,
    key: Key | None,
    mods: Mods | None,
) -> Result | None:
    """The same with functions of the user's, which are called here, once each, unless they are known."""
    traced = traced_functions(options, q, k, layout)
    known = None if mods is None else mods[2]
    if traced is None or known is None or traced.mod is not known.mod or traced.numbers is not known.numbers:
        key = None  # it is of what the functions did before they were recorded anew
    captured = () if traced is None else traced.tensors
    if any(stands_for_another(x) for x in captured):
        return None
    if records_gradients(q, k, v, options.sinks, *captured):
        return gradients.record(q, k, v, layout, options, key, traced, () if mods is None else mods[1])
    out, lse = forward_pass(q, k, v, layout, options, key, traced=traced)
    return out if lse is None else (out, lse)
