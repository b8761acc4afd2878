"""The ladders of all families by name."""

from __future__ import annotations

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import DIRECTIONS
from flash_helpers.kernels.ladder import Rung

_LADDERS = {d.label: d.ladder for d in DIRECTIONS if d.ladder is not None}
LADDERS = {label: ladder.steps for label, ladder in _LADDERS.items()}
"""Family to the steps of each head size that it has a ladder for, those of both masks."""


def get_ladder(family: str, dtype: DType, d_head: int, causal: bool) -> list[Rung]:
    """One family's ladder, see ``get_ampere_ladder`` and ``get_hopper_ladder``.

    Args:
        family: ``ampere`` or ``hopper``, with a direction other than ``forward`` behind it:
            ``ampere_backward``.
        dtype: element type.
        d_head: head size: 64, 128 or 256.
        causal: whether the kernels get a causal mask.

    Returns:
        Its steps in order, each with its configuration.

    Raises:
        ValueError: no such family, or no ladder for this head size.
    """
    if family not in _LADDERS:
        raise ValueError(f"there is no ladder {family!r}; valid: {', '.join(LADDERS)}")
    return [*_LADDERS[family].climb(dtype, d_head, causal)]
