"""The mod that a kernel of gradients is compiled with: what the forward pass computes, and its derivatives.

    score, visible     as the mod has them
    d_score            the derivative of the score by the score that it is given; without it, it is 1
    d_load_…, index_…  of each load of a captured tensor whose gradient is wanted (``Mod.gradients``)

Where gradients of captured tensors are wanted, a launch is told of more tensors, behind the mod's own: of
each tensor in ``Mod.gathered`` its sums, 64 bit integers in its shape and contiguous, and then one of 32 bit
integers, two for each of them (common/backward/captured_sums.cuh).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flash_helpers.mods.derivative import derivative
from flash_helpers.mods.mod import Element, Mod, TensorType


@lru_cache(256)
def backward_mod(mod: Mod, wanted: tuple[int, ...] = ()) -> Mod:
    """The mod for gradients.

    Args:
        mod: that of the forward kernel.
        wanted: places of captured tensors whose gradients are wanted.
    """
    if mod.result("score") is None:
        return mod
    found = derivative(mod, wanted, kept=("score", "visible"))
    made = found.mod
    slope = made.nodes[dict(made.results)["d_score"]]
    if slope.op == "constant" and slope.data == 1.0:
        made = replace(made, results=tuple(result for result in made.results if result[0] != "d_score"))
    made = replace(made, gradients=found.tensors, dropped=mod.dropped)
    sums = [TensorType(Element.INT64, made.tensors[slot].n_dims) for slot in made.gathered]
    scales = [TensorType(Element.INT32, 1)] if sums else []
    return replace(made, tensors=(*made.tensors, *sums, *scales))
