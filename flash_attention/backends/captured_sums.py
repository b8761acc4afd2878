"""Gradients of captured tensors as whole numbers, of which a power of two makes real ones.

Whole numbers add up to equal bits in whatever order thread blocks come (``captured_sums.cuh``). They take 8
bytes an element of a captured tensor whose gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_helpers.mods.mod import Mod

NOT_FINITE = 2**61  # a sum beyond it has a term that is not finite
AT_A_TIME = 2**24  # elements that are made real numbers at once: 128 MiB in float64


@dataclass(frozen=True, eq=False)
class CapturedSums:
    """What a launch adds to.

    Attributes:
        sums: by the places of the captured tensors, int64, of their shapes.
        scales: (2 n,) int32 for n tensors: the bits of the largest term of each, then the powers.
    """

    sums: dict[int, Tensor]
    scales: Tensor

    @classmethod
    def of(cls, mod: Mod, captured: tuple[Tensor, ...]) -> CapturedSums | None:
        """Room for the gradients that a mod gathers, all of it 0; None: it gathers none."""
        if not mod.gathered:
            return None
        sums = {
            i: torch.zeros(captured[i].shape, dtype=torch.int64, device=captured[i].device)
            for i in mod.gathered
        }
        first = captured[mod.gathered[0]]
        return cls(sums, torch.zeros(2 * len(sums), dtype=torch.int32, device=first.device))

    def tensors(self) -> tuple[Tensor, ...]:
        """Behind those of the mod, as a launch takes them."""
        return (*self.sums.values(), self.scales)

    def write(self, gradients: Mapping[int, Tensor]) -> None:
        """Writes the gradients, each contiguous and like its tensor."""
        powers = self.scales[len(self.sums) :].long()
        factors = ((1023 - powers) << 52).view(torch.float64)  # 2 ** -power, in the bits of a float64
        for (place, total), factor in zip(self.sums.items(), factors, strict=True):
            wholes, reals = (x.view(-1).split(AT_A_TIME) for x in (total, gradients[place]))
            for whole, real in zip(wholes, reals, strict=True):
                real.copy_((whole.double() * factor).masked_fill_(whole > NOT_FINITE, torch.nan))
