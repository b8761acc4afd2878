"""What a mod captured, as the launch of a kernel with it takes it."""

from __future__ import annotations

from torch import Tensor

from flash_attention.mods.tracing import Traced
from flash_helpers.kernels.arguments import ModArguments


def mod_arguments(traced: Traced, *further: int | float, sums: tuple[Tensor, ...] = ()) -> ModArguments:
    """The numbers and tensors of a mod; the tensors have to live as long as the launch is being made.

    Args:
        traced: the mod.
        further: numbers behind those of the functions, such as a soft cap (``flash_helpers.mods.capped``).
        sums: tensors behind those of the functions, for their gradients (``flash_helpers.mods.backward``).
    """
    return ModArguments(
        (*traced.numbers, *further),
        tuple((x.data_ptr(), x.stride(), tuple(x.shape)) for x in (*traced.tensors, *sums)),
    )
