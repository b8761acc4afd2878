"""What a mod's mask depends on: whoever keeps what was found out about tiles asks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flash_helpers.mods.mod import Mod
from flash_helpers.mods.operations import Kind
from flash_helpers.mods.stages import needed

MASK = "visible"
_BOUNDED_WELL = frozenset(
    (
        "b", "h", "q", "k", "constant", "number", "add", "sub", "neg", "mul", "abs", "minimum", "maximum",
        "lt", "le", "eq", "ne", "and", "or", "not", "to_int", "to_bool",
    )
)  # fmt: skip


class MaskInputs(NamedTuple):
    """What the mask depends on beside the places of query and key.

    Attributes:
        batch: the batch item.
        head: the query head.
        numbers: which of the captured numbers.
        tensors: which of the captured tensors.
    """

    batch: bool
    head: bool
    numbers: tuple[int, ...]
    tensors: tuple[int, ...]


@lru_cache(1024)
def mask_inputs(mod: Mod) -> MaskInputs:
    """What the mask of a mod depends on; of one without a mask nothing."""
    used = [node for node, used in zip(mod.nodes, needed(mod, MASK), strict=True) if used]
    return MaskInputs(
        any(node.op == "b" for node in used),
        any(node.op == "h" for node in used),
        tuple(sorted({node.data for node in used if node.op == "number"})),
        tuple(sorted({node.data for node in used if node.op == "load"})),
    )


@lru_cache(1024)
def needs_bits(mod: Mod) -> bool:
    """Whether a mask's tiles can only be told by looking at elements.

    Bounds are enough of one that is made of sums, products and comparisons of places and numbers: they tell
    of all tiles but some at its edges.
    """
    return any(
        used and (node.op not in _BOUNDED_WELL or node.kind is Kind.FLOAT)
        for node, used in zip(mod.nodes, needed(mod, MASK), strict=True)
    )
