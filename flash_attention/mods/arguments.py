"""What a mod captured, as the launch of a kernel with it takes it."""

from __future__ import annotations

from flash_attention.mods.tracing import Traced
from flash_helpers.kernels.arguments import ModArguments


def mod_arguments(traced: Traced, *further: int | float) -> ModArguments:
    """The numbers and tensors of a mod; the tensors have to live as long as the launch is being made.

    Args:
        traced: the mod.
        further: numbers behind those of the functions, such as a soft cap (``flash_helpers.mods.capped``).
    """
    return ModArguments(
        (*traced.numbers, *further),
        tuple((x.data_ptr(), x.stride(), tuple(x.shape)) for x in traced.tensors),
    )
