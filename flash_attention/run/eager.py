"""The one way of every attention call on real tensors, at once."""

from __future__ import annotations

from torch import Tensor

from flash_attention.call import Layout
from flash_attention.checks.tensors import records_gradients
from flash_attention.options import Options
from flash_attention.run import gradients
from flash_attention.run.gradients import Result
from flash_attention.run.launch_cache import Key
from flash_attention.run.passes import forward_pass
from flash_attention.run.tracing import not_for_eager


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: Options, key: Key | None = None
) -> Result | None:
    """A call of ``flash_attention.attention``, or of another function for another layout.

    Args:
        key: by which the call is to be remembered (``launch_cache``); None: it is not.

    Returns:
        The result; None: these tensors are not for eager work (``not_for_eager``).
    """
    if key is not None and (again := gradients.repeat(q, k, v, layout, options, key)) is not None:
        return again
    if not_for_eager(q, k, v, options.sinks, options.out, *layout):
        return None
    if records_gradients(q, k, v, options.sinks):
        return gradients.record(q, k, v, layout, options, key)
    out, lse = forward_pass(q, k, v, layout, options, key)
    return out if lse is None else (out, lse)
