"""Derivatives of a recorded score function for whole blocks of scores, with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attention.mods.evaluate import evaluate
from flash_attention.mods.tracing import Traced
from flash_helpers.mods.derivative import derivative
from flash_helpers.mods.mod import TensorGradient

Indices = tuple[Tensor, Tensor, Tensor, Tensor]  # b, h, q, k


@dataclass(frozen=True, eq=False)
class ScoreDerivative:
    """How a score function's result changes with its score and with the tensors that it captures.

    Attributes:
        traced: the derivatives, with what the function captured.
        tensors: the loads of tensors whose gradients are wanted.
    """

    traced: Traced
    tensors: tuple[TensorGradient, ...] = ()

    @classmethod
    def of(cls, traced: Traced, wanted: tuple[int, ...] = ()) -> ScoreDerivative | None:
        """The derivative of a mod; None: it changes no score.

        Args:
            traced: the mod.
            wanted: places of captured tensors whose gradients are wanted.
        """
        if traced.mod.result("score") is None:
            return None
        found = derivative(traced.mod, wanted)
        return cls(Traced(found.mod, traced.numbers, traced.tensors), found.tensors)

    def by_score(self, score: Tensor, indices: Indices) -> Tensor:
        """The derivative by the score, float32, of a shape that broadcasts to the scores'."""
        return evaluate(self.traced, "d_score", score, *indices)

    def add(self, sums: Mapping[int, Tensor], slopes: Tensor, score: Tensor, indices: Indices) -> None:
        """Adds what a block contributes to the gradients of captured tensors, in the order of its elements.

        Args:
            sums: by the places of the tensors, float64, contiguous, of their shapes.
            slopes: gradients of the function's results, the shape of the scores. Where one is 0, nothing is
                added, whatever the derivative is.
            score: what the function was given.
            indices: as the function was given them.
        """
        for part in self.tensors:
            for step in range(part.length or 1):
                value = evaluate(self.traced, part.value, score, *indices, step=step)
                places = [evaluate(self.traced, name, score, *indices, step=step) for name in part.indices]
                self._scatter(sums[part.slot], (slopes * value).masked_fill(slopes == 0, 0.0), places)

    @staticmethod
    def _scatter(total: Tensor, values: Tensor, places: list[Tensor]) -> None:
        if not total.numel():
            return
        inside = torch.ones((), dtype=torch.bool, device=total.device)
        flat = torch.zeros((), dtype=torch.int64, device=total.device)
        for place, size in zip(places, total.shape, strict=True):
            place = torch.where(place < 0, place + size, place)
            within = (place >= 0) & (place < size)
            inside = inside & within
            flat = flat * size + torch.where(within, place, 0)
        # What lies outside was not read. In one dimension PyTorch adds element by element, in order.
        values = torch.where(inside, values.double(), 0.0)
        flat = torch.broadcast_to(torch.where(inside, flat, 0), values.shape)
        total.view(-1).index_add_(0, flat.reshape(-1), values.reshape(-1))
