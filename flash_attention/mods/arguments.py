"""What a mod captured, as the launch of a kernel with it takes it."""

from __future__ import annotations

from torch import Tensor

from flash_attention.mods.tracing import Traced
from flash_helpers.kernels.arguments import ModArguments


def mod_arguments(
    traced: Traced | None,
    *further: int | float,
    dropout: tuple[float, Tensor] | None = None,
    sums: tuple[Tensor, ...] = (),
) -> ModArguments:
    """The numbers and tensors of a mod; the tensors have to live as long as the launch is being made.

    Args:
        traced: what the user's functions do; None: there are none.
        further: numbers behind those of the functions, such as a soft cap (``flash_helpers.mods.capped``).
        dropout: the probability that a weight is dropped and the seed, behind them
            (``flash_helpers.mods.dropped``); None: none is.
        sums: tensors behind all others, for gradients of captured ones (``flash_helpers.mods.backward``).
    """
    numbers: tuple[int | float, ...] = (*(() if traced is None else traced.numbers), *further)
    tensors: tuple[Tensor, ...] = () if traced is None else traced.tensors
    if dropout is not None:
        p, seed = dropout
        numbers, tensors = (*numbers, p), (*tensors, seed)
    return ModArguments(numbers, tuple((x.data_ptr(), x.stride(), tuple(x.shape)) for x in (*tensors, *sums)))
