"""The ladders of all families by name."""

from __future__ import annotations

from flash_helpers.kernels.ampere.forward.ladder import STEPS as AMPERE_STEPS
from flash_helpers.kernels.ampere.forward.ladder import get_ampere_ladder
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.ladder import STEPS as HOPPER_STEPS
from flash_helpers.kernels.hopper.forward.ladder import get_hopper_ladder
from flash_helpers.kernels.ladder import Rung

LADDERS = {"ampere": AMPERE_STEPS, "hopper": HOPPER_STEPS}
"""Family to the steps of each head size that it has a ladder for, those of both masks."""


def get_ladder(family: str, dtype: DType, d_head: int, causal: bool) -> list[Rung]:
    """One family's ladder, see ``get_ampere_ladder`` and ``get_hopper_ladder``.

    Args:
        family: ``ampere`` or ``hopper``.
        dtype: element type.
        d_head: head size: 64, 128 or 256.
        causal: whether the kernels get a causal mask.

    Returns:
        Its steps in order, each with its configuration.

    Raises:
        ValueError: no such family, or no ladder for this head size.
    """
    if family == "ampere":
        return [*get_ampere_ladder(dtype, d_head, causal)]
    if family == "hopper":
        return [*get_hopper_ladder(dtype, d_head, causal)]
    raise ValueError(f"there is no ladder {family!r}; valid: {', '.join(LADDERS)}")
