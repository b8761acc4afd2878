"""A mod of a kernel that drops weights: kernels without one drop none."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flash_helpers.mods.mod import Dropped, Element, Mod, Number, TensorType

NOTHING = Mod((), ())
"""A mod that changes no score and hides no key."""


@lru_cache(256)
def dropped(mod: Mod) -> Mod:
    """The mod with dropout behind the softmax.

    The probability is one more captured number, the seed, () int64, one more captured tensor, the last ones.
    Which weights are dropped is what ``philox`` says; the LSE is that of the softmax.
    """
    return replace(
        mod,
        numbers=(*mod.numbers, Number.REAL),
        tensors=(*mod.tensors, TensorType(Element.INT64, 0)),
        dropped=Dropped(len(mod.numbers), len(mod.tensors)),
    )
